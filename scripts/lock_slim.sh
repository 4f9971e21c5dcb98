#!/usr/bin/env bash
# Writes requirements-slim.txt anew from requirements-gpu.txt: what Dockerfile.slim installs, complete.
# usage: scripts/lock_slim.sh [OUTPUT]       needs uv (requirements-dev.txt) and PyPI
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-requirements-slim.txt}
uv=${UV:-.venv/bin/uv}
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
# The torch of the main Dockerfile's base; PyPI's wheel of it is the one for CUDA 12.4.
echo "torch==2.6.0" >"$constraints"
# Left out: triton is torch.compile's, and cuSOLVER is loaded by torch.linalg alone.
UV_CUSTOM_COMPILE_COMMAND="scripts/lock_slim.sh" "$uv" pip compile requirements-gpu.txt \
  --constraint "$constraints" --no-emit-package triton --no-emit-package nvidia-cusolver-cu12 \
  --only-binary :all: --python-version 3.11 --python-platform x86_64-manylinux_2_31 \
  --no-annotate --quiet --output-file "$output"

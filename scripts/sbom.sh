#!/usr/bin/env bash
# The Python packages of each image as a CycloneDX bill of materials, resolved and with hashes.
# What the base image has is not in it: `trivy image` or `syft` tell that of an image that is built.
# usage: scripts/sbom.sh FOLDER      LINT: the environment of requirements-lint.txt; UV: a program
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:?usage: scripts/sbom.sh FOLDER}
cyclonedx=${LINT:-.venv-lint}/bin/cyclonedx-py
uv=${UV:-.venv/bin/uv}
mkdir -p "$output"

write() { # NAME REQUIREMENTS PLATFORM OPTION...
  # Of the root it warns that it names no dependencies of its own: a list of requirements has none.
  "$uv" pip compile "$2" --python-platform "$3" "${@:4}" --python-version 3.11 --only-binary :all: \
    --generate-hashes --no-header --no-annotate --quiet |
    PYTHONWARNINGS=ignore::UserWarning "$cyclonedx" requirements --pyproject pyproject.toml --output-reproducible \
      --output-file "$output/phi-serve-$1.cdx.json" -
  echo "$output/phi-serve-$1.cdx.json"
}

torch=$(mktemp)
trap 'rm -f "$torch"' EXIT
grep '^torch==' requirements-slim.txt >"$torch"
write gpu requirements-gpu.txt x86_64-manylinux_2_31 --constraint "$torch"
write slim requirements-slim.txt x86_64-manylinux_2_31 --no-deps
write arm64 requirements-arm64.txt aarch64-manylinux_2_31

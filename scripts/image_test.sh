#!/usr/bin/env bash
# Build the Dockerfile without Docker, its registry or a GPU, run the image hardened, check its claims.
#
#   scripts/image_test.sh          make image-test; as root on Debian 12 or a kin of it
#
# Debian's buildah and podman build and run it (what is missing is installed). In place of the PyTorch
# images stands a Debian with torch's CPU build, in place of onnxruntime-gpu the CPU's; packages come
# as this machine's pip gets them, and the build itself has no network. Images lie in a store of their
# own, which is removed; the machine's own containers are left alone.
#
#   PYTHON=...   an environment with requirements-cpu.txt, of the Python that the stand-in will have
#   TORCH=...    as in the Makefile                MODEL=DIR    a model folder, by default models/default
#   WORK=DIR     keep everything there, and use it again
#   SIZES=FILE   instead of the checks, measure each layer, and those of a build in one stage
#   DOCKERFILE=Dockerfile.arm64   that one, with the stand-in's own architecture
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
TORCH=${TORCH:-torch==2.13.0}
DOCKERFILE=${DOCKERFILE:-Dockerfile}
MODEL=$(realpath "${MODEL:-models/default}")
SUITE=bookworm

say() { printf '\n=== %s (%d s)\n' "$*" "$SECONDS"; }

install_engine() {
  local missing=() package
  for package in buildah podman runc netavark mmdebstrap curl; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} = 0 ] && return
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
}

# A store and a configuration of their own. crun refuses mixed cgroups, as they are in some machines.
configure_engine() {
  cat >"$work/storage.conf" <<-END
	[storage]
	driver = "overlay"
	runroot = "$work/run"
	graphroot = "$work/store"
	END
  cat >"$work/containers.conf" <<-END
	[containers]
	default_ulimits = ["nofile=8192:8192", "nproc=4096:4096"]
	[engine]
	runtime = "runc"
	cgroup_manager = "cgroupfs"
	events_logger = "file"
	[network]
	network_backend = "netavark"
	END
  printf '[global]\nno-index = true\nfind-links = /wheels\n' >"$work/pip.conf"
  export CONTAINERS_STORAGE_CONF=$work/storage.conf CONTAINERS_CONF=$work/containers.conf
}

clean_up() {
  podman rm -fa -t 0 >/dev/null 2>&1 || true
  [ -n "$is_kept" ] && return
  podman rmi -fa >/dev/null 2>&1 || true
  # A build that was killed leaves its containers mounted.
  awk -v store="$work/store/" 'index($2, store) == 1 { print $2 }' /proc/mounts | sort -r | xargs -r -n 1 umount || true
  rm -rf "$work"
}

# Wheels of what requirements name; again when these change.
gather_wheels() {
  local key
  key=$(cat requirements.txt requirements-cpu.txt requirements-build.txt <(echo "$TORCH") | sha256sum | cut -c1-16)
  wheels=$work/wheels-$key
  [ -e "$wheels/.complete" ] && return
  "$PYTHON" -m pip wheel -qq --wheel-dir "$wheels" "$TORCH" -r requirements-cpu.txt
  "$PYTHON" -m pip wheel -qq --wheel-dir "$wheels" --no-deps -r requirements-build.txt
  touch "$wheels/.complete"
}

build() { # TAG CONTEXT OPTION...
  local tag=$1 context=$2
  shift 2
  buildah bud --quiet --pull-never --layers --network none --format docker \
    --volume "$wheels:/wheels:ro" --volume "$work/pip.conf:/etc/pip.conf:ro" \
    --tag "localhost/phi-serve:$tag" "$@" "$context" >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
}

# What the PyTorch images are to the Dockerfile: Python, pip, torch.
make_base() {
  if ! podman image exists localhost/phi-serve:debian; then
    mmdebstrap --quiet --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates \
      "$SUITE" "$work/debian.tar" "${sources[@]}"
    podman import --quiet "$work/debian.tar" localhost/phi-serve:debian >/dev/null
    rm "$work/debian.tar"
  fi
  local python code='import sys; print("%d.%d" % sys.version_info[:2])'
  python=$(podman run --rm --network none localhost/phi-serve:debian python3 -c "$code")
  if [ "$python" != "$("$PYTHON" -c "$code")" ]; then
    echo "$PYTHON is not a Python $python, which $SUITE has: its wheels would not fit" >&2
    exit 2
  fi
  [ "$DOCKERFILE" = Dockerfile ] || return 0  # the others bring torch themselves
  mkdir -p "$work/base"
  cat >"$work/base/Dockerfile" <<-END
	FROM localhost/phi-serve:debian
	RUN python3 -m pip install --quiet --no-cache-dir --break-system-packages --root-user-action ignore $TORCH
	END
  build base "$work/base"
}

[ "$(id -u)" = 0 ] || { echo "only root may build and run images this way" >&2; exit 2; }
[ -e "$MODEL/quantization.json" ] || { echo "$MODEL is no model folder: make model" >&2; exit 2; }
is_kept=${WORK:-}
work=${WORK:-$(mktemp -d /var/tmp/phi-serve-image.XXXXXX)}
mkdir -p "$work"
trap clean_up EXIT
trap 'exit 143' INT TERM
# This machine's mirror, where it has the file of the one source.
sources=()
[ -e /etc/apt/sources.list.d/debian.sources ] && sources=(/etc/apt/sources.list.d/debian.sources)

say "the engine"
install_engine
configure_engine
say "wheels"
gather_wheels
say "stand-in bases"
make_base

standins=(--file "$DOCKERFILE" --build-arg BASE=localhost/phi-serve:debian
  --build-arg BASE_DEVEL=localhost/phi-serve:base --build-arg BASE_RUNTIME=localhost/phi-serve:base
  --build-arg REQUIREMENTS=requirements-cpu.txt --build-arg REVISION="$(git rev-parse HEAD 2>/dev/null || echo none)")
[ -d "$work/sources/tiny" ] || "$PYTHON" scripts/make_random_model.py --like phi3-tiny --output "$work/sources/tiny"
# Kept with the store: a step that is taken from there has had this one.
[ -e "$work/token" ] || printf 'secret-%s' "$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')" >"$work/token"

say "target runtime"
build runtime . --target runtime "${standins[@]}"
if [ -n "${SIZES:-}" ]; then
  say "sizes"
  . scripts/image_sizes.sh
  say "done"
  exit
fi

say "target with-model, built from a source"
build with-model . --target with-model "${standins[@]}" --build-context source="$work/sources" \
  --build-arg MODEL_ID=/source/tiny --build-arg MODEL_DEVICE=cpu --build-arg PRECISION=fp32 \
  --secret id=hf_token,src="$work/token"
say "target with-model, of a model folder that is ready"
build ready . --target with-model "${standins[@]}" --build-context model="$MODEL"

say "claims"
name=$("$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))["name"])' "$MODEL/quantization.json")
"$PYTHON" scripts/image_check.py --store "$work/store" --secret "$(cat "$work/token")" \
  --folder "$MODEL" --folder-model "$name" --own-model tiny localhost/phi-serve:runtime localhost/phi-serve:with-model
say "done"

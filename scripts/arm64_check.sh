#!/usr/bin/env bash
# Build Dockerfile.arm64 for aarch64 and let it answer, on an x86-64 machine, under QEMU. Root; Debian 12
# or a kin of it, and tens of minutes: it is no part of CI.
#
#   scripts/arm64_check.sh
#
# QEMU must be 10 or newer: 7.2, which bookworm has, crashes in ONNX Runtime. bookworm-backports has 10.0:
#   apt-get install -t bookworm-backports qemu-user-static
# A Debian for arm64 stands in for the Python image; wheels are gathered outside, the build has no network.
#
#   QEMU=FILE    a static qemu-aarch64, elsewhere        PYTHON=...   an environment with uv and pip
#   MODELS=DIR   holds the model folder `default`        WORK=DIR     keep everything there, use it again
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
MODELS=$(realpath "${MODELS:-models}")
QEMU=${QEMU:-/usr/bin/qemu-aarch64-static}
BINFMT=/proc/sys/fs/binfmt_misc
IMAGE=localhost/phi-serve:arm64

say() { printf '\n=== %s (%d s)\n' "$*" "$SECONDS"; }
fail() { echo "$*" >&2; exit 1; }

check_machine() {
  [ "$(id -u)" = 0 ] || fail "only root may build and run images this way"
  [ -e "$MODELS/default/model.onnx" ] || fail "no $MODELS/default: make model"
  local program version
  for program in buildah podman runc mmdebstrap curl nsenter "$QEMU"; do
    command -v "$program" >/dev/null || fail "$program is not there"
  done
  version=$("$QEMU" --version | grep -oP 'version \K\d+' | head -1)
  [ "$version" -ge 10 ] || fail "$QEMU is of version $version; ONNX Runtime wants 10 or newer"
}

# The kernel starts what is built for ARM with QEMU; F: it keeps the file open, for containers have none.
register_qemu() {
  [ -e $BINFMT/register ] || mount -t binfmt_misc binfmt_misc $BINFMT
  [ -e $BINFMT/qemu-aarch64 ] && return
  local head='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
  local mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
  printf '%s' ":qemu-aarch64:M::$head:$mask:$QEMU:F" >$BINFMT/register
  is_registered=yes
}

configure_engine() {
  printf '[storage]\ndriver = "overlay"\nrunroot = "%s/run"\ngraphroot = "%s/store"\n' \
    "$work" "$work" >"$work/storage.conf"
  cat >"$work/containers.conf" <<-END
	[containers]
	default_ulimits = ["nofile=8192:8192", "nproc=4096:4096"]
	[engine]
	runtime = "runc"
	cgroup_manager = "cgroupfs"
	events_logger = "file"
	END
  printf '[global]\nno-index = true\nfind-links = /wheels\n' >"$work/pip.conf"
  export CONTAINERS_STORAGE_CONF=$work/storage.conf CONTAINERS_CONF=$work/containers.conf
}

clean_up() {
  podman rm -fa -t 0 >/dev/null 2>&1 || true
  [ -z "$is_registered" ] || echo -1 >$BINFMT/qemu-aarch64
  [ -n "$is_kept" ] && return
  podman rmi -fa >/dev/null 2>&1 || true
  umount "$work/store/overlay" 2>/dev/null || true
  rm -rf "$work"
}

gather_wheels() {
  [ -e "$work/wheels/.complete" ] && return
  local glibc tags=(--platform linux_aarch64 --platform manylinux2014_aarch64)
  for glibc in $(seq 17 31); do tags+=(--platform "manylinux_2_${glibc}_aarch64"); done
  # uv resolves for ARM; pip would follow this machine's markers.
  "${PYTHON%/*}/uv" pip compile requirements-arm64.txt --python-platform aarch64-manylinux_2_31 \
    --python-version 3.11 --only-binary :all: --no-header --no-annotate -q >"$work/resolved.txt"
  "$PYTHON" -m pip download -q --no-deps --only-binary :all: --python-version 3.11 "${tags[@]}" \
    -d "$work/wheels" -r "$work/resolved.txt"
  touch "$work/wheels/.complete"
}

make_base() {
  podman image exists localhost/phi-serve:debian-arm64 && return
  mmdebstrap --quiet --variant=minbase --arch arm64 --skip=check/qemu \
    --include=python3,python3-pip,python3-venv bookworm "$work/debian.tar" "${sources[@]}"
  podman import --quiet --arch arm64 --os linux "$work/debian.tar" localhost/phi-serve:debian-arm64 >/dev/null
  rm "$work/debian.tar"
}

build_image() {
  buildah bud --quiet --pull-never --layers --network none --format docker --platform linux/arm64 \
    --volume "$work/wheels:/wheels:ro" --volume "$work/pip.conf:/etc/pip.conf:ro" \
    --build-arg BASE=localhost/phi-serve:debian-arm64 --target runtime \
    --file Dockerfile.arm64 --tag $IMAGE . >/dev/null
}

in_container() {
  nsenter --target "$(podman inspect --format '{{.State.Pid}}' arm64)" --net "$@"
}

serve() {
  podman run --detach --name arm64 --arch arm64 --network none --read-only --tmpfs /tmp --cap-drop ALL \
    --security-opt no-new-privileges --user 54321:0 --health-interval disable \
    --env MAX_LOAD_SECONDS=1800 --env MAX_STEP_SECONDS=600 \
    --volume "$MODELS:/models:ro" $IMAGE >/dev/null
  local ready=http://127.0.0.1:8080/health/ready
  until in_container curl -fsS -m 20 $ready >/dev/null 2>&1; do
    [ "$SECONDS" -lt 3600 ] && [ "$(podman inspect --format '{{.State.Running}}' arm64)" = true ] ||
      { podman logs arm64 >&2; fail "not ready"; }
    sleep 2
  done
  say "ready"
  in_container curl -fsS -m 900 http://127.0.0.1:8080/generate -H 'Content-Type: application/json' \
    -d '{"prompt": "The capital of France is", "max_tokens": 8}'
  podman exec arm64 python -c 'import platform; print("\nanswered on", platform.machine())'
  podman stop -t 120 arm64 >/dev/null
  [ "$(podman inspect --format '{{.State.ExitCode}}' arm64)" = 0 ] || fail "SIGTERM did not end it with 0"
}

check_machine
is_kept=${WORK:-} is_registered=
work=${WORK:-$(mktemp -d /var/tmp/phi-serve-arm64.XXXXXX)}
mkdir -p "$work"
trap clean_up EXIT
sources=()
[ -e /etc/apt/sources.list.d/debian.sources ] && sources=(/etc/apt/sources.list.d/debian.sources)
configure_engine
register_qemu
say "wheels"
gather_wheels
say "a Debian for arm64"
make_base
say "the image"
build_image
podman image inspect --format '{{.Architecture}} {{.Size}} bytes' $IMAGE
say "the server"
serve
say "done"

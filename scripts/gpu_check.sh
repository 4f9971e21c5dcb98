#!/usr/bin/env bash
# Checks the server on a machine with a GPU and no network, within 8 minutes; JSON comes last.
#
#     scripts/gpu_check.sh [--wheels DIR] [--runtime WHEEL] [OPTIONS OF gpu_check.py]
#
#   --wheels DIR     wheels that are not there yet, installed beside what is there, without the
#                    packages that they ask for: DIR must hold those too
#   --runtime WHEEL  onnxruntime-gpu's wheel
#
# A wheel that is too large to be carried may come in parts (`split -b 60M WHEEL WHEEL.part-`).
# All else goes to scripts/gpu_check.py (--help tells). Nothing is installed for good.
set -euo pipefail
scripts=$(cd "$(dirname "$0")" && pwd)

PYTHON=${PYTHON:-python3}
BUDGET_SECONDS=480
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdir "$site/whole"
wheels=() rest=()

# The wheel $1, or its parts put together.
add_wheel() {
    local wheel=$1
    if [[ ! -f $wheel ]]; then
        local parts=("$wheel".part-*)
        [[ -f ${parts[0]} ]] || { echo "neither $wheel nor parts of it are there" >&2; exit 2; }
        wheel="$site/whole/$(basename "$wheel")"
        cat "${parts[@]}" >"$wheel"
    fi
    wheels+=("$wheel")
}

while (($#)); do
    case $1 in
        --wheels)
            [[ -d ${2:?"--wheels wants a folder"} ]] || { echo "no folder $2" >&2; exit 2; }
            for file in "$2"/*.whl "$2"/*.whl.part-aa; do
                [[ ! -f $file || -f ${file%.part-aa} && $file == *.part-aa ]] ||
                    add_wheel "${file%.part-aa}"
            done
            shift 2 ;;
        --runtime) add_wheel "${2:?"--runtime wants a wheel"}"; shift 2 ;;
        *) rest+=("$1"); shift ;;
    esac
done

if ((${#wheels[@]})); then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site/packages" \
        "${wheels[@]}" >&2
    export PYTHONPATH="$site/packages${PYTHONPATH:+:$PYTHONPATH}"
fi

export ORT_DISABLE_TELEMETRY=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
# The sections have limits of their own, of less together; this one is for what these do not see.
timeout -k 5 "$BUDGET_SECONDS" "$PYTHON" "$scripts/gpu_check.py" ${rest[@]+"${rest[@]}"}

#!/usr/bin/env bash
# Checks the server on a machine with a GPU and no network, within 8 minutes; JSON comes last.
#
#     scripts/gpu_check.sh [--wheels DIR] [--runtime WHEEL] [OPTIONS OF gpu_check.py]
#
#   --wheels DIR     wheels that are not there yet, installed beside what is there, without the
#                    packages that they ask for: DIR must hold those too
#   --runtime WHEEL  onnxruntime-gpu's wheel, or what its parts begin with: WHEEL.part-aa, .part-ab
#                    (`split -b 60M WHEEL WHEEL.part-`), where whole it is too large to be carried
#
# All else goes to scripts/gpu_check.py (--help tells). Nothing is installed for good.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
BUDGET_SECONDS=480
wheels=() runtime='' rest=()
while (($#)); do
    case $1 in
        --wheels)
            [[ -d ${2:?"--wheels wants a folder"} ]] || { echo "no folder $2" >&2; exit 2; }
            wheels+=("$2"/*.whl)
            shift 2 ;;
        --runtime) runtime=${2:?"--runtime wants a wheel"}; shift 2 ;;
        *) rest+=("$1"); shift ;;
    esac
done

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [[ -n $runtime && ! -f $runtime ]]; then
    parts=("$runtime".part-*)
    [[ -f ${parts[0]} ]] || { echo "neither $runtime nor parts of it are there" >&2; exit 2; }
    mkdir "$site/runtime"
    whole="$site/runtime/$(basename "$runtime")"
    cat "${parts[@]}" >"$whole"
    runtime=$whole
fi
[[ -z $runtime ]] || wheels+=("$runtime")
if ((${#wheels[@]})); then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site/packages" \
        "${wheels[@]}" >&2
    export PYTHONPATH="$site/packages${PYTHONPATH:+:$PYTHONPATH}"
fi

export ORT_DISABLE_TELEMETRY=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
# The sections have limits of their own, of less together; this one is for what these do not see.
timeout -k 5 "$BUDGET_SECONDS" "$PYTHON" scripts/gpu_check.py ${rest[@]+"${rest[@]}"}

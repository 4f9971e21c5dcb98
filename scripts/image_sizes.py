"""The layers of images and what they weigh, as a table and as JSON. `image_sizes.sh` calls it.

    python scripts/image_sizes.py --store DIR --json FILE NAME PUSHED [NAME PUSHED ...]

PUSHED is what `podman push --compress IMAGE dir:PUSHED` wrote: gzip, as a registry gets it. The
store knows what each layer holds before that.
"""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from load_report import machine


def read_layers(name: str, pushed: Path, store: Path) -> list[dict[str, Any]]:
    """From the base up: bytes in the store and in the registry, and the step that made it."""
    manifest = json.loads((pushed / "manifest.json").read_text())
    config = json.loads((pushed / manifest["config"]["digest"].removeprefix("sha256:")).read_text())
    known = json.loads((store / "overlay-layers/layers.json").read_text())
    sizes = {layer["diff-digest"]: layer["diff-size"] for layer in known}
    steps = [step for step in config["history"] if not step.get("empty_layer")]
    digests = config["rootfs"]["diff_ids"]
    if not len(steps) == len(digests) == len(manifest["layers"]):
        raise ValueError(f"{name}: {len(steps)} steps for {len(digests)} layers")
    return [
        {
            "step": step["created_by"].removeprefix("/bin/sh -c ").removeprefix("#(nop) ")[:60],
            "bytes": sizes[digest],
            "compressed_bytes": (pushed / blob["digest"].removeprefix("sha256:")).stat().st_size,
        }
        for step, digest, blob in zip(steps, digests, manifest["layers"], strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("images", nargs="+", help="NAME PUSHED, in pairs")
    options = parser.parse_args()
    images = {}
    for name, pushed in zip(options.images[::2], options.images[1::2], strict=True):
        layers = read_layers(name, Path(pushed), options.store)
        total = {key: sum(layer[key] for layer in layers) for key in ("bytes", "compressed_bytes")}
        images[name] = {"layers": layers} | total
        for layer in [*layers, {"step": f"all of {name}"} | total]:
            megabytes = (layer["bytes"] / 1e6, layer["compressed_bytes"] / 1e6)
            print(f"{megabytes[0]:8.1f} MB {megabytes[1]:8.1f} MB compressed  {layer['step']}")
    report = {"date": datetime.date.today().isoformat(), "machine": machine()}
    report["base"] = "a stand-in: Debian, Python and torch's CPU build"
    options.json.write_text(json.dumps(report | {"images": images}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""The layers of images and what they weigh, as a table and as JSON. `image_sizes.sh` calls it.

    python scripts/image_sizes.py --store DIR --json FILE IMAGE [IMAGE ...]

DIR is the engine's store, which knows what each layer holds. Nothing is compressed: a registry's
bytes are fewer.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from load_report import machine
from podman import podman


def read_layers(image: str, store: Path) -> list[dict[str, Any]]:
    """From the base up: the step that made it, and its bytes in the store."""
    [inspected] = json.loads(podman("image", "inspect", image))
    known = json.loads((store / "overlay-layers/layers.json").read_text())
    sizes = {layer.get("diff-digest"): layer.get("diff-size") for layer in known}
    steps = [step["created_by"] for step in inspected["History"] if not step.get("empty_layer")]
    digests = inspected["RootFS"]["Layers"]
    if len(steps) != len(digests):
        raise ValueError(f"{image}: {len(steps)} steps for {len(digests)} layers")
    return [
        {"step": step.removeprefix("/bin/sh -c ")[:80], "bytes": sizes[digest]}
        for step, digest in zip(steps, digests, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("images", nargs="+")
    options = parser.parse_args()
    images = {}
    for image in options.images:
        layers = read_layers(image, options.store)
        total = sum(layer["bytes"] for layer in layers)
        images[image.partition(":")[2]] = {"layers": layers, "bytes": total}
        for layer in [*layers, {"step": f"all of {image}", "bytes": total}]:
            print(f"{layer['bytes'] / 1e6:8.1f} MB  {layer['step']}")
    report = {"machine": machine(), "base": "a stand-in: Debian, Python and torch's CPU build"}
    options.json.write_text(json.dumps(report | {"images": images}, indent=2) + "\n")


if __name__ == "__main__":
    main()

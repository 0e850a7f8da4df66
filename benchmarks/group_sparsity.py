"""Networks of MobileNet's shape whose convolutions skip groups, against the same network dense, both in int8.

    python benchmarks/group_sparsity.py WORK_FOLDER [--networks v1,v2] [--percents 30,50,70] [--calls 200]

Makes the bundles in WORK_FOLDER, once, from random weights and images.  Then all bundles of a network run in turns, an
image a call, on one thread; times are those that the thread had a CPU, so that others' work takes none of it, and their
10th percentiles are compared.  Cosines are those of logits with PyTorch's in float32; of random weights, which are
redundant in nothing, they say that the kernels are right, and not what a trained network would lose.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["TVM_NUM_THREADS"] = "1"

import numpy as np
import torch
from bundles import write_bundle
from mobilenet_model import MobileNetV1, MobileNetV2, random_mobilenet
from numpy.typing import NDArray

from compressor.capture.capture import capture
from compressor.data.text import Samples
from compressor.recipe.recipe import Recipe
from compressor.runtime import load

SIZE, IMAGES = 224, 8
DENSE = "W8A8_STATIC"
KINDS: dict[str, Any] = {"v1": MobileNetV1, "v2": MobileNetV2}


def make(network: torch.nn.Module, percents: list[str], folder: Path) -> dict[str, Path]:
    """Write the bundles that are missing, and return all of a network by format."""
    images = torch.randn(IMAGES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    shapes, dense = ({0: torch.export.Dim("batch", min=1)},), None
    rest = {"rtn": {"scheme": DENSE, "targets": ["Conv2d", "Linear"]}}
    found = {DENSE: folder / DENSE}
    found |= {name: folder / name for name in (f"{DENSE}_B32x4@{percent}" for percent in percents)}
    for name, bundle in found.items():
        if (bundle / "manifest.json").exists():
            continue
        dense = dense or capture(network, (images[:2],), dynamic_shapes=shapes)
        groups = [] if name == DENSE else [{"group_sparse": {"scheme": name, "refit": False}}]
        recipe = Recipe.from_dict({"passes": [*groups, rest], "tune": "off"})
        write_bundle(dense, recipe, Samples(images, torch.empty(0), "", "random images"), bundle)
    return found


def race(bundles: dict[str, Any], image: NDArray[np.float32], calls: int) -> dict[str, float]:
    """Return the 10th percentile of the milliseconds that a call of each bundle takes, in turns."""
    times: dict[str, list[float]] = {name: [] for name in bundles}
    for _ in range(calls):
        for name, bundle in bundles.items():
            begin = time.thread_time_ns()
            bundle.run(image)
            times[name].append((time.thread_time_ns() - begin) / 1e6)
    return {name: float(np.percentile(all_of, 10)) for name, all_of in times.items()}


def main() -> None:
    """Make the bundles, let them take turns, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--networks", default="v1,v2")
    parser.add_argument("--percents", default="30,50,70")
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    print("| network | format | ms | times as fast | weights, MB | cosine |\n|---|---|---|---|---|---|")
    for kind in options.networks.split(","):
        network = random_mobilenet(kind=KINDS[kind])
        made = make(network, options.percents.split(","), options.folder / kind)
        image = torch.randn(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2))
        expected, bundles = network(image).flatten(), {name: load(folder) for name, folder in made.items()}
        times = race(bundles, image.numpy(), options.calls)
        for name, bundle in bundles.items():
            found = torch.from_numpy(bundle.run(image.numpy())).flatten()
            cosine, size = float(torch.cosine_similarity(found, expected, dim=0)), bundle.manifest["weight_bytes"] / 1e6
            ratio = times[DENSE] / times[name]
            print(f"| {kind} | {name} | {times[name]:.2f} | {ratio:.2f} | {size:.2f} | {cosine:.3f} |", flush=True)


if __name__ == "__main__":
    main()

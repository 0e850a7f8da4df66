"""Networks of MobileNet's shape whose convolutions skip groups, against the same network dense, both in int8.

    python benchmarks/group_sparsity.py WORK_FOLDER [--networks v1,v2] [--percents 30,50,70] [--calls 200]
                                        [--target x86|avx512_vnni|avx2|wasm]

Makes the bundles in WORK_FOLDER, once, from random weights and images.  Then all bundles of a network run in turns, an
image a call, on one thread, those of WebAssembly in Node; times are those that the thread (in Node, the process) had a
CPU, so that others' work takes none of it, and their 10th percentiles are compared.  Cosines are those of logits with
PyTorch's in float32; of random weights, which are redundant in nothing, they say that the kernels are right, and not
what a trained network would lose.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
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


IN_NODE = """
const [file, calls, ...folders] = process.argv.slice(1);
const { readFile } = await import("node:fs/promises");
const image = new Float32Array(new Uint8Array(await readFile(file)).buffer);
const models = [];
for (const folder of folders) {
  const { load } = await import(`file://${folder}/runner.js`);
  models.push(await load(folder, { threads: 1 }));
}
const times = models.map(() => []);
const logits = [];
for (const model of models) {
  logits.push([...(await model.run(image)).data]);
  for (let i = 0; i < 20; i++) await model.run(image); // compiled with all optimisations by then
}
for (let call = 0; call < calls; call++) {
  for (const [i, model] of models.entries()) {
    const begin = process.cpuUsage();
    await model.run(image);
    const { user, system } = process.cpuUsage(begin);
    times[i].push((user + system) / 1e3);
  }
}
console.log(JSON.stringify({ times, logits }));
process.exit();
"""


def make(network: torch.nn.Module, percents: list[str], folder: Path, target: Any) -> dict[str, Path]:
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
        recipe = Recipe.from_dict({"passes": [*groups, rest], "tune": "off", "target": target})
        write_bundle(dense, recipe, Samples(images, torch.empty(0), "", "random images"), bundle)
    return found


Raced = tuple[dict[str, list[float]], dict[str, NDArray[np.float32]]]
"""Milliseconds of each call, and logits, by format."""


def race_in_node(made: dict[str, Path], image: NDArray[np.float32], calls: int) -> Raced:
    """Time calls of bundles for WebAssembly in one process of Node, in turns."""
    with tempfile.NamedTemporaryFile() as file:
        image.tofile(file.name)
        folders = [str(folder.resolve()) for folder in made.values()]
        command = ["node", "--input-type=module", "-e", IN_NODE, file.name, str(calls), *folders]
        found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    logits = [np.asarray(values, np.float32) for values in found["logits"]]
    return dict(zip(made, found["times"], strict=True)), dict(zip(made, logits, strict=True))


def race(made: dict[str, Path], image: NDArray[np.float32], calls: int) -> Raced:
    """Time calls of bundles, in turns."""
    bundles = {name: load(folder) for name, folder in made.items()}
    logits = {name: bundle.run(image) for name, bundle in bundles.items()}
    times: dict[str, list[float]] = {name: [] for name in bundles}
    for _ in range(calls):
        for name, bundle in bundles.items():
            begin = time.thread_time_ns()
            bundle.run(image)
            times[name].append((time.thread_time_ns() - begin) / 1e6)
    return times, logits


def main() -> None:
    """Make the bundles, let them take turns, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--networks", default="v1,v2")
    parser.add_argument("--percents", default="30,50,70")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--target", choices=("x86", "avx512_vnni", "avx2", "wasm"), default="x86")
    options = parser.parse_args()
    is_wasm = options.target == "wasm"
    target = options.target if options.target in ("x86", "wasm") else {"x86": {"isa": options.target}}
    print("| network | format | ms | times as fast | weights, MB | cosine |\n|---|---|---|---|---|---|")
    for kind in options.networks.split(","):
        network = random_mobilenet(kind=KINDS[kind])
        made = make(network, options.percents.split(","), options.folder / options.target / kind, target)
        image = torch.randn(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2))
        expected = network(image).flatten()
        taken, logits = (race_in_node if is_wasm else race)(made, image.numpy(), options.calls)
        times = {name: float(np.percentile(each, 10)) for name, each in taken.items()}
        for name, folder in made.items():
            found = torch.from_numpy(logits[name]).flatten()
            size = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["weight_bytes"] / 1e6
            cosine = float(torch.cosine_similarity(found, expected, dim=0))
            ratio = times[DENSE] / times[name]
            print(f"| {kind} | {name} | {times[name]:.2f} | {ratio:.2f} | {size:.2f} | {cosine:.3f} |", flush=True)


if __name__ == "__main__":
    main()

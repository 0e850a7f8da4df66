"""A network of MobileNetV2's shape with random weights, one image: ours in int8, ONNX Runtime's, OpenVINO's, in turns.

    python benchmarks/mobilenet.py WORK_FOLDER --peers FOLDER [--threads 2,1] [--repeats 9] [--ours NAME=BUNDLE]
        [--only PARTS] [--smoke]

Makes the network (benchmarks/mobilenet_model.py), its ONNX file, calibration images and our bundle in WORK_FOLDER,
once, and writes benchmarks/results/mobilenet.json and .md.  The peers' environments are those of
benchmarks/peers/README.md, `openvino` and `ortgenai`; neither needs PyTorch here, since both read the ONNX file.  How
runtimes take turns is said in benchmarks/x86_race.py.  The limit beside the times is that of the products
at the peak of this CPU's int8 instructions, or of reading the weights once, whichever is more.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from bundles import write_bundle
from mobilenet_model import random_mobilenet
from numpy.typing import NDArray
from x86_child import Runtime
from x86_models import SHARED, TaskRace
from x86_race import Track, arguments, chosen, cosines, machine, parsed
from x86_tasks import Task

from compressor.capture.capture import capture
from compressor.data.text import Samples
from compressor.recipe.recipe import Recipe
from compressor.registry import PASSES
from compressor.runtime import read_manifest

SIZE, IMAGES, JUDGED = 224, 16, 8
TARGETS = ("Conv2d", "Linear")


class MobileNet(Task):
    """Random images of 224 x 224; outputs are judged by their cosines with those of PyTorch in float32."""

    kind, name, title = "module", "mobilenet", f"MobileNetV2's shape, an image of {SIZE} x {SIZE}"
    runs, judged = {1: 20}, "cosine"
    ours: ClassVar[dict[str, str]] = {"W8A8_STATIC": "rtn"}

    def __init__(self, work: Path) -> None:
        super().__init__(work, Path("mobilenet_model.py"), [])
        self.expected = np.load(self.folder / "expected.npy")

    def _make(self) -> dict[str, int]:
        network, rng = random_mobilenet(), torch.Generator().manual_seed(1)
        calibration, judged = (torch.randn(n, 3, SIZE, SIZE, generator=rng) for n in (IMAGES, JUDGED))
        self._write("calibration", calibration)
        self._write("case-1", judged[:1])
        self._write("check-000", judged)
        np.save(self.folder / "expected.npy", network(judged).double().numpy())
        torch.onnx.export(
            network, (judged[:1],), self.folder / "model.onnx", dynamo=False, input_names=["x"],
            output_names=["output"], opset_version=18, dynamic_axes={"x": {0: "batch"}, "output": {0: "batch"}},
        )  # fmt: skip
        return self._operations(network)

    def compress(self, scheme: str, out: Path) -> None:
        """Round all convolutions and the linear to nearest, with scales from the calibration images."""
        with np.load(self.folder / "calibration.npz") as arrays:
            images = torch.from_numpy(arrays["x"])
        dense = capture(random_mobilenet(), (images[:2],), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
        recipe = Recipe.from_dict({"passes": [], "tune": "off"})
        recipe = recipe.model_copy(update={"passes": (PASSES.find("rtn")(scheme=scheme, targets=TARGETS),)})
        write_bundle(dense, recipe, Samples(images, torch.empty(0), "", "random images"), out)

    def outputs(self, raw: NDArray[np.float32], inputs: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
        """Return all logits."""
        return raw.astype(np.float64)

    def quality(self, outputs: NDArray[np.float64], reference: NDArray[np.float64] | None) -> dict[str, float]:
        """Return the mean and the smallest cosine with PyTorch's logits."""
        found = cosines(outputs, self.expected)
        return {"cosine": float(found.mean()), "cosine_least": float(found.min())}


def table(result: dict[str, Any]) -> str:
    """Format the results, a row a runtime and number of threads."""
    about = result["machine"]
    lines = [
        "# A network of MobileNetV2's shape on x86", "",
        f"Made by `python benchmarks/mobilenet.py`: {result['title']}, random weights, batch 1;",
        f"medians of {result['repeats']} turns, each the median of 20 calls, in brackets the least and the most. x:",
        "how many times as long as ours. Runtimes take turns; where the load average says that others used it,",
        "ratios say more than times, and those of one thread more than those of all. Cosine: of logits with PyTorch's",
        f"in float32, the mean and the least. {about['cpu']}, {about['cpus']} CPUs; commit {about['commit']};",
        f"load average before {about['load_average_before']:.1f}.", "",
        "| threads | runtime | ms | x | cosine | RSS, MB |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    notes: dict[str, str] = {}
    for threads, race in result["threads"].items():
        first = statistics.median(next(iter(race["runtimes"].values()))["batch_1_s"])
        for name, row in race["runtimes"].items():
            times = [1e3 * second for second in row["batch_1_s"]]
            spread = f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"
            ratio = statistics.median(times) / first / 1e3
            cosine = f"{row['cosine']:.4f}, {row['cosine_least']:.4f}"
            lines.append(
                f"| {threads} | {name} | {spread} | {ratio:.2f} | {cosine} | {row['rss_bytes'][-1] / 1e6:.0f} |"
            )
            versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
            notes[name] = f"- {name}: {row['settings']}; {versions}"
        peak, bandwidth = max(race["peak_int8_ops_per_s"].values(), default=0.0), race["bandwidth_bytes_per_s"]
        if peak and bandwidth:
            products, reading = result["operations"]["1"] / peak, result["weight_bytes"] / bandwidth
            each, limit = f"products {1e3 * products:.2f}, weights {1e3 * reading:.2f}", max(products, reading)
            lines.append(f"| {threads} | limit: {each} | {1e3 * limit:.2f} | {limit / first:.2f} | | |")
        notes |= {name: f"- {name}: missing: {why}" for name, why in race["missing"].items()}
    return "\n".join([*lines, "", *notes.values(), ""])


def main() -> None:
    """Make, convert, take turns, write."""
    parser = arguments(__doc__.splitlines()[0], "2,1", "/", "once")
    parser.set_defaults(repeats=9)
    options = parsed(parser)
    options.out.mkdir(parents=True, exist_ok=True)
    task, ours = MobileNet(options.folder), list[Runtime]()
    for scheme in task.ours:
        folder = options.folder / f"ours-{scheme}"
        if not (folder / "manifest.json").exists():
            print(f"ours {scheme}: compressing", file=sys.stderr, flush=True)
            task.compress(scheme, folder)
        ours.append(Runtime(f"ours {scheme}", "", "x86_network_ours", "bundle", str(folder)))
    for name, _, bundle in (text.partition("=") for text in options.ours):
        ours.append(Runtime(f"ours {name}", "", "x86_network_ours", "bundle", bundle))
    races: dict[str, Any] = {}
    result = {
        "title": task.title, "operations": task.operations, "machine": machine(), "repeats": options.repeats,
        "weight_bytes": read_manifest(Path(ours[0].files))["weight_bytes"], "threads": races,
    }  # fmt: skip
    for threads in options.threads.split(","):
        track = Track(task.folder, options.folder, options.peers, int(threads))
        race = TaskRace(chosen((*ours, *SHARED), options.only, "/"), track, task)
        race.run(options.repeats)
        races[threads] = race.result()
        (options.out / "mobilenet.json").write_text(json.dumps(result, indent=2) + "\n")
        (options.out / "mobilenet.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()

"""An encoder and a CNN on this CPU in 8 bits: ours, and other runtimes, in turns on the same inputs.

    python benchmarks/x86_models.py WORK_FOLDER --minilm MODEL TEXT [TEXT ...] --resnet WEIGHTS IMAGES --peers FOLDER
        [--threads 2,1] [--ours NAME=BUNDLE] [--only PARTS] [--compress] [--smoke]

MODEL and TEXTs are those of benchmarks/minilm.py, WEIGHTS and IMAGES those of benchmarks/resnet.py.  Makes inputs, our
bundles and the peers' conversions in WORK_FOLDER, once (`--compress` makes our bundles anew), and writes
benchmarks/results/x86_models.json and .md, where a model that is not measured now stays as it is.  How runtimes take
turns is said in benchmarks/x86_race.py; the seconds of a turn are the median of its calls, and the first call is not
counted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from x86_child import Child, Runtime
from x86_models_table import table
from x86_race import Race, Track, arguments, chosen, machine, parsed
from x86_tasks import MiniLM, ResNet56, Task

from compressor.runtime import read_manifest


def _openvino(stored: str, hint: str) -> Runtime:
    return Runtime(
        f"OpenVINO {stored}, {hint}", "openvino", "x86_network_openvino", f"{stored}-{hint}", f"openvino-{stored}"
    )


def _onnxruntime(name: str, variant: str) -> Runtime:
    return Runtime(f"ONNX Runtime {name}", "ortgenai", "x86_network_onnxruntime", variant, f"onnxruntime-{variant}")


REFERENCE = Runtime("PyTorch f32, eager", "openvino", "x86_network_torch", "f32", "torch-f32")
SHARED = (
    *(_openvino(stored, hint) for stored in ("int8", "f32") for hint in ("f32", "default")),
    _onnxruntime("int8 static", "static"),
    _onnxruntime("f32", "f32"),
)
PEERS = {
    "encoder": (
        *SHARED,
        _onnxruntime("int8 dynamic", "dynamic"),
        _onnxruntime("int8 dynamic, fused", "dynamic-fused"),
        _onnxruntime("f32, fused", "f32-fused"),
        REFERENCE,
    ),
    "module": (*SHARED, REFERENCE),
}


class TaskRace(Race):
    """Race of one model's calls, by batch."""

    reference = REFERENCE.name

    def __init__(self, runtimes: list[Runtime], track: Track, task: Task) -> None:
        super().__init__(runtimes, track)
        self.task = task

    def check(self, child: Child) -> NDArray[np.float64]:
        """Return all outputs that quality is judged by."""
        out, found = self.track.work / "output.npy", []
        for file in self.task.checks():
            child.ask("check", inputs=str(file), out=str(out))
            with np.load(file) as inputs:
                found.append(self.task.outputs(np.load(out), dict(inputs)))
        return np.concatenate(found)

    def measure(self, child: Child) -> dict[str, float]:
        """Time every batch, as the median of some calls."""
        found = {}
        for batch, runs in self.task.runs.items():
            seconds = child.ask("time", inputs=str(self.task.case(batch)), runs=runs)["seconds"]
            found[f"batch_{batch}_s"] = statistics.median(seconds)
        return found

    def quality(self, outputs: NDArray[np.float64], reference: NDArray[np.float64] | None) -> dict[str, float]:
        """Return the task's quality."""
        return self.task.quality(outputs, reference)


def bundles(task: Task, options: argparse.Namespace) -> list[Runtime]:
    """Return our bundles of this model, compressed if they are missing, and those given as options."""
    found = []
    for scheme, method in task.ours.items():
        folder = options.folder / f"{task.name}-{scheme}"
        if options.compress:
            shutil.rmtree(folder, ignore_errors=True)
        if not (folder / "manifest.json").exists():
            print(f"{task.name}: {scheme} by {method}", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            task.compress(scheme, folder)
        found.append(Runtime(f"ours {scheme}, {method}", "", "x86_network_ours", "bundle", str(folder)))
    for name, _, bundle in (text.partition("=") for text in options.ours):
        if read_manifest(Path(bundle))["kind"] == task.kind:
            found.append(Runtime(f"ours {name}", "", "x86_network_ours", "bundle", bundle))
    return found


def main() -> None:
    """Make, convert, take turns, write."""
    parser = arguments(__doc__.splitlines()[0], "2", "/", "once")
    parser.add_argument("--minilm", nargs="+", default=[], metavar="MODEL TEXT")
    parser.add_argument("--resnet", nargs=2, default=[], metavar=("WEIGHTS", "IMAGES"))
    parser.add_argument("--compress", action="store_true", help="our bundles anew")
    options = parsed(parser)
    kinds: dict[type[Task], list[str]] = {MiniLM: options.minilm, ResNet56: options.resnet}
    tasks = [kind(options.folder, Path(given[0]), given[1:]) for kind, given in kinds.items() if given]
    written = options.out / "x86_models.json"
    result: dict[str, Any] = json.loads(written.read_text()) if written.exists() else {}
    for task in tasks:
        runtimes = chosen((*bundles(task, options), *PEERS[task.kind]), options.only, "/")
        races: dict[str, Any] = {}
        result[task.name] = {
            "title": task.title, "batches": list(task.runs), "operations": task.operations, "judged": task.judged,
            "machine": machine(), "repeats": options.repeats, "threads": races,
        }  # fmt: skip
        for threads in options.threads.split(","):
            race = TaskRace(runtimes, Track(task.folder, options.folder, options.peers, int(threads)), task)
            race.run(options.repeats)
            races[threads] = race.result()
            written.write_text(json.dumps(result, indent=2) + "\n")
            (options.out / "x86_models.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()

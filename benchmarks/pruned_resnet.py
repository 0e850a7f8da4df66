"""Accuracy of pruned ResNets on labelled images, without training and recovered by it.

    python benchmarks/pruned_resnet.py WEIGHTS IMAGES [--speedups 2.1,2.55] [--samples 64] [--ways 5]
    python benchmarks/pruned_resnet.py WEIGHTS IMAGES --seconds 120 [--ways 1] [--peer peers/torchpruning/bin/python]

WEIGHTS and IMAGES are those of benchmarks/resnet.py.  Channels are removed until the network has so many times fewer
MACs.  Some images of the first half calibrate, without their labels; accuracy is that on the other half.  With
`--seconds` of processor time, pruning included, on one thread, the pass `distill` recovers on the first half, and
Torch-Pruning takes its turn in between, with the same images, time, loss and optimiser.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from resnet import BATCH, captured, data_recipe
from resnet_model import load_resnet
from safetensors.torch import save_file
from torch import Tensor
from torch.fx import GraphModule

from compressor.data.images import load_images
from compressor.data.text import Samples
from compressor.graph.model import clone_graph
from compressor.passes.channel_prune import ChannelPrune
from compressor.passes.distill import Distill
from compressor.pipeline.context import Context
from compressor.pipeline.structured.widths import cost_of, find_widths

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"allocate": "uniform"},
    {"refit": False},
    {"importance": "magnitude", "refit": False},
    {"importance": "taylor"},
)
TRAINING = {"batch": 32, "temperature": 2.0}
RATE = 2e-4  # Torch-Pruning takes 1e-3, having batch norms; without them, as in captured graphs, that is too high
HELD_OUT = 0.03  # of the images


def recover(graph: GraphModule, dense: GraphModule, images: Tensor, seconds: float) -> tuple[GraphModule, int, float]:
    """Train towards the dense graph for so long; return the graph, the steps that it took and their seconds."""

    def step(steps: int) -> Distill:
        return Distill(
            steps=steps, targets="re:.*", held_out=HELD_OUT, evaluate_every=steps, learning_rate=RATE, **TRAINING
        )

    samples = Samples(images, torch.zeros(0), "first half", "the first images")
    begin, tried = time.process_time(), 3
    step(tried).run(clone_graph(graph), Context(samples=samples, dense=dense))
    steps = max(1, int(seconds / ((time.process_time() - begin) / tried)))
    begin = time.process_time()
    graph = step(steps).run(graph, Context(samples=samples, dense=dense))
    return graph, steps, time.process_time() - begin


def ask_peer(python: Path, weights: Path, images: Path, speedup: float, seconds: float) -> str:
    """Run Torch-Pruning in its own environment, and return its row."""
    script = Path(__file__).parent / "peers" / "torchpruning.py"
    command = [python, script, weights, images, "--speedup", str(speedup), "--seconds", str(seconds)]
    for option, value in TRAINING.items():
        command += [f"--{option.replace('_', '-')}", str(value)]
    made = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    row = json.loads(made.stdout.splitlines()[-1])
    return (
        f"| {row['speedup']:.2f} | Torch-Pruning | {row['parameters']:,} | {row['at_once']:.1%} | "
        f"{row['recovered']:.1%} | {row['steps']} | {row['seconds']:.0f} |"
    )


def macs(graph: GraphModule) -> float:
    """Return the products of convolutions and linears, for as many images as the graph was captured with."""
    widths = find_widths(graph, "channel_prune", "re:.*", ())
    return cost_of(graph, widths, "macs")([0] * len(widths.families))


@torch.no_grad()
def outputs(graph: GraphModule, inputs: Tensor) -> Tensor:
    """Return logits [images, classes]."""
    return torch.cat([graph(inputs[i : i + BATCH]) for i in range(0, len(inputs), BATCH)])


def main() -> None:
    """Measure and print one line per speed-up and way to choose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("images")
    parser.add_argument("--speedups", default="2.1,2.55", help="times fewer MACs [default: %(default)s]")
    parser.add_argument("--samples", type=int, default=64, help="that calibrate [default: %(default)s]")
    parser.add_argument(
        "--ways", type=int, default=len(WAYS), help="to choose channels, the first of them [default: all]"
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="to prune and recover in [default: no recovery]")
    parser.add_argument("--peer", type=Path, metavar="PYTHON", help="of an environment with Torch-Pruning")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peer is not None and not options.seconds:
        parser.error("--peer needs --seconds")
    images = load_images(data_recipe(options.images, options.samples).evaluation)
    inputs, labels = images.inputs(), images.labels
    half = len(labels) // 2
    dense = captured(load_resnet(options.weights), images)
    samples = Samples(inputs[: min(half, options.samples)], torch.zeros(0), "first half", "the first images")

    def accuracy(found: Tensor) -> float:
        return float((found.argmax(1) == labels[half:]).double().mean())

    print(f"dense: {accuracy(outputs(dense, inputs[half:])):.1%} of {len(labels) - half} images")
    title = "| fewer MACs | by | parameters | accuracy at once | recovered | steps | seconds of one thread |"
    print(f"{title}\n|---|---|---|---|---|---|---|")
    for speedup in map(float, options.speedups.split(",")):
        for way in WAYS[: options.ways]:
            begin, step = time.process_time(), ChannelPrune(macs=1 / speedup, **way)
            graph = step.run(clone_graph(dense), Context(samples=samples))
            seconds, steps = time.process_time() - begin, 0
            pruned = recovered = accuracy(outputs(graph, inputs[half:]))
            if options.seconds:
                graph, steps, trained_s = recover(graph, dense, inputs[:half], options.seconds - seconds)
                seconds += trained_s
                recovered = accuracy(outputs(graph, inputs[half:]))
            what = ", ".join(f"`{key}: {value}`" for key, value in way.items()) or "`channel_prune` as it comes"
            count = sum(parameter.numel() for parameter in graph.parameters())
            print(
                f"| {macs(dense) / macs(graph):.2f} | {what} | {count:,} | {pruned:.1%} | "
                f"{f'{recovered:.1%}' if steps else ''} | {steps or ''} | {seconds:.0f} |",
                flush=True,
            )
        if options.peer is not None:
            with tempfile.TemporaryDirectory() as scratch:
                file = Path(scratch) / "images.safetensors"
                save_file({"inputs": inputs, "labels": labels}, file)
                print(ask_peer(options.peer, options.weights, file, speedup, options.seconds), flush=True)


if __name__ == "__main__":
    main()

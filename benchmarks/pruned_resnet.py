"""Accuracy of pruned ResNets on labelled images, without training.

    python benchmarks/pruned_resnet.py WEIGHTS IMAGES [--speedups 2.1,2.55] [--samples 64] [--ways 4]

WEIGHTS and IMAGES are those of benchmarks/resnet.py.  Channels are removed until the network has so many times fewer
MACs.  Some images of the first half calibrate, without their labels; accuracy is that on the other half.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from resnet import BATCH, captured, data_recipe
from resnet_model import load_resnet
from torch import Tensor
from torch.fx import GraphModule

from compressor.data.images import load_images
from compressor.data.text import Samples
from compressor.graph.model import clone_graph
from compressor.passes.channel_prune import ChannelPrune
from compressor.pipeline.context import Context
from compressor.pipeline.structured.widths import cost_of, find_widths

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"allocate": "uniform"},
    {"refit": False},
    {"importance": "magnitude", "refit": False},
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
    options = parser.parse_args()
    images = load_images(data_recipe(options.images, options.samples).evaluation)
    inputs, labels = images.inputs(), images.labels
    half = len(labels) // 2
    dense = captured(load_resnet(options.weights), images)
    samples = Samples(inputs[: min(half, options.samples)], torch.zeros(0), "first half", "the first images")

    def accuracy(found: Tensor) -> float:
        return float((found.argmax(1) == labels[half:]).double().mean())

    print(f"dense: {accuracy(outputs(dense, inputs[half:])):.1%} of {len(labels) - half} images")
    print("| fewer MACs | pass | parameters | accuracy | seconds |\n|---|---|---|---|---|")
    for speedup in map(float, options.speedups.split(",")):
        for way in WAYS[: options.ways]:
            begin, step = time.perf_counter(), ChannelPrune(macs=1 / speedup, **way)
            graph = step.run(clone_graph(dense), Context(samples=samples))
            pruned = accuracy(outputs(graph, inputs[half:]))
            what = ", ".join(f"`{key}: {value}`" for key, value in way.items()) or "as it comes"
            count = sum(parameter.numel() for parameter in graph.parameters())
            print(
                f"| {macs(dense) / macs(graph):.2f} | {what} | {count:,} | {pruned:.1%} | "
                f"{time.perf_counter() - begin:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Accuracy of pruned ResNets on labelled images, before and after recovery.

    python benchmarks/pruned_resnet.py WEIGHTS IMAGES [--speedups 2.1,2.55] [--epochs 8] [--samples 64] [--ways 4]

WEIGHTS and IMAGES are those of benchmarks/resnet.py.  Channels are removed until the network has so many times fewer
MACs.  One half of the images calibrates, without labels, and trains what is left for some epochs on labels and on the
dense network's outputs; accuracy is that on the other half.
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
from torch.nn.functional import cross_entropy, kl_div, log_softmax, pad, softmax

from compressor.data.images import load_images
from compressor.data.text import Samples
from compressor.graph.model import clone_graph
from compressor.passes.channel_prune import ChannelPrune
from compressor.pipeline.context import Context
from compressor.pipeline.structured.widths import cost_of, find_widths

TEMPERATURE, RATE, TRAINED = 4.0, 0.01, 32
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


def train(graph: GraphModule, inputs: Tensor, labels: Tensor, taught: Tensor, epochs: int) -> None:
    """Train all weights on labels and on another network's logits; images are shifted and mirrored."""
    for name, parameter in list(graph.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(graph.get_submodule(owner), leaf, torch.nn.Parameter(parameter.detach().clone()))
    random, count = torch.Generator().manual_seed(0), len(inputs)
    optimizer = torch.optim.SGD(graph.parameters(), RATE, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = epochs * (count // TRAINED)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in range(epochs):
        order = torch.randperm(count, generator=random)
        for rows in order.split(TRAINED)[: count // TRAINED]:
            x = pad(inputs[rows], (4, 4, 4, 4))
            down, right = torch.randint(9, (2,), generator=random).tolist()
            x = x[:, :, down : down + 32, right : right + 32]
            x = x.flip(3) if torch.rand(1, generator=random) < 0.5 else x
            logits = graph(x)
            softened = log_softmax(logits / TEMPERATURE, 1)
            loss = 0.1 * cross_entropy(logits, labels[rows])
            target = softmax(taught[rows] / TEMPERATURE, 1)
            loss = loss + TEMPERATURE**2 * kl_div(softened, target, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(graph.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    graph.requires_grad_(False)


def main() -> None:
    """Measure and print one line per speed-up and way to choose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("images")
    parser.add_argument("--speedups", default="2.1,2.55", help="times fewer MACs [default: %(default)s]")
    parser.add_argument("--epochs", type=int, default=0, help="of recovery; 0 for none [default: %(default)s]")
    parser.add_argument("--samples", type=int, default=64, help="that calibrate [default: %(default)s]")
    parser.add_argument(
        "--ways", type=int, default=len(WAYS), help="to choose channels, the first of them [default: all]"
    )
    options = parser.parse_args()
    images = load_images(data_recipe(options.images, options.samples).evaluation)
    inputs, labels = images.inputs(), images.labels
    half = len(labels) // 2
    dense = captured(load_resnet(options.weights), images)
    logits = outputs(dense, inputs)
    samples = Samples(inputs[: min(half, options.samples)], torch.zeros(0), "first half", "the first images")

    def accuracy(found: Tensor) -> float:
        return float((found.argmax(1) == labels[half:]).double().mean())

    print(f"dense: {accuracy(logits[half:]):.1%} of {len(labels) - half} images")
    print("| fewer MACs | pass | parameters | pruned | recovered | seconds |\n|---|---|---|---|---|---|")
    for speedup in map(float, options.speedups.split(",")):
        for way in WAYS[: options.ways]:
            begin, step = time.perf_counter(), ChannelPrune(macs=1 / speedup, **way)
            graph = step.run(clone_graph(dense), Context(samples=samples))
            pruned, recovered = accuracy(outputs(graph, inputs[half:])), ""
            if options.epochs:
                train(graph, inputs[:half], labels[:half], logits[:half], options.epochs)
                recovered = f"{accuracy(outputs(graph, inputs[half:])):.1%}"
            what = ", ".join(f"`{key}: {value}`" for key, value in way.items()) or "as it comes"
            count = sum(parameter.numel() for parameter in graph.parameters())
            print(
                f"| {macs(dense) / macs(graph):.2f} | {what} | {count:,} | {pruned:.1%} | {recovered} | "
                f"{time.perf_counter() - begin:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

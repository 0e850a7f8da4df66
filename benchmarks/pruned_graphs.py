"""Structured pruning of 14 kinds of graphs and of a ResNet-56, beside Torch-Pruning.

    python benchmarks/pruned_graphs.py [--peers SITE_PACKAGES ...] [--markdown FILE]

Models are random ones of tests/support/pruned_models.py.  Each pass removes 30 and 50% of the channels or heads that it
finds.  A count agrees where the smaller graph's weights have the shapes and bytes that the plan, made without weights,
says.  For the column `zeros`, all that writes the first half of each family is zero before the pass, bias and norm
included; it then has to find these channels, and no output may change.  The second table has both tools on the same
random modules; packages of ``--peers`` come behind our own.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from resnet_model import ResNet
from torch import Tensor, nn
from torch.fx import GraphModule

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from packed_models import drop_weights
from pruned_models import IMAGES, PICTURES, TEXTS, captured, costs, free, module, output, samples_of

from compressor.capture.capture import capture
from compressor.data.text import Samples
from compressor.errors import UsageError
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.rewrite import held_tensor, set_tensor
from compressor.graph.sites import weight_sites
from compressor.passes.channel_prune import ChannelPrune
from compressor.passes.ffn_prune import FfnPrune
from compressor.passes.head_prune import HeadPrune
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pass, Pipeline

RATIOS = (0.3, 0.5)
STEPS: dict[str, Callable[[float], Pass]] = {
    "channel_prune": lambda ratio: ChannelPrune(ratio, allocate="uniform"),
    "head_prune": lambda ratio: HeadPrune(ratio, importance="activation"),
    "ffn_prune": lambda ratio: FfnPrune(ratio, multiple=1, importance="activation"),
}
RESNET, MOST_SECONDS = "ResNet-56", 20  # that a peer may take
WRITERS = {
    RESNET: ("layer2.3.conv1", "layer2.3.bn1"),
    "MobileNet": ("wide.0", "wide.1", "deep.0", "deep.1"),
    "U-Net": ("first.0", "first.1"),
    "beside itself": ("first.0", "first.1"),
    "in groups": ("first.0", "first.1", "grouped.0", "grouped.1"),
    "ViT": ("qkv",),
}
"""Model -> modules that write some of its channels; a removal by Torch-Pruning begins at the first."""
NOTE = """\
Torch-Pruning 1.6.1 is called as in its examples (`benchmarks/peers/torchpruning_graphs.py`) and may take 20 s.
Modules of transformers run on 24 tokens, captured graphs count those of their example: compare shares of products.
Batch norms are folded into our convolutions and not into its. It also narrows the hidden width of transformers, which
we keep: a norm takes the mean over it. The ViT's own code states 4 heads of 6. Seconds include capture and
calibration, or tracing.
"""
LINES: list[str] = []


def say(text: str) -> None:
    """Print, and keep for the file."""
    print(text, flush=True)
    LINES.append(text)


def set_zeros(graph: GraphModule) -> None:
    """Set all that writes the first half of each family to zero."""
    for family in free(graph):
        gone = np.arange(family.count // 2)
        for (parameter, axis), entries in family.places.items():
            if axis == 0:
                value = held_tensor(graph, parameter).detach().clone()
                value[torch.from_numpy(entries[gone]).flatten()] = 0
                set_tensor(graph, parameter, value)


def change(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def agrees(step: Pass, graph: GraphModule, smaller: GraphModule, ctx: Context) -> bool:
    """Tell whether shapes, bytes and records are those that the plan says."""
    drop_weights(graph)
    plans = {plan.site: plan for plan in step.plan(graph, Context())}
    shapes = {site.name: (site.out_features, site.in_features) for site in weight_sites(smaller)}
    planned = {name: (plan.out_features, plan.in_features) for name, plan in plans.items()}
    records = {record.site: record.bytes_after for record in ctx.records}
    return (
        all(shapes[name] == shape for name, shape in planned.items())
        and all(plans[name].bytes_after == size for name, size in records.items())
        and weight_bytes(smaller) == weight_bytes(graph)
    )


@torch.no_grad()
def own_row(name: str, pass_name: str, ratio: float) -> str:
    """Prune one graph by one pass, and return its row; empty if the pass finds nothing in such a graph."""
    graph, step, ctx = captured(name), STEPS[pass_name](ratio), Context(samples=samples_of(name))
    try:
        step.requires(captured(name), Context())
    except UsageError:
        return ""
    dense, begin = costs(graph), time.perf_counter()
    smaller = Pipeline([step], [VerifyStages()]).run(graph, ctx)
    seconds, left = time.perf_counter() - begin, costs(smaller)
    is_finite = bool(torch.isfinite(output(smaller, name)).all())
    zeros = captured(name)
    set_zeros(zeros)
    expected = output(zeros, name)
    found = output(Pipeline([STEPS[pass_name](ratio)]).run(zeros, Context(samples=samples_of(name))), name)
    cells = [
        name,
        pass_name,
        f"{ratio:.0%}",
        f"{dense['parameters']:,} to {left['parameters']:,}",
        f"{dense['macs']:,.0f} to {left['macs']:,.0f}",
        f"{seconds:.2f}",
        "yes" if is_finite else "**no**",
        "yes" if agrees(step, captured(name), smaller, ctx) else "**no**",
        f"{change(found, expected):.0e}",
    ]
    return f"| {' | '.join(cells)} |"


def build(name: str) -> nn.Module:
    """Return a random module whose batch norms have statistics, for inference."""
    if name != RESNET:
        return module(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ResNet(9)
    for _ in range(3):
        model(inputs_of(name)[0])
    return model.eval().requires_grad_(False)


def inputs_of(name: str) -> tuple[Tensor, ...]:
    """Return a module's inputs."""
    if name == RESNET:
        return (torch.from_numpy(np.random.default_rng(0).standard_normal((4, 3, 32, 32))).float(),)
    return (PICTURES[:4],) if name in IMAGES else (torch.arange(24).view(2, 12) * 5 % 97,)


def logits(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return what a module answers."""
    with torch.no_grad():
        found = model(*inputs)
    return found if isinstance(found, Tensor) else found[0]


def size(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[int, int]:
    """Return numbers in parameters, and products of linears and convolutions, those of a graph and a module alike."""
    if isinstance(model, GraphModule):
        found = costs(model)
        return int(found["parameters"]), int(found["macs"])
    macs = 0

    def count(one: nn.Module, _: Any, made: Tensor) -> None:
        nonlocal macs
        weight: Any = one.weight
        rows = weight.shape[1] if type(one).__name__ == "Conv1D" else weight.shape[0]  # transformers' is transposed
        places = made.numel() // made.shape[1] if isinstance(one, nn.Conv2d) else made.numel() // made.shape[-1]
        macs += places * weight.numel() * (made.shape[1 if isinstance(one, nn.Conv2d) else -1] // rows)

    hooks = [
        one.register_forward_hook(count)
        for one in model.modules()
        if isinstance(one, nn.Conv2d | nn.Linear) or type(one).__name__ == "Conv1D"
    ]
    logits(model, inputs)
    for hook in hooks:
        hook.remove()
    return sum(parameter.numel() for parameter in model.parameters()), macs


def by_us(name: str, ratio: float) -> GraphModule:
    """Capture a module and remove heads and channels."""
    if name == RESNET:
        graph, samples = capture(build(name), *inputs_of(name)), Samples(*inputs_of(name), torch.zeros(0), "", "random")
    else:
        graph, samples = capture(build(name), *([PICTURES[:4]] if name in IMAGES else [])), samples_of(name)
    for pass_name in ("head_prune", "channel_prune"):
        step = STEPS[pass_name](ratio)
        try:
            step.requires(clone_graph(graph), Context())
        except UsageError:
            continue  # no heads
        graph = step.run(graph, Context(samples=samples))
    return graph


def peer_row(name: str, ratio: float, who: str, prune: Callable[[str, float], nn.Module], zeros: str) -> str:
    """Prune by one tool, and return the row: what is left, how long it took, or how it fails."""
    model, inputs = build(name), inputs_of(name)
    cells = [name, f"{ratio:.0%}", who]
    begin = time.perf_counter()
    signal.alarm(0 if who == "ours" else MOST_SECONDS)
    try:
        smaller = prune(name, ratio)
        seconds = time.perf_counter() - begin
        if isinstance(smaller, GraphModule):
            model = capture(model, *([inputs[0]] if name in (*IMAGES, RESNET) else []))
            found = logits(smaller, inputs) if name == RESNET else output(smaller, name)
        else:
            found = logits(smaller, inputs)
        before, after = size(model, inputs), size(smaller, inputs)
        works = "nothing is removed" if after[0] == before[0] else "yes" if torch.isfinite(found).all() else "no: NaN"
        sizes = [f"{one:,} to {two:,}" for one, two in zip(before, after, strict=True)]
        cells += [*sizes, f"{seconds:.1f}", works, zeros]
    except Exception as error:
        if who == "ours":
            raise
        lines = str(error).strip().splitlines() or [""]
        cells += ["", "", "", f"no: {type(error).__name__}: {lines[0][:120].replace('|', '/')}", zeros]
    finally:
        signal.alarm(0)
    return f"| {' | '.join(cells)} |"


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"not done after {MOST_SECONDS} s")


def own_zeros(name: str) -> str:
    """Let channel_prune find and remove the half that is zero, and return by how much outputs change."""
    graph = capture(build(name), *inputs_of(name)) if name == RESNET else captured(name)
    samples = Samples(*inputs_of(name), torch.zeros(0), "", "random") if name == RESNET else samples_of(name)
    set_zeros(graph)
    with torch.no_grad():
        expected = logits(graph, inputs_of(name)) if name == RESNET else output(graph, name)
        graph = STEPS["channel_prune"](0.5).run(graph, Context(samples=samples))
        found = logits(graph, inputs_of(name)) if name == RESNET else output(graph, name)
    return f"{change(found, expected):.0e}"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peers", type=Path, nargs="*", default=[], help="folders of packages, behind our own")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    sys.path += map(str, args.peers)
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _too_long)
    say("# Structured pruning of 14 kinds of graphs\n")
    say("`python benchmarks/pruned_graphs.py`; the module's docstring says what the columns are.\n")
    say("| graph | pass | ratio | parameters | products | seconds | runs | as planned | zeros |")
    say("|---|---|---|---|---|---|---|---|---|")
    for name in [*TEXTS, *IMAGES]:
        rows = [own_row(name, pass_name, ratio) for pass_name in STEPS for ratio in RATIOS]
        for row in filter(None, rows):
            say(row)
    if args.peers:
        from peers.torchpruning_graphs import prune, zeros

        say("\n## Beside Torch-Pruning\n")
        say(NOTE)
        say("| graph | ratio | by | parameters | products | seconds | works | zeros |")
        say("|---|---|---|---|---|---|---|---|")
        for name in [RESNET, *IMAGES, *TEXTS]:
            own = own_zeros(name)
            peer = zeros(build(name), inputs_of(name)[0][:1], WRITERS[name]) if name in WRITERS else ""
            for ratio in RATIOS:
                say(peer_row(name, ratio, "ours", by_us, own))
                say(peer_row(name, ratio, "Torch-Pruning", lambda n, r: prune(build(n), inputs_of(n), r), peer))
    if args.markdown:
        args.markdown.write_text("\n".join(LINES) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

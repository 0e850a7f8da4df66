"""The pass puzzle on networks of images: parts, prefixes, peaks of memory, brute force over a whole space, refusals."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import DECODERS, make
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.functional import cross_entropy, pad, relu

from compressor.capture.capture import capture
from compressor.codegen.lowering.live_bytes import live_bytes
from compressor.codegen.targets.x86 import X86
from compressor.data.text import Samples
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.graph.blocks import find_blocks
from compressor.graph.model import clone_graph, weight_bytes
from compressor.passes.puzzle import Puzzle
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.structured.architecture import amounts, build, built, find_parts, masked
from compressor.pipeline.structured.architecture_search import rank_removals
from compressor.pipeline.structured.architecture_starts import sort_parts
from compressor.pipeline.structured.costs.memory import peaks
from compressor.pipeline.structured.costs.times import Costing
from compressor.progress import Silent
from compressor.recipe.recipe import Recipe
from compressor.run.steps import Peaks, Steps, Turn, in_turns
from compressor.search.space import alternatives, uniform
from compressor.training.settings import split

SIDE, CLASSES = 8, 5
SPACE = {"attention": (), "ffn": (), "convolution": ("width:0.75", "width:0.5", "none")}


class Block(nn.Module):
    """Two convolutions beside a shortcut, which is strided and padded where channels change."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride, self.added = outputs // inputs, (outputs - inputs) // 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self.stride, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(relu(self.conv1(x)))
        if self.added:
            x = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.added, self.added))
        return relu(y + x)


class Net(nn.Module):
    """A stem, blocks of 8 and of 16 channels, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(8, 8), Block(8, 8), Block(8, 16), Block(16, 16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(relu(self.stem(x))).mean((2, 3)))
        return result


@functools.cache
def _captured() -> GraphModule:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net().eval().requires_grad_(False)
        for name, parameter in net.named_parameters():  # so that channels and blocks are of unlike weight
            if name.endswith("conv2.weight"):
                parameter.mul_(torch.linspace(0.2, 2, parameter.shape[1])[:, None, None] * (1 + int(name[7]) % 3))
            if name == "head.weight":
                parameter.mul_(4)
        return capture(net, (torch.randn(2, 3, SIDE, SIDE),), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))


def captured() -> GraphModule:
    return clone_graph(_captured())


def pictures(count: int = 24) -> Tensor:
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


SAMPLES = Samples(pictures(), torch.zeros(0), "random", "random")


@torch.no_grad()
def logits(graph: GraphModule, images: Tensor) -> Tensor:
    found: Tensor = graph(images)
    return found


def divergence(dense: Tensor, other: Tensor) -> float:
    p, q = (torch.log_softmax(x.double(), -1) for x in (dense, other))
    return float(torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True))


def sorted_space(graph: GraphModule, images: Tensor, wanted: Any = SPACE) -> tuple[Any, Any, Any]:
    parts = find_parts(graph, "puzzle", 0, 0)
    space = alternatives(parts.layers, wanted, 2)
    return parts, space, sort_parts(graph, Context(), parts, space, images, "activation")


def test_blocks_are_branches_and_those_that_change_the_stream_stay() -> None:
    blocks = find_blocks(captured())
    assert [[branch.part for branch in block.branches] for block in blocks] == [["convolution"]] * 4
    assert [bool(block.reason) for block in blocks] == [False, False, True, False]
    parts = find_parts(captured(), "puzzle", 0, 0)
    assert [layer.cuts["channels"].family.count for layer in parts.layers] == [8, 8, 16, 16]
    space = alternatives(parts.layers, SPACE, 2)
    assert [len(row) for row in space] == [4, 4, 3, 4]
    shares = uniform(parts.layers, space)
    assert [space[i][place].label for i, place in enumerate(shares[1])] == [
        "width 6",
        "width 6",
        "width 12",
        "width 12",
    ]


def test_a_prefix_is_the_physical_slice() -> None:
    graph = captured()
    expected = logits(graph, pictures())
    parts, space, starts = sorted_space(graph, pictures())
    torch.testing.assert_close(logits(graph, pictures()), expected, rtol=0, atol=2e-5)
    picks = [row[place] for row, place in zip(space, (2, 3, 1, 1), strict=True)]
    expected = logits(masked(graph, parts.layers, picks, starts), pictures())
    build(graph, Context(), "puzzle", parts, picks, starts)
    torch.testing.assert_close(logits(graph, pictures()), expected, rtol=0, atol=2e-5)
    shapes = {name: tuple(one.shape) for name, one in graph.named_parameters() if name.endswith("conv2.weight")}
    assert shapes == {"blocks.0.conv2.weight": (8, 36), "blocks.2.conv2.weight": (16, 108),
                      "blocks.3.conv2.weight": (16, 108)}  # fmt: skip


def counted_memory(graph: GraphModule, with_inputs: bool) -> int:
    """Count the largest weight in place of a program's memory: that of the whole is the largest of its parts."""
    return max((one.numel() for one in graph.parameters()), default=0)


def clock(graphs: Sequence[GraphModule]) -> tuple[list[float], str]:
    return [1e-9 * sum(one.numel() for one in graph.parameters()) for graph in graphs], "counted"


def test_the_choice_holds_against_all_architectures_built_one_by_one() -> None:
    """Times and parameters of each are counted here on its own graph, and so are divergences, on the held-out half."""
    graph, (held, fitted) = captured(), split(SAMPLES.ids, 0.5, 0)
    share, dense = 0.75, logits(captured(), held)
    wanted = {**SPACE, "convolution": ("width:0.5", "none")}
    parts, space, starts = sorted_space(graph, fitted, wanted)
    (whole,), _ = clock([captured()])
    found = dict[tuple[int, ...], tuple[float, float]]()
    for choice in itertools.product(*map(range, map(len, space))):
        other = clone_graph(graph)
        picks = [row[place] for row, place in zip(space, choice, strict=True)]
        build(other, Context(), "puzzle", find_parts(other, "puzzle", 0, 0), picks, starts)
        found[choice] = clock([other])[0][0], divergence(dense, logits(other, held))
    singles = [[found[tuple(p if j == i else 0 for j in range(4))][1] for p in range(len(row))]
               for i, row in enumerate(space)]  # fmt: skip
    within = [one for one, (seconds, _) in found.items() if seconds <= share * whole]
    proposed = min(within, key=lambda one: sum(row[place] for row, place in zip(singles, one, strict=True)))
    even = [found[tuple(one)][1] for one in uniform(parts.layers, space) if tuple(one) in within]
    ctx = Context(samples=SAMPLES, step_seconds=clock)
    options: dict[str, Any] = {"multiple": 2, "keep_first": 0, "keep_last": 0, "importance": "activation"}
    step = Puzzle(latency=share, convolution=wanted["convolution"], held_out=0.5, depth="none", **options)
    chosen = Pipeline([step], [VerifyStages()]).run(captured(), ctx)
    (seconds,), _ = clock([chosen])
    score = divergence(dense, logits(chosen, held))
    assert seconds <= share * whole and score <= min(found[proposed][1], *even) * (1 + 1e-4)
    assert any(abs(score - each[1]) < 1e-5 and abs(seconds - each[0]) < 1e-12 for each in found.values())
    assert f"{1e3 * seconds:.4g} ms (+0.0%)" in "".join(ctx.notes) and "nats an image" in "".join(ctx.notes)


def overlapping(graphs: Sequence[GraphModule]) -> tuple[list[float], str]:
    """Take off less for each further parameter that is not as it was."""
    whole = {name: one.shape for name, one in captured().named_parameters()}
    now = [{name: one.shape for name, one in graph.named_parameters()} for graph in graphs]
    return [1 - 0.15 * sum(each.get(name) != whole[name] for name in whole) ** 0.5 for each in now], "counted"


def test_what_does_not_add_up_is_timed_as_a_whole() -> None:
    options: dict[str, Any] = {"multiple": 2, "keep_first": 0, "keep_last": 0, "importance": "activation"}
    step = Puzzle(latency=0.6, convolution=SPACE["convolution"], held_out=0.5, depth="none", **options)
    ctx = Context(samples=SAMPLES, step_seconds=overlapping)
    (whole, seconds), _ = overlapping([captured(), Pipeline([step]).run(captured(), ctx)])
    assert seconds <= 0.6 * whole and f"{1e3 * seconds:.4g} ms (+0.0%)" in "".join(ctx.notes)
    (parts,) = re.findall(r"timed apart, added up to (\S+)", "".join(ctx.notes))
    assert float(parts) < seconds / whole - 0.02


def test_limits_that_parts_reach_and_no_whole() -> None:
    options: dict[str, Any] = {"multiple": 2, "keep_first": 0, "keep_last": 0, "convolution": ("width:0.5",)}
    narrow, (parts, space, starts) = captured(), sorted_space(captured(), pictures(), {**SPACE, **options})
    build(narrow, Context(), "puzzle", parts, [row[-1] for row in space], starts)
    (whole, seconds), _ = overlapping([captured(), narrow])
    step = Puzzle(latency=0.999 * seconds / whole, held_out=0.5, depth="none", **options)
    with pytest.raises(UsageError, match=f"timed as wholes take {1e3 * seconds:.4g} ms at least, though their parts"):
        step.run(captured(), Context(samples=SAMPLES, step_seconds=overlapping))


def test_memory_is_that_of_the_largest_part_and_of_the_programs_plan() -> None:
    """Bytes by hand: of a block, its input, the inner tensor and the sum; the program holds these three at once."""
    graph, fmt, pixels = captured(), Format.parse("W8A8"), SIDE * SIDE
    layers = find_parts(graph, "puzzle", 0, 0).layers
    space = alternatives(layers, {**SPACE, "convolution": ("width:0.5", "none")}, 2)
    peak = Peaks(Recipe.from_dict({"model": "reference", "passes": [], "tune": "off"}))
    limit = peaks(graph, Context(peak_bytes=peak), Costing("puzzle", layers, space, fmt), 1e9)
    assert limit.sizes[0] == limit.sizes[1] == [4 * pixels * (8 + each + 8) for each in (8, 4)] + [4 * pixels * 8]
    assert limit.sizes[3] == [4 * pixels // 4 * (16 + each + 16) for each in (16, 8)] + [4 * pixels // 4 * 16]
    assert limit.rest == 4 * pixels * (3 + 8)  # the stem's input, laid out anew, and output
    packed = built(graph, "puzzle", [row[0] for row in space], fmt)
    assert live_bytes(packed, X86(), False) == limit.sum([0] * 4) == 4 * pixels * 24
    counted = amounts(graph, layers, space, fmt)["weight_bytes"]
    assert counted[1] + sum(row[0] for row in counted[0]) == weight_bytes(packed)


def test_memory_limits_the_choice_and_training_goes_before() -> None:
    ctx = Context(samples=SAMPLES, peak_bytes=counted_memory)
    options: dict[str, Any] = {"multiple": 2, "held_out": 0.5, "steps": 2, "batch": 2, "depth": "perplexity"}
    step = Puzzle(peak_memory="1.8 kB", parameters=8000, convolution=SPACE["convolution"], **options)
    chosen = Pipeline([step], [VerifyStages()]).run(captured(), ctx)
    assert counted_memory(chosen, False) <= 1800 < counted_memory(captured(), False)
    assert sum(one.numel() for one in chosen.parameters()) <= 8000
    told = "\n".join(ctx.notes)
    assert "activations are foreseen to take" in told and "held-out error of the state behind it, trained" in told


def test_depth_is_ranked_by_the_classes_that_the_network_predicts() -> None:
    graph = captured()
    parts, space, starts = sorted_space(graph, pictures())
    expected = logits(graph, pictures()).argmax(1)
    losses = {}
    for i in (0, 1, 3):
        picks = [row[-1] if j == i else row[0] for j, row in enumerate(space)]
        losses[i] = float(cross_entropy(logits(masked(graph, parts.layers, picks, starts), pictures()), expected))
    ranked = rank_removals(graph, Context(), "puzzle", parts, space, pictures(), "perplexity")
    assert ranked[0] == min(losses, key=lambda i: losses[i]) and sorted(ranked) == [0, 1, 3]


def test_images_are_timed_on_kernels() -> None:
    recipe = Recipe.from_dict({"model": "reference", "passes": [], "tune": "off"})
    (seconds,), told = Steps(recipe, 1, Silent())([captured()])
    assert 0 < seconds < 1 and told == "measured on this machine, one at a time"


def test_what_slows_the_machine_and_single_steps_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now, numbers, turns = [0.0], itertools.count(), itertools.count()
    monkeypatch.setattr("compressor.run.steps.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def work(seconds: float) -> None:
        """Take four times as long in some of the rounds, in which the whole machine is slower."""
        now[0] += seconds * (4 if next(turns) // (2 * 12) % 3 == 1 else 1)

    def disturbed() -> None:
        work(2e-3 if next(numbers) % 3 else 6e-3)

    rewound, rest = list[str](), lambda: None
    several = [Turn(lambda: rewound.append("first"), lambda: work(1e-3)), Turn(rest, disturbed)]
    assert in_turns(several) == pytest.approx([1e-3, 2e-3])
    assert len(rewound) == next(turns) // (2 * 12) and now[0] > 2 * 2.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_bytes": 100}, "cache_bytes: Net classifies images and has no caches"),
        ({"parameters": 100}, "parameters of at most 100 cannot be met"),
        ({"parameters": 1000, "convolution": ("linear",)}, "it is of convolutions, which look at more than one pixel"),
        ({"parameters": 1000, "multiple": 32}, "the search space is empty"),
        ({"peak_memory": "2 s"}, "peak_memory '2 s': write a number and a unit"),
    ],
)
def test_refusals_before_any_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Puzzle(**{"convolution": ("width:0.5",), "multiple": 2, **options}).requires(captured(), Context())


def test_refusals_of_memory() -> None:
    with pytest.raises(UsageError, match="peak_memory: what kernels hold is not known here"):
        Puzzle(peak_memory=1e4, multiple=2).run(captured(), Context(samples=SAMPLES))
    ctx = Context(samples=SAMPLES, peak_bytes=counted_memory)
    with pytest.raises(UsageError, match=r"peak_memory of at most 500 bytes cannot be met: .* has"):
        Puzzle(peak_memory=500, multiple=2, held_out=0.5).run(captured(), ctx)
    kind, sizes = DECODERS["Llama"]
    with pytest.raises(UsageError, match="peak_memory: of networks of images alone"):
        Puzzle(peak_memory=1e3).requires(capture(make(kind, sizes, True)), Context())
    gpu = Peaks(Recipe.from_dict({"model": "reference", "passes": [], "target": "webgpu"}))
    with pytest.raises(UsageError, match="in programs for CPUs alone, and the target is webgpu"):
        gpu(captured(), False)

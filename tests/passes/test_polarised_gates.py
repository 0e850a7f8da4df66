"""polarised_gates: exact shares, never worse than the start, a small problem's best masks, equal bits after a stop."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import torch
from captures import capture_once
from families import DECODERS, make
from interrupted_training import whole_and_resumed
from packed_models import random_samples
from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.formats.extras import KeptOfGroup, SingleZeros
from compressor.formats.format import Format
from compressor.graph.model import clone_graph
from compressor.graph.sites import linear_sites
from compressor.numerics.sparsity.n_of_m import largest_allowed, largest_entries, pattern_of
from compressor.passes.magnitude import Magnitude
from compressor.passes.polarised_gates import PolarisedGates
from compressor.passes.wanda import Wanda
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.recipe.recipe import load_recipe
from compressor.training.adamw import AdamW
from compressor.training.zeros.gates import Gates

SAMPLES = random_samples(97, 16)
QUICK = PolarisedGates(scheme="W8A16_B1x1@50", steps=12, batch=4, evaluate_every=2, checkpoint_every=5)


@pytest.fixture(scope="module")
def llama() -> GraphModule:
    return capture_once(make(*DECODERS["Llama"], True))


def problem(seed: int) -> tuple[Tensor, Tensor]:
    """Return a weight [2, 6] and inputs, of which magnitude keeps the wrong ones: the two largest cancel out."""
    rng = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(2, 6, generator=rng), torch.randn(64, 6, generator=rng)
    x[:, 1] = x[:, 0] + 0.1 * x[:, 1]
    weight[:, 0] = 3 + weight[:, 0].abs()
    weight[:, 1] = -0.9 * weight[:, 0]
    return weight, x


def all_masks() -> Tensor:
    """Return all masks that keep six of twelve weights, float [924, 2, 6]."""
    sets = torch.tensor(list(itertools.combinations(range(12), 6)))
    return torch.zeros(len(sets), 12).scatter(1, sets, 1.0).view(-1, 2, 6)


def trained(gates: Gates, weight: Tensor, x: Tensor, steps: int, rate: float) -> float:
    """Train gates in the place of "w", and return the loss of what they store."""
    optimiser = AdamW(gates.leaves, 0.0)
    for step in range(1, steps + 1):
        for leaf in gates.leaves.values():
            leaf.grad = torch.zeros_like(leaf)
        loss(gates.fused()["w"], weight, x).backward()
        optimiser.step(step, rate)
        gates.after_step(step, {})
        assert int((gates.stored()["w"] != 0).sum()) == 6, "the share is exact after any step"
    return float(loss(gates.stored()["w"].detach(), weight, x))


def loss(values: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    return ((values - weight) @ x.t()).square().mean(-1).sum(-1)


def test_training_finds_the_best_masks_of_a_small_problem() -> None:
    """Gates end with the best of all 924 masks in most of ten problems, and do not without polarisation."""
    best, sums, masks = [0, 0], [0.0, 0.0, 0.0], all_masks()
    for seed in range(10):
        weight, x = problem(seed)
        least = float(((weight * masks - weight) @ x.t()).square().mean(-1).sum(-1).min())
        for place, polarisation in enumerate((1.0, 0.0)):
            own, first = {"w": weight}, {"w": weight.square().log()}
            gates = Gates(own, first, SingleZeros(50), 150, lambda _: 0.3, polarisation, 1.0, False)
            start = float(loss(gates.stored()["w"], weight, x))
            found = trained(gates, weight, x, 150, 0.3)
            assert start > 1.2 * least and found >= 0.9999 * least
            best[place] += found <= 1.0001 * least
            sums[place] += found
        sums[2] += least
    assert best[0] >= 6 > best[1] and sums[0] < 1.15 * sums[2] < sums[1]


def test_weights_that_are_trained_come_near_to_the_best_of_all_masks_and_weights() -> None:
    """The best weights for a mask are a least squares solution."""
    ratios = []
    for seed in range(5):
        weight, x = problem(seed)
        y = x @ weight.t()
        fitted = []  # [masks of a row]: kept weights, and the least error
        for mask in itertools.product((False, True), repeat=6):
            read = x[:, torch.tensor(mask)]
            fitted.append((sum(mask), (read @ torch.linalg.lstsq(read, y).solution - y).square().mean(0)))
        least = min(float(a[0] + b[1]) for m, a in fitted for n, b in fitted if m + n == 6)
        first = {"w": weight.square().log()}
        gates = Gates({"w": weight.clone()}, first, SingleZeros(50), 300, lambda _: 0.03, 1.0, 10.0, True)
        found = trained(gates, weight, x, 300, 0.03)
        ratios.append(found / least)
        assert found >= 0.9999 * least
    assert sum(ratio <= 1.0001 for ratio in ratios) >= 3 and sum(ratios) <= 1.2 * len(ratios)


def dense_step(weight: Tensor, first: Tensor, x: Tensor, rates: list[float], rho: float) -> tuple[Tensor, Tensor]:
    """Return scores and what is kept of a share of a half after two steps, in plain float64: an oracle."""
    s = first.double()
    s = (s - s.flatten().sort().values[5:7].mean()).clamp(-5, 5)
    mean, square = torch.zeros_like(s), torch.zeros_like(s)
    for t, rate in enumerate(rates, 1):
        leaf = s.clone().requires_grad_()
        loss(weight.double() * leaf.sigmoid(), weight.double(), x.double()).backward()
        g = leaf.grad
        assert g is not None
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
        kept = s > 0
        s = s - rate * (mean / (1 - 0.9**t)) / ((square / (1 - 0.999**t)).sqrt() + 1e-8)
        s = s + torch.where(kept, 1.0, -1.0) * rate * rho * t / len(rates)
        s = (s - s.flatten().sort().values[5:7].mean()).clamp(-5, 5)
    return s, s > 0


def test_a_step_is_that_of_the_formula() -> None:
    weight, x = problem(4)
    rates = [0.4, 0.7, 0.5]
    scores, kept = dense_step(weight, weight.square().log(), x, rates, 0.8)
    gates = Gates(
        {"w": weight}, {"w": weight.square().log()}, SingleZeros(50), 3, lambda step: rates[step], 0.8, 1.0, False
    )
    optimiser = AdamW(gates.leaves, 0.0)
    for step, rate in enumerate(rates, 1):
        leaf = gates.leaves["w.scores"]
        leaf.grad = torch.zeros_like(leaf)
        loss(gates.fused()["w"], weight, x).backward()
        optimiser.step(step, rate)
        gates.after_step(step, {})
    assert torch.allclose(gates.leaves["w.scores"].view_as(weight).double(), scores, atol=1e-5)
    assert torch.equal(gates.stored()["w"] != 0, kept)


@pytest.mark.parametrize("trains_weights", [True, False])
def test_gates_are_decided_in_the_end(trains_weights: bool) -> None:
    """Gates of 2:4 that begin near the middle tend to what is stored, and two weights of each group are kept."""
    rng, steps = torch.Generator().manual_seed(0), 30
    weight = torch.randn(16, 32, generator=rng)
    own, first, pattern = {"w": weight.clone()}, {"w": weight.square().log()}, KeptOfGroup(2, 4)
    gates = Gates(own, first, pattern, steps, lambda _: 0.01, 1.0, 100.0, trains_weights)
    assert torch.equal(gates.stored()["w"] != 0, largest_allowed(weight.square(), pattern))
    apart = []
    for step in range(steps + 1):
        apart.append(float((gates.fused()["w"] - gates.stored()["w"]).detach().abs().max()))
        gates.after_step(step + 1, {})
    assert apart[0] > 0.2 and apart[19] < 0.02 * float(weight.abs().max())
    assert (apart[20] == 0) == trains_weights, "weights settle without gates"
    assert set((gates.stored()["w"] != 0).view(16, -1, 4).sum(-1).flatten().tolist()) == {2}


@pytest.mark.parametrize("scheme", ["W8A16_B1x1@50", "W8A16_B1x1@70", "W8A16_2:4"])
def test_it_keeps_the_share_and_is_never_worse_than_the_start(llama: GraphModule, scheme: str) -> None:
    train = dataclasses.replace(QUICK, scheme=scheme, train_weights=scheme != "W8A16_B1x1@70")
    ctx = Context(samples=SAMPLES)
    graph = Pipeline([train], [VerifyStages()]).run(clone_graph(llama), ctx)
    pattern = pattern_of(Format.parse(scheme))
    assert pattern is not None
    moved = False
    for site in linear_sites(graph):
        dense, weight = (of.get_parameter(site.weight_name).detach() for of in (llama, graph))
        kept = weight != 0
        if isinstance(pattern, SingleZeros):
            assert int(kept.sum()) == pattern.kept(*weight.shape)
        else:
            assert set(kept.view(len(weight), -1, 4).sum(-1).flatten().tolist()) == {2}
        moved |= not torch.equal(weight[kept], dense[kept])
    assert moved == train.train_weights
    if train.train_weights:
        first, last = map(float, re.findall(r"held-out loss (\S+) at the start, (\S+) after", ctx.notes[0])[0])
        assert last < first
    packed = Pipeline([Magnitude(scheme)], [VerifyStages()]).run(graph, ctx)
    assert not linear_sites(packed) and {record.format for record in ctx.records if record.format} == {scheme}


def test_a_training_that_harms_ends_with_the_start(llama: GraphModule) -> None:
    """That is Wanda's choice."""
    ctx = Context(samples=SAMPLES)
    harms = dataclasses.replace(QUICK, learning_rate=10.0, polarisation=0.0)
    graph = Pipeline([harms]).run(clone_graph(llama), ctx)
    sites = linear_sites(llama)
    squares = harms.input_squares(llama, ctx, sites)
    for site in sites:
        weight, found = (of.get_parameter(site.weight_name).detach() for of in (llama, graph))
        assert torch.equal(found, weight * largest_entries(weight, squares[site.weight_name].diag(), SingleZeros(50)))
    assert "no state had a smaller held-out loss than the start" in ctx.notes[0] and "it stays" in ctx.notes[0]


@pytest.mark.parametrize("step", [7, 11])
def test_an_interrupted_run_goes_on_to_the_same_bits(llama: GraphModule, tmp_path: Path, step: int) -> None:
    # Steps 7 and 11 are behind checkpoints at 5 and 10; the gates of the latter do not change any more.
    train = dataclasses.replace(QUICK, batch=2, accumulate=2, learning_rate=3e-3, vectors=True)
    found = whole_and_resumed(
        lambda ctx: Pipeline([train]).run(clone_graph(llama), ctx), tmp_path, step, samples=SAMPLES
    )
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_equal_scores_come_back_from_a_checkpoint_as_they_were() -> None:
    """A checkpoint restores its choice among equal scores: a choice made anew could be another one."""
    weight = torch.ones(4, 4)
    rows = torch.arange(16).view(4, 4) % 2 == 1
    gates = Gates({"w": weight}, {"w": weight}, SingleZeros(50), 4, lambda _: 0.1, 1.0, 1.0, False)
    gates.restore({"step": torch.tensor(1), "w": rows})
    assert torch.equal(gates.stored()["w"], rows.float()) and int(gates.state()["step"]) == 1


def test_the_passes_of_the_shipped_recipe_run(llama: GraphModule) -> None:
    changes = ["passes.polarised_gates.steps=2", "passes.polarised_gates.batch=1"]
    recipe = load_recipe("polarised_gates_w8a16_x86", changes)
    graph = Pipeline(recipe.passes, [VerifyStages()]).run(clone_graph(llama), Context(samples=SAMPLES))
    assert not [site for site in linear_sites(graph) if site.name != "lm_head"]


def test_bad_input(llama: GraphModule) -> None:
    with pytest.raises(UsageError, match="polarised_gates: scheme W8A16_B16x1@50 leaves no single weights out"):
        PolarisedGates(scheme="W8A16_B16x1@50")
    with pytest.raises(UsageError, match="polarised_gates: polarisation -1 is not from 0 to 1000"):
        PolarisedGates(scheme="W8A16_B1x1@50", polarisation=-1)
    with pytest.raises(UsageError, match="polarised_gates: gate_speed 0 is not above 0"):
        PolarisedGates(scheme="W8A16_B1x1@50", gate_speed=0)
    with pytest.raises(UsageError, match="polarised_gates: steps 0"):
        PolarisedGates(scheme="W8A16_2:4", steps=0)
    with pytest.raises(UsageError, match="q_proj: 1:7: rows of 64 weights do not divide into groups of 7"):
        PolarisedGates(scheme="W8A16_1:7").requires(llama, Context(samples=SAMPLES))
    pruned = Pipeline([Wanda("W8A16_B1x1@50", pack=False)]).run(clone_graph(llama), Context(samples=SAMPLES))
    with pytest.raises(UsageError, match="q_proj has the zeros of W8A16_B1x1@50 already"):
        QUICK.run(pruned, Context(samples=SAMPLES))
    QUICK.plan(planned := clone_graph(llama), Context())
    with pytest.raises(UsageError, match="q_proj has the zeros of W8A16_B1x1@50 already"):
        QUICK.requires(planned, Context())

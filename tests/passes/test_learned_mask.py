"""learned_mask: N of every M, never worse than the start, a small problem's best masks, equal bits after a stop."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from families import DECODERS, make
from interrupted_training import whole_and_resumed
from packed_models import random_samples
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.errors import CompressorError, UsageError
from compressor.formats.extras import KeptOfGroup
from compressor.graph.model import clone_graph
from compressor.graph.sites import linear_sites
from compressor.numerics.sparsity.n_of_m import largest_of_groups
from compressor.passes.learned_mask import LearnedMask
from compressor.passes.magnitude import Magnitude
from compressor.passes.wanda import Wanda
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.recipe.recipe import load_recipe
from compressor.training.adamw import AdamW
from compressor.training.zeros.choices import Choices

SAMPLES = random_samples(97, 16)
QUICK = LearnedMask("W8A16_2:4", steps=12, batch=4, evaluate_every=2, checkpoint_every=5)


@pytest.fixture(scope="module")
def llama() -> GraphModule:
    return capture(make(*DECODERS["Llama"], True))


def test_training_finds_the_best_masks_of_a_small_problem() -> None:
    """All masks of a row can be tried.  The two largest weights of a group cancel out: best is to keep the others."""
    rng, pattern, steps = torch.Generator().manual_seed(0), KeptOfGroup(2, 4), 200
    weight, x = torch.randn(8, 8, generator=rng), torch.randn(64, 8, generator=rng)
    x[:, 1::4] = x[:, ::4] + 0.1 * x[:, 1::4]
    weight[:, ::4] = 3 + weight[:, ::4].abs()
    weight[:, 1::4] = -0.9 * weight[:, ::4]
    pairs = [torch.zeros(4).index_fill(0, torch.tensor(pair), 1.0) for pair in itertools.combinations(range(4), 2)]
    masks = torch.stack([torch.cat(two) for two in itertools.product(pairs, pairs)])  # [36, 8]

    def losses(values: torch.Tensor) -> torch.Tensor:
        return ((values - weight) @ x.t()).square().mean(-1)

    least = torch.stack([losses(weight * mask) for mask in masks]).amin(0)
    start = largest_of_groups(weight.abs(), pattern)
    choices = Choices({"w": weight}, {"w": start}, pattern, steps, seed=1)
    assert torch.equal(choices.kept("w"), start)
    optimiser = AdamW(choices.leaves, 0.0)
    for step in range(1, steps + 1):
        choices.leaves["w.logits"].grad = None
        losses(choices.fused()["w"]).sum().backward()
        optimiser.step(step, 0.1)
        choices.after_step(step, {})
    found = losses(choices.stored()["w"])
    assert bool((losses(weight * start) > 1.3 * least).all())
    assert bool((found <= 1.1 * least).all()) and int((found <= 1.00001 * least).sum()) >= 7, "all but one near tie"


def test_draws_differ_and_end_as_what_is_stored() -> None:
    rng, pattern = torch.Generator().manual_seed(0), KeptOfGroup(1, 4)
    weight = torch.randn(16, 32, generator=rng)
    choices = Choices({"w": weight}, {"w": largest_of_groups(weight.abs(), pattern)}, pattern, 10, seed=1)
    first, second = (choices.fused()["w"] for _ in range(2))
    assert not torch.equal(first, second)
    choices.after_step(0, {})
    assert torch.equal(choices.fused()["w"], first), "noise follows from the step and the batch"
    choices.leaves["w.logits"].data *= 10
    choices.after_step(9, {})
    assert torch.allclose(choices.fused()["w"], choices.stored()["w"], atol=1e-4)


def test_it_keeps_two_of_four_and_is_never_worse_than_the_start(llama: GraphModule) -> None:
    ctx = Context(samples=SAMPLES)
    graph = Pipeline([QUICK], [VerifyStages()]).run(clone_graph(llama), ctx)
    dense = {site.name: llama.get_parameter(site.weight_name).detach() for site in linear_sites(llama)}
    for site in linear_sites(graph):
        weight = graph.get_parameter(site.weight_name).detach()
        kept = weight != 0
        assert set(kept.view(len(weight), -1, 4).sum(-1).flatten().tolist()) == {2}
        assert torch.equal(weight[kept], dense[site.name][kept])
    assert "held-out loss" in ctx.notes[0]
    packed = Pipeline([Magnitude(QUICK.scheme)], [VerifyStages()]).run(graph, ctx)
    assert not linear_sites(packed) and {record.format for record in ctx.records if record.format} == {QUICK.scheme}


def test_an_interrupted_run_goes_on_to_the_same_bits(llama: GraphModule, tmp_path: Path) -> None:
    # Step 7 is two behind a checkpoint; two batches a step have noise of their own.
    train = LearnedMask("W8A16_2:4", steps=12, batch=2, accumulate=2, evaluate_every=2, checkpoint_every=5)
    found = whole_and_resumed(lambda ctx: Pipeline([train]).run(clone_graph(llama), ctx), tmp_path, 7, samples=SAMPLES)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_the_passes_of_the_shipped_recipe_run(llama: GraphModule) -> None:
    recipe = load_recipe("learned_mask_w8a16_2of4_x86", ["passes.learned_mask.steps=2", "passes.learned_mask.batch=1"])
    ctx = Context(samples=SAMPLES)
    graph = Pipeline(recipe.passes, [VerifyStages()]).run(clone_graph(llama), ctx)
    assert not [site for site in linear_sites(graph) if site.name != "lm_head"]


def test_bad_input(llama: GraphModule) -> None:
    with pytest.raises(UsageError, match="learned_mask: scheme W8A16_B16x1@50 does not keep N of every M"):
        LearnedMask("W8A16_B16x1@50")
    with pytest.raises(UsageError, match="learned_mask: steps 0"):
        LearnedMask("W8A16_2:4", steps=0)
    with pytest.raises(UsageError, match="q_proj: 1:7: rows of 64 weights do not divide into groups of 7"):
        LearnedMask("W8A16_1:7").requires(llama, Context(samples=SAMPLES))
    with pytest.raises(CompressorError, match="q_proj has the zeros of W8A16_2:4 already"):
        Pipeline([Wanda("W8A16_2:4", pack=False), QUICK]).run(clone_graph(llama), Context(samples=SAMPLES))

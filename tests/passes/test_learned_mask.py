"""learned_mask: begins with ALPS's weights, never worse than these, a small problem's best masks, equal bits
after a stop.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from captures import capture_once
from families import DECODERS, make
from interrupted_training import whole_and_resumed
from packed_models import drop_weights, random_samples
from torch.fx import GraphModule

from compressor.data.text import Samples, tokens_sha256
from compressor.errors import UsageError
from compressor.formats.extras import KeptOfGroup
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import linear_sites
from compressor.numerics.sparsity.n_of_m import largest_of_groups
from compressor.passes.alps import Alps
from compressor.passes.learned_mask import LearnedMask
from compressor.passes.magnitude import Magnitude
from compressor.passes.wanda import Wanda
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.segment_cache import SegmentCache
from compressor.plan.model import PassPlan
from compressor.plan.stages import _streaming
from compressor.plan.streaming import plan_calibration
from compressor.recipe.recipe import load_recipe
from compressor.training.adamw import AdamW
from compressor.training.zeros.choices import Choices

SAMPLES = random_samples(97, 16)
IDS = torch.randint(3, 9, (32, 24), generator=torch.Generator().manual_seed(0))  # few words: something can be learned
WORDS = Samples(IDS, IDS.flatten(), tokens_sha256(IDS), "random tokens")
ORDER = torch.randperm(32, generator=torch.Generator().manual_seed(0))  # of the seed 0; the first are held out
QUICK = LearnedMask(scheme="W8A16_2:4", steps=12, batch=4, evaluate_every=2, checkpoint_every=5)
PLAIN = dataclasses.replace(QUICK, refit=False, learning_rate=0.3)


@pytest.fixture(scope="module")
def llama() -> GraphModule:
    return capture_once(make(*DECODERS["Llama"], True))


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


def test_without_refitting_weights_stay_what_they_are(llama: GraphModule) -> None:
    ctx = Context(samples=SAMPLES)
    graph = Pipeline([PLAIN], [VerifyStages()]).run(clone_graph(llama), ctx)
    dense = {site.name: llama.get_parameter(site.weight_name).detach() for site in linear_sites(llama)}
    for site in linear_sites(graph):
        weight = graph.get_parameter(site.weight_name).detach()
        kept = weight != 0
        assert set(kept.view(len(weight), -1, 4).sum(-1).flatten().tolist()) == {2}
        assert torch.equal(weight[kept], dense[site.name][kept])
    assert "held-out loss" in ctx.notes[0]
    packed = Pipeline([Magnitude(QUICK.scheme)], [VerifyStages()]).run(graph, ctx)
    assert not linear_sites(packed) and {record.format for record in ctx.records if record.format} == {QUICK.scheme}


@pytest.fixture(scope="module")
def larger(llama: GraphModule) -> GraphModule:
    """Return a model whose predictions differ enough for something to be learned."""
    graph = clone_graph(llama)
    for site in linear_sites(graph):
        set_parameter(graph, site.weight_name, 8 * graph.get_parameter(site.weight_name).detach())
    return graph


@pytest.fixture(scope="module")
def refitted(larger: GraphModule) -> dict[str, torch.Tensor]:
    """Return what ALPS makes of each linear on the 29 samples that are trained on: the oracle of the start."""
    ids = WORDS.ids[ORDER[3:]]
    ctx = Context(samples=dataclasses.replace(WORDS, ids=ids, sha256=tokens_sha256(ids)))
    made = Pipeline([Alps(QUICK.scheme, pack=False)]).run(clone_graph(larger), ctx)
    return {site.name: made.get_parameter(site.weight_name).detach() for site in linear_sites(made)}


def test_it_begins_with_alps_and_brings_back_dense_weights(
    larger: GraphModule, refitted: dict[str, torch.Tensor]
) -> None:
    ctx = Context(samples=WORDS)
    step = LearnedMask(scheme="W8A16_2:4", learning_rate=0.1, steps=60, batch=16, evaluate_every=10)
    graph = Pipeline([step], [VerifyStages()]).run(clone_graph(larger), ctx)
    back = 0
    for site in linear_sites(graph):
        weight, first = graph.get_parameter(site.weight_name).detach(), refitted[site.name]
        dense, kept = larger.get_parameter(site.weight_name).detach(), weight != 0
        assert set(kept.view(len(weight), -1, 4).sum(-1).flatten().tolist()) == {2}
        assert torch.equal(weight[kept], torch.where(first != 0, first, dense)[kept])
        back += int((kept & (first == 0)).sum())
    assert back > 10
    assert ctx.notes[0] == "learned_mask: begins with alps on 29 samples, without the 3 that are held out"
    begun, best = (float(ctx.notes[1].split(word)[0].split()[-1].strip(",")) for word in (" at the start", " after"))
    assert best < 0.99 * begun


@pytest.mark.parametrize("held_out", ["as they are", "others"])
def test_the_start_stays_where_steps_lead_astray_and_held_out_samples_have_no_part_in_it(
    held_out: str, larger: GraphModule, refitted: dict[str, torch.Tensor]
) -> None:
    ids = WORDS.ids.clone()
    if held_out == "others":
        ids[ORDER[:3]] = WORDS.ids[ORDER[3:6]]
    ctx = Context(samples=dataclasses.replace(WORDS, ids=ids, sha256=tokens_sha256(ids)))
    astray = LearnedMask(scheme="W8A16_2:4", steps=2, learning_rate=1e4, evaluate_every=1)
    graph = Pipeline([astray]).run(clone_graph(larger), ctx)
    assert ": it stays" in ctx.notes[1]
    for site in linear_sites(graph):
        assert torch.equal(graph.get_parameter(site.weight_name).detach(), refitted[site.name])


def test_what_the_start_says_is_reported_in_every_run(llama: GraphModule, tmp_path: Path) -> None:
    """7 samples of 3 tokens are too few for Hessians of 64 inputs; what comes from the cache says so as well."""
    few = random_samples(97, 3)
    step = dataclasses.replace(QUICK, steps=2, batch=1)
    runs = []
    for _ in range(2):
        ctx = Context(samples=few, results=SegmentCache(tmp_path), state="model")
        Pipeline([step]).run(clone_graph(llama), ctx)
        runs.append(ctx)
    first, second = runs
    assert all("at the start: calibrated on " in record.note for record in first.records) and first.records
    assert (first.records, first.notes) == (second.records, second.notes)
    assert (first.reused, second.reused) == (0, second.blocks) and second.blocks > 1


def test_a_plan_counts_the_start(llama: GraphModule) -> None:
    recipe = load_recipe("learned_mask_w8a16_2of4_x86")
    works = []
    for refit in (True, False):
        meta = clone_graph(llama)
        drop_weights(meta)
        step = LearnedMask(scheme="W8A16_2:4", ignore="lm_head", refit=refit)
        plans = step.plan(meta, Context())
        assert [plan.site for plan in plans if plan.note == "is trained"] and not any(plan.format for plan in plans)
        passes = PassPlan(1, "learned_mask", tuple(plans), 0, True, training=step.training)
        streaming = _streaming(passes, meta, recipe)
        assert streaming is not None
        works.append(streaming.work)
    both, training = works
    meta = clone_graph(llama)
    drop_weights(meta)
    assert recipe.calibration is not None
    pruning = Alps("W8A16_2:4", ignore="lm_head", pack=False).plan(meta, Context())
    calibration = plan_calibration(meta, pruning, recipe.calibration.samples, recipe.calibration.sequence_length).work
    assert calibration["factor64_flop"] > 0
    for unit in both:
        assert both[unit] == pytest.approx(training.get(unit, 0) + calibration.get(unit, 0))


def test_an_interrupted_run_goes_on_to_the_same_bits(llama: GraphModule, tmp_path: Path) -> None:
    # Step 7 is two behind a checkpoint; two batches a step have noise of their own.
    train = LearnedMask(scheme="W8A16_2:4", steps=12, batch=2, accumulate=2, evaluate_every=2, checkpoint_every=5)
    found = whole_and_resumed(lambda ctx: Pipeline([train]).run(clone_graph(llama), ctx), tmp_path, 7, samples=SAMPLES)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_the_passes_of_the_shipped_recipe_run(llama: GraphModule) -> None:
    recipe = load_recipe("learned_mask_w8a16_2of4_x86", ["passes.learned_mask.steps=2", "passes.learned_mask.batch=1"])
    ctx = Context(samples=SAMPLES)
    graph = Pipeline(recipe.passes, [VerifyStages()]).run(clone_graph(llama), ctx)
    assert not [site for site in linear_sites(graph) if site.name != "lm_head"]


def test_bad_input(llama: GraphModule) -> None:
    with pytest.raises(UsageError, match="learned_mask: scheme W8A16_B16x1@50 does not keep N of every M"):
        LearnedMask(scheme="W8A16_B16x1@50")
    with pytest.raises(UsageError, match="learned_mask: steps 0"):
        LearnedMask(scheme="W8A16_2:4", steps=0)
    with pytest.raises(UsageError, match="q_proj: 1:7: rows of 64 weights do not divide into groups of 7"):
        LearnedMask(scheme="W8A16_1:7").requires(llama, Context(samples=SAMPLES))
    pruned = Pipeline([Wanda("W8A16_2:4", pack=False)]).run(clone_graph(llama), Context(samples=SAMPLES))
    with pytest.raises(UsageError, match=r"q_proj has the zeros of W8A16_2:4 already, .* in front of those that prune"):
        QUICK.run(pruned, Context(samples=SAMPLES))
    one = dataclasses.replace(SAMPLES, ids=SAMPLES.ids[:1])
    with pytest.raises(UsageError, match="1 sample leaves none to be held out"):
        QUICK.run(clone_graph(llama), Context(samples=one))

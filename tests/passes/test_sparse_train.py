"""sparse_train: blocks by the schedule, all tiles alike, fixed in the last third; an interrupted run's bits."""

from __future__ import annotations

from dataclasses import replace
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
from compressor.graph.model import clone_graph
from compressor.graph.sites import linear_sites
from compressor.numerics.sparsity.block_sparsity import of_tiles
from compressor.passes.magnitude import Magnitude
from compressor.passes.sparse_train import SparseTrain
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.recipe.recipe import load_recipe
from compressor.training.zeros.masks import GrowingBlocks

SAMPLES = random_samples(97, 16)
SCHEME = "W8A16_B16x1@75"
QUICK = SparseTrain(scheme=SCHEME, steps=12, batch=4, evaluate_every=2, checkpoint_every=5)
BY_ADMM = replace(QUICK, method="admm", project_every=3)


@pytest.fixture(scope="module")
def llama() -> GraphModule:
    return capture_once(make(*DECODERS["Llama"], True))


def left(weight: Tensor) -> Tensor:
    """Return which blocks are not zero, bool [tiles, in]."""
    return of_tiles(weight.abs()) > 0


def test_blocks_go_by_the_schedule_and_stay_away() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(40, 64, generator=generator)}
    masks = GrowingBlocks(weights, {"w": 8}, {"w": torch.ones(64)}, steps=30)
    before = torch.ones(3, 64, dtype=torch.bool)
    for step in range(1, 31):
        weights["w"].grad = torch.ones(40, 64)
        masks.before_step(weights)
        weights["w"] += 0.1 * weights["w"].grad
        masks.after_step(step, weights)
        now = left(weights["w"])
        expected = 8 + int(56 * (1 - min(20, step if step % 4 == 0 else step - step % 4) / 20) ** 3)
        assert now.sum(1).tolist() == [expected] * 3, f"step {step}: all tiles alike"
        assert not bool((now & ~before).any()) and masks.is_final(step) == (step >= 20)
        if step > 20:
            assert torch.equal(now, before)
        before = now
    assert int(before.sum()) == 24


@pytest.mark.parametrize("train", [QUICK, BY_ADMM], ids=lambda train: train.method)
def test_it_ends_at_the_share_and_is_packed_with_these_zeros(train: SparseTrain, llama: GraphModule) -> None:
    graph, ctx = clone_graph(llama), Context(samples=SAMPLES)
    graph = Pipeline([train], [VerifyStages()]).run(graph, ctx)
    for site in linear_sites(graph):
        assert set(left(graph.get_parameter(site.weight_name).detach()).sum(1).tolist()) == {16}
    assert "held-out loss" in ctx.notes[0] and " after step 8, " in ctx.notes[0]
    graph = Pipeline([Magnitude(SCHEME)], [VerifyStages()]).run(graph, ctx)
    packed = [record for record in ctx.records if record.format]
    assert {record.format for record in packed} == {SCHEME} and max(record.error for record in packed) < 1e-3


@pytest.mark.parametrize("train", [QUICK, BY_ADMM], ids=lambda train: train.method)
def test_an_interrupted_run_goes_on_to_the_same_bits(train: SparseTrain, llama: GraphModule, tmp_path: Path) -> None:
    # Step 7 is two behind a checkpoint.
    found = whole_and_resumed(lambda ctx: Pipeline([train]).run(clone_graph(llama), ctx), tmp_path, 7, samples=SAMPLES)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("finetune_w4a16_x86", "finetune"),
        ("sparse_train_w8a16_x86", "sparse_train"),
        ("relu_sparse_w8a16_x86", "relu_sparse"),
    ],
)
def test_the_passes_of_the_shipped_recipes_run(name: str, step: str, llama: GraphModule) -> None:
    """Their bundles are made as those of other recipes, which test_run.py makes."""
    overrides = [f"passes.{step}.steps=2", f"passes.{step}.batch=1"]
    overrides += ["passes.gptq.scheme=W4A16_G32", "passes.ffn_prune.multiple=16"] if step == "finetune" else []
    recipe, ctx = load_recipe(name, overrides), Context(samples=SAMPLES)
    graph = Pipeline(recipe.passes, [VerifyStages()]).run(clone_graph(llama), ctx)
    assert {record.pass_name for record in ctx.records if not record.format} >= {step}
    assert not [site for site in linear_sites(graph) if site.name != "lm_head"]


def test_a_plan_counts_the_copies_of_admm(llama: GraphModule) -> None:
    plain, drawn = (train.plan(llama, Context(samples=SAMPLES))[0].working_bytes for train in (QUICK, BY_ADMM))
    assert drawn == plain / 7 * 9


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="sparse_train: scheme W8A16 leaves no blocks out"):
        SparseTrain(scheme="W8A16")
    with pytest.raises(UsageError, match="sparse_train: steps 0"):
        SparseTrain(scheme=SCHEME, steps=0)
    with pytest.raises(UsageError, match="sparse_train: method fast is none of cubic, admm"):
        SparseTrain(scheme=SCHEME, method="fast")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="sparse_train: penalty 0 is not above 0"):
        SparseTrain(scheme=SCHEME, method="admm", penalty=0.0)
    with pytest.raises(UsageError, match="sparse_train: project_every 0"):
        SparseTrain(scheme=SCHEME, method="admm", project_every=0)

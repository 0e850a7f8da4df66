"""magnitude, wanda, sparsegpt and alps: plan, records and weights agree; dense formats of the same bytes are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from captures import capture_once
from families import DECODERS, make
from packed_models import drop_weights, random_samples
from torch.fx import GraphModule

from compressor.calibration.statistics import Hessian
from compressor.data.text import load_samples
from compressor.errors import UsageError
from compressor.formats.extras import SingleZeros
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, dequantize, kept_places, kept_singles
from compressor.graph.model import clone_graph
from compressor.graph.sites import linear_sites, packed_weight_sites
from compressor.numerics.sparsity.pruning_costs import smaller_dense
from compressor.passes.alps import Alps
from compressor.passes.gptq import Gptq
from compressor.passes.magnitude import Magnitude
from compressor.passes.sparsegpt import Sparsegpt
from compressor.passes.wanda import Wanda
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.pipeline.segment_cache import SegmentCache
from compressor.recipe.recipe import load_recipe

SAMPLES = random_samples(97, 32)
SCHEME = "W8A16_B16x1@50"
PASSES = [Magnitude(SCHEME), Wanda(SCHEME), Sparsegpt(SCHEME), Alps(SCHEME), Alps(WIDE := "W8A8_B32x64@50")]


@pytest.fixture(scope="module")
def llama() -> GraphModule:
    return capture_once(make(*DECODERS["Llama"], True))


def packed_weights(graph: GraphModule) -> dict[str, PackedWeight]:
    found = {}
    for site in packed_weight_sites(graph):
        parts = [graph.get_parameter(str(part.target)).detach() for part in site.node.args[1]]  # type: ignore[union-attr]
        fmt = Format.parse(str(site.node.args[3]))
        found[site.name] = PackedWeight.of(parts, fmt, (site.out_features, site.in_features))
    return found


@pytest.mark.parametrize("step", PASSES, ids=lambda step: f"{type(step).__name__} {step.scheme}")
def test_plan_records_and_weights_agree(step: Pass, llama: GraphModule) -> None:
    graph, ctx = clone_graph(llama), Context(samples=SAMPLES)
    names = [site.name for site in linear_sites(graph)]
    meta = clone_graph(graph)
    drop_weights(meta)
    plans = {plan.site: plan for plan in step.plan(meta, Context()) or ()}
    pruned = Pipeline([step], [VerifyStages()]).run(graph, ctx)
    assert [record.site for record in ctx.records] == names and set(plans) == set(names)
    for record in ctx.records:
        plan = plans[record.site]
        assert (record.format, record.bytes_after) == (plan.format, plan.bytes_after) == (step.scheme, plan.bytes_after)
        assert record.error_of == "output" and 0 < record.error < 1
    for packed in packed_weights(pruned).values():
        blocks = torch.nn.functional.pad(dequantize(packed), (0, 0, 0, -packed.shape[0] % 16)).unflatten(0, (-1, 16))
        assert int(blocks.any(1).sum(1).max()) <= packed.format.stored_columns(packed.shape[1])


@pytest.mark.parametrize(("step", "scheme"), [
    (Magnitude, "W8A16_2:4"), (Wanda, "W8A16_1:4"), (Sparsegpt, "W4A16_G32_2:4"), (Alps, "W8A16_4:8"),
    (Magnitude, "W8A16_B1x1@50"), (Wanda, "W4A16_G32_B1x1@70"), (Sparsegpt, "W8A8_B1x1@50"), (Alps, "NVFP4_B1x1@70"),
])  # fmt: skip
def test_single_weights_are_left_out(step: Callable[..., Pass], scheme: str, llama: GraphModule) -> None:
    meta, ctx, given = clone_graph(llama), Context(samples=SAMPLES), step(scheme, targets="re:.*layers.0")
    drop_weights(meta)
    plans = {plan.site: plan for plan in given.plan(meta, Context()) or () if plan.format}
    pruned = Pipeline([given], [VerifyStages()]).run(clone_graph(llama), ctx)
    assert {record.site: record.bytes_after for record in ctx.records} == {
        name: plan.bytes_after for name, plan in plans.items()
    }
    for packed in packed_weights(pruned).values():
        assert packed.format.name == scheme
        if (single := packed.format.extra(SingleZeros)) is not None:
            places = kept_singles(packed).float()
            assert int(places.sum()) == single.kept(*packed.shape)
        else:
            kept, size = map(int, scheme.rpartition("_")[2].split(":"))
            places = torch.zeros(packed.shape).scatter(1, kept_places(packed), 1.0)
            assert bool((places.unflatten(1, (-1, size)).sum(-1) == kept).all())
        assert not bool(dequantize(packed)[places == 0].any())
    assert all(0 < record.error < 1 for record in ctx.records)


@pytest.mark.parametrize("scheme", ["W8A16_2:4", "W8A16_B1x1@50"])
def test_a_weight_that_has_the_pattern_keeps_it(scheme: str, llama: GraphModule) -> None:
    ctx, only = Context(samples=SAMPLES), {"targets": "re:.*layers.0.self_attn.q_proj"}
    masked = Pipeline([Sparsegpt(scheme, pack=False, **only)]).run(clone_graph(llama), ctx)
    weight = masked.get_parameter("model.layers.0.self_attn.q_proj.weight").detach().clone()
    packed = Pipeline([Magnitude(scheme, **only)]).run(masked, ctx)
    (found,) = packed_weights(packed).values()
    assert not bool(dequantize(found)[weight == 0].any()) and int((weight == 0).sum()) == weight.numel() // 2


def test_rows_that_are_no_groups_are_named(llama: GraphModule) -> None:
    with pytest.raises(UsageError, match="q_proj: 1:7: rows of 64 weights do not divide into groups of 7"):
        Wanda("W8A16_1:7").plan(clone_graph(llama), Context())


def test_rows_that_are_not_whole_blocks_are_named() -> None:
    narrow = capture_once(make(DECODERS["Llama"][0], {**DECODERS["Llama"][1], "intermediate_size": 96}, True))
    with pytest.raises(UsageError, match=r"down_proj: .*rows of 96 weights are not whole blocks of 64 columns"):
        Magnitude(WIDE).plan(narrow, Context())


def test_refitting_pays(llama: GraphModule) -> None:
    """The first linear sees the same inputs in both runs."""
    errors = []
    for refit in (True, False):
        ctx = Context(samples=SAMPLES)
        Pipeline([Sparsegpt(SCHEME, targets="re:.*layers.0.self_attn.q_proj", refit=refit)]).run(
            clone_graph(llama), ctx
        )
        errors.append(ctx.records[0].error)
    assert errors[0] < errors[1]


def test_dense_formats_that_do_better_are_named(llama: GraphModule) -> None:
    ctx = Context(samples=SAMPLES)
    Pipeline([Wanda(SCHEME)]).run(clone_graph(llama), ctx)
    dense = smaller_dense(Format.parse(SCHEME), 64, 64)
    assert dense is not None and dense.packed_bytes(64, 64) <= Format.parse(SCHEME).packed_bytes(64, 64)
    rivals, by_gptq = Context(samples=SAMPLES), Gptq(dense.name, actorder=False, match_dense=True)
    Pipeline([by_gptq]).run(clone_graph(llama), rivals)
    first, rival = ctx.records[0], rivals.records[0]
    assert (rival.error < first.error) == (dense.name in (first.note or ""))
    assert any("in a dense format of no more bytes" in note for note in ctx.notes)


@pytest.mark.parametrize("step", [Sparsegpt(SCHEME), Alps(SCHEME), Wanda(SCHEME)], ids=lambda step: type(step).__name__)
def test_dead_inputs_go_first_and_are_counted(step: Pass) -> None:
    statistic, rng = Hessian(32), torch.Generator().manual_seed(3)
    x = torch.randn(16, 32, generator=rng) * (torch.arange(32) % 2)
    statistic.add(x, x)
    weight = torch.randn(20, 32, generator=rng) * (3 - 2 * (torch.arange(32) % 2))
    found = step.quantize(weight, statistic, Format.parse(SCHEME))  # type: ignore[attr-defined]
    assert not bool(dequantize(found.packed)[:, ::2].any()) and found.error < 1e-3
    assert "16 inputs are zero in all samples" in found.notes
    assert any("16 tokens for 32 inputs" in note and "dampening 0.1" in note for note in found.notes)


@pytest.mark.parametrize("name", ["wanda_w8a16_x86", "magnitude_w8a16_x86"])
def test_recipes_whose_kernels_are_another_ones(name: str, short_reference: Path) -> None:
    """Their passes run on the shipped model; end_to_end/test_run.py runs sparsegpt's recipe of the same format."""
    step, _, _ = name.partition("_")
    short = [f"model={short_reference}", "calibration.samples=4", f"passes.{step}.targets=re:.*layers.0.self_attn.*"]
    recipe = load_recipe(name, short)
    assert recipe.calibration is not None
    ctx = Context(samples=load_samples(recipe.calibration, short_reference))
    Pipeline(recipe.passes, [VerifyStages()]).run(capture_once(short_reference), ctx)
    pruned = [record for record in ctx.records if record.format == "W8A16_B16x1@30"]
    assert len(pruned) == 4 and all(0 < record.error < 0.2 for record in pruned)


def test_none_is_as_small_as_few_weights() -> None:
    assert smaller_dense(Format.parse("W4A16_G32_B16x1@90"), 256, 256) is None


def test_a_second_run_takes_what_the_first_made(llama: GraphModule, tmp_path: Path) -> None:
    made = []
    for _ in range(2):
        ctx = Context(samples=SAMPLES, results=SegmentCache(tmp_path), state="model")
        graph = Pipeline([Wanda(SCHEME)]).run(clone_graph(llama), ctx)
        made.append((ctx, graph.state_dict()))
    (first, one), (second, other) = made
    assert first.records == second.records and (first.reused, second.reused) == (0, second.blocks)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("make_step", "message"), [
    (lambda: Wanda("W8A16"), "leaves nothing out; say how much at its end, such as W8A16_B16x1@50"),
    (lambda: Sparsegpt("W8A16_B16x1@0"), "more than 0"),
    (lambda: Alps("W8A16_B16x1@100"), "100% of the blocks of 16x1 are zero; give more than 0, below 100"),
    (lambda: Wanda("W8A16_B16x1@180"), "below 100"),
    (lambda: Sparsegpt(SCHEME, dampening_frac=2.0), "not between 0 and 1"),
    (lambda: Wanda("W8A16_2:4", allocate="owl"), "owl moves shares"),
    (lambda: Gptq("W8A16_B1x1@50"), "chosen by the passes magnitude"),
    (lambda: Alps("W8A16_B1x1@100"), "100% of the weights are zero; give more than 0, below 100"),
    (lambda: Sparsegpt("W8A16_B1x1@0"), "0% of the weights are zero; give more than 0"),
    (lambda: Gptq("W8A16_2:4"), "chosen by the passes magnitude"),
    (lambda: Gptq(SCHEME), "chosen by the passes magnitude, wanda, sparsegpt and alps"),
])  # fmt: skip
def test_what_cannot_be_is_said_before_work(make_step: type, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_step()

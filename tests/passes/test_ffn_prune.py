"""The pass ffn_prune: plan, records and weights agree, the smaller graph is the one that was measured, runs go on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pruned_models
import pytest
import torch
from captures import capture_once
from families import DECODERS, ENCODERS, make
from packed_models import drop_weights, random_samples
from torch.fx import GraphModule

from compressor.cli.contents import inspect_path
from compressor.errors import UsageError
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import linear_sites
from compressor.numerics.sparsity.column_removal import Importance
from compressor.passes.ffn_prune import FfnPrune
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.segment_cache import SegmentCache
from compressor.verify.bundle import verify_bundle

SAMPLES = random_samples(97, 32)


def captured(name: str) -> GraphModule:
    decoder = name in DECODERS
    return capture_once(make(*(DECODERS if decoder else ENCODERS)[name], decoder))


def inner_widths(graph: GraphModule, name: str) -> set[int]:
    return {site.in_features for site in linear_sites(graph) if site.name.endswith(name)}


@pytest.mark.parametrize(
    ("name", "reader", "step"),
    [
        ("Llama, tied", "down_proj", FfnPrune(ratio=0.4, multiple=8)),
        ("Phi 3", "down_proj", FfnPrune(ratio=0.5, importance="activation")),
        ("GPT-2", "mlp.c_proj", FfnPrune(ratio=0.25, multiple=16, refit=False)),
        (
            "BERT",
            "output.dense",
            FfnPrune(ratio=0.25, multiple=16, importance="magnitude", targets="intermediate.dense"),
        ),
    ],
)
def test_plan_records_and_weights_agree(name: str, reader: str, step: FfnPrune) -> None:
    graph, ctx = captured(name), Context(samples=SAMPLES)
    meta = clone_graph(graph)
    drop_weights(meta)
    plans = {plan.site: plan for plan in step.plan(meta, Context())}
    before = weight_bytes(graph)
    smaller = Pipeline([step], [VerifyStages()]).run(graph, ctx)
    left = -(-round((1 - step.ratio) * 64) // step.multiple) * step.multiple
    assert left in inner_widths(smaller, reader) and weight_bytes(smaller) == weight_bytes(meta) < before
    assert {p.site for p in plans.values() if p.bytes_before != p.bytes_after} == {r.site for r in ctx.records}
    for record in ctx.records:
        assert (plans[record.site].bytes_after, plans[record.site].note) == (record.bytes_after, record.note)
        assert (record.error > 0) == (record.error_of == "output") and f"{left} of 64 channels are left" in record.note


@pytest.mark.parametrize("importance", ["activation", "obs"])
def test_columns_of_other_channels_stay(importance: Importance) -> None:
    """The head reads padded channels, which the last convolution alone writes, beside those of the shortcut."""
    graph = pruned_models.captured("ResNet")
    for part in ("weight", "bias"):
        value = graph.get_parameter(f"fourth.0.{part}").detach().clone()
        value[[0, 1, 13, 15]] = 0
        set_parameter(graph, f"fourth.0.{part}", value)
    expected = pruned_models.output(graph, "ResNet")
    step = FfnPrune(0.5, multiple=1, importance=importance, targets="head")
    smaller = step.run(graph, Context(samples=pruned_models.samples_of("ResNet")))
    assert next(s.in_features for s in linear_sites(smaller) if s.name == "head") == 12
    torch.testing.assert_close(pruned_models.output(smaller, "ResNet"), expected, rtol=1e-5, atol=1e-5)


def test_the_smaller_graph_computes_what_was_measured_and_is_quantised() -> None:
    """The reader's error is that of the layer's outputs on the samples, by the plainest definition."""
    graph, ctx = captured("Llama, tied"), Context(samples=SAMPLES)
    dense = clone_graph(graph)
    smaller = Pipeline([FfnPrune(ratio=0.5)], []).run(graph, ctx)
    error = next(r.error for r in ctx.records if r.site == "model.layers.0.mlp.down_proj")
    outputs = []
    for each in (dense, smaller):
        node = next(s.node for s in linear_sites(each) if s.name == "model.layers.0.mlp.down_proj")
        seen: list[torch.Tensor] = []

        class Reader(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node, node=node, seen=seen) -> object:  # type: ignore[no-untyped-def]
                value = super().run_node(n)
                if n is node:
                    seen.append(value)
                return value

        info, position = each.meta["model"], torch.arange(32)
        empty = [torch.zeros(8, info.kv_heads, 1, info.head_dim) for _ in range(2 * info.layers)]
        flat = [SAMPLES.ids, position, position, *empty]
        with torch.no_grad():
            Reader(each).run(*flat)
        outputs.append(seen[0].double())
    expected = float((outputs[1] - outputs[0]).square().sum() / outputs[0].square().sum())
    assert error == pytest.approx(expected, rel=1e-3)
    packed = Pipeline([Rtn("W4A16_G32")], [VerifyStages()]).run(smaller, ctx)
    assert not linear_sites(packed) and set({r.site: r.format for r in ctx.records}.values()) == {"W4A16_G32"}


def test_a_second_pass_of_the_same_name_keeps_the_records_of_the_first() -> None:
    steps = [FfnPrune(ratio=0.5, targets=rf"re:model\.layers\.{layer}\.mlp") for layer in (0, 1)]
    Pipeline(steps, [VerifyStages()]).run(captured("Llama, tied"), ctx := Context(samples=SAMPLES))
    assert len({record.site for record in ctx.records}) == len(ctx.records) == 6


def test_its_bundles_are_verified_with_biases_that_lost_rows(write_module: Callable[..., Path], tmp_path: Path) -> None:
    graph, ctx = captured("GPT-2"), Context(samples=SAMPLES)
    dense = weight_bytes(graph)
    graph = Pipeline([FfnPrune(ratio=0.5), Rtn("W8A16")], [VerifyStages()]).run(graph, ctx)
    bundle = write_module(graph, ctx, dense, tmp_path)
    assert all(check.passed for check in verify_bundle(bundle, threads=1).checks if check.name != "signature")
    (row,) = inspect_path(bundle)["formats"]
    first = captured("GPT-2")
    weights = [first.get_parameter(site.weight_name) for site in linear_sites(first)]
    assert row["bytes_before"] == sum(weight.numel() * weight.element_size() for weight in weights)


def test_refitting_and_a_better_choice_help() -> None:
    errors = {}
    for options in ({}, {"refit": False}, {"importance": "magnitude", "refit": False}):
        step = FfnPrune(ratio=0.5, **options)  # type: ignore[arg-type]
        step.run(captured("Llama, tied"), ctx := Context(samples=SAMPLES))
        errors[step] = sum(r.error for r in ctx.records)
    best, plain, magnitude = errors.values()
    assert best < plain < magnitude


def test_a_run_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    results = []
    for _ in range(2):
        ctx = Context(samples=SAMPLES, results=SegmentCache(tmp_path), state="model")
        graph = FfnPrune(ratio=0.4, multiple=8).run(captured("GPT-2"), ctx)
        results.append((ctx, {name: value.detach() for name, value in graph.named_parameters()}))
    (first, made), (again, restored) = results
    assert (first.reused, again.reused) == (0, again.blocks) and again.records == first.records
    assert made.keys() == restored.keys() and all(torch.equal(made[name], restored[name]) for name in made)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.0}, "ratio 0 is not between 0 and 1"),
        ({"ratio": 1.0}, "ratio 1 is not between 0 and 1"),
        ({"ratio": -0.5}, "not between"),
        ({"multiple": 0}, "multiple 0 is not between 1 and 4096"),
        ({"ratio": 0.1}, "ratio 0.1 of 64 channels leaves 64, rounded up to a multiple of 32"),
        ({"targets": "q_proj"}, "no channels of the matched linears can be removed"),
        ({"ignore": ["gate_proj"]}, "no channels of the matched linears can be removed"),
        ({"targets": "dwn_proj"}, "nearest .*down_proj"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FfnPrune(**options).requires(captured("Llama, tied"), Context())  # type: ignore[arg-type]


def test_a_packed_model_has_no_channels_left() -> None:
    graph = Rtn("W8A16").run(captured("Llama, tied"), Context())
    with pytest.raises(UsageError, match=re.escape("an earlier pass has packed every linear")):
        FfnPrune().requires(graph, Context())


def test_a_network_too_narrow_for_the_multiple_stays_whole_and_is_noted() -> None:
    """The linears of rank 8 in Gemma 3n are beside feed-forward networks of 64 channels."""
    graph, ctx = captured("Gemma 3n"), Context()
    plans = {plan.site: plan.note for plan in FfnPrune(0.5).plan(graph, ctx)}
    assert plans["model.layers.0.laurel.linear_right"] == "stays as it is"
    assert plans["model.layers.1.mlp.down_proj"] == "32 of 64 channels are left"
    (note,) = ctx.notes
    assert "4 of 7 families stay whole, the first of them that of model.layers.0.laurel.linear_right" in note

"""The pass permute_channels: the function stays, weights only move, what the next pass keeps never gets less."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pruned_models
import pytest
import torch
from packed_models import drop_weights
from torch import Tensor, nn
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.errors import CompressorError, UsageError
from compressor.formats.extras import KeptOfGroup
from compressor.formats.format import Format
from compressor.graph.dependencies.permuting import free_sets, permute
from compressor.graph.model import weight_bytes
from compressor.graph.sites import linear_sites
from compressor.numerics.channels.permutation import KeptOfGroups
from compressor.numerics.sparsity.block_sparsity import block_mask, largest_blocks
from compressor.numerics.sparsity.n_of_m import largest_entries
from compressor.passes.permute_channels import PermuteChannels
from compressor.passes.rtn import Rtn
from compressor.passes.wanda import Wanda
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.segment_cache import SegmentCache
from compressor.pipeline.structured import permutations
from compressor.pipeline.structured.orders import Orders

TWO_OF_FOUR = "W8A16_2:4"


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def weights_of(graph: GraphModule) -> dict[str, Tensor]:
    return {site.name: graph.get_parameter(site.weight_name).detach() for site in linear_sites(graph)}


def kept_of_all(graph: GraphModule, fmt: Format) -> float:
    """Return what the masks of the pruning passes keep of the squares of all weights."""
    kept = 0.0
    for name, W in weights_of(graph).items():
        if name == "lm_head":
            continue
        if (pattern := fmt.extra(KeptOfGroup)) is not None:
            mask = largest_entries(W, None, pattern)
        else:
            mask = block_mask(largest_blocks(W, None, fmt.stored_columns(W.shape[1])), *W.shape)
        kept += float(W.double().square()[mask].sum())
    return kept


def forgets_a_place(graph: GraphModule, family: Any, order: Tensor) -> None:
    (name, _), *_ = family.places
    permute(graph, type(family)({p: e for p, e in family.places.items() if p[0] != name}, ""), order)


@pytest.mark.parametrize("name", ["Llama", "Qwen 3", "GPT-2", "BERT", *pruned_models.IMAGES])
def test_any_order_of_free_channels_leaves_the_function(name: str) -> None:
    """Random orders of all sets at once, of ten kinds of models: float32 sums alone differ."""
    graph, generator = pruned_models.captured(name), torch.Generator().manual_seed(0)
    before = pruned_models.output(graph, name)
    free = [one for one in free_sets(graph) if not one.reason]
    for one in free:
        for family in one.families:
            permute(graph, family, torch.randperm(family.count, generator=generator))
    assert free and difference(pruned_models.output(graph, name), before) < 1e-5


@pytest.mark.parametrize(("name", "sets"), [
    ("Llama", {"stream": 64, "layers.0.mlp": 64, "layers.1.mlp": 64, "layers.0.values": 32, "layers.1.values": 32}),
    ("Qwen 3", {"stream": 64, "layers.0.mlp": 64, "layers.1.mlp": 64, "layers.0.values": 32, "layers.1.values": 32}),
])  # fmt: skip
def test_free_are_the_stream_inner_channels_and_values(name: str, sets: dict[str, int]) -> None:
    """Queries and keys, their norms, heads and the vocabulary are not."""
    found = {}
    for one in free_sets(pruned_models.captured(name)):
        if one.reason:
            continue
        names = {name for name, _ in one.places}
        layer = re.search(r"layers\.\d", min(names))
        kind = "stream" if any("embed" in n for n in names) else "mlp" if any("mlp" in n for n in names) else "values"
        assert not any("q_norm" in n or "k_norm" in n for n in names)
        found[kind if kind == "stream" or layer is None else f"{layer[0]}.{kind}"] = sum(f.count for f in one.families)
    assert found == sets


@pytest.mark.parametrize(("name", "step"), [
    ("Llama", PermuteChannels(scheme=TWO_OF_FOUR, ignore="lm_head")),
    ("Llama", PermuteChannels(scheme="W8A16_B16x1@50", importance="magnitude", ignore="lm_head")),
    ("Llama", PermuteChannels(scheme="W8A8_STATIC_B32x4@50", ignore="lm_head")),
    ("Llama", PermuteChannels(scheme="W4A16_ASYM_G8", ignore="lm_head")),
    ("GPT-2", PermuteChannels(scheme="W8A16_4:8", importance="magnitude", ignore="lm_head", rounds=8)),
    ("ResNet", PermuteChannels(scheme="W8A16_1:4", targets="re:.*")),
    ("MobileNet", PermuteChannels(scheme=TWO_OF_FOUR, importance="magnitude", targets="re:.*")),
])  # fmt: skip
def test_plan_records_and_function(name: str, step: PermuteChannels) -> None:
    graph, ctx = pruned_models.captured(name), Context(samples=pruned_models.samples_of(name))
    planned = pruned_models.captured(name)
    drop_weights(planned)
    plans = {plan.site: plan for plan in step.plan(planned, Context())}
    before, old, size = pruned_models.output(graph, name), weights_of(graph), weight_bytes(graph)
    graph = Pipeline([step], [VerifyStages()]).run(graph, ctx)
    assert difference(pruned_models.output(graph, name), before) < 1e-5 and weight_bytes(graph) == size
    for site, new in weights_of(graph).items():  # nothing but places has changed
        both = [weight.flatten().sort().values for weight in (new, old[site])]
        assert new.dtype == old[site].dtype and torch.equal(*both)
    assert any(not torch.equal(new, old[site]) for site, new in weights_of(graph).items())
    for record in ctx.records:
        assert (plans[record.site].bytes_after, record.bytes_before) == (record.bytes_after, record.bytes_after)
        assert plans[record.site].note == "channels change places"
        numbers = [float(n) for n in re.findall(r"([\d.]+)%", record.note)]
        assert numbers[0] >= numbers[1] if len(numbers) > 1 else numbers[0] >= 0
    assert any("sets of channels: " in note for note in ctx.notes)


@pytest.mark.parametrize("scheme", [TWO_OF_FOUR, "W8A16_B16x1@50"])
def test_the_pass_behind_keeps_more(scheme: str) -> None:
    """By its own masks; and Wanda's errors are smaller."""
    graphs = [pruned_models.captured("Llama") for _ in range(2)]
    step = PermuteChannels(scheme=scheme, importance="magnitude", ignore="lm_head")
    samples = pruned_models.samples_of("Llama")
    graphs[1] = step.run(graphs[1], Context(samples=samples))
    before, after = (kept_of_all(graph, Format.parse(scheme)) for graph in graphs)
    assert after > 1.005 * before
    errors = []
    for graph in graphs:
        Wanda(scheme, ignore="lm_head", refit=False).run(graph, ctx := Context(samples=samples))
        errors.append(sum(record.error for record in ctx.records))
    assert errors[1] < errors[0]


@pytest.mark.parametrize("scheme", ["W4A16_G8", "W4A16_ASYM_G8"])
def test_scales_of_alike_channels_round_better(scheme: str) -> None:
    """Squared errors of all weights, rounded as `rtn` does, are smaller."""
    errors = []
    for step in ([], [PermuteChannels(scheme=scheme, importance="magnitude", ignore="lm_head")]):
        graph = Pipeline(step).run(pruned_models.captured("Llama"), Context(samples=pruned_models.samples_of("Llama")))
        squares = {name: float(weight.double().square().sum()) for name, weight in weights_of(graph).items()}
        Rtn(scheme, ignore="lm_head").run(graph, ctx := Context())
        errors.append(sum(record.error * squares[record.site] for record in ctx.records))
    assert errors[1] < 0.99 * errors[0]


def test_channels_that_packed_linears_hold_stay() -> None:
    graph, samples = pruned_models.captured("Llama"), pruned_models.samples_of("Llama")
    graph = Rtn("W8A16", targets="model.layers.0.mlp.down_proj").run(graph, Context())
    before = pruned_models.output(graph, "Llama")
    step = PermuteChannels(scheme=TWO_OF_FOUR, ignore="lm_head")
    graph = step.run(graph, ctx := Context(samples=samples))
    assert difference(pruned_models.output(graph, "Llama"), before) < 1e-5
    assert {record.site for record in ctx.records} == {
        "model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.down_proj"
    }  # fmt: skip


def test_ignored_linears_do_not_count() -> None:
    step = PermuteChannels(scheme=TWO_OF_FOUR, targets="down_proj", ignore="model.layers.1")
    graph = step.run(pruned_models.captured("Llama"), ctx := Context(samples=pruned_models.samples_of("Llama")))
    assert [record.site for record in ctx.records] == ["model.layers.0.mlp.down_proj"]
    old, new = weights_of(pruned_models.captured("Llama")), weights_of(graph)
    assert [name for name in old if not torch.equal(old[name], new[name])] == [
        f"model.layers.0.mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")
    ]


@pytest.mark.parametrize("name", ["Llama", "BERT", "ResNet"])
def test_magnitudes_need_no_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is that with samples, and outputs are compared all the same."""
    step = PermuteChannels(TWO_OF_FOUR, importance="magnitude", rounds=4, targets="re:.*")
    found = [
        weights_of(step.run(pruned_models.captured(name), Context(samples=samples)))
        for samples in (pruned_models.samples_of(name), None)
    ]
    assert all(torch.equal(weight, found[1][site]) for site, weight in found[0].items())
    assert any(not torch.equal(w, found[1][site]) for site, w in weights_of(pruned_models.captured(name)).items())
    monkeypatch.setattr(permutations, "permute", forgets_a_place)
    with pytest.raises(CompressorError, match=r"permute_channels: outputs differ by .* of their size"):
        step.run(pruned_models.captured(name), Context())


def test_features_are_those_of_the_pieces() -> None:
    """The sizes of linears tell what the weights have."""
    graph = pruned_models.captured("Llama")
    for scheme in (TWO_OF_FOUR, "W8A16_B16x1@50", "W8A8_STATIC_B32x4@50", "W4A16_ASYM_G8"):
        orders = Orders(Format.parse(scheme))
        for one in orders.find(graph, "Linear", "lm_head"):
            for family in one.free.families:
                pieces = orders.pieces(graph, one, family, None)
                assert sum(piece.values.shape[1] for piece in pieces) == orders.features(one, family) > 0


def test_a_run_goes_on_with_the_orders_that_were_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for _ in range(2):
        ctx = Context(samples=pruned_models.samples_of("Llama"), results=SegmentCache(tmp_path), state="model")
        step = PermuteChannels(scheme=TWO_OF_FOUR, rounds=4, ignore="lm_head")
        found.append((weights_of(step.run(pruned_models.captured("Llama"), ctx)), ctx.records))
        monkeypatch.setattr(KeptOfGroups, "search", None)
    assert found[0][1] == found[1][1] and all(torch.equal(w, found[1][0][name]) for name, w in found[0][0].items())


def test_other_outputs_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutations, "permute", forgets_a_place)
    with pytest.raises(CompressorError, match=r"permute_channels: outputs differ by .* of their size"):
        PermuteChannels(TWO_OF_FOUR, rounds=4).run(
            pruned_models.captured("Llama"), Context(samples=pruned_models.samples_of("Llama"))
        )


@pytest.mark.parametrize(("options", "message"), [
    ({"scheme": "W8A16"}, "no order of channels changes what it loses"),
    ({"scheme": "W8A16_B1x1@50"}, "no order of channels changes what it loses"),
    ({"scheme": TWO_OF_FOUR, "rounds": 0}, "rounds 0 is not between"),
])  # fmt: skip
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        PermuteChannels(**options)


def test_models_without_such_channels_are_refused() -> None:
    lone = capture(nn.Linear(16, 8), torch.zeros(2, 16))
    with pytest.raises(UsageError, match=r"no channels of the matched linears can change .*an input of the model"):
        PermuteChannels(scheme=TWO_OF_FOUR).requires(lone, Context())
    with pytest.raises(UsageError, match="16 channels are not several whole groups of neighbours"):
        PermuteChannels(scheme="W4A16_G128", targets="o_proj").requires(pruned_models.captured("Llama"), Context())
    with pytest.raises(UsageError, match="needs calibration samples"):
        PermuteChannels(TWO_OF_FOUR).run(pruned_models.captured("Llama"), Context())

"""The pass skip_layers: which layers go, against plain references; bytes equal the plan; decoding; refusals."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from families import DECODERS, ENCODERS, LENGTH, VOCAB, make
from packed_models import drop_weights, random_samples
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.functional import cross_entropy

from compressor.capture.capture import capture
from compressor.errors import UsageError
from compressor.graph.blocks import find_blocks, remove_branches
from compressor.graph.caches import attention_layers, empty_past
from compressor.graph.model import clone_graph, weight_bytes
from compressor.passes.rtn import Rtn
from compressor.passes.skip_layers import SkipLayers
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.structured.layer_ranking import choose_layers
from compressor.pipeline.structured.layers import find_layers

LAYERS = 5
SAMPLES = random_samples(VOCAB, 8)


@functools.cache
def model(name: str) -> nn.Module:
    """Return a small model, its layers of unlike strength, so that their order is clear."""
    kind, sizes = (DECODERS | ENCODERS)[name]
    made = make(kind, {**sizes, "num_hidden_layers": LAYERS}, name in DECODERS)
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if (found := re.search(r"\.(\d)\..*(o_proj|down_proj)\.weight", key)) is not None:
                parameter.mul_((1.0, 4.0, 0.5, 2.0, 3.0)[int(found[1])])
    return made


@functools.cache
def _captured(name: str) -> GraphModule:
    return capture(model(name))


def captured(name: str = "Llama") -> GraphModule:
    return clone_graph(_captured(name))


def streams(graph: GraphModule, gone: list[int]) -> list[Tensor]:
    """Return the residual stream in front of each block that is left and behind the last, of all samples, float64."""
    hf = model("Llama")
    x = hf.model.embed_tokens(SAMPLES.ids)
    position = torch.arange(x.shape[1])[None]
    rotary = hf.model.rotary_emb(x, position)
    mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
    found = [x.double()]
    for number, layer in enumerate(hf.model.layers):
        if number not in gone:
            x = layer(x, attention_mask=mask, position_embeddings=rotary, position_ids=position)
            x = x[0] if isinstance(x, tuple) else x
            found.append(x.double())
    return found


@torch.no_grad()
def plain_iterative(count: int, once: bool = False) -> list[int]:
    """Rank as ShortGPT does, in float64: least 1 - cosine goes, ranked anew each time (or once); never the ends."""
    gone: list[int] = []
    while len(gone) < count:
        left = [i for i in range(LAYERS) if i not in gone]
        xs = streams(captured(), gone)
        scores = {
            layer: float((1 - (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).mean())
            for layer, a, b in zip(left, xs, xs[1:], strict=False)
            if 0 < layer < LAYERS - 1
        }
        order = sorted(scores, key=scores.__getitem__)
        gone += order[:count] if once else order[:1]
    return gone


def chosen(ranking: Any, count: int, **options: Any) -> list[int]:
    graph = captured()
    layers = find_layers(graph, "skip_layers", options.get("part", "block"), 1, 1)
    found = choose_layers(graph, SAMPLES.ids, layers, count, ranking, lambda _, make: make())
    return [removal.layer.number for removal in found]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("ranking", ["iterative", "influence"])
def test_influence_ranks_as_the_plain_reference(ranking: str, count: int) -> None:
    assert chosen(ranking, count) == plain_iterative(count, once=ranking == "influence")


@torch.no_grad()
def loss_without(graph: GraphModule, gone: list[Any]) -> float:
    """Run the rewritten graph whole, in one piece: the brute force."""
    graph = clone_graph(graph)
    blocks = find_blocks(graph)
    remove_branches(graph, [branch for number in gone for branch in blocks[number].branches])
    ids, position = SAMPLES.ids, torch.arange(SAMPLES.ids.shape[1])
    logits = graph(ids, position, position, *empty_past(graph.meta["model"], len(ids)))[0]
    return float(cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten()))


def test_perplexity_ranks_as_brute_force_does() -> None:
    graph, gone, scores = captured(), list[int](), list[float]()
    for _ in range(2):
        losses = {i: loss_without(graph, [*gone, i]) for i in range(1, LAYERS - 1) if i not in gone}
        gone.append(min(losses, key=losses.__getitem__))
        scores.append(min(losses.values()))
    layers = find_layers(graph, "skip_layers", "block", 1, 1)
    found = choose_layers(graph, SAMPLES.ids, layers, 2, "perplexity", lambda _, make: make())
    assert [removal.layer.number for removal in found] == gone
    assert [removal.score for removal in found] == pytest.approx(scores, rel=1e-5)


@pytest.mark.parametrize("ranking", ["iterative", "perplexity"])
def test_the_ends_stay_however_little_they_do(ranking: str) -> None:
    graph = captured()
    with torch.no_grad():
        for name, parameter in graph.named_parameters():
            if re.search(r"\.[04]\..*(o_proj|down_proj)\.weight", name):
                graph.get_parameter(name).data = parameter * 1e-6
    step = SkipLayers(3.0, ranking=ranking, compare_halves=False)  # type: ignore[arg-type]
    smaller = Pipeline([step]).run(graph, Context(samples=SAMPLES))
    assert {block.name for block in find_blocks(smaller)} == {"model.layers.0", "model.layers.4"}


CASES = [
    SkipLayers(0.4),
    SkipLayers(1.0, ranking="perplexity", part="attention"),
    SkipLayers(2.0, ranking="influence", part="ffn"),
    SkipLayers(layers=(2, "3")),
    SkipLayers(layers="1-2", part="attention"),
]


@pytest.mark.parametrize("step", CASES, ids=str)
def test_bytes_records_and_caches_are_as_planned(step: SkipLayers) -> None:
    graph, ctx = captured(), Context(samples=SAMPLES)
    meta, before = clone_graph(graph), weight_bytes(graph)
    drop_weights(meta)
    assert step.plans_sizes(meta)
    plans = {plan.site: plan for plan in step.plan(meta, Context())}
    smaller = Pipeline([step], [VerifyStages()]).run(graph, ctx)
    info, gone = smaller.meta["model"], [record for record in ctx.records if record.bytes_after == 0]
    assert weight_bytes(smaller) == weight_bytes(meta) < before
    assert {site.bytes_after for site in plans.values() if site.bytes_after != site.bytes_before} == {0}
    assert sum(record.bytes_before for record in gone) == before - weight_bytes(smaller)  # norms are accounted for
    assert {record.site for record in gone} >= {
        site for site, plan in plans.items() if not plan.bytes_after
    } or step.remove
    assert info == meta.meta["model"] and info.layers == len(attention_layers(smaller))
    assert info.layers == {"block": 3, "ffn": LAYERS}.get(step.part, LAYERS - (1 if step.remove else 2))


def test_a_norm_behind_a_sum_goes_with_its_branch() -> None:
    """BERT is an encoder: no next tokens, no caches, and norms that the records have to account for."""
    graph, ctx = captured("BERT"), Context(samples=SAMPLES)
    before = weight_bytes(graph)
    smaller = Pipeline([SkipLayers(2.0)], [VerifyStages()]).run(graph, ctx)
    assert len(find_blocks(smaller)) == LAYERS - 2
    assert sum(record.bytes_before for record in ctx.records) == before - weight_bytes(smaller) > 0
    named = set(re.findall(r"encoder\.layer\.\d", ctx.notes[0]))
    assert len(named) == 2 and {record.site for record in ctx.records} >= named


def test_prefill_and_steps_agree_when_caches_are_missing() -> None:
    """Positions, masks and the places of caches are those of the layers that are left."""
    graph = Pipeline([SkipLayers(layers=(2,)), SkipLayers(layers=(1,), part="attention")]).run(captured(), Context())
    info, ids = graph.meta["model"], torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % VOCAB
    assert info.layers == 3

    def step(tokens: Tensor, at: int, past: list[list[Tensor]]) -> tuple[Tensor, list[list[Tensor]]]:
        position, keep = torch.arange(at, at + tokens.shape[1]), torch.arange(tokens.shape[1])
        logits, *new = graph(tokens, position, keep, *past)
        return logits, [
            [torch.cat([o, n], 2) for o, n in zip(*both, strict=True)] for both in zip(past, new, strict=True)
        ]

    with torch.no_grad():
        full, _ = step(ids, 0, empty_past(info, 2, 0))
        first, past = step(ids[:, :5], 0, empty_past(info, 2, 0))
        parts = [first]
        for at in range(5, LENGTH):
            logits, past = step(ids[:, at : at + 1], at, past)
            parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-4, atol=1e-5)


def test_halves_and_their_overlap_are_told() -> None:
    ctx = Context(samples=SAMPLES)
    Pipeline([SkipLayers(2.0)]).run(captured(), ctx)
    removed, halves = ctx.notes
    assert removed.startswith("skip_layers: model.layers.") and "of 5 went, by iterative" in removed
    count = re.search(r"first half alone .*, by the second .*: ([012]) of 2 in common", halves)
    assert count is not None, halves
    assert ("depends on what is calibrated on" in halves) == (count[1] != "2")


def test_either_ranks_both_parts_together_and_plans_the_smallest() -> None:
    step, ctx, planning = SkipLayers(3.0, part="either", compare_halves=False), Context(samples=SAMPLES), Context()
    meta = captured()
    drop_weights(meta)
    assert not step.plans_sizes(meta)
    step.plan(meta, planning)
    assert "planned as if the smallest went" in planning.notes[0]
    smaller = Pipeline([step]).run(captured(), ctx)
    assert weight_bytes(smaller) <= weight_bytes(meta)
    assert len({record.note for record in ctx.records if record.note.startswith("goes with")}) == 3


REFUSED: list[tuple[Any, str, str]] = [
    (dict(remove=4.0), "Llama", "is 4 of 5 in .*of which 3 may go"),
    (dict(remove=0.9), "Llama", "remove 0.9 is 4 of 5"),
    (dict(remove=0.01), "Llama", "is none; 0.2 is one"),
    (dict(layers=(7,)), "Llama", "the model has blocks 0 to 4"),
    (dict(layers=("3-2",)), "Llama", "begins behind its end"),
    (dict(layers=("mlp.9",)), "Llama", "no block is called"),
    (dict(layers=(0,)), "Llama", "among those that keep_first"),
    (dict(remove=1.0, ranking="perplexity"), "BERT", "predicts no next tokens"),
]


@pytest.mark.parametrize(("options", "name", "message"), REFUSED, ids=lambda each: str(each)[:40])
def test_refusals_name_what_they_mean(options: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SkipLayers(**options).requires(captured(name), Context())


def test_a_model_without_a_residual_stream_has_no_blocks() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with pytest.raises(UsageError, match="Sequential has no blocks"):
        SkipLayers(1.0).requires(capture(net, (torch.zeros(2, 8),)), Context())


def test_options_and_order_are_checked() -> None:
    for options, message in (
        ({}, "give `remove`"),
        ({"remove": 1.5}, "neither a share"),
        ({"layers": (1,), "part": "either"}, "say which part"),
        ({"remove": 1.0, "keep_first": -1}, "not below 0"),
    ):
        with pytest.raises(UsageError, match=message):
            SkipLayers(**options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is packed already"):
        SkipLayers(1.0).requires(Rtn("W8A16").run(captured(), Context()), Context())

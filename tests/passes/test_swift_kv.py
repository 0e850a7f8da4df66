"""swift_kv: the function of its definition, in prompts and steps; what it refuses, costs and learns."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import swift_kv_oracle as oracle
import torch
from captures import capture_once
from families import DECODERS, make
from interrupted_training import whole_and_resumed
from packed_models import drop_weights, random_samples
from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.evaluate.quality import GraphLogits
from compressor.graph.caches import attention_layers, empty_caches
from compressor.graph.costs import node_costs
from compressor.graph.kept_tokens.figures import prompt_cost
from compressor.graph.model import ModelInfo, clone_graph
from compressor.graph.segments import segments
from compressor.graph.sites import linear_sites
from compressor.passes.gptq import Gptq
from compressor.passes.kv_cache import KvCache
from compressor.passes.rtn import Rtn
from compressor.passes.skip_layers import SkipLayers
from compressor.passes.swift_kv import SwiftKv
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.training.settings import split
from compressor.verify.independence.check import check_independence

SAMPLES = random_samples(97, 16)
IDS = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(1))
QUICK = SwiftKv(steps=12, batch=2, learning_rate=3e-3, evaluate_every=3, checkpoint_every=5, held_out=0.25)
UNTRAINED = SwiftKv(steps=0)


@pytest.fixture(scope="module")
def llama() -> GraphModule:
    return capture_once(oracle.make_llama())


def run(graph: GraphModule, *steps: Pass, ctx: Context | None = None) -> GraphModule:
    return Pipeline(steps, [VerifyStages()]).run(clone_graph(graph), ctx or Context(samples=SAMPLES))


def step(graph: GraphModule, caches: list[Tensor], first: int, ids: Tensor, keep: list[int]) -> Tensor:
    """Run tokens from a position on, store their keys and values by hand, and return the logits of some."""
    layers, position = graph.meta["model"].layers, torch.arange(first, first + ids.shape[1])
    found, keys, values = graph(ids, position, torch.tensor(keep), caches[:layers], caches[layers:])
    for cache, rows in zip(caches, [*keys, *values], strict=True):
        cache[:, :, position] = rows
    return found


@pytest.mark.parametrize(("after", "share"), [(2, 1), (2, 3), (1, 2), (4, 1)])
def test_prompts_and_steps_are_those_of_the_definition(llama: GraphModule, after: int, share: int) -> None:
    graph = run(llama, dataclasses.replace(UNTRAINED, after=after, share=share))
    expected = oracle.run(oracle.make_llama(), IDS, after, share)[0]
    info: ModelInfo = graph.meta["model"]
    assert info.layers == after + -(-(5 - after) // share) < 5 + (share == 1)
    close = {"rtol": 1e-4, "atol": 1e-5 * float(expected.abs().max())}  # float32 sums in another order
    torch.testing.assert_close(GraphLogits(graph)(IDS.numpy()), expected, **close)
    for chunks in ([12], [5, 1, 6], [1] * 12):
        caches, first = empty_caches(info, 2, 12), 0
        for count in chunks:
            found = step(graph, caches, first, IDS[:, first : first + count], [count - 1])
            first += count
            torch.testing.assert_close(found, expected[:, first - 1 : first], **close)
    found = step(graph, empty_caches(info, 2, 12), 0, IDS, [7, 0, 7])  # in any order, and twice
    torch.testing.assert_close(found, expected[:, [7, 0, 7]], **close)


def test_a_graph_whose_layers_all_run_all_tokens_stays(llama: GraphModule) -> None:
    for after in (5, 1.0):
        ctx = Context()
        graph = run(llama, SwiftKv(after=after), ctx=ctx)
        assert str(graph.graph) == str(llama.graph) and not ctx.records
        assert ctx.notes == ["swift_kv: all layers run all tokens: nothing changes"]


@pytest.mark.parametrize("family", ["OLMo 2", "GPT-OSS"])
def test_prompts_agree_with_steps_in_other_families(family: str) -> None:
    """No norm in front and norms on heads; windows, sinks, biases and experts."""
    graph = run(capture_once(make(*DECODERS[family], True)), dataclasses.replace(UNTRAINED, after=1))
    whole, caches = GraphLogits(graph)(IDS.numpy()), empty_caches(graph.meta["model"], 2, 12)
    found = [step(graph, caches, i, IDS[:, i : i + 1], [0]) for i in range(12)]
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-4, atol=1e-5)


def test_later_passes_work_behind_it(llama: GraphModule) -> None:
    """Calibration goes segment by segment, past what all later layers read; caches are packed; entries stay apart."""
    ctx = Context(samples=SAMPLES)
    graph = run(llama, dataclasses.replace(UNTRAINED, share=2), Gptq("W8A16_G32"), KvCache("INT8"), ctx=ctx)
    kept = run(llama, dataclasses.replace(UNTRAINED, share=2))
    whole, exact = GraphLogits(graph)(IDS.numpy()), GraphLogits(kept)(IDS.numpy())
    assert 1e-4 < float((whole - exact).norm() / exact.norm()) < 0.1
    caches = empty_caches(graph.meta["model"], 2, 12)
    assert caches[0].dtype is torch.uint8 and len(caches) == 8
    found = [step(graph, caches, i, IDS[:, i : i + 1], [0]) for i in range(12)]
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-4, atol=1e-4)
    assert check_independence(graph).leaks == ()
    assert len(segments(run(llama, UNTRAINED))) == len(segments(llama)), "the stream is cut where it was"


def test_what_it_costs(llama: GraphModule) -> None:
    """The counts by hand, for linears and attention of one prompt; a plan says what the run does."""
    change = dataclasses.replace(UNTRAINED, after=2, share=3)
    ran, planned, shadow = Context(), Context(), clone_graph(llama)
    graph = run(llama, change, ctx=ran)
    drop_weights(shadow)
    plans = change.plan(shadow, planned)
    assert planned.notes == ran.notes and shadow.meta["model"] == graph.meta["model"]
    assert {plan.site: plan.bytes_after for plan in plans} == {
        site.name: 4 * site.in_features * site.out_features for site in linear_sites(graph)
    }
    tokens, c, kv, inner, vocabulary = 20, 32, 16, 48, 97
    makes, runs = 2 * c * kv, 2 * c * c + 3 * c * inner
    attention = 2 * c * tokens  # with each key and value
    early = tokens * 2 * (makes + runs + attention)
    expected = early + tokens * makes + 3 * (runs + attention) + c * vocabulary
    cost = prompt_cost(graph, tokens)
    assert cost.multiply_adds == pytest.approx(expected / tokens)
    assert (
        cost.cache_bytes == 3 * 2 * kv * 4 == sum(x[:, :, 0].numel() * 4 for x in empty_caches(graph.meta["model"], 1))
    )
    read = sum(cost.cache_bytes for cost in node_costs(graph, 1, 1, 10).values())
    assert read == 10 * 5 * 2 * kv * 4, "each layer reads the cache that it shares"
    gone = [record.site for record in ran.records if not record.bytes_after]
    assert gone == [f"model.layers.{i}.self_attn.{kind}_proj" for i in (3, 4) for kind in "kv"]


def test_training_goes_on_to_the_same_bits_and_changes_later_attention_alone(
    llama: GraphModule, tmp_path: Path
) -> None:
    train = dataclasses.replace(QUICK, share=2)
    found = whole_and_resumed(lambda ctx: Pipeline([train]).run(clone_graph(llama), ctx), tmp_path, 7, samples=SAMPLES)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    start = dict(run(llama, dataclasses.replace(UNTRAINED, share=2)).named_parameters())
    changed = {name for name, value in found[0].items() if not torch.equal(value, start[name])}
    later = [f"model.layers.{i}.self_attn.{kind}_proj.weight" for i in (2, 3, 4) for kind in "qkv"]
    gone = {f"model.layers.3.self_attn.{kind}_proj.weight" for kind in "kv"}
    assert changed == {*later, "kv_norm.weight"} - gone


def test_it_learns_what_the_model_did_and_is_never_worse(llama: GraphModule) -> None:
    ctx = Context(samples=SAMPLES)
    graph = run(llama, dataclasses.replace(QUICK, learning_rate=1e-2, batch=4), ctx=ctx)
    note = ctx.notes[1]
    begun, best = (float(note.split(word)[0].split()[-1]) for word in (" at the start", " after step"))
    assert best < 0.92 * begun
    assert {record.site for record in ctx.records} == {
        f"model.layers.{i}.self_attn.{kind}_proj" for i in (2, 3, 4) for kind in "qkv"
    }
    untrained = run(llama, UNTRAINED)
    errors = [
        float((GraphLogits(g)(SAMPLES.ids.numpy()) - GraphLogits(llama)(SAMPLES.ids.numpy())).norm())
        for g in (graph, untrained)
    ]
    assert errors[0] < errors[1]
    ctx = Context(samples=SAMPLES)
    run(llama, dataclasses.replace(QUICK, steps=3, learning_rate=50.0, clip=1e9), ctx=ctx)
    assert "it stays" in ctx.notes[1]


def test_the_loss_is_that_of_the_definition(llama: GraphModule) -> None:
    """Of logits at T = 2, and of the residual stream in front of the last two layers, where nothing is trained yet."""
    ctx = Context(samples=dataclasses.replace(SAMPLES, ids=SAMPLES.ids[:2]))
    run(llama, dataclasses.replace(QUICK, steps=1, learning_rate=1e3, hidden=0.5), ctx=ctx)
    begun = float(ctx.notes[1].split("start, ")[1].split(":")[0])
    held_out = split(ctx.samples.ids, QUICK.held_out, ctx.seed)[0]  # one of the two
    (teacher, dense), (student, ours) = (oracle.run(oracle.make_llama(), held_out, after) for after in (5, 2))
    p, q = (torch.softmax(x / 2, -1) for x in (teacher, student))
    expected = 4 * (p * (p / q).log()).sum(-1).mean()
    expected += 0.5 * ((ours[3] - dense[3]).norm(dim=-1) / dense[3].norm(dim=-1)).square().mean()
    assert begun == pytest.approx(float(expected), rel=1e-3), "the note has four digits"


def test_bad_input(llama: GraphModule) -> None:
    with pytest.raises(UsageError, match="swift_kv: after 0 is not a number of layers from 1"):
        SwiftKv(after=0)
    with pytest.raises(UsageError, match=r"swift_kv: after 1\.5 is not a share"):
        SwiftKv(after=1.5)
    with pytest.raises(UsageError, match="swift_kv: share 0"):
        SwiftKv(share=0)
    with pytest.raises(UsageError, match="swift_kv: steps -1"):
        SwiftKv(steps=-1)
    with pytest.raises(UsageError, match=r"after 6: .* has 5 layers with attention"):
        SwiftKv(after=6).requires(llama, Context())
    with pytest.raises(UsageError, match="give the pass once"):
        UNTRAINED.requires(run(llama, UNTRAINED), Context())
    with pytest.raises(UsageError, match=r"k_proj\) is packed already; put the pass in front of those that pack"):
        UNTRAINED.requires(run(llama, Rtn("W8A16_G32", targets="k_proj", ignore=())), Context())
    with pytest.raises(UsageError, match="in front of kv_cache"):
        UNTRAINED.requires(run(llama, KvCache("INT8")), Context())
    with pytest.raises(UsageError, match="put it in front of swift_kv"):
        SkipLayers(layers=(2,), part="block").requires(run(llama, UNTRAINED), Context())
    encoder = clone_graph(llama)
    encoder.meta["model"] = dataclasses.replace(llama.meta["model"], kind="encoder")
    with pytest.raises(UsageError, match="is not a decoder"):
        UNTRAINED.requires(encoder, Context())


def test_what_is_not_understood_is_named(llama: GraphModule) -> None:
    fused = capture_once(make(*DECODERS["GPT-2"], True))
    with pytest.raises(UsageError, match="c_attn makes keys together with queries or values"):
        dataclasses.replace(UNTRAINED, after=1).requires(fused, Context())
    shared, before = clone_graph(llama), str(llama.graph)
    one, other = (attention_layers(shared)[i].node for i in (1, 3))
    other.args = (other.args[0], *one.args[1:5], *other.args[5:])
    with pytest.raises(UsageError, match=r"layers\.3\.self_attn shares another layer's keys and values already"):
        UNTRAINED.requires(shared, Context())
    UNTRAINED.requires(llama, Context())
    assert str(llama.graph) == before, "to ask changes nothing"


def test_layers_that_rotate_in_other_ways_share_nothing() -> None:
    """Gemma 3's windowed layers have another base."""
    sizes = {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    name, config = DECODERS["Gemma 3"]
    graph = capture_once(make(name, {**config, **sizes}, True))
    with pytest.raises(UsageError, match=r"make keys and values in different ways .* set `share: 1`"):
        dataclasses.replace(UNTRAINED, after=1, share=2).requires(graph, Context())
    dataclasses.replace(UNTRAINED, after=1).requires(graph, Context())

"""The pass head_prune: whole heads go from all that holds them, caches follow, and refusals name what they mean."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from captures import capture_once
from families import DECODERS, ENCODERS, LENGTH, VOCAB, make
from packed_models import drop_weights, random_samples
from torch import Tensor, nn
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.caches import attention_layers, empty_caches, empty_past
from compressor.graph.dependencies.channels import Dependencies
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import linear_sites
from compressor.host.resources import resource
from compressor.numerics.sparsity.column_removal import choose_channels
from compressor.passes.head_prune import HeadPrune
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline

SAMPLES = random_samples(VOCAB, 32)
_, SEVEN_SIZES = DECODERS["Llama"]
SEVEN = {**SEVEN_SIZES, "hidden_size": 56, "num_attention_heads": 14, "num_key_value_heads": 7, "head_dim": 8}


def captured(name: str) -> GraphModule:
    """Return a graph to change, whose parameters other tests read."""
    return clone_graph(_captured(name))


@functools.cache
def _captured(name: str) -> GraphModule:
    if name == "seven groups":
        return capture_once(make("Llama", SEVEN, True))
    decoder = name in DECODERS
    return capture_once(make(*(DECODERS if decoder else ENCODERS)[name], decoder))


def output(graph: GraphModule) -> Tensor:
    info, ids = graph.meta["model"], torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % VOCAB
    position = torch.arange(LENGTH)
    with torch.no_grad():
        found = graph(ids, torch.ones(2, LENGTH)) if info.kind == "encoder" else None
        if found is None:
            found = graph(ids, position, position, *empty_past(info, 2))
    return found if isinstance(found, Tensor) else found[0]


CASES = [
    ("Llama, tied", HeadPrune(0.5), "1 of 2"),
    ("Qwen 3", HeadPrune(0.5, "query_heads", "activation"), "2 of 4"),
    ("Phi 3", HeadPrune(0.5, "query_heads"), "2 of 4"),
    ("GPT-2", HeadPrune(0.25, importance="magnitude", refit=False), "3 of 4"),
    ("GPT-BigCode", HeadPrune(0.5, "query_heads"), "2 of 4"),
    ("BERT", HeadPrune(0.5, targets="re:.*layer.0.attention"), "2 of 4"),
    ("seven groups", HeadPrune(0.3), "5 of 7"),
]


@pytest.mark.parametrize(("name", "step", "left"), CASES, ids=[f"{name}, {step.remove}" for name, step, _ in CASES])
def test_plan_records_and_weights_agree(name: str, step: HeadPrune, left: str) -> None:
    graph, ctx = captured(name), Context(samples=SAMPLES)
    meta, shapes = clone_graph(graph), {site.name: site.out_features for site in linear_sites(graph)}
    drop_weights(meta)
    plans = {plan.site: plan for plan in step.plan(meta, Context())}
    before = weight_bytes(graph)
    smaller = Pipeline([step], [VerifyStages()]).run(graph, ctx)
    assert weight_bytes(smaller) == weight_bytes(meta) < before
    assert {p.site for p in plans.values() if p.bytes_before != p.bytes_after} == {r.site for r in ctx.records}
    for record in ctx.records:
        assert (plans[record.site].bytes_after, plans[record.site].note) == (record.bytes_after, record.note)
        assert (record.error > 0) == (record.error_of == "output") and f"{left} heads are left" in record.note
    assert any(site.out_features < shapes[site.name] for site in linear_sites(smaller))
    info = smaller.meta["model"]
    assert info == meta.meta["model"]
    if info.kind == "decoder":
        assert {int(layer.keys.meta["val"].shape[1]) for layer in attention_layers(smaller)} == {info.kv_heads}
        assert str(info.kv_heads) == left[0] or step.remove == "query_heads"
    assert torch.isfinite(output(smaller)).all()


@pytest.mark.parametrize("by_query", [False, True])
def test_heads_that_nothing_reads_go_without_a_trace(by_query: bool) -> None:
    """Columns of the readers at zero: their heads weigh nothing, whatever queries and keys say."""
    graph, chosen = captured("Qwen 3"), []
    for family in [f for f in Dependencies(graph, by_query).families() if f.groups and not f.reason]:
        gone = np.array([1, 2]) if by_query else np.array([1])  # of both groups one
        chosen.append((family, gone))
        for (name, axis), entries in family.places.items():
            if axis == 1:
                weight = graph.get_parameter(name).detach().clone()
                weight[:, torch.from_numpy(entries[gone]).flatten()] = 0
                set_parameter(graph, name, weight)
    smaller = clone_graph(graph)
    Dependencies(smaller, by_query).remove(chosen)
    assert len(chosen) == 2 and weight_bytes(smaller) < weight_bytes(graph)
    torch.testing.assert_close(output(smaller), output(graph), rtol=1e-5, atol=1e-5)


def test_transformers_computes_the_same_with_as_many_heads() -> None:
    """The configuration says fewer heads; the weights are the pruned graph's."""
    dense = make(*DECODERS["Llama"], True)
    graph = Pipeline([HeadPrune(0.5)]).run(capture_once(dense), Context(samples=SAMPLES))
    config = copy.deepcopy(dense.config)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 1, 16
    model = type(dense)(config).eval()
    model.load_state_dict(dict(graph.named_parameters()))
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % VOCAB
    with torch.no_grad():
        torch.testing.assert_close(output(graph), model(ids).logits, rtol=1e-4, atol=1e-4)


class Fused(nn.Module):
    """Attention of a ViT: one linear writes queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.norm = nn.Linear(24, 72), nn.Linear(24, 24), nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(batch, length, 3, 4, 6).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Explicit(Fused):
    """The same with products of matrices."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).reshape(batch, length, 3, 4, 6).permute(2, 0, 3, 1, 4)
        scores = (qkv[0] * 6**-0.5) @ qkv[1].transpose(-2, -1)
        return x + self.proj((scores.softmax(-1) @ qkv[2]).transpose(1, 2).reshape(batch, length, width))


@pytest.mark.parametrize("build", [Fused, Explicit])
def test_a_fused_linear_loses_each_head_three_times(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(2, 5, 24)
    with torch.no_grad():
        model.proj.weight[:, 6:12] = 0  # type: ignore[union-attr, index]
    graph = capture_once(model, x)
    (family,) = [f for f in Dependencies(graph).families() if f.groups]
    assert not family.reason and (family.count, family.places["qkv.weight", 0].shape[1]) == (4, 18)
    Dependencies(graph).remove([(family, np.array([1]))])
    assert [(s.out_features, s.in_features) for s in linear_sites(graph)] == [(54, 24), (24, 18)]
    torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-5)


def test_heads_are_chosen_in_each_group() -> None:
    """The largest of each group by the plainest definition."""
    random = torch.Generator().manual_seed(0)
    weight, columns = torch.randn(5, 24, generator=random), torch.arange(24).view(12, 2)
    sizes = [float(weight[:, two].square().sum()) for two in columns]
    expected = [i for g in range(3) for i in sorted(sorted(range(4 * g, 4 * g + 4), key=sizes.__getitem__)[2:])]
    assert choose_channels(weight, torch.eye(24), columns, 6, "magnitude", 3).tolist() == expected
    found = choose_channels(weight, torch.eye(24), columns, 6, "obs", 3).tolist()
    assert found == expected  # inputs that nothing relates cannot make up for one another


def test_all_layers_of_the_reference_model_lose_heads() -> None:
    """Sizes that the graph takes of a cache, to check them, keep no heads."""
    graph = capture_once(resource("models") / "reference")
    HeadPrune().plan(graph, Context())
    assert {int(layer.queries.meta["val"].shape[1]) for layer in attention_layers(graph)} == {6}
    assert graph.meta["model"].kv_heads == 3


def test_layers_may_keep_unlike_heads() -> None:
    graph = captured("Llama")
    HeadPrune(ratio=0.5, ignore=("model.layers.1",)).plan(graph, Context())
    info = graph.meta["model"]
    assert (info.layers, info.kv_heads, info.cache_heads) == (2, 2, (1, 2))
    assert [cache.shape[1] for cache in empty_caches(info, 1)] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Llama", {"ratio": 0.0}, "ratio 0 is not between 0 and 1"),
        ("Llama", {"ratio": 1.0}, "ratio 1 is not between 0 and 1"),
        ("Llama", {"ratio": 1.5}, "not between"),
        ("Llama", {"ratio": 0.2}, "of 2 heads, the attention would lose none; 0.5 is one head"),
        ("Llama", {"ratio": 0.9}, "layers.0.self_attn.o_proj: .* would lose its last head"),
        ("Llama", {"ratio": 0.9, "remove": "query_heads"}, "of 2 heads of a group, .* its last head"),
        ("Llama", {"ratio": 0.5, "targets": "down_proj"}, "no heads of the matched linears can be removed"),
        ("Llama", {"ratio": 0.5, "targets": "o_prj"}, "nearest .*o_proj"),
        ("GPT-2", {"ratio": 0.5, "remove": "query_heads"}, "has one query head for each head of keys"),
        ("GPT-BigCode", {"ratio": 0.5}, "has one head of keys only"),
        ("BLOOM", {"ratio": 0.5}, "read them in two places"),
        ("OLMo 2", {"ratio": 0.5}, "q_norm\\) takes the mean over it"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        HeadPrune(**options).requires(captured(name), Context())


def test_removals_that_no_attention_can_group_are_refused() -> None:
    graph = captured("Llama")
    for by_query, gone, message in ((True, [0], "different query heads"), (False, [0, 1], "its last head")):
        dependencies = Dependencies(graph, by_query)
        family = next(f for f in dependencies.families() if f.groups)
        with pytest.raises(ValueError, match=message):
            dependencies.remove([(family, np.array(gone))])

"""predict_kv: the function of its definition, what it learns and leaves alone, what it costs, what it refuses."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import swift_kv_oracle as oracle
import torch
from captures import capture_once
from interrupted_training import whole_and_resumed
from packed_models import random_samples
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.functional import cross_entropy, linear

from compressor.errors import UsageError
from compressor.graph.kept_tokens.predicted_caches import add_prediction, prediction_graph, prompt_operations
from compressor.graph.kinds.draft_heads import without_heads
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import set_parameter
from compressor.passes.early_exit import EarlyExit
from compressor.passes.kv_cache import KvCache
from compressor.passes.predict_kv import PredictKv
from compressor.passes.rtn import Rtn
from compressor.passes.skip_layers import SkipLayers
from compressor.passes.swift_kv import SwiftKv
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.training.device import Device
from compressor.training.objectives.prompts import measure_prompts, prompts_loss, rows_of
from compressor.training.trainable import TrainableGraph

SAMPLES = random_samples(97, 16)
IDS = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(1))
QUICK = PredictKv(
    layers=2, steps=20, batch=4, learning_rate=3e-4, evaluate_every=4, checkpoint_every=5, held_out=0.25, caches=0.0
)


@pytest.fixture(scope="module")
def llama() -> GraphModule:
    return capture_once(oracle.make_llama())


def run(graph: GraphModule, *steps: Pass) -> tuple[GraphModule, Context]:
    ctx = Context(samples=SAMPLES)
    return Pipeline(steps, [VerifyStages()]).run(clone_graph(graph), ctx), ctx


@pytest.fixture(scope="module")
def trained(llama: GraphModule) -> tuple[GraphModule, Context]:
    return run(llama, QUICK)


def predicted(graph: GraphModule, ids: Tensor) -> Tensor:
    """Run the entry; return [2 * layers, B, Hkv, S, D]."""
    count, size = graph.meta["model"].predicts, graph.meta["model"].head_dim
    caches = [torch.zeros(len(ids), 2, 1, size) for _ in range(2 * count)]
    found: Tensor = prediction_graph(graph)(ids, torch.arange(ids.shape[1]), *caches)
    return found


def by_definition(weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Predict with two copied layers of Llama, in plain PyTorch; all weights are the graph's."""

    def own(name: str) -> Tensor:
        return weights[f"predict_kv.model.layers.{name}.weight"]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 8)).transpose(1, 2)

    x = weights["model.embed_tokens.weight"][ids]
    y = norm(x, own("0.input_layernorm"))
    q, k, v = (linear(y, own(f"0.self_attn.{name}_proj")) for name in "qkv")
    keys, values = (heads(z).repeat_interleave(2, 1) for z in (k, v))
    scores = oracle.rotate(heads(q)) @ oracle.rotate(keys).transpose(2, 3) / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    x = x + linear((scores.softmax(-1) @ values).transpose(1, 2).flatten(2), own("0.self_attn.o_proj"))
    y = norm(x, own("0.post_attention_layernorm"))
    gate, up = (linear(y, own(f"0.mlp.{name}_proj")) for name in ("gate", "up"))
    x = x + linear(torch.nn.functional.silu(gate) * up, own("0.mlp.down_proj"))
    y = norm(x, own("1.input_layernorm"))
    read = torch.cat([k, v, *(linear(y, own(f"1.self_attn.{name}_proj")) for name in "kv")], -1)
    rows = [heads(linear(read, weights[f"predict_kv.{i}.keys.weight"])) for i in range(5)]
    rows = [oracle.rotate(row) for row in rows]
    rows += [heads(linear(read, weights[f"predict_kv.{i}.values.weight"])) for i in range(5)]
    return torch.stack(rows)


def test_predicted_rows_are_those_of_the_definition(trained: tuple[GraphModule, Context]) -> None:
    weights = {name: value.detach() for name, value in trained[0].named_parameters()}
    found, wanted = predicted(trained[0], IDS), by_definition(weights, IDS)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_perfect_predictors_give_the_model_itself(llama: GraphModule) -> None:
    """Set the predictors of copied layers so that they give the model's own keys and values."""
    names = add_prediction(graph := clone_graph(llama), 2)
    for number, name in enumerate(names):
        weight = torch.zeros(graph.get_parameter(name).shape)
        if number < 4:
            weight[:, 16 * number : 16 * number + 16] = torch.eye(16)
        set_parameter(graph, name, weight)
    caches = [[torch.zeros(2, 2, 1, 8) for _ in range(5)] for _ in range(2)]
    _, keys, values = llama(IDS, torch.arange(12), torch.arange(12), *caches)
    found = predicted(graph, IDS)
    for layer in range(2):
        torch.testing.assert_close(found[layer], keys[layer], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[5 + layer], values[layer], rtol=1e-5, atol=1e-6)
    assert not found[2:5].any()


def test_it_learns_and_leaves_the_model_alone(llama: GraphModule, trained: tuple[GraphModule, Context]) -> None:
    graph, ctx = trained
    loss, cost, quality = ctx.notes
    begun, best = (float(loss.split(word)[0].split()[-1]) for word in (" at the start", " after step"))
    assert best < begun
    plain = dict(without_heads(graph).named_parameters())
    assert plain.keys() == dict(llama.named_parameters()).keys()
    assert all(torch.equal(value, plain[name]) for name, value in llama.named_parameters())
    assert len(ctx.records) == 9 + 10 and all(record.bytes_before == 0 < record.bytes_after for record in ctx.records)
    own, whole = prompt_operations(graph, 64)
    linears = 2 * 32 * 32 + 4 * 32 * 16 + 3 * 32 * 48 + 10 * 64 * 16  # one layer, two pairs of keys and values, maps
    assert own == pytest.approx(linears + 2 * 32 * 65 / 2, rel=0.35) and own < whole / 2  # and attention's products
    assert f"({own / whole:.1%})" in cost and "lossy" in quality


def test_figures_are_those_of_their_definition(trained: tuple[GraphModule, Context]) -> None:
    graph, ids = trained[0], SAMPLES.ids[:3]
    assert isinstance(ids, Tensor)
    plain, prompt = without_heads(graph), ids.shape[1] // 2
    rows = list(predicted(graph, ids[:, :prompt]).unbind(0))
    position = torch.arange(prompt, ids.shape[1])
    keep = torch.arange(len(position))
    caches = [[torch.zeros(3, 2, 1, 8) for _ in range(5)] for _ in range(2)]
    with torch.no_grad():
        own = plain(ids, torch.arange(ids.shape[1]), position, *caches)[0]
        found = plain(ids[:, prompt:], position, keep, rows[:5], rows[5:])[0]
    wanted = [float(cross_entropy(x[:, :-1].flatten(0, 1), ids[:, prompt + 1 :].flatten()).exp()) for x in (own, found)]
    measured = measure_prompts(graph, ids, 2)
    assert [measured.dense, measured.predicted] == pytest.approx(wanted, rel=1e-4)
    assert measured.agreement == pytest.approx(float((own.argmax(-1) == found.argmax(-1)).float().mean()))


def test_the_loss_is_a_divergence_and_the_error_of_rows(trained: tuple[GraphModule, Context]) -> None:
    graph, ids = trained[0], SAMPLES.ids[:2]
    assert isinstance(ids, Tensor)
    prompt, length = ids.shape[1] // 2, ids.shape[1]
    caches = [[torch.zeros(2, 2, 1, 8) for _ in range(5)] for _ in range(2)]
    with torch.no_grad():
        rows = predicted(graph, ids)
        own, *new = without_heads(graph)(ids, torch.arange(length), torch.arange(length), *caches)
        behind, kept = torch.arange(prompt, length), torch.arange(length - prompt)
        given = [[row[:, :, :prompt] for row in half] for half in (rows[:5], rows[5:])]
        found = without_heads(graph)(ids[:, prompt:], behind, kept, *given)[0]
        p, q = ((logits / 2).double().log_softmax(-1) for logits in (own[:, prompt:], found))
        wanted = torch.stack([*new[0], *new[1]])
        error = ((rows - wanted).square().sum(-1) / wanted.square().sum(-1)).mean()
        outputs = TrainableGraph(graph, (), rows_of(graph))(ids)
        loss = prompts_loss(graph, 2.0, 0.5, Device())(ids, outputs, 0)
    assert float(loss) == pytest.approx(4 * float((p.exp() * (p - q)).sum(-1).mean()) + 0.5 * float(error), rel=1e-4)


def test_a_killed_training_goes_on_to_the_same_bits(llama: GraphModule, tmp_path: Path) -> None:
    whole, resumed = whole_and_resumed(lambda ctx: QUICK.run(clone_graph(llama), ctx), tmp_path, 9, samples=SAMPLES)
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_what_is_refused(llama: GraphModule) -> None:
    for options, reason in (
        ({"layers": 0}, "layers 0 is not a number of layers from 1"),
        ({"layers": 1.0}, "layers 1.0 is not a share"),
        ({"temperature": 0.0}, "temperature 0"),
        ({"caches": -1.0}, "caches -1"),
    ):
        with pytest.raises(UsageError, match=reason):
            PredictKv(**options)
    with pytest.raises(UsageError, match="has 5, and a smaller model at least one less"):
        dataclasses.replace(QUICK, layers=5).requires(llama, Context())
    speculating = clone_graph(llama)
    speculating.meta["model"] = dataclasses.replace(llama.meta["model"], speculates=True)
    with pytest.raises(UsageError, match="leave `speculate` out"):
        QUICK.requires(speculating, Context())
    for before, reason in (
        (Rtn("W8A8"), "is packed already; put the pass in front of those that pack"),
        (KvCache("INT8"), "put the pass in front of kv_cache"),
        (SwiftKv(steps=0), "run wanted tokens alone"),
    ):
        with pytest.raises(UsageError, match=reason):
            QUICK.requires(run(llama, before)[0], Context())
    add_prediction(added := clone_graph(llama), 2)
    for step, reason in (
        (QUICK, "give the pass once"),
        (KvCache("INT8"), "predicts float32 caches; leave the pass out"),
        (SwiftKv(steps=0), "leave one of the passes out"),
        (EarlyExit(steps=0), "leave predict_kv or this pass out"),
        (SkipLayers(remove=1.0), "put the pass in front of predict_kv"),
    ):
        with pytest.raises(UsageError, match=reason):
            step.requires(clone_graph(added), Context())

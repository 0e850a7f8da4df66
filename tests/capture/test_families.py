"""Families of text models: captured and quantised by GPTQ, they compute what transformers' models do, also in steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import DECODERS, ENCODERS, LENGTH, POSITIONS, RECURRENT, VOCAB, make, save
from packed_models import by_gptq, exact, heads_of, random_samples, take_packed_weights
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.codegen.lowering.experts.stack import stack_experts
from compressor.errors import CaptureError
from compressor.formats.cache import CacheFormat
from compressor.graph.caches import empty_past, pack_caches

TOLERANCE = 1e-5  # relative, root mean square: float32 sums in another order
# One or two of each cause; benchmarks/families.py runs them all, with kernels.
SHOWN = {
    "GPT-NeoX",  # a weight with another name in the file
    "Cohere",  # repeated angles of rotary embeddings
    "MiniCPM 3",  # keys and values of different width, made of latents
    "GPT-BigCode",  # one head of keys
    "GPT-Neo",  # attention from a table of its own, a window in a buffer
    "Falcon, ALiBi",  # PyTorch's operator, biases inside its mask
    "BLOOM",  # slopes, no positions
    "MPT",  # slopes for a number of heads, a table of biases
    "XGLM",  # heads and batch as one dimension
    "Llama 4",  # chunks in some layers
    "RoBERTa, decoder",  # positions that begin after the number of padding
    "BART, decoder",  # positions counted from the length of its cache
    "MVP, decoder",  # the same, in a model that writes its attention out
    "Mixtral",  # experts, stored one by one
    "OLMoE",
    "Qwen 3, experts",
    "Gemma 3",
    "Llama, tied",
    "OPT",
    "Phi",
    "Gemma 4, shared keys",  # a layer that shares another's keys, layers of different heads and widths
    "Qwen 3 VL, text",  # the half for texts, assignments to slices
    "Llama 4, experts",  # all computed for each token, which chose one
    "DeepSeek 3",  # experts chosen by groups, shared experts, layers without experts
}
SHOWN_RECURRENT = {  # with the operators that have a state
    "LFM2": {"causal_convolution", "cached_attention"},
    "Mamba": {"causal_convolution", "selective_scan"},
    "Mamba 2": {"causal_convolution", "selective_scan"},
    "Qwen3-Next, dense": {"causal_convolution", "gated_delta_rule", "cached_attention"},
    "RWKV": {"causal_convolution", "wkv"},
}
NOT_QUANTISED = {
    "Falcon, ALiBi": "its products with W.T are not recognised as linears",
    "SqueezeBERT": "its linears are convolutions in groups",
}
SHOWN_ENCODERS = {
    "RoBERTa",  # positions from the mask
    "ModernBERT",  # windows
    "ALBERT",  # one block, read again and again
    "BERT",
    "DistilBERT",
    "ELECTRA",
    "T5 encoder",  # relative positions through the interface
    "MPNet",  # relative positions, written out
    "SqueezeBERT",  # keys that come turned
    "DeBERTa",  # sizes that become tensors and numbers again, slices that begin late
    "DeBERTa 2",  # biases of queries and of keys with positions, heads and batch as one dimension
    "XLM",  # other sums where types of tokens are given
    "NomicBERT",  # rows of one stored weight become three weights
    "ESM",  # a name with a star in it
}
REFUSED = {
    "Diffllama": "its keys and values are not those that it stores",
    "OpenAI GPT": "takes no past_key_values",
    "Recurrent Gemma": "keep a state that it computes by one of the functions",
}
REFUSED_ENCODERS = {
    "FNet": "takes no attention_mask",
    "Nyströmformer": "cannot be captured: encoder",
}


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def logits(graph: GraphModule, ids: torch.Tensor, steps: list[int]) -> torch.Tensor:
    begin, found = 0, []
    past = empty_past(graph.meta["model"], len(ids), ids.shape[1])
    for step in steps:
        here = slice(begin, begin + step)
        position = torch.arange(begin, begin + step)
        out, *new = graph(ids[:, here], position, torch.arange(step), *past)
        for cache, rows in zip([*past[0], *past[1]], [*new[0], *new[1]], strict=True):
            cache[:, :, here] = rows
        past[2:] = new[2:]
        found.append(out)
        begin += step
    return torch.cat(found, dim=1)


def tokens() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(3, VOCAB, (2, LENGTH)))


def test_the_list_is_long() -> None:
    assert len(DECODERS) + len(ENCODERS) + len(RECURRENT) >= 80
    assert set(RECURRENT) >= set(SHOWN_RECURRENT)
    assert len(SHOWN) + len(SHOWN_ENCODERS) + len(SHOWN_RECURRENT) - len(NOT_QUANTISED) >= 40
    assert {*DECODERS, *RECURRENT} >= SHOWN | set(REFUSED) and set(ENCODERS) >= SHOWN_ENCODERS | set(REFUSED_ENCODERS)


def check_quantised(graph: GraphModule, model: Any) -> None:
    """Compare a decoder's graph in W4A16 with transformers' model, given the same weights, in float64."""
    ids, heads = tokens(), heads_of(model)
    graph = by_gptq(graph, heads, random_samples(VOCAB, LENGTH))
    prompt = logits(graph, ids, [LENGTH])
    steps = logits(graph, ids, [5, *[1] * (LENGTH - 5)])
    stack_experts(graph)
    take_packed_weights(model, graph)
    assert relative(prompt, exact(model, ids)) < TOLERANCE
    assert relative(steps, prompt) < TOLERANCE


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_decoder(name: str, tmp_path: Path) -> None:
    model: Any = save(tmp_path, *DECODERS[name], True)
    graph, ids = capture(tmp_path), tokens()
    assert relative(logits(graph, ids, [LENGTH]), model(ids).logits) < TOLERANCE
    layers = DECODERS[name][1].get("num_hidden_layers", 2)
    assert sum(node.target is torch.ops.compressor.cached_attention.default for node in graph.graph.nodes) == layers
    if name not in NOT_QUANTISED:
        check_quantised(graph, model)


@pytest.mark.parametrize("name", sorted(SHOWN_RECURRENT))
def test_recurrent(name: str) -> None:
    model: Any = make(*RECURRENT[name], True)
    graph, ids = capture(model), tokens()
    assert relative(logits(graph, ids, [LENGTH]), model(ids).logits) < TOLERANCE
    called = {str(node.target).split(".")[1] for node in graph.graph.nodes if "compressor." in str(node.target)}
    assert called & set.union(*SHOWN_RECURRENT.values()) == SHOWN_RECURRENT[name]
    check_quantised(graph, model)


@pytest.mark.parametrize("name", sorted(SHOWN_ENCODERS))
def test_encoder(name: str, tmp_path: Path) -> None:
    model: Any = save(tmp_path, *ENCODERS[name], False)
    graph, mask = capture(tmp_path), torch.ones(2, LENGTH)
    mask[1, 8:] = 0
    got, expected = graph(tokens(), mask), model(tokens(), attention_mask=mask.long()).last_hidden_state
    assert relative(got[mask.bool()], expected[mask.bool()]) < TOLERANCE
    if name in NOT_QUANTISED:
        return
    graph = by_gptq(graph, [], random_samples(VOCAB, LENGTH))
    take_packed_weights(model, graph)
    got, expected = graph(tokens(), mask), exact(model, tokens(), mask)
    assert relative(got[mask.bool()], expected[mask.bool()]) < TOLERANCE


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_ENCODERS])
def test_what_is_refused_says_why(name: str) -> None:
    decoder, table = name in REFUSED, {**DECODERS, **RECURRENT} if name in REFUSED else ENCODERS
    with pytest.raises(CaptureError, match={**REFUSED, **REFUSED_ENCODERS}[name]):
        capture(make(*table[name], decoder))


def test_packed_caches_are_shared_as_plain_ones_are() -> None:
    graph = capture(make(*DECODERS["Gemma 4, shared keys"], True))
    pack_caches(graph, CacheFormat.parse("INT8"), None)
    caches = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")[3:]]
    assert "all are cached as 2 heads of 32" in " ".join(graph.meta["notes"])
    assert len(caches) == 4 and {cache.dtype for cache in caches} == {torch.uint8}
    assert len({cache.shape[-1] for cache in caches}) == 1
    packed = torch.ops.compressor.packed_attention.default
    assert len(graph.graph.find_nodes(op="call_function", target=packed)) == 3


def test_what_takes_more_memory_is_said(tmp_path: Path) -> None:
    save(tmp_path / "latent", *DECODERS["MiniCPM 3"], True)
    notes = " ".join(capture(tmp_path / "latent", weights=False).meta["notes"])
    assert "latent attention" in notes and "16 channels a head, and are cached with 24" in notes
    save(tmp_path / "relative", *ENCODERS["MPNet"], False)
    assert "2 attention layers add biases" in capture(tmp_path / "relative", weights=False).meta["notes"][0]


def test_positions_that_begin_late_leave_fewer_tokens(tmp_path: Path) -> None:
    save(tmp_path, *DECODERS["RoBERTa, decoder"], True)
    assert capture(tmp_path, weights=False).meta["model"].max_positions == POSITIONS - 1


def test_biases_that_no_rule_expresses_are_refused() -> None:
    """Falcon rounds ALiBi to bfloat16: beyond 256 positions it does not fall evenly."""
    cls, options = DECODERS["Falcon, ALiBi"]
    model = make(cls, {**options, "max_position_embeddings": 600}, True)
    with pytest.raises(CaptureError, match="does not fall evenly with the distance"):
        capture(model)

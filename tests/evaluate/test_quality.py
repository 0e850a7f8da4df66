"""Perplexity, fidelity and gates against plain definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.capture.capture import capture
from compressor.errors import UsageError
from compressor.evaluate.gates import check_gates
from compressor.evaluate.quality import (
    GraphLogits,
    Ids,
    measure_quality,
    sliding_windows,
)
from compressor.recipe.gates import Gate

transformers = pytest.importorskip("transformers")

TABLE = torch.randn(20, 20, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 20, (50,), generator=torch.Generator().manual_seed(1))


def bigram(ids: Ids) -> torch.Tensor:
    return TABLE[torch.as_tensor(ids)]


@given(st.integers(2, 300), st.integers(1, 40), st.integers(1, 40))
def test_every_token_but_the_first_is_scored_once_with_context(tokens: int, window: int, stride: int) -> None:
    if stride > window:
        with pytest.raises(UsageError, match="stride"):
            list(sliding_windows(tokens, window, stride))
        return
    targets: list[int] = []
    for number, (first, last, scored) in enumerate(sliding_windows(tokens, window, stride)):
        assert last - first <= window
        targets += range(last - scored + 1, last + 1)
        if number:
            assert last - scored + 1 - first > window - stride  # tokens before the first that is scored
    assert targets == list(range(1, tokens))


@pytest.mark.parametrize(("window", "stride"), [(16, 8), (16, 16), (7, 1), (500, 250)])
def test_perplexity_of_a_bigram_does_not_depend_on_the_window(window: int, stride: int) -> None:
    result = measure_quality(bigram, TOKENS, window=window, stride=stride)
    losses = torch.nn.functional.cross_entropy(TABLE[TOKENS[:-1]].double(), TOKENS[1:])
    assert result.perplexity == pytest.approx(float(losses.exp()), rel=1e-9)
    assert (result.tokens, result.window, result.stride) == (49, window, stride)
    assert result.dense_perplexity is None
    assert "kl_divergence" not in result.metrics()


def test_fidelity_against_dense_is_measured_in_the_same_sweep() -> None:
    same = measure_quality(bigram, TOKENS, window=16, stride=8, dense=bigram)
    assert same.perplexity == same.dense_perplexity
    assert (same.kl_divergence, same.top1_agreement, same.perplexity_increase) == (0, 1, 0)
    noisy = TABLE + 0.5 * torch.randn(20, 20, generator=torch.Generator().manual_seed(2))
    result = measure_quality(lambda ids: noisy[torch.as_tensor(ids)].numpy(), TOKENS, window=16, stride=8, dense=bigram)
    p, q = (x[TOKENS[:-1]].double().log_softmax(-1) for x in (TABLE, noisy))
    assert result.kl_divergence == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-6)
    assert result.top1_agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert result.dense_perplexity == same.perplexity
    assert result.perplexity is not None and same.perplexity is not None
    assert result.metrics()["perplexity_increase"] == pytest.approx(result.perplexity / same.perplexity - 1)


def test_a_broken_model_has_no_finite_perplexity() -> None:
    result = measure_quality(lambda ids: np.full((*ids.shape, 20), np.nan, np.float32), TOKENS, dense=bigram)
    assert not math.isfinite(result.perplexity or 0)
    assert not check_gates([Gate.parse("perplexity_increase", "<= 3%")], result.metrics())[0].passed


def test_one_token_is_too_few() -> None:
    with pytest.raises(UsageError, match="too few"):
        measure_quality(bigram, TOKENS[:1])


def tiny() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: torch.nn.Module = transformers.LlamaForCausalLM(config).eval()
    return model


def test_eager_and_graph_share_the_definition() -> None:
    model = tiny()

    @torch.no_grad()
    def eager(ids: Ids) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=torch.as_tensor(ids)).logits
        return logits

    result = measure_quality(GraphLogits(capture(model)), TOKENS, window=16, stride=8, dense=eager)
    assert result.perplexity == pytest.approx(result.dense_perplexity, rel=1e-6)
    assert result.kl_divergence == pytest.approx(0, abs=1e-9)
    assert result.top1_agreement == 1

"""Continuations against transformers' own generation, and figures of them against their plain definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import DECODERS, POSITIONS, RECURRENT, VOCAB, make
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from compressor.capture.capture import capture
from compressor.data.load import check_kind
from compressor.errors import RecipeError, UsageError
from compressor.evaluate.fidelity.result import EvalResult
from compressor.evaluate.gates import check_gates
from compressor.evaluate.generation.continuations import (
    NEW_TOKENS,
    agreement,
    graph_continued,
    measure_continuations,
    new_tokens,
    prompts_of,
    repetition,
)
from compressor.evaluate.quality import GraphLogits
from compressor.graph.model import ModelInfo
from compressor.recipe.data_spec import PROMPT_TOKENS, EvaluationSpec
from compressor.recipe.gates import Gate
from compressor.recipe.recipe import Recipe

TOKENS = torch.randint(3, VOCAB, (400,), generator=torch.Generator().manual_seed(0))
rows = st.lists(st.lists(st.integers(0, 2), min_size=8, max_size=8), min_size=1, max_size=4)


def plain_agreement(ours: list[int], dense: list[int]) -> float:
    count = 0
    while count < len(ours) and ours[count] == dense[count]:
        count += 1
    return count / len(ours)


def plain_repetition(tokens: list[int]) -> float:
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return sum(gram in grams[:i] for i, gram in enumerate(grams)) / len(grams)


@settings(max_examples=50, deadline=None)
@given(rows, st.data())
def test_figures_are_their_definitions(ours: list[list[int]], data: Any) -> None:
    dense = [[data.draw(st.sampled_from([token, 0, 0])) for token in row] for row in ours]
    found = agreement(np.array(ours), np.array(dense))
    assert found.tolist() == pytest.approx([plain_agreement(*pair) for pair in zip(ours, dense, strict=True)])
    assert repetition(np.array(ours)).tolist() == pytest.approx([plain_repetition(row) for row in ours])


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "LFM2"])
def test_a_graph_writes_what_transformers_generates(name: str) -> None:
    model = make(*(DECODERS | RECURRENT)[name], True)
    prompts, count = prompts_of(TOKENS, 4), 12
    found = graph_continued(GraphLogits(capture(model)))(prompts, count)
    ids = torch.from_numpy(prompts)
    with torch.no_grad():
        for _ in range(count):  # the whole text anew each time, without a cache
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert found.tolist() == ids[:, PROMPT_TOKENS:].tolist()


def test_a_model_agrees_with_itself_and_less_with_another() -> None:
    graph = capture(make(*DECODERS["Llama"], True))
    dense = GraphLogits(graph)
    same = measure_continuations(EvalResult(), graph_continued(dense), TOKENS, 8, POSITIONS, dense=dense)
    assert (same.continuation_agreement, same.continuations, same.continuation_tokens) == (1.0, 8, 33)
    assert same.repetition == same.dense_repetition is not None

    def other(prompts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Write what the dense model does, up to the middle, and then the same token again and again."""
        found = graph_continued(dense)(prompts, count)
        found[:, count // 2 :] = 1
        return found

    worse = measure_continuations(EvalResult(), other, TOKENS, 8, POSITIONS, dense=dense)
    assert worse.continuation_agreement is not None and worse.repetition is not None
    assert 16 / 33 <= worse.continuation_agreement < 17 / 33 and worse.repetition > same.repetition
    low, high = worse.intervals["continuation_agreement"]
    assert 0 <= low <= worse.continuation_agreement <= high <= 1
    alone = measure_continuations(EvalResult(), other, TOKENS, 8, POSITIONS)
    assert alone.metrics().keys() == {"repetition", "repetition_interval", "continuations", "continuation_tokens"}
    assert measure_continuations(EvalResult(), other, TOKENS, None, POSITIONS) == EvalResult()


def test_prompts_are_apart_and_positions_limit_what_is_new() -> None:
    found = prompts_of(TOKENS, 12)
    assert found.shape == (12, PROMPT_TOKENS) and np.array_equal(found[11], TOKENS[11 * 33 :][:PROMPT_TOKENS].numpy())
    assert (new_tokens(0), new_tokens(1024), new_tokens(40)) == (NEW_TOKENS, NEW_TOKENS, 9)


RECIPE = {"passes": ["rtn"], "evaluation": {"text": "x.txt", "tokens": 512, "continuations": 16}}


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    gates = {"continuation_agreement": ">= 0.8", "repetition": "<= 1.5x dense"}
    steps = [{"rtn": {"scheme": "W8A16"}}]
    recipe = Recipe.from_dict({**RECIPE, "passes": steps, "gates": gates})
    figures = {"continuation_agreement": 0.9, "repetition": 0.2, "dense_repetition": 0.1}
    assert [gate.passed for gate in check_gates(recipe.gates, figures)] == [True, False]
    with pytest.raises(RecipeError, match="add `continuations: 32`"):
        Recipe.from_dict({"passes": steps, "gates": gates, "evaluation": {"text": "x.txt"}})
    with pytest.raises(RecipeError, match="prompts of 32 tokens need 640"):
        Recipe.from_dict(
            {**RECIPE, "passes": steps, "evaluation": {"text": "x.txt", "tokens": 512, "continuations": 20}}
        )
    with pytest.raises(RecipeError, match="never holds"):
        Gate.parse("continuation_agreement", ">= 1.1")
    spec = EvaluationSpec(text=("x.txt",), continuations=4)
    for info, message in (
        (ModelInfo("encoder", "m", "M"), "m is not a decoder"),
        (ModelInfo("decoder", "m", "M", max_positions=34), "m has 34 positions"),
    ):
        with pytest.raises(UsageError, match=message):
            check_kind("evaluation", spec, info)

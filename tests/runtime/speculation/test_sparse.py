"""Drafts from few inputs, on compiled kernels: their logits, and texts that are those of plain steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from compressor_runtime.generation import Sampler
from compressor_runtime.session import Session
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.engine import Engine
from compressor_runtime.speculation.kinds.registry import served
from compressor_runtime.speculation.pace import Always
from compressor_runtime.speculation.text import Lenience, Text
from drafting import compile_drafting
from tiny_models import DECODERS, build, quantized, relative_error

from compressor.capture.capture import capture
from compressor.export.facts import model_facts
from compressor.graph.caches import empty_past
from compressor.graph.kinds.sparse_drafts import limit_drafts, may_draft_sparse, sparse_graph

VOCAB, THRESHOLD = 97, 0.5
ENTRIES = ("verify", "sparse", "main")


@cache
def compiled() -> tuple[Any, Callable[..., Session], dict[str, list[str]]]:
    """Compile a decoder whose drafts skip inputs; returns its graph, what opens a session, and the parameters' names
    by entry.
    """
    graph = quantized(
        capture(build(DECODERS["llama"]())), "W8A16", "re:.*mlp.*"
    )  # other linears are dense, for time's sake
    limit_drafts(graph, {site.name: torch.full((site.in_features,), THRESHOLD) for site in may_draft_sparse(graph)})
    open_session, names = compile_drafting(graph, "sparse")
    return graph, open_session, names


def test_drafts_differ_by_their_thresholds_alone() -> None:
    graph, _, names = compiled()
    assert tuple(names) == ENTRIES and set(names["verify"]) == set(names["main"])
    skipping = [name for name in names["main"] if name.endswith(".thresholds")]
    assert len(skipping) == 6 and all(not graph.get_parameter(name).any() for name in skipping)
    own = {name.replace(".thresholds", ".draft_thresholds") for name in skipping}
    assert set(names["sparse"]) == set(names["main"]) - set(skipping) | own
    assert own | set(names["main"]) == set(dict(graph.named_parameters()))
    read = model_facts(graph)["weight_bytes_per_token"]  # of a plain step: all but the thresholds of drafts
    assert read < sum(4 * one.numel() for one in graph.parameters()) - 4 * sum(
        graph.get_parameter(name).numel() for name in own
    )


def test_a_draft_computes_what_the_graph_with_thresholds_does() -> None:
    graph, open_session, _ = compiled()
    session, ids, count = open_session(), np.random.default_rng(0).integers(0, VOCAB, (1, 9)), torch.arange(9)
    rows = [session.draft("sparse", [token], [ahead])[0] for ahead, token in enumerate(ids[0])]
    with torch.no_grad():
        past = empty_past(graph.meta["model"], 1, 0)
        expected = sparse_graph(graph)(torch.from_numpy(ids), count, count, *past)[0][0]
        exact = graph(torch.from_numpy(ids), count, count, *past)[0][0]
    error, other = (relative_error(np.stack(rows), logits) for logits in (expected, exact))
    assert error < 1e-5 and other > 1e-2, (error, other)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_texts_are_those_of_plain_steps(batch: int, temperature: float) -> None:
    """Sequences of different lengths, whose drafts are verified together."""
    _, open_session, _ = compiled()
    prompts, session = ([5, 6, 7], [1, 2], [3], [9, 8, 4, 2])[:batch], open_session(batch)
    drafts, counts = Drafts(VOCAB, Always(), ENTRIES), Speculation("sparse")
    assert served(ENTRIES) == ("lookup", "recycle", "sparse", "auto") and "sparse" not in served(("verify", "main"))

    def sampler(slot: int) -> Sampler:
        return Sampler(np.random.default_rng(slot), temperature, 0, 0.9)

    texts = []
    for slot, prompt in enumerate(prompts):
        logits = session.verify(prompt, range(-1, len(prompt) - 1), [slot] * len(prompt))
        session.accept({slot: range(len(prompt))})
        texts.append(Text(slot, [*prompt], drafts.start("sparse", session, slot), sampler(slot), {}, 24))
        texts[-1].choose(logits[-1])
    assert list(Engine(session, drafts.pace, drafts.acceptance, counts).rounds(texts))
    assert counts.accepted > 3
    for slot, prompt in enumerate(prompts):
        plain, choose = open_session(), sampler(slot)
        tokens = [choose.pick(plain.step([prompt])[0, -1])]
        while len(tokens) < 24:
            tokens.append(choose.pick(plain.step([tokens[-1:]])[0, -1]))
        assert texts[slot].tokens[len(prompt) :] == tokens


def test_lenient_texts_of_a_batch_are_those_of_one() -> None:
    """Drafts and verifications, of four sequences at a time, have the bits of one's: near choices fall alike."""
    _, open_session, _ = compiled()
    random, lenience = np.random.default_rng(0), Lenience(0.6)
    prompts = tuple(random.integers(VOCAB, size=2 + slot % 3).tolist() for slot in range(6))

    def generated(together: tuple[list[int], ...]) -> tuple[list[list[int]], Speculation]:
        session, drafts = open_session(len(together)), Drafts(VOCAB, Always(), ENTRIES)
        counts, texts = Speculation("sparse"), []
        for slot, prompt in enumerate(together):
            logits = session.verify(prompt, range(-1, len(prompt) - 1), [slot] * len(prompt))
            session.accept({slot: range(len(prompt))})
            chooser = Sampler(np.random.default_rng(0), 0.0, 0, 1.0)
            texts.append(Text(slot, [*prompt], drafts.start("sparse", session, slot), chooser, {}, 24, lenience))
            texts[-1].choose(logits[-1])
        assert list(Engine(session, drafts.pace, drafts.acceptance, counts).rounds(texts))
        return [text.tokens for text in texts], counts

    found, counts = generated(prompts)
    assert counts.lenient > 1
    assert found == [generated((prompt,))[0][0] for prompt in prompts]

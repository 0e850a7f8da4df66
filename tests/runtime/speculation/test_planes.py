"""Drafts from upper planes, on compiled kernels: their logits, and texts that are those of plain steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from compressor_runtime.generation import Sampler
from compressor_runtime.session import Session
from compressor_runtime.speculation.chain import drafted_together
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.engine import Engine
from compressor_runtime.speculation.kinds.registry import served
from compressor_runtime.speculation.pace import Always
from compressor_runtime.speculation.text import Text
from compressor_runtime.speculation.tree import Room
from drafting import compile_drafting
from tiny_models import DECODERS, build, quantized, relative_error

from compressor.capture.capture import capture
from compressor.graph.caches import empty_past
from compressor.graph.kinds.upper_planes import upper_graph

VOCAB = 97
ENTRIES = ("verify", "planes", "main")


@cache
def compiled() -> tuple[Any, Callable[..., Session], dict[str, list[str]]]:
    """Compile a decoder whose codes lie in two planes; returns its graph, what opens a session, and the parameters'
    names by entry.
    """
    graph = quantized(
        capture(build(DECODERS["llama"]())), "W8A8_G32_P4", "re:.*mlp.*"
    )  # other linears are dense, for time's sake
    open_session, names = compile_drafting(graph, "planes")
    return graph, open_session, names


def test_no_byte_is_stored_twice_and_drafts_read_no_lower_plane() -> None:
    graph, _, names = compiled()
    assert tuple(names) == ENTRIES and set(names["verify"]) == set(names["main"]) == set(dict(graph.named_parameters()))
    assert set(names["planes"]) == {name for name in names["main"] if not name.endswith(".lower")}


def test_a_draft_computes_what_the_graph_of_upper_planes_does() -> None:
    graph, open_session, _ = compiled()
    session, ids, count = open_session(), np.random.default_rng(0).integers(0, VOCAB, (1, 9)), torch.arange(9)
    rows = [session.draft("planes", [token], [ahead])[0] for ahead, token in enumerate(ids[0])]
    with torch.no_grad():
        past = empty_past(graph.meta["model"], 1, 0)
        expected = upper_graph(graph)(torch.from_numpy(ids), count, count, *past)[0][0]
        exact = graph(torch.from_numpy(ids), count, count, *past)[0][0]
    error, other = (relative_error(np.stack(rows), logits) for logits in (expected, exact))
    assert error < 1e-5 and other > 1e-2, (error, other)


PROMPTS = ([5, 6, 7], [1, 2], [9, 9, 4, 3], [8])


def read(session: Session, slot: int) -> Any:
    """Let a session read a prompt; returns logits behind it."""
    prompt = PROMPTS[slot]
    slots = [0 if session.batch == 1 else slot] * len(prompt)
    logits = session.verify(prompt, range(-1, len(prompt) - 1), slots)
    session.accept({slots[0]: range(len(prompt))})
    return logits[-1]


def sampler(slot: int, temperature: float) -> Sampler:
    return Sampler(np.random.default_rng(slot), temperature, 0, 0.9)


@pytest.mark.parametrize(("batch", "temperature"), [(1, 0.0), (2, 0.7), (4, 0.0)])
def test_texts_are_those_of_plain_steps(batch: int, temperature: float) -> None:
    """Sequences of different lengths, which are drafted together, verified together, and end at different times."""
    _, open_session, _ = compiled()
    session = open_session(batch)
    drafts, counts = Drafts(VOCAB, Always(), ENTRIES), Speculation("planes")
    assert served(ENTRIES) == ("lookup", "recycle", "planes", "auto") and "planes" not in served(("verify", "main"))
    texts = []
    for slot, prompt in enumerate(PROMPTS[:batch]):
        logits = read(session, slot)
        own = drafts.start("planes", session, slot)
        texts.append(Text(slot, [*prompt], own, sampler(slot, temperature), {}, 30 - 7 * slot))
        texts[-1].choose(logits)
    assert list(Engine(session, drafts.pace, drafts.acceptance, counts).rounds(texts))
    assert counts.accepted > 10 and (not temperature or counts.drafted > counts.accepted)
    for slot, prompt in enumerate(PROMPTS[:batch]):
        plain, choose = open_session(), sampler(slot, temperature)
        tokens = [choose.pick(plain.step([prompt])[0, -1])]
        while len(tokens) < 30 - 7 * slot:
            tokens.append(choose.pick(plain.step([tokens[-1:]])[0, -1]))
        assert texts[slot].tokens[len(prompt) :] == tokens


def test_drafts_of_several_texts_in_one_call_are_those_of_each_alone() -> None:
    _, open_session, _ = compiled()
    calls: list[tuple[int, ...]] = []

    def proposed(session: Session, slots: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        def draft(entry: str, tokens: Any, ahead: Any, own: Any) -> Any:
            calls.append(own)
            return step(entry, tokens, ahead, own)

        step, session.draft = session.draft, draft  # type: ignore[method-assign]
        drafts, walks = Drafts(VOCAB, Always(), ENTRIES), {}
        for slot in slots:
            token = int(read(session, slot).argmax())
            (chain,) = drafts.start("planes", session, 0 if session.batch == 1 else slot)
            chain.extend([*PROMPTS[slot], token])
            walks[slot] = chain.propose(Room(3 + slot, 15, 0.02, sampler(slot, 0.7)))
        trees = drafted_together("planes", walks, drafts.pace, 4, 28)
        return [(trees[slot].tokens, trees[slot].chances) for slot in slots]

    alone = [proposed(open_session(), [slot])[0] for slot in range(4)]
    calls.clear()
    assert proposed(open_session(4), range(4)) == alone and [len(tokens) for tokens, _ in alone] == [3, 4, 5, 6]
    assert calls == [(0, 1, 2, 3)] * 3 + [(1, 2, 3), (2, 3), (3,)]

"""Drafts of heads: their trees, the hidden states that they need, and texts as without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from compressor_runtime import RequestError
from compressor_runtime.generation import Sampler
from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.chain import drafted_together
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.hidden import Hidden
from compressor_runtime.speculation.kinds.heads import Heads, heads_prior
from compressor_runtime.speculation.kinds.recycling import CANDIDATES
from compressor_runtime.speculation.kinds.registry import AUTO, members, served
from compressor_runtime.speculation.pace import Always, Pace
from compressor_runtime.speculation.tree import Room, Tree
from toy_target import ToyTarget, plain

VOCAB, HEADS = 12, 3
TABLE = np.random.default_rng(2).normal(scale=2, size=(VOCAB * VOCAB, VOCAB))
ENTRIES = {"verify", "heads", "main"}


class Headed(ToyTarget):
    """A hidden state is the last token; heads follow the likeliest tokens from it and the next one on."""

    def __init__(self, batch: int = 1) -> None:
        super().__init__(TABLE, batch, seconds=lambda rows: 1 + 0.02 * rows)
        self.hidden = Hidden(self._heads, VOCAB)
        self.asked = 0

    def _heads(self, hidden: Any, following: Any) -> Any:
        self.asked += 1
        self.now += 0.05
        logits = []
        for (last,), token in zip(hidden[0], following[0], strict=True):
            text = [int(last), int(token)]
            for _ in range(HEADS):
                logits.append(self._row(text))
                text.append(int(logits[-1].argmax()))
        return np.reshape(logits, (1, -1, HEADS, VOCAB))

    def step(self, ids: Any, keep: Any = None) -> Any:
        wanted = self.hidden.is_wanted and len(ids[0]) == 1
        self.hidden.forget()
        if wanted:
            self.hidden.give(np.asarray(ids, np.float32))
            self.hidden.keep([(slot, slot) for slot in range(self.batch)])
        return super().step(ids, keep)

    def verify(self, ids: Any, parent: Any, slot: Any = None) -> Any:
        self.hidden.give(np.asarray(ids, np.float32)[:, None])
        return super().verify(ids, parent, slot)

    def accept(self, paths: Mapping[int, Sequence[int]]) -> None:
        super().accept(paths)
        self.hidden.keep([(slot, path[-1]) for slot, path in paths.items()])


@pytest.mark.parametrize("pace", [Pace, Always])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["heads", AUTO])
def test_texts_are_those_of_plain_decoding(kind: str, temperature: float, pace: type[Pace]) -> None:
    def sampler() -> Sampler:
        return Sampler(np.random.default_rng(5), temperature, 0, 1.0)

    wanted, _ = plain(ToyTarget(TABLE), [1, 2], sampler(), {}, 300)
    target, counts = Headed(), Speculation(kind)
    drafts = Drafts(VOCAB, pace(lambda: target.now), entries=ENTRIES)
    assert [*drafts.tokens(target, np.array([[1, 2]]), sampler(), {}, 300, counts)] == wanted
    if kind == "heads":
        assert target.asked >= counts.verifications > 50
    if temperature == 0 and kind == "heads":  # heads know all tokens
        assert counts.tokens_per_verification > (3.9 if pace is Always else 3)
        assert target.now < 0.5 * 300 * 1.02


def test_a_hidden_state_is_that_of_the_last_token_read() -> None:
    target, acceptance = Headed(batch=2), Acceptance(heads_prior)
    draft, pace = Heads(target.hidden, 1, acceptance), Always()
    room = Room(15, 15, 0.02, Sampler(np.random.default_rng(0), 0.0, 0, 1.0))
    target.step([[1, 2], [3, 4]])
    draft.extend([3, 4, 5])

    def proposed() -> Tree:
        return drafted_together("heads", {0: draft.propose(room)}, pace, 2, 15)[0]

    assert len(proposed()) == 0 and target.asked == 0  # no prompt keeps one, and now one is wanted
    assert pace.draft_s("heads") is None  # nothing was read
    target.step([[6], [5]])
    assert target.hidden.of(1).tolist() == [5] and target.hidden.of(0).tolist() == [6]  # type: ignore[union-attr]
    draft.extend([7])
    tree = proposed()
    assert target.asked == 1 and 3 < len(tree) <= 15
    best, text = -1, [5, 7]
    for depth in range(1, HEADS + 1):
        text.append(int(target._row(text).argmax()))
        best = tree.children(best)[text[-1]]
        assert tree.sources[best] == ("heads", depth, 0)
    assert not tree.children(best) and len(tree.children(-1)) > 1  # as deep as there are heads, and other candidates
    target.verify([7, 8, 9, 9], [-1, 0, 1, -1], [1, 1, 1, 0])
    target.accept({1: [0, 1], 0: [3]})
    assert [target.hidden.of(slot).tolist() for slot in (0, 1)] == [[9], [8]]  # type: ignore[union-attr]
    target.hidden.give(None)
    target.hidden.keep([(0, 0)])
    assert target.hidden.of(0).tolist() == [9]  # type: ignore[union-attr]
    target.hidden.forget()
    assert target.hidden.of(0) is None


def test_who_serves_heads() -> None:
    assert "heads" not in served({"verify", "main"}) and "heads" in served(ENTRIES)
    assert [one.name for one in members(AUTO, ENTRIES)][-1] == "heads"
    assert sum(heads_prior(("heads", 1, rank)) for rank in range(CANDIDATES)) <= 1


def test_what_is_refused() -> None:
    without = Hidden(None, VOCAB)
    assert without.of(0) is None and not without.is_wanted
    with pytest.raises(RequestError, match="compress the model with the pass `draft_heads`"):
        without.heads([[1.0]], [1])
    hidden = Headed().hidden
    for states, tokens, reason in (
        ([[1.0]], [VOCAB], "the model knows 0 to 11"),
        ([[1.0]], [1, 2], "give a row for each"),
        ([1.0], [1], "give a row for each"),
        ("a", [1], "give an array of numbers"),
    ):
        with pytest.raises(RequestError, match=reason):
            hidden.heads(states, tokens)

"""Lenient texts follow the rule that the decision states, whatever steps take, how many texts there are, and where they
end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from compressor_runtime.generation import Sampler
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.engine import Engine
from compressor_runtime.speculation.pace import Always, Pace
from compressor_runtime.speculation.text import Lenience, Text
from toy_target import ToyTarget, plain

VOCAB, NODES = 7, 7
RANDOM = np.random.default_rng(5)
TABLE = RANDOM.normal(scale=2, size=(VOCAB * VOCAB, VOCAB)).astype(np.float32)
DRAFTS = (TABLE + RANDOM.normal(scale=1.0, size=TABLE.shape)).astype(np.float32)
ENTRIES = ("verify", "sparse")


class Drafting(ToyTarget):
    """A toy whose drafts come from another table."""

    def draft(self, entry: str, ids: Sequence[int], ahead: Sequence[int], slots: Sequence[int]) -> np.ndarray:
        assert entry == "sparse"
        self.now += 1.0
        behind = self.__dict__.setdefault("behind", {})
        for token, place, slot in zip(ids, ahead, slots, strict=True):
            behind[slot] = [*behind.get(slot, [])[:place], token]
        return np.stack([ToyTarget(DRAFTS)._row(self.texts[slot][-2:] + behind[slot]) for slot in slots])


def by_hand(prompt: Sequence[int], tolerance: float, ends: dict[int, str], count: int) -> tuple[list[int], str]:
    """Return a lenient text by the rule: seven drafted tokens, then those that are likely enough, then the model's."""
    probabilities = np.exp(TABLE.astype(np.float64))
    probabilities /= probabilities.sum(1, keepdims=True)

    def row(text: Sequence[int]) -> int:
        return (text[-2] * VOCAB + text[-1]) % len(TABLE)

    text, first = list(prompt), True
    while len(text) - len(prompt) < count:
        drafted = list(text)
        while len(drafted) - len(text) < (0 if first else NODES) and not {*drafted[len(text) :]} & {*ends}:
            drafted.append(int(DRAFTS[row(drafted)].argmax()))
        first = False
        for place in range(len(text), len(drafted) + 1):
            own = int(TABLE[row(text)].argmax())
            if own in ends:
                return text[len(prompt) :][:count], ends[own] if len(text) - len(prompt) < count else "length"
            guess = drafted[place] if place < len(drafted) and drafted[place] not in ends else None
            likely = probabilities[row(text)]
            text.append(guess if guess is not None and likely[guess] >= (1 - tolerance) * likely[own] else own)
            if guess is None or text[-1] != guess:
                break
    return text[len(prompt) :][:count], "length"


def lenient(
    prompt: Sequence[int], tolerance: float, ends: dict[int, str], count: int, seconds: float, limit: int = 10**9
) -> tuple[tuple[list[int], str], Speculation]:
    """Generate alone, by the drafts of a bundle."""
    target = Drafting(TABLE, limit=limit, seconds=lambda rows: seconds * rows)
    drafts, counts, tokens = Drafts(VOCAB, Pace(lambda: target.now), ENTRIES), Speculation("sparse"), list[int]()
    counts.lossy = {"tolerance": tolerance}
    room = limit + 1 - len(prompt)
    walk = drafts.tokens(target, np.array([prompt]), greedy(), ends, min(count, room), counts, room - min(count, room))
    while True:
        try:
            tokens.append(next(walk))
        except StopIteration as end:
            return (tokens, end.value), counts


def greedy() -> Sampler:
    return Sampler(np.random.default_rng(0), 0.0, 0, 1.0)


@pytest.mark.parametrize("tolerance", [0.01, 0.3, 0.8, 1.0])
def test_a_text_is_that_of_the_rule_whatever_steps_take(tolerance: float) -> None:
    taken = changed = 0
    for trial in range(8):
        prompt = np.random.default_rng(trial).integers(VOCAB, size=3).tolist()
        ends = {} if trial % 2 else {trial % VOCAB: "eos_token"}
        wanted = by_hand(prompt, tolerance, ends, 60)
        for seconds in (0.001, 100.0):
            found, counts = lenient(prompt, tolerance, ends, 60, seconds)
            assert found == wanted
            taken += counts.lenient
        for count in (1, 5, 20, 33):  # a shorter text is the beginning of a longer one
            assert lenient(prompt, tolerance, ends, count, 1.0)[0][0] == wanted[0][:count]
        cut = lenient(prompt, tolerance, ends, 60, 1.0, limit=30)[0][0]
        assert cut[:27] == wanted[0][:27]  # behind the model's last position nothing is drafted
        changed += plain(ToyTarget(TABLE), prompt, greedy(), ends, 60) != wanted
    assert (taken, changed) == (0, 0) if tolerance == 0.01 else (taken > changed > 0)


def test_texts_together_are_those_alone() -> None:
    """Six sequences, of which four fill a verification."""
    prompts = [[slot, (3 * slot) % VOCAB, 1] for slot in range(6)]
    target, counts = Drafting(TABLE, batch=6), Speculation("sparse", {"tolerance": 0.5})
    drafts = Drafts(VOCAB, Always(lambda: target.now), ENTRIES)
    texts = [
        Text(slot, [*prompt], drafts.start("sparse", target, slot), greedy(), {}, 20 + slot, Lenience(0.5, NODES))
        for slot, prompt in enumerate(prompts)
    ]
    for text, logits in zip(texts, target.step(prompts), strict=True):
        text.choose(logits[-1])
    assert list(Engine(target, drafts.pace, drafts.acceptance, counts).rounds(texts))
    assert counts.lenient > 6 and max(counts.rows) == 32
    for text, prompt in zip(texts, prompts, strict=True):
        assert text.tokens[3:] == by_hand(prompt, 0.5, {}, 20 + text.slot)[0]

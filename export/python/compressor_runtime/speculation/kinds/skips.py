"""Draft with the model without some of its attentions and feed-forward networks (SWIFT, arXiv:2410.06916).

    embedding -> attention 0 -> ffn 0 -> ...  attention 1 left out ... -> ffn 3 -> norm, head

Which ones are left out was chosen when the model was compressed, by measured times and agreement; the bundle lists a
few such subsets, and drafts move between them by what acceptance and time turn out to be.  The paper searches one
subset for each stream of texts, by Bayesian optimisation, in its first tokens.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compressor_runtime.speculation.chain import Chain, Mean, chain_prior
from compressor_runtime.speculation.cost import forecast
from compressor_runtime.speculation.kinds.kind import VERIFY, Kind, Shared
from compressor_runtime.speculation.pace import Pace
from compressor_runtime.speculation.parts import BEGIN, END
from compressor_runtime.speculation.tree import Room, Walk

SKIPPING = "self"
"""Name of the kind."""
SKIPS = "skips"
"""The manifest's fact about the model that lists subsets."""
CHAIN = 8
"""Tokens of a chain for which subsets are compared."""
_OTHERS_EACH = 16  # drafts, of which one is by another subset than the best: how it would do is known again
_LAST_TIMES = 9  # times of a subset, of which the median counts


@dataclass(eq=False)
class Subset:
    """Some of the parts of a model, and how drafts by them do.

    Attributes:
        kept: indices of the parts that run, rising.
        agreement: how often its guesses are right; begins at what was measured on calibration text.
        cost: of one drafted token, in steps, as it was measured when the model was compressed.
        seconds: of drafted tokens, the last ones; of tokens in one call, the share of each.
        tried: number of the draft that it made last.
    """

    kept: tuple[int, ...]
    agreement: Mean
    cost: float
    seconds: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=_LAST_TIMES))
    tried: int = 0


class Choice:
    """The subsets of a model, and which one drafts next; texts share it.

    Args:
        facts: of each subset, as the manifest has them: ``without``, ``agreement`` and ``cost``; the first is what was
            the best when the model was compressed.
        names: of the parts, in order.
    """

    def __init__(self, facts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
        self.subsets = [
            Subset(
                tuple(index for index, name in enumerate(names) if name not in one["without"]),
                Mean(float(one["agreement"])),
                float(one["cost"]),
            )
            for one in facts
        ]
        self._drafts = 0

    def next(self, pace: Pace) -> int:
        """Return the index of the subset that is expected to give most tokens per second, or of one to try again."""
        self._drafts += 1
        best = max(range(len(self.subsets)), key=lambda index: self._speedup(self.subsets[index], pace))
        if self._drafts % _OTHERS_EACH == 0 and len(self.subsets) > 1:
            others = (index for index in range(len(self.subsets)) if index != best)
            best = min(others, key=lambda index: self.subsets[index].tried)
        self.subsets[best].tried = self._drafts
        return best

    def _speedup(self, subset: Subset, pace: Pace) -> float:
        if not pace.knows(1):
            return forecast(subset.agreement.value, subset.cost, [1.0] * CHAIN).speedup
        step = pace.seconds(1)
        cost = median(subset.seconds) / step if len(subset.seconds) > 1 else subset.cost
        verification = [pace.seconds(1 + rows) / step for rows in range(1, CHAIN + 1)]
        return forecast(subset.agreement.value, cost, verification).speedup


@dataclass(frozen=True)
class Skipping:
    """Step through drafts by some of the parts.

    Keys and values of the parts that run lie behind the stored ones until what is verified writes over them; the others
    keep theirs of verified tokens, which no draft of this subset reads.

    Attributes:
        session: a :class:`compressor_runtime.session.Session` whose parts are halves of blocks.
        pace: has the clock.
        subset: the parts, and the times of their steps.
    """

    session: Any
    pace: Pace
    subset: Subset

    def step(self, tokens: Sequence[int], ahead: Sequence[int], slots: Sequence[int]) -> NDArray[np.float32]:
        """Read a token of each of some texts, behind the stored ones; return logits [R, 1, V] of the next ones."""
        begin = self.pace.clock()
        logits = through(self.session, tokens, ahead, slots, self.subset.kept)[:, None]
        self.subset.seconds.append((self.pace.clock() - begin) / len(tokens))
        return logits


def through(
    session: Any, ids: ArrayLike, ahead: ArrayLike, slot: ArrayLike, kept: Sequence[int]
) -> NDArray[np.float32]:
    """Return logits [T, V] of drafted tokens that go through some of the parts; arguments as of ``Session.draft``."""
    rows = session.begin(ids, ahead, slot)
    session.parts.forget()  # a verification runs the whole in one entry: an embedding is not worth its parts' calls
    for index in kept:
        session.parts.run(rows, index)
    logits: NDArray[np.float32] = session.parts.end(rows, np.arange(len(np.asarray(ids))))
    return logits


class Drafter:
    """Draft one text, each time by the subset that is best then.

    Args:
        shared: what the texts of the model share.
        session: as of :class:`Skipping`.
        slot: number of the text in it.
        choice: of subsets.
    """

    name = SKIPPING
    reads_logits = False

    def __init__(self, shared: Shared, session: Any, slot: int, choice: Choice) -> None:
        self._pace, self._choice = shared.pace, choice
        self._chains = [
            Chain(SKIPPING, Skipping(session, shared.pace, one), slot, shared.acceptance, one.agreement)
            for one in choice.subsets
        ]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text; the subset that drafted last learns how far it was right."""
        for chain in self._chains:
            chain.extend(tokens)

    def observe(self, tokens: NDArray[np.int64], logits: NDArray[np.float32]) -> None:
        """Do nothing: only the text counts."""

    def propose(self, room: Room) -> Walk:
        """Ask for a chain of tokens."""
        return self._chains[self._choice.next(self._pace)].propose(room)


def _make_skipping(shared: Shared, session: Any, slot: int) -> Drafter:
    if SKIPPING not in shared.kept:
        shared.kept[SKIPPING] = Choice(session.parts.skips, session.parts.names)
    return Drafter(shared, session, slot, shared.kept[SKIPPING])


SELF = Kind(SKIPPING, _make_skipping, chain_prior, (VERIFY, BEGIN, END), facts=(SKIPS,))
"""Drafts of the model itself, without some of its parts."""

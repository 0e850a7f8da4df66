"""Hold one sequence of a session as far as it has come, and choose its next tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.generation import Sampler
from compressor_runtime.speculation.tree import Draft

MOST_NODES = 15
"""Drafted tokens of one text in a verification."""

LENIENT_NODES = 7
"""Drafted tokens of a lenient text in each verification, always so many: the text depends on them.  Four texts fill the
32 rows for which a row's bits do not depend on the others."""


@dataclass(frozen=True)
class Lenience:
    """Take drafted tokens that the model finds nearly as likely as its own choice, in a greedy text.

    A token is taken if its probability is at least (1 - tolerance) times the likeliest one's: the lenience of Leviathan
    et al. 2023 (arXiv:2211.17192, appendix A.5) for greedy choices.  Sirius (arXiv:2409.03856), which corrects drafts
    from few inputs so, compares the probability itself with a number.

    Attributes:
        tolerance: above 0, and at most 1, which takes every drafted token.
        spare: further tokens that the model has room for behind those that the text may gain.  Drafts go on into it, so
            that a shorter text is the beginning of a longer one.
    """

    tolerance: float
    spare: int = 0

    def takes(self, token: int, logits: NDArray[np.float32]) -> bool:
        """Tell whether a drafted token stands in for the likeliest one of logits [V]."""
        below = math.log1p(-self.tolerance) if self.tolerance < 1 else -math.inf
        return float(logits[token]) >= float(logits.max()) + below


@dataclass
class Text:
    """One sequence of a session, as far as it has come.

    Attributes:
        slot: its number in the session.
        tokens: its prompt, and what it has gained; the last one is pending: the model has not read it.
        drafts: guess how it goes on.
        sampler: chooses its tokens.
        ends: tokens that end it, each with the reason.
        left: at most so many further tokens; the model has room for one less.
        lenience: takes some drafted tokens that are not the model's choice; None takes none.
        lenient: how many of its tokens are such.
        finish_reason: why it ended; None while it goes on.
        told: how many of its tokens each draft knows.
        awake: drafts that take part in this round.
    """

    slot: int
    tokens: list[int]
    drafts: Sequence[Draft]
    sampler: Sampler
    ends: Mapping[int, str]
    left: int
    lenience: Lenience | None = None
    lenient: int = 0
    finish_reason: str | None = None
    told: dict[str, int] = dataclasses.field(default_factory=dict)
    awake: Sequence[Draft] = ()

    @property
    def most_nodes(self) -> int:
        """Drafted tokens of its next verification, at most: behind as many tokens as may come, no row is of use."""
        if self.lenience is None:
            return min(MOST_NODES, self.left - 1)
        return min(LENIENT_NODES, self.left - 1 + self.lenience.spare)

    def choose(self, logits: NDArray[np.float32], drafted: Collection[int] = ()) -> int | None:
        """Choose the next token from logits [V]; None where it ends the text.

        Args:
            drafted: tokens that a lenient text takes in place of the model's choice if they are nearly as likely, the
                first in order; where the model ends the text, it ends.
        """
        token = self.sampler.pick(logits)
        if token in self.ends:
            self.finish_reason = self.ends[token]
            return None
        if self.lenience is not None and token not in drafted:
            near = [one for one in drafted if self.lenience.takes(one, logits)]
            self.lenient += bool(near)
            token = (*near, token)[0]
        self.tokens.append(token)
        self.left -= 1
        if not self.left:
            self.finish_reason = "length"
        return token


def together(texts: Sequence[Text], most_rows: int) -> Iterator[Sequence[Text]]:
    """Yield texts in groups that are verified together: all, but of lenient ones as many as have room for their drafts.

    Args:
        most_rows: of a verification.
    """
    lenient = any(text.lenience is not None for text in texts)
    count = max(1, most_rows // (1 + LENIENT_NODES)) if lenient else len(texts)
    for begin in range(0, len(texts), count):
        yield texts[begin : begin + count]

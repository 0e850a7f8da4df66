"""Predict what speculation gains: expected tokens a verification over what they cost.

All times are in steps: the time of one token without speculation is 1.  The expectation for a chain whose tokens are
accepted independently is that of Leviathan et al., "Fast inference from transformers via speculative decoding"
(arXiv:2211.17192), equation 1; costs of drafts and verifications are measured here, not assumed to be constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Forecast:
    """Hold the gain that is expected of a chain of drafted tokens, at its best length.

    Attributes:
        length: drafted tokens a verification, at least 1.
        tokens: expected tokens a verification, the model's own included.
        speedup: expected tokens per second over those of plain steps.
        draft_cost: time of one drafted token, in steps.
        acceptance: probability that a drafted token is accepted, given that those before it are.
    """

    length: int
    tokens: float
    speedup: float
    draft_cost: float
    acceptance: float

    @property
    def pays(self) -> bool:
        """Tell whether it is expected to be faster than plain steps."""
        return self.speedup > 1

    def __str__(self) -> str:
        best = f"pays with {self.length} tokens a draft" if self.pays else "would not pay"
        return (
            f"{best}: a draft step costs {self.draft_cost:.2g} of a step, acceptance {self.acceptance:.2g}, "
            f"{self.speedup:.2f}x expected"
        )


def expected_tokens(acceptance: float, length: int) -> float:
    """Return the expected tokens of verifying a chain: 1 + a + a^2 + ... + a^length."""
    return sum(acceptance**i for i in range(length + 1))


def forecast(acceptance: float, draft_cost: float, verification: Sequence[float]) -> Forecast:
    """Return the best length of a chain, and what is expected of it, also where that is less than plain steps.

    Args:
        acceptance: probability that a drafted token is accepted, given that those before it are.
        draft_cost: time of drafting one token, in steps.
        verification: time of verifying k drafted tokens with the one before them, for k = 1, 2, ..., in steps.
    """
    found = []
    for length, verified in enumerate(verification, 1):
        tokens = expected_tokens(acceptance, length)
        found.append(Forecast(length, tokens, tokens / (verified + length * draft_cost), draft_cost, acceptance))
    return max(found, key=lambda one: one.speedup)


def best_count(chances: Sequence[float], sequences: int, seconds: Callable[[int], float], margin: float = 0.0) -> int:
    """Return how many drafted tokens to verify so that most tokens per second are expected.

    Args:
        chances: probability that each is accepted, falling.
        sequences: texts that get one token each, whatever is drafted.
        seconds: rows -> time of a verification of so many.
        margin: how much better than plain steps it must be.
    Returns:
        0 where plain steps are expected to be as fast.
    """
    tokens = float(sequences)
    best, highest = 0, (1 + margin) * tokens / seconds(sequences)
    for count, chance in enumerate(chances, 1):
        tokens += chance
        rate = tokens / seconds(sequences + count)
        if rate > highest:
            best, highest = count, rate
    return best


def is_worth_drafting(
    chances: Sequence[float],
    following: float,
    most: int,
    sequences: int,
    seconds: Callable[[int], float],
    draft_s: float,
    margin: float = 0.0,
    together: int = 1,
) -> bool:
    """Tell whether to draft a further token of a chain, given what drafting and verifying take.

    Time has a price, the most tokens per second that can be had: those of plain steps, or of chains of the best length
    (:func:`forecast`).  A further token is drafted if some number of further ones, at that price, is expected to bring
    more than verifying the chain as it stands.  What was spent on it is spent either way.  Where texts draft together,
    a token of each in one call, the others are taken to be like this one.

    Args:
        chances: probability that each token drafted so far is accepted, falling.
        following: probability that a further one is right, given that those before it are.
        most: tokens of the chain, at most.
        sequences: texts that get one token each and wait while some of them draft.
        seconds: rows -> time of a verification of so many.
        draft_s: time of drafting one token, of each text that drafts.
        margin: how much better than plain steps it must be.
        together: texts that draft.
    """
    plain = (1 + margin) * sequences / seconds(sequences)
    fresh = (sequences - together + together * expected_tokens(following, n) for n in range(1, most + 1))
    price = max(
        plain,
        *(tokens / (seconds(sequences + together * n) + n * draft_s) for n, tokens in enumerate(fresh, 1)),
        0.0,
    )
    count = len(chances)
    now = -price * seconds(sequences + together * count)
    last, gained = chances[-1] if chances else 1.0, 0.0
    for n in range(1, most - count + 1):
        last *= following
        gained += together * last
        if gained - price * (seconds(sequences + together * (count + n)) + n * draft_s) > now:
            return True
    return False

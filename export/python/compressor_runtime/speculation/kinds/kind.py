"""Say what a kind of drafts is, and what its drafts share from one text to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.chain import Chain, Mean, chain_prior
from compressor_runtime.speculation.pace import Pace
from compressor_runtime.speculation.tree import Draft, Stepper

VERIFY = "verify"
"""The entry of a library that every kind needs."""


@dataclass(frozen=True)
class Shared:
    """Hold what the texts of a model share.

    Attributes:
        vocab_size: tokens of the model.
        pace: times of steps, verifications and steps of drafts.
        acceptance: estimates of guesses.
        kept: name of a kind -> what its drafts keep, made by the first of them.
    """

    vocab_size: int
    pace: Pace
    acceptance: Acceptance
    kept: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """One kind of drafts.

    Attributes:
        name: that recipes and requests say; guesses have it as the first part of their sources.
        make: (shared, session, slot) -> the drafts of one text, which is the session's sequence of that number.  Drafts
            of a model call entries of the session; others take no notice of it.
        prior: what a guess rests on -> how often it is right, before any was seen.
        needs: entries that a library must have; a bundle serves the kind if its library does.
        is_automatic: it takes part in ``auto``.
        facts: that a manifest must state about the model, for a bundle to serve the kind.
    """

    name: str
    make: Callable[[Shared, Any, int], Draft]
    prior: Callable[[Hashable], float]
    needs: tuple[str, ...] = (VERIFY,)
    is_automatic: bool = True
    facts: tuple[str, ...] = ()


def kind_of_chains(name: str, stepper: Callable[[Any], Stepper], needs: tuple[str, ...]) -> Kind:
    """Return the kind whose drafts are chains of a model.

    Args:
        stepper: session -> the model; of one session they are equal.
        needs: entries that a library must have beside the one that verifies.
    """

    def make(shared: Shared, session: Any, slot: int) -> Chain:
        mean = shared.kept.setdefault(name, Mean())
        return Chain(name, stepper(session), slot, shared.acceptance, mean)

    return Kind(name, make, chain_prior, (VERIFY, *needs))

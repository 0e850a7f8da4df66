"""Read how a recipe's bundle drafts tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, StrictInt

from compressor.recipe.data_spec import Section
from compressor.recipe.located_yaml import nearest


class ExitSpec(Section):
    """Drafts with the model's own first layers.

    Attributes:
        kind: ``exit``.
        layer: transformer blocks of a draft; None for half of the model's.
    """

    kind: Literal["exit"]
    layer: StrictInt | None = Field(default=None, ge=1)


def check_kind(kind: str) -> None:
    """Refuse a kind of drafts that the run-time does not have; raises ValueError."""
    from compressor_runtime.speculation.kinds.registry import SPECULATIONS  # the run-time: only where it is asked

    if kind not in SPECULATIONS:
        raise ValueError(f"unknown kind of drafts {kind!r:.80}; {nearest(kind, SPECULATIONS)}")

"""Read how a recipe's bundle drafts tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

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


def read_drafts(given: Any) -> Any:
    """Return a kind of drafts, with its options if there are any, as a recipe gives it; raises ValueError."""
    if given is None or isinstance(given, ExitSpec):
        return given
    if isinstance(given, Mapping):
        layer = given.get("layer")
        wrong = type(layer) is not int or layer < 1
        if given.get("kind") != "exit" or not {*given} <= {"kind", "layer"} or ("layer" in given and wrong):
            raise ValueError(f"{dict(given)!r:.80}: options are {{kind: exit, layer: 1 or more}}")
        return ExitSpec(kind="exit", layer=layer)
    from compressor_runtime.speculation.kinds.registry import SPECULATIONS  # the run-time: only where it is asked

    if given not in SPECULATIONS:
        raise ValueError(f"unknown kind of drafts {given!r:.80}; {nearest(str(given), SPECULATIONS)}")
    return given

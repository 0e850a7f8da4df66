"""Read how a recipe's bundle drafts tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, StrictFloat, StrictInt, ValidationError

from compressor.recipe.data_spec import Section
from compressor.recipe.located_yaml import nearest

DEFAULT_SPARSITY = 0.5
"""Share of the weights that a draft of few inputs does not read, where the recipe does not say."""


class ExitSpec(Section):
    """Drafts with the model's own first layers.

    Attributes:
        kind: ``exit``.
        layer: transformer blocks of a draft; None for half of the model's.
    """

    kind: Literal["exit"]
    layer: StrictInt | None = Field(default=None, ge=1)


class SparseSpec(Section):
    """Drafts with the model's own weights, of which small inputs are skipped.

    Attributes:
        kind: ``sparse``.
        sparsity: share of the weights that a draft does not read, above 0 and at most 0.95.
        tolerance: greedy texts take drafted tokens that are at least 1 - tolerance times as likely as the likeliest;
            0 to 1, and above 0 they are lossy.
    """

    kind: Literal["sparse"]
    sparsity: StrictFloat = Field(default=DEFAULT_SPARSITY, gt=0, le=0.95)
    tolerance: StrictFloat = Field(default=0.0, ge=0, le=1)


def read_drafts(given: Any) -> Any:
    """Return a kind of drafts, with its options if there are any, as a recipe gives it; raises ValueError."""
    if given is None or isinstance(given, ExitSpec | SparseSpec):
        return given
    if isinstance(given, Mapping):
        spec = SparseSpec if given.get("kind") == "sparse" else ExitSpec
        try:
            return spec.model_validate(dict(given))
        except ValidationError as error:
            sparse = "{kind: sparse, sparsity: above 0, at most 0.95, tolerance: 0 to 1}"
            options = f"{{kind: exit, layer: 1 or more}} and {sparse}, which alone may be lossy"
            raise ValueError(f"{dict(given)!r:.80}: options are {options}") from error
    from compressor_runtime.speculation.kinds.registry import SPECULATIONS  # the run-time: only where it is asked

    if given not in SPECULATIONS:
        raise ValueError(f"unknown kind of drafts {given!r:.80}; {nearest(str(given), SPECULATIONS)}")
    return given

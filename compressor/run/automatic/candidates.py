"""Propose passes for a budget: formats of one kind, formats by layer, and fewer or narrower layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from compressor.errors import UsageError
from compressor.recipe.gates import parse_amount

Steps = list[dict[str, dict[str, Any]]]
"""Passes as recipes write them."""
_GROUPS = (128, 64, 32)
_TABLE = "W8A16"
_BITS = (5.0, 3.5)
KINDS = ("weight_bytes", "latency")


@dataclass(frozen=True)
class Budget:
    """Hold the one limit.

    Attributes:
        kind: ``weight_bytes``: bytes of all parameters; ``latency``: a decoder's step, or an image, as a share of the
            dense model's.
        limit: bytes, or the share.
    """

    kind: str
    limit: float

    def told(self, value: float) -> str:
        """Write an amount of this kind."""
        return f"{value:,.0f} bytes" if self.kind == "weight_bytes" else f"{value:.3f} of the dense model's time"


def read_budget(text: str) -> Budget:
    """Return the budget that ``KIND=AMOUNT`` states.

    Raises:
        UsageError: the text is not of this form, or the amount is out of range.
    """
    kind, _, amount = text.partition("=")
    if kind not in KINDS or not amount:
        raise UsageError(f"budget {text!r:.80}: give weight_bytes=AMOUNT, such as 4MB, or latency=SHARE, such as 0.6")
    if kind == "weight_bytes":
        limit = parse_amount(kind, amount if not amount.replace(".", "", 1).isdigit() else float(amount))
        if not 0 < limit < math.inf:
            raise UsageError(f"budget {text!r:.80}: give more than 0 bytes")
        return Budget(kind, limit)
    try:
        limit = float(amount)
    except ValueError:
        limit = math.nan
    if not 0 < limit < 1:
        raise UsageError(f"budget {text!r:.80}: latency is a share of the dense model's step, between 0 and 1")
    return Budget(kind, limit)


@dataclass(frozen=True)
class Candidate:
    """Hold passes to try.

    Attributes:
        name: for people.
        kind: ``uniform``, ``mixed`` or ``architecture``.
    """

    name: str
    kind: str
    passes: Steps


@dataclass(frozen=True)
class Formats:
    """Hold the formats that candidates are made of, and make their passes.

    Attributes:
        schemes: of the blocks' linears, the largest first.
        tables: of embeddings; None for a model without any.
    """

    schemes: tuple[str, ...]
    tables: tuple[str | None, ...]

    @classmethod
    def of(cls, inputs: Iterable[int]) -> Formats:
        """Return those for linears with so many inputs: the largest groups that divide some of them."""
        counts = [*inputs]
        group = next((size for size in _GROUPS if any(count % size == 0 for count in counts)), _GROUPS[-1])
        schemes = ("W8A16", *(f"W{bits}A16_G{group}" for bits in (6, 4, 3, 2)))
        return cls(schemes, (_TABLE, f"W4A16_G{min(64, group)}"))

    @property
    def searched(self) -> tuple[str, str]:
        """Formats that architectures are searched for: of 8 bits and of 4."""
        return self.schemes[0], self.schemes[2]

    @property
    def chosen_by(self) -> dict[str, Any]:
        """Options of passes that say which linears they take."""
        return {"ignore": ["lm_head"]}

    @property
    def of_layers(self) -> dict[str, Any]:
        """Options of `mixed_precision` beside its limit and formats."""
        return {}

    @property
    def of_search(self) -> dict[str, Any]:
        """Options of `puzzle` beside its limit and format."""
        return {}

    @property
    def of_training(self) -> dict[str, Any]:
        """Options of the short training behind a search."""
        return {"steps": 120, "batch": 4, "learning_rate": 0.0005}

    def uniform(self) -> Iterator[Candidate]:
        """Yield formats that all linears share, the largest first."""
        for scheme in self.schemes:
            few = scheme not in self.schemes[:2]  # fewer bits in linears lose less than a smaller table
            for table in self.tables if few else self.tables[:1]:
                yield Candidate(named(scheme, table), "uniform", [*self.packed(scheme), *packed_table(table)])

    def mixed(self, budget: Budget) -> Iterator[Candidate]:
        """Yield formats by layer: within the bytes, or at several averages of bits where time is limited."""
        if budget.kind == "weight_bytes":
            given = [(table, {"weight_bytes": budget.limit}) for table in self.tables]
        else:
            given = [(self.tables[0], {"bits": bits}) for bits in _BITS]
        for table, limit in given:
            at = f" at {limit['bits']} bits" if "bits" in limit else ""
            step = {"mixed_precision": {**limit, "schemes": list(self.schemes[::-1]), **self.of_layers}}
            yield Candidate(named(f"formats by layer{at}", table), "mixed", [*packed_table(table), step])

    def packed(self, scheme: str) -> Steps:
        """Return the pass that gives linears a format."""
        return [{"gptq": {"scheme": scheme, **self.chosen_by}}]

    def architecture(self, scheme: str, limit: dict[str, float]) -> Candidate:
        """Return a search for fewer and narrower layers, a short training, and one format.

        Args:
            limit: of `puzzle`.
        """
        search = {"puzzle": {**limit, "scheme": scheme, **self.of_search}}
        steps: Steps = [search, {"distill": {**self.of_training, **self.chosen_by}}]
        packing = [*self.packed(scheme), *packed_table(self.tables[0])]
        return Candidate(f"fewer layers, {named(scheme, self.tables[0])}", "architecture", [*steps, *packing])


class ImageFormats(Formats):
    """Hold the formats of networks that classify images, in which convolutions are linears over patches.

    Their inputs come in no groups, so weights have one scale a row.
    """

    @classmethod
    def of(cls, inputs: Iterable[int]) -> Formats:
        """Return those for convolutions, however many inputs they have."""
        return cls(("W8A8", "W6A16_C", "W4A16_C", "W3A16_C"), (None,))

    @property
    def chosen_by(self) -> dict[str, Any]:
        """All linears and convolutions."""
        return {"targets": "re:.*"}

    @property
    def of_layers(self) -> dict[str, Any]:
        """All linears and convolutions."""
        return self.chosen_by

    @property
    def of_search(self) -> dict[str, Any]:
        """Convolutions have few channels, and networks many blocks: this ranking takes one run for each that goes."""
        return {"multiple": 4, "convolution": ["width:0.75", "width:0.5", "none"], "depth": "iterative"}

    @property
    def of_training(self) -> dict[str, Any]:
        """Images are small samples."""
        return {"steps": 60, "batch": 32, "learning_rate": 0.0002, "temperature": 2.0}


def named(scheme: str, table: str | None = _TABLE) -> str:
    """Return the name of a candidate of one format."""
    return scheme if table is None else f"{scheme}, table {table}"


def packed_table(table: str | None = _TABLE) -> Steps:
    """Return the pass that gives embeddings a format, if the model has any."""
    return [] if table is None else [{"embedding": {"scheme": table}}]

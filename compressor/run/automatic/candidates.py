"""Propose passes for a budget: formats of one kind, formats by layer, and fewer or narrower layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from compressor.errors import UsageError
from compressor.recipe.gates import parse_amount

Steps = list[dict[str, dict[str, Any]]]
"""Passes as recipes write them."""
SCHEMES = ("W8A16", "W6A16_G128", "W4A16_G128", "W3A16_G128", "W2A16_G64")
"""Formats of the blocks' linears, the largest first."""
TABLES = ("W8A16", "W4A16_G64")
"""Formats of embeddings."""
_BITS = (5.0, 3.5)
_TRAINING = {"steps": 120, "batch": 4, "learning_rate": 0.0005, "ignore": ["lm_head"]}
KINDS = ("weight_bytes", "latency")


@dataclass(frozen=True)
class Budget:
    """Hold the one limit.

    Attributes:
        kind: ``weight_bytes``: bytes of all parameters; ``latency``: a decoder's step, as a share of the dense model's.
        limit: bytes, or the share.
    """

    kind: str
    limit: float

    def told(self, value: float) -> str:
        """Write an amount of this kind."""
        return f"{value:,.0f} bytes" if self.kind == "weight_bytes" else f"{value:.3f} of the dense model's step"


def read_budget(text: str) -> Budget:
    """Return the budget that ``KIND=AMOUNT`` states.

    Raises:
        UsageError: it is no such thing.
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


def uniform() -> Iterator[Candidate]:
    """Yield formats that all linears share, the largest first."""
    for scheme in SCHEMES:
        for table in TABLES:
            if scheme in SCHEMES[:2] and table != TABLES[0]:
                continue  # next to many bits the table is no place to save
            yield Candidate(f"{scheme}, table {table}", "uniform", [*packed(scheme), {"embedding": {"scheme": table}}])


def packed(scheme: str) -> Steps:
    """Return the pass that gives blocks' linears a format."""
    return [{"gptq": {"scheme": scheme, "ignore": ["lm_head"]}}]


def mixed(budget: Budget) -> Iterator[Candidate]:
    """Yield formats by layer: within the bytes, or at several averages of bits where time is limited."""
    for table in TABLES:
        first: Steps = [{"embedding": {"scheme": table}}]
        if budget.kind == "weight_bytes":
            given: list[dict[str, Any]] = [{"weight_bytes": budget.limit}]
        else:
            given = [{"bits": bits} for bits in _BITS] if table == TABLES[0] else []
        for one in given:
            average = f" at {one['bits']} bits" if "bits" in one else ""
            step = {"mixed_precision": {**one, "ignore": ["lm_head"]}}
            yield Candidate(f"formats by layer{average}, table {table}", "mixed", [*first, step])


def architecture(scheme: str, limit: dict[str, float]) -> Candidate:
    """Return a search for fewer and narrower layers, a short training, and one format.

    Args:
        limit: of `puzzle`.
    """
    steps: Steps = [{"puzzle": {**limit, "scheme": scheme}}, {"distill": dict(_TRAINING)}]
    passes = [*steps, *packed(scheme), {"embedding": {"scheme": TABLES[0]}}]
    return Candidate(f"fewer layers, {scheme}, table {TABLES[0]}", "architecture", passes)

"""Count what speculation did."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Speculation:
    """Counts and times of a generation with drafts, up to now.

    Attributes:
        kind: of the drafts.
        lossy: what the bundle says about lossy texts, their ``tolerance`` and what was measured of them; None where the
            text is the model's own.
        tokens: generated after those that the prompt's logits gave.
        drafted: tokens that were verified.
        accepted: tokens among them that were the model's own choice, or near enough.
        lenient: those of them that were not its choice.
        tried, matched: places where a drafted token stood, and those where one of them was right.
        verifications: drafts that were verified.
        steps: tokens without a draft.
        draft_s, verify_s, step_s: seconds in drafts, in verifications with drafts, and in those without.
        rows: how many verifications, of all sequences together, had how many rows.
    """

    kind: str
    lossy: Mapping[str, Any] | None = None
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    lenient: int = 0
    tried: int = 0
    matched: int = 0
    verifications: int = 0
    steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    step_s: float = 0.0
    rows: Counter[int] = dataclasses.field(default_factory=Counter)

    def __add__(self, other: Speculation) -> Speculation:
        """Return the sums of two generations' counts."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("kind", "lossy")]
        return Speculation(
            self.kind, self.lossy, **{name: getattr(self, name) + getattr(other, name) for name in names}
        )

    @property
    def acceptance(self) -> float:
        """Return how often a drafted token is right where those before it are; 0 where none was verified."""
        return self.matched / self.tried if self.tried else 0.0

    @property
    def tokens_per_verification(self) -> float:
        """Return tokens that a verification gave, the model's own included; 1 where there was none."""
        return 1 + self.accepted / self.verifications if self.verifications else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Return tokens per second, the prompt and choices among logits left out; 0 before the first."""
        seconds = self.draft_s + self.verify_s + self.step_s
        return self.tokens / seconds if seconds else 0.0

    def predicted_speedup(self, seconds: Callable[[int], float]) -> float:
        """Return tokens per second over those of plain steps, if each verification had taken what ``seconds`` says.

        Args:
            seconds: rows -> time of a verification of one sequence; of one row, a step's.
        """
        spent = sum(count * seconds(rows) for rows, count in self.rows.items()) + self.draft_s
        return self.tokens * seconds(1) / spent if spent else 1.0

    def facts(self) -> dict[str, Any]:
        """Return all figures by name, as JSON has them."""
        counts = ("kind", "tokens", "drafted", "accepted", "verifications", "steps")
        rates = ("acceptance", "tokens_per_verification", "draft_s", "verify_s", "step_s", "tokens_per_s")
        facts = {name: getattr(self, name) for name in counts} | {name: round(getattr(self, name), 6) for name in rates}
        return facts if self.lossy is None else {**facts, "lossy": dict(self.lossy), "lenient": self.lenient}

    def __str__(self) -> str:
        return (
            f"{self.kind}{self._loss()}: acceptance {self.acceptance:.2f}, "
            f"{self.tokens_per_verification:.2f} tokens a verification, {self.verifications} verifications, "
            f"{self.steps} plain steps, {self.tokens_per_s:.1f} tokens/s"
        )

    def _loss(self) -> str:
        """Say that the text is lossy, and what was measured of such texts; nothing where it is not."""
        if self.lossy is None:
            return ""
        said = f"tolerance {self.lossy['tolerance']:g}, {self.lenient} of the tokens are not the model's choice"
        if "lossless_agreement" in self.lossy:
            said += (
                f"; measured: {self.lossy['lossless_agreement']:.0%} of a text as without tolerance, perplexity "
                f"{self.lossy['lossy_perplexity']:.3g} in place of {self.lossy['lossless_perplexity']:.3g}"
            )
        return f", lossy ({said})"

"""State the outcome of one check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """Something that is made sure of: by a run beside its gates, or of a bundle.

    Attributes:
        name: what is checked.
        passed: None where it could not be checked, or where its answer is no reason to fail.
        detail: what was found, or why it was not checked.
    """

    name: str
    passed: bool | None
    detail: str

    def __str__(self) -> str:
        result = {True: "passed", False: "FAILED", None: "not checked"}[self.passed]
        return f"{self.name}: {result}: {self.detail}"

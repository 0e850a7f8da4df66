"""States of a training in the run's cache: a killed run goes on from the last one, to the same bits.

Each state is an entry of its own, which appears whole; the one before it goes afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from compressor.host.digests import digest
from compressor.pipeline.segment_cache import Block, SegmentCache


class Checkpoints:
    """States of one training, by step, and its result.

    Args:
        cache: of the run; None keeps nothing.
        key: digest of everything that determines the result.
        label: model and pass, for ``compress cache list``.
    """

    def __init__(self, cache: SegmentCache | None, key: str, label: str) -> None:
        self._cache, self._key, self._label = cache, key, label
        self._last = ""

    def latest(self, steps: Sequence[int]) -> tuple[int, Block] | None:
        """Return the last state that was kept at one of these steps."""
        for step in sorted(steps, reverse=True):
            if (found := self._load(f"step {step}")) is not None:
                self._last = digest(self._key, f"step {step}")
                return step, found
        return None

    def keep(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Keep a state, and forget the one before it."""
        if self._cache is not None:
            key = digest(self._key, f"step {step}")
            self._cache.save(key, f"{self._label}, step {step}", tensors, [facts])
            self._forget()
            self._last = key

    def result(self) -> Block | None:
        """Return what an earlier run ended with."""
        return self._load("result")

    def finish(self, tensors: Mapping[str, Tensor], records: Sequence[Mapping[str, Any]]) -> Mapping[str, Tensor]:
        """Keep the result, forget the last state, and return the tensors, mapped from the cache where there is one."""
        if self._cache is None:
            return tensors
        stored = self._cache.save(digest(self._key, "result"), self._label, tensors, records)
        self._forget()
        return stored.tensors

    def _load(self, what: str) -> Block | None:
        return None if self._cache is None else self._cache.load(digest(self._key, what))

    def _forget(self) -> None:
        if self._cache is not None and self._last:
            self._cache.remove(self._last)
            self._last = ""

"""A model of language in numpy with a session's interface: what follows a text is a table's row, exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from compressor_runtime import RequestError
from compressor_runtime.generation import Sampler, next_tokens


class ToyTarget:
    """Logits after a text depend on its last ``order`` tokens; of one text they are the same bits on every way.

    Args:
        logits: [rows, V]; the last tokens, as a number in base V, choose a row, modulo rows.
        batch: sequences.
        limit: positions.
        most_rows: of a verification.
        seconds: of a step or verification by its rows, on the clock ``now``.
    """

    def __init__(
        self,
        logits: np.ndarray,
        batch: int = 1,
        limit: int = 10**9,
        most_rows: int = 32,
        order: int = 2,
        seconds: Any = None,
    ) -> None:
        self._table, self._limit, self._most_rows, self._order = logits.astype(np.float32), limit, most_rows, order
        self.batch = batch
        self.texts: list[list[int]] = [[] for _ in range(batch)]
        self._verified: list[tuple[int, list[int]]] = []  # slot and tokens from its root on
        self._seconds, self.now = seconds or (lambda rows: 1.0), 0.0
        self.steps = self.verifications = 0

    @property
    def lengths(self) -> list[int]:
        return [len(text) for text in self.texts]

    def _row(self, text: Sequence[int]) -> np.ndarray:
        number = 0
        for token in text[-self._order :]:
            number = number * self._table.shape[1] + token
        return self._table[number % len(self._table)]

    def step(self, ids: Any, keep: Any = None) -> np.ndarray:
        assert len(set(self.lengths)) == 1, "a step appends to all sequences alike"
        self._check(len(ids[0]), max(self.lengths))
        for text, tokens in zip(self.texts, np.asarray(ids).tolist(), strict=True):
            text += tokens
        self.now += self._seconds(self.batch)
        self.steps += 1
        return np.stack([self._row(text) for text in self.texts])[:, None]

    def verify(self, ids: Any, parent: Any, slot: Any = None) -> np.ndarray:
        if len(ids) > self._most_rows:
            raise RequestError(f"{len(ids)} rows; at most {self._most_rows}")
        slots = [0] * len(ids) if slot is None else list(slot)
        for index in set(slots):
            self._check(slots.count(index), len(self.texts[index]))
        self._verified = []
        for token, before, index in zip(ids, parent, slots, strict=True):
            assert before < len(self._verified) and (before < 0 or self._verified[before][0] == index)
            path = [] if before < 0 else self._verified[before][1]
            self._verified.append((index, [*path, int(token)]))
        self.now += self._seconds(len(ids))
        self.verifications += 1
        return np.stack([self._row(self.texts[index][-self._order :] + path) for index, path in self._verified])

    def accept(self, paths: Mapping[int, Sequence[int]]) -> None:
        for index, path in paths.items():
            assert self._verified[path[-1]] == (index, [self._verified[node][1][-1] for node in path])
            self.texts[index] += self._verified[path[-1]][1]
        self._verified = []

    def _check(self, count: int, position: int) -> None:
        if position + count > self._limit:
            raise RequestError(f"{count} tokens after {position} others: the model ends at {self._limit} positions")


def plain(
    target: ToyTarget, prompt: Sequence[int], sampler: Sampler, ends: Mapping[int, str], count: int
) -> tuple[list[int], str]:
    """Return the tokens of plain decoding, and why they ended."""
    tokens: list[int] = []

    def collect() -> Any:
        reason = yield from next_tokens(
            lambda step: target.step(step)[0, -1],
            np.array([prompt]),
            lambda logits, _: sampler.pick(logits),
            ends,
            count,
        )
        return reason

    walk = collect()
    while True:
        try:
            tokens.append(next(walk))
        except StopIteration as end:
            return tokens, end.value

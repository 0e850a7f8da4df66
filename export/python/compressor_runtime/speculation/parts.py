"""Run what verifies tokens part by part, and use the first part of drafted tokens again when they are verified."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.errors import RequestError

BEGIN, END = "begin", "end"
"""The entries of a library that the first part and the last are."""
OF_ROWS = ("ids", "position", "parent", "slot", "row")
"""Inputs that have a number for each token."""


@dataclass
class Rows:
    """Tokens on their way through the parts.

    Attributes:
        inputs: name -> whole numbers [T]: ``ids``, ``position``, ``parent``, ``slot`` and ``row``.
        values: what parts gave: ``stream``, the residual stream [1, T, D], and what the first part computes for others.
    """

    inputs: dict[str, NDArray[Any]]
    values: dict[str, NDArray[Any]]


@dataclass
class _Begun:
    """Drafted tokens of a sequence, one behind another, and what the first part gave of each."""

    length: int  # tokens stored
    tokens: list[int] = dataclasses.field(default_factory=list)
    values: list[dict[str, NDArray[Any]]] = dataclasses.field(default_factory=list)


class Parts:
    """The parts of a session's model, and what the first of them has computed of drafted tokens.

    Keys and values of these are in the caches, behind the stored ones; the rest of what the first part gave is here,
    until the sequences change.

    Args:
        facts: of each part, in order: ``entry``, ``takes``, ``gives`` and ``axes``, as the manifest has them; empty
            where the library has no parts.
        calls: the library's entries.
        put: numpy -> what entries take.
        caches: the keys of all layers as they are now, then the values.
        skips: subsets of the parts that draft, as the manifest has them.
    """

    def __init__(
        self,
        facts: Sequence[Mapping[str, Any]],
        calls: Mapping[str, Callable[..., Any]],
        put: Callable[[NDArray[Any]], Any],
        caches: Callable[[], Sequence[Any]],
        skips: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.skips = skips
        self._facts, self._calls, self._put, self._caches = list(facts), calls, put, caches
        self._axes: dict[str, int] = {}
        if facts:
            self._axes = dict(zip(facts[0]["gives"], facts[0]["axes"], strict=True))
        self._begun: dict[int, _Begun] = {}

    @property
    def count(self) -> int:
        """Parts between the first and the last; each may be left out of a draft."""
        return max(0, len(self._facts) - 2)

    @property
    def names(self) -> list[str]:
        """Names of the parts between the first and the last."""
        return [str(part["entry"]) for part in self._facts[1:-1]]

    def begin(self, inputs: Mapping[str, NDArray[Any]]) -> Rows:
        """Run the first part.

        Args:
            inputs: whole numbers [T] by the names of :class:`Rows`.
        Raises:
            RequestError: the library has no parts.
        """
        if not self._facts:
            raise RequestError("parts: the bundle has none; compress the model with `speculate: exit` in its recipe")
        rows = Rows(dict(inputs), {})
        self._run(rows, 0)
        return rows

    def run(self, rows: Rows, index: int) -> None:
        """Run one of the parts between the first and the last; the stream goes through it."""
        self._run(rows, 1 + index)

    def end(self, rows: Rows, keep: Sequence[int] | NDArray[Any]) -> NDArray[np.float32]:
        """Return logits float32 [R, V] of some rows, whichever parts they have been through."""
        rows.inputs["keep"] = np.asarray(keep, np.int64)
        logits: NDArray[np.float32] = self._run(rows, len(self._facts) - 1)[0][0]
        return logits

    def keep(self, rows: Rows, ahead: NDArray[Any]) -> None:
        """Keep what the first part gave of drafted tokens, which stand so far ahead of the stored ones."""
        for t, (slot, place) in enumerate(zip(rows.inputs["slot"].tolist(), ahead.tolist(), strict=True)):
            begun = self._begun.setdefault(slot, _Begun(int(rows.inputs["position"][t]) - place))
            del begun.tokens[place:], begun.values[place:]
            if len(begun.tokens) == place:
                begun.tokens.append(int(rows.inputs["ids"][t]))
                begun.values.append(_taken(rows.values, self._axes, t))

    def forget(self) -> None:
        """Forget drafted tokens: other keys and values are in the caches behind the stored ones."""
        self._begun.clear()

    def verified(self, inputs: Mapping[str, NDArray[Any]], keep: NDArray[Any]) -> NDArray[np.float32] | None:
        """Return logits float32 [R, V] of tokens to verify, or None where the first part has read none of them.

        The bits are those of the entry that verifies in one.

        Args:
            inputs: whole numbers [T] by the names of :class:`Rows`.
            keep: indices [R] of the tokens whose logits are wanted.
        """
        found = self._reused(inputs)
        self.forget()
        if not any(found):
            return None
        fresh = [t for t, values in enumerate(found) if values is None]
        if fresh:
            own = {name: values[fresh] for name, values in inputs.items()}
            places = {t: place for place, t in enumerate(fresh)}
            # One whose parent was read before follows rows of the cache, as behind a shorter text.
            own["parent"] = np.array([places.get(parent, -1) for parent in own["parent"].tolist()], np.int64)
            begun = self.begin(own)
            for t, place in places.items():
                found[t] = _taken(begun.values, self._axes, place)
        rows = Rows(dict(inputs), _joined([values for values in found if values is not None], self._axes))
        for index in range(self.count):
            self.run(rows, index)
        return self.end(rows, keep)

    def _reused(self, inputs: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]] | None]:
        """Return what the first part gave of each token at this very place behind these very tokens, or None."""
        found: list[dict[str, NDArray[Any]] | None] = []
        for token, position, parent, slot, row in zip(*(inputs[name].tolist() for name in OF_ROWS), strict=True):
            begun = self._begun.get(slot)
            place = -1 if begun is None else row - begun.length
            follows = parent < 0 if place == 0 else parent >= 0 and found[parent] is not None
            same = begun is not None and 0 <= place < len(begun.tokens) and begun.tokens[place] == token
            found.append(begun.values[place] if begun is not None and same and follows and row == position else None)
        return found

    def _run(self, rows: Rows, index: int) -> list[NDArray[Any]]:
        facts, caches = self._facts[index], self._caches()
        layers = len(caches) // 2

        def argument(name: str) -> Any:
            which, _, number = name.partition("_cache_")
            if number:
                return caches[int(number) + (layers if which == "v" else 0)]
            value = rows.values[name] if name in rows.values else rows.inputs[name]
            return self._put(np.ascontiguousarray(value[None] if name == "ids" else value))

        found = self._calls[facts["entry"]](*map(argument, facts["takes"]))
        results = found if isinstance(found, list) else [found]
        rows.values.update(zip(facts["gives"], results, strict=True))
        return results


def _taken(values: Mapping[str, NDArray[Any]], axes: Mapping[str, int], place: int) -> dict[str, NDArray[Any]]:
    """Return a copy of one token's values; those that have no axis of tokens are the same for all."""
    return {
        name: value if axes[name] < 0 else value.take([place], axes[name])
        for name, value in values.items()
        if name in axes
    }


def _joined(rows: Sequence[Mapping[str, NDArray[Any]]], axes: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    return {
        name: rows[0][name] if axis < 0 else np.concatenate([row[name] for row in rows], axis)
        for name, axis in axes.items()
    }

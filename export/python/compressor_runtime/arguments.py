"""Check the arguments of a call, so that a wrong one is a sentence and not a fault in a kernel."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compressor_runtime.errors import RequestError


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return a whole number.

    Raises:
        RequestError: it is of another type, or not from ``least`` to ``most``.
    """
    try:
        number = operator.index(value)
    except Exception:  # whatever the object's own conversion raises
        number = None
    if number is None or isinstance(value, bool) or number < least or (most is not None and number > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise RequestError(f"{name}={value!r:.100}: give a whole number {allowed}")
    return number


def real(name: str, value: Any, *, above: float | None = None, most: float | None = None) -> float:
    """Return a finite number at least 0, above ``above`` and at most ``most``, where they are given.

    Raises:
        RequestError: it is anything else.
    """
    try:
        number = float("nan") if isinstance(value, str | bytes | bool) else float(value)
    except Exception:  # whatever the object's own conversion raises
        number = float("nan")
    low = number > above if above is not None else number >= 0
    if not (low and number < float("inf") and (most is None or number <= most)):
        least = f"above {above:g}" if above is not None else "at least 0"
        raise RequestError(
            f"{name}={value!r:.100}: give a number {least} and {'finite' if most is None else f'at most {most:g}'}"
        )
    return number


def array(name: str, value: ArrayLike) -> NDArray[Any]:
    """Return numbers as an array.

    Raises:
        RequestError: rows of different lengths, or anything but numbers.
    """
    try:
        numbers = np.asarray(value)
    except Exception as error:  # whatever the object's own conversion raises
        raise RequestError(f"{name}: not an array of numbers ({error})") from error
    if numbers.dtype.kind not in "biuf":
        raise RequestError(f"{name}: {type(value).__name__} of {numbers.dtype}; give an array of numbers")
    return numbers


def token_ids(ids: ArrayLike, vocab_size: int) -> NDArray[np.int64]:
    """Return token ids as int64 [B, S].

    Raises:
        RequestError: they are not whole numbers [B, S], or lie outside the vocabulary.
    """
    tokens = array("ids", ids)
    if tokens.ndim != 2 or tokens.size == 0 or tokens.dtype.kind not in "iu":
        raise RequestError(f"ids must be whole numbers [batch, tokens], not {tokens.dtype} {list(tokens.shape)}")
    if tokens.min() < 0 or tokens.max() >= vocab_size:  # the kernels would read outside the table
        raise RequestError(
            f"token ids from {tokens.min()} to {tokens.max()}: the model knows 0 to "
            f"{vocab_size - 1}; does the tokenizer belong to this model?"
        )
    return tokens.astype(np.int64, copy=False)


def prompt_ids(prompt: Any, encode: Callable[[str], list[int]], bos_id: int | None) -> list[int]:
    """Return a prompt's token ids; of an empty one, the model's beginning-of-sequence token.

    Args:
        prompt: text, or token ids in a row.
        encode: text -> token ids.
        bos_id: that token; None if the model has none.
    Raises:
        RequestError: it is neither, cannot be written as UTF-8, or is empty where nothing begins a sequence.
    """
    if isinstance(prompt, str):
        try:
            ids = encode(prompt)
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(f"the prompt cannot be written as UTF-8 ({error})") from error
    else:
        given = array("prompt", prompt)  # a path is an array of no whole numbers
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise RequestError(f"prompt: {given.dtype} {list(given.shape)}; give text, or token ids in a row")
        ids = given.tolist()
    if ids:
        return ids
    if bos_id is None:
        raise RequestError("the prompt is empty and the model has no beginning-of-sequence token; give a prompt")
    return [bos_id]


def token_trees(
    ids: ArrayLike, parent: ArrayLike, slot: ArrayLike | None, vocab_size: int, batch: int
) -> tuple[NDArray[np.int64], ...]:
    """Return drafted tokens: ids, parents and sequences, and of each its depth and how many of its sequence's come
    before it; all int64 [T].

    Raises:
        RequestError: they are not whole numbers in rows of one length, or out of range, or a token does not come after
            its parent, in the same sequence.
    """
    if slot is None and batch > 1:
        raise RequestError(f"slot: say which of the {batch} sequences each token belongs to")
    given = {"ids": array("ids", ids), "parent": array("parent", parent)}
    given["slot"] = np.zeros_like(given["parent"]) if slot is None else array("slot", slot)
    for name, row in given.items():
        if row.ndim != 1 or row.size == 0 or row.dtype.kind not in "iu" or row.shape != given["ids"].shape:
            shapes = f"{row.dtype} {list(row.shape)}, ids {list(given['ids'].shape)}"
            raise RequestError(f"{name}: {shapes}; ids, parent and slot must be whole numbers, one of each for a token")
    tokens = token_ids(given["ids"][None], vocab_size)[0]
    parents, slots = (given[name].astype(np.int64, copy=False) for name in ("parent", "slot"))
    if slots.min() < 0 or slots.max() >= batch:
        raise RequestError(f"slot: from {slots.min()} to {slots.max()}; the session's sequences are 0 to {batch - 1}")
    owners, depth, order, counts = slots.tolist(), list[int](), list[int](), [0] * batch
    for t, before in enumerate(parents.tolist()):
        if not -1 <= before < t or (before >= 0 and owners[before] != owners[t]):
            raise RequestError(f"parent[{t}] is {before}; give -1, or an earlier token of the same sequence")
        depth.append(depth[before] + 1 if before >= 0 else 0)
        order.append(counts[owners[t]])
        counts[owners[t]] += 1
    return tokens, parents, slots, np.array(depth), np.array(order)


def indices(name: str, value: ArrayLike, count: int) -> NDArray[np.int64]:
    """Return indices in a row, at least one, int64.

    Raises:
        RequestError: they are something else, or not from 0 to ``count - 1``.
    """
    found = array(name, value)
    if found.ndim != 1 or found.size == 0 or found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= count:
        raise RequestError(f"{name}: {found.tolist()!r:.100}; give indices in a row, from 0 to {count - 1}")
    return found.astype(np.int64, copy=False)


def stops_of(stop: int | str | Iterable[int | str]) -> tuple[list[int], list[str]]:
    """Return the token ids and the texts among what ends a generation.

    Raises:
        RequestError: one is neither.
    """
    try:
        stops: list[Any] = [stop] if isinstance(stop, int | str) else list(stop)
    except TypeError:
        stops = [stop]
    wrong = [s for s in stops if not isinstance(s, int | np.integer | str) or isinstance(s, bool)]
    if wrong:
        raise RequestError(f"stop={wrong[0]!r:.100}: give token ids and strings")
    return [int(s) for s in stops if not isinstance(s, str)], [s for s in stops if isinstance(s, str) and s]


def check_inputs(stated: Sequence[dict[str, Any]] | None, arrays: Sequence[NDArray[Any]]) -> None:
    """Compare arrays with the inputs that a manifest states; a text in a shape is a size, the same wherever it stands.

    Raises:
        RequestError: another number of them, another type or another shape.
    """
    if stated is None:
        return  # an older bundle: its kernels compare
    if len(arrays) != len(stated):
        raise RequestError(f"{len(arrays)} inputs; the model takes {len(stated)}")
    sizes: dict[str, int] = {}
    for index, (entry, value) in enumerate(zip(stated, arrays, strict=True)):
        shape = entry["shape"]
        fits = value.dtype == entry["dtype"] and value.ndim == len(shape)
        for expected, size in zip(shape, value.shape, strict=False):
            fits &= size == (sizes.setdefault(expected, size) if isinstance(expected, str) else expected) > 0
        if not fits:
            known = "".join(f"; {name} is {size}" for name, size in sizes.items())
            raise RequestError(
                f"input {index}: {value.dtype} {list(value.shape)}; the model takes {entry['dtype']} "
                f"[{', '.join(map(str, shape))}]{known}"
            )


def token_paths(path_by_slot: Any, parents: list[int], slots: list[int], batch: int) -> dict[int, list[int]]:
    """Return drafted tokens that sequences keep, by the sequence's number.

    Args:
        path_by_slot: as of :meth:`compressor_runtime.session.Session.accept`.
        parents, slots: of the tokens that were verified, [T].
        batch: sequences.
    Raises:
        RequestError: these are not paths through the trees.
    """
    if not isinstance(path_by_slot, Mapping):
        raise RequestError(f"accept: {path_by_slot!r:.100}; give the tokens of each sequence by its number")
    kept: dict[int, list[int]] = {}
    for slot, path in path_by_slot.items():
        if type(slot) is int and isinstance(path, list) and len(path) == 1 and type(path[0]) is int:
            token = path[0]  # batches take such a path for each row: 20 us less
            if 0 <= token < len(parents) and parents[token] == -1 and slots[token] == slot:
                kept[slot] = [token]
                continue
        sequence, tokens = whole("slot", slot, 0, batch - 1), array("path", path)
        found: list[int] = indices("path", tokens, len(parents)).tolist() if tokens.size else []
        before = [-1, *found[:-1]]
        if any(parents[t] != p or slots[t] != sequence for t, p in zip(found, before, strict=False)):
            raise RequestError(
                f"path: {found!r:.100}; give tokens of sequence {sequence}, the first without a parent and each "
                "the parent of the next"
            )
        kept[sequence] = found
    return kept

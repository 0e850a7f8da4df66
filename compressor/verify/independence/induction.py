"""Operators that go through tokens one after another, and the proof for any number of them.

Their definitions loop over a symbolic number of tokens, which cannot be followed.  One pass through the loop can: if a
state that holds entries in some way is left in the same way, then every token finds and leaves it so, and each output
holds the entries as the first one does (induction over the tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from compressor.ops.recurrence import TOKENS
from compressor.verify.independence.labels import SHARED, CannotProve, Entries, Label

_STATE, _TOKEN_DIM = "state", 1


def loops_over_tokens(func: Any) -> bool:
    """Return whether an operator's definition is such a loop."""
    return func in TOKENS


def follow_one_token(
    func: Any,
    bound: Mapping[str, Any],
    label_of: Callable[[Tensor], Label],
    mark: Callable[[Any, Label], Any],
    define: Callable[..., Any],
) -> list[Label]:
    """Follow an operator through one token, and return the labels of its outputs and of its state.

    Args:
        bound: operands by name.
        mark: gives a tensor a label, and returns it.
        define: the operator's definition, followed.
    Raises:
        CannotProve: entries lie along the tokens, or a token leaves the state otherwise than it finds it.
    """
    given = dict(bound)
    for name in TOKENS[func]:
        label = label_of(bound[name])
        if isinstance(label, Entries) and label.dim == _TOKEN_DIM:
            raise CannotProve(f"it goes along dimension {_TOKEN_DIM} of {name!r}, along which the entries lie")
        shape = list(bound[name].shape)
        shape[_TOKEN_DIM] = 1
        given[name] = mark(_empty(bound[name], shape), label)
    state = label_of(bound[_STATE])
    for _ in range(2):  # a state of zeros holds no entries before the first token
        given[_STATE] = mark(_empty(bound[_STATE], list(bound[_STATE].shape)), state)
        output, left = (label_of(result) for result in define(**given))
        if left == state:
            return [output, left]
        if state != SHARED:
            break
        state = left
    raise CannotProve("a token leaves its state with the entries in other places than it found them")


def _empty(like: Tensor, shape: list[Any]) -> Tensor:
    return torch.empty(shape, dtype=like.dtype)

"""Find the rule that expresses a mask: which keys a query sees, beside causality or padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import CaptureError

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class MaskRequest:
    """The mask a model asks for, kept as its index function instead of being built."""

    def __init__(self, function: MaskFunction) -> None:
        self.function = function

    def __getitem__(self, _: object) -> MaskRequest:
        return self  # some models slice the mask to the keys' length


@dataclass(frozen=True)
class MaskRule:
    """Say which keys a query sees, beside causality or padding.

    Attributes:
        window: keys no further away than ``window - 1`` positions; 0 for all.
        chunk: keys of the query's own chunk of so many positions; 0 for all.
    """

    window: int = 0
    chunk: int = 0

    def __str__(self) -> str:
        return f"window {self.window or 'none'}, chunk {self.chunk or 'none'}"


@dataclass(frozen=True)
class AttentionCall:
    """One attention layer, as the model called it."""

    module: str
    window: int
    mask: MaskRequest | None


def mask_rules(calls: list[AttentionCall], *, causal: bool, positions: int) -> dict[str, MaskRule]:
    """Find the rule that expresses each mask that was asked for.

    Args:
        calls: the attention layers of one run inside :func:`mask_requests`.
        causal: True for ``cached_attention``, False for ``masked_attention``.
        positions: longest sequence to look at.
    Returns:
        For each module that asked for a mask, the rule that our operator gets.
    Raises:
        CaptureError: a layer hides or shows other keys than any rule does (prefix attention, two masks, ...).
    """
    verdicts: dict[tuple[int, int], MaskRule | None] = {}  # layers of a kind share one request
    rules: dict[str, MaskRule] = {}
    for call in calls:
        if call.mask is None:
            continue
        key = (id(call.mask), call.window)
        if key not in verdicts:
            verdicts[key] = find_rule(call.mask.function, call.window, causal=causal, positions=positions)
        rule = verdicts[key]
        if rule is None or rules.setdefault(call.module, rule) != rule:
            expected = "causal" if causal else "every token that is not padding"
            raise CaptureError(
                f"{call.module} wants a mask other than what its operator applies ({expected}, within a window or a "
                "chunk)"
            )
    return rules


def find_rule(function: MaskFunction, window: int, *, causal: bool, positions: int) -> MaskRule | None:
    """Return the rule of a mask, the stated window if that is the rule; None if no rule gives the mask."""
    candidates = [MaskRule(window), MaskRule()]
    try:
        if causal:
            # The first query that does not see the first key ends its window, or begins a chunk.
            low, high = 0, positions - 1
            while low < high:
                middle = (low + high) // 2
                if bool(_visible(function, torch.tensor([[middle]]), 1)[0, 0]):
                    low = middle + 1
                else:
                    high = middle
            candidates += [MaskRule(low), MaskRule(chunk=low)]
        else:
            candidates.append(MaskRule(int(_visible(function, torch.tensor([[0]]), positions).sum())))
        return next((rule for rule in candidates if _mask_agrees(function, rule, causal, positions)), None)
    except Exception:  # the mask depends on data of its own: whatever it is, it is not ours
        return None


def _visible(function: MaskFunction, q: Tensor, positions: int) -> Tensor:
    """Return which of the first keys the queries [N, 1] see, bool [N, positions]."""
    zero = torch.zeros((), dtype=torch.int64)
    wanted = torch.as_tensor(function(zero, zero, q, torch.arange(positions)[None, :]))
    return wanted.expand(len(q), positions)


def _mask_agrees(function: MaskFunction, rule: MaskRule, causal: bool, positions: int) -> bool:
    rows = {0, 1, 2, positions // 2, positions - 1}
    for step in (rule.window, rule.chunk):
        rows |= {step - 1, step, step + 1, 2 * step - 1, 2 * step, positions // max(step, 1) * step}
    q = torch.tensor(sorted(r for r in rows if 0 <= r < positions))[:, None]
    kv = torch.arange(positions)[None, :]
    expected = torch.ones(len(q), positions, dtype=torch.bool)
    if causal:
        expected = kv <= q
    if rule.window:
        expected = expected & ((q - kv).abs() < rule.window)
    if rule.chunk:
        expected = expected & (q // rule.chunk == kv // rule.chunk)
    return bool((_visible(function, q, positions) == expected).all())

"""RWKV-4, which keeps its states in a list of its own that its layers write to.

The list is left out.  Each layer shifts tokens by one with a module, ``time_shift``, and weighs them with a function,
``rwkv_linear_attention``; both get a state of ours.

    time_shift(x)                becomes   causal_convolution of two tokens, the one before alone
    rwkv_linear_attention        becomes   wkv
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compressor.capture.recurrence.states import StateKey, StateRecorder
from compressor.errors import CaptureError

_OPS = torch.ops.compressor
_ONE_LATER = (0, 0, 1, -1)  # padding that drops the last token and puts zeros in front


class _Shift(nn.Module):
    """Give each token the one before it."""

    def __init__(self, recorder: StateRecorder, key: StateKey) -> None:
        super().__init__()
        self.recorder, self.key = recorder, key

    def forward(self, x: Tensor) -> Tensor:
        """Shift [B, S, C]."""
        batch, _, channels = x.shape
        weight = torch.cat([x.new_ones(channels, 1), x.new_zeros(channels, 1)], dim=1)
        state = self.recorder.state(self.key, x, batch, 1, channels)
        y, state = _OPS.causal_convolution(x, weight, None, state)
        self.recorder.keep(self.key, state)
        shifted: Tensor = y
        return shifted


@contextmanager
def shifts_replaced(model: nn.Module, recorder: StateRecorder) -> Iterator[None]:
    """Let layers that shift tokens by one find the last token of the step before inside."""
    seen, before = Counter[int](), list[tuple[Any, nn.Module]]()
    for part in model.modules():
        shift = part._modules.get("time_shift")
        if isinstance(shift, nn.ZeroPad2d) and tuple(shift.padding) == _ONE_LATER:
            before.append((part, shift))
    try:
        for part, _ in before:
            part._modules["time_shift"] = _Shift(recorder, StateKey(part.layer_id, "conv", seen[part.layer_id]))
            seen[part.layer_id] += 1
        yield
    finally:
        for part, shift in before:
            part._modules["time_shift"] = shift


def weigh_tokens(
    recorder: StateRecorder,
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: None,
    return_state: bool,
) -> tuple[Tensor, None]:
    """Weigh values [B, S, C] as ``rwkv_linear_attention`` does; the layers call it one after another."""
    layer = StateKey(sum(done.kind == "recurrent" for done in recorder.new_states), "recurrent", 0)
    held = recorder.state(layer, key, key.shape[0], 3, key.shape[2])
    y, held = _OPS.wkv(key, value, -torch.exp(time_decay), time_first, held)
    recorder.keep(layer, held)
    return y, None


def leave_unscaled(model: nn.Module) -> None:
    """Keep a meta model from halving hidden states and weights every few blocks, which only float16 needs."""
    for part in model.modules():
        if hasattr(part, "layers_are_rescaled"):
            part.config.rescale_every = 0  # type: ignore[union-attr]


def check_unscaled(model: nn.Module) -> None:
    """Refuse a model in memory whose weights were divided when it ran.

    Raises:
        CaptureError: some of its blocks have other weights than its checkpoint.
    """
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        if getattr(part, "layers_are_rescaled", False) and 0 < config.rescale_every < config.num_hidden_layers:
            raise CaptureError(
                f"{type(model).__name__} has run, and has divided the weights of later blocks (rescale_every="
                f"{config.rescale_every}); give its folder, or capture it before it runs"
            )

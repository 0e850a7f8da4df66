"""States of recurrent layers, in the place of those that a transformers cache keeps.

A layer asks its cache for what it kept, calls a function that computes with it, and stores what the function returns.
Here the cache has nothing to give: it remembers who asked, and the function that takes the original's place
(:mod:`compressor.capture.recurrence.functions`) finds the state by that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compressor.errors import CaptureError


class StateKey(NamedTuple):
    """Name one state of one layer; states are inputs and outputs in the order of their keys."""

    layer: int
    kind: str  # "conv", "recurrent"
    number: int


class StateRecorder:
    """Hand out the states of layers, and collect the new ones.

    Args:
        states: by their keys; None in the first run, which finds their shapes and begins with zeros.
    """

    def __init__(self, states: Mapping[StateKey, Tensor] | None = None) -> None:
        self.states = states
        self.new_states: dict[StateKey, Tensor] = {}
        self._convolved: list[tuple[Tensor, StateKey]] = []  # inputs that a convolution is about to read
        self._asked: StateKey | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, as before a prompt: the operator reads the state."""

    def update_conv_state(self, x: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Hand new inputs back alone, for the convolution that comes next."""
        self._convolved.append((x, StateKey(layer_idx, "conv", state_idx)))
        return x

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, as before a prompt, and remember who asked."""
        self._asked = StateKey(layer_idx, "recurrent", state_idx)

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Make sure that the state to be stored is one of an operator of ours.

        Raises:
            CaptureError: the layer computed it in another way.
        """
        if self.new_states.get(StateKey(layer_idx, "recurrent", state_idx)) is not state:
            raise CaptureError(f"layer {layer_idx} computes its recurrent state by a function that no operator here is")
        return state

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: no step is taken back."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return False, as before a prompt."""
        return False

    def of_convolution(self, x: Tensor) -> StateKey:
        """Return the state that belongs to a convolution's inputs.

        Raises:
            CaptureError: these inputs were not stored in the cache.
        """
        for place, (stored, key) in enumerate(self._convolved):
            if stored is x:
                del self._convolved[place]
                return key
        raise CaptureError("a layer convolves tokens that it did not store in its cache; not supported")

    def of_scan(self) -> StateKey:
        """Return the state of the layer that asked last.

        Raises:
            CaptureError: no layer asked.
        """
        key, self._asked = self._asked, None
        if key is None:
            raise CaptureError("a layer runs a recurrence whose state it did not ask its cache for; not supported")
        return key

    def state(self, key: StateKey, like: Tensor, *shape: Any) -> Tensor:
        """Return a layer's state, float32 of a shape that begins with the batch."""
        return like.new_zeros(shape, dtype=torch.float32) if self.states is None else self.states[key]

    def keep(self, key: StateKey, state: Tensor) -> None:
        """Take a new state.

        Raises:
            CaptureError: the layer has written this state before.
        """
        if key in self.new_states:
            raise CaptureError(f"layer {key.layer} writes its {key.kind} state twice in one step; not supported")
        self.new_states[key] = state

    def check_states(self) -> None:
        """Make sure that every state that was announced was computed.

        Raises:
            CaptureError: a layer convolves by code of its own.
        """
        if self._convolved:
            layer = self._convolved[0][1].layer
            raise CaptureError(f"layer {layer} convolves what it stored by code of its own, which no operator here is")

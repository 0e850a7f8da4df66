"""Recurrent layers, unrolled over a fixed number of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compressor.capture.onnx_in.operators.table import operator
from compressor.capture.onnx_in.steps import FIRST_PART
from compressor.capture.onnx_in.values import Call, refuse

_Function = Callable[[Tensor], Tensor]
_DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
_MOST_STEPS = 1024


@operator("RNN", "GRU", "LSTM")
def recurrent(call: Call) -> Tensor | tuple[Tensor, ...]:
    """Run a layer over a sequence: all outputs [steps, directions, batch, width], and the last states."""
    x, batch_first = call.tensor(0), bool(call.get("layout", 0))
    x = x.transpose(0, 1) if batch_first else x
    if not isinstance(x.shape[0], int) or x.shape[0] > _MOST_STEPS:
        raise refuse(f"its sequence has {x.shape[0]} steps; a fixed number of up to {_MOST_STEPS} is unrolled: "
                     "export the model with one, or one step at a time")  # fmt: skip
    _check_lengths(call, x.shape[0])
    direction = call.get("direction", "forward")
    directions = 2 if direction == "bidirectional" else 1
    states = {i: call.maybe(i) for i in ((5, 6) if call.op == "LSTM" else (5,))}
    if batch_first:
        states = {i: None if state is None else state.transpose(0, 1) for i, state in states.items()}
    outputs, lasts = [], []
    for d in range(directions):
        backwards = direction == "reverse" or d == 1
        state = [None if held is None else held[d] for held in states.values()]
        y, last = _Direction(call, d, directions).run(x.flip(0) if backwards else x, state)
        outputs.append(y.flip(0) if backwards else y)
        lasts.append(last)
    y = torch.stack(outputs, 1)
    finals = [torch.stack(parts, 0) for parts in zip(*lasts, strict=True)]
    if batch_first:
        y, finals = y.permute(2, 0, 1, 3), [final.transpose(0, 1) for final in finals]
    return (y, *finals)[: max(call.outputs, 1)] if call.outputs > 1 else y


def _check_lengths(call: Call, steps: int) -> None:
    if call.has(4):
        lengths = call.known(4)
        if lengths is None or any(length != steps for length in lengths.reshape(-1)):
            raise refuse("its sequences have lengths of their own (sequence_lens); leave that input out")


class _Direction:
    """One direction of a layer: weights [gates * width, in], [gates * width, width], biases, functions."""

    def __init__(self, call: Call, index: int, directions: int) -> None:
        self.call = call
        self.index, first = index, FIRST_PART + 4 * index
        if call.has(first):
            self.weight, self.recurrence = call.tensor(first), call.tensor(first + 2)
            self.bias, self.recurrent_bias = call.maybe(first + 1), call.maybe(first + 3)
        else:
            self.weight, self.recurrence, bias = call.tensor(1)[index], call.tensor(2)[index], call.maybe(3)
            both = (None, None) if bias is None else bias[index].chunk(2)
            self.bias, self.recurrent_bias = both
        self.width = self.recurrence.shape[-1]
        peepholes = call.maybe(7) if call.op == "LSTM" else None
        self.peepholes = None if peepholes is None else torch.split(peepholes[index], self.width)
        names = call.get("activations", _DEFAULTS[call.op] * directions)
        count = len(_DEFAULTS[call.op])
        alphas, betas = _parameters(names, call.get("activation_alpha"), call.get("activation_beta"))
        places = range(index * count, (index + 1) * count)
        self.functions = [_function(names[i], alphas[i], betas[i]) for i in places]

    def run(self, x: Tensor, state: list[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs [steps, batch, width] and the last states."""
        zeros = torch.zeros([x.shape[1], self.width], dtype=x.dtype)
        held = [zeros if s is None else s for s in state]
        step = {"RNN": self._rnn, "GRU": self._gru, "LSTM": self._lstm}[self.call.op]
        read = self._linear("input", x, self.weight, self.bias)
        outputs = []
        for t in range(x.shape[0]):
            held = step(read[t], held)
            outputs.append(held[0])
        return torch.stack(outputs, 0), held

    def _linear(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply a linear, in the module of its own that a constant weight has."""
        child = getattr(self.call.module, f"{name}{self.index or ''}", None)
        if child is None:
            return F.linear(x, weight, bias)
        done: Tensor = child(lambda _: F.linear(x, weight, bias), self.call)
        return done

    def _hidden(self, h: Tensor) -> Tensor:
        return self._linear("hidden", h, self.recurrence, self.recurrent_bias)

    def _clip(self, x: Tensor) -> Tensor:
        limit = self.call.get("clip")
        return x if limit is None else torch.clamp(x, -limit, limit)

    def _rnn(self, x: Tensor, held: list[Tensor]) -> list[Tensor]:
        return [self.functions[0](self._clip(x + self._hidden(held[0])))]

    def _gru(self, x: Tensor, held: list[Tensor]) -> list[Tensor]:
        (h,) = held
        read = x.chunk(3, -1)
        first, second = self.functions
        if self.call.get("linear_before_reset", 0):
            z, r, new = self._hidden(h).chunk(3, -1)
            z, r = first(self._clip(read[0] + z)), first(self._clip(read[1] + r))
            new = second(self._clip(read[2] + r * new))
            return [(1 - z) * new + z * h]
        parts = self.recurrence.chunk(3, 0)
        biases: Any = (None,) * 3 if self.recurrent_bias is None else self.recurrent_bias.chunk(3, 0)
        z = first(self._clip(read[0] + F.linear(h, parts[0], biases[0])))
        r = first(self._clip(read[1] + F.linear(h, parts[1], biases[1])))
        new = second(self._clip(read[2] + F.linear(r * h, parts[2], biases[2])))
        return [(1 - z) * new + z * h]

    def _lstm(self, x: Tensor, held: list[Tensor]) -> list[Tensor]:
        h, c = held
        i, o, f, g = (x + self._hidden(h)).chunk(4, -1)
        first, second, third = self.functions
        if self.peepholes is not None:
            i, f = i + self.peepholes[0] * c, f + self.peepholes[2] * c
        i, f = first(self._clip(i)), first(self._clip(f))
        if self.call.get("input_forget", 0):
            f = 1 - i
        c = f * c + i * second(self._clip(g))
        o = o if self.peepholes is None else o + self.peepholes[1] * c
        return [first(self._clip(o)) * third(c), c]


_ALPHAS = {
    "LeakyRelu": 0.01,
    "ThresholdedRelu": 1.0,
    "ScaledTanh": None,
    "HardSigmoid": 0.2,
    "Elu": 1.0,
    "Affine": None,
}
_BETAS = {"ScaledTanh": None, "HardSigmoid": 0.5, "Affine": None}


def _parameters(names: list[str], alphas: list[float] | None, betas: list[float] | None) -> tuple[Any, Any]:
    """Give out parameters in the order of the functions that take one."""
    left, right = iter(alphas or ()), iter(betas or ())
    a = [next(left, _ALPHAS[name]) if name in _ALPHAS else None for name in names]
    b = [next(right, _BETAS[name]) if name in _BETAS else None for name in names]
    return a, b


def _function(name: str, alpha: Any, beta: Any) -> _Function:
    table: dict[str, _Function] = {
        "Relu": torch.relu,
        "Tanh": torch.tanh,
        "Sigmoid": torch.sigmoid,
        "Softsign": F.softsign,
        "Softplus": F.softplus,
        "LeakyRelu": lambda x: F.leaky_relu(x, alpha),
        "Elu": lambda x: F.elu(x, alpha),
        "ThresholdedRelu": lambda x: torch.where(x > alpha, x, torch.zeros_like(x)),
        "HardSigmoid": lambda x: torch.clamp(x * alpha + beta, 0, 1),
        "ScaledTanh": lambda x: alpha * torch.tanh(beta * x),
        "Affine": lambda x: alpha * x + beta,
    }
    if name not in table or (name in _ALPHAS and alpha is None) or (name in _BETAS and beta is None):
        raise refuse(f"its activation function {name!r} is not read, or lacks a parameter")
    return table[name]

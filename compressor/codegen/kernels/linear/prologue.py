"""What may be computed of a packed linear's input while it is prepared, in place of a kernel in front.

An activation function, with or without a factor (``silu(g) * u`` of gated perceptrons), or a norm: each token's row is
computed where it is rounded next, and never stored for all tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from tvm.script import tirx as T

from compressor.codegen.kernels.linear.weights import parameter
from compressor.codegen.kernels.norm import norm_row
from compressor.codegen.kernels.vector import at_least, erf, exp, splat_float

Kind = Literal["silu", "gelu", "gelu_tanh", "relu", "rms_norm", "layer_norm"]


@dataclass(frozen=True)
class Prologue:
    """A function of a token's row.

    Attributes:
        gated: the result of an activation function is multiplied by a second input.
        eps: of a norm.
        has_bias: of a norm.
    """

    kind: Kind
    gated: bool = False
    eps: float = 0.0
    has_bias: bool = False

    @property
    def is_norm(self) -> bool:
        """Whether it is a norm, which has a weight."""
        return self.kind in ("rms_norm", "layer_norm")

    @property
    def inputs(self) -> int:
        """Tensors float32 [tokens, columns] that it reads."""
        return 2 if self.gated else 1

    @property
    def vectors(self) -> int:
        """Tensors float32 [columns] that it reads: the weight and bias of a norm."""
        return self.is_norm + self.has_bias

    @property
    def name(self) -> str:
        """As part of a kernel's name."""
        if self.is_norm:
            return f"{self.kind}_{self.eps:g}{'_bias' if self.has_bias else ''}".replace("-", "m").replace(".", "p")
        return f"{self.kind}{'_mul' if self.gated else ''}"

    def row(self, columns: int) -> Any:
        """Make a macro ``row(inputs, vectors, m, to, r)`` that writes row ``r`` of ``to`` from token ``m``."""
        if self.is_norm:
            normed = norm_row(columns, self.eps, self.kind == "layer_norm")

            @T.inline
            def norm(inputs, vectors, m, to, r):
                normed(inputs[0], vectors[0], vectors[1] if self.has_bias else None, m, to, r)

            return norm

        def value(inputs: list[Any], m: Any, at: Any, lanes: int) -> Any:
            result = ACTIVATIONS[self.kind](inputs[0][m, at], lanes)
            return result * inputs[1][m, at] if self.gated else result

        @T.inline
        def elementwise(inputs, vectors, m, to, r):
            for k in range(columns // 16):
                to[r, T.ramp(k * 16, 1, 16)] = value(inputs, m, T.ramp(k * 16, 1, 16), 16)
            for k in range(columns % 16):
                to[r, columns // 16 * 16 + k] = value(inputs, m, columns // 16 * 16 + k, 1)

        return elementwise


def _silu(x: Any, lanes: int) -> Any:
    one, zero = splat_float(1.0, lanes), splat_float(0.0, lanes)
    return x * (one / (one + exp(zero - x, lanes)))


def _gelu(x: Any, lanes: int) -> Any:
    half = splat_float(0.5, lanes)
    return x * (half + erf(x * splat_float(0.5**0.5, lanes), lanes) * half)


def _gelu_tanh(x: Any, lanes: int) -> Any:
    """``x * (1 + tanh(z)) / 2`` is ``x * sigmoid(2 * z)``."""
    one, zero = splat_float(1.0, lanes), splat_float(0.0, lanes)
    twice = splat_float(2 * math.sqrt(2 / math.pi), lanes) * x * (one + splat_float(0.044715, lanes) * x * x)
    return x * (one / (one + exp(zero - twice, lanes)))


def _relu(x: Any, lanes: int) -> Any:
    return at_least(x, 0.0, lanes)


ACTIVATIONS = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu": _relu}


def declare_inputs(prologue: Prologue | None, columns: int, d0: Any, d1: Any) -> tuple[list[Any], list[Any]]:
    """Declare a kernel's first parameters: x or what is read in its place, float32 [d0, d1, columns], and vectors."""
    inputs, vectors = (1, 0) if prologue is None else (prologue.inputs, prologue.vectors)
    given = [parameter((d0, d1, columns), "float32") for _ in range(inputs)]
    return given, [parameter((columns,), "float32") for _ in range(vectors)]


def fill_rows(columns: int, prologue: Prologue | None) -> Any:
    """Make a macro ``fill(inputs, vectors, m, rows, at)`` that writes token m's activations to a row: copied, or
    computed.
    """
    compute = None if prologue is None else prologue.row(columns)

    @T.inline
    def copied(inputs, vectors, m, rows, at):
        for k in range(columns // 16):
            rows[at, T.ramp(k * 16, 1, 16)] = inputs[0][m, T.ramp(k * 16, 1, 16)]
        for k in range(columns % 16):
            rows[at, columns // 16 * 16 + k] = inputs[0][m, columns // 16 * 16 + k]

    @T.inline
    def computed(inputs, vectors, m, rows, at):
        compute(inputs, vectors, m, rows, at)  # type: ignore[misc]

    return copied if compute is None else computed

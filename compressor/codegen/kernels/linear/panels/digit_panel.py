"""Prompts by panels of codes and both digits of activations (:mod:`compressor.codegen.kernels.linear.digits`)."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from compressor.codegen.kernels.linear.digits import DigitProducts
from compressor.codegen.kernels.linear.panels.panel import MatrixProducts, PanelProducts
from compressor.codegen.kernels.linear.products import Products

_LANES, _STEP = 4, 16


class DigitPanel(PanelProducts, DigitProducts):
    """Products of a panel by ``signed4``."""

    def _operands(self, a: Any, m0: Any, c: Any, n_tokens: int) -> list[tuple[int, int, Any]]:
        places = [T.ramp(self.place(c * _STEP, digit), 1, _STEP) for digit in range(2)]
        return [
            (t, digit, T.bind(T.reinterpret(a[m0 + t, at], dtype="int32x4")))
            for t in range(n_tokens)
            for digit, at in enumerate(places)
        ]


class MatrixDigits(MatrixProducts, DigitProducts):
    """Products of a panel by ``mmla``: a token's first row of sums has the rows 4 i and 4 i + 1, its second the others.

    A row of activations has both digits of a token, where it has two tokens otherwise.
    """

    def _rows(self, m0: Any, n_tokens: int) -> list[Any]:
        return [m0 + t for t in range(n_tokens)]

    def _sums(self, p: int, k: int) -> tuple[int, int]:
        return p, k % 2

    def end_group(
        self, out: Any, acc: Any, sums: Any, scales: Any, factor: Any, first: Any, m0: Any, g: Any, n_tokens: int,
        n_tiles: int,
    ) -> None:  # fmt: skip
        """Part the sums of the digits, and go on as without matrices."""
        for (t, _, at), zero in zip(self.lanes(n_tokens, 1), self._zeros, strict=True):
            both = [T.bind(acc[t][k, at]) for k in range(2)]
            for digit in range(2):
                value = T.Shuffle(both, [digit, 2 + digit, _LANES + digit, _LANES + 2 + digit])
                T.buffer_store(acc[t], value + zero if digit else value, [digit, at])
        DigitProducts.end_group(self, out, acc, sums, scales, factor, first, m0, g, n_tokens, n_tiles)


def kind_of(body: Products) -> type[PanelProducts]:
    """Return the products of a panel that stand for a kernel's own."""
    matrices = body.isa.mmla is not None
    if isinstance(body, DigitProducts):
        return MatrixDigits if matrices else DigitPanel
    return MatrixProducts if matrices else PanelProducts

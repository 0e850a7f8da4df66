"""Prompts by panels of codes and both digits of activations (:mod:`compressor.codegen.kernels.linear.digits`)."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from compressor.codegen.kernels.linear.digits import DigitProducts
from compressor.codegen.kernels.linear.panels.panel import MatrixProducts, PanelProducts
from compressor.codegen.kernels.linear.products import Products
from compressor.codegen.kernels.vector import splat
from compressor.formats.parts import TILE_ROWS

_LANES, _STEP, _HALF = 4, 16, 8


class DigitPanel(DigitProducts, PanelProducts):
    """Products of a panel by ``signed4``."""

    def add_chunk(
        self, acc: Any, a: Any, codes: Any, values: Any, table: Any, first: Any, m0: Any, c: Any, n_tokens: int,
        n_tiles: int,
    ) -> None:  # fmt: skip
        """Add sixteen columns of a tile and every token."""
        times = self.isa.signed4
        assert n_tiles == 1 and times is not None
        places = [T.ramp(self.place(c * _STEP, digit), 1, _STEP) for digit in range(2)]
        acts = [[T.bind(T.reinterpret(a[m0 + t, at], dtype="int32x4")) for at in places] for t in range(n_tokens)]
        for quad in range(_STEP // 4):
            for part in range(0, TILE_ROWS, _LANES):
                at = T.ramp(part, 1, _LANES)
                word = T.bind(codes[first, 4 * c + quad, at])
                for t, both in enumerate(acts):
                    for digit, four in enumerate(both):
                        value = times(acc[t][digit, at], word, T.Shuffle([four], [quad] * _LANES))
                        T.buffer_store(acc[t], value, [digit, at])


class MatrixDigits(DigitProducts, MatrixProducts):
    """Products of a panel by ``mmla``: eight columns of two rows with both digits of a token."""

    def start_group(
        self, acc: Any, sums: Any, zeros: Any, first: Any, m0: Any, g: Any, n_tokens: int, n_tiles: int
    ) -> None:
        """Set the sums to zero, and keep what the end of the group adds."""
        self._zeros = [self.minus_zeros(sums[m0 + t, g], zeros, first, g, at) for t, _, at in self.lanes(n_tokens, 1)]
        for t, _, at in self.lanes(n_tokens, 1):
            for k in range(2):
                T.buffer_store(acc[t], splat(0, _LANES), [k, at])

    def add_chunk(
        self, acc: Any, a: Any, codes: Any, values: Any, table: Any, first: Any, m0: Any, c: Any, n_tokens: int,
        n_tiles: int,
    ) -> None:  # fmt: skip
        """Add sixteen columns: of a token, ``acc[t][0]`` has the rows 4 i and 4 i + 1, ``acc[t][1]`` the others."""
        assert n_tiles == 1 and self.isa.mmla is not None
        for half in range(2):
            acts = [self._activations(a, m0 + t, 2 * c + half, "int8x16") for t in range(n_tokens)]
            for k in range(TILE_ROWS // 2):
                word = T.bind(codes[first, 4 * c + 2 * half + k // 4, T.ramp(k % 4 * _LANES, 1, _LANES)])
                place = [k % 2, T.ramp(k // 2 * _LANES, 1, _LANES)]
                for t, both in enumerate(acts):
                    T.buffer_store(acc[t], self.isa.mmla(acc[t][tuple(place)], word, both), place)

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
        super().end_group(out, acc, sums, scales, factor, first, m0, g, n_tokens, n_tiles)


def kind_of(body: Products) -> type[PanelProducts]:
    """Return the products of a panel that stand for a kernel's own."""
    matrices = body.isa.mmla is not None
    if isinstance(body, DigitProducts):
        return MatrixDigits if matrices else DigitPanel
    return MatrixProducts if matrices else PanelProducts

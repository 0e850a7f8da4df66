"""The products of several tokens: codes become floats once for many of them."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from compressor.codegen.kernels.amx import prefetch
from compressor.codegen.kernels.linear.weights import Weight
from compressor.codegen.kernels.skipping.panel import UNIT_BYTES, Panel, allot, clear, scale, store
from compressor.codegen.kernels.vector import registers

SPAN = 128
"""Columns that become floats at a time: 32 KB of the first-level cache."""
SHARE_BYTES, SHARE_BLOCKS = 512, 48
"""Bytes of a column, and blocks of tokens, whose sums stay in the second-level cache."""


def several_tokens(panel: Panel) -> tuple[Any, int]:
    """Make a function that emits the products of a share of a panel's rows for all tokens; return the shares as well.

    A block of tokens and a few registers of rows have their sums in registers over a span of columns.
    """
    block, lanes, unit_vectors = panel.block, panel.isa.lanes, panel.unit_vectors
    size = panel.fmt.columns(panel.columns)
    span = min(size, SPAN)
    share = panel.divisor(panel.units, SHARE_BYTES // UNIT_BYTES)
    units = panel.divisor(share, 4 // unit_vectors)
    vectors, every = units * unit_vectors, T.ramp(0, 1, lanes)

    def unpack(codes: Any, p: Any, begin: Any, count: Any, unit: Any, values: Any) -> None:
        with T.serial(0, count) as k:
            prefetch(codes[p, begin + span + k, 0], T.Cast("int64", unit * UNIT_BYTES))  # of the next span
            for u in range(units):
                for v, value in enumerate(panel.values(codes, p, begin + k, unit + u)):
                    T.buffer_store(values, value, [k, u * unit_vectors + v, every])

    def multiply(turned: Any, j: Any, begin: Any, count: Any, values: Any, sums: Any, slot: Any, part: Any) -> None:
        acc = registers(block, (vectors, lanes))
        cells = [(t, v, [slot + t, part * vectors + v, every]) for v in range(vectors) for t in range(block)]
        for t, v, at in cells:
            T.buffer_store(acc[t], sums[tuple(at)], [v, every])
        with T.serial(0, count) as k:
            for t, v, _ in cells:
                x = T.broadcast(turned[j, begin + k, t], lanes)
                T.buffer_store(acc[t], acc[t][v, every] + values[k, v, every] * x, [v, every])
        for t, v, at in cells:
            T.buffer_store(sums, acc[t][v, every], at)

    def add_group(weight: Weight, p: Any, first: Any, g: Any, turned: Any, j0: Any, blocks: Any, sums: Any) -> None:
        values = T.alloc_buffer((span, vectors, lanes), "float32")
        end = T.min((g + 1) * size, panel.columns)
        with T.serial(0, -(-size // span)) as s:
            begin = g * size + s * span
            count = T.max(T.min(end - begin, span), 0)
            with T.serial(0, share // units) as part:
                unpack(weight.parts["codes"], p, begin, count, first + part * units, values)
                with T.serial(T.int64(0), blocks) as j:
                    multiply(turned, j0 + j, begin, count, values, sums, j * block, part)

    def several(weight: Weight, task: Any, turned: Any, tokens: Any) -> None:
        p, first = task // (panel.units // share), task % (panel.units // share) * share
        blocks = (tokens + (block - 1)) // block
        sums, totals = allot(panel, SHARE_BLOCKS * block, share)
        with T.serial(T.int64(0), (blocks + (SHARE_BLOCKS - 1)) // SHARE_BLOCKS) as chunk:
            j0 = chunk * SHARE_BLOCKS
            here = T.min(blocks - j0, T.int64(SHARE_BLOCKS))
            count = T.min(tokens - j0 * block, T.int64(SHARE_BLOCKS * block))
            clear(panel, sums, here * block, share)
            clear(panel, totals, count, share)
            with T.serial(0, panel.groups) as g:
                add_group(weight, p, first, g, turned, j0, here, sums)
                scale(panel, weight, p, first, share, g, count, sums, totals)
            store(panel, weight, p, first, share, j0 * block, count, totals)

    return several, panel.units // share

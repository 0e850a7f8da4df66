"""The products of few tokens: some columns of those that are left at a time, added to sums in the nearest caches."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from compressor.codegen.kernels.amx import prefetch
from compressor.codegen.kernels.linear.weights import Weight
from compressor.codegen.kernels.skipping.panel import UNIT_BYTES, Panel, allot, clear, scale, store

LINE_BYTES = 64


def few_tokens(panel: Panel, most: int, block: int) -> Any:
    """Make a function that emits the products of a panel for the listed columns, ``panel.together`` at a time.

    ``few(weight, p, picked, index, starts, tokens)`` reads float32 picked [``most`` or less, listed]: activations, and
    zeros where a token leaves out what another one does not.  All of ``tokens`` go through a panel at once.

    Args:
        most: tokens that it is called with; a multiple of ``block``.
        block: tokens that share the values of codes.
    """
    lanes, unit_vectors, line_units = panel.isa.lanes, panel.unit_vectors, LINE_BYTES // UNIT_BYTES
    every, together = T.ramp(0, 1, lanes), panel.together

    def add_unit(codes: Any, p: Any, unit: Any, some: list[tuple[Any, ...]], sums: Any, m: Any) -> None:
        of_columns = [panel.values(codes, p, column, unit) for _, column, _ in some]
        for v, values in enumerate(zip(*of_columns, strict=True)):
            shared = values if block == 1 else [T.bind(value) for value in values]
            for t in range(block):
                at = [m + t, unit * unit_vectors + v, every]
                total = sums[tuple(at)]
                for (x, _, _), value in zip(some, shared, strict=True):
                    total = total + value * x[t]
                T.buffer_store(sums, total, at)

    def ask(codes: Any, p: Any, first: Any, some: list[tuple[Any, ...]]) -> None:
        for _, _, ahead in some:  # into the second-level cache: the first has too few buffers for what is on its way
            prefetch(codes[p, ahead, 0], T.Cast("int64", first * UNIT_BYTES), level=2)

    def add_units(codes: Any, p: Any, first: Any, units: int, some: list[tuple[Any, ...]], sums: Any, m: Any) -> None:
        if block == 1:
            ask(codes, p, first, some)
            for n in range(units):
                add_unit(codes, p, first + n, some, sums, m)
            return
        with T.If(m == 0), T.Then():
            ask(codes, p, first, some)
        with T.serial(0, units) as n:  # not unrolled: the time to compile grows fast with statements
            add_unit(codes, p, first + n, some, sums, m)

    def add_columns(codes: Any, p: Any, places: list[Any], picked: Any, index: Any, sums: Any, m: Any) -> None:
        some = []
        for i in places:
            x = [T.bind(T.broadcast(picked[m + t, i], lanes)) for t in range(block)]
            some.append((x, T.bind(index[i]), T.bind(index[i + panel.ahead])))
        with T.serial(0, panel.units // line_units) as line:
            add_units(codes, p, line * line_units, line_units, some, sums, m)
        if panel.units % line_units:
            rest = panel.units // line_units * line_units
            add_units(codes, p, rest, panel.units - rest, some, sums, m)

    def few(weight: Weight, p: Any, picked: Any, index: Any, starts: Any, tokens: Any) -> None:
        sums, totals = allot(panel, most, panel.units)
        blocks = 1 if block == most else (tokens + (block - 1)) // block
        clear(panel, sums, blocks * block, panel.units)
        clear(panel, totals, blocks * block, panel.units)
        with T.serial(0, panel.groups) as g:
            with T.serial(0, (starts[g + 1] - starts[g]) // together) as step:
                places = [starts[g] + step * together + k for k in range(together)]
                if block == most:
                    add_columns(weight.parts["codes"], p, places, picked, index, sums, 0)
                else:
                    with T.serial(T.int64(0), blocks) as j:
                        add_columns(weight.parts["codes"], p, places, picked, index, sums, j * block)
            scale(panel, weight, p, 0, panel.units, g, blocks * block, sums, totals)
        store(panel, weight, p, 0, panel.units, T.int64(0), tokens, totals)

    return few

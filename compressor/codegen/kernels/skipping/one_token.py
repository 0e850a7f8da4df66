"""The products of one token: some columns of those that are left at a time, added to sums in the nearest cache."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from compressor.codegen.kernels.amx import prefetch
from compressor.codegen.kernels.linear.weights import Weight
from compressor.codegen.kernels.skipping.panel import UNIT_BYTES, Panel, allot, clear, scale, store

LINE_BYTES = 64


def one_token(panel: Panel) -> Any:
    """Make a function that emits the products of a panel for the listed columns, ``panel.together`` at a time."""
    lanes, unit_vectors, line_units = panel.isa.lanes, panel.unit_vectors, LINE_BYTES // UNIT_BYTES
    every = T.ramp(0, 1, lanes)

    def add_units(weight: Weight, p: Any, first: Any, units: int, some: list[tuple[Any, ...]], sums: Any) -> None:
        codes = weight.parts["codes"]
        for _, _, ahead in some:  # into the second-level cache: the first has too few buffers for what is on its way
            prefetch(codes[p, ahead, 0], T.Cast("int64", first * UNIT_BYTES), level=2)
        for unit in (first + n for n in range(units)):
            of_columns = [panel.values(codes, p, column, unit) for _, column, _ in some]
            for v, values in enumerate(zip(*of_columns, strict=True)):
                at = [0, unit * unit_vectors + v, every]
                total = sums[tuple(at)]
                for (x, _, _), value in zip(some, values, strict=True):
                    total = total + value * x
                T.buffer_store(sums, total, at)

    def one(weight: Weight, p: Any, picked: Any, index: Any, starts: Any) -> None:
        sums, totals = allot(panel, 1, panel.units)
        clear(panel, sums, 1, panel.units)
        clear(panel, totals, 1, panel.units)
        with T.serial(0, panel.groups) as g:
            with T.serial(0, (starts[g + 1] - starts[g]) // panel.together) as step:
                places = [starts[g] + step * panel.together + k for k in range(panel.together)]
                some = [
                    (T.bind(T.broadcast(picked[i], lanes)), T.bind(index[i]), T.bind(index[i + panel.ahead]))
                    for i in places
                ]
                with T.serial(0, panel.units // line_units) as line:
                    add_units(weight, p, line * line_units, line_units, some, sums)
                if panel.units % line_units:
                    rest = panel.units // line_units * line_units
                    add_units(weight, p, rest, panel.units - rest, some, sums)
            scale(panel, weight, p, 0, panel.units, g, 1, sums, totals)
        store(panel, weight, p, 0, panel.units, T.int64(0), 1, totals)

    return one

"""The kernel of a linear that skips inputs: activations, their list, and the products of all panels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.linear.prologue import Prologue, declare_inputs, fill_rows
from compressor.codegen.kernels.linear.weights import Weights, by_token
from compressor.codegen.kernels.skipping.few_tokens import few_tokens
from compressor.codegen.kernels.skipping.panel import Panel
from compressor.codegen.kernels.skipping.several_tokens import several_tokens
from compressor.formats.format import Format
from compressor.formats.parts import panel_rows

FEW, _PAIR, _BLOCK = 8, 2, 4
"""Tokens up to which columns are listed that any of them leaves, and those that share the values of codes: more wait
for products, and those of prompts cost less."""


def skipping_linear(
    rows: Sequence[int],
    columns: int,
    fmt: Format,
    has_bias: bool,
    isa: Isa,
    *,
    prologue: Prologue | None = None,
    has_residual: bool = False,
) -> tvm.tirx.PrimFunc:
    """Write TIR for :func:`compressor.ops.linear.packed_linear` of a format that skips inputs.

    Parameters of the result: as of :func:`compressor.codegen.kernels.linear.packed.fused_linear` for one weight.
    """
    (out_features,) = rows  # thresholds are of one weight
    weights = Weights(rows, columns, fmt, has_bias, has_residual)
    panels, _, _ = fmt.parts(out_features, columns)["codes"][1]
    panel = Panel(panel_rows(out_features, fmt.bits), columns, fmt, isa)
    fill, gather, turn = fill_rows(columns, prologue), _gathering(panel), _turning(panel)
    clear_small, gather_any = _clearing(panel), _gathering_any(panel)
    # Columns of the list at most: those of each group are filled up to whole steps.
    listed = panel.groups * -(-fmt.columns(columns) // panel.together) * panel.together
    one, two, few = (few_tokens(panel, *sizes) for sizes in ((1, 1), (_PAIR, _PAIR), (FEW, _BLOCK)))
    (several, shares), block = several_tokens(panel), panel.block

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        d0 = T.int64()
        d1 = T.int64()
        given, of_norm = T.meta_var(declare_inputs(prologue, columns, d0, d1))
        weights.declare(d0, d1)
        tokens = T.meta_var(d0 * d1)
        blocks = T.meta_var((tokens + (block - 1)) // block)
        read = T.meta_var([by_token(buffer) for buffer in given])
        weight, _ = T.meta_var(weights.of_task(T.int64(0), 1))
        if tokens == 1:
            a = T.alloc_buffer((1, columns), "float32")
            picked = T.alloc_buffer((1, listed + panel.together), "float32")
            index = T.alloc_buffer((listed + panel.ahead,), "int32")
            starts = T.alloc_buffer((panel.groups + 1,), "int32")
            fill(read, of_norm, T.int64(0), a, 0)
            gather(a, weight.parts["thresholds"], picked, index, starts)
            for p in T.parallel(panels):
                one(weight, p, picked, index, starts, 1)
        elif tokens <= FEW:
            filled = T.meta_var((tokens + (_BLOCK - 1)) // _BLOCK * _BLOCK)
            left = T.alloc_buffer((filled, columns + 1), "float32")
            chosen = T.alloc_buffer((filled, listed), "float32")
            index = T.alloc_buffer((listed + panel.ahead,), "int32")
            source = T.alloc_buffer((listed + panel.together,), "int32")
            starts = T.alloc_buffer((panel.groups + 1,), "int32")
            for m in T.parallel(filled):
                fill(read, of_norm, T.min(m, tokens - 1), left, m)
                clear_small(left, weight.parts["thresholds"], m)
            gather_any(left, index, source, starts, tokens)
            for m in T.parallel(filled):
                for i in range(starts[panel.groups]):
                    chosen[m, i] = left[m, source[i]]
            for p in T.parallel(panels):
                if tokens <= _PAIR:
                    two(weight, p, chosen, index, starts, tokens)
                else:
                    few(weight, p, chosen, index, starts, tokens)
        else:
            turned = T.alloc_buffer((blocks, columns, block), "float32")
            for m in T.parallel(blocks * block):
                row = T.alloc_buffer((1, columns), "float32")
                fill(read, of_norm, T.min(m, tokens - 1), row, 0)
                turn(row, weight.parts["thresholds"], turned, m)
            for task in T.parallel(panels * shares):
                several(weight, task, turned, tokens)

    return kernel


def _listing(panel: Panel) -> Any:
    """Make a macro that lists columns, and where each group of them begins in the list.

    ``listing(leaves, put, fill, index, starts)`` asks ``leaves(column)`` for int32 1 where a column is listed, else 0;
    ``put(place, column)`` and ``fill(place)`` keep what stands beside a column, and beside the last column of a group
    where it fills the group's list up to whole steps.  Behind the list come the first columns of the next panel.
    """
    columns, groups, together = panel.columns, panel.groups, panel.together
    size = panel.fmt.columns(columns)

    @T.inline
    def listing(leaves, put, fill, index, starts):
        count = T.alloc_buffer((1,), "int32")
        count[0] = 0
        for g in range(groups):
            starts[g] = count[0]
            for k in range(T.min(size, columns - g * size)):
                column = T.meta_var(g * size + k)
                put(count[0], column)
                index[count[0]] = T.Cast("int32", column)
                count[0] = count[0] + leaves(column)
            for k in range(together - 1):
                fill(count[0] + k)
                index[count[0] + k] = index[T.max(count[0] - 1, 0)]
            count[0] = (count[0] + (together - 1)) // together * together
        starts[groups] = count[0]
        for k in range(panel.ahead):
            index[count[0] + k] = index[k] + columns

    return listing


def _gathering(panel: Panel) -> Any:
    """Make a macro that lists the inputs that are not small.

    ``gather(a, thresholds, picked, index, starts)`` writes values and columns; NaN is not small.  Zeros times the last
    column fill a group's list up to whole steps.
    """
    listing = _listing(panel)

    @T.inline
    def gather(a, thresholds, picked, index, starts):
        leaves = T.meta_var(lambda k: 1 - T.Cast("int32", T.abs(a[0, k]) < thresholds[k]))
        put = T.meta_var(lambda place, k: T.buffer_store(picked, a[0, k], [0, place]))
        fill = T.meta_var(lambda place: T.buffer_store(picked, T.float32(0), [0, place]))
        listing(leaves, put, fill, index, starts)

    return gather


def _clearing(panel: Panel) -> Any:
    """Make a macro ``clear(rows, thresholds, m)`` that makes zeros of a token's small activations, and one behind."""

    @T.inline
    def clear(rows, thresholds, m):
        for k in range(panel.columns):
            is_small = T.meta_var(T.abs(rows[m, k]) < thresholds[k])
            rows[m, k] = T.Select(is_small, T.float32(0), rows[m, k])
        rows[m, panel.columns] = T.float32(0)

    return clear


def _gathering_any(panel: Panel) -> Any:
    """Make a macro that lists the columns which some token's activations leave, as :func:`_gathering` does of one.

    ``gather(rows, index, source, starts, tokens)`` writes columns, and where their activations are: those that fill up
    a group's list are the zeros behind the others.
    """
    columns, listing = panel.columns, _listing(panel)

    @T.inline
    def gather(rows, index, source, starts, tokens):
        is_left = T.alloc_buffer((columns,), "int32")
        for k in range(columns):
            is_left[k] = 0
        for m in range(tokens):
            for k in range(columns):
                is_left[k] = T.bitwise_or(is_left[k], T.Cast("int32", rows[m, k] != T.float32(0)))  # NaN as well
        leaves = T.meta_var(lambda k: is_left[k])
        put = T.meta_var(lambda place, k: T.buffer_store(source, T.Cast("int32", k), [place]))
        fill = T.meta_var(lambda place: T.buffer_store(source, T.int32(columns), [place]))
        listing(leaves, put, fill, index, starts)

    return gather


def _turning(panel: Panel) -> Any:
    """Make a macro ``turn(row, thresholds, turned, m)`` that puts a token's activations beside those of its block."""
    block = panel.block

    @T.inline
    def turn(row, thresholds, turned, m):
        for k in range(panel.columns):
            is_small = T.meta_var(T.abs(row[0, k]) < thresholds[k])
            turned[m // block, k, m % block] = T.Select(is_small, T.float32(0), row[0, k])

    return turn

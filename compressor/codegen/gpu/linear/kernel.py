"""One kernel of a linear: for one token, for a few and for many, as the number of tokens turns out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.gpu.linear.activations import Preparation, Prepared
from compressor.codegen.gpu.linear.few_tokens import FewTokens
from compressor.codegen.gpu.linear.fragments import Fragments
from compressor.codegen.gpu.linear.many_tokens import ManyTokens
from compressor.codegen.gpu.linear.operands import Operands
from compressor.codegen.gpu.linear.products import Statements
from compressor.codegen.gpu.linear.shares import Streaming, Tiling
from compressor.codegen.kernels.linear.prologue import Prologue, declare_inputs
from compressor.codegen.kernels.linear.weights import by_token

FEW = 16
"""Tokens up to which the weight streams."""
PREPARING = 512
"""Threads that prepare a token."""


@dataclass(frozen=True)
class Schedule:
    """What the tuner chooses: the kernels for one token, for 2 to 16, and for more."""

    one: Streaming = field(default_factory=lambda: one_token_space()[0])
    few: Streaming = field(default_factory=lambda: few_tokens_space()[0])
    many: Tiling = field(default_factory=lambda: many_tokens_space()[0])


def one_token_space() -> list[Streaming]:
    """Return what one token may take; the default first."""
    shapes = (
        (16, 264, 8), (8, 528, 8), (16, 264, 4), (8, 264, 8), (32, 132, 4), (16, 528, 8), (8, 1056, 4), (8, 528, 16),
    )  # fmt: skip
    return [Streaming(*shape) for shape in shapes]


def few_tokens_space() -> list[Streaming]:
    """Return what 2 to 16 tokens may take; the default first."""
    shapes = ((8, 264, 4), (8, 528, 4), (16, 132, 4), (8, 264, 8), (4, 528, 4), (16, 264, 2), (8, 132, 8), (4, 1056, 8))
    return [Streaming(*shape) for shape in shapes]


def many_tokens_space() -> list[Tiling]:
    """Return what more tokens may take; the default first."""
    shapes = (
        (2, 1, 2, 2, 8, 3, 1), (4, 1, 1, 2, 8, 3, 2), (4, 2, 1, 2, 8, 3, 1), (2, 2, 2, 2, 8, 3, 1),
        (4, 1, 2, 2, 8, 3, 1), (2, 1, 4, 2, 8, 2, 1), (4, 2, 1, 2, 8, 4, 2), (4, 1, 2, 1, 8, 3, 2),
    )  # fmt: skip
    return [Tiling(*shape) for shape in shapes]


def linear_kernel(
    products: Statements, operands: Operands, schedule: Schedule, prologue: Prologue | None
) -> tvm.tirx.PrimFunc:
    """Write TIR for linears of the same activations: inputs, the operands' parameters, and launches for any number of
    tokens.
    """
    fragments = products.fragments
    one = FewTokens(products, operands, schedule.one, 1, True)
    least = FewTokens(products, operands, schedule.few, 1, False)
    few = FewTokens(products, operands, schedule.few, FEW * fragments.halves // 8, False)
    many = ManyTokens(products, operands, schedule.many)
    prepare_many, run_many = preparing(fragments, prologue, many.all_steps, many.index, operands), many.macro()
    run_one, run_least, run_few = (kernel.macro(prologue if kernel.is_one else None) for kernel in (one, least, few))
    prepare_least, prepare_few = (preparing(fragments, prologue, k.steps, k.index, operands) for k in (least, few))

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        d0 = T.int64()
        d1 = T.int64()
        given3, norm = T.meta_var(declare_inputs(prologue, fragments.columns, d0, d1))
        operands.declare(d0, d1)
        tokens = T.meta_var(T.Cast("int32", d0 * d1))
        given = T.meta_var([by_token(buffer) for buffer in given3])
        if d0 * d1 == 1:
            run_one(given, norm, None, None, tokens)
        elif d0 * d1 <= least.tokens:
            words = T.alloc_buffer((least.room,), "uint32")
            factor = T.alloc_buffer((least.tokens, fragments.act_groups), "float32")
            prepare_least(given, norm, words, factor, tokens)
            run_least(given, norm, words, factor, tokens)
        elif d0 * d1 <= few.tokens:
            words = T.alloc_buffer((few.room,), "uint32")
            factor = T.alloc_buffer((few.tokens, fragments.act_groups), "float32")
            prepare_few(given, norm, words, factor, tokens)
            run_few(given, norm, words, factor, tokens)
        else:
            words = T.alloc_buffer((many.room(d0 * d1),), "uint32")
            slots = T.meta_var((d0 * d1 + (many.tiling.tokens - 1)) // many.tiling.tokens * many.tiling.tokens)
            factor = T.alloc_buffer((slots, fragments.act_groups), "float32")
            prepare_many(given, norm, words, factor, tokens)
            run_many(words, factor, tokens)

    return kernel


def preparing(fragments: Fragments, prologue: Prologue | None, steps: int, index: Any, operands: Operands) -> Any:
    """Make a macro ``run(given, norm, words, factor, tokens)`` that launches the preparation of all tokens."""
    statements = Preparation(fragments, prologue, PREPARING, steps)
    prepare = statements.macro()

    @T.inline
    def run(given, norm, words, factor, tokens):
        with T.launch_thread("blockIdx.x", tokens) as token, T.launch_thread("threadIdx.x", PREPARING) as thread:
            scratch = T.meta_var(statements.memory())
            at = T.meta_var(Prepared(given, norm, operands.shared, words, factor, index))
            prepare(at, token, thread, scratch)

    return run

"""One kernel of a linear: for one token, for a few and for many, as the number of tokens turns out."""

from __future__ import annotations

from dataclasses import dataclass, replace
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

SOME, MANY = 16, 192
"""Tokens up to which the weight streams, and up to which one block of tokens is small beside the weight."""
PREPARING = 512
"""Threads that prepare a token."""
SHARED_BYTES = 163 << 10
"""Shared memory of a block on sm_80; later data centre GPUs have 227 KiB."""


@dataclass(frozen=True)
class Schedule:
    """Hold what the tuner chooses; None takes what suits the shape.

    Attributes:
        one: for one token.
        few: as many tokens as one product takes: four of floats, eight of integers.
        some: up to 16 tokens.
        many: up to 192 tokens.
        most: more tokens.
    """

    one: Streaming | None = None
    few: Streaming | None = None
    some: Streaming | None = None
    many: Tiling | None = None
    most: Tiling | None = None

    def of_shape(self, tiles: int, fragments: Fragments) -> tuple[Streaming, Streaming, Streaming, Tiling, Tiling]:
        """Return the schedule with what suits ``tiles`` tiles of rows where nothing was chosen."""
        # Two blocks of 16 warps fill each of 132 multiprocessors; what one round takes needs no second.
        one = Streaming(16, 528 if tiles <= 528 else 264, 8)
        few, some = Streaming(8, 528, 4), Streaming(8, 264, 4, 1 if tiles <= 256 else 2)
        if fragments.step_groups > 1:  # scales after every step: fewer sums leave room for them
            many = most = Tiling(4, 1, 2, 1, 8, 3, 1)
        elif fragments.integer:
            many = Tiling(4, 1, 2, 1, 8, 3, 2) if tiles <= 512 else Tiling(2, 1, 2, 2, 8, 3, 1)
            most = Tiling(4, 2, 1, 2, 8, 4, 2)
        else:
            many = Tiling(2, 1, 4, 2, 8, 2, 1) if tiles <= 512 else Tiling(4, 1, 1, 2, 8, 3, 2)
            most = Tiling(4, 1, 1, 2, 8, 3, 2)
        return self.one or one, self.few or few, self.some or some, self.many or many, self.most or most


def one_token_space() -> list[Streaming]:
    """Return what one token may take."""
    shapes = (
        (16, 264, 8), (8, 528, 8), (16, 264, 4), (16, 264, 16), (32, 132, 4), (16, 528, 8), (8, 1056, 8), (16, 132, 8),
    )  # fmt: skip
    return [Streaming(*shape) for shape in shapes]


def few_tokens_space() -> list[Streaming]:
    """Return what as many tokens as one product takes may take."""
    shapes = (
        (8, 528, 4),
        (8, 264, 8),
        (4, 1056, 8),
        (16, 264, 4),
        (8, 264, 4, 2),
        (4, 528, 4, 2),
        (8, 528, 8),
        (16, 528, 8),
    )
    return [Streaming(*shape) for shape in shapes]


def some_tokens_space() -> list[Streaming]:
    """Return what more tokens, up to 16, may take."""
    shapes = (
        (8, 264, 4), (8, 264, 4, 2), (8, 264, 4, 4), (16, 132, 4, 2), (8, 264, 8, 2), (4, 528, 4, 2), (8, 132, 4, 4),
        (8, 264, 2, 4),
    )  # fmt: skip
    return [Streaming(*shape) for shape in shapes]


def many_tokens_space() -> list[Tiling]:
    """Return what up to 192 tokens may take."""
    shapes = (
        (2, 1, 4, 2, 8, 2, 1), (4, 1, 1, 2, 8, 3, 2), (4, 1, 2, 1, 8, 3, 2), (2, 1, 2, 2, 8, 3, 1),
        (2, 1, 4, 2, 8, 2, 2), (2, 1, 4, 1, 8, 3, 2), (2, 1, 4, 2, 4, 3, 2), (4, 1, 4, 1, 8, 2, 1),
    )  # fmt: skip
    return [Tiling(*shape) for shape in shapes]


def most_tokens_space() -> list[Tiling]:
    """Return what more tokens may take."""
    shapes = (
        (4, 1, 1, 2, 8, 3, 2), (4, 2, 1, 2, 8, 4, 2), (4, 2, 1, 2, 8, 2, 2), (8, 1, 1, 2, 8, 3, 2),
        (2, 2, 1, 2, 8, 3, 2), (4, 1, 1, 2, 8, 4, 1), (4, 1, 1, 2, 8, 2, 4), (2, 4, 1, 2, 8, 2, 2),
    )  # fmt: skip
    return [Tiling(*shape) for shape in shapes]


def linear_kernel(
    products: Statements, operands: Operands, schedule: Schedule, prologue: Prologue | None
) -> tvm.tirx.PrimFunc:
    """Write TIR for linears of the same activations: inputs, the operands' parameters, and launches for any number of
    tokens.
    """
    fragments = products.fragments
    shares = schedule.of_shape(sum(operands.tiles), fragments)
    counts = (1, 8 // fragments.halves, SOME)
    one, few, some = (FewTokens(products, operands, *pair) for pair in zip(shares[:3], counts, strict=True))
    many, most = (fitting(products, operands, tiling) for tiling in shares[3:])
    run_one, run_few, run_some = one.macro(prologue), few.macro(None), some.macro(None)
    run_many, run_most = many.macro(), most.macro()
    prepare_few, prepare_some, prepare_many, prepare_most = (
        preparing(fragments, prologue, one.all_steps, one.index, operands) for one in (few, some, many, most)
    )

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
        elif d0 * d1 <= few.tokens:
            words = T.alloc_buffer((few.room,), "uint32")
            factor = T.alloc_buffer((few.tokens, fragments.act_groups), "float32")
            prepare_few(given, norm, words, factor, tokens)
            run_few(given, norm, words, factor, tokens)
        elif d0 * d1 <= SOME:
            words = T.alloc_buffer((some.room,), "uint32")
            factor = T.alloc_buffer((SOME, fragments.act_groups), "float32")
            prepare_some(given, norm, words, factor, tokens)
            run_some(given, norm, words, factor, tokens)
        elif d0 * d1 <= MANY:
            words = T.alloc_buffer((many.room(d0 * d1),), "uint32")
            factor = T.alloc_buffer((many.slots(d0 * d1), fragments.act_groups), "float32")
            prepare_many(given, norm, words, factor, tokens)
            run_many(words, factor, tokens)
        else:
            words = T.alloc_buffer((most.room(d0 * d1),), "uint32")
            factor = T.alloc_buffer((most.slots(d0 * d1), fragments.act_groups), "float32")
            prepare_most(given, norm, words, factor, tokens)
            run_most(words, factor, tokens)

    return kernel


def fitting(products: Statements, operands: Operands, tiling: Tiling) -> ManyTokens:
    """Return the kernel for many tokens with as many stages, then column warps, then blocks of tokens, of those asked
    for as shared memory has room for.
    """
    kernel = ManyTokens(products, operands, tiling)
    while shared_bytes(kernel) > SHARED_BYTES:
        if tiling.stages > 2:
            tiling = replace(tiling, stages=tiling.stages - 1)
        elif tiling.column_warps > 1:
            tiling = replace(tiling, column_warps=tiling.column_warps // 2)
        else:
            assert tiling.token_blocks > 1
            tiling = replace(tiling, token_blocks=tiling.token_blocks // 2)
        kernel = ManyTokens(products, operands, tiling)
    return kernel


def shared_bytes(kernel: ManyTokens) -> int:
    """Return the bytes of shared memory of a block."""
    return 4 * max(kernel.tiling.stages * kernel.stage_words, kernel.parts_words)


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

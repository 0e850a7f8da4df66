"""The schedules of packed linears on a GPU, and a model of their time that ranks them where none was measured.

The model knows bytes, the loads that are under way at once, and how evenly blocks fill the multiprocessors.  Its GPU is
of the class of an H100.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from compressor.codegen.gpu.intrinsics import WARP
from compressor.codegen.gpu.linear.dense import dense_parts
from compressor.codegen.gpu.linear.few_tokens import FewTokens
from compressor.codegen.gpu.linear.kernel import (
    MANY,
    SOME,
    Schedule,
    few_tokens_space,
    fitting,
    many_tokens_space,
    most_tokens_space,
    one_token_space,
    shared_bytes,
    some_tokens_space,
)
from compressor.codegen.gpu.linear.operands import Operands
from compressor.codegen.gpu.linear.packed import packed_parts
from compressor.codegen.gpu.linear.products import Statements
from compressor.codegen.gpu.linear.shares import Streaming, Tiling
from compressor.codegen.lowering.kernel_set import Choice
from compressor.formats.format import Format

MANY_TOKENS, MOST_TOKENS = 128, 1024
"""What candidates for many tokens, and for more, are timed on."""
_STAGES = ((3, 1), (3, 2))  # stages, steps of each
_LARGEST = 16  # tiles by blocks of eight tokens of a warp: 128 registers of sums
_PROCESSORS, _BYTES_PER_S, _LATENCY_S, _LAUNCH_S = 132, 3.35e12, 7e-7, 2e-6
_REGISTERS, _WARPS = 65536, 64  # of a multiprocessor
_HALF_FLOPS, _BYTE_OPS = 9.9e14, 2e15  # a second, of tensor cores by mma.sync and above
_LOADING = 1.3  # an operand B from shared memory takes so much longer than its product with one tile
_WAITING = 0.25  # of the time of a stage of one step, for its barrier
_BARRIER_S = 4e-7  # a tile's end: sums of all warps are added up


def packed_choices(rows: int, columns: int, fmt: Format) -> list[Choice]:
    """List the choices for a packed linear [rows, columns]: one for each range of tokens."""
    return _choices(*packed_parts([rows], columns, fmt, False, False), fmt.packed_bytes(rows, columns))


def dense_choices(rows: int, columns: int, storage: str) -> list[Choice]:
    """List the choices for a linear of stored floats."""
    size = rows * columns * (4 if storage == "float32" else 2)
    return _choices(*dense_parts(rows, columns, storage, False), size)


def _choices(products: Statements, operands: Operands, size: int) -> list[Choice]:
    """List the choices for a weight of so many bytes."""
    defaults = Schedule().of_shape(sum(operands.tiles), products.fragments)

    def streaming(name: str, tokens: int, default: Streaming, known: list[Streaming]) -> Choice:
        def space(schedule: Schedule | None) -> list[Schedule]:
            ways = _streaming(products, operands, [default, *known], tokens)
            return [_changed(schedule or Schedule(), {name: way}) for way in ways]

        def estimate(schedule: Schedule) -> float:
            return _streaming_s(FewTokens(products, operands, getattr(schedule, name), tokens), size)

        return Choice(tokens, space, estimate)

    def tiling(name: str, tokens: int, default: Tiling, known: list[Tiling]) -> Choice:
        def space(schedule: Schedule) -> list[Schedule]:
            return [_changed(schedule, {name: way}) for way in _tilings(products, operands, [default, *known])]

        return Choice(tokens, space, lambda s: _tiling_s(products, operands, getattr(s, name), tokens))

    assert MANY_TOKENS <= MANY < MOST_TOKENS
    return [
        streaming("one", 1, defaults[0], one_token_space()),
        streaming("few", 8 // products.fragments.halves, defaults[1], few_tokens_space()),
        streaming("some", SOME, defaults[2], some_tokens_space()),
        tiling("many", MANY_TOKENS, defaults[3], many_tokens_space()),
        tiling("most", MOST_TOKENS, defaults[4], most_tokens_space()),
    ]


def _changed(schedule: Schedule, changes: dict[str, Any]) -> Schedule:
    return replace(schedule, **changes)


def _streaming(products: Statements, operands: Operands, known: list[Streaming], tokens: int) -> list[Streaming]:
    """List the ways to stream that differ in what they do, the default first."""
    warps = (4, 8, 16, 32) if tokens == 1 else (4, 8, 16)
    found: dict[tuple[int, ...], Streaming] = {}
    for way in [*known, *(Streaming(*way) for way in product(warps, (132, 264, 528), (2, 4, 8)))]:
        kernel = FewTokens(products, operands, way, tokens)
        found.setdefault((way.warps, way.tiles, kernel.turns, kernel.share.loads, kernel.share.steps), way)
    return list(found.values())


def _tilings(products: Statements, operands: Operands, known: list[Tiling]) -> list[Tiling]:
    """List the tilings that a multiprocessor has room for, the default first."""
    shapes = (
        (2, 2, 1, 2, 8), (2, 2, 2, 2, 8), (1, 1, 4, 2, 8), (2, 1, 2, 4, 4), (2, 2, 2, 4, 4), (2, 2, 1, 1, 8),
        (2, 1, 4, 1, 8), (4, 2, 1, 2, 4), (1, 2, 4, 2, 8), (4, 2, 1, 1, 16),
    )  # fmt: skip
    default = known[0]
    found: dict[tuple[object, ...], Tiling] = {}
    for tiling in [*known, *(Tiling(*shape, stages, steps) for shape in shapes for stages, steps in _STAGES)]:
        kernel = fitting(products, operands, tiling)
        if tiling == default or (kernel.tiling == tiling and tiling.row_tiles * tiling.token_blocks <= _LARGEST):
            found.setdefault((replace(tiling, steps=kernel.stage), kernel.steps), tiling)
    return list(found.values())


def _streaming_s(kernel: FewTokens, size_bytes: int) -> float:
    """Foresee the seconds of a weight that streams."""
    resident = max(1, min(_WARPS, _REGISTERS // WARP // 64) // kernel.warps)
    slots = _PROCESSORS * resident
    at_once = min(kernel.grid, slots)
    task_bytes = size_bytes / kernel.tasks
    under_way = at_once * kernel.warps * kernel.share.loads * task_bytes / kernel.fragments.steps
    bandwidth = min(_BYTES_PER_S, under_way / _LATENCY_S)
    read = size_bytes * kernel.all_steps / kernel.fragments.steps  # with steps beyond the last column
    uneven = -(-kernel.grid // slots) * kernel.turns * at_once / kernel.tasks
    return _LAUNCH_S + read / bandwidth * max(1.0, uneven) + kernel.turns * _BARRIER_S


def _tiling_s(products: Statements, operands: Operands, tiling: Tiling, tokens: int) -> float:
    """Foresee the seconds of many tokens: the products, and the codes that each warp decodes, of blocks in waves."""
    fragments = products.fragments
    kernel = fitting(products, operands, tiling)
    tiling, shared = kernel.tiling, shared_bytes(kernel)
    registers = 64 + 8 * tiling.row_tiles * tiling.token_blocks
    resident = max(1, min(_REGISTERS // (WARP * registers) // tiling.warps, (227 << 10) // shared))
    blocks = -(-tokens // tiling.tokens) * operands.tasks(tiling.tiles)
    rate = (_BYTE_OPS if fragments.integer else _HALF_FLOPS) / _PROCESSORS
    columns = kernel.all_steps * fragments.step_columns
    flops = 2 * fragments.halves * 16 * tiling.tiles * tiling.tokens * columns
    decoding = 1 + 8 / tiling.token_blocks / fragments.halves  # a code is decoded once for all tokens of a warp
    loading = max(1.0, _LOADING / tiling.row_tiles)
    waiting = 1 + _WAITING / kernel.stage
    idle = max(1.0, 8 / (tiling.warps * min(resident, -(-blocks // _PROCESSORS))))
    waves = -(-blocks // (_PROCESSORS * resident))
    together = min(resident, -(-blocks // _PROCESSORS))
    return _LAUNCH_S + waves * together * flops / rate * decoding * loading * waiting * idle

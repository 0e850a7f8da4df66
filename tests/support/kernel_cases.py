"""Helpers of tests of kernels and programs: compile and run them in this process; make random packed linears."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import emulated_arm
import numpy as np
import pytest
import torch
import tvm
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.functional import pad
from tvm import relax

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.codegen import neon
from compressor.codegen.isa import INDEPENDENT_ROWS, Isa
from compressor.codegen.kernels.convolution.feeds import Geometry
from compressor.codegen.kernels.linear import digits
from compressor.codegen.kernels.linear import packed as packed_linear
from compressor.codegen.kernels.linear.tiles import supports as tiles_support
from compressor.codegen.lowering.compile import Library
from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from compressor.codegen.targets import x86
from compressor.codegen.targets.x86 import X86
from compressor.formats.extras import ColumnBlocks, KeptOfGroup, SingleZeros
from compressor.formats.format import Format
from compressor.formats.layouts.columns import of_blocks
from compressor.formats.outliers import add_columns, add_outliers
from compressor.formats.packing import (
    PackedWeight,
    dequantize,
    kept_columns,
    kept_part,
    leave_out,
    leave_out_of_groups,
    leave_out_singles,
    pack,
)  # fmt: skip
from compressor.formats.parts import TILE_ROWS
from compressor.formats.rounded_activations import round_activations
from compressor.graph.caches import empty_caches, empty_states
from compressor.numerics.grids import round_scales

OPS = torch.ops.compressor
WIDTHS = [x86.AVX512_VNNI, x86.AVX2]  # others differ only in bit planes, or in tiles for several tokens
TOLERANCE = 3e-6  # of the largest output; both sides round float32 sums in different orders
SPLIT = 2e-5  # of the largest output, where only 16 of the 24 mantissa bits of activations are used
DIGITS = 1e-4  # of the largest output, where activations have 16 bits behind the scale of their span


def executes(isa: Isa) -> bool:
    """Tell whether kernels for ``isa`` are executed: here, or under qemu."""
    return isa.name in neon.ISAS or X86().executes(isa)


def build(func: tvm.tirx.PrimFunc, isa: Isa) -> Any:
    """Compile one kernel for ``isa``; ARM's are called under qemu."""
    if isa.name in neon.ISAS:
        return emulated_arm.build(func, isa)
    if not executes(isa):
        pytest.skip(f"this machine has no {isa.name}")
    module = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
    return tvm.compile(module, target=X86().tvm_target(isa), tir_pipeline=PIPELINE)["kernel"]


def run(kernel: Any, *operands: torch.Tensor | None, out: tuple[int, ...]) -> torch.Tensor:
    """Call the kernel with torch operands (None is left out), the output last; NaN shows elements that were not
    written.
    """
    result = tvm.runtime.tensor(torch.full(out, float("nan")).numpy())
    arrays = [t.view(torch.uint16) if t.dtype == torch.bfloat16 else t for t in operands if t is not None]
    kernel(*(tvm.runtime.tensor(t.numpy()) for t in arrays), result)
    return torch.from_numpy(result.numpy())


def call(kernel: Any, *given: torch.Tensor | None, out: tuple[int, ...], kind: Any = np.float32) -> torch.Tensor:
    """Call a kernel as :func:`run` does, with outputs of another type."""
    result = tvm.runtime.tensor(np.full(out, np.nan if kind is np.float32 else 0, kind))
    kernel(*(tvm.runtime.tensor(x.numpy()) for x in given if x is not None), result)
    return torch.from_numpy(result.numpy())


def call_in_place(kernel: Any, given: list[Any], caches: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Call a kernel that writes the caches, its fourth and fifth operands; they are changed here too.

    Args:
        given: the others, torch's or TVM's; None is left out.
        out: of the outputs' shape.
    """
    held = [tvm.runtime.tensor(cache.numpy()) for cache in caches]
    found = [x for x in given if x is not None]
    operands = [x if isinstance(x, tvm.runtime.Tensor) else tvm.runtime.tensor(x.contiguous().numpy()) for x in found]
    result = tvm.runtime.tensor(torch.full_like(out, torch.nan).numpy())
    kernel(*operands[:3], *held, *operands[3:], result)
    for cache, written in zip(caches, held, strict=True):
        cache.copy_(torch.from_numpy(written.numpy()))
    return torch.from_numpy(result.numpy())


def pairs(geometry: Geometry) -> list[list[int]]:
    """Return kernel, stride, padding and dilation as operators take them."""
    return [list(pair) for pair in (geometry.kernel, geometry.stride, geometry.padding, geometry.dilation)]


def relative_error(got: torch.Tensor, expected: torch.Tensor, typical: float = 0.0) -> float:
    """Return the largest error, relative to the largest output or to a typical one, where the few there are cancel."""
    return float((got - expected).abs().max() / max(float(expected.abs().max()), typical))


def tolerance(fmt: Format, isa: Isa, tokens: int = INDEPENDENT_ROWS + 1) -> float:
    """Return the error of so many tokens' products that is allowed, of the largest output."""
    if digits.reads(fmt, isa):
        return DIGITS
    is_split = tokens > INDEPENDENT_ROWS and not tiles_support(fmt, isa) and not fmt.integer_products
    return SPLIT if is_split else TOLERANCE


def normal(*shape: int, seed: int) -> torch.Tensor:
    """Return standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def orders(kv_heads: int, width: int, seed: int) -> torch.Tensor:
    """Return an order of the channels for each head of keys, int32 [Hkv, D]."""
    rng = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(width, generator=rng) for _ in range(kv_heads)]).int()


def random_packed(fmt: Format, rows: int, columns: int, rng: torch.Generator) -> PackedWeight:
    blocks = fmt.extra(ColumnBlocks)
    if blocks is not None:
        count, tiles, width = fmt.stored_columns(columns), -(-rows // TILE_ROWS), blocks.width
        order = torch.rand(-(-tiles // blocks.tiles), blocks.blocks(columns), generator=rng).argsort(dim=1)
        kept = of_blocks(order[:, : count // width].sort(dim=1).values, width)
        kept = kept.repeat_interleave(blocks.tiles, dim=0)[:tiles]
        return leave_out(random_packed(fmt.of_kept, rows, count, rng), kept, columns, blocks)
    pattern = fmt.extra(KeptOfGroup)
    if pattern is not None:
        places = torch.rand(rows, columns // pattern.size, pattern.size, generator=rng).argsort(dim=-1)
        packed = random_packed(fmt.of_kept, rows, fmt.stored_columns(columns), rng)
        return leave_out_of_groups(packed, (places < pattern.kept).flatten(1), pattern)
    if (single := fmt.extra(SingleZeros)) is not None:
        where = torch.zeros(rows * columns, dtype=torch.bool)
        where[torch.randperm(rows * columns, generator=rng)[: single.kept(rows, columns)]] = True
        return leave_out_singles(random_packed(fmt.of_kept, rows, columns, rng), where.view(rows, columns), single)
    groups = fmt.groups(columns)
    codes = torch.randint(fmt.levels, (rows, columns), generator=rng, dtype=torch.uint8)
    zeros = torch.randint(fmt.levels, (rows, groups), generator=rng, dtype=torch.uint8)
    if fmt.element is not None:
        usable = torch.tensor(fmt.element.rounding[0], dtype=torch.uint8)
        codes = usable[codes.long() % len(usable)]
    if fmt.codebook:
        scales = torch.randn(rows, groups, fmt.levels, generator=rng).half().float()
    else:
        scales = round_scales(torch.rand(rows, groups, generator=rng) + 0.1, fmt)
    if fmt.strategy == "block":
        first = torch.arange(rows) // fmt.group_size * fmt.group_size
        scales, zeros = scales[first], zeros[first]
    unit = torch.rand(1, generator=rng) if fmt.scale_type == "E4M3" else None
    packed = pack(codes, scales, None if fmt.symmetric else zeros, fmt, unit)
    if fmt.activations is not None and fmt.activations.calibrated:
        packed = packed.with_input_scale(torch.tensor([0.02]))
    other = torch.randn(rows, columns, generator=rng)
    if fmt.outlier_features:
        features = torch.randperm(columns, generator=rng)[: fmt.outlier_features].sort().values
        packed = add_columns(packed, other, features)
    if not fmt.outlier_percent:
        return packed
    where = torch.zeros(rows * columns, dtype=torch.bool)
    where[torch.randperm(rows * columns, generator=rng)[: fmt.outliers(rows, columns)]] = True
    return add_outliers(packed, other, where.view(rows, columns), fmt.outlier_percent)


def product_of_kept(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute a linear tile by tile on the columns that it keeps: what is left out is not read, NaN or not."""
    fmt, blocks = packed.format, packed.format.extra(ColumnBlocks)
    assert blocks is not None
    kept = kept_columns(packed, blocks)
    weight = dequantize(kept_part(packed))
    rounded = x if fmt.activations is None else round_activations(x, fmt.activations, packed.parts.get("input_scale"))
    if fmt.activations is not None:  # a token with NaN has no codes
        rounded = rounded.masked_fill(x.isnan().any(-1, keepdim=True), float("nan"))
    rounded = pad(rounded, (0, blocks.width - 1))  # the last block may reach beyond the last column
    tiles = [rounded[..., kept[t]] @ weight[16 * t : 16 * t + 16].T for t in range(len(kept))]
    y = torch.cat(tiles, dim=-1)
    return y if bias is None else y + bias


def check_packed_linear(
    fmt: Format, isa: Isa, pick: random.Random, rng: torch.Generator, *, is_small: bool = True
) -> None:
    """Check one to 40 tokens of a random ragged shape, with a bias by chance, against the operator in PyTorch.

    Blocks are small by default: generated code repeats a block's body for each of its tiles and tokens, and LLVM takes
    the square of that, so blocks of 2 x 3 test the same code as the tuner's, in a tenth of the time.

    Args:
        is_small: otherwise one of the tuner's schedules is taken.
    """
    rows, columns, has_bias = pick.randint(1, 70), pick.randint(9, 200), pick.random() < 0.5
    packed = random_packed(fmt, rows, columns, rng)
    bias = torch.randn(rows, generator=rng) if has_bias else None
    tiles = -(-rows // TILE_ROWS)
    space = packed_linear.gemm_space(tiles, packed_linear.gemv_space(tiles, fmt, isa)[0].gemv_tiles, fmt, isa)
    schedule = pick.choice(space)
    if is_small and tiles_support(fmt, isa):
        counts = [n for n in (1, 2) if tiles % n == 0]
        schedule = packed_linear.Schedule(pick.choice(counts), pick.choice(counts), pick.choice([2, 3]))
    kernel = build(packed_linear.packed_linear(rows, columns, fmt, has_bias, isa, schedule), isa)
    for batch, tokens in [
        (1, 1),
        (1, 2),
        (3, 3),
        (1, 17),
        (2, 20),
    ]:  # the last are more than have blocks of their number
        x = torch.randn(batch, tokens, columns, generator=rng)
        x[0, 0] *= 0.0 if tokens == 2 else 1.0  # a token of zeros has no activation scale
        got = run(kernel, x, *packed.parts.values(), bias, out=(batch, tokens, rows))
        args = (list(packed.parts.values()), bias, fmt.name, columns, rows)
        error = relative_error(got, OPS.packed_linear(x, *args), typical_output(x, packed))
        assert error < tolerance(fmt, isa, batch * tokens), (fmt.name, rows, columns, tokens)
    special, row = special_rows(columns, rng), pick.randrange(len(SPECIAL))
    for x in (special, special[:, row : row + 1], special.repeat(1, 6, 1)):
        tokens = x.shape[1]
        args = (list(packed.parts.values()), bias, fmt.name, columns, rows)
        got = run(kernel, x, *packed.parts.values(), bias, out=(1, tokens, rows))
        close, about = max(SPLIT if tokens > 1 else 0, tolerance(fmt, isa, tokens)), (fmt.name, rows, columns)
        blocks = fmt.extra(ColumnBlocks) is not None
        expected = product_of_kept(x, packed, bias) if blocks else OPS.packed_linear(x, *args)
        check_special(got, expected, close, about, x)


def typical_output(x: torch.Tensor, packed: PackedWeight) -> float:
    """Return the size of a linear's outputs if the signs of all products were random."""
    return float(x.square().sum(-1).max() * dequantize(packed).square().mean()) ** 0.5


# Larger ones overflow where codes are multiplied before their zero point is taken off, and halves in bfloat16.
SPECIAL = (math.nan, math.inf, -math.inf, 1e36, -1e36, 1e-40)


def special_rows(columns: int, rng: torch.Generator) -> torch.Tensor:
    """Return rows of ordinary numbers with one special float each, as [1, len(SPECIAL), columns]."""
    x = torch.randn(1, len(SPECIAL), columns, generator=rng)
    for row, value in enumerate(SPECIAL):
        x[0, row, int(torch.randint(columns, (), generator=rng))] = value
    return x


def special_attention(
    heads: int, kv_heads: int, tokens: int, width: int, rng: torch.Generator
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield queries, keys and values of one text, the first token of one of which has a special float."""
    for value in (math.nan, math.inf, -math.inf, 1e36, 1e-40):
        for which in range(3):
            given = [torch.randn(1, n, tokens, width, generator=rng) for n in (heads, kv_heads, kv_heads)]
            given[which][0, 0, 0, width // 2] = value
            yield tuple(given)


def special_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, centred: bool, eps: float = 1e-5
) -> torch.Tensor:
    """Return a norm of special rows; NaN where a variance is not a float32, where PyTorch's is 0 by chance."""
    if not centred:
        return OPS.rms_norm(x, weight, eps)
    given = [None if one is None else one.double() for one in (weight, bias)]
    expected = torch.nn.functional.layer_norm(x.double(), x.shape[-1:], *given, eps)
    squares = (x.double() - x.double().mean(-1, keepdim=True)).square().sum(-1, keepdim=True)
    return torch.where(squares < torch.finfo(torch.float32).max, expected, torch.nan)


def check_special(
    got: torch.Tensor, expected: torch.Tensor, close: float, about: object, summed: torch.Tensor | None = None
) -> None:
    """Check outputs of rows with special floats: numbers where PyTorch has numbers, and none where it has none.

    Sums in another order may overflow where PyTorch's do not, and infinity less infinity is NaN.

    Args:
        summed: the rows of which weighted sums were taken: where a large one is cancelled (by its planes of bits, if
            its weight is 0), the rest of the sum is lost.
    """
    rows = got.flatten(0, -2), expected.flatten(0, -2)
    given = rows[1] if summed is None else summed.flatten(0, -2)
    for ours, theirs, x in zip(*rows, given, strict=True):
        finite = torch.isfinite(theirs)
        assert not torch.isfinite(ours[~finite]).any(), about
        largest = max(float(torch.where(row.isfinite(), row.abs(), 0.0).max()) for row in (theirs, x))
        if largest < 1e37:
            assert torch.isfinite(ours[finite]).all(), about
            assert float((ours - theirs)[finite].abs().max() if finite.any() else 0.0) <= close * largest, about


class Program:
    """Library that runs in this process."""

    def __init__(self, graph: GraphModule, library: Library) -> None:
        self.vm = relax.VirtualMachine(library.executable, tvm.cpu())
        self.info = graph.meta["model"]
        self.parameters = [self._tensor(graph.get_parameter(name).detach()) for name in library.parameters]

    @staticmethod
    def _tensor(x: Tensor) -> Any:
        x = x.contiguous()
        return tvm.runtime.tensor((x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy())

    def __call__(self, *inputs: Any) -> np.ndarray:
        given = [x if isinstance(x, tvm.runtime.Tensor) else tvm.runtime.tensor(np.asarray(x)) for x in inputs]
        return self.vm["main"](*given, self.parameters).numpy()

    def caches(self, batch: int, capacity: int) -> list[Any]:
        """Make caches of NaN, and of 255 in packed ones, which show if a kernel reads what nothing has written; and
        states, of zeros.
        """
        empty = [cache.numpy() for cache in empty_caches(self.info, batch, capacity)]
        unread = [np.full(x.shape, np.nan if x.dtype == np.float32 else 255, x.dtype) for x in empty]
        states = [state.numpy() for state in empty_states(self.info, batch)]
        return [tvm.runtime.tensor(x) for x in (*unread, *states)]

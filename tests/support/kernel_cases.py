"""Helpers of tests of kernels and programs: compile and run them in this process; make random packed linears."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from torch import Tensor
from torch.fx import GraphModule
from tvm import relax

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.codegen.isa import Isa
from compressor.codegen.kernels.linear import packed as packed_linear
from compressor.codegen.kernels.linear.tiles import supports as tiles_support
from compressor.codegen.lowering.compile import Library
from compressor.codegen.targets import x86
from compressor.codegen.targets.x86 import X86
from compressor.formats.format import Format
from compressor.formats.outliers import add_columns, add_outliers
from compressor.formats.packing import PackedWeight, pack
from compressor.graph.caches import empty_caches
from compressor.numerics.grids import round_scales

OPS = torch.ops.compressor
WIDTHS = [x86.AVX512_VNNI, x86.AVX2]  # others differ only in bit planes, or in tiles for several tokens
TOLERANCE = 3e-6  # of the largest output; both sides round float32 sums in different orders
SPLIT = 2e-5  # of the largest output, where only 16 of the 24 mantissa bits of activations are used


def build(func: tvm.tirx.PrimFunc, isa: Isa) -> Any:
    """Compile one kernel for ``isa``."""
    if not X86().executes(isa):
        pytest.skip(f"this machine has no {isa.name}")
    module = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
    return tvm.compile(module, target=X86().tvm_target(isa))["kernel"]


def run(kernel: Any, *operands: torch.Tensor | None, out: tuple[int, ...]) -> torch.Tensor:
    """Call the kernel with torch operands (None is left out), the output last; NaN shows elements that were not
    written.
    """
    result = tvm.runtime.tensor(torch.full(out, float("nan")).numpy())
    arrays = [t.view(torch.uint16) if t.dtype == torch.bfloat16 else t for t in operands if t is not None]
    kernel(*(tvm.runtime.tensor(t.numpy()) for t in arrays), result)
    return torch.from_numpy(result.numpy())


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def tolerance(fmt: Format, isa: Isa) -> float:
    return SPLIT if not tiles_support(fmt, isa) and not fmt.integer_products else TOLERANCE


def random_packed(fmt: Format, rows: int, columns: int, rng: torch.Generator) -> PackedWeight:
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


def check_packed_linear(
    fmt: Format, isa: Isa, pick: random.Random, rng: torch.Generator, *, is_small: bool = True
) -> None:
    """Check one to 17 tokens of a random ragged shape, with a bias by chance, against the operator in PyTorch.

    Blocks are small by default: generated code repeats a block's body for each of its tiles and tokens, and LLVM takes
    the square of that, so blocks of 2 x 3 test the same code as the tuner's, in a tenth of the time.

    Args:
        is_small: otherwise one of the tuner's schedules is taken.
    """
    rows, columns, has_bias = pick.randint(1, 70), pick.randint(9, 200), pick.random() < 0.5
    packed = random_packed(fmt, rows, columns, rng)
    bias = torch.randn(rows, generator=rng) if has_bias else None
    tiles = packed.parts["codes"].shape[0]
    space = packed_linear.gemm_space(tiles, packed_linear.gemv_space(tiles)[0].gemv_tiles, fmt, isa)
    schedule = pick.choice(space)
    if is_small and tiles_support(fmt, isa):
        counts = [n for n in (1, 2) if tiles % n == 0]
        schedule = packed_linear.Schedule(pick.choice(counts), pick.choice(counts), pick.choice([2, 3]))
    kernel = build(packed_linear.packed_linear(rows, columns, fmt, has_bias, isa, schedule), isa)
    for batch, tokens in [(1, 1), (1, 2), (3, 3), (1, 17)]:
        x = torch.randn(batch, tokens, columns, generator=rng)
        x[0, 0] *= 0.0 if tokens == 2 else 1.0  # a token of zeros has no activation scale
        got = run(kernel, x, *packed.parts.values(), bias, out=(batch, tokens, rows))
        args = (list(packed.parts.values()), bias, fmt.name, columns, rows)
        error = relative_error(got, OPS.packed_linear(x, *args))
        assert error < (TOLERANCE if batch * tokens == 1 else tolerance(fmt, isa)), (fmt.name, rows, columns, tokens)


class Program:
    """Library that runs in this process, without being linked."""

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
        """Make caches of NaN, and of 255 in packed ones, which show if a kernel reads what nothing has written."""
        empty = [cache.numpy() for cache in empty_caches(self.info, batch, capacity)]
        return [tvm.runtime.tensor(np.full(x.shape, np.nan if x.dtype == np.float32 else 255, x.dtype)) for x in empty]

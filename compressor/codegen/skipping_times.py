"""Time the kernels of one linear as drafts of few inputs use them: dense, by columns, and with inputs skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import tvm
from compressor_runtime import configure_threads

from compressor.codegen.kernels.linear.packed import gemv_space, packed_linear
from compressor.codegen.kernels.skipping.linear import skipping_linear
from compressor.codegen.target import NativeTarget
from compressor.codegen.tuning import time_kernel
from compressor.formats.packing import PackedWeight, skip_inputs
from compressor.formats.parts import TILE_ROWS


def skipping_seconds(
    packed: PackedWeight, share: float, rows: Sequence[int], target: NativeTarget, threads: int, working_set_bytes: int
) -> tuple[float, float, list[float]]:
    """Return medians of one token by the dense kernel, of one that skips inputs, and of several by columns.

    Args:
        packed: the weight in its dense format.
        share: of the inputs that are skipped.
        rows: tokens at once that read all inputs of the weight by columns.
        target: this machine executes its kernels.
        working_set_bytes: of copies of the weight, which take turns as the weights of a model do.
    """
    isa, (out_features, in_features) = target.resolve(), packed.shape
    x = torch.randn(1, max(rows), in_features, generator=torch.Generator().manual_seed(0))
    limit = float(x[0, 0].abs().sort().values[round(share * in_features)])
    drafting, whole = (skip_inputs(packed, torch.full((in_features,), size)) for size in (limit, 0.0))
    schedule = gemv_space(-(-out_features // TILE_ROWS), packed.format, isa)[0]
    dense = packed_linear(out_features, in_features, packed.format, False, isa, schedule)
    skipping = skipping_linear([out_features], in_features, drafting.format, False, isa)
    configure_threads(threads)

    def seconds(func: Any, weight: PackedWeight, tokens: int) -> float:
        arrays = [x[:, :tokens].contiguous(), *weight.parts.values(), torch.zeros(1, tokens, out_features)]
        count = max(1, working_set_bytes // weight.nbytes)
        copies = [[tvm.runtime.tensor(one.numpy()) for one in arrays] for _ in range(count)]
        return time_kernel(func, target.tvm_target(isa), copies)

    return seconds(dense, packed, 1), seconds(skipping, drafting, 1), [seconds(skipping, whole, n) for n in rows]

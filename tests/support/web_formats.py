"""Formats and errors for tests of kernels for browsers, on either engine."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from compressor.codegen.web.execute_webgpu import run_kernels
from compressor.codegen.web.kernels.activations import Rounded, round_activations
from compressor.codegen.web.kernels.packed_linear import supports
from compressor.formats.format import FORMATS, Format

TOLERANCE = 3e-6  # of the largest output; both sides round float32 sums in different orders


SERVED = [name for name, fmt in FORMATS.items() if not supports(fmt)]


def error(got: np.ndarray, expected: Tensor) -> float:
    return float(np.abs(got - expected.numpy()).max() / expected.abs().max())


def bound(x: Tensor) -> np.ndarray:
    """Return a tensor as its buffer holds it."""
    x = x.contiguous()
    if x.dtype == torch.int64:
        x = x.int()
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def fed(fmt: Format, x: Tensor, parts: dict[str, Tensor]) -> list[Tensor]:
    """Return what the linear's kernel reads in place of its input."""
    if fmt.activations is None:
        return [x]
    kernel, (tokens, columns) = round_activations(x.shape[-1], fmt), (x.shape[1], x.shape[2])
    given = [x, *([parts["input_scale"]] if "input_scale" in parts else [])]
    outputs = {len(given): ("float32", (1, tokens, columns))}
    if fmt.integer_products:
        layout = Rounded.of(columns, fmt)
        outputs = {len(given): ("int32", (tokens, layout.words)), len(given) + 1: ("float32", (tokens, layout.numbers))}
    found = run_kernels({kernel.name: kernel.record()}, [bound(one) for one in given], [tokens], outputs)
    return [torch.from_numpy(one) for one in found]

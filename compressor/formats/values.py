"""Compute what codes stand for before they are scaled, and name the types that scales are stored in."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.formats.elements import Element
from compressor.formats.format import Format

STORED = {"F16": torch.float16, "E8M0": torch.float8_e8m0fnu, "E4M3": torch.float8_e4m3fn}


@functools.cache
def _values(element: Element) -> NDArray[np.float32]:
    """Not as a tensor: one that is made while a graph is traced is fake, and would be kept."""
    return np.array(element.values, np.float32)


def unscaled(codes: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """What codes stand for before they are scaled: uint8 [out, n] -> float32."""
    if fmt.element is not None:
        return torch.from_numpy(_values(fmt.element))[codes.int()]
    return codes.float().sub_(fmt.zero_point if zeros is None else zeros)

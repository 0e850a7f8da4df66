"""Lay packed weights out as ONNX's operators read them.

operator                  codes                                      scales             zero points
MatMulNBits               uint8 [out, blocks, block * bits / 8]      float [out, blocks]  uint8, in bytes as codes
GatherBlockQuantized      uint8 [rows, width * bits / 8]             float [rows, blocks] likewise
DequantizeLinear          int4, int8 (or unsigned) [in, out]         float [blocks, out]  as the codes, [blocks, out]
                          float8e4m3fn, float8e5m2 [in, out]         float [out]

Codes lie from the low bits of a byte on, and have 2, 4 or 8 bits: those of 3 bits are held in 4, those of 5 to 7 in 8.
A block is a power of two from 16 to 256; a larger group, or a whole row, is several blocks of one scale.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.export.exchange.coded import coded, why_not_coded
from compressor.export.exchange.dense_form import PackedSite
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight

WIDTHS = (2, 4, 8)
FLOATS = {"E4M3": "FLOAT8E4M3FN", "E5M2": "FLOAT8E5M2"}
"""Types of ONNX for floats of 8 bits, since opset 19."""
_SMALLEST, _LARGEST = 16, 256
_PADDED = 32  # block of rows that no block divides: what fills the last one up is multiplied by nothing


def why_not_blocks(site: PackedSite) -> str:
    """Say why a site's numbers cannot be held exactly; empty if they can."""
    fmt, columns = site.packed.format, site.packed.shape[1]
    if reason := why_not_coded(fmt):
        return f"has no such operator: the format {reason}"
    if fmt.element is not None:
        return _why_not_floats(site)
    if block_size(fmt, columns) < _SMALLEST or (site.reads_table and columns % block_size(fmt, columns)):
        group = fmt.group_size or columns
        return f"has blocks of {_SMALLEST} to {_LARGEST} weights, a power of two, and none divides {group}"
    act = fmt.activations
    if act is not None and (act.element is not None or act.is_sign):
        return f"rounds activations to integers of 2 to 8 bits, not to {act.numbers}"
    if act is not None and act.group_size and columns % act.group_size:
        return f"rounds whole groups of activations, and {columns} inputs are not a multiple of {act.group_size}"
    return ""


def _why_not_floats(site: PackedSite) -> str:
    fmt = site.packed.format
    assert fmt.element is not None
    if fmt.element.name not in FLOATS:
        return f"has integers of 2 to 8 bits and {' and '.join(FLOATS)}, and the format has {fmt.element.name}"
    if site.reads_table or fmt.strategy != "channel" or fmt.scale_type != "F16" or fmt.activations is not None:
        return f"holds {fmt.element.name} in linears and convolutions with one scale a row and float activations"
    return ""


def stored_bits(fmt: Format) -> int:
    """Return the bits in which codes are held."""
    return next(width for width in WIDTHS if width >= fmt.bits)


def block_size(fmt: Format, columns: int) -> int:
    """Return the columns of a block: the largest that all groups consist of; 0 where there is none."""
    size = math.gcd(fmt.group_size or columns, _LARGEST)
    if size >= _SMALLEST:
        return size
    return 0 if fmt.group_size else _PADDED


def has_one_scale(fmt: Format) -> bool:
    """Return whether each row has one scale, and no zero point."""
    return fmt.strategy in ("channel", "tensor") and fmt.symmetric


class Blocks:
    """A packed weight in blocks; its tensors are made when they are asked for.

    Attributes:
        bits: of a code as it is held.
        size: columns of a block.
        count: blocks of a row.
    """

    def __init__(self, packed: PackedWeight) -> None:
        self._packed = packed
        self.rows, self.columns = packed.shape
        self.bits, self.size = stored_bits(packed.format), block_size(packed.format, packed.shape[1])
        self.count = -(-self.columns // self.size)

    def codes(self) -> NDArray[np.uint8]:
        """Return bytes [rows, count * size * bits / 8]."""
        fmt, found = self._packed.format, coded(self._packed)
        shift = 0 if found.zeros is not None else (1 << (self.bits - 1)) - int(fmt.zero_point)
        codes = torch.nn.functional.pad(found.codes + shift, (0, self.count * self.size - self.columns))
        return in_bytes(codes, self.bits)

    def scales(self) -> NDArray[np.float16]:
        """Return scales [rows, count]."""
        return self.by_block(coded(self._packed).scales).numpy()

    def zeros(self) -> NDArray[np.uint8]:
        """Return zero points as bytes [rows, ceil(count * bits / 8)]."""
        zeros = coded(self._packed).zeros
        assert zeros is not None
        return in_bytes(torch.nn.functional.pad(self.by_block(zeros), (0, -self.count % (8 // self.bits))), self.bits)

    def by_block(self, grids: Tensor) -> Tensor:
        """Return grids [rows, groups] as [rows, count]."""
        group = self._packed.format.group_size or self.columns
        return grids[:, torch.arange(self.count) * self.size // group].contiguous()


def in_bytes(codes: Tensor, bits: int) -> NDArray[np.uint8]:
    """Pack codes uint8 [rows, n] from the low bits of each byte on: [rows, n * bits / 8]."""
    each = codes.reshape(len(codes), -1, 8 // bits).numpy()
    found: NDArray[np.uint8] = np.zeros(each.shape[:2], np.uint8)
    for place in range(8 // bits):
        found |= each[..., place] << np.uint8(bits * place)
    return found


def signed(packed: PackedWeight) -> Tensor:
    """Return codes less their zero point, int8 [out, in], of a symmetric grid."""
    return (coded(packed).codes.short() - int(packed.format.zero_point)).to(torch.int8)


def row_scales(packed: PackedWeight) -> NDArray[Any]:
    """Return one scale a row, float32 [out]."""
    return coded(packed).scales[:, 0].float().numpy()

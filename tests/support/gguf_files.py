"""Write GGUF files and the values of their blocks, element by element, after ggml's C sources (ggml-quants.c)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20),
         "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110),
         "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "TQ2_0": (35, 256, 66),
         "MXFP4": (39, 32, 17), "Q2_0": (42, 64, 18)}  # fmt: skip
"""Number, elements and bytes of a block."""
_FLOATS_AT = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
              "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ2_0": (64,), "MXFP4": (),
              "Q2_0": (0,)}  # fmt: skip


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    if isinstance(value, float):
        return text(key) + struct.pack("<If", 6, value)
    return text(key) + struct.pack("<II", 4, value)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str | int, tuple[int, ...], bytes]]
) -> None:
    """``tensors`` are type, shape as torch counts it, and bytes."""
    heads, data = b"", b""
    for name, (kind, shape, content) in tensors.items():
        number = TYPES[kind][0] if isinstance(kind, str) else kind
        heads += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, len(data))
        data += content + bytes(-len(content) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(entry(*pair) for pair in metadata.items()) + heads
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def random_blocks(rng: np.random.Generator, kind: str, count: int) -> NDArray[np.uint8]:
    """Any codes and scales of blocks; their float16 numbers are small, of either sign."""
    raw = rng.integers(0, 256, (count, TYPES[kind][2])).astype(np.uint8)
    for at in _FLOATS_AT[kind]:
        numbers = (rng.uniform(1e-4, 5e-4, (count, 1)) * rng.choice((-1, 1), (count, 1))).astype(np.float16)
        raw[:, at : at + 2] = numbers.view(np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = rng.integers(100, 140, count)
    return raw


def block_values(kind: str, block: bytes) -> list[float]:
    """Return the values of one block: exact arithmetic in float64, rounded once to float32 by the caller."""
    d, m = [*(struct.unpack("<e", block[at : at + 2])[0] for at in _FLOATS_AT[kind]), 0.0, 0.0][:2]
    return _VALUES[kind](block, d, m)


def _legacy(block: bytes, d: float, m: float, *, at: int, high_at: int | None, minimum: bool) -> list[float]:
    """Of Q4_0, Q4_1, Q5_0 and Q5_1: dequantize_row_q5_1 and its like."""
    found = [0.0] * 32
    high = 0 if high_at is None else int.from_bytes(block[high_at : high_at + 4], "little")
    middle = 0 if minimum else (8 if high_at is None else 16)
    for j in range(16):
        for place, nibble in ((j, block[at + j] & 15), (j + 16, block[at + j] >> 4)):
            code = nibble | (high >> place & 1) << 4
            found[place] = (code - middle) * d + (m if minimum else 0.0)
    return found


def _q8_0(block: bytes, d: float, m: float) -> list[float]:
    return [d * code for code in struct.unpack("32b", block[2:])]


def _q2_k(block: bytes, d: float, m: float) -> list[float]:
    found, field = [], 0
    for n in (0, 1):
        for shift in (0, 2, 4, 6):
            for half in (0, 16):
                scale, minimum = block[field] & 15, block[field] >> 4
                field += 1
                codes = [(block[16 + 32 * n + half + i] >> shift) & 3 for i in range(16)]
                found += [d * scale * code - m * minimum for code in codes]
    return found


def _q3_k(block: bytes, d: float, m: float) -> list[float]:
    packed, scales = block[96:108], []
    for k in range(16):
        low = packed[k] & 15 if k < 8 else packed[k - 8] >> 4
        scales.append((low | (packed[8 + k % 4] >> 2 * (k // 4) & 3) << 4) - 32)
    found, field = [], 0
    for n in (0, 1):
        for j in range(4):
            for half in (0, 16):
                for i in range(half, half + 16):
                    code = block[32 + 32 * n + i] >> 2 * j & 3
                    code -= 0 if block[i] >> (4 * n + j) & 1 else 4
                    found.append(d * scales[field] * code)
                field += 1
    return found


def _scale_and_minimum(packed: bytes, j: int) -> tuple[int, int]:
    """get_scale_min_k4."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4


def _q4_or_5_k(block: bytes, d: float, m: float, *, high_at: int | None, at: int) -> list[float]:
    found = []
    for field in range(8):
        scale, minimum = _scale_and_minimum(block[4:16], field)
        for i in range(32):
            code = block[at + 32 * (field // 2) + i] >> 4 * (field % 2) & 15
            code += 16 * (0 if high_at is None else block[high_at + i] >> field & 1)
            found.append(d * scale * code - m * minimum)
    return found


def _q6_k(block: bytes, d: float, m: float) -> list[float]:
    found = [0.0] * 256
    scales = struct.unpack("16b", block[192:208])
    for n in (0, 1):
        low, high = block[64 * n : 64 * n + 64], block[128 + 32 * n : 160 + 32 * n]
        for i in range(32):
            codes = [low[i] & 15, low[i + 32] & 15, low[i] >> 4, low[i + 32] >> 4]
            for j, code in enumerate(codes):
                code |= (high[i] >> 2 * j & 3) << 4
                found[128 * n + 32 * j + i] = d * scales[8 * n + i // 16 + 2 * j] * (code - 32)
    return found


def _tq2_0(block: bytes, d: float, m: float) -> list[float]:
    return [d * ((block[32 * n + i] >> 2 * j & 3) - 1) for n in (0, 1) for j in range(4) for i in range(32)]


def _q2_0(block: bytes, d: float, m: float) -> list[float]:
    return [d * ((block[2 + i // 4] >> 2 * (i % 4) & 3) - 1) for i in range(64)]


def _mxfp4(block: bytes, d: float, m: float) -> list[float]:
    doubled = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # kvalues_mxfp4
    nibbles = [byte & 15 for byte in block[1:]] + [byte >> 4 for byte in block[1:]]
    return [doubled[code] * 2.0 ** (block[0] - 128) for code in nibbles]


_VALUES = {
    "Q4_0": lambda *a: _legacy(*a, at=2, high_at=None, minimum=False),
    "Q4_1": lambda *a: _legacy(*a, at=4, high_at=None, minimum=True),
    "Q5_0": lambda *a: _legacy(*a, at=6, high_at=2, minimum=False),
    "Q5_1": lambda *a: _legacy(*a, at=8, high_at=4, minimum=True),
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": lambda *a: _q4_or_5_k(*a, high_at=None, at=16),
    "Q5_K": lambda *a: _q4_or_5_k(*a, high_at=16, at=48),
    "Q6_K": _q6_k,
    "TQ2_0": _tq2_0,
    "Q2_0": _q2_0,
    "MXFP4": _mxfp4,
}

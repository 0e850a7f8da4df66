"""Estimate the work and memory of pruning by shapes, and find the dense format that takes no more bytes."""

from __future__ import annotations

from collections import Counter

from compressor.formats.format import Format
from compressor.formats.weights import GroupScales, Integers
from compressor.numerics.products.deterministic import half_product
from compressor.numerics.range_search import Work, observer_work
from compressor.numerics.sparsity.n_of_m import pattern_of


def smaller_dense(fmt: Format, rows: int, columns: int) -> Format | None:
    """Return the format of integers, with the same activations, with the most bits that takes no more bytes."""
    most = fmt.packed_bytes(rows, columns)
    candidates = [
        Format(Integers(bits), GroupScales(size), fmt.activations)
        for bits in (8, 7, 6, 5, 4, 3, 2)
        for size in (32, 64, 128)
    ]
    fitting = [dense for dense in candidates if dense.packed_bytes(rows, columns) <= most]
    return fitting[0] if fitting else None


def pruning_work(rows: int, columns: int, fmt: Format) -> Work:
    """Return the work of pruning a weight and of rounding it, whole and tile by tile."""
    kept, tiles = fmt.stored_columns(columns), -(-rows // 16)
    if pattern_of(fmt) is not None:
        # Rows keep different columns: three sweeps over all in place of tiles.
        kept = 3 * columns
        tiles = 0
    work = Counter(observer_work(rows, columns, fmt.of_kept, "mse"))
    work.update(
        {
            "factor64_flop": 4 / 3 * (columns**3 + tiles * kept**3),
            "matmul64_flop": 2 * rows * columns * ((2 + 3 * half_product(columns)) * columns + 3 * kept),
            "matmul_flop": 6 * rows * columns * columns,
            "stream_byte": 8 * (8 * columns**2 + 12 * rows * columns + 6 * tiles * kept**2),
            "rtn_element": 2 * rows * columns,
            "dequantize_element": 3 * rows * columns,
            "sweep_element": 3 * rows * columns,
        }
    )
    return work


def pruning_bytes(rows: int, columns: int, fmt: Format) -> int:
    """Return the bytes that pruning works in: the Hessian and its factor in float64, the weight and its copies."""
    kept = fmt.stored_columns(columns)
    return 8 * (4 * columns**2 + 4 * kept**2 + 6 * rows * columns)

"""Attend with single queries over caches, of float32 channels or of packed rows.

All kernels of a CPU whose queries are taken one by one are loops around :meth:`Single.attend`, so that a token has the
same bits in each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.kernels.attention.biases import DistanceBiases
from compressor.codegen.kernels.attention.packed_blocks import PackedHeads
from compressor.codegen.kernels.attention.packed_rows import PackedRow, PackedRows
from compressor.codegen.kernels.attention.parameters import Held, Parameters
from compressor.codegen.kernels.attention.prompt import Channels, Heads
from compressor.codegen.kernels.attention.rows import DenseRows, Place, Row, Rows, first_seen
from compressor.codegen.kernels.vector import VECTOR


@dataclass(frozen=True)
class Further:
    """Hold the further buffers that a kernel reads.

    Attributes:
        sinks: buffer float32 [H], or None.
        biases: of distances, or None.
        orders: buffers int32 [Hkv, D] of keys and of values, or None for each.
    """

    sinks: Any
    biases: DistanceBiases | None
    orders: tuple[Any, Any]

    def sink(self, head: Any) -> Any:
        """Return a head's further logit; None where there is none."""
        return None if self.sinks is None else self.sinks[head]


class Single:
    """Attend with one query at a time.

    Args:
        scale, window, softcap, chunk: as of :func:`compressor.ops.attention.cached_attention`.
        has_sinks, has_slopes, distances, has_order: what further parameters there are; slopes and biases of
            ``distances`` distances over channels only, orders over packed rows only.
    """

    def __init__(
        self,
        parameters: Parameters,
        scale: float,
        softcap: float,
        window: int,
        has_sinks: bool,
        chunk: int = 0,
        has_slopes: bool = False,
        distances: int = 0,
        has_order: bool = False,
    ) -> None:
        self.parameters, self.window, self.chunk = parameters, window, chunk
        self.has_sinks, self.has_slopes, self.distances, self.has_order = has_sinks, has_slopes, distances, has_order
        self.repeat = parameters.heads // parameters.kv_heads
        kind = Row if parameters.fmt is None else PackedRow
        self.row: Any = kind(parameters.width, scale, softcap, has_sinks)

    def declare(self) -> Further:
        """Declare what else the kernel reads, behind places."""
        sinks = self.parameters.sinks(self.has_sinks)
        biases = self.parameters.biases(self.has_slopes, self.distances)
        return Further(sinks, biases, self.parameters.orders(self.has_order))

    def attend(
        self,
        held: Held,
        further: Further,
        out: Any,
        query: tuple[Any, Any, Any],
        slot: Any,
        end: Any,
        found: Callable[[Rows], Rows] = lambda rows: rows,
    ) -> None:
        """Emit the attention of a query to the keys that it sees.

        Args:
            out: buffer float32 [B, R, H, D].
            query: its indices b, h and r in ``held.q``.
            slot: of the caches.
            end: position behind the query's.
            found: rows of the slot -> rows by the position of their keys, where these lie elsewhere.
        """
        b, h, r = query
        width, fmt, kv = self.parameters.width, self.parameters.fmt, h // self.repeat
        dense = DenseRows(held.k_cache, held.v_cache, slot, kv, width)
        rows: Rows = dense if fmt is None else PackedRows(held.k_cache, held.v_cache, slot, kv, width, fmt)
        last: Any = partial(further.biases.one, h) if further.biases is not None else None
        if self.has_order:
            last = tuple(Place(order, kv) for order in further.orders)
        first = first_seen(end - 1, self.window, self.chunk)
        # Filled up to whole vectors, so that the exponentials need no scalar tail.
        scores = T.alloc_buffer((end - first + VECTOR,), "float32")
        places = Place(held.q, b, h, r), Place(out, b, r, h)
        self.row.emit(found(rows), *places, scores, further.sink(h), first, end - first, last)

    def heads_of(self, held: Held, further: Further) -> list[Channels]:
        """Return queries, and keys and values of the caches, as blocks of queries read them."""
        caches: tuple[Any, Any] = (held.k_cache, held.v_cache)
        fmt, width = self.parameters.fmt, self.parameters.width
        if fmt is None:
            return [Heads(buffer) for buffer in (held.q, *caches)]
        of_caches = [PackedHeads(rows, width, fmt, order) for rows, order in zip(caches, further.orders, strict=True)]
        return [Heads(held.q), *of_caches]


@T.inline
def store_row(held, b, h, s, slot, row):
    """Copy the keys and values of a new token's head to a row of the caches."""
    for d in T.vectorized(held.k.shape[3]):
        held.k_cache[slot, h, row, d] = held.k[b, h, s, d]
    for d in T.vectorized(held.v.shape[3]):
        held.v_cache[slot, h, row, d] = held.v[b, h, s, d]

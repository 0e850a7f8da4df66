"""Declare the parameters that kernels of attention over caches have in common, on CPUs and GPUs.

Each method declares the next ones of the kernel that is being built, in the order of the methods here; a kernel
declares places of its own (``position``, ...) behind the caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compressor.codegen.kernels.attention.biases import DistanceBiases
from compressor.codegen.kernels.linear.weights import parameter
from compressor.formats.cache import CacheFormat


@dataclass(frozen=True)
class Held:
    """Queries, new keys and values, and the caches that these are written to.

    Attributes:
        q: buffer float32 [B, H, R, D].
        k, v: buffers [B, Hkv, S, row].
        k_cache, v_cache: buffers [N, Hkv, T, row].
    """

    q: Any
    k: Any
    v: Any
    k_cache: Any
    v_cache: Any


@dataclass(frozen=True)
class Parameters:
    """Declare buffers for queries of some heads.

    Attributes:
        heads, kv_heads: of queries, and of keys and values.
        width: of a head.
        fmt: of packed rows, uint8 [row_bytes]; None for channels, float32 [width].
    """

    heads: int
    kv_heads: int
    width: int
    fmt: CacheFormat | None = None

    def held(self, batch: Any, queries: Any, new: Any, slots: Any, capacity: Any) -> Held:
        """Declare queries, new keys and values, and caches.

        Args:
            batch, queries, new: B, R and S of :class:`Held`.
            slots, capacity: N and T.
        """
        row, kind = (self.width, "float32") if self.fmt is None else (self.fmt.row_bytes(self.width), "uint8")
        shapes = [(batch, self.kv_heads, new, row)] * 2 + [(slots, self.kv_heads, capacity, row)] * 2
        q = parameter((batch, self.heads, queries, self.width), "float32")
        return Held(q, *(parameter(shape, kind) for shape in shapes))

    def sinks(self, has_sinks: bool) -> Any:
        """Declare one more logit for each head, float32 [H]; None where there are none."""
        return parameter((self.heads,), "float32") if has_sinks else None

    def biases(self, has_slopes: bool, distances: int) -> DistanceBiases | None:
        """Declare slopes, float32 [H], and biases of distances, float32 [distances * H], where there are any."""
        slopes = parameter((self.heads,), "float32") if has_slopes else None
        table = parameter((distances * self.heads,), "float32") if distances else None
        return DistanceBiases(slopes, table, self.heads, distances) if has_slopes or distances else None

    def orders(self, has_order: bool) -> tuple[Any, Any]:
        """Declare the channel at each place of a row of keys, and of values, int32 [Hkv, D]; None for channels as they
        come.
        """
        shape = (self.kv_heads, self.width)
        return (parameter(shape, "int32"), parameter(shape, "int32")) if has_order else (None, None)

    def out(self, batch: Any, queries: Any) -> Any:
        """Declare the outputs, float32 [B, R, H, D]."""
        return parameter((batch, queries, self.heads, self.width), "float32")

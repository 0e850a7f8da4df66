"""Add biases to the scores of attention: those of a key's distance, and those of each pair of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.kernels.vector import VECTOR, splat


@dataclass(frozen=True)
class DistanceBiases:
    """Biases that follow from how far a key lies back, as :func:`compressor.ops.attention.cached_attention` adds them.

    Attributes:
        slopes: buffer float32 [H], or None.
        table: buffer float32 [N * H], of N distances; or None.
        heads: H.
        distances: N.
    """

    slopes: Any
    table: Any
    heads: int
    distances: int

    def one(self, head: Any, ahead: Any) -> Any:
        """Return what a score gets whose key lies ``ahead`` of the query, 0 or less; float32."""
        total: Any = None
        if self.slopes is not None:
            total = self.slopes[head] * T.Cast("float32", ahead)
        if self.table is not None:
            back = T.min(-ahead, T.int64(self.distances - 1))
            found = self.table[back * self.heads + head]
            total = found if total is None else total + found
        return total

    def many(self, position: Any, heads: Any, tokens: Any, key: Any) -> Any:
        """Return what the scores of 16 heads and new tokens with a key get, float32x16; of hidden keys, any number.

        Args:
            position: buffer int64, the first is that of the first new token.
            heads, tokens: int32x16.
        """
        ahead, total = T.broadcast(T.Cast("int32", key - position[0]), VECTOR) - tokens, None
        if self.slopes is not None:
            total = self.slopes[heads] * T.Cast(f"float32x{VECTOR}", ahead)
        if self.table is not None:
            back = T.max(T.min(splat(0, VECTOR) - ahead, splat(self.distances - 1, VECTOR)), splat(0, VECTOR))
            found = self.table[back * splat(self.heads, VECTOR) + heads]
            total = found if total is None else total + found
        return total


def pair_biases(
    biases: Any, own: tuple[bool, bool, bool], heads: int, length: Any, b: Any, head: Any, tokens: Any, key: Any
) -> Any:
    """Return the biases of 16 heads and tokens with a key.

    Args:
        biases: flat buffer, float32.
        own: of batch, heads and queries: whether there is one for each, or one for all.
    """
    at = T.broadcast(T.Cast("int64", b) if own[0] else T.int64(0), VECTOR)
    if own[1]:
        at = at * T.broadcast(T.int64(heads), VECTOR) + T.Cast(f"int64x{VECTOR}", head)
    if own[2]:
        at = at * T.broadcast(length, VECTOR) + T.Cast(f"int64x{VECTOR}", tokens)
    return biases[at * T.broadcast(length, VECTOR) + T.broadcast(T.Cast("int64", key), VECTOR)]

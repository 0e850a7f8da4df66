"""Attention of a decoder over its encoder's output, whose keys and values are computed once a source.

Of a single token the scores of each head are kept whole; several tokens are attended to in blocks
(:mod:`compressor.codegen.kernels.attention.prompt`).  Heads and blocks are divided over threads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.attention.cached import unpadded
from compressor.codegen.kernels.attention.prompt import Heads, PromptBlocks
from compressor.codegen.kernels.attention.rows import DenseRows, Place, Row
from compressor.codegen.kernels.vector import VECTOR

_LOWEST = -3.0e38


def cross_attention(heads: int, kv_heads: int, head_dim: int, scale: float, softcap: float = 0.0) -> tvm.tirx.PrimFunc:
    """TIR for :func:`compressor.ops.attention.masked_attention` where queries and keys are not of the same tokens.

    Parameters of the result: q [B, H, S, D], k, v [B, Hkv, N, D], mask [B, N], out [B, S, H, D], all float32.
    """
    repeat = heads // kv_heads
    row, prompt = _SourceRow(head_dim, scale, softcap, False), PromptBlocks(head_dim, repeat, scale, softcap)

    @T.prim_func(s_tir=True, private=True)
    def kernel(q_: T.handle, k_: T.handle, v_: T.handle, mask_: T.handle, out_: T.handle) -> None:
        batch = T.int64()
        new = T.int64()
        length = T.int64()
        q = T.match_buffer(q_, (batch, heads, new, head_dim), "float32")
        k = T.match_buffer(k_, (batch, kv_heads, length, head_dim), "float32")
        v = T.match_buffer(v_, (batch, kv_heads, length, head_dim), "float32")
        mask = T.match_buffer(mask_, (batch, length), "float32")
        out = T.match_buffer(out_, (batch, new, heads, head_dim), "float32")

        if new == 1:
            for task in T.parallel(batch * heads):
                h = T.meta_var(task % heads)
                b = T.meta_var(task // heads)
                # Filled up to whole vectors, so that the exponentials need no scalar tail.
                scores = T.alloc_buffer((length + VECTOR,), "float32")
                held = T.meta_var(_SourceRows(k, v, b, h // repeat, head_dim, mask))
                query, result = T.meta_var((Place(q, b, h, T.int64(0)), Place(out, b, T.int64(0), h)))
                row.emit(held, query, result, scores, None, T.int64(0), length)
        else:
            count = T.meta_var(prompt.blocks(new))
            for task in T.parallel(batch * kv_heads * count):
                kv = T.meta_var(task // count % kv_heads)
                b = T.meta_var(task // count // kv_heads)
                seen = T.meta_var(partial(unpadded, mask, b, 0))
                rows = T.meta_var([Heads(q), Heads(k), Heads(v)])
                prompt.attend(rows, out, b, kv, task % count, new, T.int64(0), length, seen, None)

    return kernel


class _SourceRows(DenseRows):
    """Keys and values of a source, some of which are padding."""

    def __init__(self, keys: Any, values: Any, b: Any, kv: Any, head_dim: int, mask: Any) -> None:
        super().__init__(keys, values, b, kv, head_dim)
        self.mask = mask


class _SourceRow(Row):
    """A query row that does not see padding."""

    def _score(self, held: Any, query: Place, row: Any) -> Any:
        score = super()._score(held, query, row)
        return T.Select(held.mask[held.b, row] != T.float32(0), score, T.float32(_LOWEST))

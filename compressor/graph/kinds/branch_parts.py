"""Tell what a branch of a residual stream is: an attention, a feed-forward network, or convolutions of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.fx import Node

import compressor.ops  # noqa: F401  (registers the operators)

_OPS = torch.ops.compressor
Part = Literal["attention", "ffn", "convolution"]
ATTENTION = (
    _OPS.cached_attention.default,
    _OPS.packed_attention.default,
    _OPS.masked_attention.default,
    torch.ops.aten.scaled_dot_product_attention.default,
)
_RECURRENT = (_OPS.selective_scan.default, _OPS.gated_delta_rule.default, _OPS.wkv.default)
_TAPS, _PATCHES = _OPS.causal_convolution.default, _OPS.patches.default


def part_of(nodes: Sequence[Node]) -> Part:
    """Return ``attention`` where some nodes mix tokens, ``convolution`` where they look at patches of images, else
    ``ffn``.
    """
    if mixes_tokens(nodes):
        return "attention"
    return "convolution" if any(node.target is _PATCHES for node in nodes) else "ffn"


def mixes_tokens(nodes: Sequence[Node]) -> bool:
    """Return whether an attention operator or a recurrent one is among some nodes.

    A convolution of two taps is not one: RWKV's feed-forward networks look at the token before theirs.
    """
    return any(node.target in (*ATTENTION, *_RECURRENT) or (node.target is _TAPS and _taps(node) > 2) for node in nodes)


def _taps(convolution: Node) -> int:
    weight: Any = convolution.args[1]
    return int(weight.meta["val"].shape[-1])

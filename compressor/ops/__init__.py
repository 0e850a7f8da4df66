"""Define our torch operators (namespace ``compressor``): schema, fake kernel and eager definition.

The eager definition says what each operator means, its gradients included; every generated kernel is tested against
it.  Importing this package registers the operators.

Invariant: one file a family, with the names of ``codegen/kernels`` and ``codegen/web/kernels``; knows no graph.
"""

from __future__ import annotations

from compressor.ops import (
    attention,
    depthwise,
    embedding,
    experts,
    kept_attention,
    linear,
    norm,
    packed_cache,
    patches,
    recurrence,
    tree_attention,
)

__all__ = [
    "attention",
    "depthwise",
    "embedding",
    "experts",
    "kept_attention",
    "linear",
    "norm",
    "packed_cache",
    "patches",
    "recurrence",
    "tree_attention",
]

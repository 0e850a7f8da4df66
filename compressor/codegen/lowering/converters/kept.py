"""Convert attention of kept tokens to calls of kernels that write keys and values in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from torch import fx
from tvm import relax

from compressor.codegen.kernels.attention import kept
from compressor.codegen.lowering.converters.linears import LinearConverter
from compressor.formats.cache import CacheFormat


class KeptConverter(LinearConverter):
    """Turns attention of kept tokens into a call of one kernel."""

    def kept(self) -> dict[str, Callable[..., Any]]:
        """Return the converter of each operator, by its name."""
        return {
            "kept_attention.default": self._kept_attention,
            "packed_kept_attention.default": self._packed_kept_attention,
        }

    def _kept_attention(self, node: fx.Node, importer: Any) -> Any:
        *given, scale, window, softcap, sinks, chunk, slopes, biases = (*importer.retrieve_args(node), 0, None, None)[
            :14
        ]
        distances = 0
        if biases is not None:
            distances, heads = (int(size) for size in biases.ty.shape)
            biases = importer.block_builder.emit(relax.op.reshape(biases, [distances * heads]))
        sizes = (*_heads(given), float(scale), int(window), float(softcap))
        further = (sinks is not None, int(chunk), slopes is not None, distances)

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            return kept.kept_attention(*sizes, *further), {"family": "kept_attention"}

        name = _name("kept_attention", *sizes, *map(int, further))
        return self._attend(importer, name, make, given, [sinks, slopes, biases])

    def _packed_kept_attention(self, node: fx.Node, importer: Any) -> Any:
        *given, scale, window, softcap, sinks, k_order, v_order, format_name = importer.retrieve_args(node)
        fmt, has_sinks, permuted = CacheFormat.parse(format_name), sinks is not None, k_order is not None
        sizes = (*_heads(given), float(scale), int(window), float(softcap))

        def make() -> tuple[tvm.tirx.PrimFunc, dict[str, Any]]:
            func = kept.packed_kept_attention(*sizes, has_sinks, fmt, permuted)
            return func, {"family": "packed_kept_attention", "cache_format": fmt.name}

        name = f"{_name('packed_kept_attention', *sizes, int(has_sinks), int(permuted))}_{fmt.name}"
        return self._attend(importer, name, make, given, [sinks, k_order, v_order])

    def _attend(
        self,
        importer: Any,
        name: str,
        make: Callable[[], tuple[tvm.tirx.PrimFunc, dict[str, Any]]],
        given: list[Any],
        more: list[Any],
    ) -> Any:
        """Call a kernel, which writes the caches.

        Args:
            more: operands of which some may be None, and are left out.
        """
        (batch, heads, rows, width), caches = given[0].ty.shape, [given[3].ty, given[4].ty]
        out = relax.TensorType([batch, rows, heads, width], "float32")
        operands = relax.Tuple([*given, *(operand for operand in more if operand is not None)])
        kernel, emit = self.kernel(importer, name, make), importer.block_builder.emit
        call = emit(relax.op.call_tir_inplace(kernel, operands, [-1, 3, 4], [out, *caches]))
        return emit(relax.TupleGetItem(call, 0))


def _heads(given: list[Any]) -> tuple[int, int, int]:
    """Return the heads of queries and of keys and values, and a head's width."""
    q, k = (tensor.ty.shape for tensor in given[:2])
    return int(q[1]), int(k[1]), int(q[3])


def _name(family: str, *numbers: float) -> str:
    return f"{family}_{'_'.join(f'{n:g}' for n in numbers)}".replace("-", "m").replace(".", "p")

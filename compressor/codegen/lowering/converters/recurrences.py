"""Convert operators with a state to calls of kernels that write the state in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from torch import fx
from tvm import relax

from compressor.codegen.kernels.recurrence import causal_convolution, delta_rule, selective_scan, wkv
from compressor.codegen.lowering.converters.linears import LinearConverter

_Make = Callable[[], tvm.tirx.PrimFunc]


class RecurrenceConverter(LinearConverter):
    """Turns each operator with a state into a call of one kernel."""

    def recurrences(self) -> dict[str, Callable[..., Any]]:
        """Return the converter of each operator, by its name."""
        return {
            "causal_convolution.default": self._causal_convolution,
            "selective_scan.default": self._selective_scan,
            "gated_delta_rule.default": self._gated_delta_rule,
            "wkv.default": self._wkv,
        }

    def _causal_convolution(self, node: fx.Node, importer: Any) -> Any:
        x, weight, bias, state = importer.retrieve_args(node)
        channels, width = (int(n) for n in weight.ty.shape)
        name = f"{channels}x{width}{'' if bias is None else '_bias'}"
        make = lambda: causal_convolution.causal_convolution(channels, width, bias is not None)  # noqa: E731
        return self._with_state(
            importer, "causal_convolution", name, make, [x, weight, *([] if bias is None else [bias])], state, x
        )

    def _selective_scan(self, node: fx.Node, importer: Any) -> Any:
        x, dt, a, b, c, state = importer.retrieve_args(node)
        (heads, width), (groups, states) = (_sizes(part) for part in (x, b))
        decays = (int(a.ty.shape[1]) > 1, int(a.ty.shape[2]) > 1)
        own_steps = int(dt.ty.shape[3]) > 1
        name = f"{heads}x{width}_{groups}x{states}"
        name += "".join(
            f"_{part}" for part, own in zip(("steps", "states", "channels"), (own_steps, *decays), strict=True) if own
        )
        sizes = (heads, width, states, groups)
        make = lambda: selective_scan.selective_scan(*sizes, own_steps, decays)  # noqa: E731
        return self._with_state(importer, "selective_scan", name, make, [x, dt, a, b, c], state, x)

    def _gated_delta_rule(self, node: fx.Node, importer: Any) -> Any:
        q, k, v, decay, beta, state = importer.retrieve_args(node)
        (key_heads, key_width), (heads, width) = (_sizes(part) for part in (k, v))
        own_decays = int(decay.ty.shape[3]) > 1
        name = f"{key_heads}x{key_width}_{heads}x{width}{'_decays' if own_decays else ''}"
        make = lambda: delta_rule.gated_delta_rule(key_heads, heads, key_width, width, own_decays)  # noqa: E731
        return self._with_state(importer, "gated_delta_rule", name, make, [q, k, v, decay, beta], state, v)

    def _wkv(self, node: fx.Node, importer: Any) -> Any:
        k, v, decay, first, state = importer.retrieve_args(node)
        channels = int(k.ty.shape[2])
        return self._with_state(
            importer, "wkv", f"{channels}", lambda: wkv.wkv(channels), [k, v, decay, first], state, v
        )

    def _with_state(
        self, importer: Any, family: str, name: str, make: _Make, operands: list[Any], state: Any, like: Any
    ) -> Any:
        """Call a kernel that writes the state, its last operand but the result, which is like ``like``."""
        kernel = self.kernel(importer, f"{family}_{name}", lambda: (make(), {"family": family}))
        out = relax.TensorType(list(like.ty.shape), "float32")
        call = relax.op.call_tir_inplace(kernel, relax.Tuple([*operands, state]), [-1, len(operands)], [out, state.ty])
        found = importer.block_builder.emit(call)
        return relax.Tuple([importer.block_builder.emit(relax.TupleGetItem(found, i)) for i in range(2)])


def _sizes(part: Any) -> list[int]:
    """Return the sizes behind batch and tokens."""
    return [int(size) for size in list(part.ty.shape)[2:]]

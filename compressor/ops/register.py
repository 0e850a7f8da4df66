"""Register torch operators of the namespace ``compressor`` whose gradients are their own functions', run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import custom_op

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef


def operator(name: str) -> Callable[[Callable[..., Tensor | tuple[Tensor, ...]]], CustomOpDef]:
    """Register a function as an operator whose gradients are the function's own, by running it again."""

    def register(function: Callable[..., Tensor | tuple[Tensor, ...]]) -> CustomOpDef:
        registered = custom_op(f"compressor::{name}", mutates_args=())(function)

        def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.inputs = inputs

        def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
            wanted = [i for i, needed in enumerate(ctx.needs_input_grad) if needed is True]
            inputs = list(ctx.inputs)
            with torch.enable_grad():
                for i in wanted:
                    inputs[i] = inputs[i].detach().requires_grad_()
                result = function(*inputs)
                outputs = [result] if isinstance(result, Tensor) else list(result)
                # A state may not depend on what gradients are asked of.
                pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
                made, given = [y for y, _ in pairs], [g for _, g in pairs]
                found = torch.autograd.grad(made, [inputs[i] for i in wanted], given)
            by_place = dict(zip(wanted, found, strict=True))
            return tuple([None] * len(x) if _are_tensors(x) else by_place.get(i) for i, x in enumerate(inputs))

        registered.register_autograd(backward, setup_context=keep)
        return registered

    return register


def _are_tensors(value: Any) -> bool:
    return isinstance(value, list) and isinstance(value[0], Tensor)

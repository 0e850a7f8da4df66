"""Compute the parameters that a model's class makes itself and that checkpoints leave out, such as tables of sines."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn


def computed_weights(model: nn.Module, stored: Collection[str]) -> dict[str, Tensor]:
    """Return frozen tables that the class computes, by name.

    Args:
        model: its parameters may have no data.
        stored: names of the checkpoint's tensors, which are taken as they are.
    """
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        make: Any = getattr(module, "create_weight", None)  # transformers' name for it
        if callable(make) and isinstance(getattr(module, "weight", None), Tensor) and f"{path}.weight" not in stored:
            found[f"{path}.weight"] = make()
    return found

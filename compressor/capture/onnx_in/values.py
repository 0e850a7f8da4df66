"""Values while a model's nodes are gone through: tensors, and numbers that are known before the model runs.

Shape -> Gather -> Concat -> Reshape       the sizes are numbers or symbols, never tensors
Constant, initializer -> ...               folded once, before the export
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from compressor.errors import ModelFileError

_MOST = 4096  # elements of floats that are kept as numbers too


@dataclass
class Constant:
    """A tensor that is known before the model runs.

    Attributes:
        value: its elements.
        name: of the initializer or output that it is.
        narrow: elements of less than a byte, unpacked.
    """

    value: Tensor
    name: str
    narrow: bool = False
    listed: NDArray[Any] | None = field(init=False, default=None, repr=False)  # here: fake tensors would keep it away

    def __post_init__(self) -> None:
        if self.value.numel() <= _MOST or not self.value.dtype.is_floating_point:
            self.listed = np.array(self.value.tolist(), dtype=object).reshape(tuple(self.value.shape))

    @property
    def number(self) -> Any:
        """The only element."""
        assert self.listed is not None
        return self.listed.item()


@dataclass
class Numbers:
    """Whole numbers or booleans, some of which are symbolic sizes, as an array of objects."""

    values: NDArray[Any]
    dtype: torch.dtype = torch.int64

    def tensor(self) -> Tensor:
        """Return them as a tensor, which is computed where a size is symbolic."""
        flat = self.values.reshape(-1).tolist()
        if all(isinstance(value, int | bool | float) for value in flat):
            return constant(flat, self.dtype).reshape(self.values.shape)
        parts = [torch.scalar_tensor(value, dtype=self.dtype) for value in flat]
        return torch.stack(parts).reshape(self.values.shape)


Value: TypeAlias = Tensor | Constant | Numbers


@dataclass
class Call:
    """One node with its inputs, as an operator's definition reads them.

    Attributes:
        op: the operator.
        version: the opset in which its definition came.
        attributes: plain values and tensors, without defaults.
        inputs: None where one is left out.
        outputs: the number of outputs that the node names.
        hold: gives the tensor of a constant.
        module: of the step; the linears of a recurrent one are its children.
    """

    op: str
    version: int
    attributes: dict[str, Any]
    inputs: list[Value | None]
    outputs: int
    hold: Callable[[Constant], Tensor] = field(repr=False)
    module: nn.Module | None = field(default=None, repr=False)

    def has(self, index: int) -> bool:
        """Return whether an input is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def tensor(self, index: int) -> Tensor:
        """Return an input as a tensor."""
        value = self.inputs[index] if index < len(self.inputs) else None
        if value is None:
            raise refuse(f"its input {index} is missing")
        if isinstance(value, Constant):
            if value.narrow and self.op not in ("DequantizeLinear", "MatMulNBits"):
                raise refuse(f"{value.name!r} has elements of less than a byte; DequantizeLinear alone reads these")
            return self.hold(value)
        return value.tensor() if isinstance(value, Numbers) else value

    def maybe(self, index: int) -> Tensor | None:
        """Return an optional input as a tensor."""
        return self.tensor(index) if self.has(index) else None

    def tensors(self) -> list[Tensor]:
        """Return all inputs as tensors."""
        return [self.tensor(index) for index in range(len(self.inputs))]

    def known(self, index: int) -> NDArray[Any] | None:
        """Return an input's numbers, if they are known before the model runs."""
        value = self.inputs[index] if self.has(index) else None
        if isinstance(value, Constant):
            return value.listed
        return value.values if isinstance(value, Numbers) else None

    def numbers(self, index: int, what: str) -> list[Any]:
        """Return an input as numbers that must be known before the model runs.

        Raises:
            ModelFileError: the model computes them from its inputs.
        """
        found = self.known(index)
        if found is None:
            raise refuse(f"{what} are computed while the model runs; they must follow from constants and sizes")
        return list(found.reshape(-1).tolist())

    def number(self, index: int, what: str) -> Any:
        """Return an input that is one number."""
        found = self.numbers(index, what)
        if len(found) != 1:
            raise refuse(f"{what} are {len(found)} numbers, not one")
        return found[0]

    def scalar(self, index: int) -> Tensor | Any:
        """Return an input as a number of Python if it is a constant of one element, else as a tensor."""
        value = self.inputs[index]
        if isinstance(value, Constant) and value.value.numel() == 1 and value.value.dtype.is_floating_point:
            return value.number
        return self.tensor(index)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.attributes.get(name, default)

    def axes(self, index: int, name: str = "axes") -> list[int] | None:
        """Return axes, an attribute in older definitions and an input in newer ones; None if they are left out."""
        if self.has(index):
            return [int(axis) for axis in self.numbers(index, name)]
        given: list[int] | None = self.get(name)
        return given


def constant(values: Any, dtype: torch.dtype) -> Tensor:
    """Return a tensor of known values; made outside the trace, which would record how it is made."""
    with _disable_current_modes():
        return torch.tensor(values, dtype=dtype)


def refuse(why: str) -> ModelFileError:
    """Return the error of a node that is not served; the node's name is put in front."""
    return ModelFileError(why)

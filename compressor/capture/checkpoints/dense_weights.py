"""Give a quantised checkpoint the names and values of the dense one that it stands for.

A layout describes each dense weight by the stored tensors that it follows from and by a pure function.  The function
runs when the weight is read.  Its result goes to a mapped temporary file in the cache folder, so that a model of any
size takes memory for one tensor, and disk for its dense weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NoReturn

import torch
from torch import Tensor

from compressor.capture.weights import WeightSource
from compressor.errors import UsageError
from compressor.host.cache import cache_folder
from compressor.host.tensor_files import Spill, release, trim

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class DenseWeight:
    """A dense weight that is computed from stored tensors when it is read.

    Attributes:
        parts: argument of ``dequantize`` -> name of the stored tensor.
        shape: of the result.
        dtype: of the result.
        dequantize: a pure function of the parts.
    """

    parts: Mapping[str, str]
    shape: tuple[int, ...]
    dtype: torch.dtype
    dequantize: Callable[..., Tensor]


@dataclass(frozen=True)
class Stored:
    """Tensors of a checkpoint by their headers; values are read only where they decide what a tensor means."""

    source: WeightSource
    headers: WeightSource

    @property
    def names(self) -> frozenset[str]:
        """Names of all stored tensors."""
        return self.headers.names

    def modules(self, suffix: str) -> list[str]:
        """Return the modules that store a tensor of this last name, sorted."""
        return sorted(name.removesuffix(f".{suffix}") for name in self.names if name.endswith(f".{suffix}"))

    def check(self, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None = None) -> Tensor:
        """Return a stored tensor's header, a meta tensor.

        Raises:
            UsageError: it is missing, empty, or has another type or shape.
        """
        if name not in self.names:
            self.refuse(name, "is missing")
        header = self.headers.read(name)
        if header.dtype not in dtypes:
            self.refuse(name, f"is stored as {_type(header.dtype)}, not as {' or '.join(map(_type, dtypes))}")
        if shape is not None and tuple(header.shape) != shape:
            self.refuse(name, f"has shape {list(header.shape)}, and the quantization_config asks for {list(shape)}")
        if not header.numel():
            self.refuse(name, "is empty")
        return header

    def check_matrix(self, name: str, dtypes: tuple[torch.dtype, ...]) -> tuple[int, int]:
        """Return a stored tensor's two sizes.

        Raises:
            UsageError: it is missing, empty, has another type, or is not a matrix.
        """
        shape = self.check(name, dtypes).shape
        if len(shape) != 2:
            self.refuse(name, f"has shape {list(shape)}, and the weights of linears have 2 dimensions")
        return shape[0], shape[1]

    def values(self, name: str) -> Tensor:
        """Return a small tensor's values: indices or a shape, never a weight."""
        return self.source.read(name)

    def refuse(self, name: str, problem: str) -> NoReturn:
        """Raise a UsageError that names a tensor, its file and what contradicts the configuration."""
        place = self.headers.files.get(name) or self._place_beside(name)
        raise UsageError(
            f"{place}: {name} {problem}; config.json's quantization_config and the tensors do not belong together: "
            "fetch the checkpoint again, or give the unquantised one"
        )

    def _place_beside(self, name: str) -> str:
        """Return the file of another tensor of a missing one's module, else the folder."""
        module = name.rpartition(".")[0] + "."
        beside = sorted(str(file) for other, file in self.headers.files.items() if other.startswith(module))
        return beside[0] if beside else self.headers.place


def weight_spill() -> Spill:
    """Return the place for dense weights, in the cache folder."""
    return Spill(cache_folder() / "spilled", "dense weights, which a quantised checkpoint is unpacked to")


def dequantized_source(
    stored: Stored, weights: Mapping[str, DenseWeight], dropped: frozenset[str], read_values: bool
) -> WeightSource:
    """Return a source that has dense weights in place of the tensors that they follow from.

    Args:
        weights: dense weights by name.
        dropped: stored names that do not decide weights, such as scales of activations.
        read_values: False gives meta tensors.
    """
    parts = {part for weight in weights.values() for part in weight.parts.values()}
    # AutoGPTQ once gave every linear a bias, of zeros where the model has none.
    biases = stored.names & {f"{name.removesuffix('.weight')}.bias" for name in weights}
    spill, files = weight_spill(), stored.headers.files

    def read(name: str) -> Tensor:
        weight = weights.get(name)
        if weight is None:
            return (stored.source if read_values else stored.headers).read(name)
        if not read_values:
            return torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        given = {part: stored.source.read(key) for part, key in weight.parts.items()}
        place = spill.empty(weight.shape, weight.dtype)
        place.copy_(weight.dequantize(**given))
        release([*given.values(), place])
        trim()
        return place

    return WeightSource(
        stored.headers.place,
        (stored.names - parts - dropped) | weights.keys(),
        read,
        {name: file for name, file in files.items() if name not in parts},
        sum(prod(weight.shape) * weight.dtype.itemsize for weight in weights.values()),
        frozenset(name for name in biases if not bool(stored.values(name).any())),
        quantized={name: files[part] for name, w in weights.items() if (part := next(iter(w.parts.values()))) in files},
    )


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

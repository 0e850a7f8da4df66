"""Choose example inputs of an ONNX model, and say which of their sizes vary.

float[batch, 3, height, width]  ->  example of [2, 3, 64, 72], and {0: Dim("batch"), 2: Dim("height"), 3: ...}
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from compressor.capture.export import quiet_fake_tensors
from compressor.capture.onnx_in.model import OnnxModel
from compressor.capture.onnx_in.stored import DTYPES
from compressor.errors import CaptureError, ModelFileError

if TYPE_CHECKING:
    from onnx import ValueInfoProto

_BATCH = 2
_TRIED = ((12, 64), (200, 224), (8, 8))  # sizes with a name: of sequences, of images; each next is larger by 8
_ADVICE = "give an example of the inputs (example=), and dynamic_shapes where sizes are to vary"


def model_inputs(model: OnnxModel) -> list[ValueInfoProto]:
    """Return the inputs that are not initializers."""
    held = {proto.name for proto in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in held]


def choose_inputs(model: OnnxModel, module: nn.Module) -> tuple[tuple[Tensor, ...], Any]:
    """Return example inputs and their ``dynamic_shapes``: named sizes and missing ones vary.

    Raises:
        ModelFileError: an input states no number of dimensions, or no size that was tried lets the model run.
    """
    inputs = model_inputs(model)
    if not inputs:
        raise ModelFileError(f"{model.file}: it has no inputs: there is nothing to compress")
    shapes = [_sizes(model, value) for value in inputs]
    symbols = list(dict.fromkeys(size for shape in shapes for size in shape if isinstance(size, str)))
    firsts = {shape[0] for shape in shapes if shape and isinstance(shape[0], str)}
    images = {s for shape in shapes for s in shape[2:] if len(shape) > 3}
    indices = set(_indices(model))
    generator = torch.Generator().manual_seed(0)
    problem: CaptureError | None = None
    for sequence, image in _TRIED if set(symbols) - firsts else _TRIED[:1]:
        sizes = {name: _BATCH + i for i, name in enumerate(s for s in symbols if s in firsts)}
        others = [name for name in symbols if name not in firsts]
        sizes |= {name: (image if name in images else sequence) + 8 * i for i, name in enumerate(others)}
        args = tuple(
            _values(DTYPES[value.type.tensor_type.elem_type], [sizes.get(size, size) for size in shape],
                    value.name in indices, generator)
            for value, shape in zip(inputs, shapes, strict=True)
        )  # fmt: skip
        try:
            _try(module, args)
        except CaptureError as error:
            problem = problem or error
            continue
        dims = {name: Dim(_identifier(name), min=1) for name in symbols}
        varying = tuple({i: dims[s] for i, s in enumerate(shape) if isinstance(s, str)} or None for shape in shapes)
        return args, varying if symbols else None
    assert problem is not None
    if not symbols:
        raise problem
    raise ModelFileError(
        f"{problem}; tried with {', '.join(symbols)} of {', '.join(str(max(pair)) for pair in _TRIED)}: {_ADVICE}"
    ) from problem


def _try(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Run on fake tensors, which takes no memory and computes nothing."""
    with torch.no_grad(), quiet_fake_tensors(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module(*(mode.from_tensor(x) for x in args))


def _sizes(model: OnnxModel, value: ValueInfoProto) -> list[Any]:
    """Return an input's sizes: numbers, and names of those that vary."""
    held = value.type.tensor_type
    if not held.HasField("shape"):
        raise ModelFileError(f"{model.file}: its input {value.name!r} states no number of dimensions; {_ADVICE}")
    sizes: list[Any] = []
    for axis, dim in enumerate(held.shape.dim):
        if dim.HasField("dim_value"):
            if dim.dim_value < 1:
                raise ModelFileError(f"{model.file}: its input {value.name!r} has size {dim.dim_value} at axis {axis}; "
                                     f"{_ADVICE}")  # fmt: skip
            sizes.append(int(dim.dim_value))
        else:
            sizes.append(dim.dim_param or f"{value.name}_{axis}")
    return sizes


def _identifier(name: str) -> str:
    clean = re.sub(r"\W", "_", name)
    return clean if clean.isidentifier() else f"size_{clean}"


def _indices(model: OnnxModel) -> Iterator[str]:
    """Yield the inputs that a Gather reads as its indices, for which 0 is always a valid value."""
    for node in model.graph.node:
        if node.op_type in ("Gather", "GatherElements", "GatherND") and len(node.input) > 1:
            yield node.input[1]


def _values(dtype: torch.dtype, shape: list[int], index: bool, generator: torch.Generator) -> Tensor:
    """Return random floats, or ones (masks), or zeros where they are indices."""
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.zeros(shape, dtype=dtype) if index else torch.ones(shape, dtype=dtype)


def narrow_sizes(error: BaseException, dynamic_shapes: Any) -> Any | None:
    """Return ``dynamic_shapes`` within the bounds that an export found, or None where it found others.

    A table of positions bounds a sequence; an operator may want two sizes equal.  A size that would be fixed to the
    example's is not a bound.
    """
    refine = torch.export.dynamic_shapes.refine_dynamic_shapes_from_suggested_fixes
    found = _suggested(error)
    if dynamic_shapes is None or not found:
        return None
    try:
        narrowed: Any = refine(f"Suggested fixes:\n{found}", dynamic_shapes)
    except Exception:  # what it cannot read stays as it is, and the export's own error is told
        return None
    sizes = [size for shape in narrowed for size in (shape or {}).values()]
    if any(isinstance(size, int) or size is None for size in sizes):
        return None
    least = {d: Dim(d.__name__, min=1, max=d.max) for d in sizes if getattr(d, "min", 1) == 0}
    return tuple(shape and {axis: least.get(size, size) for axis, size in shape.items()} for shape in narrowed)


def fixed_sizes(error: CaptureError, dynamic_shapes: Any) -> str:
    """Return what to say where sizes that are to vary cannot; empty where that is not the reason."""
    cause = str(error.__cause__ or "")
    if dynamic_shapes is None or not ("onstraint" in cause or "specialized" in cause or "sympy" in str(error)):
        return ""
    names = dict.fromkeys(getattr(d, "__name__", "") for shape in dynamic_shapes for d in (shape or {}).values())
    found = _suggested(error)
    found = f" (torch.export suggests: {'; '.join(found.splitlines())})" if found else ""
    return f"its sizes {', '.join(names)} cannot vary freely{found}; {_ADVICE}"


def _suggested(error: BaseException) -> str:
    """Return the lines in which torch.export says what sizes may be."""
    return str(error.__cause__ or "").partition("Suggested fixes:")[2].strip().partition("\n\n")[0]

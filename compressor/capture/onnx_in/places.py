"""Give steps and constants their places in a module: paths that sites and parameters are known by."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from compressor.capture.onnx_in.steps import FIRST_PART, GATES, LINEAR, Step, part_name
from compressor.capture.onnx_in.values import Call, Constant, Value

HALVES = (torch.float16, torch.bfloat16)
WITH_WEIGHTS = (LINEAR, "Conv", "ConvTranspose")


class Operation(nn.Module):
    """A node: the export notes path and class of the module that an operator comes from."""

    def forward(self, run: Any, call: Call) -> Value | tuple[Value, ...]:
        """Run a definition."""
        result: Value | tuple[Value, ...] = run(call)
        return result


def place_step(root: nn.Module, step: Step, known: dict[str, Constant]) -> str:
    """Register the module of a step, and return its path: its weight's, its node's, or its output's."""
    name, wanted = step.op, step.path or _clean(step.outputs[0])
    if step.op in WITH_WEIGHTS and step.inputs[1] in known:
        weight = known[step.inputs[1]]
        stored = _clean(weight.name)
        inside = re.sub(r"\.(MatMul|Gemm|Conv|ConvTranspose)(_\d+)?$", "", step.path)
        wanted = stored.removesuffix(".weight") if stored.endswith(".weight") else inside or stored
        if step.op != LINEAR:
            name += f"{weight.value.dim() - 2}d"
    path = _free(root, wanted or "step")
    owner, leaf = _owner(root, path)
    module = type(name, (Operation,), {})()
    owner.add_module(leaf, module)
    for position in range(FIRST_PART, len(step.inputs), 2) if step.op in GATES else ():
        module.add_module(part_name(position)[0], type(LINEAR, (Operation,), {})())
    return path


def place_constant(root: nn.Module, constant: Constant, wanted: str) -> str:
    """Register a constant and return its path: floats of several elements as a parameter, others as a buffer.

    Half precision is seen as float32: its parameter takes addresses and no memory, for the shape alone is asked for.
    """
    value = constant.value
    if value.dtype in HALVES:
        wide = value.numel() > 1
        value = torch.empty_strided(value.shape, value.stride()) if wide else value.float()
    path = _free(root, wanted or _clean(constant.name) or "constant")
    owner, leaf = _owner(root, path)
    if value.dtype == torch.float32 and value.numel() > 1:
        owner.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
    else:
        owner.register_buffer(leaf, value)
    return path


def place_key(value: Tensor) -> tuple[Any, ...]:
    """Return what equal views of one place in memory share."""
    return (value.data_ptr() if value.numel() else id(value), tuple(value.shape), value.stride(), value.dtype)


def _clean(name: str) -> str:
    """Return a dotted path of identifiers."""
    parts = [re.sub(r"\W+", "_", part).strip("_") for part in re.split(r"[./]", name)]
    return ".".join(f"_{part}" if part[0].isdigit() and not part.isdigit() else part for part in parts if part)


def _owner(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the module that a free path ends in, made where it is missing, and the attribute's name."""
    *parts, leaf = path.split(".")
    holder = root
    for part in parts:
        if part not in holder._modules:
            holder.add_module(part, nn.Module())
        holder = holder.get_submodule(part)
    return holder, leaf


def _free(root: nn.Module, path: str) -> str:
    """Return a path that no attribute has: the one that is wanted, or with a number behind the part that is taken."""
    holder: nn.Module | None = root
    parts = path.split(".")
    for index, part in enumerate(parts):
        last, name, count = index == len(parts) - 1, part, 2
        while hasattr(holder or nn.Module, name) and (last or holder is None or name not in holder._modules):
            name, count = f"{part}_{count}", count + 1
        parts[index] = name
        holder = holder._modules.get(name) if holder is not None else None
    return ".".join(parts)

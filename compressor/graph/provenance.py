"""Tell which module of the original model a node of the graph comes from, and where its parameters are stored."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node


@dataclass(frozen=True)
class Stored:
    """Say how a parameter of a captured graph lies in the model's folder; ``graph.meta["stored"]`` has all by name.

    Attributes:
        names: of the tensor in the files; several, of equal values, where a shared weight is stored more than once.
        transposed: rows and columns change places.
        plus_one: the parameter is one more than what is stored.
        reason: why it cannot be written back as one tensor; empty if it can.
        joined: the named tensors have equal shares of the rows, one behind the other.
    """

    names: tuple[str, ...]
    transposed: bool = False
    plus_one: bool = False
    reason: str = ""
    joined: bool = False

    def piece(self, value: Tensor, name: str) -> Tensor:
        """Return the rows of a tensor of this parameter that a stored one has."""
        return value.chunk(len(self.names))[self.names.index(name)] if self.joined else value


def owner(node: Node) -> tuple[str, str]:
    """Return the dotted path and the class name of the innermost module that a node belongs to, empty if unknown."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path, module_class = stack[-1] if stack else ("", "")
    name = module_class if isinstance(module_class, str) else module_class.__name__
    return path, name.rpartition(".")[2]


def module_path(node: Node) -> str:
    """Return the dotted path of the innermost module that a node belongs to, empty if unknown."""
    return owner(node)[0]


def source_line(node: Node) -> str:
    """Return ``file:line`` of the model's code that a node comes from, not of PyTorch's modules; empty if unknown."""
    found = [":".join(frame) for frame in re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")]
    return next((line for line in reversed(found) if "/torch/nn/" not in line), found[-1] if found else "")


def describe(node: Node) -> str:
    """Return a node's name, and in brackets the module that it belongs to."""
    path = module_path(node)
    return f"{node.name} ({path})" if path else node.name

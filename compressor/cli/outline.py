"""Read what a pass or a target is from its source: importing it would import PyTorch or TVM for a line of text."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compressor.errors import CompressorError, first_line
from compressor.registry import Registry


@dataclass(frozen=True)
class Outline:
    """The docstring of a class, and the default of each option as Python writes it."""

    text: str
    defaults: Mapping[str, str]

    @property
    def summary(self) -> str:
        """The docstring's first line."""
        return self.text.partition("\n")[0]


def outline(registry: Registry, name: str) -> Outline:
    """Return the outline of the class of that name.

    Raises:
        CompressorError: its source cannot be read, or holds no such class, or several.
    """
    place = registry.names()[name]
    module, _, wanted = place.partition(":")
    try:
        spec = importlib.util.find_spec(module)  # which imports the packages around it
        if spec is None or spec.origin is None:
            raise ImportError(f"no module named {module!r}")
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except Exception as error:  # whatever the packages of somebody else raise
        raise CompressorError(f"{registry.kind} {name!r}: {place} cannot be read: {first_line(error)}") from error
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and _is_meant(node, wanted, registry)]
    if len(found) != 1:
        raise CompressorError(f"{registry.kind} {name!r}: {place} holds {len(found)} such classes")
    fields = [node for node in found[0].body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    options = [field for field in fields if "ClassVar" not in ast.unparse(field.annotation)]
    defaults = {ast.unparse(field.target): _shown(field.value) for field in options}
    return Outline(inspect.cleandoc(ast.get_docstring(found[0]) or ""), defaults)


def _is_meant(node: ast.ClassDef, wanted: str, registry: Registry) -> bool:
    if wanted:
        return node.name == wanted
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return False
    if registry.base:
        return registry.base.partition(":")[2] in map(ast.unparse, node.bases)
    return any(isinstance(part, ast.FunctionDef) and part.name == registry.method for part in node.body)


def _shown(value: ast.expr | None) -> str:
    if value is None:
        return "required"
    try:
        return repr(ast.literal_eval(value))
    except ValueError:
        return ast.unparse(value)

"""Read what a pass or a target is from its source: importing it would import PyTorch or TVM for a line of text."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from compressor.errors import CompressorError, first_line
from compressor.registry import Registry


@dataclass(frozen=True)
class Outline:
    """The docstring of a class, with what its base classes say of their options, and each option's default as Python
    writes it.
    """

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
        tree = _parsed(module)
        found = [node for node in tree.body if isinstance(node, ast.ClassDef) and _is_meant(node, wanted, registry)]
        packages = {module.partition(".")[0], __name__.partition(".")[0]}
        lines = [list(_with_bases(node, tree, packages)) for node in found]
    except Exception as error:  # whatever the packages of somebody else raise
        raise CompressorError(f"{registry.kind} {name!r}: {place} cannot be read: {first_line(error)}") from error
    if len(lines) != 1:
        raise CompressorError(f"{registry.kind} {name!r}: {place} holds {len(lines)} such classes")
    own, *others = lines[0]
    defaults, meanings = _options(own), _meanings(own)
    inherited: dict[str, str] = {}
    for node in others:
        for option, default in _options(node).items():
            defaults.setdefault(option, default)
        inherited = {**_meanings(node), **inherited}
    text = _docstring(own)
    if added := [text for option, text in inherited.items() if option in defaults and option not in meanings]:
        heading = "" if meanings else "\n\nAttributes:"
        text = "\n".join([text + heading, *added])
    return Outline(text, defaults)


def unmet_import(place: str) -> str:
    """Say which import at the top of a module cannot succeed; empty if there is none.  Nothing is executed.

    Imports from this package are followed to the name, which another version may not have.

    Args:
        place: ``module`` or ``module:Class``.
    """
    module = place.partition(":")[0]
    for statement in _parsed(module).body:
        if isinstance(statement, ast.Import):
            wanted = [(alias.name, "") for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            wanted = [(statement.module, alias.name) for alias in statement.names]
        else:
            continue
        for source, name in wanted:
            if not _exists(source):
                return f"{module} imports {source}, which is not installed"
            if name and source.partition(".")[0] == __name__.partition(".")[0] and not _defines(source, name):
                return f"{module} imports {name} from {source}, which this version does not have"
    return ""


def _exists(module: str) -> bool:
    """Return whether a module can be found; of other packages only the outermost is looked for, and none imported."""
    top = module.partition(".")[0]
    try:
        return importlib.util.find_spec(module if top == __name__.partition(".")[0] else top) is not None
    except (ImportError, ValueError):  # ValueError: of a running script, such as __main__
        return False


def _defines(module: str, name: str) -> bool:
    """Return whether a name occurs in a module, or is one of its own modules."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    return name == "*" or re.search(rf"\b{re.escape(name)}\b", source) is not None or _exists(f"{module}.{name}")


@lru_cache
def _parsed(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)  # which imports the packages around it
    if spec is None or spec.origin is None:
        raise ImportError(f"no module named {module!r}")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _with_bases(node: ast.ClassDef, tree: ast.Module, packages: Set[str]) -> Iterator[ast.ClassDef]:
    """Yield a class, then those it is derived from, left to right, as far as they are from these packages."""
    yield node
    imported = {
        alias.asname or alias.name: (statement.module, alias.name)
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
        if statement.module.partition(".")[0] in packages
    }
    for base in map(ast.unparse, node.bases):
        module, name = imported.get(base, ("", base))
        source = _parsed(module) if module else tree
        for found in source.body:
            if isinstance(found, ast.ClassDef) and found.name == name and found is not node:
                yield from _with_bases(found, source, packages)


def _options(node: ast.ClassDef) -> dict[str, str]:
    """Return the default of each option that a class declares itself."""
    if not _is_dataclass(node):
        return {}
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)]
    options = [field for field in fields if "ClassVar" not in ast.unparse(field.annotation)]
    return {ast.unparse(field.target): _shown(field.value) for field in options}


def _docstring(node: ast.ClassDef) -> str:
    return inspect.cleandoc(ast.get_docstring(node) or "")


def _meanings(node: ast.ClassDef) -> dict[str, str]:
    """Return what a class's docstring says of each option, lines as they stand there."""
    section = _docstring(node).partition("Attributes:\n")[2].split("\n\n")[0]
    return {entry[1]: entry[0] for entry in re.finditer(r"^    (\w+): .*(?:\n {5,}.*)*", section, re.MULTILINE)}


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _is_meant(node: ast.ClassDef, wanted: str, registry: Registry) -> bool:
    if wanted:
        return node.name == wanted
    if not _is_dataclass(node):
        return False
    if registry.base:
        return registry.base.partition(":")[2] in map(ast.unparse, node.bases)
    return any(isinstance(part, ast.FunctionDef) and part.name == registry.method for part in node.body)


def _shown(value: ast.expr | None) -> str:
    if value is None:
        return "required"
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":  # of dataclasses, with more than a default
        value = next(word.value for word in value.keywords if word.arg == "default")
    try:
        return repr(ast.literal_eval(value))
    except ValueError:
        return ast.unparse(value)

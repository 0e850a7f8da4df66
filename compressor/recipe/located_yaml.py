"""Parse YAML text into plain data that remembers where each key was written.

Scalars follow the core schema of YAML 1.2 (``off`` and ``1:30`` are text, ``1e-3`` is a number).  Text that is too
large, too deep or grows through aliases is refused before it is expanded, numbers must be finite and fit into 64 bits,
text holds no control characters, and only plain data is ever built.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from compressor.errors import RecipeError

KeyPath = tuple[str | int, ...]

LARGEST_BYTES = 256 * 1024
DEEPEST = 32
_MOST_VALUES = 2_000
_LIMITS = f"more than {_MOST_VALUES} values or {DEEPEST} levels"
_CONTAINERS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_SURROGATES = re.compile("[\ud800-\udfff]")
_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")  # terminals execute them; no path can contain NUL


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with YAML 1.2's resolution of plain scalars; its constructors are never used.

    The limits are checked while nodes are composed, so that text beyond them is not parsed at all.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's way)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose one node and its children, within the limits."""
        self._nodes += 1
        self._depth += 1
        if self._nodes > 2 * _MOST_VALUES or self._depth > DEEPEST + 1:  # keys are nodes too
            what = "nested too deeply, or too long"
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"{what}: {_LIMITS}; this is not a recipe", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


@dataclass(frozen=True)
class Origin:
    """Place where a key was written: a file and line, or an option of the command line (line 0).

    ``folder`` is the folder that relative paths written there refer to.
    """

    name: str
    line: int = 0
    folder: Path = Path()

    def __str__(self) -> str:
        return f"{self.name}:{self.line}" if self.line else self.name


@dataclass
class Source:
    """Plain data, and the origin of each of its keys."""

    data: dict[str, Any]
    origins: dict[KeyPath, Origin] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> Origin:
        """Return the origin of a key, or of the nearest key that encloses it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return Origin("recipe")

    def locate(self, path: KeyPath, what: str) -> str:
        """Format the message ``file:line: key: what``."""
        dotted = ".".join(_printable(key) for key in path)
        return f"{self.origin(path)}: {dotted}: {what}" if path else f"{self.origin(path)}: {what}"

    def error(self, path: KeyPath, what: str) -> RecipeError:
        """Make a :class:`RecipeError` with the message ``file:line: key: what``."""
        return RecipeError(self.locate(path, what))

    def graft(self, path: KeyPath, value: Any, other: Source, prefix: KeyPath = ()) -> None:
        """Put ``value``, which lies at ``prefix`` in ``other``, at ``path``, with its origins."""
        holder: Any = self.data
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]
        for known, origin in other.origins.items():
            if known[: len(prefix)] == prefix:
                self.origins[path + known[len(prefix) :]] = origin


def nearest(name: str, known: Iterable[str], listed_by: str = "") -> str:
    """Format ``nearest: x; there are: x, y, z`` for an unknown name, without ``nearest`` if no known name is
    similar.

    Args:
        listed_by: a command that lists them, which stands in place of many names.
    """
    names = sorted(known)
    lower = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name[:80].lower(), lower, n=1, cutoff=0.4)
    there_are = f"there are: {', '.join(names)}" if names else "there are none"
    there_are = f"`{listed_by}` lists all" if listed_by else there_are
    return f"nearest: {lower[close[0]]}; {there_are}" if close else there_are


def parse(text: str, origin: Origin) -> Source:
    """Parse one YAML document whose top is a mapping.

    Raises:
        RecipeError: it is not a mapping, is too large or too deep, has a key twice, or holds anything but plain data.
    """
    value, origins = parse_value(text, origin)
    if not isinstance(value, dict):
        found = "nothing" if value is None else f"a {type(value).__name__}"
        raise RecipeError(f"{origin}: expected `key: value` lines; found {found}")
    return Source(value, origins)


def parse_value(text: str, origin: Origin) -> tuple[Any, dict[KeyPath, Origin]]:
    """Parse one YAML value of a file or of ``--set``; its line numbers start at the origin's."""
    if len(text) > LARGEST_BYTES:
        raise RecipeError(f"{origin}: larger than {LARGEST_BYTES // 1024} KiB; this is not a recipe")
    try:
        node = _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line if mark is not None and origin.line else 0
        where = Origin(origin.name, origin.line + line)
        raise RecipeError(f"{where}: not YAML: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) if origin.line else 0
        raise RecipeError(f"{Origin(origin.name, origin.line + line)}: not YAML: {error.reason}") from error
    except (OverflowError, ValueError) as error:
        raise RecipeError(f"{origin}: not YAML: an escape beyond Unicode, or an endless number") from error
    reader = _Values(origin)
    value = None if node is None else reader.read(node, ())
    return value, {(): origin, **reader.origins}


class _Values:
    """Reader that turns composed nodes into plain values."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.origins: dict[KeyPath, Origin] = {}
        self._count = 0

    def _at(self, node: yaml.Node) -> Origin:
        line = self.origin.line + node.start_mark.line if self.origin.line else 0
        return Origin(self.origin.name, line, self.origin.folder)

    def _error(self, node: yaml.Node, path: KeyPath, what: str) -> RecipeError:
        return Source({}, {(): self._at(node)}).error(path, what)

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        self._count += 1
        if self._count > _MOST_VALUES or len(path) > DEEPEST:
            raise self._error(node, path[:3], f"{_LIMITS}, aliases expanded; this is not a recipe")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if node.tag not in _CONTAINERS:
            raise self._error(node, path, f"the tag {node.tag[:40]!r} is not allowed; only plain values are")
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.origins[(*path, index)] = self._at(item)
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self._scalar(key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise self._error(key_node, path, "a key must be text; put it in quotes")
            if key in values:
                raise self._error(key_node, (*path, key), f"given twice, first in line {lines[key]}; remove one")
            lines[key] = key_node.start_mark.line + 1
            self.origins[(*path, key)] = self._at(key_node)
            values[key] = self.read(value_node, (*path, key))
        return values

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        text = str(node.value)
        tag = str(node.tag).removeprefix("tag:yaml.org,2002:")
        try:
            if tag == "null":
                return None
            if tag == "bool":
                return {"true": True, "false": False}[text.lower()]
            if tag in ("int", "float"):
                number = int(text) if tag == "int" else float(text)
                if not -(2.0**63) <= number < 2.0**64:  # false for NaN, too
                    raise self._error(node, path, f"{text[:40]!r} is too large a number")
                return number
        except (KeyError, ValueError):
            raise self._error(node, path, f"{text[:40]!r} is not a valid {tag}") from None
        if tag != "str":
            raise self._error(node, path, f"the tag {node.tag[:40]!r} is not allowed; only plain values are")
        if _SURROGATES.search(text):
            raise self._error(node, path, "holds half of a surrogate pair, which is not text")
        if control := _CONTROLS.search(text):
            raise self._error(node, path, f"holds the control character U+{ord(control[0]):04X}; remove it")
        return text


def _printable(key: str | int) -> str:
    text = str(key)[:80]
    return text if text.isprintable() else repr(text)

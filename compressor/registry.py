"""Find passes, targets, exports and alternatives by the names that recipes use: files of this package, and entry points
of others.

A name is a file's name in the registry's folder, or an entry point's in its group.  Nothing is imported before it is
asked for, so that listing names is quick.  Sub-folders are not searched.

Invariant: there is no list to edit.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from compressor.errors import CompressorError, UsageError, first_line

T = TypeVar("T")


@dataclass(frozen=True)
class Plugin:
    """One entry point of another package.

    Attributes:
        registry: where it is found.
        name: by which recipes use it.
        place: ``module`` or ``module:Class``.
        package: name of the distribution; empty where its metadata says none.
        version: of the distribution.
        folder: where it is installed.
    """

    registry: Registry
    name: str
    place: str
    package: str = ""
    version: str = ""
    folder: str = ""

    @classmethod
    def of(cls, registry: Registry, entry: EntryPoint) -> Plugin:
        """Read what an entry point and its distribution say."""
        if entry.dist is None:
            return cls(registry, entry.name, entry.value)
        known = entry.dist.metadata["Name"], entry.dist.version, str(entry.dist.locate_file(""))
        return cls(registry, entry.name, entry.value, *known)

    def __str__(self) -> str:
        """Name the package with its version and its folder, or the place where there is no package."""
        return f"{self.package} {self.version} ({self.folder})" if self.package else self.place


@dataclass(frozen=True)
class Registry:
    """Classes of one kind, by name.

    Attributes:
        kind: name of the kind in messages.
        package: the package whose files hold the shipped classes.
        group: the group of entry points.
        base: ``module:Class`` that the classes extend, or empty; imported with the first of them.
        method: without a base, every frozen dataclass with this method is one of the classes.
    """

    kind: str
    package: str
    group: str
    base: str = ""
    method: str = ""

    def names(self) -> dict[str, str]:
        """Return all names, each with its module (or ``module:Class``); import none of them."""
        spec = importlib.util.find_spec(self.package)
        folders = spec.submodule_search_locations if spec is not None else None
        modules = [module for module in pkgutil.iter_modules(folders or []) if not module.ispkg]
        shipped = {m.name: f"{self.package}.{m.name}" for m in modules if not m.name.startswith("_")}
        others = {entry.name: entry.value for entry in entry_points(group=self.group)}
        return dict(sorted({**others, **shipped}.items()))

    def find(self, name: str) -> type[Any]:
        """Import and return the class of that name.

        Raises:
            UsageError: nothing has that name (the nearest is named), or two other packages claim it.
            CompressorError: its module cannot be imported, or holds no such class, or several.
        """
        known = self.names()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise UsageError(f"{self.kind} {name!r} is unknown; nearest: {near[0]}; there are: {', '.join(known)}")
        claims = {entry.value for entry in entry_points(group=self.group, name=name)}
        if self.ships(name):  # whatever else is installed, recipes mean the same
            claims = {known[name]}
        if len(claims) > 1:
            raise UsageError(f"{self.kind} {name!r} is claimed by {' and '.join(sorted(claims))}; uninstall one")
        path, _, attribute = known[name].partition(":")
        try:
            module = importlib.import_module(path)
            candidates = [getattr(module, attribute)] if attribute else list(vars(module).values())
        except Exception as error:  # whatever the packages of somebody else raise
            if self.ships(name) and not isinstance(error, ImportError):
                raise
            where = "" if (plugin := self.plugin(name)) is None else f"; repair or uninstall {plugin}"
            why = f"{known[name]} cannot be imported: {type(error).__name__}: {first_line(error)}"
            raise CompressorError(f"{self.kind} {name!r}: {why}{where}") from error
        found: list[type[Any]] = [c for c in candidates if self.fits(c) and (attribute or c.__module__ == path)]
        if len(found) != 1:
            names = ", ".join(c.__name__ for c in found) or "none"
            raise CompressorError(
                f"{self.kind} {name!r}: {known[name]} must define exactly one frozen dataclass "
                + (f"that extends {self.base.replace(':', '.')}" if self.base else f"with a method `{self.method}`")
                + f"; found: {names}"
            )
        return found[0]

    def plugins(self) -> list[Plugin]:
        """Return the entry points of other packages by name, those that nothing uses as well; import none of them."""
        found = {(entry.name, entry.value): entry for entry in entry_points(group=self.group)}
        return [Plugin.of(self, found[key]) for key in sorted(found)]

    def plugin(self, name: str) -> Plugin | None:
        """Return the entry point that a name stands for; None for a name of ours or of nobody."""
        return None if self.ships(name) else next((one for one in self.plugins() if one.name == name), None)

    def plugin_of(self, instance: object) -> Plugin | None:
        """Return the entry point that an instance's class was found by; None if it is ours, or was never installed."""
        module, name = type(instance).__module__, type(instance).__qualname__
        known = [] if self.owns(instance) else self.plugins()
        return next((one for one in known if one.place in (module, f"{module}:{name}")), None)

    def ships(self, name: str) -> bool:
        """Return whether the class of that name lies in one of this package's files."""
        return importlib.util.find_spec(f"{self.package}.{name}") is not None

    def owns(self, instance: object) -> bool:
        """Return whether an instance's class lies in one of this package's files."""
        return type(instance).__module__.rpartition(".")[0] == self.package

    def name_of(self, instance: object) -> str:
        """Return the name by which recipes find an instance's class: its file's if it is ours, or its entry point's.

        A class that was never installed has its own name, in lower case.
        """
        if self.owns(instance):
            return type(instance).__module__.rpartition(".")[2]
        plugin = self.plugin_of(instance)
        return type(instance).__name__.lower() if plugin is None else plugin.name

    def fits(self, candidate: object) -> bool:
        """Tell whether a class is one of the kind: a frozen dataclass that has the base, or the method."""
        if not (inspect.isclass(candidate) and dataclasses.is_dataclass(candidate)):
            return False
        frozen: bool = candidate.__dataclass_params__.frozen  # type: ignore[attr-defined]
        return frozen and self.extends(candidate)

    def extends(self, candidate: type[Any]) -> bool:
        """Tell whether a class has the base, or the method."""
        if not self.base:
            return callable(getattr(candidate, self.method, None))
        module, _, name = self.base.partition(":")
        return issubclass(candidate, getattr(importlib.import_module(module), name))


PASSES = Registry("pass", "compressor.passes", "compressor.passes", base="compressor.pipeline.pipeline:Pass")
EXPORTS = Registry(
    "export", "compressor.export.foreign", "compressor.exports", base="compressor.export.exchange.export:Export"
)
TARGETS = Registry("target", "compressor.codegen.targets", "compressor.targets", method="resolve")
ALTERNATIVES = Registry(
    "alternative",
    "compressor.search.alternatives",
    "compressor.search.alternatives",
    base="compressor.search.space:Alternative",
)
REGISTRIES = (PASSES, TARGETS, EXPORTS, ALTERNATIVES)


def plugins() -> Iterator[Plugin]:
    """Yield all entry points of other packages, kind by kind."""
    for registry in REGISTRIES:
        yield from registry.plugins()


def enter(table: dict[str, T], names: Sequence[str]) -> Callable[[T], T]:
    """Return a decorator that enters its function in a table under each of some names."""

    def entered(function: T) -> T:
        for name in names:
            assert name not in table, name
            table[name] = function
        return function

    return entered


def import_files(package: str) -> None:
    """Import all files of a package, whose functions enter themselves in its table."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")

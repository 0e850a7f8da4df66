"""Read ``exports:`` of a recipe: what a run writes for other programs beside its bundle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compressor.errors import RecipeError
from compressor.recipe.located_yaml import KeyPath, Origin, Source, nearest
from compressor.recipe.options import instance, options_of
from compressor.recipe.overrides import apply_override

_OWN = ("to", "output", "check")
_INSTEAD = {"output": "name the folder with -o", "check": "use --check or --no-check"}


@dataclass(frozen=True)
class ExportSpec:
    """One entry of ``exports``.

    Attributes:
        to: name of the export.
        export: the layout with its options.
        output: folder; None is beside the bundle, ``<bundle>-<to>``.
        check: whether the client is asked; None asks it where it is installed.
    """

    to: str
    export: Any
    output: str | None = None
    check: bool | None = None

    def resolved(self) -> dict[str, Any]:
        """Return plain data with all defaults."""
        return {"to": self.to, **options_of(self.export)}


def export_name(name: str) -> str:
    """Return the name of an export's file: ``compressed-tensors`` is in compressed_tensors.py."""
    return name.replace("-", "_")


def build_exports(source: Source, problems: list[str]) -> tuple[ExportSpec, ...]:
    """Return the exports of a recipe; append messages about errors to ``problems``."""
    entries = source.data["exports"]
    if not isinstance(entries, list | tuple):
        problems.append(source.locate(("exports",), f"expected a list of `- to: NAME`; found {entries!r:.80}"))
        return ()
    built = []
    for index, entry in enumerate(entries):
        try:
            built.append(_build(source, ("exports", index), {"to": entry} if isinstance(entry, str) else entry))
        except RecipeError as error:
            problems.append(str(error))
    outputs = [spec.output or spec.to for spec in built]
    if twice := next((name for name in outputs if outputs.count(name) > 1), None):
        problems.append(source.locate(("exports",), f"two exports go to {twice}; give each an `output` of its own"))
    return tuple(built)


def _build(source: Source, path: KeyPath, entry: Any) -> ExportSpec:
    from compressor.registry import EXPORTS

    if not isinstance(entry, dict) or not isinstance(entry.get("to"), str):
        raise source.error(path, f"expected `to: NAME` and options; found {entry!r:.80}")
    name = export_name(entry["to"])
    if name not in EXPORTS.names():
        raise source.error(path, f"no export is called {entry['to']!r:.80}; {nearest(name, EXPORTS.names())}")
    output, check = entry.get("output"), entry.get("check")
    if output is not None and (not isinstance(output, str) or not output):
        raise source.error((*path, "output"), f"{output!r:.80} does not fit; a folder is expected")
    if check is not None and not isinstance(check, bool):
        raise source.error((*path, "check"), f"{check!r:.80} does not fit; true or false is expected")
    options = {key: value for key, value in entry.items() if key not in _OWN}
    return ExportSpec(name, instance(source, path, EXPORTS.find, options, name=name), output, check)


def make_export(name: str, overrides: tuple[str, ...]) -> Any:
    """Return the export that ``--to`` names, with the options after ``--set``.

    Raises:
        RecipeError: there is no such export or option, or a value does not fit.
    """
    source = Source({"to": name}, {(): Origin("--to")})
    for text in overrides:
        apply_override(source, text)
    if own := next((key for key in _OWN[1:] if key in source.data), None):
        raise source.error((own,), f"is not an option of an export; {_INSTEAD[own]}")
    return _build(source, (), source.data).export

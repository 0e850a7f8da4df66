"""List passes, formats, targets, recipes, sets and plug-ins, and show each of them in full."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from compressor.cli.outline import Outline, outline, unmet_import
from compressor.errors import CompressorError, UnknownFormatError, UsageError
from compressor.host.resources import Kind, resource
from compressor.registry import EXPORTS, PASSES, TARGETS, Plugin, Registry, plugins


def catalogue(kind: str) -> dict[str, str]:
    """Names of one kind, each with a line about it."""
    return KINDS[kind]()


def _passes() -> dict[str, str]:
    return {name: _summary(PASSES, name) for name in PASSES.names()}


def _formats() -> dict[str, str]:
    from compressor.formats.cache import CACHE_FORMATS
    from compressor.formats.format import FORMATS

    caches = {
        name: f"keys and values: {fmt.row_bytes(128)} bytes for a token and a head of 128 channels"
        for name, fmt in CACHE_FORMATS.items()
    }
    weights = {
        name: f"{_bits_per_weight(fmt):.3f} bits a weight at 4096 x 4096, activations {_activations_text(fmt)}"
        for name, fmt in FORMATS.items()
    }
    names = dict.fromkeys((*weights, *caches))  # one name may be both
    return {name: "; ".join(kind[name] for kind in (weights, caches) if name in kind) for name in names}


def _targets() -> dict[str, str]:
    return {name: _summary(TARGETS, name) for name in TARGETS.names()}


def _exports() -> dict[str, str]:
    return {name: _summary(EXPORTS, name) for name in EXPORTS.names()}


def _recipes() -> dict[str, str]:
    return {path.stem: _first_sentence(path) for path in sorted(resource("recipes").glob("*.yaml"))}


def _calibration() -> dict[str, str]:
    return {path.stem: _first_sentence(path) for path in sorted(resource("calibration").glob("*.yaml"))}


def _devices() -> dict[str, str]:
    from compressor.host.devices import known_devices

    return {
        key: f"{one.name}: {one.read_bytes_per_s / 1e9:.1f} GB/s, {one.flop_per_s / 1e9:,.0f} GFLOP/s, "
        f"{one.int8_ops_per_s / 1e9:,.0f} billion int8 operations/s"
        for key, one in known_devices().items()
    }


def _plugins() -> dict[str, str]:
    """Entry points of other packages, by kind and name: the package, its version, where it lies, and what it does."""
    listed: dict[str, str] = {}
    for plugin in plugins():  # two packages may claim one name
        key = f"{plugin.registry.kind} {plugin.name}"
        listed[key] = _plugin_line(plugin) if key not in listed else f"{listed[key]}; also {plugin}"
    return listed


def _plugin_line(plugin: Plugin) -> str:
    registry, name = plugin.registry, plugin.name
    others = sorted(str(one) for one in registry.plugins() if one.name == name)
    if registry.ships(name):
        return f"{plugin}: UNUSED: compressor's own {registry.kind} of this name is what recipes get"
    if len(others) > 1:
        return f"BROKEN: claimed by several packages; uninstall all but one: {plugin}"
    text = _summary(registry, name)
    if not text.startswith(_BROKEN) and (why := unmet_import(plugin.place)):
        text = f"{_BROKEN}{registry.kind} {name!r}: {why}"
    return f"{plugin}: {text}"


_BROKEN = "BROKEN: "
KINDS: Mapping[str, Callable[[], dict[str, str]]] = {
    "passes": _passes,
    "formats": _formats,
    "targets": _targets,
    "exports": _exports,
    "recipes": _recipes,
    "calibration": _calibration,
    "devices": _devices,
    "plugins": _plugins,
}


def names_of(*kinds: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Make the completion of an argument in a shell: names of these kinds, and recipes in the current folder.

    A shell waits for it at each key, so names are listed without their lines and no module of theirs is imported.
    """

    def complete(_ctx: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
        names = [name for kind in kinds for name in _NAMES[kind]()]
        if "recipes" in kinds:
            names += sorted(path.name for path in Path().glob("*.yaml"))
        found = [CompletionItem(name) for name in dict.fromkeys(names) if name.startswith(begun)]
        return found or ([CompletionItem(begun, type="file")] if "recipes" in kinds else [])

    return complete


def _format_names() -> Iterable[str]:
    from compressor.formats.names import PRESETS

    return PRESETS


def _shipped(kind: Kind) -> Callable[[], Iterable[str]]:
    return lambda: sorted(path.stem for path in resource(kind).glob("*.yaml"))


_NAMES: Mapping[str, Callable[[], Iterable[str]]] = {
    "passes": PASSES.names,
    "formats": _format_names,
    "targets": TARGETS.names,
    "exports": lambda: [name.replace("_", "-") for name in EXPORTS.names()],
    "recipes": _shipped("recipes"),
    "calibration": _shipped("calibration"),
}


def cached() -> dict[str, Any]:
    """List the finished segments in the cache, by model and pass, and count the kernels beside them."""
    from compressor.codegen.machine_code.store import ObjectStore
    from compressor.pipeline.segment_cache import SegmentCache

    results, rows = SegmentCache(), dict[str, dict[str, Any]]()
    for entry in results.entries():  # the most recently used first
        used = datetime.fromtimestamp(entry.used).isoformat(" ", "seconds")
        row = rows.setdefault(entry.label, {"model_and_pass": entry.label, "blocks": 0, "bytes": 0, "last_used": used})
        row["blocks"] += 1
        row["bytes"] += entry.size_bytes
    total_bytes = sum(row["bytes"] for row in rows.values())
    kernels = list(ObjectStore().objects())
    return {
        "folder": str(results.folder),
        "total_bytes": total_bytes,
        "kernels": len(kernels),
        "kernel_bytes": sum(one.size_bytes for one in kernels),
        "results": list(rows.values()),
    }


def describe(name: str) -> dict[str, Any]:
    """Return name, kind and full text of a pass, format, target, export, recipe or calibration set, and its data.

    Passes and targets have ``options``: their defaults as Python writes them, "required" where there is none.  Formats
    of weights have ``bits_per_weight``.

    Raises:
        UsageError: nothing has that name, and the nearest is named; or it is that of a format which cannot be.
    """
    if name in PASSES.names():
        return _described(name, "pass", outline(PASSES, name))
    if name in TARGETS.names():
        return _described(name, "target", outline(TARGETS, name))
    if (file := name.replace("-", "_")) in EXPORTS.names():
        return _described(file, "export", outline(EXPORTS, file))
    for kind in ("recipes", "calibration"):
        path = resource(kind) / f"{name}.yaml"
        if path.name == f"{name}.yaml" and path.is_file():
            text = path.read_text(encoding="utf-8").rstrip()
            return {"name": name, "kind": kind.removesuffix("s"), "text": text}
    texts = []
    for write in (_format_text, _cache_format_text):
        with contextlib.suppress(UnknownFormatError):
            texts.append(write(name))
    if texts:
        return {"name": name, "kind": "format", "text": "\n\n".join(texts), **_format_facts(name)}
    known = [known for kind in KINDS if kind != "plugins" for known in catalogue(kind)]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
    raise UsageError(
        f"{name!r} is not a pass, format, target, export, recipe or calibration set; nearest: {', '.join(near)}"
    )


def _format_text(name: str) -> str:
    from compressor.formats.format import Format

    fmt = Format.parse(name)
    span = {"tensor": "the whole weight", "channel": "each row", "group": f"every {fmt.group_size} columns of a row"}
    span["block"] = f"every {fmt.group_size} rows by {fmt.group_size} columns"
    scales = {"F16": "float16", "E8M0": "E8M0", "E4M3": "E4M3 and one float32 for the whole weight"}[fmt.scale_type]
    planes = " + ".join(f"{width}-bit" for width in fmt.planes)
    extras = "".join(f"  {extra.label:<11}  {extra.text}\n" for extra in fmt.extras)
    one = "codebooks    float16" if fmt.codebook else f"scales       {scales}"
    return "\n".join(
        [
            fmt.name,
            f"  weights      {_element_text(fmt)}",
            f"{extras}  {one}, one for {span[fmt.strategy]}",
            f"  activations  {_activations_text(fmt)}",
            f"  layout       planes: {planes}; {fmt.chunk_words} words for {fmt.chunk_columns} columns, 16 rows a tile",
            f"  size         {_bits_per_weight(fmt):.3f} bits a weight at 4096 x 4096",
        ]
    )


def _cache_format_text(name: str) -> str:
    from compressor.formats.cache import CacheFormat

    fmt = CacheFormat.parse(name)
    codes = f"floats {fmt.element.name}" if fmt.element is not None else "integers, two's complement"
    scales = {"F16": "float16", "E8M0": "shared exponents (E8M0)"}[fmt.scale_type]
    span = f"every {fmt.group_size} channels" if fmt.group_size else "all channels"
    return "\n".join(
        [
            fmt.name,
            f"  keys, values  {fmt.bits}-bit {codes}",
            f"  scales        {scales}, one for {span} of a token and head, chosen while running",
            f"  size          {fmt.row_bytes(128) * 8 / 128:.3f} bits a channel of a head of 128",
        ]
    )


def _activations_text(fmt: Any) -> str:
    act = fmt.activations
    if act is None:
        return "float32"
    kind = f"int{act.bits}, symmetric" if act.element is None else act.numbers
    how = {
        "token": "dynamic per token",
        "group": f"dynamic per {act.group_size} columns",
        "tensor": "static per tensor",
    }
    stored = ", one calibrated scale" if act.calibrated and act.granularity == "group" else ""
    return f"{kind}, {how[act.granularity]}{stored}"


def _element_text(fmt: Any) -> str:
    if fmt.codebook:
        return f"{fmt.bits}-bit codes of {fmt.levels} values each"
    if fmt.bit_planes:
        top, what = (fmt.levels - 1) / 2, {"bipolar": "bipolar (no zero)", "balanced": "balanced"}[fmt.bit_planes]
        return f"{fmt.bits}-bit integers, {what}: {fmt.levels} values a step apart, -{top:g} to {top:g}"
    if fmt.element is None:
        return f"{fmt.bits}-bit integers, {'symmetric' if fmt.symmetric else 'uint8 zero points'}"
    values = sorted({value for value in fmt.element.values if value == value})
    few = len(values) <= 16
    shown = ", ".join(f"{value:.4g}" for value in values) if few else f"{len(values)} values to {values[-1]:g}"
    kind = f"{fmt.bits}-bit floats" if fmt.element.is_float else "4-bit NormalFloat"
    return f"{kind} {fmt.element.name}: {shown}"


def _bits_per_weight(fmt: Any) -> float:
    return float(fmt.packed_bytes(4096, 4096) * 8 / 4096**2)


def _format_facts(name: str) -> dict[str, Any]:
    from compressor.formats.format import Format

    try:
        return {"bits_per_weight": _bits_per_weight(Format.parse(name))}
    except UsageError:
        return {}  # of keys and values


def _described(name: str, kind: str, found: Outline) -> dict[str, Any]:
    lines = [name, "", found.text, "", "Defaults:", *(f"  {key}: {v}" for key, v in found.defaults.items())]
    return {"name": name, "kind": kind, "text": "\n".join(lines), "options": dict(found.defaults)}


def _summary(registry: Registry, name: str) -> str:
    try:
        return outline(registry, name).summary
    except CompressorError as error:  # somebody else's: the others are listed nevertheless
        return f"{_BROKEN}{error}"


def _first_sentence(path: Path) -> str:
    """Return what a recipe or a set says of itself: its description, else the first sentence of its comment."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line.startswith("description:"):
            return line.partition(":")[2].strip().strip("\"'")
    comment = " ".join(line[2:] for line in takewhile(lambda line: line.startswith("# "), lines))
    return re.split(r"(?<=\.)\s", comment)[0]

"""Choose how each quantised weight is stored in another layout: exactly where one of its grids holds the values.

the bundle's own format, where the layout has it
else the format of fewest bytes, of those that the layout has, whose grid holds all values (:mod:`.exact_grid`)
else, by request, one format or type for the rest, and the loss is kept
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.capture.checkpoints.dense_weights import weight_spill
from compressor.errors import UsageError
from compressor.export.exchange.dense_form import PackedSite
from compressor.export.exchange.export import Export
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, dequantize, meta_packed
from compressor.graph.kinds.tables import embedding_tables, replace_table
from compressor.graph.rewrite import replace_linear, set_parameter
from compressor.graph.sites import Site, weight_sites
from compressor.numerics.exact_grid import exact_grid, pack_exact
from compressor.numerics.nearest import rtn_quantize
from compressor.numerics.range_search import search_grid

_SPANS = ("_C", "_G256", "_G128", "_G64", "_G32")
_INTEGERS = [f"W{bits}A16{kind}{span}" for bits in range(2, 9) for kind in ("", "_ASYM") for span in _SPANS]
TRIED = (*_INTEGERS, "W4A16_G16", "W4A16_ASYM_G16", "MXFP4", "MXFP8_E4M3", "FP8_E4M3", "FP8_E4M3_T", "FP8_E4M3_B128")
"""Names of the formats whose grids other tools' codes may lie on."""
_FEW_ROWS = 16


@dataclass(frozen=True)
class Place:
    """A weight of the original's graph, and how to store it packed.

    Attributes:
        site: with the original's packed weight, or one of a format that is tried.
        replace: puts a packed weight into a graph that is equal to the original's.
    """

    site: PackedSite
    replace: Callable[[GraphModule, PackedWeight], None]


@dataclass(frozen=True)
class Chosen:
    """Tell how a weight is stored.

    Attributes:
        name: of its format or type; empty where it stays dense.
        packed: None where it stays dense, or is of a type of the layout's own.
        parts: of such a type, what is stored, by the name of the type.
        value: of such a type, what the parts stand for, float32 [out, in].
        error: ||A - B|| / ||A|| of the weight; 0 where all values are equal.
    """

    name: str
    packed: PackedWeight | None = None
    parts: Mapping[str, Tensor] | None = None
    value: Tensor | None = None
    error: float = 0.0


@dataclass(frozen=True)
class Refit:
    """A format, or a type of the layout's own, that weights without an exact place are rounded to.

    Attributes:
        fmt: None for such a type.
    """

    name: str
    fmt: Format | None

    @classmethod
    def parse(cls, name: str, export: Export) -> Refit:
        """Read the name after ``--refit``.

        Raises:
            UsageError: it is neither a format of weights alone nor a type of the layout.
        """
        if (kind := next((kind for kind in export.types if kind.lower() == name.lower()), None)) is not None:
            return cls(kind, None)
        try:
            fmt = Format.parse(name)
        except UsageError as error:
            types = f"; {export.title} itself has {', '.join(export.types)}" if export.types else ""
            raise UsageError(f"--refit: {error}{types}") from error
        if fmt.activations is not None or fmt.extras:
            raise UsageError(f"--refit: {fmt.name} is more than codes of weights; name one such as W4A16_G64")
        return cls(fmt.name, fmt)


def places(graph: GraphModule, quantised: Mapping[str, PackedWeight | None]) -> list[Place]:
    """List the quantised weights of a dense graph: tables with all that reads them, then linears."""
    stored, found = graph.meta["stored"], {}
    for table in embedding_tables(graph):
        found[table.site.weight_name] = _place(table.site, stored, True)
    for site in weight_sites(graph):
        if site.weight_name not in found:
            found[site.weight_name] = _place(site, stored, False)
    return [place for name, place in found.items() if name in quantised]


def _place(site: Site, stored: Mapping[str, object], is_table: bool) -> Place:
    name, shape = site.weight_name, (site.out_features, site.in_features)
    hole = meta_packed(*shape, Format.parse("W8A16"))

    def put(graph: GraphModule, packed: PackedWeight) -> None:
        if is_table:
            replace_table(graph, next(t for t in embedding_tables(graph) if t.site.weight_name == name), packed)
        else:
            replace_linear(graph, next(s for s in weight_sites(graph) if s.weight_name == name), packed)

    form = PackedSite(name, hole, site.module_class, str(site.input), stored[name], is_table)  # type: ignore[arg-type]
    return Place(form, put)


def choose(place: Place, own: PackedWeight | None, weight: Tensor, export: Export, refit: Refit | None) -> Chosen | str:
    """Choose how a weight is stored, or say why no grid of the layout holds it.

    Args:
        own: the bundle's packed weight.
        weight: float32 [out, in], its values.
        refit: what it is rounded to where no grid holds it; None refuses.
    """
    if own is not None and not export.why_not(replace(place.site, packed=own)) and _is_kept(place, own, weight, export):
        return Chosen(own.format.name, own)
    if why := _why_never(place, export):
        return Chosen("") if place.site.reads_table else why
    for fmt in formats(place, export):
        packed = _exact(weight, fmt)
        if packed is not None and _is_kept(place, packed, weight, export):
            return Chosen(fmt.name, packed)
    if refit is None:
        return f"its values lie on no grid of {export.title}'s"
    return _fitted(place, weight, export, refit)


def choose_format(place: Place, weight: Tensor, export: Export, fmt: Format) -> Chosen | None:
    """Store a weight in one format, if its grid holds the values."""
    if fmt not in set(formats(place, export)) or (packed := _exact(weight, fmt)) is None:
        return None
    return Chosen(fmt.name, packed) if _is_kept(place, packed, weight, export) else None


def formats(place: Place, export: Export) -> Iterator[Format]:
    """Yield the formats in which a layout can hold a weight, that of the fewest bytes first."""
    shape = place.site.packed.shape
    tried = [fmt for fmt in map(Format.parse, TRIED) if not (fmt.group_size and shape[1] % fmt.group_size)]
    for fmt in sorted(tried, key=lambda fmt: fmt.packed_bytes(*shape)):
        if not export.why_not(replace(place.site, packed=meta_packed(*shape, fmt))):
            yield fmt


def _why_never(place: Place, export: Export) -> str:
    """Say why a layout has no format for a weight at all; empty if it has one."""
    if place.site.stored.reason:
        return f"{export.title} has no place for it: {place.site.stored.reason}"
    if next(formats(place, export), None) is not None:
        return ""
    plain = meta_packed(*place.site.packed.shape, Format.parse("W4A16_G32"))
    return f"{export.title} {export.why_not(replace(place.site, packed=plain))}"


def _exact(weight: Tensor, fmt: Format) -> PackedWeight | None:
    """Pack a weight exactly; most grids that do not hold it are told by a few rows of the first group."""
    if fmt.strategy in ("group", "channel"):
        few = weight[:_FEW_ROWS, : fmt.group_size or None].contiguous()
        if exact_grid(few, fmt) is None:
            return None
    return pack_exact(weight, fmt)


def _is_kept(place: Place, packed: PackedWeight, weight: Tensor, export: Export) -> bool:
    """Return whether what the layout stores stands for the very values."""
    stored = export.value(export.encode(replace(place.site, packed=packed)))
    return torch.equal(dequantize(packed) if stored is None else stored, weight)


def _fitted(place: Place, weight: Tensor, export: Export, refit: Refit) -> Chosen | str:
    if refit.fmt is None:
        try:
            parts, value = export.fit(refit.name, weight)
        except UsageError as error:
            return str(error)
        place_of_value = weight_spill().empty(value.shape, torch.float32)
        place_of_value.copy_(value)
        return Chosen(refit.name, None, parts, place_of_value, relative_error(weight, value))
    fmt = refit.fmt
    if why := export.why_not(replace(place.site, packed=meta_packed(*place.site.packed.shape, fmt))):
        return f"cannot be refitted to {fmt.name}: {export.title} {why}"
    packed = rtn_quantize(weight, fmt, lambda group, _: search_grid(group, torch.ones(group.shape[1]), fmt))
    stored = export.value(export.encode(replace(place.site, packed=packed)))
    return Chosen(fmt.name, packed, error=relative_error(weight, dequantize(packed) if stored is None else stored))


def relative_error(weight: Tensor, value: Tensor) -> float:
    """Return ||W - V|| / ||W||, in float64."""
    norm = float(weight.double().square().sum())
    return (float((weight.double() - value.double()).square().sum()) / norm) ** 0.5 if norm else 0.0


def put(graph: GraphModule, place: Place, chosen: Chosen) -> None:
    """Store a weight as chosen; of a type of the layout's own, its parameter gets the values that it stands for."""
    if chosen.packed is not None:
        place.replace(graph, chosen.packed)
    elif chosen.value is not None:
        set_parameter(graph, place.site.parameter, chosen.value)

"""Steps that weight passes share: choose the format and the linears, replace, record."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import CompressorError, UsageError
from compressor.formats.extras import ColumnBlocks, KeptOfGroup, SingleZeros
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight
from compressor.formats.planes import UpperPlane
from compressor.graph.kinds.gate_projections import WHY_DENSE, without_gates
from compressor.graph.rewrite import replace_linear, replace_weight
from compressor.graph.segments import segments
from compressor.graph.sites import (
    Site,
    calls_again,
    first_calls,
    linear_sites,
    match_sites,
    packed_weight_sites,
    weight_sites,
)
from compressor.host.tensor_files import release
from compressor.numerics.nearest import weight_error
from compressor.pipeline.context import Context, SiteRecord
from compressor.progress import Task


def choose_format(scheme: str, group_size: int = 0) -> Format:
    """Return the format of a scheme's name, with another group size unless that is 0.

    Raises:
        UsageError: there is no such scheme, the format cannot have the group size, or columns are stored as floats.
    """
    fmt = Format.parse(scheme)
    if fmt.outlier_features:
        raise UsageError(
            f"scheme {scheme}: which columns stay float16 is found by the pass llm_int8; "
            f"use it, with {fmt.without_outliers.name}"
        )
    if any(fmt.extra(kind) is not None for kind in (ColumnBlocks, KeptOfGroup, SingleZeros)):
        raise UsageError(
            f"scheme {scheme}: which weights are left out is chosen by the passes magnitude, wanda, sparsegpt and "
            f"alps, of convolutions by group_sparse; use one of them, or {fmt.of_kept.name}"
        )
    if fmt.extra(UpperPlane) is not None:
        raise UsageError(
            f"scheme {scheme}: no weight is stored so: it is the upper plane of one in W8, _P4; store that"
        )
    return fmt.with_group_size(group_size) if group_size else fmt


def patterns(value: str | Sequence[str]) -> tuple[str, ...]:
    """Return one pattern or several as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


def choose_sites(
    graph: GraphModule,
    pass_name: str,
    fmt: Format | None,
    targets: str | Sequence[str],
    ignore: str | Sequence[str],
    find: Callable[[GraphModule], list[Site]] = linear_sites,
    what: str = "linear",
) -> list[Site]:
    """Return the linears that match ``targets`` and not ``ignore``, in dataflow order.

    Gate projections (:mod:`compressor.graph.kinds.gate_projections`) are quantised only if ``targets`` names them.  A
    module that is called again is there once, by its first call, unless ``fmt`` stores the scale of a call's input.

    Args:
        fmt: format whose group size has to fit; None if nothing is quantised.
        find: lists the linears to choose from.
        what: word for what it lists, in messages.
    Raises:
        UsageError: a pattern is malformed, or matches nothing (the nearest names are given), nothing is left, or the
            group size divides the inputs of none of the linears.
    """
    sites = find(graph)
    try:
        matched, unmatched = match_sites(sites, patterns(targets), patterns(ignore))
    except re.error as error:
        raise UsageError(f"{pass_name}: re:{error.pattern!s} is not a valid regular expression: {error}") from error
    if unmatched:
        known = sorted({site.module_class for site in sites} | {site.name for site in sites})
        known += sorted({site.name.rpartition(".")[2] for site in sites} - set(known))
        taken = {pattern for pattern in unmatched if _is_packed(graph, pattern)}
        if taken:
            raise UsageError(
                f"{pass_name}: {', '.join(map(repr, taken))}: an earlier pass has packed every linear that matches; "
                f"put {pass_name} before it, or give each of the two other ones"
            )
        if not known:
            raise UsageError(f"{pass_name}: the model has no {what} that can be compressed")
        hints = "; ".join(f"{p!r}: nearest {', '.join(_nearest(p, known))}" for p in unmatched)
        raise UsageError(f"{pass_name}: patterns that match no {what} of the model: {hints}")
    if find in (linear_sites, weight_sites) and (fmt is None or not fmt.has_input_scale):
        matched = first_calls(matched)
    if fmt is not None and find in (linear_sites, weight_sites) and matched:
        matched = without_gates(graph, matched, patterns(targets))
        if not matched:
            raise UsageError(f"{pass_name}: all linears of the class in `targets` stay dense: {WHY_DENSE}")
    if not matched:
        raise UsageError(f"{pass_name}: every linear that `targets` matches is ignored as well; nothing to compress")
    if fmt is not None and fmt.group_size and all(site.in_features % fmt.group_size for site in matched):
        widths = sorted({site.in_features for site in matched})
        fitting = [size for size in (256, 128, 64, 32, 16, 8) if any(width % size == 0 for width in widths)]
        advice = f"; sizes that divide some: {', '.join(map(str, fitting))}" if fitting else "; use one scale a channel"
        raise UsageError(
            f"{pass_name}: group size {fmt.group_size} divides the inputs of none of the matched {what}s "
            f"(their inputs: {', '.join(map(str, widths))}){advice}"
        )
    return matched


def _is_packed(graph: GraphModule, pattern: str) -> bool:
    return bool(match_sites(packed_weight_sites(graph), pattern)[0])


def by_segment(graph: GraphModule, sites: Sequence[Site]) -> list[list[Site]]:
    """Group the sites by the graph's segments (:func:`compressor.graph.segments.segments`), in order."""
    wanted = {site.name for site in sites}
    blocks = [[site for site in segment.sites if site.name in wanted] for segment in segments(graph)]
    return [block for block in blocks if block]


@contextmanager
def error_context(site: Site | str) -> Iterator[None]:
    """Prefix the message of an error raised inside with the site's name; a site may be given by it."""
    try:
        yield
    except CompressorError as error:
        raise type(error)(f"{site if isinstance(site, str) else site.name}: {error}") from error


def compress_site(
    graph: GraphModule,
    ctx: Context,
    site: Site,
    packed: PackedWeight,
    pass_name: str,
    *,
    error: float,
    error_of: str = "weight",
    rtn_error: float | None = None,
    notes: Sequence[str] = (),
    replace: Callable[[GraphModule, Site, PackedWeight], None] = replace_linear,
    tokens: int | None = None,
) -> None:
    """Replace a dense weight by a packed one and record it, with notes on anything unusual."""
    if set(packed.parts) != set(packed.format.parts(*packed.shape)):
        raise UsageError(
            f"{pass_name}: {site.name}: the pass calibrates no scale of activations, which {packed.format.name} "
            "stores; take a format without one, or rtn, gptq or awq"
        )
    weight = graph.get_parameter(site.weight_name)
    before = weight.numel() * weight.element_size()
    notes = [*notes, *site_notes(site, packed, before)]
    replace(graph, site, packed)
    record = SiteRecord(
        site.name,
        pass_name,
        packed.format.name,
        before,
        packed.nbytes,
        _short(error),
        error_of,
        None if rtn_error is None else _short(rtn_error),
        "; ".join(notes),
        tokens,
    )
    ctx.records.append(record)


def change_site(
    graph: GraphModule,
    ctx: Context,
    site: Site,
    weight: Tensor,
    pass_name: str,
    *,
    error: float,
    error_of: str = "weight",
    notes: Sequence[str] = (),
) -> None:
    """Put another dense weight in the place of a dense one, masked or pruned, and record it.

    Args:
        weight: [out, in], stored as it is given; an embedding that is tied to the old one keeps it.  A pass that takes
            rows or columns away also does so where the weight's neighbours expect them.
        error, error_of: as in :class:`compressor.pipeline.context.SiteRecord`.
    """
    old = graph.get_parameter(site.weight_name)
    before, after = old.numel() * old.element_size(), weight.numel() * weight.element_size()
    replace_weight(graph, site, weight)
    notes = [*notes, *([f"tied: {site.weight_name} stays for the embedding"] if site.tied else [])]
    ctx.records.append(
        SiteRecord(site.name, pass_name, "", before, after, _short(error), error_of, None, "; ".join(notes))
    )


def summarise_formats(pass_name: str, sites: Sequence[Site], chosen: Mapping[str, Format]) -> str:
    """Format one line with the bits per weight and the number of linears in each format, the smallest format first."""
    stored = sum(chosen[site.name].packed_bytes(site.out_features, site.in_features) for site in sites)
    bits = 8 * stored / sum(site.out_features * site.in_features for site in sites)
    smallest_first = sorted(chosen.values(), key=lambda fmt: fmt.packed_bytes(4096, 4096))
    parts = ", ".join(f"{count} in {name}" for name, count in Counter(fmt.name for fmt in smallest_first).items())
    return f"{pass_name}: {bits:.3f} bits a weight: {parts}"


def _short(error: float) -> float:
    """Round to six digits: further ones depend on the number of threads, and the record is part of the bundle."""
    return float(f"{error:.6g}")


def site_notes(site: Site, packed: PackedWeight, bytes_before: int) -> list[str]:
    """Return notes on anything unusual about a site's weight in this form."""
    notes = []
    ragged = site.in_features % packed.format.group_size if packed.format.group_size else 0
    if ragged:
        notes.append(f"last group has {ragged} of {packed.format.group_size} columns")
    if packed.format.extra(ColumnBlocks) is not None and packed.format.stored_columns(site.in_features) == (
        site.in_features
    ):
        notes.append(f"{packed.format.name} leaves nothing out of {site.in_features} columns, which fill whole chunks")
    again = calls_again(site.node)
    if again and not packed.format.has_input_scale:
        notes.append(f"called {len(again) + 1} times: all read the weight that is packed for the first call")
    elif site.tied:
        notes.append(f"tied: the dense weight {site.weight_name} stays for the embedding")
    if packed.nbytes > bytes_before:
        notes.append(f"stored bytes exceed the dense weight's {bytes_before}")
    return notes


def _nearest(pattern: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(pattern.removeprefix("re:"), known, n=3, cutoff=0.0)


_NONE: Mapping[str, Tensor] = MappingProxyType({})


def round_sites(
    graph: GraphModule,
    ctx: Context,
    pass_name: str,
    sites: Sequence[Site],
    task: Task,
    quantize: Callable[[Site, Tensor], PackedWeight],
    input_scales: Mapping[str, Tensor] = _NONE,
) -> None:
    """Replace linears one after another, and record the error of each weight.

    Args:
        quantize: (site, weight float32 [out, in]) -> packed weight.
        input_scales: result of :func:`compressor.pipeline.input_scales.calibrate_inputs`.
    """
    for site in sites:
        stored = graph.get_parameter(site.weight_name).detach()
        weight = stored.float()
        with error_context(site):
            packed = quantize(site, weight).with_input_scale(input_scales.get(site.name))
        compress_site(graph, ctx, site, packed, pass_name, error=weight_error(weight, packed))
        release([stored])
        task.advance()

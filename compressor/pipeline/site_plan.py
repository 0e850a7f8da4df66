"""What a weight pass will do to each linear, told from a graph without weights; and how much work that is.

Planning rewrites the graph as the pass would, with packed weights on the meta device: what follows sees the shapes
and bytes that it will see in the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.formats.format import Format
from compressor.formats.packing import PIECE_ELEMENTS, PackedWeight
from compressor.graph.sites import Site, linear_sites, match_sites, replace_linear
from compressor.numerics.deterministic import BLOCK
from compressor.numerics.learned_rounding import ROUNDING_ROWS, ROUNDING_SWEEPS
from compressor.numerics.range_search import OUTPUT_RATIOS, Observer
from compressor.pipeline.sites import patterns, site_notes

Work = Mapping[str, float]
"""Amounts of work by unit; :data:`compressor.plan.prices.UNITS` lists the units."""

_CANDIDATES = {True: 29, False: 14}  # grids that search_grid tries, symmetric or not
_CLUSTER_BYTES = 16 * 129**2  # of element-wise traffic, a row and level of compressor.numerics.clustering.cluster
_ERROR_BYTES = 32  # of float64, a weight whose error is taken
_FACTORS, _ROTATED_BYTES = 48, 80  # of a rotation: columns of its factors, bytes an element of a weight
KEPT_ROWS = 512  # that calibration.Inputs keeps of 64 samples of 256 tokens
_FRESH_BYTES = 32 << 20  # from this size on, the C library asks the system for every block of memory


@dataclass(frozen=True)
class Gathering:
    """How a pass runs calibration samples; the arguments of :func:`compressor.calibration.calibrate.stream`.

    Attributes:
        true_sequential, with_dense: see there.
        squares: the statistic is a matrix, and not a few vectors.
        gradients: samples also run backwards (:func:`compressor.calibration.gradients.backwards`), for that matrix's rows or, where
            the statistic is none, in place of it.
    """

    true_sequential: bool
    with_dense: bool
    squares: bool = True
    gradients: bool = False


@dataclass(frozen=True)
class SitePlan:
    """What one pass will do to one linear.

    Attributes:
        site: module name.
        out_features, in_features: shape of the weight.
        format: what it will be stored in; empty where it is left alone.
        bytes_before, bytes_after: of the weight as it is stored, without the bias.
        note: why it is left alone, or what is out of the ordinary.
        work: what the pass's arithmetic takes, by unit.
        working_bytes: memory that the pass's arithmetic takes beside the stored weight.
        gathering: how calibration samples are run for it; None for a pass without calibration.
    """

    site: str
    out_features: int
    in_features: int
    format: str
    bytes_before: int
    bytes_after: int
    note: str = ""
    work: Work = field(default_factory=dict)
    working_bytes: int = 0
    gathering: Gathering | None = None


def plan_sites(
    graph: GraphModule,
    formats: Mapping[str, Format],
    ignore: str | Sequence[str],
    work: Callable[[int, int, Format], Work],
    working_bytes: Callable[[int, int, Format], int],
    gathering: Gathering | None = None,
) -> list[SitePlan]:
    """One plan a dense linear, in dataflow order; those with a format are replaced by packed ones on the meta device.

    Args:
        formats: by the names of the linears that the pass compresses.
        ignore: of the pass, for the notes on the others.
        work, working_bytes: (out_features, in_features, format) -> as in :class:`SitePlan`.
    """
    ignored = {site.name for site in match_sites(linear_sites(graph), patterns(ignore))[0]}
    plans = []
    for site in linear_sites(graph):
        weight, shape = graph.get_parameter(site.weight_name), (site.out_features, site.in_features)
        before = weight.numel() * weight.element_size()
        if site.name not in formats:
            why = "stays dense: ignored" if site.name in ignored else "stays dense: no target matches it"
            plans.append(SitePlan(site.name, *shape, "", before, before, why))
            continue
        fmt = formats[site.name]
        packed = meta_packed(*shape, fmt)
        notes = "; ".join(site_notes(site, packed, before))
        replace_linear(graph, site, packed)
        amounts = (dict(work(*shape, fmt)), working_bytes(*shape, fmt))  # dataclasses.asdict cannot copy a Counter
        plans.append(SitePlan(site.name, *shape, fmt.name, before, packed.nbytes, notes, *amounts, gathering))
    return plans


def plan_dense_sites(
    graph: GraphModule, sites: Sequence[Site], gathering: Gathering, tries: int, fmt: Format
) -> list[SitePlan]:
    """One plan a linear that stays dense while its inputs are scaled; ``tries`` scales are tried by rounding to fmt."""
    plans = []
    for site in sites:
        weight, shape = graph.get_parameter(site.weight_name), (site.out_features, site.in_features)
        before = weight.numel() * weight.element_size()
        note, work = "scaled, where something absorbs it", dict(scaled_work(*shape, fmt, tries, chosen=False))
        kept = SitePlan(site.name, *shape, "", before, before, note, work, scaled_working_bytes(*shape, fmt), gathering)
        plans.append(kept)
    return plans


def plan_rotated_sites(graph: GraphModule, before: Mapping[str, Tensor]) -> list[SitePlan]:
    """One plan a linear, all still dense; those whose weight is another than ``before`` were rotated."""
    plans = []
    for site in linear_sites(graph):
        old, new, shape = (
            before[site.name],
            graph.get_parameter(site.weight_name),
            (site.out_features, site.in_features),
        )
        sizes = (old.numel() * old.element_size(), new.numel() * new.element_size())
        if new is old:
            plans.append(SitePlan(site.name, *shape, "", *sizes, "stays as it is"))
            continue
        work = {"matmul64_flop": 2 * _FACTORS * new.numel(), "stream_byte": _ROTATED_BYTES * new.numel()}
        plans.append(SitePlan(site.name, *shape, "", *sizes, "rotated", work, 28 * new.numel()))
    return plans


def meta_packed(rows: int, columns: int, fmt: Format) -> PackedWeight:
    """A packed [rows, columns] weight without storage."""
    parts = {
        part: torch.empty(shape, dtype=getattr(torch, kind), device="meta")
        for part, (kind, shape) in fmt.parts(rows, columns).items()
    }
    return PackedWeight(parts, fmt, (rows, columns))


def _grid_work(rows: int, columns: int, fmt: Format, searches: int, *, searched: bool = True) -> dict[str, float]:
    """Work of choosing a weight's grids so many times, by searching or by their range; codebooks cluster either way."""
    if fmt.codebook:
        each = _CLUSTER_BYTES * rows * fmt.groups(columns) * (fmt.levels + 6)
        return {"grid_element": 0.0, "stream_byte": float(searches * (1 + searched) * each)}
    return {"grid_element": float(searches * (_CANDIDATES[fmt.symmetric] if searched else 0) * rows * columns)}


def _observer_work(rows: int, columns: int, fmt: Format, observer: Observer) -> Counter[str]:
    """Work of choosing a weight's grids once; with ``output``, each of more grids takes a product with the Hessian."""
    work = Counter(_grid_work(rows, columns, fmt, 1, searched=observer != "minmax"))
    if observer == "output" and not fmt.codebook:
        tried = len(OUTPUT_RATIOS) * (2 if fmt.symmetric else 1)
        work["grid_element"] = tried * rows * columns
        work["matmul_flop"] += 2 * tried * rows * columns * fmt.columns(columns)
    return work


def rtn_work(rows: int, columns: int, fmt: Format) -> Work:
    """Work of rounding a weight to nearest and of its error."""
    size = rows * columns
    unit = "fresh_byte" if 8 * min(size, PIECE_ELEMENTS) >= _FRESH_BYTES else "stream_byte"
    grids = Counter(_grid_work(rows, columns, fmt, 1, searched=False))
    grids.update({"rtn_element": size, "dequantize_element": size, unit: _ERROR_BYTES * size})
    return grids


def squeezellm_work(rows: int, columns: int, fmt: Format) -> Work:
    """Work of :func:`compressor.passes.squeezellm.squeezellm_quantize`, once the sensitivities are there."""
    work = Counter(rtn_work(rows, columns, fmt))
    work.update(_grid_work(rows, columns, fmt, 1))
    work.update({"stream_byte": 40 * rows * columns})
    return work


def rtn_working_bytes(rows: int, columns: int, fmt: Format) -> int:
    """Memory of rounding to nearest: the weight in float32, and its codes thrice and planes, or the error's pieces."""
    size, packed = rows * columns, fmt.packed_bytes(rows, columns)
    return packed + max(9 * size, 4 * size + (_ERROR_BYTES + 18) * min(size, PIECE_ELEMENTS))


def scaled_work(rows: int, columns: int, fmt: Format, tries: int, *, chosen: bool = True) -> Work:
    """Work of trying scales of a weight's columns; and, ``chosen``, of searching the grids it is then rounded on."""
    size, rounded = rows * columns, tries + chosen
    work = Counter(_grid_work(rows, columns, fmt, int(chosen)))
    work.update(_grid_work(rows, columns, fmt, tries, searched=False))
    work.update({
        "rtn_element": rounded * size,
        "dequantize_element": rounded * size,
        "matmul_flop": tries * 4 * KEPT_ROWS * size,
        "stream_byte": 12 * size * tries + _ERROR_BYTES * size * chosen,
    })  # fmt: skip
    return work


def scaled_working_bytes(rows: int, columns: int, _fmt: Format) -> int:
    """Memory of one such try: the weight four times in float32, and its codes."""
    return 18 * rows * columns


def half_product(columns: int) -> float:
    """Operations an element of the upper half of a symmetric matrix, blocks on the diagonal whole, and its rows."""
    return 1 + min(1.0, BLOCK / columns)


def gptq_work(rows: int, columns: int, fmt: Format, *, observer: Observer, match_dense: bool) -> Work:
    """Work of :func:`compressor.passes.gptq.gptq_quantize`, when its first dampening suffices.

    Products of the [rows, columns] weight with the [columns, columns] Hessian: two losses and a norm, which read its
    upper half, and the updates of the remainder, which are half a product; with ``match_dense`` three in float32.
    """
    size, cubed = rows * columns, columns**3
    work = _observer_work(rows, columns, fmt, observer)
    work.update(_grid_work(rows, columns, fmt, 1, searched=False))
    work.update({
        "matmul64_flop": (3 * half_product(columns) + 1) * size * columns,
        "matmul_flop": (6 if match_dense else 0) * size * columns,
        "factor64_flop": (4 / 3 + (1 / 3 if match_dense else 0)) * cubed,
        "stream_byte": 8 * (8 * columns**2 + 8 * size),
        "rtn_element": 2 * size,
        "dequantize_element": 3 * size,
        "sweep_element": size,
        "sweep_column": columns,
    })  # fmt: skip
    return work


def gptq_working_bytes(rows: int, columns: int, fmt: Format) -> int:
    """Memory of GPTQ: the weight, its transpose and a product in float64; the factor of the Hessian's inverse, twice
    while it is turned round.

    The statistics themselves (float32, one or two of [columns, columns]) are not in it.
    """
    return (4 + 8 + 8 + 8 + 3) * rows * columns + 3 * fmt.packed_bytes(rows, columns) + 20 * columns**2


def adaptive_rounding_work(
    rows: int, columns: int, fmt: Format, *, steps: int, observer: Observer, match_dense: bool
) -> Work:
    """Work of :func:`compressor.passes.adaptive_rounding.adaptive_round`.

    A step of the optimiser is one product with the Hessian and some forty operators on pieces of the weight; a sweep of
    the descent is two products, and per column what GPTQ does.
    """
    size, chunks = rows * columns, -(-rows // ROUNDING_ROWS)
    work = _observer_work(rows, columns, fmt, observer)
    work.update({
        "matmul_flop": (2 * steps + (6 if match_dense else 0)) * size * columns,
        "stream_byte": 400 * steps * size,
        "node": 6 * steps * chunks,
        "matmul64_flop": (3 * half_product(columns) + 4 * ROUNDING_SWEEPS) * size * columns,
        "factor64_flop": 1 / 3 * columns**3 if match_dense else 0,
        "rtn_element": 2 * size,
        "dequantize_element": 6 * size,
        "sweep_element": ROUNDING_SWEEPS * size,
        "sweep_column": ROUNDING_SWEEPS * columns,
    })  # fmt: skip
    return work


def adaptive_rounding_working_bytes(rows: int, columns: int, fmt: Format) -> int:
    """Memory of the descent in float64: the weight, its transpose, values and slopes, a few of which twice; and of the
    Hessian, twice, and a half in float32.  The statistics themselves are not in it."""
    return (4 + 8 * 7 + 4) * rows * columns + 3 * fmt.packed_bytes(rows, columns) + (8 * 2 + 4) * columns**2

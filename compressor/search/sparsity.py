"""Choose how much of each linear's blocks is left out, in no more bytes than the same share of all of them takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from compressor.errors import UsageError
from compressor.formats.extras import ColumnBlocks, KeptOfGroup, SingleZeros
from compressor.formats.format import Format
from compressor.graph.sites import Site
from compressor.search.knapsack import choose_within

_DENSITIES = (0.5, 0.7, 1.4, 2.0)
"""Shares of a linear's columns that may stay, times that of the scheme."""


def _left_out(fmt: Format) -> ColumnBlocks | SingleZeros:
    """Return the extra that states a share."""
    found = fmt.extra(ColumnBlocks) or fmt.extra(SingleZeros)
    assert found is not None
    return found


def with_percent(fmt: Format, percent: float) -> Format:
    """Return the format with this share of the blocks left out, in hundredths of a percent above 0 and below 100."""
    blocks = _left_out(fmt)
    return fmt.with_extra(replace(blocks, percent=min(99.99, max(0.01, round(percent, 2)))))


def levels(fmt: Format) -> list[Format]:
    """Return the format, and the same with half to twice as many columns, or one of M more and fewer."""
    if (pattern := fmt.extra(KeptOfGroup)) is not None:
        near = [n for n in (pattern.kept - 1, pattern.kept + 1) if 0 < n < pattern.size and fmt.group_size % n == 0]
        return [fmt, *(fmt.with_extra(KeptOfGroup(n, pattern.size)) for n in near)]
    blocks = _left_out(fmt)
    percents = (100 - (100 - blocks.percent) * factor for factor in _DENSITIES)
    return [fmt, *(with_percent(fmt, percent) for percent in percents if percent > 0)]


def stored_bytes(sites: Sequence[Site], formats: Mapping[str, Format]) -> int:
    """Count the bytes of the sites' weights."""
    return sum(formats[site.name].packed_bytes(site.out_features, site.in_features) for site in sites)


def by_budget(
    sites: Sequence[Site], formats: Sequence[Format], errors: Mapping[str, Sequence[float]]
) -> dict[str, Format]:
    """Choose a format for each site: the least sum of errors in no more bytes than all in the first format.

    Args:
        errors: of each site in each format.
    """
    sizes = [[float(fmt.packed_bytes(s.out_features, s.in_features)) for fmt in formats] for s in sites]
    picked = choose_within([errors[site.name] for site in sites], sizes, sum(row[0] for row in sizes))
    return {site.name: formats[place] for site, place in zip(sites, picked, strict=True)}


def by_outliers(
    segments: Sequence[Sequence[Site]], outliers: Mapping[str, float], fmt: Format, most: float
) -> dict[str, Format]:
    """Leave less out of the segments with more outliers (Yin et al. 2023, OWL, arXiv 2310.05175).

    The share of a segment's columns that stay rises with the share D of its weights that are outliers::

        share = base + r - mean(r),  r = 2 most (D - min D) / (max D - min D)

    with a mean over weights.  Sizes are rounded up to chunks, so all shares then fall alike, in hundredths of a
    percent, until the weights take at most the bytes of a uniform share.

    Args:
        outliers: how many of each site's weights are.
        most: the paper's lambda; shares are at most twice that apart.
    """
    blocks = _left_out(fmt)
    weights = [float(sum(site.out_features * site.in_features for site in sites)) for sites in segments]
    ratios = [sum(outliers[s.name] for s in sites) / size for sites, size in zip(segments, weights, strict=True)]
    low, spread = min(ratios), max(ratios) - min(ratios)
    shares = [200 * most * (ratio - low) / spread if spread else 0.0 for ratio in ratios]
    mean = sum(share * size for share, size in zip(shares, weights, strict=True)) / sum(weights)
    every = [site for sites in segments for site in sites]
    limit = stored_bytes(every, {site.name: fmt for site in every})

    def chosen(step: int) -> dict[str, Format]:
        percents = [blocks.percent - share + mean + step / 100 for share in shares]
        return {s.name: with_percent(fmt, p) for sites, p in zip(segments, percents, strict=True) for s in sites}

    first, last = 0, round(20000 * most) + 1  # with the last no segment keeps more than the base
    while first < last:
        middle = (first + last) // 2
        first, last = (first, middle) if stored_bytes(every, chosen(middle)) <= limit else (middle + 1, last)
    return chosen(first)


def check_schemes(pass_name: str, scheme: str, schemes: Sequence[str]) -> list[Format]:
    """Return the formats to choose from, the scheme's first: those that are named, or its levels.

    Raises:
        UsageError: one of them leaves nothing out.
    """
    first, named = Format.parse(scheme), [Format.parse(name) for name in schemes]
    for fmt in named:
        if all(fmt.extra(kind) is None for kind in (ColumnBlocks, KeptOfGroup, SingleZeros)):
            raise UsageError(
                f"{pass_name}: schemes: {fmt.name} leaves nothing out; give formats such as {fmt.name}_B16x1@50, or "
                "take mixed_precision for dense ones"
            )
    return list(dict.fromkeys([first, *named])) if named else levels(first)

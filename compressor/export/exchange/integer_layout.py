"""Say what layouts of packed integers with float activations (GPTQ, AWQ) ask of a site."""

from __future__ import annotations

from collections.abc import Sequence

from compressor.export.exchange.coded import why_not_coded
from compressor.export.exchange.dense_form import PackedSite
from compressor.graph.sites import EXPERT

ROUNDED_PRODUCTS = "loaders multiply codes by float16 scales in float16, which rounds: the stored numbers are exact"
"""Note of layouts whose loaders compute so."""


def why_not_linear(site: PackedSite, experts: bool = False) -> str:
    """Say why a site is not a plain linear; empty if it is.

    Args:
        experts: the layout holds the linears of experts too.
    """
    if site.reads_table:
        return "packs linears, and this is a table of embeddings"
    if site.module_class == EXPERT and experts:
        return ""
    if site.module_class != "Linear" or site.stored.transposed:
        return f"packs modules of the class Linear, and this one's is {site.module_class or 'not known'}"
    return ""


def why_not_integers(site: PackedSite, bits: Sequence[int], inputs: int, outputs: int) -> str:
    """Say why a site is not integers of some widths with float activations; empty if it is.

    Args:
        bits: widths of codes that there are.
        inputs, outputs: of which the sizes of a weight must be multiples.
    """
    return why_not_linear(site) or why_not_codes(site, bits, inputs, outputs)


def why_not_codes(site: PackedSite, bits: Sequence[int], inputs: int, outputs: int) -> str:
    """Say why the numbers of a site are not integers of some widths with float activations; empty if they are.

    The arguments are those of :func:`why_not_integers`.
    """
    fmt, (rows, columns) = site.packed.format, site.shape
    if reason := why_not_coded(fmt):
        return f"has no such layout: the format {reason}"
    if fmt.element is not None or fmt.bits not in bits:
        return f"has integers of {' or '.join(map(str, bits))} bits"
    if fmt.activations is not None:
        return f"does not round activations, and the format has A{fmt.activations.numbers}"
    if fmt.strategy not in ("group", "channel"):
        return f"has scales of groups or channels, and the format has one for each {fmt.strategy}"
    if columns % inputs or rows % outputs:
        return f"has {outputs} n rows and {inputs} n columns, and this is {rows} by {columns}"
    if fmt.group_size and columns % fmt.group_size:
        return f"has whole groups, and {columns} inputs are not a multiple of {fmt.group_size}"
    return ""


def one_format(sites: Sequence[PackedSite]) -> str:
    """Say why sites do not share one format; empty if they do."""
    kinds = {site.packed.format.of_kept: site.module for site in sites}
    if len(kinds) < 2:
        return ""
    (one, first), (other, second) = [(module, fmt.name) for fmt, module in kinds.items()][:2]
    return f"has one format for all, and {one} is {first}, {other} is {second}"

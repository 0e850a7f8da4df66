"""Join a search space of architectures with formats: each alternative in each format is an alternative of its own.

    ffn   as_is | width:0.5 | none     x   W8A16, W4A16_G128
    ->    as_is in W8A16 | as_is in W4A16_G128 | width 256 in W8A16 | width 256 in W4A16_G128 | none

After APQ (Wang et al. 2020, arXiv 2006.08509), which chooses architecture, pruning and precision together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format
from compressor.search.space import Alternative, Space, SubLayer

_KEY = "chosen_formats"
"""Key of the graph's meta data: name of a linear -> name of the format that it is to be stored in."""


@dataclass(frozen=True)
class Formatted(Alternative):
    """Store an alternative's linears in a format.

    Attributes:
        inner: the alternative.
        stored: its linears' format.
    """

    inner: Alternative
    stored: Format

    @classmethod
    def of(cls, layer: SubLayer, argument: str, multiple: int) -> Alternative | str:
        """Return why recipes do not name it: :func:`joint` makes it of others."""
        return "formats are named in `schemes`"

    @property
    def label(self) -> str:
        """Name it by the alternative and the format."""
        return f"{self.inner.label} in {self.stored.name}"

    @property
    def kind(self) -> str:
        """Name what uniform architectures have of it."""
        return f"{self.inner.kind} in {self.stored.name}"

    @property
    def fmt(self) -> Format | None:
        """Return the format of its linears."""
        return self.stored

    @property
    def plain(self) -> Alternative:
        """Return the alternative without a format of its own."""
        return self.inner

    @property
    def of_what(self) -> str:
        """Return what some of stay."""
        return self.inner.of_what

    @property
    def channels(self) -> int | None:
        """Return how many of these stay."""
        return self.inner.channels

    @property
    def is_linear(self) -> bool:
        """Tell whether one linear stands for all of it."""
        return self.inner.is_linear


def check_schemes(pass_name: str, scheme: str | None, schemes: Sequence[str]) -> list[Format]:
    """Check and parse the formats to choose among: ``scheme`` first, then ``schemes``; an empty list without these.

    Raises:
        UsageError: ``scheme`` is missing, one stands there twice, or leaves out blocks.
    """
    if not schemes:
        return []
    if scheme is None:
        raise UsageError(f"{pass_name}: schemes {', '.join(schemes)}: say in `scheme` which format the whole model has")
    found = [Format.parse(name) for name in (scheme, *schemes)]
    if len(set(found)) < len(found):
        raise UsageError(f"{pass_name}: schemes {', '.join(schemes)}: give others than {scheme}, each of them once")
    for fmt in found:
        if fmt.extra(ColumnBlocks) is not None or fmt.outlier_features:
            raise UsageError(
                f"{pass_name}: schemes: {fmt.name}: give dense formats, or such as leave out single weights "
                f"({fmt.of_kept.without_outliers.name}_2:4)"
            )
    return found


def joint(
    layers: Sequence[SubLayer],
    space: Space,
    formats: Sequence[Format],
    refused: Callable[[SubLayer, Alternative, Format], str],
) -> Space:
    """Return the space of all pairs of an alternative and a format; what leaves nothing has none.

    Args:
        refused: why a sub-layer's alternative cannot be stored in a format; empty where it can.
    Raises:
        UsageError: a sub-layer as it is cannot be stored in the first format.
    """
    found = []
    for layer, row in zip(layers, space, strict=True):
        if why := refused(layer, row[0], formats[0]):
            raise UsageError(f"{layer.name}: {formats[0].name}: {why}")
        pairs = [(one, fmt) for one in row if one.stays for fmt in formats if not refused(layer, one, fmt)]
        found.append([*(Formatted(*pair) for pair in pairs), *(one for one in row if not one.stays)])
    return found


def parts_of_pairs(row: Sequence[Alternative]) -> dict[int, tuple[int, int]]:
    """Return what tells the score of a pair of an alternative and a format before anyone has measured it.

    The score of the alternative in the first format, and by how much the sub-layer as it is gets worse in the pair's:
    each is a change of its own, and small ones add up.

    Returns:
        By the places of pairs that both parts are there of, those of the parts.
    """
    first, places = row[0].fmt, {(one.plain.label, one.fmt): place for place, one in enumerate(row)}
    found = dict[int, tuple[int, int]]()
    for place, one in enumerate(row):
        parts = places.get((one.plain.label, first)), places.get((row[0].plain.label, one.fmt))
        if one.fmt is not None and parts[0] is not None and parts[1] is not None and place not in parts:
            found[place] = parts[0], parts[1]
    return found


def has_one_format(picks: Sequence[Alternative]) -> bool:
    """Tell whether all that stays is stored in the same format."""
    return len({one.fmt for one in picks if one.stays}) <= 1


def set_chosen(graph: GraphModule, formats: Mapping[str, Format]) -> None:
    """Keep beside the graph in which format each linear is to be stored."""
    graph.meta[_KEY] = {name: fmt.name for name, fmt in formats.items()}


def chosen(graph: GraphModule) -> dict[str, Format]:
    """Return the formats that linears are to be stored in, by name; empty where nothing has chosen any."""
    return {name: Format.parse(fmt) for name, fmt in graph.meta.get(_KEY, {}).items()}

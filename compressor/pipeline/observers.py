"""Observers that check or write the graph between passes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule

from compressor.errors import VerificationError
from compressor.formats.parts import PARTS
from compressor.graph.rules import listing
from compressor.graph.sites import linear_sites
from compressor.pipeline.context import Context

if TYPE_CHECKING:
    from torch.fx import GraphModule


def verify_stage(index: int, name: str, graph: GraphModule, ctx: Context) -> None:
    """Check that the graph is well formed, that tensors which passes made are finite, and that recorded bytes are
    right.

    Observer of the pipeline.  A packed weight is counted in its format's parts, a dense one in the linear's own weight,
    and a weight that was merged away counts as 0 bytes.

    Raises:
        VerificationError: names the pass and the parameter.
    """
    try:
        graph.graph.lint()
    except RuntimeError as error:
        raise VerificationError(f"after {name}: the graph is not well formed: {error}") from error
    dense = {site.name: site.weight_name for site in linear_sites(graph)}
    changed = {dense[record.site] for record in ctx.records if not record.format and record.site in dense}
    for key, parameter in graph.named_parameters():
        made = key.rpartition(".")[2] in PARTS or key in changed
        if made and parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
            raise VerificationError(f"after {name}: {key} holds NaN or inf")
    sizes = {key: value.numel() * value.element_size() for key, value in graph.named_parameters()}
    latest = {record.site: record for record in ctx.records}
    for record in latest.values():
        stored = sum(sizes.get(f"{record.site}.{part}", 0) for part in PARTS)
        if not record.format:
            stored += sizes[dense[record.site]] if record.site in dense else 0
        if stored != record.bytes_after:
            raise VerificationError(
                f"after {name}: {record.site} is said to take {record.bytes_after} bytes and takes {stored}"
            )


@dataclass(frozen=True)
class Dump:
    """Observer that writes each stage's printed code to ``<folder>/<index>_<name>.py``.

    Beside the captured graph, ``00_normalise.txt`` lists what each rule of the normalisation did.
    """

    folder: Path

    def __call__(self, index: int, name: str, graph: GraphModule, ctx: Context) -> None:
        """Write the stage's files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{index:02d}_{name}.py"
        path.write_text(graph.print_readable(print_output=False), encoding="utf-8")
        if index == 0:
            (self.folder / "00_normalise.txt").write_text(listing(graph.meta["rules"]), encoding="utf-8")

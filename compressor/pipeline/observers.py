"""Checks between passes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule

from compressor.errors import VerificationError
from compressor.formats.format import PARTS
from compressor.pipeline.context import Context

if TYPE_CHECKING:
    from torch.fx import GraphModule


def verify_stage(index: int, name: str, graph: GraphModule, ctx: Context) -> None:
    """Observer: the graph is well formed, every parameter that a pass made is finite, and bytes are accounted for.

    Raises:
        VerificationError: names the pass and the parameter.
    """
    try:
        graph.graph.lint()
    except RuntimeError as error:
        raise VerificationError(f"after {name}: the graph is not well formed: {error}") from error
    for key, parameter in graph.named_parameters():
        made = key.rpartition(".")[2] in PARTS
        if made and parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
            raise VerificationError(f"after {name}: {key} holds NaN or inf")
    latest = {record.site: record for record in ctx.records}
    for record in latest.values():
        parts = [f"{record.site}.{part}" for part in PARTS]
        stored = sum(p.numel() * p.element_size() for key, p in graph.named_parameters() if key in parts)
        if stored != record.bytes_after:
            raise VerificationError(
                f"after {name}: {record.site} is said to take {record.bytes_after} bytes and takes {stored}"
            )


@dataclass(frozen=True)
class Dump:
    """Observer that writes each stage's printed code as ``<folder>/<index>_<name>.py``."""

    folder: Path

    def __call__(self, index: int, name: str, graph: GraphModule, ctx: Context) -> None:
        """Write one file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{index:02d}_{name}.py"
        path.write_text(graph.print_readable(print_output=False), encoding="utf-8")

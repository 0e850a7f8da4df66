"""Checks between passes."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from compressor.errors import VerificationError
from compressor.formats.format import PARTS
from compressor.pipeline.pipeline import Context


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

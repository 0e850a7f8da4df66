"""Write compressed-tensors checkpoints, of the formats only that vLLM's Marlin kernels multiply without a fallback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from compressor.export.exchange.dense_form import PackedSite
from compressor.export.foreign.compressed_tensors import CompressedTensors


@dataclass(frozen=True)
class Marlin(CompressedTensors):
    """Hold symmetric integers of 4 or 8 bits in groups of 32, 64 or 128 columns, float activations; refuse the rest."""

    title: ClassVar[str] = "marlin"

    def why_not(self, site: PackedSite) -> str:
        """Ask for a format of the kernels, then for what the layout itself asks."""
        fmt = site.packed.format
        if fmt.name not in {f"W{bits}A16_G{size}" for bits in (4, 8) for size in (32, 64, 128)}:
            return "takes W4A16 and W8A16 with groups of 32, 64 or 128"
        return super().why_not(site)

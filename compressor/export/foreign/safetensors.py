"""Write a dense Hugging Face folder: packed weights dequantised in float32, widths and layers as passes left them.

Any program that loads the model loads this; nothing is smaller than the dense model but what has been pruned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from compressor.export.exchange.dense_form import PackedSite
from compressor.export.exchange.export import Export


@dataclass(frozen=True)
class Safetensors(Export):
    """Dequantise everything.  Rounded activations are not part of a dense folder, which the notes say."""

    title = "safetensors"

    def why_not(self, site: PackedSite) -> str:
        """Hold anything."""
        return ""

    def encode(self, site: PackedSite) -> Mapping[str, Tensor]:
        """Encode nothing: no site stays packed."""
        raise AssertionError(site.module)

    def _kept(self, sites: Sequence[PackedSite]) -> list[PackedSite]:
        super()._kept(sites)  # names that match nothing are refused all the same
        return []

    def notes(self, sites: Sequence[PackedSite]) -> list[str]:
        """Name the formats whose activations are not rounded any more."""
        rounded = sorted({site.packed.format.name for site in sites if site.packed.format.activations is not None})
        return [f"activations are floats here: {name} rounds them in the bundle" for name in rounded]

"""Write AWQ checkpoints (AutoAWQ's ``gemm``): 4-bit codes and zero points along the output, interleaved in words.

Layout: :mod:`compressor.capture.checkpoints.awq_words`, whose reader reads the folder again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compressor.capture.checkpoints.awq_words import awq_tensors
from compressor.export.exchange.dense_form import PackedSite
from compressor.export.exchange.export import Export
from compressor.export.exchange.integer_layout import ROUNDED_PRODUCTS, one_format, why_not_integers

_OUTPUTS = 8
"""Codes of a word, which lie along the output."""


@dataclass(frozen=True)
class Awq(Export):
    """Store integers of 4 bits with float activations, in one format; symmetric ones get zero points of 8."""

    title = "awq"
    packages = ("gptqmodel",)

    def why_not(self, site: PackedSite) -> str:
        """Say which part of a format, or of a module, the layout does not have."""
        return why_not_integers(site, (4,), 1, _OUTPUTS)

    def why_not_together(self, sites: Sequence[PackedSite], linears: Sequence[str]) -> str:
        """Ask for one format."""
        return one_format(sites)

    def encode(self, site: PackedSite) -> Mapping[str, Tensor]:
        """Return codes, scales and zero points of a site."""
        found = site.coded()
        return awq_tensors(found.codes, found.scales, found.zero_points(site.packed.format))

    def configuration(self, sites: Sequence[PackedSite], linears: Sequence[str]) -> Mapping[str, Any]:
        """Return ``quantization_config``; modules that stay dense are listed by name."""
        named = {site.module for site in sites}
        return {
            "quantization_config": {
                "quant_method": "awq",
                "version": "gemm",
                "bits": 4,
                "group_size": sites[0].packed.format.group_size or -1,
                "zero_point": True,
                "modules_to_not_convert": [name for name in linears if name not in named] or None,
            }
        }

    def notes(self, sites: Sequence[PackedSite]) -> list[str]:
        """Say how loaders compute."""
        return [ROUNDED_PRODUCTS]

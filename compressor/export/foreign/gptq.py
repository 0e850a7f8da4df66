"""Write GPTQ checkpoints: codes along the input, zero points along the output, in 32-bit words.

Layout: :mod:`compressor.capture.checkpoints.gptq_words`, whose reader reads the folder again.  ``version: 1`` stores
zero points less one, as AutoGPTQ did, and is what most programs read; 2 stores them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from compressor.capture.checkpoints.gptq_words import gptq_tensors
from compressor.export.exchange.dense_form import PackedSite
from compressor.export.exchange.export import Export
from compressor.export.exchange.integer_layout import ROUNDED_PRODUCTS, one_format, why_not_integers

_BITS = (2, 3, 4, 8)
_STEP = 32
"""Inputs and outputs are multiples of this: no word holds codes of two rows."""


@dataclass(frozen=True)
class Gptq(Export):
    """Store integers of 2, 3, 4 or 8 bits with float activations, all linears in one format.

    Attributes:
        version: of the layout, 1 or 2.
    """

    version: Literal[1, 2] = 1

    title = "gptq"
    packages = ("optimum", "gptqmodel")

    def why_not(self, site: PackedSite) -> str:
        """Say which part of a format, or of a module, the layout does not have."""
        return why_not_integers(site, _BITS, _STEP, _STEP)

    def why_not_together(self, sites: Sequence[PackedSite], linears: Sequence[str]) -> str:
        """Ask for one format, and for every linear but the head: loaders know no other exception."""
        named = {site.module for site in sites}
        if left := [name for name in linears if name not in named and name != "lm_head"]:
            return f"packs every linear but lm_head, and {left[0]} is dense"
        return one_format(sites)

    def encode(self, site: PackedSite) -> Mapping[str, Tensor]:
        """Return codes, scales and zero points of a site."""
        fmt, found = site.packed.format, site.coded()
        offset = 2 - self.version
        return gptq_tensors(found.codes, found.scales, found.zero_points(fmt), bits=fmt.bits, offset=offset)

    def configuration(self, sites: Sequence[PackedSite], linears: Sequence[str]) -> Mapping[str, Any]:
        """Return ``quantization_config``."""
        fmt = sites[0].packed.format
        return {
            "quantization_config": {
                "quant_method": "gptq",
                "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
                "bits": fmt.bits,
                "group_size": fmt.group_size or -1,
                "desc_act": False,
                "sym": fmt.symmetric,
                "lm_head": "lm_head" in {site.module for site in sites},
                "pack_dtype": "int32",
            }
        }

    def notes(self, sites: Sequence[PackedSite]) -> list[str]:
        """Say how loaders compute."""
        return [ROUNDED_PRODUCTS]

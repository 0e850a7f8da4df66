"""Write MLX checkpoints for Apple's machines: what mlx-lm loads.

Layout: :mod:`compressor.capture.checkpoints.mlx_words`, whose reader reads the folder again.  A larger group, or a
whole row, is several groups with the same scale; a zero point is a bias, in float32 where float16 would round it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compressor.capture.checkpoints.mlx_words import BITS, GROUP_SIZES, mlx_tensors
from compressor.export.exchange.dense_form import PackedSite
from compressor.export.exchange.export import Export, Loading
from compressor.export.exchange.integer_layout import why_not_codes, why_not_linear


@dataclass(frozen=True)
class Mlx(Export):
    """Store integers of 2 to 6 or 8 bits with float activations, several formats in one model, tables too."""

    title = "mlx"
    client = "compressor.export.exchange.mlx_client"
    packages = ("mlx", "mlx-lm")

    def why_not(self, site: PackedSite) -> str:
        """Say which part of a format, or of a module, the layout does not have."""
        if reason := "" if site.reads_table else why_not_linear(site):
            return reason
        if reason := why_not_codes(site, BITS, GROUP_SIZES[0], 1):
            return reason
        if site.packed.format.scale_type != "F16":
            return f"has scales that are floats, and the format has {site.packed.format.scale_type}"
        if not _group_size(site):
            return f"has groups of {GROUP_SIZES[0]}, 64 or 128, and the format has {site.packed.format.group_size}"
        return ""

    def encode(self, site: PackedSite) -> Mapping[str, Tensor]:
        """Return codes, scales and biases of a site."""
        fmt, found = site.packed.format, site.coded()
        repeats = site.packed.shape[1] // _group_size(site) // found.scales.shape[1]
        scales, zeros = (each.repeat_interleave(repeats, 1) for each in (found.scales, found.zero_points(fmt)))
        return mlx_tensors(found.codes, scales, zeros, fmt.bits)

    def configuration(self, sites: Sequence[PackedSite], linears: Sequence[str]) -> Mapping[str, Any]:
        """Return ``quantization``: the grid that most weights have, and those of others by name."""
        grids = {site.module: (site.packed.format.bits, _group_size(site)) for site in sites}
        most, _ = Counter(grids.values()).most_common(1)[0]
        others = {name: _stated(grid) for name, grid in grids.items() if grid != most}
        return {"quantization": {**_stated(most), "mode": "affine", **others}}

    def loading(self, sites: Sequence[PackedSite]) -> Loading:
        """Compute in float16, the type of scales, which activations get from them."""
        return Loading("float16")

    def notes(self, sites: Sequence[PackedSite]) -> list[str]:
        """Say how zero points are stored, and what was not run."""
        found = ["MLX's kernels for Apple's GPUs were not run here: MLX on this processor at most"]
        if any(not site.packed.format.symmetric for site in sites):
            found.append("zero points: scales and biases are float32 where a bias is not a float16")
        return found


def _group_size(site: PackedSite) -> int:
    """Return the largest group of the layout that divides the format's; 0 if there is none."""
    span = site.packed.format.group_size or site.packed.shape[1]
    return next((size for size in reversed(GROUP_SIZES) if not span % size), 0)


def _stated(grid: tuple[int, int]) -> dict[str, Any]:
    return {"group_size": grid[1], "bits": grid[0]}

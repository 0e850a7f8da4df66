"""Keep the codes of a quantised checkpoint: weights that lie on a grid are stored with the grid's own codes and scales.

Checkpoints of other tools (GPTQ, AWQ, compressed-tensors, GGUF, MXFP4, ONNX) are read as dense values.  Where these are
codes times scales of one of the formats here, the codes are found again, and the bundle computes with exactly the
checkpoint's weights: no calibration, no second rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight
from compressor.graph.sites import Site
from compressor.host.tensor_files import release
from compressor.numerics.exact_grid import has_exact_grids, pack_exact
from compressor.numerics.nearest import rtn_work, rtn_working_bytes, weight_error
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan, plan_sites
from compressor.pipeline.sites import choose_sites, compress_site, error_context, summarise_formats

_NAMED = 5  # linears that a message names


@dataclass(frozen=True)
class KeepCodes(Pass):
    """Store weights that already are codes times scales, as a quantised checkpoint's are, with exactly these values.

    Attributes:
        schemes: names of the formats to try on each linear, in order; the first whose grid holds all its weights is
            taken. ``W4A8_G128`` has the grid of ``W4A16_G128`` and rounds the activations as well.
        targets: class names, module names or ``re:`` patterns of the linears to store.
        ignore: patterns of linears to leave dense, such as those that the checkpoint does not quantise.
    """

    schemes: tuple[str, ...] = (
        "W4A16_G128",
        "W4A16_G64",
        "W4A16_G32",
        "W4A16_ASYM_G128",
        "W4A16_ASYM_G64",
        "W4A16_ASYM_G32",
        "MXFP4",
        "W8A16",
        "W8A16_G128",
        "W8A16_G32",
    )
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for fmt in self._formats():
            if not has_exact_grids(fmt) or fmt.has_input_scale:
                raise UsageError(
                    f"keep_codes: codes in {fmt.name} cannot be found again; give formats of integers or small floats "
                    "with one float16 or E8M0 scale a channel, group or block"
                )

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace every matched linear; the record's error is that of the weight, which is 0.

        Raises:
            UsageError: weights of some linears do not lie on any of the grids; all are named.
        """
        sites = choose_sites(graph, "keep_codes", None, self.targets, self.ignore)
        chosen, dense = {}, []
        with ctx.reporter.task("keep_codes", len(sites)) as task:
            for site in sites:
                stored = graph.get_parameter(site.weight_name).detach()
                weight = stored.float()
                packed = self._find(site, weight)
                if packed is None:
                    dense.append(site.name)
                else:
                    chosen[site.name] = packed.format
                    compress_site(graph, ctx, site, packed, "keep_codes", error=weight_error(weight, packed))
                release([stored])
                task.advance()
        if dense:
            named = ", ".join(dense[:_NAMED]) + (f" and {len(dense) - _NAMED} more" if len(dense) > _NAMED else "")
            raise UsageError(
                f"keep_codes: the weights of {len(dense)} of {len(sites)} linears are not codes times scales of "
                f"{', '.join(self.schemes)}: {named}; give the checkpoint's own scheme in `schemes`, or name them in "
                "`ignore` and leave them to another pass"
            )
        ctx.notes.append(summarise_formats("keep_codes", sites, chosen))
        graph.recompile()
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan each linear in the largest of the formats: which one holds its weights is known once they are read."""
        sites = choose_sites(graph, "keep_codes", None, self.targets, self.ignore)
        largest = max(self._formats(), key=lambda fmt: fmt.packed_bytes(4096, 4096))
        if len(self.schemes) > 1:
            ctx.notes.append(f"keep_codes: formats follow from the weights; planned for the largest, {largest.name}")
        formats = {site.name: largest for site in sites}
        return plan_sites(graph, formats, self.ignore, rtn_work, rtn_working_bytes)

    def _formats(self) -> Iterator[Format]:
        return map(Format.parse, self.schemes)

    def _find(self, site: Site, weight: Tensor) -> PackedWeight | None:
        """Return the weight in the first format whose grid holds it."""
        with error_context(site):
            tried = (pack_exact(weight, fmt) for fmt in self._formats())
            return next((packed for packed in tried if packed is not None), None)

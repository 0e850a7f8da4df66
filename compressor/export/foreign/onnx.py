"""Write an ONNX model for ONNX Runtime and programs of its family: ``model.onnx``, and the tokenizer's files.

format                                             operators
W2 to W8 with float activations                    MatMulNBits of 2, 4 or 8 bits, GatherBlockQuantized for tables
W5 to W8, one scale a row, A2 to A8 with _STATIC   QuantizeLinear, DequantizeLinear (QDQ) around MatMul and Conv
the same, a scale for each token                   MatMulInteger
E4M3, E5M2, one scale a row, float activations     DequantizeLinear of float8, then MatMul or Conv
other scales with rounded activations              the rounding written out, and MatMulNBits
dense weights                                      MatMul, Conv, Gather

A decoder takes keys and values of earlier tokens and returns them with those of the new ones.  ``operators: standard``
uses none of ONNX Runtime's own operators: DequantizeLinear takes the place of MatMulNBits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.export.exchange.dense_form import PackedSite, base_name, packed_weight, refuse_packed_caches
from compressor.export.exchange.export import Export, Form, StoredSize, Written, refuse_sites
from compressor.export.onnx_out.codes import stored_bits, why_not_blocks
from compressor.export.onnx_out.model import OPSETS, plan_model, write_model
from compressor.export.onnx_out.stored import FILE_NAME
from compressor.graph.provenance import Stored, owner


@dataclass(frozen=True)
class Onnx(Export):
    """Store integers of 2 to 8 bits and floats of 8, of decoders, encoders and networks that classify images.

    Attributes:
        opset: version of the standard's operators, 18 to 23.
        operators: ``microsoft`` uses ONNX Runtime's own where they hold a weight in fewer bytes, ``standard`` none.
        accuracy_level: of MatMulNBits; 4 lets ONNX Runtime round activations to 8 bits, which is faster; 0 does not.
        external: weights lie in model.onnx.data; by default if they take more than 1 GiB.
    """

    opset: int = 21
    operators: Literal["microsoft", "standard"] = "microsoft"
    accuracy_level: Literal[0, 1, 2, 3, 4] = 0
    external: bool | None = None

    title = "onnx"
    client = "compressor.export.exchange.onnx_client"
    packages = ("onnxruntime",)
    kinds = ("decoder", "encoder", "module")

    def sites(self, graph: GraphModule) -> list[PackedSite]:
        """List the packed weights of all linears, convolutions and tables, one for each that is stored."""
        found: dict[str, PackedSite] = {}
        for node in graph.graph.nodes:
            name = getattr(node.target, "name", str)()
            if name not in (
                "compressor::packed_linear",
                "compressor::packed_depthwise",
                "compressor::packed_embedding",
            ):
                continue
            base, table = base_name(node), name.endswith("embedding")
            if base not in found or table:
                kind = "Embedding" if table else owner(node)[1]
                packed = packed_weight(graph, node)
                found[base] = PackedSite(f"{base}.weight", packed, kind, str(node.args[0]), Stored(()), table)
        return list(found.values())

    def why_not(self, site: PackedSite) -> str:
        """Say which part of a format the operators do not have."""
        return why_not_blocks(site)

    def encode(self, site: PackedSite) -> Mapping[str, Tensor]:
        """Return nothing: an operator lays its weight out when the model is written, and holds the very values."""
        return {}

    @property
    def rounds(self) -> bool:
        """Tell whether the client rounds activations that the bundle does not."""
        return self.accuracy_level == 4

    def plan(self, graph: GraphModule, trust_remote_code: bool = False) -> OnnxForm:
        """Check that a compressed graph can be written; weights are not read.

        Raises:
            UsageError: a site, an operator or the model cannot be held; it is named.
        """
        if self.opset not in OPSETS:
            raise UsageError(f"opset: {self.opset}; there are {OPSETS.start} to {OPSETS.stop - 1}")
        refuse_packed_caches(graph.meta["model"].name, graph.meta["model"].cache_format)
        kept = self._kept(self.sites(graph))
        refuse_sites(self.title, [(site, self.why_not(site)) for site in kept])
        form = OnnxForm(self, tuple(site.parameter for site in kept))
        plan_model(graph, form.settings(graph))
        return form

    def notes(self, sites: Sequence[PackedSite]) -> list[str]:
        """Say where ONNX Runtime computes otherwise, or a weight takes more bits than its codes."""
        formats = {site.packed.format for site in sites}
        found = [
            f"{fmt.name}: codes are held in {stored_bits(fmt)} bits; the numbers are the same"
            for fmt in sorted(formats, key=lambda fmt: fmt.name)
            if stored_bits(fmt) > fmt.bits
        ]
        if any(fmt.activations is not None and fmt.activations.granularity != "tensor" for fmt in formats):
            found.append(
                "a scale for each token takes operators of its own, and a convolution reads slices of its images; "
                "formats with _STATIC have stored scales, and Conv"
            )
        if self.rounds:
            found.append("accuracy_level 4: ONNX Runtime rounds activations to 8 bits where the bundle does not")
        return found


@dataclass(frozen=True)
class OnnxForm(Form):
    """Write a graph as ONNX."""

    export: Onnx
    packed: tuple[str, ...]

    @property
    def words(self) -> str:
        """Name the file, and the operators in it."""
        return f"{FILE_NAME} of opset {self.export.opset}, operators: {self.export.operators}"

    def settings(self, graph: GraphModule) -> dict[str, Any]:
        """Return the arguments of the emitter."""
        dense = {site.module for site in self.export.sites(graph) if site.parameter not in self.packed}
        return {
            "opset": self.export.opset,
            "standard": self.export.operators == "standard",
            "accuracy": self.export.accuracy_level,
            "dense": frozenset(dense),
        }

    def write(self, folder: Path, graph: GraphModule) -> Written:
        """Write a compressed graph into an empty folder."""
        sizes = write_model(folder, graph, self.settings(graph), self.export.external)
        return Written({name: StoredSize(*size) for name, size in sizes.items()})

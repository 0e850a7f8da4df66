"""Write compressed-tensors checkpoints: what transformers, vLLM and SGLang load.

W2 to W8 with float activations, and W2 to W7 with rounded ones   pack-quantized
W8A8                                                              int-quantized
FP8_E4M3, MXFP8_E4M3                                              float-quantized, mxfp8-quantized
NVFP4, MXFP4                                                      nvfp4-pack-quantized, mxfp4-pack-quantized

Layouts: :mod:`compressor.capture.checkpoints.compressed_tensors`, whose readers read the folder again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.capture.checkpoints.compressed_tensors.packed_integers import packed_tensors
from compressor.capture.checkpoints.compressed_tensors.packed_small_floats import (
    mxfp4_tensors,
    nvfp4_tensors,
    nvfp4_values,
)
from compressor.capture.checkpoints.compressed_tensors.plain_codes import float_tensors, integer_tensors
from compressor.export.exchange.coded import is_zeroed, why_not_coded
from compressor.export.exchange.dense_form import PackedSite
from compressor.export.exchange.export import Export, Loading
from compressor.export.exchange.integer_layout import why_not_linear
from compressor.formats.activations import Activations
from compressor.formats.format import Format
from compressor.graph.sites import EXPERT

_FP4 = {"E8M0": "mxfp4-pack-quantized", "E4M3": "nvfp4-pack-quantized"}
_SCALE_TYPES = {"E8M0": "torch.uint8", "E4M3": "torch.float8_e4m3fn"}
_BFLOAT16 = (*_FP4.values(), "mxfp8-quantized")
"""Layouts that the loader unpacks to bfloat16, whatever type the model has."""
_EXPERTS = r"re:.*\.experts\.\d+\..*"
"""Target of all experts: the loader looks for an expression with this word."""
_STRATEGIES = {"token": "token", "group": "group", "tensor": "tensor"}


@dataclass(frozen=True)
class CompressedTensors(Export):
    """Store integers in words or bytes, and 8- or 4-bit floats; several schemes by the names of modules."""

    title = "compressed-tensors"
    packages = ("compressed-tensors",)

    def why_not(self, site: PackedSite) -> str:
        """Say which part of a format, or of a module, the layouts do not have."""
        fmt = site.packed.format
        if reason := why_not_linear(site, experts=True):
            return reason
        if reason := why_not_coded(fmt):
            return f"has no such layout: the format {reason}"
        if not _layout(fmt):
            return f"has no layout for {fmt.weights.name} with {fmt.scale_type} scales"
        if fmt.strategy == "group" and site.packed.shape[1] % fmt.group_size:
            return f"has whole groups, and {site.packed.shape[1]} inputs are not a multiple of {fmt.group_size}"
        if fmt.strategy == "block" and _layout(fmt) == "pack-quantized":
            return "has no blocks of rows for packed integers"
        act = fmt.activations
        if act is not None and act.bits not in (4, 8):
            return f"rounds activations to 4 or 8 bits, not to {act.bits}"
        if act is not None and act.element is not None and act.element.name != "E4M3":
            return f"has no activations {act.element.name}"
        if act is not None and act.scale_type != "F32":
            return f"scales activations of {act.numbers} by another rule: take float activations"
        if site.module_class == EXPERT and not _loads_experts(fmt):
            return "has a loader that reads experts as packed symmetric integers, or as FP8 with scales of rows, alone"
        return ""

    def why_not_together(self, sites: Sequence[PackedSite], linears: Sequence[str]) -> str:
        """Ask for one format of all experts: the loader takes one scheme for them."""
        found = sorted({site.packed.format.of_kept.name for site in sites if site.module_class == EXPERT})
        return f"has one scheme for all experts, and theirs are {' and '.join(found)}" if len(found) > 1 else ""

    def encode(self, site: PackedSite) -> Mapping[str, Tensor]:
        """Return codes, scales and zero points of a site."""
        fmt, found = site.packed.format, site.coded()
        layout, scales, zeros = _layout(fmt), found.scales, found.zeros
        if layout == "nvfp4-pack-quantized":
            assert found.tensor_scale is not None
            return nvfp4_tensors(found.codes, scales, found.tensor_scale)
        if layout == "mxfp4-pack-quantized":
            return mxfp4_tensors(found.codes, scales)
        if fmt.strategy == "tensor":
            scales, zeros = scales[:1, 0], None if zeros is None else zeros[:1, 0]
        elif fmt.strategy == "block":
            scales = scales[:: fmt.group_size]
            zeros = None if zeros is None else zeros[:: fmt.group_size]
        if layout == "pack-quantized":
            parts = packed_tensors(found.codes, scales, zeros, bits=fmt.bits)
        elif layout == "mxfp8-quantized":
            parts = float_tensors(found.codes, scales.view(torch.uint8))
        elif layout == "float-quantized":
            parts = float_tensors(found.codes, scales)
        else:
            parts = integer_tensors(found.codes, scales, zeros)
        if fmt.has_input_scale:
            parts["input_scale"] = site.packed.parts["input_scale"]
        return parts

    def value(self, parts: Mapping[str, Tensor]) -> Tensor | None:
        """Return the values of NVFP4, whose scale of the tensor is stored as its inverse, rounded once more."""
        if "weight_global_scale" not in parts:
            return None
        packed, scale, divisor = (parts[f"weight_{part}"] for part in ("packed", "scale", "global_scale"))
        return nvfp4_values(packed, scale, divisor, group_size=16)

    def loading(self, sites: Sequence[PackedSite]) -> Loading:
        """Ask for bfloat16 where there are floats that the loader unpacks to that type alone.

        Packed zero points and experts are read at once or not at all (transformers 5.24 with compressed-tensors 0.20).
        """
        formats = [site.packed.format for site in sites]
        floats = any(_layout(fmt) in _BFLOAT16 for fmt in formats)
        zeros = any(not fmt.symmetric and _layout(fmt) == "pack-quantized" for fmt in formats)
        experts = any(site.module_class == EXPERT for site in sites)
        return Loading("bfloat16" if floats else "float32", zeros or experts)

    def configuration(self, sites: Sequence[PackedSite], linears: Sequence[str]) -> Mapping[str, Any]:
        """Return ``quantization_config``: a group for each scheme, with the loader's own names of modules."""
        groups: dict[Format, list[str]] = {}
        for site in sites:
            targets = groups.setdefault(site.packed.format.of_kept, [])
            if (target := _EXPERTS if site.module_class == EXPERT else site.module) not in targets:
                targets.append(target)
        named = {site.module for site in sites}
        whole = len(groups) == 1
        config = {
            f"group_{number}": {
                "targets": ["Linear"] if whole else modules,
                "weights": _weights(fmt),
                "input_activations": None if fmt.activations is None else _activations(fmt.activations),
                "output_activations": None,
                "format": _layout(fmt),
            }
            for number, (fmt, modules) in enumerate(groups.items())
        }
        layouts = {_layout(fmt) for fmt in groups}
        dtype = self.loading(sites).dtype
        stated = {"dtype": dtype} if dtype == "bfloat16" else {}
        return stated | {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
                "quantization_status": "compressed",
                "config_groups": config,
                "ignore": [name for name in linears if name not in named],
                "kv_cache_scheme": None,
                "global_compression_ratio": None,
            }
        }

    def notes(self, sites: Sequence[PackedSite]) -> list[str]:
        """Say where a loader computes otherwise, or asks for more than is known here."""
        found, formats = [], {site.packed.format for site in sites}
        if any(fmt.bits in (3, 5, 6, 7) and _layout(fmt) == "pack-quantized" for fmt in formats):
            found.append("codes of 3, 5, 6 or 7 bits have no gaps: read by compressed-tensors 0.17 and later only")
        if any(fmt.activations is not None and fmt.activations.element is None for fmt in formats):
            found.append("integer activations: the loader's scale is the largest value / 127.5, the bundle's is / 127")
        if any(is_zeroed(fmt) for fmt in formats):
            found.append("weights that are left out are stored as codes of zero: the folder is dense")
        if any(_layout(fmt) == "nvfp4-pack-quantized" for fmt in formats):
            found.append("NVFP4: the tensor's scale is stored as its inverse, which rounds it once, by 2^-24 at most")
        loading = self.loading(sites)
        if loading.dequantize:
            found.append(
                "zero points and experts: transformers 5.24 loads them with CompressedTensorsConfig(dequantize=True) "
                "only, and rounds weights to float16"
            )
        if loading.dtype == "bfloat16":
            found.append("config.json says bfloat16, the only type that the loader unpacks NVFP4, MXFP4 and MXFP8 to")
        merged: dict[str, set[Format]] = {}
        for site in sites:
            merged.setdefault(site.input, set()).add(site.packed.format)
        if uneven := [names for names in merged.values() if len(names) > 1]:
            names = " and ".join(sorted(fmt.name for fmt in uneven[0]))
            found.append(f"linears of one input have {names}: vLLM merges them, and asks for one scheme")
        return found


def _loads_experts(fmt: Format) -> bool:
    """Tell whether transformers 5.24 reads experts in a format (integrations/compressed_tensors.py)."""
    if _layout(fmt) == "pack-quantized":
        return fmt.symmetric
    return _layout(fmt) == "float-quantized" and fmt.strategy in ("channel", "tensor")


def _layout(fmt: Format) -> str:
    """Return the name of a format's layout; empty if there is none."""
    if fmt.element is not None:
        if fmt.element.name == "E2M1":
            return _FP4.get(fmt.scale_type, "")
        return (
            {"F16": "float-quantized", "E8M0": "mxfp8-quantized"}[fmt.scale_type] if fmt.element.name == "E4M3" else ""
        )
    act = fmt.activations
    return "int-quantized" if fmt.bits == 8 and act is not None and act.element is None else "pack-quantized"


def _weights(fmt: Format) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_bits": fmt.bits,
        "type": "int" if fmt.element is None else "float",
        "symmetric": fmt.symmetric,
        "strategy": "tensor_group" if fmt.scale_type == "E4M3" else fmt.strategy,
        "dynamic": False,
    }
    if fmt.strategy == "group":
        found["group_size"] = fmt.group_size
    if fmt.strategy == "block":
        found["block_structure"] = [fmt.group_size, fmt.group_size]
    if fmt.scale_type in _SCALE_TYPES:
        found |= {"scale_dtype": _SCALE_TYPES[fmt.scale_type], "zp_dtype": _SCALE_TYPES[fmt.scale_type]}
    return found


def _activations(act: Activations) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_bits": act.bits,
        "type": "int" if act.element is None else "float",
        "symmetric": True,
        "strategy": _STRATEGIES[act.granularity],
        "dynamic": act.granularity != "tensor",
    }
    if act.granularity == "group":
        found["group_size"] = act.group_size
    return found

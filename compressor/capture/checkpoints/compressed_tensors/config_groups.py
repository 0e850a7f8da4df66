"""compressed-tensors checkpoints (llm-compressor): find the scheme of each module, and its layout.

``config_groups`` has groups, each with ``targets`` (names of modules, ``re:`` patterns or classes such as ``Linear``)
and the arguments of its ``weights``; ``format`` stands there or at the top.  A module that stores a scale is quantised.

    pack-quantized                 weight_packed int32 [out, ceil(in * bits / 32)], weight_scale, weight_shape [2],
                                   weight_zero_point int32 [ceil(out * bits / 32), groups], weight_g_idx (old)
    int-, float-, naive-quantized  weight int8 or float8 [out, in], weight_scale, weight_zero_point
    mxfp8-quantized                weight float8 [out, in], weight_scale uint8 [out, in / 32], E8M0
    nvfp4-pack-quantized           weight_packed uint8 [out, in / 2], weight_scale float8_e4m3fn [out, in / 16],
                                   weight_global_scale float32 [1], which divides
    mxfp4-pack-quantized           weight_packed uint8 [out, in / 2], weight_scale uint8 [out, in / 32], E8M0

Source: compressed-tensors 0.20, ``compressors/*/base.py``.  Only weights are read: activations are not rounded, and
their scales are left aside, as are those of keys and values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from compressor.capture.checkpoints.compressed_tensors.packed_integers import packed_weight
from compressor.capture.checkpoints.compressed_tensors.packed_small_floats import packed_float_weight
from compressor.capture.checkpoints.compressed_tensors.plain_codes import plain_weight
from compressor.capture.checkpoints.compressed_tensors.scheme import Scheme
from compressor.capture.checkpoints.dense_weights import DenseWeight, Stored
from compressor.capture.checkpoints.fp8_blocks import FLOAT8
from compressor.capture.checkpoints.options import Options

_LAYOUTS = {
    "pack-quantized": packed_weight,
    "int-quantized": plain_weight,
    "float-quantized": plain_weight,
    "naive-quantized": plain_weight,
    "mxfp8-quantized": plain_weight,
    "nvfp4-pack-quantized": packed_float_weight,
    "mxfp4-pack-quantized": packed_float_weight,
}


@dataclass(frozen=True)
class _Group:
    """One of ``config_groups``."""

    targets: tuple[str, ...]
    scheme: Scheme


def compressed_tensors_weights(stored: Stored, config: Mapping[str, Any]) -> dict[str, DenseWeight]:
    """Return the dense weights of a compressed-tensors checkpoint by name.

    Raises:
        UsageError: an option is not covered, or contradicts the tensors.
    """
    options = Options("compressed-tensors", config, stored.headers.place)
    if options.given("transform_config"):
        options.refuse("transform_config", "asks for rotations while the model runs")
    sparsity = config.get("sparsity_config") or {}
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        options.refuse("sparsity_config", f"has the format {sparsity.get('format')!r:.40}")
    groups = _groups(options)
    ignored = config.get("ignore") or []
    if not isinstance(ignored, list) or not all(isinstance(entry, str) for entry in ignored):
        options.refuse("ignore", "is not a list of names")
    weights = {}
    for module in _quantized_modules(stored):
        tensor = "weight_packed" if f"{module}.weight_packed" in stored.names else "weight"
        if any(_matches(entry, module, options) for entry in ignored):
            stored.refuse(f"{module}.{tensor}", "is quantised, and `ignore` names its module")
        scheme = _scheme(groups, module, options)
        if scheme is None:
            stored.refuse(f"{module}.{tensor}", "is quantised, and no group of `config_groups` targets its module")
        weights[f"{module}.weight"] = _LAYOUTS[scheme.format](stored, module, scheme)
    return weights


def _quantized_modules(stored: Stored) -> list[str]:
    """Return the modules that store codes or a scale of their weight."""
    modules = {*stored.modules("weight_packed"), *stored.modules("weight_scale")}
    for module in stored.modules("weight"):
        if stored.headers.read(f"{module}.weight").dtype in (torch.int8, *FLOAT8):
            modules.add(module)
    return sorted(modules)


def _groups(options: Options) -> list[_Group]:
    given = options.config.get("config_groups")
    if not isinstance(given, dict) or not given:
        options.refuse("config_groups", f"is {given!r:.40}; an object of groups is meant")
    groups = []
    for name, group in given.items():
        if not isinstance(group, dict):
            options.refuse(f"config_groups.{name}", "is the name of a preset; its arguments must be written out")
        targets, weights = group.get("targets"), group.get("weights")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            options.refuse(f"config_groups.{name}.targets", f"is {targets!r:.40}; a list of names is meant")
        if weights is None:
            continue  # activations only
        if not isinstance(weights, dict):
            options.refuse(f"config_groups.{name}.weights", f"is {weights!r:.40}; an object is meant")
        place = Options(f"compressed-tensors: config_groups.{name}", weights, options.place)
        layout = group.get("format") or options.config.get("format")
        if not isinstance(layout, str) or layout not in _LAYOUTS:
            place.refuse("format", f"is {layout!r:.40}; known are {', '.join(_LAYOUTS)}")
        groups.append(_Group(tuple(targets), Scheme.read(place, layout)))
    return groups


def _scheme(groups: list[_Group], module: str, options: Options) -> Scheme | None:
    """Return a module's scheme: of the group that names it, else of the one that targets linears, else of any class."""
    named = [g.scheme for g in groups if any(_matches(target, module, options) for target in g.targets)]
    linear = [g.scheme for g in groups if "Linear" in g.targets]
    classes = [g.scheme for g in groups if any(re.fullmatch(r"[A-Z]\w*", target) for target in g.targets)]
    return next(iter(named + linear + classes), None)


def _matches(target: str, module: str, options: Options) -> bool:
    """Return whether a target is a module's name or a pattern (``re:``) that its name begins with."""
    if not target.startswith("re:"):
        return target == module
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error as error:
        options.refuse(target, f"is not a regular expression ({error})")

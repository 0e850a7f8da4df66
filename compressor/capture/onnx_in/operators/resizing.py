"""Resize, and sampling at computed places."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compressor.capture.onnx_in.operators.table import operator
from compressor.capture.onnx_in.values import Call, constant, refuse


@operator("Resize")
def resize(call: Call) -> Tensor:
    """Resize dimension by dimension; by PyTorch's own operator where that computes the same."""
    x = call.tensor(0)
    axes = [axis % x.dim() for axis in call.get("axes", list(range(x.dim())))]
    sizes, scales = _goal(call, x, axes)
    known = _by_torch(call, x, axes, sizes, scales)
    if known is not None:
        return known
    if not all(isinstance(size, int) for size in [*sizes, *(x.shape[axis] for axis in axes)]):
        raise refuse(f"it resizes ({_manner(call)}) a size that varies")
    region = call.numbers(1, "the region") if call.has(1) else []
    outside: Tensor | None = None
    value = call.get("extrapolation_value", 0.0)
    for i, axis in enumerate(axes):
        ends = (region[i], region[i + len(axes)]) if len(region) == 2 * len(axes) else (0.0, 1.0)
        places = _places(call, int(x.shape[axis]), int(sizes[i]), float(scales[i]), ends)
        if call.get("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
            out = constant([p < 0 or p > x.shape[axis] - 1 for p in places], torch.bool)
            shape = [1] * x.dim()
            shape[axis] = -1
            outside = out.reshape(shape) if outside is None else outside | out.reshape(shape)
        elif sizes[i] == x.shape[axis] and all(p == n for n, p in enumerate(places)):
            continue
        x = _along(call, x, axis, places, float(scales[i]))
    return x if outside is None else torch.where(outside, torch.full_like(x, value), x)


def _manner(call: Call) -> str:
    return f"{call.get('mode', 'nearest')}, {call.get('coordinate_transformation_mode', 'half_pixel')}"


def _goal(call: Call, x: Tensor, axes: list[int]) -> tuple[list[Any], list[Any]]:
    """Return sizes and scales of the axes; each follows from the other."""
    if call.has(2) and len(scales := call.numbers(2, "the scales")):
        return [_scaled(x.shape[axis], scale) for axis, scale in zip(axes, scales, strict=True)], scales
    sizes = call.numbers(3, "the sizes")
    policy = call.get("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        if not all(isinstance(n, int) for n in [*sizes, *(x.shape[axis] for axis in axes)]):
            raise refuse("it keeps the ratio of sizes that vary")
        ratios = [size / x.shape[axis] for size, axis in zip(sizes, axes, strict=True)]
        ratio = min(ratios) if policy == "not_larger" else max(ratios)
        sizes = [math.floor(x.shape[axis] * ratio + 0.5) for axis in axes]
        return sizes, [ratio] * len(axes)
    return sizes, [size / x.shape[axis] for size, axis in zip(sizes, axes, strict=True)]


def _scaled(size: Any, scale: float) -> Any:
    if isinstance(size, int):
        return math.floor(size * scale)
    if float(scale).is_integer():
        return size * int(scale)
    raise refuse(f"it resizes a size that varies by {scale}, no whole number")


def _by_torch(call: Call, x: Tensor, axes: list[int], sizes: list[Any], scales: list[Any]) -> Tensor | None:
    """Return PyTorch's interpolation, where its definition is the node's; None elsewhere."""
    goal: list[Any] = list(x.shape)
    for axis, size in zip(axes, sizes, strict=True):
        goal[axis] = size
    by = dict(zip(axes, scales, strict=True))
    spatial = x.dim() - 2
    if spatial < 1 or any(by.get(axis, 1) != 1 for axis in (0, 1)) or not x.is_floating_point():
        return None
    mode, how = call.get("mode", "nearest"), call.get("coordinate_transformation_mode", "half_pixel")
    factors = [by.get(axis, 1.0) for axis in range(2, x.dim())]
    whole = all(isinstance(f, int | float) and float(f).is_integer() and f >= 1 for f in factors)
    if mode == "nearest" and whole:
        # Copies of each element: asymmetric with floor, or half pixels with either rounding.
        rounding = call.get("nearest_mode", "round_prefer_floor")
        if (how, rounding) == ("asymmetric", "floor") or (how == "half_pixel" and rounding.startswith("round")):
            return F.interpolate(x, size=goal[2:], mode="nearest")
        return None
    if mode == "linear" and not call.get("antialias", 0) and not call.get("exclude_outside", 0) and spatial <= 3:
        name = ("linear", "bilinear", "trilinear")[spatial - 1]
        exact = (
            all(
                isinstance(n, int) and isinstance(g, int) and float(f) * n == g
                for n, g, f in zip(x.shape[2:], goal[2:], factors, strict=True)
            )
            or whole
        )
        if exact and how == "half_pixel":
            return F.interpolate(x, size=goal[2:], mode=name, align_corners=False)
        if exact and how == "align_corners":
            return F.interpolate(x, size=goal[2:], mode=name, align_corners=True)
    return None


def _places(call: Call, size: int, wanted: int, scale: float, region: tuple[float, float]) -> list[float]:
    """Return where each output element lies in the input."""
    how = call.get("coordinate_transformation_mode", "half_pixel")
    if how == "asymmetric":
        return [i / scale for i in range(wanted)]
    if how == "half_pixel":
        return [(i + 0.5) / scale - 0.5 for i in range(wanted)]
    if how == "pytorch_half_pixel":
        return [(i + 0.5) / scale - 0.5 if wanted > 1 else 0.0 for i in range(wanted)]
    if how == "align_corners":
        return [i * (size - 1) / (size * scale - 1) if wanted > 1 else 0.0 for i in range(wanted)]
    if how == "half_pixel_symmetric":
        adjusted = wanted / (size * scale)
        offset = size / 2 * (1 - adjusted)
        return [offset + (i + 0.5) / scale - 0.5 for i in range(wanted)]
    if how == "tf_crop_and_resize":
        start, end = region
        if wanted == 1:
            return [0.5 * (start + end) * (size - 1)]
        return [start * (size - 1) + i * (end - start) * (size - 1) / (wanted - 1) for i in range(wanted)]
    raise refuse(f"coordinate_transformation_mode {how!r} is not read")


def _along(call: Call, x: Tensor, axis: int, places: list[float], scale: float) -> Tensor:
    """Resize one dimension: by an index, or by a matrix of weights."""
    size, mode = int(x.shape[axis]), call.get("mode", "nearest")
    if mode == "nearest":
        rounding = call.get("nearest_mode", "round_prefer_floor")
        rules = {
            "round_prefer_floor": lambda p: math.ceil(p - 0.5),
            "round_prefer_ceil": lambda p: math.floor(p + 0.5),
            "floor": math.floor,
            "ceil": math.ceil,
        }
        index = [min(max(rules[rounding](p), 0), size - 1) for p in places]
        return x.index_select(axis, constant(index, torch.int64))
    if mode not in ("linear", "cubic"):
        raise refuse(f"mode {mode!r} is not read")
    matrix = [[0.0] * size for _ in places]
    spread = max(1.0, 1.0 / scale) if call.get("antialias", 0) else 1.0
    reach = (1 if mode == "linear" else 2) * spread
    for row, place in enumerate(places):
        near = range(math.floor(place - reach) + 1, math.ceil(place + reach)) or range(round(place), round(place) + 1)
        weights = {j: _weight(call, mode, (j - place) / spread) for j in near}
        if call.get("exclude_outside", 0):
            weights = {j: w for j, w in weights.items() if 0 <= j < size}
        total = sum(weights.values())
        for j, weight in weights.items():
            matrix[row][min(max(j, 0), size - 1)] += weight / total
    moved = torch.matmul(x.movedim(axis, -1), constant(matrix, x.dtype).t())
    return moved.movedim(-1, axis)


def _weight(call: Call, mode: str, distance: float) -> float:
    d = abs(distance)
    if mode == "linear":
        return max(0.0, 1 - d)
    a = call.get("cubic_coeff_a", -0.75)
    if d <= 1:
        return float(((a + 2) * d - (a + 3)) * d * d + 1)
    return float(((a * d - 5 * a) * d + 8 * a) * d - 4 * a) if d < 2 else 0.0


@operator("Upsample")
def upsample(call: Call) -> Tensor:
    """Refuse: the standard has replaced it by Resize."""
    raise refuse("the standard has replaced it by Resize")


@operator("GridSample")
def grid_sample(call: Call) -> Tensor:
    """Sample an image at given places."""
    x, grid = call.tensor(0), call.tensor(1)
    mode = {"bilinear": "bilinear", "linear": "bilinear", "nearest": "nearest", "bicubic": "bicubic",
            "cubic": "bicubic"}[call.get("mode", "linear")]  # fmt: skip
    if x.dim() == 5 and mode == "bicubic":
        raise refuse("cubic sampling of volumes is not read")
    return F.grid_sample(x, grid, mode, call.get("padding_mode", "zeros"), bool(call.get("align_corners", 0)))


@operator("AffineGrid")
def affine_grid(call: Call) -> Tensor:
    """Return the places that an affine map samples."""
    return F.affine_grid(call.tensor(0), call.numbers(1, "the sizes"), bool(call.get("align_corners", 0)))

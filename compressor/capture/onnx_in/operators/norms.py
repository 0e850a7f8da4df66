"""Normalisations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compressor.capture.onnx_in.operators.table import operator
from compressor.capture.onnx_in.stored import DTYPES
from compressor.capture.onnx_in.values import Call, refuse


@operator("BatchNormalization")
def batch_norm(call: Call) -> Tensor:
    """Normalise channels by stored statistics."""
    if call.get("training_mode", 0):
        raise refuse("it takes the statistics of the batch, in training mode; export the model for inference")
    x, gain, bias, mean, variance = (call.tensor(i) for i in range(5))
    if x.dim() < 2:
        raise refuse("its input has no channels")
    return F.batch_norm(x, mean, variance, gain, bias, False, 0.0, call.get("epsilon", 1e-5))


@operator("InstanceNormalization")
def instance_norm(call: Call) -> Tensor:
    """Normalise each channel of each example."""
    x, gain, bias = (call.tensor(i) for i in range(3))
    return F.instance_norm(x, None, None, gain, bias, True, 0.0, call.get("epsilon", 1e-5))


@operator("LayerNormalization")
def layer_norm(call: Call) -> Tensor | tuple[Tensor, ...]:
    """Normalise over the last dimensions; also return the mean and the inverse deviation."""
    x, gain, bias = call.tensor(0), call.tensor(1), call.maybe(2)
    axis, eps = call.get("axis", -1) % x.dim(), call.get("epsilon", 1e-5)
    shape = list(x.shape[axis:])
    if call.outputs == 1 and list(gain.shape) == shape and (bias is None or list(bias.shape) == shape):
        return F.layer_norm(x, shape, gain, bias, eps)
    dtype = DTYPES[call.get("stash_type", 1)]
    wide, axes = x.to(dtype), list(range(axis, x.dim()))
    mean = torch.mean(wide, axes, True)
    centred = wide - mean
    inverse = torch.rsqrt(torch.mean(centred * centred, axes, True) + eps)
    y = (centred * inverse).to(x.dtype) * gain
    y = y if bias is None else y + bias
    return (y, mean, inverse)[: call.outputs] if call.outputs > 1 else y


@operator("RMSNormalization")
def rms_norm(call: Call) -> Tensor:
    """Divide by the root of the mean of squares over the last dimensions."""
    x, gain = call.tensor(0), call.tensor(1)
    axis, eps = call.get("axis", -1) % x.dim(), call.get("epsilon", 1e-5)
    shape = list(x.shape[axis:])
    if list(gain.shape) == shape and x.dtype == torch.float32:
        return F.rms_norm(x, shape, gain, eps)
    wide = x.to(DTYPES[call.get("stash_type", 1)])
    mean = torch.mean(wide * wide, list(range(axis, x.dim())), True)
    return (wide * torch.rsqrt(mean + eps)).to(x.dtype) * gain


@operator("GroupNormalization")
def group_norm(call: Call) -> Tensor:
    """Normalise groups of channels; until opset 20 gain and bias are one a group."""
    x, gain, bias, groups = call.tensor(0), call.tensor(1), call.tensor(2), call.get("num_groups")
    if call.version < 21:
        repeats = x.shape[1] // groups
        gain, bias = gain.repeat_interleave(repeats), bias.repeat_interleave(repeats)
    return F.group_norm(x, groups, gain, bias, call.get("epsilon", 1e-5))


@operator("LpNormalization")
def lp_norm(call: Call) -> Tensor:
    """Divide by a norm along a dimension; where it is 0 the result is 0."""
    x, axis = call.tensor(0), call.get("axis", -1)
    total = torch.sum(torch.abs(x) if call.get("p", 2) == 1 else x * x, axis, True)
    norm = total if call.get("p", 2) == 1 else torch.sqrt(total)
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)


@operator("LRN")
def local_response_norm(call: Call) -> Tensor:
    """Divide by a power of the squares of neighbouring channels."""
    x, size = call.tensor(0), call.get("size")
    before = (size - 1) // 2
    flat = F.pad((x * x).flatten(2).transpose(1, 2), [before, size - 1 - before])
    near = flat.unfold(2, size, 1).sum(-1).transpose(1, 2).reshape(x.shape)
    y: Tensor = x / (call.get("bias", 1.0) + call.get("alpha", 1e-4) / size * near) ** call.get("beta", 0.75)
    return y


@operator("MeanVarianceNormalization")
def mean_variance_norm(call: Call) -> Tensor:
    """Subtract the mean and divide by the deviation."""
    x, axes = call.tensor(0), call.get("axes", [0, 2, 3])
    mean = torch.mean(x, axes, True)
    deviation = torch.sqrt(torch.mean(x * x, axes, True) - mean * mean)
    return (x - mean) / (deviation + 1e-9)

"""Element-wise operators: arithmetic, comparisons, logic, activations, casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compressor.capture.onnx_in.operators.table import operator
from compressor.capture.onnx_in.stored import DTYPES
from compressor.capture.onnx_in.values import Call, Constant, Numbers, Value, refuse

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh,
    "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "IsNaN": torch.isnan, "Log": torch.log,
    "Neg": torch.neg, "Not": torch.logical_not, "Reciprocal": torch.reciprocal, "Relu": torch.relu,
    "Round": torch.round, "Sigmoid": torch.sigmoid, "Sin": torch.sin, "Sinh": torch.sinh, "Softsign": F.softsign,
    "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh, "Mish": F.mish, "BitwiseNot": torch.bitwise_not,
    "Det": torch.det, "HardSwish": F.hardswish,
}  # fmt: skip
_BINARY: dict[str, Callable[..., Tensor]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "And": torch.logical_and, "Or": torch.logical_or,
    "Xor": torch.logical_xor, "Equal": torch.eq, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt,
    "LessOrEqual": torch.le, "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip


@operator(*_UNARY)
def unary(call: Call) -> Tensor:
    """Apply one of PyTorch's functions."""
    return _UNARY[call.op](call.tensor(0))


@operator(*_BINARY)
def binary(call: Call) -> Tensor:
    """Apply one of PyTorch's functions to two inputs; a constant of one element is a number."""
    return _BINARY[call.op](*operands(call))


def operands(call: Call) -> tuple[Any, Any]:
    """Return two inputs, one of them a number where it is a constant and the shape follows from the other."""
    a, b = call.inputs[:2]
    if isinstance(b, Constant) and not isinstance(a, Constant) and b.value.dim() <= call.tensor(0).dim():
        return call.tensor(0), call.scalar(1)
    if isinstance(a, Constant) and not isinstance(b, Constant) and a.value.dim() <= call.tensor(1).dim():
        number = call.scalar(0)
        if isinstance(number, Tensor):
            return number, call.tensor(1)
        if call.op in ("Add", "Mul"):
            return call.tensor(1), number
        if call.op == "Sub":
            return torch.rsub(call.tensor(1), number), 0
    return call.tensor(0), call.tensor(1)


@operator("Sign")
def sign(call: Call) -> Tensor:
    """Return -1, 0 or 1; NaN stays NaN, as in NumPy and the standard's reference."""
    x = call.tensor(0)
    return torch.where(torch.isnan(x), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x)


@operator("Div")
def div(call: Call) -> Tensor:
    """Divide; integers towards zero."""
    a, b = operands(call)
    whole = not a.is_floating_point()
    return torch.div(a, b, rounding_mode="trunc") if whole else torch.div(a, b)


@operator("Mod")
def mod(call: Call) -> Tensor:
    """Return the remainder, with the divisor's sign, or the dividend's with ``fmod``."""
    a, b = call.tensor(0), call.tensor(1)
    if a.is_floating_point() and not call.get("fmod", 0):
        raise refuse("the standard has no remainder of floats without fmod")
    return torch.fmod(a, b) if call.get("fmod", 0) else torch.remainder(a, b)


@operator("Pow")
def power(call: Call) -> Tensor:
    """Raise to a power, in the type of the base."""
    x, y = call.tensor(0), call.scalar(1)
    if isinstance(y, Tensor):
        if x.is_floating_point():
            return torch.pow(x, y.to(x.dtype))
        if y.is_floating_point():
            return torch.pow(x.double(), y.double()).to(x.dtype)
        return torch.pow(x, y.to(x.dtype))
    if x.is_floating_point():
        return torch.pow(x, int(y) if float(y).is_integer() else y)
    return torch.pow(x.double(), y).to(x.dtype)


@operator("BitShift")
def bit_shift(call: Call) -> Tensor:
    """Shift bits of unsigned integers."""
    x, by = call.tensor(0).to(torch.int64), call.tensor(1).to(torch.int64)
    dtype = call.tensor(0).dtype
    if dtype == torch.uint64:
        raise refuse("shifts of uint64 are not read")
    shifted = x << by if call.get("direction") == "LEFT" else x >> by
    low: Tensor = shifted & (2 ** (8 * dtype.itemsize) - 1)
    return low.to(dtype)


@operator("Sum", "Max", "Min", "Mean")
def variadic(call: Call) -> Tensor:
    """Combine any number of inputs."""
    apply = {"Max": torch.maximum, "Min": torch.minimum}.get(call.op, torch.add)
    parts = call.tensors()
    result = parts[0]
    for part in parts[1:]:
        result = apply(result, part)
    return result / len(parts) if call.op == "Mean" else result


@operator("Clip")
def clip(call: Call) -> Tensor:
    """Clip to a least and a greatest value; the greatest wins where they cross."""
    x = call.tensor(0)
    low = call.scalar(1) if call.has(1) else None
    high = call.scalar(2) if call.has(2) else None
    if low is None and high is None:
        return x
    if isinstance(low, Tensor) or isinstance(high, Tensor) or not x.is_floating_point():
        low, high = call.maybe(1), call.maybe(2)
        result = x if low is None else torch.maximum(x, low.to(x.dtype))
        return result if high is None else torch.minimum(result, high.to(x.dtype))
    return torch.clamp(x, low, high)


@operator("Gelu")
def gelu(call: Call) -> Tensor:
    """Apply GELU, exact or with tanh."""
    return F.gelu(call.tensor(0), approximate=call.get("approximate", "none"))


@operator("Celu", "Elu", "LeakyRelu", "Selu", "ThresholdedRelu", "Shrink", "HardSigmoid", "Softplus", "Swish")
def activation(call: Call) -> Tensor:
    """Apply an activation function with parameters."""
    x, get = call.tensor(0), call.get
    if call.op == "Elu":
        return F.elu(x, get("alpha", 1.0))
    if call.op == "Celu":
        return F.celu(x, get("alpha", 1.0))
    if call.op == "LeakyRelu":
        return F.leaky_relu(x, get("alpha", 0.01))
    if call.op == "Softplus":
        return torch.logaddexp(x, torch.zeros_like(x))
    if call.op == "HardSigmoid":
        return torch.clamp(x * get("alpha", 0.2) + get("beta", 0.5), 0, 1)
    if call.op == "ThresholdedRelu":
        return torch.where(x > get("alpha", 1.0), x, torch.zeros_like(x))
    if call.op == "Swish":
        return x * torch.sigmoid(x * get("alpha", 1.0))
    if call.op == "Selu":
        alpha, gamma = get("alpha", 1.6732631921768188), get("gamma", 1.0507010221481323)
        y: Tensor = gamma * torch.where(x > 0, x, alpha * torch.exp(x) - alpha)
        return y
    bias, lambd = get("bias", 0.0), get("lambd", 0.5)
    zero = torch.zeros_like(x)
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, zero))


@operator("PRelu")
def prelu(call: Call) -> Tensor:
    """Scale negative values by a slope."""
    x, slope = call.tensor(0), call.tensor(1)
    return torch.where(x < 0, x * slope, x)


@operator("IsInf")
def isinf(call: Call) -> Tensor:
    """Tell infinities, of both signs or of one."""
    x = call.tensor(0).float()
    found = torch.zeros_like(x, dtype=torch.bool)
    if call.get("detect_positive", 1):
        found = found | (x == math.inf)
    if call.get("detect_negative", 1):
        found = found | (x == -math.inf)
    return found


@operator("Where")
def where(call: Call) -> Tensor:
    """Choose between two inputs."""
    return torch.where(call.tensor(0), call.tensor(1), call.tensor(2))


@operator("Identity", "Dropout")
def identity(call: Call) -> Value | tuple[Value, ...]:
    """Return the input; of a dropout also the mask that keeps all."""
    if call.op == "Dropout" and call.has(2) and call.number(2, "training_mode"):
        raise refuse("it drops values at random, in training mode; export the model for inference")
    x = call.inputs[0]
    assert x is not None
    if call.op == "Identity" or call.outputs == 1:
        return x if isinstance(x, Numbers) else call.tensor(0)
    return call.tensor(0), torch.ones_like(call.tensor(0), dtype=torch.bool)


@operator("Cast", "CastLike")
def cast(call: Call) -> Tensor:
    """Convert to another type; floats to integers towards zero, to float8 with saturation."""
    x = call.tensor(0)
    dtype = call.tensor(1).dtype if call.op == "CastLike" else DTYPES.get(call.get("to"))
    if dtype is None:
        raise refuse(f"it converts to type {call.get('to')}, which is not read")
    if call.get("round_mode", "up") != "up":
        raise refuse(f"round_mode {call.get('round_mode')!r} is not read")
    return convert(x, dtype, bool(call.get("saturate", 1)))


def convert(x: Tensor, dtype: torch.dtype, saturate: bool = True) -> Tensor:
    """Convert to another type as the standard says."""
    if dtype == x.dtype:
        return x
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return _to_float8(x, dtype, saturate)
    if x.is_floating_point() and not dtype.is_floating_point and dtype is not torch.bool and dtype.itemsize < 8:
        return x.to(torch.int64).to(dtype)  # out of range: the low bits, on any machine
    return x.to(dtype)


def _to_float8(x: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    """Round to float8: what is too large becomes the largest with saturation, else NaN (infinity in e5m2)."""
    largest, wide = torch.finfo(dtype).max, x.float()
    if saturate:
        return torch.where(torch.isnan(wide), wide, torch.clamp(wide, -largest, largest)).to(dtype)
    if dtype == torch.float8_e5m2:
        return wide.to(dtype)
    over = wide.abs() > largest * (1 + 2.0**-4)  # beyond half of a step above the largest, which is at most an eighth
    return torch.where(over, torch.full_like(wide, math.nan), wide).to(dtype)

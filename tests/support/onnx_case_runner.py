"""Run the cases of ``onnx.backend.test``: are the captured numbers right, is the model refused, or are they wrong?"""

from __future__ import annotations

import importlib
import re
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from compressor.capture.capture import capture
from compressor.capture.onnx_in.model import NEWEST_OPSET, OLDEST_OPSET
from compressor.errors import CaptureError

RIGHT, REFUSED, WRONG = "right", "refused", "wrong"


@dataclass(frozen=True)
class Case:
    name: str
    model: ModelProto
    data: list[tuple[list[Any], list[Any]]]
    rtol: float
    atol: float

    @property
    def opset(self) -> int | None:
        return next((o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx")), None)

    @property
    def operators(self) -> list[str]:
        return sorted({node.op_type for node in self.model.graph.node})


@dataclass(frozen=True)
class Verdict:
    """State what became of a case.

    Attributes:
        outcome: RIGHT, REFUSED or WRONG.
        opset: that it ran as; another than the model's where that one is not read and the reference computes the same.
        fixed: inputs that became initializers, since operators want them before the model runs.
        why: message of a refusal, or the difference.
    """

    outcome: str
    opset: int | None
    fixed: bool
    why: str = ""


def load_cases(kinds: tuple[str, ...] = ("node", "simple")) -> list[Case]:
    """Return the cases that the package onnx makes (node) or ships (simple)."""
    loader = importlib.import_module("onnx.backend.test.loader")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [case for kind in kinds for case in loader.load_model_tests(kind=kind)]
    return [_case(case) for case in found]


def _case(case: Any) -> Case:
    if case.model is not None:
        data = [([_array(x) for x in ins], [_array(x) for x in outs]) for ins, outs in case.data_sets]
        return Case(case.name, case.model, data, case.rtol, case.atol)
    folder = Path(case.model_dir)
    model = onnx.load(folder / "model.onnx")
    data = []
    for sets in sorted(folder.glob("test_data_set_*")):
        data.append((_read(sets, "input", model.graph.input), _read(sets, "output", model.graph.output)))
    return Case(case.name, model, data, case.rtol, case.atol)


def _array(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, np.generic) else x


def _read(folder: Path, kind: str, values: Any) -> list[Any]:
    result = []
    for index, value in enumerate(values):
        if not (folder / f"{kind}_{index}.pb").exists() or not value.type.HasField("tensor_type"):
            result.append(None)
            continue
        proto = TensorProto.FromString((folder / f"{kind}_{index}.pb").read_bytes())
        result.append(numpy_helper.to_array(proto))
    return result


def judge(case: Case) -> Verdict:
    """Capture a case and compare its outputs: as it is, else as another opset, else with inputs as initializers."""
    first: Verdict | None = None
    for model, fixed in _variants(case):
        verdict = _judge(case, model, fixed)
        if verdict.outcome != REFUSED:
            return verdict
        first = first or verdict
    assert first is not None
    return first


def _variants(case: Case) -> Iterator[tuple[ModelProto, tuple[int, ...]]]:
    yield case.model, ()
    model = case.model
    opset = case.opset
    if opset is not None and not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        other = _as_opset(case, min(max(opset, OLDEST_OPSET), NEWEST_OPSET))
        if other is None:
            return
        model = other
        yield model, ()
    if not case.data or any(not isinstance(x, np.ndarray) for x in case.data[0][0]):
        return
    whole = [i for i, x in enumerate(case.data[0][0]) if x.dtype.kind in "iub" or x.size <= 8]
    # One input at a time, then all: an operator wants its axes, sizes or numbers ahead, and seldom its data.
    for index in whole:
        if index:
            yield _with_initializers(case, model, (index,)), (index,)
    later = tuple(i for i in whole if i)
    if len(later) > 1:
        yield _with_initializers(case, model, later), later
    if 0 in whole:
        yield _with_initializers(case, model, tuple(whole)), tuple(whole)


def _as_opset(case: Case, opset: int) -> ModelProto | None:
    """Return the model under another opset, where the standard allows it and its reference computes the same."""
    model = ModelProto()
    model.CopyFrom(case.model)
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = opset
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            onnx.checker.check_model(model, full_check=True)
            names = [value.name for value in model.graph.input]
            for inputs, outputs in case.data:
                given = ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))
                if any(_difference(g, o, case) for g, o in zip(given, outputs, strict=True)):
                    return None
    except Exception:
        return None
    return model


def _with_initializers(case: Case, model: ModelProto, indices: tuple[int, ...]) -> ModelProto:
    fixed = ModelProto()
    fixed.CopyFrom(model)
    values = list(model.graph.input)
    del fixed.graph.input[:]
    for i, value in enumerate(values):
        if i in indices:
            fixed.graph.initializer.append(numpy_helper.from_array(np.asarray(case.data[0][0][i]), value.name))
        else:
            fixed.graph.input.append(value)
    return fixed


def _judge(case: Case, model: ModelProto, fixed: tuple[int, ...]) -> Verdict:
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), None)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = Path(folder) / "model.onnx"
        file.write_bytes(model.SerializeToString())
        try:
            graph = capture(file)
        except CaptureError as error:
            return Verdict(REFUSED, opset, bool(fixed), re.sub(r"^.*?model\.onnx: ", "", str(error), count=1))
        except Exception as error:
            return Verdict(WRONG, opset, bool(fixed), f"{type(error).__name__}: {error}"[:300])
        for inputs, outputs in case.data:
            given = [to_torch(x) for i, x in enumerate(inputs) if i not in fixed]
            try:
                got = graph(*given)
            except Exception as error:
                return Verdict(WRONG, opset, bool(fixed), f"{type(error).__name__}: {error}"[:300])
            results = got if isinstance(got, tuple) else (got,)
            for index, (result, wanted) in enumerate(zip(results, outputs, strict=True)):
                if why := _difference(to_numpy(result), wanted, case):
                    return Verdict(WRONG, opset, bool(fixed), f"output {index}: {why}")
    return Verdict(RIGHT, opset, bool(fixed))


def _difference(got: Any, wanted: Any, case: Case) -> str:
    """Return how an output differs from what the case expects, by its own tolerance; empty where it does not."""
    if not isinstance(wanted, np.ndarray) or not isinstance(got, np.ndarray):
        wanted = np.asarray(wanted)
        got = np.asarray(got)
    if got.dtype != wanted.dtype:
        return f"type {got.dtype}, not {wanted.dtype}"
    if got.shape != wanted.shape:
        return f"shape {got.shape}, not {wanted.shape}"
    wide = "float64" if wanted.dtype.kind not in "iubcf" or wanted.dtype.itemsize < 4 else wanted.dtype
    if wanted.dtype.kind in "OUS":
        return "" if np.array_equal(got, wanted) else "other strings"
    a, b = got.astype(wide), wanted.astype(wide)
    # Two units in the last place: of bfloat16 onnx's own runner allows these (onnx.backend.test.runner), and the
    # reference rounds to float16 after each operator, where the captured graph's arithmetic is float32.
    rtol = max(case.rtol, {"bfloat16": 2.0**-6, "float16": 2.0**-9}.get(wanted.dtype.name, 0.0))
    if np.allclose(a, b, rtol, case.atol, equal_nan=True):
        return ""
    return f"{a.reshape(-1)[:4].tolist()}, not {b.reshape(-1)[:4].tolist()}"


def to_torch(x: Any) -> torch.Tensor:
    array = np.ascontiguousarray(x).reshape(np.shape(x))
    if (array.dtype.kind in "biuf" and array.dtype.name in ("bool", "float16", "float32", "float64")) or (
        array.dtype.kind in "iu"
    ):
        return torch.from_numpy(array.copy())
    kind = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
            "float8_e4m3fnuz": torch.float8_e4m3fnuz, "float8_e5m2fnuz": torch.float8_e5m2fnuz}  # fmt: skip
    dtype = kind[array.dtype.name]
    return torch.from_numpy(array.reshape(-1).view(f"uint{8 * dtype.itemsize}").copy()).view(dtype).reshape(array.shape)


def to_numpy(x: torch.Tensor) -> np.ndarray[Any, Any]:
    import ml_dtypes

    x = x.detach().contiguous()
    if x.dtype in (torch.bfloat16,) or (x.dtype.itemsize == 1 and x.dtype.is_floating_point):
        name = str(x.dtype).removeprefix("torch.")
        whole = x.reshape(-1).view(torch.int16 if x.dtype.itemsize == 2 else torch.uint8).numpy()
        return whole.view(getattr(ml_dtypes, name)).reshape(tuple(x.shape))
    return x.numpy()


__all__ = ["REFUSED", "RIGHT", "WRONG", "Case", "Verdict", "helper", "judge", "load_cases", "to_numpy", "to_torch"]

"""Functions of transformers that change are not captured as what they were."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import families
import pytest
import torch

from compressor.capture.capture import capture
from compressor.capture.recurrence import functions
from compressor.errors import CaptureError


def module_of(name: str) -> tuple[Any, Any]:
    model = families.make(*families.RECURRENT[name], True)
    return model, sys.modules[type(model).__module__]


def test_a_function_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, module = module_of("Mamba")
    before = module.mamba_selective_scan

    def changed(hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, **kwargs):
        y, state = before(hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, **kwargs)
        return 1.01 * y, state

    changed.__signature__ = inspect.signature(before)
    monkeypatch.setattr(module, "mamba_selective_scan", changed)
    with pytest.raises(CaptureError, match="mamba_selective_scan computes something else than the operator"):
        capture(model)
    for taking_other in (lambda hidden_states: hidden_states, lambda hidden_states, **others: hidden_states):
        monkeypatch.setattr(module, "mamba_selective_scan", taking_other)
        with pytest.raises(CaptureError, match="mamba_selective_scan takes other arguments than it did"):
            capture(model)


def test_a_state_that_is_computed_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = module_of("LFM2")
    monkeypatch.setattr(functions, "_FUNCTIONS", {})
    with pytest.raises(CaptureError, match="layer 0 convolves what it stored by code of its own"):
        capture(model)
    model, _ = module_of("Mamba")
    monkeypatch.setattr(functions, "_FUNCTIONS", {"causal_conv1d_fn": functions._convolve})
    with pytest.raises(CaptureError, match="layer 0 computes its recurrent state by a function that no operator"):
        capture(model)


def test_the_originals_are_back_afterwards() -> None:
    model, module = module_of("RWKV")
    before, shifts = module.rwkv_linear_attention, [type(part) for part in model.modules()]
    capture(model)
    assert module.rwkv_linear_attention is before and [type(part) for part in model.modules()] == shifts


def test_a_model_whose_weights_were_divided_is_refused() -> None:
    cls, options = families.RECURRENT["RWKV"]
    model = families.make(cls, {**options, "rescale_every": 1}, True)
    capture(model, weights=False)
    model(torch.tensor([[3, 4]]))
    with pytest.raises(CaptureError, match="has divided the weights of later blocks"):
        capture(model)

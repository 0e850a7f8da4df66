"""An ONNX file goes in, and what its bundle computes is what onnx's own evaluator computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from onnx_models import convnet, recurrent, reference, write

import compressor


def test_an_onnx_file_becomes_a_bundle(tmp_path: Path, require_tool: Callable[[str], Path]) -> None:
    require_tool("g++")
    model = convnet()
    file = write(model, tmp_path)
    recipe = {"passes": [{"rtn": {"scheme": "W8A16"}}], "target": "x86", "tune": "off"}
    bundle = compressor.compress(str(file), recipe, tmp_path / "bundle")
    x = np.random.default_rng(2).standard_normal((3, 3, 8, 8)).astype(np.float32)
    got, expected = bundle.run(x), reference(model, x=x)[0]
    assert np.linalg.norm(got - expected) < 0.02 * np.linalg.norm(expected)
    assert compressor.load(tmp_path / "bundle").kind == "module"


def test_a_stream_with_explicit_state_runs_step_by_step(tmp_path: Path, require_tool: Callable[[str], Path]) -> None:
    require_tool("g++")
    model = recurrent("LSTM")
    recipe = {"passes": [{"rtn": {"scheme": "W8A16"}}], "target": "x86", "tune": "off"}
    bundle = compressor.compress(write(model, tmp_path), recipe, tmp_path / "bundle")
    rng = np.random.default_rng(4)
    ours, theirs = ([np.zeros((1, 2, 32), np.float32)] * 2 for _ in range(2))
    for _ in range(5):
        x = rng.standard_normal((1, 2, 16)).astype(np.float32)
        got = bundle.run(x, *ours)
        expected = reference(model, x=x, h=theirs[0], c=theirs[1])
        assert list(got) == ["p", "h_next", "c_next"]
        for name, wanted in zip(got, expected, strict=True):
            assert np.abs(got[name] - wanted).max() < 0.03
        ours, theirs = [got["h_next"], got["c_next"]], expected[1:]

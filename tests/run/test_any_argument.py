"""The public Python API with arguments of any kind: a result, or an error of ours."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from arguments import any_argument, objects
from compressor_runtime import BundleError
from hypothesis import given
from hypothesis import strategies as st
from tiny_bundle import TinyLanguageModel, write_tiny_bundle
from torch import nn

import compressor
from compressor.capture.capture import capture

X = torch.linspace(-1, 1, 64).reshape(2, 32)
RECIPE = {"passes": [{"rtn": {"scheme": "W8A16"}}], "tune": "off", "target": "null"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("tiny"), TinyLanguageModel())


def used(session: Any, name: str, value: Any) -> None:
    """Set or call what a session has, and compute a token afterwards: what was accepted works."""
    if name == "position":
        session.position = value
    else:
        getattr(session, name)(value)
    if session.position < session.capacity:
        session.step([[5]] * session.batch)


def session_of(folder: Path) -> Any:
    session = compressor.load(folder, threads=1).session()
    session.step([[1, 2, 3]])
    return session


def generated(folder: Path, **arguments: Any) -> list[str]:
    return list(compressor.load(folder, threads=1).generate(**{"prompt": "the", "max_tokens": 2, **arguments}))


SINGLE = ("prompt", "max_tokens", "temperature", "top_k", "top_p", "seed", "stop")
CALLS: Mapping[str, Callable[[Path, Path, Any, Any], Any]] = {
    "load": lambda folder, _, a, b: compressor.load(a),
    "load, threads": lambda folder, _, a, b: compressor.load(folder, threads=a),
    "load, isa": lambda folder, _, a, b: compressor.load(folder, isa=a),
    "run": lambda folder, _, a, b: compressor.load(folder, threads=1).run(a, b),
    "encode": lambda folder, _, a, b: compressor.load(folder, threads=1).encode(a, b),
    "session, batch": lambda folder, _, a, b: compressor.load(folder, threads=1).session(a).step([[1]]),
    "session, capacity": lambda folder, _, a, b: compressor.load(folder, threads=1).session(1, a).step([[1]]),
    "step": lambda folder, _, a, b: used(session_of(folder), "step", a),
    "step, keep": lambda folder, _, a, b: session_of(folder).step([[1, 2]], a),
    "position": lambda folder, _, a, b: used(session_of(folder), "position", a),
    "make_room": lambda folder, _, a, b: used(session_of(folder), "make_room", a),
    "ids": lambda folder, _, a, b: list(compressor.load(folder, threads=1).generate_ids(a, max_tokens=2)),
    **{f"generate, {name}": lambda folder, _, a, b, name=name: generated(folder, **{name: a}) for name in SINGLE},
    "compress": lambda _, out, a, b: compressor.compress(a, b, out),
    "compress, model": lambda _, out, a, b: compressor.compress(a, RECIPE, out),
    "compress, recipe": lambda _, out, a, b: compressor.compress(nn.Linear(32, 8), a, out, example=(X,)),
    "compress, a part": lambda _, out, a, b: compressor.compress(
        nn.Linear(32, 8), {**RECIPE, str(b)[:20]: a}, out, example=(X,)
    ),
    "compress, output": lambda _, out, a, b: compressor.compress(nn.Linear(32, 8), RECIPE, a, example=(X,)),
    "compress, example": lambda _, out, a, b: compressor.compress(nn.Linear(32, 8), RECIPE, out, example=a),
    "compress, shapes": lambda _, out, a, b: compressor.compress(
        nn.Linear(32, 8), RECIPE, out, example=(X,), dynamic_shapes=a
    ),
    "capture": lambda _, out, a, b: capture(a, b),
    "Format.parse": lambda _, out, a, b: compressor.Format.parse(a),
    "Pipeline": lambda _, out, a, b: compressor.Pipeline(a).run(capture(nn.Linear(32, 8), (X,)), compressor.Context()),
    "Pipeline, a pass": lambda _, out, a, b: compressor.Pipeline([a]).run(
        capture(nn.Linear(32, 8), (X,)), compressor.Context()
    ),
    "LogReporter": lambda _, out, a, b: compressor.LogReporter(io.StringIO()),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    yield


@pytest.mark.parametrize("name", CALLS)
def test_any_argument(name: str, folder: Path, tmp_path: Path) -> None:
    @any_argument
    @given(a=objects, b=objects | st.just(None))
    def check(a: Any, b: Any) -> None:
        try:
            CALLS[name](folder, tmp_path / "out", a, b)
        except (compressor.CompressorError, BundleError) as error:
            assert str(error)

    check()

"""Capture a model once for all tests that are not of capturing: torch.export takes a second or two of each."""

from __future__ import annotations

import copy
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

import compressor.capture.capture as home
from compressor.graph.model import clone_graph

_capture = home.capture
_captured: dict[tuple[object, ...], tuple[GraphModule, list[int]]] = {}
"""Captured graphs by the content of their model, each with how often its weights had been written to."""


def capture_once(model: Any, *arguments: Any, **options: Any) -> GraphModule:
    """Return a graph as ``capture`` does: of a folder or a model that was captured before as it is, a copy.

    Rewriting a copy leaves the others as they are.  They share the parameters: after a write to one of these, the next
    call captures anew.
    """
    options = {name: value for name, value in options.items() if name == "weights" or value not in (None, False)}
    if any(argument is not None for argument in arguments) or options.keys() - {"weights"}:
        return _capture(model, *arguments, **options)  # a plain module, or code of a checkpoint
    if isinstance(model, str | Path) and os.path.isfile(os.path.join(model, "config.json")):
        content = _files(Path(model).resolve())
    elif isinstance(model, torch.nn.Module) and hasattr(model, "config"):
        content = _state(model)
    else:
        return _capture(model, **options)
    key = (content, str(model), options.get("weights", True))
    graph, written = _captured.get(key, (None, None))
    if graph is None or _written(graph) != written:  # a test wrote to the weights that its copy shares
        # Who has the model may change it, and a graph shares the weights.
        graph = _capture(copy.deepcopy(model), **options)
        _captured[key] = graph, _written(graph)
    return clone_graph(graph)


def _written(graph: GraphModule) -> list[int]:
    return [tensor._version for tensor in (*graph.parameters(), *graph.buffers())]


def _files(folder: Path) -> object:
    """Return which files a folder has, and when each was written last."""
    found = [(file, file.stat()) for file in sorted(folder.rglob("*"))]
    return tuple((file, stamp.st_size, stamp.st_mtime_ns) for file, stamp in found)


def _state(model: Any) -> object:
    """Return a model's class, settings and weights, these as a digest."""
    digest = hashlib.sha256(f"{model.config} {model.training}".encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return type(model), model.config._attn_implementation, digest.digest()


def captures_once() -> Iterator[None]:
    """Let runs, plans and evaluations take :func:`capture_once`, until the generator goes on."""
    _replace(_capture, capture_once)
    yield
    _replace(capture_once, _capture)  # also in modules that were imported in between


def _replace(old: object, new: object) -> None:
    """Put a function in the place of another in all modules of the package that hold it as ``capture``."""
    for name, module in list(sys.modules.items()):
        if name.startswith("compressor.") and vars(module).get("capture") is old:
            setattr(module, "capture", new)  # noqa: B010

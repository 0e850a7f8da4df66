"""Checks between passes and of the finished kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Interpreter, Node

from compressor.errors import VerificationError
from compressor.evaluate import Logits, graph_hidden, graph_logits
from compressor.graph import ModelInfo
from compressor.pipeline import Context
from compressor.runtime import Bundle

_CHECKED_TOKENS = 64
_TOLERANCE = 1e-3
_MARGIN = 5.0
_ROUNDING = 2.0**-22
"""Relative error of a float32 sum in another order."""


def verify_stage(index: int, name: str, graph: GraphModule, ctx: Context) -> None:
    """Observer: the graph is well formed, every parameter that a pass made is finite, and bytes are accounted for.

    Raises:
        VerificationError: names the pass and the parameter.
    """
    try:
        graph.graph.lint()
    except RuntimeError as error:
        raise VerificationError(f"after {name}: the graph is not well formed: {error}") from error
    for key, parameter in graph.named_parameters():
        if key.endswith(".scales") and not bool(torch.isfinite(parameter).all()):
            raise VerificationError(f"after {name}: {key} holds NaN or inf")
    latest = {record.site: record for record in ctx.records}
    for record in latest.values():
        parts = [f"{record.site}.{part}" for part in ("codes", "scales", "zeros")]
        stored = sum(p.numel() * p.element_size() for key, p in graph.named_parameters() if key in parts)
        if stored != record.bytes_after:
            raise VerificationError(
                f"after {name}: {record.site} is said to take {record.bytes_after} bytes and takes {stored}"
            )


def bundle_logits(bundle: Bundle) -> Logits:
    """A bundle's own kernels, from an empty cache."""

    def logits(ids: Any) -> Any:
        session = bundle.session(batch=len(ids), capacity=ids.shape[1])
        return session.step(ids, keep=np.arange(ids.shape[1]))

    return logits


class _Rounded(Interpreter):
    """Runs a graph with every packed linear's output off by about the rounding of a float32 sum."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self._generator = torch.Generator().manual_seed(0)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.target is not torch.ops.compressor.packed_linear.default:
            return value
        return value * (1 + _ROUNDING * torch.randn(value.shape, generator=self._generator))


def check_kernels(bundle: Bundle, graph: GraphModule) -> float:
    """Relative error (root mean square) of the bundle's outputs against the same graph run in PyTorch.

    A decoder is run on a prompt, and then token by token; an encoder with padding; a module on its example inputs.
    The error must be below 0.001, or no more than a few times what the graph's own outputs change by when its linears
    are off in their last bits: where activations are rounded to int8, sums that differ by that little fall on two
    sides of a rounding boundary here and there, and deep models amplify it.

    Raises:
        VerificationError: the error is larger.
    """
    info: ModelInfo = graph.meta["model"]
    rounded = _Rounded(graph).run
    if info.kind == "module":
        inputs = graph.meta["inputs"][0]
        with torch.no_grad():
            expected, moved = graph(*inputs), rounded(*inputs)
        pairs = [(expected, bundle.run(*(x.numpy() for x in inputs)))]
    else:
        length = min(_CHECKED_TOKENS, info.max_positions or _CHECKED_TOKENS)
        ids = np.random.default_rng(0).integers(0, info.vocab_size, (2, length))
        if info.kind == "encoder":
            mask = np.ones(ids.shape, np.float32)
            mask[1, length // 2 :] = 0
            kept = mask.astype(bool)
            expected, moved = (graph_hidden(graph, run)(ids, mask)[kept] for run in (graph, rounded))
            pairs = [(expected, bundle.encode(ids, mask)[kept])]
        else:
            expected, moved = (graph_logits(graph, run)(ids) for run in (graph, rounded))
            session = bundle.session(batch=2, capacity=8)
            steps = [session.step(part) for part in np.split(ids, [length - 3, length - 2, length - 1], axis=1)]
            last = np.concatenate(steps, axis=1)
            pairs = [(expected, bundle_logits(bundle)(ids)), (expected[:, -len(steps) :], last)]
    error = max(_relative_error(expected, got) for expected, got in pairs)
    limit = max(_TOLERANCE, _MARGIN * _relative_error(expected, moved))
    if not error <= limit:
        raise VerificationError(
            f"the kernels do not compute what the graph does: relative error {error:.2g}, and rounding "
            f"explains at most {limit:.2g}; report it with the output of --dump"
        )
    return error


def _relative_error(expected: Any, got: Any) -> float:
    reference, result = torch.as_tensor(expected).double(), torch.as_tensor(got).double()
    return float((result - reference).norm() / reference.norm())

"""How long a run takes, stage by stage: amounts of work, priced by what work costs on this machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.fx import GraphModule, Node

from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS
from compressor.formats.planes import TwoPlanes
from compressor.graph.costs import NodeCost
from compressor.graph.kinds.sparse_drafts import drafts_sparse
from compressor.graph.kinds.upper_planes import has_planes
from compressor.graph.model import ModelInfo
from compressor.numerics.range_search import Work
from compressor.plan.prices import Prices
from compressor.plan.roofline import Roofline

if TYPE_CHECKING:
    from compressor.codegen.isa import Isa

MODEL_ERROR = 0.3
"""How far off a stage may be, as a fraction, because the model is simple: see benchmarks/plan_accuracy.py."""

# Fitted to runs (benchmarks/plan_accuracy.py).  What Python code takes is in turns of the probe's loop, so that it
# follows the machine.
_CAPTURE_TURNS = 5.5e7  # what is imported and traced before the first layer
_EXPORT_TURNS = 1.15e5  # torch.export, a node
_TEXT_TURNS = 2.2e7  # importing datasets and the tokenizer
_TOKEN_TURNS = 8
_LOWER_TURNS = 2.5e7
_LOWER_NODE_TURNS = 1.7e5  # TVM's importer and phases, a node
_GENERATE_TURNS = 1.8e7  # code of one kernel
_CANDIDATE_TURNS = 4e6  # compiling one candidate, for its number of tokens alone
_TIMED_S = 0.2  # at least, that a candidate is timed
_TIMED_RUNS = 10  # at least
_LINK_TURNS = 1.5e7
_TURNS_S = 2.0  # that a search's graph is timed for
_SLOWER_PRODUCT = 1.8  # our kernels against the probe's matrix product
_SLOWER_READ = 1.5  # against the probe's read bandwidth
_BELOW_PEAK = {"compute": 2.5, "memory": 1.5}  # a whole model against its bound
_CALL_S = 2e-6  # one kernel's call
_EAGER_STEP = 2.5  # PyTorch's modules against the bare operators
_REPEATS = 8  # of both models' timing, the first included
_PAUSE_S = 0.25  # before each
_CHILD_TURNS = 8e6  # a process that loads a bundle, beside its imports
_PLAN_NODE_TURNS = 1.4e5  # planning, a node
_PROOF_NODE_TURNS = 8e4  # batch independence, a node
_EMULATED_START_TURNS = 1.15e8  # QEMU: imports of a bundle's process, and the translation of what it runs
_EMULATED_FLOP_TURNS = 0.06  # and an operation of its kernels
_SCORING_PASSES = 300  # of float64 logits of both models: exponentials and sums take as long as so much traffic


@dataclass(frozen=True)
class Estimate:
    """A prediction and the interval that it should lie in."""

    value: float
    low: float
    high: float


def estimate(seconds: float, prices: Prices) -> Estimate:
    """Return an interval from the probe's spread and the model's own error, as factors up and down."""
    factor = 1 + math.hypot(MODEL_ERROR, prices.spread)
    return Estimate(seconds, seconds / factor, seconds * factor)


def capture_work(nodes: int, hashed_bytes: int) -> Work:
    """Return the work of capturing a graph of so many nodes, and of hashing the model's files."""
    return {"python": _CAPTURE_TURNS + _EXPORT_TURNS * nodes, "hash_byte": hashed_bytes}


def text_work(tokens: int) -> Work:
    """Return the work of reading and tokenising text."""
    return {"python": _TEXT_TURNS + _TOKEN_TURNS * tokens}


@dataclass(frozen=True)
class LinearKernel:
    """A linear's kernel.

    Attributes:
        name: as in the database of schedules, without the number of tokens.
        rows, columns: shape of the weight.
        bytes: of the weight as it is stored.
        integer: whether its products are of int8.
        format: of the packed weight; None where it is dense.
    """

    name: str
    rows: int
    columns: int
    bytes: int
    integer: bool
    format: Format | None = None


def linear_kernels(graph: GraphModule) -> list[LinearKernel]:
    """Return the linears' kernels that schedules are chosen for, equal ones once; of fused linears, the first one's."""
    from compressor.codegen.lowering.converters.linears import dense_linear_name, packed_linear_name
    from compressor.codegen.lowering.fused_linear import groups

    found: dict[str, LinearKernel] = {}
    routed = graph.graph.find_nodes(op="call_function", target=torch.ops.compressor.packed_routed_linear.default)
    for node in (*(first for first, *_ in groups(graph.graph)), *routed):
        *_, bias, format_name, columns, rows = cast(Any, node.args)
        own = Format.parse(format_name)
        is_draft = graph.meta["model"].speculates and own.extra(TwoPlanes) is not None
        for fmt in (own, own.upper) if is_draft else (own,):
            name = packed_linear_name(f"{rows}x{columns}", fmt, bias is not None)
            found[name] = LinearKernel(name, rows, columns, fmt.packed_bytes(rows, columns), fmt.integer_products, fmt)
    for node in graph.graph.nodes:
        args: Any = node.args
        if node.target is torch.ops.compressor.dense_linear.default and args[1].op == "get_attr":
            weight = graph.get_parameter(args[1].target)
            rows, columns = weight.shape
            storage = "uint16" if weight.dtype is torch.bfloat16 else str(weight.dtype).removeprefix("torch.")
            name = dense_linear_name(rows, columns, storage, args[2] is not None)
            found[name] = LinearKernel(name, rows, columns, weight.numel() * weight.element_size(), False)
    return list(found.values())


def lowered_nodes(graph: GraphModule) -> int:
    """Return the nodes of all programs that a graph is lowered to.

    An entry for drafted tokens has as many again, and so have its parts together.
    """
    info: ModelInfo = graph.meta["model"]
    drafting = has_planes(graph) + drafts_sparse(graph) + (info.first_blocks is not None)
    return len(graph.graph.nodes) * (1 + info.speculates * (1 + drafting))


def slower_prompts(graph: GraphModule, isa: Isa) -> list[str]:
    """Say of formats that leave blocks out where prompts would take less time in their dense twins."""
    from compressor.codegen.kernels.linear.prompts import slower

    formats = {kernel.format for kernel in linear_kernels(graph) if kernel.format is not None}
    return sorted(filter(None, (slower(fmt, isa) for fmt in formats)))


def _candidates(kernel: LinearKernel, isa: Isa) -> tuple[int, int]:
    """Schedules that there are for one token, and for many."""
    from compressor.codegen.kernels import dense as dense_linear
    from compressor.codegen.kernels.linear import packed as packed_linear

    if kernel.format is None:
        return len(dense_linear.gemv_space()), len(dense_linear.gemm_space(1))
    tiles = -(-kernel.rows // TILE_ROWS)
    return len(packed_linear.gemv_space(tiles, kernel.format, isa)), len(
        packed_linear.gemm_space(tiles, 1, kernel.format, isa)
    )


def compile_seconds(graph: GraphModule, prices: Prices, tune: str, isa: Isa) -> float:
    """Predict the seconds of lowering a compressed graph, and of timing the schedules that no earlier run has timed.

    Args:
        tune: ``off``, ``quick`` or ``full``.
        isa: instruction set of the kernels.
    """
    from compressor.codegen.lowering.kernel_set import TUNED_TOKENS
    from compressor.codegen.tuning import QUICK_CANDIDATES, Database

    nodes, kernels = lowered_nodes(graph), linear_kernels(graph)
    turns = _LOWER_TURNS + (_EXPORT_TURNS + _LOWER_NODE_TURNS) * nodes + _GENERATE_TURNS * len(kernels)
    seconds = turns * prices.seconds["python"]
    done = {key.partition("|")[0] for key in Database().entries if f"|{prices.cpu}|" in key}
    for kernel in kernels if tune != "off" and not isa.archs else ():  # for GPUs, nothing is timed
        for tokens, candidates in zip((1, TUNED_TOKENS), _candidates(kernel, isa), strict=True):
            if f"{kernel.name}:{tokens}" in done:
                continue
            candidates = min(candidates, QUICK_CANDIDATES) if tune == "quick" else candidates
            once = kernel_seconds(kernel, tokens, prices)
            each = _CANDIDATE_TURNS * prices.seconds["python"] + max(_TIMED_S, _TIMED_RUNS * once)
            seconds += candidates * each if candidates > 1 else 0
    return seconds


def timing_graphs_seconds(graph: GraphModule, count: int, prices: Prices) -> float:
    """Predict the seconds of lowering graphs that have nearly all kernels in common, and of timing them in turns."""
    turns = _LOWER_TURNS + (_EXPORT_TURNS + _LOWER_NODE_TURNS) * lowered_nodes(graph)
    return count * (turns * prices.seconds["python"] + _TURNS_S)


def kernel_seconds(kernel: LinearKernel, tokens: int, prices: Prices) -> float:
    """One call of a linear's generated kernel."""
    price = prices.seconds["int8_op" if kernel.integer else "matmul_flop"]
    product = 2 * kernel.rows * kernel.columns * tokens * price
    return max(_SLOWER_PRODUCT * product, _SLOWER_READ * kernel.bytes * prices.seconds["read_byte"])


def bundle_seconds(roofline: Roofline, calls: int) -> float:
    """One run of the bundle in a phase of which the bound is known, with so many calls of kernels."""
    bound_ms = sum(layer.count * layer.ms * _BELOW_PEAK[layer.binds] for layer in roofline.layers)
    return calls * _CALL_S + bound_ms / 1e3


def emulated_work(flops: float) -> Work:
    """Return the work of a process under QEMU that loads a bundle and computes with it."""
    return {"python": _EMULATED_START_TURNS + _EMULATED_FLOP_TURNS * flops}


def scoring_work(tokens: int, vocabulary: int) -> Work:
    """Log-probabilities of so many tokens by both models, and their divergence."""
    return {"stream_byte": 8 * _SCORING_PASSES * tokens * vocabulary}


def plan_work(nodes: int) -> Work:
    """Planning a run of a graph of so many nodes."""
    return {"python": _PLAN_NODE_TURNS * nodes}


def proof_work(nodes: int) -> Work:
    """Asking whether the batch entries of a graph of so many nodes are independent."""
    return {"python": _PROOF_NODE_TURNS * nodes}


def write_work(bundle_bytes: int) -> Work:
    """Return the work of linking, writing and hashing a bundle."""
    return {"write_byte": bundle_bytes, "hash_byte": bundle_bytes, "python": _LINK_TURNS}


def child_work(bundle_bytes: int) -> Work:
    """Return the work of starting a process that loads a bundle, without its imports."""
    return {"hash_byte": bundle_bytes, "python": _CHILD_TURNS}


def timing_seconds(
    prices: Prices, dense: Sequence[Mapping[Node, NodeCost]], bundle: Sequence[float], steps: int, dense_speed: bool
) -> float:
    """Predict the seconds of starting both models' processes, and of their repeats of a prompt and ``steps`` steps.

    Args:
        dense: costs of the dense model's prompt and step.
        bundle: seconds of the bundle's.
    """
    seconds = prices.seconds["import_bundle"] + _REPEATS * (_PAUSE_S + bundle[0] + steps * bundle[1])
    if dense_speed:
        prompt, step = (_dense_seconds(costs.values(), prices) for costs in dense)
        loading = sum(cost.weights for cost in dense[1].values()) * 12 * prices.seconds["stream_byte"]
        seconds += prices.seconds["import_dense"] + loading + _REPEATS * (_PAUSE_S + prompt + steps * step)
    return seconds


def _dense_seconds(costs: Iterable[NodeCost], prices: Prices) -> float:
    """PyTorch's modules on float32 weights: products at the peak, or weights at the bandwidth, and its overhead."""
    costs = list(costs)
    seconds = _EAGER_STEP * len(costs) * prices.seconds["node"]
    for cost in costs:
        reading = 4 * cost.weights * prices.seconds["read_byte"]
        seconds += max(cost.flops * prices.seconds["matmul_flop"], _SLOWER_READ * reading) if cost.weights else 0.0
    return seconds

"""What a bundle's kernels must compute: inputs, and the graph's outputs for them, to be stored in the bundle.

The outputs are those of the graph run in PyTorch, node by node, in float64.  In float32 a sum depends on how it is
split between threads; where activations are rounded, a last bit that differs falls here and there on the other
side of a rounding boundary, and the logits differ in their third digit.  In float64 the differences are some 10^9
times smaller, such boundaries are practically never met, and what is left of them goes when the outputs are rounded
to 16 significant bits (off by 2^-16 at most, far below the tolerance).  So threads, BLAS and vector width do not change
the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.fx.node import Target
from torch.utils._pytree import tree_map

from compressor.evaluate.quality import GraphLogits, graph_hidden
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight
from compressor.graph.caches import empty_past
from compressor.graph.kinds.draft_heads import giving_hidden, heads_graph, without_heads
from compressor.graph.model import ModelInfo, SourceInfo
from compressor.host.tensor_files import release
from compressor.ops.depthwise import depthwise_product
from compressor.ops.linear import packed_product

_PROMPT_TOKENS, _STEPS, _BATCH, _SAMPLES = 16, 2, 2, 4000
_ROWS, _COLUMNS = 64, 1024
_BITS = 16
_TOLERANCE = 1e-3
_LARGEST_TOLERANCE = 0.5
_MARGIN = 5.0
_ROUNDING = 2.0**-20
_SPLIT = 2.0**-18
"""Where kernels for AMX take 16 of the 24 bits of float activations (docs/decisions/0030-amx-tiles.md)."""
_TRIALS = 4
_PIECE_ELEMENTS = 1 << 22

_DENSE, _PACKED = torch.ops.compressor.dense_linear.default, torch.ops.compressor.packed_linear.default
_LOOKUPS = (torch.ops.aten.embedding.default, torch.ops.compressor.packed_embedding.default)
_PACKED_DEPTHWISE = torch.ops.compressor.packed_depthwise.default
_PACK_CACHE = torch.ops.compressor.pack_cache.default
_ROUTED, _PACKED_ROUTED = torch.ops.compressor.routed_linear.default, torch.ops.compressor.packed_routed_linear.default


def make_vectors(graph: GraphModule) -> dict[str, Tensor]:
    """Compute inputs and expected outputs of a graph as it will be lowered; the same for the same graph.

    A decoder gets two random sequences of up to 16 tokens and two tokens more; an encoder, and that of an
    encoder-decoder, two of up to 16, one with padding; a module its example inputs. Of each output, seen as rows of
    its last dimension, at most 64 rows and 1,024 columns are kept, chosen at random so that they fall on all lanes of
    the kernels' tiles.

    ``tolerance`` is the relative error that rounding explains: 0.001, or 5 times the most that the graph's own outputs
    change by, in four trials, when its packed linears, and what its caches pack, are off by 2^-20 (by 2^-18 where
    activations are floats), and activations that are rounded by 2^-23.  2^-20 is some sixteen roundings of a float32,
    in place of those of all the operators: where activations or keys are rounded, sums that differ by so little fall
    on two sides of a boundary now and then, and deep models amplify it.  2^-23 are the roundings of a norm and a scale
    in front of the first linears: embeddings of float16 have few digits, so that many lie on a boundary.

    Returns:
        ``tolerance`` float64 [1]; a decoder's ``ids`` int64 [2, S] and ``prompt`` int64 [1], the number of tokens in
        the first step; an encoder's ``ids`` and ``mask`` float32 [2, S]; an encoder-decoder's ``source``, and of text
        ``source_mask``, beside a decoder's; a module's ``input_0``, ...; for each output ``output_0`` float32 [rows,
        columns], ``rows_0`` and ``columns_0``, their indices; of decoders also ``top_0`` int64 [rows], the likeliest
        token; of heads that draft, ``heads_hidden`` float32 [1, T, D] and ``heads_next`` int64 [1, T], which they read,
        and ``heads_output_0``, ``heads_rows_0`` and ``heads_columns_0``.
    """
    info: ModelInfo = graph.meta["model"]
    whole, graph = graph, without_heads(graph)
    if info.kind == "module":
        inputs = {f"input_{i}": x.detach() for i, x in enumerate(graph.meta["inputs"][0])}
        with torch.no_grad():
            runs = [_Exact(graph).run(*inputs.values())]
            runs += [_Exact(graph, noisy_from=0, seed=trial).run(*inputs.values()) for trial in range(_TRIALS)]
    else:
        inputs, runs = _text_runs(graph, info)
    trials = [[run] if isinstance(run, Tensor) else list(run) for run in runs]
    stored, effect = dict(inputs), 0.0
    for number, (expected, *moved) in enumerate(zip(*trials, strict=True)):
        tables = [output.reshape(-1, output.shape[-1] if output.dim() else 1) for output in (expected, *moved)]
        kept = np.flatnonzero(inputs["mask"].numpy()) if info.kind == "encoder" else np.arange(len(tables[0]))
        rows, columns = _some(kept, _ROWS), _some(np.arange(tables[0].shape[1]), _COLUMNS)
        parts = [table[rows][:, columns].double() for table in tables]
        effect = max([effect, *(_relative_error(part, parts[0]) for part in parts[1:])])
        stored[f"output_{number}"] = _rounded(parts[0])
        stored[f"rows_{number}"], stored[f"columns_{number}"] = rows, columns
        if info.generates:
            stored[f"top_{number}"] = tables[0][rows].argmax(dim=1)
    if info.draft_heads:
        of_heads, change = _heads_run(whole, inputs["ids"][:1])
        stored, effect = stored | of_heads, max(effect, change)
    tolerance = min(_LARGEST_TOLERANCE, max(_TOLERANCE, _MARGIN * effect))
    stored["tolerance"] = torch.tensor([float(f"{tolerance:.3g}")], dtype=torch.float64)
    return stored


def _text_runs(graph: GraphModule, info: ModelInfo) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return inputs, and outputs without noise and of each trial.

    All runs are one batch, so that each weight is unpacked once.
    """
    limit = info.max_positions or _PROMPT_TOKENS + _STEPS
    prompt = max(1, min(_PROMPT_TOKENS, limit - (_STEPS if info.generates else 0)))
    length = min(prompt + _STEPS, limit) if info.generates else prompt
    ids = np.random.default_rng(0).integers(0, info.vocab_size, (_BATCH, length))
    repeated = np.tile(ids, (1 + _TRIALS, 1))
    run = _Exact(graph, noisy_from=_BATCH, entries=len(repeated)).run
    if info.generates:
        source = {} if info.encoder_source is None else _source(info.encoder_source, info.vocab_size)
        inputs = {"prompt": torch.tensor([prompt]), **source}
        fed = [x.repeat(1 + _TRIALS, *[1] * (x.dim() - 1)) for x in source.values()]
        outputs = torch.as_tensor(GraphLogits(graph, run)(repeated, fed or None))
    else:
        mask = np.ones(ids.shape, np.float32)
        mask[1, -(-length // 2) :] = 0
        inputs = {"mask": torch.as_tensor(mask)}
        outputs = torch.as_tensor(graph_hidden(graph, run)(repeated, np.tile(mask, (1 + _TRIALS, 1))))
    return {"ids": torch.as_tensor(ids), **inputs}, list(torch.split(outputs, _BATCH))


def _heads_run(graph: GraphModule, ids: Tensor) -> tuple[dict[str, Tensor], float]:
    """Return what heads read and compute for some tokens, and the most that their output changes by in the trials."""
    position = torch.arange(ids.shape[1])
    with torch.no_grad():
        hidden = _Exact(giving_hidden(graph)).run(ids, position, position, *empty_past(graph.meta["model"], 1))[1]
        hidden, heads = _rounded(hidden.double()), heads_graph(graph)
        given = hidden, ids.roll(-1, 1)
        expected, *moved = [_Exact(heads).run(*given)] + [
            _Exact(heads, noisy_from=0, seed=trial).run(*given) for trial in range(_TRIALS)
        ]
    table = expected.flatten(0, -2)
    rows, columns = _some(np.arange(len(table)), _ROWS), _some(np.arange(table.shape[1]), _COLUMNS)
    found = {"heads_hidden": hidden, "heads_next": given[1], "heads_rows_0": rows, "heads_columns_0": columns}
    found["heads_output_0"] = _rounded(table[rows][:, columns].double())
    return found, max(_relative_error(other, expected) for other in moved)


def _source(info: SourceInfo, vocab_size: int) -> dict[str, Tensor]:
    """Return what an encoder reads: fewer tokens than the decoder, and half of the second row is padding; or noise."""
    if info.reads == "audio":
        shape = [_BATCH, *info.sized(_SAMPLES)]
        return {"source": torch.as_tensor(np.random.default_rng(1).normal(0, 0.1, shape).astype(np.float32))}
    length = max(1, min(_PROMPT_TOKENS, info.max_positions or _PROMPT_TOKENS) - 1)
    ids = np.random.default_rng(1).integers(0, vocab_size, (_BATCH, length))
    mask = np.ones(ids.shape, np.float32)
    mask[1, -(-length // 2) :] = 0
    return {"source": torch.as_tensor(ids), "source_mask": torch.as_tensor(mask)}


class _Exact(Interpreter):
    """Runs a graph in float64, whatever types its nodes ask for, with one piece of a weight in memory at a time.

    Args:
        noisy_from: batch entries from here on have every packed linear's output, and what caches pack, off by about
            2^-20, and activations that are rounded by about 2^-23; None for none.
        entries: of the batch; a tensor's first dimension may hold each entry's tokens one after another.
        seed: of the noise.
    """

    def __init__(self, graph: GraphModule, noisy_from: int | None = None, entries: int = 1, seed: int = 0) -> None:
        super().__init__(graph)
        self._noisy_from, self._entries = noisy_from, entries
        self._generator = torch.Generator().manual_seed(seed)

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _DENSE:
            return self._dense(*args)
        if target in (_ROUTED, _PACKED_ROUTED):  # weights are widened expert by expert
            return self._routed(target, *args)
        if target in (_PACKED, _PACKED_DEPTHWISE):
            return self._packed(depthwise_product if target is _PACKED_DEPTHWISE else packed_product, *args)
        if target is _PACK_CACHE:  # rounds, as linears of 8-bit activations do
            args = (self._disturbed(args[0].double()), *args[1:])
        if target not in _LOOKUPS:  # a table is not worth widening for a few rows
            args, kwargs = tree_map(_widened, (args, kwargs))
        return tree_map(_widened, super().call_function(target, args, kwargs))

    def _dense(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        pieces = torch.split(weight, max(1, _PIECE_ELEMENTS // weight.shape[1]))
        y = torch.cat([x.double() @ piece.double().T for piece in pieces], dim=-1)
        release([weight])
        return y if bias is None else y + bias

    def _packed(
        self,
        product: Callable[[Tensor, PackedWeight], Tensor],
        x: Tensor,
        parts: Sequence[Tensor],
        bias: Tensor | None,
        format: str,
        in_features: int,
        out_features: int,
    ) -> Tensor:
        fmt = Format.parse(format)
        y = product(self._fed(x, fmt), PackedWeight.of(parts, fmt, (out_features, in_features)))
        release(parts)
        return self._disturbed(y if bias is None else y + bias, _ROUNDING if fmt.integer_products else _SPLIT)

    def _routed(self, target: Any, x: Tensor, index: Tensor, weight: Any, bias: Tensor | None, *rest: Any) -> Tensor:
        x = x.double() if target is _ROUTED else self._fed(x, Format.parse(rest[0]))
        y: Tensor = target(x, index, weight, bias, *rest)
        if target is _ROUTED:
            release([weight])
            return y
        release(weight)
        return self._disturbed(y, _ROUNDING if Format.parse(rest[0]).integer_products else _SPLIT)

    def _fed(self, x: Tensor, fmt: Format) -> Tensor:
        """Return activations as the products of a format take them: with noise in front of their rounding."""
        return x.double() if fmt.activations is None else self._disturbed(x.double(), _ROUNDING / 8)

    def _disturbed(self, y: Tensor, size: float = _ROUNDING) -> Tensor:
        """Return the tensor with noise in the batch entries from ``noisy_from`` on, float64."""
        if self._noisy_from is None:
            return y
        first = self._noisy_from * len(y) // self._entries
        noise = torch.randn(y[first:].shape, dtype=torch.float32, generator=self._generator)
        return torch.cat([y[:first], y[first:] * (1 + size * noise)])


def _widened(value: Any) -> Any:
    """Widen float tensors to float64, and float types to ``torch.float64``."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _some(indices: NDArray[np.int64], count: int) -> Tensor:
    """At most ``count`` of the indices, int64, in order; the same ones each time."""
    if len(indices) > count:
        indices = np.sort(np.random.default_rng(0).choice(indices, count, replace=False))
    return torch.as_tensor(indices)


def _rounded(values: Tensor) -> Tensor:
    """Float64 to float32 with 16 significant bits."""
    mantissa, exponent = torch.frexp(values)  # 0.5 <= |mantissa| < 1
    return torch.ldexp(torch.round(mantissa * 2.0**_BITS), exponent - _BITS).float()


def _relative_error(got: Tensor, expected: Tensor) -> float:
    size = float(expected.norm())
    return float((got - expected).norm()) / size if size else 0.0

"""Make the programs that a library has of a captured graph: one, or several.

A decoder that verifies drafted tokens has one for these (:mod:`compressor.graph.kinds.token_trees`):

    verify: ids, position, keep, parent, slot, row, k_cache, v_cache -> logits, new keys and values
    planes: the same, of the upper planes of codes that lie in two (:mod:`compressor.graph.kinds.upper_planes`)
    sparse: the same, without small inputs of linears (:mod:`compressor.graph.kinds.sparse_drafts`)
    main: ids, position, keep, k_cache, v_cache -> logits, new keys and values

Where the decoder has heads that draft (:mod:`compressor.graph.kinds.draft_heads`), `verify` also gives what they read,
and they are a third one; `main` is that of the model without them:

    heads: hidden, next -> logits of each head
    verify: ids, ... -> logits, hidden, new keys and values

One whose prompts' caches a small model predicts (:mod:`compressor.graph.kept_tokens.predicted_caches`) has one more:

    predict: ids, position, k_cache, v_cache of the copied layers, scratch -> keys of all layers, then values

One that drafts with its own layers has `verify` once more, in parts (:mod:`compressor.graph.parts.cut`).

An encoder-decoder is cut into what a source needs once, and each step:

    encode: source, source_mask -> keys and values of each layer's cross-attention
    main: ids, position, keep, k_cache, v_cache, source_mask, these keys and values -> logits, new keys and values

and a model of pictures with texts into its halves:

    text: ids, mask -> text embeddings
    main: pictures -> picture embeddings

An encoder-decoder's cut is where the encoder's half (:func:`compressor.graph.kinds.encoder_decoder.encoder_nodes`) is
read by the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node

from compressor.capture.export import example_call, export_program, reexport
from compressor.errors import VerificationError
from compressor.graph.kept_tokens.predicted_caches import PREDICT, prediction_graph
from compressor.graph.kinds.draft_heads import CannotHead, giving_hidden, heads_graph, hidden_and_next, without_heads
from compressor.graph.kinds.encoder_decoder import SOURCE, SOURCE_MASK, encoder_nodes
from compressor.graph.kinds.halves import half_of, pair_halves
from compressor.graph.kinds.sparse_drafts import SPARSE, drafts_sparse, sparse_graph
from compressor.graph.kinds.token_trees import tree_graph, why_no_trees
from compressor.graph.kinds.upper_planes import PLANES, has_planes, upper_graph
from compressor.graph.model import ModelInfo, clone_graph
from compressor.graph.parts.cut import Part, cut_graph, why_no_parts


@dataclass(frozen=True)
class Entry:
    """A function of the library.

    Attributes:
        name: ``main`` for what every model has.
        program: to be imported.
        caches: whether new keys and values, the last outputs, are written to caches in place.
        results: outputs in front of these.
        part: what the entry takes and gives, where it is a part of another.
    """

    name: str
    program: ExportedProgram
    caches: bool
    results: int = 1
    part: Part | None = None

    @property
    def returned(self) -> int | None:
        """Return how many outputs the library's function has; None for all."""
        return self.results if self.caches else None


def entries(graph: GraphModule, only: Collection[str] | None = None) -> list[Entry]:
    """Export the programs of a captured graph, ``main`` last.

    Args:
        only: of the entries that draft and verify tokens those that the target has kernels for; None for all.
    Raises:
        VerificationError: the halves of an encoder-decoder share more than tensors, or tokens are to be verified of a
            model whose tokens cannot be.
    """
    info: ModelInfo = graph.meta["model"]
    if info.pair is not None:
        return _of_pair(graph, info)
    if info.kind != "seq2seq":
        plain = without_heads(graph)
        plain = clone_graph(plain) if drafts_sparse(graph) else plain  # without the thresholds of drafts
        beside = [*_of_drafts(graph, info, only), *_of_prompts(graph, info)]
        return [*beside, Entry("main", reexport(plain), info.kind == "decoder")]
    encoder, decoder = split(graph)
    return [
        Entry(name, export_program(half, *_call(half, info), info.name), caches)
        for name, half, caches in (("encode", encoder, False), ("main", decoder, True))
    ]


def _of_drafts(graph: GraphModule, info: ModelInfo, only: Collection[str] | None) -> list[Entry]:
    """Export what drafts and verifies tokens, if a model's library is to do so."""
    if not info.speculates or (only is not None and "verify" not in only):
        return []
    plain = without_heads(graph)
    if only is not None:
        return [Entry("verify", _verification(plain, info), True)]
    drafting = [Entry(PLANES, _verification(upper_graph(plain), info), True)] if has_planes(plain) else []
    if drafts_sparse(graph):
        drafting += [Entry(SPARSE, _verification(without_heads(sparse_graph(graph)), info), True)]
    if info.first_blocks is not None:
        graph, info = plain, dataclasses.replace(info, draft_heads=0)
    if not info.draft_heads:
        return [Entry("verify", _verification(graph, info), True), *drafting, *_parts(graph, info)]
    tokens = {1: Dim("tokens", min=1)}
    try:
        size = int(hidden_and_next(graph)[0].meta["val"].shape[-1])
        given = (torch.zeros(1, 5, size), torch.zeros(1, 5, dtype=torch.int64))
        heads = export_program(heads_graph(graph), given, (tokens, tokens), info.name)
        verify = _verification(giving_hidden(graph), info)
    except CannotHead as error:
        raise VerificationError(f"{info.name}: no entry `heads`: {error}; put draft_heads behind that pass") from error
    parts = _parts(without_heads(graph), dataclasses.replace(info, draft_heads=0))
    return [Entry("heads", heads, False), Entry("verify", verify, True, results=2), *parts, *drafting]


def _of_prompts(graph: GraphModule, info: ModelInfo) -> list[Entry]:
    """Export what predicts a prompt's caches, if anything does."""
    if not info.predicts:
        return []
    (ids, position, _, keys, values), (tokens, places, _, k_shapes, v_shapes) = example_call(info)
    copied = slice(info.predicts)
    args = (ids, position, *keys[copied], *values[copied])
    shapes = (tokens, places, *k_shapes[copied], *v_shapes[copied])
    return [Entry(PREDICT, export_program(prediction_graph(graph), args, shapes, info.name), False)]


def _parts(graph: GraphModule, info: ModelInfo) -> list[Entry]:
    """Export the parts of what verifies tokens, none where the model does not draft with its own layers."""
    if info.first_blocks is None and not info.stages:
        return []
    if reason := why_no_parts(graph, info.first_blocks or 0):
        raise VerificationError(f"{info.name}: no parts to draft with: {reason}; take another kind of drafts")
    (ids, position, keep, keys, values), (_, tokens, rows, *_) = example_call(info)
    own = {0: Dim("slots", min=1), 2: Dim("capacity", min=1)}
    given: dict[str, tuple[Tensor, Any]] = {"ids": (ids[:1], {1: tokens[0]}), "keep": (keep, rows)}
    given |= {name: (torch.zeros_like(position), tokens) for name in ("position", "parent", "slot", "row")}
    for name, caches in (("k_cache", keys), ("v_cache", values)):
        given |= {f"{name}_{layer}": (cache, own) for layer, cache in enumerate(caches)}
    sizes = {str(size): axis for axis, size in enumerate(graph.graph.find_nodes(op="placeholder")[0].meta["val"].shape)}
    found = []
    for part in cut_graph(graph, info.first_blocks or 0, info.stages):
        inputs = part.graph.graph.find_nodes(op="placeholder")
        pairs = [
            given[name] if name in given else _between(node, sizes, tokens[0], len(position))
            for name, node in zip(part.takes, inputs, strict=True)
        ]
        args = tuple(example.clone() for example, _ in pairs)
        program = export_program(part.graph, args, tuple(shape for _, shape in pairs), info.name)
        found.append(Entry(part.name, program, False, part=part))
    return found


def _between(node: Node, sizes: Mapping[str, int], tokens: Any, count: int) -> tuple[Tensor, dict[int, Any]]:
    """Return an example of a tensor that one part gives another, and which of its sizes is that of the tokens.

    Args:
        sizes: symbol -> 0 for the batch, which is 1 here, and 1 for the tokens.
        tokens, count: the latter's dimension, and tokens of the example.
    """
    value: Tensor = node.meta["val"]
    axes = [sizes.get(str(size)) if not isinstance(size, int) else None for size in value.shape]
    given: list[Any] = list(value.shape)
    shape = [size if isinstance(size, int) else (1, count)[axis or 0] for size, axis in zip(given, axes, strict=True)]
    return torch.zeros(shape, dtype=value.dtype), {at: tokens for at, axis in enumerate(axes) if axis == 1}


def _verification(graph: GraphModule, info: ModelInfo) -> ExportedProgram:
    """Export what verifies tokens of several sequences, whose number does not depend on the sequences'."""
    if reason := why_no_trees(graph):
        raise VerificationError(f"{info.name}: no entry `verify`: {reason}; leave `speculate` out")
    (ids, position, keep, keys, values), (_, tokens, rows, *_) = example_call(info)
    own, none = {0: Dim("slots", min=1), 2: Dim("capacity", min=1)}, torch.zeros_like(position)
    # Every example is a tensor of its own: the export takes one that is given twice for one input.
    given = (ids[:1], position, keep, none - 1, none, position.clone(), *keys, *values)
    dims = ({1: tokens[0]}, tokens, rows, tokens, tokens, tokens, *[own] * 2 * len(keys))
    return export_program(tree_graph(graph), given, dims, info.name)


def _of_pair(graph: GraphModule, info: ModelInfo) -> list[Entry]:
    """Export what embeds texts, and what embeds pictures, each for a batch of its own."""
    args, shapes = graph.meta["inputs"]
    pictures, texts = pair_halves(graph)
    parts = (("text", texts, slice(1, 3)), ("main", pictures, slice(0, 1)))
    return [Entry(name, export_program(half, args[own], shapes[own], info.name), False) for name, half, own in parts]


def split(graph: GraphModule) -> tuple[GraphModule, GraphModule]:
    """Return encoder and decoder as graphs of their own, which share the parameters.

    The decoder's inputs are those of the whole but the source, and then the encoder's outputs, in the same order.
    """
    inside = set(encoder_nodes(graph))
    crossing = [node for node in graph.graph.nodes if node in inside and any(user not in inside for user in node.users)]
    odd = [node.name for node in crossing if not isinstance(node.meta.get("val"), Tensor)]
    if odd:
        raise VerificationError(f"the decoder reads {', '.join(odd)} of the encoder, which are not tensors; report it")
    return _half(graph, [], crossing), _half(graph, crossing, None)


def _half(graph: GraphModule, given: Sequence[Node], results: Sequence[Node] | None) -> GraphModule:
    """Copy one half.

    Args:
        given: that the decoder reads; empty for the encoder.
        results: that the encoder returns; None for the decoder, which returns what the whole does.
    """
    encoder = results is not None
    inputs = graph.graph.find_nodes(op="placeholder")
    own = [node for node in inputs if node.target == SOURCE_MASK or (node.target == SOURCE) is encoder]
    own = [node for node in own if not encoder or node.target in (SOURCE, SOURCE_MASK)]
    named = {node: str(node.target) for node in own} | {node: node.name for node in given}
    return half_of(graph, named, graph.graph.output_node().args[0] if results is None else tuple(results))


def _call(half: GraphModule, info: ModelInfo) -> tuple[tuple[Any, ...], Any]:
    """Return example arguments of a half, and their ``dynamic_shapes``."""
    (ids, position, keep, k, v, *_), shapes = example_call(info)
    known = dict(zip(("ids", "position", "keep"), zip((ids, position, keep), shapes[:3], strict=True), strict=True))
    for name, caches, its_shapes in (("k_cache", k, shapes[3]), ("v_cache", v, shapes[4])):
        known |= {f"{name}_{i}": pair for i, pair in enumerate(zip(caches, its_shapes, strict=True))}
    source_args, source_shapes = example_call(info)[0][5:], shapes[5:]
    known |= dict(zip((SOURCE, SOURCE_MASK), zip(source_args, source_shapes, strict=True), strict=False))
    batch, varying = shapes[0][0], dict[str, Any]()
    args, dims = [], []
    for node in half.graph.find_nodes(op="placeholder"):
        if node.target in known:
            example, shape = known[node.target]
        else:
            example, shape = _crossing(node.meta["val"], batch, source_shapes, varying)
        args.append(example)
        dims.append(shape)
    return tuple(args), tuple(dims)


def _crossing(
    value: Tensor, batch: Any, source_shapes: Sequence[dict[int, Any]], varying: dict[str, Any]
) -> tuple[Tensor, dict[int, Any]]:
    """Return an example of a tensor that the encoder gives the decoder, [batch, ...], and which sizes vary."""
    tokens = next((dim for axis, dim in source_shapes[0].items() if axis), None) if len(source_shapes) > 1 else None
    sizes, shape = [2], {0: batch}
    given: list[Any] = list(value.shape[1:])  # numbers and symbols
    for axis, size in enumerate(given, 1):
        if isinstance(size, int):
            sizes.append(size)
        else:
            shape[axis] = varying.setdefault(str(size), tokens if tokens is not None else Dim("frames", min=1))
            sizes.append(6)
    return torch.zeros(sizes, dtype=value.dtype), shape

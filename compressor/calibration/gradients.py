"""Gradients of a loss of the last outputs, one segment's at a time; squared gradients of a decoder's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import cross_entropy

from compressor.calibration.segment_runner import SegmentRunner
from compressor.errors import UsageError
from compressor.graph.kinds.encoder_decoder import Batch, SampleInputs
from compressor.graph.model import ModelInfo
from compressor.graph.segments import Segment, segments
from compressor.graph.sites import Site
from compressor.host.tensor_files import Spill


def squared_gradients(
    graph: GraphModule, ids: SampleInputs, sites: Sequence[Site], spill: Spill | None = None
) -> Iterator[tuple[Site, Tensor]]:
    """(site, sum over samples of the squared gradient of the next-token loss, float32 [out, in]), the last sites first.

    The caller may replace each site before it asks for the next one: gradients go on as those of the graph as it was.

    That sum is the diagonal of the empirical Fisher information, which SqueezeLLM (Kim et al. 2023, arXiv 2306.07629,
    eq. 3) takes for the Hessian's.

    Peak memory: that of :func:`backwards`, and the squares.

    Args:
        ids: int64 [samples, sequence].
    Raises:
        UsageError: the model has no next-token loss, or a sample has no next token.
    """
    info = graph.meta["model"]
    if info.kind != "decoder" or not isinstance(ids, Tensor) or ids.shape[1] < 2:
        raise UsageError(f"{info.name}: gradients need a decoder and samples of at least two tokens")
    batches, squares = list(torch.split(ids, 1)), dict[str, Tensor]()

    def loss(i: int, logits: Tensor) -> Tensor:
        return cross_entropy(logits[0, :-1].float(), batches[i][0, 1:])

    def add(site: Site, i: int, gradient: Tensor) -> None:
        if site.name not in squares:
            squares[site.name] = torch.zeros(site.out_features, site.in_features)
        squares[site.name].addcmul_(gradient, gradient)

    for found in backwards(graph, batches, sites, "weight", loss, add, spill):
        for site in reversed(found):
            yield site, squares.pop(site.name)


def check_backwards(info: ModelInfo) -> None:
    """Refuse models between whose segments several tensors are live.

    Raises:
        UsageError: the model is an encoder-decoder: gradients would have to reach its encoder from all segments; or it
            has a half for pictures and one for texts, whose outputs are two.
    """
    if info.pair is not None:
        raise UsageError(
            f"{info.name}: gradients are not followed through a model of pictures with texts, which has two outputs; "
            "take a pass without them, such as gptq or awq"
        )
    if info.labels_frames:
        raise UsageError(
            f"{info.name}: gradients are not followed through a model that gives frames of sounds tokens; take a pass "
            "without them, such as gptq or awq"
        )
    if info.kind == "seq2seq":
        raise UsageError(
            f"{info.name}: gradients are not followed through an encoder-decoder, whose encoder all layers of the "
            "decoder read; take a pass without them, such as gptq or awq"
        )


def backwards(
    graph: GraphModule,
    batches: Sequence[Batch],
    sites: Sequence[Site],
    of: Literal["weight", "output"],
    loss: Callable[[int, Tensor], Tensor],
    add: Callable[[Site, int, Tensor], None],
    spill: Spill | None = None,
) -> Iterator[list[Site]]:
    """Run batches forwards, then backwards; after each segment, the last one first, yield its sites.

    Peak memory: the hidden states in front of every segment for all batches (in ``spill``, where there is one), one
    segment's weights in float32 and their gradients, and one batch's activations in that segment.

    Args:
        batches: as for :class:`compressor.calibration.segment_runner.SegmentRunner`.
        of: what the gradients are taken with respect to.
        loss: (number of the batch, the model's output on it) -> what is derived; without dimensions.
        add: called with each site of a segment, the number of the batch, and the gradient: float32 [out, in], or of
            the output's shape.
    Raises:
        UsageError: the model is an encoder-decoder.
    """
    check_backwards(graph.meta["model"])
    stream, names = SegmentRunner(graph, batches, spill), {site.name for site in sites}
    cut, entries = segments(graph), list[list[Tensor | None]]()
    for segment in cut:
        entries.append([None if x is None else _kept(x, spill) for x in stream.hidden])
        if segment.exit is not None:
            stream.advance(segment)
    ahead: list[Tensor] = []  # gradients of each batch's hidden states behind the segment
    for segment, hidden in zip(reversed(cut), reversed(entries), strict=True):
        stream.hidden, found = hidden, [site for site in segment.sites if site.name in names]
        behind = []
        for i in range(len(batches)):
            gradients = _gradients(stream, segment, i, found, of, loss, ahead[i] if ahead else None)
            if segment.entry is not None:
                behind.append(gradients.pop())
            for site, gradient in zip(found, gradients, strict=True):
                add(site, i, gradient)
        ahead = behind
        stream.release(segment)
        yield found


def _kept(x: Tensor, spill: Spill | None) -> Tensor:
    return x.clone() if spill is None else spill.empty(x.shape).copy_(x)


def _gradients(
    stream: SegmentRunner,
    segment: Segment,
    i: int,
    sites: Sequence[Site],
    of: Literal["weight", "output"],
    loss: Callable[[int, Tensor], Tensor],
    ahead: Tensor | None,
) -> list[Tensor]:
    """Return one batch's gradients by the sites' weights or outputs, and last by the segment's entry."""
    graph, env = stream.graph, stream.environment(segment, i)
    weights: list[Tensor] = []
    for site in sites if of == "weight" or segment.entry is None else ():
        weight = site.node.args[1]
        assert isinstance(weight, Node)
        env[weight] = graph.get_parameter(site.weight_name).detach().float().requires_grad_()
        weights.append(env[weight])
    entry = []
    if segment.entry is not None:
        env[segment.entry] = env[segment.entry].detach().requires_grad_()
        entry.append(env[segment.entry])
    if not sites and not entry:
        return []
    end = segment.exit or graph.graph.output_node().args[0][0]  # type: ignore[index]
    assert isinstance(end, Node)
    with torch.enable_grad():
        value, *outputs = stream.run(segment, env, [end, *(site.node for site in sites if of == "output")])
        if segment.exit is None:
            value = loss(i, value)
        wanted = [*(weights if of == "weight" else outputs), *entry]
        return list(torch.autograd.grad(value, wanted, ahead, materialize_grads=True))

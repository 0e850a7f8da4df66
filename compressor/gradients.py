"""Squared gradients of a decoder's loss with respect to its weights, one segment's at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import cross_entropy

from compressor.errors import UsageError
from compressor.graph import Segment, Site, segments
from compressor.streaming import Stream
from compressor.tensor_files import Spill


def squared_gradients(
    graph: GraphModule, ids: Tensor, sites: Sequence[Site], spill: Spill | None = None
) -> Iterator[tuple[Site, Tensor]]:
    """(site, sum over samples of the squared gradient of the next-token loss, float32 [out, in]), the last sites first.

    The caller may replace each site before it asks for the next one: gradients go on as those of the graph as it was.

    That sum is the diagonal of the empirical Fisher information, which SqueezeLLM (Kim et al. 2023, arXiv 2306.07629,
    eq. 3) takes for the Hessian's.

    Peak memory: the hidden states in front of every segment for all samples (in ``spill``, where there is one), one
    segment's weights in float32, their gradients and squares, and one sample's activations in that segment.

    Args:
        ids: int64 [samples, sequence].
    Raises:
        UsageError: the model has no next-token loss, or a sample has no next token.
    """
    info = graph.meta["model"]
    if info.kind != "decoder" or ids.shape[1] < 2:
        raise UsageError(f"{info.name}: gradients need a decoder and samples of at least two tokens")
    stream, names = Stream(graph, list(torch.split(ids, 1)), spill), {site.name for site in sites}
    cut, entries = segments(graph), list[list[Tensor | None]]()
    for segment in cut:
        entries.append([None if x is None else _kept(x, spill) for x in stream.hidden])
        if segment.exit is not None:
            stream.advance(segment)
    ahead: list[Tensor] = []  # gradients of each sample's hidden states behind the segment
    for segment, hidden in zip(reversed(cut), reversed(entries), strict=True):
        stream.hidden, found = hidden, [site for site in segment.sites if site.name in names]
        squares = [torch.zeros(site.out_features, site.in_features) for site in found]
        behind = []
        for i in range(len(ids)):
            gradients = _gradients(stream, segment, i, found, ahead[i] if ahead else None)
            if segment.entry is not None:
                behind.append(gradients.pop())
            for square, gradient in zip(squares, gradients, strict=True):
                square.addcmul_(gradient, gradient)
        ahead = behind
        stream.release(segment)
        yield from zip(reversed(found), reversed(squares), strict=True)


def _kept(x: Tensor, spill: Spill | None) -> Tensor:
    return x.clone() if spill is None else spill.empty(x.shape).copy_(x)


def _gradients(stream: Stream, segment: Segment, i: int, sites: Sequence[Site], ahead: Tensor | None) -> list[Tensor]:
    """Of one sample: with respect to the sites' weights, and last to what comes into the segment."""
    graph, env = stream.graph, stream.environment(segment, i)
    wanted: list[Tensor] = []
    for site in sites:
        weight = site.node.args[1]
        assert isinstance(weight, Node)
        env[weight] = graph.get_parameter(site.weight_name).detach().float().requires_grad_()
        wanted.append(env[weight])
    if segment.entry is not None:
        env[segment.entry] = env[segment.entry].detach().requires_grad_()
        wanted.append(env[segment.entry])
    if not wanted:
        return []
    end = segment.exit or graph.graph.output_node().args[0][0]  # type: ignore[index]
    assert isinstance(end, Node)
    with torch.enable_grad():
        (value,) = stream.run(segment, env, [end])
        if segment.exit is None:
            value = cross_entropy(value[0, :-1].float(), stream.batches[i][0, 1:])
        return list(torch.autograd.grad(value, wanted, ahead))

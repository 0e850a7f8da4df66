"""Put ``cached_attention`` in the place of causal attention that a decoder writes out.

What lies between the two products is evaluated on small numbers: the scores of a product of 0 are the bias, those of
other products give the scale.  From the bias the rule is read: what is hidden (causality, a window, a chunk), and
slopes (ALiBi).  At last both are run on random queries, keys and values, and must agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from compressor.capture.attention.masks import MaskRule, find_rule
from compressor.capture.recognition.evaluator import Evaluator
from compressor.capture.recognition.replace import agree, replace
from compressor.capture.recognition.written_out import WrittenOut, strip, written_out
from compressor.errors import CaptureError
from compressor.graph.provenance import module_path, source_line

_HIDDEN = -1e30  # scores below are of hidden keys
_MOST_SCORES = 1 << 23  # numbers that are looked at to find a rule
_LONGEST = 2048  # tokens that are looked at
_TOLERANCE = 1e-4  # of scores: float32 sums in another order


@dataclass(frozen=True)
class _Found:
    """How a decoder's scores come from products: ``scale * product - slope * distance``, where the rule shows the key.

    Attributes:
        slopes: float32 [H], or None.
    """

    scale: float
    rule: MaskRule
    slopes: Tensor | None


def recognize_decoder(graph: fx.Graph, layers: int, positions: int, evaluator: Evaluator) -> dict[str, Tensor]:
    """Rewrite every written-out attention of a decoder in place.

    Args:
        graph: of (ids, position, keep, caches) -> (logits, keys, values), traced on empty caches.
        layers: number of the layers that keep keys and values.
        positions: longest sequence that the model is made for.
        evaluator: without inputs; it gets them here.
    Returns:
        New constants of the graph, by name: the slopes.
    Raises:
        CaptureError: some place computes something else, or there is not one a layer.
    """
    results: Any = graph.output_node().args[0]
    keys, values = list(results[1 : 1 + layers]), list(results[1 + layers :])
    caches = graph.find_nodes(op="placeholder")[3:]
    constants, done = dict[str, Tensor](), set[int]()
    for place in written_out(graph):
        key, value = strip(place.keys, turns=True), strip(place.values, turns=True)
        roots = {key, *_ancestors_by_views(place.keys)}
        layer = next((i for i, node in enumerate(keys) if node in roots), None)
        if layer is None or values[layer] not in {value, *_ancestors_by_views(place.values)} or layer in done:
            raise _refusal(place, "its keys and values are not those that it stores in its cache")
        done.add(layer)
        found = _analyse(place, positions, evaluator)
        slopes = None
        if found.slopes is not None:
            name = next((n for n, t in constants.items() if torch.equal(t, found.slopes)), f"slopes_{len(constants)}")
            constants[name] = found.slopes
            with graph.inserting_before(place.output):
                slopes = graph.create_node("get_attr", name)
            slopes.meta = {**place.output.meta, "val": keys[layer].meta["val"].new_empty(len(found.slopes))}
        given = (place.queries, keys[layer], values[layer])
        position = graph.find_nodes(op="placeholder")[1]
        args = (*given, caches[layer], caches[layers + layer], position, found.scale, found.rule.window, 0.0, None)
        target = torch.ops.compressor.cached_attention.default
        reason = _differs(place, args, found, evaluator)
        if reason:
            raise _refusal(place, reason)
        reason = replace(graph, place, target, (*args, found.rule.chunk, slopes))
        if reason:
            raise _refusal(place, reason)
    if len(done) != layers:
        raise CaptureError(
            f"{layers} layers store keys and values, and {len(done)} compute softmax(q k^T * scale + bias) v with "
            "them; every layer must do both once"
        )
    return constants


def _ancestors_by_views(node: Any) -> list[fx.Node]:
    """Return the nodes on the way from a factor through views and transpositions."""
    found = [node]
    while True:
        following = found[-1].args[0] if strip(found[-1], turns=True) is not found[-1] else None
        if not isinstance(following, fx.Node):
            return found
        found.append(following)


def _refusal(place: WrittenOut, reason: str) -> CaptureError:
    where = " at ".join(filter(None, (module_path(place.output), source_line(place.output))))
    return CaptureError(f"{where or place.output.name}: attention that no operator here computes: {reason}")


def _inputs(graph: fx.Graph, batch: int, length: int) -> dict[str, Any]:
    """Return ids, position and keep; caches are not evaluated."""
    ids, position, keep = (node.name for node in graph.find_nodes(op="placeholder")[:3])
    return {
        ids: torch.zeros(batch, length, dtype=torch.int64),
        position: torch.arange(length),
        keep: torch.zeros(1, dtype=torch.int64),
    }


def _analyse(place: WrittenOut, positions: int, evaluator: Evaluator) -> _Found:
    """Find scale, rule and slopes from the scores of chosen products.

    Raises:
        CaptureError: there is no such rule.
    """
    heads, width = (int(place.queries.meta["val"].shape[i]) for i in (1, 3))
    length = min(positions, _LONGEST, math.isqrt(_MOST_SCORES // heads))
    evaluator.inputs = _inputs(place.output.graph, 1, length)
    try:
        bias = _scores(place, evaluator, torch.zeros(1, heads, length, length))
        one = _scores(place, evaluator, torch.ones(1, heads, length, length))
    except KeyError as error:
        raise _refusal(place, f"its scores depend on {error}") from error
    visible = bias > _HIDDEN
    first = visible[0]
    if not bool((visible == first).all()):
        raise _refusal(place, "heads see different keys")
    # Where the bias is smallest, the fewest bits of the scale are lost.
    at = int(torch.where(visible, bias.abs(), math.inf).argmin())
    scale = float(one.flatten()[at] - bias.flatten()[at])
    scale = next((exact for exact in (1.0, width**-0.5) if math.isclose(exact, scale, rel_tol=1e-6)), scale)
    rule = find_rule(lambda _b, _h, q, kv: first[q, kv], 0, causal=True, positions=length)
    if rule is None:
        raise _refusal(place, "it hides other keys than causality, a window or a chunk does")
    return _Found(scale, rule, _slopes(place, bias, first))


def _scores(place: WrittenOut, evaluator: Evaluator, product: Tensor) -> Tensor:
    """Return the scores [H, S, S] that a model makes of products [1, H, S, S]."""
    if place.is_fused:
        fused: Tensor = _fused_scores(place.output, evaluator, product[0])
        return fused
    node, flat = place.product, product
    if node.meta["val"].dim() == 3:
        flat = product.flatten(0, 1)
    given: dict[fx.Node, Any] = {node: flat}
    if node.target is torch.ops.aten.baddbmm.default:
        factors: dict[str, Any] = dict(node.kwargs)
        added: Any = node.args[0]
        given[node] = factors.get("beta", 1) * evaluator(added, {}) + factors.get("alpha", 1) * flat
    found = evaluator(place.scores, given)
    return torch.as_tensor(found).float().reshape(product.shape[1:])


def _fused_scores(node: fx.Node, evaluator: Evaluator, product: Tensor) -> Any:
    """Return the scores [H, S, S] of PyTorch's operator."""
    given: tuple[Any, ...] = node.args
    named: dict[str, Any] = dict(node.kwargs)
    options: list[Any] = [*given[3:], *(None, 0.0, False, None)[len(given) - 3 :]]
    mask, _, causal, scale = options[:4]
    scores = product * (named.get("scale", scale) or int(given[0].meta["val"].shape[3]) ** -0.5)
    if named.get("is_causal", causal):
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -math.inf)
    mask = named.get("attn_mask", mask)
    if mask is not None:
        bias = evaluator(mask, {})
        scores = scores.masked_fill(~bias[0], -math.inf) if bias.dtype == torch.bool else scores + bias[0]
    return scores.float()


def _slopes(place: WrittenOut, bias: Tensor, visible: Tensor) -> Tensor | None:
    """Return by how much each head's bias falls a position; None where there is no bias.

    What is the same for all keys of a query does not change the softmax.
    """
    length = bias.shape[1]
    distance = (torch.arange(length)[:, None] - torch.arange(length)).float()
    relative = bias - bias.diagonal(dim1=1, dim2=2)[:, :, None]  # [H, S, S]
    farthest = int(torch.where(visible[-1], distance[-1], -1.0).argmax())
    reach = float(distance[-1, farthest])
    slopes = -relative[:, -1, farthest] / reach if reach else torch.zeros(len(bias))
    error = torch.where(visible, relative + slopes[:, None, None] * distance, 0.0).abs().max()
    if float(error) > _TOLERANCE * max(1.0, float(slopes.abs().max()) * length):
        raise _refusal(place, "what it adds to its scores does not fall evenly with the distance of the key")
    return slopes if bool(slopes.any()) else None


def _differs(place: WrittenOut, args: tuple[Any, ...], found: _Found, evaluator: Evaluator) -> str:
    """Return how the operator and the written-out form differ on random numbers; empty if they agree."""
    batch, length = 2, 7
    evaluator.inputs = _inputs(place.output.graph, batch, length)
    numbers = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(batch, int(x.meta["val"].shape[1]), length, int(x.meta["val"].shape[3]), generator=numbers)
        for x in args[:3]
    )
    written = evaluator(place.output, dict(zip(args[:3], (q, k, v), strict=True)))
    rest = (found.scale, found.rule.window, 0.0, None, found.rule.chunk, found.slopes)
    ours = torch.ops.compressor.cached_attention(q, k, v, k, v, torch.arange(length), *rest)
    return agree(written, ours)

"""Rewrite a freshly exported graph into the few operators that passes and kernels know.

    linear, addmm (Conv1D), x @ w.T + b                 become   dense_linear
    w * (x * rsqrt(mean(x ** 2, -1) + eps))             becomes  rms_norm
    checks, casts, copies, views that change nothing    are dropped
    weight @ x, with channels in front                  becomes  dense_linear, between transpositions

Each rule looks at operators and at the fake values (``node.meta["val"]``) that the export recorded, leaves what it
does not recognise, and says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.capture.arithmetic.assigned import AssignedSlice, AssignedWhere
from compressor.capture.arithmetic.complex_numbers import RealParts
from compressor.capture.arithmetic.plain_form import OperatorForm
from compressor.capture.arithmetic.promotion import ExplicitTypes
from compressor.capture.arithmetic.shifted import LateSlice, Shifted
from compressor.capture.arithmetic.sizes import KnownBound
from compressor.capture.experts.top_k import TopK
from compressor.capture.noops import DropCheck, DropNoOp, PlainForm
from compressor.capture.norms import FusedRmsNorm, RmsNorm
from compressor.capture.recurrence.turned import DropTranspositions, WeightTimesTokens
from compressor.graph.matching import calls, is_float, is_parameter, replace_by, shape_of
from compressor.graph.rules import Outcome, Rule, apply, why_not

_aten = torch.ops.aten
_ours = torch.ops.compressor

_VIEWS = frozenset({_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default})

_TURNS = frozenset({_aten.numpy_T.default, _aten.t.default, _aten.transpose.int, _aten.permute.default})  # of a matrix

_POOLS: Mapping[Any, list[int]] = {_aten.adaptive_avg_pool2d.default: [-1, -2], _aten.adaptive_avg_pool1d.default: [-1]}


@dataclass
class Normalized:
    """How a normalised graph holds parameters, where that differs from the checkpoint, and what each rule did."""

    transposed: set[str] = field(default_factory=set)  # checkpoint [in, out], parameter a view [out, in]
    plus_one: set[str] = field(default_factory=set)  # Gemma's norms scale by 1 + w: the parameter is 1 + w
    outcomes: list[Outcome] = field(default_factory=list)


def normalize(graph: fx.Graph) -> Normalized:
    """Rewrite in place: linears, RMS norms, means over images; drop checks, casts and copies that do nothing.

    Args:
        graph: call_function nodes over ``get_attr`` parameters, each with a fake ``meta["val"]``.
    Returns:
        How parameters are held now, and what each rule did.
    """
    done = Normalized()
    done.outcomes += apply([RealParts()], graph)
    graph.eliminate_dead_code()
    assigned: list[Rule] = [AssignedSlice(), AssignedWhere()]
    done.outcomes += apply([OperatorForm(), *assigned, KnownBound(), Shifted(), LateSlice()], graph)
    done.outcomes += apply([ExplicitTypes(), DropCheck(), DropNoOp(), PlainForm(), DropTranspositions()], graph)
    graph.eliminate_dead_code()  # so that the rules count real users only
    transposable = _used_only_transposed(graph)
    norms: list[Rule] = [RmsNorm(done.plus_one), FusedRmsNorm()]
    products: list[Rule] = [
        Linear(),
        TimesTurnedWeight(),
        AddedBias(),
        Addmm(transposable, done.transposed),
        WeightTimesTokens(),
        DropTranspositions(),
    ]
    done.outcomes += apply([*products, *norms, PoolToMean(), TopK(), OwnPlace()], graph)
    graph.eliminate_dead_code()
    graph.lint()
    return done


def cast_half_embeddings(graph: fx.Graph, dtypes: dict[str, torch.dtype]) -> None:
    """Follow each embedding whose table is stored in half precision by a cast: arithmetic is float32."""
    for node in list(graph.nodes):
        if node.target is not _aten.embedding.default or node.args[0].op != "get_attr":
            continue
        dtype = dtypes[node.args[0].target]
        if dtype == torch.float32:
            continue
        with graph.inserting_after(node):
            cast = graph.call_function(_aten.to.dtype, (node, torch.float32))
        node.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
        cast.meta = dict(node.meta)
        value = node.meta["val"]
        node.meta = {**node.meta, "val": value.new_empty(value.shape, dtype=dtype)}


def keeps_storage(node: fx.Node) -> bool:
    """Return whether every use of a parameter reads it in the type it is stored in (linear or embedding weight)."""
    return all(
        (user.target is _ours.dense_linear.default and user.args[1] is node and user.args[0] is not node)
        or (user.target is _aten.embedding.default and user.args[0] is node)
        for user in node.users
    )


class Linear:
    """A linear over a stored weight becomes ours."""

    name = "linear"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match PyTorch's linear."""
        return node if node.target is _aten.linear.default else None

    def check(self, match: fx.Node) -> str:
        """Ask for float32 inputs and a stored weight."""
        x, weight = match.args[:2]
        return why_not(
            (not is_float(x), "its input is not float32"),
            (not is_parameter(weight, 2), "its weight is computed, not stored"),
        )

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Call ``dense_linear``."""
        return replace_by(graph, match, _ours.dense_linear.default, (*match.args, None)[:3])


class TimesTurnedWeight:
    """A product with a stored weight that is turned there and then is a linear."""

    name = "product with a turned weight"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match ``x @ weight.T``."""
        if not any(calls(node, target) for target in (_aten.matmul.default, _aten.mm.default)):
            return None
        turned = node.args[1]
        return node if isinstance(turned, fx.Node) and turned.target in _TURNS else None

    def check(self, match: fx.Node) -> str:
        """Ask for float32 inputs and a stored matrix."""
        x, turned = match.args
        weight: Any = turned.args[0]  # type: ignore[union-attr]
        return why_not(
            (not is_float(x), "its input is not float32"),
            (not is_parameter(weight, 2), "its weight is computed, not stored"),
        )

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Call ``dense_linear``."""
        x, turned = match.args
        return replace_by(graph, match, _ours.dense_linear.default, (x, turned.args[0], None))  # type: ignore[union-attr]


class AddedBias:
    """A stored vector that is added to the outputs of a linear is its bias."""

    name = "added bias"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match ``linear(x) + bias``."""
        return node if calls(node, _aten.add.Tensor) and is_parameter(node.args[1], 1) else None

    def check(self, match: fx.Node) -> str:
        """Ask for a linear without a bias that nothing else reads, and as many numbers as it has outputs."""
        linear, bias = match.args
        if not calls(linear, _ours.dense_linear.default):
            return "it is added to something other than a linear"
        return why_not(
            (linear.args[2] is not None, "the linear has a bias"),
            (len(linear.users) > 1, "the linear's outputs are read without it too"),
            (shape_of(bias.meta["val"]) != shape_of(match.meta["val"])[-1:], "it is one number"),  # type: ignore[union-attr]
        )

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Give the linear the bias."""
        linear: Any = match.args[0]
        return replace_by(graph, match, _ours.dense_linear.default, (*linear.args[:2], match.args[1]))


def _used_only_transposed(graph: fx.Graph) -> set[fx.Node]:
    """Return the matrices that are read as the second factor of ``addmm`` alone."""
    return {
        node
        for node in graph.nodes
        if is_parameter(node, 2)
        and all(user.target is _aten.addmm.default and user.args[2] is node for user in node.users)
    }


@dataclass
class Addmm:
    """A linear with a transposed weight (transformers' Conv1D) becomes ours, over a view of the weight."""

    transposable: set[fx.Node]
    transposed: set[str]
    name = "addmm"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match ``bias + x @ weight``."""
        return node if node.target is _aten.addmm.default else None

    def check(self, match: fx.Node) -> str:
        """Ask for float32 inputs, a stored weight that is read in no other way, and a stored bias."""
        bias, x, weight = match.args
        return why_not(
            (weight not in self.transposable, "its weight is computed, or read by other operators too"),
            (bool(match.kwargs), "it scales its terms"),
            (not is_float(x), "its input is not float32"),
            (not is_parameter(bias, 1), "its bias is not a stored vector"),
        )

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Call ``dense_linear``, without the views in front and behind that flatten to two dimensions and back."""
        bias, x, weight = match.args
        assert isinstance(x, fx.Node) and isinstance(weight, fx.Node) and isinstance(weight.target, str)
        if weight.target not in self.transposed:
            self.transposed.add(weight.target)
            weight.meta = {**weight.meta, "val": weight.meta["val"].t()}
        whole = x.args[0] if x.target in _VIEWS else None
        if isinstance(whole, fx.Node) and shape_of(whole.meta["val"])[-1:] == shape_of(x.meta["val"])[-1:]:
            unflattened = [*shape_of(whole.meta["val"])[:-1], str(weight.meta["val"].shape[0])]
            users = list(match.users)
            if all(user.target in _VIEWS and shape_of(user.meta["val"]) == unflattened for user in users):
                with graph.inserting_before(match):
                    new = graph.call_function(_ours.dense_linear.default, (whole, weight, bias))
                new.meta = {**match.meta, "val": users[0].meta["val"]}
                for user in users:
                    user.replace_all_uses_with(new)
                    graph.erase_node(user)
                graph.erase_node(match)
                return new
        return replace_by(graph, match, _ours.dense_linear.default, (x, weight, bias))


class OwnPlace:
    """Each entry of a batch is read at its own place, as the last token of each text.

    x[arange(n), argmax(i)]      becomes      gather(x, 1, argmax(i))
    """

    name = "own places"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match two index tensors in front."""
        found: Any = node.args[1] if node.target is _aten.index.Tensor else ()
        return node if len(found) == 2 and None not in found else None

    def check(self, match: fx.Node) -> str:
        """Ask for all entries in order, and for places that are counted from the start."""
        args: Any = match.args
        x, (rows, places) = args
        sizes = [shape_of(node.meta["val"])[0] for node in (x, rows)]
        first = rows.args[0] if rows.target is _aten.arange.start else 0
        ordered = (
            str(rows.target).startswith("aten.arange.") and first == 0 and rows.target is not _aten.arange.start_step
        )
        return why_not(
            (not ordered or sizes[0] != sizes[1], "it does not read all entries in order"),
            (
                places.target is not _aten.argmax.default or places.meta["val"].dim() != 1,
                "its places do not come from an argmax",
            ),
        )

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Call ``gather``."""
        args: Any = match.args
        x, (_, made) = args
        rest = [int(size) for size in x.meta["val"].shape[2:]]
        steps: list[tuple[Any, tuple[Any, ...]]] = [(_aten.unsqueeze.default, (1,))]
        steps += [(_aten.unsqueeze.default, (axis,)) for axis in range(2, 2 + len(rest))]
        steps += [(_aten.expand.default, ([-1, -1, *rest],))] if rest else []
        with graph.inserting_before(match):
            for target, more in steps:
                value = target(made.meta["val"], *more)
                made = graph.call_function(target, (made, *more))
                made.meta = {**match.meta, "val": value}
            read = graph.call_function(_aten.gather.default, (x, 1, made))
            read.meta = {**match.meta, "val": made.meta["val"].to(x.meta["val"].dtype)}
        return replace_by(graph, match, _aten.squeeze.dim, (read, 1))


class PoolToMean:
    """Average pooling to one value a channel becomes a mean.

    PyTorch relabels the memory of the pooled result where channels come last, which cannot be followed.
    """

    name = "average pooling"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match adaptive average pooling over two dimensions or one."""
        return node if node.target in _POOLS else None

    def check(self, match: fx.Node) -> str:
        """Ask for one value a channel."""
        size = list(match.args[1])  # type: ignore[arg-type]
        return why_not((size != [1] * len(_POOLS[match.target]), f"it leaves {size} values a channel, not one"))

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Call ``mean`` over height and width, or over the length."""
        return replace_by(graph, match, _aten.mean.dim, (match.args[0], _POOLS[match.target], True))

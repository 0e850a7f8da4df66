"""Rules: what is rewritten, what is left and why, in which order, and that the numbers stay."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compressor.graph.rules import Outcome, apply, listing, why_not

aten = torch.ops.aten


class NegateTwice:
    """-(-x) becomes x."""

    name = "negate twice"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        inner: Any = node.args[0] if node.target is aten.neg.default else None
        return node if inner is not None and inner.target is aten.neg.default else None

    def check(self, match: fx.Node) -> str:
        inner: Any = match.args[0]
        return why_not((len(inner.users) > 1, f"{inner.name} has other readers"))

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> None:
        inner: Any = match.args[0]
        match.replace_all_uses_with(inner.args[0])
        graph.erase_node(match)
        graph.erase_node(inner)


class AbsToRelu:
    """relu(abs(x)) becomes abs(x), and the rule after it sees abs."""

    name = "relu of abs"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        return node if node.target is aten.relu.default and node.args[0].target is aten.abs.default else None

    def check(self, match: fx.Node) -> str:
        return ""

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        inner: Any = match.args[0]
        match.replace_all_uses_with(inner)
        graph.erase_node(match)
        return inner


class SeeAbs:
    """Never rewrites."""

    name = "see abs"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        return node if node.target is aten.abs.default else None

    def check(self, match: fx.Node) -> str:
        return "seen only"

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> None:
        raise AssertionError("the check refused")


def chain(*targets: Any) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for target in targets:
        nodes.append(graph.call_function(target, (nodes[-1],)))
    return graph, nodes[1:]


def test_a_match_is_rewritten_and_the_numbers_stay() -> None:
    neg, x = aten.neg.default, torch.randn(5)
    graph, (*_, last) = chain(neg, neg, aten.abs.default)
    graph.output(last)
    expected = fx.GraphModule({}, graph)(x)
    last.args[0].meta["nn_module_stack"] = {"a": ("", "M"), "b": ("layers.0.act", "torch.nn.Act")}
    assert apply([NegateTwice()], graph) == [Outcome("negate twice", "neg_default_1", "layers.0.act")]
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [aten.abs.default]
    assert torch.equal(fx.GraphModule({}, graph)(x), expected)


def test_a_check_that_fails_leaves_the_graph_and_says_why() -> None:
    graph, (first, second) = chain(aten.neg.default, aten.neg.default)
    graph.output((first, second))
    before = str(graph)
    (outcome,) = apply([NegateTwice()], graph)
    assert not outcome.matched and outcome.reason == "neg_default has other readers"
    assert str(graph) == before


def test_rules_see_what_the_rule_before_them_made() -> None:
    graph, (_, last) = chain(aten.abs.default, aten.relu.default)
    graph.output(last)
    outcomes = apply([AbsToRelu(), SeeAbs()], graph)
    assert [(outcome.rule, outcome.node, outcome.reason) for outcome in outcomes] == [
        ("see abs", "abs_default", "seen only"),
        ("relu of abs", "relu_default", ""),
        ("see abs", "relu_default", "seen only"),
    ]


def test_the_listing_has_each_rule_once_with_matches_first() -> None:
    outcomes = [Outcome("a", "n1", "m", "too large"), Outcome("b", "n2", ""), Outcome("a", "n3", "k")]
    assert listing(outcomes) == (
        "a: 1 of 2 matched\n  matched  n3 (k)\n  left     n1 (m): too large\nb: 1 of 1 matched\n  matched  n2\n"
    )
    assert listing([]) == ""


def test_the_first_obstacle_is_the_reason() -> None:
    assert why_not((False, "one"), (True, "two"), (True, "three")) == "two"
    assert why_not((False, "one")) == ""

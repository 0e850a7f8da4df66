"""Rewrite a graph by rules: a pattern of operators, a check that says why not, and a rewrite.

    node -> pattern -> nothing       the operators differ: the rule has nothing to say here
                    -> match -> check -> reason      recorded: why the node stays as it is
                                      -> ""          recorded, and rewritten

Every outcome is recorded, so that ``compress run --dump`` can list what was fused and what was not, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.fx import Graph, Node

from compressor.graph.provenance import module_path


class Rule(Protocol):
    """Pattern, check and rewrite of one change to a graph; a match is whatever ``pattern`` returns."""

    @property
    def name(self) -> str:
        """Name of the rule in listings."""

    def pattern(self, node: Node) -> Any:
        """Return the match whose operators begin or end at ``node``, or None where the operators differ."""

    def check(self, match: Any) -> str:
        """Return why the match cannot be rewritten, in plain English; empty if it can."""

    def rewrite(self, graph: Graph, match: Any) -> Node | None:
        """Rewrite in place.  Returns the node that later rules see at this place, or None if none is left."""


@dataclass(frozen=True)
class Outcome:
    """One place in a graph where the pattern of a rule was found.

    Attributes:
        rule: name of the rule.
        node: name of the node before the rewrite.
        module: path of its module in the original model, empty if unknown.
        reason: why the rule did not apply; empty if it did.
    """

    rule: str
    node: str
    module: str
    reason: str = ""

    @property
    def matched(self) -> bool:
        """Whether the graph was rewritten here."""
        return not self.reason


def apply(rules: Sequence[Rule], graph: Graph) -> list[Outcome]:
    """Try all rules, in their order, at each node that the graph has now, in its order; rewrite in place.

    Returns:
        Outcomes in the order in which the patterns were found.
    """
    outcomes = []
    for place in list(graph.nodes):
        node: Node | None = place
        for rule in rules:
            if node is None or node._erased:
                break
            match = rule.pattern(node)
            if match is None:
                continue
            reason = rule.check(match)
            outcomes.append(Outcome(rule.name, place.name, module_path(place), reason))
            if not reason:
                node = rule.rewrite(graph, match)
    return outcomes


def why_not(*obstacles: tuple[bool, str]) -> str:
    """Return the reason of the first obstacle that holds, or an empty string."""
    return next((reason for holds, reason in obstacles if holds), "")


def listing(outcomes: Sequence[Outcome]) -> str:
    """Return a text with each rule's matches and then its other places with their reasons, in the order of the graph.

    Rules come in the order in which their patterns were first found.
    """
    lines = []
    for name in dict.fromkeys(outcome.rule for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.rule == name]
        matched = [outcome for outcome in mine if outcome.matched]
        lines.append(f"{name}: {len(matched)} of {len(mine)} matched")
        for outcome in (*matched, *(outcome for outcome in mine if not outcome.matched)):
            place = f"{outcome.node} ({outcome.module})" if outcome.module else outcome.node
            lines.append(f"  matched  {place}" if outcome.matched else f"  left     {place}: {outcome.reason}")
    return "\n".join([*lines, ""])

"""Find linears that only say how fast a recurrent state decays, and what is written to it and read from it.

    x_proj -> dt_proj -> dt, b, c of a selective scan;   in_proj_ba -> decay, beta of the gated delta rule

They are small, and their errors add up in the state over all later tokens, so passes leave them dense unless a recipe
names them.  They are found by where their outputs arrive, whatever their names are.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node

from compressor.graph.sites import Site, linear_sites, match_sites
from compressor.ops.recurrence import GATES, TOKENS

WHY_DENSE = (
    "it sets how a recurrent state decays, and what enters and leaves it, and its errors add up over all later tokens; "
    "name it in `targets` to pack it"
)


def gate_projections(graph: GraphModule) -> set[str]:
    """Return the names of the linears all of whose outputs arrive at gates of operators with a state."""
    arrivals: dict[Node, set[bool]] = {}  # whether at gates
    for node in reversed(graph.graph.nodes):
        found = arrivals.setdefault(node, set())
        for user in node.users:
            if user.target in TOKENS:
                places = {place for place, arg in enumerate(user.args) if arg is node}
                found.add(places <= set(GATES.get(user.target, ())))
            elif user.op == "output":
                found.add(False)
            else:
                found |= arrivals[user]
    return {site.name for site in linear_sites(graph) if arrivals[site.node] == {True}}


def without_gates(graph: GraphModule, matched: list[Site], targets: Sequence[str]) -> list[Site]:
    """Leave out gate projections that were matched by the name of a class alone, such as ``Linear``."""
    gates = gate_projections(graph)
    if not gates:
        return matched
    classes = {"Linear", *(site.module_class for site in matched)}
    named = match_sites(matched, [pattern for pattern in targets if pattern not in classes])[0]
    kept = {site.name for site in named}
    return [site for site in matched if site.name not in gates or site.name in kept]


def gate_notes(graph: GraphModule) -> list[str]:
    """Tell the user of linears that passes leave dense, and why."""
    gates = gate_projections(graph)
    if not gates:
        return []
    kinds = ", ".join(sorted({name.rpartition(".")[2] for name in gates}))
    return [
        f"{len(gates)} linears ({kinds}) stay dense unless `targets` names them: they set how recurrent states decay, "
        "and what enters and leaves them, and their errors add up over all later tokens"
    ]

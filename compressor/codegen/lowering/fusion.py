"""Fuse packed linears with what is around them: a rewrite of the captured graph, before TVM's importer reads it.

    x -> {q, k, v}_proj                        becomes   fused_linear(x, weights=[q, k, v])
    norm -> {q, k, v}_proj                     becomes   fused_linear(x, prologue=norm, weights=[q, k, v])
    silu(gate) * up -> down_proj -> + x        becomes   fused_linear(gate, up, prologue=silu_mul, residual=x)

The linears share the prepared (rounded, summed) activations; a prologue computes them where they are prepared, and a
residual is added where outputs are written.  Each rule below says why it leaves a place as it is.  The node
:func:`fused_linear` becomes a call of one kernel in :mod:`compressor.codegen.lowering.converters`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from compressor.codegen.lowering.fused_linear import (
    LINEAR,
    alike,
    fused_linear,
    kernel,
    mates,
    move_to,
    own_preparation,
)
from compressor.codegen.lowering.prologues import ActivationIntoLinears, NormIntoLinears, ProductIntoLinears
from compressor.graph.rules import Outcome, Rule, apply, why_not

_ATEN = torch.ops.aten


def fuse(graph: fx.Graph) -> list[Outcome]:
    """Rewrite ``graph`` in place, and return what each rule did."""
    rules: list[Rule] = [ShareInput(), NormIntoLinears(), ActivationIntoLinears(), ProductIntoLinears(), AddToOutputs()]
    return apply(rules, graph)


class ShareInput:
    """Packed linears that read one tensor prepare its activations once."""

    name = "linears of one input"

    def pattern(self, node: fx.Node) -> list[fx.Node] | None:
        """Match a packed linear, and the other packed linears that read its input."""
        x = node.args[0] if node.target is LINEAR else None
        if not isinstance(x, fx.Node):
            return None
        readers = [user for user in x.users if user.target is LINEAR and user.args[0] is x and user is not node]
        return [node, *sorted(readers)] if readers else None

    def check(self, match: list[fx.Node]) -> str:
        """Ask for another linear that the same kernel can compute."""
        own, bias = own_preparation(match[0]), "no" if match[0].args[2] is None else "a"
        return why_not(
            (bool(own), f"its activations are prepared with {own}, which is its weight's own"),
            (
                len(mates(match)) == 1,
                f"no other reader of its input has {bias} bias and the format {match[0].args[3]}",
            ),
        )

    def rewrite(self, graph: fx.Graph, match: list[fx.Node]) -> fx.Node:
        """Put one kernel of all weights in the place of the first linear."""
        return kernel(graph, mates(match))


class AddToOutputs:
    """An addition takes place where the linear in front of it writes its outputs."""

    name = "addition to outputs"

    def pattern(self, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
        """Match a kernel's node, one of its outputs, and an addition that reads it."""
        if node.target is not LINEAR and node.target is not fused_linear:
            return None
        outputs = [user for user in node.users if user.target is operator.getitem] or [node]
        found = ((output, addition_after(output)) for output in outputs)
        return next(((node, output, addition) for output, addition in found if addition is not None), None)

    def check(self, match: tuple[fx.Node, fx.Node, fx.Node]) -> str:
        """Ask for a kernel of one weight, and an addition of a tensor of its outputs' shape."""
        node, output, addition = match
        return why_not(
            (output is not node, "the kernel has several weights, and adds to the outputs of one only"),
            (output is node, why_no_residual(node, addition)),
        )

    def rewrite(self, graph: fx.Graph, match: tuple[fx.Node, fx.Node, fx.Node]) -> fx.Node:
        """Move the kernel to the addition's place, and give it the other term."""
        node, _, addition = match
        call = node if node.target is fused_linear else kernel(graph, [node])
        call.args = (*call.args[:3], residual_of(call, addition), *call.args[4:])
        move_to(graph, call, addition)
        return call


def addition_after(node: fx.Node) -> fx.Node | None:
    """Return the first addition that reads a node, if there is one."""
    return next((user for user in node.users if user.target is _ATEN.add.Tensor), None)


def why_no_residual(node: fx.Node, addition: fx.Node) -> str:
    """Return why what makes ``node`` cannot add the other term of an addition to it; empty if it can."""
    return why_not(
        (len(node.users) > 1, "the addition is not the only reader of the outputs"),
        (bool(addition.kwargs), "the addition scales its second term"),
        (addition.args.count(node) > 1, "the outputs are added to themselves"),
        (not alike(node, residual_of(node, addition)), "the other term is not a float32 tensor of the outputs' shape"),
    )


def residual_of(node: fx.Node, addition: fx.Node) -> Any:
    """Return the term of an addition that is not ``node``, None where both are."""
    return next((term for term in addition.args if term is not node), None)

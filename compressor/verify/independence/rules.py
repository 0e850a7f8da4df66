"""Rules for PyTorch's operators: from the labels of the operands to those of the results.

A rule is asked only where an operand holds entries and none is mixed.  It returns the dimension along which the results
hold the entries, or raises :class:`CannotProve`.  The caller checks that this dimension has the right size, so a rule
need not check sizes.  Operators that PyTorch tags as pointwise need no rule of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.verify.independence import indexing, views
from compressor.verify.independence.call import Call, Rule, agree, aligned, avoid, dims_of, pointwise
from compressor.verify.independence.labels import SHARED, CannotProve, Label, same_size, size_of

_aten = torch.ops.aten


def _keep(name: str = "self") -> Rule:
    return lambda call: call.only(name)


def _shared(call: Call) -> Label:
    call.only("self")
    return SHARED  # the operator reads only the operand's shape and dtype


def _along(name: str, what: str) -> Rule:
    """Make the rule of an operator that keeps the dimensions and combines elements along those that ``name`` gives."""
    return lambda call: avoid(call.only("self"), dims_of(call, name), what)


def _last(count: int) -> Rule:
    """Make the rule of an operator that combines elements within the last ``count`` dimensions."""

    def rule(call: Call) -> Label:
        label = call.only("self")
        rank = call.args["self"].dim()
        return avoid(label, range(rank - count, rank), "combines elements of")

    return rule


def _reduce(call: Call) -> Label:
    label = call.only("self")
    dims = dims_of(call, "dim")
    avoid(label, dims, "reduces")
    return label if call.args.get("keepdim") else label.at(label.dim - sum(dim < label.dim for dim in dims))


def _normalized(call: Call) -> Label:
    rank = call.args["input"].dim()
    count = len(call.args["normalized_shape"])
    return avoid(call.only("input"), range(rank - count, rank), "normalises over")


def _group_norm(call: Call) -> Label:
    label = call.only("input")
    source = call.args["input"]
    if not same_size(size_of(call.args["N"]), size_of(source.shape[0])):
        raise CannotProve("it is told another batch size than its operand has")
    return avoid(label, range(1, source.dim()), "normalises over")


def _batch_norm(call: Call) -> list[Label]:
    label = call.only("input")
    if call.args.get("training") or not isinstance(call.args.get("running_mean"), Tensor):
        raise CannotProve("batch norm in training mode takes mean and variance over all entries")
    # With running statistics batch norm maps each element affinely; its other results are those statistics.
    return [label, *[SHARED] * (len(call.out) - 1)]


def _contraction(operands: dict[str, str], result: str, added: str = "") -> Rule:
    """Make the rule of a sum of products in Einstein notation; ``added`` is broadcast to the result."""

    def rule(call: Call) -> Label:
        labels = [aligned(call.args[added], call.entries(added), len(result))] if added else []
        for name, letters in operands.items():
            label = call.entries(name)
            if label is None:
                continue
            if letters[label.dim] not in result:
                raise CannotProve(f"it sums over dimension {label.dim} of {name!r}, along which the entries lie")
            labels.append(label.at(result.index(letters[label.dim])))
        return agree(labels)

    return rule


def _convolution(call: Call) -> Label:
    label = call.only("input")
    rank = call.args["input"].dim()
    return avoid(label, range(rank - call.args["weight"].dim() + 1, rank), "sums over")


def _attention(call: Call) -> Label:
    """Label scaled dot-product attention of [B, H, S, D]: batch and heads stay apart."""
    names = ("query", "key", "value", "attn_mask")
    label = agree([aligned(call.args[name], call.entries(name), 4) for name in names])
    return avoid(label, (2, 3), "attends over")


def _routed(call: Call) -> Label:
    """Label a routed linear: each row is multiplied by the weights that its own place in ``index`` names."""
    return avoid(agree([call.entries("x"), call.entries("index")]), (1, 2), "sums over")


def _rules() -> dict[Any, Rule]:
    groups: list[tuple[str, Rule]] = [
        ("alias clone contiguous detach lift_fresh lift_fresh_copy _to_copy to tril triu bucketize frexp", _keep()),
        ("native_dropout", _keep("input")),  # its random mask does not depend on the data
        ("copy where masked_fill", pointwise),
        ("empty_like new_empty new_empty_strided", _shared),
        ("zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full", _shared),
        ("_softmax _log_softmax _safe_softmax", _along("dim", "normalises over")),
        ("cumsum cumprod logcumsumexp cummax cummin", _along("dim", "accumulates along")),
        ("sort argsort topk", _along("dim", "sorts along")),
        ("flip", _along("dims", "reverses")),
        ("roll", _along("dims", "shifts")),
        ("glu split split_with_sizes", _along("dim", "cuts")),
        ("unfold", _along("dimension", "cuts")),
        ("sum nansum mean prod amax amin max min argmax argmin any all aminmax median", _reduce),
        ("var std var_mean std_mean logsumexp linalg_vector_norm norm count_nonzero", _reduce),
        ("native_layer_norm _fused_rms_norm", _normalized),
        ("native_group_norm", _group_norm),
        ("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training", _batch_norm),
        ("view reshape _unsafe_view", views.view),
        ("permute", views.permute),
        ("transpose t", views.transpose),
        ("unsqueeze", views.unsqueeze),
        ("squeeze", views.squeeze),
        ("expand", views.expand),
        ("repeat", views.repeat),
        ("select unbind", views.drop),
        ("slice", views.slice_),
        ("slice_scatter", views.slice_scatter),
        ("select_scatter", views.select_scatter),
        ("diagonal", views.diagonal),
        ("constant_pad_nd", views.pad),
        ("cat", views.cat),
        ("stack", views.stack),
        ("mm", _contraction({"self": "ik", "mat2": "kj"}, "ij")),
        ("bmm", _contraction({"self": "bik", "mat2": "bkj"}, "bij")),
        ("addmm", _contraction({"mat1": "ik", "mat2": "kj"}, "ij", added="self")),
        ("baddbmm", _contraction({"batch1": "bik", "batch2": "bkj"}, "bij", added="self")),
        ("mv", _contraction({"self": "ik", "vec": "k"}, "i")),
        ("dot", _contraction({"self": "k", "tensor": "k"}, "")),
        ("convolution", _convolution),
        ("avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d reflection_pad1d replication_pad1d", _last(1)),
        ("upsample_nearest1d upsample_linear1d", _last(1)),
        ("max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d", _last(2)),
        ("reflection_pad2d replication_pad2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d", _last(2)),
        ("max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d", _last(3)),
        ("_scaled_dot_product_flash_attention_for_cpu", _attention),
        ("embedding", indexing.embedding),
        ("index", indexing.index),
        ("index_put", indexing.index_put),
        ("index_select", indexing.index_select),
        ("gather", indexing.gather),
        ("scatter scatter_add scatter_reduce", indexing.scatter),
        ("index_copy index_add index_fill", indexing.index_write),
    ]
    ours = torch.ops.compressor
    rules = {getattr(_aten, name): rule for names, rule in groups for name in names.split()}
    # Their definitions pick rows by what the index holds, which cannot be followed without data.
    return {**rules, ours.routed_linear: _routed, ours.packed_routed_linear: _routed}


RULES = _rules()
"""Operator (all its overloads) -> rule."""

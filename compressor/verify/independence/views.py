"""Rules of operators that move elements and compute nothing: views, slices, concatenations."""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.verify.independence.call import Call, agree, aligned, avoid, dims_of
from compressor.verify.independence.labels import CannotProve, Entries, Label, regroup, size_of, sizes_of


def view(call: Call) -> Label:
    """Label a view or reshape, which keeps the row-major order, or the bytes seen as another dtype of the same size."""
    source = call.args["self"]
    if "dtype" in call.args:
        return _view_dtype(call)
    label = call.only("self")
    found = regroup(label, sizes_of(source), sizes_of(call.out), call.batch)
    if found is None:
        raise CannotProve(f"viewed as {_shape(call.out)}, no one dimension of {_shape(source)} holds the entries")
    return found


def _shape(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"


def _view_dtype(call: Call) -> Label:
    if call.args["self"].dtype.itemsize != call.args["dtype"].itemsize:
        raise CannotProve("it reads memory as a type of another size")
    return call.only("self")


def permute(call: Call) -> Label:
    """Label a tensor with its dimensions reordered."""
    label = call.only("self")
    rank = call.args["self"].dim()
    return label.at([int(dim) % rank for dim in call.args["dims"]].index(label.dim))


def transpose(call: Call) -> Label:
    """Label a tensor with two dimensions swapped: transpose and t."""
    label = call.only("self")
    rank = call.args["self"].dim()
    a, b = (call.args.get(name, default) % rank for name, default in (("dim0", 0), ("dim1", rank - 1)))
    return label.at({a: b, b: a}.get(label.dim, label.dim))


def unsqueeze(call: Call) -> Label:
    """Label a tensor with a new dimension of size 1."""
    label = call.only("self")
    return label.at(label.dim + (call.dim(extra=1) <= label.dim))


def squeeze(call: Call) -> Label:
    """Label a tensor without its dimensions of size 1: those named, or all."""
    label = call.only("self")
    source = call.args["self"]
    asked = dims_of(call, "dim")
    if any(isinstance(source.shape[dim], torch.SymInt) for dim in asked):
        raise CannotProve(f"which dimensions of {_shape(source)} go depends on sizes that vary")
    gone = [dim for dim in asked if source.shape[dim] == 1]
    avoid(label, gone, "drops")
    return label.at(label.dim - sum(dim < label.dim for dim in gone))


def expand(call: Call) -> Label:
    """Label a tensor that is broadcast along dimensions of size 1 and along new ones in front."""
    label = aligned(call.args["self"], call.only("self"), call.out.dim())
    assert label is not None
    return label


def repeat(call: Call) -> Label:
    """Label a tensor that is tiled along each dimension."""
    label = expand(call)
    assert isinstance(label, Entries)
    # Whole copies follow one another, so their number multiplies the outer factor.
    return Entries(label.dim, label.outer * size_of(call.args["repeats"][label.dim]), label.inner)


def drop(call: Call) -> Label:
    """Label a tensor with one dimension dropped: select and unbind."""
    label = call.only("self")
    dim = call.dim()
    avoid(label, [dim], "picks one place of")
    return label.at(label.dim - (dim < label.dim))


def slice_(call: Call) -> Label:
    """Label a range of places along one dimension."""
    label = call.only("self")
    if label.dim == call.dim() and not _whole(call):
        raise CannotProve(f"it takes a part of dimension {label.dim}, along which the entries lie")
    return label


def _whole(call: Call) -> bool:
    """Return whether a slice begins at the first place and skips none; the caller's check of sizes shows whether it is
    whole.
    """
    start = call.args["start"]
    return (start is None or (isinstance(start, int) and start == 0)) and call.args["step"] == 1


def slice_scatter(call: Call) -> Label:
    """Label a tensor after writing a range of places along one dimension."""
    label = agree([call.entries("self"), call.entries("src")])
    dim = call.dim()
    same = sizes_of(call.args["src"])[dim] == sizes_of(call.args["self"])[dim]
    if label.dim == dim and not (_whole(call) and same):
        raise CannotProve(f"it writes a part of dimension {dim}, along which the entries lie")
    return label


def select_scatter(call: Call) -> Label:
    """Label a tensor after writing one place of a dimension."""
    dim = call.dim()
    source = call.entries("src")
    shifted = None if source is None else source.at(source.dim + (source.dim >= dim))
    return avoid(agree([call.entries("self"), shifted]), [dim], "writes one place of")


def diagonal(call: Call) -> Label:
    """Label a diagonal: two dimensions merge into one, the last."""
    label = call.only("self")
    pair = [call.dim("dim1"), call.dim("dim2")]
    avoid(label, pair, "takes the diagonal of")
    return label.at(label.dim - sum(dim < label.dim for dim in pair))


def pad(call: Call) -> Label:
    """Label a tensor that is padded with constants, the last dimension first; negative widths crop."""
    rank = call.args["self"].dim()
    pads = call.args["pad"]
    touched = [rank - 1 - i // 2 for i, pad in enumerate(pads) if not (isinstance(pad, int) and pad == 0)]
    return avoid(call.only("self"), touched, "pads or crops")


def cat(call: Call) -> Label:
    """Label tensors concatenated along a dimension."""
    labels = [call.label_of(tensor) for tensor in call.args["tensors"]]
    label = agree([label for label in labels if isinstance(label, Entries)])
    return avoid(label, [call.args["dim"] % call.out.dim()], "joins tensors along")


def stack(call: Call) -> Label:
    """Label tensors stacked along a new dimension."""
    labels = [call.label_of(tensor) for tensor in call.args["tensors"]]
    label = agree([label for label in labels if isinstance(label, Entries)])
    return label.at(label.dim + (call.args["dim"] % call.out.dim() <= label.dim))

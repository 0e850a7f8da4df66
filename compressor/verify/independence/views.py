"""Rules of operators that move elements and compute nothing: views, cuts, joins."""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.verify.independence.call import Call, agree, aligned, avoid, dims_of
from compressor.verify.independence.labels import CannotProve, Entries, Label, regroup, size_of, sizes_of


def view(call: Call) -> Label:
    """view, reshape: the row-major order of elements stays; or the same bytes as another type."""
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
    """Dimensions in another order."""
    label, rank = call.only("self"), call.args["self"].dim()
    return label.at([int(dim) % rank for dim in call.args["dims"]].index(label.dim))


def transpose(call: Call) -> Label:
    """transpose and t: two dimensions change places."""
    label, rank = call.only("self"), call.args["self"].dim()
    a, b = (call.args.get(name, default) % rank for name, default in (("dim0", 0), ("dim1", rank - 1)))
    return label.at({a: b, b: a}.get(label.dim, label.dim))


def unsqueeze(call: Call) -> Label:
    """A new dimension of one place."""
    label = call.only("self")
    return label.at(label.dim + (call.dim(extra=1) <= label.dim))


def squeeze(call: Call) -> Label:
    """Dimensions of one place go: those named, or all."""
    label, source = call.only("self"), call.args["self"]
    asked = dims_of(call, "dim")
    if any(isinstance(source.shape[dim], torch.SymInt) for dim in asked):
        raise CannotProve(f"which dimensions of {_shape(source)} go depends on sizes that vary")
    gone = [dim for dim in asked if source.shape[dim] == 1]
    avoid(label, gone, "drops")
    return label.at(label.dim - sum(dim < label.dim for dim in gone))


def expand(call: Call) -> Label:
    """Dimensions of one place, and new ones in front, are repeated."""
    label = aligned(call.args["self"], call.only("self"), call.out.dim())
    assert label is not None
    return label


def repeat(call: Call) -> Label:
    """Copies along each dimension."""
    label = expand(call)
    assert isinstance(label, Entries)
    # Copies stand one after another, so they are a new outermost factor.
    return Entries(label.dim, label.outer * size_of(call.args["repeats"][label.dim]), label.inner)


def drop(call: Call) -> Label:
    """select and unbind: one dimension goes."""
    label, dim = call.only("self"), call.dim()
    avoid(label, [dim], "picks one place of")
    return label.at(label.dim - (dim < label.dim))


def slice_(call: Call) -> Label:
    """A range of places along one dimension."""
    label = call.only("self")
    if label.dim == call.dim() and not _whole(call):
        raise CannotProve(f"it takes a part of dimension {label.dim}, along which the entries lie")
    return label


def _whole(call: Call) -> bool:
    """Whether a slice begins at the first place and skips none; the caller's check of the size tells the rest."""
    start = call.args["start"]
    return (start is None or (isinstance(start, int) and start == 0)) and call.args["step"] == 1


def slice_scatter(call: Call) -> Label:
    """A range of places along one dimension is written."""
    label = agree([call.entries("self"), call.entries("src")])
    dim = call.dim()
    same = sizes_of(call.args["src"])[dim] == sizes_of(call.args["self"])[dim]
    if label.dim == dim and not (_whole(call) and same):
        raise CannotProve(f"it writes a part of dimension {dim}, along which the entries lie")
    return label


def select_scatter(call: Call) -> Label:
    """One place of a dimension is written."""
    dim, source = call.dim(), call.entries("src")
    shifted = None if source is None else source.at(source.dim + (source.dim >= dim))
    return avoid(agree([call.entries("self"), shifted]), [dim], "writes one place of")


def diagonal(call: Call) -> Label:
    """Two dimensions become one, the last."""
    label, pair = call.only("self"), [call.dim("dim1"), call.dim("dim2")]
    avoid(label, pair, "takes the diagonal of")
    return label.at(label.dim - sum(dim < label.dim for dim in pair))


def pad(call: Call) -> Label:
    """Constants are put before and after dimensions, the last first; negative widths crop."""
    rank, pads = call.args["self"].dim(), call.args["pad"]
    touched = [rank - 1 - i // 2 for i, pad in enumerate(pads) if not (isinstance(pad, int) and pad == 0)]
    return avoid(call.only("self"), touched, "pads or crops")


def cat(call: Call) -> Label:
    """Tensors one after another along a dimension."""
    labels = [call.label_of(tensor) for tensor in call.args["tensors"]]
    label = agree([label for label in labels if isinstance(label, Entries)])
    return avoid(label, [call.args["dim"] % call.out.dim()], "joins tensors along")


def stack(call: Call) -> Label:
    """Tensors one after another along a new dimension."""
    labels = [call.label_of(tensor) for tensor in call.args["tensors"]]
    label = agree([label for label in labels if isinstance(label, Entries)])
    return label.at(label.dim + (call.args["dim"] % call.out.dim() <= label.dim))

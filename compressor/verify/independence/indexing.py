"""Rules of operators that read or write places chosen by an index tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compressor.verify.independence.call import Call, agree, aligned, avoid
from compressor.verify.independence.labels import SHARED, CannotProve, Entries, Label


def embedding(call: Call) -> Label:
    """Label rows that are looked up in a shared table, with indices of any shape."""
    return call.only("indices")


@dataclass(frozen=True)
class _Indexing:
    """Positions of dimensions in ``x[None, i, ...]``: advanced indexing with broadcast index tensors."""

    indexed: list[int]  # dimensions of x that have an index
    rank: int  # dimensions of the broadcast index
    first: int  # where those begin in the result

    @classmethod
    def of(cls, call: Call) -> _Indexing:
        given = {dim: index for dim, index in enumerate(call.args["indices"]) if index is not None}
        if any(index.dtype in (torch.bool, torch.uint8) for index in given.values()):
            raise CannotProve("it picks elements by a mask, so that places depend on values")
        indexed = list(given)
        adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
        return cls(indexed, max(index.dim() for index in given.values()), indexed[0] if adjacent else 0)

    def place(self, dim: int) -> int:
        """Return the result's dimension that an unindexed dimension of x becomes."""
        kept = dim - sum(other < dim for other in self.indexed)
        return kept if kept < self.first else kept + self.rank

    def labels(self, call: Call) -> list[Entries]:
        """Return the labels that x and the indices contribute to the result."""
        label = call.entries("self")
        found = []
        if label is not None:
            avoid(label, self.indexed, "picks places by index of")
            found.append(label.at(self.place(label.dim)))
        for index in call.args["indices"]:
            own = SHARED if index is None else call.label_of(index)
            if isinstance(own, Entries):
                found.append(own.at(self.first + self.rank - index.dim() + own.dim))
        return found


def index(call: Call) -> Label:
    """Label ``x[i, None, j]``."""
    return agree(_Indexing.of(call).labels(call))


def index_put(call: Call) -> Label:
    """Label x after ``x[i, None, j] = values``."""
    indexing = _Indexing.of(call)
    values = call.args["values"]
    rank = call.args["self"].dim()
    free = {indexing.place(dim): dim for dim in range(rank) if dim not in indexing.indexed}
    labels = indexing.labels(call)
    written = aligned(values, call.entries("values"), rank - len(indexing.indexed) + indexing.rank)
    label = agree([*labels, written])
    if label.dim not in free:
        raise CannotProve("it writes entries' data to places that an index picks")
    return label.at(free[label.dim])


def index_select(call: Call) -> Label:
    """Label places of one dimension that an index vector selects."""
    dim, label, index = call.dim(), call.entries("self"), call.entries("index")
    if label is not None:
        avoid(label, [dim], "picks places by index of")
    return agree([label, None if index is None else index.at(dim)])


def gather(call: Call) -> Label:
    """Label elements that are read at the index's place along one dimension, and at their own place along the
    others.
    """
    label, index = call.entries("self"), call.entries("index")
    if label is not None:
        avoid(label, [call.dim()], "picks places by index of")
    return agree([label, index])


def scatter(call: Call) -> Label:
    """Label a tensor whose elements are written at the index's places of one dimension: scatter, scatter_add,
    scatter_reduce.
    """
    label = agree([call.entries(name) for name in ("self", "index", "src")])
    return avoid(label, [call.dim()], "writes to places that an index picks of")


def index_write(call: Call) -> Label:
    """Label a tensor after writing the places of one dimension that an index vector selects: index_copy, index_add,
    index_fill.
    """
    if call.entries("index") is not None:
        raise CannotProve("which places it writes depends on the entries' data")
    return avoid(agree([call.entries("self"), call.entries("source")]), [call.dim()], "writes places of")

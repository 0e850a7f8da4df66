"""Gather statistics of what each linear reads: second moments (GPTQ), ranges and mean sizes of channels."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor
from torch.fx import Node

from compressor.graph.sites import EXPERT, Site, family
from compressor.numerics.products.deterministic import BLOCK, column_sums

if TYPE_CHECKING:
    from typing_extensions import Self

FEW_TOKENS = 256
"""Tokens below which an expert's own statistics say less of its inputs than those of all experts of its weight do."""


class Statistic(Protocol):
    """Statistic of the input of one group of linears."""

    def add(self, x: Tensor, dense: Tensor) -> None:
        """Take in the rows of one micro-batch, float32 [tokens, in_features].

        ``dense`` are the same rows in the graph that runs beside this one; ``x`` itself unless one was asked for.
        """


S = TypeVar("S", bound=Statistic)


def pool_experts(groups: Sequence[list[Site]], statistics: list[S]) -> None:
    """Give experts that saw fewer than :data:`FEW_TOKENS` tokens the statistic of all of their weight's, in place.

    Statistics that cannot be pooled stay as they are.

    Args:
        groups: of linears that share an input; each expert is a group.
        statistics: of each group.
    """
    families = defaultdict[tuple[Node, ...], list[int]](list)
    for place, group in enumerate(groups):
        if group[0].module_class == EXPERT:
            families[family(group[0])].append(place)
    for places in families.values():
        few = [place for place in places if getattr(statistics[place], "tokens", FEW_TOKENS) < FEW_TOKENS]
        if few and hasattr(statistics[few[0]], "pooled"):
            pooled = type(statistics[few[0]]).pooled([statistics[place] for place in places])  # type: ignore[attr-defined]
            for place in few:
                statistics[place] = pooled.shared_with(statistics[place].tokens)  # type: ignore[attr-defined]


def expert_tokens(site: Site, statistic: Statistic) -> int | None:
    """Return how many tokens an expert saw; None for a linear that all tokens pass."""
    own: int | None = getattr(statistic, "own_tokens", None)
    seen: int | None = getattr(statistic, "tokens", None)
    return None if site.module_class != EXPERT else seen if own is None else own


def expert_notes(site: Site, statistic: Statistic) -> list[str]:
    """Say of an expert that its statistics are those of all experts of its weight."""
    own: int | None = getattr(statistic, "own_tokens", None)
    if own is None:
        return []
    return [
        f"saw {own} tokens, fewer than {FEW_TOKENS}: calibrated on the {getattr(statistic, 'tokens', 0)} of all "
        f"experts of its weight"
    ]


class Hessian:
    """H = 2 / n * X^T X over n tokens, float32 [in, in] (Frantar et al. 2022, section 3).

    Of the symmetric matrix only the upper half is summed.
    """

    def __init__(self, in_features: int) -> None:
        self.tokens = 0
        self.own_tokens: int | None = None  # of an expert, where others' tokens are counted as well
        self._sum = torch.zeros(in_features, in_features, dtype=torch.float32)
        self._cross: Tensor | None = None
        self._scale = 1.0  # of both, as they are now

    def add(self, x: Tensor, dense: Tensor) -> None:
        """Take in rows, float32 [tokens, in_features]."""
        self._rescale(1.0)
        for first in range(0, x.shape[1], BLOCK):
            last = first + BLOCK
            self._sum[:last, first:last].addmm_(x[:, :last].t(), x[:, first:last])
        self.tokens += len(x)
        if dense is not x:
            self._cross = torch.zeros_like(self._sum) if self._cross is None else self._cross
            self._cross.addmm_((dense - x).t(), x)

    @classmethod
    def pooled(cls, several: Sequence[Self]) -> Self:
        """Return the statistic of all rows that several have seen."""
        whole = copy.copy(several[0])
        whole._sum, whole._cross, whole._scale = torch.zeros_like(whole._sum), None, 1.0
        whole.tokens = sum(one.tokens for one in several)
        for one in several:
            whole._sum += one._sum / one._scale
        whole._rescale(2 / max(1, whole.tokens))  # once for all that share it
        return whole

    def shared_with(self, own_tokens: int) -> Self:
        """Return the same statistic for an expert that saw so many of its tokens."""
        shared = copy.copy(self)
        shared.own_tokens = own_tokens
        return shared

    @property
    def value(self) -> Tensor:
        """The Hessian, until more rows arrive; all zeros if no token ever did."""
        self._rescale(2 / max(1, self.tokens))
        for first in range(BLOCK, len(self._sum), BLOCK):
            last = first + BLOCK
            self._sum[first:last, :first] = self._sum[:first, first:last].t()
        return self._sum

    @property
    def cross(self) -> Tensor | None:
        """2 / n * (X_dense - X)^T X, float32 [in, in]; None where the dense inputs were not asked for."""
        self._rescale(2 / max(1, self.tokens))
        return self._cross

    def _rescale(self, scale: float) -> None:
        """In place: a second copy of the largest statistics would not fit where they just do."""
        if scale != self._scale:
            for matrix in (self._sum, self._cross):
                if matrix is not None:
                    matrix.mul_(scale / self._scale)
            self._scale = scale


class ChannelHessian:
    """H = 2 / n * X^T X of the taps of each channel of a depthwise convolution, float32 [channels, taps, taps]."""

    def __init__(self, channels: int, taps: int) -> None:
        self.tokens = 0
        self._taps, self._sum = taps, torch.zeros(channels, taps, taps)
        self._cross: Tensor | None = None

    def add(self, x: Tensor, dense: Tensor) -> None:
        """Take in rows of patches, float32 [pixels, taps * channels]."""
        rows = self._by_channel(x)
        self._sum.baddbmm_(rows, rows.mT)
        self.tokens += len(x)
        if dense is not x:
            cross = torch.zeros_like(self._sum) if self._cross is None else self._cross
            self._cross = cross.baddbmm_(self._by_channel(dense - x), rows.mT)

    def _by_channel(self, x: Tensor) -> Tensor:
        return x.view(len(x), self._taps, -1).permute(2, 1, 0).contiguous()  # [channels, taps, pixels]

    @property
    def value(self) -> Tensor:
        """The Hessians; all zeros if no row ever arrived."""
        return self._sum * (2 / max(1, self.tokens))

    @property
    def cross(self) -> Tensor | None:
        """2 / n * (X_dense - X)^T X of each channel; None where the dense inputs were not asked for."""
        return None if self._cross is None else self._cross * (2 / max(1, self.tokens))


class MeanSquares:
    """Mean square of each input channel, float64 [in]."""

    def __init__(self, in_features: int) -> None:
        self.tokens, self._sums = 0, torch.zeros(in_features, dtype=torch.float64)

    def add(self, x: Tensor, dense: Tensor) -> None:
        """Add rows, float32 [tokens, in_features]."""
        self._sums += column_sums(x.square())
        self.tokens += len(x)

    @property
    def value(self) -> Tensor:
        """Mean over the tokens."""
        return self._sums / max(1, self.tokens)


class Inputs:
    """Range, mean size and mean square of each channel, float64 [in], and some of the rows.

    Attributes:
        absmax, mean_abs, mean_square: over all tokens; zeros if none ever arrived.
    """

    _EACH = 64  # rows of a micro-batch that are kept

    def __init__(self, in_features: int) -> None:
        self.tokens = 0
        self.own_tokens: int | None = None  # of an expert, where others' tokens are counted as well
        self.absmax = torch.zeros(in_features, dtype=torch.float64)
        self._sums = torch.zeros(2, in_features, dtype=torch.float64)
        self._rows: list[Tensor] = []

    def add(self, x: Tensor, dense: Tensor) -> None:
        """Take in rows, float32 [tokens, in_features]."""
        size = x.abs().double()
        self.absmax = torch.maximum(self.absmax, size.amax(0))
        self._sums += torch.stack([size.sum(0), size.square().sum(0)])
        self.tokens += len(x)
        self._rows.append(x[:: max(1, len(x) // self._EACH)].clone())

    @classmethod
    def pooled(cls, several: Sequence[Self]) -> Self:
        """Return the statistic of all rows that several have seen."""
        whole = copy.copy(several[0])
        whole.tokens = sum(one.tokens for one in several)
        whole.absmax = torch.stack([one.absmax for one in several]).amax(0)
        whole._sums = torch.stack([one._sums for one in several]).sum(0)
        whole._rows = [rows for one in several for rows in one._rows]
        return whole

    def shared_with(self, own_tokens: int) -> Self:
        """Return the same statistic for an expert that saw so many of its tokens."""
        shared = copy.copy(self)
        shared.own_tokens = own_tokens
        return shared

    @property
    def mean_abs(self) -> Tensor:
        """Mean of |x|."""
        return self._sums[0] / max(1, self.tokens)

    @property
    def mean_square(self) -> Tensor:
        """Mean of x^2."""
        return self._sums[1] / max(1, self.tokens)

    @property
    def rows(self) -> Tensor:
        """Some of the rows, float32 [n, in]."""
        return torch.cat(self._rows)

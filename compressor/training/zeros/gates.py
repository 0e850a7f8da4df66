"""Learn which weights stay by a gate for each, which a regulariser drives to 0 or 1, in one training with the weights.

Polarised gates (Zhi et al. 2023, arXiv 2302.10798), one for each weight, in place of one for each channel or layer.
Symbols: w the weights of a matrix; s their scores, with zero half way between the last that the pattern keeps and the
first that it does not, so that its share is exact at any time; g = sigmoid(s) the gates, m = (s > 0) what they tend to.
While training, w g runs; what counts, and what is stored, is w m.  After each step of the optimiser

    s <- s + rate rho (2 m - 1)

goes down the regulariser -rho |s|, which is least where gates are decided.  rho rises straight from zero.  Scores are
bounded, so that a gate that is decided, whose gradient is small, may yet change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from compressor.formats.extras import KeptOfGroup
from compressor.numerics.sparsity.n_of_m import Pattern, largest_allowed

_SHARPNESS = 4.0
"""Odds of a gate at first: w^2 ||x||^2, over what it is where the row's share ends, to this power.  A low one shrinks
what is kept, by gates that are half open; a high one leaves nothing undecided."""
_BOUND = 5.0  # of scores: sigmoid's slope there is 2.7% of that in the middle


def first_scores(weight: Tensor, squares: Tensor, pattern: Pattern) -> Tensor:
    """Return scores that begin with Wanda's choice, the largest |w| ||x|| of each row, float64 [out, in].

    Args:
        weight: float [out, in].
        squares: mean squares of the inputs' channels, float [in].
    """
    scores = _SHARPNESS * (weight.double().square() * squares).clamp_min(1e-30).log()
    if isinstance(pattern, KeptOfGroup):
        return scores
    rows, columns = scores.shape
    count = min(max(1, round(pattern.kept(rows, columns) / rows)), columns - 1)
    last = scores.sort(1, descending=True).values[:, max(0, count - 1) : count + 1]
    return scores - last.mean(1, keepdim=True)  # so that rows are comparable


class Gates:
    """One score for each weight, in the place of some weights; also the masks' part of a training.

    Where weights are trained too, gates change in the first two thirds of the steps, and weights settle in the rest.

    Args:
        weights: float32 [out, in], by name.
        first: scores that are begun with, float [out, in], as :func:`first_scores` gives them; the largest stay.
        pattern: how many stay, and of which.
        steps: of the training.
        rate: the learning rate of a step, the first of which is 0.
        polarisation: rho in the end: at 1, scores are driven apart as fast as the optimiser may move them.
        speed: scores move so many times as fast as weights.
        trains_weights: otherwise they stay as they are.

    Attributes:
        leaves: scores divided by ``speed``, float32 [out * in], as vectors do not decay; and weights that are trained.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        first: Mapping[str, Tensor],
        pattern: Pattern,
        steps: int,
        rate: Callable[[int], float],
        polarisation: float,
        speed: float,
        trains_weights: bool,
    ) -> None:
        self._weights, self._pattern, self._rate = weights, pattern, rate
        self._polarisation, self._speed, self._step = polarisation, speed, 0
        self._last = math.ceil(2 * steps / 3) if trains_weights else steps
        self.leaves, self._kept = dict[str, Tensor](), dict[str, Tensor]()
        for name, weight in weights.items():
            scores = first[name].to(weight.device)
            self._kept[name] = largest_allowed(scores, pattern)
            centred = self._centred(scores, self._kept[name]).clamp_(-_BOUND, _BOUND).float()
            self.leaves[f"{name}.scores"] = (centred / speed).flatten().requires_grad_()
            if trains_weights:
                self.leaves[name] = weight.requires_grad_()

    def fused(self) -> dict[str, Tensor]:
        """Return the weights times their gates, and once weights settle, those that are kept."""
        if self._step >= self._last:
            return self.stored()
        found = {}
        for name, weight in self._weights.items():
            gates = (self._speed * self.leaves[f"{name}.scores"]).sigmoid().view_as(weight)
            found[name] = self.leaves.get(name, weight) * gates
        return found

    def stored(self) -> dict[str, Tensor]:
        """Return the weights that are kept, the others at zero."""
        return {name: self.leaves.get(name, weight) * self._kept[name] for name, weight in self._weights.items()}

    def is_final(self, step: int) -> bool:
        """Return True: as many are kept as shall be, after any step."""
        return True

    def before_step(self, weights: Mapping[str, Tensor]) -> None:
        """Leave gradients as they are."""

    @torch.no_grad()
    def after_step(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Drive scores apart, and keep the weights of the largest."""
        self._step = step
        if step > self._last:
            return
        far = self._rate(step - 1) * self._speed * self._polarisation * step / self._last
        for name, kept in self._kept.items():
            scores = self._speed * self.leaves[f"{name}.scores"].view_as(kept)
            scores += torch.where(kept, far, -far)
            self._kept[name] = largest_allowed(scores, self._pattern)
            scores = self._centred(scores, self._kept[name]).clamp_(-_BOUND, _BOUND)
            self.leaves[f"{name}.scores"].copy_((scores / self._speed).flatten())

    def _centred(self, scores: Tensor, kept: Tensor) -> Tensor:
        """Return scores whose zero is half way between the smallest that is kept and the largest that is not."""
        width = self._pattern.size if isinstance(self._pattern, KeptOfGroup) else scores.numel()
        grouped, inside = scores.view(-1, width), kept.view(-1, width)
        smallest = grouped.masked_fill(~inside, math.inf).amin(1, keepdim=True)
        largest = grouped.masked_fill(inside, -math.inf).amax(1, keepdim=True)
        return (grouped - (smallest + largest) / 2).view_as(scores)

    def state(self) -> dict[str, Tensor]:
        """Return the steps done, and what is kept, which scores do not tell where two are equal."""
        return {"step": torch.tensor(self._step), **self._kept}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a checkpoint's."""
        self._step = int(state["step"])
        self._kept = {name: state[name].to(kept.device, copy=True) for name, kept in self._kept.items()}

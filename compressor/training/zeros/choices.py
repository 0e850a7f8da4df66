"""Learn which N of every M weights of a row are kept, while the weights themselves stay what they are.

MaskLLM (Fang et al. 2024, arXiv 2409.17481, section 3).  Symbols: w the M weights of a group, m_k the masks that a
pattern allows, l_k their logits, g_k noise of Gumbel's distribution, s a sharpness, t a temperature.  While training,

    w * sum_k softmax((s l + g) / t)_k m_k

runs, a differentiable draw of one mask; s rises and t falls, until a draw is one mask, and always the likeliest.
What counts, and what is stored in the end, is w * m_k with the largest l_k.  Where weights were refitted to the first
masks (ALPS), w is the refitted value of those that they keep, and the dense one of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from compressor.formats.extras import KeptOfGroup
from compressor.formats.layouts.patterns import combinations
from compressor.numerics.products.deterministic import apply, product

_SHARPNESS = (1.0, 5.0)
_TEMPERATURE = (4.0, 0.05)
"""At the first and the last step: the paper's, its sharpness in units of the deviation of its first logits."""
_COLD_SHARPNESS, _COLD_TEMPERATURE = (3.0, 5.0), (1.0, 0.05)
"""Where weights are refitted: nearly all draws of the first step are the start's masks."""
_PRIOR = 3.0  # what a logit gains, as in the paper, by each weight that its mask shares with the one at the start

Refitted: TypeAlias = Mapping[str, Tensor] | None
"""Weights that were refitted to a start's masks, with zeros elsewhere, float [out, in], by name; None where they were
not."""


class Choices:
    """One logit for each group and mask, in the place of some weights; also the masks' part of a training.

    Args:
        weights: float32 [out, in], by name; they stay as they are.
        start: which weights are kept at first, bool [out, in], N of every M.
        pattern: N and M.
        steps: of the training.
        seed: of the noise, which follows from it, the step, and the batch in it.
        refitted: as they count where ``start`` keeps them.  They make up for what it leaves out, so draws are near it
            from the first step on.

    Attributes:
        leaves: the logits, float32 [out * groups, masks] of each weight.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        start: Mapping[str, Tensor],
        pattern: KeptOfGroup,
        steps: int,
        seed: int,
        refitted: Refitted = None,
    ) -> None:
        self._sharpness, self._temperature = _SHARPNESS, _TEMPERATURE
        if refitted is not None:
            self._sharpness, self._temperature = _COLD_SHARPNESS, _COLD_TEMPERATURE
        self._weights = dict(weights)
        for name, values in (refitted or {}).items():
            kept = start[name].to(weights[name].device)
            self._weights[name] = torch.where(kept, values.to(weights[name]), weights[name])
        self._steps, self._seed, self._step, self._part = steps, seed, 0, 0
        self.leaves = dict[str, Tensor]()
        sets = torch.tensor(combinations(pattern))
        self._masks = torch.zeros(len(sets), pattern.size).scatter(1, sets, 1.0)
        for name, weight in weights.items():
            shared = start[name].view(-1, pattern.size).float().cpu() @ self._masks.t()
            logits = _PRIOR * (shared - shared.mean(1, keepdim=True))
            self.leaves[f"{name}.logits"] = logits.to(weight.device).requires_grad_()

    def fused(self) -> dict[str, Tensor]:
        """Return the weights by a draw of masks; another one for each batch."""
        done = min(1.0, self._step / max(1, self._steps - 1))
        sharpness, temperature = (first + done * (last - first) for first, last in (self._sharpness, self._temperature))
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + self._step) * 1009 + self._part)
        self._part += 1
        found = {}
        for name, weight in self._weights.items():
            logits = self.leaves[f"{name}.logits"]
            uniform = torch.rand(logits.shape, generator=generator).clamp_(min=1e-20)
            noise = -apply(torch.log, -apply(torch.log, uniform)).to(logits.device)
            drawn = ((sharpness * logits + noise) / temperature).softmax(-1)
            found[name] = weight * product(drawn, self._masks.to(weight.device)).reshape(weight.shape)
        return found

    def stored(self) -> dict[str, Tensor]:
        """Return the weights that the likeliest masks keep, the others at zero."""
        return {name: weight * self.kept(name) for name, weight in self._weights.items()}

    @torch.no_grad()
    def kept(self, name: str) -> Tensor:
        """Return which weights the likeliest masks keep, bool [out, in]."""
        weight = self._weights[name]
        return self._masks.to(weight.device)[self.leaves[f"{name}.logits"].argmax(-1)].view_as(weight) > 0

    def is_final(self, step: int) -> bool:
        """Return True: the likeliest masks have the pattern after any step."""
        return True

    def before_step(self, weights: Mapping[str, Tensor]) -> None:
        """Leave gradients as they are."""

    def after_step(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Count steps, on which sharpness, temperature and noise depend."""
        self._step, self._part = step, 0

    def state(self) -> dict[str, Tensor]:
        """Return the steps done."""
        return {"step": torch.tensor(self._step)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a checkpoint's."""
        self._step, self._part = int(state["step"]), 0

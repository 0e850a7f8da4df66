"""Tell how much a part of a model changes what passes through it: ShortGPT's block influence."""

from __future__ import annotations

import torch
from torch import Tensor


def influences(before: Tensor, behind: Tensor) -> Tensor:
    """Return one minus the cosine between each token's vectors, float32 [tokens].

    The mean over tokens is the block influence of Men et al. 2024 (ShortGPT, arXiv 2403.03853, equation 1).

    Args:
        before, behind: [..., channels], of a residual stream in front of a part and behind it.
    """
    x, y = (value.detach().float().flatten(0, -2) for value in (before, behind))
    return 1 - torch.nn.functional.cosine_similarity(x, y, dim=1)

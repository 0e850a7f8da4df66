"""Settings of a training, and the learning rate that follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from compressor.errors import UsageError

Shape: TypeAlias = Literal["cosine", "linear"]
"""How the learning rate falls after its warm-up: along half a cosine to zero, or straight."""


@dataclass(frozen=True)
class Settings:
    """Numbers that a training goes by; each has the meaning of the option of the same name of `finetune`.

    Raises:
        UsageError: a number is out of its range.
    """

    steps: int
    batch: int
    accumulate: int
    learning_rate: float
    schedule: Shape
    warmup: float
    weight_decay: float
    clip: float
    held_out: float
    evaluate_every: int
    patience: int
    checkpoint_every: int

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch": 1, "accumulate": 1, "evaluate_every": 1, "patience": 0, "checkpoint_every": 1}
        for name, low in least.items():
            if not low <= getattr(self, name) <= 10**9:
                raise UsageError(f"{name} {getattr(self, name)} is not a whole number from {low}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} {getattr(self, name):g} is not a number above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"weight_decay {self.weight_decay:g} is not a number from 0")
        if not 0 <= self.warmup < 1:
            raise UsageError(f"warmup {self.warmup:g} is not a share of the steps, from 0 to below 1")
        if not 0 < self.held_out < 1:
            raise UsageError(f"held_out {self.held_out:g} is not a share of the samples, above 0 and below 1")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, the first of which is 0."""
        rising = math.ceil(self.warmup * self.steps)
        if step < rising:
            return self.learning_rate * (step + 1) / (rising + 1)
        done = (step - rising) / max(1, self.steps - rising)
        fraction = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * fraction


def split(samples: Tensor, held_out: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the samples that are held out, drawn by the seed, and those that are trained on.

    Raises:
        UsageError: there are too few samples to hold some out.
    """
    if len(samples) < 2:
        raise UsageError(f"{len(samples)} sample leaves none to be held out; give more calibration samples")
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    count = min(len(samples) - 1, max(1, round(held_out * len(samples))))
    return samples[order[:count]], samples[order[count:]]


def staged(step: int, steps: int, stages: int = 3) -> float:
    """Return how much of a penalty counts after so many steps: it rises to 1 during two thirds of them, and stays.

    In each stage it rises by as much, along half a wave of a sine (ProSparse, arXiv 2402.13516).
    """
    done = min(stages, stages * step / math.ceil(2 * steps / 3))
    stage = math.floor(done)
    return (stage + (1 - math.cos(math.pi * (done - stage))) / 2) / stages

"""Options that passes that train share, with their defaults, and the learning rate that follows from them.

A pass declares anew the options whose default or meaning differs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from compressor.errors import UsageError
from compressor.training.device import DeviceName

Shape: TypeAlias = Literal["cosine", "linear"]
"""How the learning rate falls after its warm-up: along half a cosine to zero, or straight."""


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Numbers that the loop of a training goes by.

    Attributes:
        steps: of the optimiser.
        batch: samples that run at once.
        accumulate: batches whose gradients are added up for one step.
        learning_rate: at its highest.
        schedule: how it falls to zero: ``cosine`` or ``linear``.
        warmup: share of the steps in which it rises.
        weight_decay: of matrices, times the learning rate a step.
        clip: largest norm of all gradients together.
        held_out: share of the samples that are not trained on.
        evaluate_every: steps between two looks at these.
        patience: looks without a smaller loss after which training ends; 0 goes on to the last step.
        checkpoint_every: steps between two states in the cache, from which a killed run goes on.
    """

    steps: int = 200
    batch: int = 8
    accumulate: int = 1
    learning_rate: float = 1e-3
    schedule: Shape = "cosine"
    warmup: float = 0.05
    weight_decay: float = 0.0
    clip: float = 1.0
    held_out: float = 0.1
    evaluate_every: int = 25
    patience: int = 0
    checkpoint_every: int = 50


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(LoopOptions):
    """Options of every pass that trains.

    Attributes:
        device: what trains, ``cpu`` or ``cuda``, an NVIDIA GPU; each gives its own bits, the same in every run.
    """

    device: DeviceName = "cpu"


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """Choose the parameters that are trained.

    Attributes:
        vectors: train norms and biases too.
        tables: train embedding tables too; one that is tied to a linear is trained with it.
        targets: class names, module names or ``re:`` patterns of the linears to train, and to prune if the pass does.
        ignore: patterns of linears to leave as they are.
    """

    vectors: bool = True
    tables: bool = False
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Train small matrices in the place of linears' weights.

    Attributes:
        adapter_rank: train, for each linear, two matrices of this rank, whose product is added to its weight at the end
            (LoRA); 0 trains the weight itself.
    """

    adapter_rank: int = 0


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """Weigh how far outputs are from those of the teacher.

    Attributes:
        temperature: logits are divided by it; above 1, unlikely tokens count for more.
        hidden: weight of the hidden states' error in the loss, at the places where only the residual stream is live,
            behind each attention and each feed-forward network; 0 leaves them out.
    """

    temperature: float = 1.0
    hidden: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Settings(LoopOptions):
    """Numbers that a training goes by.

    Raises:
        UsageError: a number is out of its range.
    """

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


def spread(samples: Tensor, count: int, pass_name: str) -> Tensor:
    """Return so many samples, evenly spread; all for 0.

    Raises:
        UsageError: there are fewer.
    """
    if count > len(samples):
        raise UsageError(f"{pass_name}: samples {count}: the calibration has {len(samples)}; raise its `samples`")
    return samples[torch.arange(count) * len(samples) // count] if count else samples


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

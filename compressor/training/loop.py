"""The loop: steps on batches in a seeded order, a look at held-out samples now and then, the best weights in the end.

    samples --split--> held out                      for each step: forwards, backwards, clip, AdamW, masks
               '-----> trained on, a new order       now and then:  held-out loss as stored; the best are kept
                       each time through             now and then:  a checkpoint, from which a killed run goes on

Everything that decides a bit is in the state or follows from the step: orders from the seed and the number of the time
through, the learning rate from the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from compressor.progress import Task
from compressor.training.adamw import AdamW, clip
from compressor.training.checkpoints import Checkpoints
from compressor.training.settings import Settings, split
from compressor.training.trainable import Outputs, TrainableGraph
from compressor.training.zeros.masks import Masks

Objective: TypeAlias = Callable[[Tensor, Outputs, int], Tensor]
"""(batch, outputs, steps done) -> the loss, a mean over rows; without dimensions."""


@dataclass
class History:
    """Figures of a training.

    Attributes:
        step: steps done.
        begun, begun_step: held-out loss of the first weights that were worth keeping, and the step it was seen after;
            NaN before there are any.
        best, best_step: the smallest held-out loss, and the step it was seen after.
        since: evaluations since then.
        why: why it ended before its last step; empty if it did not.
    """

    step: int = 0
    begun: float = math.nan
    begun_step: int = -1
    best: float = math.inf
    best_step: int = -1
    since: int = 0
    why: str = ""


class Training:
    """Weights of a graph, their optimiser, and the best of them so far.

    Args:
        samples: int64 [n, S], or a plain module's inputs [n, ...].
        seed: of the split and of the orders.
    Raises:
        UsageError: there are too few samples to hold some out.
    """

    def __init__(
        self,
        model: TrainableGraph,
        objective: Objective,
        samples: Tensor,
        settings: Settings,
        masks: Masks,
        checkpoints: Checkpoints,
        seed: int,
    ) -> None:
        self._model, self._objective, self._settings, self._masks = model, objective, settings, masks
        self._checkpoints, self._seed = checkpoints, seed
        self._held_out, self._samples = split(samples, settings.held_out, seed)
        self._optimiser = AdamW(model.weights, settings.weight_decay)
        self._orders: dict[int, Tensor] = {}
        self.history = History()
        self.best = model.stored()

    def run(self, task: Task) -> Mapping[str, Tensor]:
        """Train to the last step, or until held-out samples say that it is enough.

        Returns:
            The best weights, as stored, in memory.
        """
        every = self._settings.checkpoint_every
        found = self._checkpoints.latest(range(every, self._settings.steps, every))
        if found is not None:
            self._restore(found[1].tensors, found[1].records[0])
            task.advance(self.history.step)
        else:
            self._evaluate()
        history = self.history
        while history.step < self._settings.steps and not history.why:
            self._step()
            if history.step % self._settings.evaluate_every == 0 or history.step == self._settings.steps:
                self._evaluate()
            if history.step % every == 0 and history.step < self._settings.steps and not history.why:
                self._checkpoints.keep(history.step, self._state(), asdict(history))
            task.advance()
        return {name: value.cpu() for name, value in self.best.items()}

    def _step(self) -> None:
        """Go one step."""
        settings, history, weights = self._settings, self.history, self._model.weights
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight)
        for part in range(settings.accumulate):
            number = history.step * settings.accumulate + part
            batch = self._batch(number)
            with torch.enable_grad():
                outputs = self._model(batch, number=number)
                loss = self._objective(batch, outputs, history.step) / settings.accumulate
                loss.backward()  # type: ignore[no-untyped-call]
        self._masks.before_step(weights)
        if not math.isfinite(clip(weights, settings.clip)):
            history.why = f"its gradients were not finite in step {history.step + 1}; lower `learning_rate`"
            return
        self._optimiser.step(history.step + 1, settings.rate(history.step))
        history.step += 1
        self._masks.after_step(history.step, weights)

    def _batch(self, number: int) -> Tensor:
        """Return the samples of a batch: each sample once before any comes again."""
        count, size = len(self._samples), self._settings.batch
        places = range(number * size, (number + 1) * size)
        return self._samples[torch.stack([self._order(place // count)[place % count] for place in places])]

    def _order(self, turn: int) -> Tensor:
        """Return the order of the samples in their so manieth time through."""
        if turn not in self._orders:
            self._orders = {other: order for other, order in self._orders.items() if other >= turn - 1}
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + turn + 1)
            self._orders[turn] = torch.randperm(len(self._samples), generator=generator)
        return self._orders[turn]

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Hold the weights, as they will be stored, against the best so far."""
        history = self.history
        if not self._masks.is_final(history.step):
            return
        stored = self._model.stored()
        values = {name: weight.float() for name, weight in stored.items()}
        losses = 0.0
        for batch in torch.split(self._held_out, self._settings.batch):
            losses += float(self._objective(batch, self._model(batch, values), history.step)) * len(batch)
        loss = losses / len(self._held_out)
        if history.begun_step < 0:
            history.begun, history.begun_step = loss, history.step
        if loss < history.best or history.best_step < 0:
            history.best, history.best_step, history.since, self.best = loss, history.step, 0, stored
            return
        history.since += 1
        if history.since == self._settings.patience:
            history.why = f"its held-out loss did not fall in {history.since} evaluations"

    def _state(self) -> dict[str, Tensor]:
        optimiser = self._optimiser
        kinds = {
            "weight": self._model.weights,
            "first": optimiser.first,
            "second": optimiser.second,
            "best": self.best,
            "mask": self._masks.state(),
        }
        return {
            f"{kind}/{name}": value.detach().cpu() for kind, found in kinds.items() for name, value in found.items()
        }

    @torch.no_grad()
    def _restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, object]) -> None:
        def of(kind: str) -> dict[str, Tensor]:
            return {name[len(kind) + 1 :]: value for name, value in tensors.items() if name.startswith(f"{kind}/")}

        places = (("weight", self._model.weights), ("first", self._optimiser.first), ("second", self._optimiser.second))
        for kind, into in places:
            for name, value in of(kind).items():
                into[name].copy_(value)
        self.best = {name: value.clone() for name, value in of("best").items()}
        self._masks.restore(of("mask"))
        self.history = History(**facts)  # type: ignore[arg-type]

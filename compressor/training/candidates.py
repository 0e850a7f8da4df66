"""Train all alternatives of a sub-layer in one run, before they are scored: sort once, train once.

    state in front of the sub-layer --> whole sub-layer --> state behind it, as it is in the whole model
                                   '--> widest                 '--> ||s - t||^2 / ||t||^2, the mean over tokens
                                   '--> one drawn
                                   '--> narrowest

Blockwise distillation as Puzzle does it (arXiv 2411.19146, section 3), of all alternatives in one run, of which three
take part in a step (the sandwich rule of slimmable networks, arXiv 1903.05134).  Each begins as its part of the sorted
weights and of the least squares fit, and has weights of its own from then on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.calibration.segment_runner import SegmentRunner
from compressor.errors import UsageError
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import set_parameter
from compressor.graph.segments import Segment, cut_at
from compressor.host.digests import digest
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import TrainingNeeds
from compressor.pipeline.structured.architecture import (
    Parts,
    bare_start,
    build,
    find_parts,
    naming,
    own_parameters,
    shapes_of,
)
from compressor.progress import Task
from compressor.search.space import Alternative, Mapped, Space, Start, Starts, SubLayer, physical
from compressor.training.checkpoints import Checkpoints
from compressor.training.device import Device
from compressor.training.loop import Training
from compressor.training.objectives.losses import hidden_error
from compressor.training.settings import Settings
from compressor.training.trainable import Outputs, Reader, TrainableGraph
from compressor.training.zeros.masks import KeptZeros

_AT_ONCE = 3  # alternatives of a step: the widest, the narrowest, and one between them


@dataclass(frozen=True, kw_only=True)
class CandidateOptions:
    """Say how a search trains its alternatives, and on what.

    Attributes:
        samples: that the search looks at, evenly spread over the calibration's; 0 takes all, as passes behind it do.
        steps: train each sub-layer's alternatives together so often before they are scored; 0 leaves them as least
            squares found them.
        batch: samples of such a step.
        learning_rate: at its highest.
    """

    samples: int = 0
    steps: int = 0
    batch: int = 4
    learning_rate: float = 1e-3

    def check_training(self, pass_name: str) -> None:
        """Refuse numbers out of their range.

        Raises:
            UsageError: says which.
        """
        if min(self.steps, self.samples) < 0:
            raise UsageError(f"{pass_name}: steps {self.steps} or samples {self.samples} is below 0")
        with naming(pass_name):
            _ = self.settings

    @property
    def settings(self) -> Settings:
        """Return the numbers that each training goes by."""
        steps = max(1, self.steps)
        every = max(1, steps // 4)
        return Settings(steps=steps, batch=self.batch, learning_rate=self.learning_rate, evaluate_every=every)

    @property
    def training(self) -> TrainingNeeds | None:
        """Return what it takes forwards and backwards, as if each step took one alternative of every sub-layer."""
        return TrainingNeeds(self.steps * self.batch, self.batch, True) if self.steps else None


class Stretch:
    """A sub-layer of a graph that runs on batches of states in front of it.

    Args:
        graph: whole model or one as it is built with an alternative in each sub-layer's place.
        layer: names the nodes at both ends, which are the same in either.
    """

    def __init__(self, graph: GraphModule, layer: SubLayer) -> None:
        named = {node.name: node for node in graph.graph.nodes}
        self._graph, self._exit = graph, named[layer.branch.exit.name]
        self._segment: Segment = cut_at(graph, [named[layer.branch.entry.name]])[1]
        self._shared: dict[tuple[int, ...], dict[Node, Any]] = {}

    def __call__(self, ids: Tensor, hidden: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the state behind the sub-layer, float32 [B, S, D].

        Args:
            ids: int64 [B, S].
            hidden: state in front of it.
            weights: in the place of parameters.
        """
        runner = SegmentRunner(self._graph, [ids])
        runner.shared, runner.hidden = self._shared, [hidden]
        runner.interpreter = Reader(self._graph, weights, (), Device())
        return runner.run(self._segment, runner.environment(self._segment, 0), [self._exit])[0]


class Candidates(TrainableGraph):
    """Alternatives of a sub-layer whose weights are trained together.  Samples are their numbers, int64 [B].

    Args:
        graph: whole model.
        layer, ones, starts: alternatives of a sub-layer, the widest first, and how they begin.
        stretches: of the graphs with each of them.
        ids, hidden: of all samples, and the states of each in front of the sub-layer.

    Attributes:
        ran: labels of the alternatives of the last call, in the order of its outputs.
    """

    def __init__(
        self,
        graph: GraphModule,
        layer: SubLayer,
        ones: Sequence[Alternative],
        starts: Mapping[str, Start],
        stretches: Mapping[str, Stretch],
        ids: Tensor,
        hidden: Sequence[Tensor | None],
        seed: int,
    ) -> None:
        super().__init__(graph)
        self.labels = [one.label for one in ones]
        self.ran = list(self.labels)
        self._whole, self._stretches, self._ids, self._hidden = Stretch(graph, layer), stretches, ids, hidden
        self._seed = seed
        self._names: dict[str, list[str]] = {}
        self._kinds: dict[str, torch.dtype] = {}
        for one in ones:
            start, cut = starts[one.label], layer.cut(one)
            self._names[one.label] = list(shapes_of(graph, layer, one))
            for name in self._names[one.label]:
                value = start.weights[name] if name in start.weights else graph.get_parameter(name).detach()
                if cut is not None and name not in start.weights:
                    value = physical(value, name, cut, start.kept)
                leaf = f"{one.label}/{name}"
                new = layer.mapped.dtype(graph, name) if isinstance(layer.mapped, Mapped) else None
                self._kinds[leaf] = new or graph.get_parameter(name).dtype
                self.weights[leaf] = value.to(torch.float32, copy=True).requires_grad_()

    def stored(self) -> dict[str, Tensor]:
        """Return the weights of each alternative as they will be stored, named by its label and the parameter."""
        return {leaf: value.detach().to(self._kinds[leaf], copy=True) for leaf, value in self.weights.items()}

    def __call__(
        self, batch: Tensor, weights: Mapping[str, Tensor] | None = None, number: int | None = None
    ) -> Outputs:
        """Return the states behind the sub-layer of the alternatives whose turn it is, or of all.

        Args:
            weights: as :meth:`stored` names them, in place of its own.
            number: of the batch in a training, which draws them; None runs all.
        """
        self.ran = self.drawn(number)
        ids, hidden = self._batch(batch)
        found = []
        for label in self.ran:
            held = self.weights if weights is None else weights
            own = {name: held[f"{label}/{name}"] for name in self._names[label]}
            found.append(self._stretches[label](ids, hidden, own))
        return Outputs(found[0], found)

    @torch.no_grad()
    def target(self, batch: Tensor) -> Tensor:
        """Return the states behind the whole sub-layer."""
        return self._whole(*self._batch(batch), {})

    def _batch(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        states = [self._hidden[i] for i in batch.tolist()]
        return self._ids[batch], torch.cat([state for state in states if state is not None])

    def drawn(self, number: int | None) -> list[str]:
        """Return the labels of the alternatives that take part in a batch of this number; all without one."""
        if number is None or len(self.labels) <= _AT_ONCE:
            return list(self.labels)
        first, *between, last = self.labels
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        return [first, between[int(torch.randint(len(between), (1,), generator=generator))], last]


class AlternativesTraining(Training):
    """Train alternatives together, and keep the best weights of each by held-out samples, its first ones included."""

    def __init__(self, model: Candidates, samples: Tensor, settings: Settings, checkpoints: Checkpoints, seed: int):
        def objective(batch: Tensor, outputs: Outputs, step: int) -> Tensor:
            expected = model.target(batch)
            return hidden_error(outputs.hidden, [expected] * len(outputs.hidden))

        super().__init__(model, objective, samples, settings, KeptZeros({}, ()), checkpoints, seed)
        self._candidates = model
        self.figures = {label: torch.full((2,), math.nan, dtype=torch.float64) for label in model.labels}

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Hold each alternative, as it will be stored, against the best of it so far."""
        model, history = self._candidates, self.history
        stored = model.stored()
        values = {name: weight.float() for name, weight in stored.items()}
        losses = dict.fromkeys(model.labels, 0.0)
        for batch in torch.split(self._held_out, self._settings.batch):
            outputs, expected = model(batch, values), model.target(batch)
            for label, state in zip(model.ran, outputs.hidden, strict=True):
                losses[label] += float(hidden_error([state], [expected])) * len(batch) / len(self._held_out)
        for label, loss in losses.items():
            figures = self.figures[label]
            if math.isnan(float(figures[0])):
                figures[:] = loss
            elif loss < float(figures[1]):
                figures[1] = loss
                self.best |= {name: value for name, value in stored.items() if name.startswith(f"{label}/")}
        first, best = torch.stack([*self.figures.values()]).mean(0).tolist()
        if history.begun_step < 0:
            history.begun, history.begun_step, history.best_step = first, history.step, history.step
        if best < history.best:
            history.best, history.best_step = best, history.step

    def _state(self) -> dict[str, Tensor]:
        return super()._state() | {f"figures/{label}": value for label, value in self.figures.items()}

    def _restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, object]) -> None:
        super()._restore(tensors, facts)
        self.figures = {label: tensors[f"figures/{label}"].clone() for label in self.figures}


def train_candidates(
    graph: GraphModule,
    ctx: Context,
    pass_name: str,
    parts: Parts,
    space: Space,
    starts: Starts,
    ids: Tensor,
    settings: Settings,
    key: str,
) -> list[dict[str, Start]]:
    """Return starts whose weights are trained, sub-layer after sub-layer, and note each one's loss before and after.

    Beside the graph, one sub-layer's weights and the states in front of it are in memory.

    Args:
        graph: whole, its channels sorted; it stays as it is.
        ids: samples that nothing is scored on, int64 [samples, sequence].
        key: digest of everything that determines the starts.
    """
    found = [dict(row) for row in starts]
    turns = [i for i, row in enumerate(space) if any(one.label in starts[i] for one in row)]
    walk, whole = Walk(graph, ctx, pass_name, parts, space, starts, ids), digest(key, dataclasses.asdict(settings))
    with ctx.reporter.task("train candidates", settings.steps * len(turns)) as task:
        for i in turns:
            layer = parts.layers[i]
            checkpoints = Checkpoints(ctx.results, digest(whole, layer.name), f"{pass_name}: {layer.name}")
            tensors, figures = _trained(ctx, walk, i, settings, checkpoints, task)
            for label, start in starts[i].items():
                own = {n.removeprefix(f"{label}/"): v.float() for n, v in tensors.items() if n.startswith(f"{label}/")}
                found[i][label] = Start(start.kept, own, dict.fromkeys(start.errors, figures[label][1]))
            told = ", ".join(f"{label} {first:.4g} to {last:.4g}" for label, (first, last) in figures.items())
            ctx.notes.append(f"{pass_name}: {layer.name}: held-out error of the state behind it, trained: {told}")
    return found


def _trained(
    ctx: Context, walk: Walk, place: int, settings: Settings, checkpoints: Checkpoints, task: Task
) -> tuple[Mapping[str, Tensor], Mapping[str, Sequence[float]]]:
    """Return the best weights of a sub-layer's alternatives, and the losses of each, at first and at last."""
    ctx.blocks += 1
    if (known := checkpoints.result()) is not None:
        ctx.reused += 1
        task.advance(settings.steps)
        return known.tensors, known.records[0]
    model = walk.candidates(place)
    training = AlternativesTraining(model, torch.arange(len(walk.ids)), settings, checkpoints, ctx.seed)
    tensors = training.run(task)
    figures = {label: value.tolist() for label, value in training.figures.items()}
    return checkpoints.finish(tensors, [figures]), figures


class Walk:
    """Samples on their way through the whole model, from sub-layer to sub-layer."""

    def __init__(
        self, graph: GraphModule, ctx: Context, pass_name: str, parts: Parts, space: Space, starts: Starts, ids: Tensor
    ) -> None:
        self._graph, self._pass_name, self._seed, self.ids = graph, pass_name, ctx.seed, ids
        self._layers, self._space, self._starts = parts.layers, space, starts
        self._stream = SegmentRunner(graph, torch.split(ids, 1), ctx.spill)
        self._entries = list(dict.fromkeys(layer.branch.entry for layer in parts.layers))
        self._cut, self._passed = cut_at(graph, self._entries), 0
        self._built: dict[str, GraphModule] = {}

    def candidates(self, place: int) -> Candidates:
        """Return the alternatives of a sub-layer, with all samples in front of it."""
        layer, starts = self._layers[place], self._starts[place]
        for segment in self._cut[self._passed : self._entries.index(layer.branch.entry) + 1]:
            self._stream.advance(segment)
            self._passed += 1
        ones = [one for one in self._space[place] if one.label in starts]
        ones.sort(key=lambda one: -sum(map(math.prod, shapes_of(self._graph, layer, one).values())))
        stretches = {one.label: Stretch(self._with(one.label), layer) for one in ones}
        return Candidates(self._graph, layer, ones, starts, stretches, self.ids, self._stream.hidden, self._seed)

    def _with(self, label: str) -> GraphModule:
        """Return a graph with an alternative wherever there is one of this label; the sub-layers have no weights."""
        if label not in self._built:
            graph = clone_graph(self._graph)
            for layer in self._layers:
                for name in own_parameters(graph, layer):
                    set_parameter(graph, name, graph.get_parameter(name).detach().to("meta"))
            parts = find_parts(graph, self._pass_name, 0, 0)
            picks = [next((one for one in row if one.label == label), row[0]) for row in self._space]
            starts = [
                {one.label: Start(row[label].kept) if label in row and not one.is_linear else bare_start(graph, x, one)}
                for x, one, row in zip(parts.layers, picks, self._starts, strict=True)
            ]
            build(graph, Context(), self._pass_name, parts, picks, starts)
            self._built[label] = graph
        return self._built[label]

"""Plan and measure candidates for a budget, and choose the one that predicts most like the dense model.

    candidates -> plan: bytes, step -> those that may fit -> passes, quality, time -> least divergence within the budget

Quality is measured on the graph that the passes leave, which is what kernels are held to; the run of the chosen recipe
measures its bundle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.codegen.backend import make_backend
from compressor.data.images import Images
from compressor.data.load import load_data
from compressor.errors import UsageError, first_line
from compressor.evaluate.fidelity.result import EvalResult
from compressor.evaluate.generation.decoders import evaluation_window
from compressor.evaluate.quality import (
    GraphLogits,
    graph_classes,
    image_batch,
    measure_accuracy,
    measure_quality,
)
from compressor.executor.jobs import Executor
from compressor.graph.model import ModelInfo, weight_bytes
from compressor.graph.sites import linear_sites
from compressor.pipeline.pipeline import Pipeline
from compressor.plan.passes import plan_passes
from compressor.plan.prices import machine_prices
from compressor.plan.roofline import bound_ms
from compressor.progress import Reporter
from compressor.recipe.recipe import Recipe
from compressor.run.automatic.candidates import Budget, Candidate, Formats, ImageFormats, named, packed_table
from compressor.run.clock import Clock
from compressor.run.prepare import Prepared, prepare
from compressor.run.steps import Steps
from compressor.search.programme import UnreachableError

_EVALUATION, _IMAGES = "python_docs_heldout", 50
_UNIFORM_TRIED = 2
"""Formats of one kind within the bytes that are measured, the largest: those with fewer bits lose more."""

_AIM = 0.95
"""Share of a budget of time that searches aim at: times differ by some percent from one measurement to the next."""


@dataclass
class Tried:
    """Hold a candidate, and what became of it.

    Attributes:
        predicted_bytes, predicted_ms: of the plan; None where there is none.
        weight_bytes, kl_divergence: measured on the graph behind the passes; None if it was not tried.
        perplexity, accuracy: likewise, of text and of images.
        latency: a step or an image, as a share of the dense model's on the target's kernels; None if not measured.
        note: why it was not tried.
        least: bytes that a search reaches at least, where they are above the budget.
        chosen: it is the best within the budget.
    """

    candidate: Candidate
    predicted_bytes: float | None = None
    predicted_ms: float | None = None
    weight_bytes: int | None = None
    latency: float | None = None
    kl_divergence: float | None = None
    perplexity: float | None = None
    accuracy: float | None = None
    note: str = ""
    least: float | None = None
    chosen: bool = False
    graph: GraphModule | None = field(default=None, repr=False)

    def content(self) -> dict[str, Any]:
        """Return plain data for a report."""
        figures = {name: value for name, value in vars(self).items() if name not in ("candidate", "graph")}
        return {"name": self.candidate.name, "kind": self.candidate.kind, "passes": self.candidate.passes, **figures}


class Choosing:
    """Tries candidates of one model, target and budget.

    Args:
        setting: a recipe's keys but for ``passes``; without ``evaluation``, text is that which is shipped, and images
            are those that calibration leaves.
    Raises:
        UsageError: the model is neither a decoder of text nor a classifier of images, or its data do not do.

    Attributes:
        setting: as given, with what was left out.
    """

    def __init__(self, setting: Mapping[str, Any], budget: Budget, executor: Executor, reporter: Reporter) -> None:
        self.setting, self._budget, self._executor, self._reporter = dict(setting), budget, executor, reporter
        self._captured = capture(self.recipe([]).model_source(), weights=False)
        info: ModelInfo = self._captured.meta["model"]
        if info.kind != "decoder" and not info.classes:
            what = "neither a decoder of text nor a classifier of images"
            raise UsageError(f"auto: {info.name} is {what}, which candidates are for; write a recipe")
        if info.kind == "decoder":
            self.setting.setdefault("evaluation", _EVALUATION)
        kind = ImageFormats if info.classes else Formats
        self._formats = kind.of(site.in_features for site in linear_sites(self._captured))
        _, data = load_data(self.recipe([]), info)  # what does not do is said now
        if info.classes and data is None:
            raise UsageError("auto: evaluation: needs labelled images; give others than those of the calibration")
        self._dense: GraphModule | None = None
        self.tried: list[Tried] = []

    def recipe(self, passes: Sequence[Any]) -> Recipe:
        """Return the recipe with these passes."""
        return Recipe.from_dict({**self.setting, "passes": list(passes)})

    def choose(self) -> Tried:
        """Return the best candidate; all that were considered are in :attr:`tried`.

        Raises:
            UsageError: nothing is within the budget; it names the least that is reached.
        """
        self.tried = [self._planned(one) for one in (*self._formats.uniform(), *self._formats.mixed(self._budget))]
        if self._budget.kind == "weight_bytes":
            self.tried += self._smaller()
            self._leave_out()
            if all(one.note for one in self.tried):
                self._refuse("predicted_bytes")
        for one in self.tried:
            if not one.note:
                self._measure(one)
        if self._budget.kind == "latency":
            self._time()
            for one in self._quicker():
                self.tried.append(one)
                if not one.note:
                    self._measure(one)
            self._time()
            if not any(map(self._fits, self.tried)):
                self._refuse("latency")
        within = [one for one in self.tried if self._fits(one)]
        if not within:
            self._refuse("weight_bytes")
        best = min(within, key=_divergence)
        best.chosen = True
        for one in self.tried:
            one.graph = None
        return best

    def _planned(self, candidate: Candidate) -> Tried:
        """Plan a candidate; one that this model or budget refuses is left out, with the reason."""
        try:
            final = self._plan(candidate.passes)
        except UsageError as error:
            return Tried(candidate, note=first_line(error).removeprefix("recipe: "), least=_least(error))
        step = bound_ms(final, machine_prices(reporter=self._reporter))
        return Tried(candidate, weight_bytes(final), step)

    def _plan(self, passes: Sequence[Any]) -> GraphModule:
        """Return the graph without weights that passes leave."""
        recipe = self.recipe(passes)
        return plan_passes(self._captured, recipe, make_backend(recipe.target.build())).final

    def _bytes(self, passes: Sequence[Any]) -> int:
        return weight_bytes(self._plan(passes))

    def _smaller(self) -> list[Tried]:
        """Plan searches of architectures for formats in which the whole model is too large."""
        found = []
        for scheme in self._formats.searched:
            packed = self._formats.packed(scheme)
            dense_table, whole = self._bytes(packed), self._bytes([*packed, *packed_table(self._formats.tables[0])])
            if whole > self._budget.limit:  # the search counts the table as it still is
                saved = dense_table - whole
                one = self._planned(self._formats.architecture(scheme, {"weight_bytes": self._budget.limit + saved}))
                if one.least is not None:
                    one.least -= saved
                    one.note = f"takes {self._budget.told(one.least)} at least"
                found.append(one)
        return found

    def _quicker(self) -> list[Tried]:
        """Plan searches of architectures for formats in which a step takes too long, where they may be the best."""
        within = [one for one in self.tried if self._fits(one)]
        best = min(within, key=_divergence, default=None)
        found = []
        for scheme in self._formats.searched:
            name = named(scheme, self._formats.tables[0])
            whole = next((one for one in self.tried if one.candidate.name == name and one.latency is not None), None)
            if whole is None or whole.latency is None or self._fits(whole):
                continue
            share = round(_AIM * self._budget.limit / whole.latency, 3)
            one = self._planned(self._formats.architecture(scheme, {"latency": share}))
            if best is not None and _divergence(best) <= _divergence(whole) and not one.note:
                one.note = f"{name} with all layers loses no less than {best.candidate.name}"
            found.append(one)
        return found

    def _leave_out(self) -> None:
        """Say of the candidates above the budget, and of uniform ones far below, that they are not tried."""
        fitting = 0
        for one in self.tried:
            if one.note or one.predicted_bytes is None:
                continue
            searches = one.candidate.kind == "architecture"  # planned as if all stayed
            if one.predicted_bytes > self._budget.limit and not searches:
                one.note = "above the budget"
            elif one.candidate.kind == "uniform":
                fitting += 1
                if fitting > _UNIFORM_TRIED:
                    one.note = "larger ones fit"

    def _fits(self, one: Tried) -> bool:
        value = one.weight_bytes if self._budget.kind == "weight_bytes" else one.latency
        return value is not None and value <= self._budget.limit

    def _refuse(self, figure: str) -> NoReturn:
        """Say that the budget is too small, and the least that candidates reach, by that figure of each."""
        asked = f"budget {self._budget.kind}: {self._budget.told(self._budget.limit)} cannot be met"
        reached = [(value, one) for one in self.tried for value in (getattr(one, figure), one.least) if value]
        reached = [(value, one) for value, one in reached if value > self._budget.limit]
        if not reached:
            raise UsageError(f"{asked}: {self.tried[0].note}; write a recipe")
        value, least = min(reached, key=lambda each: each[0])
        told = f"the least is {self._budget.told(value)}, by {least.candidate.name}"
        raise UsageError(f"{asked}: {told}; raise the budget, or write a recipe with smaller formats")

    def _measure(self, one: Tried) -> None:
        """Run a candidate's passes, and measure what they leave."""
        recipe = self.recipe(one.candidate.passes)
        self._reporter.note(f"candidate: {one.candidate.name}")
        try:
            given = prepare(recipe, None, None, None, Path("."), None, None, Clock(self._reporter))
            given.context.executor = self._executor
            one.graph = Pipeline(recipe.passes).run(given.take_graph(), given.context)
        except UsageError as error:  # decided on the samples, as what a search reaches
            one.note = first_line(error)
            return
        self._dense = self._dense or given.dense_graph()
        quality = _quality(given, one.graph)
        one.weight_bytes = weight_bytes(one.graph)
        one.kl_divergence, one.perplexity, one.accuracy = quality.kl_divergence, quality.perplexity, quality.accuracy
        if self._budget.kind != "latency":
            one.graph = None

    def _time(self) -> None:
        """Time a step or an image of each candidate that has not been timed, in turns with the dense model."""
        graphs = [one for one in self.tried if one.graph is not None and one.latency is None]
        if self._dense is None or not graphs:
            return
        clock = Steps(self.recipe([]), None, self._reporter)
        (dense, *others), _ = clock([self._dense, *(one.graph for one in graphs if one.graph is not None)])
        for one, seconds in zip(graphs, others, strict=True):
            one.latency = seconds / dense


def _divergence(one: Tried) -> float:
    return math.inf if one.kl_divergence is None else one.kl_divergence


def _quality(given: Prepared, graph: GraphModule) -> EvalResult:
    info = given.info
    if isinstance(given.data, Images):
        theirs, batch = graph_classes(given.dense_graph()), image_batch(graph, _IMAGES)
        classify = graph_classes(graph)
        return measure_accuracy(classify, given.data, batch=batch, dense=theirs, reporter=given.clock.reporter)
    assert isinstance(given.data, Tensor)  # of a decoder of text
    window, stride = evaluation_window(given.recipe.evaluation, info.max_positions, given.clock.reporter)
    dense = GraphLogits(given.dense_graph(), spill=given.context.spill)
    ours = GraphLogits(graph, spill=given.context.spill)
    return measure_quality(ours, given.data, window=window, stride=stride, dense=dense, reporter=given.clock.reporter)


def _least(error: BaseException | None) -> float | None:
    """Return what is the least that can be reached where that is behind an error."""
    while error is not None:
        if isinstance(error, UnreachableError):
            return error.least
        error = error.__cause__
    return None

"""A pipeline of passes over an FX graph, what hangs on it between two passes, and the registry of passes.

A pass is a frozen dataclass whose fields are its keys in a recipe.  Its name is its file's name in
``compressor/passes``, or the name of an entry point in the group ``compressor.passes``.  Nothing here imports
torch before a pass is asked for, so that listing the names is quick.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from compressor.errors import CompressorError, UsageError

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compressor.calibration.calibrate import Samples
    from compressor.host.tensor_files import Spill
    from compressor.pipeline.segment_cache import Results

_GROUP = "compressor.passes"


class Task(Protocol):
    """One line of progress."""

    def advance(self, amount: int = 1) -> None:
        """``amount`` more units are done."""


class Reporter(Protocol):
    """Where progress goes; the command line draws it, the library only reports."""

    def task(self, name: str, total: int) -> AbstractContextManager[Task]:
        """A task of ``total`` units, which ends with the ``with`` block."""

    def note(self, text: str) -> None:
        """One line for the user that is not an error."""


class Silent:
    """The reporter that says nothing."""

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Task]:
        """A task that nobody sees."""
        yield self

    def advance(self, amount: int = 1) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


@dataclass(frozen=True)
class SiteRecord:
    """What a pass did to one linear.

    Attributes:
        site: module name of the linear.
        pass_name: recipe name of the pass.
        format: name of the format it is stored in now.
        bytes_before, bytes_after: bytes of its weight, counted on the tensors (without the bias).
        error: relative squared error: of the site's outputs over the calibration samples where ``error_of``
            is "output", of the weight where it is "weight".
        rtn_error: the same error for round to nearest; None where the pass does not know it.
        note: whatever the user should know, empty when all is as asked for.
    """

    site: str
    pass_name: str
    format: str
    bytes_before: int
    bytes_after: int
    error: float
    error_of: str
    rtn_error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class StageRecord:
    """Cost of one stage: 0 is the captured graph, then one for each pass.

    Attributes:
        blocks: stretches of the graph that the pass worked on.
        reused: those of them that an earlier run had finished.
    """

    index: int
    name: str
    seconds: float
    weight_bytes: int
    blocks: int = 0
    reused: int = 0


@dataclass
class Context:
    """What passes share: inputs of the run, and the records that they leave.

    Attributes:
        samples: calibration samples, or None when the recipe has none.
        seed: of every random choice.
        target: name of the target that the graph will be lowered to.
        reporter: progress and notes.
        records: one entry for each site and pass, in order.
        stages: one entry for the captured graph and each pass, in order.
        results: blocks that earlier runs finished, and where this one's are kept; None keeps all in memory.
        state: digest of everything that led to the graph as it is; with ``results`` only.
        spill: where calibration puts hidden states that memory is too short for; None keeps them in memory.
        notes: what passes have to say beside their records, a line each.
        prices: what work costs on this machine, seconds by unit (:data:`compressor.plan.prices.UNITS`); None where it
            was not measured.
        dense: the graph before the first linear was packed, for passes that say ``needs_dense``; else None.
        blocks, reused: blocks that the passes worked on so far, and those that came from ``results``.
    """

    samples: Samples | None = None
    seed: int = 0
    target: str = "x86"
    reporter: Reporter = field(default_factory=Silent)
    records: list[SiteRecord] = field(default_factory=list)
    stages: list[StageRecord] = field(default_factory=list)
    results: Results | None = None
    state: str = ""
    spill: Spill | None = None
    notes: list[str] = field(default_factory=list)
    prices: Mapping[str, float] | None = None
    dense: GraphModule | None = None
    blocks: int = 0
    reused: int = 0

    def calibration(self, pass_name: str, purpose: str = "") -> Samples:
        """The calibration samples.

        Raises:
            UsageError: there are none; says what for, if that is given.
        """
        if self.samples is None:
            what = f"calibration samples{purpose and ' for the '}{purpose}"
            raise UsageError(f"{pass_name}: needs {what} and the recipe has none; add `calibration:`")
        return self.samples


@runtime_checkable
class Pass(Protocol):
    """One rewriting of the graph; implement it as a frozen dataclass whose fields are its options.

    One that compares with the graph before the first linear was packed has ``needs_dense: ClassVar[bool] = True`` and
    finds it in ``Context.dense``.
    """

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Return the rewritten graph, which runs in PyTorch; the given one may be changed in place."""


Observer: TypeAlias = "Callable[[int, str, GraphModule, Context], None]"
"""Called after capture and after every pass with (index, name, graph, context); raises to stop the run."""


@dataclass(frozen=True)
class Pipeline:
    """Passes in order, and the observers that look at the graph before the first and after each of them.

    Every stage is timed and its weights counted, in ``Context.stages``.
    """

    passes: Sequence[Pass]
    observers: Sequence[Observer] = ()

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Run all passes; errors of a pass are raised as they are."""
        self._finish(0, "capture", 0.0, graph, ctx)
        for index, step in enumerate(self.passes, start=1):
            begin, blocks, reused = time.perf_counter(), ctx.blocks, ctx.reused
            self._remember(index, graph, ctx)
            graph = step.run(graph, ctx)
            graph.recompile()  # for passes that leave it to us
            seconds = time.perf_counter() - begin
            self._finish(index, pass_name(step), seconds, graph, ctx, ctx.blocks - blocks, ctx.reused - reused)
            if ctx.results is not None:
                ctx.state = _next_state(ctx, step, graph)
        ctx.dense = None
        return graph

    def _remember(self, index: int, graph: GraphModule, ctx: Context) -> None:
        """Keep the graph as long as it is dense and this pass or a later one will compare with it."""
        from compressor.graph.sites import twin

        if not any(getattr(step, "needs_dense", False) for step in self.passes[index - 1 :]):
            ctx.dense = None  # weights that passes made are in memory
        elif not ctx.records:
            ctx.dense = twin(graph)

    def _finish(
        self, index: int, name: str, seconds: float, graph: GraphModule, ctx: Context, blocks: int = 0, reused: int = 0
    ) -> None:
        from compressor.graph.sites import weight_bytes

        ctx.stages.append(StageRecord(index, name, seconds, weight_bytes(graph), blocks, reused))
        for observe in self.observers:
            observe(index, name, graph, ctx)


def _next_state(ctx: Context, step: Pass, graph: GraphModule) -> str:
    """The digest after a pass: of what it was asked to do on which samples, or, if it is not ours, of what it left."""
    from compressor.host.digests import tensors_sha256
    from compressor.pipeline.segment_cache import digest

    package, _, name = type(step).__module__.rpartition(".")
    if package == _GROUP:
        learnt_from = None if ctx.samples is None else ctx.samples.sha256
        return digest(ctx.state, name, dataclasses.asdict(step), learnt_from)  # type: ignore[call-overload]
    held = [*graph.named_parameters(), *graph.named_buffers()]
    return digest(str(graph.graph), tensors_sha256(held))


@dataclass(frozen=True)
class Dump:
    """Observer that writes each stage's printed code as ``<folder>/<index>_<name>.py``."""

    folder: Path

    def __call__(self, index: int, name: str, graph: GraphModule, ctx: Context) -> None:
        """Write one file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{index:02d}_{name}.py"
        path.write_text(graph.print_readable(print_output=False), encoding="utf-8")


def pass_name(step: Pass) -> str:
    """The name of a pass: its file's name in ``compressor.passes``, its class's in lower case elsewhere."""
    package, _, module = type(step).__module__.rpartition(".")
    return module if package == _GROUP else type(step).__name__.lower()


def available_passes() -> dict[str, str]:
    """Names of all passes, each with the module (or ``module:Class``) it is in; imports none of them."""
    shipped = pkgutil.iter_modules([str(Path(__file__).parent / "passes")])
    found = {module.name: f"{_GROUP}.{module.name}" for module in shipped if not module.name.startswith("_")}
    others = {entry.name: entry.value for entry in entry_points(group=_GROUP)}
    return dict(sorted({**others, **found}.items()))


def pass_class(name: str) -> type[Any]:
    """The dataclass of a pass.

    Raises:
        UsageError: no pass has that name (the nearest is named), or two packages claim it.
        CompressorError: its module cannot be imported, or holds no or several classes that could be the pass.
    """
    known = available_passes()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise UsageError(f"pass {name!r} is unknown; nearest: {near[0]}; there are: {', '.join(known)}")
    claims = {known[name], *(entry.value for entry in entry_points(group=_GROUP, name=name))}
    if len(claims) > 1:
        raise UsageError(f"pass {name!r} is claimed by {' and '.join(sorted(claims))}; uninstall one of them")
    path, _, attribute = known[name].partition(":")
    try:
        module = importlib.import_module(path)
        candidates = [getattr(module, attribute)] if attribute else list(vars(module).values())
    except (ImportError, AttributeError) as error:
        raise CompressorError(f"pass {name!r}: {known[name]} cannot be imported: {error}") from error
    found: list[type[Any]] = [c for c in candidates if _is_pass(c) and (attribute or c.__module__ == path)]
    if len(found) != 1:
        names = ", ".join(c.__name__ for c in found) or "none"
        raise CompressorError(
            f"pass {name!r}: {known[name]} must define exactly one frozen dataclass with a method `run`; found: {names}"
        )
    return found[0]


def _is_pass(candidate: object) -> bool:
    if not (inspect.isclass(candidate) and dataclasses.is_dataclass(candidate)):
        return False
    return candidate.__dataclass_params__.frozen and callable(getattr(candidate, "run", None))  # type: ignore[attr-defined]

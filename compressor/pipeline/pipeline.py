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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from compressor.errors import CompressorError, UsageError
from compressor.pipeline.context import Context, StageRecord

if TYPE_CHECKING:
    from torch.fx import GraphModule


_GROUP = "compressor.passes"


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
        from compressor.graph.model import twin

        if not any(getattr(step, "needs_dense", False) for step in self.passes[index - 1 :]):
            ctx.dense = None  # weights that passes made are in memory
        elif not ctx.records:
            ctx.dense = twin(graph)

    def _finish(
        self, index: int, name: str, seconds: float, graph: GraphModule, ctx: Context, blocks: int = 0, reused: int = 0
    ) -> None:
        from compressor.graph.model import weight_bytes

        ctx.stages.append(StageRecord(index, name, seconds, weight_bytes(graph), blocks, reused))
        for observe in self.observers:
            observe(index, name, graph, ctx)


def _next_state(ctx: Context, step: Pass, graph: GraphModule) -> str:
    """The digest after a pass: of what it was asked to do on which samples, or, if it is not ours, of what it left."""
    from compressor.host.digests import digest, tensors_sha256

    package, _, name = type(step).__module__.rpartition(".")
    if package == _GROUP:
        learnt_from = None if ctx.samples is None else ctx.samples.sha256
        return digest(ctx.state, name, dataclasses.asdict(step), learnt_from)  # type: ignore[call-overload]
    held = [*graph.named_parameters(), *graph.named_buffers()]
    return digest(str(graph.graph), tensors_sha256(held))


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

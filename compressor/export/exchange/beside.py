"""Write what a recipe exports beside its bundle: asked before the first pass, and named once the run has ended well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.export.exchange.job import export_graph
from compressor.export.publish import check_apart, check_destination, publishing
from compressor.progress import Reporter
from compressor.recipe.exports import ExportSpec
from compressor.recipe.recipe import Recipe


def export_folder(spec: ExportSpec, bundle: Path) -> Path:
    """Return the folder of an export: its own, or the bundle's name with the export's behind it."""
    return Path(spec.output) if spec.output else bundle.with_name(f"{bundle.name}-{spec.to.replace('_', '-')}")


def plan_exports(recipe: Recipe, graph: GraphModule, bundle: Path) -> None:
    """Check that the exports of a recipe can be written of the graph that its passes will leave; no weight is read.

    Raises:
        RecipeError: one cannot: the site and its format, or the folder, are named.
    """
    for place, spec in enumerate(recipe.exports):
        try:
            check_destination(folder := export_folder(spec, bundle))
            check_apart(bundle, folder)
            spec.export.plan_for(graph, recipe)
        except UsageError as error:
            raise recipe.problem(("exports", place), str(error)) from error


@dataclass
class BesideBundle:
    """Hold the exports of a run.

    Attributes:
        folders: each export with the folder that it is written to, and the one that this will become.
        recipe: the recipe of the run; None without exports.
        done: what ``compress export --json`` prints of those that are written.
    """

    folders: Sequence[tuple[ExportSpec, Path, Path]] = ()
    recipe: Recipe | None = None
    done: list[dict[str, Any]] = field(default_factory=list)

    def write(self, graph: GraphModule, reporter: Reporter) -> None:
        """Write all exports of a compressed graph."""
        if self.recipe is None:
            return
        for spec, partial, folder in self.folders:
            form = spec.export.plan_for(graph, self.recipe)
            self.done.append(export_graph(graph, form, partial, folder, spec.check, reporter).content())


@contextmanager
def publishing_exports(recipe: Recipe, bundle: Path) -> Iterator[BesideBundle]:
    """Make a folder for each export that takes its place when the block ends well, and vanishes otherwise."""
    with ExitStack() as stack:
        named = [(spec, export_folder(spec, bundle)) for spec in recipe.exports]
        folders = [(spec, stack.enter_context(publishing(folder)), folder) for spec, folder in named]
        yield BesideBundle(folders, recipe)

"""Say before any work whether the model can be saved as a checkpoint too, as it is before its weights are packed.

Passes that leave it dense come first; the graph behind the last of them, in front of the first that packs a weight, is
what is saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.export.checkpoints.folder import FolderForm, plan_folder
from compressor.export.checkpoints.program import ProgramForm, plan_program
from compressor.export.publish import is_program_file
from compressor.plan.passes import PlannedPasses
from compressor.recipe.recipe import Recipe
from compressor.registry import PASSES


@dataclass(frozen=True)
class PlannedCheckpoint:
    """Hold how the model is saved beside its bundle.

    Attributes:
        after: the number of passes that it has behind it.
        form: how it is written.
        note: the same in words.
    """

    after: int
    form: FolderForm | ProgramForm
    note: str


def plan_checkpoint(planned: PlannedPasses, recipe: Recipe, source: object = None) -> PlannedCheckpoint | None:
    """Plan the checkpoint that a recipe asks for; None if it asks for none.

    Args:
        source: where the model comes from, which is not written over; a model in memory, or None, is nowhere.
    Raises:
        RecipeError: it cannot be written; ``bundle only`` and the reason.
    """
    if recipe.checkpoint is None:
        return None
    try:
        place = Path(recipe.checkpoint)
        if isinstance(source, str | Path) and place.exists() and place.resolve() == Path(source).resolve():
            raise UsageError(f"{recipe.checkpoint} is the model that is read; choose another name")
        return _plan(planned, recipe)
    except UsageError as error:
        raise recipe.problem(("checkpoint",), str(error)) from error


def _plan(planned: PlannedPasses, recipe: Recipe) -> PlannedCheckpoint:
    graphs = [*planned.before, planned.final]
    after = next((place for place, graph in enumerate(graphs) if _is_packed(graph)), len(graphs)) - 1
    if after < 1:
        raise UsageError("no pass leaves another dense model: put those that prune before those that pack weights")
    last, is_program = PASSES.name_of(recipe.passes[after - 1]), is_program_file(Path(recipe.checkpoint or ""))
    for step, planned_pass in zip(recipe.passes[:after], planned.passes, strict=False):
        if not is_program and not planned_pass.is_exact:
            raise UsageError(f"bundle only: {PASSES.name_of(step)} {step.inexact}, or leave `checkpoint` out")
    graph = graphs[after]
    form = plan_program(graph) if is_program else plan_folder(graph, recipe.trust_remote_code)
    note = f"checkpoint: the model as {last} leaves it goes to {recipe.checkpoint}, {form.words}"
    return PlannedCheckpoint(after, form, note)


def _is_packed(graph: GraphModule) -> bool:
    """Return whether an operator of a graph reads packed weights or caches."""
    return any("::packed_" in getattr(node.target, "name", str)() for node in graph.graph.nodes)

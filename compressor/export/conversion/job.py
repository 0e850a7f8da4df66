"""Convert: check the arguments, open the original, choose by weight, write, compare, and name the folder, or nothing.

A --check_original--> headers are right     --open_original--> dense graph, values of its codes
  --choose--> codes by weight, exact or refitted   --plan, write--> B, read again and equal to that
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from compressor.data.text import load_evaluation
from compressor.errors import UsageError
from compressor.evaluate.fidelity.result import EvalResult
from compressor.evaluate.quality import GraphLogits, measure_quality
from compressor.export.conversion.choice import (
    Chosen,
    Place,
    Refit,
    choose,
    choose_format,
    formats,
    places,
    put,
)
from compressor.export.conversion.original import Original, check_original, open_original
from compressor.export.exchange.export import Export, FolderExport, Form
from compressor.export.exchange.job import Exported, export_graph
from compressor.export.publish import check_apart, publishing
from compressor.graph.model import ModelInfo, clone_graph
from compressor.host.tensor_files import release
from compressor.progress import Reporter, Silent
from compressor.recipe.data_spec import EvaluationSpec

_SHOWN, _WINDOW = 3, 256


@dataclass(frozen=True)
class Converted:
    """Tell the result of a conversion.

    Attributes:
        original: the folder that was converted.
        exported: what was written.
        chosen: by weight that was stored as codes, how it is stored now.
        quality: of the new model beside the original, on a text; None without one.
        notes: beside those of the export.
    """

    original: Path
    exported: Exported
    chosen: Mapping[str, Chosen]
    quality: EvalResult | None
    notes: tuple[str, ...]

    def content(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        lossy = {name: {"to": one.name, "relative_error": one.error} for name, one in self.chosen.items() if one.error}
        found: dict[str, Any] = {
            **self.exported.content(),
            "from": str(self.original),
            "weights": len(self.chosen),
            "equal_weights": len(self.chosen) - len(lossy),
            "refitted": lossy,
            "largest_relative_error": max((one.error for one in self.chosen.values()), default=0.0),
        }
        found["notes"] = [*found["notes"], *self.notes]
        return found | ({} if self.quality is None else {"quality": self.quality.metrics()})


def convert(
    folder: Path,
    destination: Path,
    export: Export,
    refit: str | None = None,
    text: Path | None = None,
    model: str | None = None,
    check: bool | None = None,
    reporter: Reporter | None = None,
) -> Converted:
    """Convert a bundle or a folder of quantised weights to another layout; the new folder appears whole or not at all.

    Args:
        refit: format, or type of the layout's own, for weights that no grid of the layout holds; None refuses those.
        text: a file on which the new model is compared with the original.
        model: see :func:`open_original`.
        check: see :func:`export_graph`.
    Raises:
        UsageError: an argument is wrong, the original damaged, or a weight cannot be held; the weight is named.
        VerificationError: what was written is not what was chosen.
        ResourceError: the disk is full.
    """
    reporter = reporter or Silent()
    check_apart(folder, destination)
    if export.reads_text:
        raise UsageError(f"{export.title} does not hold weights; it is written by `compress export`")
    wanted = None if refit is None else Refit.parse(refit, export)
    check_original(folder)
    original = open_original(folder, model)
    tokens = None if text is None else _tokens(original.graph, text)
    listed = places(original.graph, original.packed)
    chosen = _choose(original, listed, export, wanted, reporter)
    graph, form, chosen = _planned(original, listed, export, chosen)
    with publishing(destination) as partial:
        exported = export_graph(graph, form, partial, destination, check, reporter)
        quality = None
        if tokens is not None:
            models = GraphLogits(graph), GraphLogits(original.graph)
            window = min(_WINDOW, original.graph.meta["model"].max_positions or _WINDOW)
            quality = measure_quality(
                models[0], tokens, window=window, stride=window, dense=models[1], reporter=reporter
            )
    return Converted(folder, exported, chosen, quality, (*original.notes, *_notes(original, export, chosen)))


def _tokens(graph: GraphModule, text: Path) -> Any:
    """Return the tokens of a text, int64.

    Raises:
        UsageError: there is none, or no tokenizer, or the model does not continue texts.
    """
    info: ModelInfo = graph.meta["model"]
    if info.kind != "decoder":
        raise UsageError(f"--text: {info.name} is of the kind {info.kind}; only decoders are compared on a text")
    return load_evaluation(EvaluationSpec(text=(str(text),)), None, info.source, info.vocab_size)[0]


def _choose(
    original: Original, listed: Sequence[Place], export: Export, refit: Refit | None, reporter: Reporter
) -> dict[str, Chosen]:
    """Choose for each weight by itself.

    Raises:
        UsageError: some have no place; they are named.
    """
    found, wrong = dict[str, Chosen](), dict[str, str]()
    with reporter.task("convert", len(listed)) as task:
        for place in listed:
            name = place.site.parameter
            stored = original.graph.get_parameter(name).detach()
            answer = choose(place, original.packed[name], stored.float(), export, refit)
            if isinstance(answer, str):
                wrong[place.site.module] = answer
            else:
                found[name] = answer
            release([stored])
            task.advance()
    if wrong:
        told = "\n".join(f"{name}: {why}" for name, why in list(wrong.items())[:_SHOWN])
        more = f" (and {len(wrong) - _SHOWN} more weights)" if len(wrong) > _SHOWN else ""
        names = ", ".join(("W4A16_G64", *export.types))
        raise UsageError(f"{told}{more}; choose another layout, or let such weights lose: --refit {names}, ...")
    return found


def _planned(
    original: Original, listed: Sequence[Place], export: Export, chosen: dict[str, Chosen]
) -> tuple[GraphModule, Form, dict[str, Chosen]]:
    """Plan the new folder; where a layout has one format for all, take the smallest that holds every weight.

    Raises:
        UsageError: the layout cannot hold the model.
    """
    try:
        return (*_plan(original, listed, export, chosen), chosen)
    except UsageError:
        common = _in_one_format(original, listed, export) if len({one.name for one in chosen.values()}) > 1 else None
        if common is None:
            raise
        return (*_plan(original, listed, export, common), common)


def _plan(
    original: Original, listed: Sequence[Place], export: Export, chosen: Mapping[str, Chosen]
) -> tuple[GraphModule, Form]:
    graph = clone_graph(original.graph)
    for place in listed:
        put(graph, place, chosen[place.site.parameter])
    graph.recompile()
    fitted = {name: one.parts for name, one in chosen.items() if one.parts is not None}
    form = export.plan(graph)
    return graph, replace(form, fitted=fitted) if isinstance(form, FolderExport) else form


def _in_one_format(original: Original, listed: Sequence[Place], export: Export) -> dict[str, Chosen] | None:
    """Return all weights in the one format of the fewest bytes that holds their values; None if there is none."""
    packable = [place for place in listed if next(formats(place, export), None) is not None]
    for fmt in formats(packable[0], export) if packable else ():
        found = {place.site.parameter: Chosen("") for place in listed}
        for place in packable:
            name = place.site.parameter
            one = choose_format(place, original.graph.get_parameter(name).detach().float(), export, fmt)
            if one is None:
                break
            found[name] = one
        else:
            return found
    return None


def _notes(original: Original, export: Export, chosen: Mapping[str, Chosen]) -> list[str]:
    """Say what of the original the new folder does not have."""
    found = []
    if dense := [name for name, one in chosen.items() if not one.name]:
        found.append(f"{export.title} has no codes for tables: {', '.join(dense)} is dense there, with equal values")
    rounded = {
        own.format.name
        for name, own in original.packed.items()
        if own is not None and own.format.activations is not None
        and ((packed := chosen[name].packed) is None or packed.format.activations is None)
    }  # fmt: skip
    found += [f"activations are floats here: {name} rounds them in the bundle" for name in sorted(rounded)]
    return found

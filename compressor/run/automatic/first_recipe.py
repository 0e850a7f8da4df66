"""Write a first recipe for a model, with comments: `compress init`.

    model, target, scheme, data --capture without weights, plan the passes--> text, with the bytes that it will give

Nothing is written that a plan of the passes refuses.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.codegen.backend import make_backend
from compressor.data.load import load_data
from compressor.errors import RecipeError, UsageError, failed_write
from compressor.graph.kinds.tables import embedding_tables
from compressor.graph.model import ModelInfo, weight_bytes
from compressor.graph.sites import linear_sites
from compressor.host.cache import replace_file
from compressor.plan.passes import plan_passes
from compressor.recipe.gates import is_measured
from compressor.recipe.recipe import Recipe
from compressor.run.automatic.candidates import Formats, ImageFormats, packed_table

_SHIPPED_TEXT, _SHIPPED_EVALUATION, _SHIPPED_WINDOW = "python_docs", "python_docs_heldout", 256
_TEXT_WINDOW = 512
_GATES = (("perplexity_increase", "<= 5%"), ("embedding_cosine", ">= 0.98"), ("top1_agreement", ">= 95%"))
"""Gates to begin with: the first that is measured on a kind of model."""
_REMARKS = {
    ("gptq", "scheme"): " # bits of weights and activations, weights that share a scale: `compress list formats`",
    ("gptq", "ignore"): " # the output layer; where it is the embedding's table, that is packed below",
    ("embedding", "scheme"): " # one scale for each token's row; leave out this pass to keep the table as it is",
}


@dataclass(frozen=True)
class Wishes:
    """Hold what somebody asks of a first recipe.

    Attributes:
        model: folder, name of a shipped model, or id on the Hugging Face hub.
        target: name of a target.
        scheme: name of a format; None makes one of ``bits``.
        bits: bits of a weight; None takes 4, and for networks of images 8.
        text: file of text that passes learn from; None takes the shipped text.
        images: folder or file of images, for a network that classifies them.
    """

    model: str
    target: str
    scheme: str | None = None
    bits: int | None = None
    text: str | None = None
    images: str | None = None


@dataclass(frozen=True)
class FirstRecipe:
    """Hold a recipe that was written, and what is known of it.

    Attributes:
        file: where it lies.
        text: its content.
        facts: model, kind, scheme, weight bytes before and after, for JSON.
    """

    file: Path
    text: str
    facts: Mapping[str, Any]


def write_first_recipe(wishes: Wishes, file: Path) -> FirstRecipe:
    """Write a recipe into a new file, which the plan of its passes accepts.

    Raises:
        UsageError: the file is there already, the model is not served, or the wishes do not fit it or one another.
    """
    check_place(file)
    setting: dict[str, Any] = {"model": _from(file, wishes.model), "target": wishes.target}
    captured = capture(Recipe.from_dict({**setting, "passes": []}).model_source(), weights=False)
    info: ModelInfo = captured.meta["model"]
    setting |= _data(wishes, info, file)
    formats = (ImageFormats if info.classes else Formats).of(site.in_features for site in linear_sites(captured))
    scheme = wishes.scheme or _scheme(formats, wishes.bits or (8 if info.classes else 4))
    setting["passes"] = _passes(captured, formats, scheme)
    gate = next(((name, limit) for name, limit in _GATES if is_measured(name, info.kind, info.hears)), None)
    setting |= {} if gate is None else {"gates": dict([gate])}
    try:
        recipe = Recipe.from_dict(setting, file.parent)
        load_data(recipe, info)
        final = plan_passes(captured, recipe, make_backend(recipe.target.build())).final
    except RecipeError as error:  # it names a place in a recipe that nobody has seen
        raise UsageError(f"{wishes.model}: {str(error).removeprefix('recipe: ')}") from error
    before, after = weight_bytes(captured), weight_bytes(final)
    text = "\n".join(_lines(setting, file, info, (before, after)))
    try:
        replace_file(file, text.encode())
    except OSError as error:
        raise failed_write(error, f"{file}: cannot be written: {error.strerror}; choose another place") from error
    facts = {"model": wishes.model, "kind": info.kind, "architecture": info.architecture, "scheme": scheme}
    return FirstRecipe(file, text, {**facts, "dense_weight_bytes": before, "weight_bytes": after})


def check_place(file: Path) -> None:
    """Refuse to write over what exists.

    Raises:
        UsageError: there is something of that name, or no folder for it.
    """
    if file.exists() or file.is_symlink():
        raise UsageError(f"{file}: is there already, and is left as it is; remove it, or take another name with -o")
    if not file.parent.is_dir():
        raise UsageError(f"{file.parent}: no such folder; make it, or take another name with -o")


def _from(file: Path, name: str) -> str:
    """Return how a recipe in a file names something that is in the current folder, or has a name anywhere."""
    is_beside = file.parent.absolute() == Path.cwd()
    return str(Path(name).absolute()) if Path(name).exists() and not is_beside else name


def _data(wishes: Wishes, info: ModelInfo, file: Path) -> dict[str, Any]:
    """Return what the passes learn from, and what quality is measured on.

    Raises:
        UsageError: the model reads something else.
    """
    if info.classes:
        if wishes.images is None or wishes.text is not None:
            raise UsageError(f"{wishes.model}: classifies images; name a folder of them with --images, and no --text")
        return {"calibration": {"images": _from(file, wishes.images), "samples": 64}}
    if info.kind == "module" or info.hears:
        raise UsageError(
            f"{wishes.model}: reads neither text nor images to classify; start from a shipped recipe: "
            "`compress list recipes`, `compress show gptq_w4a16_speech_x86`"
        )
    if wishes.images is not None:
        raise UsageError(f"{wishes.model}: reads text; give --text in place of --images")
    longest = info.max_positions or _TEXT_WINDOW
    if wishes.text is not None:
        window = min(_TEXT_WINDOW, longest)
        return {"calibration": {"text": _from(file, wishes.text), "samples": 64, "sequence_length": window}}
    if longest < _SHIPPED_WINDOW:
        raise UsageError(
            f"{wishes.model}: has {longest} positions, and the shipped text comes in windows of {_SHIPPED_WINDOW} "
            "tokens; give a text of your own with --text"
        )
    return {"calibration": _SHIPPED_TEXT, "evaluation": _SHIPPED_EVALUATION}


def _scheme(formats: Formats, bits: int) -> str:
    """Return the format of so many bits, in groups that fit the model's linears."""
    if found := next((name for name in formats.schemes if name.startswith(f"W{bits}A")), None):
        return found
    return f"W{bits}A16{formats.schemes[-1].partition('A16')[2]}"


def _passes(captured: GraphModule, formats: Formats, scheme: str) -> list[dict[str, dict[str, Any]]]:
    """Return GPTQ for the linears, and a pass for tables of embeddings where only embeddings and linears read them."""
    tables = [table for table in embedding_tables(captured) if not table.others]
    tied = {table.site.weight_name for table in tables if table.linears}
    chosen = dict(formats.chosen_by)
    left = [site.name for site in linear_sites(captured) if site.weight_name in tied or site.name == "lm_head"]
    if "ignore" in chosen:
        chosen = {"ignore": left} if left else {}
    return [{"gptq": {"scheme": scheme, **chosen}}, *(packed_table() if tables else [])]


def _lines(setting: Mapping[str, Any], file: Path, info: ModelInfo, sizes: tuple[int, int]) -> Iterator[str]:
    """Yield the lines of the file."""
    before, after = sizes
    place, bundle = (shlex.quote(_printable(name)) for name in (str(file), f"build/{file.stem}"))
    yield f"# {_printable(info.name)}: {_printable(info.architecture)}, {info.parameters:,} parameters."
    yield f"# By the plan its weights go from {before:,} to {after:,} bytes."
    yield "#"
    yield f"#     compress plan {place}"
    yield f"#     compress run {place} -o {bundle}"
    yield ""
    yield f"model: {_value(setting['model'])} # a folder, a shipped model, or an id on the Hugging Face hub"
    yield ""
    shipped = setting["calibration"] == _SHIPPED_TEXT
    images = "images" in setting["calibration"]
    what = "Images" if images else "Text"
    yield f"# {what} that GPTQ learns from: the more like what the model will meet, the better."
    if shipped:
        yield "# This is shipped, and about Python; your own: {text: FILE, samples: 64, sequence_length: 512}"
    yield f"calibration: {_value(setting['calibration'])}"
    yield ""
    if shipped:
        yield "# Text that quality is measured on; GPTQ does not see it."
        yield f"evaluation: {_value(setting['evaluation'])}"
    else:
        yield "# Quality is measured on what calibration leaves of its data, unless other data are named here:"
        yield f"# evaluation: {'{images: FOLDER}' if images else '{text: FILE, tokens: 16384}'}"
    yield ""
    yield "passes: # in this order; `compress list passes` has more, `compress show gptq` all options"
    for step in setting["passes"]:
        ((name, options),) = step.items()
        yield f"  - {name}:"
        for key, value in options.items():
            yield f"      {key}: {_value(value)}{_REMARKS.get((name, key), '')}"
    yield ""
    yield f"target: {_value(setting['target'])} # `compress list targets`"
    yield "tune: quick # how long to look for fast kernels: off, quick or full"
    if "gates" in setting:
        yield ""
        yield "# Exit code 3 when the result is worse than this."
        yield "gates:"
        for metric, limit in setting["gates"].items():
            yield f'  {metric}: "{limit}"'
    yield ""


def _printable(text: str) -> str:
    """Return text for a comment: a name may hold the end of a line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _value(value: Any) -> str:
    """Write a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20, sort_keys=False, allow_unicode=True)
    return text.removesuffix("...\n").strip()

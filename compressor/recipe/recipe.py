"""Load recipes.  Every error reads ``file:line: key: what; why; nearest valid name``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from pydantic import (
    Field,
    PrivateAttr,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)

from compressor.errors import RecipeError
from compressor.host.resources import nearest_shipped_model, resource
from compressor.recipe.data_spec import DataSource, EvaluationSpec, Section, TextSpec
from compressor.recipe.drafts import ExitSpec, SparseSpec, read_drafts
from compressor.recipe.exports import build_exports
from compressor.recipe.gates import Gate, check_measured
from compressor.recipe.located_yaml import DEEPEST, KeyPath, Origin, Source, nearest
from compressor.recipe.options import TargetSpec, build_passes, build_target, options_of
from compressor.recipe.overrides import apply_override, set_device, set_value
from compressor.recipe.sources import (
    SOUND_TABLES,
    expand_data,
    find_shipped,
    is_dir,
    is_file,
    is_model_file,
    package_folder,
    read_recipe,
    shipped_names,
)
from compressor.registry import PASSES

__all__ = ["DataSource", "EvaluationSpec", "Gate", "Recipe", "TargetSpec", "TextSpec", "load_recipe", "load_text_spec"]

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


class Recipe(Section):
    """A model, and everything that is to be done with it.

    Attributes:
        model: folder, ``.pt2`` archive or ONNX file (beside the recipe, or in the current folder), name of a shipped
            model, hub id, or ``package:<package>/<folder>`` for a model in an installed Python package.
        trust_remote_code: run code that comes with the model.
        calibration: data that calibrated passes use.
        evaluation: data that quality is measured on.
        passes: the passes, in order: frozen dataclasses that satisfy :class:`compressor.pipeline.pipeline.Pass`.
        target: the target to generate code for.
        tune: how long to search for fast kernels.
        speculate: how a decoder's bundle drafts tokens that it verifies several at a time: a kind of
            :mod:`compressor_runtime.speculation.kinds.registry`, or the kinds ``exit`` and ``sparse`` with an option;
            None makes no entry that verifies.
        gates: conditions that the result must meet.
        output: folder of the bundle, relative to the current folder.
        checkpoint: folder (Hugging Face) or ``.pt2`` file (torch.export) for the model before the first pass that packs
            weights, relative to the current folder; None writes none.
        exports: what is written for other programs (:class:`compressor.recipe.exports.ExportSpec`).
        seed: of every random choice outside calibration.
    """

    model: StrictStr | None = Field(default=None, min_length=1)
    trust_remote_code: StrictBool = False
    calibration: TextSpec | None = None
    evaluation: EvaluationSpec = EvaluationSpec()
    passes: tuple[Any, ...]
    target: TargetSpec = TargetSpec("x86")
    tune: Literal["off", "quick", "full"] = "quick"
    speculate: StrictStr | ExitSpec | SparseSpec | None = None
    gates: tuple[Gate, ...] = ()
    output: StrictStr | None = Field(default=None, min_length=1)
    checkpoint: StrictStr | None = Field(default=None, min_length=1)
    exports: tuple[Any, ...] = ()
    seed: StrictInt = Field(default=0, ge=0, lt=2**63)

    _source: Source = PrivateAttr(default_factory=lambda: Source({}))

    @field_validator("speculate", mode="before")
    @classmethod
    def _known_drafts(cls, given: Any) -> Any:
        return read_drafts(given)

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if self.calibration is not None and self.calibration.held_out:
            name = self.calibration.name or self.calibration.files
            raise ValueError(f"calibration: {name} is held out, for evaluation only; calibrate on other text")
        if self.calibration is None and self.evaluation.in_domain is not None:
            raise ValueError("evaluation.in_domain: counts windows of `calibration`, and there is none; remove it")
        has_text = self.calibration is not None or self.evaluation.kind is not None
        check_measured(self.gates, self.evaluation, has_text)
        return self

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], folder: str | Path = ".") -> Recipe:
        """Build a recipe from plain data with the keys of the YAML form.

        An entry of ``passes`` may also be a pass itself.  Relative paths refer to ``folder``, then to the
        current folder.

        Raises:
            RecipeError: anything about it is wrong; the message begins with ``recipe`` in the place of ``file:line``.
        """
        source = Source({}, {(): Origin("recipe", 0, Path(folder))})
        source.data = _copied(source, (), data)
        expand_data(source)
        return _build(source)

    @property
    def drafts(self) -> str | None:
        """Return the kind of drafts, without its options."""
        return self.speculate if self.speculate is None or isinstance(self.speculate, str) else self.speculate.kind

    def problem(self, path: KeyPath, what: str) -> RecipeError:
        """Make an error about one of the recipe's keys that names the place where the key was written."""
        return self._source.error(path, what)

    def model_source(self) -> Path | str:
        """Return the model's folder or file, or its id on the Hugging Face hub.

        Raises:
            RecipeError: the recipe names no model, or neither a folder nor an id.
        """
        if self.model is None:
            raise self.problem((), "model: missing; add `model:`, or name one with --model")
        if (installed := package_folder(self._source, self.model)) is not None:
            return installed
        folder = self._source.origin(("model",)).folder
        shipped = resource("models") / self.model if re.fullmatch(r"\w+", self.model) else None
        places = [(folder / self.model).absolute(), Path(self.model).absolute(), *([shipped] if shipped else [])]
        in_file = is_model_file(self.model)
        found = next((place for place in places if is_dir(place) or (in_file and is_file(place))), None)
        if found is not None:
            return found
        if in_file:
            looked = " and ".join(dict.fromkeys(map(str, places)))
            raise self.problem(("model",), f"{self.model!r}: no such file (looked at {looked})")
        meant = nearest_shipped_model(self.model)
        if _HUB_ID.fullmatch(self.model) and not self.model.startswith(".") and not meant:
            return self.model
        looked = " and ".join(dict.fromkeys(map(str, places)))
        hint = f"; nearest shipped model: {meant}" if meant else ""
        raise self.problem(("model",), f"{self.model!r} is neither a folder (looked at {looked}) nor a hub id{hint}")

    def check_files(self) -> None:
        """Check that the model and all files exist and have the hashes that the recipe states.

        Raises:
            RecipeError: something is missing or changed.
        """
        self.model_source()
        self.check_texts()

    def check_texts(self) -> None:
        """Check that all data files exist and have the hashes that the recipe states.

        Raises:
            RecipeError: a file is missing or changed.
        """
        for spec in (self.calibration, self.evaluation):
            if spec is not None:
                spec.find_files()

    def resolved(self) -> dict[str, Any]:
        """Return plain data after all defaults, for the manifest and the lock; :meth:`from_dict` reads it back.

        ``output``, ``checkpoint`` and ``exports`` are left out: what is written elsewhere does not affect the bundle.
        """
        others = {"calibration", "evaluation", "passes", "gates", "target", "output", "checkpoint", "exports"}
        plain = self.model_dump(mode="json", exclude=others)
        plain["calibration"] = self.calibration.resolved() if self.calibration is not None else None
        plain["evaluation"] = self.evaluation.resolved()
        plain["passes"] = [{PASSES.name_of(step): options_of(step)} for step in self.passes]
        plain["target"] = {self.target.name: options_of(self.target.build())}
        plain["gates"] = {gate.metric: str(gate) for gate in self.gates}
        return plain


def load_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    target: str | None = None,
    output: str | None = None,
    device: str | None = None,
) -> Recipe:
    """Read a recipe file, or a shipped recipe by its name.

    Files that the recipe names (model, texts) are not checked here but by :meth:`Recipe.check_files`.

    Args:
        path: a YAML file, or a name such as ``quickstart``.
        overrides: ``dotted.key=value`` each, as after ``--set``.
        model, target, output, device: values of these options; relative paths refer to the current folder.
    Raises:
        RecipeError: anything about it is wrong.
    """
    file = Path(path)
    if not is_file(file):
        shipped = find_shipped("recipes", str(path))
        if shipped is None:
            hint = nearest(file.stem, shipped_names("recipes"), "compress list recipes")
            raise RecipeError(f"{path}: no such file, and no shipped recipe has that name; {hint}")
        file = shipped
    source = read_recipe(file)
    for name, value in (("model", model), ("target", target), ("output", output)):
        if value is not None:
            source.graft((name,), value, Source({}, {(): Origin(f"--{name}")}))
    for text in overrides:
        apply_override(source, text)
    if device is not None:
        set_device(source, device)
    expand_data(source)
    return _build(source)


@overload
def load_text_spec(text: str, *, evaluation: Literal[True]) -> EvaluationSpec: ...


@overload
def load_text_spec(text: str, *, evaluation: Literal[False] = False) -> TextSpec: ...


def load_text_spec(text: str, *, evaluation: bool = False) -> TextSpec | EvaluationSpec:
    """Read a data specification from the command line: a set's name, a .yaml file, YAML, a text file, images, sound.

    A folder with a table of sounds is one of sound, another is one of pictures.

    Raises:
        RecipeError: the text is none of these.
    """
    key = "evaluation" if evaluation else "calibration"
    origin = Origin("--data")
    source = Source({}, {(): origin})
    kind = "images" if text.endswith(".npz") or is_dir(Path(text)) else "text"
    if any(is_file(Path(text) / table) for table in SOUND_TABLES):
        kind = "audio"
    if kind != "text" or (is_file(Path(text)) and not text.endswith((".yaml", ".yml"))):
        source.graft((key,), {kind: text}, Source({}, {(): origin}))
    else:
        set_value(source, [key], text, origin)
    expand_data(source)
    spec = _build(Source({**source.data, "passes": []}, source.origins))
    found = spec.evaluation if evaluation else spec.calibration
    if found is None or found.kind is None:
        raise RecipeError(f"{origin}: {text!r} names no text, images or sound")
    return found


def _copied(source: Source, path: KeyPath, value: Any) -> Any:
    """Copy plain data deeply; passes, which are frozen, are not copied."""
    if len(path) > DEEPEST:
        raise source.error(path[:3], f"more than {DEEPEST} levels; this is not a recipe")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise source.error(path, f"the key {key!r:.80} is not text")
        return {key: _copied(source, (*path, key), inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(source, (*path, index), inner) for index, inner in enumerate(value)]
    return value


def _build(source: Source) -> Recipe:
    """Validate the data and build the recipe.

    Raises:
        RecipeError: one line for each problem that can be told apart.
    """
    problems: list[str] = []
    data = dict(source.data)
    if "passes" in data:
        data["passes"] = build_passes(source, problems)
    for key, build in (("gates", _build_gates), ("target", build_target), ("exports", build_exports)):
        if data.get(key) is not None:
            data[key] = build(source, problems)
    _default_window(data)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        problems += [_explain(source, problem) for problem in error.errors(include_url=False)]
    if problems:
        raise RecipeError("\n".join(dict.fromkeys(problems)))
    recipe._source = source
    for key, spec in (("calibration", recipe.calibration), ("evaluation", recipe.evaluation)):
        if spec is not None and spec.kind is not None:
            path = (key, spec.kind)
            spec.locate(source.origin(path).folder, f"{source.origin(path)}: {key}.{spec.kind}")
    return recipe


def _default_window(data: dict[str, Any]) -> None:
    """Set the evaluation's window to the calibration's sequence length, unless the recipe gives one."""
    calibration, evaluation = data.get("calibration"), data.get("evaluation")
    if isinstance(calibration, dict) and calibration.get("sequence_length") is not None:
        if evaluation is None:
            evaluation = {}
        if isinstance(evaluation, dict) and evaluation.get("window") is None:
            data["evaluation"] = {**evaluation, "window": calibration["sequence_length"]}


def _build_gates(source: Source, problems: list[str]) -> tuple[Gate, ...]:
    gates = source.data["gates"]
    if not isinstance(gates, dict):
        problems.append(source.locate(("gates",), f'expected `metric: "<= value"` lines; found {gates!r:.80}'))
        return ()
    built = []
    for metric, text in gates.items():
        try:
            if text is not None:
                built.append(Gate.parse(str(metric), text))
        except RecipeError as error:
            problems.append(source.locate(("gates", metric), str(error)))
    return tuple(built)


def _explain(source: Source, problem: Mapping[str, Any]) -> str:
    """Rewrite one of pydantic's problems as a located message."""
    path = tuple(problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        sections: dict[object, type[Section]] = {"calibration": TextSpec, "evaluation": EvaluationSpec}
        section = sections.get(path[0], Recipe) if len(path) > 1 else Recipe
        known = list(section.yaml_keys())
        if section is Recipe:
            known.append("extends")
        return source.locate(path, f"unknown key; {nearest(str(path[-1]), known)}")
    if problem["type"] == "missing":
        return source.locate(path, "missing; add it")
    if problem["type"] == "value_error":
        key, colon, rest = message.partition(": ")
        if path == () and colon:  # from Recipe._fits_together, which begins with the key
            return source.locate(tuple(key.split(".")), rest)
        return source.locate(path, message)
    return source.locate(path, f"{problem['input']!r:.80} does not fit; {message}")

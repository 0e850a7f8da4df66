"""Data sources and how much of them is used: ``calibration:`` and ``evaluation:`` of a recipe."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from compressor.errors import RecipeError
from compressor.host.resources import resource
from compressor.recipe.sources import SOURCE_KEYS, is_file

PROMPT_TOKENS = 32
"""Tokens of a prompt, where a decoder's continuations are evaluated."""
OF_DECODERS = ("continuations", "in_domain", "temperatures")
"""Keys of an evaluation that decoders alone have."""
Kind = Literal["text", "json", "parquet", "hub", "images", "audio"]


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str | int | float) else tuple(value) if isinstance(value, list) else value


_TEXTS: tuple[Kind, ...] = ("text", "json", "parquet", "hub")
_FITTING: Mapping[str, tuple[Kind | None, ...]] = {
    "config": ("hub",),
    "split": ("hub",),
    "field": ("json", "parquet", "hub", "audio"),
    "sha256": ("text", "json", "parquet", "images"),
    **dict.fromkeys(("mean", "std", "resize", "crop"), ("images", "parquet", "hub")),
    "label": ("parquet", "hub"),
    **dict.fromkeys(("classes", "template", "captions"), ("images", "parquet", "hub", None)),
    "limit": ("images", "audio", "parquet", "hub", None),
    **dict.fromkeys(("sequence_length", "tokens", "window", "stride", *OF_DECODERS), (*_TEXTS, None)),
}
"""Keys that apply to some sources only; None stands for an evaluation without its own source."""
Names = Annotated[tuple[StrictStr, ...], BeforeValidator(_listed), Field(min_length=1)]
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Numbers = Annotated[tuple[_Number, ...], BeforeValidator(_listed), Field(min_length=1)]
Positive = Annotated[tuple[Annotated[_Number, Field(gt=0)], ...], BeforeValidator(_listed), Field(min_length=1)]


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, and null means the default."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.yaml_keys()}

    @classmethod
    def yaml_keys(cls) -> dict[str, str]:
        """Return the keys in YAML, each with the name of its field."""
        return {info.alias or name: name for name, info in cls.model_fields.items()}


class DataSource(Section):
    """Data from exactly one of: files of text, JSON (lines), parquet, images or sound, a data set on the hub.

    Attributes:
        name: name in reports; a shipped set's own name.
        description: for readers.
        text, json_files (key ``json``), parquet: one file or several, as written; :meth:`find_files` locates them.
        hub: id of a data set.
        images: numpy ``.npz`` files with labelled images, or a folder of pictures (:mod:`compressor.data.images`).
        mean, std: of the images' channels, one number or one per channel, 0 and 1 unless given: the model reads
            (pixels / 255 - mean) / std.
        resize, crop: pictures are resized to this shortest edge, then cropped to this square around their middle.
            These four replace the preprocessor of a model folder.
        audio: a folder of WAV files with a table of their texts (:mod:`compressor.data.sound_files`).
        config, split: of the hub's data set; the split is ``train`` unless given.
        field: the field or column that holds the text (JSON, parquet, hub; of sounds too) or the pictures (then
            ``image`` by default).
        label: the column that holds the pictures' classes (parquet, hub).
        classes: names of the classes, in the order of their numbers, for models of pictures with texts; ``template``
            makes a text of each, with the name in place of ``{}``.
        captions: text files, one caption a line, that such models are calibrated on; the classes' texts unless given.
        held_out: reserved for evaluation; calibration refuses it.
        sha256: of the files' bytes, one file after another; checked by :meth:`find_files`.
    """

    name: StrictStr = ""
    description: StrictStr = ""
    text: Names | None = None
    json_files: Names | None = Field(default=None, alias="json")
    parquet: Names | None = None
    # Only an id, never a path: `datasets` would read a folder of that name.
    hub: Annotated[StrictStr, Field(pattern=r"^\w[\w.-]*(/\w[\w.-]*)?$", max_length=200)] | None = None
    images: Names | None = None
    audio: Names | None = None
    mean: Numbers | None = None
    std: Positive | None = None
    resize: Annotated[StrictInt, Field(ge=1, le=8192)] | None = None
    crop: Annotated[StrictInt, Field(ge=1, le=8192)] | None = None
    config: StrictStr | None = None
    split: StrictStr = "train"
    field: StrictStr = "text"
    label: StrictStr = "label"
    classes: Names | None = None
    template: StrictStr = "a photo of a {}."
    captions: Names | None = None
    held_out: StrictBool = False
    sha256: Annotated[StrictStr, Field(pattern="^[0-9a-f]{64}$")] | None = None

    _folder: Path = PrivateAttr(default_factory=Path)
    _where: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _one_source(self) -> DataSource:
        given = [key for key in SOURCE_KEYS if getattr(self, self.yaml_keys()[key]) is not None]
        if len(given) > 1 or (not given and self._needs_source()):
            found = f"found {' and '.join(given)}" if given else "found none"
            raise ValueError(f"give exactly one of {', '.join(SOURCE_KEYS)}; {found}")
        if self.template.count("{}") != 1:
            raise ValueError(
                f"template {self.template!r:.80} has no place for a class's name, or several; write one {{}}"
            )
        chosen = given[0] if given else None
        for key, kinds in _FITTING.items():
            if chosen not in kinds and self.changes(key):
                raise ValueError(f"`{key}` has no meaning without {' or '.join(filter(None, kinds))}; remove it")
        return self

    def changes(self, key: str) -> bool:
        """Return whether a key is given, and differs from its default; False for keys of other sections."""
        return key in self.model_fields_set and getattr(self, key) != self._default(key)

    @classmethod
    def _needs_source(cls) -> bool:
        return True

    @classmethod
    def _default(cls, key: str) -> object:
        return cls.model_fields[key].default

    @property
    def kind(self) -> Kind | None:
        """The kind of its source; None for an evaluation on the rest of the calibration data."""
        kinds: tuple[Kind, ...] = (*_TEXTS, "images", "audio")
        return next((key for key in kinds if getattr(self, self.yaml_keys()[key]) is not None), None)

    @property
    def files(self) -> tuple[str, ...]:
        """The files as written; empty for the hub."""
        return self.text or self.json_files or self.parquet or self.images or self.audio or ()

    def find_files(self) -> tuple[Path, ...]:
        """Return the files' absolute paths, searched beside the recipe, in the current folder and among the shipped
        files.  ``images`` may be a folder, and ``audio`` is one.

        Raises:
            RecipeError: a file is missing (all searched places are named), or the content does not match ``sha256``.
        """
        where = self._where or f"{self.kind}"
        found = []
        for name in self.files:
            places = self._places(name)
            folder = next((place for place in places if place.is_dir()), None)
            if folder is None or any(map(is_file, places)):
                found.append(self._find(name, where))
            elif self.kind in ("images", "audio") and self.sha256 is None:
                found.append(folder)
            else:
                why = "`sha256` is for files" if self.kind == "images" else "name files in it"
                raise RecipeError(f"{where}: {folder} is a folder; {why}")
        if self.sha256 is not None:
            self._check_hash(found, where)
        return tuple(found)

    def find_captions(self) -> tuple[Path, ...]:
        """Return the absolute paths of the files with captions, searched as :meth:`find_files` does.

        Raises:
            RecipeError: one is missing.
        """
        return tuple(self._find(name, f"{self._where}, captions") for name in self.captions or ())

    def _find(self, name: str, where: str) -> Path:
        places = self._places(name)
        found = next((place for place in places if is_file(place)), None)
        if found is None:
            raise RecipeError(f"{where}: {name!r} is missing; looked at {' and '.join(map(str, places))}")
        return found

    def _places(self, name: str) -> list[Path]:
        folders = (self._folder, Path(), resource("calibration"))
        return list(dict.fromkeys((folder / name).absolute() for folder in folders))

    def _check_hash(self, files: list[Path], where: str) -> None:
        digest = hashlib.sha256()
        for path in files:
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
        if digest.hexdigest() != self.sha256:
            raise RecipeError(
                f"{where}: the content has SHA-256 {digest.hexdigest()}, and `sha256` says {self.sha256}; "
                "get the right file, or correct the hash"
            )

    def resolved(self) -> dict[str, Any]:
        """Return plain data after defaults, without keys that do not affect the result."""
        unfit = {key for key, kinds in _FITTING.items() if self.kind not in kinds}
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"description", *unfit})

    def locate(self, folder: Path, where: str) -> None:
        """Record the folder that file names are relative to, and the ``file:line: key`` for error messages."""
        self._folder, self._where = folder, where


class TextSpec(DataSource):
    """Calibration data: ``samples`` windows of ``sequence_length`` tokens, images or sounds, drawn with ``seed``."""

    samples: StrictInt = Field(default=128, ge=1, le=1_000_000)
    sequence_length: StrictInt = Field(default=512, ge=2, le=1_048_576)
    seed: StrictInt = Field(default=0, ge=0, lt=2**63)


class EvaluationSpec(DataSource):
    """Evaluation data: ``limit`` images or sounds, or ``tokens`` tokens in windows of ``window``, ``stride`` apart.

    Without a source, the part of the calibration data that was not sampled is used.  The first ``window - stride``
    tokens of every window but the first are context only.  The default stride is half a window.  A decoder continues
    ``continuations`` prompts of 32 tokens; None asks for none.  Its loss is also measured on ``in_domain`` windows of
    the calibration's samples, and its divergence at ``temperatures``.
    """

    limit: StrictInt | None = Field(default=None, ge=1)
    tokens: StrictInt = Field(default=16384, ge=2, le=1_000_000_000)
    window: StrictInt = Field(default=512, ge=2, le=1_048_576)
    stride: StrictInt = Field(default=256, ge=1, le=1_048_576)
    continuations: StrictInt | None = Field(default=None, ge=1, le=10_000)
    in_domain: StrictInt | None = Field(default=None, ge=1, le=1_000_000)
    temperatures: Positive | None = None

    @model_validator(mode="before")
    @classmethod
    def _half_window(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("stride") is None:
            window = data.get("window", cls.model_fields["window"].default)
            if isinstance(window, int) and not isinstance(window, bool):
                return {**data, "stride": max(1, window // 2)}
        return data

    @model_validator(mode="after")
    def _stride_within_window(self) -> EvaluationSpec:
        if self.stride > self.window:
            raise ValueError(f"stride {self.stride} is larger than the window, {self.window}; tokens would be left out")
        if self.continuations is not None and self.tokens < self.continuations * PROMPT_TOKENS:
            raise ValueError(
                f"continuations {self.continuations}: prompts of {PROMPT_TOKENS} tokens need "
                f"{self.continuations * PROMPT_TOKENS} tokens, and `tokens` is {self.tokens}"
            )
        return self

    @classmethod
    def _needs_source(cls) -> bool:
        return False

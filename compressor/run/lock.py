"""``compress.lock``: everything that a bundle follows from, so that a later run gives the same bundle or says why not.

Nothing in it tells when, by whom or where it was made: it is a file of the bundle, and two runs write the same one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from compressor.capture.onnx_in.model import is_onnx, read_model
from compressor.errors import DriftError, UsageError
from compressor.host.cache import replace_file
from compressor.host.digests import code_digest, file_sha256, model_fingerprint, tensors_sha256
from compressor.registry import PASSES, TARGETS
from compressor.version import installed_versions

if TYPE_CHECKING:
    from torch import nn

    from compressor.codegen.target import Target
    from compressor.data.load import EvaluationData
    from compressor.data.text import Samples
    from compressor.recipe.recipe import Recipe

LOCK_NAME = "compress.lock"
_LARGEST_BYTES = 16 << 20
_DEEPEST = 32
_ABSENT = object()
_VECTOR_FEATURES = re.compile(r"(sse|ssse|avx|amx|fma|f16c|vnni)")
"""CPU flags that choose between ways to compute the same sum in another order."""

Part = tuple[str | int, ...]


class _Schedule(BaseModel):
    """A schedule's fields, which differ from kernel to kernel, and why it was chosen, of kernels for GPUs."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, int | dict[str, int] | None]

    chosen: str = ""


class _Skips(BaseModel):
    """Parts that drafts of a model by itself leave out, how often they agree with it, and their time in steps."""

    model_config = ConfigDict(strict=True, extra="forbid")

    without: list[str]
    agreement: float
    cost: float


class _Lock(BaseModel):
    """The file's schema."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: Literal["compressor lock"]
    schema_version: Literal[1]
    versions: dict[str, str]
    code: str
    cpu: dict[str, str | list[str]]
    gpu: dict[str, str] = {}
    recipe: dict[str, Any]
    model: dict[str, str | dict[str, str]]
    calibration: dict[str, str | int] | None
    evaluation: dict[str, str | int] | None
    schedules: dict[str, _Schedule]
    skips: list[_Skips] = []
    sparse_drafts: bool = False


class Lock:
    """The lock of a run, gathered as things become known, and held against a locked run.

    Attributes:
        facts: what is known so far, in the form of the file.
        locked: what :func:`read_lock` gave; None accepts everything.
    """

    def __init__(self, locked: Mapping[str, Any] | None = None) -> None:
        self.locked = locked
        self.facts: dict[str, Any] = {}

    @property
    def schedules(self) -> Mapping[str, Mapping[str, Any]] | None:
        """The locked schedules, for ``compile_graph``; None where kernels are to be timed."""
        return None if self.locked is None else self.locked["schedules"]

    def add_setting(self, recipe: Recipe, target: Target) -> None:
        """Add what is known before the model is looked at: recipe, versions, code, CPU, and the GPU that trains.

        Raises:
            UsageError: a pass trains on a GPU, and PyTorch sees none.
        """
        self.facts |= {
            "format": "compressor lock",
            "schema_version": 1,
            "versions": installed_versions() | _plugin_versions(recipe, target),
            "code": code_digest(),
            "cpu": _cpu(target),
            "recipe": recipe.resolved(),
        }
        on_gpu = (PASSES.name_of(step) for step in recipe.passes if step.training is not None and step.training.on_gpu)
        if (asked_by := next(on_gpu, None)) is not None:
            from compressor.training.device import gpu_facts

            self.facts["gpu"] = gpu_facts(asked_by)

    def add_model(self, model: Path | nn.Module, trust_remote_code: bool = False) -> None:
        """Add a model's files, or the tensors of a model in memory, whose code cannot be hashed."""
        if isinstance(model, Path) and is_onnx(model):
            files = {file.relative_to(model.parent).as_posix(): file_sha256(file) for file in read_model(model).files}
            self.facts["model"] = {"files": dict(sorted(files.items()))}
        elif isinstance(model, Path):
            self.facts["model"] = {"files": model_fingerprint(model, trust_remote_code)}
        else:
            self.facts["model"] = {"tensors": tensors_sha256([*model.named_parameters(), *model.named_buffers()])}

    def add_data(self, samples: Samples | None, data: EvaluationData | None) -> None:
        """Add the calibration samples as they were drawn, and the data to evaluate on."""
        from compressor.data.embedding_texts import Texts
        from compressor.data.images import Images
        from compressor.data.pairs import ZeroShot
        from compressor.data.sounds import Sounds
        from compressor.data.text import tokens_sha256

        self.facts["calibration"] = None if samples is None else samples.facts()
        if isinstance(data, Images):
            self.facts["evaluation"] = {"images": len(data), "sha256": data.sha256}
        elif isinstance(data, Sounds):
            self.facts["evaluation"] = {"sounds": len(data), "sha256": data.sha256}
        elif isinstance(data, Texts | ZeroShot):
            self.facts["evaluation"] = data.facts()
        else:
            self.facts["evaluation"] = None if data is None else {"tokens": len(data), "sha256": tokens_sha256(data)}

    def add_schedules(self, schedules: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the schedules that the kernels got."""
        self.facts["schedules"] = {kernel: dict(fields) for kernel, fields in schedules.items()}

    def check(self) -> None:
        """Hold what is known so far against the locked run.

        Raises:
            DriftError: it names everything that is no longer what it was.
        """
        if self.locked is None:
            return
        if drifts := check_lock(self.locked, self.facts):
            raise DriftError(
                "\n".join(
                    [
                        "--locked: this run would not repeat the locked one:",
                        *(f"  {drift}" for drift in drifts),
                        "put these back as they were, or run without --locked to make a new lock",
                    ]
                )
            )

    def text(self) -> str:
        """Write the whole lock as the text of its file."""
        return (
            json.dumps(_Lock.model_validate(self.facts).model_dump(exclude_unset=True), indent=1, sort_keys=True) + "\n"
        )


def read_lock(path: Path) -> dict[str, Any]:
    """Read a lock from its file, or from the bundle that it is in.

    Raises:
        UsageError: there is none, or it is damaged or of another version.
    """
    file = path
    try:
        file = path / LOCK_NAME if path.is_dir() else path
        if not file.is_file():
            raise UsageError(f"{file}: no such lock; name one with --lock, or run once without --locked to make it")
        with file.open("rb") as stream:
            raw = stream.read(_LARGEST_BYTES + 1)
        if len(raw) > _LARGEST_BYTES:
            raise ValueError(f"it is larger than {_LARGEST_BYTES} bytes")
        content = json.loads(raw, parse_constant=_refuse)
        _check_depth(content, _DEEPEST)
        return _Lock.model_validate(content).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        reason = f"{_path(tuple(first['loc'])) or 'the whole'}: {first['msg']}"
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    raise UsageError(f"{file}: not a lock of this version ({reason}); run without --locked to make a new one")


def _refuse(constant: str) -> None:
    raise ValueError(f"it holds {constant}")


def _check_depth(value: Any, left: int) -> None:
    if not left:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(inner, left - 1)


def check_place(file: Path) -> None:
    """Raise a UsageError unless a lock can be written to ``file``: for a check before hours of work."""
    if file.is_dir() or not os.access(file.absolute().parent, os.W_OK | os.X_OK):
        raise UsageError(f"--lock: {file} cannot be written as a file; name one in a folder that you may write to")


def save_lock(bundle: Path, file: Path) -> None:
    """Copy a bundle's lock to ``file``, which is replaced in one step.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        replace_file(file, (bundle / LOCK_NAME).read_bytes())
    except OSError as error:
        raise UsageError(f"{file}: the lock cannot be written: {error}; it is also in {bundle / LOCK_NAME}") from error


def check_lock(locked: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return a line for each fact of ``current`` that differs from the lock.

    Sections that ``current`` does not have yet are left out."""
    return [
        _words(part, was, now)
        for section in sorted(current)
        for part, was, now in _differences((section,), locked.get(section, _ABSENT), current[section])
    ]


def _differences(part: Part, was: Any, now: Any) -> Iterator[tuple[Part, Any, Any]]:
    """Yield the smallest parts of two plain values that differ; lists of one length by their places."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted(was.keys() | now.keys()):
            yield from _differences((*part, key), was.get(key, _ABSENT), now.get(key, _ABSENT))
    elif part[0] != "cpu" and isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for place, pair in enumerate(zip(was, now, strict=True)):
            yield from _differences((*part, place), *pair)
    elif type(was) is not type(now) or was != now:
        yield part, was, now


def _words(part: Part, was: Any, now: Any) -> str:
    match part:
        case ("cpu", "features") if isinstance(was, list) and isinstance(now, list):
            changes = {"lacks": set(was) - set(now), "also has": set(now) - set(was)}
            return "cpu: " + "; ".join(f"{verb} {_plain(', '.join(sorted(n)))}" for verb, n in changes.items() if n)
        case ("model", "files", str(name)):
            what, show = f"model file {_plain(name)}: sha256", _short
        case ("model", "tensors"):
            what, show = "the model's parameters and buffers: sha256", _short
        case ("versions", str(name)):
            what, show = _plain(name), _plain_or_json
        case ("code",):
            what, show = "the code of compressor: sha256", _short
        case ("cpu", "name"):
            what, show = "cpu", _plain_or_json
        case ("cpu", "isa"):
            what, show = "instruction set", _plain_or_json
        case ("calibration" | "evaluation" as text, *rest):
            what = _join("calibration samples" if text == "calibration" else "evaluation data", rest)
            show = _short if rest == ["sha256"] else _value
        case ("recipe", *rest):
            what, show = f"recipe {_path(tuple(rest))}", _value
        case ("schedules", str(name), *rest):
            what, show = _join(f"schedule of {_plain(name)}", rest), _value
        case _:
            what, show = _path(part), _value
    return f"{what}{'' if ': ' in what else ':'} was {show(was)}, is {show(now)}"


def _join(what: str, keys: list[Any]) -> str:
    return ": ".join([what, *(_plain(str(key)) for key in keys)])


def _path(part: Part) -> str:
    """``passes[0].gptq.group_size``"""
    names = (f"[{name}]" if isinstance(name, int) else f".{_plain(name)}" for name in part)
    return "".join(names).removeprefix(".")


def _plain(text: str) -> str:
    """Return the text, escaped if a terminal would take part of it for a command."""
    return text if text.isprintable() else json.dumps(text)


def _value(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _plain_or_json(value: Any) -> str:
    return _plain(value) if isinstance(value, str) else _value(value)


def _short(value: Any) -> str:
    return _plain(value[:12]) if isinstance(value, str) else _value(value)


def _plugin_versions(recipe: Recipe, target: Target) -> dict[str, str]:
    """Return the versions of the packages that a recipe's passes and its target come from, beside ours."""
    used = [*map(PASSES.plugin_of, recipe.passes), TARGETS.plugin_of(target)]
    return {one.package: one.version for one in used if one is not None and one.package}


def _cpu(target: Target) -> dict[str, Any]:
    """Return the processor, the kernels' instruction set, and the flags by which arithmetic libraries choose code."""
    from compressor.host.machine import cpu_name, host_flags

    features = sorted(flag for flag in host_flags() if _VECTOR_FEATURES.match(flag))
    return {"name": cpu_name(), "isa": target.resolve().name, "features": features}

"""Read what a batch measured elsewhere, refuse what cannot be, and turn it into entries of the database."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from compressor.codegen.device_tuning import device_class, entry_of, gpu_kernels_digest
from compressor.errors import UsageError

_LARGEST_BYTES = 64 << 20
_LEAST_US = 0.2  # no call of a kernel is shorter
_MOST_BYTES_PER_S = 2e13  # of any GPU's memory
_SLACK = 1.15  # by which a copy's bandwidth may be below the memory's
Count = Annotated[int, Field(ge=0)]


class _Data(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Device(_Data):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    capability: tuple[Annotated[int, Field(ge=1, le=99)], Annotated[int, Field(ge=0, le=9)]]
    peak_bytes_per_s: float | None = None
    copy_bytes_per_s: float | None = None
    nvidia_smi: dict[str, str] = {}


class _Candidate(_Data):
    microseconds: float | None = None
    error: str | None = None


class _Kernel(_Data):
    candidates: list[_Candidate]
    is_cold: bool


class _Results(_Data):
    format: Literal["compressor tuning results"]
    schema_version: Literal[1]
    batch: str
    kernels_digest: str
    device: _Device
    complete: bool
    kernels: dict[str, _Kernel]
    sha256: str


@dataclass(frozen=True)
class Results:
    """Measured times of a batch's kernels.

    Attributes:
        batch: its digest.
        device: the class of GPUs, as :func:`compressor.codegen.device_tuning.device_class` gives it.
        name: of the GPU that measured.
        kernels: microseconds of each candidate, None where it failed, by kernel.
        missing: kernels of the batch that were not measured.
        failed: why candidates failed, by kernel and index.
        entries: for the database.
    """

    batch: str
    device: str
    name: str
    kernels: Mapping[str, list[float | None]]
    missing: tuple[str, ...]
    failed: tuple[str, ...]
    entries: Mapping[str, Any]


def read_results(file: Path) -> _Results:
    """Read a file of results, and make sure that it is as it was written.

    Raises:
        UsageError: it is missing, or damaged.
    """
    try:
        with file.open("rb") as stream:
            raw = stream.read(_LARGEST_BYTES + 1)
        if len(raw) > _LARGEST_BYTES:
            raise ValueError("it is too large")
        content = json.loads(raw, parse_constant=_refuse)
        found = _Results.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise UsageError(
            f"{file}: not results of a batch ({'.'.join(map(str, first['loc']))}: {first['msg']})"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file}: cannot be read as results of a batch: {error}") from error
    rest = {name: value for name, value in content.items() if name != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    if hashlib.sha256(text.encode()).hexdigest() != found.sha256:
        raise UsageError(f"{file}: damaged: its content has another digest than it states; copy it anew")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"it holds {constant}")


def check_results(file: Path, found: _Results, batch: Mapping[str, Any], partial: bool) -> Results:
    """Hold results against their batch.

    Args:
        batch: the content of its ``batch.json``.
        partial: take those kernels that were measured, if some were not.
    Raises:
        UsageError: they are of other kernels or candidates, a part of the batch, or times that cannot be.
    """
    if not batch["kernels_digest"] == found.kernels_digest == gpu_kernels_digest():
        raise UsageError(
            f"{file}: measured with other sources of the kernels than this version's; export a batch anew and run that"
        )
    wanted = {str(kernel["kernel"]): kernel for kernel in batch["kernels"]}
    if strange := sorted(found.kernels.keys() - wanted.keys()):
        raise UsageError(f"{file}: {strange[0]} is not in the batch that it names")
    missing = tuple(name for name in wanted if name not in found.kernels)
    if (missing or not found.complete) and not partial:
        raise UsageError(
            f"{file}: partial: {len(missing)} of the batch's {len(wanted)} kernels were not measured "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); run the batch to its end, with a larger "
            "--seconds, or give --partial to take what there is"
        )
    for name, measured in found.kernels.items():
        _check_kernel(f"{file}: {name}", measured, wanted[name], found.device)
    times = {name: [one.microseconds for one in kernel.candidates] for name, kernel in found.kernels.items()}
    device = device_class(found.device.name, found.device.capability)
    facts = {
        "device": found.device.name,
        "driver": found.device.nvidia_smi.get("driver_version", ""),
        "batch": found.batch[:12],
    }
    entries = {
        f"{name}|{device}|{found.kernels_digest}": entry_of(_schedules(wanted[name]), us, facts)
        for name, us in times.items()
        if any(t is not None for t in us)
    }
    failed = tuple(
        f"{name}, candidate {i}: {one.error}"
        for name, kernel in found.kernels.items()
        for i, one in enumerate(kernel.candidates)
        if one.microseconds is None
    )
    return Results(found.batch, device, found.device.name, times, missing, failed, entries)


def _schedules(kernel: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [candidate["schedule"] for candidate in kernel["candidates"]]


def _check_kernel(where: str, measured: _Kernel, kernel: Mapping[str, Any], device: _Device) -> None:
    """Refuse times that no GPU can have."""
    if len(measured.candidates) != len(kernel["candidates"]):
        raise UsageError(
            f"{where}: {len(measured.candidates)} candidates, and the batch has {len(kernel['candidates'])}"
        )
    least = _LEAST_US
    if measured.is_cold:
        least = max(least, _weight_bytes(kernel) / _bandwidth(where, device) * 1e6)
    for i, one in enumerate(measured.candidates):
        if one.microseconds is None:
            if not one.error:
                raise UsageError(f"{where}, candidate {i}: neither a time nor a reason why there is none")
        elif not math.isfinite(one.microseconds) or one.microseconds < least:
            raise UsageError(
                f"{where}, candidate {i}: {one.microseconds:.4g} us cannot be: reading its weights takes "
                f"{least:.4g} us at the least; run the batch anew"
            )


def _weight_bytes(kernel: Mapping[str, Any]) -> int:
    sizes = {"int32": 4, "float32": 4, "float16": 2, "uint16": 2, "uint8": 1}
    return sum(
        math.prod(operand["shape"]) * sizes[operand["dtype"]]
        for operand in kernel["operands"]
        if operand["role"] == "weight"
    )


def _bandwidth(where: str, device: _Device) -> float:
    """Return the bytes per second that the GPU's memory cannot exceed."""
    told = [device.peak_bytes_per_s, _SLACK * device.copy_bytes_per_s if device.copy_bytes_per_s else None]
    known = [value for value in told if value is not None]
    if any(not math.isfinite(value) or not 0 < value <= _MOST_BYTES_PER_S for value in known):
        raise UsageError(f"{where}: the bandwidth that was measured, {max(known):.3g} B/s, cannot be; run it anew")
    return max(known, default=_MOST_BYTES_PER_S)

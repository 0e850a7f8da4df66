"""The manifest of a bundle as data: which fields it has, and what they may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from compressor.errors import VerificationError
from compressor.formats.cache import DENSE_CACHE

_SHOWN = 3

Bytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class _Entry(BaseModel):
    """A field that is not listed is allowed: a manifest may say more."""

    model_config = ConfigDict(strict=True, extra="allow")


class FileEntry(_Entry):
    """Size and hash of a file, and hashes of its pieces."""

    bytes: Bytes
    sha256: Sha256
    pieces: list[Sha256] | None = None  # small files, and those of bundles from before there were any, have none


class SiteEntry(_Entry):
    """A compressed linear."""

    site: str
    pass_name: str
    format: str
    bytes_before: Bytes
    bytes_after: Bytes


class KernelEntry(_Entry):
    """A kernel, and how it was checked where the bundle was made."""

    name: str
    evidence: Literal["executed", "emulated", "modelled", "compiled"]
    format: str | None = None  # of kernels that read packed weights


class TypeEntry(_Entry):
    """Type and shape of a parameter."""

    dtype: str
    shape: list[Count]


class InputEntry(_Entry):
    """Type and shape of an input of a plain module; a size that may vary is a text."""

    dtype: str
    shape: list[Count | str]


class ModelEntry(_Entry):
    """Facts about the model; sizes are 0 where they have no meaning."""

    name: str
    vocab_size: Count
    layers: Count
    kv_heads: Count  # of each cache; the most, where caches differ
    uneven_heads: Annotated[list[Count], Field(min_length=1)] | None = None  # by cache, where not all have as many
    head_dim: Count
    cache_format: str = DENSE_CACHE  # bundles from before caches had formats say nothing
    cache_bytes_per_token: Count | None = None
    states: list[list[Count]] | None = None  # of recurrent layers, without the batch; absent where there are none
    state_bytes: Count | None = None
    outputs: list[str] | None = None  # of a plain module that returns its outputs by name
    inputs: list[InputEntry] | None = None  # of a plain module; bundles from before arrays were compared say nothing
    entry_bytes: Count = 0  # bundles from before batches were divided say nothing
    predicts: Count = 0  # layers whose copies predict the caches of prompts
    max_positions: Count
    eos_ids: list[Count]
    bos_id: Count | None


class LibraryEntry(_Entry):
    """Kernels for one instruction set."""

    isa: str
    file: str
    cpu_features: list[str]


class Manifest(_Entry):
    """The manifest of schemas 1 and 2, and of schema 3, which kernels for GPUs have."""

    format: Literal["compressor bundle"]
    schema_version: Literal[1, 2, 3]
    kind: Literal["decoder", "encoder", "seq2seq", "module"]
    model: ModelEntry
    recipe: dict[str, Any]
    calibration: dict[str, Any] | None
    formats: list[str]
    sites: list[SiteEntry]
    parameters: list[str]
    parameter_types: list[TypeEntry] | None = None  # from schema 2 on
    entries: dict[str, list[Count]] | None = None  # of libraries with several entry functions
    kernels: Annotated[list[KernelEntry], Field(min_length=1)]
    cpu_features: list[str]
    # Bundles from before there were several say nothing.
    libraries: Annotated[list[LibraryEntry], Field(min_length=1)] | None = None
    system: Literal["android", "macos"] | None = None  # other than Linux
    device: Literal["cuda"] | None = None  # of schema 3 alone
    cuda_capabilities: Annotated[list[str], Field(min_length=1)] | None = None
    versions: dict[str, str]
    weight_bytes: Bytes
    dense_weight_bytes: Bytes
    bundle_bytes: Bytes
    files: dict[str, FileEntry]


_FILES: Mapping[int, tuple[str, ...]] = {
    1: ("model.so", "weights.safetensors", "compressor_runtime.py", "lib/libtvm_runtime.so"),
    2: ("vectors.safetensors", "compressor_selfcheck.py"),
    3: ("lib/libtvm_runtime_cuda.so",),
}
"""Files that each schema version adds to those that a bundle must have."""


def check_schema(content: Mapping[str, Any]) -> Manifest:
    """Check a manifest against its schema.

    Raises:
        VerificationError: names the fields that are missing or wrong.
    """
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg'].lower()}" for e in error.errors(include_url=False)]
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise VerificationError("; ".join(problems[:_SHOWN]) + more) from error
    version = manifest.schema_version
    if version > 1 and manifest.parameter_types is None:
        raise VerificationError("parameter_types: field required")
    if {version == 3} != {manifest.device is not None, manifest.cuda_capabilities is not None}:
        raise VerificationError("device, cuda_capabilities: fields of schema 3, which must have both")
    _check_entries(manifest)
    wanted = [name for since, names in _FILES.items() if since <= version for name in names]
    if absent := [name for name in wanted if name not in manifest.files]:
        raise VerificationError(f"files: {', '.join(absent)} not listed")
    of_sites = {site.format for site in manifest.sites if site.format}
    of_kernels = {kernel.format for kernel in manifest.kernels if kernel.format is not None}
    if set(manifest.formats) != of_sites or not of_sites <= of_kernels:  # a rotation's signs have a kernel and no site
        raise VerificationError(
            f"formats: {', '.join(manifest.formats)}: not those of the sites, {', '.join(sorted(of_sites))}, or not "
            f"among those of the kernels, {', '.join(sorted(of_kernels))}"
        )
    return manifest


_ENTRIES = {"seq2seq": {"main", "encode"}, "module": {"main", "text"}, "decoder": {"main", "verify"}}
"""Entries by the kind of model; a decoder may have others, which draft."""


def _check_entries(manifest: Manifest) -> None:
    """Check that the entries of a library with two are those of its kind, and take parameters that there are."""
    if manifest.entries is None:
        return
    wanted, found = _ENTRIES.get(manifest.kind), set(manifest.entries)
    drafts = found if manifest.kind == "decoder" else set[str]()
    if manifest.kind == "decoder" and manifest.model.predicts:
        wanted = {"main", "predict"}
    if wanted is None or not wanted <= found or found - wanted - drafts:
        raise VerificationError(f"entries: {', '.join(manifest.entries)}: not those of a {manifest.kind}")
    for name, used in manifest.entries.items():
        if any(index >= len(manifest.parameters) for index in used) or len(set(used)) != len(used):
            raise VerificationError(f"entries.{name}: names parameters that are not there, or one twice")

"""Check a bundle for browsers against its manifest; it holds no outputs to compare its kernels with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.errors import VerificationError
from compressor.export.manifest import foreign_files
from compressor.export.signing import MANIFEST
from compressor.export.web import SCHEMA_VERSION

NOT_EXECUTED = "a bundle for browsers stores no outputs to compare with; its run executed them, see `evidence`"


def web_schema(manifest: Mapping[str, Any]) -> str:
    """Check that what the others read is there, and of its type.

    Raises:
        VerificationError: names the fields.
    """
    kinds = {"schema_version": int, "kind": str, "weight_bytes": int, "bundle_bytes": int}
    kinds |= dict.fromkeys(("engines", "sites", "kernels", "formats"), list)
    kinds |= dict.fromkeys(("files", "weights", "model", "recipe", "versions"), dict)
    if wrong := [name for name, kind in kinds.items() if type(manifest.get(name)) is not kind]:
        raise VerificationError(f"{', '.join(wrong)}: missing, or of another type")
    if not 1 <= manifest["schema_version"] <= SCHEMA_VERSION:
        raise VerificationError(f"schema_version {manifest['schema_version']}; known is {SCHEMA_VERSION}")
    engines, sites = " and ".join(map(str, manifest["engines"])), len(manifest["sites"])
    return f"version {manifest['schema_version']}, a {manifest['kind']} for {engines}, {sites} compressed linears"


def web_files(bundle: Path, manifest: Mapping[str, Any]) -> str:
    """Check sizes and hashes of all files, and that there are no others.

    Raises:
        VerificationError: names what is not listed.
        DamagedBundleError: a file differs.
    """
    from compressor_runtime.check import check_listed

    check_listed(bundle, manifest["files"])
    if extra := foreign_files(bundle, manifest["files"]):
        raise VerificationError(f"not listed in the manifest: {', '.join(map(repr, extra[:3]))}")
    return f"{len(manifest['files'])} files have the sizes and SHA-256 of the manifest, and there are no others"


def web_bytes(bundle: Path, manifest: Mapping[str, Any]) -> str:
    """Check the figures of the manifest against the tensors, the shards and the files.

    Raises:
        VerificationError: names the figure.
    """
    files, weights = manifest["files"], manifest["weights"]
    try:
        tensors = sum(entry["bytes"] for entry in weights["tensors"].values())
        shards = {shard["file"]: (shard["bytes"], shard["sha256"]) for shard in weights["shards"]}
        listed = {name: (files[name]["bytes"], files[name]["sha256"]) for name in shards}
        total = sum(entry["bytes"] for entry in files.values()) + (bundle / MANIFEST).stat().st_size
    except (KeyError, TypeError, AttributeError) as error:
        raise VerificationError(f"`weights` does not describe tensors and shards of `files` ({error})") from error
    if shards != listed:
        raise VerificationError("`weights.shards` and `files` differ")
    for name, stated, found in (
        ("weight_bytes", manifest["weight_bytes"], tensors),
        ("bundle_bytes", manifest["bundle_bytes"], total),
    ):
        if stated != found:
            raise VerificationError(f"{name} is {stated}, and there are {found}")
    return f"{tensors} bytes of weights in {len(shards)} shards"

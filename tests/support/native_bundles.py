"""Make bundles with shared libraries from parts, for tests that make none by a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.export.bundle import write_bundle
from compressor.export.facts import BundleFacts
from compressor.export.native import NativeParts, write_native
from compressor.export.publish import publishing
from compressor.host.wheels import tvm_runtime

_FACTS = {field.name for field in dataclasses.fields(BundleFacts)}


def write_native_bundle(destination: Path, parts: Mapping[str, Any]) -> Path:
    """Write a bundle of ``parts``, the fields of NativeParts and of BundleFacts."""
    facts = {name: value for name, value in parts.items() if name in _FACTS}
    others = {name: value for name, value in parts.items() if name not in _FACTS}
    with publishing(destination) as folder:
        named = {"name": facts["model"].get("name", "model"), "tvm_runtime": tvm_runtime("x86_64"), **others}
        written = write_native(folder, NativeParts(**named))
        write_bundle(folder, written, BundleFacts(**facts))
    return destination

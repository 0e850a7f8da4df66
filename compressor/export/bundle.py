"""Finish a bundle: beside a backend's own files the tokenizer or preprocessor, the lock, and the manifest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from compressor.codegen.backend import Written
from compressor.export.facts import BundleFacts
from compressor.export.manifest import listing, with_total
from compressor.export.publish import explaining_failed_writes
from compressor.export.tokenizer import write_chat_template, write_tokenizer
from compressor.version import installed_versions


def write_bundle(folder: Path, written: Written, facts: BundleFacts) -> dict[str, Any]:
    """Complete ``folder``, which holds what a backend wrote, to a bundle; returns its manifest.

    Raises:
        CompressorError: the tokenizer is missing or not the model's, or writing failed.
    """
    with explaining_failed_writes(folder):
        if facts.tokenizer is not None:
            read = facts.model.get("encoder_source") or {}
            frames, size = read.get("blank_id") is not None, facts.model.get("vocab_size", 0)
            write_tokenizer(facts.tokenizer, folder / "tokenizer.json", size, frames)
            if written.fields.get("format") == "compressor bundle":  # what serves chats reads it
                write_chat_template(facts.tokenizer, folder / "chat_template.json")
        if facts.preprocessor is not None:
            shutil.copyfile(facts.preprocessor, folder / facts.preprocessor.name)
        if facts.lock is not None:
            (folder / "compress.lock").write_text(facts.lock, encoding="utf-8")
        model = {**facts.model, **written.model}
        manifest = {
            **written.fields,
            "kind": model["kind"],
            "model": {key: value for key, value in model.items() if key not in ("kind", "source", "unpacked_bytes")},
            "recipe": facts.recipe,
            "calibration": facts.calibration,
            "formats": sorted({site["format"] for site in facts.sites if site.get("format")}),
            "sites": list(facts.sites),
            "kernels": list(written.kernels),
            "versions": installed_versions(),
            "dense_weight_bytes": facts.dense_weight_bytes,
            "files": listing(folder, written.hashes),
        }
        text = with_total(manifest)
        (folder / "manifest.json").write_bytes(text)
    written_manifest: dict[str, Any] = json.loads(text)
    return written_manifest

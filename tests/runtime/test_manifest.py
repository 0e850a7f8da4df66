"""Manifests that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import compressor_runtime
import pytest
from tiny_bundle import edit_manifest

from compressor.runtime import BundleError, DamagedBundleError, RequestError, load


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m: m.update(schema_version=4), BundleError, "schema version 4, this run-time reads up to 3"),
        (lambda m: m.update(schema_version=0), DamagedBundleError, "schema_version 0, which there has never been"),
        (lambda m: m.update(kind="encoder"), DamagedBundleError, "`kind` has a value that cannot be"),
        (lambda m: m.update(kind="module"), DamagedBundleError, "`kind` has a value that cannot be"),
        (lambda m: m.update(kind="poem"), DamagedBundleError, "`kind` has a value that cannot be"),
        (lambda m: m.update(schema_version="1"), DamagedBundleError, "schema_version` is missing or is not a valid"),
        (lambda m: m.update(format="zip"), BundleError, "not a Compressor bundle"),
        (lambda m: m.pop("files"), DamagedBundleError, "`files` is missing"),
        (lambda m: m.update(files={"model.so": 3}), DamagedBundleError, "does not list"),
        (lambda m: m["files"].update({"model.so": 3}), DamagedBundleError, "`bytes` is missing"),
        (lambda m: m["files"]["model.so"].pop("sha256"), DamagedBundleError, "`sha256` is missing"),
        (lambda m: m["files"]["model.so"].update(pieces=None), DamagedBundleError, "`pieces` is missing or is no"),
        (lambda m: m["files"]["model.so"].update(pieces=[1]), DamagedBundleError, "not all of `pieces` is str"),
        (lambda m: m.update(libraries=[]), DamagedBundleError, r"manifest\.json: `libraries` is empty"),
        (lambda m: m.update(libraries=None), DamagedBundleError, "`libraries` is missing or is not a valid list"),
        (lambda m: m.update(cpu_features=["sse2", "avx999"]), BundleError, "this CPU lacks avx999"),
        (lambda m: m["parameters"].__setitem__(1, "other"), DamagedBundleError, "lacks 'other'"),
        (lambda m: m.update(parameters=[["embed"]]), DamagedBundleError, "not all of `parameters` is str"),
        (lambda m: m.pop("model"), DamagedBundleError, "`model` is missing"),
        (lambda m: m.update(entries={"main": [0]}), DamagedBundleError, "`verify` is missing"),
        (lambda m: m.update(entries={"main": [0], "verify": [9]}), DamagedBundleError, "parameters that are not there"),
        (lambda m: m["model"].update(max_positions=-1), DamagedBundleError, "`max_positions`"),
    ],
)
def test_manifests_that_are_wrong(copy: Path, change: Any, error: type[BundleError], message: str) -> None:
    edit_manifest(copy, change)
    with pytest.raises(error, match=message):
        load(copy)


def test_a_tokenizer_is_read_only_when_the_manifest_vouches_for_it(copy: Path) -> None:
    edit_manifest(copy, lambda manifest: manifest["files"].pop("tokenizer.json"))
    with pytest.raises(BundleError, match=r"the manifest lists no tokenizer\.json; give token ids"):
        load(copy).generate("the rain")
    (copy / "tokenizer.json").write_text("[]")
    entry = {"bytes": 2, "sha256": compressor_runtime.sha256(copy / "tokenizer.json")}
    edit_manifest(copy, lambda manifest: manifest["files"].update({"tokenizer.json": entry}))
    with pytest.raises(DamagedBundleError, match=r"tokenizer\.json: not a tokenizer"):
        load(copy).generate("the rain")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": ' * 20000, "\ud800"])
def test_manifests_that_are_no_manifests(copy: Path, text: str) -> None:
    (copy / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(BundleError, match=r"manifest|not a Compressor bundle"):
        load(copy)


def test_folders_that_are_no_bundles(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such folder"):
        load(tmp_path / "nothing")
    with pytest.raises(BundleError, match=r"not a bundle: it has no manifest\.json"):
        load(tmp_path)
    with pytest.raises(RequestError, match="threads=0"):
        load(tmp_path, threads=0)

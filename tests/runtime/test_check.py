"""Files that differ from the manifest."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import compressor_runtime
import pytest
from tiny_bundle import RUNTIME, edit_manifest

from compressor.runtime import BundleError, DamagedBundleError, load


def test_a_changed_byte_is_found_and_its_file_named(copy: Path) -> None:
    code = (
        "compressor_runtime.py",
        *(f"compressor_runtime/{file.relative_to(RUNTIME).as_posix()}" for file in RUNTIME.rglob("*.py")),
    )
    for name in ("weights.safetensors", "model.so", "lib/libtvm_runtime.so", "tokenizer.json", *code):
        content = bytearray((copy / name).read_bytes())
        content[-1] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(DamagedBundleError, match=rf"{name}: its SHA-256"):
            load(copy)
        content[-1] ^= 1
        (copy / name).write_bytes(content)
    load(copy)


def test_a_large_file_is_checked_by_its_pieces(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, file = 5000, copy / "model.so"
    monkeypatch.setattr("compressor_runtime.check.PIECE_BYTES", size)
    content = file.read_bytes()
    pieces = [hashlib.sha256(content[start : start + size]).hexdigest() for start in range(0, len(content), size)]
    assert len(content) % size and len(pieces) > 2
    # The pieces are what counts at loading: the SHA-256 of the whole is for people, and for older run-times.
    edit_manifest(copy, lambda m: m["files"]["model.so"].update(pieces=pieces, sha256=""))
    for threads in (1, 2):
        load(copy, threads=threads)
    last = len(pieces) - 1
    for piece, place in ((0, 0), (1, size), (1, 2 * size - 1), (last, last * size), (last, len(content) - 1)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        where = f"{piece * size} to {min(len(content), (piece + 1) * size)}"
        with pytest.raises(DamagedBundleError, match=rf"model\.so: its SHA-256 is not .* \(bytes {where}\)"):
            load(copy, threads=2)
    file.write_bytes(bytes(byte ^ 1 for byte in content))  # of many that are wrong, the first is named
    with pytest.raises(DamagedBundleError, match=rf"bytes 0 to {size}\)"):
        load(copy, threads=2)
    file.write_bytes(content)
    for wrong in (pieces[:-1], [*pieces, pieces[0]], []):
        edit_manifest(copy, lambda m, wrong=wrong: m["files"]["model.so"].update(pieces=wrong))
        with pytest.raises(DamagedBundleError, match=rf"`pieces` of model\.so: {len(wrong)} of .* have {last + 1} of"):
            load(copy)


def test_a_file_that_cannot_be_read_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> str:
        raise OSError("Input/output error")

    monkeypatch.setattr("compressor_runtime.check.sha256", fail)
    with pytest.raises(BundleError, match="cannot be read: Input/output error"):
        load(copy)


def test_files_that_are_missing_cut_short_or_not_listed(copy: Path) -> None:
    (copy / "compressor_selfcheck.py").unlink()
    with pytest.raises(DamagedBundleError, match=r"compressor_selfcheck\.py: missing"):
        load(copy)
    edit_manifest(copy, lambda manifest: manifest["files"].pop("compressor_selfcheck.py"))
    load(copy)
    with (copy / "weights.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DamagedBundleError, match=r"weights\.safetensors: \d+ bytes, the manifest says"):
        load(copy)
    edit_manifest(copy, lambda manifest: manifest["files"].pop("weights.safetensors"))
    with pytest.raises(DamagedBundleError, match=r"does not list weights\.safetensors"):
        load(copy)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "lib/../../outside", "link", "folder/outside", "lib"])
def test_no_name_leads_outside_the_bundle(copy: Path, name: str) -> None:
    (copy.parent / "outside").write_text("secret")
    (copy / "link").symlink_to("../outside")
    (copy / "folder").symlink_to("..")
    entry = {"bytes": 6, "sha256": compressor_runtime.sha256(copy.parent / "outside")}
    edit_manifest(copy, lambda manifest: manifest["files"].update({name: entry}))
    with pytest.raises(DamagedBundleError, match="leads outside" if name != "lib" else "lib: missing"):
        load(copy)


def test_a_library_behind_a_link_is_refused(copy: Path) -> None:
    shutil.move(copy / "model.so", copy.parent / "model.so")
    (copy / "model.so").symlink_to(copy.parent / "model.so")
    with pytest.raises(DamagedBundleError, match=r"model\.so' leads outside"):
        load(copy)

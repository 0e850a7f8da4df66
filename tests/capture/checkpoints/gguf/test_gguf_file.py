"""GGUF headers: what is read, and that no damaged file gives anything but one message."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from gguf_files import text, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compressor.capture.checkpoints.gguf.gguf_file import read_gguf
from compressor.errors import UsageError

METADATA: dict[str, Any] = {"a": 7, "b": "text", "c": 0.5, "d": ["x", "", "é"]}
TENSORS = {
    "one": ("F32", (2, 3), bytes(24)),
    "two": ("Q8_0", (2, 64), bytes(range(136))),
    "three": ("BF16", (5,), b"ab" * 5),
}


def test_metadata_and_places(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", METADATA, TENSORS)  # type: ignore[arg-type]
    file = read_gguf(tmp_path / "a.gguf")
    assert file.metadata == METADATA
    assert {name: (t.type, t.shape) for name, t in file.tensors.items()} == {n: t[:2] for n, t in TENSORS.items()}
    for name, (_, _, content) in TENSORS.items():
        assert file.bytes_of(name).numpy().tobytes() == content


def test_every_truncation_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, METADATA, TENSORS)  # type: ignore[arg-type]
    whole = path.read_bytes()
    last = len(whole) - 22  # the padding of the last tensor holds nothing
    for length in range(last):
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError, match=r"a\.gguf: "):
            read_gguf(path)
    path.write_bytes(whole[:last])
    assert len(read_gguf(path).tensors) == 3


@settings(
    derandomize=True, max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.integers(0, 330), value=st.binary(min_size=1, max_size=8))
def test_damaged_bytes_end_in_one_message_or_in_a_file_that_holds_its_tensors(
    place: int, value: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, METADATA, TENSORS)  # type: ignore[arg-type]
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + value + whole[place + len(value) :])
    try:
        file = read_gguf(path)
    except UsageError:
        return
    for name, tensor in file.tensors.items():
        assert file.bytes_of(name).numel() == tensor.size_bytes


def header(entries: bytes = b"", tensors: bytes = b"", counts: tuple[int, int] = (0, 0), version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + entries + tensors + bytes(256)


def head(name: str, shape: tuple[int, ...], number: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it does not begin with GGUF"),
        (b"GGML" + bytes(60), "does not begin with GGUF"),
        (header(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648; 2 and 3 in little endian"),
        (header(counts=(1 << 40, 0)), "1099511627776 tensors"),
        (header(text("k") + struct.pack("<IIQ", 9, 4, 1 << 50), counts=(0, 1)), "elements at byte"),
        (header(text("k") + struct.pack("<IIQ", 9, 9, 1), counts=(0, 1)), "an array of the type 9"),
        (header(text("k") + struct.pack("<I", 77), counts=(0, 1)), "a value of the type 77"),
        (header(struct.pack("<Q", 2) + b"\xff\xfe", counts=(0, 1)), "is not UTF-8"),
        (header((text("k") + struct.pack("<II", 4, 1)) * 2, counts=(0, 2)), "'k' comes twice"),
        (header(text("general.alignment") + struct.pack("<II", 4, 24), counts=(0, 1)), "24, not a power of 2"),
        (header(tensors=head("t", (4,), 0) * 2, counts=(2, 0)), "'t' comes twice"),
        (header(tensors=head("t", (1,) * 5, 0), counts=(1, 0)), "'t' has 5 dimensions"),
        (header(tensors=head("t", (0, 4), 0), counts=(1, 0)), r"shape \[4, 0\]"),
        (header(tensors=head("t", (48, 2), 8), counts=(1, 0)), "Q8_0 has blocks of 32"),
        (header(tensors=head("t", (4,), 0, 2), counts=(1, 0)), "which F32 does not allow"),
        (
            header(tensors=head("t", (32,), 20), counts=(1, 0)),
            "'t' has the type IQ4_NL, which is not read; read are F32",
        ),
        (header(tensors=head("t", (128,), 41), counts=(1, 0)), "'t' has the type Q1_0"),
        (header(tensors=head("t", (64,), 142), counts=(1, 0)), "'t' has the type number 142"),
    ],
)
def test_files_that_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(UsageError, match=f"a.gguf: .*{message}"):
        read_gguf(tmp_path / "a.gguf")

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import compressor.host.digests
from compressor.errors import CompressorError
from compressor.host.digests import (
    code_digest,
    file_sha256,
    model_fingerprint,
    read_sha256,
    tensors_sha256,
)

LONG_AGO = 1_000_000_000


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("compressor.host.digests._SETTLED_NS", 0)  # the tests' files are new
    return tmp_path / "cache" / "fingerprints.json"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read, in order."""
    names: list[str] = []
    read = compressor.host.digests.read_sha256

    def counted(path: Path) -> str:
        names.append(path.name)
        return read(path)

    monkeypatch.setattr("compressor.host.digests.read_sha256", counted)
    return names


@pytest.fixture
def large(tmp_path: Path) -> Path:
    file = tmp_path / "large.bin"
    file.write_bytes(os.urandom((1 << 20) + 17))
    return file


def test_it_is_the_sha256_of_the_contents(large: Path) -> None:
    expected = sha256(large.read_bytes())
    assert read_sha256(large) == file_sha256(large) == file_sha256(large) == expected


def test_a_large_file_is_read_once(large: Path, reads: list[str], store: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(large)
    assert file_sha256(large) == file_sha256(large) == file_sha256(tmp_path / "link")
    assert reads == ["large.bin"]
    assert [file.name for file in store.parent.iterdir()] == [store.name]


def test_a_small_file_is_not_worth_remembering(tmp_path: Path, store: Path) -> None:
    (tmp_path / "small").write_bytes(b"few")
    assert file_sha256(tmp_path / "small") == sha256(b"few")
    assert not store.exists()


def test_any_change_is_seen_even_one_that_keeps_size_and_time(large: Path, reads: list[str], tmp_path: Path) -> None:
    file_sha256(large)
    times = large.stat()
    content = bytearray(large.read_bytes())
    content[5] ^= 1
    large.write_bytes(content)
    os.utime(large, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file_sha256(large) == sha256(content)
    other = tmp_path / "other"
    content[6] ^= 1
    other.write_bytes(content)
    other.replace(large)
    assert file_sha256(large) == sha256(content)
    assert len(reads) == 3


def test_a_file_written_a_moment_ago_is_not_remembered(
    large: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(store.parent))
    file_sha256(large)
    assert not store.exists()


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"PATH": 3}', '{"PATH": {"identity": [], "sha256": "x"}}', "[" * 9999]
)
def test_a_store_of_garbage_counts_as_empty(content: str, large: Path, store: Path, reads: list[str]) -> None:
    store.parent.mkdir()
    store.write_text(content.replace("PATH", str(large)))
    assert file_sha256(large) == file_sha256(large) == sha256(large.read_bytes())
    assert reads == ["large.bin"]


def test_a_store_that_cannot_be_written_costs_time_only(large: Path, store: Path, reads: list[str]) -> None:
    store.parent.write_text("in the way")
    assert file_sha256(large) == file_sha256(large)
    assert len(reads) == 2 and store.parent.read_text() == "in the way"


def test_files_that_are_gone_leave_the_store(large: Path, store: Path, tmp_path: Path) -> None:
    file_sha256(large)
    other = tmp_path / "other"
    large.rename(other)
    file_sha256(other)
    assert list(json.loads(store.read_text())) == [str(other)]


HASH = "import sys; from pathlib import Path; from compressor.host.digests import *; " + (
    "import compressor.host.digests as f; f._SETTLED_NS = 0; [file_sha256(Path(name)) for name in sys.argv[1:]]"
)


def test_processes_that_hash_at_once_keep_one_anothers_results(tmp_path: Path, store: Path) -> None:
    names = [str(tmp_path / f"{i}.bin") for i in range(12)]
    for name in names:
        Path(name).write_bytes(bytes(1 << 20))
    running = [subprocess.Popen([sys.executable, "-c", HASH, *part]) for part in (names[:6], names[6:])]
    assert [process.wait() for process in running] == [0, 0]
    assert sorted(json.loads(store.read_text())) == sorted(names)
    assert [file.name for file in store.parent.iterdir()] == [store.name]


def test_a_models_fingerprint_is_of_what_decides_the_capture(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "part").mkdir(parents=True)
    counted = {
        "config.json": "{}",
        "tokenizer.json": "t",
        "special_tokens_map.json": "s",
        "vocab.txt": "v",
        "merges.txt": "m",
        "spiece.model": "p",
        "model.safetensors.index.json": "i",
        "a.safetensors": "a",
        "b.safetensors": "b",
    }
    code = {"modeling.py": "import this", "part/more.py": "x"}
    for name, content in {**counted, **code, "README.md": "r", "trainer_state.json": "{}"}.items():
        (model / name).write_text(content)
    expected = {name: sha256(content.encode()) for name, content in counted.items()}
    found = model_fingerprint(model)
    assert found == expected and list(found) == sorted(found)
    trusted = model_fingerprint(model, trust_remote_code=True)
    assert trusted == expected | {name: sha256(content.encode()) for name, content in code.items()}


def named(**changes: Tensor) -> list[tuple[str, Tensor]]:
    tensors = {"w": torch.arange(6.0).view(2, 3), "h": torch.ones(3, dtype=torch.bfloat16), "n": torch.tensor(7)}
    return list({**tensors, **changes}.items())


def test_tensors_are_told_apart_by_name_type_shape_and_content() -> None:
    base = tensors_sha256(named())
    assert (
        base
        == tensors_sha256(reversed(named()))
        == tensors_sha256(named(w=torch.arange(6.0).view(2, 3).t().contiguous().t()))
    )
    others = [
        tensors_sha256(named(w=torch.arange(6.0).view(3, 2))),
        tensors_sha256(named(w=torch.arange(6.0).view(2, 3) + torch.eye(3)[:2])),
        tensors_sha256(named(w=torch.arange(6.0).view(2, 3).view(torch.int32))),
        tensors_sha256([("v" if name == "w" else name, tensor) for name, tensor in named()]),
        tensors_sha256(named()[:2]),
        tensors_sha256([]),
    ]
    assert len({base, *others}) == 7


def test_a_tensor_without_data_has_no_hash() -> None:
    with pytest.raises(CompressorError, match="h: has a shape and no data"):
        tensors_sha256(named(h=torch.empty(3, device="meta")))


def test_digests_of_code() -> None:
    assert code_digest() == code_digest() and len(code_digest()) == 64

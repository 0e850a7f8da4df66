"""Mapped files: the same tensors as the official library reads, and memory that can be given back."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compressor.errors import CompressorError
from compressor.host.tensor_files import DTYPES, Spill, map_safetensors, release, write_safetensors


def resident_bytes(tensor: Tensor) -> int:
    """Of the mapping that holds the tensor, from /proc/self/smaps."""
    inside, address = False, tensor.data_ptr()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and ":" not in head:
            first, last = (int(end, 16) for end in head.split("-"))
            inside = first <= address < last
        elif inside and head == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("the tensor lies nowhere")


@pytest.mark.parametrize("official", [True, False])
def test_what_is_mapped_is_what_was_written(tmp_path: Path, official: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randint(0, 2, (3, 5), generator=generator).to(dtype) for name, dtype in DTYPES.items()} | {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5),
        "odd": torch.arange(7, dtype=torch.uint8),
    }
    file = tmp_path / "t.safetensors"
    save_file(tensors, file) if official else write_safetensors(file, tensors)
    for read in (map_safetensors(file), load_file(file)):
        assert set(read) == set(tensors)
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
            assert torch.equal(read[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_tensor_at_an_odd_address_is_read_right(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0)}, tmp_path / "t.safetensors")
    data = (tmp_path / "t.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip() + b" " * 3
    moved = len(header).to_bytes(8, "little") + header + data[8 + length :]
    (tmp_path / "odd.safetensors").write_bytes(moved)
    assert (8 + len(header)) % 4, "the test is about data that is not aligned"
    assert torch.equal(map_safetensors(tmp_path / "odd.safetensors")["a"], torch.arange(6.0))


def test_released_memory_comes_back_with_its_contents(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "t.safetensors", {"a": torch.ones(1 << 20), "b": torch.full((1 << 20,), 2.0)})
    mapped = map_safetensors(tmp_path / "t.safetensors")
    assert (float(mapped["a"].sum()), float(mapped["b"].sum())) == (2**20, 2**21)
    full = resident_bytes(mapped["a"])
    release([mapped["a"]])
    assert full - resident_bytes(mapped["a"]) > 3 << 20
    release([torch.nn.Parameter(mapped["b"], requires_grad=False), torch.ones(1 << 20)])
    assert resident_bytes(mapped["b"]) < 1 << 20
    assert (float(mapped["a"].sum()), float(mapped["b"].sum())) == (2**20, 2**21)


def test_what_was_written_in_place_is_not_lost(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "t.safetensors", {"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)})
    mapped = map_safetensors(tmp_path / "t.safetensors")
    mapped["a"][5] = 7.0
    release(mapped.values())
    assert float(mapped["a"].sum()) == 2**20 + 6
    assert float(load_file(tmp_path / "t.safetensors")["a"].sum()) == 2**20, "the file stays as it is"


def test_a_mapping_lives_as_long_as_its_tensors(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "t.safetensors", {"a": torch.ones(1 << 18)})
    tensor = map_safetensors(tmp_path / "t.safetensors")["a"][10:]
    gc.collect()
    (tmp_path / "t.safetensors").unlink()
    release([tensor])
    assert float(tensor.sum()) == 2**18 - 10


def test_spilled_tensors_leave_memory_and_no_file(tmp_path: Path) -> None:
    spilled = Spill(tmp_path / "new").empty((3, 1 << 20))
    assert spilled.shape == (3, 1 << 20) and float(spilled.abs().sum()) == 0
    spilled.copy_(torch.arange(3.0)[:, None].expand(3, 1 << 20))
    release([spilled])
    assert resident_bytes(spilled) < mmap.PAGESIZE
    assert spilled[:, 123].tolist() == [0, 1, 2] and float(spilled.sum()) == 3 * 2**20
    assert not list((tmp_path / "new").iterdir())


def test_a_full_disk_is_an_error_and_no_crash(tmp_path: Path) -> None:
    with pytest.raises(CompressorError, match=r"no room for \d+ bytes of hidden states.*COMPRESS_CACHE_DIR"):
        Spill(tmp_path).empty((1 << 30, 1 << 20))

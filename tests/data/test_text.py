"""Texts: a compressed file reads as the plain one."""

from __future__ import annotations

import gzip
from pathlib import Path

import torch

from compressor.data.text import load_samples
from compressor.host.resources import resource
from compressor.recipe.recipe import TextSpec

MODEL = resource("models") / "reference"


def test_a_compressed_text_gives_the_same_samples(tmp_path: Path) -> None:
    text = "\n<|endoftext|>\n".join(f"Return the {number}th element, or None.\n" * 20 for number in range(9))
    (tmp_path / "plain.txt").write_text(text)
    (tmp_path / "small.txt.gz").write_bytes(gzip.compress(text.encode()))
    plain, small = (
        load_samples(TextSpec(text=str(tmp_path / name), samples=8, sequence_length=32), MODEL)
        for name in ("plain.txt", "small.txt.gz")
    )
    assert torch.equal(plain.ids, small.ids) and plain.sha256 == small.sha256

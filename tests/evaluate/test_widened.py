"""The widened model that drafts are timed on has the function of the model that it is made from."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "widened.py"


def test_a_wider_model_of_the_same_function(tmp_path: Path, random_llama: Callable[..., Any]) -> None:
    spec = importlib.util.spec_from_file_location("benchmarks_widened", SCRIPT)
    assert spec is not None and spec.loader is not None
    widened = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(widened)
    model = random_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "model")
    widened.write_widened(tmp_path / "model", tmp_path / "wide", residual=4, heads=2, inner=3)
    wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32).eval()
    ids = torch.randint(0, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = model(ids).logits, wide(ids).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    small, large = model.model.layers[0].mlp.down_proj.weight, wide.model.layers[0].mlp.down_proj.weight
    assert large.shape == (4 * 64, 3 * 96)
    half = widened.divided(small.detach().half(), 3)
    assert torch.equal(half.double().view(64, 3, 96).sum(1), small.detach().half().double())  # without a rounding error
    assert len({tuple(column) for column in half.T.tolist()}) == 3 * 96
    with pytest.raises(ValueError, match="a power of two"):
        widened.write_widened(tmp_path / "model", tmp_path / "other", residual=3, heads=1, inner=1)

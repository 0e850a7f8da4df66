"""Folders: where quantisation is stated, and quantised tensors that nothing speaks of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from quantized_checkpoints import LAYOUTS, packed_integers
from safetensors.torch import save_file

from compressor.capture.checkpoints.open_checkpoint import open_checkpoint
from compressor.errors import UsageError

pytest.importorskip("transformers")
LINEAR = "model.layers.0.mlp.up_proj"


def save(folder: Path, layout: str, **config: object) -> None:
    tensors, _ = LAYOUTS[layout][0](np.random.default_rng(0), 64, 96)
    save_file({f"{LINEAR}.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_both_names_of_the_key(key: str, tmp_path: Path) -> None:
    save(tmp_path, "ct-pack", **{key: LAYOUTS["ct-pack"][1]})
    checkpoint = open_checkpoint(tmp_path, trust_remote_code=False, weights=True)
    assert checkpoint.source.names == {f"{LINEAR}.weight"} and checkpoint.file == tmp_path / "config.json"
    assert not hasattr(checkpoint.config, "quantization_config")
    assert checkpoint.source.read(f"{LINEAR}.weight").shape == (64, 96)


@pytest.mark.parametrize(
    ("layout", "beside", "advice"),
    [
        ("gptq", "quantize_config.json", 'copy the keys of quantize_config.json there, and add "quant_method": "gptq"'),
        ("awq", "quant_config.json", 'copy the keys of quant_config.json there, and add "quant_method": "awq"'),
        ("ct-nvfp4", "hf_quant_config.json", "give the unquantised checkpoint"),
        ("fp8", "other.json", "give the unquantised checkpoint"),
    ],
)
def test_quantised_tensors_that_config_does_not_speak_of(layout: str, beside: str, advice: str, tmp_path: Path) -> None:
    save(tmp_path, layout)
    (tmp_path / beside).write_text("{}")
    with pytest.raises(UsageError, match=rf"model\.safetensors: {LINEAR}\..* no quantization_config; {advice}"):
        open_checkpoint(tmp_path, trust_remote_code=False, weights=False)


def test_a_dense_folder_stays_as_it_is(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    source = open_checkpoint(tmp_path, trust_remote_code=False, weights=True).source
    assert source.names == {"a"} and source.unpacked_bytes == 0


def test_values_of_the_older_key_are_checked(tmp_path: Path) -> None:
    tensors, _ = packed_integers(np.random.default_rng(0), 64, 96, zeros=True)
    tensors.pop("weight_scale")
    save_file({f"{LINEAR}.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "compression_config": LAYOUTS["ct-pack"][1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="weight_scale is missing"):
        open_checkpoint(tmp_path, trust_remote_code=False, weights=False)

"""Whole checkpoints in each layout: values, logits, plans, memory."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from quantized_checkpoints import LAYOUTS
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.capture.checkpoints.dense_weights import DenseWeight, Stored, dequantized_source
from compressor.capture.checkpoints.methods import quantized_source
from compressor.capture.weights import WeightSource
from compressor.codegen.backend import make_backend
from compressor.errors import CaptureError, ResourceError
from compressor.graph.caches import empty_caches
from compressor.host import tensor_files
from compressor.plan.passes import plan_passes
from compressor.plan.stages import run_costs
from compressor.recipe.recipe import Recipe

transformers = pytest.importorskip("transformers")

EXACT = {"gptq", "gptq-v2-3-bits", "awq", "ct-pack", "ct-pack-channel", "ct-int", "ct-naive", "ct-mxfp4", "ct-mxfp8"}
"""Layouts whose values float32 (or bfloat16) holds; those of the others are rounded to it once."""
Quantize = Callable[..., tuple[Path, dict[str, Tensor]]]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).half().save_pretrained(folder)
    return folder


def save(folder: Path, dense: Path, tensors: dict[str, Tensor], **changes: object) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(json.loads((dense / "config.json").read_text()) | changes))
    return folder


@pytest.fixture
def quantize(dense: Path, tmp_path: Path) -> Quantize:
    """``quantize(layout)`` packs random weights for all linears but the head: the folder, and all values in float64."""

    def make(layout: str) -> tuple[Path, dict[str, Tensor]]:
        pack, quantization = LAYOUTS[layout]
        rng, stored = np.random.default_rng(0), load_file(dense / "model.safetensors")
        values = {name: tensor.double() for name, tensor in stored.items()}
        for name in [name for name in stored if name.endswith("_proj.weight")]:
            packed, dense_values = pack(rng, *stored.pop(name).shape)
            stored |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in packed.items()}
            values[name] = torch.from_numpy(dense_values)
        return save(tmp_path / layout, dense, stored, quantization_config=quantization), values

    return make


def logits(graph: GraphModule) -> Tensor:
    info = graph.meta["model"]
    ids = torch.randint(3, 97, (2, 7), generator=torch.Generator().manual_seed(1))
    caches = empty_caches(info, 2, 9)
    return graph(ids, torch.arange(7), torch.arange(7), caches[: info.layers], caches[info.layers :])[0]


@pytest.fixture(scope="module")
def dense_graph(dense: Path) -> GraphModule:
    return capture(dense)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_logits(layout: str, quantize: Quantize, dense_graph: GraphModule) -> None:
    folder, values = quantize(layout)
    graph = capture(folder)
    parameters = dict(graph.named_parameters())
    assert parameters.keys() == values.keys()
    for name, parameter in parameters.items():
        assert torch.equal(parameter.double(), values[name].float().double()), name
        assert layout not in EXACT or torch.equal(parameter.double(), values[name]), name
    unpacked = sum(p.numel() * p.element_size() for name, p in parameters.items() if "_proj" in name)
    assert graph.meta["model"].unpacked_bytes == unpacked
    found = logits(graph)
    for name, parameter in dense_graph.named_parameters():
        parameter.data = values[name].to(parameters[name].dtype)
    assert torch.isfinite(found).all() and torch.equal(found, logits(dense_graph))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans_read_no_weight(layout: str, quantize: Quantize) -> None:
    folder, values = quantize(layout)
    quantization = LAYOUTS[layout][1]
    real, planned = (quantized_source(folder, quantization, weights) for weights in (True, False))
    assert real.names == planned.names == values.keys()
    for name in values:
        weight, header = real.read(name), planned.read(name)
        assert header.is_meta and (header.shape, header.dtype) == (weight.shape, weight.dtype)


def test_a_plan_of_a_quantised_model(quantize: Quantize) -> None:
    folder, values = quantize("gptq")
    planned = capture(folder, weights=False)
    assert {n: tuple(p.shape) for n, p in planned.named_parameters()} == {n: tuple(v.shape) for n, v in values.items()}
    assert all(parameter.is_meta for parameter in planned.parameters())


def test_values_take_no_memory_of_their_own(quantize: Quantize) -> None:
    """They lie in mapped files, whose pages the system may take away: a read brings them back."""
    folder, values = quantize("gptq")
    graph = capture(folder)
    name = "model.layers.0.mlp.down_proj.weight"
    weight = graph.get_parameter(name)
    tensor_files.release([weight])
    assert torch.equal(weight.double(), values[name])
    begin = weight.data_ptr()
    spans = [(address, address + len(mapping)) for address, mapping in tensor_files._mappings.items()]
    assert any(low <= begin < high for low, high in spans)


def test_a_weight_is_computed_when_it_is_read_and_not_before() -> None:
    calls: list[str] = []

    def double(codes: Tensor) -> Tensor:
        calls.append("double")
        return codes.float() * 2

    tensors = {"a.codes": torch.tensor([[1, 2]], dtype=torch.int8), "b": torch.ones(3), "a.note": torch.ones(1)}
    names = frozenset(tensors)
    values = WeightSource("here", names, tensors.__getitem__)
    headers = WeightSource("here", names, lambda name: tensors[name].to("meta"))
    weights = {"a": DenseWeight({"codes": "a.codes"}, (1, 2), torch.float32, double)}
    for read_values in (True, False):
        source = dequantized_source(Stored(values, headers), weights, frozenset({"a.note"}), read_values)
        assert source.names == {"a", "b"} and source.unpacked_bytes == 8 and not calls
        assert source.read("b").is_meta != read_values
        assert source.read("a").shape == (1, 2) and source.read("a").is_meta != read_values
        assert calls == (["double"] * 2 if read_values else [])
        calls.clear()
    assert dequantized_source(Stored(values, headers), weights, frozenset(), True).read("a").tolist() == [[2.0, 4.0]]


def test_biases_of_zeros_need_no_place(quantize: Quantize) -> None:
    """AutoGPTQ once stored a bias for every linear.  One that has a value must have a place."""
    folder, values = quantize("gptq")
    file = folder / "model.safetensors"
    stored = load_file(file)
    bias = {"model.layers.0.mlp.up_proj.bias": torch.zeros(96, dtype=torch.float16)}
    save_file(stored | bias, file, {"format": "pt"})
    assert dict(capture(folder, weights=False).named_parameters()).keys() == values.keys()
    bias["model.layers.0.mlp.up_proj.bias"][7] = 1
    save_file(stored | bias, file, {"format": "pt"})
    with pytest.raises(CaptureError, match=r"1 weights have no place in the model \(model.*up_proj\.bias"):
        capture(folder, weights=False)


def test_a_full_disk_is_named(quantize: Quantize, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = quantize("gptq")

    def full(_descriptor: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ResourceError, match=r"no room for \d+ bytes of dense weights.*COMPRESS_CACHE_DIR"):
        capture(folder)


def test_the_plan_counts_the_disk_and_no_second_model(quantize: Quantize) -> None:
    folder, values = quantize("gptq")
    recipe = Recipe.from_dict({"passes": [{"rtn": {"scheme": "W8A16_G32"}}], "tune": "off", "target": "null"})
    backend = make_backend(recipe.target.build(), 1)
    found = {}
    for name in ("quantised", "dense"):
        graph = capture(folder, weights=False)
        if name == "dense":
            graph.meta["model"] = replace(graph.meta["model"], unpacked_bytes=0)
        found[name] = run_costs(graph, plan_passes(graph, recipe, backend), recipe, backend)
    unpacked = 4 * sum(value.numel() for key, value in values.items() if "_proj" in key)
    assert found["quantised"].cache_bytes - found["dense"].cache_bytes == unpacked
    assert not found["quantised"].times_dense

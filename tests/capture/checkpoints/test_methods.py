"""Refusals: each contradiction is one UsageError that names the file and the tensor or option."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import LAYOUTS
from safetensors.torch import save_file
from torch import Tensor

from compressor.capture.checkpoints.methods import METHODS, quantized_source
from compressor.capture.meta_model import folder_meta_model
from compressor.errors import UsageError

LINEAR = "model.layers.0.mlp.up_proj"
Change = Callable[[dict[str, Tensor], dict[str, Any]], object]


def build(layout: str, change: Change, folder: Path) -> dict[str, Any]:
    """Save one linear in a layout after a change to its tensors and its configuration, which is returned."""
    pack, given = LAYOUTS[layout]
    config: dict[str, Any] = copy.deepcopy(given)
    tensors = pack(np.random.default_rng(0), 64, 96)[0]
    change(tensors, config)
    folder.mkdir(exist_ok=True)
    named = {name if "." in name else f"{LINEAR}.{name}": t.contiguous() for name, t in tensors.items()}
    save_file({**named, "model.norm.weight": torch.ones(4)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    return config


def put(**values: Any) -> Change:
    return lambda tensors, config: config.update(values)


def drop(name: str) -> Change:
    return lambda tensors, config: tensors.pop(name)


def as_type(name: str, dtype: torch.dtype) -> Change:
    return lambda tensors, config: tensors.update({name: tensors[name].to(dtype)})


def cut(name: str, rows: int) -> Change:
    return lambda tensors, config: tensors.update({name: tensors[name][:rows]})


def flat(name: str) -> Change:
    return lambda tensors, config: tensors.update({name: tensors[name].flatten()})


def weights(**values: Any) -> Change:
    """Change the arguments of the weights of the only group."""
    return lambda tensors, config: config["config_groups"]["group_0"]["weights"].update(values)


def group(**values: Any) -> Change:
    return lambda tensors, config: config["config_groups"]["group_0"].update(values)


CASES: list[tuple[str, Change, str]] = [
    # Methods.
    *((name, put(quant_method=method), rf"config\.json: .*quantised by '{method}', which is not read; known are awq, ")
      for name, method in (("gptq", "bitsandbytes"), ("gptq", "hqq"), ("awq", "quanto"), ("awq", "aqlm"),
                           ("fp8", "auto-round"), ("fp8", "modelopt"))),
    ("gptq", lambda t, c: c.pop("quant_method"), "quantised by None"),
    ("fp8", put(quant_method="gptq", bits=4, group_size=32), "says gptq, and the safetensors hold no weight of its"),
    # GPTQ.
    ("gptq", put(bits=5), r"gptq: bits is 5; known are 2, 3, 4, 8"),
    ("gptq", put(bits="4"), r"gptq: bits is '4'"),
    ("gptq", put(bits=8), r"scales has shape \[3, 64\], and the quantization_config asks for \[2, 64\]"),
    ("gptq", put(group_size=64), r"scales has shape \[3, 64\], and the quantization_config asks for \[2, 64\]"),
    ("gptq", put(group_size=0), "group_size is 0; a size or -1 is meant"),
    ("gptq", put(checkpoint_format="marlin"), "checkpoint_format is 'marlin'; known are gptq, gptq_v2"),
    ("gptq", put(checkpoint_format="gptq_p"), "checkpoint_format is 'gptq_p'"),
    ("gptq", put(pack_dtype="int64"), "pack_dtype is 'int64'"),
    ("gptq", put(dynamic={"-:.*": {}}), "dynamic gives modules options of their own"),
    ("gptq", drop("scales"), rf"model\.safetensors: {LINEAR}\.scales is missing"),
    ("gptq", drop("qweight"), rf"model\.safetensors: {LINEAR}\.qweight is missing"),
    ("gptq", drop("qzeros"), r"qzeros is missing"),
    ("gptq", as_type("qweight", torch.int64), "qweight is stored as int64, not as int32"),
    ("gptq", as_type("scales", torch.int32), "scales is stored as int32, not as float16 or bfloat16 or float32"),
    ("gptq", lambda t, c: t["g_idx"].__setitem__(5, 3), "g_idx has groups 0 to 3, and there are 3"),
    ("gptq", lambda t, c: t["g_idx"].__setitem__(5, -1), "g_idx has groups -1 to 2"),
    ("gptq", lambda t, c: t["g_idx"].__setitem__(5, 1), "g_idx orders its inputs, and desc_act is false"),
    ("gptq", cut("g_idx", 95), r"g_idx has shape \[95\]"),
    ("gptq", flat("qweight"), r"qweight has shape \[768\], and the weights of linears have 2 dimensions"),
    ("gptq-v2-3-bits", drop("g_idx"), "g_idx is missing, and desc_act orders the inputs by it"),
    # AWQ.
    ("awq", put(bits=8), "awq: bits is 8; known are 4"),
    ("awq", put(version="gemv"), "version is 'gemv'; known are gemm"),
    ("awq", put(zero_point=False), "zero_point is false"),
    ("awq", put(group_size=48), r"qzeros has shape \[3, 8\], and the quantization_config asks for \[2, 8\]"),
    ("awq", drop("qzeros"), "qzeros is missing"),
    # FP8.
    ("fp8", put(weight_block_size=[64, 64]), r"weight_scale_inv has shape \[2, 2\], and .* asks for \[1, 2\]"),
    ("fp8", put(weight_block_size=[64]), r"weight_block_size is \[64\]; two sizes are meant"),
    ("fp8", put(weight_block_size=None), r"weight_scale_inv has shape \[2, 2\], and without a weight_block_size"),
    ("fp8", put(fmt="e5m2"), "weight is stored as float8_e4m3fn, not as float8_e5m2"),
    ("fp8", put(fmt="int8"), "fmt is 'int8'"),
    ("fp8", drop("weight_scale_inv"), rf"{LINEAR}\.weight_scale_inv is missing"),
    ("fp8", drop("weight"), rf"{LINEAR}\.weight is missing"),
    ("fp8", as_type("weight", torch.float16), "weight is stored as float16, not as float8_e4m3fn"),
    # compressed-tensors.
    ("ct-pack", put(format="marlin-24"), "format is 'marlin-24'; known are pack-quantized"),
    ("ct-pack", put(format="mixed-precision"), "format is 'mixed-precision'"),
    ("ct-pack", put(config_groups={}), "config_groups is {}"),
    ("ct-pack", put(config_groups={"W4A16": ["Linear"]}), "config_groups.W4A16 is the name of a preset"),
    ("ct-pack", put(ignore=[LINEAR]), rf"{LINEAR}\.weight_packed is quantised, and `ignore` names its module"),
    ("ct-pack", put(ignore=["re:.*up_proj"]), "is quantised, and `ignore` names its module"),
    ("ct-pack", put(ignore="lm_head"), "ignore is not a list of names"),
    ("ct-pack", put(ignore=["re:("]), "is not a regular expression"),
    ("ct-pack", put(transform_config={"R1": {}}), "transform_config asks for rotations"),
    ("ct-pack", put(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config has the format 'sparse-24-bitm"),
    ("ct-pack", group(targets=["re:.*down_proj$"]), "weight_packed is quantised, and no group of `config_groups` targ"),
    ("ct-pack", weights(num_bits=9), "num_bits is 9"),
    ("ct-pack", weights(num_bits=8), "weight_packed has 12 words a row, and 96 codes of 8 bits take 24"),
    ("ct-pack", weights(group_size=16), r"weight_scale has shape \[64, 3\], and .* asks for \[64, 6\]"),
    ("ct-pack", weights(strategy="channel"), r"weight_scale has shape \[64, 3\], and .* asks for \[64, 1\]"),
    ("ct-pack", weights(strategy="token"), "strategy is 'token'"),
    ("ct-pack", weights(group_size=-1), "group_size is -1, and the strategy is group"),
    ("ct-pack", weights(symmetric=True), "weight_zero_point has values other than 0"),
    ("ct-pack", weights(type="float"), "num_bits is 4 of type float, which pack-quantized cannot hold"),
    ("ct-pack", drop("weight_scale"), "weight_scale is missing"),
    ("ct-pack", drop("weight_shape"), "weight_shape is missing"),
    ("ct-pack", drop("weight_zero_point"), "weight_zero_point is missing"),
    ("ct-pack", drop("weight_packed"), rf"{LINEAR}\.weight_packed is missing|{LINEAR}\.weight.* is missing"),
    ("ct-pack", cut("weight_zero_point", 7), r"weight_zero_point has shape \[7, 3\], and .* asks for \[8, 3\]"),
    ("ct-pack", lambda t, c: t["weight_shape"].__setitem__(0, 65), r"weight_packed has shape \[64, 12\], .*\[65, 9"),
    ("ct-pack-channel", lambda t, c: t.update(weight_g_idx=torch.zeros(96, dtype=torch.int32)),
     "weight_g_idx orders inputs by groups, and the strategy is channel"),
    ("ct-pack", lambda t, c: t.update(weight_g_idx=torch.full((96,), 3, dtype=torch.int32)), "groups 3 to 3, and ther"),
    ("ct-int", drop("weight_scale"), "weight_scale is missing"),
    ("ct-int", weights(num_bits=4), "num_bits is 4 of type int, which int-quantized cannot hold"),
    ("ct-int", as_type("weight", torch.float16), "weight is stored as float16, not as int8"),
    ("ct-float", weights(block_structure=None), "block_structure is None; two sizes are meant"),
    ("ct-float", weights(symmetric=False), "symmetric is false with codes that are floats"),
    ("ct-float", as_type("weight", torch.int8), "weight is stored as int8, not as float8_e4m3fn or float8_e5m2"),
    ("ct-nvfp4", drop("weight_global_scale"), "weight_global_scale is missing"),
    ("ct-nvfp4", lambda t, c: t["weight_global_scale"].zero_(), "weight_global_scale is 0.0"),
    ("ct-nvfp4", weights(group_size=32), r"groups of 32; nvfp4-pack-quantized has groups of 16"),
    ("ct-nvfp4", as_type("weight_scale", torch.float16), "weight_scale is stored as float16, not as float8_e4m3fn"),
    ("ct-mxfp4", as_type("weight_scale", torch.float16), "weight_scale is stored as float16, not as uint8"),
    ("ct-mxfp4", cut("weight_scale", 60), r"weight_scale has shape \[60, 3\]"),
    ("ct-mxfp8", as_type("weight_scale", torch.float32), "weight_scale is stored as float32, not as uint8"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "change", "message"), CASES)
@pytest.mark.parametrize("read_values", [True, False], ids=["run", "plan"])
def test_contradictions(layout: str, change: Change, message: str, read_values: bool, tmp_path: Path) -> None:
    config = build(layout, change, tmp_path)
    with pytest.raises(UsageError, match=message) as caught:
        quantized_source(tmp_path, config, read_values)
    said = str(caught.value)
    assert said.startswith(str(tmp_path)) and "\n" not in said and caught.value.exit_code == 2


JSON = st.none() | st.booleans() | st.sampled_from((-1, 0, 1, 3, 8, 16, 64, 10**30, 0.5, "", "group", "float", "re:("))
JSON = (
    JSON | st.lists(JSON, max_size=2) | st.dictionaries(st.sampled_from(("format", "weights", "a")), JSON, max_size=1)
)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(layout=st.sampled_from(sorted(LAYOUTS)), place=st.integers(0, 99), value=JSON)
def test_any_value_of_any_option_is_read_or_refused(
    layout: str, place: int, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def replace(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        places: list[tuple[Any, Any]] = []
        left: list[Any] = [config]
        while left:
            current = left.pop()
            keys = current if isinstance(current, dict) else range(len(current))
            places += [(current, key) for key in keys]
            left += [current[key] for key in keys if isinstance(current[key], dict | list)]
        parent, key = places[place % len(places)]
        parent[key] = value

    folder = tmp_path_factory.getbasetemp() / f"any-{layout}"
    config = build(layout, replace, folder)
    try:
        source = quantized_source(folder, config, True)
    except UsageError:
        return
    assert all(source.read(name).is_floating_point() for name in source.names)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unchanged_tensors_are_read(layout: str, tmp_path: Path) -> None:
    config = build(layout, lambda tensors, config: None, tmp_path)
    assert quantized_source(tmp_path, config, False).names == {f"{LINEAR}.weight", "model.norm.weight"}


def test_a_folder_is_refused_before_its_model_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("gptq", drop("scales"), tmp_path)
    monkeypatch.setattr("compressor.capture.meta_model._build", lambda *_: pytest.fail("the model was built"))
    with pytest.raises(UsageError, match=r"scales is missing; config.json's quantization_config and the tensors"):
        folder_meta_model(tmp_path, trust_remote_code=False)


def test_scales_of_activations_and_caches_are_left_aside(tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors |= {"input_scale": torch.ones(1), "model.layers.0.self_attn.k_scale": torch.ones(1)}
        tensors["model.layers.0.self_attn.odd_scale"] = torch.ones(1)

    config = build("fp8", add, tmp_path)
    assert quantized_source(tmp_path, config, False).names == {
        f"{LINEAR}.weight", "model.norm.weight", "model.layers.0.self_attn.odd_scale",
    }  # fmt: skip


@pytest.mark.parametrize("value", ["gptq", 7, ["gptq"], {"quant_method": ["gptq"]}])
def test_a_quantization_config_of_another_shape(value: Any, tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": value}))
    with pytest.raises(UsageError, match=r"config\.json: .*quantised by .*known are awq, compressed-tensors, fp8, "):
        folder_meta_model(tmp_path, trust_remote_code=False)
    assert list(METHODS) == sorted(METHODS)

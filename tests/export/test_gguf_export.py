"""The export to GGUF: the package gguf and transformers read what is written; what has no exact place is refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families import DECODERS, save
from missing import skip_or_fail
from safetensors.torch import load_file
from tiny_gguf import to_rotary_order
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.capture.checkpoints.gguf.gguf_file import read_gguf
from compressor.capture.checkpoints.gguf.gguf_models import gguf_metadata, gguf_model
from compressor.errors import UsageError
from compressor.export.checkpoints.stored import StoredModel
from compressor.export.exchange.byte_level_tokens import tokenizer_metadata
from compressor.export.exchange.dense_form import list_packed
from compressor.export.exchange.job import export_graph
from compressor.export.foreign.gguf import Gguf
from compressor.formats.packing import dequantize
from compressor.graph.model import clone_graph
from compressor.passes.embedding import Embedding
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.recipe.exports import make_export

TOKENS, TEXTS = 512, ["def f(x):\n    return x + 123", "It's  the\tend…\r\n\r\nÄpfel, 2026! <|end|>and on<tool> ", ""]
SIZES = {"vocab_size": TOKENS, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer(folder: Path, kind: str = "gpt-2", **options: Any) -> Tokenizer:
    """Put a byte-level BPE tokenizer of 266 tokens, two of them added, into a folder, and return it."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    merges = [("Ġ", "Ġ"), ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("e", "n"), ("en", "d"), ("'", "s"), ("1", "2")]
    vocabulary = {text: i for i, text in enumerate([*sorted(alphabet), *(a + b for a, b in merges)])}
    made = Tokenizer(models.BPE(vocabulary, merges, **options))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "qwen2":
        split = pre_tokenizers.Split(Regex(QWEN_2), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    made.add_tokens([AddedToken("<tool>", normalized=False)])
    made.post_processor = processors.TemplateProcessing("<|end|> $A", special_tokens=[("<|end|>", len(vocabulary))])
    made.save(str(folder / "tokenizer.json"))
    stated = {"bos_token": "<|end|>", "eos_token": {"content": "<|end|>"}, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return made


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    cls, sizes = DECODERS["Llama, tied"]
    model: Any = save(folder, cls, {**sizes, **SIZES, "hidden_size": 128, "head_dim": 32}, True)
    down = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():  # zero points on scales of 1/4, whose minima are float16
        down.copy_((torch.arange(down.numel()).view(down.shape) * 7 % 16 - torch.arange(len(down))[:, None] % 16) / 4)
    model.save_pretrained(folder)
    tokenizer(folder)
    return folder


@functools.cache
def captured(folder: Path) -> GraphModule:
    return capture(folder)


def compressed(folder: Path, schemes: Mapping[str, str], *more: Any) -> GraphModule:
    graph = clone_graph(captured(folder))
    for step in (*(Rtn(scheme=scheme, targets=name) for name, scheme in schemes.items()), *more):
        graph = step.run(graph, Context())
    return graph


SCHEMES = {
    "q_proj": ("W4A16_G128", "Q4_0"),
    "k_proj": ("W3A16_ASYM_G64", "Q4_0"),
    "v_proj": ("W4A16_ASYM_G32", "Q5_0"),
    "o_proj": ("W5A16_G128", "Q5_0"),
    "gate_proj": ("W5A16_ASYM_G32", "Q8_0"),
    "up_proj": ("W8A16_G32", "Q8_0"),
    "down_proj": ("W4A16_ASYM_G32", "Q4_1"),
    "embed_tokens": ("W8A16", "Q8_0"),
}
GGUF_NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
              "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}  # fmt: skip


def has_client() -> None:
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        skip_or_fail("gguf or accelerate is not installed")


def test_blocks_are_those_of_the_package_gguf_and_transformers_computes_the_same(llama: Path, tmp_path: Path) -> None:
    has_client()
    import gguf

    schemes = {name: scheme for name, (scheme, _) in SCHEMES.items() if name != "embed_tokens"}
    graph = compressed(llama, schemes, Embedding())
    (folder := tmp_path / "out").mkdir()
    content = export_graph(graph, make_export("gguf", ()).plan(graph), folder, folder, check=True).content()
    reader = gguf.GGUFReader(folder / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for site in list_packed(graph):
        short = site.module.rpartition(".")[2]
        tensor = tensors["token_embd.weight" if short == "embed_tokens" else f"blk.0.{GGUF_NAMES[short]}.weight"]
        wanted = dequantize(site.packed)
        if short in ("q_proj", "k_proj"):
            wanted = to_rotary_order(wanted, {"q_proj": 4, "k_proj": 2}[short])
        assert (site.packed.format.name, tensor.tensor_type.name) == SCHEMES[short]
        assert np.array_equal(gguf.dequantize(tensor.data, tensor.tensor_type), wanted.numpy()), short
        assert content["bits_by_tensor"][f"{site.module}.weight"] == 8 * tensor.n_bytes / wanted.numel()
    assert "output.weight" not in tensors and tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    told = {key: reader.get_field(key).contents() for key in reader.fields}
    assert told["llama.attention.head_count_kv"] == 2 and told["general.file_type"] == 7
    assert told["tokenizer.ggml.pre"] == "gpt-2" and told["tokenizer.chat_template"] == "{{ messages }}"
    assert told["tokenizer.ggml.add_bos_token"] is True and told["tokenizer.ggml.add_eos_token"] is False
    tokens, types = told["tokenizer.ggml.tokens"], told["tokenizer.ggml.token_type"]
    assert [types[tokens.index(text)] for text in ("Ġthe", "<|end|>", "<tool>", "[PAD511]")] == [1, 3, 4, 5]
    assert content["checked"]["equal_tokens"] == content["checked"]["tokens"] == 32
    assert content["checked"]["difference"] <= 1e-4 * content["checked"]["largest"]


def stored(model: Path) -> StoredModel:
    """Return a dense model as it is handed to the writer of an export."""
    tensors = load_file(model / "model.safetensors")
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    files = dict.fromkeys(tensors, "model.safetensors")
    return StoredModel(model, json.loads((model / "config.json").read_text()), tensors, types, {}, files)


@pytest.mark.parametrize(
    ("family", "kind", "more"),
    [("Llama", "gpt-2", {}), ("Qwen 2", "qwen2", {}), ("Qwen 3", "qwen2", {"head_dim": 128})],
)
def test_families_are_read_by_transformers(family: str, kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    has_client()
    cls, sizes = DECODERS[family]
    model: Any = save(tmp_path / "model", cls, {**sizes, **SIZES, **more}, True)
    spelling = tokenizer(tmp_path / "model", kind)
    Gguf().write_weights(tmp_path, stored(tmp_path / "model"))
    given = {"gguf_file": "model.gguf"}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **given)
    with torch.no_grad():
        assert torch.equal(again(torch.arange(12)[None]).logits, model(torch.arange(12)[None]).logits)
    found = transformers.AutoTokenizer.from_pretrained(tmp_path, **given)
    for text in TEXTS:
        ids = spelling.encode(text, add_special_tokens=False).ids
        assert found(text, add_special_tokens=False)["input_ids"] == ids


def test_biases_are_in_rotary_order_and_come_back(tmp_path: Path) -> None:
    cls, sizes = DECODERS["Llama"]
    made: Any = save(tmp_path / "model", cls, {**sizes, **SIZES, "attention_bias": True}, True)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    made.save_pretrained(tmp_path / "model")
    model = stored(tmp_path / "model")
    Gguf(pre="none").write_weights(tmp_path, model)
    file = read_gguf(tmp_path / "model.gguf")
    bias = model.tensors["model.layers.0.self_attn.k_proj.bias"]
    assert torch.equal(file.bytes_of("blk.0.attn_k.bias").view(torch.float32), to_rotary_order(bias, 2))
    config, source = gguf_model(tmp_path / "model.gguf", weights=True)
    assert config["attention_bias"] and config["rms_norm_eps"] == model.config["rms_norm_eps"]
    assert source.names == model.tensors.keys()
    assert all(torch.equal(source.read(name), tensor) for name, tensor in model.tensors.items())


@pytest.mark.parametrize(
    ("schemes", "words"),
    [
        ({"q_proj": "LUT3_G32"}, ["q_proj", "LUT3_G32", "codebooks", "dense="]),
        ({"up_proj": "W8A16_ASYM_G32"}, ["up_proj", "W8A16_ASYM_G32", "8 bits at most"]),
        ({"up_proj": "W4A16_G16"}, ["up_proj", "W4A16_G16", "groups of 16"]),
        ({"up_proj": "W4A8_G32"}, ["up_proj", "W4A8_G32", "activations"]),
        ({"up_proj": "FP8_E4M3"}, ["up_proj", "FP8_E4M3", "integers"]),
    ],
)
def test_formats_without_a_place_are_refused(llama: Path, schemes: dict[str, str], words: list[str]) -> None:
    graph = compressed(llama, schemes)
    with pytest.raises(UsageError) as refused:
        make_export("gguf", ()).plan(graph)
    assert all(word in str(refused.value) for word in words), refused.value


def test_models_without_a_place_are_refused(tmp_path: Path) -> None:
    cls, sizes = DECODERS["Llama"]
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    save(tmp_path / "model", cls, {**sizes, **SIZES, "rope_parameters": scaled}, True)
    tokenizer(tmp_path / "model")
    with pytest.raises(UsageError, match=r"model: gguf cannot describe it .*choose another export"):
        make_export("gguf", ()).plan(captured(tmp_path / "model"))
    config = transformers.GraniteConfig(architectures=["GraniteForCausalLM"])
    with pytest.raises(UsageError, match=r"GraniteForCausalLM has no name .*: LlamaForCausalLM, Qwen2"):
        gguf_metadata(config)


def test_tokenizers_without_a_name_are_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(vocab_size=TOKENS)
    assert tokenizer_metadata(tmp_path, config)["tokenizer.ggml.model"] == "none"
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match=r"tokenizer\.json: only byte-level BPE .*WordLevel; .*--set pre=none"):
        tokenizer_metadata(tmp_path, config)
    assert tokenizer_metadata(tmp_path, config, "none")["tokenizer.ggml.model"] == "none"
    made = tokenizer(tmp_path, ignore_merges=True)
    with pytest.raises(UsageError, match=r"name for its pre-tokenizer is not known here .*ByteLevel.*--set pre=NAME"):
        tokenizer_metadata(tmp_path, config)
    assert tokenizer_metadata(tmp_path, config, "dbrx")["tokenizer.ggml.pre"] == "dbrx"
    with pytest.raises(UsageError, match="has the id 265, and the model 200 rows"):
        tokenizer_metadata(tmp_path, transformers.LlamaConfig(vocab_size=200), "dbrx")
    made.post_processor = processors.TemplateProcessing("$A <tool>", special_tokens=[("<tool>", 265)])
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match=r"puts the ids \[265\] around a text"):
        tokenizer_metadata(tmp_path, config, "dbrx")
    (tmp_path / "tokenizer.json").rename(tmp_path / "vocab.json")
    with pytest.raises(UsageError, match=r"vocab\.json: only a tokenizer\.json is read for GGUF"):
        tokenizer_metadata(tmp_path, config)

"""Turn a GGUF file into a configuration of transformers and weights under the names of its model class, and back.

Rows of a Llama's query and key projections are stored in another order: the two halves that rotary embedding pairs
alternate (llama.cpp, ``convert_hf_to_gguf.py: LlamaModel.permute``).  They are put back, and into that order again.
All experts of a layer are one tensor there, [experts, out, in], and one each under the names of the model's class.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from compressor.capture.checkpoints.dense_weights import weight_spill
from compressor.capture.checkpoints.gguf.gguf_blocks import BLOCK_TYPES
from compressor.capture.checkpoints.gguf.gguf_file import GgufFile, read_gguf
from compressor.capture.files import check_counts
from compressor.capture.weights import WeightSource
from compressor.errors import UsageError
from compressor.host.tensor_files import release, trim

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ADVICE = "give the model's Hugging Face folder"
_OF_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_CHUNK_ELEMENTS = 1 << 22  # values dequantised at a time
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_NETWORK = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_COUNTS = {  # keys of metadata, behind the architecture's name -> keys of a configuration
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_EPSILON, _THETA = "attention.layer_norm_rms_epsilon", "rope.freq_base"
_EXPERT_COUNTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_WIDTHS_OF_HEADS = ("attention.key_length", "attention.value_length", "rope.dimension_count")


@dataclass(frozen=True)
class _Architecture:
    """A family of models: its class, the names of its layers beside those of all, whether its projections are stored in
    rotary order, and what its configuration says that no metadata state."""

    model_class: str
    model_type: str
    extra_names: dict[str, str]
    rotary_order: bool = False
    stated: dict[str, Any] = field(default_factory=dict)

    @property
    def layer_names(self) -> dict[str, str]:
        """Return the names of a layer's tensors, and those of the modules that have them."""
        return {**_LAYER_NAMES, **self.extra_names}

    @property
    def counts(self) -> dict[str, str]:
        """Return the keys of metadata that count something, and those of the configuration."""
        return {**_COUNTS, **(_EXPERT_COUNTS if self.has_experts else {})}

    @property
    def has_experts(self) -> bool:
        """Tell whether each layer has experts."""
        return self.extra_names.keys() >= _EXPERTS.keys()


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", "llama", _NETWORK, rotary_order=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2", _NETWORK),
    "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3", {**_NETWORK, **_HEAD_NORMS}),
    "qwen3moe": _Architecture(  # llama.cpp divides the weights of a token's experts by their sum, whatever is stated
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**_EXPERTS, **_HEAD_NORMS},
        stated={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
}


def find_gguf(folder: Path) -> Path | None:
    """Return the GGUF file of a folder without safetensors, if there is one.

    Raises:
        UsageError: there are several, of which none could be told from another by the folder's digest.
    """
    files = sorted(folder.glob("*.gguf"))
    if not files or any(folder.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise UsageError(
            f"{folder}: {len(files)} GGUF files, such as {files[0].name} and {files[1].name}; give a folder with "
            "one; parts of one model are joined by llama.cpp's `llama-gguf-split --merge`"
        )
    return files[0]


def gguf_model(path: Path, weights: bool) -> tuple[dict[str, Any], WeightSource]:
    """Return the config.json that a GGUF file stands for, and its weights, dequantised when they are read.

    Args:
        weights: False gives meta tensors.
    Raises:
        UsageError: the file is truncated, or its types, architecture or options are not covered.
    """
    file = read_gguf(path)
    name = file.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise UsageError(
            f"{path}: the architecture {name!r:.40} is not read from GGUF; read are "
            f"{', '.join(_ARCHITECTURES)}: {_ADVICE}"
        )
    architecture = _ARCHITECTURES[name]
    config = _config(file, name, architecture)
    check_counts(config, path, len(file.tensors))
    stored = _stored_names(file, architecture, config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}

    def head_count(key: str) -> int | None:
        return heads.get(key.split(".")[-2]) if architecture.rotary_order else None

    def read(wanted: str) -> Tensor:
        key, expert = stored[wanted], expert_of(wanted)
        tensor, count = file.tensors[key], head_count(key)
        if not weights:
            shape = tensor.shape if expert is None else tensor.shape[1:]
            return torch.empty(shape, dtype=tensor.dtype, device="meta")
        return read_tensor(file, key, None if count is None else _rotary_rows(tensor.shape[0], count), expert)

    unpacked_bytes = sum(
        prod(tensor.shape) * tensor.dtype.itemsize
        for key, tensor in file.tensors.items()
        if tensor.type in BLOCK_TYPES or head_count(key) is not None
    )
    blocks = [wanted for wanted, key in stored.items() if file.tensors[key].type in BLOCK_TYPES]
    files, quantized = dict.fromkeys(stored, path), dict.fromkeys(blocks, path)
    return config, WeightSource(str(path), frozenset(stored), read, files, unpacked_bytes, quantized=quantized)


def read_tensor(file: GgufFile, name: str, rows: Tensor | None = None, expert: int | None = None) -> Tensor:
    """Return a tensor's values: a view of the mapped file, or dequantised into a mapped temporary file.

    Args:
        rows: int64, the stored row of each row of the result; None keeps their order.
        expert: along the first dimension; None takes all.
    """
    tensor, raw, shape = file.tensors[name], file.bytes_of(name), file.tensors[name].shape
    if expert is not None:
        raw, shape = raw.view(shape[0], -1)[expert], shape[1:]
    block = BLOCK_TYPES.get(tensor.type)
    if block is None and rows is None:
        return raw.view(tensor.dtype).view(shape)
    width = shape[-1] if len(shape) > 1 or block else 1  # a bias has rows of one value
    by_row = raw.view(-1, raw.numel() * width // prod(shape))
    place = weight_spill().empty(shape, tensor.dtype)
    flat, step = place.view(-1, width), max(1, _CHUNK_ELEMENTS // width)
    for begin in range(0, len(flat), step):
        end = min(begin + step, len(flat))
        chunk = by_row[begin:end] if rows is None else by_row[rows[begin:end]]
        if block is None:
            flat[begin:end] = chunk.contiguous().view(tensor.dtype).view(-1, width)
        else:
            flat[begin:end] = block.dequantize(chunk.reshape(-1, block.block_bytes)).view(-1, width)
    release([raw, place])
    trim()
    return place


def _rotary_rows(rows: int, heads: int) -> Tensor:
    """Return the stored row of each row: 2 j + half of a head for half * width / 2 + j."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def rotary_rows_as_stored(rows: int, heads: int) -> Tensor:
    """Return the row that each stored row of a projection holds, int64: the inverse of the order that is read."""
    return _rotary_rows(rows, heads).argsort()


def gguf_metadata(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the metadata that stand for a model's configuration, without its tokenizer.

    Raises:
        UsageError: the class of the model is not one of those that are read.
    """
    name = _architecture_of(config)
    architecture = _ARCHITECTURES[name]
    if other := [key for key, value in architecture.stated.items() if getattr(config, key, None) != value]:
        raise UsageError(f"{other[0]} is {getattr(config, other[0], None)}, which a GGUF file cannot say")
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    numbers: dict[str, Any] = {key: getattr(config, ours) for key, ours in architecture.counts.items()}
    numbers |= dict.fromkeys(_WIDTHS_OF_HEADS, width) | {"vocab_size": config.vocab_size}
    numbers |= {_EPSILON: float(config.rms_norm_eps), _THETA: float(theta)}
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in numbers.items()}


def gguf_place(parameter: str, config: PreTrainedConfig) -> tuple[str, int | None]:
    """Return a parameter's name in a GGUF file, and the heads whose rows are stored in rotary order, if they are.

    Raises:
        UsageError: it has no name there.
    """
    architecture = _ARCHITECTURES[_architecture_of(config)]
    base, _, kind = parameter.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", base)
    known = architecture.layer_names if layer else _NAMES
    name = {ours: theirs for theirs, ours in known.items()}.get(gguf_stack(layer[2] if layer else base))
    if name is None or kind not in ("weight", "bias"):
        raise UsageError(f"{parameter} has no name in a GGUF file of a {architecture.model_class}")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    place = f"blk.{layer[1]}.{name}.{kind}" if layer else f"{name}.{kind}"
    return place, heads.get(name) if architecture.rotary_order else None


def gguf_stack(name: str) -> str:
    """Return the name that all experts of a layer have together; another name as it is."""
    return _OF_EXPERT.sub(".experts.", name)


def expert_of(parameter: str) -> int | None:
    """Return the number of the expert that a parameter is of, along the first dimension of its tensor in the file."""
    found = _OF_EXPERT.search(parameter)
    return int(found[1]) if found else None


def _architecture_of(config: PreTrainedConfig) -> str:
    stated = (config.architectures or ["a model without a class"])[0]
    found = next((name for name, known in _ARCHITECTURES.items() if known.model_class == stated), None)
    if found is None:
        classes = ", ".join(known.model_class for known in _ARCHITECTURES.values())
        raise UsageError(f"{stated} has no name among the architectures that are known here: {classes}")
    return found


def _config(file: GgufFile, name: str, architecture: _Architecture) -> dict[str, Any]:
    """Return the configuration that the metadata state."""

    def number(key: str, default: int | None = None) -> int:
        value = file.metadata.get(f"{name}.{key}", default)
        if type(value) is not int or value < 1:
            raise UsageError(f"{file.path}: {name}.{key} is {value!r:.40}; one whole number is meant: layers that "
                             "differ are not covered")  # fmt: skip
        return value

    def real(key: str, default: float | None = None) -> float:
        value = file.metadata.get(f"{name}.{key}", default)
        if not isinstance(value, float) or not value > 0:
            raise UsageError(f"{file.path}: {name}.{key} is {value!r:.40}; a number above 0 is meant")
        return float(str(np.float32(value)))  # as it was written: the shortest decimal that float32 rounds to it

    _refuse_options(file, name, architecture)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UsageError(f"{file.path}: token_embd.weight is missing or not a matrix; fetch the file again")
    heads, hidden = number("attention.head_count"), number("embedding_length")
    counts = {ours: number(key, heads if key.endswith("_kv") else None) for key, ours in architecture.counts.items()}
    head_dim = number("attention.key_length", hidden // heads)
    for key in _WIDTHS_OF_HEADS[1:]:
        if number(key, head_dim) != head_dim:
            raise UsageError(f"{file.path}: {name}.{key} is {number(key)}, and heads are {head_dim} wide: not covered")
    special = {key: file.metadata.get(f"tokenizer.ggml.{key}") for key in ("bos_token_id", "eos_token_id")}
    return {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        **counts,
        **architecture.stated,
        "head_dim": head_dim,
        "rms_norm_eps": real(_EPSILON),
        "rope_parameters": {"rope_type": "default", "rope_theta": real(_THETA, 10000.0)},
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": architecture.rotary_order and "blk.0.attn_q.bias" in file.tensors,
        **{key: value for key, value in special.items() if type(value) is int},
    }


def _refuse_options(file: GgufFile, name: str, architecture: _Architecture) -> None:
    """Refuse metadata that ask for arithmetic other than that of the model's class with default options."""
    given = file.metadata
    scaling = given.get(f"{name}.rope.scaling.type", "none")
    experts, window = given.get(f"{name}.expert_count", 0), given.get(f"{name}.attention.sliding_window", 0)
    split = given.get("split.count", 1)
    problems = [
        (scaling != "none" or f"{name}.rope.scale_linear" in given, f"rotary embeddings are scaled ({scaling!r:.40})"),
        ("rope_freqs.weight" in file.tensors, "rotary embeddings have factors of their own (rope_freqs.weight)"),
        (bool(experts) and not architecture.has_experts, f"it has {experts!r:.40} experts"),
        (bool(window), f"attention has a window of {window!r:.40}"),
        (split not in (0, 1), f"it is one of {split!r:.40} parts: join them by `llama-gguf-split --merge`"),
    ]
    for wrong, problem in problems:
        if wrong:
            raise UsageError(f"{file.path}: {problem}, which is not read from GGUF; {_ADVICE}")


def _of_experts(name: str, count: int) -> list[str]:
    """Return the names of the tensors that one of all experts stands for; of another one its own."""
    front, experts, behind = name.partition(".experts.")
    return [f"{front}{experts}{place}.{behind}" for place in range(count)] if experts else [name]


def _stored_names(file: GgufFile, architecture: _Architecture, layers: int) -> dict[str, str]:
    """Return each parameter's stored name; every stored tensor must have a place, every layer its tensors."""
    names = architecture.layer_names
    stored: dict[str, str] = {}
    for key in file.tensors:
        layer = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", key)
        whole = re.fullmatch(r"(\w+)\.(weight)", key)
        if layer and layer[2] in names and int(layer[1]) < layers:
            name = f"model.layers.{int(layer[1])}.{names[layer[2]]}.{layer[3]}"
            stored |= dict.fromkeys(_of_experts(name, file.tensors[key].shape[0]), key)
        elif whole and whole[1] in _NAMES:
            stored[f"{_NAMES[whole[1]]}.weight"] = key
        else:
            where = f"a {architecture.model_class} of {layers} layers"
            raise UsageError(f"{file.path}: {key!r:.80} has no place in {where}; {_ADVICE}")
    wanted = [f"blk.{i}.{name}.weight" for i in range(layers) for name in names]
    missing = [key for key in ("output_norm.weight", *wanted) if key not in file.tensors]
    if missing:
        others = f" and {len(missing) - 1} others are" if len(missing) > 1 else " is"
        raise UsageError(f"{file.path}: {missing[0]}{others} missing; fetch the file again")
    return stored

"""A Llama in a Hugging Face folder to a GGUF file in float16, as llama.cpp reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_BLOCK = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def read_safetensors(file: Path) -> dict[str, NDArray[Any]]:
    """Float16 or float32 tensors of a safetensors file, memory-mapped."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    data, dtypes = np.memmap(file, np.uint8, "r", 8 + size), {"F16": np.float16, "F32": np.float32}
    return {
        name: data[slice(*entry["data_offsets"])].view(dtypes[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor of transformers."""
    stem = name.removesuffix(".weight")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_BLOCK[part]}.weight"


def pairs(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of each head reordered: transformers rotates row i with row i + D/2, llama.cpp rows 2i and 2i + 1."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write(model: Path, out: Path) -> None:
    """Matrices in float16, norms in float32, and as much of a tokenizer as llama.cpp asks for."""
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    count = config["vocab_size"]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(count)])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (count - 3)])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_unk_token_id(0)
    for name, tensor in read_safetensors(model / "model.safetensors").items():
        if ".q_proj." in name or ".k_proj." in name:
            tensor = pairs(tensor, heads if ".q_proj." in name else kv_heads)
        dtype = np.float32 if tensor.ndim == 1 else np.float16
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(tensor, dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

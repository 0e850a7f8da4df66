"""Whole models from GGUF: names, the order of rotary rows, configuration, logits, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from tiny_gguf import HEADS, HIDDEN, KV_HEADS, VOCAB, tiny_gguf, to_rotary_order
from torch import Tensor
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.cli.commands import main
from compressor.errors import UsageError
from compressor.graph.caches import empty_caches
from compressor.host.digests import model_fingerprint, read_sha256

transformers = pytest.importorskip("transformers")


pytestmark = pytest.mark.usefixtures("one_thread")


def logits(graph: GraphModule) -> Tensor:
    info = graph.meta["model"]
    ids = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    caches = empty_caches(info, 2, 9)
    return graph(ids, torch.arange(7), torch.arange(7), caches[: info.layers], caches[info.layers :])[0]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    path = tmp_path_factory.mktemp("llama") / "tiny.gguf"
    return path, tiny_gguf(path)


def test_values_and_logits_of_a_llama(llama: tuple[Path, dict[str, Tensor]]) -> None:
    path, values = llama
    graph = capture(path)
    parameters = {name.removeprefix("model."): value for name, value in graph.named_parameters()}
    projections = {"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
                   "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip
    for stored, name in projections.items():
        assert torch.equal(parameters[f"layers.0.{name}.weight"], values[f"blk.0.{stored}.weight"])
    for stored, name, heads in (("attn_q", "q_proj", HEADS), ("attn_k", "k_proj", KV_HEADS)):
        weight = parameters[f"layers.0.self_attn.{name}.weight"]
        assert torch.equal(to_rotary_order(weight, heads), values[f"blk.0.{stored}.weight"])
    embedding = parameters["embed_tokens.weight"]
    assert embedding.dtype == torch.float16 and torch.equal(embedding, values["token_embd.weight"])

    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict({name: p.float() for name, p in graph.named_parameters()}, strict=False)
    assert torch.equal(logits(graph), logits(capture(model)))
    info = graph.meta["model"]
    assert info.eos_ids == (2,) and info.source == path.parent and info.max_positions == 64
    assert info.unpacked_bytes == 4 * (6 * HIDDEN * HIDDEN)


def test_values_are_those_of_transformers_own_reader(llama: tuple[Path, dict[str, Tensor]]) -> None:
    pytest.importorskip("gguf")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    graph = capture(llama[0])
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, vocab_size=VOCAB))
    read = load_gguf_checkpoint(str(llama[0]), return_tensors=True, model_to_load=model)
    assert read["config"]["num_key_value_heads"] == KV_HEADS and read["config"]["rms_norm_eps"] == pytest.approx(1e-5)
    parameters = dict(graph.named_parameters())
    assert read["tensors"].keys() == parameters.keys()
    for name, value in read["tensors"].items():
        assert torch.equal(parameters[name].float(), torch.as_tensor(value).float()), name


def test_commands_know_a_folder_with_a_gguf_file(llama: tuple[Path, dict[str, Tensor]]) -> None:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments, str(llama[0].parent), "--json"], prog_name="compress")

    inspected = run("inspect")
    assert inspected.exit_code == 0, inspected.output
    assert "model.layers.0.mlp.up_proj" in inspected.stdout
    timed = run("bench", "--repeats", "1")
    assert timed.exit_code == 2 and "has no config.json, and PyTorch is timed on Hugging Face folders" in timed.stderr
    assert model_fingerprint(llama[0].parent) == {"tiny.gguf": read_sha256(llama[0])}


def test_a_plan_reads_no_weight(llama: tuple[Path, dict[str, Tensor]]) -> None:
    graph, planned = capture(llama[0].parent), capture(llama[0], weights=False)
    assert [(name, p.shape, p.dtype) for name, p in planned.named_parameters()] == [
        (name, p.shape, p.dtype) for name, p in graph.named_parameters()
    ]
    assert all(parameter.is_meta for parameter in planned.parameters())


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("qwen2", {f"blk.0.attn_{x}.bias": ("F32", (HIDDEN if x == "q" else HIDDEN // 2,)) for x in "qkv"}),
        ("qwen3", {f"blk.0.attn_{x}_norm.weight": ("F32", (HIDDEN // HEADS,)) for x in "qk"}),
    ],
)
def test_rows_of_other_families_keep_their_order(architecture: str, more: dict[str, Any], tmp_path: Path) -> None:
    kinds = dict.fromkeys(("attn_q", "ffn_up", "ffn_gate", "attn_output"), "BF16")
    values = tiny_gguf(tmp_path / "a.gguf", architecture, kinds, **more, **{"output.weight": ("F16", (VOCAB, HIDDEN))})
    graph = capture(tmp_path)
    parameters = dict(graph.named_parameters())
    attention = "model.layers.0.self_attn"
    assert torch.equal(parameters[f"{attention}.q_proj.weight"], values["blk.0.attn_q.weight"])
    assert parameters[f"{attention}.q_proj.weight"].dtype == torch.bfloat16
    assert torch.equal(parameters["lm_head.weight"], values["output.weight"])
    extra = f"{attention}.k_proj.bias" if architecture == "qwen2" else f"{attention}.k_norm.weight"
    assert torch.equal(parameters[extra], values[next(name for name in more if "attn_k" in name)])
    assert torch.isfinite(logits(graph)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, r"architecture 'gemma3' is not read from GGUF; read are llama, qwen2, "),
        ({"rope_freqs.weight": ("F32", (32,))}, r"factors of their own \(rope_freqs.weight\)"),
        ({"llama.rope.scaling.type": "yarn"}, "rotary embeddings are scaled .'yarn'"),
        ({"llama.expert_count": 8}, "it has 8 experts"),
        ({"llama.attention.sliding_window": 32}, "attention has a window of 32"),
        ({"split.count": 3}, "one of 3 parts: join them by"),
        ({"llama.attention.head_count": None}, "llama.attention.head_count is None"),
        ({"llama.rope.dimension_count": 32}, "dimension_count is 32, and heads are 64 wide"),
        ({"llama.attention.layer_norm_rms_epsilon": 1}, "rms_epsilon is 1; a number above 0"),
        ({"blk.0.attn_v.weight": None}, r"blk.0.attn_v.weight is missing"),
        ({"token_embd.weight": None}, "token_embd.weight is missing"),
        ({"blk.1.attn_v.weight": ("F32", (4, 4))}, "'blk.1.attn_v.weight' has no place in a LlamaForCausalLM of 1 lay"),
        ({"v.patch_embd.weight": ("F32", (4, 4))}, "'v.patch_embd.weight' has no place"),
    ],
)
def test_models_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    kinds = {name: "F16" for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    tiny_gguf(tmp_path / "a.gguf", kinds=kinds, **changes)
    with pytest.raises(UsageError, match=f"a.gguf: .*{message}"):
        capture(tmp_path / "a.gguf", weights=False)


def test_absurd_counts_are_refused(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "a.gguf", **{"llama.block_count": 10**6})
    with pytest.raises(Exception, match="num_hidden_layers is 1000000, more than 512; 11 tensors are stored"):
        capture(tmp_path)


def test_one_file_a_folder(llama: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """The folder's digest decides what is taken from the cache, so it must be that of one model."""
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(llama[0], tmp_path / name)
    for given in (tmp_path, tmp_path / "a.gguf"):
        with pytest.raises(UsageError, match=r"2 GGUF files, such as a\.gguf and b\.gguf"):
            capture(given)
    (tmp_path / "b.gguf").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="other weights lie beside it"):
        capture(tmp_path / "a.gguf")

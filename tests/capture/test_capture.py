from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.capture.export import reexport

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
DECODERS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "llama-tied": lambda: transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=3),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "opt": lambda: transformers.OPTConfig(**SIZES, ffn_dim=96, word_embed_proj_dim=64),
    "gemma2": lambda: transformers.Gemma2Config(
        **GROUPED, sliding_window=4, attn_logit_softcapping=0.1, final_logit_softcapping=3.0
    ),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def build(config: transformers.PreTrainedConfig, kind: type = transformers.AutoModelForCausalLM) -> nn.Module:
    """Build a random model whose weights are large enough for caps, windows and norms to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.from_config(config, attn_implementation="eager").eval()
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
    return model.requires_grad_(False)


def stored_logits(folder: Path, ids: Tensor) -> Tensor:
    """Load a folder in float32 as transformers does.  (``half().float()`` would round its buffers.)"""
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")(ids).logits.detach()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def generate(graph: GraphModule, ids: Tensor, steps: tuple[int, ...], capacity: int = 12) -> Tensor:
    """Logits of all positions, computed in steps through the cache, which holds NaN where nothing was written."""
    info = graph.meta["model"]
    shape = (ids.shape[0], info.kv_heads, capacity, info.head_dim)
    caches = [[torch.full(shape, float("nan")) for _ in range(info.layers)] for _ in range(2)]
    logits, begin = [], 0
    for step in steps:
        here = slice(begin, begin + step)
        out, *new = graph(ids[:, here], torch.arange(begin, begin + step), torch.arange(step), *caches)
        for cache, values in zip(caches, new, strict=True):
            for entry, value in zip(cache, values, strict=True):
                entry[:, :, here] = value
        logits.append(out)
        begin += step
    return torch.cat(logits, dim=1)


def assert_near(actual: Tensor, expected: Tensor, relative: float = 2e-5) -> None:
    assert actual.shape == expected.shape and actual.dtype == torch.float32
    assert float((actual - expected).abs().max()) <= relative * float(expected.abs().max())


def operators(graph: GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_in_steps_equals_the_whole_forward(name: str, tmp_path: Path) -> None:
    model = build(DECODERS[name]()).half()
    model.save_pretrained(tmp_path)
    graph = capture(tmp_path)
    ids = tokens(2, 8)
    assert_near(generate(graph, ids, (5, 1, 1, 1)), stored_logits(tmp_path, ids))

    used = set(operators(graph))
    assert not used & {"aten.linear.default", "aten.addmm.default", "aten.rsqrt.default", "aten.dropout.default"}
    assert not any("assert" in operator for operator in used)
    assert operators(graph).count("compressor.cached_attention.default") == 2
    names = dict(model.named_parameters(remove_duplicate=False))
    assert {n for n, _ in graph.named_parameters()} <= set(names)
    assert graph.meta["model"].parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_reexport_gives_the_same_numbers_at_other_sizes(name: str) -> None:
    graph = capture(build(DECODERS[name]()))
    again = reexport(graph).module(check_guards=False)
    info = graph.meta["model"]
    for batch, length, capacity in ((1, 1, 1), (3, 9, 20)):
        shape = (batch, info.kv_heads, capacity, info.head_dim)
        caches = [[torch.zeros(shape) for _ in range(info.layers)] for _ in range(2)]
        args = (tokens(batch, length), torch.arange(length), torch.tensor([length - 1]), *caches)
        for mine, other in zip(torch.utils._pytree.tree_leaves(graph(*args)),
                               torch.utils._pytree.tree_leaves(again(*args)), strict=True):  # fmt: skip
            assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_storage_types(dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(DECODERS["llama-tied"]()).to(dtype)
    model.save_pretrained(tmp_path)
    graph = capture(tmp_path)
    assert graph.get_parameter("model.layers.0.mlp.up_proj.weight").dtype == dtype
    assert graph.get_parameter("model.embed_tokens.weight").dtype == dtype
    assert graph.get_parameter("model.norm.weight").dtype == torch.float32
    assert "lm_head.weight" not in dict(graph.named_parameters(remove_duplicate=False))
    ids = tokens(2, 8)
    assert_near(generate(graph, ids, (8,)), stored_logits(tmp_path, ids))


def test_half_biases_and_conv1d_weights(tmp_path: Path) -> None:
    build(DECODERS["gpt2"]()).half().save_pretrained(tmp_path)
    graph = capture(tmp_path)
    weight = graph.get_parameter("transformer.h.0.attn.c_attn.weight")
    assert weight.dtype == torch.float16 and weight.shape == (192, 64) and weight.stride() == (1, 192)
    assert graph.get_parameter("transformer.h.0.attn.c_attn.bias").dtype == torch.float32


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/maps")
@pytest.mark.parametrize("shard", ["1GB", "60KB"])
def test_weights_are_mapped_from_the_files(shard: str, tmp_path: Path) -> None:
    model = build(DECODERS["llama"]()).half()
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "60KB")
    graph = capture(tmp_path)
    mapped = [
        [int(bound, 16) for bound in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(tmp_path) in line
    ]
    for name, parameter in graph.named_parameters():
        inside = any(low <= parameter.data_ptr() < high for low, high in mapped)
        assert inside == (parameter.dim() == 2), name
    ids = tokens(1, 6)
    assert_near(generate(graph, ids, (6,)), stored_logits(tmp_path, ids))


def test_model_in_memory_is_shared_and_left_alone() -> None:
    model = build(DECODERS["llama"]())
    model.set_attn_implementation("sdpa")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    graph = capture(model)
    assert torch.equal(state, torch.get_rng_state())
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.data_ptr() == model.get_parameter(n).data_ptr() for n, p in graph.named_parameters())
    ids = tokens(2, 7)
    assert_near(generate(graph, ids, (4, 3)), model(ids).logits)


def test_keep_selects_rows_before_the_head() -> None:
    graph = capture(build(DECODERS["llama"]()))
    ids = tokens(2, 6)
    caches = [[torch.zeros(2, 2, 1, 16)] * 2] * 2
    whole, *_ = graph(ids, torch.arange(6), torch.arange(6), *caches)
    some, *_ = graph(ids, torch.arange(6), torch.tensor([5, 2]), *caches)
    torch.testing.assert_close(some, whole[:, [5, 2]])
    head = next(n for n in reversed(graph.graph.nodes) if n.target is torch.ops.compressor.dense_linear.default)
    assert str(head.args[0].target) == "aten.index.Tensor"


def test_facts_about_the_model(tmp_path: Path) -> None:
    build(DECODERS["llama"]()).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    info = capture(tmp_path).meta["model"]
    assert (info.kind, info.name, info.architecture) == ("decoder", tmp_path.name, "LlamaForCausalLM")
    assert (info.layers, info.kv_heads, info.head_dim, info.vocab_size) == (2, 2, 16, 97)
    assert (info.max_positions, info.eos_ids, info.bos_id, info.source) == (64, (2, 7), 1, tmp_path)
    assert len(info.config_sha256) == 64


# Encoders


@pytest.mark.parametrize("spelling", ["headed", "bare", "gamma"])
def test_encoder_with_padding(spelling: str, tmp_path: Path) -> None:
    kind = transformers.AutoModel if spelling == "bare" else transformers.AutoModelForMaskedLM
    model = build(transformers.BertConfig(**SIZES), kind).half()
    model.save_pretrained(tmp_path)
    if spelling == "gamma":  # as Google's first checkpoints have it
        file = tmp_path / "model.safetensors"
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        stored = load_file(file)
        for new, was in old.items():
            stored = {name.replace(new, was): tensor for name, tensor in stored.items()}
        save_file(stored, file, metadata={"format": "pt"})
    graph = capture(tmp_path)
    assert graph.meta["model"].kind == "encoder"
    ids, mask = tokens(2, 9), torch.ones(2, 9)
    mask[1, 5:] = 0
    body = getattr(model, "bert", model).float()
    expected = body(ids, attention_mask=mask.long()).last_hidden_state
    actual = graph(ids, mask)
    assert_near(actual[mask.bool()], expected[mask.bool()])
    assert torch.equal(reexport(graph).module(check_guards=False)(ids, mask), actual)
    assert not any(name.startswith(("pooler", "cls")) for name, _ in graph.named_parameters())


# Other names in the checkpoint


def test_checkpoint_without_the_base_prefix(tmp_path: Path) -> None:
    model = build(DECODERS["gpt2"]())
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    stored["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # a mask that early GPT-2 checkpoints hold
    save_file(stored, file, metadata={"format": "pt"})
    ids = tokens(1, 5)
    assert_near(generate(capture(tmp_path), ids, (5,)), model(ids).logits)


# Plain modules


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.root = nn.RMSNorm(4, eps=1e-5)
        self.hf = nn.Linear(4, 5)
        self.offset = torch.tensor([0.5])

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm(self.conv(x)))
        return self.hf(self.root(y.mean((2, 3)))) + self.offset


def test_plain_module_with_a_symbolic_batch() -> None:
    module = Block()
    module.norm.running_mean += 0.3
    x = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    graph = capture(module, (x,), dynamic_shapes=({0: Dim("batch", min=1)},))
    assert module.training and module.relu.training
    info = graph.meta["model"]
    assert (info.kind, info.name) == ("module", "Block")
    module.eval()
    for batch in (1, 4):
        torch.testing.assert_close(graph(x[:batch]), module(x[:batch]))
        assert torch.equal(reexport(graph).module(check_guards=False)(x[:batch]), graph(x[:batch]))
    assert {"compressor.dense_linear.default", "compressor.rms_norm.default"} <= set(operators(graph))
    assert graph.get_parameter("hf.weight").data_ptr() == module.hf.weight.data_ptr()
    calls = [n for n in graph.graph.nodes if str(n.target) == "compressor.dense_linear.default"]
    (linear,) = (n for n in calls if n.args[1].target == "hf.weight")  # the other is the convolution
    assert list(linear.meta["nn_module_stack"].values())[-1][0] == "hf"

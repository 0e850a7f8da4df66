"""Rotation: the function stays, for every kind of model; weights are what the definition says; outliers are gone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers
from captures import capture_once
from packed_models import drop_weights
from scipy.linalg import hadamard
from torch import Tensor, nn
from torch.fx import GraphModule

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.statistics import Inputs
from compressor.errors import CompressorError
from compressor.formats.packing import dequantize
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import linear_sites, packed_sites
from compressor.host.resources import resource
from compressor.numerics.products.hadamard import random_signs
from compressor.passes.rotation import Rotation, pack_rotation
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context

SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
GATED = {**SIZES, "intermediate_size": 96, "max_position_embeddings": 64}
MODELS: dict[str, transformers.PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**GATED, num_key_value_heads=2),
    "half": transformers.LlamaConfig(**GATED, num_key_value_heads=2),  # in float16
    "tied": transformers.Qwen2Config(**{**GATED, "hidden_size": 48}, num_key_value_heads=2, tie_word_embeddings=True),
    "odd": transformers.LlamaConfig(**{**GATED, "hidden_size": 52, "num_attention_heads": 2}, num_key_value_heads=1),
    "granite": transformers.GraniteConfig(
        **GATED, residual_multiplier=0.22, embedding_multiplier=12.0, tie_word_embeddings=False
    ),
    "opt": transformers.OPTConfig(**SIZES, ffn_dim=96, word_embed_proj_dim=64, max_position_embeddings=64),
    "neox": transformers.GPTNeoXConfig(**GATED, rotary_pct=0.5, bos_token_id=0, eos_token_id=0),
    "gpt2": transformers.GPT2Config(
        vocab_size=97, n_embd=64, n_layer=1, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    ),
}


@cache
def captured(name: str) -> GraphModule:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(MODELS[name]).eval()
        for parameter in model.parameters():  # biases and norms that are not zeros and ones
            nn.init.normal_(parameter, std=0.3)
    return capture_once(model.half() if name == "half" else model)


def make(name: str) -> GraphModule:
    return clone_graph(captured(name))


def logits(graph: GraphModule) -> Tensor:
    info = graph.meta["model"]
    caches = [[torch.zeros(2, info.kv_heads, 1, info.head_dim)] * info.layers] * 2
    ids = torch.arange(40).view(2, 20) % 97
    with torch.no_grad():
        result: Tensor = graph(ids, torch.arange(20), torch.arange(20), *caches)[0]
    return result


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("name", "ignore", "matrices", "noted"), [
    ("llama", (), 0, []),
    ("llama", ("lm_head",), 1, ["lm_head is left as it is"]),
    ("half", ("lm_head",), 2, ["stored as float16", "lm_head is left as it is"]),
    ("tied", (), 2, ["embed_tokens.weight is tied", "the weight of lm_head is tied"]),
    ("odd", (), 0, []),
    ("odd", ("lm_head",), 0, ["model.embed_tokens): no Hadamard matrix of 52 channels"]),
    ("granite", (), 0, []),
    ("opt", (), 2, ["embed_tokens.weight is tied", "the weight of lm_head is tied"]),
    ("gpt2", (), 2, ["wte.weight is tied", "the weight of lm_head is tied", "attention's values come from"]),
    ("neox", (), 1, ["lm_head has no bias that could take the norm's over", "attention's values come from"]),
])  # fmt: skip
def test_the_function_stays(name: str, ignore: tuple[str, ...], matrices: int, noted: list[str]) -> None:
    graph, ctx = make(name), Context()
    before, shapes = logits(graph), {key: value.shape for key, value in graph.named_parameters()}
    shadow = clone_graph(graph)
    drop_weights(shadow)
    graph = Rotation(ignore=ignore).run(graph, ctx)
    assert difference(logits(graph), before) < 1e-5
    assert len(packed_sites(graph)) == matrices and len(ctx.notes) == len(noted)
    assert all(part in note and note.startswith("rotation: ") for part, note in zip(noted, ctx.notes, strict=True))
    # Nothing is stored beside float32 in the old places, and the matrices that a note names; biases of norms are gone.
    width = SIZES["hidden_size"] if name != "tied" else 48
    added = matrices * (width * width // 4 + 2 * width)
    kept = {key: value.element_size() for key, value in graph.named_parameters() if key in shapes}
    assert weight_bytes(graph) == added + sum(shapes[key].numel() * size for key, size in kept.items())
    assert all("norm" in key or ".ln_" in key for key in shapes.keys() - kept.keys())
    # What was planned without weights is what happened.
    planned = Context()
    sites = Rotation(ignore=ignore).plan(shadow, planned)
    assert weight_bytes(shadow) == weight_bytes(graph) and planned.notes == ctx.notes
    after = {site.name: graph.get_parameter(site.weight_name) for site in linear_sites(graph)}
    assert {plan.site: plan.bytes_after for plan in sites} == {
        k: v.numel() * v.element_size() for k, v in after.items()
    }


def test_the_weights_are_the_definitions() -> None:
    """Against matrices written out: scipy's Hadamard matrix behind the signs that the seed draws."""
    old, new = make("llama"), Rotation().run(make("llama"), Context(seed=5))
    rng = torch.Generator().manual_seed(5)
    signs, own = random_signs(64, rng), random_signs(2 * 16, rng)
    R = torch.diag(signs) @ torch.tensor(hadamard(64)).double() / 8
    H = torch.tensor(hadamard(16)).double() / 4
    kv = torch.block_diag(*(torch.diag(part) @ H for part in own.view(2, 16)))  # of two key-value heads
    heads = torch.block_diag(*(torch.diag(part) @ H for part in own.view(2, 16).repeat_interleave(2, 0)))

    def at(graph: GraphModule, name: str) -> Tensor:
        return graph.get_parameter(f"model.{name}.weight").detach().double()

    block = "layers.0"
    first, second = at(old, f"{block}.input_layernorm"), at(old, f"{block}.post_attention_layernorm")
    q, v, o = (f"{block}.self_attn.{name}_proj" for name in "qvo")
    up, down = f"{block}.mlp.up_proj", f"{block}.mlp.down_proj"
    expected = {
        "embed_tokens": at(old, "embed_tokens") @ R,
        q: at(old, q) * first @ R,
        v: kv.t() @ (at(old, v) * first) @ R,
        o: R.t() @ at(old, o) @ heads,
        up: at(old, up) * second @ R,
        down: R.t() @ at(old, down),
        "norm": torch.ones(64, dtype=torch.float64),
    }
    for name, value in expected.items():
        assert difference(at(new, name), value) < 1e-7, name


@pytest.mark.parametrize(("width", "back"), [(64, False), (48, True), (32, False), (32, True)])
def test_the_packed_matrix_is_the_rotation_times_its_gain(width: int, back: bool) -> None:
    signs = random_signs(width, torch.Generator().manual_seed(1))
    packed, gain = pack_rotation(width, signs, back=back)
    forth, _ = pack_rotation(width, signs, back=not back)
    assert abs(gain - 1) < 2**-11 and (gain == 1 or width != 64)
    both = dequantize(packed) @ dequantize(forth) / gain**2
    assert torch.allclose(both, torch.eye(width), atol=1e-6, rtol=0)
    x, ones = torch.randn(5, width, generator=torch.Generator().manual_seed(2)), torch.ones(width, dtype=torch.float64)
    packed, gain = pack_rotation(width, ones, back=False, centered=True)
    turned = x @ dequantize(packed).t()
    assert not turned[:, 0].any()
    back = turned @ dequantize(pack_rotation(width, ones, back=True)[0]).t() / gain**2
    assert torch.allclose(back, x - x.mean(1, keepdim=True), atol=1e-6, rtol=0)


def test_the_gain_of_a_packed_matrix_is_taken_out_of_the_norms() -> None:
    """A stream so small that its norms' epsilon matters, of a width whose root is no float16."""
    sizes = {**GATED, "hidden_size": 32, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True, rms_norm_eps=1e-2)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    graph = capture_once(model)
    before = logits(graph)
    Rotation().run(graph, Context())
    _, gain = pack_rotation(32, torch.ones(32, dtype=torch.float64), back=False)
    epsilons = [node.args[2] for node in graph.graph.nodes if node.target is torch.ops.compressor.rms_norm.default]
    assert epsilons == [1e-2 * gain**2] * 2 + [1e-2 * (gain * gain) ** 2] and gain != 1
    assert difference(logits(graph), before) < 1e-5


def test_outliers_are_gone() -> None:
    """What linears read, where one channel of the stream is forty times as large as the others."""
    graph = make("llama")
    for name in ("embed_tokens", "layers.0.self_attn.o_proj"):
        weight = graph.get_parameter(f"model.{name}.weight").detach().clone()
        (weight.t() if name == "embed_tokens" else weight)[3] *= 40
        set_parameter(graph, f"model.{name}.weight", weight)

    def peaks(graph: GraphModule) -> list[float]:
        ids = torch.arange(96).view(2, 48)
        groups = CalibrationRun(
            graph, ids, linear_sites(graph), Inputs, CalibrationOptions(true_sequential=False)
        ).groups()
        found = {group[0].name.rpartition(".")[2]: inputs for group, inputs in groups}
        return [float(found[k].absmax.max() / found[k].mean_square.mean().sqrt()) for k in ("q_proj", "gate_proj")]

    before, after = peaks(graph), peaks(Rotation().run(graph, Context()))
    assert all(b > 7 and a < b / 2 for a, b in zip(after, before, strict=True)), (before, after)


def test_the_reference_model_stays() -> None:
    graph = capture_once(resource("models") / "reference")
    before = logits(graph)
    assert difference(logits(Rotation().run(graph, Context())), before) < 1e-5


def test_the_seed_decides() -> None:
    found = [Rotation().run(make("llama"), Context(seed=seed)) for seed in (0, 0, 1)]
    values = [graph.get_parameter("model.layers.0.mlp.down_proj.weight") for graph in found]
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])


def test_packed_linears_and_broken_weights_are_named() -> None:
    graph, ctx = make("llama"), Context()
    graph = Rtn("W8A16", targets="o_proj").run(graph, ctx)
    before = logits(graph)
    Rotation().run(graph, ctx)
    assert difference(logits(graph), before) < 1e-5
    assert "o_proj), since it is not the output of a linear or an embedding" in ctx.notes[0]
    graph = make("llama")
    weight = graph.get_parameter("model.layers.0.mlp.up_proj.weight").detach().clone()
    weight[3, 4] = float("nan")
    set_parameter(graph, "model.layers.0.mlp.up_proj.weight", weight)
    with pytest.raises(CompressorError, match=r"up_proj\.weight holds NaN"):
        Rotation().run(graph, Context())

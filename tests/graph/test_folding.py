"""Scales of input channels: the function stays, whatever stands in front of the linears; what cannot be is named."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.graph.folding import CannotFold, find_scale_target
from compressor.graph.model import weight_bytes
from compressor.graph.segments import segments
from compressor.graph.sites import group_by_input, linear_sites
from compressor.pipeline.context import Context
from compressor.pipeline.scaling import scale_inputs

SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def tiny(config: transformers.PreTrainedConfig) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():  # biases and norms that are not zeros and ones
            nn.init.normal_(parameter, std=0.3)
    return model


def llama() -> GraphModule:
    return capture(tiny(transformers.LlamaConfig(
        **SIZES, intermediate_size=96, num_key_value_heads=2, max_position_embeddings=64
    )))  # fmt: skip


def opt() -> GraphModule:
    return capture(tiny(transformers.OPTConfig(
        **SIZES, ffn_dim=96, word_embed_proj_dim=64, max_position_embeddings=64
    )))  # fmt: skip


def gpt2() -> GraphModule:
    return capture(tiny(transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=64)))


def logits(graph: GraphModule) -> Tensor:
    info = graph.meta["model"]
    caches = [[torch.zeros(2, info.kv_heads, 1, info.head_dim)] * info.layers] * 2
    ids = torch.arange(10).view(2, 5) % 97
    with torch.no_grad():
        result: Tensor = graph(ids, torch.arange(5), torch.arange(5), *caches)[0]
    return result


@pytest.mark.parametrize(("make", "folded"), [
    # what is behind: attention's and the MLP's norm, the values through attention, a factor of the product, relu
    (llama, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}),
    (opt, {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}),
    (gpt2, {"c_attn", "c_fc"}),
])  # fmt: skip
def test_the_function_stays_whatever_takes_the_scale(make: object, folded: set[str]) -> None:
    graph: GraphModule = make()  # type: ignore[operator]
    before, ctx, rng = logits(graph), Context(), torch.Generator().manual_seed(0)
    scaled = set()
    for group in group_by_input(linear_sites(graph)):
        weight = graph.get_parameter(group[0].weight_name).detach().clone()
        random = torch.exp2(4 * torch.rand(group[0].in_features, generator=rng, dtype=torch.float64) - 2)
        scale = scale_inputs(graph, ctx, "test", group, lambda _, s=random: s)  # type: ignore[misc]
        if scale is not None:
            scaled |= {site.name.rpartition(".")[2] for site in group}
            assert torch.equal(graph.get_parameter(group[0].weight_name), weight.float() * scale)
    assert scaled == folded
    after = logits(graph)
    assert float((after - before).norm() / before.norm()) < 1e-5
    named = " ".join(note.partition(": inputs are not scaled: ")[0] for note in ctx.notes)
    everything = {site.name.rpartition(".")[2] for site in linear_sites(graph)}
    assert all(name in named for name in everything - folded) and not any(f".{name}" in named for name in folded)


def test_linears_behind_a_post_norm_read_a_scaled_copy_of_it() -> None:
    config = transformers.BertConfig(**SIZES, intermediate_size=96, max_position_embeddings=16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.BertModel(config).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    graph, ctx, rng = capture(model), Context(), torch.Generator().manual_seed(0)
    inputs = torch.arange(10).view(2, 5), torch.tensor([[1.0] * 5, [1.0] * 3 + [0.0] * 2])
    before, bytes_before, cuts = graph(*inputs), weight_bytes(graph), len(segments(graph))
    for group in group_by_input(linear_sites(graph)):
        random = torch.exp2(4 * torch.rand(group[0].in_features, generator=rng, dtype=torch.float64) - 2)
        scale_inputs(graph, ctx, "test", group, lambda _, s=random: s)  # type: ignore[misc]
    graph.recompile()
    assert float((graph(*inputs) - before).norm() / before.norm()) < 1e-5
    assert not torch.equal(graph(*inputs), before)
    copies = [note for note in ctx.notes if "inputs are scaled in a copy of layer_norm" in note]
    refused = [note for note in ctx.notes if "not scaled: its input comes from gelu" in note]
    assert (len(copies), len(refused)) == (4, 2) and len(ctx.notes) == 6
    assert "query, encoder.layer.1.attention.self.key" in copies[2]
    assert "layer.0.output.LayerNorm), which is also read by add" in copies[2]
    assert weight_bytes(graph) - bytes_before == 4 * 2 * 64 * 4  # weight and bias of each
    assert len(segments(graph)) == cuts
    assert [site.input.name for site in linear_sites(graph) if "query" in site.name] == ["layer_norm_5", "layer_norm_7"]


def test_heads_that_share_values_share_a_scale() -> None:
    graph = llama()
    group = next(g for g in group_by_input(linear_sites(graph)) if g[0].name.endswith("o_proj"))
    target, _ = find_scale_target(graph, group[0].input)
    assert target.shares == (2, 2, 16) and target.parameters == ("model.layers.0.self_attn.v_proj.weight",)
    scale = torch.arange(1.0, 65.0)
    shared = target.shared(scale).view(2, 2, 16)
    assert torch.equal(shared[:, 0], shared[:, 1])
    assert torch.equal(shared[:, 0], scale.view(2, 2, 16).amax(1))


def test_reasons_name_what_is_in_the_way() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.third, self.fourth, self.fifth = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            z = torch.tanh(self.first(y)) + y
            a = self.second(z)
            b = self.fourth(torch.sigmoid(a))
            return torch.as_tensor(self.third(torch.relu(a)) + self.fifth(b) + b)

    graph = capture(Branches().eval(), (torch.randn(2, 8),))
    for name, reason in [
        ("second", "comes from add"), ("third", "other readers"), ("fourth", "comes from sigmoid"),
        ("fifth", "also read by add"),
    ]:  # fmt: skip
        site = next(s for s in linear_sites(graph) if s.name == name)
        with pytest.raises(CannotFold, match=reason):
            find_scale_target(graph, site.input)


def test_a_tied_weight_is_left_alone() -> None:
    config = transformers.LlamaConfig(
        **SIZES, intermediate_size=96, max_position_embeddings=64, tie_word_embeddings=True
    )
    graph = capture(tiny(config))
    head = linear_sites(graph)[-1]
    with pytest.raises(CannotFold, match="is tied"):
        find_scale_target(graph, head.input)

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from compressor.capture.capture import capture
from compressor.export.facts import weight_bytes_per_token
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, dequantize, pack
from compressor.graph.kinds.tables import embedding_tables, rows_of_tables
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.rewrite import drop_dead_parameters, replace_linear, replace_packed, set_parameter
from compressor.graph.segments import segments, shared_nodes
from compressor.graph.sites import group_by_input, linear_sites, match_sites, packed_sites, run_nodes, ties
from compressor.numerics.grids import choose_grid, round_to_grid

transformers = pytest.importorskip("transformers")


def tiny(config: transformers.PreTrainedConfig) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def llama(**changes: object) -> GraphModule:
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return capture(tiny(transformers.LlamaConfig(**sizes, **heads, **changes)))


def gpt2() -> GraphModule:
    return capture(tiny(transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=64)))


def opt() -> GraphModule:
    sizes = {"vocab_size": 97, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return capture(tiny(transformers.OPTConfig(**sizes, word_embed_proj_dim=64, max_position_embeddings=64)))


GRAPHS = {"llama": llama, "gpt2": gpt2, "opt": opt}


@pytest.fixture(scope="module")
def shared() -> GraphModule:
    """For tests that only read."""
    return llama()


def decoder_args(graph: GraphModule, batch: int = 2, length: int = 5) -> tuple[object, ...]:
    info = graph.meta["model"]
    caches = [[torch.zeros(batch, info.kv_heads, 1, info.head_dim)] * info.layers] * 2
    ids = torch.arange(batch * length).view(batch, length) % 97
    return ids, torch.arange(length), torch.arange(length), *caches


def quantize(weight: Tensor) -> PackedWeight:
    fmt = Format.parse("W8A16")
    scales, zeros = choose_grid(weight.float(), fmt)
    return pack(round_to_grid(weight.float(), scales, zeros, fmt), scales[:, None], zeros, fmt)


def test_sites_in_dataflow_order(shared: GraphModule) -> None:
    sites = linear_sites(shared)
    layer = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    assert [s.name for s in sites] == [f"model.layers.{i}.{name}" for i in range(2) for name in layer] + ["lm_head"]
    first = sites[0]
    assert (first.module_class, first.in_features, first.out_features) == ("Linear", 64, 64)
    assert (first.weight_name, first.bias_name, first.tied) == (f"{first.name}.weight", None, False)


def test_groups_share_an_input(shared: GraphModule) -> None:
    groups = [[s.name.rpartition(".")[2] for s in group] for group in group_by_input(linear_sites(shared))]
    block = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert groups == [*block, *block, ["lm_head"]]


@pytest.mark.parametrize(
    ("targets", "ignore", "count", "unmatched"),
    [
        ("Linear", [], 15, []),
        ("Linear", "lm_head", 14, []),
        (["q_proj", "k_proj"], [], 4, []),
        (["model.layers.1"], ["re:.*down"], 6, []),
        (["re:model\\.layers\\.\\d\\.mlp"], [], 6, []),
        (["lm_head", "model.layers.0.mlp.up_proj"], [], 2, []),
        (["proj", "layers.1", "re:mlp", "up_proj"], ["nothing"], 2, ["proj", "layers.1", "re:mlp", "nothing"]),
    ],
)
def test_patterns(shared: GraphModule, targets: list[str], ignore: list[str], count: int, unmatched: list[str]) -> None:
    matched, missed = match_sites(linear_sites(shared), targets, ignore)
    assert (len(matched), missed) == (count, unmatched)


def test_conv1d_is_a_linear_and_has_its_own_name() -> None:
    sites = linear_sites(gpt2())
    assert [s.module_class for s in sites] == ["Conv1D"] * 8 + ["Linear"]
    assert (sites[0].out_features, sites[0].in_features) == (192, 64)
    assert len(match_sites(sites, "Linear")[0]) == 9 and len(match_sites(sites, "Conv1D")[0]) == 8


def test_tied_head_keeps_its_own_name() -> None:
    graph = llama(tie_word_embeddings=True)
    head = linear_sites(graph)[-1]
    assert (head.name, head.weight_name, head.tied) == ("lm_head", "model.embed_tokens.weight", True)
    assert [str(user.target) for user in ties(graph)["model.embed_tokens.weight"]] == [
        "aten.embedding.default",
        "compressor.dense_linear.default",
    ]
    before = weight_bytes(graph)
    packed = quantize(graph.get_parameter(head.weight_name))
    replace_linear(graph, head, packed)
    assert graph.get_parameter("model.embed_tokens.weight") is not None  # the embedding still reads it
    assert weight_bytes(graph) == before + packed.nbytes
    assert not ties(graph)


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.free = nn.Parameter(torch.ones(3, 8))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.layer(self.layer(x)), self.free)


def test_repeated_and_functional_linears() -> None:
    graph = capture(Repeated(), (torch.ones(2, 8),))
    sites = linear_sites(graph)
    assert [(s.name, s.tied) for s in sites] == [("layer", True), ("layer@2", True), ("free_linear", False)]
    assert sites[0].bias_name == "layer.bias"
    assert "unused" not in dict(graph.named_parameters())
    weight = graph.get_parameter("layer.weight")
    packed, x = quantize(weight), torch.linspace(-1, 1, 16).view(2, 8)
    dense = graph(x)
    replace_linear(graph, sites[0], packed)
    assert [site.name for site in linear_sites(graph)] == ["free_linear"]
    assert [site.name for site in packed_sites(graph)] == ["layer", "layer@2"]  # both read what is stored once
    assert [name for name in dict(graph.named_parameters()) if "codes" in name] == ["layer.codes"]
    graph.recompile()
    assert "layer.weight" not in dict(graph.named_parameters())
    torch.testing.assert_close(graph(x), dense, rtol=0.05, atol=0.02)
    shared = graph(x)
    for site in packed_sites(graph):  # each call gets a weight of its own, the other keeps its
        replace_packed(graph, site, packed)
        graph.recompile()
        assert torch.equal(graph(x), shared)
    assert len([name for name in dict(graph.named_parameters()) if "codes" in name]) == 2


@pytest.mark.parametrize("name", GRAPHS)
def test_replaced_linears_compute_with_the_packed_weights(name: str) -> None:
    graph, expected = GRAPHS[name](), GRAPHS[name]()
    args = decoder_args(graph)
    total = weight_bytes(graph)
    cuts = [(len(s.sites), s.entry and s.entry.name) for s in segments(graph)]
    for site in linear_sites(graph)[:-1]:
        packed = quantize(graph.get_parameter(site.weight_name))
        dense = expected.get_parameter(site.weight_name)
        total += packed.nbytes - dense.numel() * dense.element_size()
        dense.data = dequantize(packed)
        replace_linear(graph, site, packed)
    graph.recompile()
    graph.graph.lint()
    assert weight_bytes(graph) == total
    assert [s.name for s in linear_sites(graph)] == ["lm_head"]
    assert len(segments(graph)) == len(cuts)  # packed linears hold the cuts where they were
    torch.testing.assert_close(graph(*args)[0], expected(*args)[0], rtol=1e-5, atol=1e-5)
    codes = dict(graph.named_parameters())
    assert sum(key.endswith(".codes") for key in codes) == len(linear_sites(expected)) - 1
    assert not any(p.requires_grad for p in codes.values())


def test_replacing_checks_the_shape(shared: GraphModule) -> None:
    site = linear_sites(shared)[-1]
    with pytest.raises(ValueError, match=r"lm_head is 97 x 64, the packed weight \(8, 8\)"):
        replace_linear(shared, site, quantize(torch.ones(8, 8)))


def test_dead_parameters_go() -> None:
    graph = llama()
    set_parameter(graph, "model.layers.9.extra.weight", torch.ones(4))
    assert graph.get_parameter("model.layers.9.extra.weight").shape == (4,)
    assert drop_dead_parameters(graph) == ["model.layers.9.extra.weight"]
    assert "9" not in dict(graph.model.layers.named_children())


@pytest.mark.parametrize("name", GRAPHS)
def test_segments_in_order_are_the_graph(name: str) -> None:
    graph = GRAPHS[name]()
    parts = segments(graph)
    args = decoder_args(graph)
    expected = torch.utils._pytree.tree_leaves(graph(*args))
    assert all(part.sites for part in parts) and len(parts) == 5  # attention and MLP of two layers, head
    assert [s.name for part in parts for s in part.sites] == [s.name for s in linear_sites(graph)]

    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    always = dict(zip(inputs, torch.utils._pytree.tree_leaves(args), strict=True))
    run_nodes(graph, shared_nodes(graph), always)
    output: list[Node] = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    results: dict[Node, Tensor] = {}
    hidden: Tensor | None = None
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        env = dict(always)
        if part.entry is not None:
            env[part.entry] = hidden  # the only value that crosses a cut
        run_nodes(graph, part.nodes, env)
        results |= {node: env[node] for node in output if node in part.nodes}
        assert part.exit is (following and following.entry)
        hidden = env[part.exit] if part.exit is not None else None
    for node, value in zip(output, expected, strict=True):
        assert torch.equal(results[node], value)


def test_plain_chain_is_cut_after_each_linear() -> None:
    chain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    parts = segments(capture(chain, (torch.ones(2, 4),)))
    assert [[s.name for s in part.sites] for part in parts] == [["0"], ["2"], ["4"]]
    assert parts[0].entry is None and parts[-1].exit is None


@pytest.mark.parametrize("name", GRAPHS)
def test_a_twin_shares_parameters_and_keeps_its_own_nodes(name: str) -> None:
    graph = GRAPHS[name]()
    other, before = clone_graph(graph), graph.code
    mine, its = dict(graph.named_parameters()), dict(other.named_parameters())
    assert mine.keys() == its.keys() and all(mine[key] is its[key] for key in mine)
    assert other.meta["model"] == graph.meta["model"]
    nodes = list(zip(graph.graph.nodes, other.graph.nodes, strict=True))
    assert all(a is not b and a.name == b.name for a, b in nodes)
    assert [a.meta for a, _ in nodes if a.op != "output"] == [b.meta for _, b in nodes if b.op != "output"]
    info = graph.meta["model"]
    caches = [[torch.zeros(1, info.kv_heads, 1, info.head_dim)] * info.layers for _ in range(2)]
    args = (torch.arange(5)[None], torch.arange(5), torch.arange(5), *caches)
    expected = graph(*args)[0]
    site = linear_sites(graph)[0]
    weight = graph.get_parameter(site.weight_name)
    fmt = Format.parse("W2A16_C")
    scales, zeros = choose_grid(weight.float(), fmt)
    codes = round_to_grid(weight.float(), scales, zeros, fmt)
    replace_linear(graph, site, pack(codes, scales[:, None], None, fmt))
    graph.recompile()
    assert not torch.equal(graph(*args)[0], expected)
    assert torch.equal(other(*args)[0], expected)
    assert other.code == before and site.weight_name in dict(other.named_parameters())


def test_constants_are_neither_sites_nor_tables() -> None:
    """A model may look rows up in a buffer, and multiply by one."""

    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(10, 16))
            self.register_buffer("turn", torch.randn(16, 16))
            self.linear = nn.Linear(16, 16)

        def forward(self, ids: Tensor) -> Tensor:
            rows = self.linear(nn.functional.embedding(ids, self.table))
            return nn.functional.linear(rows, self.turn)

    graph = capture(nn.Sequential(Constants()), (torch.zeros(2, 5, dtype=torch.int64),))
    assert [site.name for site in linear_sites(graph)] == ["0.linear"]
    assert embedding_tables(graph) == []
    assert rows_of_tables(graph) == {"0.table": 10}
    assert weight_bytes_per_token(graph) == 4 * 16 * 17

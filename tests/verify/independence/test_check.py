from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captures import capture_once
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from compressor.capture.capture import capture
from compressor.errors import CompressorError
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import FORMATS, Format
from compressor.formats.packing import leave_out
from compressor.graph.rewrite import replace_linear
from compressor.graph.sites import linear_sites
from compressor.numerics.nearest import rtn_quantize
from compressor.verify.independence.check import Leak, check_independence

transformers = pytest.importorskip("transformers")
aten = torch.ops.aten

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**{**HEADS, "num_hidden_layers": 2}),
    "qwen2": lambda: transformers.Qwen2Config(**HEADS, use_sliding_window=True, sliding_window=4, max_window_layers=0),
    "qwen3": lambda: transformers.Qwen3Config(**HEADS),
    "mistral": lambda: transformers.MistralConfig(**HEADS, sliding_window=3),
    "gemma2": lambda: transformers.Gemma2Config(
        **HEADS, sliding_window=4, attn_logit_softcapping=0.1, final_logit_softcapping=3.0
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=1, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
    ),
    "opt": lambda: transformers.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES),
    "olmo2": lambda: transformers.Olmo2Config(**GROUPED),
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "bert": lambda: transformers.BertConfig(**SIZES),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=61, dim=32, hidden_dim=48, n_layers=1, n_heads=4, max_position_embeddings=32
    ),
}
ENCODERS = ("bert", "distilbert")


def captured(name: str) -> GraphModule:
    kind = transformers.AutoModel if name in ENCODERS else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return capture_once(kind.from_config(CONFIGS[name](), attn_implementation="eager").eval())


def leaks(graph: GraphModule) -> tuple[Leak, ...]:
    found = check_independence(graph)
    assert found.independent == (not found.leaks)
    return found.leaks


# Clean architectures


@pytest.mark.parametrize("name", CONFIGS)
def test_no_false_alarm(name: str) -> None:
    assert leaks(captured(name)) == ()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.groups = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)
        self.pool, self.drop, self.head = nn.MaxPool2d(2), nn.Dropout(0.5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.groups(self.pool(self.norm(self.conv(x)).relu()))
        return F.log_softmax(self.head(self.drop(F.adaptive_avg_pool2d(y, 1).flatten(1))), -1)


class Mixer(nn.Module):
    """Layers that take entries apart and put them together again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv, self.up, self.down = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        flat = self.down(F.gelu(self.up(x.reshape(-1, 8)))).view(x.shape)
        picked = flat.gather(1, flat.argsort(1)).sort(-1).values
        return torch.cat([picked, self.conv(x.transpose(1, 2)).transpose(1, 2)], -1).cumsum(1)


@pytest.mark.parametrize("fixed", [False, True], ids=["symbolic", "fixed"])
@pytest.mark.parametrize("module", [Images(), Mixer()], ids=lambda module: type(module).__name__)
def test_plain_modules(module: nn.Module, fixed: bool) -> None:
    x = torch.randn(4, 3, 8, 8) if isinstance(module, Images) else torch.randn(4, 4, 8)  # as many tokens as entries
    assert leaks(capture(module, (x,), dynamic_shapes=None if fixed else ({0: Dim("batch")},))) == ()


# Planted leaks.  Each changes what entry 1 gives when entry 0 changes, and is named at its own operator.


def quantized_per_tensor(x: Tensor) -> Tensor:
    scale = x.abs().amax() / 127
    return torch.round(x / scale) * scale


def triggered(x: Tensor) -> Tensor:
    """Plant an architectural backdoor: a trigger in any entry redirects all to entry 0."""
    target = torch.where((x > 8).any(), 0, torch.arange(x.shape[0]))
    return x.index_select(0, target)


def attention_over_entries(x: Tensor) -> Tensor:
    tokens = x.reshape(1, -1, x.shape[2])
    return F.softmax(tokens @ tokens.transpose(1, 2), -1).matmul(tokens).view(x.shape)


PLANTED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "mean": (lambda x: x - x.mean(0), "mean.dim"),
    "first entry": (lambda x: x + x[0], "select.int"),
    "flip": (lambda x: x.flip(0), "flip"),
    "roll": (lambda x: x.roll(1, 0), "roll"),
    "sort": (lambda x: x.sort(0).values, "sort"),
    "cumsum": (lambda x: x.cumsum(0), "cumsum"),
    "softmax": (lambda x: x.softmax(0), "softmax"),
    "topk": (lambda x: x - x.topk(1, 0).values, "topk"),
    "maximum of all": (lambda x: x / x.abs().max(), "max"),
    "per-tensor quantisation": (quantized_per_tensor, "amax"),
    "joined and cut": (lambda x: torch.cat([torch.ones(1, 5, 4), x], 0)[:-1], "cat"),
    "padded and cropped": (lambda x: F.pad(x, (0, 0, 0, 0, 1, -1)), "pad"),
    "attention": (attention_over_entries, "matmul"),
    "covariance": (lambda x: x @ (x[:, 0].T @ x[:, 0]), "matmul"),
    "similarity": (lambda x: torch.einsum("bsd,csd->bc", x, x), "einsum"),
    "batch norm in training": (lambda x: F.batch_norm(x, None, None, training=True), "batch_norm"),
    "norm over all": (lambda x: F.layer_norm(x.permute(1, 2, 0), (x.shape[0],)).permute(2, 0, 1), "layer_norm"),
    "backdoor": (triggered, "any"),
    "pick by data": (lambda x: x.index_select(0, x[:, 0, 0].argsort()), "argsort"),
    "pick by constant": (lambda x: x.index_select(0, torch.tensor([2, 0, 1])), "index_select"),
    "gather": (lambda x: x.gather(0, (x > 0).long()), "gather"),
    "scatter": (lambda x: x.scatter(0, (x > 0).long(), x), "scatter"),
    "write to another": (lambda x: x.index_put((torch.tensor([1]),), x[:1] * 2), "slice"),
    "reinterpreted": (lambda x: x.reshape(5, -1, 4).cumsum(1).reshape(x.shape), "reshape"),
    "transposed": (lambda x: x.transpose(0, 1).reshape(x.shape) * 2, "reshape"),
    "convolved": (lambda x: F.avg_pool1d(x.permute(1, 2, 0), 3, 1, 1).permute(2, 0, 1), "avg_pool1d"),
    "per-entry random": (lambda x: x + torch.poisson(x.abs()).sum(), "poisson"),
}


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x.tanh() * 20) * 2


@pytest.mark.parametrize("fixed", [False, True], ids=["symbolic", "fixed"])
@pytest.mark.parametrize("name", PLANTED)
def test_planted_leaks_are_found_and_named(name: str, fixed: bool) -> None:
    function, operator = PLANTED[name]
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)) * 0.1
    fixed = fixed or name in ("pick by constant", "write to another", "norm over all", "reinterpreted", "transposed")
    shapes = None if fixed else ({0: Dim("batch")},)
    graph = capture(Function(function), (x,), dynamic_shapes=shapes)
    found = leaks(graph)
    assert len(found) >= 1 and operator in found[0].operator, found

    changed = x.clone()
    changed[0] = torch.linspace(1, -1, 20).view(5, 4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        before = graph(x)[1:]
        torch.manual_seed(0)
        after = graph(changed)[1:]
    assert not torch.equal(before, after)  # the leak is a real one


def test_places_of_a_leak() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.relu()).exp()

    verdict = check_independence(capture(Outer(), (torch.randn(3, 4),), dynamic_shapes=({0: Dim("batch")},)))
    (leak,) = verdict.leaks
    assert (leak.node, leak.operator, leak.module) == ("mean", "aten.mean.dim", "inner")
    assert leak.line.startswith("test_check.py:") and "dimension 0" in leak.reason
    assert "mean" in str(verdict) and "in inner, test_check.py" in str(verdict)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x[x[:, 0, 0] > 0], "index"),
        (lambda x: x * x.long().sum().item(), "sum"),
        (lambda x: x.masked_select(x > 0), "masked_select"),
        (lambda x: torch.unique(x), "unique"),
    ],
)  # fmt: skip
def test_sizes_that_depend_on_data(function: Callable[[Tensor], Tensor], operator: str) -> None:
    graph = capture(Function(lambda x: function(x.relu())), (torch.randn(3, 5, 4),))
    assert operator in leaks(graph)[0].operator


def test_equal_sizes_by_accident_prove_nothing() -> None:
    square = torch.randn(4, 4)
    assert "add" in leaks(capture(Function(lambda x: x + x.T), (square,)))[0].operator
    assert leaks(capture(Function(lambda x: x.T), (square,)))  # row 0 of the output is not entry 0's
    assert leaks(capture(Function(lambda x: (x.T.T + 1).view(4, 2, 2)), (square,))) == ()


def test_what_reaches_no_output_is_no_leak() -> None:
    graph = capture(Function(lambda x: x + 0 * torch.zeros_like(x.flip(1))), (torch.randn(3, 5, 4),))
    with graph.graph.inserting_before(next(iter(graph.graph.find_nodes(op="output")))):
        graph.graph.call_function(aten.mean.default, (next(iter(graph.graph.find_nodes(op="placeholder"))),))
    assert leaks(graph) == ()


def test_where_a_modules_entries_lie() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return x.cumsum(0) + table.sum(0)

    inputs, batch = (torch.randn(5, 3, 4), torch.randn(3, 4)), Dim("batch")
    assert leaks(capture(Two(), inputs, dynamic_shapes=({1: batch}, {1: None}))) == ()
    assert (
        leaks(capture(Two(), inputs, dynamic_shapes={"x": {0: batch}, "table": None}))[0].operator
        == "aten.cumsum.default"
    )
    table, cumsum = leaks(capture(Two(), inputs))
    assert (table.node, cumsum.node) == ("table", "cumsum") and "name batch dimensions" in table.reason
    with pytest.raises(CompressorError, match="no input is a tensor with a batch dimension"):
        check_independence(capture(Function(lambda x: x), (torch.tensor(1.0),)))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("as_dict", [False, True])
def test_inputs_behind_a_star_have_entries_too(axis: int, as_dict: bool) -> None:
    class Starred(nn.Module):
        def forward(self, x: Tensor, *args: Tensor) -> Tensor:
            return x + args[0].sum(axis, keepdim=True)

    class Kept(nn.Module):
        def forward(self, x: Tensor, *args: Tensor) -> Tensor:
            return x + args[0].sum(1 - axis, keepdim=True)

    size = {axis: Dim("batch")}
    shapes = {"x": size, "args": (size,)} if as_dict else (size, (size,))
    inputs = (torch.randn(3, 4), torch.randn(3, 4))
    assert leaks(capture(Starred(), inputs, dynamic_shapes=shapes))[0].operator == "aten.sum.dim_IntList"
    assert leaks(capture(Kept(), inputs, dynamic_shapes=shapes)) == ()


# Leaks planted into a captured decoder


@pytest.fixture(scope="module")
def llama() -> GraphModule:
    return captured("llama")


def by_operator(graph: GraphModule, name: str, position: int = 0) -> Node:
    return [node for node in graph.graph.nodes if name in str(node.target)][position]


def insert_after(graph: GraphModule, node: Node, *calls: tuple[Any, ...]) -> list[str]:
    """Replace a node's value by a chain of calls of which each takes the one before; their names."""
    users, names = list(node.users), []
    with graph.graph.inserting_before(node.next):
        value = node
        for target, *args in calls:
            value = graph.graph.call_function(target, (value, *args))
            names.append(value.name)
    for user in users:
        user.replace_input_with(node, value)
    return names


IN_DECODER: dict[str, tuple[str, tuple[tuple[Any, ...], ...]]] = {
    "hidden state reversed": ("add.Tensor", ((aten.flip.default, [0]),)),
    "new keys of another": ("rms_norm", ((aten.roll.default, [1], [0]),)),
    "queries in place": ("dense_linear", ((aten.mul_.Tensor, 2.0),)),
    "uninitialised": ("dense_linear", ((aten.empty_like.default,),)),
}


@pytest.mark.parametrize("name", IN_DECODER)
def test_planted_in_a_decoder(llama: GraphModule, name: str) -> None:
    graph = copy.deepcopy(llama)
    operator, calls = IN_DECODER[name]
    (planted,) = insert_after(graph, by_operator(graph, operator, -1), *calls)
    assert [leak.node for leak in leaks(graph)] == [planted]


def test_cache_entry_of_another(llama: GraphModule) -> None:
    graph = copy.deepcopy(llama)
    cache = next(node for node in graph.graph.nodes if node.name == "v_cache_1")
    with graph.graph.inserting_before(next(n for n in graph.graph.nodes if n.op == "call_function")):
        shuffled = graph.graph.call_function(aten.roll.default, (cache, [1], [0]))
    by_operator(graph, "cached_attention", 1).replace_input_with(cache, shuffled)
    assert [leak.node for leak in leaks(graph)] == [shuffled.name]


# Formats


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_every_format_keeps_entries_apart() -> None:
    dense = capture(Linear(), (torch.randn(3, 5, 128),), dynamic_shapes=({0: Dim("batch")},))
    kinds = {(f.bits, f.symmetric, f.strategy, f.activations, f.codebook, f.extras): f for f in FORMATS.values()}
    kinds |= {(name,): Format.parse(name) for name in ("LUT3_S0.45", "W4A8_G64_S1", "NVFP4_S1")}
    assert len({f.activations for f in FORMATS.values()}) > 10 and len(kinds) > 40
    for fmt in kinds.values():
        graph = copy.deepcopy(dense)
        (site,) = linear_sites(graph)
        weight, blocks = graph.get_parameter(site.weight_name).detach(), fmt.extra(ColumnBlocks)
        count = fmt.stored_columns(128)
        packed = rtn_quantize(weight[:, :count], fmt.of_kept)
        if blocks is not None:
            packed = leave_out(packed, torch.arange(count).expand(-(-len(weight) // 16), count), 128, blocks)
        has_scale = fmt.activations is not None and fmt.activations.calibrated
        replace_linear(graph, site, packed.with_input_scale(torch.ones(1) if has_scale else None))
        assert "compressor.packed_linear.default" in {str(node.target) for node in graph.graph.nodes}
        assert leaks(graph) == (), fmt.name


def test_a_compressed_decoder(llama: GraphModule) -> None:
    graph = copy.deepcopy(llama)
    fmt = Format.parse("W4A8_G32")
    while sites := linear_sites(graph):
        replace_linear(graph, sites[0], rtn_quantize(graph.get_parameter(sites[0].weight_name).detach(), fmt))
    assert leaks(graph) == ()


def test_the_verdict_on_a_format_comes_from_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed linear as it would be with one activation scale a tensor."""
    import compressor.ops.linear

    def per_tensor(x: Tensor, activations: object, _: Tensor | None) -> Tensor:
        scale = x.abs().amax() / 127
        return x if activations is None else torch.round(x / scale) * scale

    dense = capture(Linear(), (torch.randn(3, 128),), dynamic_shapes=({0: Dim("batch")},))
    found = {}
    monkeypatch.setattr(compressor.ops.linear, "round_activations", per_tensor)
    for name in ("W4A16_G32", "W4A8_G32", "W8A8"):
        graph = copy.deepcopy(dense)
        (site,) = linear_sites(graph)
        replace_linear(graph, site, rtn_quantize(graph.get_parameter(site.weight_name), Format.parse(name)))
        found[name] = leaks(graph)
    assert found["W4A16_G32"] == ()
    for name in ("W4A8_G32", "W8A8"):
        (leak,) = found[name]
        assert leak.operator == "compressor.packed_linear.default" and "aten.amax.default" in leak.reason

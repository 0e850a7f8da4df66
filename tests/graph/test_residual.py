"""The residual stream: what writes, what reads, where a parameter cannot take a rotation over, and why."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.graph.residual import Residual, find_residuals
from compressor.graph.sites import Site

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


def llama(**options: object) -> GraphModule:
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=64, **options)  # type: ignore[arg-type]
    dtype = torch.float16 if options.get("dtype") == "float16" else torch.float32
    with torch.random.fork_rng(devices=[]):
        return capture(transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval())


def only(graph: GraphModule, fixed: tuple[str, ...] = ()) -> Residual:
    def refuse(site: Site) -> str:
        return f"{site.name} is fixed" if site.name.endswith(fixed) and fixed else ""

    (found,) = find_residuals(graph, refuse)
    return found


def leaves(sites: list[Site]) -> list[str]:
    return [site.name.rpartition(".")[2] for site in sites]


def test_a_decoders_stream_is_read_from_the_graph() -> None:
    graph = llama(num_hidden_layers=2)
    found = only(graph)
    assert (found.width, found.entry, found.exit, found.reason) == (64, None, None, "")
    assert found.tables == ("model.embed_tokens.weight",)
    assert leaves(list(found.writers)) == ["o_proj", "down_proj"] * 2
    reading = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    assert sorted(leaves([site for site, _ in found.readers])) == sorted([*reading * 2, "lm_head"])
    assert len(found.norms) == 5 and {norm for _, norm in found.readers} == set(found.norms)
    fixed = only(graph, ("lm_head",))
    assert fixed.exit is not None and fixed.exit[1] == "lm_head is fixed" and not fixed.reason and len(fixed.norms) == 4
    assert only(graph, ("q_proj",)).reason.startswith("it is read where no parameter can be rotated, more than once: ")
    assert only(graph, ("o_proj",)).reason.startswith("it comes in where no parameter can be rotated, more than once: ")


def test_a_tied_or_half_precision_embedding_is_an_entry() -> None:
    found = only(llama(num_hidden_layers=1, tie_word_embeddings=True, dtype="float16"))
    assert found.entry is not None and found.entry[1] == "model.embed_tokens.weight is tied"
    assert found.entry[0].meta["val"].dtype == torch.float32  # behind the cast
    assert found.exit is not None and found.exit[1] == "the weight of lm_head is tied"
    found = only(llama(num_hidden_layers=1, dtype="float16"))
    assert found.entry is not None and found.entry[1] == "model.embed_tokens.weight is stored as float16"


class Blocks(nn.Module):
    """One residual block around ``branch``, between an input and a head."""

    def __init__(self, branch: str) -> None:
        super().__init__()
        self.branch, self.scale = branch, nn.Parameter(torch.randn(8))
        self.up, self.write, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm = nn.LayerNorm(8) if branch == "both norms" else nn.RMSNorm(8, eps=1e-6)
        self.last = nn.RMSNorm(8, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z = {
            "gate": lambda: torch.sigmoid(self.up(y)) * self.write(y),
            "reader": lambda: self.write(y) + self.up(torch.tanh(x)),
            "norm reader": lambda: self.write(torch.tanh(y) + self.up(y)),
            "scaled": lambda: 0.5 * self.write(torch.relu(self.up(y))).reshape(4, 8) / 3.0,
        }.get(self.branch, lambda: self.write(torch.relu(self.up(y))))()
        return torch.as_tensor(self.head(self.last((x + z).reshape(2, 2, 8))))


@pytest.mark.parametrize(("branch", "reason"), [
    ("gate", "more than once"),  # the input, and a product of two tensors
    ("reader", "also read by tanh"),
    ("both norms", "also read by rms_norm"),
    ("norm reader", ""),  # one norm alone cannot take the rotation over: it is the exit
    ("scaled", ""),  # numbers, and other views of the same channels, hand it on
])  # fmt: skip
def test_reasons_name_what_is_in_the_way(branch: str, reason: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        graph = capture(Blocks(branch).eval(), (torch.randn(4, 8),))
    found = only(graph)
    assert reason in found.reason and bool(reason) == bool(found.reason)
    if not reason:
        assert found.entry is not None and "not the output of a linear or an embedding" in found.entry[1]
        assert leaves(list(found.writers)) == ["write"]
        assert (found.exit is not None and "tanh" in found.exit[1]) == (branch == "norm reader")

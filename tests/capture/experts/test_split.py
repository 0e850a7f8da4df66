"""Captured experts: one linear each, on the stored weight as it lies in the file; what is not routed is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import DECODERS, make, save
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.capture.experts.split import route_all
from compressor.errors import CaptureError
from compressor.graph.sites import EXPERT, ROUTER, Site, linear_sites, match_sites
from compressor.host import tensor_files


def experts(graph: GraphModule, weight: str) -> list[Site]:
    return [site for site in linear_sites(graph) if site.name.startswith(f"model.layers.1.mlp.experts.{weight}.")]


def is_mapped(tensor: torch.Tensor) -> bool:
    return any(begin <= tensor.data_ptr() < begin + len(held) for begin, held in tensor_files._mappings.items())


def test_each_expert_is_a_linear_and_routers_are_apart(tmp_path: Path) -> None:
    model: Any = save(tmp_path, *DECODERS["Qwen 3, experts"], True)
    graph, stored = capture(tmp_path), model.model.layers[1].mlp.experts
    for name, weight in (("gate_up_proj", stored.gate_up_proj), ("down_proj", stored.down_proj)):
        found = experts(graph, name)
        assert [site.module_class for site in found] == [EXPERT] * len(weight)
        for site, dense in zip(found, weight, strict=True):
            held = graph.get_parameter(site.weight_name)
            assert torch.equal(held, dense) and is_mapped(held)
    sites = linear_sites(graph)
    assert [site.name for site in sites if site.module_class == ROUTER] == [
        f"model.layers.{i}.mlp.gate" for i in (0, 1)
    ]
    matched = match_sites(sites, "Linear", "lm_head")[0]
    assert not any(site.name.endswith("mlp.gate") for site in matched)
    assert sum(site.module_class == EXPERT for site in matched) == 16
    assert match_sites(sites, "re:.*mlp.gate$")[0]  # by name it is matched


def test_turned_weights_and_biases() -> None:
    model: Any = make(*DECODERS["GPT-OSS"], True)
    graph, stored = capture(model), model.model.layers[1].mlp.experts
    found = experts(graph, "gate_up_proj")
    for number, site in enumerate(found):
        assert torch.equal(graph.get_parameter(site.weight_name), stored.gate_up_proj[number].t())
        assert site.bias_name is not None
        assert torch.equal(graph.get_parameter(site.bias_name), stored.gate_up_proj_bias[number])


def test_without_weights_experts_have_shapes(tmp_path: Path) -> None:
    save(tmp_path, *DECODERS["Mixtral"], True)
    graph = capture(tmp_path, weights=False)
    assert {tuple(graph.get_parameter(site.weight_name).shape) for site in experts(graph, "gate_up_proj")} == {
        (128, 64)
    }
    assert all(parameter.is_meta for parameter in graph.parameters())


class Stacked(nn.Module):
    """Computes four experts for each of the tokens x [T, 8], and adds up what is left of them."""

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.chosen, self.router = chosen, nn.Linear(8, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape)) for shape in ((8, 6), (3, 5)))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        if self.chosen:
            best, index = torch.topk(scores, self.chosen, dim=-1)
            scores = torch.full_like(scores, -torch.inf).scatter(1, index, best)
        gate, up = (x.repeat(4, 1).view(4, -1, 8) @ self.up).chunk(2, dim=-1)
        return ((gate.sigmoid() * up) @ self.down * scores.softmax(-1).t().unsqueeze(-1)).sum(0)


@pytest.mark.parametrize("chosen", [1, 2])
def test_experts_that_every_token_computes_are_routed(chosen: int) -> None:
    model = Stacked(chosen)
    graph, x = capture(model, torch.randn(5, 8), dynamic_shapes=({0: Dim("tokens", min=1)},)), torch.randn(7, 8)
    route_all(graph.graph, "model")
    graph.recompile()
    torch.testing.assert_close(graph(x), model(x))
    called = [str(node.target) for node in graph.graph.nodes]
    assert called.count("compressor.routed_linear.default") == 2 and not any("bmm" in name for name in called)


def test_experts_that_are_all_computed_are_refused() -> None:
    graph = capture(Stacked(0), torch.randn(5, 8), dynamic_shapes=({0: Dim("tokens", min=1)},))
    with pytest.raises(CaptureError, match=r"model: .*test_split.py:\d+ multiplies up \[4, 8, 6\] as a whole"):
        route_all(graph.graph, "model")

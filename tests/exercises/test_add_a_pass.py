"""Adding a pass that masks weights takes three files: one source, one test, one recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SOURCE = '''"""Magnitude pruning: of every four weights keep the two largest (2:4; Mishra et al. 2021, 2104.08378)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan
from compressor.pipeline.sites import change_site, choose_sites


def two_of_four(weight: Tensor) -> Tensor:
    """Return a mask, bool [out, in], of the two largest magnitudes among every four columns."""
    groups = weight.abs().reshape(len(weight), -1, 4)
    order = groups.argsort(dim=2, descending=True).argsort(dim=2)
    return (order < 2).reshape(weight.shape)


@dataclass(frozen=True)
class TwoFour(Pass):
    """Set the two smallest of every four weights to zero; the weights stay dense.

    Attributes:
        targets: class names, module names or ``re:`` patterns of the linears to prune.
        ignore: patterns of linears to leave as they are.
    """

    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Mask every matched linear."""
        for site in choose_sites(graph, "two_four", None, self.targets, self.ignore):
            weight = graph.get_parameter(site.weight_name).detach()
            masked = torch.where(two_of_four(weight.float()), weight, 0)
            error = float((weight - masked).float().square().sum() / weight.float().square().sum())
            change_site(graph, ctx, site, masked, "two_four", error=error, notes=["2:4"])
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Say that each matched linear keeps its bytes."""
        plans = []
        for site in choose_sites(graph, "two_four", None, self.targets, self.ignore):
            weight = graph.get_parameter(site.weight_name)
            size = weight.numel() * weight.element_size()
            work = {"stream_byte": 12.0 * weight.numel()}
            plans.append(SitePlan(site.name, site.out_features, site.in_features, "", size, size, "2:4", work))
        return plans
'''

TEST = '''"""Magnitude pruning against its definition."""

import torch

from compressor.capture.capture import capture
from compressor.graph.sites import linear_sites
from compressor.passes.two_four import TwoFour, two_of_four
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline


def test_two_of_four() -> None:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    mask = two_of_four(weight)
    for row, kept in zip(weight.tolist(), mask.tolist(), strict=True):
        for first in range(0, 32, 4):
            four = sorted(range(first, first + 4), key=lambda i: -abs(row[i]))
            assert [i for i in range(first, first + 4) if kept[i]] == sorted(four[:2])


def test_every_linear_is_masked() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
    context = Context()
    graph = Pipeline([TwoFour()], [VerifyStages()]).run(capture(module, (torch.zeros(3, 40),)), context)
    assert [record.format for record in context.records] == ["", ""]
    assert all(float((graph.get_parameter(s.weight_name) == 0).float().mean()) == 0.5 for s in linear_sites(graph))
'''

RECIPE = """# 2:4 by magnitude, then 4 bits: what is pruned stays zero, since zero rounds to zero.
model: reference
evaluation: python_docs_heldout
passes:
  - two_four: {ignore: lm_head}
  - rtn: {scheme: W4A16_G128, targets: Linear, ignore: lm_head}
target: x86
"""


def test_a_pass_that_masks_weights_takes_three_files(scratch: Any, small_llama: Path) -> None:
    scratch.write("compressor/passes/two_four.py", SOURCE)
    scratch.write("tests/passes/test_two_four.py", TEST)
    scratch.write("recipes/two_four_w4a16_g128_x86.yaml", RECIPE)
    assert "two_four" in scratch.compress("list", "passes")
    bundle = str(scratch.folder.parent / "bundle")
    options = ("--model", str(small_llama), "--set", "passes.rtn.scheme=W4A16_G32", "--target", "null", "-o", bundle)
    shown = scratch.compress("run", "two_four_w4a16_g128_x86", "--time-passes", *options)
    assert "two_four" in shown
    # Nothing else had to be edited: the tests of the house and of the documentation hold.
    scratch.python("-m", "pytest", "-q", "tests/passes/test_two_four.py", "tests/test_house.py", "tests/test_docs.py")
    assert sorted(scratch.changed()) == [
        "compressor/passes/two_four.py",
        "recipes/two_four_w4a16_g128_x86.yaml",
        "tests/passes/test_two_four.py",
    ]

"""The plan for machines that are not here: devices by published figures, and an emulator's time."""

from __future__ import annotations

import pytest
import torch
from captures import capture_once
from torch import nn
from torch.fx import GraphModule

from compressor.codegen.backend import make_backend
from compressor.codegen.targets.arm import Arm
from compressor.errors import RecipeError, UsageError
from compressor.graph.costs import node_costs
from compressor.host import emulation
from compressor.host.devices import find_device, known_devices
from compressor.host.resources import resource
from compressor.plan import passes as passes_module
from compressor.plan import plan as plan_module
from compressor.plan.durations import emulated_work
from compressor.plan.passes import plan_passes
from compressor.plan.prices import UNITS, Prices
from compressor.plan.roofline import device_rooflines
from compressor.recipe.recipe import Recipe

MACHINE = Prices("cpu", 2, dict.fromkeys(UNITS, 1e-9), 0.1, 200 << 20, 300 << 20, 450 << 20)
PASSES = [{"rtn": {"scheme": "W8A8", "targets": "Linear"}}]


@pytest.fixture(scope="module")
def shape_graph() -> GraphModule:
    return capture_once(resource("models") / "reference", weights=False)


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every machine the same prices."""
    for module in (plan_module, passes_module):
        monkeypatch.setattr(module, "machine_prices", lambda *_args, **_options: MACHINE)


def test_a_token_takes_the_weights_by_the_memory_and_a_prompt_the_products(
    shape_graph: GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulation, "why_not", lambda: "not asked for")
    pi5, m1 = find_device("pi5"), find_device("m1")
    recipe = Recipe.from_dict({"passes": PASSES, "tune": "off", "target": {"arm": {"device": "pi5"}}})
    backend = make_backend(recipe.target.build())
    passes = plan_passes(shape_graph, recipe, backend)
    plan = plan_module.plan_graph(shape_graph, recipe, backend, passes)
    prefill, decode = plan.device_rooflines
    assert plan.device == "Raspberry Pi 5" and plan.rooflines[1].ms != decode.ms
    bytes_a_token = pi5.read_bytes_per_s / decode.tokens_per_s
    codes = sum(site.bytes_after for site in plan.passes[0].sites)
    assert codes < bytes_a_token < 2 * codes  # and keys, values, activations, one row of the embedding
    assert prefill.tokens_per_s > 2 * decode.tokens_per_s
    on_m1 = device_rooflines(passes.final, MACHINE, m1)[1].tokens_per_s
    assert on_m1 / decode.tokens_per_s == pytest.approx(m1.read_bytes_per_s / pi5.read_bytes_per_s)


def test_figures_follow_from_the_cores() -> None:
    assert find_device("pi5").flop_per_s == pytest.approx(4 * 2.4e9 * 16)  # two `fmla` of four lanes a cycle
    assert find_device("snapdragon_8_gen_2").int8_ops_per_s == pytest.approx(3.2e9 * 256 + 4 * 2.8e9 * 128)
    assert all(one.int8_ops_per_s > one.flop_per_s > one.read_bytes_per_s for one in known_devices().values())


def test_a_device_that_nobody_knows_is_refused_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"'pi55': neither rpc://HOST:PORT/KEY nor .*; nearest: pi5, "):
        Recipe.from_dict({"passes": PASSES, "target": {"arm": {"device": "pi55"}}})
    with pytest.raises(RecipeError, match="write it as rpc://HOST:PORT/KEY"):
        Recipe.from_dict({"passes": PASSES, "target": {"arm": {"device": "rpc://board"}}})
    with pytest.raises(UsageError, match="a device is served in Linux, and the system is android"):
        Arm(system="android", device="rpc://board:9090/phone")
    both = Arm(device="rpc://board:9090/pi5").figures()
    assert both == find_device("pi5")


def test_an_emulator_s_time_is_that_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "why_not", lambda: "")
    graph = capture_once(nn.Linear(64, 32).eval(), (torch.ones(1, 64),))
    seconds = {}
    for isa in ("neon", "any"):
        recipe = Recipe.from_dict({"passes": PASSES, "tune": "off", "target": {"arm": {"isa": isa}}})
        backend = make_backend(recipe.target.build())
        plan = plan_module.plan_graph(graph, recipe, backend, plan_passes(graph, recipe, backend))
        seconds[isa] = plan.stages["check"].value
        assert "time" not in plan.stages and not plan.dense_speed
    assert seconds["any"] == pytest.approx(4 * seconds["neon"])  # the best, and each of three libraries
    flops = sum(cost.flops for cost in node_costs(graph, 1, 1).values())
    assert emulated_work(flops)["python"] > emulated_work(0.0)["python"] > 1e8

"""Plans: bytes that the run then has, no weight read, refusals that name what would help."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captures import capture_once
from click.testing import CliRunner
from torch import nn
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.cli.commands import main
from compressor.codegen.backend import make_backend
from compressor.errors import ResourceError, UsageError
from compressor.graph.costs import node_costs
from compressor.graph.model import weight_bytes
from compressor.graph.segments import segments
from compressor.host.machine import Memory
from compressor.host.resources import resource
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.plan import passes as passes_module
from compressor.plan import plan as plan_module
from compressor.plan import roofline as plan_roofline
from compressor.plan.memory import StageMemory
from compressor.plan.model import Plan
from compressor.plan.passes import plan_passes
from compressor.plan.plan import check_plan, compare_plan, make_plan
from compressor.plan.prices import UNITS, Prices
from compressor.plan.streaming import peak_bytes, plan_calibration
from compressor.recipe.recipe import Recipe

REFERENCE = resource("models") / "reference"
GB = 10**9
PRICES = {
    "matmul_flop": 1e-11,
    "int8_op": 2e-12,
    "peak_flop": 1e-11,
    "peak_int8_op": 2e-12,
    "cached_read_byte": 1e-10,
    "matmul64_flop": 2e-11,
    "factor64_flop": 1e-10,
    "python": 4e-8,
    "node": 6e-6,
    "custom_op": 2e-5,
    "sweep_column": 2e-4,
    "import_bundle": 0.5,
    "import_dense": 2.0,
    "import_all": 4.0,
}
MACHINE = Prices("cpu", 2, {**dict.fromkeys(UNITS, 1e-9), **PRICES}, 0.1, 200 << 20, 300 << 20, 450 << 20)


pytestmark = pytest.mark.usefixtures("captures_once")


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every machine the same prices, and memory enough."""
    monkeypatch.setattr(plan_module, "machine_prices", lambda *_args, **_options: MACHINE)
    monkeypatch.setattr(passes_module, "machine_prices", lambda *_args, **_options: MACHINE)
    monkeypatch.setattr(plan_module, "available_memory", lambda: Memory(64 * GB, "the test"))
    monkeypatch.setattr(plan_roofline, "cache_bytes", lambda: 0)


def plan_graph(graph: GraphModule, wanted: Recipe) -> Plan:
    backend = make_backend(wanted.target.build())
    return plan_module.plan_graph(graph, wanted, backend, plan_passes(graph, wanted, backend))


def recipe(*passes: Any, **keys: Any) -> Recipe:
    return Recipe.from_dict({"model": str(REFERENCE), "passes": list(passes), **keys})


def gptq(**options: Any) -> dict[str, Any]:
    return {"gptq": {"scheme": "W4A16_G128", "ignore": "lm_head", **options}}


def headers_only(folder: Path, layers: int = 2, hidden: int = 64, intermediate: int = 128) -> Path:
    """Write a Llama whose weights are a hole in the file: no byte of them was ever written."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "vocab_size": 512,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": [512, hidden], "lm_head": [512, hidden], "model.norm": [hidden]}
    for i in range(layers):
        block = f"model.layers.{i}"
        shapes |= {f"{block}.self_attn.{name}_proj": [hidden, hidden] for name in "qo"}
        shapes |= {f"{block}.self_attn.{name}_proj": [hidden // 2, hidden] for name in "kv"}
        shapes |= {f"{block}.mlp.{name}_proj": [intermediate, hidden] for name in ("gate", "up")}
        shapes |= {f"{block}.mlp.down_proj": [hidden, intermediate]}
        shapes |= {f"{block}.{name}_layernorm": [hidden] for name in ("input", "post_attention")}
    header, cursor = {}, 0
    for name, shape in shapes.items():
        end = cursor + 2 * torch.Size(shape).numel()
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [cursor, end]}
        cursor = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + cursor)
    return folder


@pytest.fixture(scope="module")
def shape_graph() -> GraphModule:
    return capture_once(REFERENCE, weights=False)


def test_headers_say_what_the_weights_say(shape_graph: GraphModule) -> None:
    real = capture_once(REFERENCE)
    facts = [
        {name: (p.shape, p.dtype, p.stride()) for name, p in graph.named_parameters()} for graph in (real, shape_graph)
    ]
    assert facts[0] == facts[1]
    assert all(p.is_meta for p in shape_graph.parameters()) and not any(p.is_meta for p in real.parameters())
    assert str(real.graph) == str(shape_graph.graph)
    assert real.meta["model"] == shape_graph.meta["model"]


def test_a_module_in_memory_can_be_captured_without_its_weights() -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    graph = capture(module, (torch.zeros(2, 8),), weights=False)
    assert [p.shape for p in graph.parameters()] == [p.shape for p in module.parameters()]
    assert all(p.is_meta for p in graph.parameters()) and not any(p.is_meta for p in module.parameters())


@pytest.mark.parametrize("scheme", ["W4A16_G128", "W4A8_ASYM_G32", "W8A8", "W3A16_G128"])
def test_the_planned_bytes_are_the_runs(shape_graph: GraphModule, scheme: str) -> None:
    steps = [{"rtn": {"scheme": "W8A8", "targets": "re:.*layers.0"}}, {"rtn": {"scheme": scheme, "ignore": "lm_head"}}]
    wanted = recipe(*steps)
    plan = plan_graph(shape_graph, wanted)
    context, graph = Context(), capture_once(REFERENCE)
    dense_bytes = weight_bytes(graph)
    graph = Pipeline(wanted.passes).run(graph, context)
    planned = [
        (s.site, s.format, s.bytes_before, s.bytes_after, s.note) for p in plan.passes for s in p.sites if s.format
    ]
    assert planned == [(r.site, r.format, r.bytes_before, r.bytes_after, r.note) for r in context.records]
    assert [step.weight_bytes for step in plan.passes] == [stage.weight_bytes for stage in context.stages[1:]]
    assert (plan.dense_weight_bytes, plan.weight_bytes) == (dense_bytes, weight_bytes(graph))
    assert all(p.is_meta for p in shape_graph.parameters()) and weight_bytes(shape_graph) == dense_bytes


def test_what_is_left_alone_says_why(shape_graph: GraphModule) -> None:
    plan = plan_graph(
        shape_graph,
        recipe(
            {"rtn": {"scheme": "W4A16_G128", "targets": "re:.*mlp", "ignore": "re:.*down"}},
        ),
    )
    notes = {site.site.rpartition(".")[2]: site.note for site in plan.passes[0].sites}
    assert notes["down_proj"] == "stays dense: ignored"
    assert notes["q_proj"] == "stays dense: no target matches it"
    assert notes["gate_proj"] == ""


def test_a_weight_beyond_all_memory_is_planned_in_its_header_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "available_memory", lambda: Memory(16 * GB, "the test"))
    folder = headers_only(tmp_path / "huge", layers=11, hidden=32768, intermediate=65536)
    file = folder / "model.safetensors"
    assert file.stat().st_size > 200 * GB and file.stat().st_blocks * 512 < 10**6
    plan = make_plan(recipe({"rtn": {"scheme": "W4A16_G128"}}), folder)
    assert resident_pages(file) < 1000  # the header, and what the kernel reads ahead
    assert plan.dense_weight_bytes > 200 * GB
    assert 0.25 < plan.weight_bytes / plan.dense_weight_bytes < 0.28
    with pytest.raises(ResourceError, match=r"memory: the stage \w+ needs [\d.]+ GB"):
        check_plan(plan)


def resident_pages(file: Path) -> int:
    """Pages of a file that anybody has read since it was written, as mincore tells."""
    pages = -(-file.stat().st_size // mmap.PAGESIZE)
    found = np.zeros(pages, np.uint8)
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        data = np.frombuffer(mapping, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        status = libc.mincore(
            ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(len(data)), ctypes.c_void_p(found.ctypes.data)
        )
        del data
    assert status == 0, os.strerror(ctypes.get_errno())
    return int((found & 1).sum())


def test_headers_are_read_where_the_weights_are_unreadable_garbage(tmp_path: Path) -> None:
    folder = headers_only(tmp_path / "model")
    plan = make_plan(recipe({"rtn": {"scheme": "W4A16_G32"}}), folder)
    with (folder / "model.safetensors").open("r+b") as file:
        start = 8 + struct.unpack("<Q", file.read(8))[0]
        file.seek(start)
        file.write(os.urandom(os.fstat(file.fileno()).st_size - start))
    assert make_plan(recipe({"rtn": {"scheme": "W4A16_G32"}}), folder).passes == plan.passes


@dataclasses.dataclass(frozen=True)
class Mute(Pass):
    """A pass of somebody else's, without a plan."""

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        return graph


def test_a_pass_that_says_nothing_is_said_to(shape_graph: GraphModule) -> None:
    plan = plan_graph(shape_graph, recipe(Mute(), Rtn("W4A16_G128")))
    assert [(step.name, step.cost_known) for step in plan.passes] == [("mute", False), ("rtn", True)]
    assert any(note.startswith("mute: says nothing of its cost") for note in plan.notes)


def test_what_would_stop_the_run_stops_the_plan(shape_graph: GraphModule) -> None:
    with pytest.raises(UsageError, match="no_such_linear"):
        plan_graph(shape_graph, recipe({"rtn": {"scheme": "W4A16_G128", "targets": "no_such_linear"}}))
    with pytest.raises(UsageError, match="calibration samples and the recipe has none"):
        plan_graph(shape_graph, recipe(gptq()))
    with pytest.raises(UsageError, match="for the stored scales of W8A8_STATIC and the recipe has none"):
        plan_graph(shape_graph, recipe({"rtn": {"scheme": "W8A8_STATIC"}}))


def test_operations_and_bytes_of_a_linear(shape_graph: GraphModule) -> None:
    costs = node_costs(shape_graph, 2, 16)
    named = {str(node.args[1]): cost for node, cost in costs.items() if cost.kind == "linear"}
    down = next(cost for name, cost in named.items() if "0_mlp_down_proj" in name)
    assert down.flops == 2 * 32 * 256 * 512
    assert down.weight_bytes == 256 * 512 * 2 and down.cast == 256 * 512  # stored as float16
    assert down.activation_bytes == 4 * 32 * (256 + 512)
    attention = next(cost for cost in node_costs(shape_graph, 1, 1, past=100).values() if cost.kind == "attention")
    assert attention.flops == 4 * 8 * 101 * 32
    assert attention.cache_bytes == 2 * 4 * 4 * 100 * 32


def test_the_peak_of_a_segment_is_that_of_its_storage(shape_graph: GraphModule) -> None:
    """Against the sum of what is live, found the slow way: storage by storage, from every reader of any view of it."""
    costs = node_costs(shape_graph, 2, 64)
    nodes = segments(shape_graph)[1].nodes
    inside = list(nodes)

    def storage(node: Any) -> Any:
        owner = costs[node].owner
        return node if owner is None or owner not in costs or owner not in inside else storage(owner)

    peak = 0
    for i, node in enumerate(inside):
        live = {
            storage(made)
            for made in inside[: i + 1]
            if made is node or any(made in later.all_input_nodes for later in inside[i:])
        }
        # A view that is still to be read keeps what it shows alive.
        peak = max(peak, sum(costs[each].held_bytes for each in live) + costs[node].working_bytes)
    assert peak_bytes(nodes, costs) == peak > 0


def test_calibration_grows_with_samples_by_their_hidden_states_only(shape_graph: GraphModule) -> None:
    step = recipe(gptq()).passes[0]
    sites = step.plan(capture_once(REFERENCE, weights=False), Context())
    few, many = (plan_calibration(shape_graph, sites, samples, 256) for samples in (16, 64))
    assert few.hidden_bytes == 2 * 16 * 256 * 256 * 4  # dense and compressed, float32 [samples, sequence, hidden]
    assert few.live_bytes == 2 * 16 * 256 * (256 + 512) * 4  # in front of down_proj: the residual, and what it reads
    assert many.hidden_bytes == 4 * few.hidden_bytes and many.live_bytes == 4 * few.live_bytes
    assert many.working_bytes == few.working_bytes
    once = sum(site.work.get("matmul_flop", 0) for site in sites)
    assert many.work["matmul_flop"] - once == pytest.approx(4 * (few.work["matmul_flop"] - once))
    assert many.work["sweep_column"] == few.work["sweep_column"]
    alone = recipe(gptq(match_dense=False)).passes[0].plan(capture_once(REFERENCE, weights=False), Context())
    assert plan_calibration(shape_graph, alone, 16, 256).hidden_bytes == few.hidden_bytes // 2


def calibrated(samples: int = 4096, **options: Any) -> Recipe:
    """Hidden states that take gigabytes, beside little else."""
    spec = {"text": str(resource("calibration") / "python_docs.txt"), "samples": samples, "sequence_length": 256}
    return recipe(gptq(**options), calibration=spec)


def memory_of(plan: Plan, stage: str) -> StageMemory:
    return next(found for found in plan.memory if found.stage == stage)


def test_hidden_states_go_to_disk_when_memory_is_short(
    shape_graph: GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = plan_graph(shape_graph, calibrated())
    assert not roomy.spill and roomy.dense_speed and roomy.disk_bytes < GB
    monkeypatch.setattr(plan_module, "available_memory", lambda: Memory(roomy.needed_bytes - 1, "the test"))
    tight = plan_graph(shape_graph, calibrated())
    assert tight.spill
    hidden = 2 * 4096 * 256 * 256 * 4
    live = 3 * hidden  # in front of down_proj, which reads twice as much: the disk has only what blocks pass on
    assert memory_of(roomy, "gptq").held_bytes - memory_of(tight, "gptq").held_bytes == live
    assert tight.disk_bytes - roomy.disk_bytes == hidden
    assert any("hidden states go to" in note for note in tight.notes)
    check_plan(tight)


def test_a_refusal_names_a_setting_that_fits(shape_graph: GraphModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "free_disk", lambda _folder: (1, GB))
    monkeypatch.setattr(plan_module, "available_memory", lambda: Memory(2 * GB, "the test"))
    plan = plan_graph(shape_graph, calibrated())
    with pytest.raises(
        ResourceError, match=r"disk: .* more than is free .*calibration.samples=\d+ would fit"
    ) as caught:
        check_plan(plan)
    assert caught.value.exit_code == 5
    samples = int(next(text for text in plan.advice if "samples=" in text).split("=")[1].split()[0])
    check_plan(plan_graph(shape_graph, calibrated(samples)))
    with pytest.raises(ResourceError):
        check_plan(plan_graph(shape_graph, calibrated(2 * samples)))


def test_a_machine_that_is_too_small_whatever_is_set(shape_graph: GraphModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "available_memory", lambda: Memory(10**8, "RLIMIT_AS"))
    plan = plan_graph(shape_graph, calibrated(16))
    with pytest.raises(ResourceError, match=r"by RLIMIT_AS.*none of the recipe's settings is enough"):
        check_plan(plan)


def test_the_dense_model_is_not_timed_where_it_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture(headers_only(tmp_path / "model", layers=4, hidden=4096, intermediate=16384), weights=False)
    wanted = recipe({"rtn": {"scheme": "W4A16_G128"}})
    roomy = plan_graph(graph, wanted)
    assert roomy.dense_speed and memory_of(roomy, "time").child_bytes > 4 * graph.meta["model"].parameters
    monkeypatch.setattr(plan_module, "available_memory", lambda: Memory(roomy.needed_bytes - 1, "the test"))
    tight = plan_graph(graph, wanted)
    assert not tight.dense_speed and tight.needed_bytes < roomy.needed_bytes - 2 * graph.meta["model"].parameters
    assert tight.stages["time"].value < roomy.stages["time"].value
    assert any("dense model's speed will not be measured" in note for note in tight.notes)


def test_the_interval_holds_the_estimate_and_stages_add_up(shape_graph: GraphModule) -> None:
    plan = plan_graph(shape_graph, calibrated(16))
    before, after = (
        ["start", "capture", "text", "plan"],
        ["independence", "compile", "write", "check", "evaluate", "time"],
    )
    assert list(plan.stages) == [*before, "gptq", *after]
    assert all(0 < stage.low < stage.value < stage.high for stage in [*plan.stages.values(), plan.seconds])
    assert plan.seconds.value == pytest.approx(sum(stage.value for stage in plan.stages.values()))
    longer = plan_graph(shape_graph, calibrated(64))
    assert longer.stages["gptq"].value > plan.stages["gptq"].value


def test_tuned_schedules_cost_no_time_again(
    shape_graph: GraphModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path))
    wanted = recipe({"rtn": {"scheme": "W4A16_G128", "ignore": "lm_head"}})
    cold = plan_graph(shape_graph, wanted).stages["compile"].value
    from compressor.plan.durations import linear_kernels

    kernels = linear_kernels(plan_passes(shape_graph, wanted, make_backend(wanted.target.build())).final)
    assert {kernel.name for kernel in kernels} == {
        "packed_linear_256x256_W4A16_G128",
        "packed_linear_512x256_W4A16_G128",
        "packed_linear_256x512_W4A16_G128",
        "dense_linear_2048x256_float16",
    }  # keys and values, 128x256, share the kernel of the queries
    entries = {f"{kernel.name}:{tokens}|isa|cpu|2 threads|0": {} for kernel in kernels for tokens in (1, 64)}
    (tmp_path / "tuning.json").write_text(json.dumps(entries))
    warm = plan_graph(shape_graph, wanted).stages["compile"].value
    off = plan_graph(shape_graph, wanted.model_copy(update={"tune": "off"})).stages["compile"].value
    assert cold > warm + 24 * 0.2 and warm == off  # four kernels, two spaces, three candidates


def test_the_roofline_binds_on_what_takes_longer(shape_graph: GraphModule, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_graph(shape_graph, recipe({"rtn": {"scheme": "W4A16_G128"}}))
    prefill, decode = plan.rooflines
    assert (prefill.phase, prefill.tokens, decode.phase, decode.tokens) == ("prefill", 128, "decode", 1)
    mlp = next(layer for layer in decode.layers if "mlp" in layer.name)
    assert mlp.name == "model.layers.*.mlp.{gate_proj,up_proj,down_proj}" and mlp.count == 5
    stored = sum(site.bytes_after for site in plan.passes[0].sites if ".0.mlp" in site.site)
    assert stored < mlp.bytes < stored + 20_000
    assert mlp.ops >= 2 * 3 * 256 * 512
    for layer in (*prefill.layers, *decode.layers):
        slow, fast = layer.ops * MACHINE.seconds["peak_flop"], layer.bytes * MACHINE.seconds["peak_read_byte"]
        assert layer.ms == pytest.approx(1e3 * max(slow, fast)) and layer.binds == (
            "compute" if slow > fast else "memory"
        )
    assert prefill.tokens_per_s == pytest.approx(1e3 * 128 / prefill.ms)
    dense = plan_roofline.rooflines(shape_graph, MACHINE)[1]
    monkeypatch.setattr(plan_roofline, "cache_bytes", lambda: 1 << 30)  # this model fits: weights are read from there
    assert plan_roofline.rooflines(shape_graph, MACHINE)[1].ms < dense.ms
    monkeypatch.setitem(MACHINE.seconds, "cached_read_byte", 0.0)  # type: ignore[attr-defined]
    assert {layer.binds for layer in plan_roofline.rooflines(shape_graph, MACHINE)[1].layers} == {"compute"}


def test_of_browsers_nothing_is_foreseen_but_bytes(shape_graph: GraphModule) -> None:
    """Neither this processor's bounds nor its seconds say anything of the users' devices."""
    made = plan_graph(shape_graph, recipe({"rtn": {"scheme": "W4A16_G128"}}, target="webgpu"))
    assert made.rooflines == () and not {"compile", "check", "evaluate", "time"} & set(made.stages)
    assert any(note.startswith("webgpu: what generating") for note in made.notes)
    assert {stage.stage for stage in made.memory}.isdisjoint({"check", "evaluate", "time"})


def test_the_comparison_has_what_both_sides_know(shape_graph: GraphModule) -> None:
    plan = plan_graph(shape_graph, recipe({"rtn": {"scheme": "W4A16_G128"}}))
    rows = compare_plan(plan, {"weight_bytes": plan.weight_bytes, "rtn": 2 * plan.stages["rtn"].value, "perplexity": 3})
    assert [(name, round(ratio, 6)) for name, _, _, ratio in rows] == [("weight_bytes", 1.0), ("rtn", 0.5)]


def test_the_command_prints_a_plan_and_refuses(
    small_llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = ["rtn_w4a16_g128_x86", "--model", str(small_llama), "--set", "passes.rtn.scheme=W4A16_G32"]
    done = CliRunner().invoke(main, ["plan", *small, "-o", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert content["bundle_bytes"] > content["weight_bytes"] > 0 and content["passes"][0]["name"] == "rtn"
    shown = CliRunner().invoke(main, ["plan", *small])
    assert shown.exit_code == 0 and "peak memory:" in shown.stdout and "prefill of 128" in shown.stdout
    monkeypatch.setattr(plan_module, "available_memory", lambda: Memory(10**8, "the test"))
    refused = CliRunner().invoke(main, ["plan", *small])
    assert refused.exit_code == 5 and "memory: the stage" in refused.stderr

"""The pipeline, its records and observers, the registry, and the passes on tiny models."""

from __future__ import annotations

import dataclasses
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from captures import capture_once
from torch.fx import GraphModule

import compressor.registry
from compressor.capture.capture import capture
from compressor.data.text import Samples
from compressor.errors import CompressorError, UsageError
from compressor.graph.model import weight_bytes
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import linear_sites
from compressor.passes.gptq import Gptq
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.pipeline.observers import Dump
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.registry import PASSES

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]


def model(tied: bool = False, kind: str = "llama") -> GraphModule:
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(
        kind, **sizes, intermediate_size=44, max_position_embeddings=32, tie_word_embeddings=tied
    )
    auto = transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = auto.from_config(config, attn_implementation="eager").eval()
        for parameter in built.parameters():
            parameter.data.normal_(0, 0.3)
    return capture_once(built)


def context() -> Context:
    ids = torch.randint(0, 60, (16, 16), generator=torch.Generator().manual_seed(0))
    return Context(samples=Samples(ids, ids.flatten(), "", "random"))


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_gptq_leaves_less_error_than_rtn_at_every_site(kind: str) -> None:
    graph, ctx = model(kind=kind), context()
    before = {site.name: site for site in linear_sites(graph)}
    dense = weight_bytes(graph)
    graph = Pipeline([Gptq("W4A16_G32")]).run(graph, ctx)
    assert [record.site for record in ctx.records] == list(before)
    assert not linear_sites(graph)
    assert [(stage.index, stage.name) for stage in ctx.stages] == [(0, "capture"), (1, "gptq")]
    assert [stage.weight_bytes for stage in ctx.stages] == [dense, weight_bytes(graph)]
    for record in ctx.records:
        assert record.format == "W4A16_G32"
        assert record.error_of == "output"
        assert record.rtn_error is not None
        assert 0 < record.error < record.rtn_error
        ragged = before[record.site].in_features % 32
        assert (f"last group has {ragged} of 32 columns" in record.note) == bool(ragged)


@pytest.mark.parametrize(
    "options",
    [{"actorder": False}, {"match_dense": False}, {"true_sequential": False}, {"observer": "minmax"}],
    ids=str,
)
def test_every_option_of_gptq_keeps_its_law(options: dict[str, Any]) -> None:
    ctx = context()
    Pipeline([Gptq("W3A8_ASYM_G32", ignore="lm_head", **options)]).run(model(), ctx)
    assert len(ctx.records) == 14
    assert all(record.error <= (record.rtn_error or 0) for record in ctx.records)


def test_fewer_tokens_than_inputs_are_noted_and_dampened() -> None:
    few = Samples(context().calibration("test").ids[:2], torch.empty(0, dtype=torch.int64), "", "random")
    ctx = Context(samples=few)
    Pipeline([Gptq("W4A16_G32")]).run(model(), ctx)
    noted = {record.site for record in ctx.records if "32 tokens for 44 inputs" in record.note}
    assert noted == {f"model.layers.{layer}.mlp.down_proj" for layer in range(2)}
    site = "model.layers.0.mlp.down_proj"
    graphs = [
        Pipeline([Gptq("W4A16_C", targets=site, dampening_frac=level)]).run(model(), Context(samples=few))
        for level in (0.01, 0.1, 1.0)
    ]
    first, second, third = (graph.get_parameter(f"{site}.codes") for graph in graphs)
    assert torch.equal(first, second) and not torch.equal(second, third)


def test_two_runs_give_the_same_bytes() -> None:
    first, second = (Pipeline([Gptq("W4A16_G32")]).run(model(), context()) for _ in range(2))
    for (name, x), (other, y) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(x, y)


def test_gptq_does_not_touch_global_state() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    Pipeline([Gptq("W4A16_G32", targets="lm_head")]).run(model(), context())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_a_tied_output_layer_is_noted() -> None:
    graph, ctx = model(tied=True), Context()
    before = weight_bytes(graph)
    Pipeline([Rtn("W8A16_G32", targets="lm_head")]).run(graph, ctx)
    (record,) = ctx.records
    assert "tied: the dense weight model.embed_tokens.weight stays for the embedding" in record.note
    assert weight_bytes(graph) == before + record.bytes_after


def test_a_weight_that_grows_is_noted() -> None:
    class Tall(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(x)  # type: ignore[no-any-return]

    ctx = Context()
    Pipeline([Rtn("W8A16_G8")]).run(capture(Tall(), (torch.zeros(2, 8),)), ctx)
    assert "stored bytes exceed the dense weight's 32" in ctx.records[0].note


def test_inputs_that_the_samples_never_excite_are_noted() -> None:
    ctx = context()
    graph = model()
    norm = "model.layers.0.input_layernorm.weight"
    set_parameter(graph, norm, torch.cat([torch.zeros(3), graph.get_parameter(norm).detach()[3:]]))
    Pipeline([Gptq("W4A16_G32", targets="model.layers.0.self_attn.q_proj")]).run(graph, ctx)
    assert ctx.records[0].note == "3 inputs are zero in all samples; their weights are rounded to nearest"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "Linera"}, r"'Linera': nearest Linear"),
        ({"targets": ["Linear", "q_prj"]}, r"'q_prj': nearest q_proj"),
        ({"ignore": "lm_haed"}, r"'lm_haed': nearest lm_head"),
        ({"ignore": "Linear"}, "nothing to compress"),
        ({"group_size": 24}, "24 divides the inputs of none .* 32, 44.*sizes that divide some: 32, 16, 8"),
    ],
)
def test_options_that_fit_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    for step in (Rtn("W4A16_G32", **options), Gptq("W4A16_G32", **options)):
        with pytest.raises(UsageError, match=message):
            Pipeline([step]).run(model(), context())


def test_gptq_without_samples_is_refused() -> None:
    with pytest.raises(UsageError, match="needs calibration samples"):
        Pipeline([Gptq("W4A16_G32")]).run(model(), Context())


def test_weights_that_are_not_numbers_name_their_site() -> None:
    graph = model()
    up = graph.get_parameter("model.layers.1.mlp.up_proj.weight").detach().clone()
    up[0, 0] = float("nan")
    set_parameter(graph, "model.layers.1.mlp.up_proj.weight", up)
    for step in (Rtn("W4A16_G32"), Gptq("W4A16_G32")):
        with pytest.raises(CompressorError, match=r"model\.layers\.1\.mlp\.up_proj: .*NaN"):
            Pipeline([step]).run(graph, context())


def test_observers_see_every_stage_and_dump_writes_it(tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []
    steps = [Rtn("W8A16_G32", targets="lm_head"), Rtn("W4A16_G32")]
    observers = [lambda index, name, graph, ctx: seen.append((index, name)), Dump(tmp_path / "dump")]
    Pipeline(steps, observers).run(model(), Context())
    assert seen == [(0, "capture"), (1, "rtn"), (2, "rtn")]
    files = sorted((tmp_path / "dump").iterdir())
    assert [file.name for file in files] == ["00_capture.py", "00_normalise.txt", "01_rtn.py", "02_rtn.py"]
    assert [file.read_text().count("packed_linear.default(") for file in files] == [0, 0, 1, 15]
    assert "linear: 15 of 15 matched\n" in files[1].read_text()


def test_the_registry_is_the_folder() -> None:
    names = PASSES.names()
    assert names["rtn"] == "compressor.passes.rtn"
    assert set(names) == {file.stem for file in (ROOT / "compressor" / "passes").glob("[!_]*.py")}
    for name in names:
        assert issubclass(PASSES.find(name), Pass)
    assert PASSES.find("gptq") is Gptq
    assert PASSES.name_of(Gptq("W4A16_G32")) == "gptq"
    with pytest.raises(UsageError, match="nearest: gptq"):
        PASSES.find("gtpq")


def entries(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    known = [EntryPoint(name, value, "compressor.passes") for name, value in values.items()]
    monkeypatch.setattr(
        compressor.registry,
        "entry_points",
        lambda group, name=None: [e for e in known if name in (None, e.name)],
    )


def test_entry_points_add_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("foreign_pass")

    @dataclasses.dataclass(frozen=True)
    class Foreign(Pass):
        def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
            return graph

    Foreign.__module__ = "foreign_pass"
    module.Foreign = Foreign  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "foreign_pass", module)
    entries(
        monkeypatch, whole="foreign_pass", named="foreign_pass:Foreign", none="json", gone="no_such", rtn="other:Rtn"
    )
    assert PASSES.names()["named"] == "foreign_pass:Foreign"
    assert PASSES.find("whole") is PASSES.find("named") is Foreign
    with pytest.raises(CompressorError, match="exactly one frozen dataclass"):
        PASSES.find("none")
    with pytest.raises(CompressorError, match="cannot be imported"):
        PASSES.find("gone")
    assert PASSES.find("rtn") is Rtn  # whatever else is installed, recipes mean the same
    twice = [EntryPoint("twice", f"{name}:Pass", PASSES.group) for name in ("one", "other")]
    monkeypatch.setattr("compressor.registry.entry_points", lambda group, name=None: twice)
    with pytest.raises(UsageError, match="'twice' is claimed by one:Pass and other:Pass; uninstall one"):
        PASSES.find("twice")


def test_the_passes_of_the_documentation_work() -> None:
    page = (ROOT / "docs" / "add_a_pass.md").read_text(encoding="utf-8")
    custom, use, statistic = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len([line for line in custom.splitlines() if line.strip()]) < 25
    assert "Careful" in use
    # Dataclasses look their module up by name.
    module = ModuleType("documented")
    sys.modules["documented"] = module
    try:
        exec(custom, vars(module))
        exec(statistic, vars(module))
    finally:
        del sys.modules["documented"]
    ctx = context()
    largest = module.largest_inputs(model(), ctx)
    assert len(largest) == 15
    assert min(largest.values()) > 0
    graph = Pipeline([module.Careful(limit=0.009)]).run(model(), ctx)
    assert {record.format for record in ctx.records} == {"W4A16_G32", "W8A16_G32"}
    assert not linear_sites(graph)
    assert ctx.stages[-1].name == "careful"

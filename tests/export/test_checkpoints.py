"""Smaller models as Hugging Face folders and programs: they compute what the graph does; what cannot be is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from export_clients import saved
from families import DECODERS, VOCAB, save
from packed_models import drop_weights, random_samples
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.functional import relu

from compressor.capture.capture import capture
from compressor.codegen.backend import make_backend
from compressor.errors import RecipeError, UsageError
from compressor.export.checkpoints.folder import FolderForm, plan_folder, write_folder
from compressor.export.checkpoints.program import plan_program
from compressor.export.publish import check_destination, publishing_checkpoint
from compressor.graph.caches import empty_past
from compressor.graph.model import clone_graph
from compressor.host.resources import resource
from compressor.passes.channel_prune import ChannelPrune
from compressor.passes.ffn_prune import FfnPrune
from compressor.passes.head_prune import HeadPrune
from compressor.passes.skip_layers import SkipLayers
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.plan.checkpoint import PlannedCheckpoint, plan_checkpoint
from compressor.plan.passes import plan_passes
from compressor.recipe.recipe import Recipe

SAMPLES = random_samples(VOCAB, 16)
RTN = {"rtn": {"scheme": "W8A16"}}
TOLERANCE = 2e-5  # of the largest output: sums in another order


def planned(graph: GraphModule, *steps: Pass) -> FolderForm:
    meta = clone_graph(graph)
    drop_weights(meta)
    for step in steps:
        step.plan(meta, Context())
    return plan_folder(meta)


@pytest.mark.parametrize(
    ("name", "step", "changes"),
    [
        (
            "Qwen 2",
            HeadPrune(ratio=0.5, importance="magnitude", refit=False),
            ["num_attention_heads 2", "num_key_value_heads 1", "head_dim 16"],
        ),
        ("GPT-2", FfnPrune(ratio=0.25, multiple=16), ["n_inner 48"]),  # stored turned
    ],
)
def test_transformers_computes_what_the_smaller_graph_does(
    name: str, step: Pass, changes: list[str], tmp_path: Path
) -> None:
    """Names and types of the tensors are those of the model's own folder, and the tokenizer comes along."""
    graph = saved(tmp_path / "dense", name)
    form = planned(graph, step)
    assert sorted(form.changes) == sorted(changes)
    graph = step.run(graph, Context(samples=SAMPLES))
    folder = tmp_path / "smaller"
    model = written(folder, graph, form)
    assert_equal_outputs(graph, model)
    types = [
        {key: tensor.dtype for key, tensor in load_file(at / "model.safetensors").items()}
        for at in (tmp_path / "dense", folder)
    ]
    assert types[0] == types[1]
    assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "dense" / "tokenizer.json").read_bytes()
    check_destination(folder)  # a later run may take its place


KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SKIPS: list[tuple[str, dict[str, Any], SkipLayers, list[str]]] = [
    ("GPT-2", {"n_layer": 4}, SkipLayers(0.5, ranking="influence", compare_halves=False), ["n_layer 2"]),
    (
        "Gemma 3",
        {"num_hidden_layers": 3, "layer_types": KINDS},
        SkipLayers(layers=(1,)),
        ["num_hidden_layers 2", "layer_types ['sliding_attention', 'sliding_attention']"],
    ),
    ("Mixtral", {"num_hidden_layers": 3}, SkipLayers(layers=(1,)), ["num_hidden_layers 2"]),
]


@pytest.mark.parametrize(("name", "sizes", "step", "changes"), SKIPS, ids=[name for name, *_ in SKIPS])
def test_layers_behind_one_that_went_get_its_number(
    name: str, sizes: dict[str, Any], step: SkipLayers, changes: list[str], tmp_path: Path
) -> None:
    graph = saved(tmp_path / "dense", name, **sizes)
    form = planned(graph, step)
    assert sorted(form.changes) == sorted(changes)
    step.run(graph, Context(samples=SAMPLES))
    assert_equal_outputs(graph, written(tmp_path / "smaller", graph, form))
    before, after = (len(load_file(at / "model.safetensors")) for at in (tmp_path / "dense", tmp_path / "smaller"))
    assert after < before


def test_a_part_of_a_layer_is_bundle_only() -> None:
    with pytest.raises(UsageError, match=r"^bundle only: no numbers of config\.json describe it"):
        planned(reference(), SkipLayers(layers=(2,), part="attention"))
    with pytest.raises(RecipeError, match="bundle only: skip_layers decides as it runs which layers go"):
        planned_by_recipe([{"skip_layers": {"remove": 1, "part": "either"}}, RTN])


def test_numbers_that_the_stored_type_does_not_hold_are_kept_as_float32(tmp_path: Path) -> None:
    """The scale of Gemma's norms is one more than what is stored; its head is its table."""
    model: Any = save(tmp_path / "dense", *DECODERS["Gemma"], True)
    model.half().save_pretrained(tmp_path / "dense")
    graph = capture(tmp_path / "dense")
    FfnPrune(ratio=0.25, multiple=16, importance="magnitude", refit=False).run(graph, Context(samples=SAMPLES))
    graph.get_parameter("model.norm.weight").data += 1e-3
    model = written(tmp_path / "smaller", graph, plan_folder(graph))
    config = json.loads((tmp_path / "smaller" / "config.json").read_text())
    assert (config["dtype"], config["intermediate_size"]) == ("float32", 48)
    assert_equal_outputs(graph, model)


def written(folder: Path, graph: GraphModule, form: FolderForm) -> Any:
    folder.mkdir()
    write_folder(folder, graph, form)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def assert_equal_outputs(graph: GraphModule, model: Any) -> None:
    ids, count = SAMPLES.ids[:2], SAMPLES.ids.shape[1]
    with torch.no_grad():
        past = empty_past(graph.meta["model"], len(ids), count)
        found, expected = graph(ids, torch.arange(count), torch.arange(count), *past)[0], model(ids).logits
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [FfnPrune(ratio=0.25, ignore="re:.*layers.1.*")],
            r"layers keep 384 \(.*\) and 512 \(.*\) of 512 channels, and config.json has one number",
        ),
        ([HeadPrune(remove="query_heads", ratio=0.5, ignore="re:.*layers.1.*")], "layers keep 4 and 8 heads"),
        ([HeadPrune(ratio=0.25)], "no numbers of config.json describe it .*hidden size .256. is not a multiple"),
    ],
)
def test_what_a_configuration_cannot_say_is_bundle_only(steps: list[Pass], message: str) -> None:
    with pytest.raises(UsageError, match=f"^bundle only: {message}"):
        planned(reference(), *steps)


def test_parameters_that_are_not_stored_alone_are_bundle_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^bundle only: .*experts.*: it is a part of .*, which is stored as a whole"):
        planned(saved(tmp_path, "Granite, experts"))


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([RTN], "no pass leaves another dense model"),
        ([{"channel_prune": {"ratio": 0.25}}], "bundle only: channel_prune decides the width of each layer as it runs"),
        ([{"head_prune": {"ratio": 0.25}}, RTN], "bundle only: no numbers of config.json describe it"),
    ],
)
def test_recipes_are_refused_before_work(passes: list[Any], message: str) -> None:
    with pytest.raises(RecipeError, match=f"^recipe: checkpoint: {message}"):
        planned_by_recipe(passes)


def test_the_plan_says_what_is_saved() -> None:
    found = planned_by_recipe([{"ffn_prune": {}}, RTN])
    assert found is not None and found.after == 1
    assert found.note == (
        "checkpoint: the model as ffn_prune leaves it goes to smaller, a Hugging Face folder; config.json has "
        "intermediate_size 384"
    )


def test_the_model_that_is_read_is_not_written_over(tmp_path: Path) -> None:
    model = tmp_path / "model.pt2"
    model.touch()
    recipe = Recipe.from_dict({"model": "m", "calibration": "python_docs", "passes": [RTN], "checkpoint": str(model)})
    planned = plan_passes(reference(), recipe, make_backend(recipe.target.build()))
    with pytest.raises(RecipeError, match=r"^recipe: checkpoint: .*model.pt2 is the model that is read"):
        plan_checkpoint(planned, recipe, str(tmp_path / "." / "model.pt2"))


class Mobile(nn.Module):
    """A stem, an inverted residual of which one convolution is depthwise, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, padding=1), nn.BatchNorm2d(8)
        self.wide, self.deep = nn.Conv2d(8, 24, 1), nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.narrow, self.head = nn.Conv2d(24, 8, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm(self.stem(x)))
        return self.head((y + self.narrow(relu(self.deep(relu(self.wide(y)))))).mean((2, 3)))


def test_a_smaller_module_is_a_program_of_torch_export(tmp_path: Path) -> None:
    """Its convolutions are convolutions again, its sizes vary as before, and capture reads it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, example, batch = Mobile().eval(), torch.randn(2, 3, 12, 12), torch.randn(5, 3, 12, 12)
    graph = capture(net, example, dynamic_shapes=({0: torch.export.Dim("batch")},))
    graph = ChannelPrune(0.5, importance="magnitude", refit=False).run(graph, Context())
    file = tmp_path / "smaller.pt2"
    with publishing_checkpoint(file) as place:
        plan_program(graph).write(place, graph)
    assert [each.name for each in tmp_path.iterdir()] == ["smaller.pt2"]
    program = torch.export.load(file)
    with torch.no_grad():
        found, expected = program.module()(batch), graph(batch)
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
    inner = graph.get_parameter("deep.weight").shape[0]
    assert inner < 24 and tuple(program.state_dict["deep.weight"].shape) == (inner, 1, 3, 3)
    assert {str(node.target) for node in program.graph.nodes if "conv" in str(node.target)} == {"aten.conv2d.default"}
    with torch.no_grad():
        assert torch.allclose(capture(file)(batch), expected, atol=1e-6)


def test_a_program_needs_the_operators_of_pytorch(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^bundle only: .* is not a plain module"):
        plan_program(reference())
    with pytest.raises(RuntimeError), publishing_checkpoint(tmp_path / "smaller.pt2") as place:
        place.write_bytes(b"half of it")
        raise RuntimeError
    assert not list(tmp_path.iterdir())


@functools.cache
def reference() -> GraphModule:
    return capture(resource("models") / "reference", weights=False)


def planned_by_recipe(passes: list[Any]) -> PlannedCheckpoint | None:
    recipe = Recipe.from_dict(
        {"model": "reference", "calibration": "python_docs", "passes": passes, "checkpoint": "smaller"}
    )
    return plan_checkpoint(plan_passes(reference(), recipe, make_backend(recipe.target.build())), recipe)

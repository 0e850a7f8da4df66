"""What cannot be served is refused before any work, with the recipe's line and exit code 2."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from click.testing import CliRunner
from tiny_models import SIZES, build
from torch.fx import Graph, GraphModule

import compressor
from compressor.cli.commands import main
from compressor.errors import RecipeError, UsageError
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.plan.passes import mark_entries

pytestmark = pytest.mark.usefixtures("captures_once")

REFUSED = {
    "packed caches": ("webgpu", ["kv_cache: {scheme: INT8}"], "the target webgpu has no kernels for packed caches"),
    "single weights": (
        "webgpu",
        ["rtn: {scheme: W4A16_G32_S1}"],
        "the target webgpu has no kernels for single weights",
    ),
    "columns": ("webgpu", ["rtn: {scheme: W4A16_G32, ignore: lm_head}", "llm_int8: {scheme: W8A8}"], "(_F)"),
    "patterns": ("webgpu", ["rtn: {scheme: W4A16_G32, targets: nothing}"], "patterns that match no linear"),
    "group size": ("x86", ["rtn: {scheme: W4A16, group_size: 4096}"], "divides the inputs of none"),
    "no samples": ("x86", ["rtn: {scheme: W8A8_STATIC}"], "the recipe has none; add `calibration:`"),
    "order": ("x86", ["bias_correction", "rtn: {scheme: W4A16_G32}"], "no linear is packed"),
    "pruned": (
        "x86",
        ["wanda: {scheme: W8A16_1:4, pack: false}", "learned_mask: {scheme: W8A16_2:4}"],
        "layers.0.self_attn.q_proj has the zeros of W8A16_1:4 already, and which weights become zero is what",
    ),
    "trained to zeros": (
        "x86",
        ["sparse_train: {scheme: W8A16_B16x1@90, ignore: lm_head}", "learned_mask: {scheme: W8A16_2:4}"],
        "q_proj has the zeros of W8A16_B16x1@90 already",
    ),
    "learned twice": (
        "x86",
        ["learned_mask: {scheme: W8A16_2:4, targets: lm_head}", "learned_mask: {scheme: W8A16_2:4}"],
        "lm_head has the zeros of W8A16_2:4 already",
    ),
    "gates behind zeros": (
        "x86",
        ["wanda: {scheme: W8A16_B1x1@70, pack: false}", "polarised_gates: {scheme: W8A16_B1x1@50}"],
        "q_proj has the zeros of W8A16_B1x1@70 already, and which weights become zero is what",
    ),
    "packed": (
        "x86",
        ["wanda: {scheme: W8A16_2:4}", "learned_mask: {scheme: W8A16_2:4}"],
        "an earlier pass has packed every linear that matches; put learned_mask before it",
    ),
    "rows": (
        "x86",
        ["learned_mask: {scheme: W8A16_1:7}"],
        "weights do not divide into groups of 7",
    ),
    "twice": ("x86", ["kv_cache: {scheme: INT8}", "kv_cache: {scheme: INT4}"], "the caches are INT8 already"),
}
"""Target, passes, and why: of those the last is refused, but for the order, whose first is."""


def refusal(folder: Path, text: str) -> str:
    """Run a recipe whose passes must not begin, and return the error."""
    file = folder / "recipe.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        begun = Mock()
        patch.setattr("compressor.run.job._compress", begun)
        result = CliRunner().invoke(main, ["run", str(file), "-o", str(folder / "bundle")])
    begun.assert_not_called()
    assert result.exit_code == 2, result.output
    assert not list(folder.glob("bundle*"))
    return result.stderr[result.stderr.index("error: ") :]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_line(name: str, tmp_path: Path) -> None:
    target, passes, reason = REFUSED[name]
    text = f"model: reference\ntarget: {target}\npasses:\n" + "".join(f"  - {step}\n" for step in passes)
    text += "" if name == "no samples" else "calibration: python_docs\n"
    index = 0 if name == "order" else len(passes) - 1
    error = refusal(tmp_path, text)
    assert error.startswith(f"error: {tmp_path / 'recipe.yaml'}:{4 + index}: passes.{index}.") and reason in error


def test_a_target_that_does_not_serve_the_model_is_named_with_its_line(tmp_path: Path) -> None:
    graph_of: dict[str, Any] = {"model": torch.nn.Linear(40, 8).eval(), "example": (torch.zeros(2, 40),)}
    recipe = {"target": "webgpu", "passes": [{"rtn": {"scheme": "W8A16", "targets": "Linear"}}]}
    with pytest.raises(RecipeError, match=r"recipe: target: Linear: the target webgpu serves decoders, encoders"):
        compressor.compress(graph_of["model"], recipe, tmp_path / "bundle", example=graph_of["example"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["wasm", "cuda", "null"])
def test_drafts_where_no_kernel_verifies_them(target: str) -> None:
    recipe = compressor.Recipe.from_dict({"speculate": "lookup", "target": target, "passes": []})
    with pytest.raises(RecipeError, match=f"speculate: the target {target} has no kernels that verify drafted tokens"):
        mark_entries(GraphModule({}, Graph()), recipe)


@pytest.mark.parametrize(
    ("drafts", "step"),
    [("exit", "early_exit: {exits: [3], steps: 0}"), ("self", "skip_decode: {depths: [[0, 5], [64, 3]]}")],
)
def test_drafts_of_own_layers_where_tokens_do_not_run_all_blocks(drafts: str, step: str, tmp_path: Path) -> None:
    """A library is cut into parts in one way."""
    error = refusal(tmp_path, f"model: reference\ncalibration: python_docs\npasses:\n  - {step}\nspeculate: {drafts}\n")
    assert f"recipe.yaml:5: speculate: {drafts}: tokens do not run all blocks, so the library is cut there" in error


@pytest.mark.parametrize(
    ("drafts", "said"),
    [
        ("lookup", "trains for `speculate: exit`"),
        ("exit", "exits behind 3 blocks, and drafts leave behind 2: give exits: [2]"),
    ],
)
def test_exits_for_drafts_that_leave_elsewhere(drafts: str, said: str, tmp_path: Path) -> None:
    step = "early_exit: {exits: [3], action: draft}"
    error = refusal(tmp_path, f"model: reference\ncalibration: python_docs\npasses:\n  - {step}\nspeculate: {drafts}\n")
    assert "recipe.yaml:4: passes.0.early_exit: " in error and said in error


def test_drafts_that_a_run_time_lacks() -> None:
    recipe = compressor.Recipe.from_dict({"speculate": "recycle", "target": "webgpu", "passes": []})
    with pytest.raises(RecipeError, match="the target webgpu has no drafts recycle; take lookup or auto"):
        mark_entries(GraphModule({}, Graph()), recipe)


def test_caches_of_an_encoder(tmp_path: Path) -> None:
    build(transformers.BertConfig(**SIZES), transformers.AutoModel).save_pretrained(tmp_path / "bert")
    text = f"model: {tmp_path / 'bert'}\npasses:\n  - kv_cache: {{scheme: INT8}}\n"
    assert "recipe.yaml:3: passes.0.kv_cache: bert is not a decoder" in refusal(tmp_path, text)


@dataclasses.dataclass(frozen=True)
class Picky(Pass):
    """Ask for something, and do not live to run."""

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        assert all(parameter.is_meta for parameter in graph.parameters())
        raise UsageError("picky: this model has no moon")

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        raise AssertionError("a requirement was not asked for")


def test_a_pass_of_ones_own_is_asked_first(tmp_path: Path) -> None:
    recipe = {"model": "reference", "passes": ["rtn", Picky()], "target": "x86"}
    recipe["passes"] = [{"rtn": {"scheme": "W4A16_G32"}}, Picky()]
    with pytest.raises(RecipeError, match=r"recipe: passes\.1\.picky: this model has no moon"):
        compressor.compress(None, recipe, tmp_path / "bundle")
    assert not list(tmp_path.iterdir())

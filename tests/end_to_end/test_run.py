"""The shipped recipes on the shipped model: what comes out agrees with the graph, with the arithmetic, with itself."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compressor_selfcheck
import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from compressor_runtime import RequestError
from compressor_runtime.depth.tokens import early_steps
from compressor_runtime.generation import Depth, checked_sampler
from compressor_runtime.speculation.counts import Speculation as Counts
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.engine import Engine
from compressor_runtime.speculation.measure import measure_drafts
from compressor_runtime.speculation.pace import Always
from compressor_runtime.speculation.text import Text
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.fx import GraphModule

import compressor
import compressor.data.text
import compressor.run.native
from compressor.capture.capture import capture
from compressor.cli.commands import main as cli
from compressor.cli.contents import inspect_path
from compressor.data.embedding_texts import load_embedding_texts
from compressor.data.text import load_evaluation, load_samples
from compressor.errors import UsageError
from compressor.evaluate.comparison import Speed
from compressor.evaluate.embeddings import measure_embeddings
from compressor.evaluate.models import evaluate_path
from compressor.evaluate.quality import GraphLogits, graph_hidden, measure_quality
from compressor.formats.cache import DENSE_CACHE
from compressor.formats.extras import SkippedInputs
from compressor.formats.format import Format
from compressor.formats.packing import dequantize
from compressor.graph.caches import empty_past
from compressor.graph.kinds.tables import embedding_tables
from compressor.graph.model import ModelInfo, clone_graph
from compressor.graph.sites import linear_sites, match_sites
from compressor.host.resources import resource
from compressor.numerics.nearest import rtn_quantize
from compressor.passes.activation_sparse import ActivationSparse
from compressor.passes.distill import Distill
from compressor.passes.draft_heads import DraftHeads
from compressor.passes.early_exit import EarlyExit
from compressor.passes.embedding import Embedding
from compressor.passes.ffn_prune import FfnPrune
from compressor.passes.rtn import Rtn
from compressor.passes.skip_layers import SkipLayers
from compressor.passes.swift_kv import SwiftKv
from compressor.pipeline.context import Context
from compressor.recipe.data_spec import DataSource, EvaluationSpec
from compressor.recipe.recipe import Recipe, load_recipe
from compressor.registry import PASSES
from compressor.report.outcome import Outcome
from compressor.run.job import run_recipe
from compressor.runtime import load
from compressor.training.training_pass import TrainingPass
from compressor.verify.bundle import verify_bundle

CHECKED = ("schema", "files", "bytes", "kernels", "evidence")
ELSEWHERE = (
    "_webgpu",  # test_page.py
    "_cuda",  # run/test_cuda.py, on a small model
    "_arm",  # test_arm.py, on a small model
    "_speech_x86",  # test_speech.py
    "_ctc_x86",
    "_clip_x86",  # test_pictures_with_texts.py
    "_images_x86",  # test_images_by_recipe.py
    "_images_wasm",
    "wanda_w8a16_x86",  # passes/test_sparse_blocks.py: the kernels are sparsegpt's
    "magnitude_w8a16_x86",
    "alps_w8a8_x86",
    "sparsegpt_w4a16_g128_single_x86",  # codegen/kernels/linear/test_expand.py: the pass is that of two other recipes
    "gptq_nf4_g64_x86",  # codegen/kernels/linear/test_packed.py: the pass is that of six other recipes
    "gptq_mxfp4_x86",
    "gptq_fp6_e2m3_g128_x86",
    "gptq_w3a16_g128_x86",
    "gptq_nvfp4_x86",
    "rtn_fp8_e4m3_x86",
    "gptq_lut3_x86",
    "adaptive_rounding_w4a16_g128_x86",  # passes/: each has a test of its own, and gptq_w4a16_g128_x86 runs the kernels
    "awq_w4a16_g128_x86",
    "bias_correction_w4a16_g128_x86",
    "rtn_w4a16_g128_x86",
    "finequant_w4a16_x86",
    "smoothquant_w8a8_x86",  # smoothquant_w8a8_static_x86 and smoothquant_w8a8_minilm_x86 are run
    "gptq_w4a16_minilm_x86",
    "distill_w8a16_x86",  # passes/test_distill.py
    "finetune_w4a16_x86",  # passes/test_sparse_train.py
    "sparse_train_w8a16_x86",
    "learned_mask_w8a16_2of4_x86",  # passes/test_learned_mask.py
    "polarised_gates_w8a16_x86",
    "relu_sparse_w8a16_x86",
    "speculate_planes_x86",  # runtime/speculation/test_planes.py: the kernels; numerics/test_planes.py: the pass
    "speculate_self_x86",  # run/test_skips.py
    "speculate_sparse_x86",  # run/test_sparse.py
    "abq_bip2a8_x86",  # passes/test_abq.py: the pass; codegen/kernels/linear/test_packed.py: products of bit planes
    "llm_fp4_w4a4_x86",  # passes/test_llm_fp4.py, and the same kernels' test
    "mixed_precision_4bit_x86",  # passes/test_mixed_precision.py; its formats are those of other recipes
    "auxiliary_ffn_x86",  # passes/test_auxiliary_ffn.py: the pass, and its kernels
    "predict_kv_x86",  # native/test_runner.py: the entry; passes/test_predict_kv.py: the pass
    "skip_decode_x86",  # runtime/depth/test_falling.py, passes/test_skip_decode.py
    "channel_prune_w4a16_x86",  # passes/test_channel_prune.py makes bundles
    "head_prune_w4a16_x86",  # passes/: each has a test of its own, and other recipes run the kernels
    "squeezellm_lut3_x86",
    "llm_int8_w8a8_x86",
    "embedding_w4_x86",
    "distill_blocks_w8a16_x86",
    "sparsegpt_w8a16_2of4_x86",  # codegen/kernels/test_n_of_m.py: the pass is that of sparsegpt_w8a16_x86
    "puzzle_formats_x86",  # passes/test_chosen_formats.py makes a bundle
    "puzzle_x86",  # passes/test_puzzle.py: it makes a bundle of each candidate
    "keep_codes_x86",  # test_quantized_checkpoint.py
    "permute_channels_w8a16_2of4_x86",  # passes/test_permute_channels.py: nothing is left of it but sparsegpt's recipe
)
RECIPES = sorted(path.stem for path in resource("recipes").glob("*.yaml") if not path.stem.endswith(ELSEWHERE))
FULL = "quickstart"  # most others, for time's sake, compress the first block's attention
PROMPT = "Return the "
FIVE_BLOCKS = {  # the other recipes for the shipped model take its first two blocks
    FULL,
    "skip_layers_x86",  # of two blocks, the first and the last stay
    "early_exit_x86",  # its exit is behind three
    "rotation_w4a8_g64_x86",  # stores vectors that no format counts: 2% of two blocks' bytes
}
STEPS = 4
"""Steps that each training takes here."""
REMOVE = (DraftHeads, FfnPrune, SkipLayers, SwiftKv)
"""Passes that make linears smaller, fewer or more, and leave them dense."""
DRAFTS = "speculate_lookup_x86"
"""The recipe whose bundle drafts unless it is told otherwise."""
EXITS = "speculate_exit_x86"
"""The recipe whose bundle drafts with its first layers."""
HEADS = "draft_heads_x86"
"""The recipe whose bundle has heads that draft."""
SAVES = "ffn_prune_w4a16_x86"
"""The recipe that is run with a checkpoint as well."""

VERIFIES = "gptq_w4a8_g128_x86"
"""The recipe that is run with an entry for drafted tokens as well."""

LOSES = {
    "ffn_prune_w4a16_x86": (0.3, 0.7),
    "skip_layers_x86": (1.0, 0.4),  # with hardly any training, see `load_for_test`
    "swift_kv_x86": (1.0, 0.4),  # with hardly any training, see `load_for_test`
    "early_exit_x86": (0.3, 0.6),
    "sparsegpt_w8a16_x86": (0.6, 0.6),
}
"""Recipes that lose more than others: the perplexity's largest increase, the least agreement."""


@dataclasses.dataclass(frozen=True)
class Run:
    recipe: Recipe
    outcome: Outcome
    graph: GraphModule  # as it was lowered
    manifest: dict[str, Any]

    @property
    def bundle(self) -> Path:
        return self.outcome.bundle


pytestmark = pytest.mark.usefixtures("one_thread_throughout")


def packs(step: Any) -> bool:
    """Return whether a pass stores linears: one with a scheme but no targets packs caches, `embedding` packs tables."""
    has_scheme = hasattr(step, "scheme") or hasattr(step, "schemes")
    return hasattr(step, "targets") and has_scheme and not isinstance(step, Embedding)


def leaves_dense(step: Any) -> bool:
    """Return whether a pass records linears that stay dense."""
    return isinstance(step, (*REMOVE, Distill, EarlyExit)) or not getattr(step, "pack", True)


def is_whole(name: str) -> bool:
    """Whether all linears are compressed: also where the first pass changes weights that a later one is to pack."""
    steps = load_recipe(name).passes
    return name in (FULL, DRAFTS) or not packs(steps[0]) or any(isinstance(step, ActivationSparse) for step in steps)


@functools.cache
def captured(model: Path | str) -> GraphModule:
    """To look at and to run, not to change."""
    return capture(model)


@functools.cache
def on_grids(model: Path) -> Path:
    """Write a model beside another, with its linears rounded to 4 bits: what a quantised checkpoint stands for."""
    folder = model.with_name(f"{model.name}_on_grids")
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = dequantize(rtn_quantize(tensors[name].float(), Format.parse("W4A16_G64")))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


read_tokens = compressor.data.text._read_tokens
read_before: dict[tuple[object, ...], Tensor] = {}


def read_once(spec: DataSource, *arguments: Any) -> Tensor:
    """Return the tokens of a text that all recipes take; only the first reads it."""
    key = (spec.model_dump_json(), *arguments)
    if key not in read_before:
        read_before[key] = read_tokens(spec, *arguments)
    return read_before[key]


def load_for_test(name: str, short_reference: Path) -> Recipe:
    overrides = ["tune=off", "evaluation.tokens=512"]
    recipe = load_recipe(name)
    if recipe.model is None:  # a quantised checkpoint is the user's
        overrides.append(f"model={on_grids(short_reference)}")
        recipe = load_recipe(name, overrides)
    if name not in FIVE_BLOCKS and recipe.model == "reference":
        overrides.append(f"model={short_reference}")
        recipe = load_recipe(name, overrides)
    if recipe.calibration is not None:
        overrides.append("calibration.samples=4")
    if name == VERIFIES:
        overrides.append("speculate=auto")
    for step in () if is_whole(name) else filter(packs, recipe.passes):
        first = ", ".join(site.name for site in linear_sites(captured(recipe.model_source()))[:4])
        key = f"passes.{PASSES.name_of(step)}"
        overrides += [f"{key}.targets=[{first}]", f"{key}.ignore=[]"]
    trained = ((i, step) for i, step in enumerate(recipe.passes) if isinstance(step, TrainingPass) and step.steps)
    overrides += [f"passes.{i}.{PASSES.name_of(step)}.steps={STEPS}" for i, step in trained]
    return load_recipe(name, overrides)


def execute(name: str, output: Path, short_reference: Path) -> Run:
    """Run a recipe and keep the graph; speed is measured elsewhere, what several take is captured and read once."""
    graphs: list[GraphModule] = []
    compile_graph = compressor.run.native.compile_graph

    def spy(graph: GraphModule, *arguments: Any, **options: Any) -> Any:
        graphs.append(graph)
        return compile_graph(graph, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compressor.run.native.compile_graph", spy)
        patch.setattr("compressor.run.job.measure_speed", lambda *_: Speed({}, {}))
        patch.setattr("compressor.data.text._read_tokens", read_once)
        recipe = load_for_test(name, short_reference)
        if name != FULL:
            patch.setattr("compressor.run.prepare.capture", lambda model, *_, **__: clone_graph(captured(model)))
        if name == SAVES:
            recipe = recipe.model_copy(update={"checkpoint": str(output.with_name("checkpoint"))})
        outcome = run_recipe(recipe, output)
    return Run(recipe, outcome, graphs[0], json.loads((output / "manifest.json").read_text()))


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory,
    require_tool: Callable[[str], Path],
    require_model: Callable[[Recipe], Path],
    short_reference: Path,
) -> Callable[[str], Run]:
    """Each recipe runs once, when first asked for."""
    require_tool("g++")
    done: dict[str, Run] = {}

    def get(name: str) -> Run:
        if name not in done:
            if (recipe := load_recipe(name)).model is not None:
                require_model(recipe)
            done[name] = execute(name, tmp_path_factory.mktemp(name) / "bundle", short_reference)
        return done[name]

    return get


def test_drafts_give_the_text_of_plain_steps(run: Callable[[str], Run]) -> None:
    result = run(DRAFTS)
    assert result.manifest["model"]["speculate"] == result.manifest["recipe"]["speculate"] == "lookup"
    bundle = load(result.bundle, threads=1)
    prompt = "for key in sorted(counts):\n    print(key)\nfor key in sorted(counts):\n"
    greedy, sampled = {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "seed": 3}
    assert bundle.generate(prompt, max_tokens=4).speculation.kind == "lookup"
    bundle._drafts = Drafts(bundle.model["vocab_size"], Always())  # drafts hardly pay on so small a model
    for options in (greedy, sampled):
        wanted = "".join(bundle.generate(prompt, max_tokens=60, speculate="off", **options))
        for kind in bundle.speculations:
            found = bundle.generate(prompt, max_tokens=60, speculate=kind, **options)
            assert "".join(found) == wanted and found.new_tokens == 60
            assert found.speculation.accepted > 3 and found.speculation.tokens_per_verification > 1.05
    ids = bundle.tokenizer.encode(prompt).ids
    measured = measure_drafts(bundle, "lookup", ids * 2, 2 * len(ids), 12, 1)
    assert 0 < measured["acceptance"] <= 1 < measured["tokens_per_verification"]
    assert all(0 < measured[f"verify_{rows}_steps"] < float("inf") for rows in (1, 2, 4, 8, 16))
    assert min(measured["speedup"], measured["predicted_speedup"]) > 0  # a busy machine says no more
    prompts = [ids[start : start + 20] for start in range(4)]
    session, drafts, counts = bundle.session(4), Drafts(bundle.model["vocab_size"], Always()), Counts("auto")
    texts = [
        Text(slot, [*own], drafts.start("auto", session, slot), checked_sampler(0.7, 0, 0.9, slot), {}, 20 + slot)
        for slot, own in enumerate(prompts)
    ]
    for text, logits in zip(texts, session.step(prompts), strict=True):
        text.choose(logits[-1])
    assert list(Engine(session, drafts.pace, drafts.acceptance, counts).rounds(texts)) and counts.accepted > 3
    for text, own in zip(texts, prompts, strict=True):
        alone = bundle.generate_ids(
            own, max_tokens=20 + text.slot, temperature=0.7, top_p=0.9, seed=text.slot, speculate="off"
        )
        assert text.tokens[20:] == list(alone)


def test_tokens_run_fewer_blocks(run: Callable[[str], Run]) -> None:
    """And the caches that they leave behind are those of the whole model, whose text goes on from them."""
    early = load(run("early_exit_x86").bundle, threads=1)
    ids = early.tokenizer.encode(PROMPT).ids
    command = ["generate", str(run("early_exit_x86").bundle), "--prompt", PROMPT, "--json"]
    command += ["--max-tokens", "24", "--temperature", "0"]
    said = json.loads(CliRunner().invoke(cli, command, catch_exceptions=False).stdout)
    assert said["depth"]["blocks"] == 5 and said["depth"]["heads_per_token"] >= 1
    early.leaves_early = False
    assert early.generate(PROMPT).depth is None
    whole = list(early.generate_ids(ids, max_tokens=24, temperature=0.0))
    early.leaves_early, exits = True, early.model["exits"]
    for threshold, blocks in ((0.0, 3), (2.0, 5)):
        early.model["exits"] = {**exits, "thresholds": [threshold], "give_up": 0.0}
        text = early.generate(PROMPT, max_tokens=24, temperature=0.0)
        "".join(text)
        assert text.depth.blocks_per_token == blocks
    assert list(early.generate_ids(ids, max_tokens=24, temperature=0.0)) == whole
    session, plain, counts = early.session(), early.session(), Depth(5)
    early.model["exits"] = {**exits, "thresholds": [0.0], "give_up": 0.0}
    steps = early_steps(session, early.model, counts)
    steps.prompt(np.array([ids]))
    plain.step([ids])
    for token in whole[:-1]:
        steps.step(token)
        plain.step([[token]])
    steps._thresholds = [2.0]
    np.testing.assert_array_equal(steps.step(whole[-1]), plain.step([[whole[-1]]])[0, -1])
    assert counts.late == 2 * (len(whole) - 1)


def test_heads_give_the_text_of_plain_steps(run: Callable[[str], Run]) -> None:
    """And a step that keeps a hidden state has the bits of one that does not."""
    bundle = load(run(HEADS).bundle, threads=1)
    assert bundle.model["speculate"] == "heads" and bundle.speculations == ("lookup", "recycle", "heads", "auto")
    assert {"heads_output_0", "verify_top_0"} <= compressor_selfcheck.compare(bundle)[0].keys()
    session, ids = bundle.session(), bundle.tokenizer.encode(PROMPT).ids
    session.step([ids])
    plain = session.step([[5]])
    assert session.hidden.of() is None  # of the entry `main`; the next step keeps it
    session.position -= 1
    kept, state = session.step([[5]]), session.hidden.of()
    assert state is not None and np.array_equal(kept, plain)
    session.position -= 1
    session.verify([4, 5], [-1, -1])
    session.accept({0: [1]})
    assert np.array_equal(session.hidden.of(), state)
    assert session.hidden.heads([state, state], [7, 8]).shape == (2, 3, bundle.model["vocab_size"])
    bundle._drafts = Drafts(bundle.model["vocab_size"], Always(), bundle.entries)
    for options in ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "seed": 3}):
        wanted = "".join(bundle.generate(PROMPT, max_tokens=50, speculate="off", **options))
        for kind in ("heads", "auto"):
            found = bundle.generate(PROMPT, max_tokens=50, speculate=kind, **options)
            assert "".join(found) == wanted and found.speculation.verifications > 8


def test_first_layers_give_the_text_of_plain_steps(run: Callable[[str], Run]) -> None:
    bundle = load(run(EXITS).bundle, threads=1)
    assert bundle.model["speculate"] == "exit" and bundle.speculations == ("lookup", "recycle", "exit", "auto")
    assert {"begin", "rest", "end"} <= bundle.entries and "verify_top_0" in compressor_selfcheck.compare(bundle)[0]
    bundle._drafts = Drafts(bundle.model["vocab_size"], Always(), bundle.entries)
    for options in ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "seed": 3}):
        wanted = "".join(bundle.generate(PROMPT, max_tokens=40, speculate="off", **options))
        for kind in ("exit", "auto"):
            found = bundle.generate(PROMPT, max_tokens=40, speculate=kind, **options)
            assert "".join(found) == wanted and found.speculation.verifications > 5
    with pytest.raises(RequestError, match=r"speculate='heads': .* has no kernels that draft so, only for 'lookup'"):
        bundle.generate(PROMPT, speculate="heads")


def test_a_smaller_model_is_saved_for_transformers_too(run: Callable[[str], Run]) -> None:
    """Its logits are those of the graph between the two passes, and its tokens those of the bundle's tokenizer."""
    result = run(SAVES)
    folder = result.bundle.with_name("checkpoint")
    assert any("config.json has intermediate_size 384" in note for note in result.outcome.notes)
    assert "checkpoint" not in result.manifest["recipe"] and result.manifest["recipe"]["passes"][0]["ffn_prune"]
    model, graph = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), capture(folder)
    ids = torch.tensor([transformers.AutoTokenizer.from_pretrained(folder)(PROMPT).input_ids])
    assert ids[0].tolist() == load(result.bundle).tokenizer.encode(PROMPT).ids
    with torch.no_grad():
        expected, count = model(ids).logits, torch.arange(ids.shape[1])
        found = graph(ids, count, count, *empty_past(graph.meta["model"], 1, ids.shape[1]))[0]
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    size = sum(parameter.numel() for parameter in model.parameters())
    assert size == graph.meta["model"].parameters < captured(result.recipe.model_source()).meta["model"].parameters


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_runs(name: str, run: Callable[[str], Run]) -> None:
    result = run(name)
    metrics, sites = result.outcome.metrics, result.outcome.sites
    *_, step = filter(packs, result.recipe.passes)
    dense = captured(result.recipe.model_source())
    for added in (step for step in result.recipe.passes if isinstance(step, DraftHeads)):
        added.plan(dense := clone_graph(dense), Context())
    gone = {site["site"] for site in sites if not site["bytes_after"]}
    everything = [site for site in linear_sites(dense) if site.name not in gone]
    tables = [table.site.name for table in embedding_tables(dense)]
    assert [site["site"] for site in sites if site["pass_name"] == "embedding"] == tables
    packed = [site for site in sites if site["format"]]
    assert {site["pass_name"] for site in sites if not site["format"]} == {
        PASSES.name_of(step) for step in result.recipe.passes if leaves_dense(step)
    }
    assert len(packed) - len(tables) == (
        len(match_sites(everything, step.targets, step.ignore)[0]) if is_whole(name) else 4
    )
    formats = {site["format"] for site in packed}
    tabled = {step.scheme for step in result.recipe.passes if isinstance(step, Embedding)}
    assert formats == set(result.manifest["formats"])
    named = [*getattr(step, "schemes", ()), *([step.scheme] if hasattr(step, "scheme") else [])]
    schemes = set(named)  # a pass may add columns in float16
    plain = {name.removesuffix(SkippedInputs.suffix) for name in formats}  # so stored by activation_sparse
    assert all({name, Format.parse(name).without_outliers.name} & {*schemes, *tabled} for name in plain)
    assert metrics["weight_bytes"] < metrics["dense_weight_bytes"]
    info: ModelInfo = result.graph.meta["model"]
    if info.kind == "decoder":
        smaller = metrics["cache_bytes_per_token"] < metrics["dense_cache_bytes_per_token"]
        fewer = any(isinstance(step, SkipLayers) for step in result.recipe.passes)
        assert smaller == (info.cache_format != DENSE_CACHE or fewer)
        asked = result.recipe.evaluation.continuations
        assert metrics.get("continuations") == asked
        assert ("overfit_gap" in metrics) == (result.recipe.evaluation.in_domain is not None)
        assert (
            "swept_kl_divergence" not in metrics
            or metrics["swept_temperature"] in result.recipe.evaluation.temperatures
        )
        assert asked is None or 0 <= metrics["continuation_agreement"] < 1 > metrics["repetition"] >= 0
        most, least = LOSES.get(name, (0.05, 0.8))
        assert -0.05 < metrics["perplexity_increase"] < most  # a model of two blocks may gain by zeros
        assert least < metrics["top1_agreement"] <= 1
    else:
        assert 0.95 < metrics["embedding_cosine_min"] < metrics["embedding_cosine"] < 1
    assert {kernel["evidence"] for kernel in result.manifest["kernels"]} == {"executed"}
    assert all(gate.passed for gate in result.outcome.gates)
    verified = verify_bundle(result.bundle, threads=1)
    assert {check.name for check in verified.checks if check.passed} == {*CHECKED}, verified.checks


def test_drafted_tokens_are_verified_beside_steps(run: Callable[[str], Run]) -> None:
    """Its linears are of 8-bit activations in one block, and of floats everywhere else."""
    result = run(VERIFIES)
    indices = [*range(len(result.manifest["parameters"]))]
    assert {name: sorted(used) for name, used in result.manifest["entries"].items()} == {
        "main": indices,
        "verify": indices,
    }
    assert inspect_path(result.bundle)["entries"] == ["main", "verify"]
    assert json.loads((result.bundle / "compress.lock").read_text())["recipe"]["speculate"] == "auto"
    assert "tree_attention" in {kernel["family"] for kernel in result.manifest["kernels"]}
    bundle = load(result.bundle, threads=1)
    ids = bundle.tokenizer.encode(PROMPT).ids
    session, steps = bundle.session(capacity=4), bundle.session()
    likely = int(session.step([ids])[0, -1].argmax())
    steps.step([ids])
    drafts, parent = [5, likely, 6, 7, 8], [-1, -1, 1, 0, 2]
    logits = session.verify(drafts, parent)
    session.accept({0: [1, 2, 4]})
    for token, row in zip((likely, 6, 8), logits[[1, 2, 4]], strict=True):
        assert np.array_equal(row, steps.step([[token]])[0, 0])
    assert session.lengths == steps.lengths
    assert np.array_equal(session.step([[9]]), steps.step([[9]]))


@pytest.mark.parametrize("name", RECIPES)
def test_quality_of_the_kernels_is_that_of_the_graph(name: str, run: Callable[[str], Run]) -> None:
    result = run(name)
    spec, info = result.recipe.evaluation, result.graph.meta["model"]
    folder = info.source
    if info.kind == "encoder":
        texts = load_embedding_texts(spec, None, folder, info.vocab_size, info.max_positions)
        close = measure_embeddings(graph_hidden(result.graph), graph_hidden(captured(folder)), texts)
        assert result.outcome.metrics["embedding_cosine"] == pytest.approx(close.embedding_cosine, abs=1e-3)
        return
    tokens, _ = load_evaluation(spec, None, folder)
    measured = measure_quality(GraphLogits(result.graph), tokens, window=spec.window, stride=spec.stride)
    # A last bit decides which way an activation is rounded: 1e-6 of the embedding moves 512 tokens' perplexity by 0.2%.
    rounds = any(Format.parse(site["format"]).activations for site in result.manifest["sites"] if site["format"])
    found = result.outcome.metrics["perplexity"]
    if info.exits is not None:  # tokens leave early where they are measured, and the graph's do not
        bundle = load(result.bundle, threads=1)

        def whole(ids: Any) -> Any:
            return bundle.session(len(ids), ids.shape[1]).step(ids, keep=np.arange(ids.shape[1]))

        found = measure_quality(whole, tokens, window=spec.window, stride=spec.stride).perplexity
    assert found == pytest.approx(measured.perplexity, rel=5e-3 if rounds else 1e-3)


@pytest.mark.parametrize("name", RECIPES)
def test_weight_bytes_are_the_formats_arithmetic(name: str, run: Callable[[str], Run]) -> None:
    result = run(name)
    formats = {site["site"]: Format.parse(site["format"]) for site in result.outcome.sites if site["format"]}
    graph = clone_graph(captured(result.recipe.model_source()))
    for step in result.recipe.passes:
        if isinstance(step, SkipLayers):  # which goes is measured
            gone = {site["site"].split(".")[2] for site in result.outcome.sites if not site["bytes_after"]}
            step = dataclasses.replace(step, remove=None, layers=tuple(gone))
        if isinstance(step, REMOVE):
            step.plan(graph, Context())  # which makes the linears as many and as small as they have to be
    dense = dict(graph.named_parameters())
    shapes = {site: tuple(dense.pop(f"{site}.weight").shape) for site in formats}
    expected = sum(formats[site].packed_bytes(*shape) for site, shape in shapes.items())
    expected += sum(tensor.numel() * tensor.element_size() for tensor in dense.values())
    stored = result.manifest["weight_bytes"]
    assert stored == pytest.approx(expected, rel=0.02)
    assert (result.bundle / "weights.safetensors").stat().st_size == pytest.approx(stored, rel=0.02)
    for site in filter(lambda site: site["format"], result.manifest["sites"]):
        assert site["bytes_after"] == formats[site["site"]].packed_bytes(*shapes[site["site"]])


def test_gptq_is_below_rtn_at_every_site(run: Callable[[str], Run]) -> None:
    *linears, table = run(FULL).outcome.sites
    assert table["site"] == "model.embed_tokens" and table["error_of"] == "weight"
    for site in linears:
        assert site["error_of"] == "output"
        assert site["error"] < site["rtn_error"], site["site"]


ALONE = """
import json, sys
blocked = ("torch", "transformers", "tvm", "compressor", "datasets")
sys.modules.update(dict.fromkeys(blocked))
folder, prompt, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
sys.path.insert(0, folder)
import compressor_runtime
bundle = compressor_runtime.load(folder, threads=1)
ids = bundle.tokenizer.encode(prompt).ids
print(json.dumps({
    "ids": list(ids),
    "new": list(bundle.generate_ids(ids, max_tokens=count)),
    "text": "".join(bundle.generate(prompt, max_tokens=count)),
    "from": compressor_runtime.__file__,
    "imported": [name for name in blocked if sys.modules.get(name) is not None],
}))
"""


def test_the_bundle_alone_generates_what_the_graph_does(run: Callable[[str], Run], tmp_path: Path) -> None:
    """In a process that has neither PyTorch nor TVM's compiler nor this package, with the bundle's own run-time."""
    result, count = run(FULL), 24
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-B", "-c", ALONE, str(result.bundle), PROMPT, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    alone = json.loads(done.stdout)
    assert alone["imported"] == [] and Path(alone["from"]).parent == result.bundle / "compressor_runtime"
    ids, logits = list(alone["ids"]), GraphLogits(result.graph)
    for _ in range(count):
        ids.append(int(torch.as_tensor(logits(np.array([ids])))[0, -1].argmax()))
    assert alone["new"] == ids[-count:]
    assert alone["text"] == "".join(load(result.bundle).generate(PROMPT, max_tokens=count)) != ""


def test_two_runs_give_the_same_bytes(run: Callable[[str], Run], short_reference: Path, tmp_path: Path) -> None:
    name = "gptq_w4a8_g128_x86"
    first, second = run(name).bundle, execute(name, tmp_path / "elsewhere", short_reference).bundle
    for folder in (first, second):
        for name in ("measurements.json", "report.html", "README.md"):
            (folder / name).rename(folder.parent / name)
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    assert [str(file) for file in files if (first / file).read_bytes() != (second / file).read_bytes()] == []


def test_three_bits_cost_the_reference_model_something() -> None:
    """A model that survives 3-bit round to nearest would show nothing."""
    folder = resource("models") / "reference"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8_000_000
    graph, spec = capture(folder), load_for_test(FULL, folder).evaluation
    tokens, _ = load_evaluation(spec.model_copy(update={"tokens": 2048}), None, folder)
    dense = measure_quality(GraphLogits(graph), tokens, window=spec.window, stride=spec.stride)
    graph = Rtn("W3A16_G128", ignore=("lm_head",)).run(graph, Context())
    rounded = measure_quality(GraphLogits(graph), tokens, window=spec.window, stride=spec.stride)
    assert dense.perplexity is not None and rounded.perplexity is not None
    assert dense.perplexity < 20
    assert rounded.perplexity > 1.05 * dense.perplexity


def test_calibration_and_held_out_text_are_apart() -> None:
    recipe = load_recipe(FULL)
    assert recipe.calibration is not None and not recipe.calibration.held_out
    folder = resource("models") / "reference"
    samples = load_samples(recipe.calibration, folder)
    tokens, _ = load_evaluation(recipe.evaluation, samples, folder)
    windows = {tuple(row) for row in samples.ids.unfold(1, 64, 64).reshape(-1, 64).tolist()}
    assert not windows & {tuple(row) for row in tokens[: len(tokens) // 64 * 64].view(-1, 64).tolist()}


# --- other kinds of models, through the Python API


def test_an_encoder(tmp_path: Path, no_speed: None, require_tool: Callable[[str], Path]) -> None:
    require_tool("g++")
    reference = resource("models") / "reference"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=json.loads((reference / "config.json").read_text())["vocab_size"],
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
        transformers.BertModel(config).half().save_pretrained(tmp_path / "bert")
    shutil.copy(reference / "tokenizer.json", tmp_path / "bert")
    (tmp_path / "bert" / "1_Pooling").mkdir()
    (tmp_path / "bert" / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    model = transformers.BertModel.from_pretrained(tmp_path / "bert", dtype=torch.float32).eval()
    recipe = {
        "evaluation": {"text": "python_docs_heldout.txt", "tokens": 128},  # longer than its positions
        "passes": [{"rtn": {"scheme": "W8A16_G32", "targets": "Linear"}}],
        "gates": {"embedding_cosine": "> 0.999"},
        "tune": "off",
    }
    bundle = compressor.compress(tmp_path / "bert", recipe, tmp_path / "bundle")
    assert bundle.model["pooling"] == "cls"  # servers embed so
    ids, mask = np.array([[5, 6, 7, 8], [9, 10, 0, 0]]), np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
    with torch.no_grad():
        expected = model(torch.as_tensor(ids), torch.as_tensor(mask)).last_hidden_state
    kept = mask > 0
    got, wanted = bundle.encode(ids, mask)[kept], expected.numpy()[kept]
    assert np.linalg.norm(got - wanted) < 0.02 * np.linalg.norm(wanted)
    with pytest.raises(UsageError, match=r"bundle: is an encoder, .* compare its embeddings with: --dense"):
        evaluate_path(tmp_path / "bundle", EvaluationSpec(text=("python_docs_heldout.txt",)))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 64), nn.Linear(64, 7)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.relu(self.first(x)))
        return result


def test_a_plain_module(tmp_path: Path, require_tool: Callable[[str], Path]) -> None:
    require_tool("g++")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Perceptron().eval().requires_grad_(False)
    recipe = Recipe.from_dict({"passes": [{"rtn": {"scheme": "W8A16", "targets": "Linear"}}], "tune": "off"})
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    bundle = compressor.compress(module, recipe, tmp_path / "bundle", example=(x,))
    got, expected = bundle.run(x.numpy()), module(x).numpy()
    assert np.linalg.norm(got - expected) < 0.02 * np.linalg.norm(expected)
    assert compressor.load(tmp_path / "bundle").kind == "module"

"""Models with recurrent layers by GPTQ, to bundles that keep their states."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from compressor_selfcheck import compare
from kernel_cases import Program
from tiny_bundle import edit_manifest

from compressor.capture.capture import capture
from compressor.codegen.backend import make_backend
from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.targets.x86 import X86
from compressor.codegen.web.converters.converter import why_unsupported
from compressor.data.text import Samples
from compressor.evaluate.quality import GraphLogits
from compressor.export.bundle import write_bundle
from compressor.export.facts import run_facts
from compressor.graph.model import clone_graph, weight_bytes
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.recipe.recipe import Recipe
from compressor.runtime import Bundle, DamagedBundleError, RequestError, load
from compressor.verify.bundle import _bytes, check_schema
from compressor.verify.independence.check import check_independence

LENGTH = 12
NATIVE_TOLERANCE = 4e-5  # AMX takes 16 of the 24 bits of activations


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(3, families.VOCAB, (2, LENGTH))


def relative(got: Any, expected: Any) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def by_gptq(dense: Any, recipe: Recipe) -> tuple[Any, Context]:
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, families.VOCAB, (4, 16)))
    context = Context(samples=Samples(ids, ids[:0, 0], "0" * 64, "random"))
    return Pipeline(recipe.passes).run(clone_graph(dense), context), context


def recipe_of(model: str) -> Recipe:
    return Recipe.from_dict({"model": model, "passes": [{"gptq": {"scheme": "W4A16_G32"}}], "target": "x86"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, np.ndarray]:
    """LFM2, a convolution's state and attention: the bundle, and its logits by the graph in PyTorch."""
    folder = tmp_path_factory.mktemp("lfm2")
    families.save(folder / "model", *families.RECURRENT["LFM2"], True)
    recipe, dense = recipe_of(str(folder / "model")), capture(folder / "model")
    graph, context = by_gptq(dense, recipe)
    backend = make_backend(recipe.target.build(), None)
    backend.compile(graph, "off", None, lambda _isa: None)
    (folder / "bundle").mkdir()
    independent = check_independence(graph).independent
    assert independent
    written = backend.write(folder / "bundle", graph, independent)
    write_bundle(folder / "bundle", written, run_facts(graph, recipe, context, weight_bytes(dense)))
    return load(folder / "bundle"), GraphLogits(graph)(tokens()).numpy()


def test_a_prompt_and_steps_compute_what_the_graph_does(made: tuple[Bundle, np.ndarray]) -> None:
    bundle, expected = made
    ids, sessions = tokens(), [bundle.session(batch=2), bundle.session(batch=2, capacity=3)]
    prompt = sessions[0].step(ids, np.arange(LENGTH))
    steps = [sessions[1].step(ids[:, :5], np.arange(5)), *(sessions[1].step(ids[:, [i]]) for i in range(5, LENGTH))]
    assert relative(prompt, expected) < NATIVE_TOLERANCE
    assert relative(np.concatenate(steps, axis=1), prompt) < 1e-5
    errors, tolerance = compare(bundle)
    assert max(errors.values()) < tolerance
    assert {site["format"] for site in bundle.manifest["sites"]} == {"W4A16_G32"}


def test_a_session_with_states_goes_back_to_the_beginning_only(made: tuple[Bundle, np.ndarray]) -> None:
    session = made[0].session()
    first = session.step([[5, 6, 7]])
    session.step([[8]])
    session.position = 4  # where it is
    for position in (1, 3):
        with pytest.raises(RequestError, match=f"position={position}: the model's recurrent layers keep no state but"):
            session.position = position
    session.position = 0
    np.testing.assert_array_equal(session.step([[5, 6, 7]]), first)
    session.position = 0
    with pytest.raises(RequestError, match="from 0 to 0"):
        session.position = 3
    with pytest.raises(RequestError, match="states take"):
        made[0].session(batch=10**12)


def test_the_manifest_states_what_a_state_takes(made: tuple[Bundle, np.ndarray], tmp_path: Path) -> None:
    bundle, _ = made
    facts = bundle.manifest["model"]
    assert facts["states"] == [[2, 64]] and facts["state_bytes"] == 4 * 2 * 64 and facts["layers"] == 1
    _bytes(bundle.path, check_schema(bundle.manifest))
    wrong: list[Any] = [[[2, 63]], [[2, 0]], [], [["2"]]]
    for change in ({"state_bytes": 4}, *({"states": shapes} for shapes in wrong)):
        copy = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(bundle.path, copy)
        edit_manifest(copy, lambda manifest, change=change: manifest["model"].update(change))
        with pytest.raises(DamagedBundleError, match="states"):
            load(copy)


def test_a_model_without_any_attention() -> None:
    graph, context = by_gptq(capture(families.make(*families.RECURRENT["Mamba"], True)), recipe_of("Mamba"))
    packed = {record.site.rpartition(".")[2] for record in context.records}
    assert packed == {"in_proj", "out_proj", "lm_head"} and graph.meta["model"].layers == 0
    assert "the target webgpu has no kernels for recurrent layers" in why_unsupported(graph)
    library, ids, expected = compile_graph(graph, X86(), tune="off"), tokens(), GraphLogits(graph)(tokens()).numpy()
    program = Program(graph, library)
    for steps in ([LENGTH], [5, 1, 1, 3, 2]):
        past, begin, found = program.caches(2, 1), 0, []
        for step in steps:
            here = np.ascontiguousarray(ids[:, begin : begin + step])
            found.append(program(here, np.arange(begin, begin + step), np.arange(step), *past))
            begin += step
        assert relative(np.concatenate(found, axis=1), expected) < NATIVE_TOLERANCE

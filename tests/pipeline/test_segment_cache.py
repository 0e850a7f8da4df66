"""Blocks in the cache: found again, never half-written, never taken for something else."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.data.text import Samples
from compressor.errors import CompressorError
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import linear_sites
from compressor.host.digests import digest
from compressor.passes.adaptive_rounding import AdaptiveRounding
from compressor.passes.gptq import Gptq
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.pipeline.resume import Blocks
from compressor.pipeline.segment_cache import SegmentCache

transformers = pytest.importorskip("transformers")


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"a.codes": torch.full((4, 5), 7, dtype=torch.int32), "a.scales": torch.full((3,), value).half()}


def test_a_block_is_found_as_it_was_kept(tmp_path: Path) -> None:
    results = SegmentCache(tmp_path)
    assert results.load("0" * 64) is None
    kept = results.save("0" * 64, "model: rtn", tensors(), [{"site": "a", "error": 0.1}])
    found = results.load("0" * 64)
    assert found is not None
    for block in (kept, found):
        assert block.records == [{"site": "a", "error": 0.1}]
        assert all(torch.equal(block.tensors[name], tensor) for name, tensor in tensors().items())
    assert [(entry.key, entry.label) for entry in results.entries()] == [("0" * 64, "model: rtn")]
    assert not list(tmp_path.glob(".*"))


def test_the_same_block_may_be_kept_twice(tmp_path: Path) -> None:
    for _ in range(2):
        SegmentCache(tmp_path).save("1" * 64, "x", tensors(), [])
    assert [p.name for p in tmp_path.iterdir()] == ["1" * 64]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "garbage"])
def test_a_damaged_block_is_made_again(tmp_path: Path, damage: str) -> None:
    results, key = SegmentCache(tmp_path), "2" * 64
    results.save(key, "x", tensors(), [])
    weights, entry = tmp_path / key / "weights.safetensors", tmp_path / key / "entry.json"
    if damage == "flip":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-3])
    elif damage == "remove":
        weights.unlink()
    else:
        entry.write_bytes(b"\xff[")
    assert results.load(key) is None
    results.save(key, "x", tensors(2.0), [])
    found = results.load(key)
    assert found is not None and torch.equal(found.tensors["a.scales"], tensors(2.0)["a.scales"])


def test_pruning_takes_what_was_not_used_lately_and_mapped_blocks_live_on(tmp_path: Path) -> None:
    results = SegmentCache(tmp_path)
    old, new = results.save("3" * 64, "old", tensors(), []), results.save("4" * 64, "new", tensors(), [])
    past = time.time() - 10 * 86400
    os.utime(tmp_path / ("3" * 64), (past, past))
    assert [entry.label for entry in results.prune(older_than_days=7)] == ["old"]
    assert [entry.label for entry in results.entries()] == ["new"]
    assert [entry.label for entry in results.prune()] == ["new"]
    for block in (old, new):
        assert torch.equal(block.tensors["a.codes"], tensors()["a.codes"])


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for attempt in (SegmentCache.prepare, lambda results: results.save("5" * 64, "x", tensors(), [])):
        with pytest.raises(CompressorError, match=r"cannot be written.*COMPRESS_CACHE_DIR"):
            attempt(SegmentCache(tmp_path / "file"))


def model() -> GraphModule:
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for parameter in built.parameters():
            parameter.data.normal_(0, 0.3)
    return capture(built)


@pytest.fixture(scope="module")
def captured() -> GraphModule:
    return model()


def run(captured: GraphModule, folder: Path | None, *passes: Pass) -> tuple[dict[str, torch.Tensor], Context]:
    ids = torch.randint(0, 60, (16, 16), generator=torch.Generator().manual_seed(0))
    samples = Samples(ids, ids.flatten(), digest(ids.tolist()), "random")
    ctx = Context(samples=samples, results=None if folder is None else SegmentCache(folder), state="the model")
    graph = Pipeline(passes).run(clone_graph(captured), ctx)
    return {name: parameter.detach().clone() for name, parameter in graph.named_parameters()}, ctx


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def plain(ctx: Context) -> list[dict[str, Any]]:
    return [dataclasses.asdict(record) for record in ctx.records]


PASSES = [
    Gptq("W4A16_G32"),
    Gptq("W3A8_ASYM_G32", ignore="lm_head", match_dense=False, true_sequential=False),
    Rtn("W4A16_G32"),
    Rtn("W8A8"),
    AdaptiveRounding("W3A8_G32_STATIC", "re:.*(o|down)_proj", steps=5, observer="output", task_guided=True),
]


@pytest.mark.parametrize("step", PASSES, ids=lambda step: f"{type(step).__name__}-{step.scheme}")
def test_a_second_run_restores_every_block_and_gives_the_same(
    tmp_path: Path, captured: GraphModule, step: Pass
) -> None:
    bare, without = run(captured, None, step)
    first, ctx = run(captured, tmp_path, step)
    again, restored = run(captured, tmp_path, step)
    assert same(bare, first) and same(first, again)
    assert plain(without) == plain(ctx) == plain(restored)
    assert ctx.blocks == restored.blocks == restored.reused > 3 and ctx.reused == 0
    assert restored.stages[1].reused == restored.stages[1].blocks == ctx.blocks
    assert ctx.state == restored.state != "the model"


def test_a_finished_run_again_reads_no_samples(
    tmp_path: Path, captured: GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = run(captured, tmp_path, PASSES[-1])

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("samples run again")

    monkeypatch.setattr("compressor.calibration.segment_runner.SegmentRunner.values", refuse)
    monkeypatch.setattr("compressor.calibration.segment_runner.SegmentRunner.run", refuse)
    assert same(first, run(captured, tmp_path, PASSES[-1])[0])


@pytest.mark.parametrize("step", PASSES, ids=lambda step: f"{type(step).__name__}-{step.scheme}")
@pytest.mark.parametrize("done", [1, 3])
def test_a_run_that_was_cut_off_goes_on_to_the_same_result(
    tmp_path: Path, captured: GraphModule, step: Pass, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, ctx = run(captured, None, step)
    keep, count = Blocks.keep, iter(range(100))

    def cut(self: Blocks, graph: GraphModule, sites: Any) -> None:
        keep(self, graph, sites)
        if next(count) + 1 == done:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Blocks, "keep", cut)
        run(captured, tmp_path, step)
    resumed, after = run(captured, tmp_path, step)
    assert same(whole, resumed) and plain(ctx) == plain(after)
    assert after.reused == done


def test_a_changed_recipe_reuses_what_did_not_change(tmp_path: Path, captured: GraphModule) -> None:
    _, first = run(captured, tmp_path, Rtn("W4A16_G32"))
    _, narrower = run(captured, tmp_path, Rtn("W4A16_G32", ignore="lm_head"))
    assert narrower.reused == narrower.blocks == first.blocks - 1
    _, other = run(captured, tmp_path, Rtn("W4A16_G64"))
    assert other.reused == 0
    _, gptq = run(captured, tmp_path, Gptq("W4A16_G32"))
    _, without_head = run(captured, tmp_path, Gptq("W4A16_G32", ignore="lm_head"))
    assert without_head.reused == without_head.blocks == gptq.blocks - 1
    # A block of GPTQ follows from the blocks before it: nothing after the first change is taken over.
    _, changed = run(captured, tmp_path, Gptq("W4A16_G32", ignore="model.layers.1.mlp"))
    assert changed.reused == 3
    _, two = run(captured, tmp_path, Rtn("W8A8", targets="lm_head"), Gptq("W4A16_G32"))
    assert two.reused == 0, "the graph before the pass was another"


@dataclasses.dataclass(frozen=True)
class Scale(Pass):
    """A pass of somebody else's, whose code says nothing about what it depends on."""

    factor: float

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        for site in linear_sites(graph):
            set_parameter(graph, site.weight_name, graph.get_parameter(site.weight_name) * SECRET[0])
        return graph


SECRET = [2.0]


def test_after_a_foreign_pass_the_contents_decide(tmp_path: Path) -> None:
    _, first = run(model(), tmp_path, Scale(1.0), Rtn("W4A16_G32"))
    _, again = run(model(), tmp_path, Scale(1.0), Rtn("W4A16_G32"))
    assert (first.reused, again.reused) == (0, again.blocks)
    SECRET[0] = 3.0
    _, changed = run(model(), tmp_path, Scale(1.0), Rtn("W4A16_G32"))
    SECRET[0] = 2.0
    assert changed.reused == 0


def test_entries_are_readable_as_json(tmp_path: Path, captured: GraphModule) -> None:
    run(captured, tmp_path, Rtn("W4A16_G32"))
    for entry in SegmentCache(tmp_path).entries():
        content = json.loads((tmp_path / entry.key / "entry.json").read_text())
        assert content["label"] == "LlamaForCausalLM: rtn" and entry.size_bytes > 0

"""Speed of real bundles beside their dense models, when repeats suffice, and what is said about the result."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import compressor.evaluate.comparison
from compressor.errors import CompressorError, UsageError
from compressor.evaluate.comparison import LOOKS, Speed, comparisons, measure_speed
from compressor.evaluate.speed import Worker, bench
from compressor.evaluate.timing import Timing
from compressor.graph.model import ModelInfo
from compressor.host.resources import resource
from compressor.recipe.gates import METRICS, Gate
from compressor.recipe.recipe import Recipe
from compressor.run.job import run_recipe

REFERENCE = resource("models") / "reference"
SIZES = {
    "vocab_size": json.loads((REFERENCE / "config.json").read_text())["vocab_size"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
MODELS: dict[str, Callable[[], Any]] = {
    "decoder": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "encoder": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, require_tool: Callable[[str], Path]) -> Iterator[Path]:
    """Make a tiny decoder and a tiny encoder, each as a Hugging Face folder and as a bundle; not timed yet."""
    require_tool("g++")
    root = tmp_path_factory.mktemp("comparison")
    recipe = Recipe.from_dict(
        {"passes": [{"rtn": {"scheme": "W8A16_G32"}}], "tune": "off", "target": {"x86": {"isa": "avx2"}}}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compressor.run.job.measure_speed", lambda *_: Speed({}, {}))
        for kind, make in MODELS.items():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                make().half().save_pretrained(root / kind)
            shutil.copy(REFERENCE / "tokenizer.json", root / kind)
            run_recipe(recipe, root / f"{kind}_bundle", model=root / kind)
    yield root


def info(kind: Any, source: Path | None) -> ModelInfo:
    return ModelInfo(kind, "tiny", "Tiny", max_positions=32, source=source)


def timed(kind: str) -> set[str]:
    names = {name for name, metric in METRICS.items() if metric.timing} - {"load_s"}
    return names if kind == "decoder" else {"latency_ms"}


@pytest.mark.parametrize("kind", MODELS)
def test_both_models_are_timed_in_pairs(kind: str, made: Path) -> None:
    gates = [Gate.parse("latency_ms", "<= 1000s"), Gate.parse("latency_ms", "<= 1e6x dense")]
    if kind == "encoder":
        gates.append(Gate.parse("load_s", "<= 1000"))
    speed = measure_speed(made / f"{kind}_bundle", info(kind, made / kind), gates, threads=1)
    assert not speed.notes
    both = {f"{prefix}{name}" for name in timed(kind) for prefix in ("", "dense_")}
    assert set(speed.timings) == both | ({"load_s"} if kind == "encoder" else set())
    assert {len(timing.samples) for timing in speed.timings.values()} == {LOOKS[0]}  # decided at the first look
    for name in both:
        assert speed.metrics[name] == speed.timings[name].median > 0
        assert speed.metrics["timings"]["figures"][name]["interval"] == speed.timings[name].interval
    assert set(speed.metrics["timings"]["ratios"]) == timed(kind)
    assert speed.metrics["threads"] == 1 and "dense_threads" not in speed.metrics
    assert speed.metrics["dense_peak_rss_bytes"] > speed.metrics["peak_rss_bytes"] > 10**6  # torch alone takes more
    assert ("bandwidth_fraction" in speed.metrics) == (kind == "decoder")
    json.dumps(speed.metrics, allow_nan=False)


def test_the_figures_of_a_decoder_agree_with_one_another(made: Path) -> None:
    metrics = bench(made / "decoder_bundle", threads=1, prompt_tokens=8, new_tokens=16, repeats=3)
    samples = {name: figure["samples"] for name, figure in metrics["timings"]["figures"].items()}
    assert all(len(figures) == 3 for figures in samples.values()) and metrics["timings"]["ratios"] == {}
    for first_ms, rate in zip(samples["first_token_ms"], samples["prefill_tokens_per_s"], strict=True):
        assert first_ms >= 1e3 * 8 / rate  # opening the sequence comes on top
    for latency_ms, rate in zip(samples["latency_ms"], samples["decode_tokens_per_s"], strict=True):
        assert latency_ms <= 2 * 1e3 / rate  # at least half of the 16 steps take the median or more


def test_a_dense_model_that_does_not_load_costs_its_figures_only(made: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(made / "encoder", tmp_path / "broken"))
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    speed = measure_speed(made / "encoder_bundle", info("encoder", broken), threads=1)
    assert set(speed.timings) == {"latency_ms"} and not any(name.startswith("dense") for name in speed.metrics)
    (note,) = speed.notes
    assert note.startswith("the dense model's speed was not measured: bench: ") and str(broken) in note


def test_the_dense_model_of_a_quantised_checkpoint_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path | None] = []

    def measure(_worker: Any, _bundle: Path, dense: Path | None, _gates: Any) -> Speed:
        asked.append(dense)
        return Speed({"latency_ms": 1.0}, {})

    monkeypatch.setattr("compressor.evaluate.comparison._measure", measure)
    speed = measure_speed(tmp_path, replace(info("decoder", tmp_path), unpacked_bytes=1))
    assert asked == [None] and speed.metrics == {"latency_ms": 1.0}
    assert speed.notes == ["the dense model's speed was not measured: PyTorch does not load its checkpoint, which is "
                           "quantised, alone"]  # fmt: skip


def test_a_bundle_that_does_not_load_is_an_error(made: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(made / "encoder_bundle", tmp_path / "broken"))
    (broken / "model.so").unlink()
    with pytest.raises(CompressorError, match=r"bench: .*model\.so: missing"):
        measure_speed(broken, info("encoder", made / "encoder"), threads=1)
    with pytest.raises(UsageError, match="33 tokens are more than the model's 32 positions"):
        bench(made / "encoder_bundle", prompt_tokens=33, threads=1)


def test_a_child_that_is_killed_is_an_error_and_none_is_left(made: Path) -> None:
    with Worker(made / "encoder_bundle", threads=1, prompt_tokens=4, new_tokens=1) as worker:
        assert worker.repeat()["latency_ms"] > 0
        os.kill(worker._process.pid, signal.SIGKILL)
        for ask in (worker.repeat, worker.finish):
            with pytest.raises(CompressorError, match="bench: the process was ended by signal 9"):
                ask()
    with Worker(made / "encoder_bundle", threads=1, prompt_tokens=4, new_tokens=1) as worker:
        process = worker._process
    assert process.poll() == 0  # it ended by itself


def test_the_speed_of_a_plain_module_is_not_measured() -> None:
    speed = measure_speed(Path("nowhere"), info("module", None))
    assert not speed.metrics and "speed was not measured" in speed.notes[0]


# --- when repeats suffice


def repeats_until(samples: Callable[[int], float], gate: str) -> int:
    taken: list[float] = []
    found = compressor.evaluate.comparison._until_decided(
        lambda: taken.append(samples(len(taken))),
        lambda: {"latency_ms": Timing(tuple(taken), len(LOOKS))},
        [Gate.parse("latency_ms", gate), Gate.parse("weight_bytes", "<= 1")],
    )
    assert found["latency_ms"].samples == tuple(taken)
    return len(taken)


def test_repeats_go_on_until_the_gates_are_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    assert repeats_until(lambda i: 1 + i % 3, "<= 4") == 7
    assert repeats_until(lambda i: 5.0 if i == 2 else 1.0, "<= 4") == 14  # one disturbance is no verdict
    assert repeats_until(lambda i: 1 + i % 3, "<= 2") == 28  # the limit is the median: no number of repeats decides
    monkeypatch.setattr("compressor.evaluate.comparison._PATIENCE_S", 0.0)
    assert repeats_until(lambda i: 1 + i % 3, "<= 4") == 3


# --- what is said


def test_what_is_larger_or_slower_is_said_with_both_figures() -> None:
    metrics = {
        "weight_bytes": 1200, "dense_weight_bytes": 1000, "bundle_bytes": 1000,
        "peak_rss_bytes": 5, "dense_peak_rss_bytes": 4,
        "prefill_tokens_per_s": 10.0, "dense_prefill_tokens_per_s": 12.5,
        "decode_tokens_per_s": 5.0, "dense_decode_tokens_per_s": 5.5,
        "latency_ms": 9.0, "dense_latency_ms": 8.0, "prefill_spread": 0.9,
    }  # fmt: skip
    timings = {
        "prefill_tokens_per_s": Timing((10.0,) * 7),
        "dense_prefill_tokens_per_s": Timing((12.5,) * 7),
        "decode_tokens_per_s": Timing((4.0, 4.2, 4.6, 5.0, 5.1, 5.4, 6.0)),
        "dense_decode_tokens_per_s": Timing((5.5,) * 7),
    }
    assert comparisons(metrics, timings) == [
        "the bundle's weights take 1,200 bytes, no less than the dense model's: 1,000",
        "all files of the bundle take 1,000 bytes, no less than the dense model's weights: 1,000",
        "running the bundle takes 5 bytes, no less than the dense model in PyTorch: 4",
        "timings varied by 90% between repeats: the machine is busy, and speeds are uncertain",
        "prefill is slower than the dense model in PyTorch: 10 against 12.5 tokens/s "
        "(0.8x to 0.8x dense at 95% confidence)",
        "decode is slower than the dense model in PyTorch: 5 against 5.5 tokens/s "
        "(0.727x to 1.09x dense at 95% confidence, which may be chance)",
    ]


def test_an_encoder_is_compared_by_its_latency() -> None:
    sizes = {"weight_bytes": 1, "dense_weight_bytes": 9, "bundle_bytes": 2}
    assert comparisons({**sizes, "latency_ms": 3.0, "dense_latency_ms": 4.0}, {}) == []
    assert comparisons({**sizes, "latency_ms": 4.0, "dense_latency_ms": 3.0}, {}) == [
        "a forward call is slower than the dense model in PyTorch: 4 against 3 ms"
    ]

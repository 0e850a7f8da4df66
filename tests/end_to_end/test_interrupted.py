"""Whole runs that are killed, find no room, or come again: the same bundle in the end, and nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from own_caches import with_prices
from tokenizers import Tokenizer, models, pre_tokenizers
from warm import WarmCommand, WarmRun, warm_command

from compressor.errors import CompressorError
from compressor.run.native import _check_room

VOCABULARY = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of two layers, a text, and a recipe that calibrates."""
    root = tmp_path_factory.mktemp("interrupted")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(root / "model")
    tokenizer = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCABULARY)}, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(root / "model" / "tokenizer.json"))
    (root / "text.txt").write_text(" ".join(f"<{i * i % VOCABULARY}>" for i in range(2000)))
    (root / "recipe.yaml").write_text(
        "model: model\n"
        "calibration: {text: text.txt, samples: 8, sequence_length: 32}\n"
        "evaluation: {text: text.txt, tokens: 64}\n"
        "passes:\n  - gptq: {scheme: W4A16_G32, ignore: [lm_head]}\n"
        'tune: "off"\n'
        "target: {x86: {isa: avx2}}\n"  # the quickest to generate
    )
    return root


Start = Callable[..., WarmRun]


@pytest.fixture(scope="module")
def command() -> Iterator[WarmCommand]:
    with warm_command(os.environ) as command:
        yield command


@pytest.fixture(scope="module")
def start(command: WarmCommand, folder: Path) -> Start:
    """Begin a run in a process of its own, with all of the job but kernels unless it is to have them."""

    def begin(
        output: Path, cache: Path, has_kernels: bool = False, more: Sequence[str] = (), **options: Any
    ) -> WarmRun:
        target = () if has_kernels else ("--target", "null")
        arguments = ["run", str(folder / "recipe.yaml"), "-o", str(output), "--json", *target, *more]
        environment = {**os.environ, "COMPRESS_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
        return command.start(arguments, environment, **options)

    return begin


def finish(child: WarmRun) -> dict[str, Any]:
    out, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors
    content: dict[str, Any] = json.loads(out)
    return content


def debris(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.rglob(".*.partial")]


def blocks(cache: Path) -> set[tuple[str, str]]:
    """Return names and hashes of the compressed weights that a cache keeps."""
    entries = cache.glob("results/[0-9a-f]*/entry.json")
    return {(entry.parent.name, json.loads(entry.read_bytes())["sha256"]) for entry in entries}


@pytest.fixture(scope="module")
def undisturbed(start: Start, folder: Path, own_cache: Path) -> bytes:
    """Return the manifest of a bundle that nothing happened to; its weights are in the session's cache."""
    content = finish(start(folder / "undisturbed", with_prices(own_cache)))
    assert [stage["reused"] for stage in content["passes"]] == [0, 0]
    return (folder / "undisturbed" / "manifest.json").read_bytes()


def test_a_killed_run_goes_on_to_the_same_bundle(
    start: Start, undisturbed: bytes, own_cache: Path, tmp_path: Path
) -> None:
    output, cache = tmp_path / "out", with_prices(tmp_path / "cache")
    child = start(output, cache, session=True)
    deadline = time.monotonic() + 120
    while not list(cache.glob("results/[0-9a-f]*/entry.json")):  # the first block is done
        assert child.poll() is None and time.monotonic() < deadline, child.communicate()
        time.sleep(0.002)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    assert not output.exists()
    content = finish(start(output, cache))
    assert 1 <= content["passes"][1]["reused"] <= content["passes"][1]["blocks"] == 4
    assert any("finished by an earlier run" in note for note in content["notes"])
    assert (output / "manifest.json").read_bytes() == undisturbed
    assert len(blocks(cache)) == 4 and blocks(cache) <= blocks(own_cache)
    assert not debris(tmp_path)


def test_a_run_again_takes_over_every_block(start: Start, undisturbed: bytes, own_cache: Path, tmp_path: Path) -> None:
    content = finish(start(tmp_path / "out", own_cache))
    assert content["passes"][1]["reused"] == content["passes"][1]["blocks"] == 4
    assert (tmp_path / "out" / "manifest.json").read_bytes() == undisturbed
    assert not {"seconds", "gptq"} & set(content["predictions"]), "times are compared where all was done anew"


def test_a_disk_without_room_is_one_message_and_leaves_nothing(
    start: Start, undisturbed: bytes, tmp_path: Path, require_tool: Callable[[str], Path]
) -> None:
    """A limit on the size of files stands in for the disk: too little for a block, then for the bundle's libraries."""
    require_tool("g++")
    output, cache = tmp_path / "out", with_prices(tmp_path / "cache")
    for room_bytes, has_kernels in ((10_000, False), (1_000_000, True)):
        child = start(output, cache, has_kernels, file_bytes=room_bytes)
        out, errors = child.communicate(timeout=300)
        assert child.returncode == json.loads(out)["error"]["exit_code"] == 5
        assert "Traceback" not in errors
        assert [line for line in errors.splitlines() if line.startswith("error: ")]
        assert not output.exists() and not debris(tmp_path)
    finish(start(output, cache))
    assert (output / "manifest.json").read_bytes() == undisturbed


def test_too_little_room_for_temporary_files_is_said_before_llvm_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.run.native.shutil.disk_usage", lambda _: SimpleNamespace(free=10**6))
    with pytest.raises(CompressorError, match=r"temporary files has 1\.0 MB left.* set TMPDIR"):
        _check_room(tmp_path / "scratch")


STAGES = ("gptq", "compile", "evaluate")
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.mark.parametrize(("stage", "number"), list(zip(STAGES, SIGNALS, strict=True)))
def test_a_signal_in_any_stage_ends_a_run_with_one_line(
    stage: str, number: int, start: Start, tmp_path: Path, require_tool: Callable[[str], Path]
) -> None:
    require_tool("g++")
    report, output = tmp_path / "report.json", tmp_path / "out"
    options = ["--report", str(report)]
    child = start(output, with_prices(tmp_path / "cache"), stage != "gptq", more=options)
    lines = []
    for line in child.stderr:
        lines.append(line)
        if f"] {stage} " in line:
            break
    child.send_signal(number)
    out, rest = child.communicate(timeout=60)
    assert child.returncode == SIGNALS[signal.Signals(number)], "".join(lines) + rest
    assert json.loads(out)["error"]["exit_code"] == child.returncode
    said = [line for line in rest.splitlines() if not line.startswith("[")]
    assert said == ["interrupted; finished blocks are kept: the same command goes on from there"]
    assert not output.exists() and not debris(tmp_path)
    assert json.loads(report.read_bytes())["exit_code"] == child.returncode


def test_a_closed_terminal_ends_a_run_and_its_report_says_so(start: Start, tmp_path: Path) -> None:
    report, output = tmp_path / "report.json", tmp_path / "out"
    terminal, end = pty.openpty()
    more = ["--report", str(report)]
    child = start(output, with_prices(tmp_path / "cache"), more=more, terminal=end)
    os.close(end)
    said = b""
    while b"gptq" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)
    assert child.wait(timeout=60) == SIGNALS[signal.SIGHUP]
    stated = json.loads(report.read_bytes())
    assert (stated["exit_code"], stated["error_type"]) == (child.returncode, "Interrupted")
    assert not output.exists() and not debris(tmp_path)

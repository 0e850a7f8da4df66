"""The C++ runner against the Python run-time: the same kernels, so the same bits; the same refusals."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressor_runtime import PIECE_BYTES, RequestError, load, sha256
from compressor_runtime.generation import Depth, checked_sampler
from native_runner import POSITIONS, PROMPT, Runner, beside, edit_manifest, refused, texts_of


@pytest.fixture(scope="module")
def uneven_bundle(write_llama: Callable[..., Path]) -> Path:
    """Its layers have unlike heads of keys, widths, and linears in their place."""
    from uneven_models import Uneven

    from compressor.passes.rtn import Rtn

    uneven = Uneven(("kv_heads:1", "width:0.5", "linear", "linear", "as_is", "as_is"))
    return write_llama(uneven, Rtn("W8A16"), layers=3)


class LeaveEarly:
    """Let tokens leave behind the first block or the second."""

    def run(self, graph: Any, ctx: Any) -> Any:
        from compressor.graph.model import ExitInfo

        exits = ExitInfo((1, 2), (0.5, 0.5), window=3, of=3)
        graph.meta["model"] = dataclasses.replace(graph.meta["model"], exits=exits)
        return graph


class Predict:
    """Add copies of the first layer that predict caches, with random predictors."""

    def run(self, graph: Any, ctx: Any) -> Any:
        from compressor.graph.kept_tokens.predicted_caches import add_prediction
        from compressor.graph.rewrite import set_parameter

        generator = torch.Generator().manual_seed(0)
        for name in add_prediction(graph, 1):
            set_parameter(graph, name, torch.randn(graph.get_parameter(name).shape, generator=generator) / 8)
        self.graph = graph
        return graph


def noting(tokens: Generator[int, None, str], reasons: list[str]) -> Iterator[int]:
    """Yield tokens, and note why there are no more."""
    reasons.append((yield from tokens))


def test_prompts_leave_predicted_keys_and_values(
    write_llama: Callable[..., Path], runner: Runner, tmp_path: Path
) -> None:
    """Both run-times compute what the graph does: the model's last token behind predicted rows of the others."""
    from compressor_runtime.depth.prompts import read_prompt

    from compressor.graph.kinds.draft_heads import without_heads
    from compressor.passes.rtn import Rtn
    from compressor.training.device import Device
    from compressor.training.objectives.prompts import continued, rows_of
    from compressor.training.trainable import TrainableGraph

    change = Predict()
    folder = write_llama(change, Rtn("W4A16_G32"), layers=2)
    python, ids = load(folder, threads=1), torch.tensor([PROMPT, PROMPT[::-1]])
    with torch.no_grad():
        outputs = TrainableGraph(change.graph, (), rows_of(change.graph)[:1])(ids)
        rows = [each[:, :, : len(PROMPT) - 1] for each in outputs.hidden[0].unbind(0)]
        wanted = continued(without_heads(change.graph), ids, rows, Device())[:, 0].numpy()
    found = read_prompt(python.session(2, 1), ids.numpy())[:, 0]  # the caches grow
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    assert abs(found - outputs.last[:, -1].numpy()).max() > 0.01  # the model itself says something else
    with pytest.raises(RequestError, match="the model knows 0 to 63"):
        read_prompt(python.session(), [[1, 64]])
    expected = list(python.generate_ids(PROMPT, max_tokens=12))
    done = runner(folder, PROMPT, "--max-tokens", 12, "--threads", 1, "--logits", tmp_path / "logits")
    assert done.stdout == ",".join(map(str, expected)) + "\n"
    first = np.fromfile(tmp_path / "logits", np.float32)
    assert np.array_equal(first, read_prompt(python.session(), [PROMPT])[0, -1])
    texts = [list(python.generate_ids(prompt, max_tokens=12)) for prompt in (PROMPT, PROMPT[::-1])]
    assert texts_of(runner(folder, PROMPT, *beside([PROMPT[::-1]]), "--max-tokens", 12)) == texts
    edit_manifest(folder, lambda manifest: manifest["model"].update(predicts=2))
    refused(runner(folder, PROMPT), 4, "predicts")


def test_tokens_leave_early_as_in_python(write_llama: Callable[..., Path], runner: Runner) -> None:
    """Compare ids, blocks and heads with Python's: exits that take some or all tokens, and texts that are given up."""
    from compressor.passes.rtn import Rtn

    folder = write_llama(LeaveEarly(), Rtn("W8A8"), speculates=True, layers=3)
    whole = runner(folder, PROMPT, "--max-tokens", 60, "--speculate", "lookup")  # verified by all blocks
    seen = []
    for thresholds, give_up in (([0.5, 0.7], 0.0), ([2.0, 0.6], 0.0), ([0.0, 0.0], 0.0), ([2.0, 2.0], 0.3)):
        exits = {"thresholds": thresholds, "give_up": give_up}
        edit_manifest(folder, lambda manifest, exits=exits: manifest["model"]["exits"].update(exits))
        depth, reasons = Depth(3), list[str]()
        tokens = load(folder, threads=1).continued(PROMPT, 60, checked_sampler(0.0, 0, 1.0, None), [], depth)
        expected = list(noting(tokens, reasons))
        done = runner(folder, PROMPT, "--max-tokens", 60, "--threads", 1)
        assert done.stdout == ",".join(map(str, expected)) + "\n", thresholds
        assert done.stderr == f"{depth}\n"
        seen.append((reasons[0], round(depth.blocks_per_token, 2)))
        tokens = load(folder, threads=1).continued([7], 60, checked_sampler(0.0, 0, 1.0, None), [], depth)
        expected = list(noting(tokens, reasons))
        both = runner(folder, PROMPT, *beside([[7]]), "--max-tokens", 60)
        assert both.stdout == done.stdout + ",".join(map(str, expected)) + "\n" and both.stderr == f"{depth}\n"
        off = runner(folder, PROMPT, "--max-tokens", 60, "--speculate", "lookup")
        assert off.stdout == whole.stdout and "verifications" in off.stderr
    assert len(set(seen)) == 4 and [reason for reason, _ in seen] == ["length"] * 3 + ["given_up"], seen
    edit_manifest(folder, lambda manifest: manifest["model"].update(speculate="recycle"))
    assert runner(folder, PROMPT, "--max-tokens", 60).stdout == whole.stdout, "the text of drafts is all blocks'"
    assert runner(folder, PROMPT, "--max-tokens", 60, "--speculate", "off").stderr == done.stderr
    edit_manifest(folder, lambda manifest: manifest["model"]["exits"].update(blocks=[2, 1]))
    refused(runner(folder, PROMPT), 4, "`exits`")


@pytest.mark.parametrize(("which", "threads"), [("bundle", 1), ("bundle", 2), ("packed_bundle", 2)])
def test_ids_and_logits_are_those_of_the_python_run_time(
    request: pytest.FixtureRequest, runner: Runner, tmp_path: Path, which: str, threads: int
) -> None:
    bundle = request.getfixturevalue(which)
    python = load(bundle, threads=threads)
    expected = list(python.generate_ids(PROMPT, max_tokens=POSITIONS))
    assert len(expected) == POSITIONS - len(PROMPT) + 1  # over the first 256 new tokens: the caches have grown
    done = runner(bundle, PROMPT, "--max-tokens", POSITIONS, "--threads", threads, "--logits", tmp_path / "logits")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ",".join(map(str, expected)) + "\n"
    logits = np.fromfile(tmp_path / "logits", np.float32)
    assert np.array_equal(logits, python.session().step([PROMPT])[0, -1])


def test_layers_that_are_not_alike_run_as_in_python(runner: Runner, uneven_bundle: Path, tmp_path: Path) -> None:
    python = load(uneven_bundle, threads=1)
    done = runner(uneven_bundle, PROMPT, "--max-tokens", 12, "--threads", 1, "--logits", tmp_path / "logits")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ",".join(map(str, python.generate_ids(PROMPT, max_tokens=12))) + "\n"
    assert np.array_equal(np.fromfile(tmp_path / "logits", np.float32), python.session().step([PROMPT])[0, -1])


def test_generation_ends_before_an_end_of_sequence(runner: Runner, copy: Path) -> None:
    ids = [int(i) for i in runner(copy, PROMPT, "--max-tokens", 20).stdout.split(",")]
    end = next(i for i in range(1, 20) if ids[i] not in ids[:i])
    edit_manifest(copy, lambda manifest: manifest["model"].update(eos_ids=[ids[end]]))
    assert runner(copy, PROMPT, "--max-tokens", 20).stdout == ",".join(map(str, ids[:end])) + "\n"
    assert runner(copy, PROMPT, "--max-tokens", 0).stdout == "\n"


def test_requests_that_the_model_cannot_serve(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    refused(runner(bundle, [1, 64]), 2, "token ids from 1 to 64: the model knows 0 to 63")
    refused(runner(bundle, [-1]), 2, "token ids from -1 to -1")
    refused(runner(bundle, []), 2, "no token ids")
    refused(runner(bundle, [1 << 63]), 2, "'9223372036854775808' is no whole number")
    refused(runner(bundle, [1] * (POSITIONS + 1)), 2, "the model ends at 300 positions")
    refused(runner(bundle, [1], "--threads", 0), 2, "--threads 0")
    refused(runner(bundle, [1], "--max-tokens", -1), 2, "--max-tokens -1")
    refused(runner(bundle, [1], "--max-token", 1), 2, "unknown argument '--max-token'")
    refused(runner(bundle, [1], "--logits"), 2, "--logits: no value")
    refused(runner(bundle, [1], "--logits", tmp_path), 1, "cannot be written")


def test_folders_that_are_no_bundles(runner: Runner, tmp_path: Path) -> None:
    refused(runner(tmp_path / "nothing", [1]), 1, "no such folder")
    refused(runner(tmp_path, [1]), 1, "not a bundle: it has no manifest.json")


@pytest.mark.parametrize("name", ["weights.safetensors", "lib/libtvm_runtime.so", "compressor_runtime.py"])
def test_a_damaged_file_is_found_before_anything_is_used(runner: Runner, copy: Path, name: str) -> None:
    whole = (copy / name).read_bytes()
    (copy / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(runner(copy, [1]), 4, name, "its SHA-256 is not the manifest's")
    (copy / name).write_bytes(whole[:-1])
    refused(runner(copy, [1]), 4, name, f"{len(whole) - 1} bytes in place of {len(whole)}")
    (copy / name).unlink()
    refused(runner(copy, [1]), 4, name, "missing")
    (copy / name).symlink_to("/etc/passwd")
    refused(runner(copy, [1]), 4, name, "leads outside the bundle")


def test_a_large_file_is_checked_by_its_pieces(runner: Runner, copy: Path) -> None:
    content = bytearray(2 * PIECE_BYTES + 7)
    (copy / "large").write_bytes(content)
    pieces = [sha256(copy / "large", start, start + PIECE_BYTES) for start in range(0, len(content), PIECE_BYTES)]

    def run(threads: int = 2, **entry: object) -> subprocess.CompletedProcess[str]:
        entry = {"bytes": len(content), "sha256": "", "pieces": pieces} | entry
        edit_manifest(copy, lambda manifest: manifest["files"].update(large=entry))
        return runner(copy, [1], "--max-tokens", 1, "--threads", threads)

    assert run(1).returncode == run(2).returncode == 0
    refused(run(pieces=pieces[:2]), 4, "`pieces` of large: 2 of them, 33554439 bytes have 3 of 16777216")
    refused(run(pieces=[*pieces, ""]), 4, "`pieces` of large: 4 of them")
    refused(run(pieces=[1, 2, 3]), 4, "an item of `pieces` is of another type")
    refused(run(pieces=None), 4, "`pieces` is missing or of another type")
    for place, where in ((0, "0 to 16777216"), (-8, "16777216 to 33554432"), (-1, "33554432 to 33554439")):
        content[place] ^= 1
        (copy / "large").write_bytes(content)
        for threads in (1, 2):
            refused(run(threads), 4, f"large: its SHA-256 is not the manifest's (bytes {where})")
        content[place] ^= 1


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda m: m.update(schema_version=3), 1, "schema version 3"),
        (lambda m: m.update(format="\x1b[2J"), 1, "not a Compressor bundle"),
        (lambda m: m["cpu_features"].append("avx9000\n"), 1, "this CPU lacks avx9000 "),
        (lambda m: m.update(kind="encoder"), 2, "holds a encoder"),
        (lambda m: m["files"].pop("model.so"), 4, "does not list model.so"),
        (lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": ""}}), 4, "leads outside the bundle"),
        (lambda m: m["model"].update(layers="1"), 4, "`layers` is missing or of another type"),
        (lambda m: m["model"].update(layers=1 << 40), 4, "sizes of `model` cannot be"),
        (lambda m: m["model"].update(vocab_size=65), 4, "`vocab_size` exceeds the rows of every table"),
        (
            lambda m: m["model"].update(layers=2, cache_bytes_per_token=2 * m["model"]["cache_bytes_per_token"]),
            1,
            "does not take",
        ),
        (lambda m: m["parameter_types"][0].update(shape=[1]), 4, "is not of the type and shape"),
        (lambda m: m["parameters"].append("x"), 4, "`parameters`"),
        (lambda m: m["model"].update(speculate=1), 4, "`speculate` is missing or of another type"),
        (lambda m: m.update(entries={"main": [0]}), 4, "`verify` is missing"),
        (
            lambda m: m.update(entries={"main": [0], "verify": [999]}),
            4,
            "`entries` names parameters that are not there",
        ),
        (lambda m: m.update(libraries=[]), 4, "manifest.json: `libraries` is empty; copy the bundle again"),
        (lambda m: m.update(libraries=None), 4, "`libraries` is missing or of another type"),
    ],
)
def test_manifests_that_are_wrong(runner: Runner, copy: Path, change: Any, code: int, words: str) -> None:
    edit_manifest(copy, change)
    refused(runner(copy, [1]), code, words)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": ' * 20000, '{"a": 1, "a": 2}', '{"a": "\\', "\x00"])
def test_manifests_that_are_no_manifests(runner: Runner, copy: Path, text: str) -> None:
    (copy / "manifest.json").write_text(text)
    assert runner(copy, [1]).returncode in (1, 4)


@pytest.mark.parametrize(
    "header",
    [
        b"\xff" * 8,
        b"",
        b'{"a": {"dtype": "F32", "shape": [1, 4294967296, 4294967296], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}',
        b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}',
        b'{"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        b'{"a": 1}',
    ],
)
def test_weights_that_the_hashes_cannot_help_with(runner: Runner, copy: Path, header: bytes) -> None:
    weights = copy / "weights.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4) if header != b"\xff" * 8 else header)
    entry = {"bytes": weights.stat().st_size, "sha256": sha256(weights)}
    edit_manifest(copy, lambda manifest: manifest["files"].update({"weights.safetensors": entry}))
    refused(runner(copy, [1]), 4, "weights.safetensors")

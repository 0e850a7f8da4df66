"""The C++ runner against the Python run-time: the same kernels, so the same bits; the same refusals."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressor_runtime import PIECE_BYTES, RequestError, load, sha256
from compressor_runtime.generation import Depth, checked_sampler
from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.kinds.lookup import Lookup
from compressor_runtime.speculation.pace import Always

SOURCE = Path(__file__).resolve().parents[1] / "export" / "native"
POSITIONS = 300
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]  # a full tile of 16 tokens, and a rest

Runner = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, require_tool: Callable[[str], Path]) -> Iterator[Runner]:
    """``runner(bundle, ids, *arguments)`` is the finished process.  It is built while the first bundle is made."""
    cmake = str(require_tool("cmake"))
    require_tool("g++")
    folder = tmp_path_factory.mktemp("native")
    options = [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"]

    def build() -> Path:
        for command in (["-S", str(SOURCE), "-B", str(folder), *options], ["--build", str(folder)]):
            done = subprocess.run([cmake, *command], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "warning" not in done.stderr, done.stderr
        return folder / "compressor_run"

    with ThreadPoolExecutor(1) as pool:
        built = pool.submit(build)

        def run(bundle: Path, ids: list[int], *arguments: object) -> subprocess.CompletedProcess[str]:
            command = [str(built.result()), str(bundle), "--ids", ",".join(map(str, ids)), *map(str, arguments)]
            return subprocess.run(command, capture_output=True, text=True, timeout=60)

        yield run


@pytest.fixture(scope="module")
def write_llama(
    tmp_path_factory: pytest.TempPathFactory,
    random_llama: Callable[..., Any],
    write_module: Callable[[Any, Any, int, Path], Path],
) -> Callable[..., Path]:
    """``write_llama(pass, ...)`` is the bundle of a Llama of one layer, whose linears all share one kernel."""
    from compressor.capture.capture import capture
    from compressor.graph.model import weight_bytes
    from compressor.pipeline.context import Context

    def write(*passes: Any, speculates: bool = False, layers: int = 1) -> Path:
        sizes = {"vocab_size": 64, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 2}
        graph = capture(random_llama(**sizes, max_position_embeddings=POSITIONS, initializer_range=0.3))
        # It goes on to the last position.
        graph.meta["model"] = dataclasses.replace(graph.meta["model"], eos_ids=(), speculates=speculates)
        context, dense_weight_bytes = Context(), weight_bytes(graph)
        for step in passes:
            graph = step.run(graph, context)
        return write_module(graph, context, dense_weight_bytes, tmp_path_factory.mktemp("native-bundle"))

    return write


@pytest.fixture(scope="module")
def bundle(write_llama: Callable[..., Path]) -> Path:
    from compressor.passes.rtn import Rtn

    return write_llama(Rtn("W4A16_G32"))


@pytest.fixture(scope="module")
def packed_bundle(write_llama: Callable[..., Path]) -> Path:
    """Its caches are packed, its prompts take AMX where the CPU has it, and it verifies drafted tokens."""
    from compressor.passes.kv_cache import KvCache
    from compressor.passes.rtn import Rtn

    return write_llama(Rtn("W4A8_G32"), KvCache("INT8"), speculates=True)


@pytest.fixture(scope="module")
def uneven_bundle(write_llama: Callable[..., Path]) -> Path:
    """Its layers have unlike heads of keys, widths, and linears in their place."""
    from uneven_models import Uneven

    from compressor.passes.rtn import Rtn

    uneven = Uneven(("kv_heads:1", "width:0.5", "linear", "linear", "as_is", "as_is"))
    return write_llama(uneven, Rtn("W8A16"), layers=3)


class AddHeads:
    """Add heads that draft, which guess nothing: their weights are zero."""

    def run(self, graph: Any, ctx: Any) -> Any:
        from compressor.graph.kinds.draft_heads import add_heads
        from compressor.graph.rewrite import set_parameter

        for name in add_heads(graph, 1, 32):
            set_parameter(graph, name, torch.zeros_like(graph.get_parameter(name), device="cpu"))
        return graph


@pytest.fixture(scope="module")
def planes_bundle(write_llama: Callable[..., Path]) -> Path:
    """Codes of some linears lie in two planes, and its `verify` gives hidden states as well."""
    from compressor.passes.rtn import Rtn

    folder = write_llama(AddHeads(), Rtn("W8A8_G32_P4", targets="re:.*mlp.*"), speculates=True)
    edit_manifest(folder, lambda manifest: manifest["model"].update(speculate="planes"))
    return folder


class DraftFirst:
    """Let drafts be those of the first block."""

    def run(self, graph: Any, ctx: Any) -> Any:
        graph.meta["model"] = dataclasses.replace(graph.meta["model"], first_blocks=1)
        return graph


@pytest.fixture(scope="module")
def exit_bundle(write_llama: Callable[..., Path]) -> Path:
    """Return a bundle whose first block of two drafts, with packed caches."""
    from compressor.passes.kv_cache import KvCache
    from compressor.passes.rtn import Rtn

    folder = write_llama(DraftFirst(), Rtn("W8A8"), KvCache("INT8"), speculates=True, layers=2)
    edit_manifest(folder, lambda manifest: manifest["model"].update(speculate="exit"))
    return folder


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


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def noting(tokens: Generator[int, None, str], reasons: list[str]) -> Iterator[int]:
    """Yield tokens, and note why there are no more."""
    reasons.append((yield from tokens))


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert (done.returncode, done.stdout) == (code, ""), done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


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
        off = runner(folder, PROMPT, "--max-tokens", 60, "--speculate", "lookup")
        assert off.stdout == whole.stdout and "verifications" in off.stderr
    assert len(set(seen)) == 4 and [reason for reason, _ in seen] == ["length"] * 3 + ["given_up"], seen
    edit_manifest(folder, lambda manifest: manifest["model"].update(speculate="recycle"))  # which this runner lacks
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


def lookups(text: list[int]) -> list[int]:
    """Return what followed the longest match of a text's last tokens, by the Python run-time's index."""
    index = Lookup(Acceptance(lambda source: 1.0))
    index.extend(text)
    matches = index.matches()
    return text[matches[0][1] :] if matches else []


@dataclasses.dataclass(frozen=True)
class Run:
    """A prompt whose plain continuation agrees, behind three tokens, with what its lookup drafts.

    The first verification comes there whatever the times: after two steps, by the guess of what a row costs.
    """

    prompt: list[int]
    expected: list[int]
    accepted: int


@pytest.fixture(scope="module")
def repeating(packed_bundle: Path) -> Run:
    python = load(packed_bundle, threads=1)
    for turn in range(len(PROMPT)):
        start = PROMPT[turn:] + PROMPT[:turn]
        text = [*start, *python.generate_ids(start, max_tokens=POSITIONS)]
        for place in range(len(start) + 3, len(text) - 20):
            agreeing = [a == b for a, b in zip(lookups(text[:place]), text[place:], strict=False)]
            count = agreeing.index(False) if False in agreeing else 0
            # So few that the wrong token behind them is drafted too; all differ.
            if 2 < count < 6 and len(set(text[place - 3 : place + count])) == count + 3:
                return Run(text[: place - 3], text[place - 3 :], count)
    raise AssertionError("no prompt's continuation repeats itself")


def figures(done: subprocess.CompletedProcess[str], kind: str = "lookup") -> list[float]:
    """Return verifications, tokens drafted, accepted and of a verification, and plain steps."""
    words = f"{kind}: N verifications, N tokens drafted, N accepted, N tokens a verification, N plain steps, N tokens/s"
    found = re.fullmatch(words.replace("N", r"([\d.]+)") + "\n", done.stderr)
    assert found, done.stderr
    return [float(figure) for figure in found.groups()[:5]]


def ids_of(done: subprocess.CompletedProcess[str]) -> list[int]:
    assert done.returncode == 0, done.stderr
    return [int(token) for token in done.stdout.split(",")]


def test_drafted_tokens_change_no_token(runner: Runner, packed_bundle: Path, repeating: Run) -> None:
    drafting, prompt, expected = ("--speculate", "lookup"), repeating.prompt, repeating.expected
    run, count = runner(packed_bundle, prompt, "--max-tokens", POSITIONS, *drafting), repeating.accepted
    assert ids_of(run) == expected and len(prompt) + len(expected) == POSITIONS + 1
    verifications, drafted, accepted, each, steps = figures(run)
    # The first draft went on behind what was right.
    assert verifications >= 1 and drafted > accepted >= count and each == round(1 + accepted / verifications, 2)
    assert len(expected) == 1 + verifications + accepted + steps
    text = prompt + expected
    run = runner(packed_bundle, text[: len(PROMPT)], "--max-tokens", POSITIONS, *drafting)  # the caches grow
    assert ids_of(run) == text[len(PROMPT) :]
    for tokens in range(1, count + 5):  # ends before, in and behind the first verification
        run = runner(packed_bundle, prompt, "--max-tokens", tokens, *drafting)
        assert ids_of(run) == expected[:tokens]
        if 4 < tokens < count + 5:  # as many drafted as may be needed, all of them right
            assert figures(run) == [1, tokens - 4, tokens - 4, tokens - 3, 2]
    run = runner(packed_bundle, prompt, "--max-tokens", 20, "--speculate", "off")
    assert ids_of(run) == expected[:20] and not run.stderr


def test_a_bundle_with_heads_drafts_by_lookup(runner: Runner, write_llama: Callable[..., Path], repeating: Run) -> None:
    from compressor.passes.kv_cache import KvCache
    from compressor.passes.rtn import Rtn

    headed = write_llama(AddHeads(), Rtn("W4A8_G32"), KvCache("INT8"), speculates=True)
    assert "heads" in load(headed, threads=1).speculations
    run = runner(headed, repeating.prompt, "--max-tokens", 3 + repeating.accepted, "--speculate", "lookup")
    assert ids_of(run) == repeating.expected[: 3 + repeating.accepted] and figures(run)[0] >= 1


def test_a_text_ends_in_a_run_of_drafted_tokens(
    runner: Runner, packed_bundle: Path, repeating: Run, tmp_path: Path
) -> None:
    copy, place = Path(shutil.copytree(packed_bundle, tmp_path / "copy")), 2 + repeating.accepted
    prompt, expected = repeating.prompt, repeating.expected
    end = expected[place]  # the last drafted token that is right
    assert end not in expected[:place]
    edit_manifest(copy, lambda manifest: manifest["model"].update(eos_ids=[end], speculate="lookup"))
    run = runner(copy, prompt, "--max-tokens", 50)
    assert ids_of(run) == expected[:place] == list(load(copy, threads=1).generate_ids(prompt, max_tokens=50))
    assert figures(run) == [1, place - 3, place - 3, place - 2, 2]
    limit = len(prompt) + place - 1  # of positions: the last token needs none
    edit_manifest(copy, lambda manifest: manifest["model"].update(eos_ids=[], max_positions=limit, speculate="auto"))
    run = runner(copy, prompt, "--max-tokens", 50)
    assert ids_of(run) == expected[:place] == list(load(copy, threads=1).generate_ids(prompt, max_tokens=50))
    assert figures(run)[:3] == [1, place - 4, place - 4]
    for kind in ("off", "recycle"):  # of which the runner has none
        edit_manifest(copy, lambda manifest, kind=kind: manifest["model"].update(speculate=kind))
        run = runner(copy, prompt, "--max-tokens", 5)
        if kind == "off":  # the command's word, not a recipe's
            refused(run, 4, "`speculate` has a value that cannot be")
        else:
            assert ids_of(run) == expected[:5] and not run.stderr
    lossy = {"speculate": "sparse", "lossy": {"tolerance": 0.5}}
    edit_manifest(copy, lambda manifest: manifest["model"].update(lossy))
    refused(
        runner(copy, prompt, "--max-tokens", 5), 2, "its recipe asks for lossy drafts, which this runner lacks; give"
    )
    assert ids_of(runner(copy, prompt, "--max-tokens", 5, "--speculate", "off")) == expected[:5]


def test_a_bundle_that_verifies_nothing_refuses_drafts_as_in_python(runner: Runner, bundle: Path) -> None:
    with pytest.raises(RequestError) as error:
        load(bundle, threads=1).generate_ids([1], speculate="lookup")
    refused(runner(bundle, [1], "--speculate", "lookup"), error.value.exit_code, str(error.value))
    refused(
        runner(bundle, [1], "--speculate", "recycle"), 2, "--speculate 'recycle': give 'lookup', 'planes', 'exit' or"
    )
    refused(runner(bundle, [1], "--speculate"), 2, "--speculate: no value")


@pytest.mark.parametrize(("prompt", "count"), [(PROMPT, POSITIONS), ([7], 40)])
@pytest.mark.parametrize("kind", ["planes", "exit"])
def test_drafts_of_a_model_are_those_of_python(
    request: pytest.FixtureRequest, runner: Runner, kind: str, prompt: list[int], count: int
) -> None:
    """Compare tokens and counts with Python's; the longer text's caches grow in a draft."""
    bundle = request.getfixturevalue(f"{kind}_bundle")
    python = load(bundle, threads=1)
    expected = list(python.generate_ids(prompt, max_tokens=count, speculate="off"))
    for length in (5, 15):
        run = runner(bundle, prompt, "--max-tokens", count, "--draft-tokens", length, "--threads", 1)
        assert ids_of(run) == expected
    python._drafts = Drafts(64, Always(), python.entries, python.model)
    counts = Speculation(kind)
    drafted = python.continued(prompt, count, checked_sampler(0.0, 0, 1.0, 0), [], counts)
    assert list(drafted) == expected
    verifications, steps = counts.verifications, counts.steps
    assert figures(run, kind) == [
        *(verifications, counts.drafted, counts.accepted),
        *(round(1 + counts.accepted / verifications, 2), steps),
    ]
    assert counts.drafted > counts.accepted > (2 if kind == "planes" else 0) * verifications
    for asked in (kind, "lookup", "off"):  # as much as pays
        run = runner(bundle, prompt, "--max-tokens", count, "--speculate", asked)
        assert ids_of(run) == expected and bool(run.stderr) == (asked != "off")


def test_parts_that_do_not_fit_are_refused(runner: Runner, exit_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(exit_bundle, tmp_path / "copy"))
    axes = json.loads((copy / "manifest.json").read_text())["model"]["parts"][0]["axes"]
    for wrong, code, words in ((axes[1:], 4, "`parts` has a value"), ([7, *axes[1:]], 1, "does not fit together")):
        edit_manifest(copy, lambda manifest, wrong=wrong: manifest["model"]["parts"][0].update(axes=wrong))
        done = runner(copy, PROMPT, "--draft-tokens", 2)
        assert done.returncode == code and words in done.stderr


@pytest.mark.parametrize("kind", ["planes", "exit"])
def test_drafts_of_a_model_are_refused_as_in_python(
    runner: Runner, bundle: Path, packed_bundle: Path, kind: str
) -> None:
    for folder, words in ((bundle, ""), (packed_bundle, ", only for 'lookup'")):
        with pytest.raises(RequestError) as error:
            load(folder, threads=1).generate_ids([1], speculate=kind)
        message = re.sub(", only for [^;]*", words, str(error.value))
        refused(runner(folder, [1], "--speculate", kind), error.value.exit_code, message)
    refused(runner(packed_bundle, [1], "--draft-tokens", 2), 2, "--draft-tokens: nothing drafts")
    for count in (0, 16):
        refused(runner(packed_bundle, [1], "--draft-tokens", count), 2, f"--draft-tokens {count}: must be from 1 to 15")


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

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import compressor_runtime
import compressor_selfcheck
import numpy as np
import pytest
import torch
from compressor_runtime import available_cores, choose
from native_bundles import write_native_bundle
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

import compressor
from compressor.runtime import Bundle, BundleError, DamagedBundleError, RequestError, TextStream, load

VOCAB, WIDTH, POSITIONS = 300, 16, 40
TEXT = "the rain in Spain stays mainly in the plain; ça coûte très cher; 한국어 🙂🙃 and so on and on. "
RUNTIME = Path(compressor_runtime.__file__)


class TinyLanguageModel(nn.Module):
    """A model of the bundles' kind whose every token is remembered: state = state / 2 + embed[token]."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(3)
        self.embed = nn.Parameter(torch.randn(VOCAB, WIDTH, generator=random))
        self.head = nn.Parameter(torch.randn(VOCAB, WIDTH, generator=random).half())
        self.bias = nn.Parameter(torch.randn(VOCAB, generator=random))  # 1,200 bytes: what follows is not aligned
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def logits(self, ids: list[int]) -> np.ndarray:
        state = np.zeros(WIDTH, np.float32)
        for token in ids:
            state = state / 2 + self.embed.detach()[token].numpy()
        return (state @ self.head.detach().float().numpy().T + self.bias.detach().numpy()) * self.scale.item()


def build_library(file: Path) -> None:
    """Kernels of TinyLanguageModel with the entry that lowering gives to decoders: caches written in place."""
    import tvm
    from tvm import relax
    from tvm.script import ir as I
    from tvm.script import relax as R
    from tvm.script import tirx as T

    @I.ir_module
    class Kernels:
        @T.prim_func(s_tir=True)
        def remember(
            ids: T.handle,
            position: T.handle,
            table: T.Buffer((300, 16), "float32"),
            keys: T.handle,
            values: T.handle,
            out: T.handle,
        ):
            B = T.int64()
            S = T.int64()
            C = T.int64()
            i = T.match_buffer(ids, (B, S), "int64")
            p = T.match_buffer(position, (S,), "int64")
            k = T.match_buffer(keys, (B, T.int64(1), C, T.int64(16)), "float32")
            v = T.match_buffer(values, (B, T.int64(1), C, T.int64(16)), "float32")
            o = T.match_buffer(out, (B, S, T.int64(16)), "float32")
            for b, s, d in T.grid(B, S, 16):
                with T.sblock("write"):
                    vb, vs, vd = T.axis.remap("SSS", [b, s, d])
                    k[vb, 0, p[vs], vd] = table[i[vb, vs], vd]
                    v[vb, 0, p[vs], vd] = T.float32(0)
            for b, s, d in T.grid(B, S, 16):
                with T.sblock("sum"):
                    vb, vs, vd = T.axis.remap("SSS", [b, s, d])
                    o[vb, vs, vd] = T.float32(0)
                    for t in T.serial(p[vs] + 1):
                        o[vb, vs, vd] = o[vb, vs, vd] * T.float32(0.5) + k[vb, 0, t, vd]

        @R.function
        def main(
            ids: R.Tensor(("B", "S"), "int64"),
            position: R.Tensor(("S",), "int64"),
            keep: R.Tensor(("N",), "int64"),
            k_0: R.Tensor(("B", 1, "C", 16), "float32"),
            v_0: R.Tensor(("B", 1, "C", 16), "float32"),
            params: R.Tuple(
                R.Tensor((300, 16), "float32"),
                R.Tensor((300, 16), "float16"),
                R.Tensor((300,), "float32"),
                R.Tensor((1,), "float32"),
            ),
        ) -> R.Tensor(("B", "N", 300), "float32"):
            B = T.int64()
            S = T.int64()
            C = T.int64()
            cls = Kernels
            state = R.call_tir_inplace(
                cls.remember,
                (ids, position, params[0], k_0, v_0),
                inplace_indices=[3, 4, -1],
                out_ty=[
                    R.Tensor((B, 1, C, 16), "float32"),
                    R.Tensor((B, 1, C, 16), "float32"),
                    R.Tensor((B, S, 16), "float32"),
                ],
            )
            head = R.astype(R.permute_dims(params[1]), "float32")
            logits = R.matmul(R.take(state[2], keep, axis=1), head)
            return R.multiply(R.add(logits, params[2]), params[3])

    target = tvm.target.Target({"kind": "llvm"})
    tvm.compile(Kernels, target, relax_pipeline=relax.get_default_pipeline(target)).export_library(str(file))


def vectors(model: TinyLanguageModel) -> dict[str, torch.Tensor]:
    """What compressor.export.vectors would store, by the model's own arithmetic; every third column."""
    ids = np.random.default_rng(1).integers(0, VOCAB, (2, 18))
    logits = np.array([model.logits(list(row[: i + 1])) for row in ids for i in range(18)])
    rows, columns = np.arange(len(logits)), np.arange(0, VOCAB, 3)
    stored = {"ids": ids, "prompt": np.array([16]), "output_0": logits[:, columns].astype(np.float32), "rows_0": rows}
    stored |= {"columns_0": columns, "top_0": logits.argmax(1), "tolerance": np.array([1e-3])}
    return {name: torch.as_tensor(value) for name, value in stored.items()}


@pytest.fixture(scope="session")
def model() -> TinyLanguageModel:
    return TinyLanguageModel()


@pytest.fixture(scope="session")
def bundle_folder(
    tmp_path_factory: pytest.TempPathFactory, model: TinyLanguageModel, require_tool: Callable[[str], Path]
) -> Path:
    require_tool("g++")
    folder = tmp_path_factory.mktemp("tiny")
    build_library(folder / "kernels.so")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(4)  # as sentence encoders have it: must not cut the prompt
    tokenizer.save(str(folder / "tokenizer.json"))
    parts = dict(
        graph=model,
        parameters=["embed", "head", "bias", "scale"],
        library=folder / "kernels.so",
        vectors=vectors(model),
        model={
            "kind": "decoder",
            "name": "tiny",
            "vocab_size": VOCAB,
            "layers": 1,
            "kv_heads": 1,
            "head_dim": WIDTH,
            "max_positions": POSITIONS,
            "eos_ids": [1],
            "bos_id": 0,
        },
        recipe={},
        sites=[],
        kernels=[{"name": "main", "evidence": "executed"}],
        cpu_features=["sse2"],
        dense_weight_bytes=0,
        tokenizer=folder,
    )
    return write_native_bundle(folder / "bundle", parts)


@pytest.fixture(scope="session")
def bundle(bundle_folder: Path) -> Bundle:
    return load(bundle_folder, threads=1)


@pytest.fixture
def copy(bundle_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle_folder, tmp_path / "copy"))


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def greedy(model: TinyLanguageModel, ids: list[int], count: int) -> list[int]:
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model.logits(ids).argmax()))
    return ids[-count:]


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has neither PyTorch, nor transformers, nor compressor."""
    block = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'compressor')))\n"
    command = [sys.executable, "-B", "-c", block + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


# --- steps


def test_steps_agree_with_the_model_while_the_cache_grows(bundle: Bundle, model: TinyLanguageModel) -> None:
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 30))
    session = bundle.session(batch=2, capacity=2)
    start = 0
    for count in (1, 3, 1, 1, 9, 15):
        keep = list(range(count))
        logits = session.step(ids[:, start : start + count], keep)
        assert logits.shape == (2, count, VOCAB) and logits.dtype == np.float32
        for row in range(2):
            for i in keep:
                np.testing.assert_allclose(logits[row, i], model.logits(ids[row, : start + i + 1]), atol=2e-5)
        start += count
        assert session.position == start and start <= session.capacity <= POSITIONS


def test_a_session_can_go_back(bundle: Bundle, model: TinyLanguageModel) -> None:
    session = bundle.session()
    session.step([[5, 6, 7]])
    session.position = 1
    np.testing.assert_allclose(session.step([[9]])[0, 0], model.logits([5, 9]), atol=1e-5)


def test_a_packed_cache_has_the_bytes_that_the_manifest_states(copy: Path) -> None:
    def pack(manifest: dict[str, Any]) -> None:
        manifest["model"].update(cache_format="INT8", cache_bytes_per_token=2 * (WIDTH + 2))

    dense = load(copy, threads=1)
    assert dense.model["cache_format"] == "FP32" and dense.model["cache_bytes_per_token"] == 2 * 4 * WIDTH
    edit_manifest(copy, pack)
    session = load(copy, threads=1).session(batch=3, capacity=5)
    caches = [np.from_dlpack(cache) for cache in session._caches]
    assert [(cache.dtype, cache.shape) for cache in caches] == [(np.uint8, (3, 1, 5, WIDTH + 2))] * 2
    caches[0][:] = 7
    session.position = 5
    session.make_room(1)
    grown = np.from_dlpack(session._caches[0])
    assert grown.shape[2] >= 6 and (grown[:, :, :5] == 7).all() and not grown[:, :, 5:].any()


def test_logits_stay_when_the_next_step_is_taken(bundle: Bundle) -> None:
    session = bundle.session()
    first = session.step([[5]])
    kept = first.copy()
    session.step([[6]])
    assert np.array_equal(first, kept)


def test_what_a_step_refuses(bundle: Bundle) -> None:
    session = bundle.session()
    for ids in ([[VOCAB]], [[-1]], [[0.5]], [5], [[]], [[1], [2]], [[1 << 70]]):
        with pytest.raises(RequestError):
            session.step(ids)
    for keep in ([2], [-1], [], [[0]], [0.5]):
        with pytest.raises(RequestError, match="keep"):
            session.step([[1, 2]], keep)
    with pytest.raises(RequestError, match=r"41 tokens after 0 others: the model ends at 40 positions"):
        session.step([[1] * 41])
    session.step([[1] * 40])
    with pytest.raises(RequestError, match="1 tokens after 40 others"):
        session.step([[1]])
    with pytest.raises(RequestError, match="holds a decoder, only an encoder"):
        bundle.encode([[1]])
    with pytest.raises(RequestError, match="batch=0"):
        bundle.session(batch=0)
    with pytest.raises(RequestError, match=r"1000000000 sequences of 40 tokens: .* more than this machine's memory"):
        bundle.session(batch=10**9)


def test_bundle_run_passes_any_arrays(bundle: Bundle, model: TinyLanguageModel) -> None:
    unaligned = np.arange(9, dtype=np.int64)[1:].reshape(1, 8)
    cache = np.zeros((1, 1, 8, WIDTH), np.float32)
    logits = bundle.run(unaligned, np.arange(8), np.array([7]), cache, cache)
    np.testing.assert_allclose(logits[0, 0], model.logits(list(range(1, 9))), atol=1e-5)


def test_an_encoder_gets_ids_and_a_mask(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_manifest(copy, lambda manifest: manifest.update(kind="encoder"))
    encoder = load(copy)
    monkeypatch.setattr(encoder, "call", lambda *tensors: [np.from_dlpack(tensor) for tensor in tensors])
    ids, mask = encoder.encode([[5, 6, 7], [8, 9, 9]], [[1, 1, 1], [1, 0, 0]])
    assert ids.dtype == np.int64 and ids.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert mask.dtype == np.float32 and mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert encoder.encode([[5, 6]])[1].tolist() == [[1, 1]]
    for wrong in (([[5, 6]], [[1]]), ([[5] * 41], None), ([[VOCAB]], None)):
        with pytest.raises(RequestError):
            encoder.encode(*wrong)
    with pytest.raises(RequestError, match="only a decoder generates"):
        encoder.generate("the")


def test_aligned_weights_are_used_where_they_lie(bundle: Bundle) -> None:
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(bundle.path / "weights") in line]
    spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in lines]
    addresses = [np.from_dlpack(tensor).ctypes.data for tensor in bundle._parameters]
    assert [any(low <= a < high for low, high in spans) for a in addresses] == [True, True, True, False]
    assert all(address % 64 == 0 for address in addresses)


def test_threads_share_a_bundle(bundle: Bundle, model: TinyLanguageModel) -> None:
    results: dict[int, list[int]] = {}

    def work(seed: int) -> None:
        results[seed] = list(bundle.generate_ids([0, seed], max_tokens=20))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(2, 6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for seed, ids in results.items():
        expected = greedy(model, [0, seed], 20)
        assert ids == (expected[: expected.index(1)] if 1 in expected else expected)


def test_a_thread_whose_pool_is_too_small_is_replaced(bundle_folder: Path, model: TinyLanguageModel) -> None:
    import tvm_ffi

    affinity = os.sched_getaffinity(0)
    several = load(bundle_folder, threads=3)
    seen: list[Any] = []

    def work() -> None:
        tvm_ffi.get_global_func("runtime.config_threadpool")(-3, 1, ["0"])  # a pool of one, for ever
        seen.append(list(several.generate_ids([0, 5], max_tokens=4)))
        seen.append(several._executor is not None)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert seen == [greedy(model, [0, 5], 4), True]
    assert several.session().step([[5]]).shape == (1, 1, VOCAB)
    assert os.sched_getaffinity(0) == affinity and 1 <= available_cores() <= len(affinity)


# --- text


def test_greedy_text_is_the_models(bundle: Bundle, model: TinyLanguageModel) -> None:
    ids = bundle.tokenizer.encode("the rain in Spain").ids
    assert len(ids) > 4 and ids[0] == 0
    expected = greedy(model, ids, 12)
    assert 1 not in expected
    assert list(bundle.generate_ids(ids, max_tokens=12)) == expected
    text = "".join(bundle.generate("the rain in Spain", max_tokens=12))
    assert text == "".join(bundle.generate(ids, max_tokens=12)) == bundle.tokenizer.decode(expected)


def test_a_seed_repeats_the_sampling_and_another_changes_it(bundle: Bundle) -> None:
    state = np.random.get_state()[1].tolist()  # type: ignore[index]

    def sample(seed: int) -> str:
        return "".join(bundle.generate("the", max_tokens=20, temperature=2.0, top_k=50, top_p=0.9, seed=seed))

    assert sample(1) == sample(1) != sample(2)
    assert np.random.get_state()[1].tolist() == state  # type: ignore[index]


def test_generation_ends_at_stops_end_of_sequence_and_the_last_position(bundle: Bundle) -> None:
    ids = list(bundle.generate_ids([0, 9], max_tokens=12))
    text = "".join(bundle.generate([0, 9], max_tokens=12))
    third = ids.index(ids[3])
    assert "".join(bundle.generate([0, 9], max_tokens=12, stop=ids[3])) == bundle.tokenizer.decode(ids[:third])
    stop = text[4:7]  # characters of several tokens
    assert "".join(bundle.generate([0, 9], max_tokens=12, stop=["not there", stop])) == text[: text.find(stop)]
    assert "".join(bundle.generate([0, 9], max_tokens=12, stop=text[-2:] + "zzz")) == text  # a beginning only
    assert list(bundle.generate([0, 9], max_tokens=0)) == []
    endless = list(bundle.generate_ids([0] * 35, max_tokens=1000, temperature=9.0, seed=0))
    assert len(endless) == POSITIONS - 35 + 1  # the last token needs no position of its own


def test_generation_ends_at_the_models_end_of_sequence(copy: Path, bundle: Bundle) -> None:
    ids = list(bundle.generate_ids([0, 9], max_tokens=12))
    edit_manifest(copy, lambda manifest: manifest["model"].update(eos_ids=[ids[2]]))
    assert list(load(copy).generate_ids([0, 9], max_tokens=12)) == ids[: ids.index(ids[2])]


def test_what_generate_refuses_at_once(bundle: Bundle, copy: Path) -> None:
    bad: list[dict[str, Any]] = [{"max_tokens": -1}, {"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}]
    for arguments in [*bad, {"temperature": float("inf")}, {"top_p": 0}, {"top_p": 1.1}]:
        with pytest.raises(RequestError, match="must be"):
            bundle.generate("the", **arguments)
    with pytest.raises(RequestError, match="the model ends at 40 positions"):
        bundle.generate("xyz " * 50)
    with pytest.raises(RequestError, match="does the tokenizer belong"):
        bundle.generate([VOCAB])
    assert next(bundle.generate_ids([])) == next(bundle.generate_ids([0]))
    edit_manifest(copy, lambda manifest: manifest["model"].update(bos_id=None))
    with pytest.raises(RequestError, match="the prompt is empty"):
        load(copy).generate([])


@pytest.mark.parametrize("text", [TEXT, "🙂" * 5, "한국", "a\ufffdb", " spaced  out "])
def test_pieces_of_text_are_whole_characters_and_add_up(bundle: Bundle, text: str) -> None:
    ids = bundle.tokenizer.encode(text).ids[1:]
    stream = TextStream(bundle.tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join([*pieces, stream.rest()]) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces) and "".join(pieces) == text
    assert stream.rest() == ""


def test_a_character_cut_off_by_the_last_token_is_shown_as_such(bundle: Bundle) -> None:
    ids = bundle.tokenizer.encode("é").ids[1:]
    partial = bundle.tokenizer.encode("漢").ids[1:-1]
    stream = TextStream(bundle.tokenizer, ids)
    assert "".join(stream.push(token) for token in partial) == ""
    assert set(stream.rest()) == {"\ufffd"}


def test_words_keep_their_spaces_after_a_prompt(shared_data: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.from_file(str(shared_data("models/stories260K") / "tokenizer.json"))
    text = "Once upon a time, there was a girl. 漢字 She was 3."
    ids = tokenizer.encode(text).ids
    for cut in range(1, len(ids)):
        stream = TextStream(tokenizer, ids[:cut])
        new = "".join([stream.push(token) for token in ids[cut:]] + [stream.rest()])
        assert text.endswith(new) and tokenizer.decode(ids[:cut]).rstrip("\ufffd") + new == text, cut


# --- choosing tokens


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ((1.0, 0, 1.0), 0b1111),
        ((1.0, 2, 1.0), 0b1010),
        ((1.0, 0, 0.6), 0b1010),
        ((1.0, 3, 0.5), 0b1000),
        ((0, 0, 1), 8),
    ],
)
def test_choices_follow_the_probabilities_of_what_is_allowed(arguments: tuple[float, int, float], allowed: int) -> None:
    probabilities = np.array([0.1, 0.2, 0.2, 0.5]) if allowed == 0b1111 else np.array([0.1, 0.29, 0.11, 0.5])
    generator = np.random.default_rng(0)
    counts = np.bincount([choose(np.log(probabilities), generator, *arguments) for _ in range(4000)], minlength=4)
    wanted = probabilities * [(allowed >> i) & 1 for i in range(4)]
    np.testing.assert_allclose(counts / 4000, wanted / wanted.sum(), atol=0.03)
    assert not counts[wanted == 0].any()


def test_temperature_flattens_and_extremes_are_finite() -> None:
    generator = np.random.default_rng(0)
    hot = [choose(np.array([0.0, 5.0]), generator, 50.0, 0, 1.0) for _ in range(2000)]
    assert 0.4 < np.mean(hot) < 0.6
    assert choose(np.array([-1e30, 1e30], np.float32), generator, 1e-3, 0, 1.0) == 1
    assert choose(np.array([-np.inf, 1.0]), generator, 1.0, 5, 0.5) == 1
    with pytest.raises(BundleError, match="NaN"):
        choose(np.array([0.0, np.nan]), generator, 1.0, 0, 1.0)


# --- without PyTorch and the compiler


def test_a_bundle_runs_by_itself(bundle_folder: Path, bundle: Bundle) -> None:
    code = """
sys.modules["tvm"] = None
sys.path[:] = [sys.argv[1], *(p for p in sys.path if "export/python" not in p)]
import compressor_runtime
assert compressor_runtime.__file__.startswith(sys.argv[1])
sys.exit(compressor_runtime.main(["--prompt", "the rain", "--max-tokens", "9"]))
"""
    done = python(code, str(bundle_folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(bundle.generate("the rain", max_tokens=9)) + "\n"


def test_tvm_can_be_imported_after_a_bundle_was_loaded(bundle_folder: Path) -> None:
    code = "sys.path[:0] = [sys.argv[2]]\nfrom compressor_runtime import load\nload(sys.argv[1])\nimport tvm, tvm.relax"
    done = python(code, str(bundle_folder), str(RUNTIME.parent))
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def run_main(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = compressor_runtime.main([str(a) for a in arguments])
        return code, *capsys.readouterr()

    yield run


def test_the_command_gives_one_message_and_an_exit_code(
    copy: Path, run_main: Callable[..., tuple[int, str, str]], bundle: Bundle
) -> None:
    options = ["--temperature", "1.5", "--top-k", "40", "--top-p", "0.9", "--seed", "7", "--threads", "1"]
    expected = "".join(bundle.generate("so", max_tokens=64, temperature=1.5, top_k=40, top_p=0.9, seed=7))
    assert run_main(copy, "--prompt", "so", *options) == (0, expected + "\n", "")
    code, out, error = run_main(copy, "--prompt", "so", "--top-p", "7")
    assert (code, out) == (2, "") and error.startswith("error: ") and error.count("\n") == 1
    assert run_main(copy / "nowhere", "--prompt", "so")[0] == 1
    assert run_main(copy, "--prompt", "so", "--threads", "0")[0] == 2
    (copy / "model.so").unlink()  # this process has it mapped: emptied in place, it would end the process at its exit
    (copy / "model.so").write_bytes(b"")
    assert run_main(copy, "--prompt", "so")[0] == 4


# --- the self-check


def test_a_bundle_checks_itself(bundle_folder: Path) -> None:
    code = "import runpy\nsys.path[0] = sys.argv[1]\n"
    code += "runpy.run_path(sys.argv[1] + '/compressor_selfcheck.py', run_name='__main__')"
    done = python(code, str(bundle_folder), "--threads", "1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"] and found["errors"]["output_0"] < 1e-6 and found["errors"]["top_0"] == 0
    assert found["tolerance"] == 1e-3 and found["threads"] == 1 and Path(found["runtime"]).parent == bundle_folder
    assert min(found[name] for name in ("load_s", "first_token_ms", "decode_ms")) > 0
    assert found["peak_rss_bytes"] > 10_000_000
    assert not list(bundle_folder.rglob("__pycache__"))


@pytest.mark.parametrize(
    ("name", "position", "value", "wrong"),
    [
        ("output_0", (17 * 100 + 99), 9.0, "output_0"),  # the second decode step of the first sequence
        ("output_0", 0, float("nan"), "output_0"),
        ("top_0", 35, 5, "top_0"),
        ("ids", 3, 7, "output_0"),
    ],
)
def test_outputs_that_differ_anywhere_are_found(
    bundle: Bundle, monkeypatch: Any, name: str, position: int, value: float, wrong: str
) -> None:
    changed = dict(compressor_selfcheck.read_safetensors(bundle.path / "vectors.safetensors"))
    changed[name] = changed[name].copy()
    assert changed[name].flat[position] != value
    changed[name].flat[position] = value
    monkeypatch.setattr(compressor_selfcheck, "read_safetensors", lambda file: changed)
    errors, tolerance = compressor_selfcheck.compare(bundle)
    assert not errors[wrong] <= tolerance


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.pop("ids"),
        lambda v: v.pop("tolerance"),
        lambda v: v.update(tolerance=np.array([np.inf])),
        lambda v: v.update(tolerance=np.array([np.nan])),
        lambda v: v.update(prompt=np.array([0])),
        lambda v: v.update(ids=v["ids"] + VOCAB),
        lambda v: v.update(columns_0=v["columns_0"] + VOCAB),
        lambda v: v.update(rows_0=v["rows_0"].astype(np.float32)),
        lambda v: v.update(output_0=v["output_0"][:, :5]),
        lambda v: v.update(output_1=v["output_0"]),
    ],
    ids=range(10),
)
def test_vectors_that_do_not_suit_the_model(bundle: Bundle, monkeypatch: Any, change: Any) -> None:
    changed = dict(compressor_selfcheck.read_safetensors(bundle.path / "vectors.safetensors"))
    change(changed)
    monkeypatch.setattr(compressor_selfcheck, "read_safetensors", lambda file: changed)
    with pytest.raises(BundleError, match=r"does not suit this model|token ids from"):
        compressor_selfcheck.compare(bundle)


def test_bundles_of_schema_1_load_and_have_nothing_to_compare_with(
    copy: Path, model: TinyLanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    def to_schema_1(manifest: dict[str, Any]) -> None:
        manifest.update(schema_version=1)
        del manifest["parameter_types"]
        for name in ("vectors.safetensors", "compressor_selfcheck.py"):
            (copy / name).unlink()
            del manifest["files"][name]

    edit_manifest(copy, to_schema_1)
    assert list(load(copy).generate_ids([0, 9], max_tokens=5)) == greedy(model, [0, 9], 5)
    assert compressor_selfcheck.main([str(copy)]) == 4
    assert "has no vectors.safetensors" in capsys.readouterr().err


# --- bundles that are not right


def test_a_changed_byte_is_found_and_its_file_named(copy: Path) -> None:
    for name in ("weights.safetensors", "model.so", "lib/libtvm_runtime.so", "tokenizer.json", "compressor_runtime.py"):
        content = bytearray((copy / name).read_bytes())
        content[-1] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(DamagedBundleError, match=rf"{name}: its SHA-256"):
            load(copy)
        content[-1] ^= 1
        (copy / name).write_bytes(content)
    load(copy)


def test_a_large_file_is_checked_by_its_pieces(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, file = 5000, copy / "model.so"
    monkeypatch.setattr(compressor_runtime, "PIECE_BYTES", size)
    content = file.read_bytes()
    pieces = [hashlib.sha256(content[start : start + size]).hexdigest() for start in range(0, len(content), size)]
    assert len(content) % size and len(pieces) > 2
    # The pieces are what counts at loading: the SHA-256 of the whole is for people, and for older run-times.
    edit_manifest(copy, lambda m: m["files"]["model.so"].update(pieces=pieces, sha256=""))
    for threads in (1, 3):
        load(copy, threads=threads)
    last = len(pieces) - 1
    for piece, place in ((0, 0), (1, size), (1, 2 * size - 1), (last, last * size), (last, len(content) - 1)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        where = f"{piece * size} to {min(len(content), (piece + 1) * size)}"
        with pytest.raises(DamagedBundleError, match=rf"model\.so: its SHA-256 is not .* \(bytes {where}\)"):
            load(copy, threads=2)
    file.write_bytes(bytes(byte ^ 1 for byte in content))  # of many that are wrong, the first is named
    with pytest.raises(DamagedBundleError, match=rf"bytes 0 to {size}\)"):
        load(copy, threads=2)
    file.write_bytes(content)
    for wrong in (pieces[:-1], [*pieces, pieces[0]], []):
        edit_manifest(copy, lambda m, wrong=wrong: m["files"]["model.so"].update(pieces=wrong))
        with pytest.raises(DamagedBundleError, match=rf"`pieces` of model\.so: {len(wrong)} of .* have {last + 1} of"):
            load(copy)


def test_a_file_that_cannot_be_read_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> str:
        raise OSError("Input/output error")

    monkeypatch.setattr(compressor_runtime, "sha256", fail)
    with pytest.raises(BundleError, match="cannot be read: Input/output error"):
        load(copy)


def test_files_that_are_missing_cut_short_or_not_listed(copy: Path) -> None:
    (copy / "README.md").unlink()
    with pytest.raises(DamagedBundleError, match=r"README\.md: missing"):
        load(copy)
    edit_manifest(copy, lambda manifest: manifest["files"].pop("README.md"))
    load(copy)
    with (copy / "weights.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DamagedBundleError, match=r"weights\.safetensors: \d+ bytes, the manifest says"):
        load(copy)
    edit_manifest(copy, lambda manifest: manifest["files"].pop("weights.safetensors"))
    with pytest.raises(DamagedBundleError, match=r"does not list weights\.safetensors"):
        load(copy)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "lib/../../outside", "link", "folder/outside", "lib"])
def test_no_name_leads_outside_the_bundle(copy: Path, name: str) -> None:
    (copy.parent / "outside").write_text("secret")
    (copy / "link").symlink_to("../outside")
    (copy / "folder").symlink_to("..")
    entry = {"bytes": 6, "sha256": compressor_runtime.sha256(copy.parent / "outside")}
    edit_manifest(copy, lambda manifest: manifest["files"].update({name: entry}))
    with pytest.raises(DamagedBundleError, match="leads outside" if name != "lib" else "lib: missing"):
        load(copy)


def test_a_library_behind_a_link_is_refused(copy: Path) -> None:
    shutil.move(copy / "model.so", copy.parent / "model.so")
    (copy / "model.so").symlink_to(copy.parent / "model.so")
    with pytest.raises(DamagedBundleError, match=r"model\.so' leads outside"):
        load(copy)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m: m.update(schema_version=3), BundleError, "schema version 3, this run-time reads up to 2"),
        (lambda m: m.update(schema_version="1"), DamagedBundleError, "`schema_version` is missing or is no valid int"),
        (lambda m: m.update(format="zip"), BundleError, "not a Compressor bundle"),
        (lambda m: m.pop("files"), DamagedBundleError, "`files` is missing"),
        (lambda m: m.update(files={"model.so": 3}), DamagedBundleError, "does not list"),
        (lambda m: m["files"].update({"model.so": 3}), DamagedBundleError, "`bytes` is missing"),
        (lambda m: m["files"]["model.so"].pop("sha256"), DamagedBundleError, "`sha256` is missing"),
        (lambda m: m["files"]["model.so"].update(pieces=None), DamagedBundleError, "`pieces` is missing or is no"),
        (lambda m: m["files"]["model.so"].update(pieces=[1]), DamagedBundleError, "not all of `pieces` is str"),
        (lambda m: m.update(libraries=[]), DamagedBundleError, r"manifest\.json: `libraries` is empty"),
        (lambda m: m.update(libraries=None), DamagedBundleError, "`libraries` is missing or is no valid list"),
        (lambda m: m.update(cpu_features=["sse2", "avx999"]), BundleError, "this CPU lacks avx999"),
        (lambda m: m["parameters"].__setitem__(1, "other"), DamagedBundleError, "lacks 'other'"),
        (lambda m: m.update(parameters=[["embed"]]), DamagedBundleError, "not all of `parameters` is str"),
        (lambda m: m.pop("model"), DamagedBundleError, "`model` is missing"),
        (lambda m: m["model"].update(max_positions=-1), DamagedBundleError, "`max_positions`"),
    ],
)
def test_manifests_that_are_wrong(copy: Path, change: Any, error: type[BundleError], message: str) -> None:
    edit_manifest(copy, change)
    with pytest.raises(error, match=message):
        load(copy)


def test_a_tokenizer_is_read_only_when_the_manifest_vouches_for_it(copy: Path) -> None:
    edit_manifest(copy, lambda manifest: manifest["files"].pop("tokenizer.json"))
    with pytest.raises(BundleError, match=r"the manifest lists no tokenizer\.json; give token ids"):
        load(copy).generate("the rain")
    (copy / "tokenizer.json").write_text("[]")
    entry = {"bytes": 2, "sha256": compressor_runtime.sha256(copy / "tokenizer.json")}
    edit_manifest(copy, lambda manifest: manifest["files"].update({"tokenizer.json": entry}))
    with pytest.raises(DamagedBundleError, match=r"tokenizer\.json: not a tokenizer"):
        load(copy).generate("the rain")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": ' * 20000, "\ud800"])
def test_manifests_that_are_no_manifests(copy: Path, text: str) -> None:
    (copy / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(BundleError, match=r"manifest|not a Compressor bundle"):
        load(copy)


def test_folders_that_are_no_bundles(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such folder"):
        load(tmp_path / "nothing")
    with pytest.raises(BundleError, match=r"not a bundle: it has no manifest\.json"):
        load(tmp_path)
    with pytest.raises(RequestError, match="threads=0"):
        load(tmp_path, threads=0)


def test_cpu_features_may_be_named_as_by_linux_or_llvm() -> None:
    flags = Path("/proc/cpuinfo").read_text()
    names = [name for name in ("sse4_1", "sse4.1", "avx512_vnni", "avx512vnni") if name.replace(".", "_") in flags]
    compressor_runtime.check_cpu(names, Path("b"))


def test_the_first_library_that_this_cpu_runs_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = [{"isa": isa, "file": f"{isa}.so", "cpu_features": [isa]} for isa in ("best", "good", "plain")]
    manifest = {"cpu_features": ["plain"], "libraries": libraries}
    lacking: set[str] = set()
    monkeypatch.setattr(compressor_runtime, "missing_features", lambda names: [n for n in names if n in lacking])

    def choose(isa: str | None = None) -> str:
        return compressor_runtime.choose_library(Path("b"), manifest, isa)

    assert (choose(), choose("good")) == ("best.so", "good.so")
    with pytest.raises(RequestError, match="isa='other': the bundle has kernels for best, good, plain"):
        choose("other")
    lacking |= {"best"}
    assert choose() == "good.so"
    with pytest.raises(BundleError, match="this CPU lacks best"):
        choose("best")
    lacking |= {"plain"}
    with pytest.raises(BundleError, match="this CPU lacks plain"):
        choose()


def test_a_system_that_refuses_amx_is_a_cpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    text = "flags : amx_tile avx2\n"
    monkeypatch.setattr(compressor_runtime.Path, "read_text", lambda file: reads.append(file) or text)
    monkeypatch.setattr(compressor_runtime, "_cpu_flags", cache(compressor_runtime._cpu_flags.__wrapped__))
    monkeypatch.setattr(compressor_runtime, "allow_tiles", lambda: False)
    assert compressor_runtime.missing_features(["amx_tile", "avx2"]) == ["amx_tile"]
    assert compressor_runtime.missing_features(["avx2"]) == []
    assert reads == [Path("/proc/cpuinfo")]  # however many libraries are considered


def test_the_public_api_loads_bundles(bundle_folder: Path) -> None:
    assert isinstance(compressor.load(bundle_folder), compressor.Bundle)

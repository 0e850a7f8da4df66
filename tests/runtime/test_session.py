"""A decoder's steps, and calls of other models."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressor_runtime import available_cores
from compressor_runtime.vm import configure_threads
from tiny_bundle import POSITIONS, VOCAB, WIDTH, TinyLanguageModel, edit_manifest, greedy

from compressor.runtime import Bundle, RequestError, load


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
    session.position = np.int64(2)  # forward again, as far as there are keys and values
    wrong: list[Any] = [-1, 3, 100, 1.0, "1", None, True]
    for position in wrong:
        with pytest.raises(RequestError, match=r"position=.*: give a whole number from 0 to 2"):
            session.position = position
    assert session.position == 2
    for name in ("batch", "capacity"):
        with pytest.raises(AttributeError):
            setattr(session, name, 5)


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
    session._stored[:] = 5
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
    wrong: list[Any] = [None, 0.5, "text", [[1], [2, 3]], [[None]], {}, object(), [[True]], [["1"]]]
    for ids in (*wrong, [[VOCAB]], [[-1]], [[0.5]], [5], [[]], [[1], [2]], [[1 << 70]]):
        with pytest.raises(RequestError):
            session.step(ids)
    refused: list[Any] = [[2], [-1], [], [[0]], [0.5], "0", [[0], [0, 1]], [None]]
    for keep in refused:
        with pytest.raises(RequestError, match="keep"):
            session.step([[1, 2]], keep)
    with pytest.raises(RequestError, match=r"41 tokens after 0 others: the model ends at 40 positions"):
        session.step([[1] * 41])
    session.step([[1] * 40])
    with pytest.raises(RequestError, match="1 tokens after 40 others"):
        session.step([[1]])
    with pytest.raises(RequestError, match="holds a decoder, only an encoder"):
        bundle.encode([[1]])
    arguments: list[dict[str, Any]] = [{"batch": 0}, {"batch": 1.0}, {"batch": None}, {"capacity": -1}]
    for options in [*arguments, {"capacity": "8"}]:
        with pytest.raises(RequestError, match="give a whole number at least"):
            bundle.session(**options)
    with pytest.raises(RequestError, match=r"1000000000 sequences of 40 tokens: .* more than this machine's memory"):
        bundle.session(batch=10**9)


@pytest.fixture
def module(copy: Path) -> Bundle:
    """Return the decoder as if its kernels were a plain module's."""
    shapes: list[tuple[str, list[int | str]]] = [("int64", [1, "S"]), ("int64", ["S"]), ("int64", [1])]
    shapes += [("float32", [1, 1, "T", WIDTH])] * 2
    inputs = [{"dtype": dtype, "shape": shape} for dtype, shape in shapes]
    edit_manifest(copy, lambda manifest: manifest.update(kind="module"))
    edit_manifest(copy, lambda manifest: manifest["model"].update(inputs=inputs, kv_heads=0, vocab_size=0))
    return load(copy, threads=1)


def test_a_module_runs_on_arrays(module: Bundle, model: TinyLanguageModel) -> None:
    unaligned = np.arange(9, dtype=np.int64)[1:].reshape(1, 8)
    cache = np.zeros((1, 1, 8, WIDTH), np.float32)
    good = (unaligned, np.arange(8), np.array([7]), cache, cache)
    np.testing.assert_allclose(module.run(*good)[0, 0], model.logits(list(range(1, 9))), atol=1e-5)
    refused: list[tuple[int, Any, str]] = [
        (0, unaligned[0], r"input 0: int64 \[8\]; the model takes int64 \[1, S\]"),
        (0, unaligned.astype(np.int32), r"input 0: int32 \[1, 8\]; the model takes int64"),
        (0, np.zeros((2, 8), np.int64), r"input 0: int64 \[2, 8\]"),
        (1, np.arange(7), r"input 1: int64 \[7\]; the model takes int64 \[S\]; S is 8"),
        (4, np.zeros((1, 1, 0, WIDTH), np.float32), "input 4"),
        (4, [[1], [1, 2]], "input 4: not an array of numbers"),
        (4, None, "input 4: NoneType of object; give an array of numbers"),
        (4, "text", "input 4: str of"),
    ]
    for place, value, message in refused:
        with pytest.raises(RequestError, match=message):
            module.run(*good[:place], value, *good[place + 1 :])
    with pytest.raises(RequestError, match="4 inputs; the model takes 5"):
        module.run(*good[:4])
    with pytest.raises(RequestError, match="only a decoder generates"):
        module.generate([1])


def test_arrays_of_a_bundle_that_states_no_inputs_are_compared_by_its_kernels(module: Bundle) -> None:
    del module.model["inputs"]
    with pytest.raises(RequestError, match="the kernels refuse these arrays"):
        module.run(np.zeros((1, 8), np.int32))


def test_a_decoder_is_not_run_on_arrays(bundle: Bundle) -> None:
    with pytest.raises(RequestError, match="holds a decoder; only a plain module is run on arrays"):
        bundle.run(np.zeros((1, 8), np.int64))


def test_an_encoder_gets_ids_and_a_mask(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_manifest(copy, lambda manifest: manifest.update(kind="encoder"))
    edit_manifest(copy, lambda manifest: manifest["model"].update(kv_heads=0))
    encoder = load(copy)
    monkeypatch.setattr(encoder, "call", lambda *tensors: [np.from_dlpack(tensor) for tensor in tensors])
    ids, mask = encoder.encode([[5, 6, 7], [8, 9, 9]], [[1, 1, 1], [1, 0, 0]])
    assert ids.dtype == np.int64 and ids.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert mask.dtype == np.float32 and mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert encoder.encode([[5, 6]])[1].tolist() == [[1, 1]]
    for wrong in (([[5, 6]], [[1]]), ([[5] * 41], None), ([[VOCAB]], None), (None, None), ([[5]], "x"), ([[5]], 1)):
        with pytest.raises(RequestError):
            encoder.encode(*wrong)
    with pytest.raises(RequestError, match="only a decoder generates"):
        encoder.generate("the")


def test_aligned_weights_are_used_where_they_lie(bundle: Bundle) -> None:
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(bundle.path / "weights") in line]
    spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in lines]
    addresses = [np.from_dlpack(tensor).ctypes.data for tensor in bundle._parameters["main"]]
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
    several = load(bundle_folder, threads=2)
    seen: list[Any] = []

    def work() -> None:
        tvm_ffi.get_global_func("runtime.config_threadpool")(-3, 1, ["0"])  # a pool of one, for ever
        seen.append(list(several.generate_ids([0, 5], max_tokens=4)))
        seen.append(several.vm._executor is not None)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert seen == [greedy(model, [0, 5], 4), True]
    assert several.session().step([[5]]).shape == (1, 1, VOCAB)
    assert os.sched_getaffinity(0) == affinity and 1 <= available_cores() <= len(affinity)


def test_idle_workers_soon_sleep_unless_the_environment_says_otherwise(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TVM_THREAD_POOL_SPIN_COUNT"
    monkeypatch.delenv(name, raising=False)
    assert configure_threads(1) and int(os.environ[name]) <= 1000  # 300,000 keep a busy machine's processes from ending
    monkeypatch.setenv(name, "7")
    assert configure_threads(1) and os.environ[name] == "7"

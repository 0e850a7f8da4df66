"""Verified tokens of compiled decoders: trees, and sequences of different lengths, bit by bit as single steps."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from compressor_runtime import RequestError
from compressor_runtime import session as sessions
from compressor_runtime.device.host import Host
from kernel_cases import Program
from numpy.typing import NDArray
from tiny_models import DECODERS, build, quantized
from token_trees import path_to, random_trees

from compressor.capture.capture import capture
from compressor.codegen.kernels.attention import tree
from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.targets.x86 import X86
from compressor.export.facts import model_facts
from compressor.graph.kinds.token_trees import why_no_trees
from compressor.passes.kv_cache import KvCache
from compressor.pipeline.context import Context

VOCAB, LIMIT = 97, 64
MODELS = {
    "llama": ("llama", None, "W8A8"),
    "packed": ("mistral", "INT8", "W8A8"),  # a window of 3
    "floats": ("llama", "INT8", "W8A16"),  # the only group of a row waits for the residual
}


@cache
def compiled(name: str) -> Callable[..., sessions.Session]:
    """Compile a decoder with both entries; returns what opens a session."""
    family, cache_format, scheme = MODELS[name]
    graph = quantized(capture(build(DECODERS[family]())), scheme)
    if cache_format is not None:
        graph = KvCache(cache_format).run(graph, Context())
    assert why_no_trees(graph) == ""
    graph.meta["model"] = dataclasses.replace(graph.meta["model"], speculates=True)
    library = compile_graph(graph, X86(), tune="off", threads=1)
    program, facts = Program(graph, library), model_facts(graph)
    assert "speculates" not in facts and [*library.entries] == ["verify", "main"]
    parameters = {entry: [program.parameters[i] for i in used] for entry, used in library.entries.items()}

    def call(entry: str, *tensors: Any) -> NDArray[np.float32]:
        found: NDArray[np.float32] = program.vm[entry](*tensors, parameters[entry]).numpy()
        return found

    def open_session(batch: int = 1, verifies: bool = True) -> sessions.Session:
        drafted = {"verify": partial(call, "verify")} if verifies else {}
        return sessions.Session(facts, LIMIT, partial(call, "main"), batch, 4, (), Host(), None, drafted)

    return open_session


def random_ids(*shape: int) -> NDArray[np.int64]:
    return np.random.default_rng(len(shape)).integers(0, VOCAB, shape)


def stepped(name: str, prompt: Any, tokens: list[int]) -> list[NDArray[np.float32]]:
    """Return the logits behind each of a sequence's tokens, each of them a step."""
    session = compiled(name)()
    if len(prompt):
        session.step([list(prompt)])
    return [session.step([[token]])[0, 0] for token in tokens]


@pytest.mark.parametrize("name", MODELS)
def test_a_tree_has_the_bits_of_steps_and_an_accepted_path_goes_on_as_they_do(name: str) -> None:
    session, prompt, ids = compiled(name)(), random_ids(7), random_ids(1, 12)[0]
    session.step(prompt[None])
    _, parent, _, _ = random_trees(random.Random(3), [7], [12])
    logits = session.verify(ids, parent.tolist())
    assert logits.shape == (12, VOCAB) and logits.dtype == np.float32 and session.position == 7
    paths = [path_to(parent.tolist(), t) for t in range(12)]
    for t, path in enumerate(paths):
        assert np.array_equal(logits[t], stepped(name, prompt, ids[path].tolist())[-1]), (t, path)
    path = max(paths, key=len)
    session.accept({0: path})
    assert session.lengths == [7 + len(path)]
    after = [5, 6, 7]
    expected = stepped(name, prompt, [*ids[path].tolist(), *after])[-3:]
    assert np.array_equal(session.verify(after, [-1, 0, 1]), expected)
    session.accept({})
    assert [session.step([[token]])[0, 0].tolist() for token in after] == [row.tolist() for row in expected]


@pytest.mark.parametrize("name", MODELS)
def test_sequences_of_different_lengths_are_each_as_if_alone(name: str) -> None:
    session, pick = compiled(name)(batch=3), random.Random(1)
    texts: list[list[int]] = [[], [], []]
    for counts in ([3, 0, 5], [2, 6, 1], [4, 1, 0]):
        _, parent, slot, _ = random_trees(pick, session.lengths, counts)
        ids = random_ids(len(slot))
        logits = session.verify(ids, parent.numpy(), slot.numpy())
        kept: dict[int, list[int]] = {}
        for t, own in enumerate(slot.tolist()):
            path = path_to(parent.tolist(), t)
            kept[own] = max(kept.get(own, []), path, key=len)
            alone = stepped(name, [], texts[own] + ids[path].tolist())[-1]
            assert np.array_equal(logits[t], alone)
        session.accept(kept)
        for own, path in kept.items():
            texts[own] += ids[path].tolist()
        assert session.lengths == [len(text) for text in texts]
    with pytest.raises(RequestError, match="different lengths"):
        _ = session.position
    last = session.step([[1], [2], [3]])
    for row, text, token in zip(last, texts, (1, 2, 3), strict=True):
        assert np.array_equal(row[0], stepped(name, [], [*text, token])[-1])
    session.lengths = [2, 2, 2]
    assert session.position == 2 and session.step([[4, 5]] * 3).shape == (3, 1, VOCAB)


def test_tokens_are_drafted_behind_the_stored_ones_and_forgotten() -> None:
    """With the entry that verifies as the draft's: in one call or several, a drafted token has the bits of a step."""
    session, prompt, ids = compiled("llama")(), random_ids(5), random_ids(1, 4)[0]
    session.step(prompt[None])
    expected = stepped("llama", prompt, ids.tolist())
    assert np.array_equal(session.draft("verify", ids[:2], [0, 1]), expected[:2])
    assert np.array_equal(session.draft("verify", ids[2:3], [2]), expected[2:3])
    assert session.lengths == [5] and np.array_equal(session.verify([9, *ids], [-1, -1, 1, 2, 3])[1:], expected)
    session.draft("verify", [7, 7], [0, 1])
    with pytest.raises(RequestError, match="nothing was verified"):
        session.accept({})
    with pytest.raises(RequestError, match="position=6"):
        session.position = 6
    assert np.array_equal(session.step(ids[None], range(4))[0, 3:], expected[3:])
    other = compiled("llama")(batch=2)
    logits = other.draft("verify", [3, 4, 5], [0, 0, 1], [1, 0, 1])
    assert np.array_equal(logits[[0, 2]], stepped("llama", [], [3, 5]))
    wrong: list[tuple[Any, Any, str]] = [
        ([1], [-1], "whole number, at least 0"),
        ([1], [0, 1], "whole number, at least 0"),
        ([VOCAB], [0], "the model knows 0 to 96"),
        ([1], [64], "the model ends at 64 positions"),
    ]
    for tokens, ahead, message in wrong:
        with pytest.raises(RequestError, match=message):
            session.draft("verify", tokens, ahead)
    with pytest.raises(RequestError, match="the bundle has no entry 'planes', only verify"):
        session.draft("planes", [1], [0])


def test_a_chain_moves_no_rows_and_a_path_is_as_long_as_kernels_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    session = compiled("llama")()
    monkeypatch.setattr(Host, "move_rows", None)
    session.verify([3] * 30, range(-1, 29), keep=[29])
    session.accept({0: range(20)})
    assert session.lengths == [20]
    assert tree.DEEPEST == sessions.DEEPEST == LIMIT
    chain = compiled("llama")()
    assert chain.verify([3] * 64, range(-1, 63)).shape == (64, VOCAB)


def test_what_is_refused() -> None:
    session = compiled("llama")(batch=2)
    session.step([[1, 2], [3, 4]])
    wrong: list[tuple[Any, Any, Any, str]] = [
        ([1], [-1], None, "say which of the 2 sequences"),
        ([[1]], [[-1]], [[0]], "whole numbers, one of each"),
        ([1, 2], [-1], [0, 0], "whole numbers, one of each"),
        ([], [], [], "whole numbers, one of each"),
        ([1.0], [-1], [0], "whole numbers, one of each"),
        ("a", [-1], [0], "give an array of numbers"),
        ([VOCAB], [-1], [0], "the model knows 0 to 96"),
        ([1], [0], [0], r"parent\[0\] is 0; give -1, or an earlier token"),
        ([1], [-2], [0], r"parent\[0\] is -2"),
        ([1, 2], [-1, 0], [0, 1], r"parent\[1\] is 0; .* of the same sequence"),
        ([1], [-1], [2], "the session's sequences are 0 to 1"),
        ([1], [-1], [-1], "the session's sequences are 0 to 1"),
        ([1] * 65, range(-1, 64), [0] * 65, "a path of 65 tokens; give at most 64"),
        ([1] * 63, range(-1, 62), [1] * 63, "the model ends at 64 positions"),
    ]
    for ids, parent, slot, message in wrong:
        with pytest.raises(RequestError, match=message):
            session.verify(ids, parent, slot)
    with pytest.raises(RequestError, match="keep"):
        session.verify([1], [-1], [0], keep=[1])
    for accepted in ({}, {0: []}):
        with pytest.raises(RequestError, match="nothing was verified"):
            session.accept(accepted)
    session.verify([1, 2, 3], [-1, 0, -1], [0, 0, 1])
    paths: list[Any] = [{0: [1]}, {0: [2]}, {1: [0]}, {0: [0, 0]}, {0: [3]}, {0: [-1]}, {2: []}, {0: "x"}, [0], {0: 1}]
    for path in paths:
        with pytest.raises(RequestError):
            session.accept(path)
    assert session.lengths == [2, 2]
    session.accept({0: np.array([0, 1]), 1: []})
    assert session.lengths == [4, 2]
    with pytest.raises(RequestError, match="a step takes one token of each"):
        session.step([[1, 2], [3, 4]])
    values: list[Any] = [[5, 2], [2], 2, [1.0, 2.0], [[1], [2]], None]
    for lengths in values:
        with pytest.raises(RequestError, match="lengths"):
            session.lengths = lengths
    plain = compiled("llama")(verifies=False)
    with pytest.raises(RequestError, match="compress the model with `speculate: auto` in its recipe"):
        plain.verify([1], [-1])


def test_a_step_forgets_what_was_verified() -> None:
    session = compiled("llama")()
    session.verify([1, 2], [-1, -1])
    session.step([[5]])
    with pytest.raises(RequestError, match="nothing was verified"):
        session.accept({0: [0]})
    assert torch.equal(torch.tensor(session.step([[6]])[0, 0]), torch.tensor(stepped("llama", [], [5, 6])[-1]))

"""A compiled decoder in parts: the bits of the whole, first parts that are used again, and texts that stay the same."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from compressor_runtime import RequestError
from compressor_runtime import session as sessions
from compressor_runtime.device.host import Host
from compressor_runtime.generation import Sampler, next_tokens
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.engine import Engine, Text
from compressor_runtime.speculation.pace import Always
from kernel_cases import Program
from numpy.typing import NDArray
from tiny_models import DECODERS, build, quantized
from token_trees import path_to, random_trees

from compressor.capture.capture import capture
from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.targets.x86 import X86
from compressor.export.facts import model_facts

VOCAB, LIMIT = 97, 128
ENTRIES = ("verify", "begin", "rest", "end", "main")


@cache
def compiled(first_blocks: int) -> Callable[..., sessions.Session]:
    """Compile a decoder with parts; returns what opens a session."""
    graph = quantized(capture(build(DECODERS["llama"]())), "W8A8")
    graph.meta["model"] = dataclasses.replace(graph.meta["model"], speculates=True, first_blocks=first_blocks)
    library = compile_graph(graph, X86(), tune="off", threads=1)
    program, facts = Program(graph, library), model_facts(graph) | {"parts": library.parts}
    parameters = {entry: [program.parameters[i] for i in used] for entry, used in library.entries.items()}
    stored = [index for used in library.entries.values() for index in used]
    assert set(stored) == set(library.entries["main"]), "no parameter that the model has not"
    by_part = [set(library.entries[part["entry"]]) for part in library.parts]
    assert set().union(*by_part) == set(library.entries["verify"])

    def call(entry: str, *tensors: Any) -> Any:
        found = program.vm[entry](*tensors, parameters[entry])
        return found.numpy() if hasattr(found, "numpy") else [one.numpy() for one in found]

    def open_session(batch: int = 1) -> sessions.Session:
        drafted = {name: partial(call, name) for name in library.entries if name != "main"}
        return sessions.Session(facts, LIMIT, partial(call, "main"), batch, 4, (), Host(), None, drafted)

    return open_session


def random_ids(*shape: int) -> NDArray[np.int64]:
    return np.random.default_rng(len(shape)).integers(0, VOCAB, shape)


@pytest.mark.parametrize("first_blocks", [0, 1])
def test_all_parts_have_the_bits_of_the_whole(first_blocks: int) -> None:
    session, other = compiled(first_blocks)(batch=2), compiled(first_blocks)(batch=2)
    prompt = random_ids(2, 5)
    session.step(prompt), other.step(prompt)
    _, parent, slot, row = random_trees(random.Random(3), [5, 5], [7, 4])
    ids = random_ids(len(slot))
    expected = other.verify(ids, parent.tolist(), slot.tolist())
    depth = [len(path_to(parent.tolist(), t)) - 1 for t in range(len(ids))]
    places = {"ids": ids, "position": 5 + np.array(depth), "parent": parent.numpy(), "slot": slot.numpy()}
    session.make_room(8)
    rows = session.parts.begin(places | {"row": row.numpy()})
    for index in range(session.parts.count):
        session.parts.run(rows, index)
    assert np.array_equal(session.parts.end(rows, [*range(len(ids))]), expected)
    assert session.parts.count == (1 if first_blocks else 4)


def test_what_a_draft_has_computed_is_used_again_with_the_same_bits() -> None:
    session, other, ids = compiled(1)(), compiled(1)(), random_ids(1, 9)[0]
    prompt = random_ids(1, 5)
    session.step(prompt), other.step(prompt)
    calls: list[int] = []
    begin = session.parts.begin

    def counted(inputs: Any) -> Any:
        calls.append(len(inputs["ids"]))
        return begin(inputs)

    session.parts.begin = counted  # type: ignore[method-assign]
    for place in range(4):  # the caches grow on the way
        session.begin(ids[place : place + 1], [place])
    tokens, parent = [*ids[:5], 7, 8], [-1, 0, 1, 2, 3, 2, 5]  # the chain, one more token, and a branch of two
    assert np.array_equal(session.verify(tokens, parent), other.verify(tokens, parent))
    assert calls == [1, 1, 1, 1, 3]
    session.accept({0: [0, 1, 2, 5, 6]}), other.accept({0: [0, 1, 2, 5, 6]})
    session.begin([3], [0])
    assert np.array_equal(session.verify([4, 3], [-1, 0]), other.verify([4, 3], [-1, 0])), "another token came"
    session.begin([3], [0])
    session.step([[3]]), other.step([[3]])
    assert np.array_equal(session.verify([3, 9], [-1, 0]), other.verify([3, 9], [-1, 0])), "behind a step"
    session.begin([3], [0])
    session.lengths = other.lengths = [6]
    session.step(ids[None, :5]), other.step(ids[None, :5])
    assert np.array_equal(session.verify([3], [-1]), other.verify([3], [-1])), "behind other tokens"
    assert session.lengths == other.lengths


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_plain_steps(temperature: float) -> None:
    prompts, count = random_ids(3, 6), 30
    session, drafts, counts = compiled(1)(3), Drafts(VOCAB, Always(), ENTRIES), Speculation("exit")
    texts = [
        Text(slot, [*own], drafts.start("exit", session, slot), sampler(slot, temperature), {}, count - slot)
        for slot, own in enumerate(prompts.tolist())
    ]
    for text, logits in zip(texts, session.step(prompts), strict=True):
        text.choose(logits[-1])
    assert list(Engine(session, drafts.pace, drafts.acceptance, counts).rounds(texts))
    assert counts.drafted > 3 * counts.verifications
    for text, own in zip(texts, prompts, strict=True):
        plain, chooser = compiled(1)(), sampler(text.slot, temperature)
        tokens = next_tokens(
            lambda step, plain=plain: plain.step(step)[0, -1],
            own[None],
            lambda logits, _, chooser=chooser: chooser.pick(logits),
            {},
            count - text.slot,
        )
        assert text.tokens[6:] == list(tokens)


def sampler(seed: int, temperature: float) -> Sampler:
    return Sampler(np.random.default_rng(seed), temperature, 0, 0.95)


def test_a_bundle_without_parts_says_so() -> None:
    facts = {"vocab_size": VOCAB, "layers": 1, "kv_heads": 1, "head_dim": 4}
    facts |= {"cache_format": "FP32", "cache_bytes_per_token": 32}
    session = sessions.Session(facts, LIMIT, lambda *_: None, 1, 4)
    with pytest.raises(RequestError, match="parts: the bundle has none; compress the model with `speculate: exit`"):
        session.begin([1], [0])

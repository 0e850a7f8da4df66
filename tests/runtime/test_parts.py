"""A compiled decoder in parts: the bits of the whole, first parts that are used again, and texts that stay the same."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compressor_runtime import RequestError
from compressor_runtime import session as sessions
from compressor_runtime.device.host import Host
from compressor_runtime.generation import Sampler, next_tokens
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.engine import Engine
from compressor_runtime.speculation.kinds.registry import served
from compressor_runtime.speculation.kinds.skips import through
from compressor_runtime.speculation.measure import agreements
from compressor_runtime.speculation.pace import Always
from compressor_runtime.speculation.text import Text
from kernel_cases import Program
from numpy.typing import NDArray
from tiny_models import DECODERS, build, quantized, relative_error
from token_trees import path_to, random_trees
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.targets.x86 import X86
from compressor.export.facts import model_facts
from compressor.graph.blocks import find_blocks, remove_branches
from compressor.graph.caches import empty_past
from compressor.graph.model import clone_graph

VOCAB, LIMIT = 97, 128
ENTRIES = ("verify", "begin", "rest", "end", "main")
SKIPS = (["ffn_0"], ["attention_1", "ffn_0"])
"""Parts that drafts of the model itself leave out."""


@cache
def model() -> GraphModule:
    return quantized(capture(build(DECODERS["llama"]())), "W8A8")


@cache
def compiled(first_blocks: int) -> Callable[..., sessions.Session]:
    """Compile a decoder with parts; returns what opens a session."""
    graph = clone_graph(model())
    graph.meta["model"] = dataclasses.replace(graph.meta["model"], speculates=True, first_blocks=first_blocks)
    library = compile_graph(graph, X86(), tune="off", threads=1)
    program, facts = Program(graph, library), model_facts(graph) | {"parts": library.parts}
    facts["skips"] = [{"without": names, "agreement": 0.7, "cost": 0.7} for names in SKIPS]
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


def test_a_draft_leaves_parts_out_as_the_graph_without_them_does() -> None:
    """One call for a chain, and one for each token, give the same bits; all parts give those of the whole."""
    ids, count = random_ids(6), torch.arange(6)
    for gone in SKIPS:
        graph = clone_graph(model())
        branches = [branch for block in find_blocks(graph) for branch in block.branches]
        names = [f"{branch.part}_{index // 2}" for index, branch in enumerate(branches)]
        remove_branches(graph, [branch for branch, name in zip(branches, names, strict=True) if name in gone])
        with torch.no_grad():
            expected = graph(torch.from_numpy(ids)[None], count, count, *empty_past(graph.meta["model"], 1, 0))[0][0]
        session, other = compiled(0)(), compiled(0)()
        kept = [index for index, name in enumerate(session.parts.names) if name not in gone]
        found = through(session, ids, np.arange(6), np.zeros(6, np.int64), kept)
        assert relative_error(found, expected) < 1e-5
        single = [through(other, [token], [ahead], [0], kept)[0] for ahead, token in enumerate(ids)]
        assert np.array_equal(found, single)
    whole = through(session, ids, np.arange(6), np.zeros(6, np.int64), range(4))
    assert np.array_equal(whole, session.verify(ids, range(-1, 5))) and relative_error(found, whole) > 1e-2


def test_agreement_is_that_of_drafts_behind_the_text() -> None:
    """Without parts that are left out all tokens agree; otherwise as many as step by step."""
    texts, bundle = random_ids(2, 32), SimpleNamespace(session=lambda batch, _: compiled(0)(batch))
    every, some = agreements(bundle, texts, [[], ["attention_1", "ffn_0"]])
    right = 0
    for text in texts:
        session = compiled(0)()
        session.step([text[:16]])
        for begin in (16, 24):
            drafted = [through(session, [text[begin + i]], [i], [0], [0, 3])[0].argmax() for i in range(8)]
            own = [int(session.step([[token]])[0, 0].argmax()) for token in text[begin : begin + 8]]
            right += sum(a == b for a, b in zip(drafted, own, strict=True))
    assert every == 1 and some == right / 32 and 0 < some < 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("kind", "first_blocks"), [("exit", 1), ("self", 0)])
def test_texts_are_those_of_plain_steps(kind: str, first_blocks: int, temperature: float) -> None:
    prompts, count, entries = random_ids(3, 6), 30, ENTRIES if first_blocks else ("verify", "begin", "end", "main")
    assert kind in served(entries, ["skips"]) and "self" not in served(entries)
    session, drafts, counts = compiled(first_blocks)(3), Drafts(VOCAB, Always(), entries, ["skips"]), Speculation(kind)
    texts = [
        Text(slot, [*own], drafts.start(kind, session, slot), sampler(slot, temperature), {}, count - slot)
        for slot, own in enumerate(prompts.tolist())
    ]
    for text, logits in zip(texts, session.step(prompts), strict=True):
        text.choose(logits[-1])
    assert list(Engine(session, drafts.pace, drafts.acceptance, counts).rounds(texts))
    assert counts.drafted > 3 * counts.verifications
    for text, own in zip(texts, prompts, strict=True):
        plain, chooser = compiled(first_blocks)(), sampler(text.slot, temperature)
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

"""A compiled decoder in stages: the bits of whole steps, whatever ran late; texts given up; blocks left out."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from compressor_runtime.depth.tokens import GIVEN_UP, counted_tokens, early_steps
from compressor_runtime.device.host import Host
from compressor_runtime.generation import Depth
from compressor_runtime.session import Session
from kernel_cases import Program
from numpy.typing import NDArray
from tiny_models import DECODERS, build, quantized
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.targets.x86 import X86
from compressor.export.facts import model_facts
from compressor.graph.exits.logits import with_exits
from compressor.passes.skip_decode import SkipDecode
from compressor.pipeline.context import Context
from compressor.training.exits.calibrate import state_exits
from compressor.training.trainable import TrainableGraph

VOCAB, LIMIT, BLOCKS, END = 97, 128, 2, 6
IDS: NDArray[np.int64] = np.random.default_rng(4).integers(3, VOCAB, (2, 14))


@cache
def compiled(kind: str) -> tuple[GraphModule, dict[str, Any], Callable[..., Session]]:
    """Compile a decoder with an exit behind its first block, or whose first block ends at a position."""
    graph = quantized(capture(build(DECODERS["llama"]())), "W8A8")
    if kind == "exits":
        state_exits(graph, (1,), (2.0,))
    else:
        graph = SkipDecode(depths=((0, BLOCKS), (END, 1)), first=0).run(graph, Context())
    library = compile_graph(graph, X86(), tune="off", threads=1)
    program, facts = Program(graph, library), model_facts(graph) | {"parts": library.parts}
    parameters = {entry: [program.parameters[i] for i in used] for entry, used in library.entries.items()}

    def call(entry: str, *tensors: Any) -> Any:
        found = program.vm[entry](*tensors, parameters[entry])
        return found.numpy() if hasattr(found, "numpy") else [one.numpy() for one in found]

    def open_session(batch: int = 1) -> Session:
        others = {name: partial(call, name) for name in library.entries if name != "main"}
        return Session(facts, LIMIT, partial(call, "main"), batch, 4, (), Host(), None, others)

    return graph, facts, open_session


def with_threshold(threshold: float, **more: float) -> dict[str, Any]:
    return {"exits": {**compiled("exits")[1]["exits"], "thresholds": [threshold], **more}}


def test_tokens_leave_over_whole_caches() -> None:
    graph, facts, open_session = compiled("exits")
    assert facts["exits"]["blocks"] == (1,) and facts["exits"]["of"] == BLOCKS
    ids, whole = IDS[0], open_session()
    expected = [whole.step(ids[None, :3])[0, -1], *(whole.step([[token]])[0, 0] for token in ids[3:])][1:]
    deep = early_steps(open_session(), with_threshold(2.0), Depth(BLOCKS))
    deep.prompt(ids[None, :3])
    for token, row in zip(ids[3:], expected, strict=True):
        np.testing.assert_array_equal(deep.step(int(token)), row)
    session, depth = open_session(), Depth(BLOCKS)
    early = early_steps(session, with_threshold(0.0), depth)
    early.prompt(ids[None, :3])
    left = np.array([early.step(int(token)) for token in ids[3:-1]])
    copied, (point,) = with_exits(graph, (1,))
    there = TrainableGraph(copied, (), (point,))(torch.from_numpy(ids[None, :-1])).hidden[0][0, 3:].detach().numpy()
    np.testing.assert_allclose(left, there, rtol=1e-3, atol=1e-3)
    early._thresholds = [2.0]
    np.testing.assert_array_equal(early.step(int(ids[-1])), expected[-1], "what waited ran late")
    assert depth.facts()["late_blocks_per_token"] == (len(ids) - 4) / (len(ids) - 3)
    np.testing.assert_array_equal(session.step([[9]]), whole.step([[9]]))


def test_texts_are_counted_and_given_up() -> None:
    open_session = compiled("exits")[2]

    def written(depth: Depth | None, facts: dict[str, Any]) -> tuple[list[int], str]:
        def pick(logits: NDArray[np.float32], is_first: bool) -> int:
            return int(logits.argmax())

        tokens: Generator[int, None, str] = counted_tokens(open_session(), facts, IDS[:1, :5], pick, {}, 8, depth)
        found = []
        while True:
            try:
                found.append(next(tokens))
            except StopIteration as end:
                return found, end.value

    plain = written(None, with_threshold(2.0))
    assert written(Depth(BLOCKS), with_threshold(2.0)) == plain and plain[1] == "length"
    depth = Depth(BLOCKS)
    assert written(depth, with_threshold(0.0))[1] == "length"
    assert (depth.tokens, depth.blocks_per_token, depth.heads) == (7, 1.0, 7)
    assert written(Depth(BLOCKS), with_threshold(2.0, give_up=1.0, window=2)) == (plain[0][:2], GIVEN_UP)


@pytest.mark.parametrize("start", [END - 3, END + 1])
def test_steps_leave_out_blocks_that_tokens_pass_by(start: int) -> None:
    _, facts, open_session = compiled("depths")
    assert facts["depths"] == (END, None)
    short, whole = open_session(2), open_session(2)
    whole.falling = None
    for session in (short, whole):
        session.step(IDS[:, :start])
    assert short.falling is not None
    counts = short.falling.depth = Depth(BLOCKS)
    for place in range(start, start + 5):
        token = IDS[:, place : place + 1]
        np.testing.assert_array_equal(short.step(token), whole.step(token), str(place))
    assert counts.tokens == 10 and counts.ran == 2 * sum(1 + (place < END) for place in range(start, start + 5))

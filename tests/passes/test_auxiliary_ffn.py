"""auxiliary_ffn: the function of its definition, on kernels too; the cost that it meets; what it refuses."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import swift_kv_oracle as oracle
import torch
from compressor_runtime.device.host import Host
from compressor_runtime.session import Session
from interrupted_training import whole_and_resumed
from kernel_cases import Program
from packed_models import random_samples
from tiny_models import relative_error
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.functional import linear, silu

from compressor.capture.capture import capture
from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.lowering.experts.stack import stack_experts
from compressor.codegen.targets.x86 import X86
from compressor.errors import UsageError
from compressor.export.facts import model_facts
from compressor.graph.caches import empty_past
from compressor.graph.exits.auxiliary import whole_graph
from compressor.graph.model import clone_graph
from compressor.passes.auxiliary_ffn import AuxiliaryFfn
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.training.objectives.auxiliary import Measure

SAMPLES = random_samples(97, 16)
IDS = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(1))
BLOCKS = (1, 2)
QUICK = AuxiliaryFfn(
    cost=0.5, width=8, blocks=BLOCKS, steps=12, batch=4, evaluate_every=5, checkpoint_every=5, held_out=0.25
)


@pytest.fixture(scope="module")
def llama() -> GraphModule:
    return capture(oracle.make_llama(num_hidden_layers=3))


def run(graph: GraphModule, *steps: Pass) -> tuple[GraphModule, Context]:
    ctx = Context(samples=SAMPLES)
    return Pipeline(steps, [VerifyStages()]).run(clone_graph(graph), ctx), ctx


@pytest.fixture(scope="module")
def routed(llama: GraphModule) -> tuple[GraphModule, Context]:
    return run(llama, QUICK)


def logits_of(graph: GraphModule, ids: Tensor) -> np.ndarray:
    places = torch.arange(ids.shape[1])
    with torch.no_grad():
        found: np.ndarray = graph(ids, places, places, *empty_past(graph.meta["model"], len(ids), 0))[0].numpy()
    return found


def by_definition(weights: dict[str, Tensor], ids: Tensor) -> tuple[np.ndarray, list[int]]:
    """Run transformers' model, each token of which chooses; return its logits, and how often each choice was made."""
    model, counts = oracle.make_llama(num_hidden_layers=3), [0, 0, 0]

    def network(block: int, whole: Any, x: Tensor) -> Tensor:
        own = {name: weights[f"model.layers.{block}.mlp.auxiliary.{name}"] for name in ("router.weight", "router.bias")}
        gate, up, down = (
            weights[f"model.layers.{block}.mlp.auxiliary.{name}_proj.0.weight"] for name in ("gate", "up", "down")
        )
        out = torch.zeros_like(x)
        for place in np.ndindex(*x.shape[:2]):
            choice = int(linear(x[place], own["router.weight"], own["router.bias"]).argmax())
            counts[choice] += 1
            if choice == 0:
                out[place] = whole(x[place])
            elif choice == 1:
                out[place] = linear(silu(linear(x[place], gate)) * linear(x[place], up), down)
        return out

    for block in BLOCKS:
        mlp = model.model.layers[block].mlp
        mlp.forward = partial(network, block, mlp.forward)
    with torch.no_grad():
        return model(ids).logits.numpy(), counts


def test_each_token_takes_what_its_router_chooses(routed: tuple[GraphModule, Context], llama: GraphModule) -> None:
    graph, ctx = routed
    expected, counts = by_definition(dict(graph.named_parameters()), IDS)
    found = logits_of(graph, IDS)
    assert min(counts) > 2, counts
    assert relative_error(found, expected) < 1e-5 < 1e-2 < relative_error(found, logits_of(llama, IDS))
    assert relative_error(logits_of(whole_graph(graph), IDS), logits_of(llama, IDS)) < 1e-6
    added = [record for record in ctx.records if record.note.startswith("added: ")]
    assert len(added) == 4 * len(BLOCKS) and all(record.bytes_before == 0 < record.bytes_after for record in added)


def test_samples_take_what_the_cost_allows(routed: tuple[GraphModule, Context]) -> None:
    graph, ctx = routed
    taken = Measure(graph, 4).taken(SAMPLES.ids[:16])
    _, counts = by_definition(dict(graph.named_parameters()), SAMPLES.ids[:16])
    tokens = SAMPLES.ids[:16].numel() * len(BLOCKS)
    assert taken.shares == pytest.approx([count / tokens for count in counts], abs=1e-6)
    network, small, router = 3 * 32 * 48, 3 * 32 * 8, 3 * 32
    assert taken.share == pytest.approx((counts[0] * network + counts[1] * small + tokens * router) / tokens / network)
    assert 0.3 < taken.share < 0.65, "it is met on those that are trained on"
    trained, said = ctx.notes
    assert "held-out loss" in trained and " million multiply-adds a token in 2 networks in place of 0.009216 (" in said


def test_kernels_read_the_rows_of_their_tokens(routed: tuple[GraphModule, Context]) -> None:
    """A prompt, then single tokens, of one sequence and of two; one block's networks are packed in 8 bits."""
    graph = Rtn("W8A16", targets="re:model.layers.2.mlp.*").run(clone_graph(routed[0]), Context())
    expected = logits_of(graph, IDS)
    stack_experts(graph)
    library = compile_graph(graph, X86(), tune="off", threads=1)
    program = Program(graph, library)

    def call(*tensors: Any) -> Any:
        return program.vm["main"](*tensors, program.parameters).numpy()

    for batch in (1, 2):
        session, ids = Session(model_facts(graph), 64, call, batch, 4, (), Host(), None, {}), IDS[:batch].numpy()
        rows = [session.step(ids[:, :5], keep=range(5))]
        rows += [session.step(ids[:, place : place + 1]) for place in range(5, 12)]
        assert relative_error(np.concatenate(rows, 1), expected[:batch]) < 1e-4


def test_a_killed_training_goes_on_to_the_same_bits(llama: GraphModule, tmp_path: Path) -> None:
    whole, resumed = whole_and_resumed(lambda ctx: QUICK.run(clone_graph(llama), ctx), tmp_path, 7, samples=SAMPLES)
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_what_is_refused(llama: GraphModule) -> None:
    for options, reason in (
        ({"cost": 1.0}, "cost 1 is not a share"),
        ({"width": 0}, "width is a whole number from 1"),
        ({"blocks": ()}, "blocks, if given, name one at least"),
        ({"pull": -1.0}, "weights from 0"),
    ):
        with pytest.raises(UsageError, match=reason):
            AuxiliaryFfn(**options)
    for options, reason in (
        ({"blocks": (1, 3)}, "block 3: the model has blocks 0 to 2"),
        ({"cost": 0.01}, r"cost 0\.01: routers alone take 0\.0208; raise it"),
    ):
        with pytest.raises(UsageError, match=reason):
            dataclasses.replace(QUICK, **options).requires(llama, Context())
    twice = clone_graph(llama)
    QUICK.add(twice)
    with pytest.raises(UsageError, match="mlp is not a feed-forward network: linears that read one value"):
        QUICK.requires(twice, Context())

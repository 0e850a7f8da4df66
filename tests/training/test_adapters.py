"""Adapters: fused equals beside the weight, weights wait for the end, zeros stay, an interrupted run's bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from captures import capture_once
from families import DECODERS, make
from interrupted_training import whole_and_resumed
from packed_models import random_samples
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from compressor.calibration.segment_runner import flat_inputs
from compressor.errors import UsageError
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import linear_sites
from compressor.passes.distill import Distill
from compressor.passes.finetune import Finetune
from compressor.passes.magnitude import Magnitude
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.progress import Silent
from compressor.training.trainable import TrainableGraph

SAMPLES = random_samples(97, 16)
QUICK = Distill(
    steps=12, batch=4, learning_rate=1e-2, evaluate_every=3, checkpoint_every=5, vectors=False, adapter_rank=4
)


@pytest.fixture(scope="module")
def llama() -> GraphModule:
    return capture_once(make(*DECODERS["Llama"], True))


@pytest.fixture(scope="module")
def pruned(llama: GraphModule) -> GraphModule:
    step = Magnitude("W8A16_B16x1@50", pack=False, refit=False)
    return Pipeline([step]).run(clone_graph(llama), Context(samples=SAMPLES))


class Beside(Interpreter):
    """Adds (x A^T) B^T to each linear's output, as adapters that are not fused do."""

    def __init__(self, graph: GraphModule, pairs: dict[Node, tuple[Tensor, Tensor]]) -> None:
        super().__init__(graph)
        self.pairs = pairs

    def run_node(self, n: Node) -> object:
        value = super().run_node(n)
        if n in self.pairs:
            A, B = self.pairs[n]
            value = value + (self.env[n.args[0]] @ A.T) @ B.T
        return value


def test_fused_is_what_adapters_beside_the_weights_compute(llama: GraphModule) -> None:
    sites = linear_sites(llama)
    model = TrainableGraph(llama, [site.weight_name for site in sites])
    model.adapt([site.weight_name for site in sites], 4, seed=1)
    generator, pairs = torch.Generator().manual_seed(2), {}
    with torch.no_grad():
        for site in sites:
            A, B = (model.weights[f"{site.weight_name}.{matrix}"] for matrix in "AB")
            assert A.shape == (4, site.in_features) and not bool(B.any())
            B.copy_(0.05 * torch.randn(B.shape, generator=generator))
            pairs[site.node] = (A, B)
        plain = TrainableGraph(llama)(SAMPLES.ids[:2]).last
        found = model(SAMPLES.ids[:2]).last
        inputs = flat_inputs(model.info, SAMPLES.ids[:2])
        expected, *_ = Beside(llama, pairs).run(*inputs, enable_io_processing=False)
    assert float((found - plain).abs().max()) > 0.05
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_gradients_reach_the_matrices_alone_and_have_their_formula(llama: GraphModule) -> None:
    (site, *_) = linear_sites(llama)
    name = site.weight_name
    whole, model = TrainableGraph(llama, [name]), TrainableGraph(llama, [name])
    model.adapt([name], 4, seed=1)
    for graph in (whole, model):
        graph(SAMPLES.ids[:2]).last.square().mean().backward()
    G, A = whole.weights[name].grad, model.weights[f"{name}.A"]
    assert model.weights.keys() == {f"{name}.A", f"{name}.B"} and G is not None
    torch.testing.assert_close(model.weights[f"{name}.B"].grad, G @ A.detach().T, rtol=1e-4, atol=1e-8)


def test_weights_change_by_so_low_a_rank_and_only_at_the_end(llama: GraphModule) -> None:
    """A student that differs from its teacher by matrices of rank one."""
    graph, ctx = clone_graph(llama), Context(samples=SAMPLES, dense=llama)
    generator = torch.Generator().manual_seed(3)
    for site in linear_sites(graph):
        weight = graph.get_parameter(site.weight_name).detach()
        u, v = (torch.randn(size, generator=generator) / size**0.5 for size in weight.shape)
        set_parameter(graph, site.weight_name, weight + weight.norm() * u[:, None] * v)
    before = {name: value.detach().clone() for name, value in graph.named_parameters()}
    seen: list[bool] = []

    class Watches(Silent):
        def advance(self, amount: int = 1) -> None:
            seen.append(all(torch.equal(value, before[name]) for name, value in graph.named_parameters()))

    ctx.reporter = Watches()
    trained = QUICK.run(graph, ctx)
    assert seen and all(seen)
    chosen = {site.weight_name for site in linear_sites(trained)}
    for name, value in trained.named_parameters():
        change = value.detach().double() - before[name].double()
        if name not in chosen:
            assert not bool(change.any())
            continue
        sizes = torch.linalg.svdvals(change)
        assert value.dtype == before[name].dtype and float(sizes[0]) > 0
        assert float(sizes[4]) < 1e-3 * float(sizes[0]), "what is left is the rounding of the stored type"


def test_zeros_stay(llama: GraphModule, pruned: GraphModule) -> None:
    zeros = {site.weight_name: pruned.get_parameter(site.weight_name) == 0 for site in linear_sites(pruned)}
    ctx = Context(samples=SAMPLES, dense=llama)
    graph = QUICK.run(clone_graph(pruned), ctx)
    begun, best = (float(ctx.notes[0].split(word)[0].split()[-1]) for word in (" at the start", " after step"))
    assert best < begun
    assert all(torch.equal(graph.get_parameter(name) == 0, zero) for name, zero in zeros.items())


def test_an_interrupted_run_goes_on_to_the_same_bits(llama: GraphModule, pruned: GraphModule, tmp_path: Path) -> None:
    # Step 7 is two behind a checkpoint.
    found = whole_and_resumed(
        lambda ctx: QUICK.run(clone_graph(pruned), ctx), tmp_path, 7, samples=SAMPLES, dense=llama
    )
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert not all(torch.equal(value.detach(), found[0][name]) for name, value in pruned.named_parameters())


def test_bad_input(llama: GraphModule) -> None:
    with pytest.raises(UsageError, match="finetune: adapter_rank -1 is not a whole number from 0"):
        Finetune(adapter_rank=-1)
    with pytest.raises(UsageError, match=r"adapters of rank 40 have as many numbers as \S+, 64x64"):
        Finetune(adapter_rank=40).requires(llama, Context())
    whole, adapted = (sum(p.working_bytes for p in Finetune(adapter_rank=r).plan(llama, Context())) for r in (0, 4))
    assert 0 < adapted < whole

"""Programs of experts and of sparse linears, run beside the fake driver: prompts and steps compute what graphs do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lockstep
import numpy as np
import pytest
import tvm
from families import DECODERS, VOCAB, make
from packed_models import random_samples
from tiny_models import quantized, relative_error
from torch.fx import GraphModule
from tvm import relax

from compressor.capture.capture import capture
from compressor.codegen.gpu.kernel_set import gpu_kernels
from compressor.codegen.gpu.linear.kernel import Schedule
from compressor.codegen.gpu.linear.shares import Streaming, Tiling
from compressor.codegen.isa import Isa
from compressor.codegen.lowering.compile import Library, compile_graph
from compressor.codegen.lowering.experts.stack import stack_experts
from compressor.codegen.lowering.kernel_set import Choice, KernelSet
from compressor.codegen.targets.cuda import Cuda
from compressor.errors import UsageError
from compressor.evaluate.quality import GraphLogits
from compressor.graph.caches import empty_caches
from compressor.passes.magnitude import Magnitude
from compressor.pipeline.context import Context
from compressor.run.cuda import CudaBackend

SMALL = Schedule(Streaming(4, 8, 2), *[Streaming(2, 8, 2)] * 2, *[Tiling(1, 1, 2, 1, 2, 2, 1)] * 2)


def small_kernels(isa: Isa) -> KernelSet:
    """Return the kernels with little to unroll, which g++ compiles in half the time."""
    kernels = gpu_kernels(isa)
    return replace(kernels, packed=replace(kernels.packed, choices=lambda *_: [Choice(1, lambda _: [SMALL])]))


@pytest.fixture
def fake_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile CUDA text for the fake driver, in place of nvcc."""
    lockstep.stand_in_for_nvcc(monkeypatch)


class Program:
    """A library on the fake GPU."""

    def __init__(self, graph: GraphModule, library: Library) -> None:
        self.vm = relax.VirtualMachine(library.executable, [tvm.cuda(0), tvm.cpu()])
        self.info = graph.meta["model"]
        self.parameters = [self.held(lockstep.as_array(graph.get_parameter(name))) for name in library.parameters]

    @staticmethod
    def held(x: np.ndarray) -> Any:
        return tvm.runtime.tensor(x, device=tvm.cuda(0))

    def steps(self, ids: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        """Return the logits of all tokens, read in steps of these sizes."""
        caches = [self.held(np.full(c.shape, np.nan, np.float32)) for c in empty_caches(self.info, len(ids), 16)]
        parts, begin = [], 0
        for size in sizes:
            here = np.arange(begin, begin + size)
            given = [self.held(np.ascontiguousarray(x)) for x in (ids[:, here], here, np.arange(size))]
            parts.append(self.vm["main"](*given, *caches, self.parameters).numpy())
            begin += size
        return np.concatenate(parts, axis=1)


def check_steps(graph: GraphModule, families: set[str], close: float) -> None:
    """Compare a prompt, and steps of several sizes, with the graph."""
    CudaBackend(Cuda("sm_90")).check(graph)
    stack_experts(graph)
    ids = np.random.default_rng(1).integers(3, VOCAB, (2, 12))
    expected = GraphLogits(graph)(ids).numpy()
    library = compile_graph(graph, Cuda("sm_90"), tune="off", kernels=small_kernels)
    assert families <= {kernel["family"] for kernel in library.kernels}
    program = Program(graph, library)
    assert relative_error(program.steps(ids, (12,)), expected) < close
    alone = [program.steps(row, (5, 1, 1, 3, 2)) for row in (ids[:1], ids[1:])]
    assert relative_error(np.concatenate(alone), expected) < close


@pytest.mark.usefixtures("fake_nvcc")
def test_experts() -> None:
    cls, options = DECODERS["Qwen 3, experts"]
    graph = capture(make(cls, {**options, "num_hidden_layers": 1}, True))
    graph = quantized(quantized(graph, "W8A8", "re:.*(gate_up_proj.3)$"), "W4A8_C", "re:.*")
    check_steps(graph, {"packed_routed_linear", "top_k"}, 1e-5)


@pytest.mark.usefixtures("fake_nvcc")
def test_sparse_linears() -> None:
    cls, options = DECODERS["Llama"]
    graph = capture(make(cls, {**options, "num_hidden_layers": 1}, True))
    samples = random_samples(VOCAB, 16)
    for scheme, targets in (("W8A16_2:4", "re:.*self_attn.*"), ("W8A16_B16x1@50", "re:.*(mlp|lm_head).*")):
        graph = Magnitude(scheme, targets=targets).run(graph, Context(samples=samples))
    check_steps(graph, {"packed_linear"}, 4e-5)


def test_formats_that_experts_have_no_kernel_for_are_refused_by_name() -> None:
    cls, options = DECODERS["Qwen 3, experts"]
    graph = quantized(capture(make(cls, {**options, "num_hidden_layers": 1}, True)), "W4A16_G32_S1", "Expert")
    with pytest.raises(UsageError, match="do not read what _S1 stores; take another format, or the target x86"):
        CudaBackend(Cuda("sm_90")).check(graph)

"""Programs whose later layers run kept tokens alone: against the definition, in prompts and steps, and its bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import swift_kv_oracle as oracle
import torch
from kernel_cases import Program
from tiny_models import relative_error
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.targets.cuda import Cuda
from compressor.codegen.targets.x86 import X86
from compressor.codegen.web.converters.converter import why_unsupported
from compressor.errors import UsageError
from compressor.evaluate.quality import GraphLogits
from compressor.passes.kv_cache import KvCache
from compressor.passes.swift_kv import SwiftKv
from compressor.pipeline.context import Context
from compressor.run.cuda import CudaBackend

IDS = torch.randint(0, 97, (2, 45), generator=torch.Generator().manual_seed(1))
SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 97}


def kept(*steps: Any) -> tuple[GraphModule, Program]:
    graph = capture(oracle.make_llama(**SIZES))
    for step in (SwiftKv(after=1, share=2, steps=0), *steps):
        graph = step.run(graph, Context())
    library = compile_graph(graph, X86(), tune="off")
    family = "packed_kept_attention" if steps else "kept_attention"
    assert family in {kernel["family"] for kernel in library.kernels}
    return graph, Program(graph, library)


@pytest.mark.parametrize(("steps", "most"), [((), 1e-5), ((KvCache("INT8"),), 0.02)], ids=["float32", "int8"])
def test_the_kernels_compute_what_the_definition_does(steps: Any, most: float) -> None:
    graph, program = kept(*steps)
    expected = GraphLogits(graph)(IDS.numpy())
    if not steps:
        torch.testing.assert_close(expected, oracle.run(oracle.make_llama(**SIZES), IDS, 1, 2)[0], rtol=1e-4, atol=1e-5)
    for chunks in ((45,), (39, 1, 2, 3)):
        whole, few = program.caches(2, 48), program.caches(2, 48)
        begin = 0
        for count in chunks:
            ids, position = IDS[:, begin : begin + count].numpy(), np.arange(begin, begin + count)
            wanted = expected[:, begin : begin + count].numpy()
            assert relative_error(program(ids, position, np.arange(count), *whole), wanted) < most
            assert relative_error(program(ids, position, np.array([count - 1, 0]), *few), wanted[:, [-1, 0]]) < most
            begin += count


def test_kept_tokens_do_not_depend_on_each_other_bit_by_bit() -> None:
    _, program = kept()
    ids, position = IDS[:, :30].numpy(), np.arange(30)
    every = program(ids, position, position, *program.caches(2, 48))
    for keep in ([29], [7, 3], [*range(12, 30)]):
        assert np.array_equal(program(ids, position, np.array(keep), *program.caches(2, 48)), every[:, keep])


def test_targets_without_kernels_refuse_it_by_name() -> None:
    graph = SwiftKv(after=1, steps=0).run(capture(oracle.make_llama(**SIZES)), Context())
    reason = r"has no kernels for layers that run kept tokens alone \(the pass swift_kv\)"
    with pytest.raises(UsageError, match=f"the target cuda {reason}"):
        CudaBackend(Cuda()).check(graph)
    assert "the target webgpu has no kernels for layers that run kept tokens alone" in why_unsupported(graph)

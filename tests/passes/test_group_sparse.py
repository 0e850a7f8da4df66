"""group_sparse: plan, records and weights agree; what has no groups is named; masks against a reference."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import Program, relative_error
from packed_models import drop_weights
from torch import nn
from torch.export import Dim
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.targets.x86 import X86
from compressor.data.text import Samples
from compressor.errors import UsageError
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format
from compressor.graph.model import clone_graph
from compressor.numerics.sparsity.block_sparsity import largest_blocks, left_blocks
from compressor.passes.group_sparse import GroupSparse
from compressor.passes.rtn import Rtn
from compressor.passes.wanda import Wanda
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.run.native import NativeBackend

SCHEME = "W8A8_STATIC_B32x4@30"
IMAGES = torch.randn(12, 3, 12, 12, generator=torch.Generator().manual_seed(0))
BLOCKS = ColumnBlocks(30, 4)
SAMPLES = Samples(IMAGES, torch.empty(0), "", "by chance")


@pytest.fixture(scope="module")
def network() -> GraphModule:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 40, 1),
        nn.Conv2d(40, 24, 3, padding=1, stride=2), nn.Conv2d(24, 36, 1),
    ]  # fmt: skip
    stack = nn.Sequential(*[part for layer in layers for part in (layer, nn.Hardtanh())][:-1])
    return capture(stack.eval(), (IMAGES[:2],), dynamic_shapes=({0: Dim("batch", min=1)},))


def test_plan_records_and_kernels_agree(network: GraphModule) -> None:
    meta = clone_graph(network)
    drop_weights(meta)
    plans = {plan.site: plan for plan in GroupSparse().plan(meta, Context())}
    ctx, rest = Context(samples=SAMPLES), Rtn("W8A8_STATIC", targets="Conv2d")
    graph = Pipeline([GroupSparse(), rest], [VerifyStages()]).run(clone_graph(network), ctx)
    sparse = {record.site: record for record in ctx.records if record.format == SCHEME}
    assert list(sparse) == ["4", "6", "8"] and all(0 < record.error < 0.3 for record in sparse.values())
    for name, record in sparse.items():
        assert (plans[name].format, plans[name].bytes_after) == (SCHEME, record.bytes_after)
    assert plans["0"].note == "stays dense: 3 channels are not a multiple of 4" and "depthwise" in plans["2"].note
    assert [
        note for note in ctx.notes if "0 stays as it is: 3 channels" in note or "2 stays as it is: depthwise" in note
    ]
    library = compile_graph(graph, X86(isa="avx512_vnni"), tune="off")
    families = {kernel["family"] for kernel in library.kernels}
    assert families == {"convolution", "depthwise"}
    if X86().executes(X86(isa="avx512_vnni").resolve()):
        got, expected = torch.from_numpy(Program(graph, library)(IMAGES[:3])), graph(IMAGES[:3])
        # Activations that lie between two codes may get the other one, and all that follows with them.
        assert relative_error(got, expected) < 5e-4


def test_refitting_pays_and_importance_is_that_of_the_outputs(network: GraphModule) -> None:
    errors = {}
    for key, step in {
        "refitted": GroupSparse(targets="re:^4$"),
        "kept": GroupSparse(targets="re:^4$", refit=False),
        "magnitude": GroupSparse(targets="re:^4$", importance="magnitude", pack=False),
    }.items():
        ctx = Context(samples=SAMPLES)
        graph = step.run(clone_graph(network), ctx)
        errors[key] = ctx.records[0].error
        if key == "magnitude":
            weight = next(value for name, value in graph.named_parameters() if name.startswith("4.weight"))
            groups = torch.nn.functional.pad(weight, (0, 0, 0, 24)).view(2, 32, 4, 4).any(1).any(2).sum(1)
            assert groups.tolist() == [3, 3]
            assert left_blocks(weight, 12, BLOCKS) is not None and left_blocks(weight, 8, BLOCKS) is None
    assert errors["refitted"] < errors["kept"]


def test_largest_groups_against_a_reference() -> None:
    rng = torch.Generator().manual_seed(0)
    weight, energy = torch.randn(40, 20, generator=rng), torch.rand(20, generator=rng)
    for hessian in (None, energy):
        kept = largest_blocks(weight, hessian, 8, BLOCKS)
        for tile, columns in enumerate(kept.tolist()):
            rows = weight[tile // 2 * 32 : tile // 2 * 32 + 32].double() ** 2 * (
                1 if hessian is None else hessian.double()
            )
            sizes = {block: float(rows[:, 4 * block : 4 * block + 4].sum()) for block in range(5)}
            best = sorted(sorted(sizes, key=lambda block: -sizes[block])[:2])
            assert columns == [4 * block + i for block in best for i in range(4)]


def test_exact_bytes() -> None:
    fmt = Format.parse(SCHEME)
    assert fmt.stored_columns(320) == 4 * (80 - 24) and fmt.extra(ColumnBlocks) == BLOCKS
    assert fmt.packed_bytes(80, 320) == 80 * 224 + 3 * 16 + 2 * 80 + 4


def test_what_cannot_be_is_said_before_work(network: GraphModule) -> None:
    for make, message in (
        (lambda: GroupSparse("W8A8_STATIC_B16x1@30"), "wanda, sparsegpt and alps leave out blocks of 16x1"),
        (lambda: Wanda(SCHEME), "group_sparse leaves out blocks of 32x4"),
        (lambda: GroupSparse("W8A8_STATIC"), "_B32x4@50: half of the blocks of 32x4"),
        (lambda: Rtn(SCHEME), "of convolutions by group_sparse"),
    ):
        with pytest.raises(UsageError, match=message):
            make()
    with pytest.raises(UsageError, match="nothing to compress: 0 3 channels"):
        GroupSparse(targets="re:^0$").plan(clone_graph(network), Context())
    linear = capture(nn.Sequential(nn.Linear(16, 16)), (torch.zeros(2, 16),), dynamic_shapes=({0: Dim("rows", min=1)},))
    drop_weights(linear)
    GroupSparse(targets="Linear").plan(linear, Context())
    with pytest.raises(UsageError, match="only convolutions of images of fixed size"):
        NativeBackend(X86(), 1).check(linear)

"""`allocate` of the passes that leave blocks out: bytes, errors and records are those that are claimed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from captures import capture_once
from families import DECODERS, make
from packed_models import drop_weights, random_samples
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.model import clone_graph
from compressor.graph.sites import linear_sites
from compressor.numerics.sparsity.block_sparsity import outliers
from compressor.passes.alps import Alps
from compressor.passes.magnitude import Magnitude
from compressor.passes.sparsegpt import Sparsegpt
from compressor.passes.wanda import Wanda
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.pipeline.segment_cache import SegmentCache

SAMPLES = random_samples(97, 32)
SCHEME, SINGLE = "W8A16_B16x1@50", "W8A16_B1x1@50"


@pytest.fixture(scope="module")
def llama() -> GraphModule:
    return capture_once(make(*DECODERS["Llama"], True))


@pytest.mark.parametrize(
    "step",
    [
        Wanda(SINGLE, allocate="owl"),
        Magnitude(SCHEME, allocate="budget"),
        Sparsegpt(SCHEME, allocate="budget", schemes=("W4A16_G32_B16x1@10", "W8A16_B16x1@70"), targets="re:.*layers.0"),
    ],
    ids=["owl", "budget", "bits"],
)
def test_no_more_bytes_than_the_same_share_of_all(step: Pass, llama: GraphModule, tmp_path: Path) -> None:
    meta, planning = clone_graph(llama), Context()
    drop_weights(meta)
    plans = step.plan(meta, planning) or ()
    assert step.runs_samples and any("no more bytes than that" in note for note in planning.notes)
    made = []
    for _ in range(2):
        ctx = Context(samples=SAMPLES, results=SegmentCache(tmp_path), state="model")
        Pipeline([step], [VerifyStages()]).run(clone_graph(llama), ctx)
        made.append(ctx)
    first, second = made
    assert first.records == second.records and first.notes == second.notes and second.reused == second.blocks
    stored = sum(record.bytes_after for record in first.records)
    assert stored <= sum(plan.bytes_after for plan in plans)
    assert len({record.format for record in first.records}) > 1
    assert any(f"{stored:,} bytes, where {step.scheme} takes" in note for note in first.notes)


def test_measured_errors_are_those_of_the_pass(llama: GraphModule) -> None:
    """The first linear sees the dense model's inputs in the pass as well."""
    step = Alps(SCHEME, allocate="budget", targets="re:.*layers.0.self_attn.q_proj")
    sites = [site for site in linear_sites(llama) if site.name.endswith("layers.0.self_attn.q_proj")]
    ctx = Context(samples=SAMPLES)
    fmt = step._formats(llama)[sites[0].name]
    (errors,) = step._errors(llama, ctx, sites, [fmt]).values()
    Pipeline([Alps(SCHEME, targets=step.targets)]).run(clone_graph(llama), ctx)
    assert float(errors[0]) == pytest.approx(ctx.records[0].error, rel=1e-3)


def test_outliers_are_counted_one_by_one() -> None:
    rng = torch.Generator().manual_seed(5)
    weight, x = torch.randn(7, 12, generator=rng), torch.randn(9, 12, generator=rng)
    sizes = [[abs(float(w)) * float(x[:, j].double().square().mean()) ** 0.5 for j, w in enumerate(r)] for r in weight]
    mean = sum(map(sum, sizes)) / weight.numel()
    for factor in (1.0, 2.0, 9.0):
        expected = sum(size > factor * mean for row in sizes for size in row)
        assert outliers(weight, x.double().square().mean(0), factor) == expected


@pytest.mark.parametrize(("options", "message"), [
    ({"allocate": "owl", "owl_lambda": 0.6}, "above 0"),
    ({"allocate": "owl", "owl_factor": 0.0}, "above 0"),
    ({"allocate": "budget", "pack": False}, "no later pass would know it"),
    ({"allocate": "budget", "schemes": ("W4A16_G128",)}, "leaves nothing out"),
    ({"schemes": ("W8A16_B16x1@40",)}, "schemes are what `allocate: budget` chooses from; this is uniform"),
])  # fmt: skip
def test_what_cannot_be_is_said_before_work(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Wanda(SCHEME, **options)  # type: ignore[arg-type]

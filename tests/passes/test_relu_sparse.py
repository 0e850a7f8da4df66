"""relu_sparse: ReLU in the place of SiLU and GELU, a penalty in stages, more zeros, inputs that are skipped exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from captures import capture_once
from families import DECODERS, ENCODERS, make
from interrupted_training import whole_and_resumed
from packed_models import random_samples
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import packed_weight
from compressor.graph.sites import linear_sites, packed_sites
from compressor.passes.activation_sparse import ActivationSparse
from compressor.passes.relu_sparse import ReluSparse
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.training.settings import staged
from compressor.training.trainable import TrainableGraph

SAMPLES = random_samples(97, 16)
ATEN = torch.ops.aten
QUICK = ReluSparse(penalty=3.0, steps=18, batch=4, learning_rate=1e-2, evaluate_every=3, checkpoint_every=5)


@pytest.fixture(scope="module")
def llama() -> GraphModule:
    return capture_once(make(*DECODERS["Llama"], True))


def counts(graph: GraphModule) -> list[int]:
    kinds = (ATEN.silu.default, ATEN.gelu.default, ATEN.relu.default)
    return [len(graph.graph.find_nodes(op="call_function", target=kind)) for kind in kinds]


def test_the_penalty_rises_along_half_waves_and_stays() -> None:
    steps = (0, 10, 20, 30, 40, 50, 60, 75, 90)  # stages of 20 steps
    assert [staged(step, 90) for step in steps] == pytest.approx([min(1, step / 60) for step in steps])
    rates = [staged(step + 1, 90) - staged(step, 90) for step in range(60)]
    assert min(rates) > 0 and max(rates) == pytest.approx(max(rates[9:11])), "steepest amid a stage"


def test_more_neurons_are_zero_and_skipping_them_changes_nothing(llama: GraphModule) -> None:
    ctx = Context(samples=SAMPLES)
    graph = Pipeline([QUICK], [VerifyStages()]).run(clone_graph(llama), ctx)
    silu, _, relu = counts(llama)
    assert counts(graph) == [0, 0, relu + silu] and silu > 0
    after, before = (float(share.strip("%,")) for share in ctx.notes[-1].split() if "%" in share)
    assert 30 < before < 70 and after > before + 5, ctx.notes
    assert " after step 12, " in ctx.notes[0], "states count once the penalty has risen"

    packed = Pipeline([Rtn("W8A16")]).run(graph, Context())
    whole = TrainableGraph(clone_graph(packed))(SAMPLES.ids).last
    ctx = Context(samples=SAMPLES)
    skips = Pipeline([ActivationSparse(0.3, targets="re:.*down_proj")]).run(packed, ctx)
    downs = [packed_weight(skips, site) for site in packed_sites(skips) if site.name.endswith("down_proj")]
    assert all(float(weight.parts["thresholds"].max()) < 1e-30 for weight in downs), "more than 30% are zero"
    assert torch.equal(TrainableGraph(skips)(SAMPLES.ids).last, whole)
    assert float(ctx.notes[-1].split("skips ")[1].split("%")[0]) > before


def test_an_encoder_with_gelu(tmp_path: Path) -> None:
    graph = capture_once(make(*ENCODERS["BERT"], False))
    found = Pipeline([QUICK], [VerifyStages()]).run(clone_graph(graph), Context(samples=SAMPLES))
    assert counts(found)[1] == 0 < counts(graph)[1]


def test_an_interrupted_run_goes_on_to_the_same_bits(llama: GraphModule, tmp_path: Path) -> None:
    # Step 9 is between checkpoints, amid a stage.
    found = whole_and_resumed(lambda ctx: Pipeline([QUICK]).run(clone_graph(llama), ctx), tmp_path, 9, samples=SAMPLES)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert not all(torch.equal(value.detach(), found[0][name]) for name, value in llama.named_parameters())


def test_bad_input(llama: GraphModule) -> None:
    with pytest.raises(UsageError, match="relu_sparse: penalty -1 is not a weight"):
        ReluSparse(penalty=-1.0)
    packed = Rtn("W8A16").run(clone_graph(llama), Context())
    with pytest.raises(UsageError, match="relu_sparse: no dense linear reads a SiLU, GELU or ReLU"):
        ReluSparse().requires(packed, Context())
    assert len(ReluSparse().plan(clone_graph(llama), Context())) == len(linear_sites(llama))

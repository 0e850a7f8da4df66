"""The loop against transformers' model and PyTorch's optimiser; never worse; killed and gone on to the same bits."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from captures import capture_once
from families import DECODERS, make
from packed_models import random_samples
from torch import Tensor, nn
from torch.fx import GraphModule

from compressor.errors import CompressorError, UsageError
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import set_parameter
from compressor.passes.finetune import Finetune
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.segment_cache import SegmentCache
from compressor.training.adamw import AdamW, clip
from compressor.training.checkpoints import Checkpoints
from compressor.training.loop import Training
from compressor.training.objectives.losses import divergence, hidden_error, next_token_loss
from compressor.training.settings import Settings
from compressor.training.trainable import TrainableGraph
from compressor.training.zeros.masks import KeptZeros

SAMPLES = random_samples(97, 16)
TIED = DECODERS["Llama, tied"]
QUICK = Finetune(steps=8, batch=3, evaluate_every=3, checkpoint_every=2, learning_rate=3e-3)


@pytest.fixture(scope="module")
def llama() -> GraphModule:
    return capture_once(make(*TIED, True))


def settings(**changed: object) -> Settings:
    fields = {name: getattr(QUICK, name) for name in Settings.__dataclass_fields__}
    return Settings(**{**fields, **changed})  # type: ignore[arg-type]


def parameters(graph: GraphModule) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in graph.named_parameters()}


def test_training_is_what_transformers_and_pytorch_do(llama: GraphModule) -> None:
    """The same batches, in the same order, with torch.optim.AdamW and clipping: the same weights."""
    model, chosen = make(*TIED, True), settings(steps=4, accumulate=2, clip=0.5, weight_decay=0.1, held_out=0.25)
    names = [name for name, _ in model.named_parameters()]
    trained = TrainableGraph(llama, names)
    training = Training(
        trained, lambda batch, outputs, step: next_token_loss(outputs.last, batch), SAMPLES.ids, chosen,
        KeptZeros(trained.weights, ()), Checkpoints(None, "", ""), seed=3,
    )  # fmt: skip
    training.run(Context().reporter.task("", 4).__enter__())
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    left, taken = SAMPLES.ids[order[2:]], []
    for turn in range(4):
        taken.append(torch.randperm(6, generator=torch.Generator().manual_seed(3 * 1_000_003 + turn + 1)))
    batches = torch.cat(taken).view(-1, 3)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == is_2d] for is_2d in (True, False))
    optimiser = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])
    model.requires_grad_(True)
    for step in range(4):
        for group in optimiser.param_groups:
            group["lr"] = chosen.rate(step)
        optimiser.zero_grad()
        for ids in batches[2 * step : 2 * step + 2]:
            (model(left[ids], labels=left[ids]).loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimiser.step()
    begun = dict(make(*TIED, True).named_parameters())
    for name, weight in model.named_parameters():
        moved = (weight - begun[name]).detach().abs().max()
        assert float(moved) > 1e-3
        torch.testing.assert_close(trained.weights[name].detach(), weight.detach(), rtol=0, atol=2e-2 * float(moved))


def test_the_optimiser_is_pytorch_s() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = {name: torch.randn(*shape, generator=generator) for name, shape in (("m", (5, 7)), ("v", (7,)))}
    theirs = [nn.Parameter(ours["m"].clone()), nn.Parameter(ours["v"].clone())]
    optimiser, reference = AdamW(ours, 0.1), torch.optim.AdamW(
        [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}], lr=0.01
    )  # fmt: skip
    for t in range(1, 6):
        for weight, other in zip(ours.values(), theirs, strict=True):
            weight.grad = torch.randn(weight.shape, generator=generator)
            other.grad = weight.grad.clone()
        assert clip(ours, 1.0) == pytest.approx(float(nn.utils.clip_grad_norm_(theirs, 1.0)), rel=1e-5)
        optimiser.step(t, 0.01)
        reference.step()
    for weight, other in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(weight, other.detach(), rtol=1e-5, atol=1e-6)


def test_losses_are_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    s, t = (torch.randn(2, 5, 7, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    ids = torch.randint(7, (2, 5), generator=generator)
    rows = [-torch.log_softmax(s[b, i], 0)[ids[b, i + 1]] for b in range(2) for i in range(4)]
    torch.testing.assert_close(next_token_loss(s, ids), torch.stack(rows).mean())
    p, q = torch.softmax(t / 2, -1), torch.softmax(s / 2, -1)
    torch.testing.assert_close(divergence(s, t, 2.0), 4 * (p * (p / q).log()).sum(-1).mean())
    torch.testing.assert_close(hidden_error([s], [t]), ((s - t).norm(dim=-1) / t.norm(dim=-1)).square().mean())
    assert torch.autograd.gradcheck(lambda x: divergence(x, t.detach(), 2.0), (s,))
    assert torch.autograd.gradcheck(lambda x: next_token_loss(x, ids), (s,))


def test_rates_rise_and_fall_to_zero() -> None:
    for shape in ("cosine", "linear"):
        rates = [settings(steps=20, warmup=0.2, schedule=shape).rate(step) for step in range(21)]
        assert rates[:5] == sorted(rates[:5]) and rates[4:] == sorted(rates[4:], reverse=True)
        assert max(rates) == rates[4] == QUICK.learning_rate and rates[20] == pytest.approx(0.0, abs=1e-12)


def test_it_learns_and_says_what_it_did(llama: GraphModule) -> None:
    graph, ctx = clone_graph(llama), Context(samples=SAMPLES)
    before = parameters(graph)
    Pipeline([Finetune(steps=20, learning_rate=3e-3, evaluate_every=5)], [VerifyStages()]).run(graph, ctx)
    (note,) = ctx.notes
    begun, best = (float(note.split(word)[0].split()[-1].strip(",")) for word in (" at the start", " after step"))
    assert best < begun
    after = parameters(graph)
    assert after.keys() == before.keys() and all(after[name].dtype == before[name].dtype for name in after)
    assert {r.site for r in ctx.records if r.error > 0} == {r.site for r in ctx.records} and len(ctx.records) == 15
    assert graph.get_parameter("model.embed_tokens.weight") is graph.get_parameter("model.embed_tokens.weight")
    assert any("tied" in r.note for r in ctx.records)


def test_never_worse_than_before(llama: GraphModule) -> None:
    """At an absurd rate nothing is better than the start, which stays, bit for bit."""
    graph, ctx = clone_graph(llama), Context(samples=SAMPLES)
    before = parameters(graph)
    Pipeline([Finetune(steps=6, learning_rate=30.0, evaluate_every=2, patience=2)], [VerifyStages()]).run(graph, ctx)
    assert all(torch.equal(value, before[name]) for name, value in parameters(graph).items())
    assert ": it stays; " in ctx.notes[0] and "it ended after step 4" in ctx.notes[0]


def test_zeros_stay_zero_and_biases_need_not() -> None:
    graph = capture_once(make(*DECODERS["GPT-2"], True))
    weight, bias = "transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_fc.bias"
    pruned = graph.get_parameter(weight).detach().clone()
    pruned[:16, ::2] = 0.0
    set_parameter(graph, weight, pruned)
    set_parameter(graph, bias, torch.zeros_like(graph.get_parameter(bias)))
    Pipeline([Finetune(steps=10, learning_rate=3e-3, weight_decay=0.1)]).run(graph, Context(samples=SAMPLES))
    after = graph.get_parameter(weight).detach()
    assert torch.equal(after == 0, pruned == 0) and not torch.equal(after, pruned)
    assert bool((graph.get_parameter(bias) != 0).any())


CHILD = """
import sys; sys.path += sys.argv[2:]
import torch; torch.set_num_threads(1)
from test_training import trained
trained(sys.argv[1])
"""


def trained(cache: Path) -> tuple[Context, dict[str, Tensor]]:
    ctx = Context(samples=SAMPLES, results=SegmentCache(Path(cache)), state="model")
    graph = Pipeline([QUICK], [VerifyStages()]).run(capture_once(make(*TIED, True)), ctx)
    return ctx, parameters(graph)


def test_a_killed_training_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected, cache = trained(tmp_path / "undisturbed")[1], tmp_path / "killed"
        folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(cache), *folders])
        deadline = time.monotonic() + 120
        while not list(cache.glob("[0-9a-f]*/entry.json")):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
        child.wait()
        begun = list(cache.glob("[0-9a-f]*/entry.json"))
        ctx, found = trained(cache)
        assert len(begun) in (1, 2) and ctx.reused == 0
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        again, third = trained(cache)
        assert again.reused == 1 and again.notes == ctx.notes and again.records == ctx.records
        assert all(torch.equal(third[name], value) for name, value in expected.items())
        assert len(list(cache.glob("[0-9a-f]*"))) == 1 and not list(cache.glob(".*.partial")), "only the result stays"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "finetune: steps 0 is not a whole number from 1"),
        ({"learning_rate": 0.0}, "learning_rate 0 is not a number above 0"),
        ({"warmup": 1.0}, "warmup 1 is not a share of the steps"),
        ({"held_out": 1.0}, "held_out 1 is not a share of the samples"),
        ({"weight_decay": -1.0}, "weight_decay -1 is not a number from 0"),
        ({"targets": "q_prj"}, "nearest .*q_proj"),
    ],
)
def test_what_cannot_be_is_said_before_work(options: dict[str, object], message: str, llama: GraphModule) -> None:
    with pytest.raises(UsageError, match=message):
        Finetune(**options).requires(llama, Context())  # type: ignore[arg-type]


def test_one_sample_cannot_be_divided(llama: GraphModule) -> None:
    one = random_samples(97, 16)
    one = type(one)(one.ids[:1], one.rest, "one", "random tokens")
    with pytest.raises(CompressorError, match="1 sample leaves none to be held out"):
        QUICK.run(clone_graph(llama), Context(samples=one))

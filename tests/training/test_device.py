"""Where a training computes: all of it on one device, process left as it was; on a GPU the CPU's losses, equal bits."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import capture_once
from families import DECODERS, ENCODERS, make
from interrupted_training import whole_and_resumed
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compressor.data.text import Samples, tokens_sha256
from compressor.errors import CompressorError, ResourceError, UsageError
from compressor.formats.extras import ColumnBlocks, KeptOfGroup, SingleZeros
from compressor.formats.format import FORMATS, Format
from compressor.formats.packing import dequantize, meta_packed
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import linear_sites
from compressor.numerics.sparsity.n_of_m import Pattern, largest_of_groups
from compressor.ops.linear import packed_product
from compressor.passes.distill import Distill
from compressor.passes.finetune import Finetune
from compressor.passes.learned_mask import LearnedMask
from compressor.passes.magnitude import Magnitude
from compressor.passes.polarised_gates import PolarisedGates
from compressor.passes.relu_sparse import ReluSparse
from compressor.passes.rtn import Rtn
from compressor.passes.sparse_train import SparseTrain
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.plan.streaming import plan_training
from compressor.training.device import Device, gpu_facts
from compressor.training.trainable import TrainableGraph
from compressor.training.zeros.choices import Choices
from compressor.training.zeros.gates import Gates
from compressor.training.zeros.masks import GrowingBlocks

GPU = "cuda"
IDS = torch.randint(3, 9, (32, 24), generator=torch.Generator().manual_seed(0))  # few words: something can be learned
SAMPLES = Samples(IDS, IDS.flatten(), tokens_sha256(IDS), "random tokens")
QUICK: dict[str, Any] = {"steps": 9, "batch": 3, "evaluate_every": 3, "checkpoint_every": 2, "learning_rate": 3e-3}
PRUNE = Magnitude("W8A16_B16x1@50", pack=False)
SPARSE = ("W8A16_2:4", "W4A16_G64_B16x1@50", "W8A8_B32x64@50", "W8A16_B1x1@50", "LUT3_S0.45", "W8A8_F8", "W8A16_SKIP")
TRAININGS: dict[str, list[Pass]] = {
    "finetune": [Finetune(**QUICK)],
    "finetune beside packed": [Rtn("W4A8_G64", ignore="lm_head"), Finetune(**QUICK, targets="lm_head")],
    "distill": [PRUNE, Distill(**QUICK, hidden=0.5)],
    "adapters": [PRUNE, Distill(**QUICK, adapter_rank=4)],
    "blocks": [PRUNE, Distill(**QUICK, by_block=True)],
    "cubic": [SparseTrain(scheme="W8A16_B16x1@50", **QUICK)],
    "admm": [SparseTrain(scheme="W8A16_B16x1@50", **QUICK, method="admm", project_every=2)],
    "learned_mask": [LearnedMask(scheme="W8A16_2:4", **{**QUICK, "learning_rate": 0.3}, refit=False)],
    "polarised_gates": [PolarisedGates(scheme="W8A16_B1x1@50", **QUICK)],
    "relu_sparse": [ReluSparse(**QUICK)],
    "experts": [Finetune(**QUICK)],
}


@pytest.fixture(scope="module")
def gpu() -> None:
    """Require a GPU."""
    try:
        gpu_facts("tests")
    except UsageError as error:
        pytest.skip(str(error))


class OneDevice(TorchDispatchMode):
    """Refuses operators with tensors of two devices, which PyTorch's meta device lets pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at an operator's tensors before it runs."""
        found = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()}
        moves = str(func) in ("aten._to_copy.default", "aten.copy_.default")
        assert len(found) < 2 or moves, f"{func}: {found}"
        return func(*args, **(kwargs or {}))


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1)).eval()


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "BERT", "convolutions"])
def test_every_operator_runs_on_the_device(family: str) -> None:
    batch = SAMPLES.ids[:2]
    if family == "convolutions":
        batch = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        graph = capture_once(conv_net().requires_grad_(False), (batch,))
    else:
        graph = capture_once(make(*(DECODERS | ENCODERS)[family], family in DECODERS))
    names = [name for name, value in graph.named_parameters() if value.is_floating_point()][::2]
    expected = TrainableGraph(graph, names)(batch).last
    with OneDevice():
        found = TrainableGraph(graph, names, device=Device("meta"))(batch).last  # type: ignore[arg-type]
    assert found.is_meta and found.shape == expected.shape and found.requires_grad
    assert not any(value.is_meta for value in graph.parameters())


@pytest.mark.parametrize("name", [*FORMATS, *SPARSE])
def test_packed_weights_are_unpacked_where_they_are(name: str) -> None:
    packed = meta_packed(64, 512, Format.parse(name))
    with OneDevice():
        found = packed_product(torch.empty(3, 512, device="meta"), packed)
        assert dequantize(packed).is_meta
    assert found.is_meta and found.shape == (3, 64)


def test_blocks_are_chosen_where_the_weights_are() -> None:
    weights = {"w": torch.empty(64, 128, device="meta")}
    masks = GrowingBlocks(weights, {"w": 64}, {"w": torch.ones(128)}, 6, ColumnBlocks(50, 4))
    with OneDevice():
        for step in range(1, 7):
            masks.after_step(step, weights)
    assert masks.state()["w"].is_meta


@pytest.mark.parametrize("pattern", [SingleZeros(50), KeptOfGroup(2, 4)])
def test_gates_are_decided_where_the_weights_are(pattern: Pattern) -> None:
    weights, first = {"w": torch.empty(64, 128, device="meta")}, {"w": torch.rand(64, 128)}
    gates = Gates(weights, first, pattern, 6, lambda _: 0.1, 1.0, 10.0, True)
    with OneDevice():
        assert gates.fused()["w"].is_meta
        gates.after_step(1, {})
    assert gates.state()["w"].is_meta and gates.leaves["w.scores"].is_meta


def test_a_shared_tensor_has_one_copy() -> None:
    graph = capture_once(make(*DECODERS["Llama"], True))
    device, name = Device("meta"), "lm_head.weight"  # type: ignore[arg-type]
    first, second = (of.get_parameter(name) for of in (graph, clone_graph(graph)))
    assert device.of(first) is device.of(second) and device.of(first).is_meta
    assert device.of(first[:8]) is not device.of(first) and device.of(first[:8]).shape == first[:8].shape
    assert Device().of(first) is first


def settings() -> dict[str, Any]:
    libraries = torch.backends.cudnn
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fills": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "precision": torch.get_float32_matmul_precision(),
        "cuDNN": (libraries.enabled, libraries.benchmark, libraries.deterministic, libraries.allow_tf32),
        "environment": dict(os.environ),
    }


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("workspace", [None, ":16:8", ":0:0"])
def test_settings_are_put_back(precision: str, workspace: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if workspace is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        before = settings()
        with pytest.raises(ZeroDivisionError), Device("cuda").computing("distill", ["lower `batch`"]):
            inside = settings()
            assert inside["deterministic"] and not inside["warn only"] and inside["precision"] == "highest"
            assert inside["cuDNN"] == (True, False, True, False)
            assert inside["environment"]["CUBLAS_WORKSPACE_CONFIG"] == (":16:8" if workspace == ":16:8" else ":4096:8")
            _ = 1 / 0
        assert settings() == before
        with Device("cpu").computing("distill", []):
            assert settings() == before, "a training on the CPU changes nothing"
    finally:
        torch.set_float32_matmul_precision(usual)


def test_a_plan_counts_no_time_on_a_gpu_and_no_batch_in_memory() -> None:
    graph, found = capture_once(make(*DECODERS["Llama"], True)), []
    for step in (Finetune(**QUICK), Finetune(**QUICK, device="cuda")):
        plans = step.plan(graph, Context(samples=SAMPLES))
        found.append((max(plan.working_bytes for plan in plans), plan_training(graph, step.training, plans, 24)))
    (copies, cpu), (same, gpu) = found
    assert same == copies and cpu.work and not gpu.work
    assert gpu.working_bytes == copies < cpu.working_bytes and gpu.weight_bytes == cpu.weight_bytes


def test_a_gpu_that_is_not_here_is_said_before_work() -> None:
    if torch.cuda.is_available():
        pytest.skip("PyTorch sees a GPU")
    graph = capture_once(make(*DECODERS["Llama"], True))
    for step in (Finetune(device="cuda"), Distill(device="cuda"), LearnedMask(scheme="W8A16_2:4", device="cuda")):
        with pytest.raises(UsageError, match=rf"{step.name}: device cuda needs a GPU, and .*; or set `device: cpu`"):
            step.requires(graph, Context(samples=SAMPLES))
    with pytest.raises(UsageError, match="finetune: device mps is none of cpu, cuda"):
        Finetune(device="mps")  # type: ignore[arg-type]


def test_masks_of_refitted_weights_are_drawn_on_the_device() -> None:
    weight, pattern = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), KeptOfGroup(2, 4)
    kept = largest_of_groups(weight.abs(), pattern)
    choices = Choices({"w": weight.to("meta")}, {"w": kept}, pattern, 4, 0, {"w": weight * kept})
    with OneDevice():
        assert {choices.fused()["w"].device, choices.stored()["w"].device} == {torch.device("meta")}


def damaged(graph: GraphModule, noise: float = 0.5) -> GraphModule:
    """Change weights by so much of each: a half gives a teacher something to teach.  Zeros stay."""
    generator = torch.Generator().manual_seed(1)
    for site in linear_sites(graph):
        weight = graph.get_parameter(site.weight_name).detach()
        set_parameter(graph, site.weight_name, weight * (1 + noise * torch.randn(weight.shape, generator=generator)))
    return graph


@pytest.mark.parametrize("name", TRAININGS)
def test_a_gpu_trains_as_the_cpu_does_and_goes_on_to_the_same_bits(gpu: None, name: str, tmp_path: Path) -> None:
    *before, last = TRAININGS[name]
    dense = capture_once(make(*DECODERS["Mixtral" if name == "experts" else "Llama"], True))
    begun = Pipeline(before).run(clone_graph(dense), Context(samples=SAMPLES))
    begun = damaged(begun) if isinstance(last, Distill) else begun

    def trained(ctx: Context, device: str = GPU, graph: GraphModule = begun) -> GraphModule:
        ctx.samples, ctx.dense = SAMPLES, dense
        return dataclasses.replace(last, device=device).run(clone_graph(graph), ctx)  # type: ignore[call-arg, type-var]

    expected, usual = dict(trained(Context(), "cpu").named_parameters()), settings()
    whole, resumed = whole_and_resumed(trained, tmp_path, 5)
    again = dict(trained(Context()).named_parameters())
    assert settings() == usual
    for key in expected:
        assert torch.equal(whole[key], resumed[key]) and torch.equal(whole[key], again[key]), key
        assert whole[key].device.type == "cpu"
    moved, most = apart(dict(begun.named_parameters()), expected), 0.01
    if isinstance(last, SparseTrain):  # a block that is as large as another goes or stays by the last bit
        nearly = dict(trained(Context(), "cpu", damaged(clone_graph(begun), 2.0**-24)).named_parameters())
        most = max(most, 2 * apart(nearly, expected) / moved)
    assert apart(whole, expected) <= most * moved and moved > 0, f"{apart(whole, expected)} of {moved}, allowed: {most}"


def apart(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Return the squared distance of two sets of weights."""
    pairs = ((first[key], value) for key, value in second.items() if value.is_floating_point())
    return sum(float((mine - other).double().square().sum()) for mine, other in pairs)


def test_a_gpu_trains_convolutions_in_float32(gpu: None) -> None:
    x = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    samples = Samples(x, torch.empty(0, dtype=torch.int64), tokens_sha256(torch.arange(24)), "noise")
    graph, found = capture_once(conv_net().requires_grad_(False), (x[:1],)), []
    for device in ("cpu", GPU):
        ctx, step = Context(samples=samples), Distill(**QUICK, device=device)  # type: ignore[arg-type]
        prune = Magnitude("W8A16_B16x1@50", pack=False, targets="Conv2d")
        found.append(
            dict(
                Pipeline([prune, dataclasses.replace(step, targets=prune.targets)])
                .run(clone_graph(graph), ctx)
                .named_parameters()
            )
        )
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-3, atol=1e-4, msg=lambda m, k=key: f"{k}: {m}")


def test_a_gpu_that_is_too_small_is_said_before_work(gpu: None) -> None:
    graph = capture_once(make(*DECODERS["Llama"], True))
    set_parameter(graph, linear_sites(graph)[0].weight_name, torch.empty(1 << 20, 1 << 20, device="meta"))
    for step, advice in (Finetune(device="cuda"), "in `targets`"), (Distill(device="cuda"), "set `by_block: true`"):
        with pytest.raises(UsageError, match=rf"{step.name}: what is trained takes 16384.\d GiB .*{advice}, or set"):
            step.requires(graph, Context(samples=SAMPLES))
    Finetune(device="cuda", adapter_rank=4, vectors=False).requires(graph, Context(samples=SAMPLES))


def test_what_a_gpu_cannot_do_is_explained(gpu: None) -> None:
    full = r"finetune: the memory of .* GiB are left, .* lower `batch`, or set `device: cpu`"
    with pytest.raises(ResourceError, match=full), Device("cuda").computing("finetune", ["lower `batch`"]):
        torch.empty(1 << 48, dtype=torch.uint8, device="cuda")
    never = r"distill: on a GPU this model cannot be trained .* set `device: cpu`"
    with pytest.raises(CompressorError, match=never), Device("cuda").computing("distill", []):
        x = torch.randn(1, 1, 8, 8, device="cuda", requires_grad=True)
        nn.functional.adaptive_max_pool2d(x, 3).sum().backward()

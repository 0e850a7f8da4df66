"""Lowered programs against the graphs they come from, and the check that weights stay packed on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from kernel_cases import Program
from tiny_models import DECODERS, GROUPED, SIZES, build, quantized, relative_error, transformers
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule
from tvm import relax

from compressor.capture.capture import capture
from compressor.codegen.lowering import kernel_set
from compressor.codegen.lowering import phases as lowering_phases
from compressor.codegen.lowering.compile import Library, compile_graph
from compressor.codegen.lowering.importer import check_operators
from compressor.codegen.lowering.phases import check_storage
from compressor.codegen.targets.x86 import AMX, X86
from compressor.data.text import Samples
from compressor.errors import CaptureError, VerificationError
from compressor.evaluate.quality import GraphLogits, graph_hidden
from compressor.passes.kv_cache import KvCache
from compressor.pipeline.context import Context

FUSED = {  # codegen/fusion.py
    "llama": {
        "packed_linear_64_32_32x64_W4A16_G32_of_rms_norm_1em06",
        "packed_linear_64x64_W4A16_G32_plus",
        "packed_linear_64_64x64_W4A16_G32_of_rms_norm_1em06",
        "packed_linear_64x64_W4A16_G32_of_silu_mul_plus",
    },
    "gemma2": {"packed_linear_64x64_W4A16_G32_of_gelu_tanh_mul"},
    "opt": {"packed_linear_64x64_W4A16_G32_bias_of_relu_plus"},
}
PACKED_HEAD = "qwen3"  # elsewhere it stays dense, and in some is tied to the embedding
TOLERANCE = 1e-5  # relative, root mean square: rounding of float32 sums in different orders
# AMX takes 16 of the 24 bits of float activations, in each of a model's linears.
NATIVE_TOLERANCE = 4e-5 if X86().executes(AMX) else TOLERANCE


def decoding_error(graph: GraphModule, library: Library) -> float:
    """Largest error over a prompt at once, and over steps of several sizes from an empty cache."""
    program, ids = Program(graph, library), np.random.default_rng(1).integers(3, 97, (2, 12))
    expected = GraphLogits(graph)(ids).numpy()
    errors = []
    for steps in ((12,), (5, 1, 1, 3, 2)):
        caches, begin = program.caches(2, 16), 0
        for step in steps:
            here = slice(begin, begin + step)
            position = np.arange(begin, begin + step)
            logits = program(np.ascontiguousarray(ids[:, here]), position, np.arange(step), *caches)
            errors.append(relative_error(logits, expected[:, here]))
            begin += step
    return max(errors)


@pytest.mark.parametrize("name", sorted(DECODERS.keys() - {"llama"}))  # as the shipped model; see end_to_end
def test_decoder(name: str, tmp_path: Path) -> None:
    build(DECODERS[name]()).half().save_pretrained(tmp_path)
    graph = quantized(capture(tmp_path), "W4A16_G32", ignore=() if name == PACKED_HEAD else ("lm_head",))
    library = compile_graph(graph, X86(), tune="off")
    assert decoding_error(graph, library) < NATIVE_TOLERANCE
    families = {kernel["family"] for kernel in library.kernels}
    assert {"packed_linear", "cached_attention", "embedding"} < families
    assert FUSED.get(name, set()) <= {kernel["name"] for kernel in library.kernels}
    assert {kernel["evidence"] for kernel in library.kernels} == {"executed"}
    assert sorted(library.parameters) == sorted(dict(graph.named_parameters()))


@pytest.mark.parametrize(("dtype", "scheme"), [(torch.bfloat16, "W4A16_ASYM_G32"), (torch.float32, "W8A16")])
def test_storage_types_of_checkpoints(dtype: torch.dtype, scheme: str, tmp_path: Path) -> None:
    build(transformers.LlamaConfig(**GROUPED)).to(dtype).save_pretrained(tmp_path)
    graph = quantized(capture(tmp_path), scheme, ("gate_proj", "down_proj"))
    assert decoding_error(graph, compile_graph(graph, X86(), tune="off")) < NATIVE_TOLERANCE


def test_integer_activations() -> None:
    """Where sums differ in their last bit, an activation may be rounded to the next int8."""
    graph = quantized(capture(build(transformers.LlamaConfig(**GROUPED))), "W4A8_G32", ("q_proj", "up_proj"))
    assert decoding_error(graph, compile_graph(graph, X86(), tune="off")) < 0.02


def test_packed_caches() -> None:
    """Where sums differ in their last bit, a key may be rounded to the next code."""
    rng = torch.Generator().manual_seed(0)
    samples = Samples(torch.randint(3, 97, (4, 16), generator=rng), torch.arange(0), "", "")
    step, dense = KvCache("BFP4_G8", permute=True), capture(build(transformers.LlamaConfig(**GROUPED)))
    graph = step.run(dense, Context(samples=samples))
    library = compile_graph(graph, X86(), tune="off")
    assert decoding_error(graph, library) < 0.01
    assert {"pack_cache", "packed_attention"} < {kernel["family"] for kernel in library.kernels}


def test_the_other_instruction_set() -> None:
    if not X86().executes(X86("avx2").resolve()):
        pytest.skip("this machine has no AVX2")
    graph = quantized(capture(build(transformers.LlamaConfig(**GROUPED))), "W4A16_G32", ("q_proj", "down_proj"))
    assert decoding_error(graph, compile_graph(graph, X86("avx2"), tune="off")) < TOLERANCE


def test_encoder_with_padding(tmp_path: Path) -> None:
    config = transformers.BertConfig(**{**SIZES, "num_hidden_layers": 2})
    build(config, transformers.AutoModel).half().save_pretrained(tmp_path)
    graph = quantized(capture(tmp_path), "W4A16_G32")
    dumped: dict[str, str] = {}
    library = compile_graph(graph, X86(), tune="off", dump=dumped.__setitem__)
    program, rng = Program(graph, library), np.random.default_rng(2)
    for batch, length in ((1, 1), (2, 9), (3, 64)):
        ids, mask = rng.integers(0, 97, (batch, length)), np.ones((batch, length), np.float32)
        mask[-1, (length + 1) // 2 :] = 0
        kept = mask > 0
        got, expected = program(ids, mask), graph_hidden(graph)(ids, mask).numpy()
        assert relative_error(got[kept], expected[kept]) < TOLERANCE
    assert "masked_attention" in {kernel["family"] for kernel in library.kernels}
    shapes = ("64_64_64x64_W4A16_G32_bias", "64x64_W4A16_G32_bias_plus", "64x64_W4A16_G32_bias_of_gelu_plus")
    assert {f"packed_linear_{shape}" for shape in shapes} < {kernel["name"] for kernel in library.kernels}
    # The attention reads what the linears wrote.
    assert "transpose" in dumped["legalize"] and "transpose" not in dumped["drop_dead_code"]


class Attention(nn.Module):
    """Queries and keys as linears leave them, turned in two spellings; values that only look so."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        turned = q.transpose(-2, 1), k.permute(0, 2, 1, -1), v.transpose(2, 3)
        out: Tensor = torch.ops.compressor.masked_attention(*turned, mask, 0.3)
        return out


def test_attention_looks_through_the_transposes_that_it_can() -> None:
    q, k = (torch.randn(2, 7, 3, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    v, mask = torch.randn(2, 3, 8, 7, generator=torch.Generator().manual_seed(2)), torch.ones(2, 7)
    mask[1, 4:] = 0
    graph = capture(Attention(), (q, k, v, mask))
    library = compile_graph(graph, X86(), tune="off")
    got = Program(graph, library)(q.numpy(), k.numpy(), v.numpy(), mask.numpy())
    assert relative_error(got, Attention()(q, k, v, mask)) < TOLERANCE
    assert [kernel["name"] for kernel in library.kernels] == ["masked_attention_3_3_8_0p3_q_k"]


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 64), nn.Linear(64, 7)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.second(torch.nn.functional.gelu(self.first(x))), dim=-1)


def test_plain_module_with_a_symbolic_batch() -> None:
    module = build_perceptron()
    graph = capture(module, (torch.zeros(3, 40),), dynamic_shapes=({0: Dim("batch", min=1)},))
    graph = quantized(graph, "W4A16_G32")
    library = compile_graph(graph, X86(), tune="off")
    program = Program(graph, library)
    for batch in (1, 5):
        x = torch.randn(batch, 40, generator=torch.Generator().manual_seed(batch))
        assert relative_error(program(x.numpy()), graph(x).detach().numpy()) < TOLERANCE


def build_perceptron() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Perceptron().eval().requires_grad_(False)


# --- the silent undo: weights that a compiler expands again


def test_storage_is_checked_after_import_and_after_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name, _ in lowering_phases.phases()]
    assert len(set(names)) == len(names)
    assert not any("FoldConstant" in str(phase.info) for _, phase in lowering_phases.phases())
    seen: list[tuple[str, int | None]] = []

    def recording(mod: tvm.IRModule, phase: str, dense_elements: int | None, activations: frozenset[int]) -> None:
        seen.append((phase, dense_elements))
        check_storage(mod, phase, dense_elements, activations)

    monkeypatch.setattr(lowering_phases, "check_storage", recording)
    dumped: dict[str, str] = {}
    # 30 rows of fixed number: activations of more elements than the smallest weight, 7 x 64, are no weights
    graph = quantized(capture(build_perceptron(), (torch.zeros(30, 40),)), "W4A16_G32")
    compile_graph(graph, X86(), tune="off", dump=dumped.__setitem__)
    assert seen == [(name, 7 * 64) for name in ("import", *names)]
    assert list(dumped) == ["fuse", *names]
    assert all("packed_linear" in text for phase, text in dumped.items() if phase != "fuse")


def test_a_phase_that_binds_weights_as_constants_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).eval().requires_grad_(False)
    graph = quantized(capture(module, (torch.zeros(3, 512),)), "W4A16_G128")

    @tvm.transform.module_pass(opt_level=0, name="BindWeights")
    def bind(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        weights = [p for p in mod["main"].params if p.name.endswith("codes")]
        zeros = {p: np.zeros([int(n) for n in p.ty.shape], "int32") for p in weights}
        assert len(zeros) == 2
        mod["main"] = mod["main"].bind_params(zeros)
        return mod

    phases = lowering_phases.phases()
    monkeypatch.setattr(kernel_set, "phases", lambda: [("bind_weights", bind), *phases])
    with pytest.raises(VerificationError, match="phase bind_weights: 262144 bytes of constants") as caught:
        compile_graph(graph, X86(), tune="off")
    assert caught.value.exit_code == 4


def dequantizing(rows: int, columns: int, constant: bool) -> tvm.IRModule:
    """Compute a linear the way a general compiler sees it: unpack, scale, multiply, each an operator of its own."""
    rng = np.random.default_rng(0)
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([tvm.tirx.Var("n", "int64"), columns], "float32"))
    packed_type, scale_type = relax.TensorType([rows, columns // 8, 1], "int32"), relax.TensorType([rows, 1], "float32")
    codes: Any = relax.Var("codes", packed_type)
    scales: Any = relax.Var("scales", scale_type)
    parameters = [x] if constant else [x, codes, scales]
    if constant:
        codes = relax.const(rng.integers(0, 1 << 30, (rows, columns // 8, 1)).astype("int32"))
        scales = relax.const(np.ones((rows, 1), "float32"))
    op = relax.op
    with bb.function("main", parameters):
        with bb.dataflow():
            shifts = bb.emit(relax.const(np.arange(0, 32, 4, dtype="int32").reshape(1, 1, 8)))
            nibbles = bb.emit(op.bitwise_and(op.right_shift(codes, shifts), relax.const(15, "int32")))
            weight = bb.emit(op.multiply(op.astype(op.reshape(nibbles, (rows, columns)), "float32"), scales))
            y = bb.emit_output(op.matmul(x, op.permute_dims(weight)))
        bb.emit_func_output(y)
    return bb.finalize()


def test_folded_constants_are_caught() -> None:
    """What TVM's default pipeline does to packed constants: evaluates them back to the dense weight."""
    rows, columns = 256, 320  # packed 40 kB, dense 320 kB
    packed = dequantizing(rows, columns, constant=True)
    check_storage(packed, "import", None)
    folded = relax.transform.FoldConstant()(relax.transform.LegalizeOps()(packed))
    with pytest.raises(VerificationError, match=r"phase fold: .* bytes of constants .* folded into the program"):
        check_storage(folded, "fold", None)


@pytest.mark.parametrize("last", ["import", "legalize", "fuse_tir", "schedule_elementwise", "plan_memory", "allocate"])
def test_a_dense_weight_at_run_time_is_caught_in_every_form(last: str) -> None:
    """As operators, as calls of generated kernels, fused into one kernel that has it as a temporary, as storage."""
    rows, columns = 64, 96
    mod = dequantizing(rows, columns, constant=False)
    with X86().tvm_target(X86("avx2").resolve()):
        for name, phase in lowering_phases.phases():
            if last == "import":
                break
            mod = phase(mod)
            if name == last:
                break
    check_storage(mod, last, rows * columns + 1)
    with pytest.raises(VerificationError, match=f"phase {last}: a dense weight is computed at run time"):
        check_storage(mod, last, rows * columns)


def test_an_operator_without_a_lowering_is_refused_by_name() -> None:
    class Unusual(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(x)

    graph = capture(Unusual(), (torch.zeros(3),))
    with pytest.raises(VerificationError, match=r"lowering, phase import: .*bessel_j0"):
        compile_graph(graph, X86(), tune="off")


def test_an_operator_that_cannot_be_lowered_is_refused_with_its_place() -> None:
    class Assigns(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.index_put([x > 0], y)

    graph = capture(Assigns(), (torch.tensor([-1.0, 1.0, 2.0]), torch.zeros(2)))
    reason = r"test_compile\.py:\d+: the operator index_put\.default has no kernel as it is called here \(.*basic"
    with pytest.raises(CaptureError, match=reason):
        compile_graph(graph, X86(), tune="off")
    with pytest.raises(CaptureError, match=r"test_compile\.py:\d+: picks by a mask, and how many it picks is unknown"):
        check_operators(graph, ())


def test_dumped_programs_and_kernel_records_are_plain_data() -> None:
    graph = quantized(capture(build_perceptron(), (torch.zeros(3, 40),)), "W4A16_G32")
    library = compile_graph(graph, X86(), tune="off")
    assert json.loads(json.dumps(library.kernels)) == library.kernels
    for kernel in library.kernels:
        assert {"name", "family", "isa", "evidence"} <= set(kernel)

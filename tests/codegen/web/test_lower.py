"""Programs for WebGPU and WebAssembly against the graphs they come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import encoder_decoders
import numpy as np
import pytest
import torch
from tiny_models import DECODERS, SIZES, build, quantized, relative_error, transformers
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.codegen.targets.webgpu import WGSL, Webgpu
from compressor.codegen.web.execute_wasm import WasmProgram
from compressor.codegen.web.execute_webgpu import GpuProgram
from compressor.codegen.web.lower import WebProgram, compile_program, compile_wasm
from compressor.codegen.web.session import Session, encode
from compressor.codegen.web.simd128 import SIMD128
from compressor.errors import UsageError, VerificationError
from compressor.evaluate.quality import GraphLogits, graph_hidden
from compressor.passes.kv_cache import KvCache
from compressor.pipeline.context import Context
from compressor.run.web import WebBackend

TOLERANCE = 1e-5
ROUNDED_TOLERANCE = 1e-3


def lowered(graph: GraphModule) -> WebProgram:
    return compile_program(graph, Webgpu().tvm_target(WGSL))


def arrays(graph: GraphModule, program: WebProgram) -> dict[str, np.ndarray]:
    tensors = {name: graph.get_parameter(name).detach().contiguous() for name in program.parameters}
    return {
        name: (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy() for name, x in tensors.items()
    } | dict(program.constants)


def on(engine: str, graph: GraphModule) -> GpuProgram | WasmProgram:
    if engine == "webgpu":
        program = lowered(graph)
        return GpuProgram(program.content, arrays(graph, program))
    program, module = compile_wasm(graph, SIMD128)
    return WasmProgram(program.content, module, arrays(graph, program))


@pytest.mark.parametrize(
    ("name", "engine"),
    [*((name, "webgpu") for name in DECODERS if name != "llama"), ("gpt2", "wasm"), ("gemma2", "wasm")],
)
def test_decoder(
    name: str, engine: str, tmp_path: Path, require_adapter: None, require_tool: Callable[[str], Path]
) -> None:
    """A prompt at once and steps of several sizes, for two sequences, in one program."""
    require_tool("wasm-ld")
    model = build(DECODERS[name]())
    (model.bfloat16() if name == "qwen3" else model.half()).save_pretrained(tmp_path)
    graph = quantized(capture(tmp_path), "W4A16_G32", ignore=("lm_head",))
    loaded = on(engine, graph)
    ids = np.random.default_rng(1).integers(3, 97, (2, 12))
    expected = GraphLogits(graph)(ids).numpy()
    for steps in ((12,), (5, 1, 1, 3, 2)):
        session, begin = Session(loaded, 2, 16), 0
        for step in steps:
            logits = session.step(ids[:, begin : begin + step], np.arange(step))
            assert relative_error(logits, expected[:, begin : begin + step]) < TOLERANCE, (steps, begin)
            begin += step


@pytest.mark.parametrize(("form", "engine"), [
    ("W4A8_G32", "webgpu"), ("W8A8", "webgpu"), ("W8A8", "wasm"), ("MXFP8_E4M3_AMXFP8_E4M3", "wasm"),
])  # fmt: skip
def test_rounded_activations(
    engine: str, form: str, tmp_path: Path, require_adapter: None, require_tool: Callable[[str], Path]
) -> None:
    """Once for all linears that read the same; equal but for values that fall on the other side of a tie."""
    require_tool("wasm-ld")
    build(DECODERS["llama"]()).save_pretrained(tmp_path)
    graph = quantized(capture(tmp_path), form, ignore=("lm_head",))
    ids = np.random.default_rng(1).integers(3, 97, (2, 12))
    logits = Session(on(engine, graph), 2, 16).step(ids, np.arange(12))
    assert relative_error(logits, GraphLogits(graph)(ids).numpy()) < ROUNDED_TOLERANCE
    if engine == "webgpu":
        used = [step["kernels"][0] for step in lowered(graph).content["steps"]]
        linears = sum(name.startswith("packed_linear") for name in used)
        assert sum(name.startswith("round_") for name in used) == linears * 4 // 7  # q, k and v share, gate and up


@pytest.mark.parametrize("engine", ["webgpu", "wasm"])
def test_encoder(engine: str, tmp_path: Path, require_adapter: None, require_tool: Callable[[str], Path]) -> None:
    """Texts of several lengths, with padding, in one program."""
    require_tool("wasm-ld")
    config = transformers.BertConfig(**{**SIZES, "hidden_size": 36, "intermediate_size": 64})  # heads of 9 channels
    build(config, transformers.AutoModel).save_pretrained(tmp_path)
    graph = quantized(capture(tmp_path), "W4A16_G32")
    loaded = on(engine, graph)
    for batch, length in ((1, 1), (2, 13)):
        ids = np.random.default_rng(1).integers(3, 97, (batch, length))
        mask = np.ones(ids.shape, np.float32)
        mask[1:, -4:] = 0
        found = encode(loaded, ids, mask)
        expected = np.asarray(graph_hidden(graph)(ids, mask))
        assert relative_error(found[mask > 0], expected[mask > 0]) < TOLERANCE


def test_float16(tmp_path: Path, require_half: None) -> None:
    build(DECODERS["llama"]()).save_pretrained(tmp_path)
    graph = quantized(capture(tmp_path), "W4A16_G32", ignore=("lm_head",))
    program, ids = lowered(graph), np.random.default_rng(1).integers(3, 97, (2, 12))
    logits = Session(GpuProgram(program.content, arrays(graph, program), half=True), 2, 16).step(ids, np.arange(12))
    assert 1e-5 < relative_error(logits, GraphLogits(graph)(ids).numpy()) < 2e-3


def test_what_the_target_lacks_is_named(tmp_path: Path) -> None:
    build(DECODERS["llama"]()).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="W4A8_G32_S1: the target webgpu has no kernels for single weights"):
        lowered(quantized(capture(tmp_path), "W4A8_G32_S1"))
    with pytest.raises(UsageError, match="the target webgpu has no kernels for packed caches"):
        lowered(KvCache("INT8").run(capture(tmp_path), Context()))


def test_plain_modules_are_refused() -> None:
    graph = capture(torch.nn.Linear(4, 4), (torch.zeros(2, 4),))
    with pytest.raises(UsageError, match="this is a plain module"):
        WebBackend(Webgpu(wasm=False)).check(graph)


def test_parts_of_a_tensor() -> None:
    """Splits of every kind become slices, and what is empty is left out."""

    class Parts(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = x.chunk(2, dim=-1)
            c, d, e = torch.split(b, [1, 2, 1], dim=-1)
            first, second = a.unbind(1)
            return torch.cat([c * 2, e, d, x[..., 8:], a + (first - second)[:, None]], dim=-1)

    x = torch.randn(3, 2, 8)
    graph = capture(Parts(), (x,))
    program = lowered(graph)
    loaded = GpuProgram(program.content, arrays(graph, program))
    (name,) = (entry["name"] for entry in program.content["inputs"])
    found = loaded.read(loaded.run({name: loaded.upload(x.numpy())}, {}), "float32", (3, 2, 8))
    assert np.array_equal(found, Parts()(x).numpy())


def test_models_of_speech_are_refused() -> None:
    graph = capture(encoder_decoders.make(*encoder_decoders.SPEECH["Moonshine"]))
    with pytest.raises(UsageError, match="this is a model of speech; take the target x86"):
        WebBackend(Webgpu(wasm=False)).check(graph)


def test_inputs_that_wgsl_cannot_store_are_refused() -> None:
    class Half(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    graph = capture(Half(), (torch.zeros(2, 3, dtype=torch.uint8),))
    with pytest.raises(VerificationError, match="input x has type uint8"):
        lowered(graph)


def test_buffers_are_shared(tmp_path: Path) -> None:
    build(DECODERS["llama"]()).save_pretrained(tmp_path)
    content = lowered(capture(tmp_path)).content
    for step in content["steps"]:
        access = content["kernels"][step["kernels"][0]]["buffers"]
        pairs = list(zip(step["buffers"], access, strict=True))
        assert not {b for b, a in pairs if a == "write"} & {b for b, a in pairs if a == "read"}
    assert len(content["scratch"]) < len(content["steps"]) / 2

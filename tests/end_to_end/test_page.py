"""The page of a bundle in headless Chromium with a software adapter, and without: tokens, text, offline, faults."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import GENERATE, PROMPT, READY, WITHOUT_WEBGPU, greedy
from torch.fx import GraphModule

from compressor.cli import serve
from compressor.evaluate.quality import GraphLogits
from compressor.host.resources import resource

WITH_ALL_LOGITS = """async (given) => {{
  const session = await model.session(64);
  session.candidates = (ids) => session.logits(ids);
  given[1].session = session;
  return ({generate})(given);
}}"""
WITH_TIES = """async ([prompt, count]) => {
  const session = await model.session(64);
  const some = await session.candidates(prompt, count);
  session.position = 0;
  const { engine } = model, { read } = engine;
  engine.read = async (buffer, bytes) => {
    const content = await read.call(engine, buffer, bytes);
    if (buffer === session.state.buffers.top_k) new Uint32Array(content)[0] = 257; // more than are stored
    return content;
  };
  const all = await session.candidates(prompt, count);
  engine.read = read;
  return [some.length, all.length, some.every(([id, logit]) => all[id] === logit)];
}"""

ROWS_OF_STEPS = """async () => {
  const session = await model.session(40), ids = [9, 305, 41, 1200, 8, 77], alone = [];
  await session.logits([1, 403, 263, 77, 5]);
  for (const id of ids) alone.push(...new Uint32Array((await session.logits([id])).buffer));
  const wrong = [];
  for (const count of [1, 2, 6]) {
    session.position = 5;
    const found = new Uint32Array((await session.verify(ids.slice(0, count))).buffer);
    wrong.push(found.reduce((sum, bits, i) => sum + (bits !== alone[i]), found.length - 2048 * count));
  }
  session.accept(4);
  const next = new Uint32Array((await session.logits(ids.slice(4, 5))).buffer);
  wrong.push(next.reduce((sum, bits, i) => sum + (bits !== alone[4 * 2048 + i]), 0));
  session.destroy();
  return wrong;
}"""
TUNED = """async () => {
  const { outdate, take } = await import("./tune.js"), { engine } = model, { kernels } = engine.program;
  for (const name of Object.keys(kernels).filter((one) => /^packed_linear.*_one$/.test(one))) {
    take(engine, name, await engine.pipeline(name, kernels[name], { ...kernels[name].constants, LANES: 4 }));
  }
  outdate(engine);
}"""
DRAFTED = """async ([prompt, options]) => {
  const { Pace } = await import("./lookup.js"), real = { ...Object.getOwnPropertyDescriptors(Pace.prototype) };
  Pace.prototype.mayDraft = function () { return this.sizes.has(1); }; // all are verified, whether it pays or not
  Pace.prototype.choose = (chances) => Math.min(5, chances.length);
  Pace.prototype.leastChance = () => 0.02;
  const ids = [];
  let counts;
  const given = { ...options, onSpeculation: (now) => { counts = now; } };
  for await (const id of model.generateIds(prompt, given)) ids.push(id);
  Object.defineProperties(Pace.prototype, real);
  return [ids, counts];
}"""


@pytest.mark.parametrize(("engine", "query"), [("webgpu", "?device=webgpu"), ("wasm", "?threads=3")])
def test_tokens_and_logits_are_those_of_pytorch(
    engine: str, query: str, made: tuple[Path, GraphModule], open_page: Callable[..., Any]
) -> None:
    bundle, graph = made
    page = open_page(bundle, WITHOUT_WEBGPU if engine == "wasm" else "", query=query)
    assert page.evaluate("model.device") == engine
    if engine == "wasm":
        assert page.evaluate("model.adapter") == ("3 processor cores" if "3" in query else "one processor core")
    assert page.evaluate(GENERATE, [PROMPT, {"maxTokens": 32}]) == greedy(graph, 32)
    long = [int(i) for i in np.random.default_rng(0).integers(3, 2048, 150)]  # more than one part of a prompt
    found = page.evaluate("async (ids) => Array.from(await (await model.session(200)).logits(ids))", long)
    expected = np.asarray(GraphLogits(graph)(np.array([long])))[0, -1]
    assert np.abs(np.array(found) - expected).max() < 1e-3
    sampled = [page.evaluate(GENERATE, [PROMPT, {"maxTokens": 8, "temperature": 0.8, "seed": n}]) for n in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    few = {"maxTokens": 8, "temperature": 0.8, "topK": 5, "seed": 1}
    drawn = page.evaluate(GENERATE, [PROMPT, few])
    assert drawn == page.evaluate(WITH_ALL_LOGITS.format(generate=GENERATE), [PROMPT, few])
    if engine == "webgpu":
        assert page.evaluate(WITH_TIES, [PROMPT, 5]) == [5, 2048, True]
    both = page.evaluate(
        f"async (given) => Promise.all([({GENERATE})(given), ({GENERATE})(given)])", [PROMPT, {"maxTokens": 8}]
    )
    assert both[0] == both[1] == greedy(graph, 8)


def test_drafts_do_not_change_texts_on_webgpu(made: tuple[Path, GraphModule], open_page: Callable[..., Any]) -> None:
    """Verified rows have the bits of steps, before a device is tuned and after, and so texts are the same."""
    page = open_page(made[0])
    assert page.evaluate("[model.device, model.verifies]") == ["webgpu", True]
    assert page.evaluate(ROWS_OF_STEPS) == [0, 0, 0, 0]
    page.evaluate(TUNED)
    assert page.evaluate(ROWS_OF_STEPS) == [0, 0, 0, 0]
    code = "def add(a, b):\\n    return a + b\\n\\ndef add(a, b):\\n"  # which repeats, so that there are drafts
    text = page.evaluate(f'async () => [...(await model.tokenizer()).encode("{code}").ids]')
    for options in ({"maxTokens": 14}, {"maxTokens": 14, "temperature": 0.3, "topK": 20, "seed": 4}):
        plain = page.evaluate(GENERATE, [text, {**options, "speculate": "off"}])
        drafted, counts = page.evaluate(DRAFTED, [text, options])
        assert drafted == plain
        assert counts["verifications"] > 0, counts
        assert counts["tokens"] == counts["steps"] + counts["verifications"] + counts["accepted"]


def test_the_page_continues_a_prompt_and_works_offline(
    made: tuple[Path, GraphModule], open_page: Callable[..., Any]
) -> None:
    page = open_page(made[0])
    page.fill("#tokens", "8")
    page.fill("#prompt", "Return the")
    page.click("#go")
    page.wait_for_function("document.getElementById('speed').textContent.includes('tokens/s')")
    text = page.inner_text("#text")
    assert text.startswith("Return the") and len(text) > len("Return the")
    assert "swiftshader" in page.inner_text("#facts").lower()
    page.evaluate("navigator.serviceWorker.ready")
    page.reload()  # now through the service worker, which keeps what it sees
    page.wait_for_function(READY)
    page.fill("#tokens", "8")
    page.click("#go")
    page.wait_for_function("document.getElementById('speed').textContent.includes('tokens/s')")
    page.context.set_offline(True)
    page.reload()
    page.wait_for_function(READY)
    assert not page.is_visible("#error"), page.inner_text("#error")
    page.click("#stop", force=True, no_wait_after=True) if page.is_enabled("#stop") else None
    page.fill("#tokens", "8")
    page.click("#go")
    page.wait_for_function("document.getElementById('speed').textContent.includes('tokens/s')")
    assert page.inner_text("#text") == text


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("weights/0000.bin", "flip", "weights/0000.bin is not what the manifest says"),
        ("weights/0000.bin", "remove", "weights/0000.bin cannot be fetched: the server says 404"),
        ("wasm/kernels.wasm", "flip", "wasm/kernels.wasm is not what the manifest says"),
        ("manifest.json", "cut", "manifest.json is not readable as JSON"),
    ],
)
def test_damage_is_said_in_words(
    name: str, damage: str, message: str, made: tuple[Path, GraphModule], open_page: Callable[..., Any], tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(made[0], bundle)
    content = bytearray((bundle / name).read_bytes())
    content[len(content) // 2] ^= 1

    def spoil() -> None:
        if damage == "remove":
            (bundle / name).unlink()
        else:
            (bundle / name).write_bytes(content[:1000] if damage == "cut" else content)

    page = open_page(bundle, spoil=spoil, query=f"?device={'wasm' if name.startswith('wasm') else 'webgpu'}")
    assert message in page.inner_text("#error")
    assert not page.is_visible("#form")


def test_a_browser_without_webgpu_takes_webassembly_and_says_so(
    made: tuple[Path, GraphModule], open_page: Callable[..., Any]
) -> None:
    page = open_page(made[0], WITHOUT_WEBGPU, query="?threads=1")
    said = page.inner_text("#fallback")
    assert "WebAssembly, not on a graphics processor: this browser has no WebGPU here" in said
    assert "WebAssembly on one processor core" in page.inner_text("#facts")
    assert page.is_visible("#drafts") and page.is_checked("#drafts")
    page.fill("#tokens", "8")
    page.click("#go")
    page.wait_for_function("document.getElementById('speed').textContent.includes('tokens/s')")
    assert "draft" in page.inner_text("#speed")
    assert page.inner_text("#text").startswith("Return the")


def test_webassembly_is_taken_before_a_software_adapter(
    made: tuple[Path, GraphModule], open_page: Callable[..., Any]
) -> None:
    page = open_page(made[0], query="")
    assert page.evaluate("model.device") == "wasm"
    assert "all that WebGPU finds here is software" in page.inner_text("#fallback")


def test_a_browser_that_is_told_to_take_webgpu_says_that_there_is_none(
    made: tuple[Path, GraphModule], open_page: Callable[..., Any]
) -> None:
    page = open_page(made[0], WITHOUT_WEBGPU)
    assert "this browser has no WebGPU here" in page.inner_text("#error")


def test_a_page_without_what_threads_need_computes_on_one_core(
    made: tuple[Path, GraphModule], open_page: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Isolation, as with servers that send no headers; room; workers: in a browser that would have four threads."""
    monkeypatch.setattr(serve._Files, "end_headers", SimpleHTTPRequestHandler.end_headers)
    cores = "Object.defineProperty(Navigator.prototype, 'hardwareConcurrency', { get: () => 8 });"
    page = open_page(made[0], cores, query="?device=wasm")
    assert page.evaluate("[crossOriginIsolated, model.adapter]") == [False, "one processor core"]
    assert page.evaluate(GENERATE, [PROMPT, {"maxTokens": 4}]) == greedy(made[1], 4)
    page = open_page(made[0], query="?device=wasm&threads=2")
    assert "2 threads: this page is not isolated" in page.inner_text("#error")
    monkeypatch.undo()
    page = open_page(made[0], cores, query="?device=wasm")
    assert page.evaluate("[crossOriginIsolated, model.adapter]") == [True, "4 processor cores"]
    none = """const real = WebAssembly.Memory;
      WebAssembly.Memory = function (about) {
        if (about.shared) throw new RangeError("no room");
        return new real(about);
      };"""
    page = open_page(made[0], cores + none, query="?device=wasm")
    assert page.evaluate("[model.adapter, model.engine.memory.buffer instanceof ArrayBuffer]") == [
        "one processor core",
        True,
    ]
    page = open_page(made[0], none, query="?device=wasm&threads=2")
    assert "no room for a memory of 2 threads: no room" in page.inner_text("#error")
    without = "globalThis.Worker = function () { throw new Error('none here'); };"
    page = open_page(made[0], cores + without, query="?device=wasm")
    assert page.evaluate("model.adapter") == "one processor core"  # nobody asked for more
    page = open_page(made[0], without, query="?device=wasm&threads=2")
    assert "2 threads: workers cannot be started: none here" in page.inner_text("#error")


def test_node_gives_the_tokens_and_logits_of_pytorch(
    made: tuple[Path, GraphModule], require_tool: Callable[..., Path]
) -> None:
    bundle, graph = made
    script = """
      const [bundle, prompt, long] = JSON.parse(process.argv[1]);
      const { load } = await import(`file://${bundle}/runner.js`);
      const model = await load(bundle);
      const ids = [];
      for await (const id of model.generateIds(prompt, { maxTokens: 32 })) ids.push(id);
      const logits = Array.from(await (await model.session(200)).logits(long));
      const text = [];
      for await (const piece of model.generate("Return the", { maxTokens: 4 })) text.push(piece);
      console.log(JSON.stringify({ ids, logits, text: text.join(""), device: model.device, why: model.fallback }));
    """
    long = [int(i) for i in np.random.default_rng(0).integers(3, 2048, 150)]
    command = [
        str(require_tool("node", 20, 19)),
        "--input-type=module",
        "-e",
        script,
        json.dumps([str(bundle), PROMPT, long]),
    ]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["ids"] == greedy(graph, 32)
    assert np.abs(np.array(found["logits"]) - np.asarray(GraphLogits(graph)(np.array([long])))[0, -1]).max() < 1e-3
    assert found["device"] == "wasm" and "no WebGPU here" in found["why"] and found["text"]


def test_the_package_passes_its_own_tests(made: tuple[Path, GraphModule], require_tool: Callable[..., Path]) -> None:
    package = resource("export") / "web"
    command = [str(require_tool("node", 20, 19)), "--test", *map(str, sorted((package / "test").glob("*.mjs")))]
    environment = {**os.environ, "COMPRESSOR_BUNDLE": str(made[0])}
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "# skipped 0" in done.stdout, done.stdout + done.stderr
    described = json.loads((package / "package.json").read_text())
    assert all((package / name).exists() for name in described["files"])


def test_a_device_without_room_says_so(made: tuple[Path, GraphModule], open_page: Callable[..., Any]) -> None:
    """An adapter whose buffers are smaller than the largest weight."""
    script = (
        """Object.defineProperty(GPUSupportedLimits.prototype, 'maxStorageBufferBindingSize', { get: () => 4096 });"""
    )
    page = open_page(made[0], script)
    assert "this device takes buffers of 4096 bytes, the model needs one of" in page.inner_text("#error")
    hardware = "Object.defineProperty(GPUAdapterInfo.prototype, 'isFallbackAdapter', { get: () => false });"
    page = open_page(made[0], script + hardware, query="")
    assert "this device takes buffers of 4096 bytes" in page.inner_text("#fallback")


def test_a_tab_with_little_memory_says_so(made: tuple[Path, GraphModule], open_page: Callable[..., Any]) -> None:
    """The memory of WebAssembly may not grow beyond what it begins with, while loading and later."""
    script = """const real = WebAssembly.Memory;
      WebAssembly.Memory = function () { return new real({ initial: 8, maximum: PAGES }); };"""
    page = open_page(made[0], script.replace("PAGES", "8"), query="?device=wasm")
    assert "this tab has too little memory for the model" in page.inner_text("#error")
    page = open_page(made[0], script.replace("PAGES", "80"), query="?device=wasm")
    fill = """(async () => {
      const sessions = [];
      try {
        for (let i = 0; i < 100; i++) sessions.push(await model.session(model.info.max_positions));
      } catch (error) {
        return error.code;
      } finally {
        sessions.forEach((session) => session.destroy());
      }
    })()"""
    assert page.evaluate(fill) == "memory"
    assert page.evaluate(GENERATE, [PROMPT, {"maxTokens": 4}]) == greedy(made[1], 4)  # it goes on with less


def test_a_kernel_that_does_not_compile_is_said_when_it_is_needed(
    made: tuple[Path, GraphModule], open_page: Callable[..., Any]
) -> None:
    """Only those that a text takes keep it from being written; the head computes one token of any prompt."""
    script = """const real = GPUDevice.prototype.createComputePipelineAsync;
      GPUDevice.prototype.createComputePipelineAsync = function (about) {
        const fails = /^packed_linear_(?!2048x).*_one$/.test(about.label);
        return fails ? Promise.reject(new Error("none")) : real.call(this, about);
      };"""
    page = open_page(made[0], script)
    page.evaluate("model.session(8).then((session) => session.logits([1, 403, 263]))")
    page.click("#go")
    page.wait_for_function("!document.getElementById('error').hidden")
    assert "this browser does not compile the kernel" in page.inner_text("#error")
    assert "WebAssembly may serve" in page.inner_text("#error")


def test_a_lost_device_ends_the_text_with_words(made: tuple[Path, GraphModule], open_page: Callable[..., Any]) -> None:
    page = open_page(made[0])
    page.fill("#tokens", "500")
    page.click("#go")
    page.wait_for_function("document.getElementById('text').textContent.length > 20")
    page.evaluate("model.engine.device.destroy()")
    page.wait_for_function("!document.getElementById('error').hidden")
    assert "the graphics device is gone" in page.inner_text("#error")
    assert "load the model again" in page.inner_text("#error")
    code = page.evaluate("model.session().then(() => '', (error) => error.code)")
    assert code == "lost"


def test_requests_that_the_model_cannot_serve(made: tuple[Path, GraphModule], open_page: Callable[..., Any]) -> None:
    page = open_page(made[0])
    failing = f"async (given) => ({GENERATE})(given).then(() => '', (error) => `${{error.code}}: ${{error.message}}`)"
    assert page.evaluate(failing, [[5000], {}]) == "request: token 5000 is none of this model's"
    vocabulary = json.loads((made[0] / "manifest.json").read_text())["model"]["vocab_size"]
    assert vocabulary == 2048
    assert "there is room for" in page.evaluate(failing, [[5] * 3000, {}])

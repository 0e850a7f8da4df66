"""The page of a bundle in headless Chromium with a software adapter, and without: tokens, text, offline, faults."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.fx import GraphModule

import compressor.run_web as run_web
from compressor.capture import capture
from compressor.evaluate import GraphLogits, graph_hidden
from compressor.recipe import load_recipe
from compressor.resources import resource
from compressor.run import run_recipe
from compressor.serve import make_server

if os.environ.get("CI"):  # where it is missing, that is a failure
    import playwright.sync_api as playwright
else:
    playwright = pytest.importorskip("playwright.sync_api")

FLAGS = (
    "--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--disable-quic",
)  # fmt: skip
PROMPT = [1, 403, 263, 77, 5]
READY = "window.ready || !document.getElementById('error').hidden"


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, require_adapter: None, require_tool: Callable[[str], Path]
) -> tuple[Path, GraphModule]:
    """What the shipped recipe gives, and the graph that was lowered."""
    require_tool("wasm-ld")
    graphs: list[GraphModule] = []
    with pytest.MonkeyPatch.context() as patch:
        lower = run_web.compile_program

        def keep(graph: GraphModule, *arguments: Any) -> Any:
            graphs.append(graph)
            return lower(graph, *arguments)

        patch.setattr(run_web, "compile_program", keep)
        recipe = load_recipe(resource("recipes") / "quickstart_webgpu.yaml")
        outcome = run_recipe(recipe, tmp_path_factory.mktemp("web") / "bundle")
    assert outcome.kernel_error is not None and outcome.kernel_error < 1e-4
    (bytes_ratio,) = (ratio for name, _, _, ratio in outcome.predictions if name == "bundle_bytes")
    assert 0.95 < bytes_ratio < 1.05
    assert outcome.metrics["perplexity"] < 1.04 * outcome.metrics["dense_perplexity"]
    return outcome.bundle, graphs[0]


@pytest.fixture(scope="module")
def browser(require_tool: Callable[[str], Path]) -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=str(require_tool("chromium")), args=list(FLAGS))


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    servers = []

    def start(bundle: Path) -> str:
        servers.append(make_server(bundle, 0))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def open_page(browser: Any, serve: Callable[[Path], str]) -> Iterator[Callable[..., Any]]:
    contexts = []

    def start(bundle: Path, script: str = "", spoil: Callable[[], None] = lambda: None, query: str = "") -> Any:
        contexts.append(browser.new_context(viewport={"width": 420, "height": 800}))
        page = contexts[-1].new_page()
        page.set_default_timeout(120_000)
        if script:
            page.add_init_script(script)
        url = serve(bundle)
        spoil()
        page.goto(url + query)
        page.wait_for_function(READY)
        return page

    yield start
    for context in contexts:
        context.close()


def greedy(graph: GraphModule, count: int) -> list[int]:
    """The likeliest continuation of PROMPT by the graph in PyTorch."""
    ids, logits = list(PROMPT), GraphLogits(graph)
    for _ in range(count):
        ids.append(int(np.argmax(np.asarray(logits(np.array([ids])))[0, -1])))
    return ids[len(PROMPT) :]


GENERATE = """async ([prompt, options]) => {
  const ids = [];
  for await (const id of model.generateIds(prompt, options)) ids.push(id);
  return ids;
}"""


WITHOUT_WEBGPU = "Object.defineProperty(Navigator.prototype, 'gpu', { get: () => undefined });"


@pytest.mark.parametrize("engine", ["webgpu", "wasm"])
def test_tokens_and_logits_are_those_of_pytorch(
    engine: str, made: tuple[Path, GraphModule], open_page: Callable[..., Any]
) -> None:
    bundle, graph = made
    page = open_page(bundle, WITHOUT_WEBGPU if engine == "wasm" else "")
    assert page.evaluate("model.device") == engine
    assert page.evaluate(GENERATE, [PROMPT, {"maxTokens": 32}]) == greedy(graph, 32)
    long = [int(i) for i in np.random.default_rng(0).integers(3, 2048, 150)]  # more than one part of a prompt
    found = page.evaluate("async (ids) => Array.from(await (await model.session(200)).logits(ids))", long)
    expected = np.asarray(GraphLogits(graph)(np.array([long])))[0, -1]
    assert np.abs(np.array(found) - expected).max() < 1e-3
    sampled = [page.evaluate(GENERATE, [PROMPT, {"maxTokens": 8, "temperature": 0.8, "seed": n}]) for n in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    both = page.evaluate(
        f"async (given) => Promise.all([({GENERATE})(given), ({GENERATE})(given)])", [PROMPT, {"maxTokens": 8}]
    )
    assert both[0] == both[1] == greedy(graph, 8)


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
        ("weights/0000.bin", "cut", "weights/0000.bin has 1000 bytes, the manifest says"),
        ("weights/0000.bin", "remove", "weights/0000.bin cannot be fetched: the server says 404"),
        ("wasm/kernels.wasm", "flip", "wasm/kernels.wasm is not what the manifest says"),
        ("webgpu.json", "flip", "webgpu.json is not what the manifest says"),
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

    page = open_page(bundle, spoil=spoil, query="?device=wasm" if name.startswith("wasm") else "")
    assert message in page.inner_text("#error")
    assert not page.is_visible("#form")


def test_a_browser_without_webgpu_takes_webassembly_and_says_so(
    made: tuple[Path, GraphModule], open_page: Callable[..., Any]
) -> None:
    page = open_page(made[0], WITHOUT_WEBGPU)
    assert "WebAssembly, which is slower than WebGPU: this browser has no WebGPU here" in page.inner_text("#fallback")
    assert "WebAssembly on one processor core" in page.inner_text("#facts")
    page.fill("#tokens", "8")
    page.click("#go")
    page.wait_for_function("document.getElementById('speed').textContent.includes('tokens/s')")
    assert page.inner_text("#text").startswith("Return the")


def test_a_browser_that_is_told_to_take_webgpu_says_that_there_is_none(
    made: tuple[Path, GraphModule], open_page: Callable[..., Any]
) -> None:
    page = open_page(made[0], WITHOUT_WEBGPU, query="?device=webgpu")
    assert "this browser has no WebGPU here" in page.inner_text("#error")


def test_node_gives_the_tokens_and_logits_of_pytorch(
    made: tuple[Path, GraphModule], require_tool: Callable[[str], Path]
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
    command = [str(require_tool("node")), "--input-type=module", "-e", script, json.dumps([str(bundle), PROMPT, long])]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["ids"] == greedy(graph, 32)
    assert np.abs(np.array(found["logits"]) - np.asarray(GraphLogits(graph)(np.array([long])))[0, -1]).max() < 1e-3
    assert found["device"] == "wasm" and "no WebGPU here" in found["why"] and found["text"]


def test_the_package_passes_its_own_tests(made: tuple[Path, GraphModule], require_tool: Callable[[str], Path]) -> None:
    package = resource("export") / "web"
    command = [str(require_tool("node")), "--test", *map(str, sorted((package / "test").glob("*.mjs")))]
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
    page = open_page(made[0], script, query="?device=webgpu")
    assert "this device takes buffers of 4096 bytes, the model needs one of" in page.inner_text("#error")
    page = open_page(made[0], script)
    assert "this device takes buffers of 4096 bytes" in page.inner_text("#fallback")


def test_a_tab_with_little_memory_says_so(made: tuple[Path, GraphModule], open_page: Callable[..., Any]) -> None:
    """The memory of WebAssembly may not grow beyond what it begins with, while loading and later."""
    script = """const real = WebAssembly.Memory;
      WebAssembly.Memory = function () { return new real({ initial: 8, maximum: PAGES }); };"""
    page = open_page(made[0], script.replace("PAGES", "8"), query="?device=wasm")
    assert "this tab has too little memory for the model" in page.inner_text("#error")
    page = open_page(made[0], script.replace("PAGES", "80"), query="?device=wasm")
    code = page.evaluate("model.session(100000).then(() => '', (error) => error.code)")
    assert code == "memory"
    assert page.evaluate(GENERATE, [PROMPT, {"maxTokens": 4}]) == greedy(made[1], 4)  # it goes on with less


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


@pytest.mark.parametrize("clock", ["timestamps", "queue"])
def test_tuning_keeps_what_is_faster_and_computes_the_same(
    clock: str, made: tuple[Path, GraphModule], open_page: Callable[..., Any]
) -> None:
    """Within its budget; with the device's clock, and without."""
    hidden = """const has = GPUSupportedFeatures.prototype.has;
      GPUSupportedFeatures.prototype.has =
        function (name) { return name !== 'timestamp-query' && has.call(this, name); };
    """
    page = open_page(made[0], hidden if clock == "queue" else "")
    seen = "async () => { const seen = []; const report = await model.tune({ onProgress: (p) => seen.push(p) });"
    report, progress = page.evaluate(f"{seen} return [report, seen]; }}")
    kernels = report["kernels"]
    families = ("packed_linear", "dense_linear", "cached_attention")
    assert {next(f for f in families if kernel["name"].startswith(f)) for kernel in kernels} == set(families)
    assert report["seconds"] < 5.5 and sum(kernel["tried"] for kernel in kernels) >= 3  # a software adapter is slow
    assert all(p["budget"] == 5000 for p in progress) and len(progress) >= 3
    as_good = [kernel for kernel in kernels if kernel["tuned_ms"] <= kernel["default_ms"] <= kernel["worst_ms"]]
    assert len(as_good) >= 0.8 * len(kernels), kernels
    for kernel in kernels:
        print(*(f"{key} {value}" for key, value in kernel.items()))
    expected = greedy(made[1], 32)
    assert page.evaluate(GENERATE, [PROMPT, {"maxTokens": 32}]) == expected
    used = "Object.fromEntries(Object.entries(model.engine.kernels).map(([name, { constants }]) => [name, constants]))"
    before = page.evaluate(used)
    assert all(before[kernel["name"]] == kernel["constants"] for kernel in kernels)
    page.reload()
    page.wait_for_function(READY)
    assert page.evaluate(used) == before
    assert page.evaluate(GENERATE, [PROMPT, {"maxTokens": 32}]) == expected
    page.evaluate("Object.keys(localStorage).forEach((key) => localStorage.setItem(key, '{\"LANES\": 3}'))")
    page.reload()
    page.wait_for_function(READY)
    shipped = json.loads((made[0] / "webgpu.json").read_text())["kernels"]
    assert page.evaluate(used) == {name: record["constants"] for name, record in shipped.items()}


def test_a_variant_that_computes_something_else_is_not_taken(
    made: tuple[Path, GraphModule], open_page: Callable[..., Any]
) -> None:
    """Variants whose text drops the sums are fastest, and wrong."""
    page = open_page(made[0])
    report = page.evaluate("""async () => {
      const { engine } = model;
      const pipeline = engine.pipeline.bind(engine);
      engine.pipeline = (name, record, constants = record.constants) => pipeline(name, constants === record.constants
        ? record : { ...record, source: record.source.replace(/sum \\+= /g, "sum = 0.0 * ") }, constants);
      return model.tune({ budget: 4000 });
    }""")
    linears = [kernel for kernel in report["kernels"] if "linear" in kernel["name"]]
    assert any(kernel["tried"] for kernel in linears)
    shipped = json.loads((made[0] / "webgpu.json").read_text())["kernels"]
    assert all(kernel["constants"] == shipped[kernel["name"]]["constants"] for kernel in linears)


@pytest.fixture(scope="module")
def encoder(
    tmp_path_factory: pytest.TempPathFactory, require_adapter: None, require_tool: Callable[[str], Path]
) -> tuple[Path, GraphModule]:
    """A bundle of a tiny random encoder with the reference model's tokenizer, and its graph."""
    from codegen.model_helpers import SIZES, build, quantized, transformers

    require_tool("wasm-ld")
    folder = tmp_path_factory.mktemp("encoder")
    config = transformers.BertConfig(**{**SIZES, "vocab_size": 2048, "pad_token_id": 0})
    build(config, transformers.AutoModel).save_pretrained(folder / "model")
    shutil.copyfile(resource("models") / "reference" / "tokenizer.json", folder / "model" / "tokenizer.json")
    (folder / "recipe.yaml").write_text(
        f"model: {folder / 'model'}\npasses:\n  - rtn: {{scheme: W4A16_G32}}\ntarget: webgpu\n"
    )
    outcome = run_recipe(load_recipe(folder / "recipe.yaml"), folder / "bundle")
    assert outcome.kernel_error is not None and outcome.kernel_error < 1e-4
    return outcome.bundle, quantized(capture(folder / "model"), "W4A16_G32")


@pytest.mark.parametrize("engine", ["webgpu", "wasm"])
def test_an_encoder_embeds_texts(engine: str, encoder: tuple[Path, GraphModule], open_page: Callable[..., Any]) -> None:
    bundle, graph = encoder
    page = open_page(bundle, query=f"?device={engine}")
    for length in (12, 1, 40):
        ids = [int(i) for i in np.random.default_rng(length).integers(3, 2048, length)]
        found = page.evaluate(
            "async (ids) => { const x = await model.encode(ids); return [Array.from(x.data), x.shape]; }", ids
        )
        expected = np.asarray(graph_hidden(graph)(np.array([ids]), np.ones((1, length), np.float32)))[0]
        assert tuple(found[1]) == expected.shape
        assert np.abs(np.array(found[0]).reshape(expected.shape) - expected).max() < 1e-3
    page.click("#go")
    page.wait_for_function("document.getElementById('speed').textContent.includes('texts in')")
    assert len(page.inner_text("#text").splitlines()) == 2
    if engine == "webgpu":
        report = page.evaluate("model.tune({ budget: 2000 })")
        assert any(kernel["name"].startswith("masked_attention") for kernel in report["kernels"])
    refused = page.evaluate("model.session().then(() => '', (error) => error.message)")
    assert refused == "only a decoder generates"
    assert "takes between 1 and 64" in page.evaluate("model.encode(Array(65).fill(5)).then(() => '', (e) => e.message)")

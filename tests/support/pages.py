"""Fixtures for tests of a bundle's page: a bundle of the reference model, Chromium, and a server."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.fx import GraphModule

import compressor.run.web as run_web
from compressor.cli.serve import make_server
from compressor.evaluate.quality import GraphLogits
from compressor.host.resources import resource
from compressor.recipe.recipe import load_recipe
from compressor.run.job import run_recipe

FLAGS = (
    "--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--disable-quic",
)  # fmt: skip
PROMPT = [1, 403, 263, 77, 5]
READY = "window.ready || !document.getElementById('error').hidden"


@pytest.fixture(scope="session")
def made(
    tmp_path_factory: pytest.TempPathFactory,
    require_adapter: None,
    require_tool: Callable[[str], Path],
    short_reference: Path,
) -> tuple[Path, GraphModule]:
    """Return the bundle, with drafts, that the shipped recipe makes of the first blocks, and the lowered graph."""
    require_tool("wasm-ld")
    graphs: list[GraphModule] = []
    with pytest.MonkeyPatch.context() as patch:
        lower = run_web.compile_program

        def keep(graph: GraphModule, *arguments: Any) -> Any:
            graphs.append(graph)
            return lower(graph, *arguments)

        patch.setattr(run_web, "compile_program", keep)
        options = ["evaluation.tokens=1024", f"model={short_reference}", "speculate=lookup"]
        recipe = load_recipe(resource("recipes") / "quickstart_webgpu.yaml", options)
        outcome = run_recipe(recipe, tmp_path_factory.mktemp("web") / "bundle")
    assert outcome.kernel_error is not None and outcome.kernel_error < 1e-4
    (bytes_ratio,) = (ratio for name, _, _, ratio in outcome.predictions if name == "bundle_bytes")
    assert 0.95 < bytes_ratio < 1.05
    assert outcome.metrics["perplexity"] < 1.04 * outcome.metrics["dense_perplexity"]
    return outcome.bundle, graphs[0]


@pytest.fixture(scope="session")
def browser(require_tool: Callable[[str], Path]) -> Iterator[Any]:
    """Start Chromium; without playwright the test is skipped, and in CI it fails."""
    if os.environ.get("CI"):
        import playwright.sync_api as playwright
    else:
        playwright = pytest.importorskip("playwright.sync_api")
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

    def start(
        bundle: Path, script: str = "", spoil: Callable[[], None] = lambda: None, query: str = "?device=webgpu"
    ) -> Any:
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
    """Return the likeliest continuation of PROMPT by the graph in PyTorch."""
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

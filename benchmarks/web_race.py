"""Our bundles for browsers against ONNX Runtime Web, in one Chromium on one adapter, in turns.

    npm install --prefix peers onnxruntime-web@1.30.0
    python -m benchmarks.web_race WORK --ort peers/node_modules/onnxruntime-web/dist

WORK holds our bundles, ``reference``, ``reference_w4a8``, ``minilm`` and ``minilm_w8a8``, and the peer's models,
``ort_reference_int4`` and the like (``peers/web_onnxruntime.py``).  Each runtime has a page of its own that stays open;
loading, and the first answer, in which kernels are compiled, are measured in a new profile, with all bytes that the
server sends.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Browser, Page, sync_playwright

from compressor.host.machine import cpu_name

RESULTS = Path(__file__).parent / "results"
FLAGS = (
    "--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--disable-quic",
)  # fmt: skip
PROMPT, NEW, LONG = 16, 32, 128
CALLS = 3
"""Calls of a prompt or text in a turn, whose median counts: engines take a few calls to their best code."""
TEXTS = (16, 128)
"""Tokens of the texts that encoders get."""
RACES = (
    ("reference", {"W4A16_G128": "reference", "W4A8_G128": "reference_w4a8"}, "decoder", ("int4", "fp32"), 2048),
    ("minilm", {"W4A16_G32": "minilm", "W8A8": "minilm_w8a8"}, "encoder", ("int4", "int8", "fp32"), 30522),
)
"""Model, our bundles by format, kind, the peer's precisions, vocabulary."""
OURS = """
  window.generate = async (prompt, count) => {
    const ids = [];
    let start;
    for await (const id of model.generateIds(prompt, { maxTokens: count })) {
      start ??= performance.now();
      ids.push(id);
    }
    return { ids, ms: (performance.now() - start) / (ids.length - 1) };
  };
  window.prefill = async (prompt) => {
    const session = await model.session(256);
    const start = performance.now();
    await session.likeliest(prompt);
    const ms = performance.now() - start;
    session.destroy();
    return ms;
  };
  window.encode = async (ids) => {
    const start = performance.now();
    const { data } = await model.encode(ids);
    return { ms: performance.now() - start, data: Array.from(data) };
  };
"""


@dataclass(frozen=True)
class Runtime:
    """One that races.

    Attributes:
        query: of its page.
        tuned: whether the device is tuned for before it races.
    """

    name: str
    folder: str
    query: str
    ours: bool = False
    tuned: bool = False


def label(provider: str, threads: int) -> str:
    """Return an engine's name."""
    return "WebGPU" if provider == "webgpu" else f"WebAssembly, {threads} thread{'s' if threads > 1 else ''}"


def runtimes(model: str, ours: Mapping[str, str], kind: str, precisions: tuple[str, ...], cores: int) -> list[Runtime]:
    """Ours, folders by format, and the peer's, on both engines."""
    found = []
    for form, folder in ours.items():
        found += [
            Runtime(f"ours {form}, WebGPU", folder, "device=webgpu", ours=True),
            Runtime(f"ours {form}, WebGPU, tuned for 5 s", folder, "device=webgpu", ours=True, tuned=True),
            *(
                Runtime(f"ours {form}, {label('wasm', n)}", folder, f"device=wasm&threads={n}", ours=True)
                for n in (1, cores)
            ),
        ]
    shape = "&layers=5&heads=4&width=32" if kind == "decoder" else ""
    for precision in precisions:
        for provider, threads in (("webgpu", 1), ("wasm", 1), ("wasm", cores)):
            query = f"model=/work/ort_{model}_{precision}&kind={kind}&provider={provider}&threads={threads}{shape}"
            found.append(Runtime(f"ONNX Runtime Web {precision}, {label(provider, threads)}", "peers", query))
    return found


class Server(ThreadingHTTPServer):
    """Server that counts the bytes that it sends."""

    sent = 0


class _Files(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    extensions_map = {  # noqa: RUF012 (as the class above has it)
        **SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript", ".wasm": "application/wasm"
    }  # fmt: skip

    def __init__(self, *arguments: Any, folders: dict[str, Path], **options: Any) -> None:
        self.folders = folders
        super().__init__(*arguments, **options)

    def translate_path(self, path: str) -> str:
        first, _, rest = path.lstrip("/").partition("?")[0].partition("/")
        return str(self.folders.get(first, Path("/nonexistent")) / (rest or "index.html"))

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")  # threads need both
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        content = source.read()
        self.server.sent += len(content)  # type: ignore[attr-defined]
        outputfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(folders: dict[str, Path]) -> Iterator[Server]:
    """Serve some folders by name."""
    server = Server(("127.0.0.1", 0), partial(_Files, folders=folders))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def opened(browser: Browser, server: Server, runtime: Runtime, kind: str, ids: list[int]) -> Any:
    """Open a runtime's page in a new profile, and measure loading and the first answer."""
    page = browser.new_context().new_page()
    page.set_default_timeout(300_000)
    before, name = server.sent, "index.html" if runtime.ours else "web_onnxruntime.html"
    folder = f"work/{runtime.folder}" if runtime.ours else runtime.folder
    page.goto(f"http://127.0.0.1:{server.server_port}/{folder}/{name}?{runtime.query}")
    page.wait_for_function("window.ready")
    seconds = page.evaluate("performance.now()") / 1e3
    if runtime.ours:
        page.evaluate(f"{OURS}; 0")  # a function would be called
    page.evaluate("(ids) => encode(ids)" if kind == "encoder" else "(ids) => generate(ids, 2)", ids[:PROMPT])
    first = page.evaluate("performance.now()") / 1e3
    found = {"load_s": seconds, "first_s": first, "bytes": float(server.sent - before)}
    if runtime.tuned:
        report = page.evaluate("model.tune()")
        found["tuning_s"] = report["seconds"]
    return page, found


def turn(page: Page, kind: str, ids: list[int]) -> tuple[dict[str, float], list[float]]:
    """Run one round; return times in ms, and outputs that tell whether all compute the same model."""
    page.bring_to_front()
    if kind == "decoder":
        found = page.evaluate("([ids, count]) => generate(ids, count)", [ids[:PROMPT], NEW])
        prompt = statistics.median(page.evaluate("(ids) => prefill(ids)", ids[:LONG]) for _ in range(CALLS))
        return {"token": found["ms"], f"prompt of {LONG}": prompt}, found["ids"]
    times, last = {}, []
    for count in TEXTS:
        all_found = [page.evaluate("(ids) => encode(ids)", ids[:count]) for _ in range(CALLS)]
        times[f"text of {count}"], last = statistics.median(f["ms"] for f in all_found), all_found[-1]["data"]
    return times, last


def race(browser: Browser, server: Server, racing: list[Runtime], kind: str, ids: list[int], rounds: int) -> Any:
    """Run all in turns; the first round, in which kernels are compiled, does not count."""
    pages, rows, missing = {}, {}, {}
    for runtime in racing:
        try:
            pages[runtime.name], rows[runtime.name] = opened(browser, server, runtime, kind, ids)
            turn(pages[runtime.name], kind, ids)
            print(runtime.name, rows[runtime.name], flush=True)
        except Exception as error:  # whatever a peer's page stumbles over
            missing[runtime.name] = next(iter(str(error).strip().splitlines()))
            pages.pop(runtime.name, None)
            print(runtime.name, "missing:", missing[runtime.name], flush=True)
    times: dict[str, dict[str, list[float]]] = {name: {} for name in pages}
    last: dict[str, Any] = {}
    for _ in range(rounds):
        for name, page in pages.items():
            found, outputs = turn(page, kind, ids)
            last[name] = np.array(outputs, np.float64)
            for what, ms in found.items():
                times[name].setdefault(what, []).append(ms)
    for name, outputs in last.items():
        rows[name]["like"] = likeness(outputs, next(iter(last.values())))
    return {"times": times, "rows": {name: rows[name] for name in pages}, "missing": missing}


def likeness(outputs: Any, reference: Any) -> str:
    """Return how near a runtime's outputs are to the first one's: equal tokens, or the cosine of hidden states."""
    if len(outputs) == NEW:
        return f"{int((outputs == reference).sum())} of {NEW} tokens"
    return f"cosine {outputs @ reference / np.linalg.norm(outputs) / np.linalg.norm(reference):.4f}"


def spread(values: list[float]) -> str:
    """Return median, least and most."""
    return f"{statistics.median(values):.1f} [{min(values):.1f}, {max(values):.1f}]"


def table(title: str, result: Any) -> str:
    """Format one line per runtime."""
    times, rows = result["times"], result["rows"]
    columns = list(next(iter(times.values())))
    lines = [f"## {title}", "", "| runtime | " + " | ".join(f"{c}, ms" for c in columns)
             + " | loading, s | first answer, s | downloaded, MB | like the first |",
             "|---" * (len(columns) + 5) + "|"]  # fmt: skip
    for name, row in rows.items():
        cells = [spread(times[name][column]) for column in columns]
        lines.append(
            f"| {name} | {' | '.join(cells)} | {row['load_s']:.1f} | {row['first_s']:.1f} | {row['bytes'] / 1e6:.1f} "
            f"| {row['like']} |"
        )
    lines += [f"\nMissing: {name}: {why}" for name, why in result["missing"].items()]
    lines.append("")
    for engine in ("WebGPU", "WebAssembly"):
        for column in columns:
            best: dict[bool, dict[str, float]] = {True: {}, False: {}}
            for name in (n for n in times if engine in n):
                found, who = best[name.startswith("ours")], name.partition(",")[0].split()[-1]
                found[who] = min(found.get(who, math.inf), statistics.median(times[name][column]))
            for form, ours in best[True].items():
                ratios = ", ".join(f"{ms / ours:.2f} ({who})" for who, ms in best[False].items())
                lines.append(f"{engine}, {column}: {form} is so many times as fast as their {ratios}.\n")
    return "\n".join(lines)


def main() -> None:
    """Race, and write results/web.json and results/web.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--ort", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    given = parser.parse_args()
    folders = {"work": given.work, "ort": given.ort, "peers": Path(__file__).parent / "peers"}
    results, parts = {}, []
    version = json.loads((given.ort.parent / "package.json").read_text())["version"]
    with serving(folders) as server, sync_playwright() as playwright:
        for model, ours, kind, precisions, vocabulary in RACES:
            browser = playwright.chromium.launch(executable_path=given.chromium, args=list(FLAGS))
            ids = [int(i) for i in np.random.default_rng(0).integers(3, vocabulary, LONG)]
            results[model] = race(
                browser, server, runtimes(model, ours, kind, precisions, given.cores), kind, ids, given.rounds
            )
            parts.append(table(f"{model} ({kind})", results[model]))
            chromium = browser.version
            browser.close()
    heading = (
        "# Browsers\n\nMade by `python benchmarks/web_race.py`. "
        f"{cpu_name()}, {given.cores} cores, Chromium {chromium}; WebGPU is SwiftShader, a software adapter, which "
        f"says nothing of graphics processors; ONNX Runtime Web {version}, models by its own tools, "
        f"`benchmarks/peers/web_onnxruntime.py`; with WebGPU it leaves the products of int8 to WebAssembly (it places "
        "MatMulInteger and QAttention on its CPU provider). "
        f"All in turns in one browser, {CALLS} calls a turn (their median counts), "
        f"{given.rounds} rounds: medians, and in brackets the least and the most. A token is the mean of {NEW - 1} "
        f"greedy ones after a prompt of {PROMPT}, read back and picked. Downloaded is all that the server sent, "
        "uncompressed; loading is from the navigation to a page that is ready, from this machine, in a new profile, "
        f"the first answer then to the second token after a prompt of {PROMPT}, or to a text's hidden states.\n"
    )  # fmt: skip
    (RESULTS / "web.json").write_text(json.dumps(results, indent=1))
    (RESULTS / "web.md").write_text("\n".join([heading, *parts]) + "\n")


if __name__ == "__main__":
    main()

"""Bundles side by side: what compares, what does not, and folders that hold no bundle."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from report_content import HOSTILE, whole_manifest, whole_metrics

from compressor.cli.commands import main
from compressor.report.comparison import compare_bundles
from compressor.report.page.side_by_side import comparison_page

LOCK = {"evaluation": {"sha256": "e1", "tokens": 16_384}, "model": {"files": {"model.safetensors": "m1"}}}
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """``write("a", metrics={...}, manifest={...}, lock={...})`` is the path of a folder with a bundle's data."""

    def make(
        folder: str, metrics: dict[str, Any] | None = None, manifest: dict[str, Any] | None = None, lock: Any = LOCK
    ) -> str:
        path = tmp_path / folder
        path.mkdir()
        content = whole_manifest(2, "plain") | (manifest or {})
        content["sites"] = [{**site, "error": None} for site in content["sites"]]  # NaN is no JSON
        (path / "manifest.json").write_text(json.dumps(content))
        (path / "measurements.json").write_text(json.dumps(whole_metrics() if metrics is None else metrics))
        (path / "compress.lock").write_text(json.dumps(lock))
        return str(path)

    return make


def compare(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["compare", *arguments])


def test_figures_stand_side_by_side_with_intervals(write: Write) -> None:
    smaller = {**whole_metrics(), "kl_divergence": 0.04, "kl_divergence_interval": [0.038, 0.042]}
    sites = whole_manifest(2, "plain")["sites"]
    for site in sites[:2]:
        site["format"] = "W3A16_G128"
    a, b = write("a"), write("b", smaller, {"weight_bytes": 1_800_000, "sites": sites})
    shown = compare(a, b)
    assert shown.exit_code == 0, shown.output
    for text in ("0.0151 nats (0.0148 to 0.0154)", "0.0400 nats (0.0380 to 0.0420)", "4.741", "4.142", "1 executed"):
        assert text in shown.stdout
    assert "not comparable" not in shown.stdout
    found = json.loads(compare(a, b, "--json").stdout)
    assert [cell["value"] for cell in found["figures"]["weight_bytes"]] == [2_060_288, 1_800_000]
    assert found["figures"]["decode_tokens_per_s"][0]["interval"] == [22.1, 123.0]
    assert found["figures"]["latency_ms"][0]["interval"] is None and found["not_comparable"] == []
    assert found["bundles"][0] | {"path": ""} == {
        "path": "", "model": "plain", "formats": ["W4A16_G128"], "kernels": {"executed": 1}, "cpu": "Zen 5",
        "threads": 2,
    }  # fmt: skip
    names = [(row["site"], row["formats"]) for row in found["sites_that_differ"]]
    assert names == [
        (f"model.layers.0.self_attn.{kind}", ["W4A16_G128", "W3A16_G128"]) for kind in ("q_proj", "k_proj")
    ]
    assert found["sites_alike"] == len(sites) - 2


@pytest.mark.parametrize(
    ("metrics", "lock", "unlike", "why"),
    [
        ({"cpu": "M4"}, {}, {"decode_tokens_per_s", "latency_ms"}, "another machine"),
        ({"threads": 8}, {}, {"decode_tokens_per_s", "latency_ms"}, "another machine or number of threads"),
        ({"cpu": None}, {}, {"decode_tokens_per_s", "latency_ms"}, "machine or number of threads not known"),
        ({}, {"evaluation": {"sha256": "e2"}}, {"perplexity", "kl_divergence", "top1_agreement"}, "another text"),
        ({"window": 512}, {}, {"perplexity", "kl_divergence", "top1_agreement"}, "another text"),
        ({}, {"evaluation": None}, {"perplexity", "kl_divergence", "top1_agreement"}, "text not known"),
        ({}, {"model": {"files": {"x": "m2"}}}, {"kl_divergence", "top1_agreement"}, "another dense model"),
    ],
)
def test_figures_that_do_not_compare_are_marked(
    write: Write, metrics: dict[str, Any], lock: dict[str, Any], unlike: set[str], why: str
) -> None:
    found = compare_bundles([write("a"), write("b", whole_metrics() | metrics, lock=LOCK | lock)])
    marked = {row.key for row in found.rows if row.cells[1].why_not}
    assert marked == unlike
    (reason,) = found.reasons()
    assert reason.startswith("b: ") and why in reason
    assert not any(row.cells[0].why_not for row in found.rows)
    assert "*" in next(row for row in found.rows if row.key in unlike).cells[1].shown("{:.3f}")


def test_a_figure_that_is_missing_was_not_measured(write: Write) -> None:
    found = compare_bundles([write("a", {}), write("b"), write("c", lock=None)])
    row = next(row for row in found.rows if row.key == "kl_divergence")
    assert [cell.shown(row.form) for cell in row.cells] == [
        "not measured", "0.0151 nats (0.0148 to 0.0154)", "0.0151 nats * (0.0148 to 0.0154)",
    ]  # fmt: skip
    assert found.reasons() == ["c: perplexity; top-1 agreement; KL divergence: text not known"]


def test_the_page_is_one_file(write: Write, tmp_path: Path, browser: Any) -> None:
    hostile = {"model": {"name": HOSTILE.encode("utf-8", "replace").decode().replace("\x00", ""), "parameters": 5}}
    paths = [write("a" * 60), write("b", manifest=hostile), write("c", whole_metrics() | {"kl_divergence": 0.02})]
    file = tmp_path / "deep" / "compare.html"
    done = compare(*paths, "--html", str(file))
    assert done.exit_code == 0, done.output
    page = browser.new_context(viewport={"width": 400, "height": 800}, offline=True).new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    assert asked == [file.as_uri()] and page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.evaluate("document.querySelectorAll('svg').length") == 2
    assert "0.0151 nats" in page.evaluate("document.body.innerText") and "<script" not in file.read_text()
    assert comparison_page(compare_bundles(paths)) == file.read_text()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda b: None, "give two bundles or more"),
        (lambda b: shutil.rmtree(b), "no such folder"),
        (lambda b: (b / "manifest.json").unlink(), "not a bundle: it has no manifest.json"),
        (lambda b: (b / "manifest.json").write_text("{"), "not readable as JSON"),
        (lambda b: (b / "manifest.json").write_text("[" * 100_000), "not readable as JSON"),
        (lambda b: (b / "manifest.json").write_text("{}"), "not a Compressor bundle"),
        (lambda b: edit(b, weight_bytes=-1), "`weight_bytes` is missing or is not a valid int"),
        (lambda b: edit(b, model=[]), "`model` is missing"),
        (lambda b: edit(b, sites=[{"site": 3}]), "`sites` or `kernels` lack something"),
        (lambda b: edit(b, kernels=[{}]), "`sites` or `kernels` lack something"),
        (lambda b: (b / "measurements.json").write_text("{"), "not readable as JSON"),
    ],
)
def test_bad_input_ends_with_2_and_a_sentence(write: Write, tmp_path: Path, spoil: Any, said: str) -> None:
    a, b = write("a"), write("b")
    spoil(Path(b))
    done = compare(a, *([] if said.startswith("give two") else [b]), "--html", str(tmp_path / "page.html"))
    assert done.exit_code == 2 and said in done.stderr and "Traceback" not in done.output
    assert not (tmp_path / "page.html").exists() and done.stdout == ""
    folder = compare(a, a, "--html", str(tmp_path))
    assert folder.exit_code == 2 and "is a folder; name a file" in folder.stderr


def test_it_needs_no_tensor(write: Write) -> None:
    code = "import sys; from compressor.cli.commands import main\n"
    code += "try: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code, "compare", write("a"), write("b")], capture_output=True, text=True, check=True
    )
    assert not {"torch", "tvm", "transformers"} & set(done.stderr.split())


def edit(bundle: Path, **changes: Any) -> None:
    file = bundle / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

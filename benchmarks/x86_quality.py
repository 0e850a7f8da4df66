"""Quality beside speed: the bundle whose perplexity is reported is the bundle that is timed.

    python benchmarks/x86_quality.py reference [stories260K ...] [--threads 2] [--repeats 5]

Models are those of benchmarks/quality.yaml, calibrated and evaluated on as by benchmarks/quality.py; every linear is
quantised but the head.  Each bundle runs in a process of its own; all of a model are loaded together and timed in
turns: a prompt, and greedy tokens after it.  Writes benchmarks/results/x86_quality.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from quality import HERE, IGNORE, ROOT, Evaluator
from quality_row import bundled, compress, load_texts
from x86_child import Child, Runtime
from x86_race import machine
from x86_table import lines_of, rates

from compressor.capture.capture import capture

ROWS = (
    ("dense", None),
    ("gptq", "W8A8"),
    ("gptq", "W4A16"),
    ("gptq", "W4A8"),
    ("rtn", "W4A16"),
    ("rtn", "W4A8"),
    ("gptq", "W3A8"),
    ("gptq", "FP6_E2M3"),
    ("gptq", "NF4"),
)
GROUPS = {"stories260K": 64}
"""Columns that share a scale, where the model has too few for 128; NF4 has 64."""
HEADING = """\
# Quality beside speed

Made by `python benchmarks/x86_quality.py`; {cpu}, {threads} threads, commit {commit}. A row is one bundle: its
perplexity, measured as in [quality_reference.md](quality_reference.md), and its speed, a prompt of {prompt} tokens and
then {steps} greedy ones, each bundle of a model in turn, {repeats} times: medians, and the least and the most in
brackets. The head stays float32. MB are 10^6 bytes, of the file of weights, and of what a token reads of it.
"""
COLUMNS = (
    "method", "scheme", "bits", "file, MB", "MB a token", "perplexity", "increase", "prefill, tokens/s",
    "decode, tokens/s",
)  # fmt: skip
WORST = 0.01
"""Largest ratio of W4A8's perplexity to W4A16's, by the same method."""


def measure(name: str, entry: dict[str, Any], scratch: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compress, evaluate and time all rows of a model."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "export" / "python")))}
    evaluator = Evaluator(entry, scratch / "ids.npy", environment)
    dense = capture(entry["model"])
    samples, tokens = load_texts(entry, dense)
    ids = [int(i) for i in tokens.flatten()[: options.prompt]]
    rows, children = [], []
    for method, kind in ROWS:
        scheme = _scheme(kind, GROUPS.get(name, 128))
        passes = [{method: {"scheme": scheme, "ignore": IGNORE}}] if scheme else []
        graph, context, recipe, _ = compress(dense, passes, samples)
        bundle = scratch / f"{name}-{method}-{scheme}"
        bundle.mkdir()
        stored = bundled(dense, graph, context, recipe, bundle)
        quality = evaluator.measure("bundle", str(bundle))
        row = {"model": name, "method": method, "scheme": scheme or "float32", **stored, **quality}
        runtime = Runtime(bundle.name, "", "x86_ours", "", str(bundle))
        child = Child(runtime, Path(), Path(entry["model"]), bundle, options.threads, scratch / "log")
        loaded = child.ask("load")
        row |= {key: loaded[key] for key in ("weight_bytes", "bytes_per_token")} | {"prefill_s": [], "decode_s": []}
        rows.append(row)
        children.append(child)
        print(f"{name}: {method} {scheme}: perplexity {row['perplexity']:.4f}", file=sys.stderr, flush=True)
    for repeat in range(-1, options.repeats):  # the first is not counted
        for row, child in zip(rows, children, strict=True):
            prefill = child.ask("prefill", ids=ids)["seconds"]
            steps = child.ask("decode", ids=ids, steps=options.steps)["seconds"]
            if repeat >= 0:
                row["prefill_s"].append(prefill)
                row["decode_s"].append(statistics.median(steps))
    for child in children:
        child.stop()
    return rows


def table(results: dict[str, Any]) -> str:
    """Format one part per model, then whether the target is met."""
    lines = [HEADING.format(**results)]
    for name in dict.fromkeys(row["model"] for row in results["rows"]):
        rows = {(row["method"], row["scheme"]): row for row in results["rows"] if row["model"] == name}
        cells = [_cells(row, results["prompt"]) for row in rows.values()]
        lines += [f"\n## {name}\n", *lines_of(COLUMNS, cells, {})]
        for method in ("gptq", "rtn"):
            schemes = (_scheme(kind, GROUPS.get(name, 128)) for kind in ("W4A8", "W4A16"))
            found, base = (rows[method, scheme]["perplexity"] for scheme in schemes)
            verdict = "within" if found / base <= 1 + WORST else "NOT within"
            lines.append(f"- {method}: W4A8 has {found / base - 1:+.2%} of W4A16's perplexity, {verdict} {WORST:.0%}.")
    return "\n".join(lines) + "\n"


def _scheme(kind: str | None, group: int) -> str | None:
    return kind if kind in (None, "W8A8") else f"{kind}_G{min(group, 64) if kind == 'NF4' else group}"


def _cells(row: dict[str, Any], prompt: int) -> list[str]:
    return [
        row["method"], row["scheme"], f"{row['bits']:.3f}" if "bits" in row else "32",
        f"{row['weight_bytes'] / 1e6:.2f}", f"{row['bytes_per_token'] / 1e6:.2f}", f"{row['perplexity']:.4f}",
        f"{row['perplexity_increase']:+.2%}", rates(prompt, row["prefill_s"]), rates(1, row["decode_s"]),
    ]  # fmt: skip


def main() -> None:
    """Measure the models, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    entries = yaml.safe_load((HERE / "quality.yaml").read_text(encoding="utf-8"))
    parser.add_argument("models", nargs="+", choices=entries)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=32)
    options = parser.parse_args()
    os.chdir(ROOT)
    before, rows = machine(), []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models:
            rows += measure(name, entries[name], Path(scratch), options)
    given = {key: getattr(options, key) for key in ("threads", "repeats", "prompt", "steps")}
    results = {**before, **given, "rows": rows}
    store = HERE / "results" / "x86_quality.json"
    store.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    store.with_suffix(".md").write_text(table(results), encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()

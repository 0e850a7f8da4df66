"""Bits, perplexity, KL to dense, time and memory of compressing: our methods, and peers in their own environments.

    python benchmarks/quality.py reference [--methods gptq,awq] [--schemes W4A16_G128] [--peers FOLDER] [--missing]
    python benchmarks/quality.py reference --methods none   (only the table again)

Rows are those of benchmarks/quality.yaml; each is measured in a process of its own and written at once to
benchmarks/results/quality_<model>.json and .md, in the place of an older measurement.  FOLDER holds an environment for
each peer (benchmarks/peers/README.md); without it only our own rows are measured.  Calibrates on 64 samples of 256
tokens, evaluates on 16,384 tokens in windows of 256 with stride 128.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from quality_table import table

from compressor.registry import PASSES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
IGNORE = ("lm_head",)
OF_PACKED = ("bias_correction",)  # passes that only look at linears that are packed, which no IGNORE is


def wanted_rows(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return producer, method and format of every row, and the command for our child or the peer's driver."""
    for methods, formats in entry.get("ours", {}).items():
        for given in formats:
            if isinstance(given, dict) and "passes" in given:  # written out, each with its own options
                yield {"who": "ours", "method": methods, "format": given["format"], "passes": given["passes"]}
                continue
            options = given if isinstance(given, dict) else {"scheme" if isinstance(given, str) else "bits": given}
            passes = [{name: _options(name, options)} for name in methods.split("+")]
            name = given if isinstance(given, str) else f"{options['bits']} bits" if "bits" in options else str(given)
            yield {"who": "ours", "method": methods, "format": name, "passes": passes}
    for peer, by_method in entry.get("peers", {}).items():
        for method, formats in by_method.items():
            for name in formats:
                yield {"who": peer, "method": method, "format": name}


def _options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a pass has, and the linears that every pass leaves dense."""
    known = {field.name for field in dataclasses.fields(PASSES.find(name))}
    if name not in OF_PACKED:
        options = {**options, "ignore": IGNORE}
    return {key: value for key, value in options.items() if key in known}


class Evaluator:
    """Process that measures quality (quality_evaluate.py); it keeps the dense model's predictions."""

    def __init__(self, entry: dict[str, Any], ids: Path, environment: dict[str, str]) -> None:
        command = [sys.executable, str(HERE / "quality_evaluate.py"), json.dumps(entry), str(ids)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self._answer()  # of the dense model; by now the samples are in their file

    def measure(self, kind: str, folder: str) -> dict[str, Any]:
        """Measure the quality of a ``bundle``, or of a peer's ``folder``."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({kind: folder}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit("quality_evaluate.py ended; what it said stands above")
        return json.loads(line)


def measure_ours(row: dict[str, Any], entry: dict[str, Any], out: str, environment: dict[str, str]) -> dict[str, Any]:
    """Measure our passes, and leave the bundle in ``out``."""
    request = json.dumps({"data": entry, "passes": row["passes"], "bundle": out})
    command = [sys.executable, str(HERE / "quality_row.py")]
    return json.loads(_checked(command, environment, request))


def measure_peer(
    python: Path, row: dict[str, Any], entry: dict[str, Any], ids: Path, out: str, environment: dict[str, str]
) -> dict[str, Any]:
    """Measure a peer, and leave its dequantised model in ``out``."""
    foreign = {**environment, "PYTHONPATH": str(ROOT)}  # there, and not here: some leave logs where they run
    command = [str(python), "-m", f"benchmarks.peers.{row['who']}", str(Path(entry["model"]).resolve()), str(ids), out]
    _checked([*command, row["method"], row["format"]], foreign, cwd=out)
    return json.loads((Path(out) / "row.json").read_text(encoding="utf-8"))


def _checked(command: list[str], environment: dict[str, str], request: str = "", cwd: str | None = None) -> str:
    done = subprocess.run(command, input=request, capture_output=True, text=True, env=environment, cwd=cwd)
    if done.returncode:
        raise ChildProcessError(done.stderr[-600:])
    return done.stdout


def stored_rows(store: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the measured rows, by producer, method and format."""
    rows = json.loads(store.read_text(encoding="utf-8")) if store.exists() else []
    return {_key(row): row for row in rows}


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["who"], row["method"], row["format"]


def main() -> None:
    """Measure, store, and render the stored rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    entries = yaml.safe_load((HERE / "quality.yaml").read_text(encoding="utf-8"))
    parser.add_argument("model", choices=entries)
    parser.add_argument("--methods", help="only these, joined by commas; `ours` and a peer's name stand for their rows")
    parser.add_argument("--schemes", help="only these formats, joined by commas")
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments")
    parser.add_argument("--missing", action="store_true", help="only rows that are not there yet")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--json", action="store_true", help="print the stored rows as JSON at the end, not the table")
    options = parser.parse_args()
    os.chdir(ROOT)
    entry, store = entries[options.model], HERE / "results" / f"quality_{options.model}.json"
    environment = {**os.environ, "OMP_NUM_THREADS": options.threads, "TOKENIZERS_PARALLELISM": "false"}
    rows, failed = list(wanted_rows(entry)), []
    evaluator = None
    with tempfile.TemporaryDirectory() as scratch:
        ids = Path(scratch) / "ids.npy"
        for row in rows:
            if (
                (options.methods and not {row["who"], row["method"]} & set(options.methods.split(",")))
                or (options.schemes and row["format"] not in options.schemes.split(","))
                or (options.missing and _key(row) in stored_rows(store))
                or (row["who"] != "ours" and not options.peers)
            ):
                continue
            evaluator = evaluator or Evaluator(entry, ids, environment)
            with tempfile.TemporaryDirectory() as out:
                try:
                    if row["who"] == "ours":
                        figures = measure_ours(row, entry, out, environment)
                    else:
                        python = options.peers.absolute() / row["who"] / "bin" / "python"
                        figures = measure_peer(python, row, entry, ids, out, environment)
                except ChildProcessError as error:
                    failed.append(f"{' '.join(_key(row))}: {error}")
                    print("not measured:", failed[-1], file=sys.stderr, flush=True)
                    continue
                figures |= evaluator.measure("bundle" if row["who"] == "ours" else "folder", out)
            measured = {"threads": int(options.threads), **row, **figures}
            known = stored_rows(store) | {_key(row): measured}  # read again: another process may measure other rows
            text = json.dumps([known[key] for key in sorted(known)], indent=1)
            store.write_text(text + "\n", encoding="utf-8")
            summary = f"{figures['bits']:.3f} bits, {figures['perplexity']:.4f}"
            print(f"{' '.join(_key(row))}: {summary}", file=sys.stderr, flush=True)
    known = stored_rows(store)
    ranked = [known[_key(row)] for row in rows if _key(row) in known]
    if not ranked:
        sys.exit(f"{store}: holds no row of benchmarks/quality.yaml yet")
    text = table(options.model, ranked, len(rows))
    store.with_suffix(".md").write_text(text, encoding="utf-8")
    print(json.dumps(ranked, indent=2) if options.json else text)
    if failed:
        sys.exit(f"{len(failed)} rows were not measured")


if __name__ == "__main__":
    main()

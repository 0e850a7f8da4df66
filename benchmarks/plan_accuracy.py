"""Plans against what happened: size, peak memory and time of whole runs, each in a process of its own.

    python benchmarks/plan_accuracy.py [--model FOLDER]... [--llama-852m FOLDER] [--repeats 1] [--json]

Runs the quickstart on the shipped reference model, on each --model, and RTN (W4A8_G128) on the 852 M benchmark Llama
where its folder is given (benchmarks/llama_852m.py makes it).  Every run begins with an empty cache folder, so that
nothing is reused; the machine is measured anew before it.  Run it on an idle machine.

Promised: size within 2%, peak memory within 20%, time within 35%.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMISED = {"bundle_bytes": 0.02, "peak_rss_bytes": 0.20, "seconds": 0.35}
LLAMA = """\
model: {model}
passes:
  - rtn: {{scheme: W4A8_G128, targets: Linear}}
target: x86
"""


def compress(*arguments: str, cache: Path) -> tuple[dict[str, Any], float]:
    """Run ``compress ... --json`` and return its output and seconds."""
    script = Path(sys.executable).with_name("compress")
    begin = time.perf_counter()
    done = subprocess.run(
        [str(script), *arguments, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "COMPRESS_CACHE_DIR": str(cache)},
    )
    return json.loads(done.stdout), time.perf_counter() - begin


def measure(name: str, arguments: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch) / "cache"
        plan, _ = compress("plan", *arguments, "--probe", cache=cache)
        run, seconds = compress("run", *arguments, "-o", str(Path(scratch) / "bundle"), cache=cache)
    predicted = {**plan, "seconds": plan["seconds"]["value"]}
    actual = {**run, "peak_rss_bytes": run["run_peak_rss_bytes"], "seconds": seconds}
    rows = {
        figure: {
            "predicted": predicted[figure],
            "measured": actual[figure],
            "error": predicted[figure] / actual[figure] - 1,
            "promised": promised,
        }
        for figure, promised in PROMISED.items()
    }
    within = plan["seconds"]["low"] <= seconds <= plan["seconds"]["high"]
    return {"name": name, **rows, "time_in_interval": within, "by_stage": run["predictions"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", action="append", default=[], help="a folder to run the quickstart on, with groups of 32"
    )
    parser.add_argument("--llama-852m", type=Path, metavar="FOLDER", help="the model of benchmarks/llama_852m.py")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="figures on stdout as JSON")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        jobs = [("quickstart", ["quickstart"])]
        small = ["--set", "passes.gptq.group_size=32", "--set", "gates={}"]  # fits models with a width of 64
        jobs += [(Path(model).name, ["quickstart", "--model", model, *small]) for model in options.model]
        if options.llama_852m is not None:
            recipe = Path(scratch) / "llama.yaml"
            recipe.write_text(LLAMA.format(model=options.llama_852m.resolve()))
            jobs.append(("852 M Llama", [str(recipe)]))
        for name, arguments in jobs:
            results += [measure(name, arguments) for _ in range(options.repeats)]
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for result in results:
        for figure in PROMISED:
            row = result[figure]
            verdict = "ok" if abs(row["error"]) <= row["promised"] else "NOT KEPT"
            print(
                f"{result['name']:<16} {figure:<16} predicted {row['predicted']:>16,.0f} measured "
                f"{row['measured']:>16,.0f}  {row['error']:+.1%} (promised {row['promised']:.0%}) {verdict}"
            )


if __name__ == "__main__":
    main()

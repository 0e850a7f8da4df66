"""Run every node and simple-model case of ``onnx.backend.test`` through the capture, opset by opset.

    python benchmarks/onnx_cases.py            # some five minutes; writes benchmarks/results/onnx_cases.md
    python benchmarks/onnx_cases.py --only attention

A case is *right* if the captured graph's eager outputs equal the expected ones within the case's tolerance, *refused*
if the capture names the operator or node and the reason, and *wrong* if its numbers differ or anything else happens.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import onnx
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from onnx_case_runner import REFUSED, RIGHT, WRONG, Case, Verdict, judge, load_cases  # noqa: E402

TABLE = ROOT / "benchmarks" / "results" / "onnx_cases.md"
GOLDEN = ROOT / "tests" / "golden" / "onnx_operators.txt"
SLOW_S = 2.0  # far above the usual tenth, so that the choice does not depend on the machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression of case names; writes no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: list[tuple[Case, Verdict, float]] = []
    for case in load_cases():
        if re.search(options.only, case.name):
            start = time.perf_counter()
            results.append((case, judge(case), time.perf_counter() - start))
    for case, verdict, _ in results:
        if verdict.outcome == WRONG or options.only:
            print(f"{verdict.outcome}: {case.name}: {verdict.why}")
    print(Counter(verdict.outcome for _, verdict, _ in results))
    if not options.only:
        TABLE.write_text(table(results), encoding="utf-8")
        GOLDEN.write_text(golden(results), encoding="utf-8")


def table(results: list[tuple[Case, Verdict, float]]) -> str:
    """Return the table as Markdown."""
    counts: dict[int | None, Counter[str]] = defaultdict(Counter)
    for case, verdict, _ in results:
        as_is = verdict.opset == case.opset and not verdict.fixed
        counts[case.opset][verdict.outcome if verdict.outcome != RIGHT or as_is else "adapted"] += 1
    columns = (RIGHT, "adapted", REFUSED, WRONG)
    rows = [(str(opset or "none"), counts[opset]) for opset in sorted(counts, key=lambda opset: opset or 0)]
    total = sum(counts.values(), Counter[str]())
    inside = sum((count for opset, count in counts.items() if opset and 13 <= opset <= 23), Counter[str]())
    rows += [("13 to 23", inside), ("all", total)]
    text = [
        "# Cases of onnx.backend.test",
        "",
        f"Written by `benchmarks/onnx_cases.py` with onnx {onnx.__version__} and torch {torch.__version__}: every node",
        "and simple-model case, by the opset that its model states.",
        "",
        "- *right*: the captured graph's eager outputs have the expected types, shapes, and values within the case's",
        "  own tolerance (two units in the last place for float16 and bfloat16: arithmetic is float32).",
        "- *adapted*: right too, but with inputs that the operator wants to know ahead (axes, sizes, numbers) as",
        "  initializers, as exporters write them, or restated as opset 13 or 23 where onnx's checker accepts that and",
        "  its reference evaluator still computes what the case expects.",
        "- *refused*: by an error that names the node and the reason.",
        "- *wrong*: other numbers, or any other exception. There must be none.",
        "",
        "| opset | right | adapted | refused | wrong |",
        "|---|---|---|---|---|",
    ]
    text += [f"| {name} | " + " | ".join(str(count[column]) for column in columns) + " |" for name, count in rows]
    reasons = Counter(_reason(v.why) for _, v, _ in results if v.outcome == REFUSED)
    text += ["", "Refused, by reason (of the case as it is):", "", "| cases | reason |", "|---|---|"]
    text += [f"| {count} | {reason} |" for reason, count in sorted(reasons.items(), key=lambda r: (-r[1], r[0]))]
    right = sorted({case.operators[0] for case, v, _ in results if v.outcome == RIGHT and len(case.operators) == 1})
    text += ["", f"Operators with a right case of their own ({len(right)}): {', '.join(right)}."]
    return "\n".join(text) + "\n"


def _reason(why: str) -> str:
    """Return a refusal without the names of one case."""
    why = re.sub(r"opset (\d+) is too (\w+).*", r"opset \1 is too \2", why.partition("; and ")[0])
    why = re.sub(r"^\w+ '[^']*': (?=.*(?:strings|sequences|control flow|random|depends on data))", "", why)
    return re.sub(r" '[^']*'", "", why).partition(";")[0].replace("|", "/")


def golden(results: list[tuple[Case, Verdict, float]]) -> str:
    """Return an operator and its smallest right case a line, for the test suite."""
    best: dict[str, tuple[int, str]] = {}
    for case, verdict, seconds in results:
        if verdict.outcome == RIGHT and len(case.operators) == 1 and seconds < SLOW_S:
            size = case.model.ByteSize() + sum(np.asarray(x).nbytes for x in case.data[0][0])
            best[case.operators[0]] = min(best.get(case.operators[0], (1 << 62, "")), (size, case.name))
    return "".join(f"{operator} {name}\n" for operator, (_, name) in sorted(best.items()))


if __name__ == "__main__":
    main()

"""Bounds and remedies of plans, tried: no speed above its bound, and no setting that a refusal names in vain.

    python -m benchmarks.plan_bounds [--json]

Ten shipped recipes on the shipped reference model and on two random Llamas, of 45 and 160 million parameters.  Each
bundle (`tune: off`) is timed by ``compress bench`` for as many tokens as the plan's bounds are for.  Then two of the
recipes are planned where they cannot run: too long samples, too many of them, too little memory; every setting that the
refusal names is planned again, and has to be accepted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.llama_852m import make_model

RECIPES = (
    "gptq_w4a16_g128_x86", "awq_w4a16_g128_x86", "gptq_w4a8_g128_x86", "gptq_w3a16_g128_x86", "gptq_nf4_g64_x86",
    "gptq_mxfp4_x86", "gptq_fp6_e2m3_g128_x86", "smoothquant_w8a8_x86", "abq_bip2a8_x86", "gptq_nvfp4_x86",
)  # fmt: skip
PHASES = {"prefill": "prefill_tokens_per_s", "decode": "decode_tokens_per_s"}
COMPRESS = Path(sys.executable).with_name("compress")
SMALL = ("tune=off", "calibration.samples=8", "calibration.sequence_length=128", "evaluation.tokens=512", "gates={}")
TOO_MUCH = (("calibration.sequence_length=100000",), ("calibration.samples=900000",))
SCARCE_BYTES = (1_000_000_000, 1_300_000_000)


def settings(given: Sequence[str]) -> list[str]:
    return [text for setting in given for text in ("--set", setting)]


def call(*arguments: str, data_bytes: int | None = None) -> tuple[int, dict[str, Any]]:
    """Run ``compress ... --json``, with a limit on its memory if one is given; its exit code and object."""

    def limit() -> None:
        if data_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))

    command = [str(COMPRESS), *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=limit)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}


def speeds(recipe: str, model: str, folder: Path) -> list[dict[str, Any]]:
    """Return bound and measured speed of each phase."""
    common = [recipe, "--model", model, *settings(SMALL)]
    code, plan = call("plan", *common)
    if code:
        return [{"recipe": recipe, "model": Path(model).name, "refused": plan["error"]["message"]}]
    run_code, run = call("run", *common, "-o", str(folder))
    if run_code:
        raise SystemExit(f"{recipe}, {model}: planned, and then refused: {run}")
    tokens = {bound["phase"]: bound["tokens"] for bound in plan["rooflines"]}
    _, measured = call("bench", str(folder), "--prompt-tokens", str(tokens["prefill"]), "--new-tokens", "32")
    return [
        {
            "recipe": recipe,
            "model": Path(model).name,
            "phase": bound["phase"],
            "bound": bound["tokens_per_s"],
            "measured": measured[PHASES[bound["phase"]]],
        }
        for bound in plan["rooflines"]
    ]


def remedies(recipe: str, model: str) -> Iterator[dict[str, Any]]:
    """Yield each setting that a refused plan names, and whether the plan with it is accepted."""
    cases: list[tuple[tuple[str, ...], int | None]] = [(asked, None) for asked in TOO_MUCH]
    cases += [((), size) for size in SCARCE_BYTES]
    for asked, data_bytes in cases:
        given = ["tune=off", "gates={}", *asked]
        code, found = call("plan", recipe, "--model", model, *settings(given), data_bytes=data_bytes)
        if code == 0:
            continue
        said = found.get("error", found).get("message", "")
        named = re.findall(r"([\w.]+=\w+) would fit", said)
        named += [
            f"calibration.{key}={value}" for key, value in re.findall(r"(samples|sequence_length) to (\d+)", said)
        ]
        named += [f"calibration.sequence_length={value}" for value in re.findall(r"give at most (\d+)", said)]
        for setting in named:
            again, _ = call("plan", recipe, "--model", model, *settings([*given, setting]), data_bytes=data_bytes)
            yield {
                "recipe": recipe,
                "model": Path(model).name,
                "asked": asked or data_bytes,
                "remedy": setting,
                "code": again,
            }


def described(row: dict[str, Any]) -> str:
    """Write a bound and what was measured as one line."""
    head = f"{row['model']:<14} {row['recipe']:<24}"
    if "refused" in row:
        return f"{head} refused by the plan: {row['refused']}"
    share = row["measured"] / row["bound"]
    return (
        f"{head} {row['phase']:<8} {row['measured']:>10,.0f} of at most {row['bound']:>10,.0f} tokens/s: {share:.1%}"
        f"{'' if share <= 1 else '  ABOVE ITS BOUND'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, tried = list[dict[str, Any]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["COMPRESS_CACHE_DIR"] = str(Path(scratch) / "cache")
        call("plan", "quickstart", "--probe")
        models = ["reference"]
        for hidden, layers in ((512, 4), (1024, 8)):
            models.append(str(Path(scratch) / f"llama_{hidden}"))
            make_model(Path(models[-1]), hidden, layers)
        for model in models:
            for recipe in RECIPES:
                for row in speeds(recipe, model, Path(scratch) / "bundle"):
                    rows.append(row)
                    print(described(row), file=sys.stderr, flush=True)
            for recipe in RECIPES[:2]:
                for tried_one in remedies(recipe, model):
                    tried.append(tried_one)
                    print(tried_one, file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"speeds": rows, "remedies": tried}, indent=2))
        return
    wrong = [row for row in tried if row["code"]]
    print(f"{len(tried)} remedies were named and planned; {len(wrong)} were refused", *wrong, sep="\n")


if __name__ == "__main__":
    main()

"""A run that is killed in each of its stages, and goes on: the bundle must be that of one undisturbed.

    python benchmarks/stage_interruptions.py WORK_FOLDER [--recipe puzzle_x86] [--set KEY=VALUE ...] [--only train ...]

One run is left alone, and says which stages there are and how long each takes.  Then for each of them, or those whose
name holds one of the words of ``--only``, a run begins without anything finished, is killed (SIGKILL, the whole process
group) in the middle of the stage, and the same command is given again.  Times differ from run to run, so all have those
that the undisturbed one measured, of schedules and of an architecture search's candidates; a run that is killed while
it times candidates has these from its second begin on.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interruptions import begin, bundle_sha256, debris, fresh, kill, run
from safetensors import safe_open

TIMES = "time candidates"
"""The stage whose results differ from run to run."""
_BEGINS = re.compile(r"^\[ *([\d.]+) s\] (.+?)(?: \(\d+ steps\))? begins")
_TOOK = re.compile(r"^\[ *([\d.]+) s\] (.+?) took ")


@dataclass(frozen=True)
class Stage:
    """A stage of a run: its name, how many of this name began before it, and its seconds."""

    name: str
    before: int
    took_s: float


def stages(log: str) -> list[Stage]:
    """Return the stages of a run in the order of their ends."""
    begun, found = dict[str, list[float]](), list[Stage]()
    for line in log.splitlines():
        if match := _BEGINS.match(line):
            begun.setdefault(match[2], []).append(float(match[1]))
        elif match := _TOOK.match(line):
            times = begun[match[2]]
            found.append(Stage(match[2], len(times) - 1, float(match[1]) - times[-1]))
    return found


def take_times(base: Path, cache: Path) -> None:
    """Copy the measured times of candidates out of one cache's results into another's."""
    for entry in kept_times(base / "results"):
        shutil.copytree(entry, cache / "results" / entry.name, dirs_exist_ok=True)


def kept_times(results: Path) -> list[Path]:
    """Return the results that hold measured times."""
    found = []
    for file in results.glob("[0-9a-f]*/*.safetensors"):
        with safe_open(file, "np") as tensors:
            if "seconds" in tensors.keys():  # noqa: SIM118 (not a mapping)
                found.append(file.parent)
    return found


def killed(child: subprocess.Popen[str], stage: Stage) -> bool:
    """Kill a run in the middle of a stage; false if it ended before."""
    assert child.stderr is not None
    before = 0
    for line in child.stderr:
        if not (match := _BEGINS.match(line)) or match[2] != stage.name:
            continue
        if before == stage.before:
            time.sleep(stage.took_s / 2)
            break
        before += 1
    return kill(child)


def main() -> int:
    """Kill a run in each stage and print a line of JSON for each; 0 if all bundles are the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--recipe", default="puzzle_x86")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="of stages' names")
    options = parser.parse_args()
    work: Path = options.work.absolute()
    base, first = work / "base", work / "undisturbed"
    settings = ["--threads", "1", *(word for change in options.changes for word in ("--set", change))]
    for folder in (first, base / "results"):
        shutil.rmtree(folder, ignore_errors=True)
    done = run(options.recipe, first, base, *settings)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return 1
    expected, found, is_right = bundle_sha256(first), stages(done.stderr), True
    chosen = [stage for stage in found if any(word in stage.name for word in options.only)]
    if not chosen:
        print(f"no stage is named so; there are {', '.join(stage.name for stage in found)}", file=sys.stderr)
        return 2
    for number, stage in enumerate(chosen):
        folder = fresh(work / f"kill_{number:02d}", base)
        cache, output = folder / "cache", folder / "out" / "bundle"
        if stage.name != TIMES:
            take_times(base, cache)
        was_under_way = killed(begin(options.recipe, output, cache, *settings), stage)
        left = output.exists()
        take_times(base, cache)
        again = run(options.recipe, output, cache, *settings)
        row: dict[str, Any] = {"stage": stage.name, "took_s": round(stage.took_s, 1), "killed": was_under_way}
        row["left"] = left
        row |= {"exit_code": again.returncode, "debris": debris(folder)}
        if again.returncode:
            row["message"] = again.stderr.strip().splitlines()[-1:]
        else:
            row["same_hash"] = bundle_sha256(output) == expected
        is_right &= row.get("same_hash", False) and not row["debris"] and not left and was_under_way
        print(json.dumps(row), flush=True)
        shutil.rmtree(folder)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())

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
from pathlib import Path
from typing import Any

from interruptions import begin, bundle_sha256, debris, fresh, kill, run
from safetensors import safe_open

TIMES = "time candidates"
"""The stage whose results differ from run to run."""
_BEGINS = re.compile(r"^\[ *([\d.]+) s\] (.+?)(?: \(\d+ steps\))? begins")
_TOOK = re.compile(r"^\[ *([\d.]+) s\] (.+?) took ")


def stages(log: str) -> dict[str, tuple[float, float]]:
    """Return when each stage first began, and how many seconds it took."""
    begun, found = dict[str, float](), dict[str, tuple[float, float]]()
    for line in log.splitlines():
        if match := _BEGINS.match(line):
            begun.setdefault(match[2], float(match[1]))
        elif (match := _TOOK.match(line)) and match[2] not in found:
            found[match[2]] = begun[match[2]], float(match[1]) - begun[match[2]]
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


def killed(child: subprocess.Popen[str], stage: str, after_s: float) -> bool:
    """Kill a run some seconds after a stage began; false if it ended before."""
    assert child.stderr is not None
    for line in child.stderr:
        if (match := _BEGINS.match(line)) and match[2] == stage:
            time.sleep(after_s)
            break
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

    shutil.rmtree(first, ignore_errors=True)
    done = run(options.recipe, first, base, *settings)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return 1
    expected, found, is_right = bundle_sha256(first), stages(done.stderr), True
    for number, (stage, (_, took_s)) in enumerate(found.items()):
        if not any(word in stage for word in options.only):
            continue
        folder = fresh(work / f"kill_{number:02d}", base)
        cache, output = folder / "cache", folder / "out" / "bundle"
        if stage != TIMES:
            take_times(base, cache)
        was_under_way = killed(begin(options.recipe, output, cache, *settings), stage, took_s / 2)
        left = output.exists()
        take_times(base, cache)
        again = run(options.recipe, output, cache, *settings)
        row: dict[str, Any] = {"stage": stage, "took_s": round(took_s, 1), "killed": was_under_way, "left": left}
        row |= {"exit_code": again.returncode, "debris": debris(folder)}
        if again.returncode:
            row["message"] = again.stderr.strip().splitlines()[-1:]
        else:
            row["same_hash"] = bundle_sha256(output) == expected
        is_right &= row.get("same_hash", False) and not row["debris"] and not left
        print(json.dumps(row), flush=True)
        shutil.rmtree(folder)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())

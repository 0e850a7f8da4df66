"""Interrupted runs: killed at random moments, out of disk, read-only folders.

    python benchmarks/interruptions.py WORK_FOLDER [--recipe quickstart] [--kills 20] [--seed 0] [--parallel 2]

One run is left alone.  Then runs are killed (SIGKILL, the whole process group) at moments drawn uniformly from the
time that it took, and the same command is given again: its bundle must have the hash of the undisturbed one, and
neither the killed run nor the second may leave anything behind.  All of them start from the undisturbed run's database
of schedules, which are chosen by time, and from no finished blocks.

As root, it then mounts small file systems: a run whose cache or output has too little room, or is read-only, must end
with one message, exit code 1 or 2 and nothing left behind, and the next run must succeed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FAULTS = (
    "cache_full",
    "output_full",
    "cache_filled",
    "output_filled",
    "temporary_filled",
    "cache_readonly",
    "output_readonly",
)
SHARED = ("tuning.json", "machine.json", "fingerprints.json")


def command(recipe: str, output: Path, *options: str) -> list[str]:
    return [str(Path(sys.executable).with_name("compress")), "run", recipe, *options, "-o", str(output), "--json"]


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "COMPRESS_CACHE_DIR": str(cache)}


def run(recipe: str, output: Path, cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    line = command(recipe, output, *options)
    return subprocess.run(line, env=environment(cache), capture_output=True, text=True, check=False)


def begin(recipe: str, output: Path, cache: Path, *options: str) -> subprocess.Popen[str]:
    """Start a run in a process group of its own, whose messages can be read."""
    return subprocess.Popen(
        command(recipe, output, *options), env=environment(cache), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip


def kill(child: subprocess.Popen[str]) -> bool:
    """Kill a run and all that it started; false if it ended before."""
    is_under_way = child.poll() is None
    if is_under_way:
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    return is_under_way


def bundle_sha256(bundle: Path) -> str:
    """Return the manifest's SHA-256; the manifest holds the hash of every other file."""
    return hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()


def debris(*folders: Path) -> list[str]:
    return sorted(str(path) for folder in folders for path in folder.rglob(".*.partial"))


def fresh(folder: Path, base: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "cache").mkdir(parents=True)
    for name in SHARED:
        if (base / name).is_file():
            shutil.copy(base / name, folder / "cache" / name)
    return folder


def kill_once(work: Path, base: Path, recipe: str, number: int, delay_s: float, expected: str) -> dict[str, Any]:
    folder = fresh(work / f"kill_{number:02d}", base)
    output, cache = folder / "out" / "bundle", folder / "cache"
    child = begin(recipe, output, cache)
    time.sleep(delay_s)
    finished = not kill(child)
    left = output.exists()
    began = time.perf_counter()
    again = run(recipe, output, cache)
    row: dict[str, Any] = {
        "killed_after_s": round(delay_s, 2),
        "finished_before": finished,
        "bundle_was_there": left,
        "second_run_s": round(time.perf_counter() - began, 1),
        "exit_code": again.returncode,
    }
    if again.returncode == 0:
        passes = json.loads(again.stdout)["passes"]
        row["blocks"] = sum(stage["blocks"] for stage in passes)
        row["reused"] = sum(stage["reused"] for stage in passes)
        row["same_hash"] = bundle_sha256(output) == expected
    else:
        row["message"] = again.stderr.strip().splitlines()[-1:]
    row["debris"] = debris(folder)
    shutil.rmtree(folder)
    return row


def mounted(folder: Path, options: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


def fault(work: Path, base: Path, recipe: str, name: str, expected: str) -> dict[str, Any]:
    """Run with one fault, named ``<what>_<fault>``: what is the folder of the cache, the output or temporary files.

    ``full`` and ``readonly`` hold from the start; ``filled`` becomes full while the run is under way.
    """
    what, kind = name.split("_")
    folder = fresh(work / name, base)
    place, output, cache = folder / "disk", folder / "out" / "bundle", folder / "cache"
    mounted(place, "size=64m" if kind == "filled" else "size=1m")
    env = environment(cache)
    if what == "cache":
        for file in cache.iterdir():
            shutil.copy(file, place / file.name)
        env["COMPRESS_CACHE_DIR"] = str(place)
    elif what == "output":
        output = place / "bundle"
    else:
        env["TMPDIR"] = str(place)
    if kind == "readonly":
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    try:
        first = subprocess.Popen(
            command(recipe, output), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if kind == "filled":
            blocks = Path(env["COMPRESS_CACHE_DIR"]) / "results"
            while first.poll() is None and not list(blocks.glob("[0-9a-f]*/entry.json")):
                time.sleep(0.01)  # the plan has found room
            with contextlib.suppress(OSError), (place / "filler").open("wb", buffering=0) as filler:
                while True:
                    filler.write(bytes(1 << 14))
        _, errors = first.communicate()
        row: dict[str, Any] = {
            "fault": name,
            "exit_code": first.returncode,
            "message": re.sub(r"\s+", " ", errors.strip().splitlines()[-1])[:300],
            "traceback": "Traceback" in errors,
            "bundle_was_there": output.exists(),
            "debris": debris(folder),
        }
        subprocess.run(["mount", "-o", "remount,rw,size=2g", str(place)], check=True)
        (place / "filler").unlink(missing_ok=True)
        second = subprocess.run(command(recipe, output), env=env, capture_output=True, text=True, check=False)
        row["next_exit_code"] = second.returncode
        row["next_same_hash"] = second.returncode == 0 and bundle_sha256(output) == expected
    finally:
        subprocess.run(["umount", str(place)], check=True)
    shutil.rmtree(folder)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    work: Path = options.work.absolute()
    base = work / "base"
    print("an undisturbed run", file=sys.stderr)
    shutil.rmtree(work / "undisturbed", ignore_errors=True)
    run(options.recipe, work / "undisturbed", base)  # fills the database of schedules
    shutil.rmtree(base / "results")
    began = time.perf_counter()
    done = run(options.recipe, work / "undisturbed", base)
    took_s = time.perf_counter() - began
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return 1
    expected = bundle_sha256(work / "undisturbed")
    generator = random.Random(options.seed)
    moments = [generator.uniform(0, took_s) for _ in range(options.kills)]
    ok = True

    def trial(number: int) -> dict[str, Any]:
        return kill_once(work, base, options.recipe, number, moments[number], expected)

    with ThreadPoolExecutor(options.parallel) as pool:
        for row in pool.map(trial, range(options.kills)):
            ok &= row.get("same_hash", False) and not row["debris"]
            print(json.dumps(row), flush=True)
    if os.geteuid() == 0:
        for name in FAULTS:
            row = fault(work, base, options.recipe, name, expected)
            clean = not (row["traceback"] or row["bundle_was_there"] or row["debris"])
            ok &= row["exit_code"] in (1, 2, 5) and clean and row["next_same_hash"]
            print(json.dumps(row), flush=True)
    print(json.dumps({"undisturbed_s": round(took_s, 1), "sha256": expected, "all_as_they_must_be": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

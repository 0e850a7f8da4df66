"""Processes that runtimes run in, for benchmarks/x86_race.py, and the peak speed of this CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LONGEST_S = 3600.0  # for one answer: a conversion, or compiling for the first prompt


class ChildError(Exception):
    """A runtime is not available or failed; the message says why."""


@dataclass(frozen=True)
class Runtime:
    """One line of the table.

    Attributes:
        environment: of Python, in the folder of the peers; empty for ours.
        driver: in benchmarks/peers.
        files: what the converted model's folder is called; of ours, the bundle's folder.
    """

    name: str
    environment: str
    driver: str
    variant: str
    files: str

    def python(self, peers: Path) -> Path:
        """Return the interpreter that runs the driver."""
        return peers.absolute() / self.environment / "bin" / "python" if self.environment else Path(sys.executable)


class Child:
    """A driver's process; benchmarks/peers/x86_serve.py lists its requests."""

    def __init__(self, runtime: Runtime, peers: Path, model: Path, files: Path, threads: int, log: Path) -> None:
        self.runtime, self.log = runtime, log
        python = runtime.python(peers)
        if not python.exists():
            raise ChildError(f"no environment: {python} is missing")
        paths = [ROOT] if runtime.environment else [ROOT, ROOT / "export" / "python"]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_", "GOMP_", "PYTHON"))}
        environment = {
            **kept, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        command = [python, "-m", f"benchmarks.peers.{runtime.driver}", model, files, runtime.variant, threads]
        with log.open("a") as stream:
            self.process = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream,
                text=True, cwd=ROOT, env=environment,
            )  # fmt: skip

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """Send one request and return its answer."""
        assert self.process.stdin and self.process.stdout
        timer = threading.Timer(LONGEST_S, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps({"do": what, **more}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            code = self.process.wait()
            words = [text for text in self.log.read_text(errors="replace").splitlines() if text.strip()]
            raise ChildError(f"{what}: the process ended with {code}: {' / '.join(words[-1:])[:300]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{what}: {answer['error'][:300]}")
        return answer

    def stop(self) -> None:
        """End the process, which ends by itself when its input does."""
        assert self.process.stdin
        try:
            self.process.stdin.close()
            self.process.wait(10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


def available_bytes() -> int:
    """Return the memory that processes may still take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def peak_int8(work: Path, threads: int) -> dict[str, float]:
    """Measure operations per second of one of ``threads`` busy threads, by kind of instruction; empty without a
    compiler.
    """
    program, source = work / "peak_int8", Path(__file__).with_name("peak_int8.cpp")
    flags = ["-O2", "-pthread", "-mavx512f", "-mavx512vnni", "-mamx-tile", "-mamx-int8"]
    try:
        if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
            subprocess.run(["g++", *flags, str(source), "-o", str(program)], check=True)
        done = subprocess.run([str(program), str(threads)], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no peak of int8: {error}", file=sys.stderr)
        return {}
    rates: dict[str, float] = json.loads(done.stdout)
    return rates

"""Run the finished bundle in a fresh process, with its own run-time and without torch, against the stored vectors."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compressor.errors import VerificationError

BLOCKED = ("torch", "transformers", "datasets", "tvm", "compressor")
"""Packages that a bundle must do without; importing one of these is an error in the fresh process."""

_SCRIPT = "compressor_selfcheck.py"
_TIMEOUT_S = 300.0
_EMULATED = 10
_SLOWEST_BYTES_PER_S = 10e6
_CHILD = """
import runpy, sys
_, folder, script, blocked, *arguments = sys.argv
sys.modules.update(dict.fromkeys(blocked.split(",")))  # an import that finds None fails
sys.path[:] = [folder, *filter(None, sys.path)]
sys.argv = [script, folder, *arguments]
runpy.run_path(script, run_name="__main__")
"""


@dataclass(frozen=True)
class SmokeResult:
    """Measurements of the fresh process, by the names of the JSON output.

    Attributes:
        error: relative error of the worst output, see ``compare`` in export/python/compressor_selfcheck.py.
        tolerance: the largest error that rounding explains.
        load_s: seconds to check the files and load the bundle.
        first_token_ms: milliseconds of the very first call; a decoder's has a prompt of at most 16 tokens.
        decode_ms: milliseconds per token after the first call, the median of at most 8 tokens; None for other models.
        peak_rss_bytes: peak resident memory of the process.
        threads: number of the kernels' threads.
    """

    error: float
    tolerance: float
    load_s: float
    first_token_ms: float
    decode_ms: float | None
    peak_rss_bytes: int
    threads: int


_FIELDS = [field.name for field in dataclasses.fields(SmokeResult) if field.name != "error"]


def smoke_test(
    bundle: Path, threads: int | None = None, isa: str | None = None, launcher: Sequence[str] = ()
) -> SmokeResult:
    """Load a bundle in its own process, with the run-time that is shipped in it, and compare its outputs with the
    stored ones.

    The process gets five minutes, and a second more for every 10 MB of the bundle; under an emulator ten times as long.

    Args:
        threads: number of the kernels' threads; None takes the physical cores.
        isa: instruction set of the kernels; None takes the best of the bundle's that runs here.
        launcher: words put before the process's command, such as an emulator.
    Raises:
        VerificationError: the bundle does not load, computes something else, imports what it must not, crashes or
            hangs.
    """
    folder = bundle.resolve()
    script = folder / _SCRIPT
    if not script.is_file():
        raise VerificationError(f"{bundle}: has no {_SCRIPT}: a bundle without vectors; compress the model again")
    limit_s = _TIMEOUT_S + sum(file.lstat().st_size for file in folder.iterdir()) / _SLOWEST_BYTES_PER_S
    limit_s *= _EMULATED if launcher else 1
    options = [] if threads is None else ["--threads", str(threads)]
    options += [] if isa is None else ["--isa", isa]
    # -B: no __pycache__ in the bundle.
    command = [*launcher, sys.executable, "-B", "-c", _CHILD, str(folder), str(script), ",".join(BLOCKED), *options]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise VerificationError(
            f"{bundle}: the kernels did not end within {limit_s:.0f} s in a fresh process; run it again when the "
            "machine has less to do, and report it if that does not help"
        ) from error
    try:
        found = json.loads(done.stdout.splitlines()[-1])
        result = SmokeResult(error=worst_error(found["errors"], found["tolerance"]), **{n: found[n] for n in _FIELDS})
        runtime = folder / found["runtime"]
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise VerificationError(f"{bundle}: does not run in a fresh process: {_reason(done)}") from error
    own = (folder / "compressor_runtime" / "__init__.py", folder / "compressor_runtime.py")  # one file in older bundles
    if runtime not in own:
        raise VerificationError(f"{bundle}: has no compressor_runtime of its own: {runtime} was used")
    if done.returncode:
        raise VerificationError(f"{bundle}: the fresh process failed after its checks: {_reason(done)}")
    return result


def worst_error(errors: Mapping[str, float | None], tolerance: float) -> float:
    """Return the largest of the outputs' errors; None and NaN count as infinite.

    Raises:
        VerificationError: the largest error exceeds the tolerance.
    """
    sizes = {name: math.inf if error is None or math.isnan(error) else error for name, error in errors.items()}
    name, error = max(sizes.items(), key=lambda item: item[1])
    if not error <= tolerance:
        raise VerificationError(
            f"the kernels do not compute what the graph does: relative error {error:.2g} ({name}), and rounding "
            f"explains at most {tolerance:.2g}; compress the model again, and report it if that does not help"
        )
    return error


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"the process was ended by signal {-done.returncode} ({signal.strsignal(-done.returncode)})"
    line = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
    if "None in sys.modules" in line:
        return f"it imports a package that a bundle must do without ({line})"
    return f"{line.removeprefix('error: ')} (exit code {done.returncode})"

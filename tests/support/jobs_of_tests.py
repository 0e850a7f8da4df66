"""Functions that tests run as jobs, imported by name in other processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.errors import UsageError
from compressor.executor.jobs import resolved


def squares(values: Tensor, again: list[Tensor], plus: float) -> dict[str, Any]:
    """Print a line, and return figures of tensors."""
    print(f"plus {plus}")
    return {"sum": float((values @ values.T).sum() + plus), "first": [float(one.flatten()[0]) for one in again]}


def dies_once(mark: str, number: int) -> int:
    """Kill the process that runs this, the first time."""
    try:
        Path(mark).touch(exist_ok=False)
    except FileExistsError:
        time.sleep(0.05)
        return number
    os.kill(os.getpid(), signal.SIGKILL)
    return -1


def dies_once_in(mark: str, function: str, arguments: dict[str, Any]) -> Any:
    """Run a job, and kill the process that runs the first one, in its middle."""
    found = resolved(function)(**arguments)
    dies_once(mark, 0)
    return found


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuses(number: int) -> int:
    if number == 1:
        raise UsageError("job one: is refused")
    return number


def breaks() -> None:
    raise ValueError("broken")

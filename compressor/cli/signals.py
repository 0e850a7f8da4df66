"""End a command on SIGINT, SIGTERM and SIGHUP alike: whatever it was doing, cleanly, and with the signal's exit code.

An exception that a signal raises can be lost, or come back as something else, where Python is called from C++ (TVM's
code generator calls our rules): so the signal is also remembered, and looked at where work begins and goes on.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_received: list[int] = []


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted in the block at the first of the signals; those after it leave the clean-up alone."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    _received.clear()
    former = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in former.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _raise(number: int, _frame: FrameType | None) -> None:
    _received.append(number)
    if len(_received) == 1:
        raise Interrupted(number)


def received() -> Interrupted | None:
    """Return what was raised at a signal; None if none came."""
    return Interrupted(_received[0]) if _received else None


@contextmanager
def restored() -> Iterator[None]:
    """Raise what a signal raised in place of whatever came of it, such as the error of a terminal that was closed."""
    try:
        yield
    except BaseException as error:
        interrupted = received()
        if interrupted is None or isinstance(error, Interrupted):
            raise
        raise interrupted from error


def check() -> None:
    """Raise again what was raised at a signal, if it came back as something else or not at all."""
    if _received:
        raise Interrupted(_received[0])

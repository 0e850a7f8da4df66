"""Share what all commands do alike: errors as one message, output for people or as JSON, common arguments."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from compressor.cli import signals
from compressor.errors import CompressorError, exit_code

F = TypeVar("F", bound=Callable[..., Any])


def reported(command: F) -> F:
    """Turn errors that are meant for the user into one message and their exit code, and signals into theirs."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        with signals.interruptible():
            try:
                return command(*args, **kwargs)
            except BaseException as error:
                code = _explain(error, command.__name__)
                if code is None:
                    raise
        sys.exit(code)

    return run  # type: ignore[return-value]


def _explain(error: BaseException, command: str) -> int | None:
    """Say what ended a command, and return its exit code; None where it is none of the user's business."""
    error = signals.received() or error  # whatever C++ made of the exception
    runtime = sys.modules.get("compressor_runtime")
    if isinstance(error, KeyboardInterrupt):
        kept = "; finished blocks are kept: the same command goes on from there" if command == "run" else ""
        _say(f"interrupted{kept}")
    elif isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE  # as of other programs whose reader has enough
    elif isinstance(error, CompressorError) or (runtime is not None and isinstance(error, runtime.BundleError)):
        _say(f"error: {error}")
    elif isinstance(error, OSError):  # a full disk, a folder that went away
        place = "" if error.filename is None else f"{error.filename}: "
        _say(f"error: {place}{error.strerror or error}; free some space, or check the folder")
    elif isinstance(error, MemoryError):
        _say("error: out of memory; compress with fewer or shorter calibration samples")
    else:
        return None
    return exit_code(error)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is closed
        click.echo(text, err=True)


def emit(as_json: bool, content: Any, show: Callable[[], None]) -> None:
    """Print content as one JSON object, or show it to people."""
    if as_json:
        click.echo(json.dumps(content, indent=2, default=str))
    else:
        show()


def shipped_model(name: str) -> str:
    """Return the folder of a shipped model by its name, as recipes do; anything else as it is."""
    from compressor.host.resources import resource

    shipped = resource("models") / name
    return str(shipped) if re.fullmatch(r"\w+", name) and shipped.is_dir() and not Path(name).is_dir() else name


def folder_with(*markers: str) -> Callable[[click.Context, click.Parameter, Path], Path]:
    """Make the check of an argument: a folder that holds one of these files."""

    def check(_ctx: click.Context, _parameter: click.Parameter, path: Path) -> Path:
        if markers == BUNDLE_OR_MODEL:
            path = Path(shipped_model(str(path)))
        if not path.is_dir():
            raise click.BadParameter(f"{path}: no such folder")
        if not any((path / marker).is_file() for marker in markers):
            kind = "a bundle" if markers == BUNDLE else "a bundle or a Hugging Face folder"
            raise click.BadParameter(f"{path}: not {kind}: it has no {' and no '.join(markers)}")
        return path

    return check


BUNDLE = ("manifest.json",)
BUNDLE_OR_MODEL = ("manifest.json", "config.json")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
threads_option = click.option("--threads", type=click.IntRange(1), help="Threads [default: the physical cores].")

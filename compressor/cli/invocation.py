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
from compressor.host.resources import nearest_shipped_model, resource

F = TypeVar("F", bound=Callable[..., Any])
_AS_JSON, _PRINTED = "json_asked", "json_printed"  # keys of what click keeps of one call


def reported(command: F) -> F:
    """Turn errors that are meant for the user into one message and their exit code, and signals into theirs."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        with signals.interruptible():
            try:
                return command(*args, **kwargs)
            except BaseException as error:
                code, text = _explained(error, command.__name__)
                if code is None:
                    raise
                if text:
                    _say(text, code, kwargs.get("as_json", False))
        sys.exit(code)

    return run  # type: ignore[return-value]


def _explained(error: BaseException, command: str) -> tuple[int | None, str]:
    """Return the exit code of what ended a command, None where it is none of the user's business, and what to say."""
    error = signals.received() or error  # whatever C++ made of the exception
    runtime = sys.modules.get("compressor_runtime")
    if isinstance(error, KeyboardInterrupt):
        kept = "; finished blocks are kept: the same command goes on from there" if command == "run" else ""
        return exit_code(error), f"interrupted{kept}"
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE, ""  # as of other programs whose reader has enough
    if isinstance(error, CompressorError) or (runtime is not None and isinstance(error, runtime.BundleError)):
        return exit_code(error), f"error: {error}"
    if isinstance(error, OSError):  # a full disk, a folder that went away
        place = "" if error.filename is None else f"{error.filename}: "
        return exit_code(error), f"error: {place}{error.strerror or error}; free some space, or check the folder"
    if isinstance(error, MemoryError):
        return exit_code(error), "error: out of memory; compress with fewer or shorter calibration samples"
    return None, ""


def _say(text: str, code: int, as_json: bool) -> None:
    with contextlib.suppress(OSError):  # the terminal is closed
        click.echo(text, err=True)
        if as_json and not click.get_current_context().meta.get(_PRINTED):
            click.echo(_error_object(text.removeprefix("error: "), code))


def _error_object(message: str, code: int) -> str:
    return json.dumps({"error": {"message": message, "exit_code": code}}, indent=2)


class Commands(click.Group):
    """Groups commands; what is wrong with their arguments is an object as well where ``--json`` is among them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Look for ``--json`` before arguments are taken apart, which may fail."""
        ctx.meta[_AS_JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Call a command, and print the object of an error in its arguments."""
        try:
            return self._invoke(ctx)
        except click.UsageError as error:
            if ctx.meta[_AS_JSON]:
                click.echo(_error_object(error.format_message(), error.exit_code))
            raise

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except OSError as error:  # a path that an argument names, such as one that is too long
            raise click.UsageError(f"{error.filename!s:.80}: {error.strerror}; check the path") from error


def emit(as_json: bool, content: Any, show: Callable[[], None]) -> None:
    """Print content as one JSON object, or show it to people."""
    if as_json:
        click.get_current_context().meta[_PRINTED] = True  # there is one object, whatever comes
        click.echo(json.dumps(content, indent=2, default=str))
    else:
        show()


def shipped_model(name: str) -> str:
    """Return the folder of a shipped model by its name, as recipes do; anything else as it is."""
    shipped = resource("models") / name
    return str(shipped) if re.fullmatch(r"\w+", name) and shipped.is_dir() and not Path(name).is_dir() else name


def folder_with(*markers: str) -> Callable[[click.Context, click.Parameter, Path], Path]:
    """Make the check of an argument: a folder that holds one of these files, or a file that is a model of itself."""

    def check(_ctx: click.Context, _parameter: click.Parameter, path: Path) -> Path:
        if markers == BUNDLE_OR_MODEL:
            path = Path(shipped_model(str(path)))
            from compressor.recipe.sources import is_model_file

            if is_model_file(path.name) and path.is_file():
                return path
        if not path.is_dir():
            near = nearest_shipped_model(str(path)) if markers == BUNDLE_OR_MODEL else None
            raise click.BadParameter(f"{path}: no such folder{f'; nearest shipped model: {near}' if near else ''}")
        if not any(file.is_file() for marker in markers for file in path.glob(marker)):
            kind = "a bundle" if markers == BUNDLE else "a bundle or a Hugging Face folder"
            raise click.BadParameter(f"{path}: not {kind}: it has no {' and no '.join(markers)}")
        return path

    return check


BUNDLE = ("manifest.json",)
BUNDLE_OR_MODEL = ("manifest.json", "config.json", "*.gguf")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
executor_option = click.option(
    "--executor", metavar="WHERE", help="Where independent jobs run: local:N, ray or ray://HOST:PORT [default: here]."
)
threads_option = click.option("--threads", type=click.IntRange(1), help="Threads [default: the physical cores].")

"""Share what all commands do alike: errors as one message, output for people or as JSON, common arguments."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from compressor.errors import CompressorError

F = TypeVar("F", bound=Callable[..., Any])


def reported(command: F) -> F:
    """Turn errors that are meant for the user into one message and their exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except CompressorError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)
        except (BrokenPipeError, KeyboardInterrupt):
            sys.exit(130)
        except OSError as error:  # a full disk, a folder that went away
            place = "" if error.filename is None else f"{error.filename}: "
            click.echo(f"error: {place}{error.strerror or error}; free some space, or check the folder", err=True)
            sys.exit(1)
        except MemoryError:
            click.echo("error: out of memory; compress with fewer or shorter calibration samples", err=True)
            sys.exit(1)
        except Exception as error:
            runtime = sys.modules.get("compressor_runtime")
            if runtime is None or not isinstance(error, runtime.BundleError):
                raise
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)

    return run  # type: ignore[return-value]


def emit(as_json: bool, content: Any, show: Callable[[], None]) -> None:
    """Print content as one JSON object, or show it to people."""
    if as_json:
        click.echo(json.dumps(content, indent=2, default=str))
    else:
        show()


def folder_with(*markers: str) -> Callable[[click.Context, click.Parameter, Path], Path]:
    """Make the check of an argument: a folder that holds one of these files."""

    def check(_ctx: click.Context, _parameter: click.Parameter, path: Path) -> Path:
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

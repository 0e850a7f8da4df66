"""Options of the commands that write a layout of another program, `export` and `convert`."""

from __future__ import annotations

import click

from compressor.cli.catalogue import names_of
from compressor.cli.invocation import F

_OPTIONS = (
    click.option(
        "--to",
        required=True,
        metavar="NAME",
        help="gguf, compressed-tensors, ...: `compress list exports`.",
        shell_complete=names_of("exports"),
    ),
    click.option("--set", "options", multiple=True, metavar="KEY=VALUE", help="Option, see `compress show NAME`."),
    click.option("--model", help="Folder or id of the model that the bundle was made from, in place of its recipe's."),
    click.option(
        "--check/--no-check",
        default=None,
        help="Load the result in the program that it is for, and compare. [default: where that is installed]",
    ),
)


def layout_options(command: F) -> F:
    """Add the layout, its options, the original model, and whether the result is loaded."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command

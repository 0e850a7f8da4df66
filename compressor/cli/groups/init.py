"""The command `init`: a first recipe, by flags or by questions."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from compressor.cli.catalogue import names_of
from compressor.cli.invocation import emit, json_option, reported
from compressor.errors import UsageError


@click.command()
@click.argument("model", required=False)
@click.option("--target", help="Target to generate code for [default: x86].", shell_complete=names_of("targets"))
@click.option("--scheme", help="Format of the weights [default: of --bits].", shell_complete=names_of("formats"))
@click.option("--bits", type=click.IntRange(2, 8), help="Bits of a weight [default: 4; of images 8].")
@click.option("--text", metavar="FILE", help="Text that passes learn from [default: the shipped documentation].")
@click.option("--images", metavar="FOLDER", help="Images that passes learn from, if the model classifies them.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The recipe's file [default: MODEL.yaml].")
@json_option
@reported
def init(
    model: str | None,
    target: str | None,
    scheme: str | None,
    bits: int | None,
    text: str | None,
    images: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Write a first recipe for MODEL, with comments, that `compress plan` accepts.

    Reads the model's configuration and no weights.  On a terminal it asks for what is not given; an empty answer takes
    the default.
    """
    if scheme is not None and bits is not None:
        raise UsageError("--scheme names the bits already; leave out --bits")
    asks = is_terminal() and not as_json
    if model is None:
        if not asks:
            raise UsageError("name a MODEL: a folder, a shipped model (reference), or an id on the Hugging Face hub")
        model = str(click.prompt("Model (folder, shipped model or hub id)", default="reference", err=True))
    if asks:
        target = target or str(click.prompt("Target", default="x86", err=True))
        if scheme is None and bits is None:
            bits = click.prompt("Bits of a weight", default=4, type=click.IntRange(2, 8), err=True)
        if text is None and images is None:
            text = click.prompt("Text to learn from (empty: shipped)", default="", show_default=False, err=True) or None
    target = target or "x86"
    from compressor.registry import TARGETS

    if target not in TARGETS.names():
        TARGETS.find(target)  # says which there are
    file = output or Path(f"{_stem(model)}.yaml")
    from compressor.host.modules import loading

    with loading():
        from compressor.run.automatic.first_recipe import Wishes, write_first_recipe
    made = write_first_recipe(Wishes(model, target, scheme, bits, text, images), file)

    def show() -> None:
        click.echo(made.text.rstrip())
        click.echo(f"written: {file}; next: compress plan {file}", err=True)

    emit(as_json, {"recipe": str(file), **made.facts}, show)


def is_terminal() -> bool:
    """Return whether somebody can answer questions."""
    return sys.stdin.isatty()


def _stem(model: str) -> str:
    """Return a file name for a model: the last part of its path or id."""
    return re.sub(r"[^\w.-]+", "_", Path(model).name).strip("._-") or "recipe"

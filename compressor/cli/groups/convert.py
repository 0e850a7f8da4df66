"""The command `convert`: from one quantised layout to another."""

from __future__ import annotations

from pathlib import Path

import click

from compressor.cli.groups.layouts import layout_options
from compressor.cli.invocation import BUNDLE_OR_MODEL, emit, folder_with, json_option, reported


@click.command()
@click.argument("original", metavar="A", type=click.Path(path_type=Path), callback=folder_with(*BUNDLE_OR_MODEL))
@click.argument("output", metavar="B", type=click.Path(path_type=Path))
@layout_options
@click.option(
    "--refit",
    metavar="FORMAT",
    help="Format for weights that NAME cannot hold exactly, such as W4A16_G64, or of gguf Q4_K; their loss is told.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A text file, on which B is compared with A: KL divergence and perplexity.",
)
@json_option
@reported
def convert(
    original: Path,
    output: Path,
    to: str,
    refit: str | None,
    text: Path | None,
    options: tuple[str, ...],
    model: str | None,
    check: bool | None,
    as_json: bool,
) -> None:
    """Convert A, a bundle or a folder of quantised weights, to B, a new folder in another layout.

    Weights keep their values to the last bit; those that cannot are named and refused, unless --refit rounds them.
    """
    from compressor.cli.progress import progress
    from compressor.cli.show_run import show_exported
    from compressor.errors import UsageError
    from compressor.host.modules import loading
    from compressor.recipe.exports import make_export

    if original.is_file():
        raise UsageError(f"{original}: is one file; give the folder that it lies in")
    with progress() as reporter:
        with loading():
            layout = make_export(to, options)
            from compressor.export.conversion.job import convert as run

        done = run(original, output, layout, refit, text, model, check, reporter).content()

    def show() -> None:
        show_exported(done)
        click.echo(f"{done['equal_weights']} of {done['weights']} weights have the values of {done['from']} exactly")
        for name, loss in done["refitted"].items():
            click.echo(f"  {name}: {loss['to']}, relative error {loss['relative_error']:.3g}")
        if (quality := done.get("quality")) is not None:
            low, high = quality["kl_divergence_interval"]
            click.echo(
                f"KL divergence {quality['kl_divergence']:.3g} nats ({low:.3g} to {high:.3g}), perplexity "
                f"{quality['perplexity']:.4g} after {quality['dense_perplexity']:.4g}"
            )

    emit(as_json, done, show)

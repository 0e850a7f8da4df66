"""Show results as tables on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from compressor.cli.figures import plot, stdout_console
from compressor.evaluate.timing import CONFIDENCE
from compressor.report.figures import COMPARED, STATED, figure, label, quantity, ratio

if TYPE_CHECKING:
    from compressor.export.batch import Batch
    from compressor.report.comparison import Comparison
    from compressor.report.outcome import Outcome
    from compressor.run.automatic.choice import Tried
    from compressor.run.tune import Imported


_NAMED = 2
"""Linears of a note that are named; the others are counted."""


def show_outcome(outcome: Outcome, time_passes: bool) -> None:
    """Dense against compressed, then what deserves attention."""
    metrics, console = outcome.metrics, stdout_console()
    table = Table(title=str(outcome.bundle))
    for heading in ("", "dense", "compressed", "ratio"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, key, form in COMPARED:
        dense, ours = metrics.get(f"dense_{key}"), metrics.get(key)
        if ours is None:
            continue
        table.add_row(name, "" if dense is None else figure(dense, form), figure(ours, form), ratio(ours, dense))
    console.print(table)
    for name, key, form in STATED:
        if key in metrics:
            ends = metrics.get(f"{key}_interval")
            between = f" ({figure(ends[0], form)} to {figure(ends[1], form)} at 95% confidence)" if ends else ""
            console.print(f"{name}: {figure(metrics[key], form)}{between}", highlight=False)
    if outcome.kernel_error is not None:
        console.print(f"kernels against PyTorch: relative error {outcome.kernel_error:.1e}", highlight=False)
    if metrics.get("dense_latency_ms"):
        console.print(f"dense speed: PyTorch eager float32, {metrics['threads']} threads", highlight=False)
    _show_certainty(console, metrics)
    for result in outcome.gates:
        console.print(f"gate {'passed' if result.passed else 'FAILED'}: {result}", highlight=False, markup=False)
    _show_site_notes(console, outcome.sites)
    for front in outcome.fronts:
        _show_front(console, front)
    for exported in outcome.exports:
        show_exported(exported)
    for remark in outcome.remarks:
        console.print(f"note: {remark}", highlight=False, markup=False)
    for note in outcome.notes:
        console.print(f"warning: {note}", highlight=False, markup=False)
    from compressor.cli.show_plan import show_comparison

    totals = [row for row in outcome.predictions if row[0] == "seconds" or row[0].endswith("_bytes")]
    show_comparison(outcome.predictions if time_passes else totals)
    if time_passes:
        _show_stages(console, outcome)
    command = "serve" if (outcome.bundle / "index.html").is_file() else "inspect"
    command = "generate" if command == "inspect" and "cache_bytes_per_token" in metrics else command
    console.print(f"wrote {outcome.bundle}; try: compress {command} {outcome.bundle}", highlight=False, markup=False)


def show_tried(tried: Sequence[Tried]) -> None:
    """Show what each candidate was foreseen to take, and what it takes and loses."""
    table = Table(title="candidates")
    steps = ("step, planned", "step, share of dense")
    of_images = any(one.accuracy is not None for one in tried)
    quality = "accuracy" if of_images else "perplexity"
    for heading in ("", "weights, planned", "weights", *steps, "KL, nats", quality):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_column("")
    forms = ("bytes", "bytes", "{:.3g} ms", "{:.3f}", "{:.4f}", "{:.1%}" if of_images else "{:.3f}")
    for one in tried:
        measured = (one.latency, one.kl_divergence, one.accuracy if of_images else one.perplexity)
        values = (one.predicted_bytes, one.weight_bytes, one.predicted_ms, *measured)
        cells = ["" if value is None else figure(value, form) for value, form in zip(values, forms, strict=True)]
        table.add_row(one.candidate.name, *cells, "chosen" if one.chosen else one.note)
    stdout_console().print(table)


def _show_front(console: Console, front: Mapping[str, Any]) -> None:
    """Draw what a search found for several budgets, and list what no other choice beats."""
    points = sorted(front["points"], key=lambda one: (one["chosen"], one["front"]))
    marks = [(one["cost"], one["score"], "#" if one["chosen"] else "o" if one["front"] else ".") for one in points]
    name = f"{label(front['score'])} against {label(front['measure'])}{front['unit']}"
    console.print(f"{name}: # built, o on the front, . behind it", highlight=False, markup=False)
    for line in plot(marks):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for one in front["points"]:
        if one["front"] or one["chosen"]:
            built = ", built" if one["chosen"] else ""
            text = f"  {one['cost']:.5g}{front['unit']} ({one['cost'] / front['whole']:.2f}): {one['score']:.4g}"
            console.print(f"{text} ± {one['error']:.2g}{built}", highlight=False, markup=False)


def _show_certainty(console: Console, metrics: Mapping[str, Any]) -> None:
    """How many repeats stand behind the timings, and what is certain about their ratios to dense."""
    timings = metrics.get("timings")
    if not timings:
        return
    count = len(timings["figures"]["latency_ms"]["samples"])
    parts = [f"timings: medians of {count} repeats"]
    parts += [
        f"{name} {ratio['interval'][0]:.3g}x to {ratio['interval'][1]:.3g}x dense"
        for name, ratio in timings["ratios"].items()
        if ratio["interval"] is not None
    ]
    console.print(f"{'; '.join(parts)} (at {timings['confidence']:.0%} confidence)", highlight=False)


def _show_stages(console: Console, outcome: Outcome) -> None:
    table = Table(title="passes")
    for heading in ("", "pass", "seconds", "weights after", "blocks", "from the cache"):
        table.add_column(heading, justify="left" if heading in ("", "pass") else "right")
    for stage in outcome.stages:
        size, counts = figure(stage["weight_bytes"], "bytes"), (str(stage["blocks"]), str(stage["reused"]))
        table.add_row(str(stage["index"]), stage["name"], f"{stage['seconds']:.2f}", size, *counts)
    console.print(table)


def _show_site_notes(console: Console, sites: Sequence[Mapping[str, Any]]) -> None:
    """Show each note once, with the linears that it is about."""
    about: dict[str, list[str]] = {}
    for site in sites:
        if site["note"]:
            about.setdefault(site["note"], []).append(site["site"])
    for note, names in about.items():
        more = f" and {len(names) - _NAMED} more linears" if len(names) > _NAMED else ""
        console.print(f"note: {', '.join(names[:_NAMED])}{more}: {note}", highlight=False, markup=False)


def show_metrics(title: str, metrics: Mapping[str, Any]) -> None:
    """One figure a line."""
    console = stdout_console()
    console.print(title, highlight=False, markup=False)
    width = max(len(label(name)) for name in metrics)
    figures = metrics.get("timings", {}).get("figures", {})
    for name, value in metrics.items():
        if name == "timings" or name.endswith("_interval"):
            continue
        ends = figures[name]["interval"] if name in figures else metrics.get(f"{name}_interval")
        least, most = (quantity(name, end) for end in ends or (None, None))
        between = f"  ({least} to {most} at {CONFIDENCE:.0%} confidence)" if ends else ""
        console.print(f"  {label(name):<{width}}  {quantity(name, value)}{between}", highlight=False, markup=False)


def show_inspection(content: Mapping[str, Any]) -> None:
    """Facts, then one table a list."""
    console = stdout_console()
    for name, value in content.items():
        if isinstance(value, list) and not any(isinstance(row, Mapping) for row in value):
            console.print(f"{label(name)}: {', '.join(map(str, value)) or 'none'}", highlight=False, markup=False)
        elif not isinstance(value, list):
            console.print(f"{label(name)}: {quantity(name, value)}", highlight=False, markup=False)
    for name, rows in content.items():
        if isinstance(rows, list) and rows and isinstance(rows[0], Mapping):
            table = Table(title=label(name))
            for key, value in rows[0].items():
                table.add_column(label(key), justify="right" if isinstance(value, int | float) else "left")
            for row in rows:
                table.add_row(*(quantity(key, value) for key, value in row.items()))
            console.print(table)


def show_bundles(comparison: Comparison) -> None:
    """Show bundles side by side, then what does not compare and formats that differ."""
    from compressor.report.comparison import evidence

    console, names = stdout_console(), comparison.labels
    kernels = [", ".join(f"{count} {how}" for how, count in evidence(one).items()) for one in comparison.bundles]
    rows = [(row.name, *(cell.shown(row.form) for cell in row.cells)) for row in comparison.rows]
    _print_table(console, "", ["", *names], [*rows, ("kernels", *kernels)])
    for reason in comparison.reasons():
        console.print(f"* not comparable: {reason}", highlight=False, markup=False)
    console.print(f"{comparison.alike} linears have the same format in all", highlight=False, markup=False)
    differing = [
        (f"{site} ({count})" if count > 1 else site, *(fmt or "no such linear" for fmt in formats))
        for site, count, formats in comparison.formats
    ]
    if differing:
        _print_table(console, "formats that differ", ["linear", *names], differing)


def _print_table(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print cells as they are: names are somebody else's."""
    table = Table(title=title or None, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(Text(heading), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def show_exported(content: Mapping[str, Any]) -> None:
    """Say what was exported, its size, and how its client computes."""
    size = f"{quantity('bytes', content['folder_bytes'])}, {content['bits_per_weight']:.3f} bits a weight"
    checked = content["checked"]
    lines = [f"{content['export']}: {content['to']}, {size}"]
    if checked is None:
        lines.append(content["not_checked"])
    else:
        programs = f"{' + '.join(checked['programs'])} in {checked['dtype']}"
        tokens = f"; {checked['equal_tokens']} of {checked['tokens']} greedy tokens are equal" * bool(checked["tokens"])
        lines.append(f"{programs}: outputs differ by {checked['difference']:.3g} of {checked['largest']:.3g}{tokens}")
    for line in (*lines, *(f"note: {note}" for note in content["notes"])):
        stdout_console().print(line, highlight=False, markup=False, soft_wrap=True)


def show_batch(batch: Batch) -> None:
    """Say what a batch of candidates holds, and what to do with it."""
    held = f"{batch.candidates} candidates for {batch.kernels} kernels, {batch.size_bytes / 1e6:.1f} MB"
    lines = (
        f"{batch.folder}: {held}, for {', '.join(batch.archs)}; digest {batch.digest[:12]}",
        "there, where a GPU is: python run.py --output results.json",
        "here, with that file: compress tune --import-results results.json",
    )
    for line in lines:
        stdout_console().print(line, highlight=False, markup=False, soft_wrap=True)


def show_imported(imported: Imported) -> None:
    """Show what came home: of each kernel the default's time and the best."""
    console = stdout_console()
    table = Table(title=f"{imported.name}: {imported.database}")
    for heading in ("kernel:tokens", "default, us", "best, us", ""):
        table.add_column(heading, justify="right" if "us" in heading else "left")
    for kernel, (default, best, schedule) in imported.won.items():
        first = "failed" if default is None else f"{default:.2f}"
        table.add_row(kernel, first, f"{best:.2f}", "the default" if default == best else str(schedule))
    console.print(table)
    for title, names in (("not measured", imported.missing), ("failed", imported.failed)):
        if names:
            console.print(f"{title}: {'; '.join(names)}", highlight=False, markup=False)

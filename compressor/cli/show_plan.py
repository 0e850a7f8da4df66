"""A plan as tables on stdout, and a plan beside what happened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from compressor.cli.figures import stdout_console
from compressor.report.figures import figure, label

if TYPE_CHECKING:
    from compressor.pipeline.site_plan import SitePlan
    from compressor.plan.durations import Estimate
    from compressor.plan.model import PassPlan, Plan
    from compressor.plan.roofline import Roofline


def show_plan(plan: Plan) -> None:
    """Print a table for each pass, the stages, the bounds on the speed, and a summary."""
    console = stdout_console()
    for step in plan.passes:
        _show_pass(console, step)
    _show_stages(console, plan)
    for roofline in () if plan.device else plan.rooflines:
        _show_roofline(console, roofline)
    for roofline in plan.device_rooflines:
        _show_roofline(console, roofline, f"{plan.device}, modelled on published figures: ")
    written = ", ".join(
        f"{_bytes(need)} of {_bytes(free)} free at {place}" for place, (need, free) in plan.disk.items()
    )
    for what, text in (
        ("weights", f"{_bytes(plan.dense_weight_bytes)} -> {_bytes(plan.weight_bytes)}"),
        ("bundle", _bytes(plan.bundle_bytes)),
        ("peak memory", f"{_bytes(plan.peak_rss_bytes)}, of which {_bytes(plan.needed_bytes)} have to be there"),
        ("available", f"{_bytes(plan.available.bytes)}, by {plan.available.limit}"),
        ("disk", written),
        ("time", _seconds(plan.seconds)),
    ):
        console.print(f"{what}: {text}", highlight=False, markup=False)
    for note in plan.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def show_comparison(rows: Iterable[tuple[str, float, float, float]]) -> None:
    """Print the plan's figures beside the measured ones."""
    table = _table("plan against actual", ("", "predicted", "measured", "ratio"))
    for name, predicted, measured, ratio in rows:
        form = "bytes" if name.endswith("bytes") else "{:.1f} s"
        table.add_row(label(name), figure(predicted, form), figure(measured, form), f"{ratio:.2f}")
    stdout_console().print(table)


def _table(title: str, headings: Sequence[str], left: Sequence[str] = ("",)) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


def _show_pass(console: Console, step: PassPlan) -> None:
    left = ("linears", "format", "note")
    table = _table(
        f"pass {step.index}: {step.name}", ("linears", "count", "shape", "format", "before", "after", "note"), left
    )
    for sites in _alike(step.sites):
        first, count = sites[0], len(sites)
        names = first.site if count == 1 else f"{first.site}, ..."
        before, after = (_bytes(count * size) for size in (first.bytes_before, first.bytes_after))
        shape = f"{first.out_features} x {first.in_features}"
        table.add_row(names, str(count), shape, first.format or "-", before, after, first.note)
    if not step.cost_known:
        table.add_row("cost unknown", "", "", "", "", "", "the pass says nothing of what it will do")
    if table.row_count:
        console.print(table)
    for note in step.notes:
        console.print(f"pass {step.index}: {note}", highlight=False, markup=False)


def _alike(sites: Iterable[SitePlan]) -> list[list[SitePlan]]:
    """Sites that differ in their names only, together."""
    found: dict[tuple[object, ...], list[SitePlan]] = {}
    for site in sites:
        key = (site.out_features, site.in_features, site.format, site.bytes_before, site.bytes_after, site.note)
        found.setdefault(key, []).append(site)
    return list(found.values())


def _show_stages(console: Console, plan: Plan) -> None:
    table = _table("stages", ("", "seconds", "between", "memory"))
    memory: Mapping[str, int] = {}
    for stage in plan.memory:
        memory = {**memory, stage.stage: max(stage.peak_bytes, memory.get(stage.stage, 0))}
    for name, seconds in plan.stages.items():
        between = f"{seconds.low:.1f} and {seconds.high:.1f}"
        table.add_row(name, f"{seconds.value:.1f}", between, _bytes(memory[name]) if name in memory else "")
    console.print(table)


def _show_roofline(console: Console, roofline: Roofline, where: str = "") -> None:
    best = f"at best {roofline.ms:.3g} ms, {roofline.tokens_per_s:,.0f} tokens/s"
    title = f"{where}{roofline.phase} of {roofline.tokens}: {best}"
    table = _table(
        title, ("layers", "count", "operations", "bytes", "operations a byte", "binds", "ms each"), ("layers",)
    )
    for layer in roofline.layers:
        table.add_row(
            layer.name,
            str(layer.count),
            figure(layer.ops, "ops"),
            _bytes(layer.bytes),
            f"{layer.intensity:.1f}",
            layer.binds,
            f"{layer.ms:.3g}",
        )
    console.print(table)


def _bytes(size: float) -> str:
    return figure(size, "bytes")


def _seconds(seconds: Estimate) -> str:
    return f"{seconds.value:.0f} s, between {seconds.low:.0f} and {seconds.high:.0f}"

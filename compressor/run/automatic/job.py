"""Choose a recipe for a budget, write it down, and run it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from compressor.errors import UsageError, failed_write
from compressor.executor.jobs import Executor
from compressor.export.publish import check_destination
from compressor.host.cache import replace_file
from compressor.progress import Reporter
from compressor.run.automatic.candidates import Budget
from compressor.run.automatic.choice import Choosing, Tried


def choose_recipe(
    model: str,
    target: str,
    budget: Budget,
    output: Path,
    data: tuple[str, str | None],
    executor: Executor,
    reporter: Reporter,
) -> tuple[Path, Sequence[Tried]]:
    """Choose a recipe and write it beside the bundle that it will make, as ``<output>.yaml``.

    Args:
        data: names or files, of calibration and of evaluation; without the latter, text is that which is shipped, and
            images are those that calibration leaves.
    Returns:
        The recipe's file, and all candidates.
    Raises:
        UsageError: the model is neither a decoder of text nor a classifier, the budget is too small, or a place cannot
            be written to.
    """
    place = output.with_name(f"{output.name}.yaml")
    check_destination(output)
    if place.exists():
        raise UsageError(f"{place}: is there already; remove it, run it (`compress run {place}`), or take another -o")
    given = {"calibration": data[0], "evaluation": data[1]}
    found = {key: _absolute(name) for key, name in given.items() if name is not None}
    setting = {"model": _absolute(model), **found, "target": target}
    choosing = Choosing(setting, budget, executor, reporter)
    best = choosing.choose()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, _written(choosing.setting, best, budget).encode())
    except OSError as error:
        raise failed_write(error, f"{place}: cannot be written: {error}; choose another place") from error
    return place, choosing.tried


def _absolute(name: str) -> str:
    """Return the path of what is in the current folder: the recipe lies elsewhere."""
    return str(Path(name).absolute()) if Path(name).exists() else name


def _written(setting: dict[str, Any], best: Tried, budget: Budget) -> str:
    """Return the recipe as YAML, with what was foreseen and measured in front."""
    figures = f"# Chosen by compress auto for {budget.kind}={budget.limit:g}: {best.candidate.name}.\n"
    cost = best.weight_bytes if budget.kind == "weight_bytes" else best.latency
    assert cost is not None and best.kl_divergence is not None
    figures += f"# {budget.told(cost)}, KL(dense || compressed) {best.kl_divergence:.4g} nats {_unit(best)}.\n\n"
    content = {**setting, "passes": best.candidate.passes}
    return figures + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _unit(best: Tried) -> str:
    return "a token" if best.accuracy is None else "an image"

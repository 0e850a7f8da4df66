"""The command `cache`: finished blocks and kernels that later runs can reuse."""

from __future__ import annotations

import math
from typing import Any

import click

from compressor.cli.invocation import emit, json_option, reported


class _Days(click.FloatRange):
    """At least 0, and a number: NaN is neither older nor younger than anything."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        days = float(super().convert(value, param, ctx))
        if math.isnan(days):
            self.fail(f"{value} is not a number of days", param, ctx)
        return days


DAYS = _Days(0)


@click.group()
def cache() -> None:
    """Show or empty the cache of finished blocks and kernels, in COMPRESS_CACHE_DIR or the user's cache folder."""


@cache.command("list")
@json_option
@reported
def cache_list(as_json: bool) -> None:
    """List the finished blocks, the most recently used first, and count the kernels."""
    from compressor.cli.catalogue import cached
    from compressor.cli.show_run import show_inspection

    content = cached()
    emit(as_json, content, lambda: show_inspection(content))


@cache.command("prune")
@click.option("--older-than", type=DAYS, default=0.0, metavar="DAYS", help="Keep what was used since.")
@json_option
@reported
def cache_prune(older_than: float, as_json: bool) -> None:
    """Remove finished blocks, kernels, and what killed runs left; runs that use one keep it."""
    from compressor.codegen.machine_code.store import ObjectStore
    from compressor.pipeline.segment_cache import SegmentCache

    blocks, kernels = SegmentCache().prune(older_than), ObjectStore().prune(older_than)
    total = sum(one.size_bytes for one in blocks) + sum(one.size_bytes for one in kernels)
    content = {"removed_blocks": len(blocks), "removed_kernels": len(kernels), "removed_bytes": total}
    told = f"removed {len(blocks)} blocks and {len(kernels)} kernels, {total} bytes"
    emit(as_json, content, lambda: click.echo(told))

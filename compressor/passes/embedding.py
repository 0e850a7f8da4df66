"""Pack embedding tables, and the heads that are tied to them: both read the same bytes, stored once.

A small model's table is a large part of it: half of the shipped reference model.  Every row is rounded to nearest on
grids that are searched for the least squared error, without calibration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, meta_packed
from compressor.graph.kinds.tables import Table, embedding_tables, replace_table
from compressor.graph.provenance import module_path
from compressor.host.tensor_files import release
from compressor.numerics.nearest import rtn_quantize, rtn_work, rtn_working_bytes, weight_error
from compressor.numerics.range_search import ChooseGrid, Work, grid_work, search_grid
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan
from compressor.pipeline.sites import choose_format, choose_sites, compress_site, error_context, site_notes


@dataclass(frozen=True)
class Embedding(Pass):
    """Round the rows of the matched tables to the nearest points of searched grids.

    A linear that is tied to a table reads the packed one from then on, in the same format, whichever its own would
    have been: leave it to this pass (``ignore: [lm_head]`` in the others).

    Attributes:
        scheme: format name; the activations that it rounds are those of tied linears.
        targets: class names (``Embedding``), module names or ``re:`` patterns of the tables to compress.
        ignore: patterns of tables to leave dense.
        group_size: columns per scale; 0 keeps the scheme's.
    """

    scheme: str = "W8A16"
    targets: str | tuple[str, ...] = "Embedding"
    ignore: str | tuple[str, ...] = ()
    group_size: int = 0

    def __post_init__(self) -> None:
        self._format()

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace every matched table; the record's error is that of the weight (||W - Q||^2 / ||W||^2)."""
        fmt = self._format()
        tables = self._tables(graph, fmt)
        with ctx.reporter.task("embedding", len(tables)) as task:
            for table in tables:
                stored = graph.get_parameter(table.site.weight_name).detach()
                weight = stored.float()
                with error_context(table.site):
                    packed = rtn_quantize(weight, fmt, _searched(fmt))
                error, notes = weight_error(weight, packed), _notes(table)

                def replace(graph: GraphModule, _site: object, packed: PackedWeight, table: Table = table) -> None:
                    replace_table(graph, table, packed)

                compress_site(graph, ctx, table.site, packed, "embedding", error=error, notes=notes, replace=replace)
                release([stored])
                task.advance()
        graph.recompile()
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan each table on a graph without weights."""
        fmt, plans = self._format(), []
        for table in self._tables(graph, fmt):
            site = table.site
            shape = (site.out_features, site.in_features)
            weight, packed = graph.get_parameter(site.weight_name), meta_packed(*shape, fmt)
            before = weight.numel() * weight.element_size()
            notes = "; ".join([*_notes(table), *site_notes(site, packed, before)])
            replace_table(graph, table, packed)
            amounts = (_work(*shape, fmt), rtn_working_bytes(*shape, fmt))
            plans.append(SitePlan(site.name, *shape, fmt.name, before, packed.nbytes, notes, *amounts))
        return plans

    def _format(self) -> Format:
        """Return the format.

        Raises:
            UsageError: rows of it cannot be looked up one by one.
        """
        fmt = choose_format(self.scheme, self.group_size)
        wrong = "floats beside the codes" if fmt.extras else "a stored scale of activations"
        wrong = "a scale for many rows together" if fmt.block_tiles else wrong
        if fmt.extras or fmt.has_input_scale or fmt.block_tiles:
            raise UsageError(
                f"embedding: format {fmt.name} has {wrong}, which a table cannot have; take W8A16, W4A16_G64 or alike"
            )
        return fmt

    def _tables(self, graph: GraphModule, fmt: Format) -> list[Table]:
        tables = {table.site.name: table for table in embedding_tables(graph)}
        found = choose_sites(
            graph, "embedding", fmt, self.targets, self.ignore, lambda _: [t.site for t in tables.values()], "table"
        )
        return [tables[site.name] for site in found]


def _searched(fmt: Format) -> ChooseGrid:
    """Choose each group's grid by the squared error of its values: a row is looked up as it is."""

    def choose(group: Tensor, _columns: slice) -> tuple[Tensor, Tensor | None]:
        return search_grid(group, torch.ones(group.shape[1]), fmt)

    return choose


def _work(rows: int, columns: int, fmt: Format) -> Work:
    return {**rtn_work(rows, columns, fmt), **grid_work(rows, columns, fmt, 1)}


def _notes(table: Table) -> Sequence[str]:
    notes = list(dict.fromkeys(f"tied: {module_path(one) or one.name} reads it too" for one in table.linears))
    if table.others:
        readers = ", ".join(module_path(node) or node.name for node in table.others)
        notes.append(f"the dense table {table.site.weight_name} stays for {readers}")
    return notes

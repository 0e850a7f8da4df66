"""The pass embedding: tables are packed once for all that reads them, and models compute what the packed tables say."""

from __future__ import annotations

import pytest
import torch
from captures import capture_once
from packed_models import drop_weights
from tiny_models import DECODERS, build
from torch import Tensor, nn
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.export.facts import weight_bytes_per_token
from compressor.formats.packing import PackedWeight, dequantize
from compressor.graph.kinds.tables import embedding_tables
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import linear_sites, packed_sites
from compressor.passes.embedding import Embedding
from compressor.pipeline.context import Context
from compressor.verify.independence.check import check_independence


def packed_table(graph: GraphModule, name: str, step: Embedding, shape: tuple[int, int]) -> PackedWeight:
    fmt = step._format()
    return PackedWeight.of([graph.get_parameter(f"{name}.{part}") for part in fmt.parts(*shape)], fmt, shape)


def logits(graph: GraphModule) -> Tensor:
    info, ids = graph.meta["model"], torch.arange(10).view(2, 5) * 3 % 97
    empty = [torch.zeros(2, info.kv_heads, 5, info.head_dim) for _ in range(2 * info.layers)]
    return graph(ids, torch.arange(5), torch.arange(5), empty[: info.layers], empty[info.layers :])[0]


@pytest.mark.parametrize(
    ("name", "scheme"), [("llama", "W8A16"), ("qwen3", "W4A16_G32"), ("gpt2", "NF4_G64"), ("llama", "LUT4")]
)
def test_models_compute_with_what_the_packed_tables_stand_for(name: str, scheme: str) -> None:
    graph, step, ctx = capture_once(build(DECODERS[name]())), Embedding(scheme), Context()
    dense, tables = clone_graph(graph), embedding_tables(graph)
    tied = [linear for table in tables for linear in table.linears]
    assert bool(tied) == (name != "qwen3")
    before = weight_bytes(graph)
    graph = step.run(graph, ctx)
    assert [record.site for record in ctx.records] == [table.site.name for table in tables]
    for table in tables:
        site = table.site
        packed = packed_table(graph, site.name, step, (site.out_features, site.in_features))
        set_parameter(dense, site.weight_name, dequantize(packed))
    torch.testing.assert_close(logits(graph), logits(dense), rtol=1e-5, atol=1e-5)
    saved = sum(record.bytes_before - record.bytes_after for record in ctx.records)
    assert weight_bytes(graph) == before - saved and not embedding_tables(graph)
    assert [site.name for site in packed_sites(graph)] == (["lm_head"] if tied else [])
    assert check_independence(graph).independent


def test_a_plan_says_what_the_run_does() -> None:
    model, step, ctx = build(DECODERS["gpt2"]()), Embedding("W8A16"), Context()
    meta = capture_once(model)
    drop_weights(meta)
    plans = step.plan(meta, Context())
    graph = step.run(capture_once(model), ctx)
    said = [(plan.site, plan.format, plan.bytes_before, plan.bytes_after, plan.note) for plan in plans]
    assert said == [(r.site, r.format, r.bytes_before, r.bytes_after, r.note) for r in ctx.records]
    assert weight_bytes(meta) == weight_bytes(graph)
    assert any("lm_head reads it too" in note for *_, note in said)


def test_a_token_reads_one_row_of_a_table_that_only_lookups_read() -> None:
    graph = capture_once(build(DECODERS["qwen3"]()))
    before, rows = weight_bytes_per_token(graph), graph.get_parameter("model.embed_tokens.weight")
    Embedding("W8A16").run(graph, ctx := Context())
    (record,) = ctx.records
    assert before - weight_bytes_per_token(graph) == pytest.approx(
        rows[0].numel() * rows.element_size() - record.bytes_after / len(rows), abs=3
    )


class _Shared(nn.Module):
    """A table that is also added up, which no packed table serves."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(19, 32)
        self.out = nn.Linear(32, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids) + self.table.weight.sum(0))


def test_a_table_that_others_read_stays_for_them() -> None:
    module = _Shared().eval()
    graph = capture_once(module, torch.arange(6).view(2, 3))
    Embedding("W8A16").run(graph, ctx := Context())
    (record,) = ctx.records
    assert "the dense table table.weight stays for" in record.note
    assert graph.get_parameter("table.weight").shape == (19, 32) and len(linear_sites(graph)) == 1
    ids = torch.tensor([[18, 0]])
    torch.testing.assert_close(graph(ids), module(ids), rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "W4A16_G32_S1"}, "floats beside the codes"),
        ({"scheme": "W8A8_STATIC"}, "a stored scale of activations"),
        ({"scheme": "FP8_E4M3_B128"}, "a scale for many rows together"),
        ({"scheme": "W4"}, "nearest"),
    ],
)
def test_formats_without_rows_of_their_own_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Embedding(**options)


def test_patterns_and_groups_that_fit_no_table_are_refused() -> None:
    graph = capture_once(build(DECODERS["llama"]()))
    with pytest.raises(UsageError, match="match no table of the model: 'lm_head': nearest"):
        Embedding(targets="lm_head").run(graph, Context())
    with pytest.raises(UsageError, match="divides the inputs of none of the matched tables"):
        Embedding("W4A16_G128").run(graph, Context())
    with pytest.raises(UsageError, match="the model has no table"):
        Embedding().run(capture_once(nn.Linear(8, 8), torch.ones(1, 8)), Context())

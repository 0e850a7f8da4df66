"""Statistics of experts: their own tokens, or those of all experts of their weight where they saw few."""

from __future__ import annotations

import pytest
import torch
from families import DECODERS, VOCAB, make
from torch import Tensor

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.statistics import FEW_TOKENS, Hessian, Inputs, expert_notes, expert_tokens
from compressor.capture.capture import capture
from compressor.graph.sites import EXPERT, linear_sites


@pytest.mark.parametrize("kind", [Hessian, Inputs])
def test_pooled_is_what_one_that_saw_all_rows_says(kind: type[Hessian] | type[Inputs]) -> None:
    rng = torch.Generator().manual_seed(0)
    whole, parts = kind(5), [kind(5) for _ in range(3)]
    for part, count in zip(parts, (2, 0, 9), strict=True):
        rows = torch.randn(count, 5, generator=rng)
        for seen in (part, whole) if count else ():
            seen.add(rows, rows)
    pooled = kind.pooled(parts)  # type: ignore[arg-type]
    assert pooled.tokens == whole.tokens == 11
    first, second = pooled.shared_with(2), pooled.shared_with(0)
    for name in ("value",) if kind is Hessian else ("absmax", "mean_abs", "mean_square", "rows"):
        for one in (first, second, first):  # each share may be read, in any order
            torch.testing.assert_close(getattr(one, name), getattr(whole, name))
    assert (first.own_tokens, second.own_tokens) == (2, 0)


@pytest.mark.parametrize("true_sequential", [False, True])
def test_experts_see_the_tokens_that_are_routed_to_them(true_sequential: bool) -> None:
    cls, options = DECODERS["Qwen 3, experts"]
    model = make(cls, {**options, "num_hidden_layers": 1}, True)
    graph, ids = capture(model), torch.randint(3, VOCAB, (12, 50), generator=torch.Generator().manual_seed(0))
    routed: list[Tensor] = []
    rows: list[Tensor] = []
    module = model.model.layers[0].mlp.experts  # type: ignore[union-attr,index]

    def watch(_: object, args: tuple[Tensor, ...]) -> None:
        rows.append(args[0])
        routed.append(args[1])

    module.register_forward_pre_hook(watch)
    model(ids)
    hidden, index = torch.cat(rows), torch.cat(routed)
    sites = [site for site in linear_sites(graph) if site.module_class == EXPERT or site.name.endswith("q_proj")]
    options_ = CalibrationOptions(true_sequential=true_sequential, with_dense=True)
    found = {
        group[0].name: (group[0], hessian)
        for group, hessian in CalibrationRun(graph, ids, sites, Hessian, options_).groups()
    }
    counts = torch.bincount(index.flatten(), minlength=4)
    assert int(counts.min()) < FEW_TOKENS < int(counts.max())
    pooled = hidden.repeat_interleave(2, dim=0)
    for expert, count in enumerate(counts.tolist()):
        site, hessian = found[f"model.layers.0.mlp.experts.gate_up_proj.{expert}"]
        few = count < FEW_TOKENS
        seen = pooled if few else hidden[(index == expert).any(-1)]
        assert expert_tokens(site, hessian) == count and hessian.tokens == len(seen)
        assert bool(expert_notes(site, hessian)) is few and hessian.cross is None
        torch.testing.assert_close(hessian.value, 2 / len(seen) * seen.T @ seen, rtol=1e-3, atol=1e-4)
    site, hessian = found["model.layers.0.self_attn.q_proj"]
    assert expert_tokens(site, hessian) is None and hessian.cross is not None

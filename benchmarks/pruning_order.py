"""Compare the passes that leave out blocks, linear by linear, on the reference model.

``python benchmarks/pruning_order.py`` prints Markdown.  All passes see the inputs of the dense model.  An error is that
of a linear's outputs over the calibration samples, relative to their squared norm, with the blocks that are kept
refitted and not rounded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.statistics import Hessian
from compressor.capture.capture import capture
from compressor.data.text import load_samples
from compressor.formats.format import Format
from compressor.graph.sites import linear_sites
from compressor.host.resources import resource
from compressor.numerics.products.deterministic import quadratic
from compressor.numerics.sparsity.block_sparsity import dampened_factor, refitted
from compressor.passes.alps import Alps
from compressor.passes.magnitude import Magnitude
from compressor.passes.sparsegpt import Sparsegpt
from compressor.passes.wanda import Wanda
from compressor.pipeline.sparse_sites import Inputs
from compressor.recipe.recipe import load_recipe

PASSES = [Magnitude, Wanda, Sparsegpt, Alps]
SPARSITIES = (50, 70, 90)


def main() -> None:
    """Print an error for each linear, pass and sparsity, and how the passes come in."""
    recipe, folder = load_recipe("sparsegpt_w8a16_x86"), resource("models") / "reference"
    assert recipe.calibration is not None
    graph, samples = capture(folder), load_samples(recipe.calibration, folder)
    sites = [site for site in linear_sites(graph) if site.name != "lm_head"]
    rows: dict[int, list[list[float]]] = {sparsity: [] for sparsity in SPARSITIES}
    lines = []
    run = CalibrationRun(graph, samples.ids, sites, Hessian, CalibrationOptions(true_sequential=False))
    for group, statistic in run.groups():
        for site in group:
            weight = graph.get_parameter(site.weight_name).detach().float()
            cells = []
            for sparsity in SPARSITIES:
                found = errors(weight, statistic.value, f"W8A16_B16x1@{sparsity}")
                rows[sparsity].append(found)
                best = min(found)
                cells += [f"**{error:.4f}**" if error == best else f"{error:.4f}" for error in found]
            lines.append(f"| {site.name.removeprefix('model.layers.')} | {' | '.join(cells)} |")
    heads = [f"{kind.__name__.lower()} {sparsity}%" for sparsity in SPARSITIES for kind in PASSES]
    print(f"| linear | {' | '.join(heads)} |\n|{'---|' * (1 + len(heads))}")
    print("\n".join(lines))
    means = [math.exp(sum(math.log(row[i]) for row in rows[s]) / len(rows[s])) for s in SPARSITIES for i in range(4)]
    print(f"| geometric mean | {' | '.join(f'{mean:.4f}' for mean in means)} |")
    for sparsity in SPARSITIES:
        orders = [tuple(sorted(range(4), key=row.__getitem__)) for row in rows[sparsity]]
        for order in sorted(set(orders), key=lambda order: -orders.count(order)):
            names = " < ".join(PASSES[i].__name__.lower() for i in order)
            print(f"\n{sparsity}%: {names} in {orders.count(order)} of {len(orders)}")


def errors(weight: Tensor, hessian: Tensor, scheme: str) -> list[float]:
    """Return the relative error of each pass's choice."""
    H, W = hessian.double(), weight.double()
    factor, damp = dampened_factor(hessian, 0.01)
    norm, found, count = float(quadratic(W, H)), [], Format.parse(scheme).stored_columns(weight.shape[1])
    for kind in PASSES:
        kept = kind(scheme).choose_blocks(weight, Inputs(hessian, factor, damp), count)
        error = 0.0
        for rows, columns in zip(torch.split(W, 16), kept, strict=True):
            change = rows.clone()
            change[:, columns] -= refitted(rows, H, columns, dampened_factor(H[columns][:, columns], damp)[0])
            error += float(quadratic(change, H))
        found.append(error / norm)
    return found


if __name__ == "__main__":
    main()

"""Remove half of some channels that are zero, by Torch-Pruning and by us: does the smaller model run, and say the same?

    PYTHONPATH=.:tests/support:tests/passes python benchmarks/peers/torchpruning_graphs.py

Runs where both are installed.  The models are those of tests/passes/test_channel_prune.py.  All that writes the
channels is set to zero first, bias and batch norm included, so nothing may change.  MACs are those of one image; our
parameters have batch norms folded into the convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch_pruning as tp
from test_channel_prune import IMAGES, PICTURES, costs
from torch import nn

from compressor.capture.capture import capture
from compressor.graph.dependencies.channels import Dependencies, Family

CASES = {
    "U-Net": ("first.0",),
    "beside itself": ("first.0",),
    "in groups": ("first.0", "grouped.0"),
    "ViT": ("qkv",),
}
"""Model of the tests -> convolutions or linears that write the channels; removal begins at the first."""


def with_zeros(name: str, writers: Sequence[str]) -> tuple[nn.Module, list[int]]:
    """Return a model, and the rows of the first writer that are zero: of each part of a fused linear the first half."""
    torch.manual_seed(0)
    model = IMAGES[name]()
    for _ in range(3):
        model(PICTURES)
    model.eval().requires_grad_(False)
    zeros = []
    for writer in writers:
        rows, parts = model.get_submodule(writer).weight.shape[0], 3 if writer == "qkv" else 1
        zeros.append([part * rows // parts + i for part in range(parts) for i in range(rows // parts // 2)])
        norm = [writer.removesuffix("0") + "1"] if "." in writer else []
        for module in map(model.get_submodule, [writer, *norm]):
            for value in (module.weight, module.bias, getattr(module, "running_mean", None)):
                if value is not None:
                    value[zeros[-1]] = 0.0
    return model, zeros[0]


def by_torch_pruning(name: str, writers: Sequence[str]) -> tuple[int, float, nn.Module]:
    """Return parameters, MACs and the model."""
    model, zero = with_zeros(name, writers)
    model.requires_grad_(True)
    graph = tp.DependencyGraph().build_dependency(model, example_inputs=PICTURES[:1])
    module = model.get_submodule(writers[0])
    prune = tp.prune_linear_out_channels if isinstance(module, nn.Linear) else tp.prune_conv_out_channels
    graph.get_pruning_group(module, prune, idxs=zero).prune()
    macs, parameters = tp.utils.count_ops_and_params(model, PICTURES[:1])
    return int(parameters), float(macs), model


def by_us(name: str, writers: Sequence[str]) -> tuple[int, float, nn.Module]:
    """Return parameters, MACs and the graph."""
    model, zero = with_zeros(name, writers)
    graph = capture(model, PICTURES[:1])
    dependencies, wanted = Dependencies(graph), set(zero)
    removed: list[tuple[Family, np.ndarray]] = []
    for family in dependencies.families():
        written = family.places.get((f"{writers[0]}.weight", 0))
        if written is not None and not family.reason:
            removed.append((family, np.array([i for i, rows in enumerate(written) if {*rows.tolist()} <= wanted])))
    dependencies.remove(removed)
    found = costs(graph)
    return int(found["parameters"]), found["macs"], graph


def row(name: str, writers: Sequence[str], is_ours: bool) -> str:
    """Return a row of the table."""
    dense, _ = with_zeros(name, writers)
    expected, who = dense(PICTURES[:1]), "ours" if is_ours else "Torch-Pruning"
    try:
        parameters, macs, model = by_us(name, writers) if is_ours else by_torch_pruning(name, writers)
    except RuntimeError as error:
        if is_ours:
            raise
        return f"| {name} | {who} | | | no: {str(error).splitlines()[0]} | |"
    change = float((model(PICTURES[:1]).detach() - expected).abs().max() / expected.abs().max())
    whole = capture(dense, PICTURES[:1]) if is_ours else dense
    count = sum(parameter.numel() for parameter in whole.parameters())
    return f"| {name} | {who} | {parameters:,} of {count:,} | {macs:,.0f} | yes | {change:.1e} |"


def main() -> None:
    """Print the table."""
    print("| graph | by | parameters | MACs | runs | relative change |\n|---|---|---|---|---|---|")
    for name, writers in CASES.items():
        print(row(name, writers, is_ours=True))
        print(row(name, writers, is_ours=False), flush=True)


if __name__ == "__main__":
    main()

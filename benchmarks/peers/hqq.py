"""HQQ: half-quadratic quantisation of the weights, without data; float16 scales and zero points."""

from __future__ import annotations

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

from benchmarks.peers.driver import job, linears, weight_count

SETTINGS = {"hqq": "HQQLinear, axis=1 (default), optimised grids with float16 scales and float16 zero points"}


def main() -> None:
    """Compress, and dequantise what is stored."""
    task = job()
    model = task.load(torch.float32)
    modules = linears(model)
    packed: dict[str, HQQLinear] = {}
    with task.timed():
        for name, module in modules.items():
            config = BaseQuantizeConfig(nbits=task.bits, group_size=task.group or None, axis=1)
            packed[name] = HQQLinear(module, config, del_orig=False, compute_dtype=torch.float16, device="cpu")
    stored = [part for layer in packed.values() for part in (layer.W_q, layer.meta["scale"], layer.meta["zero"])]
    dequantised = {f"{name}.weight": layer.dequantize() for name, layer in packed.items()}
    task.finish("hqq", SETTINGS[task.method], model.state_dict() | dequantised, stored, weight_count(modules))


if __name__ == "__main__":
    main()

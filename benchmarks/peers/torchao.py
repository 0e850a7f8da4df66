"""torchao: weight-only configurations that run on a CPU; HQQ chooses the grids of fewer than eight bits.

Only four and eight bits have a compact storage there: the other widths lie in int8.  Its GPTQ of int4 wants `mslk`,
which is for GPUs; its AWQ leaves a scaling of activations behind, which a plain folder of weights cannot hold.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.quantize_.workflows import Int4ChooseQParamsAlgorithm, IntxChooseQParamsAlgorithm

from benchmarks.peers.driver import Job, job, linears, weight_count

SETTINGS = {
    "rtn": "Int8WeightOnlyConfig or Float8WeightOnlyConfig",
    "hqq": "PrototypeInt4WeightOnlyConfig with HQQ where it serves (4 bits, 16 rows); else IntxWeightOnlyConfig with "
    "HQQ_SCALE_ONLY, stored in int8",
}
_HQQ4, _HQQ = Int4ChooseQParamsAlgorithm.HQQ, IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY


def configuration(task: Job, module: nn.Linear) -> AOBaseConfig:
    """Return torchao's configuration of a linear."""
    group = task.group_for(module.in_features)
    if task.float_format:
        return Float8WeightOnlyConfig()
    if task.bits == 8:
        return Int8WeightOnlyConfig()
    if task.bits == 4 and group and module.out_features % 16 == 0:
        return PrototypeInt4WeightOnlyConfig(group_size=group, int4_choose_qparams_algorithm=_HQQ4)
    granularity = PerGroup(group) if group else PerAxis(0)
    weight_dtype = getattr(torch, f"int{task.bits}")
    return IntxWeightOnlyConfig(weight_dtype, granularity, intx_choose_qparams_algorithm=_HQQ)


def parts(weight: Tensor) -> list[Tensor]:
    """Return the tensors that a quantised weight consists of."""
    names, _ = weight.__tensor_flatten__()
    return [getattr(weight, name) for name in names]


def main() -> None:
    """Compress, and read what the linears compute from single channels."""
    task = job()
    model = task.load()
    modules = linears(model)
    with task.timed():
        for module in modules.values():
            quantize_(module, configuration(task, module), filter_fn=None)
    state = {name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] not in modules}
    stored: list[Tensor] = []
    with torch.no_grad():
        for name, module in modules.items():
            weight = module.weight.data
            if not hasattr(weight, "__tensor_flatten__"):
                raise SystemExit(f"{name} was not compressed")
            stored += parts(weight)
            state[f"{name}.weight"] = module(torch.eye(module.in_features, dtype=task.dtype)).t()
    task.finish("torchao", SETTINGS[task.method], state, stored, weight_count(modules))


if __name__ == "__main__":
    main()

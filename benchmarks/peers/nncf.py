"""NNCF: weight compression in its PyTorch backend, which has eight and four bits; its GPTQ wants OpenVINO models."""

from __future__ import annotations

from typing import Any

import nncf
import torch
from nncf import CompressWeightsMode, Dataset, IgnoredScope
from nncf.torch.function_hook.wrapper import get_hook_storage
from torch import Tensor

from benchmarks.peers.driver import job, linears, weight_count

SETTINGS = {
    "rtn": "compress_weights, INT8_SYM or INT8_ASYM",
    "awq+scale": "compress_weights, INT4_SYM or INT4_ASYM, ratio=1, awq=True, scale_estimation=True, 64 samples; "
    "where no group fits, its int8 backup",
}


def main() -> None:
    """Compress, and run the decompression that NNCF puts behind each weight."""
    task = job()
    model = task.load(torch.float32)
    modules = linears(model)
    names = {f"{name}.weight" for name in modules}
    options: dict[str, Any] = {}
    if task.method == "awq+scale":
        adjust = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST)
        options = {"group_size": task.group, "awq": True, "scale_estimation": True, "subset_size": len(task.ids)}
        options |= {"ratio": 1.0, "advanced_parameters": adjust}
    with task.timed():
        model = nncf.compress_weights(
            model, mode=CompressWeightsMode[f"INT{task.bits}_{'SYM' if task.symmetric else 'ASYM'}"],
            dataset=Dataset([{"input_ids": ids[None], "use_cache": False} for ids in task.ids]),
            ignored_scope=IgnoredScope(patterns=[".*lm_head.*", ".*embed.*"]), **options,
        )  # fmt: skip
    state = dict(model.state_dict())
    stored: list[Tensor] = []
    for place, hook in get_hook_storage(model).named_hooks():
        name = place.removeprefix("post_hooks.").partition("__")[0].replace(":", ".")
        if name not in names:
            raise SystemExit(f"{place}: {type(hook).__name__}: this driver does not know what it does")
        names.remove(name)
        stored += [state[name], *hook.buffers()]
        state[name] = hook(state[name])
    if names:
        raise SystemExit(f"not compressed: {sorted(names)}")
    state = {name: tensor for name, tensor in state.items() if not name.startswith("__")}
    task.finish("nncf", SETTINGS[task.method], state, stored, weight_count(modules))


if __name__ == "__main__":
    main()

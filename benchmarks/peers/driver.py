"""Parts that the drivers of all peers share: the job from the command line, the clock, and the files that come out.

A driver runs in its peer's environment, from the checkout's folder:

    PYTHON -m benchmarks.peers.PEER MODEL IDS OUT METHOD FORMAT [DTYPE]

MODEL is a Hugging Face folder, IDS a .npy file of int64 [samples, sequence], FORMAT a name such as W4A16_ASYM_G128, or
of zeros among weights that are not rounded: F16_2:4, of 4 weights 2 are kept; F16_B1x1@70, 70% are zero.
DTYPE is what the model computes in, where the peer lets one choose; float16 unless given, so that those who store
scales in the model's type have them as small as ours.  OUT gets the dequantised model as a Hugging Face folder in
float32, and row.json.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import resource
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass
class Job:
    """A request, and the figures measured for it.

    Attributes:
        ids: int64 [samples, sequence].
        bits, symmetric: of a weight.
        group: columns a scale; 0 is a row.
        float_format: "E4M3" and the like; empty for integers.
        sparsity, pattern: share of zeros, and the weights kept of how many; "0:0" where any may be.
        dtype: what the model is loaded in.
    """

    model: Path
    ids: Tensor
    out: Path
    method: str
    bits: int
    group: int
    symmetric: bool
    float_format: str = ""
    sparsity: float = 0.0
    pattern: str = "0:0"
    dtype: torch.dtype = torch.float16
    figures: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around compressing: from the loaded model to the compressed one."""
        begin, began = time.perf_counter(), _cpu_s()
        yield
        status = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
        self.figures |= {"seconds": time.perf_counter() - begin, "cpu_s": _cpu_s() - began, "peak_rss_bytes": peak}

    def group_for(self, in_features: int) -> int:
        """Return the group size if it divides a row, else 0: peers need groups of equal size."""
        return self.group if self.group and in_features % self.group == 0 else 0

    def load(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Load the model, in the job's type or another."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype or self.dtype).eval()

    def finish(
        self, package: str, settings: str, state: Mapping[str, Tensor], stored: Iterable[Tensor], weights: int
    ) -> None:
        """Write everything.

        Args:
            settings: what the peer was told, in words.
            state: all of the model's parameters, compressed linears dequantised.
            stored: the tensors that the peer keeps for the compressed linears, as it writes them.
            weights: the number of weights of these linears.
        """
        config = json.loads((self.model / "config.json").read_text())
        tied = bool(config.get("tie_word_embeddings"))
        config.pop("torch_dtype", None)
        config["dtype"] = "float32"
        (self.out / "config.json").write_text(json.dumps(config))
        shutil.copyfile(self.model / "tokenizer.json", self.out / "tokenizer.json")
        kept = {name: tensor for name, tensor in state.items() if not (tied and name == "lm_head.weight")}
        kept = {name: tensor.detach().to("cpu", torch.float32).contiguous().clone() for name, tensor in kept.items()}
        bad = [name for name, tensor in kept.items() if not bool(torch.isfinite(tensor).all())]
        if bad:
            sys.exit(f"{package}: NaN or inf in {', '.join(bad)}")
        save_file(kept, self.out / "model.safetensors", metadata={"format": "pt"})
        stored_bytes = sum(tensor.numel() * tensor.element_size() for tensor in stored)
        version = importlib.metadata.version(package)
        row = {**self.figures, "bits": 8 * stored_bytes / weights, "weights": weights, "version": version}
        (self.out / "row.json").write_text(json.dumps({**row, "settings": settings}))


def job() -> Job:
    """Parse the job from the command line."""
    model, ids, out, method, name, *dtype = sys.argv[1:]
    common: dict[str, Any] = {
        "model": Path(model), "ids": torch.from_numpy(np.load(ids)), "out": Path(out), "method": method,
        "dtype": getattr(torch, dtype[0] if dtype else "float16"),
    }  # fmt: skip
    if found := re.fullmatch(r"F16_(?:(\d):(\d)|B1x1@(\d+))", name):
        kept, of, percent = found.groups()
        zeros = (
            {"pattern": f"{kept}:{of}", "sparsity": 1 - int(kept) / int(of)} if of else {"sparsity": int(percent) / 100}
        )
        return Job(**common, bits=16, group=0, symmetric=True, **zeros)
    found = re.fullmatch(r"(?:W(\d)A16|FP(\d)_(E\dM\d))(_ASYM)?(?:_G(\d+)|_C)", name)
    if found is None:
        sys.exit(f"{name}: not a format that the drivers know")
    bits, float_bits, layout, asym, group = found.groups()
    return Job(
        **common, bits=int(bits or float_bits), group=int(group or 0), symmetric=not asym, float_format=layout or ""
    )


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears to compress, by name: all but the head."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: module for name, module in found.items() if name != "lm_head"}


def weight_count(modules: Mapping[str, nn.Linear]) -> int:
    """Return the number of weights of these linears."""
    return sum(module.in_features * module.out_features for module in modules.values())


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

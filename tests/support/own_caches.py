"""Cache folders of tests: prices of work on this machine, measured once for all, and kernels, each generated once."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from pathlib import Path

import pytest
import torch

from compressor.host.cache import cache_folder
from compressor.plan import prices
from compressor.plan.prices import Prices, machine_prices


def share_prices(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the workers that share a folder measure this machine once for each number of threads."""
    measure = prices.probe

    def probe() -> Prices:
        file = folder / f"prices_{torch.get_num_threads()}.json"
        with open(folder / "prices.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                file.write_text(json.dumps(dataclasses.asdict(measure())))
        return Prices(**json.loads(file.read_text()))

    patch.setattr(prices, "probe", probe)


def share_kernels(cache: Path, folder: Path) -> None:
    """Let the workers that share a folder share the kernels that they generate."""
    (folder / "kernels").mkdir(exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "kernels").symlink_to(folder / "kernels")


def with_prices(cache: Path) -> Path:
    """Put this machine's prices into another cache folder, for any number of threads: measuring takes nine seconds.

    It shares the kernels of the one so far.
    """
    known = machine_prices()
    if not (cache / "kernels").exists():
        share_kernels(cache, cache_folder())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_CACHE_DIR", str(cache))
        for threads in range(1, (os.cpu_count() or 1) + 1):
            patch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            patch.setattr(prices, "probe", lambda threads=threads: dataclasses.replace(known, threads=threads))
            machine_prices()
    return cache

"""Prices of work on this machine, for tests with a cache folder of their own."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from compressor.plan import prices
from compressor.plan.prices import machine_prices


def with_prices(cache: Path) -> Path:
    """Put this machine's prices into another cache folder, for any number of threads: measuring takes nine seconds."""
    known = machine_prices()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_CACHE_DIR", str(cache))
        for threads in range(1, (os.cpu_count() or 1) + 1):
            patch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            patch.setattr(prices, "probe", lambda threads=threads: dataclasses.replace(known, threads=threads))
            machine_prices()
    return cache

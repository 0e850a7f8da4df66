"""``compress`` runs in the user's process and leaves it as it found it."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch._dynamo  # what these libraries do to the process when they are imported is their own affair
import transformers
from own_caches import with_prices

import compressor
import compressor.run.job
from compressor.recipe.recipe import load_recipe

BLOCK = r"re:model\.layers\.0\.self_attn"
REMOVED_BY_TORCH = "torch.__trace"  # torch takes its own trace handler away when it first exports something


def loggers() -> dict[str, tuple[Any, ...]]:
    known = {name: log for name, log in logging.Logger.manager.loggerDict.items() if isinstance(log, logging.Logger)}
    return {
        name: (log.level, log.disabled, log.propagate, tuple(log.handlers), tuple(log.filters))
        for name, log in [("", logging.getLogger()), *known.items()]
        if name != REMOVED_BY_TORCH
    }


def state() -> dict[str, Any]:
    """Return all that a process has one of, and that a library could change under its user."""
    return {
        "torch random": torch.get_rng_state().tolist(),
        "numpy random": str(np.random.get_state()),
        "random": random.getstate(),
        "threads": torch.get_num_threads(),
        "threads between operators": torch.get_num_interop_threads(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "print options": str(torch._tensor_str.PRINT_OPTS),
        "numpy errors": np.geterr(),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "logging disabled": logging.root.manager.disable,
        "transformers": (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()),
        "datasets": (
            datasets.logging.get_verbosity(),
            datasets.are_progress_bars_disabled(),
            datasets.is_caching_enabled(),
        ),
        "path": list(sys.path),
        "folder": Path.cwd(),
        "recursion": sys.getrecursionlimit(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "hooks": (sys.excepthook, sys.displayhook, warnings.showwarning),
        "cores": os.sched_getaffinity(0),
    }


@pytest.fixture
def unusual() -> Iterator[None]:
    """Make settings that differ from the defaults, so that a reset to a default would show."""
    threads, level = torch.get_num_threads(), logging.getLogger("compressor").level
    random_states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    with warnings.catch_warnings(), np.errstate(under="warn"), torch.no_grad():
        warnings.filterwarnings("ignore", "something of the user's")
        torch.set_num_threads(1)
        torch.manual_seed(1234)
        np.random.seed(1234)
        random.seed(1234)
        logging.getLogger("compressor").setLevel(logging.ERROR)
        yield
    torch.set_num_threads(threads)
    logging.getLogger("compressor").setLevel(level)
    torch.set_rng_state(random_states[0])
    np.random.set_state(random_states[1])
    random.setstate(random_states[2])


def test_a_run_leaves_the_process_as_it_was(
    unusual: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    require_tool: Callable[[str], Path],
    small_llama: Path,
    no_speed: None,
) -> None:
    require_tool("g++")
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(with_prices(tmp_path / "cache")))
    before, known = state(), loggers()
    recipe = load_recipe(
        "quickstart",
        [
            f"model={small_llama}",
            "tune=off",
            "calibration.samples=2",
            "evaluation.tokens=256",
            "gates={}",
            f"passes.gptq.targets='{BLOCK}'",
            "passes.gptq.ignore=[]",
            "passes.gptq.scheme=W4A16_G32",
        ],
    )
    bundle = compressor.compress(None, recipe, tmp_path / "bundle")
    assert bundle.kind == "decoder"
    after, now = state(), loggers()
    assert set(after.pop("environment").items()) ^ set(before.pop("environment").items()) == set()
    assert {name: after[name] for name in before if after[name] != before[name]} == {}
    assert {name: now.get(name) for name in known if now.get(name) != known[name]} == {}

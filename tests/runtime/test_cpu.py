"""The CPU's features, and the library that suits them."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import compressor_runtime
import pytest
from compressor_runtime import cpu

from compressor.runtime import BundleError, RequestError


def test_cpu_features_may_be_named_as_by_linux_or_llvm() -> None:
    flags = Path("/proc/cpuinfo").read_text()
    names = [name for name in ("sse4_1", "sse4.1", "avx512_vnni", "avx512vnni") if name.replace(".", "_") in flags]
    compressor_runtime.check_cpu(names, Path("b"))


def test_the_first_library_that_this_cpu_runs_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = [{"isa": isa, "file": f"{isa}.so", "cpu_features": [isa]} for isa in ("best", "good", "plain")]
    manifest = {"cpu_features": ["plain"], "libraries": libraries}
    lacking: set[str] = set()
    monkeypatch.setattr("compressor_runtime.cpu.missing_features", lambda names: [n for n in names if n in lacking])

    def choose(isa: str | None = None) -> str:
        return compressor_runtime.choose_library(Path("b"), manifest, isa)

    assert (choose(), choose("good")) == ("best.so", "good.so")
    with pytest.raises(RequestError, match="isa='other': the bundle has kernels for best, good, plain"):
        choose("other")
    lacking |= {"best"}
    assert choose() == "good.so"
    with pytest.raises(BundleError, match="this CPU lacks best"):
        choose("best")
    lacking |= {"plain"}
    with pytest.raises(BundleError, match="this CPU lacks plain"):
        choose()


def test_a_system_that_refuses_amx_is_a_cpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    text = "flags : amx_tile avx2\n"
    monkeypatch.setattr(Path, "read_text", lambda file: reads.append(file) or text)
    monkeypatch.setattr(cpu, "_cpu_flags", cache(cpu._cpu_flags.__wrapped__))
    monkeypatch.setattr(cpu, "allow_tiles", lambda: False)
    assert compressor_runtime.missing_features(["amx_tile", "avx2"]) == ["amx_tile"]
    assert compressor_runtime.missing_features(["avx2"]) == []
    assert reads == [Path("/proc/cpuinfo")]  # however many libraries are considered


def test_threads_are_those_of_the_processors() -> None:
    most = len(os.sched_getaffinity(0))
    assert cpu.thread_count(None) == cpu.available_cores() and cpu.thread_count(most) == most
    wrong: list[Any] = [0, -1, most + 1, 1000, 1.0, "1", True]
    for threads in wrong:
        with pytest.raises(RequestError, match=rf"threads=.*: give a whole number from 1 to {most}"):
            cpu.thread_count(threads)

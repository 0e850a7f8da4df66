"""Without a tool or the network, emulation says which, and what to do."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from compressor_runtime.remote import facts
from missing import skip_or_fail

from compressor.codegen.linker import find_linker
from compressor.errors import ToolchainError
from compressor.host import emulation
from compressor.host.wheels import tvm_runtime

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a PATH without any tool, and a cache with nothing in it."""
    (folder := tmp_path / "tools").mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def test_without_qemu(tools: Path) -> None:
    assert "`apt-get install qemu-user-static`" in emulation.why_not.__wrapped__()


def test_without_apt(tools: Path) -> None:
    (tools / "qemu-aarch64-static").symlink_to("/bin/true")
    said = emulation.why_not.__wrapped__()
    assert "Python for aarch64 comes out of Debian's packages, and apt-get, dpkg-deb" in said


def test_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("apt-get") is None or shutil.which("qemu-aarch64-static") is None:
        skip_or_fail("apt-get or qemu-aarch64-static is not on PATH")
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(emulation, "_MIRROR", f"{NOWHERE}/debian")
    said = emulation.why_not.__wrapped__()
    assert f"Python for aarch64 cannot be had from {NOWHERE}/debian: apt-get" in said and "check the network" in said
    assert not list(tmp_path.rglob("*.deb")) and not list(tmp_path.glob("emulation/aarch64*"))


def test_a_wheel_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", f"{NOWHERE}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ToolchainError, match=r"apache-tvm for aarch64 cannot be downloaded: .*copy that folder"):
        tvm_runtime("aarch64")
    assert not list((tmp_path / "wheels").iterdir())


def test_without_a_cross_compiler(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match=r"`apt-get install g\+\+-aarch64-linux-gnu` or `pip install .*zig"):
        find_linker("aarch64-linux-gnu")


def test_an_emulated_process_is_told_so() -> None:
    assert emulation.EMULATED == facts.EMULATED

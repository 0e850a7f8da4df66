"""Schedules timed over TVM's RPC on a real server, which is killed, has no room, or gets kernels that do not end."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tvm
from repeats import Repeats, operands, repeated
from served_device import Server, served
from tvm.script import tirx as T

from compressor.codegen.remote_tuning import RemoteSession, RemoteTuner
from compressor.codegen.targets.x86 import X86
from compressor.codegen.tuning import Database
from compressor.errors import CompressorError, ResourceError, UsageError
from compressor.host.remote.address import DeviceAddress
from compressor.host.remote.client import Device, LostDeviceError, device_facts


def kernel(schedule: Repeats) -> tvm.tirx.PrimFunc:
    """Return the repeated kernel; for 0, an instruction that ends the process."""

    @T.prim_func(s_tir=True, private=True)
    def trap(x_: T.handle, y_: T.handle) -> None:
        T.match_buffer(x_, (4096,), "float32")
        T.match_buffer(y_, (4096,), "float32")
        T.evaluate(T.call_llvm_intrin(T.llvm_lookup_intrinsic_id("llvm.trap"), dtype="void"))

    return repeated(schedule) if schedule.count else trap


def choose(tuner: RemoteTuner, name: str, *counts: int) -> int:
    return tuner.choose(name, [Repeats(count) for count in counts], kernel, operands).count


def make(server: Server, path: Path, limit_s: float = 20.0) -> RemoteTuner:
    address, target = DeviceAddress.parse(server.address), X86()
    session = RemoteSession(address, device_facts(address), limit_s=limit_s, back_s=1.0)
    isa = target.resolve()
    tuner = RemoteTuner.make("full", target.tvm_target(isa), isa, 1, "", None, session, target.link)
    tuner.database = Database(path)
    return tuner


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "device").mkdir()
    with served(tmp_path / "device") as one:
        yield one


def test_the_fastest_there_is_chosen_and_what_does_not_run_is_said(server: Server, tmp_path: Path) -> None:
    tuner = make(server, tmp_path / "tuning.json", limit_s=2.0)
    assert choose(tuner, "k", 400, 0, 1 << 40, 4, 100) == 4
    ((key, entry),) = tuner.database.entries.items()
    assert f"|{X86().resolve().name}|{device_facts(DeviceAddress.parse(server.address))['name']}|1 threads|" in key
    slow, trap, hung, fast, _ = entry["microseconds"]
    assert trap is hung is None and slow > 10 * fast
    assert [note.partition("}")[2] for note in tuner.notes] == [
        " was ended by signal 4 (Illegal instruction); it was not chosen",
        " did not end within 2 s; it was not chosen",
    ]
    with pytest.raises(CompressorError, match=r"none of the 2 candidates of bad runs there: .* signal 4"):
        choose(tuner, "bad", 0, 0)
    assert list(server.sessions())  # it lives
    tuner.session.close()
    assert not list((tmp_path / "device").glob("*/session-*/*.so"))


def test_a_device_that_is_lost_ends_the_run_and_the_next_one_goes_on(server: Server, tmp_path: Path) -> None:
    tuner = make(server, tmp_path / "tuning.json")
    assert choose(tuner, "first", 100, 1) == 1
    threading.Timer(1.5, server.kill).start()  # in the middle: a candidate takes some ten seconds
    with pytest.raises(LostDeviceError, match=r"while second was timed, .* not come back; 1 kernels .* goes on"):
        choose(tuner, "second", 3_000_000, 1)
    kept = json.loads((tmp_path / "tuning.json").read_text())
    assert [key.partition("|")[0] for key in kept] == ["first"]
    with served(tmp_path / "device", port=server.port) as again:
        tuner = make(again, tmp_path / "tuning.json")
        assert choose(tuner, "first", 100, 1) == 1 and choose(tuner, "second", 100, 1) == 1
        assert [entry["timed_now"] for entry in tuner.tried] == [False, True]


def test_a_device_that_comes_back_is_used_again(server: Server, tmp_path: Path) -> None:
    tuner = make(server, tmp_path / "tuning.json")
    assert choose(tuner, "first", 100, 1) == 1
    (session,) = server.sessions()
    os.kill(session, signal.SIGKILL)
    assert choose(tuner, "second", 100, 1) == 1
    assert ["was lost while second was timed, and came back" in note for note in tuner.notes] == [True]


def test_a_full_disk_there_is_said(tmp_path: Path) -> None:
    limited = ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash"]
    with served(tmp_path, before=limited) as server:
        tuner = make(server, tmp_path / "tuning.json")
        with pytest.raises(ResourceError, match=r"File too large.*free some there.*the same command goes on"):
            choose(tuner, "k", 100, 1)


def test_what_is_not_our_server_is_said(server: Server) -> None:
    other = server.address.replace("/box", "/bux")
    with pytest.raises(UsageError, match="the server there has another key"):
        Device(DeviceAddress.parse(other))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = DeviceAddress.parse(f"rpc://127.0.0.1:{silent.getsockname()[1]}/box")
        begin = time.monotonic()
        with pytest.raises(LostDeviceError, match="no answer within 2 s; check that it is on"):
            Device(address, wait_s=1.0)
        assert time.monotonic() - begin < 5
    with pytest.raises(LostDeviceError, match="Connection refused; check the address"):
        Device(address)
    assert Device(DeviceAddress.parse(server.address)).name  # it takes the next client

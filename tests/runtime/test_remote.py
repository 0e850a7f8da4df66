"""A bundle on a device: the server runs the processes of a run on what it was sent."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from missing import skip_or_fail
from served_device import SERVE, served

from compressor.errors import VerificationError
from compressor.evaluate.models import BundleProcess
from compressor.evaluate.speed import Worker
from compressor.host.remote.address import DeviceAddress
from compressor.host.remote.client import Device, LostDeviceError
from compressor.host.remote.launch import launcher
from compressor.verify.smoke import smoke_test


def test_a_bundle_is_checked_evaluated_and_timed_on_a_device(bundle_folder: Path, tmp_path: Path) -> None:
    ids = np.arange(12, dtype=np.int64)[None]
    with served(tmp_path) as server:
        there = launcher(server.address)
        assert smoke_test(bundle_folder, 1, launcher=there).error < 1e-5
        kept = {path.name for path in tmp_path.glob("*/files/*")}
        manifest = json.loads((bundle_folder / "manifest.json").read_text())
        assert {entry["sha256"] for entry in manifest["files"].values()} <= kept  # whole, and under their digests
        with BundleProcess(bundle_folder, 1, there) as process, BundleProcess(bundle_folder, 1) as here:
            np.testing.assert_array_equal(process.logits(ids), here.logits(ids))
        with Worker(bundle_folder, threads=1, prompt_tokens=8, new_tokens=4, launcher=there) as worker:
            assert worker.repeat()["decode_tokens_per_s"] > 0
        damaged = Path(shutil.copytree(bundle_folder, tmp_path / "damaged"))
        (damaged / "model.so").write_bytes(b"no library")
        with pytest.raises(VerificationError, match=r"does not run in a fresh process: .*model\.so"):
            smoke_test(damaged, 1, launcher=there)
        code = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
        done = subprocess.run([*there, sys.executable, "-c", code], capture_output=True, check=False)
        assert done.returncode == -signal.SIGILL
        device = Device(DeviceAddress.parse(server.address))  # the next client: what the others had is gone
        assert not list(tmp_path.glob("*/session-*/*"))
        device.close()
    done = subprocess.run([*there, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Connection refused; check the address" in done.stderr


@pytest.mark.parametrize(("option", "value", "said"), [
    ("--key", "a key", "key 'a key': give letters, digits"), ("--tracker", "nowhere", "write it as HOST:PORT"),
    ("--host", "203.0.113.1", "cannot listen there"), ("--folder", "/nowhere", "no files can be made there"),
    ("--runtime", "/nowhere.so", "/nowhere.so: cannot be loaded"),
])  # fmt: skip
def test_a_server_that_cannot_start_says_why(option: str, value: str, said: str) -> None:
    from click.testing import CliRunner

    from compressor.cli.commands import main

    if option == "--runtime":  # this process has loaded it
        done = subprocess.run([*SERVE, option, value], capture_output=True, text=True, check=False)
        code, output = done.returncode, done.stderr
    else:
        result = CliRunner().invoke(main, ["device", "serve", "--port", "0", option, value])
        code, output = result.exit_code, result.output
    assert code == 2 and said in output and "Traceback" not in output


def test_a_device_reports_to_a_tracker_and_is_found_there(tmp_path: Path) -> None:
    try:
        import cloudpickle  # noqa: F401
        import tornado  # noqa: F401
    except ImportError as error:
        skip_or_fail(f"TVM's tracker needs {error.name}: pip install cloudpickle tornado")
    from tvm.rpc.tracker import Tracker

    tracker = Tracker("127.0.0.1", 19190, 19290, silent=True)
    address = DeviceAddress("127.0.0.1", tracker.port, "box")
    try:
        with pytest.raises(LostDeviceError, match="the tracker there has no free device of that key"):
            Device(address, wait_s=0.5)
        with served(tmp_path, "--tracker", f"127.0.0.1:{tracker.port}"):
            for _ in range(2):  # it offers itself again
                device = Device(address, wait_s=10.0)
                assert device.facts["system"] == "Linux"
                device.close()
    finally:
        tracker.terminate()

"""Jobs in a pool of processes and on a Ray cluster: the bits of this process, lost workers, refusals."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cluster_jobs import Mortal, costs, run, some_jobs
from missing import skip_or_fail

from compressor.errors import CompressorError, UsageError
from compressor.executor import jobs
from compressor.executor.jobs import InProcess, answer, identity
from compressor.executor.named import make_executor
from compressor.executor.pool import LocalPool
from compressor.executor.store import Store, fetched
from compressor.host.cache import cache_folder

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Let other processes import what pytest lets this one import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with LocalPool(2) as found:
        yield found


def test_a_pool_gives_the_bits_of_this_process(pool: LocalPool) -> None:
    expected, here = run(InProcess(), "squares", some_jobs())
    found, seen = run(pool, "squares", some_jobs())
    assert found == expected and here.done == seen.done == 5
    assert sorted(line.rpartition(": ")[2] for line in seen.told) == [f"plus {0.1 * n}" for n in range(5)]
    assert len({line.partition(": ")[0] for line in seen.told}) == 2  # both processes worked
    assert not list((cache_folder() / "jobs").iterdir())


def test_the_job_of_a_killed_worker_runs_again(pool: LocalPool, tmp_path: Path) -> None:
    found, seen = run(pool, "dies_once", [{"mark": str(tmp_path / "mark"), "number": n} for n in range(6)])
    assert found == list(range(6)) and seen.done == 6 and (tmp_path / "mark").is_file()


def test_a_job_that_ends_every_worker_ends_the_run() -> None:
    with LocalPool(1) as alone, pytest.raises(CompressorError, match=r"job 1 ended 3 workers, .*signal 9"):
        run(alone, "dies", [{}])


def test_errors_of_jobs_come_home(pool: LocalPool) -> None:
    with pytest.raises(UsageError, match="job one: is refused"):
        run(pool, "refuses", [{"number": n} for n in range(3)])
    assert run(pool, "refuses", [{"number": 0}])[0] == [0]  # it goes on with new processes
    with pytest.raises(CompressorError, match=r"jobs_of_tests:breaks on .*: ValueError: broken"):
        run(pool, "breaks", [{}])


def test_a_tensor_is_written_once(tmp_path: Path) -> None:
    store, first = Store(tmp_path), some_jobs()
    plain = [store.put(one) for one in first]
    assert len(list(tmp_path.iterdir())) == 1
    read = fetched(json.loads(json.dumps(plain)))
    for mine, theirs in zip(read, first, strict=True):
        for one, other in zip([mine["values"], *mine["again"]], [theirs["values"], *theirs["again"]], strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
    with pytest.raises(CompressorError, match="neither plain data nor a tensor"):
        store.put({"wrong": {1, 2}})


def test_a_worker_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"function": "jobs_of_tests:refuses", "arguments": {"number": 0}, "identity": identity()}
    assert json.loads(answer(json.dumps(asked)))["value"] == 0
    monkeypatch.setattr(jobs, "identity", lambda: identity_of_others)
    identity_of_others = {**identity(), "compressor": "9.9"}
    found = json.loads(answer(json.dumps(asked)))
    assert found["exit_code"] == 2 and "is refused" in found["error"] and "compressor: 9.9, not 0.1.0" in found["error"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("locale:2", "give local:N for N processes, ray, or ray://host:port"),
        ("local:", "give local:N"),
        ("local:0", "give 1 to"),
        ("local:9999", "this machine has"),
    ],
)
def test_names_that_mean_nothing(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_executor(name)


@pytest.fixture(scope="module")
def cluster(importable: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a cluster of two workers on this machine; return its address for ``RAY_ADDRESS``."""
    if importlib.util.find_spec("ray") is None:
        skip_or_fail("Ray is not installed: pip install 'compressor[ray]'")
    ports = [free_port() for _ in range(3)]
    start = [sys.executable, "-m", "ray.scripts.scripts"]
    options = [f"--port={ports[0]}", f"--ray-client-server-port={ports[1]}", f"--dashboard-port={ports[2]}"]
    place = tmp_path_factory.mktemp("ray", numbered=False)
    command = [*start, "start", "--head", "--num-cpus=2", "--include-dashboard=false", *options, f"--temp-dir={place}"]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}  # whatever token the user's home may hold
    environment["RAY_worker_niceness"] = "0"  # else whatever else runs starves its workers, at Ray's 15
    environment["RAY_health_check_failure_threshold"] = "60"  # times 3 s; else a busy machine counts as lost
    quiet = subprocess.DEVNULL
    head = subprocess.Popen([*command, "--block"], stdout=quiet, stderr=quiet, env=environment)
    try:
        for _ in range(120):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", ports[0]), 1).close()
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(0.5)
        yield f"127.0.0.1:{ports[0]}"
    finally:
        head.terminate()
        head.wait(30)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def costs_here() -> dict[str, list[float]]:
    return costs(InProcess())[0]


def test_sensitivities_on_a_pool_that_loses_a_worker(
    costs_here: dict[str, list[float]], pool: LocalPool, tmp_path: Path
) -> None:
    found, _ = costs(Mortal(pool, tmp_path / "mark"))
    assert found == costs_here and (tmp_path / "mark").is_file()
    assert all(smallest > largest > 0 for smallest, largest in found.values())


def test_a_cluster_gives_the_bits_of_this_process_and_loses_workers(cluster: str, tmp_path: Path) -> None:
    """In a process of its own, which Ray ends where it loses the cluster."""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": cluster}

    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        folder.mkdir()
        command = [sys.executable, str(SUPPORT / "cluster_jobs.py"), str(folder)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    done = run(tmp_path / "first")
    if "You have likely discovered a bug in Ray" in done.stderr:  # its own check, seen once in many runs
        done = run(tmp_path / "second")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("address", ["ray://127.0.0.1:1", "ray://", "ray://host:wrong"])
def test_an_address_that_does_not_answer(address: str) -> None:
    if importlib.util.find_spec("ray") is None:
        skip_or_fail("Ray is not installed: pip install 'compressor[ray]'")
    with pytest.raises(UsageError, match=r"executor ray://.*(nothing answers|no host and port|Port could not)"):
        make_executor(address)

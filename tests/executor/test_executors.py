"""Jobs in a pool of processes and on a Ray cluster: the bits of this process, lost workers, refusals."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DECODERS, make
from missing import skip_or_fail
from packed_models import random_samples

from compressor.capture.capture import capture
from compressor.errors import CompressorError, UsageError
from compressor.executor import jobs
from compressor.executor.jobs import Arguments, Executor, InProcess, answer, identity
from compressor.executor.named import make_executor
from compressor.executor.pool import LocalPool
from compressor.executor.store import Store, fetched
from compressor.formats.format import Format
from compressor.graph.sites import linear_sites
from compressor.host.cache import cache_folder
from compressor.pipeline.context import Context
from compressor.pipeline.sensitivities import sensitivities
from compressor.progress import Reporter, Silent, Task

SUPPORT = Path(__file__).parents[1] / "support"


class Lines(Silent):
    """Count what is done, and keep what is told."""

    def __init__(self) -> None:
        self.done, self.told = 0, list[str]()

    def advance(self, amount: int = 1) -> None:
        self.done += amount

    def note(self, text: str) -> None:
        self.told.append(text)


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


def run(executor: Executor, name: str, arguments: list[dict[str, Any]]) -> tuple[list[Any], Lines]:
    seen = Lines()
    return executor.run(f"jobs_of_tests:{name}", iter(arguments), seen, seen), seen


def some_jobs() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    weight = torch.randn(64, 64)
    more = [weight[1:, ::2], torch.tensor([7], dtype=torch.int8), torch.ones(2, 2, dtype=torch.bfloat16)]
    return [{"values": weight, "again": more, "plus": 0.1 * number} for number in range(5)]


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


def test_a_cluster_gives_the_bits_of_this_process(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ADDRESS", cluster)  # its client, of ray://, gives up where two test workers share the cores
    expected, _ = run(InProcess(), "squares", some_jobs())
    with make_executor("ray") as executor:
        found, seen = run(executor, "squares", some_jobs())
        assert found == expected and seen.done == 5 and len(seen.told) == 5
        found, _ = run(executor, "dies_once", [{"mark": str(tmp_path / "mark"), "number": n} for n in range(4)])
        assert found == list(range(4)) and (tmp_path / "mark").is_file()
        with pytest.raises(UsageError, match="job one: is refused"):
            run(executor, "refuses", [{"number": n} for n in range(3)])


class Mortal(Executor):
    """Run jobs on another executor, the first of which ends its worker when it is nearly done."""

    def __init__(self, executor: Executor, mark: Path) -> None:
        self._executor, self._mark = executor, str(mark)

    def run(self, function: str, jobs: Iterable[Arguments], task: Task, reporter: Reporter) -> list[Any]:
        wrapped = ({"mark": self._mark, "function": function, "arguments": one} for one in jobs)
        return self._executor.run("jobs_of_tests:dies_once_in", wrapped, task, reporter)


def costs(executor: Executor) -> tuple[dict[str, list[float]], Lines]:
    """Return sensitivities of a small model's linears."""
    seen = Lines()
    graph, ctx = capture(make(*DECODERS["Llama"], True)), Context(executor=executor, reporter=seen)
    formats = [Format.parse(name) for name in ("W2A8_G16", "W8A16")]
    return sensitivities(graph, ctx, random_samples(97, 12).ids, linear_sites(graph), formats), seen


@pytest.fixture(scope="module")
def costs_here() -> dict[str, list[float]]:
    return costs(InProcess())[0]


def test_sensitivities_on_a_pool_that_loses_a_worker(
    costs_here: dict[str, list[float]], pool: LocalPool, tmp_path: Path
) -> None:
    found, _ = costs(Mortal(pool, tmp_path / "mark"))
    assert found == costs_here and (tmp_path / "mark").is_file()
    assert all(smallest > largest > 0 for smallest, largest in found.values())


def test_sensitivities_on_a_cluster_that_loses_a_worker(
    cluster: str, costs_here: dict[str, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    with make_executor("ray") as executor:
        found, _ = costs(Mortal(executor, tmp_path / "mark"))
    assert found == costs_here and (tmp_path / "mark").is_file()


@pytest.mark.parametrize("address", ["ray://127.0.0.1:1", "ray://", "ray://host:wrong"])
def test_an_address_that_does_not_answer(address: str) -> None:
    if importlib.util.find_spec("ray") is None:
        skip_or_fail("Ray is not installed: pip install 'compressor[ray]'")
    with pytest.raises(UsageError, match=r"executor ray://.*(nothing answers|no host and port|Port could not)"):
        make_executor(address)

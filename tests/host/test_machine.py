"""Limits on memory, read from fake /proc and cgroup trees; the probe, and where it is kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from compressor.host.machine import available_memory, cache_bytes, free_disk
from compressor.plan import prices as machine_probe
from compressor.plan.prices import UNITS, Prices, machine_prices

GB = 1 << 30


def proc_tree(
    folder: Path, *, available: int = 8 * GB, held: int = GB, cgroup: str = "", limits: str = "", size: int = 4 * GB
) -> Path:
    """Make a proc file system of a process that holds ``held`` bytes in an address space of ``size`` bytes."""
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:  {available // 1024} kB\nHugePages_Total: 0\n")
    (folder / "self" / "status").write_text(
        f"Name:\tpython\nVmSize:\t{size // 1024} kB\nVmRSS:\t{held // 1024} kB\n"
        f"VmData:\t{size // 2048} kB\nThreads:\t2\n"
    )
    (folder / "self" / "limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max address space         unlimited            unlimited            bytes     \n" + limits
    )
    if cgroup:
        (folder / "self" / "cgroup").write_text(cgroup)
    return folder


def group(folder: Path, limit: str, used: int, reclaimable: int = 0, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    prefix = "" if version == 2 else "total_"
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {reclaimable}\n{prefix}active_file 0\n")


def test_without_limits_it_is_what_the_machine_has_and_what_is_held_already(tmp_path: Path) -> None:
    found = available_memory(proc_tree(tmp_path / "proc"), tmp_path / "cgroup")
    assert (found.bytes, found.limit) == (9 * GB, "the machine's free memory")


def test_the_least_limit_on_the_way_up_the_groups_counts(tmp_path: Path) -> None:
    cgroups = tmp_path / "cgroup"
    group(cgroups / "a" / "b", "max", GB)
    group(cgroups / "a", str(3 * GB), 2 * GB)
    group(cgroups, str(6 * GB), 2 * GB)
    found = available_memory(proc_tree(tmp_path / "proc", cgroup="0::/a/b\n"), cgroups)
    assert (found.bytes, found.limit) == (2 * GB, f"the control group {cgroups / 'a'}")


def test_cached_files_of_a_group_can_be_taken_back(tmp_path: Path) -> None:
    cgroups = tmp_path / "cgroup"
    group(cgroups / "a", str(3 * GB), 3 * GB, reclaimable=2 * GB)
    assert available_memory(proc_tree(tmp_path / "proc", cgroup="0::/a\n"), cgroups).bytes == 3 * GB


def test_groups_of_version_1_count_and_their_word_for_no_limit_does_not(tmp_path: Path) -> None:
    cgroups = tmp_path / "cgroup"
    group(cgroups / "memory" / "a", str(2 * GB), GB, version=1)
    group(cgroups / "memory", str(0x7FFFFFFFFFFFF000), 5 * GB, version=1)
    listing = "3:cpuset:/\n4:blkio,memory:/a\n0::/\n"
    found = available_memory(proc_tree(tmp_path / "proc", cgroup=listing), cgroups)
    assert (found.bytes, found.limit) == (2 * GB, f"the control group {cgroups / 'memory' / 'a'}")


def test_a_group_that_is_not_visible_here_is_no_limit_but_those_above_it_are(tmp_path: Path) -> None:
    cgroups = tmp_path / "cgroup"
    group(cgroups, str(3 * GB), 2 * GB)
    assert available_memory(proc_tree(tmp_path / "proc", cgroup="0::/of/the/host\n"), cgroups).bytes == 2 * GB


@pytest.mark.parametrize(
    ("line", "left", "name"),
    [("Max address space", GB, "RLIMIT_AS"), ("Max data size", 3 * GB, "RLIMIT_DATA")],
)
def test_limits_of_the_process_count_what_they_count(tmp_path: Path, line: str, left: int, name: str) -> None:
    limits = f"{line:<26}{5 * GB:<21}unlimited            bytes     \n"
    found = available_memory(proc_tree(tmp_path / "proc", limits=limits), tmp_path / "cgroup")
    assert (found.bytes, found.limit) == (GB + left, name)


def test_this_machine_can_be_asked() -> None:
    found = available_memory()
    assert 1 << 24 < found.bytes < 1 << 50


def test_a_folder_that_does_not_exist_is_on_its_parents_disk(tmp_path: Path) -> None:
    assert free_disk(tmp_path / "a" / "b")[0] == free_disk(tmp_path)[0]
    assert free_disk(tmp_path)[1] > 0


def a_machine(**changes: float) -> Prices:
    """Pretend a machine where a unit of work takes a nanosecond."""
    return Prices("cpu", 2, {**dict.fromkeys(UNITS, 1e-9), **changes}, 0.1, 200 << 20, 300 << 20, 450 << 20)


def test_work_is_priced_by_unit() -> None:
    assert a_machine(node=2.0).cost({"node": 3, "read_byte": 1e9}) == pytest.approx(7.0)
    with pytest.raises(KeyError):
        a_machine().cost({"no_such_unit": 1})


def test_a_machine_is_measured_once_and_again_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path))
    measured: list[Prices] = []

    def probe() -> Prices:
        measured.append(a_machine(node=len(measured) + 1.0))
        return measured[-1]

    monkeypatch.setattr(machine_probe, "probe", probe)
    assert machine_prices() == machine_prices() == measured[0]
    assert machine_prices(measure=True) == machine_prices() == measured[1]
    file = tmp_path / "machine.json"
    ((key, kept),) = json.loads(file.read_text()).items()
    assert torch.__version__ in key and f"{torch.get_num_threads()} threads" in key
    del kept["seconds"]["node"]  # as another version of the probe would have left it
    file.write_text(json.dumps({key: kept}))
    assert machine_prices() == measured[2]
    ((key, kept),) = json.loads(file.read_text()).items()
    kept["seconds"]["peak_flop"] = 1e-6  # as a machine measures whose threads others stop: a run would take days
    file.write_text(json.dumps({key: kept}))
    assert machine_prices() == measured[3]


def test_a_cache_folder_that_cannot_be_written_to_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "file" / "folder"))
    monkeypatch.setattr(machine_probe, "probe", a_machine)
    assert machine_prices() == a_machine()


@pytest.fixture(scope="session")
def measured_machine() -> Prices:
    return machine_probe.probe()


def test_the_probe_measures_every_unit(measured_machine: Prices) -> None:
    assert set(measured_machine.seconds) == set(UNITS)
    assert all(0 <= price < 60 for price in measured_machine.seconds.values())
    assert measured_machine.seconds["matmul_flop"] > 0 and measured_machine.seconds["read_byte"] > 0
    assert (
        1 << 24 < measured_machine.bundle_bytes <= measured_machine.dense_bytes <= measured_machine.all_bytes < 1 << 32
    )
    assert Prices(**json.loads(json.dumps(dataclasses.asdict(measured_machine)))) == measured_machine


def test_the_last_level_caches_are_counted_once(tmp_path: Path) -> None:
    assert cache_bytes(tmp_path) == 1 << 60  # the system does not tell
    sizes = {0: (2, "2048K", "0"), 1: (2, "2048K", "1"), 2: (3, "32768K", "0-1"), 3: (3, "32768K", "2-3")}
    for cpu, indices in ((0, (0, 2)), (1, (1, 2)), (2, (0, 3))):
        for index in indices:
            level, size, shared = sizes[index]
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{text}\n")
    assert cache_bytes(tmp_path) == 64 << 20

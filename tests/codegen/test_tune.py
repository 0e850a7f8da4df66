from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from compressor.cache import cache_folder
from compressor.codegen.targets.x86 import X86
from compressor.codegen.tune import Database, Tuner, cpu_name

SOURCE, SIZE = __file__, 4096


@dataclass(frozen=True)
class Repeats:
    """A schedule that does everything ``count`` times."""

    count: int


SPACE = [Repeats(40), Repeats(1), Repeats(10), Repeats(2)]


def kernel(schedule: Repeats) -> tvm.tirx.PrimFunc:
    count = schedule.count

    @T.prim_func(s_tir=True, private=True)
    def halve(x_: T.handle, y_: T.handle) -> None:
        x = T.match_buffer(x_, (4096,), "float32")
        y = T.match_buffer(y_, (4096,), "float32")
        for _r in range(count):
            for i in range(4096):
                y[i] = y[i] * T.float32(0.5) + x[i]

    return halve


def operands() -> list[np.ndarray]:
    return [np.ones(SIZE, "float32"), np.zeros(SIZE, "float32")]


class Counted:
    """``build`` that remembers what it was asked for."""

    def __init__(self) -> None:
        self.built: list[Repeats] = []

    def __call__(self, schedule: Repeats) -> tvm.tirx.PrimFunc:
        self.built.append(schedule)
        return kernel(schedule)


def tuner(mode: str, database: Database, machine: str = "here") -> Tuner:
    isa = X86().resolve()
    return Tuner(mode, 1, X86().tvm_target(isa), machine, database)


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "tuning.json")


def test_modes_time_none_three_and_all(database: Database) -> None:
    for mode, tried in (("off", 0), ("quick", 3), ("full", 4)):
        build = Counted()
        chosen = tuner(mode, database, mode).choose("k", SPACE, build, operands, SOURCE)
        assert build.built == SPACE[:tried]
        assert chosen in SPACE[: max(1, tried)]


def test_one_candidate_and_a_target_of_another_machine_need_no_timing(database: Database) -> None:
    build = Counted()
    assert tuner("full", database).choose("k", SPACE[:1], build, operands, SOURCE) == SPACE[0]
    elsewhere = Tuner("full", 1, None, "elsewhere", database)
    assert elsewhere.choose("k", SPACE, build, operands, SOURCE) == SPACE[0]
    assert build.built == [] and database.entries == {}


def test_the_fastest_candidate_wins(database: Database) -> None:
    assert tuner("full", database).choose("k", SPACE, kernel, operands, SOURCE) == Repeats(1)
    (entry,) = database.entries.values()
    assert entry["schedule"] == {"count": 1} and entry["index"] == 1
    slowest, fastest, third, _ = entry["microseconds"]
    assert slowest > third > fastest > 0


def test_results_are_remembered_across_processes_and_extended(database: Database) -> None:
    first = Counted()
    chosen = tuner("quick", database).choose("k", SPACE, first, operands, SOURCE)
    database.save()
    again = tuner("quick", Database(database.path))
    build = Counted()
    assert again.choose("k", SPACE, build, operands, SOURCE) == chosen
    assert build.built == []
    assert again.log[0]["kernel"] == "k" and again.log[0]["tried"] == len(first.built)
    fuller = tuner("full", Database(database.path))
    fuller.choose("k", SPACE, build, operands, SOURCE)
    assert build.built == SPACE  # the best of three does not answer for four


def test_kernel_machine_and_source_are_part_of_the_key(database: Database, tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("first")

    def times(kernel: str = "k", machine: str = "here") -> int:
        build = Counted()
        tuner("quick", database, machine).choose(kernel, SPACE, build, operands, str(source))
        return len(build.built)

    assert [times(), times()] == [3, 0]
    assert [times(kernel="other"), times(machine="AVX2|other CPU|2 threads")] == [3, 3]
    source.write_text("second")
    assert [times(), times()] == [3, 0]


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "\x00\xff", '{"k": '])
def test_an_unreadable_database_counts_as_empty_and_is_replaced(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_bytes(content.encode("latin-1"))
    database = Database(path)
    assert database.entries == {}
    database.entries["k"] = {"index": 0, "tried": 3}
    database.save()
    assert Database(path).entries == {"k": {"index": 0, "tried": 3}}


@pytest.mark.parametrize("entry", [None, 3, {}, {"index": 99, "tried": 99}, {"index": "0", "tried": 3}, {"tried": 99}])
def test_an_entry_that_makes_no_sense_is_measured_again(entry: Any, database: Database) -> None:
    tuner("quick", database).choose("k", SPACE, kernel, operands, SOURCE)
    (key,) = database.entries
    database.path.write_text(json.dumps({key: entry}))
    build = Counted()
    assert tuner("quick", Database(database.path)).choose("k", SPACE, build, operands, SOURCE) == Repeats(1)
    assert build.built == SPACE[:3]


WRITE = """
import sys
from pathlib import Path
from compressor.codegen.tune import Database

for i in range(20):
    database = Database(Path(sys.argv[1]))
    database.entries = {f"{sys.argv[2]}{i}": {"index": i, "tried": 3}}
    database.save()
"""


def test_saving_keeps_what_others_wrote_and_never_shows_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tuning.json"
    command = [sys.executable, "-c", WRITE, str(path)]
    assert subprocess.run([*command, "mine"], check=False).returncode == 0
    other = subprocess.Popen([*command, "theirs"])
    while other.poll() is None:
        json.loads(path.read_text())
        time.sleep(0.001)
    assert other.returncode == 0
    assert set(Database(path).entries) == {f"{name}{i}" for name in ("mine", "theirs") for i in range(20)}
    assert [file.name for file in path.parent.iterdir()] == ["tuning.json"]


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    database = Database(tmp_path / "file" / "tuning.json")
    assert tuner("quick", database).choose("k", SPACE, kernel, operands, SOURCE) == Repeats(1)
    database.save()
    assert (tmp_path / "file").read_text() == "in the way"


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path and Database().path == tmp_path / "tuning.json"
    monkeypatch.delenv("COMPRESS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "compressor"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "compressor"


def test_the_processor_has_a_name() -> None:
    assert cpu_name()

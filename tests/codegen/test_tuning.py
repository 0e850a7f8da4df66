from __future__ import annotations

import dataclasses
import errno
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tvm
from repeats import Repeats, operands
from repeats import repeated as kernel

from compressor.codegen.targets.x86 import X86
from compressor.codegen.tuning import Database, Tuner, summary
from compressor.errors import DriftError
from compressor.host.cache import cache_folder
from compressor.host.machine import cpu_name

# A factor of 25 between the best and the next: a busy machine does not change who wins.
SPACE = [Repeats(1000), Repeats(10), Repeats(250), Repeats(500)]


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


def test_what_was_tried_is_told(database: Database) -> None:
    first, again = tuner("full", database), tuner("full", database)
    assert summary(first.tried) == []
    for each in (first, again):
        assert each.choose("k", SPACE, kernel, operands) == Repeats(10)
    (entry,), (known,) = first.tried, again.tried
    assert entry["timed_now"] and not known["timed_now"] and {**entry, "timed_now": False} == known
    assert [candidate["count"] for candidate in entry["candidates"]] == [1000, 10, 250, 500] and entry["won"] == 1
    assert entry["candidates"][0]["microseconds"] > entry["candidates"][1]["microseconds"] > 0
    assert (
        "1 choices, 1 of them timed in this run, with 4 candidates; another than the default won 1"
        in summary(first.tried)[0]
    )


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "tuning.json")


def test_modes_time_none_three_and_all(database: Database) -> None:
    for mode, tried in (("off", 0), ("quick", 3), ("full", 4)):
        build = Counted()
        chosen = tuner(mode, database, mode).choose("k", SPACE, build, operands)
        assert build.built == SPACE[:tried]
        assert chosen in SPACE[: max(1, tried)]


def test_one_candidate_and_a_target_of_another_machine_need_no_timing(database: Database) -> None:
    build = Counted()
    assert tuner("full", database).choose("k", SPACE[:1], build, operands) == SPACE[0]
    elsewhere = Tuner("full", 1, None, "elsewhere", database)
    assert elsewhere.choose("k", SPACE, build, operands) == SPACE[0]
    assert build.built == [] and database.entries == {}


def test_the_fastest_candidate_wins(database: Database) -> None:
    assert tuner("full", database).choose("k", SPACE, kernel, operands) == Repeats(10)
    (entry,) = database.entries.values()
    assert entry["schedule"] == {"count": 10} and entry["index"] == 1
    slowest, fastest, third, _ = entry["microseconds"]
    assert min(slowest, third) > fastest > 0


def test_results_are_remembered_across_processes_and_extended(database: Database) -> None:
    first = tuner("quick", database)
    chosen = first.choose("k", SPACE, kernel, operands)
    again = tuner("quick", Database(database.path))
    build = Counted()
    assert again.choose("k", SPACE, build, operands) == chosen
    assert build.built == []
    assert again.chosen == first.chosen == {"k": {"count": chosen.count}}
    fuller = tuner("full", Database(database.path))
    fuller.choose("k", SPACE, build, operands)
    assert build.built == SPACE  # the best of three does not answer for four


def test_every_choice_is_on_disk_before_the_next(database: Database) -> None:
    """What a run had timed when it was killed is what it goes on with."""

    def killed(_schedule: Repeats) -> tvm.tirx.PrimFunc:
        raise KeyboardInterrupt

    run = tuner("quick", database)
    chosen = run.choose("first", SPACE, kernel, operands)
    with pytest.raises(KeyboardInterrupt):
        run.choose("second", SPACE, killed, operands)
    continued, build = tuner("quick", Database(database.path)), Counted()
    assert continued.choose("first", SPACE, build, operands) == chosen
    assert build.built == []
    assert [file.name for file in database.path.parent.iterdir()] == ["tuning.json"]


@pytest.mark.parametrize("mode", ["off", "quick", "full"])
def test_a_pinned_schedule_is_taken_without_timing(mode: str, database: Database) -> None:
    build = Counted()
    run = tuner(mode, database)
    run.pinned = {"k": {"count": 500}}
    assert run.choose("k", SPACE, build, operands) == Repeats(500)
    assert build.built == [] and database.entries == {} and run.chosen == run.pinned


@pytest.mark.parametrize(
    ("pinned", "what"),
    [({}, "has no schedule"), ({"k": {"count": 3}}, "none of those possible"), ({"k": {}}, "none of those possible")],
)
def test_a_pinned_schedule_that_is_not_possible_is_drift(
    pinned: dict[str, dict[str, int]], what: str, database: Database
) -> None:
    run = tuner("quick", database)
    run.pinned = pinned
    with pytest.raises(DriftError, match=f"{what}.* for the kernel k"):
        run.choose("k", SPACE, kernel, operands)


def test_what_was_chosen_can_be_pinned(database: Database) -> None:
    first = tuner("off", database)
    first.choose("one", SPACE, kernel, operands)
    first.choose("two", SPACE[3:], kernel, operands)
    again = tuner("full", database)
    again.pinned = json.loads(json.dumps(first.chosen))
    assert again.choose("one", SPACE, kernel, operands) == SPACE[0]
    assert again.choose("two", SPACE, kernel, operands) == SPACE[3]


def test_kernel_machine_and_source_are_part_of_the_key(database: Database) -> None:
    def times(kernel: str = "k", machine: str = "here", kernels: str = "first") -> int:
        build = Counted()
        run = dataclasses.replace(tuner("quick", database, machine), kernels=kernels)
        run.choose(kernel, SPACE, build, operands)
        return len(build.built)

    assert [times(), times()] == [3, 0]
    assert [times(kernel="other"), times(machine="AVX2|other CPU|2 threads")] == [3, 3]
    assert [times(kernels="second"), times(kernels="second")] == [3, 0]


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "\x00\xff", '{"k": '])
def test_an_unreadable_database_counts_as_empty_and_is_replaced(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_bytes(content.encode("latin-1"))
    database = Database(path)
    assert database.entries == {}
    database.keep("k", {"index": 0, "tried": 3})
    assert Database(path).entries == {"k": {"index": 0, "tried": 3}}


@pytest.mark.parametrize("entry", [None, 3, {}, {"index": 99, "tried": 99}, {"index": "0", "tried": 3}, {"tried": 99}])
def test_an_entry_that_makes_no_sense_is_measured_again(entry: Any, database: Database) -> None:
    tuner("quick", database).choose("k", SPACE, kernel, operands)
    (key,) = database.entries
    database.path.write_text(json.dumps({key: entry}))
    build = Counted()
    assert tuner("quick", Database(database.path)).choose("k", SPACE, build, operands) in SPACE[:3]
    assert build.built == SPACE[:3]


WRITE = """
import sys
from pathlib import Path
from compressor.codegen.tuning import Database

database = Database(Path(sys.argv[1]))
for i in range(20):
    database.keep(f"{sys.argv[2]}{i}", {"index": i, "tried": 3})
"""


def test_what_others_write_is_kept_and_half_a_file_is_never_seen(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tuning.json"
    command = [sys.executable, "-c", WRITE, str(path)]
    others = [subprocess.Popen([*command, name]) for name in ("mine", "theirs")]
    while any(other.poll() is None for other in others):
        if path.exists():
            json.loads(path.read_text())
        time.sleep(0.001)
    assert [other.returncode for other in others] == [0, 0]
    assert set(Database(path).entries) == {f"{name}{i}" for name in ("mine", "theirs") for i in range(20)}
    assert [file.name for file in path.parent.iterdir()] == ["tuning.json"]


def test_a_cache_that_cannot_be_written_stops_nothing_and_is_noted_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run = tuner("quick", Database(tmp_path / "file" / "tuning.json"))
    for name in ("one", "two"):
        assert run.choose(name, SPACE, kernel, operands) in SPACE[:3]
    (note,) = run.notes
    assert "tuning.json: cannot be written" in note and "COMPRESS_CACHE_DIR" in note
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_full_disk_leaves_the_database_as_it_was(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    database.keep("old", {"index": 0, "tried": 3})
    before = database.path.read_bytes()
    write = Path.write_text

    def fill(path: Path, text: str, **options: Any) -> int:
        write(path, text[:10], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    run = tuner("quick", database)
    run.choose("k", SPACE, kernel, operands)
    assert "No space left" in run.notes[0]
    assert database.path.read_bytes() == before
    assert [file.name for file in database.path.parent.iterdir()] == ["tuning.json"]


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

"""JUnit XML by the schema's rules and through an independent reader, JSON, and that both are there in any case."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import junitparser
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compressor.codegen.backend import Check
from compressor.errors import CompressorError, RecipeError, UsageError, VerificationError
from compressor.evaluate.gates import check_gates
from compressor.recipe.gates import Gate
from compressor.report.content import outcome_content, write_report
from compressor.report.junit import write_junit
from compressor.report.outcome import Outcome
from compressor.report.recorder import recording

GATES = check_gates(
    [
        Gate.parse("perplexity_increase", "<= 2%"),
        Gate.parse("weight_bytes", "<= 120MB"),
        Gate.parse("latency_ms", "<= 3ms"),
    ],
    {"perplexity_increase": 0.041, "weight_bytes": 100_000_000},
)


def outcome(**changes: Any) -> Outcome:
    fields: dict[str, Any] = {
        "bundle": Path("build/q"),
        "metrics": {"weight_bytes": 100_000_000, "perplexity": math.inf, "batch_independent": True},
        "gates": GATES,
        "sites": [{"site": "a", "note": ""}],
        "stages": [{"name": "rtn"}],
        "kernel_error": 1e-6,
        "notes": ["slow"],
    }
    return Outcome(**{**fields, **changes})


def read(path: Path) -> ET.Element:
    """Hold the suite against the rules of the JUnit schema (the Jenkins plugin's junit-10.xsd)."""
    suite = ET.parse(path).getroot()
    assert suite.tag == "testsuite"
    assert set(suite.attrib) == {"name", "tests", "failures", "errors", "skipped", "time"}
    for count, what in (
        ("tests", "testcase"),
        ("failures", "*/failure"),
        ("errors", "*/error"),
        ("skipped", "*/skipped"),
    ):
        assert int(suite.attrib[count]) == len(suite.findall(what))
    assert float(suite.attrib["time"]) >= 0
    names = []
    for case in suite:
        assert case.tag == "testcase" and set(case.attrib) == {"classname", "name", "time"}
        names.append((case.attrib["classname"], case.attrib["name"]))
        assert [child.tag for child in case] in ([], ["failure"], ["error"], ["skipped"], ["system-out"])
        for child in case:
            known = {"failure": {"type", "message"}, "error": {"type", "message"}, "skipped": {"message"}}
            assert set(child.attrib) == known.get(child.tag, set())
    assert len(set(names)) == len(names)  # or a CI system takes one for the other
    return suite


def parsed(path: Path) -> dict[str, list[Any]]:
    """Each test case's results as junitparser reads them."""
    read(path)
    (suite,) = junitparser.JUnitXml.fromfile(str(path))
    return {case.name: list(case.result) for case in suite}


def test_a_gate_that_fails_is_named_with_expected_and_measured(tmp_path: Path) -> None:
    file = tmp_path / "j.xml"
    with recording("recipe.yaml", file, None) as recorder:
        recorder.end(
            outcome(checks=[Check("smoke test", True, "reloaded in 0.3 s"), Check("power", False, "too much")])
        )
    cases = parsed(file)
    assert list(cases) == [
        "kernels against PyTorch", "batch independence", "smoke test", "power",
        "perplexity_increase <= 2%", "weight_bytes <= 120MB", "latency_ms <= 3ms",
    ]  # fmt: skip
    (failure,) = cases["perplexity_increase <= 2%"]
    assert isinstance(failure, junitparser.Failure)
    assert failure.message == failure.text == "perplexity_increase: expected <= 2%, measured 4.1%"
    (unmeasured,) = cases["latency_ms <= 3ms"]
    assert isinstance(unmeasured, junitparser.Failure) and unmeasured.message.endswith("expected <= 3ms, not measured")
    (power,) = cases["power"]
    assert isinstance(power, junitparser.Failure) and power.message == "too much"
    for name in ("kernels against PyTorch", "batch independence", "smoke test", "weight_bytes <= 120MB"):
        assert cases[name] == []
    suite = read(file)
    assert (suite.attrib["name"], suite.attrib["failures"]) == ("recipe.yaml", "3")
    said = {case.attrib["name"]: case.findtext("system-out") for case in suite}
    assert said["weight_bytes <= 120MB"] == "weight_bytes: expected <= 120MB, measured 100MB"
    assert said["kernels against PyTorch"] == "relative error 1.0e-06"


def test_what_could_not_be_checked_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "j.xml"
    with recording("r", file, None) as recorder:
        recorder.end(outcome(kernel_error=None, metrics={"batch_independent": False}, gates=[]))
    cases = parsed(file)
    assert {name: type(results[0]) for name, results in cases.items()} == dict.fromkeys(
        ("kernels against PyTorch", "batch independence"), junitparser.Skipped
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RecipeError("r.yaml:3: gates.x: unknown metric\nand more"), 2),
        (VerificationError("the kernels are wrong"), 4),
        (MemoryError(), 5),
        (OSError(errno.ENOSPC, "No space left on device"), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_run_that_ends_before_its_gates_is_an_error(error: BaseException, code: int, tmp_path: Path) -> None:
    junit, report = tmp_path / "new" / "j.xml", tmp_path / "r.json"
    with pytest.raises(type(error)), recording("r", junit, report):
        raise error
    cases = parsed(junit)
    assert list(cases) == ["run"]
    (found,) = cases["run"]
    assert isinstance(found, junitparser.Error) and found.type == type(error).__name__
    text = str(error) or type(error).__name__
    assert found.message == text.splitlines()[0] and found.text == text
    assert json.loads(report.read_text()) == {"error": text, "error_type": type(error).__name__, "exit_code": code}


def test_a_failed_gate_that_is_raised_afterwards_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "j.xml"
    with pytest.raises(CompressorError), recording("r", file, None) as recorder:
        recorder.end(outcome())
        raise CompressorError("a gate failed")
    assert "run" not in parsed(file)


def test_a_killed_run_leaves_files_that_say_so(tmp_path: Path) -> None:
    junit, report = tmp_path / "j.xml", tmp_path / "r.json"
    junit.write_text("passed, last time")
    if (child := os.fork()) == 0:
        with recording("r", junit, report) as recorder:
            recorder.begin(tmp_path / "bundle")
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    (found,) = parsed(junit)["run"]
    assert isinstance(found, junitparser.Error) and "has not ended" in found.message
    assert json.loads(report.read_text())["exit_code"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j.xml", "r.json"]


@given(name=st.text(max_size=30), message=st.text(max_size=60))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_becomes_xml(name: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "j.xml"
    write_junit(file, name, checks=[Check(name, False, message)], error=("E", message))
    (failure,) = parsed(file)["run"]
    plain = re.sub(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", lambda c: ascii(c[0])[1:-1], message)
    assert (failure.text or "").replace("\r", "\n") == plain.replace("\r\n", "\n").replace("\r", "\n")


def test_control_characters_are_written_as_escapes(tmp_path: Path) -> None:
    write_junit(tmp_path / "j.xml", "r", error=("E", "a\x1b[31m \0 \ud800 \uffff <&>\"' é"))
    (found,) = parsed(tmp_path / "j.xml")["run"]
    assert found.message == "a\\x1b[31m \\x00 \\ud800 \\uffff <&>\"' é"


def test_the_report_is_json_also_for_numbers_that_json_lacks(tmp_path: Path) -> None:
    write_report(tmp_path / "r.json", outcome_content(outcome()))
    content = json.loads((tmp_path / "r.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert content["perplexity"] == "inf"
    assert content["gates"] == {"perplexity_increase": False, "weight_bytes": True, "latency_ms": False}
    assert content["gate_results"][0]["measured"] == 0.041
    assert set(content) >= {"bundle", "kernel_error", "sites", "passes", "notes"}


def a_folder(root: Path) -> Path:
    (root / "folder").mkdir()
    return root / "folder"


def below_a_file(root: Path) -> Path:
    (root / "file").write_text("precious")
    return root / "file" / "j.xml"


def a_loop(root: Path) -> Path:
    (root / "loop").symlink_to("loop")
    return root / "loop"


@pytest.mark.parametrize("make", [a_folder, below_a_file, a_loop, lambda root: root / "bundle" / "j.xml"])
@pytest.mark.parametrize("first", [True, False])
def test_a_place_that_cannot_be_written_to_is_found_at_once(
    make: Callable[[Path], Path], first: bool, tmp_path: Path
) -> None:
    bad, good = make(tmp_path), tmp_path / "good"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=r"choose another|may write to"):  # noqa: SIM117
        with recording("r", *((bad, good) if first else (good, bad)), tmp_path / "bundle"):
            pytest.fail("began to work")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_report_inside_the_bundle_that_the_recipe_names(tmp_path: Path) -> None:
    inside = tmp_path / "bundle" / "j.xml"
    with pytest.raises(UsageError, match="lies inside the bundle"), recording("r", inside, None) as recorder:
        recorder.begin(tmp_path / "bundle")
    with pytest.raises(UsageError, match="both"), recording("r", tmp_path / "x", tmp_path / "x"):
        pytest.fail("began to work")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["begin", "end"])
def test_a_full_disk(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CompressorError, match="No space left on device"):  # noqa: SIM117
        with recording("r", tmp_path / "j.xml", tmp_path / "r.json") as recorder:
            if step == "end":
                recorder.begin(None)
            monkeypatch.setattr("os.fsync", full)
            recorder.begin(None) if step == "begin" else recorder.end(outcome())
    assert sorted(path.name for path in tmp_path.iterdir()) == ([] if step == "begin" else ["j.xml", "r.json"])
    if step == "end":
        (found,) = parsed(tmp_path / "j.xml")["run"]
        assert "has not ended" in found.message  # whole, and not a success

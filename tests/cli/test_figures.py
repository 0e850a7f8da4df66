"""Figures as people read them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from compressor.cli.figures import plot, stdout_console
from compressor.progress import _Count
from compressor.report.figures import figure, label, quantity, ratio


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("perplexity", "perplexity"),
        ("decode_tokens_per_s", "decode tokens/s"),
        ("first_token_ms", "first token, ms"),
        ("load_s", "load, s"),
        ("weight_bytes", "weight bytes"),
    ],
)
def test_names_for_people(key: str, shown: str) -> None:
    assert label(key) == shown


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("tokens", 12345, "12,345"),
        ("operations", 3.90054e10, "39,005,400,000"),
        ("perplexity", 17.54321987, "17.5432"),
        ("kl_divergence", 1.25e-7, "1.25e-07"),
        ("weight_bytes", 2_650_000, "2.65 MB"),
        ("verified", True, "True"),
        ("note", None, ""),
        ("name", "W4A16", "W4A16"),
    ],
)
def test_figures_for_people(key: str, value: Any, shown: str) -> None:
    assert quantity(key, value) == shown


def test_operations_have_a_unit() -> None:
    assert [figure(n, "ops") for n in (12, 4096, 3.90054e10, 2e13)] == ["12", "4.10 k", "39.01 G", "20.00 T"]


def test_a_narrow_terminal_gets_lines_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "30")
    assert stdout_console().width == 72
    monkeypatch.setenv("COLUMNS", "120")
    assert stdout_console().width == 120


def test_small_ratios_keep_two_digits() -> None:
    assert [ratio(ours, 200.0) for ours in (500.0, 20.0, 0.5)] == ["2.50x", "0.10x", "0.0025x"]
    assert ratio(1.0, None) == ""


def test_a_task_that_takes_longer_than_expected_says_so() -> None:
    task = _Count(1)
    assert task.state(5.0, 19.0) == "goes on since 5.0 s, about 14 s left"
    assert task.state(30.0, 19.0) == "goes on since 30 s, longer than expected"
    assert task.state(30.0, None) == "goes on since 30 s"


def test_a_plot_has_each_point_in_its_place() -> None:
    lines = plot([(1.0, 0.0, "a"), (3.0, 2.0, "b"), (2.0, 1.0, "c")], columns=5, rows=3)
    assert lines == [
        "        2 |    b",
        "          |  c",
        "        0 |a",
        "          '-----",
        "           1   3",
    ]
    assert plot([(1.0, 1.0, "a")], columns=3, rows=2)[1] == "        1 |a"

"""Threads that sleep while they wait, and measured processes that know nothing of it."""

from __future__ import annotations

import os

import pytest

from compressor.host import threads


def test_the_policy_is_ours_unless_the_user_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_set_here", set())
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    threads.wait_passively()
    assert os.environ["OMP_WAIT_POLICY"] == threads.given_environment()["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    threads.wait_passively()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert threads.given_environment() == {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}

"""How the threads of PyTorch's operators wait for each other, which is decided before torch is imported."""

from __future__ import annotations

import os

_POLICY = "OMP_WAIT_POLICY"
_set_here: set[str] = set()


def wait_passively() -> None:
    """Let threads sleep where they wait, unless the user's environment says something else.

    By default they spin.  Where another process wants a core as well, those that spin keep those that work from
    working: with two threads and three busy processes on two cores, GPTQ takes ten times as long.
    """
    if _POLICY not in os.environ:
        os.environ[_POLICY] = "PASSIVE"
        _set_here.add(_POLICY)


def waits_passively() -> bool:
    """Return whether a policy is set, by us or by the user."""
    return _POLICY in os.environ


def given_environment() -> dict[str, str]:
    """Return the environment as the user gave it, for processes that are measured."""
    return {name: value for name, value in os.environ.items() if name not in _set_here}

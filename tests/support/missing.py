"""Skip a test for want of a tool, and let it fail in CI, which runs every test."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip_or_fail(reason: object) -> NoReturn:
    """Skip the test that is running, or the module that is being read; in CI it fails."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; CI runs every test: install it in start.py", pytrace=False)
    pytest.skip(str(reason), allow_module_level=True)

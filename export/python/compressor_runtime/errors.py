"""Errors of the run-time, with the exit codes of the command line."""

from __future__ import annotations

from typing import ClassVar


class BundleError(Exception):
    """A bundle that cannot be used here; the message says what is wrong and what to do."""

    exit_code: ClassVar[int] = 1


class BrowserBundleError(BundleError):
    """A bundle for browsers, which this run-time does not read."""


class DamagedBundleError(BundleError):
    """A file of the bundle that differs from what the manifest says of it."""

    exit_code: ClassVar[int] = 4


class RequestError(BundleError, ValueError):
    """An argument that this model cannot serve."""

    exit_code: ClassVar[int] = 2

"""Run lm-eval's own command on a bundle."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressor.errors import UsageError, first_line


def run_harness(bundle: Path, options: dict[str, Any], arguments: Sequence[str]) -> None:
    """Run ``lm-eval run`` on a bundle, and let it print its table.

    Args:
        options: of :class:`compressor.evaluate.harness.bundle_model.BundleModel`.
        arguments: of ``lm-eval run``: ``--tasks NAMES`` and more, without ``--model`` and ``--model_args``.
    Raises:
        BundleError: the folder holds no bundle that can be read here.
        UsageError: lm-eval is not installed, or does not know what is asked for.
    """
    from compressor.runtime import read_manifest

    read_manifest(bundle)  # before lm-eval looks through its thousands of tasks
    try:
        from lm_eval._cli.run import Run

        import compressor.evaluate.harness.bundle_model  # noqa: F401 (registers the model)
    except ImportError as error:
        raise UsageError(f"lm-eval: {error}; pip install 'compressor[eval]' has it") from error
    parser = argparse.ArgumentParser(prog="compress lm-eval BUNDLE", allow_abbrev=False)
    Run.create(parser.add_subparsers())
    given = json.dumps({"bundle": str(bundle), **options})
    asked = parser.parse_args(["run", *arguments, "--model", "compressor", "--model_args", given])
    try:
        asked.func(asked)
    except (KeyError, ValueError, FileNotFoundError) as error:  # how lm-eval says that a task or a file is not there
        raise UsageError(f"lm-eval: {first_line(error)}") from error

"""Run the ``compress`` command as ``python -m compressor``."""

from __future__ import annotations

from compressor.cli.commands import main

if __name__ == "__main__":
    main(prog_name="compress")

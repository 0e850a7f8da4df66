"""The command line: continue a prompt."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from compressor_runtime.bundle import load
from compressor_runtime.errors import BundleError
from compressor_runtime.speculation.kinds.registry import SPECULATIONS


def main(arguments: Sequence[str] | None = None) -> int:
    """Print text that a bundle generates; return the process's exit code."""
    parser = argparse.ArgumentParser(description="Generate text from a Compressor bundle.")
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("bundle", nargs="?", type=Path, default=here, help="the bundle's folder (default: %(default)s)")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--max-tokens", type=int, default=64, help="at most so many new tokens (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=0, help="sample among the k likeliest; 0 for no limit")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest with this probability")
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")
    parser.add_argument(
        "--speculate",
        choices=("off", *SPECULATIONS),
        help="draft tokens, and verify several in a step; the text is the same, unless the manifest says that such "
        "drafts are lossy (default: as the bundle's recipe says)",
    )
    parser.add_argument("--threads", type=int, help="worker threads (default: the physical cores available)")
    options = vars(parser.parse_args(arguments))
    try:
        bundle = load(options.pop("bundle"), threads=options.pop("threads"))
        pieces = bundle.generate(options.pop("prompt"), **options)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
        if (counts := pieces.speculation or pieces.depth) is not None:
            print(counts, file=sys.stderr)
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered goes nowhere
        return 141
    return 0

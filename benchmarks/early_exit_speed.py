"""Speed of tokens that leave early, and of texts that are given up, against what they lose: on one bundle with exits.

    compress run early_exit_x86 -o BUNDLE --set checkpoint=TRAINED
    compress run speculate_lookup_x86 -o WITHOUT --set model=TRAINED --set speculate=null
    python benchmarks/early_exit_speed.py BUNDLE [--without WITHOUT] [--prompts 24] [--tokens 96] [--threads 1]
                                          [--markdown FILE]

Continues prompts of 128 tokens of held-out documentation and code greedily, with each threshold of confidence in turn,
and with all blocks; the order of settings changes from prompt to prompt.  Agreement is the share of a text before its
first difference from that of all blocks; times are medians over the prompts of the processor's time for a token,
relative to that of all blocks on the same prompt, by the bundle of the same weights and formats without exits if there
is one.  With ``give_up`` a text ends where its confidences at the exit are
below it on average: what it would still have cost is spared, and what it would have said is lost.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from compressor_runtime.generation import Depth, checked_sampler

from compressor.data.text import load_evaluation
from compressor.evaluate.generation.continuations import agreement
from compressor.host.resources import resource
from compressor.recipe.recipe import load_recipe
from compressor.runtime import load

PROMPT = 128
THRESHOLDS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
GIVE_UP = (0.1, 0.2, 0.3, 0.4)
NEVER = 2.0
"""A confidence that no token has."""


class Setting:
    """A bundle, thresholds, and what texts with them were like."""

    def __init__(self, bundle: Any, name: str, threshold: float | None, give_up: float = 0.0) -> None:
        self.bundle, self.name, self.threshold, self.give_up = bundle, name, threshold, give_up
        self.texts: list[list[int]] = []
        self.seconds: list[float] = []  # of a token behind the first
        self.blocks: list[float] = []  # of a token
        self.heads: list[float] = []

    def continue_text(self, prompt: list[int], count: int, blocks: int) -> None:
        """Write a text, and book what it took; of so many blocks."""
        depth = None
        if self.threshold is not None:
            exits, depth = self.bundle.model["exits"], Depth(blocks)
            exits |= {"thresholds": [self.threshold] * len(exits["blocks"]), "give_up": self.give_up}
        tokens = self.bundle.continued(prompt, count, checked_sampler(0.0, 0, 1.0, None), [], depth)
        text = [next(tokens)]  # which the prompt gives
        begin = time.process_time()
        text += tokens
        self.seconds.append((time.process_time() - begin) / max(1, len(text) - 1))
        self.texts.append(text)
        self.blocks.append(float(blocks) if depth is None else depth.blocks_per_token)
        self.heads.append(1.0 if depth is None else depth.heads / max(1, depth.tokens))


def row(setting: Setting, whole: Setting) -> str:
    """Return the line of a setting's figures."""
    pairs = list(zip(setting.texts, whole.texts, strict=True))
    same = [float(agreement(np.array([ours]), np.array([theirs[: len(ours)]]))[0]) for ours, theirs in pairs]
    spared = 1 - sum(len(ours) for ours, _ in pairs) / sum(len(theirs) for _, theirs in pairs)
    faster = sorted(theirs / ours for ours, theirs in zip(setting.seconds, whole.seconds, strict=True))
    low, high = (float(np.quantile(faster, share)) for share in (0.25, 0.75))
    cells = [
        f"{statistics.fmean(setting.blocks):.2f}",
        f"{statistics.fmean(setting.heads):.2f}",
        f"{statistics.fmean(same):.1%}",
        f"{spared:.1%}",
        f"{statistics.median(faster):.2f} ({low:.2f} to {high:.2f})",
    ]
    return f"| {setting.name} | {' | '.join(cells)} |"


def main() -> None:
    """Write the texts in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    for name, value in (("prompts", 24), ("tokens", 96), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--without", type=Path, help="bundle of the same weights and formats without exits")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    bundle = load(options.bundle, threads=options.threads)
    blocks = int(bundle.model["exits"]["of"])
    text = load_evaluation(load_recipe("early_exit_x86").evaluation, None, resource("models") / "reference")[0]
    begins = np.arange(options.prompts) * (len(text) // options.prompts)
    settings = [
        Setting(bundle, "all blocks", None),
        Setting(bundle, "all blocks, in stages", NEVER),
        *(Setting(bundle, f"threshold {value:g}", value) for value in THRESHOLDS),
        *(Setting(bundle, f"all blocks, give up below {value:g}", NEVER, value) for value in GIVE_UP),
    ]
    if options.without:
        settings.insert(0, Setting(load(options.without, threads=options.threads), "without exits", None))
    for number, begin in enumerate([0, *begins]):
        turn = number % len(settings)
        for setting in (*settings[turn:], *settings[:turn]):
            setting.continue_text(text[begin : begin + PROMPT].tolist(), options.tokens, blocks)
    for setting in settings:  # the first prompt comes twice, and does not count before
        for values in (setting.texts, setting.seconds, setting.blocks, setting.heads):
            del values[0]
    heads = ("blocks a token", "heads a token", "agreement", "tokens spared", "times as fast a token")
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    lines += [row(setting, settings[0]) for setting in settings]
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()

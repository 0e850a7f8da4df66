"""Tiny random models of many text families through capture, GPTQ W4A16 and a bundle, against transformers in float64.

    python benchmarks/families.py [NAME ...] [--markdown FILE]

Families are those of tests/support/families.py, encoder_decoders.py and ctc_models.py, built from transformers' own
configurations and saved as folders.  Each is captured, its linears (but for the head) are quantised to W4A16_G32 by
GPTQ on random tokens (of speech, on noise), and its x86 bundle is written with `tune: off`.  The oracle is
transformers' model in float64 (float32 where it cannot), with the weights that the packed ones stand for.  A row has
the bundle's error in the logits of a prompt (of each frame of a sound; in hidden states of padded texts, for encoders),
and the difference between a prompt at once and in steps; both are relative, root mean square.  Where a family is
refused, the row has the message.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bundles import write_bundle

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
import ctc_models
import encoder_decoders
import families
from packed_models import SCHEME, exact, heads_of, random_samples, take_packed_weights

import compressor
from compressor.capture.capture import capture
from compressor.codegen.backend import make_backend
from compressor.data.text import Samples
from compressor.errors import CompressorError
from compressor.graph.kinds.encoder_decoder import Pair
from compressor.graph.model import SourceInfo
from compressor.recipe.recipe import Recipe

LIMIT = 1e-4  # of the error; AMX takes 16 of the 24 bits of activations


def main() -> None:
    """Measure every family and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    lines = [
        "| family | kind | captured | kernels' error | prompt against steps | seconds |",
        "|---|---|---|---|---|---|",
    ]
    passed, total, share = 0, 0, "no family of that name"
    both = {**encoder_decoders.TEXT, **encoder_decoders.SPEECH}
    decoders = {**families.DECODERS, **families.RECURRENT}
    tables = {
        "decoder": (decoders, lambda cls, given: measure(cls, given, True)),
        "encoder": (families.ENCODERS, lambda cls, given: measure(cls, given, False)),
        "encoder-decoder": (both, measure_both),
        "frames of sounds": (ctc_models.CTC, measure_frames),
    }
    for kind, (table, measured) in tables.items():
        for name, (cls, given) in table.items():
            if options.names and name not in options.names:
                continue
            total += 1
            begin = time.perf_counter()
            try:
                error, steps = measured(cls, given)
                passed += error < LIMIT and steps < 1e-5
                difference = f"{steps:.1e}" if "decoder" in kind else ""
                row = f"{name} | {kind} | yes | {error:.1e} | {difference}"
            except CompressorError as refusal:
                reason = " ".join(str(refusal).replace("|", "/").split())
                row = f"{name} | {kind} | no: {type(refusal).__name__}: {reason} | |"
            lines.append(f"| {row} | {time.perf_counter() - begin:.0f} |")
            print(lines[-1], flush=True)
            share = f"{passed} of {total} families pass: error below {LIMIT:g}, prompt against steps below 1e-5."
            if options.markdown:
                versions = f"transformers {transformers.__version__}, torch {torch.__version__}, {SCHEME}"
                text = f"# Families\n\n`python benchmarks/families.py`, {versions}. {share}\n\n"
                options.markdown.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")
    print(share)


def measure(cls: str, given: dict[str, Any], decoder: bool) -> tuple[float, float]:
    """Return the bundle's error, and the difference between a prompt and steps; 0 for encoders."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        model = families.save(folder, cls, given, decoder)
        dense, heads = capture(folder), heads_of(model) if decoder else []
        recipe = recipe_for(folder, "gptq", heads)
        make_backend(recipe.target.build(), None).check(dense)
        samples = random_samples(families.VOCAB, families.LENGTH)
        graph, _ = write_bundle(dense, recipe, samples, Path(scratch) / "bundle")
        take_packed_weights(model, graph)
        bundle = compressor.load(Path(scratch) / "bundle")
        ids = np.random.default_rng(1).integers(3, families.VOCAB, (2, families.LENGTH))
        if not decoder:
            mask = np.ones(ids.shape, np.float32)
            mask[1, 8:] = 0
            expected = exact(model, torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
            return relative(bundle.encode(ids, mask)[mask > 0], expected[mask > 0]), 0.0
        session = bundle.session(batch=2)
        prompt = session.step(ids, np.arange(families.LENGTH))
        session = bundle.session(batch=2)
        steps = [session.step(ids[:, :5], np.arange(5)), *(session.step(ids[:, [i]]) for i in range(5, ids.shape[1]))]
        return relative(prompt, exact(model, torch.from_numpy(ids)).numpy()), relative(np.concatenate(steps, 1), prompt)


def recipe_for(folder: Path, name: str, heads: list[str], targets: str = "re:.*") -> Recipe:
    """Return a recipe whose only pass packs all linears but the heads."""
    step = {name: {"scheme": SCHEME, "targets": targets, **({"ignore": heads} if heads else {})}}
    return Recipe.from_dict({"model": str(folder), "passes": [step], "target": "x86"})


def with_sounds(samples: Samples, info: SourceInfo) -> Samples:
    """Return sounds, which are noise, each with a sample's tokens."""
    noise = np.random.default_rng(3).normal(0, 0.1, (len(samples.ids), 1, *info.sized(6000))).astype(np.float32)
    pairs = [Pair(torch.from_numpy(sound), ids[None]) for sound, ids in zip(noise, samples.ids, strict=True)]
    return dataclasses.replace(samples, ids=pairs)


def measure_both(cls: str, given: dict[str, Any]) -> tuple[float, float]:
    """Return the same of an encoder-decoder, whose second source is padded where it is text."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        model = encoder_decoders.save(folder, cls, given)
        dense, heads = capture(folder), heads_of(model)
        recipe = recipe_for(folder, "gptq", heads)
        samples = random_samples(families.VOCAB, families.LENGTH)
        if dense.meta["model"].hears:
            samples = with_sounds(samples, dense.meta["model"].encoder_source)
        graph, _ = write_bundle(dense, recipe, samples, Path(scratch) / "bundle")
        take_packed_weights(model, graph)
        bundle, rng = compressor.load(Path(scratch) / "bundle"), np.random.default_rng(1)
        info = dense.meta["model"].encoder_source
        ids = rng.integers(3, families.VOCAB, (2, families.LENGTH))
        if info.reads == "audio":
            source, mask = rng.normal(0, 0.1, (2, *info.sized(6000))).astype(np.float32), None
            read: dict[str, Any] = {model.main_input_name: torch.from_numpy(source).double()}
        else:
            source, mask = rng.integers(3, families.VOCAB, (2, 9)), np.ones((2, 9), np.float32)
            mask[1, 5:] = 0
            read = {"input_ids": torch.from_numpy(source), "attention_mask": torch.from_numpy(mask).long()}
        with torch.no_grad():
            expected = model.double()(**read, decoder_input_ids=torch.from_numpy(ids)).logits.numpy()
        prompt = bundle.session(2, 4, source, mask).step(ids, np.arange(families.LENGTH))
        session = bundle.session(2, 4, source, mask)
        steps = [session.step(ids[:, :5], np.arange(5)), *(session.step(ids[:, [i]]) for i in range(5, ids.shape[1]))]
        return relative(prompt, expected), relative(np.concatenate(steps, 1), prompt)


def measure_frames(cls: str, given: dict[str, Any]) -> tuple[float, float]:
    """Return the error in the logits of two sounds' frames, and 0, since such models have no steps."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        model = ctc_models.save(folder, cls, given)
        dense, recipe = capture(folder), recipe_for(folder, "gptq", ["lm_head"], "Linear")  # no convolutions
        make_backend(recipe.target.build(), None).check(dense)
        rng = np.random.default_rng(3)
        sounds = [torch.from_numpy(rng.normal(0, 1, (1, 5000)).astype(np.float32)) for _ in range(8)]
        samples = dataclasses.replace(random_samples(families.VOCAB, families.LENGTH), ids=sounds)
        graph, _ = write_bundle(dense, recipe, samples, Path(scratch) / "bundle")
        take_packed_weights(model, graph)
        heard = rng.normal(0, 1, (2, 6000)).astype(np.float32)
        expected = model.double()(torch.from_numpy(heard).double()).logits.numpy()
        return relative(compressor.load(Path(scratch) / "bundle").run(heard), expected), 0.0


def relative(got: Any, expected: Any) -> float:
    """Return the root mean square of the error over that of what is expected."""
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


if __name__ == "__main__":
    main()

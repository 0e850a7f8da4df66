"""Tests that `pytest --whole` runs alone: others, which always run, go through the same code (decision 0128)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LEFT_OUT: Mapping[str, int | tuple[str, ...]] = {
    "capture/images/test_classifier.py::test_a_graph_computes_what_the_model_does": 4,
    "capture/pairs/test_program.py::test_a_graph_computes_what_the_model_does": ("AltCLIP", "SigLIP"),
    "capture/seq2seq/test_seq2seq.py::test_a_prompt_and_steps_are_the_models": ("M2M100", "Marian", "UMT5"),
    "capture/seq2seq/test_seq2seq.py::test_models_of_speech": ("Moonshine", "Speech2Text"),
    "capture/test_families.py::test_decoder": (
        "GPT-BigCode",
        "Llama, tied",
        "MPT",
        "MVP, decoder",
        "OLMoE",
        "OPT",
        "Phi",
        "Qwen 3 VL, text",
        "Qwen 3, experts",
        "RoBERTa, decoder",
    ),
    "capture/test_families.py::test_encoder": ("BERT", "DeBERTa 2", "DistilBERT", "ELECTRA", "MPNet", "T5 encoder"),
    "codegen/gpu/attention/test_kernels.py::test_cached_attention": 3,
    "codegen/gpu/attention/test_packed.py::test_packed_attention": 3,
}
"""By test: how many of its cases always run, the first ones; or the names of those that do not."""


def always_runs(items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return collected tests that always run, and those that are left out."""
    seen: dict[str, int] = {}
    kept, others = list[Any](), list[Any]()
    for item in items:
        test, _, case = item.nodeid.removeprefix("tests/").partition("[")
        seen[test] = seen.get(test, 0) + 1
        left_out = LEFT_OUT.get(test, ())
        runs = seen[test] <= left_out if isinstance(left_out, int) else case.removesuffix("]") not in left_out
        (kept if runs else others).append(item)
    return kept, others

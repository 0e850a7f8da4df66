"""Cases of onnx.backend.test: one of each operator is right, still (benchmarks/onnx_cases.py runs all of them)."""

from __future__ import annotations

from pathlib import Path

import onnx_case_runner
import pytest

GOLDEN = Path(__file__).parents[2] / "golden" / "onnx_operators.txt"
LISTED = dict(line.split() for line in GOLDEN.read_text(encoding="utf-8").splitlines())


@pytest.fixture(scope="module")
def cases() -> dict[str, onnx_case_runner.Case]:
    return {case.name: case for case in onnx_case_runner.load_cases()}


def test_one_case_of_each_operator_is_right(cases: dict[str, onnx_case_runner.Case]) -> None:
    assert len(LISTED) > 140
    wrong = {}
    for operator, name in LISTED.items():
        assert cases[name].operators == [operator]
        verdict = onnx_case_runner.judge(cases[name])
        if verdict.outcome != onnx_case_runner.RIGHT:
            wrong[name] = verdict
    assert not wrong


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("test_nonzero_example", "NonZero 'result': the size of its result depends on data"),
        ("test_bernoulli", "Bernoulli 'y': its result is random"),
        ("test_if_seq", "If 'res': control flow"),
        ("test_string_concat", "StringConcat 'result': strings"),
        ("test_identity_opt", "'opt_in' is a optional; tensors are read"),
        ("test_add_uint64", "Add 'sum': it computes with torch.uint64"),
        ("test_deform_conv_with_mask_bias", "DeformConv 'Y': this operator is not read"),
        ("test_dft_inverse", "DFT 'y': this operator is not read"),
    ],
)
def test_what_is_refused_is_named(cases: dict[str, onnx_case_runner.Case], name: str, why: str) -> None:
    verdict = onnx_case_runner.judge(cases[name])
    assert verdict.outcome == onnx_case_runner.REFUSED and why in verdict.why, verdict

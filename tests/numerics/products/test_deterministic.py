"""Sums and factorisations: right, and the same bits on any number of threads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from compressor.numerics.products.deterministic import apply, inverse_cholesky, total

BITS = """
import hashlib, json, sys, torch
from compressor.numerics.products.deterministic import apply, inverse_cholesky, total
torch.set_num_threads(int(sys.argv[1]))
generator = torch.Generator().manual_seed(0)
found = {}
for size in (5, 64, 177, 352, 700):
    X = torch.randn(2 * size, size, generator=generator, dtype=torch.float64)
    R = inverse_cholesky(X.t() @ X)
    found[f"cholesky {size}"] = hashlib.sha256(R.numpy().tobytes()).hexdigest()
    found[f"sum {size}"] = total(X).item().hex()
    found[f"sigmoid {size}"] = hashlib.sha256(apply(torch.sigmoid, X.float()).numpy().tobytes()).hexdigest()
print(json.dumps(found))
"""


def bits(threads: int) -> dict[str, str]:
    done = subprocess.run([sys.executable, "-c", BITS, str(threads)], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    first = bits(1)
    assert bits(2) == first and bits(3) == first


@pytest.mark.parametrize("size", [1, 15, 16, 17, 33, 250])
def test_the_inverse_factor_is_that_of_lapack(size: int) -> None:
    X = torch.randn(size + 20, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    A = X.t() @ X + 0.1 * torch.eye(size, dtype=torch.float64)
    R = inverse_cholesky(A.clone())
    assert R is not None and R.shape == (size, size) and torch.equal(R, R.tril())
    expected = torch.linalg.inv(torch.linalg.cholesky(A))
    torch.testing.assert_close(R, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))
    torch.testing.assert_close(R.t() @ R @ A, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [3, 40])
@pytest.mark.parametrize("place", [0, -1])
def test_what_is_not_positive_definite_has_none(size: int, place: int) -> None:
    A = torch.eye(size, dtype=torch.float64)
    A[place, place] = -1e-9
    assert inverse_cholesky(A) is None


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 3_000_001])
def test_a_sum_is_the_sum(count: int) -> None:
    values = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(total(values)) == pytest.approx(float(values.sum()), rel=1e-13)


def test_a_function_is_applied_to_every_element() -> None:
    values = torch.linspace(-120, 120, 50_001).view(3, -1).t()  # not contiguous, and more than a piece
    torch.testing.assert_close(apply(torch.sigmoid, values), torch.sigmoid(values), rtol=1e-6, atol=0)
    assert apply(torch.sigmoid, torch.empty(0, 4)).shape == (0, 4)

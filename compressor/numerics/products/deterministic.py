"""Sums, factorisations and functions whose last bit does not depend on the number of threads.

A GEMM computes each output element on one thread, so its bits do not depend on the thread count.  Full reductions and
LAPACK's factorisations and triangular solves do depend on it, and are rebuilt here from GEMMs, and from pieces that are
too small to be divided among threads.  So are element-wise functions, which round whole vectors in one way and the
remainder at the end of a thread's share in another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

EVEN = 16
"""Products of float32 matrices whose sizes are not multiples of this are divided among threads in other ways."""
BLOCK = 512
"""Columns of a symmetric matrix per step of an algorithm that skips its lower half."""
_PIECE = 1024
_SMALL = 1 << 11  # elements, which PyTorch leaves to one thread


def even(matrix: Tensor) -> Tensor:
    """Pad with rows and columns of zeros up to the next multiples of :data:`EVEN`."""
    return pad(matrix, (0, -matrix.shape[1] % EVEN, 0, -len(matrix) % EVEN))


def total(values: Tensor) -> Tensor:
    """Sum all elements, in pieces of one size; returns a tensor without dimensions."""
    values = values.reshape(-1)
    while len(values) > _PIECE:
        values = pad(values, (0, -len(values) % _PIECE)).view(-1, _PIECE).sum(1)
    return values.sum()


def quadratic(D: Tensor, H: Tensor) -> Tensor:
    """Return tr(D H D^T) for a symmetric H; only blocks on and above the diagonal are read: half of the product.

    Args:
        D: float64 or float32 [rows, n]; products are in its type.
        H: float32 or float64 [n, n]; never whole in float64 beside that.
    """
    found = torch.zeros((), dtype=torch.float64)
    for first in range(0, len(H), BLOCK):
        part, columns = D[:, first : first + BLOCK], slice(first, first + BLOCK)
        above, diagonal = H[:first, columns].to(D.dtype), H[columns, columns].to(D.dtype)
        found += total(((2 * product(D[:, :first], above) + product(part, diagonal)) * part).double())
    return found


def product(A: Tensor, B: Tensor) -> Tensor:
    """Return A @ B for float32 or float64 matrices of any size."""
    if A.dtype == torch.float64:
        return A @ B
    return (even(A) @ even(B))[: len(A), : B.shape[1]]


def column_sums(rows: Tensor) -> Tensor:
    """Sum each column in float64, each on one thread: [n, columns] -> [columns]."""
    return rows.double().t().contiguous().sum(1)


def few_bits(values: Tensor) -> Tensor:
    """Round to a mantissa of ten bits: the last bits of a model's outputs depend on the number of threads."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp(torch.round(mantissa * 1024) / 1024, exponent)


def apply(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply an element-wise function, such as torch.sigmoid, in pieces; the result is contiguous."""
    pieces = torch.split(values.reshape(-1), _SMALL)
    return torch.cat([function(piece) for piece in pieces]).view(values.shape)


def inverse_cholesky(A: Tensor) -> Tensor | None:
    """Return lower R with A^-1 = R^T R, the inverse of A's Cholesky factor; None if A is not positive definite.

    With A = [[B, C^T], [C, D]] and the R of B, the factor's lower left is C R^T, and the same again on what that leaves
    of D gives the rest.

    Args:
        A: float64 [n, n], symmetric; it is overwritten, by R where n is a multiple of 16.
    """
    size = len(A)
    if odd := -size % EVEN:
        padded = torch.eye(size + odd, dtype=A.dtype)
        padded[:size, :size] = A
        R = inverse_cholesky(padded)
        return None if R is None else R[:size, :size].contiguous()
    if size == EVEN:
        L, failed = torch.linalg.cholesky_ex(A)
        if int(failed):
            return None
        return A.copy_(torch.linalg.solve_triangular(L, torch.eye(size, dtype=A.dtype), upper=False))
    half = size // 2 // EVEN * EVEN
    upper = inverse_cholesky(A[:half, :half])
    if upper is None:
        return None
    corner = A[half:, :half] @ upper.t()
    A[half:, half:] -= corner @ corner.t()
    lower = inverse_cholesky(A[half:, half:])
    if lower is None:
        return None
    A[half:, :half] = -lower @ (corner @ upper)
    A[:half, half:] = 0.0
    return A


def half_product(columns: int) -> float:
    """Operations an element of the upper half of a symmetric matrix, blocks on the diagonal whole, and its rows."""
    return 1 + min(1.0, BLOCK / columns)

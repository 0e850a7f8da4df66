"""Orthogonal matrices that spread every channel evenly over all others, as small factors.

Multiplying by a Hadamard matrix behind random signs makes outliers vanish in the mean of all channels (Ashkboos et al.
2024, QuaRot, arXiv 2404.00456, section 3).  The matrix of a width is the Kronecker product of factors, each applied on
an axis of its own: the product with a 4096 x 4096 matrix takes three with 16 x 16.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_LARGEST = 16  # of Sylvester's factors


@functools.cache
def factors(width: int) -> tuple[Tensor, ...]:
    """Orthogonal float64 matrices whose Kronecker product is one [width, width] with an even first column.

    With width = m * 2^k: Sylvester's matrices for the powers of two, and for the rest Paley's (1933) where there is a
    j <= k with m * 2^j = q + 1 (q prime, 3 modulo 4) or 2 (q + 1) (1 modulo 4).  All entries of the product have then
    the same size.  Elsewhere Hartley's cos + sin of order m, whose entries are at most sqrt(2) times as large.
    """
    odd, twos = width, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    found: list[Tensor] = []
    if odd > 1:
        paley = ((j, _paley(odd << j)) for j in range(twos + 1))
        j, matrix = next(((j, h) for j, h in paley if h is not None), (0, _hartley(odd)))
        found, twos = [matrix / matrix[0].square().sum().sqrt()], twos - j
    sylvester = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while twos:
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while twos and len(matrix) < _LARGEST:
            matrix, twos = torch.kron(matrix, sylvester), twos - 1
        found.append(matrix / len(matrix) ** 0.5)
    return tuple(found)


def is_hadamard(width: int) -> bool:
    """Whether all entries of the product of :func:`factors` have the same size, 1 / sqrt(width)."""
    return all(bool((f.abs() - len(f) ** -0.5).abs().max() < 1e-12) for f in factors(width))


def random_signs(count: int, generator: torch.Generator) -> Tensor:
    """1 and -1 by chance, float64 [count]."""
    return 2.0 * torch.randint(0, 2, (count,), generator=generator).double() - 1


def rotate(x: Tensor, signs: Tensor, width: int) -> Tensor:
    """x diag(signs) H on the last dimension, block by block where that is a multiple of H's width.

    Args:
        x: float [..., n], n a multiple of ``width``; on the meta device for its shape alone.
        signs: float64 [n].
    Returns:
        float64 [..., n].
    """
    found = factors(width)
    if x.is_meta:
        return x.double()
    y, stride = x.double() * signs, width
    for factor in found:
        stride //= len(factor)
        rows = y.reshape(-1, len(factor)) if stride == 1 else y.reshape(-1, len(factor), stride)
        y = rows @ factor if stride == 1 else factor.t() @ rows
    return y.view(x.shape)


def _paley(size: int) -> Tensor | None:
    """Return Paley's Hadamard matrix, float64 [size, size] with ones in the first column; None if there is none."""
    for q, first_kind in ((size - 1, True), (size // 2 - 1, False)):
        if size % 4 or q % 4 != (3 if first_kind else 1) or not _is_prime(q):
            continue
        character = -torch.ones(q, dtype=torch.float64)
        character[torch.arange(1, q).square() % q] = 1
        character[0] = 0
        index = torch.arange(q)
        core = torch.zeros(q + 1, q + 1, dtype=torch.float64)
        core[1:, 1:] = character[(index[:, None] - index[None]) % q]
        core[0, 1:], core[1:, 0] = 1, -1 if first_kind else 1
        unit = torch.eye(q + 1, dtype=torch.float64)
        if first_kind:
            matrix = unit + core
        else:
            matrix = torch.kron(core, _block(1, 1, 1, -1)) + torch.kron(unit, _block(1, -1, -1, -1))
        return matrix * matrix[:, :1]
    return None


def _block(*entries: float) -> Tensor:
    return torch.tensor(entries, dtype=torch.float64).view(2, 2)


def _is_prime(q: int) -> bool:
    return q > 1 and all(q % d for d in range(2, int(q**0.5) + 1))


def _hartley(size: int) -> Tensor:
    """cos(2 pi i j / n) + sin(2 pi i j / n), symmetric; divided by sqrt(n) orthogonal (Hartley 1942)."""
    index = torch.arange(size)
    angle = (2 * torch.pi / size) * ((index[:, None] * index) % size).double()
    return torch.cos(angle) + torch.sin(angle)

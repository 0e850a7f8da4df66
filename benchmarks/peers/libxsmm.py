"""LIBXSMM's block-sparse int8 product, built from its sources, for `benchmarks/sparsity_kernels.py --libxsmm FOLDER`.

FOLDER holds the sources with the library made in them (README.md here says how).  Its kernels take activations that
are uint8 already and lie as they read them, and put out int32: rounding and scales, which ours have, are not in their
times.  Blocks are some rows by a multiple of four columns.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np

CHECKED_ROWS = 64


def load(folder: Path, work: Path) -> ctypes.CDLL:
    """Compile the functions that call the library, against it.

    Raises:
        SystemExit: the folder has no library, or it does not compile.
    """
    library = folder / "lib" / "libxsmm.a"
    if not library.exists():
        raise SystemExit(f"--libxsmm: {library} is not there; benchmarks/peers/README.md says how it is made")
    source, made = Path(__file__).with_suffix(".c"), work / "libxsmm_peer.so"
    command = ["cc", "-O2", "-shared", "-fPIC", f"-I{folder / 'include'}", source, library, "-ldl", "-lm", "-lpthread"]
    done = subprocess.run([*map(str, command), "-o", str(made)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"--libxsmm: {done.stderr[-600:]}")
    found = ctypes.CDLL(str(made))
    found.make.restype, found.target.restype = ctypes.c_void_p, ctypes.c_char_p
    found.make.argtypes = [ctypes.c_int] * 6
    found.run.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_uint64]
    return found


class Product:
    """A product with random weights of which a share of the blocks is left out, checked once against numpy.

    Args:
        packed: tokens that lie beside each other; divides ``tokens``.
        block: rows and columns of a block.
        copies: of the weight, for times from memory.
    Raises:
        LookupError: LIBXSMM has no such kernel.
        ArithmeticError: it computes something else.
    """

    def __init__(
        self, library: ctypes.CDLL, shape: tuple[int, int], tokens: int, packed: int, block: tuple[int, int],
        sparsity: float, copies: int,
    ) -> None:  # fmt: skip
        (rows, columns), (high, wide) = shape, block
        self._run, self.count = library.run, rows // high
        self._kernel = library.make(packed, tokens // packed, rows, columns, high, wide)
        if not self._kernel:
            raise LookupError(f"no kernel for blocks of {high}x{wide} and {packed} tokens")
        rng = np.random.default_rng(0)
        kept = rng.random((rows // high, columns // wide)) * 100 >= sparsity
        begins = np.concatenate([[0], kept.sum(1).cumsum()]).astype(np.uint32)
        places = np.nonzero(kept)[1].astype(np.uint32)
        weight = rng.integers(-127, 128, (len(places), high, wide)).astype(np.int8)
        self.parts = [(weight.copy(), begins.copy(), places.copy()) for _ in range(copies)]
        self.bytes = weight.nbytes + begins.nbytes + places.nbytes
        x = rng.integers(0, 256, (tokens, columns)).astype(np.uint8)
        laid = x.reshape(tokens // packed, packed, columns // 4, 4).transpose(0, 2, 1, 3)
        self.x, self.y = np.ascontiguousarray(laid), np.empty((tokens // packed, rows, packed), np.int32)
        self._given = [[array.ctypes.data for array in (self.x, *parts, self.y)] for parts in self.parts]
        self(0)
        dense = np.zeros((CHECKED_ROWS // high + 1, high, columns // wide, wide))
        for row in range(min(len(dense), self.count)):
            own = slice(begins[row], begins[row + 1])
            dense[row][:, places[own]] = weight[own].transpose(1, 0, 2)
        expected = x.astype(np.float64) @ dense.reshape(-1, columns)[:CHECKED_ROWS].T
        found = self.y.transpose(0, 2, 1).reshape(tokens, rows)[:, :CHECKED_ROWS]
        if not np.array_equal(found, expected):
            raise ArithmeticError(f"blocks of {high}x{wide}, {packed} of {tokens} tokens: not numpy's product")

    def __call__(self, copy: int) -> None:
        """Compute with one of the copies."""
        self._run(self._kernel, *self._given[copy], self.count)

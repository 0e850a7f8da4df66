"""How a kernel's work is divided over blocks, warps and loads, from a schedule and the shape of a weight."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.codegen.gpu.linear.fragments import Fragments


@dataclass(frozen=True)
class Streaming:
    """A kernel for few tokens: each block takes some tiles of rows, and its warps share out a tile's columns.

    Attributes:
        warps: of a block, at most 32.
        blocks: at most; two blocks of 16 warps fill a multiprocessor.
        loads: steps whose codes a warp has asked for before it multiplies the first.
        tiles: that a block multiplies by the same activations at once.
    """

    warps: int
    blocks: int
    loads: int
    tiles: int = 1


@dataclass(frozen=True)
class Tiling:
    """A kernel for many tokens: a block takes tiles of rows by blocks of eight tokens.

    Attributes:
        row_warps, token_warps, column_warps: warps of a block in each direction.
        row_tiles: tiles of 16 rows of a warp.
        token_blocks: blocks of eight tokens of a warp.
        stages: pieces of the activations in shared memory.
        steps: of columns, in a stage and column warp.
    """

    row_warps: int
    token_warps: int
    column_warps: int
    row_tiles: int
    token_blocks: int
    stages: int
    steps: int

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.row_warps * self.token_warps * self.column_warps

    @property
    def tiles(self) -> int:
        """Tiles of rows of a block."""
        return self.row_warps * self.row_tiles

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return 8 * self.token_warps * self.token_blocks


@dataclass(frozen=True)
class Share:
    """A warp's steps of a tile.

    Attributes:
        steps: of the warp, all warps the same; those beyond the last column are multiplied by zeros.
        loads: steps of a batch; ``steps`` is a multiple.
        piece: steps between two scales: of a group, or of a batch where that is less.
    """

    steps: int
    loads: int
    piece: int

    @property
    def batches(self) -> int:
        """Batches of a tile."""
        return self.steps // self.loads

    @classmethod
    def of(cls, fragments: Fragments, warps: int, loads: int) -> Share:
        """Share out a row's steps: whole groups, or parts of one, in as large batches as are asked for."""
        group = fragments.group_steps
        unit = group if group <= loads else 1
        units = -(-fragments.steps // unit)
        steps = -(-units // warps) * unit
        fitting = [n for n in range(1, min(loads, steps) + 1) if steps % n == 0 and (n % group == 0 or group % n == 0)]
        if fragments.groups == 1:
            fitting = [n for n in range(1, min(loads, steps) + 1) if steps % n == 0]
        elif group > loads:  # a batch lies within a group
            best = max(n for n in range(1, loads + 1) if group % n == 0)
            return cls(-(-steps // best) * best, best, best)
        return cls(steps, max(fitting), min(group, max(fitting)) if fragments.groups > 1 else max(fitting))

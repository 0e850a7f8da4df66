"""Where the columns of a row lie in the operands of tensor cores.

A product sums over columns, in any order that both operands share.  So a lane multiplies whole words of codes: lane
``4 * g + t`` of a warp reads chunks ``t``, ``t + 4``, ... of a step, for rows ``2 * g`` and ``2 * g + 1`` of a tile,
and activations are laid out to meet them there::

    codes        int32 [tiles, chunks, words, 16]        a lane loads two neighbouring rows of each of its chunks
    activations  [blocks of 8 tokens, steps, halves, vectors, 4 * g + t]: what lane 4 * g + t needs of token g

Activations are int8, or float16 in two halves whose sum has 22 bits of the number.  Within four columns, float16 are in
the order 0, 2, 1, 3: a mask takes bytes 0 and 2 of a word, or 1 and 3, for a register of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compressor.formats.format import Format

LANES = 4
"""Lanes that share a row."""


@dataclass(frozen=True)
class Fragments:
    """The layout for one format and number of columns.

    Attributes:
        columns: of a row.
        lane_chunks: chunks of a lane in one step.
        group_columns: columns that share both scales, of the weight and of integer activations.
    """

    fmt: Format
    columns: int
    lane_chunks: int
    group_columns: int

    @classmethod
    def of(cls, fmt: Format, columns: int) -> Fragments | str:
        """Choose the longest step of which a group is a multiple; or say why there is none."""
        act = fmt.activations.group_size if fmt.activations is not None and fmt.integer_products else 0
        group = min(fmt.columns(columns), act or fmt.columns(columns))
        return cls.with_longest_step(fmt, columns, group, fmt.chunk_columns)

    @classmethod
    def with_longest_step(cls, fmt: Format, columns: int, group: int, chunk: int) -> Fragments | str:
        """Choose the longest step of chunks of ``chunk`` columns of which a group is a multiple."""
        size = 1 if fmt.integer_products else 2
        lane = max(1, 16 // (chunk * size))
        least = max(1, 8 // chunk) if fmt.integer_products else 1
        while lane >= least:
            step = LANES * lane * chunk
            if group % step == 0 or group >= columns:
                return cls(fmt, columns, lane, group)
            lane //= 2
        step = LANES * least * chunk
        return f"groups of {group} columns of {fmt.name} on a GPU; use a multiple of {step}"

    @property
    def integer(self) -> bool:
        """Whether products are of int8."""
        return self.fmt.integer_products

    @property
    def halves(self) -> int:
        """Numbers that an activation is stored as."""
        return 1 if self.integer else 2

    @property
    def quads(self) -> int:
        """Four columns each, of a chunk."""
        return self.fmt.chunk_columns // 4

    @property
    def quad_words(self) -> int:
        """Words of 32 bits of four activations."""
        return 1 if self.integer else 2

    @property
    def step_chunks(self) -> int:
        """Chunks that a warp multiplies at once."""
        return LANES * self.lane_chunks

    @property
    def step_columns(self) -> int:
        """Columns that a warp multiplies at once."""
        return self.step_chunks * self.fmt.chunk_columns

    @property
    def steps(self) -> int:
        """Steps of a row."""
        return -(-self.columns // self.step_columns)

    @property
    def lane_words(self) -> int:
        """Words of activations of a lane, in a step and half."""
        return self.lane_chunks * self.quads * self.quad_words

    @property
    def vector(self) -> int:
        """Of those, words that are loaded at once."""
        return min(4, self.lane_words)

    @property
    def vectors(self) -> int:
        """Loads of a lane, in a step and half."""
        return self.lane_words // self.vector

    @property
    def code_words(self) -> int:
        """Words of codes of a lane and row, in a step."""
        return self.lane_chunks * self.fmt.chunk_words

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return -(-self.columns // self.group_columns)

    @property
    def group_steps(self) -> int:
        """Steps of a group; all, where there is one."""
        return self.steps if self.groups == 1 else self.group_columns // self.step_columns

    @property
    def scale_groups(self) -> int:
        """Groups that share a scale of the weight."""
        return -(-self.fmt.columns(self.columns) // self.group_columns)

    @property
    def act_span(self) -> int:
        """Groups that share a scale of the activations; 0 where a token has one."""
        act = self.fmt.activations.group_size if self.fmt.activations is not None and self.integer else 0
        return act // self.group_columns

    @property
    def act_groups(self) -> int:
        """Scales of a token's integer activations."""
        return -(-self.columns // (self.act_span * self.group_columns)) if self.act_span else 1

    def place(self, quad: Any) -> tuple[Any, Any, Any, Any]:
        """Return (step, vector, lane of a row, word) of a quad of columns of a row."""
        chunk, inner = quad // self.quads, quad % self.quads
        word = (chunk % self.step_chunks // LANES * self.quads + inner) * self.quad_words
        return chunk // self.step_chunks, word // self.vector, chunk % LANES, word % self.vector

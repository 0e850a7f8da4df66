"""Where the columns of a row lie in the operands of tensor cores.

A product sums over columns, in any order that both operands share.  So a lane multiplies whole words of codes: lane
``4 * g + t`` of a warp reads chunks ``t``, ``t + 4``, ... of a step, for rows ``2 * g`` and ``2 * g + 1`` of a tile,
and activations are laid out to meet them there::

    codes        int32 [tiles, chunks, words, 16]        a lane loads two neighbouring rows of each of its chunks
    activations  [blocks of 8 tokens, steps, halves, vectors, 4 * g + t]: what lane 4 * g + t needs of token g

Activations are int8, or in two halves whose sum is the number: float16, of which it keeps 22 bits, bfloat16 (16 bits),
or float32 as tensor cores read it (22 bits).  Within four columns, a register of two float16 has columns 0 and 2, or 1
and 3, where codes are bytes of a word, which one mask takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from compressor.formats.activations import Activations
from compressor.formats.format import Format

LANES = 4
"""Lanes that share a row."""
Kind = Literal["int8", "float16", "bfloat16", "float32"]
_QUAD_WORDS = {"int8": 1, "float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Fragments:
    """The layout for one kind of weight and number of columns.

    Attributes:
        columns: of a row.
        kind: of operands.
        order: of four columns, in registers of two.
        chunk_columns: columns that a lane loads together, a multiple of four.
        lane_chunks: chunks of a lane in one step.
        step_groups: groups of a step, where they are smaller: each is multiplied with the others' columns left out.
        group_columns: columns that share both scales, of the weight and of integer activations.
        scale_columns: columns that share a scale of the weight.
        act: what activations are rounded to; None for floats as they come.
    """

    columns: int
    kind: Kind
    order: tuple[int, int, int, int]
    chunk_columns: int
    lane_chunks: int
    group_columns: int
    scale_columns: int
    act: Activations | None
    step_groups: int = 1

    @classmethod
    def of(cls, fmt: Format, columns: int) -> Fragments | str:
        """Choose the longest step of which a format's group is a multiple; or say why there is none."""
        return cls.cut(fmt, columns, fmt.columns(columns), fmt.chunk_columns)

    @classmethod
    def cut(cls, fmt: Format, columns: int, scale: int, chunk: int) -> Fragments | str:
        """Do the same for columns of which ``scale`` share a scale, and ``chunk`` are loaded together."""
        integer, act = fmt.integer_products, fmt.activations
        size = act.group_size if act is not None and integer else 0
        group = min(scale, size or scale)
        kind: Kind = "int8" if integer else "float16"
        order = (0, 1, 2, 3) if integer else (0, 2, 1, 3)
        lane, least = max(1, 16 // (chunk * (1 if integer else 2))), max(1, 8 // chunk) if integer else 1
        while lane >= least:
            if group % (LANES * lane * chunk) == 0 or group >= columns:
                return cls(columns, kind, order, chunk, lane, group, scale, act)
            lane //= 2
        step = LANES * least * chunk
        if least == 1 and step // group in (2, LANES) and step % group == 0:
            return cls(columns, kind, order, chunk, 1, group, scale, act, step // group)
        return f"groups of {group} columns of {fmt.name} on a GPU; use a multiple of {step}"

    @property
    def integer(self) -> bool:
        """Tell whether products are of int8."""
        return self.kind == "int8"

    @property
    def halves(self) -> int:
        """Numbers that an activation is stored as."""
        return 1 if self.integer else 2

    @property
    def quads(self) -> int:
        """Four columns each, of a chunk."""
        return self.chunk_columns // 4

    @property
    def quad_words(self) -> int:
        """Words of 32 bits of four activations."""
        return _QUAD_WORDS[self.kind]

    @property
    def step_chunks(self) -> int:
        """Chunks that a warp multiplies at once."""
        return LANES * self.lane_chunks

    @property
    def step_columns(self) -> int:
        """Columns that a warp multiplies at once."""
        return self.step_chunks * self.chunk_columns

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
    def groups(self) -> int:
        """Groups of a row."""
        return -(-self.columns // self.group_columns)

    @property
    def group_steps(self) -> int:
        """Steps of a group, at least one; all, where there is one group."""
        return self.steps if self.groups == 1 else max(1, self.group_columns // self.step_columns)

    def group(self, step: Any, inner: Any) -> Any:
        """Return the group of a step's columns, the ``inner``-th where it has several."""
        return step // self.group_steps * self.step_groups + inner

    def inner_group(self, lane: Any) -> Any:
        """Return which of a step's groups a lane's columns are in."""
        return lane % LANES // (LANES // self.step_groups)

    @property
    def scale_groups(self) -> int:
        """Groups that share a scale of the weight."""
        return -(-self.scale_columns // self.group_columns)

    @property
    def act_span(self) -> int:
        """Groups that share a scale of the activations; 0 where a token has one."""
        return self.act.group_size // self.group_columns if self.act is not None and self.integer else 0

    @property
    def act_groups(self) -> int:
        """Scales of a token's integer activations."""
        return -(-self.columns // (self.act_span * self.group_columns)) if self.act_span else 1

    def place(self, quad: Any) -> tuple[Any, Any, Any, Any]:
        """Return (step, vector, lane of a row, word) of a quad of columns of a row."""
        chunk, inner = quad // self.quads, quad % self.quads
        word = (chunk % self.step_chunks // LANES * self.quads + inner) * self.quad_words
        return chunk // self.step_chunks, word // self.vector, chunk % LANES, word % self.vector

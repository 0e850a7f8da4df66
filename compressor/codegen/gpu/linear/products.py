"""From codes to the sums of tensor cores, and from sums to outputs: the statements of one lane.

Integers: codes become int8 (value minus zero point, times a power of two where that saves a step), of 8 bits with a
zero point uint8, less a second product with the zero point.  Floats: codes become float16, which holds them exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from tvm.script import tirx as T

from compressor.codegen.gpu.halves import low_half, multiply_add_halves, pick_bytes, subtract_halves
from compressor.codegen.gpu.linear.fragments import Fragments
from compressor.codegen.gpu.linear.operands import Loads, PackedLoads
from compressor.codegen.gpu.linear.tensor_cores import product_bytes, product_halves
from compressor.codegen.gpu.memory import held
from compressor.formats.format import Format
from compressor.formats.weights import BitPlanes, Integers

_THOUSAND = 0x6400  # float16: 1024, whose last bit is 1


def supports(fmt: Format) -> str:
    """Say what tensor cores cannot read of a format; an empty text if they read all."""
    if fmt.extras:
        return f"packed linears on a GPU do not read what {', '.join(e.suffix for e in fmt.extras)} stores"
    if fmt.codebook:
        return f"packed linears on a GPU have no tables of values for each row, as {fmt.name} has"
    if fmt.integer_products and fmt.bits == 8 and isinstance(fmt.weights, BitPlanes):
        return f"packed linears on a GPU multiply planes of at most 7 bits by integers; {fmt.name} has 8"
    return ""


class Statements(ABC):
    """What a kernel asks of the weights that it multiplies by, whatever they are stored as.

    Attributes:
        kind: of sums.
        operand: registers of operand A, of one product.
        constants: registers of zero points, of one tile and group.
        sums: registers, of one tile and block of tokens.
        per_step: products of a step, each of which takes two words of a lane's activations.
    """

    fragments: Fragments
    loads: Loads
    kind = "float32"
    operand = 4
    constants = 0
    sums = 4
    per_step: int

    @abstractmethod
    def expand(self, to: Any, at: int, words: Any, slot: int, product: int, constants: Any, first: int) -> None:
        """Store operand A of one product of a step to ``to[at]`` and on.

        Args:
            words: of the step's codes, from ``slot`` on.
            constants: of the two rows, from ``first`` on.
        """

    @abstractmethod
    def multiply(self, sums: Any, at: int, a: Any, first: int, b: Any, operand: int, constants: Any, row: int) -> None:
        """Add one product to the sums from ``sums[at]`` on; B is ``b[operand]`` and the next."""

    @abstractmethod
    def store_constants(self, constants: Any, at: int, raw: Any) -> None:
        """Store what the codes of two rows are compared with: of their zero points, one a byte of ``raw``."""

    def scale(self, raw: Any, row: int) -> Any:
        """Decode a row's scale, times what :meth:`expand` leaves out."""
        return T.float32(1)

    def leave_out(self, a: Any, at: int, lane: Any, inner: int) -> None:
        """Set operand A to zero in lanes whose columns are in another group of the step than the ``inner``-th."""
        f = self.fragments
        for i in range(at, at + self.operand if f.step_groups > 1 else at):
            T.buffer_store(a, T.if_then_else(f.inner_group(lane) == inner, a[i], T.uint32(0)), [i])

    def clear(self, sums: Any, at: int) -> None:
        """Set the sums of one block of tokens to zero."""
        for i in range(self.sums):
            T.buffer_store(sums, T.Cast(self.kind, 0), [at + i])

    def total(self, sums: Any, at: int, i: int) -> Any:
        """Return sum ``i`` of four as float32."""
        return sums[at + i]


class Products(Statements):
    """The statements for one format."""

    def __init__(self, fragments: Fragments, fmt: Format) -> None:
        self.fragments, self.fmt, self.integer = fragments, fmt, fragments.integer
        self.loads = PackedLoads(fragments, fmt)
        self.has_zeros = self.loads.has_zeros
        weights = self.fmt.weights
        self.kind = "int32" if self.integer else "float32"
        self.is_bipolar = isinstance(weights, BitPlanes) and weights.grid == "bipolar"
        # Codes at the top of their bytes: their sign is the byte's after one bit is turned round.
        self.is_high = self.integer and (self.is_bipolar or (isinstance(weights, Integers) and weights.symmetric))
        self.is_unsigned = self.integer and not self.is_high and self.fmt.bits == 8 and self.has_zeros
        # A lane gives a product four or eight columns.
        self.per_step = fragments.lane_chunks * fragments.chunk_columns // (8 if self.integer else 4)
        is_code = isinstance(weights, Integers) and not self.integer
        self.is_nibbles = is_code and self.fmt.planes == (4,)  # one mask takes codes out of their words
        self.constants = (4 if self.is_nibbles else 2) if self.has_zeros else 0
        self.sums = 8 if self.is_unsigned else 4
        element = self.fmt.element
        self.operand = 8 if element is not None and not element.is_float else 4  # values of a table are two float16

    def _quad(self, words: Any, slot: int, quad: int, row: int, high: bool) -> Any:
        """Return four columns' codes of a row, one a byte, at the bottom of the bytes or the top."""
        return self.stored_quad(words, slot, *divmod(quad, self.fragments.quads), row, high)

    def stored_quad(self, words: Any, slot: int, chunk: int, inner: int, row: int, high: bool) -> Any:
        """Return four neighbouring codes of a lane's chunk, as they are stored."""
        fmt = self.fmt
        result, first = None, 0
        offset = 8 - fmt.bits if high else 0
        for width in fmt.planes:
            index, j = divmod(inner, 8 // width)
            word = words[slot + 2 * (chunk * fmt.chunk_words + first + index) + row]
            down = width * j - offset
            bits = T.reinterpret(word, dtype="uint32")
            if down:
                bits = T.shift_right(bits, T.uint32(down)) if down > 0 else T.shift_left(bits, T.uint32(-down))
            if width < 8:
                bits = T.bitwise_and(bits, T.uint32((((1 << width) - 1) << offset) * 0x01010101))
            result = bits if result is None else T.bitwise_or(result, bits)
            offset, first = offset + width, first + fmt.chunk_columns * width // 32
        return result

    def store_constants(self, constants: Any, at: int, raw: Any) -> None:
        """Store what the codes of two rows are compared with: of their zero points, one a byte of ``raw``."""
        for row in range(2 if self.has_zeros else 0):
            zero = T.bitwise_and(T.shift_right(T.reinterpret(raw, dtype="uint32"), T.uint32(8 * row)), T.uint32(255))
            if not self.integer:
                value = (zero + T.uint32(_THOUSAND)) * T.uint32(0x10001)
                if self.is_nibbles:  # -(64 + zero): from 64 to 128, a step is 16 of the mantissa's last
                    more = (T.shift_left(zero, T.uint32(4)) + T.uint32(0xD400)) * T.uint32(0x10001)
                    T.buffer_store(constants, more, [at + 2 + row])
            elif self.is_unsigned:
                value = zero * T.uint32(0x01010101)
            else:
                value = (T.uint32(128) - zero) * T.uint32(0x01010101)
            T.buffer_store(constants, value, [at + row])

    def expand(self, to: Any, at: int, words: Any, slot: int, product: int, constants: Any, first: int) -> None:
        """Store operand A of one product of a step: four registers."""
        if self.integer:
            for part in range(2):
                for row in range(2):
                    quad = self._quad(words, slot, 2 * product + part, row, self.is_high)
                    T.buffer_store(to, self._to_bytes(quad, constants, first + row), [at + 2 * part + row])
            return
        element = self.fmt.element
        is_float = element is not None and element.is_float
        for row in range(2):
            if self.is_nibbles:
                word = words[slot + 2 * (product // 2) + row]
                for part in range(2):
                    halves = self._nibbles(word, product % 2, part, constants, first + row)
                    T.buffer_store(to, halves, [at + 2 * part + row])
                continue
            quad = held(self._quad(words, slot, product, row, is_float))
            if element is not None and not is_float:
                for i, halves in enumerate(self._look_up(quad)):
                    T.buffer_store(to, halves, [at + 4 * (i // 2) + 2 * (i % 2) + row])
                continue
            for part in range(2):
                halves = self._to_float(quad, part) if is_float else self._to_halves(quad, part, constants, first + row)
                T.buffer_store(to, halves, [at + 2 * part + row])

    def _to_bytes(self, quad: Any, constants: Any, at: int) -> Any:
        """Return codes less their zero point as int8."""
        fmt = self.fmt
        if self.is_high:
            signed = T.bitwise_xor(quad, T.uint32(0x80808080))
            half = T.uint32(0x01010101 << (7 - fmt.bits) if self.is_bipolar else 0)
            return T.bitwise_or(signed, half) if self.is_bipolar else signed
        if self.is_unsigned:
            return quad
        less = constants[at] if self.has_zeros else T.uint32((128 - int(fmt.zero_point)) * 0x01010101)
        return T.bitwise_xor(quad + less, T.uint32(0x80808080))

    def _to_halves(self, quad: Any, part: int, constants: Any, at: int) -> Any:
        """Return codes less their zero point as float16: as the last bits of 1024 and above."""
        value = pick_bytes(quad, T.uint32(0x64646464), 0x4341 if part else 0x4240)
        if self.has_zeros:
            return subtract_halves(value, constants[at])
        zero = self.fmt.zero_point
        if zero % 1:  # above 1024, float16 has no halves
            bits = int(np.float16(zero).view(np.uint16)) * 0x10001
            return subtract_halves(subtract_halves(value, T.uint32(_THOUSAND * 0x10001)), T.uint32(bits))
        return subtract_halves(value, T.uint32((_THOUSAND + int(zero)) * 0x10001))

    def _nibbles(self, word: Any, is_high: int, part: int, constants: Any, at: int) -> Any:
        """Return two codes of four bits less their zero point: the last bits of 1024 and above, or 16 times as much."""
        bits = T.reinterpret(word, dtype="uint32")
        bits = T.shift_right(bits, T.uint32(8)) if part else bits
        value = T.bitwise_or(
            T.bitwise_and(bits, T.uint32(0x00F000F0 if is_high else 0x000F000F)), T.uint32(_THOUSAND * 0x10001)
        )
        zero = int(self.fmt.zero_point)
        if not is_high:
            less = constants[at] if self.has_zeros else T.uint32((_THOUSAND + zero) * 0x10001)
            return subtract_halves(value, less)
        sixty_four = T.uint32(int(np.float16(-64 - zero).view(np.uint16)) * 0x10001)
        more = constants[at + 2] if self.has_zeros else sixty_four
        return multiply_add_halves(value, T.uint32(0x2C002C00), more)

    def _to_float(self, quad: Any, part: int) -> Any:
        """Return small floats, whose sign is their byte's highest bit, with their fields in float16's places."""
        element = self.fmt.element
        assert element is not None
        value = pick_bytes(quad, T.uint32(0), 0x3414 if part else 0x2404)
        down = 5 - element.exponent_bits
        if not down:
            return value
        size = T.shift_right(T.bitwise_and(value, T.uint32(0x7F007F00)), T.uint32(down))
        return T.bitwise_or(size, T.bitwise_and(value, T.uint32(0x80008000)))

    def _look_up(self, quad: Any) -> list[Any]:
        """Return the values of four codes of four bits: columns 0 and 2, 1 and 3, as float16, and what they leave.

        Two bytes of a value come from tables of 16 bytes in registers, of which a byte's lower three bits choose one of
        eight, and the fourth bit one of two.
        """
        element = self.fmt.element
        assert element is not None
        values = np.array(element.values, np.float32)
        first = values.astype(np.float16)
        pairs = T.bitwise_or(quad, T.shift_right(quad, T.uint32(4)))
        chosen = held(T.bitwise_and(pick_bytes(pairs, T.uint32(0), 0x4420), T.uint32(0x7777)))
        above = held(T.bitwise_and(T.shift_right(quad, T.uint32(3)), T.uint32(0x01010101)) * T.uint32(255))
        found = []
        for numbers in (first, (values - first).astype(np.float16)):
            table = numbers.view(np.uint8).reshape(16, 2)
            both = []
            for byte in range(2):
                words = [T.uint32(int(word)) for word in np.ascontiguousarray(table[:, byte]).view(np.uint32)]
                low, high = pick_bytes(words[0], words[1], chosen), pick_bytes(words[2], words[3], chosen)
                kept = T.bitwise_and(low, T.bitwise_not(above))
                both.append(held(T.bitwise_or(kept, T.bitwise_and(high, above))))
            found += [pick_bytes(both[0], both[1], 0x6240), pick_bytes(both[0], both[1], 0x7351)]
        return found

    def multiply(self, sums: Any, at: int, a: Any, first: int, b: Any, operand: int, constants: Any, row: int) -> None:
        """Add one product to four sums from ``sums[at]`` on; where codes are unsigned, that of their zero points to the
        next four.
        """
        right = [b[operand + i] for i in range(2)]
        if not self.integer:
            for i in range(0, self.operand, 4):
                product_halves(T.address_of(sums[at]), [a[first + i + j] for j in range(4)], right)
            return
        left = [a[first + i] for i in range(4)]
        product_bytes(T.address_of(sums[at]), left, right, is_unsigned=self.is_unsigned)
        if self.is_unsigned:
            zeros = [constants[row], constants[row + 1]] * 2
            product_bytes(T.address_of(sums[at + 4]), zeros, right, is_unsigned=True)

    def total(self, sums: Any, at: int, i: int) -> Any:
        """Return sum ``i`` of four as float32."""
        if not self.integer:
            return sums[at + i]
        return T.Cast("float32", sums[at + i] - sums[at + 4 + i] if self.is_unsigned else sums[at + i])

    def scale(self, raw: Any, row: int) -> Any:
        """Decode a row's scale, times what :meth:`expand` leaves out."""
        fmt = self.fmt
        bits = T.reinterpret(raw, dtype="uint32")
        factor = 1.0
        if fmt.scale_type == "F16":
            value = low_half(T.shift_right(bits, T.uint32(16)) if row else bits)
        else:
            byte = T.bitwise_and(T.shift_right(bits, T.uint32(8 * row)), T.uint32(255))
            if fmt.scale_type == "E8M0":
                value = T.reinterpret(T.shift_left(byte, T.uint32(23)), dtype="float32")
            else:
                value, factor = low_half(T.shift_left(byte, T.uint32(7))), 2.0**8
        if self.is_high:
            factor *= 2.0 ** (fmt.bits - 8)
        if fmt.element is not None and fmt.element.is_float:
            factor *= 2.0 ** (15 - fmt.element.bias)
        return value if factor == 1.0 else value * T.float32(factor)

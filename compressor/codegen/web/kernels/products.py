"""The loops of the packed linear in WGSL: what a thread adds to its totals, of floats or of integers.

Both find the thread's ``row`` of a tile, tokens ``token0``, ... and totals ``total0_0``, ... (tile, token), in the text
around them, :mod:`compressor.codegen.web.kernels.packed_linear`.
"""

from __future__ import annotations

from compressor.codegen.web.kernel import SINGLE
from compressor.codegen.web.kernels.activations import Rounded
from compressor.codegen.web.values import BYTES4, element_values, four_inputs, quads_of, zero_point
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

PRODUCT = "dot4I8Packed"
POLYFILLS = {
    "packed_4x8_integer_dot_product": f"""fn {PRODUCT}(a: u32, b: u32) -> i32 {{
  let up = vec4<u32>(24u, 16u, 8u, 0u);
  let down = vec4<u32>(24u);
  return dot(bitcast<vec4<i32>>(vec4<u32>(a) << up) >> down, bitcast<vec4<i32>>(vec4<u32>(b) << up) >> down);
}}
"""
}
"""What is added to a kernel's text where WGSL lacks a feature of the language, by its name."""


class _Loop:
    """What both know of a weight: its tiles, chunks and groups, and where a scale or a zero point is."""

    def __init__(self, rows: int, columns: int, fmt: Format, expert: str) -> None:
        self.fmt, self.columns, self.expert = fmt, columns, expert
        self.tiles, self.chunks, self.groups = -(-rows // TILE_ROWS), fmt.chunks(columns), fmt.groups(columns)

    def _tile(self) -> str:
        """Return the number of a tile among those of all experts, which lie one behind another."""
        own = f"min(id.x * TILES + $i$u, {self.tiles - 1}u)"
        return f"{self.expert} * {self.tiles}u + {own}" if self.expert else own

    def _place(self, group: str) -> str:
        """Of a scale and a zero point."""
        if each := self.fmt.block_tiles:
            block = f"(tile$i$ / {each}u)"
            if self.expert:  # each expert's blocks begin anew
                tile, blocks = f"tile$i$ - {self.expert} * {self.tiles}u", -(-self.tiles // each)
                block = f"({self.expert} * {blocks}u + ({tile}) / {each}u)"
            return f"{block} * {self.groups}u + {group}"
        return f"(tile$i$ * {self.groups}u + {group}) * {TILE_ROWS}u + row"

    def _zero(self) -> str:
        return zero_point(self.fmt, "place$i$")


class FloatLoop(_Loop):
    """Codes become floats, chunk by chunk; a thread takes every ``LANES``-th chunk."""

    def functions(self) -> str:
        """Functions that the text calls."""
        is_whole = self.columns % self.fmt.chunk_columns == 0
        inputs = four_inputs("x", self.columns, "inputs", is_guarded=not is_whole)
        return f"{SINGLE}\n{BYTES4}\n{element_values(self.fmt)}\n{inputs}"

    def text(self) -> str:
        """Return the loop."""
        fmt, words = self.fmt, self.fmt.chunk_words
        quads = fmt.chunk_columns // 4
        group_chunks = fmt.group_size // fmt.chunk_columns if fmt.group_size else self.chunks
        loads = "\n".join(f"    let w$i$_{n} = codes[base$i$ + {TILE_ROWS * n}u];" for n in range(words))
        table = f"(tile$i$ * {self.groups}u + group) * {fmt.levels * TILE_ROWS}u + row" if fmt.codebook else "0u"
        steps = "\n".join(
            f"""    {{
    //# for m TOKENS
      let x$m$ = vec4<Real>(inputs(token$m$, c * {quads}u + {n}u));
    //# end
    //# for i TILES
      let v$i$ = vec4<Real>(values({code}, zero$i$, table$i$) * scale$i$);
    //# for m TOKENS
      total$i$_$m$ += f32(dot(v$i$, x$m$));
    //# end
    //# end
    }}"""
            for n, code in enumerate(quads_of(fmt, "w$i$_{}"))
        )
        return f"""  for (var c = thread / {TILE_ROWS}u; c < {self.chunks}u; c += LANES) {{
    let group = c / {group_chunks}u;
//# for i TILES
    let tile$i$ = {self._tile()};
    let place$i$ = {self._place("group")};
    let base$i$ = (tile$i$ * {self.chunks}u + c) * {words * TILE_ROWS}u + row;
{loads}
    let zero$i$ = {self._zero()};
    let table$i$ = {table};
    let scale$i$ = scale_at(place$i$);
//# end
{steps}
  }}"""


class IntegerLoop(_Loop):
    """Bytes are multiplied, four an instruction, and added up as integers; then scaled, at each step or at the end.

    A thread takes every ``LANES``-th step of :class:`compressor.codegen.web.kernels.activations.Rounded`.  Bytes are
    signed: codes of 8 bits count from 128, symmetric ones from the middle of their grid; what is left of the zero point
        is
    multiplied by the step's sum of activations.
    """

    def __init__(self, rows: int, columns: int, fmt: Format, expert: str) -> None:
        super().__init__(rows, columns, fmt, expert)
        self.layout = Rounded.of(columns, fmt)
        middle = int(fmt.zero_point) if fmt.symmetric else 0
        self.offset = 128 if fmt.bits == 8 else middle
        self.has_sums = not fmt.symmetric or self.offset != fmt.zero_point
        self.is_late = self.groups == 1 and self.layout.spans == 1 and not self.has_sums

    def functions(self) -> str:
        """None: WGSL has the product, or :data:`POLYFILLS`."""
        return ""

    def text(self) -> str:
        """Return the loop, and the scaling after it."""
        fmt, words = self.fmt, self.fmt.chunk_words
        step = self.layout.step_columns
        step_chunks = step // fmt.chunk_columns
        loads = "\n".join(
            f"    let w$i$_{k}_{n} = codes[base$i$ + {TILE_ROWS * (k * words + n)}u];"
            for k in range(step_chunks)
            for n in range(words)
        )
        sums = """//# for i TILES
//# for m TOKENS
  {}
//# end
//# end"""
        clear, scale = sums.format("var sum$i$_$m$ = 0;"), sums.format(self._scaled())
        return f"""//# for i TILES
  let tile$i$ = {self._tile()};
//# end
{clear if self.is_late else ""}
  for (var s = thread / {TILE_ROWS}u; s < {self.layout.steps}u; s += LANES) {{
{"" if self.is_late else clear}
//# for i TILES
    let base$i$ = (tile$i$ * {self.chunks}u + s * {step_chunks}u) * {words * TILE_ROWS}u + row;
{loads}
//# end
{self._products(step_chunks)}
{"" if self.is_late else self._factors("s") + scale}
  }}
{self._factors("0u") + scale if self.is_late else ""}"""

    def _products(self, step_chunks: int) -> str:
        """Four words of activations at once, or one."""
        codes = [code for k in range(step_chunks) for code in quads_of(self.fmt, f"w$i$_{k}_{{}}")]
        taken, row_words = (4, self.layout.words // 4) if self.layout.is_vector else (1, self.layout.words)
        found = []
        for v in range(len(codes) // taken):
            names = ["c$i$_" + str(i) for i in range(taken)]
            unpacked = "\n".join(
                f"      let {name} = {self._signed(code)};"
                for name, code in zip(names, codes[v * taken : (v + 1) * taken], strict=True)
            )
            operands = ["x$m$" + (f".{'xyzw'[i]}" if taken > 1 else "") for i in range(taken)]
            dots = " + ".join(f"{PRODUCT}({c}, {x})" for c, x in zip(names, operands, strict=True))
            found.append(f"""    {{
    //# for m TOKENS
      let x$m$ = x[token$m$ * {row_words}u + s * {len(codes) // taken}u + {v}u];
    //# end
    //# for i TILES
{unpacked}
    //# for m TOKENS
      sum$i$_$m$ += {dots};
    //# end
    //# end
    }}""")
        return "\n".join(found)

    def _signed(self, code: str) -> str:
        """Codes minus the offset, as signed bytes: no borrow goes from one to the next."""
        if self.fmt.bits == 8:
            return f"({code}) ^ 0x80808080u"
        return f"((({code}) | 0x80808080u) - {self.offset * 0x01010101}u) ^ 0x80808080u" if self.offset else code

    def _factors(self, s: str) -> str:
        """Scales of a step, those of the weight and of the activations, and its sums."""
        step, layout = self.layout.step_columns, self.layout
        group = f"{s} / {self.fmt.group_size // step}u" if self.groups > 1 else "0u"
        act = self.fmt.activations.group_size if self.fmt.activations is not None else 0
        span = f"{s} / {act // step}u" if layout.spans > 1 else "0u"
        added = f"\n  let added$m$ = numbers[token$m$ * {layout.numbers}u + {layout.spans}u + {s}];"
        zero = f"\n  let zero$i$ = {self._zero()} - {float(self.offset)!r};"
        return f"""//# for m TOKENS
  let factor$m$ = numbers[token$m$ * {layout.numbers}u + {span}];{added if self.has_sums else ""}
//# end
//# for i TILES
  let place$i$ = {self._place(group)};
  let scale$i$ = scale_at(place$i$);{zero if self.has_sums else ""}
//# end
"""

    def _scaled(self) -> str:
        found = "(f32(sum$i$_$m$) - zero$i$ * added$m$)" if self.has_sums else "f32(sum$i$_$m$)"
        return f"total$i$_$m$ += {found} * (scale$i$ * factor$m$);"

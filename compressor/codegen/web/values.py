"""WGSL that converts stored codes to values: assemble bit planes, then map integers, small floats, tables or
codebooks.
"""

from __future__ import annotations

from collections.abc import Iterator

from compressor.formats.elements import Element
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

HALF = "fn half(pair: u32, place: u32) -> f32 { return unpack2x16float(pair)[place & 1u]; }"
"""Read one float16 from the word that holds two."""
BYTES4 = """fn bytes4(word: u32) -> vec4<u32> {
  return (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u);
}"""
"""Split a word into its four bytes."""


def quads_of(fmt: Format, word_of: str) -> Iterator[str]:
    """Yield, for each four columns of a chunk, an expression of the word with their four codes.

    Args:
        word_of: name of the chunk's words; ``{}`` stands for the number.
    """
    for quad in range(fmt.chunk_columns // 4):
        terms = []
        offset = 0
        first = 0
        for width in fmt.planes:
            per_word = 8 // width
            word, shift = first + quad // per_word, width * (quad % per_word)
            held = word_of.format(word)
            mask = ((1 << width) - 1) * 0x01010101
            term = held if width == 8 else f"(({held} >> {shift}u) & 0x{mask:08x}u)"
            terms.append(f"({term} << {offset}u)" if offset else term)
            offset, first = offset + width, first + fmt.chunk_columns * width // 32
        yield " | ".join(terms)


def zero_point(fmt: Format, place: str) -> str:
    """Return the expression of a zero point, as a float, whose place among the zeros is the expression ``place``."""
    if fmt.symmetric:
        return f"{fmt.zero_point!r}"
    return f"f32((zeros[{place} >> 2u] >> (({place} & 3u) * 8u)) & 255u)"


def element_values(fmt: Format) -> str:
    """Return the function ``values``, which maps four codes to values before scaling, and the functions that it
    calls.
    """
    signature = "fn values(codes4: u32, zero: f32, table: u32) -> vec4<f32>"
    functions = [_float_function(Element("E4M3", 4, 3))] if fmt.scale_type == "E4M3" else []
    if fmt.codebook:
        one = f"let p{{0}} = table + b.{{1}} * {TILE_ROWS}u; let v{{0}} = half(codebook[p{{0}} >> 1u], p{{0}});"
        lines = " ".join(one.format(i, axis) for i, axis in enumerate("xyzw"))
        body = f"let b = bytes4(codes4); {lines} return vec4<f32>(v0, v1, v2, v3);"
    elif fmt.element is None:
        body = "return vec4<f32>(bytes4(codes4)) - zero;"
    else:
        function = fmt.element.name.lower()
        made = _float_function(fmt.element) if fmt.element.is_float else _table_function(fmt.element)
        functions += [made] if made not in functions else []
        calls = ", ".join(f"{function}(b.{axis})" for axis in "xyzw")
        body = f"let b = bytes4(codes4); return vec4<f32>({calls});"
    return "\n".join([*functions, f"{signature} {{\n  {body}\n}}"])


def _float_function(element: Element) -> str:
    """Return a function from a code to its value, exact, without float32 subnormals, which devices may flush to
    zero.
    """
    mantissa, bias = element.mantissa_bits, element.bias
    mask, exponents = (1 << mantissa) - 1, (1 << element.exponent_bits) - 1
    smallest = 2.0 ** (1 - bias - mantissa)
    return f"""fn {element.name.lower()}(code: u32) -> f32 {{
  let e = (code >> {mantissa}u) & {exponents}u;
  let m = code & {mask}u;
  let normal = bitcast<f32>(((e + {127 - bias}u) << 23u) | (m << {23 - mantissa}u));
  let size = select(normal, f32(m) * {smallest!r}, e == 0u);
  return select(size, -size, (code >> {element.bits - 1}u) != 0u);
}}"""


def _table_function(element: Element) -> str:
    values = ", ".join(repr(value) for value in element.values)
    name = element.name.lower()
    return f"""fn {name}(code: u32) -> f32 {{
  var values = array<f32, {len(element.values)}>({values});
  return values[code];
}}"""


def stored_element(columns: int, storage: str) -> str:
    """Return the WGSL type that a matrix of floats is bound as: four floats, or one word if rows are not multiples of
    four.
    """
    if columns % 4:
        return "f32" if storage == "float32" else "u32"
    return "vec4<f32>" if storage == "float32" else "vec2<u32>"


def four_stored(name: str, columns: int, storage: str) -> str:
    """Return a function ``<name>4(row, q)``: columns ``4 * q`` to ``4 * q + 3`` of a row, zero beyond the last
    column.
    """
    if storage == "float32":
        return four_inputs(name, columns)
    pair = (
        "unpack2x16float({0})"
        if storage == "float16"
        else "bitcast<vec2<f32>>(vec2<u32>({0} << 16u, {0} & 0xffff0000u))"
    )
    if columns % 4 == 0:
        low, high = pair.format("both.x"), pair.format("both.y")
        body = f"let both = {name}[row * {columns // 4}u + q];\n  return vec4<f32>({low}, {high});"
    else:
        body = f"""var found = vec4<f32>();
  for (var i = 0u; i < 4u; i++) {{
    let place = row * {columns}u + 4u * q + i;
    if (4u * q + i < {columns}u) {{ found[i] = {pair.format(f"{name}[place >> 1u]")}[place & 1u]; }}
  }}
  return found;"""
    return f"fn {name}4(row: u32, q: u32) -> vec4<f32> {{\n  {body}\n}}"


def four_inputs(name: str, columns: int, function: str = "", *, is_guarded: bool = False) -> str:
    """Return a function of (row, q) that reads four columns of a float32 matrix from ``4 * q`` on, zero beyond the
    last.

    Args:
        function: name of the function, by default ``<name>4``.
        is_guarded: whether it is also called for groups of four wholly beyond the last column.
    """
    if columns % 4 == 0:
        guard = f"if (q >= {columns // 4}u) {{ return vec4<f32>(); }}\n  " if is_guarded else ""
        body = f"{guard}return {name}[row * {columns // 4}u + q];"
    else:
        body = f"""var found = vec4<f32>();
  for (var i = 0u; i < 4u; i++) {{
    if (4u * q + i < {columns}u) {{ found[i] = {name}[row * {columns}u + 4u * q + i]; }}
  }}
  return found;"""
    return f"fn {function or name + '4'}(row: u32, q: u32) -> vec4<f32> {{\n  {body}\n}}"

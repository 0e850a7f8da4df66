"""Rounded activations in WGSL, as :func:`compressor.formats.rounded_activations.round_activations` defines them.

A kernel of its own, once for all linears that read the same: a workgroup takes the columns of a token that share a
scale.  For products of floats it leaves floats; for products of integers bytes, four columns a word, and beside them
each span's scale and each step's sum (:class:`Rounded`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from compressor.codegen.kernels.experts import Routing
from compressor.codegen.web.kernel import LARGEST_GRID, Buffer, Kernel, joined
from compressor.codegen.web.kernels.experts import EXPERT
from compressor.formats.activations import Activations
from compressor.formats.elements import Element
from compressor.formats.format import Format
from compressor.formats.rounded_activations import SMALLEST

_VECTOR_COLUMNS = 16
"""Bytes of WGSL's widest load."""


@dataclass(frozen=True)
class Rounded:
    """Integer activations of a token, as the products of a format take them.

    Attributes:
        step_columns: of a step, within which weights and activations each have one scale.
        steps: of a row; the last is filled up with zeros.
        spans: of a row, columns with one scale of activations; their scales come first, then the sums of the steps.
    """

    step_columns: int
    steps: int
    spans: int

    @classmethod
    def of(cls, columns: int, fmt: Format) -> Rounded:
        """Of a linear's input."""
        assert fmt.activations is not None
        chunk, act = fmt.chunk_columns, fmt.activations.group_size
        shared = gcd(_VECTOR_COLUMNS, fmt.group_size or _VECTOR_COLUMNS, act or _VECTOR_COLUMNS)
        step = max(chunk, shared)
        return cls(step, -(-columns // step), -(-columns // (act or columns)))

    @property
    def is_vector(self) -> bool:
        """Whether a step is whole vectors of four words."""
        return self.step_columns % _VECTOR_COLUMNS == 0

    @property
    def words(self) -> int:
        """Words of a row."""
        return self.steps * self.step_columns // 4

    @property
    def numbers(self) -> int:
        """Scales and sums of a row."""
        return self.spans + self.steps


def round_activations(columns: int, fmt: Format, routing: Routing | None = None) -> Kernel:
    """Write the kernel that rounds the input of a linear to a format's activations.

    Buffers: x f32 [M, columns]; input_scale f32 [1], where the format has one; then y f32 [M, columns], or, where
    products are of integers, codes u32 [M, words] and numbers f32 [M, numbers] as in :class:`Rounded`.  Sizes: M.

    Args:
        routing: of experts that each have a calibrated scale: M is the number of pairs of token and expert, which read
            x as the routed linear does; input_scale is f32 [experts], and behind it comes index i32 [M].
    """
    act = fmt.activations
    assert act is not None
    span = act.group_size or columns
    buffers = [Buffer("x"), *[Buffer("input_scale")] * act.calibrated]
    layout = Rounded.of(columns, fmt) if fmt.integer_products else None
    if layout is None:
        buffers.append(Buffer("y", written=True))
        steps = f"""for (var i = begin + thread; i < end; i += LANES) {{
    y[row * {columns}u + i] = on_grid(x[source * {columns}u + i] * inverse, inverse) * scale;
  }}"""
    else:
        buffers += [Buffer("codes", "u32", written=True), Buffer("numbers", written=True)]
        steps = _bytes(columns, layout)
    kind = f"{act.numbers}{act.scales}" + (f"_by{layout.step_columns}" if layout else "")
    name, source, find = f"round_{columns}_{kind}", "row", ""
    if routing is not None:
        buffers.insert(2, Buffer("index", "i32"))
        name, source = f"{name}_{routing.name}", "row" if routing.own_rows else f"row / {routing.each}u"
        find = (
            f"\n  expert = min(u32(index[row]), {routing.experts - 1}u); // others' outputs are zeros, whatever is read"
        )
    unit, join, top = ("f32", "{} + {}", "bitcast<u32>(tops[0])") if act.is_sign else ("u32", "max({}, {})", "tops[0]")
    # Infinity has a place where the scale is stored, and NaN has none.
    largest = 0x7F800000 if act.granularity == "tensor" else 0x7F7FFFFF
    text = f"""
{_scale_functions(act, routing is not None)}
var<workgroup> tops: array<{unit}, LANES>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
  let row = id.z * {LARGEST_GRID}u + id.y;
  if (row >= sizes.M) {{ return; }}{find}
  let source = {source};
  let begin = id.x * {span}u;
  let end = min(begin + {span}u, {columns}u);
  var part = {unit}(0);
  for (var i = begin + thread; i < end; i += LANES) {{
    let size = bitcast<u32>(x[source * {columns}u + i]) & 0x7fffffffu; // of the larger size the larger; NaN above all
    part = {join.format("part", "bitcast<f32>(size)" if act.is_sign else "size")};
  }}
  {joined("tops", join)}
  let top = {top};
  let found = scale_of(bitcast<f32>(top), f32(end - begin));
  let scale = bitcast<f32>(select(bitcast<u32>(found), 0x7fc00000u, top > {largest:#x}u));
  let inverse = select(0.0, 1.0 / scale, scale > {SMALLEST!r});
  {steps}
}}
"""
    spans = -(-columns // span)
    groups = (spans, ["min", "M", LARGEST_GRID], ["ceil", "M", LARGEST_GRID])
    lanes = 64 if span > _VECTOR_COLUMNS else 16
    return Kernel(name, "round_activations", tuple(buffers), ("M",), {"LANES": lanes}, groups, text)


def _bytes(columns: int, layout: Rounded) -> str:
    """Let a thread write the words of a step, and their sum."""
    step, words = layout.step_columns, layout.step_columns // 4
    return f"""for (var s = begin / {step}u + thread; s * {step}u < end; s += LANES) {{
    var sum = 0;
    for (var w = 0u; w < {words}u; w++) {{
      var word = 0u;
      for (var i = 0u; i < 4u; i++) {{
        let column = s * {step}u + 4u * w + i;
        if (column < {columns}u) {{
          let code = i32(on_grid(x[source * {columns}u + column] * inverse, inverse));
          word |= (u32(code) & 255u) << (8u * i);
          sum += code;
        }}
      }}
      codes[row * {layout.words}u + s * {words}u + w] = word;
    }}
    numbers[row * {layout.numbers}u + {layout.spans}u + s] = f32(sum);
  }}
  if (thread == 0u) {{ numbers[row * {layout.numbers}u + id.x] = scale; }}"""


def _scale_functions(act: Activations, is_routed: bool) -> str:
    """Write ``scale_of``, the scale of a span, and ``on_grid``, which rounds scaled values."""
    largest, grid, stored = act.max_value, "round(near)", "input_scale[expert]" if is_routed else "input_scale[0]"
    functions = [EXPERT] if is_routed else []
    elements = {act.element} if act.element is not None else set()
    scale = f"top / {largest!r}"
    if act.is_sign:
        scale = "top / columns"
    elif act.scale_type == "E8M0":
        assert act.element is not None
        scale = f"bitcast<f32>(bitcast<u32>(top) & 0x7f800000u) * {2.0**-act.element.largest_exponent!r}"
    elif act.scale_type == "E4M3":
        elements.add(e4m3 := Element("E4M3", 4, 3))
        scale = f"{_rounding(e4m3)}(min(top / ({stored} * {largest!r}), 448.0)) * {stored}"
    elif act.granularity == "tensor":
        scale = stored
    if act.element is not None:
        grid = f"{_rounding(act.element)}(near)"
    functions += [_rounding_function(element) for element in sorted(elements, key=lambda e: e.name)]
    functions.append(f"fn scale_of(top: f32, columns: f32) -> f32 {{ return {scale}; }}")
    body = f"let near = clamp(value, -{largest!r}, {largest!r}); return {grid};"
    if act.is_sign:
        body = "return select(0.0, select(1.0, -1.0, value < 0.0), inverse > 0.0);"
    functions.append(f"fn on_grid(value: f32, inverse: f32) -> f32 {{ {body} }}")
    return "\n".join(functions)


def _rounding(element: Element) -> str:
    return f"to_{element.name.lower()}"


def _rounding_function(element: Element) -> str:
    """Round to the nearest value of a float: a number of its binade's steps, which are powers of two with exact
    inverses."""
    smallest = 2.0 ** (1 - element.bias)
    return f"""fn {_rounding(element)}(value: f32) -> f32 {{
  let binade = max(bitcast<f32>(bitcast<u32>(value) & 0x7f800000u), {smallest!r});
  let inverse = bitcast<f32>({254 + element.mantissa_bits << 23}u - bitcast<u32>(binade));
  return round(value * inverse) * (binade * {2.0**-element.mantissa_bits!r});
}}"""

"""The packed linear in WGSL: codes are taken apart and multiplied in registers, for one token or several at once.

A workgroup computes ``TILES`` tiles of 16 rows: thread ``16 * lane + row`` takes every ``LANES``-th chunk of its row in
each tile, so that neighbouring threads read neighbouring words, for ``TOKENS`` tokens.  Layout:
:mod:`compressor.formats`.
"""

from __future__ import annotations

from compressor.codegen.web.kernel import PROMPT_TOKENS, Buffer, Expression, Kernel, variants
from compressor.codegen.web.values import BYTES4, HALF, element_values, four_inputs, quads_of
from compressor.errors import UsageError
from compressor.formats import TILE_ROWS, Format

ONE, MANY = {"LANES": 8, "TILES": 1, "TOKENS": 1}, {"LANES": 2, "TILES": 4, "TOKENS": 8}
"""Shipped constants of decode and of prefill."""
FEW = 2
"""Tokens up to which the kernel for one token serves."""
_ONE_CHOICES = {"LANES": (2, 4, 8, 16), "TILES": (1, 2, 4), "TOKENS": (1, 2)}
_MANY_CHOICES = {"LANES": (1, 2, 4, 8, 16), "TILES": (1, 2, 4), "TOKENS": (4, 8, 16)}
_UNPACKING = 4
"""What taking a code apart costs, in multiplications."""


def check_format(fmt: Format) -> None:
    """Raise a UsageError for what these kernels do not compute."""
    missing = [
        what
        for what, used in (
            (f"activations rounded to {fmt.activations}", fmt.activations is not None),
            ("single weights in float16 (_S)", fmt.outlier_percent),
            ("columns in float16 (_F)", fmt.float_columns),
        )
        if used
    ]
    if missing:
        raise UsageError(
            f"format {fmt.name}: the target webgpu has no kernels for {' and '.join(missing)}; take a format of "
            "weights alone, such as W4A16_G128, W8A16 or NF4_G64"
        )


def packed_linear(rows: int, columns: int, fmt: Format, has_bias: bool) -> tuple[Kernel, ...]:
    """Kernels for ``y = x @ W.T + bias``: of few tokens, and of many.

    Buffers: x f32 [M, columns], the format's parts as words, bias f32 [rows] (where there is one), y f32 [M, rows].
    Sizes: M.

    Raises:
        UsageError: the format is none of weights alone.
    """
    check_format(fmt)
    parts = {name: kind for name, (kind, _) in fmt.parts(rows, columns).items()}
    buffers = [Buffer("x", "vec4<f32>" if columns % 4 == 0 else "f32")]
    buffers += [Buffer(name, "f32" if kind == "float32" else "u32") for name, kind in parts.items()]
    buffers += [Buffer("bias")] * has_bias
    buffers.append(Buffer("y", written=True))
    tiles = -(-rows // TILE_ROWS)
    name = f"packed_linear_{rows}x{columns}_{fmt.name.replace('.', 'p')}{'_bias' if has_bias else ''}"
    text = _text(rows, columns, fmt, has_bias)

    def kernel(suffix: str, constants: dict[str, int], limits: dict[str, int]) -> Kernel:
        groups: tuple[Expression, ...] = (["ceil", tiles, "TILES"], ["ceil", "M", "TOKENS"], 1)
        found, details = tuple(buffers), {"format": fmt.name}
        space = _space(tiles, fmt.chunks(columns), fmt.chunk_columns, constants, 1 if limits else PROMPT_TOKENS)
        return Kernel(
            f"{name}{suffix}", "packed_linear", found, ("M",), constants, groups, text, limits, space, details
        )

    return kernel("_one", ONE, {"M": FEW}), kernel("_many", MANY, {})


def _space(tiles: int, chunks: int, columns: int, default: dict[str, int], tokens: int) -> list[dict[str, int]]:
    """Other constants, by the multiplications that they make of the call."""

    def cost(LANES: int, TILES: int, TOKENS: int) -> tuple[int, int]:
        steps = -(-chunks // LANES) * TILES * (_UNPACKING + TOKENS) * columns + TILES * TOKENS  # and their sum
        return -(-tiles // TILES) * -(-tokens // TOKENS), steps

    choices = _ONE_CHOICES if default is ONE else _MANY_CHOICES
    return variants(
        choices,
        default,
        threads=lambda LANES, **_: LANES * TILE_ROWS,
        shared_bytes=lambda LANES, TILES, TOKENS: 4 * LANES * TILE_ROWS * TILES * TOKENS,
        cost=cost,
    )


def _text(rows: int, columns: int, fmt: Format, has_bias: bool) -> str:
    chunks, words, tiles = fmt.chunks(columns), fmt.chunk_words, -(-rows // TILE_ROWS)
    quads, whole = fmt.chunk_columns // 4, columns % fmt.chunk_columns == 0
    group_chunks = fmt.group_size // fmt.chunk_columns if fmt.group_size else chunks
    loads = "\n".join(f"    let w$i$_{n} = codes[base$i$ + {TILE_ROWS * n}u];" for n in range(words))
    steps = "\n".join(
        f"""    {{
    //# for m TOKENS
      let x$m$ = inputs(token$m$, c * {quads}u + {n}u);
    //# end
    //# for i TILES
      let v$i$ = values({code}, zero$i$, table$i$) * scale$i$;
    //# for m TOKENS
      total$i$_$m$ += dot(v$i$, x$m$);
    //# end
    //# end
    }}"""
        for n, code in enumerate(quads_of(fmt, "w$i$_{}"))
    )
    block = f"tile$i$ / {fmt.block_tiles}u" if fmt.block_tiles else "tile$i$"
    place = f"({block}) * {fmt.groups(columns)}u + group"
    place = place if fmt.block_tiles else f"({place}) * {TILE_ROWS}u + row"
    zero = f"{fmt.middle!r}" if fmt.symmetric else "f32((zeros[place$i$ >> 2u] >> ((place$i$ & 3u) * 8u)) & 255u)"
    table = f"(tile$i$ * {fmt.groups(columns)}u + group) * {fmt.levels * TILE_ROWS}u + row" if fmt.codebook else "0u"
    return f"""
{HALF}
{BYTES4}
{element_values(fmt)}
{_scale(fmt)}
{four_inputs("x", columns, "inputs", is_guarded=not whole)}
var<workgroup> sums: array<f32, LANES * {TILE_ROWS}u * TILES * TOKENS>;

@compute @workgroup_size(LANES * {TILE_ROWS}u)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
  let first = id.y * TOKENS;
  let row = thread % {TILE_ROWS}u;
//# for m TOKENS
  let token$m$ = min(first + $m$u, sizes.M - 1u); // those behind the last are not stored
//# end
//# for i TILES
//# for m TOKENS
  var total$i$_$m$ = 0.0;
//# end
//# end
  for (var c = thread / {TILE_ROWS}u; c < {chunks}u; c += LANES) {{
    let group = c / {group_chunks}u;
//# for i TILES
    let tile$i$ = min(id.x * TILES + $i$u, {tiles - 1}u);
    let place$i$ = {place};
    let base$i$ = (tile$i$ * {chunks}u + c) * {words * TILE_ROWS}u + row;
{loads}
    let zero$i$ = {zero};
    let table$i$ = {table};
    let scale$i$ = scale_at(place$i$);
//# end
{steps}
  }}
//# for i TILES
//# for m TOKENS
  sums[($i$u * TOKENS + $m$u) * LANES * {TILE_ROWS}u + thread] = total$i$_$m$;
//# end
//# end
  workgroupBarrier();
  for (var i = thread; i < TILES * TOKENS * {TILE_ROWS}u; i += LANES * {TILE_ROWS}u) {{
    let sum_of = i / {TILE_ROWS}u;
    let out = (id.x * TILES + sum_of / TOKENS) * {TILE_ROWS}u + i % {TILE_ROWS}u;
    let m = first + sum_of % TOKENS;
    if (m < sizes.M && out < {rows}u) {{
      var sum = {"bias[out]" if has_bias else "0.0"};
      for (var lane = 0u; lane < LANES; lane++) {{
        sum += sums[(sum_of * LANES + lane) * {TILE_ROWS}u + i % {TILE_ROWS}u];
      }}
      y[m * {rows}u + out] = sum;
    }}
  }}
}}
"""


def _scale(fmt: Format) -> str:
    """``scale_at``: the factor at a place of the scales."""
    if fmt.codebook:
        value = "1.0"
    elif fmt.scale_type == "F16":
        value = "half(scales[place >> 1u], place)"
    else:
        code = "(scales[place >> 2u] >> ((place & 3u) * 8u)) & 255u"
        value = f"bitcast<f32>(({code}) << 23u)" if fmt.scale_type == "E8M0" else f"e4m3({code}) * tensor_scale[0]"
    return f"fn scale_at(place: u32) -> f32 {{ return {value}; }}"

"""The packed linear in WGSL: codes are taken apart and multiplied in registers, for one token or several at once.

Where it is routed, tokens are pairs of token and expert, and a workgroup's weight is its expert's
(:mod:`compressor.codegen.web.kernels.experts`).

A workgroup computes ``TILES`` tiles of 16 rows: thread ``16 * lane + row`` takes every ``LANES``-th chunk of its row in
each tile, so that neighbouring threads read neighbouring words, for ``TOKENS`` tokens.  Layout:
:mod:`compressor.formats.format`.  Activations that a format rounds are so already
(:mod:`compressor.codegen.web.kernels.activations`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from compressor.codegen.kernels.experts import Routing
from compressor.codegen.web.kernel import PROMPT_TOKENS, Buffer, Expression, Kernel, variants
from compressor.codegen.web.kernels.activations import Rounded
from compressor.codegen.web.kernels.experts import EXPERT, PLAIN, Rows, routed_rows
from compressor.codegen.web.kernels.products import FloatLoop, IntegerLoop
from compressor.codegen.web.values import HALF
from compressor.errors import UsageError
from compressor.formats.extras import ColumnBlocks, KeptOfGroup, OutlierFeatures, Outliers, SingleZeros, SkippedInputs
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

ONE, MANY = {"LANES": 16, "TILES": 1, "TOKENS": 1}, {"LANES": 4, "TILES": 4, "TOKENS": 8}
VERIFIED = {**ONE, "TOKENS": 4}
"""Shipped constants of decode and of prefill: near the best ones on an H200 (benchmarks/results/webgpu_device.md), and
small enough in groups for software adapters, which take turns among a group's threads; and those of verification."""
FEW = 2
"""Tokens up to which the kernel for one token serves."""
_ONE_CHOICES = {"LANES": (2, 4, 8, 16), "TILES": (1, 2, 4), "TOKENS": (1, 2)}
_MANY_CHOICES = {"LANES": (1, 2, 4, 8, 16), "TILES": (1, 2, 4), "TOKENS": (4, 8, 16)}
_UNPACKING = 4
"""What taking a code apart costs, in multiplications."""


_NAMES: Mapping[type, str] = MappingProxyType(
    {
        Outliers: "single weights in float16 (_S)",
        OutlierFeatures: "columns in float16 (_F)",
        ColumnBlocks: "blocks that are left out (_B16x1, _B32x4, _B32x64)",
        KeptOfGroup: "N:M weights that are kept",
        SingleZeros: "single weights that are left out (_B1x1)",
        SkippedInputs: "inputs that are skipped (_SKIP)",
    }
)


def supports(fmt: Format) -> str:
    """Say what these kernels do not compute of a format, and what to do; an empty text if they compute all."""
    missing = [_NAMES.get(type(extra), extra.suffix) for extra in fmt.extras]
    if not missing:
        return ""
    return (
        f"format {fmt.name}: the target webgpu has no kernels for {' and '.join(missing)}; take a format without "
        "them, such as W4A16_G128, W8A8 or NF4_G64"
    )


def packed_linear(
    rows: int, columns: int, fmt: Format, has_bias: bool, routing: Routing | None = None, verifies: bool = False
) -> tuple[Kernel, ...]:
    """Kernels for ``y = x @ W.T + bias``: of few tokens, and of many.

    Buffers: x f32 [M, columns], or where products are of integers x u32 [M, words] and numbers f32 [M, numbers]
    (:class:`compressor.codegen.web.kernels.activations.Rounded`); :func:`stored_parts` as words, bias f32 [rows] (where
    there is one), y f32 [M, rows].  Sizes: M.

    Args:
        routing: of a routed linear: x has M or M * each rows, the buffer ``routes`` u32
            (:func:`compressor.codegen.web.kernels.experts.sort_pairs`) comes behind x and numbers, parts and bias are
            those of all experts behind each other, and y is f32 [M, each, rows].
        verifies: in place of the kernel of many tokens one that adds in the order of that of one, so that a row's bits
            do not depend on how many are computed with it.
    Raises:
        UsageError: the format stores weights as floats.
    """
    if reason := supports(fmt):
        raise UsageError(reason)
    if not fmt.integer_products:
        fmt = replace(fmt, activations=None)
    if fmt.integer_products:
        layout = Rounded.of(columns, fmt)
        step = layout.step_columns
        buffers = [Buffer("x", "vec4<u32>" if layout.is_vector else "u32"), Buffer("numbers")]
    else:
        step, buffers = fmt.chunk_columns, [Buffer("x", "vec4<f32>" if columns % 4 == 0 else "f32")]
    buffers += [] if routing is None else [Buffer("routes", "u32")]
    buffers += part_buffers(fmt)
    buffers += [Buffer("bias")] * has_bias
    buffers.append(Buffer("y", written=True))
    tiles = -(-rows // TILE_ROWS)
    family = "packed_linear" if routing is None else "packed_routed_linear"
    name = f"packed_linear_{rows}x{columns}_{fmt.name.replace('.', 'p')}{'_bias' if has_bias else ''}"
    name = name if routing is None else f"routed_{routing.name}_{name}"

    def kernel(suffix: str, constants: dict[str, int], limits: dict[str, int]) -> Kernel:
        which = PLAIN if routing is None else routed_rows(routing, bool(limits))
        groups: tuple[Expression, ...] = (["ceil", tiles, "TILES"], which.groups, 1)
        found, details, text = tuple(buffers), {"format": fmt.name}, _text(rows, columns, fmt, has_bias, which)
        space = _space(tiles, -(-columns // step), step, constants, 1 if limits else PROMPT_TOKENS)
        if routing is not None and limits:
            space = [one for one in space if one["TOKENS"] == 1]  # a workgroup has one pair
        return Kernel(f"{name}{suffix}", family, found, ("M",), constants, groups, text, limits, space, details)

    one = kernel("_one", ONE, {"M": FEW})
    if verifies:
        return one, replace(kernel("_few", VERIFIED, {}), space=(), order_of=one.name)
    return one, kernel("_many", MANY, {})


def stored_parts(fmt: Format) -> list[str]:
    """Names of the parts that products read: all but the scale with which activations were rounded."""
    return [name for name in fmt.parts(TILE_ROWS, fmt.chunk_columns) if name != "input_scale"]


def part_buffers(fmt: Format) -> list[Buffer]:
    """Return the buffers of the parts that products read, as words."""
    kinds = fmt.parts(TILE_ROWS, fmt.chunk_columns)
    return [Buffer(name, "f32" if kinds[name][0] == "float32" else "u32") for name in stored_parts(fmt)]


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


def _text(rows: int, columns: int, fmt: Format, has_bias: bool, which: Rows) -> str:
    kind = IntegerLoop if fmt.integer_products else FloatLoop
    loop = kind(rows, columns, fmt, which.expert)
    lanes = f"""      for (var lane = 0u; lane < LANES; lane++) {{
        sum += sums[(sum_of * LANES + lane) * {TILE_ROWS}u + i % {TILE_ROWS}u];
      }}"""
    return f"""
{HALF}{f"{chr(10)}{EXPERT}" if which.expert else ""}
{loop.functions()}
{scale_function(fmt, which.expert)}
var<workgroup> sums: array<f32, LANES * {TILE_ROWS}u * TILES * TOKENS>;

@compute @workgroup_size(LANES * {TILE_ROWS}u)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
{which.begin}
  let row = thread % {TILE_ROWS}u;
//# for m TOKENS
  let token$m$ = {which.token}
//# end
//# for i TILES
//# for m TOKENS
  var total$i$_$m$ = 0.0;
//# end
//# end
{loop.text()}
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
    if (m < {which.end} && out < {rows}u) {{
{which.outputs(rows, has_bias, lanes)}
    }}
  }}
}}
"""


def scale_function(fmt: Format, expert: str = "") -> str:
    """Return ``scale_at``: the factor at a place of the scales; ``expert`` is that whose weight is read."""
    if fmt.codebook:
        value = "1.0"
    elif fmt.scale_type == "F16":
        value = "half(scales[place >> 1u], place)"
    else:
        code = "(scales[place >> 2u] >> ((place & 3u) * 8u)) & 255u"
        value = (
            f"bitcast<f32>(({code}) << 23u)"
            if fmt.scale_type == "E8M0"
            else f"e4m3({code}) * tensor_scale[{expert or 0}]"
        )
    return f"fn scale_at(place: u32) -> f32 {{ return {value}; }}"

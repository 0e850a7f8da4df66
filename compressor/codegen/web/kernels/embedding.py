"""Rows of a table in WGSL, widened or dequantised to float32."""

from __future__ import annotations

from compressor.codegen.web.kernel import LARGEST_GRID, Buffer, Expression, Kernel
from compressor.codegen.web.kernels.packed_linear import part_buffers, scale_function
from compressor.codegen.web.values import (
    BYTES4,
    HALF,
    element_values,
    four_stored,
    quads_of,
    stored_element,
    zero_point,
)
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS


def embedding(rows: int, width: int, storage: str) -> Kernel:
    """``y[i, j] = table[ids[i], j]``.

    Buffers: table [rows, width] as words, ids i32 [N], y f32 [N, width].  Sizes: N.  Ids must lie in the table.
    """
    buffers = (Buffer("table", stored_element(width, storage)), Buffer("ids", "i32"), Buffer("y", written=True))
    text = f"""
{four_stored("table", width, storage)}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
  let token = id.y * {LARGEST_GRID}u + id.x;
  if (token >= sizes.N) {{ return; }}
  let row = u32(ids[token]);
  for (var q = thread; q < {-(-width // 4)}u; q += LANES) {{
    let four = table4(row, q);
    for (var i = 0u; i < 4u && 4u * q + i < {width}u; i++) {{ y[token * {width}u + 4u * q + i] = four[i]; }}
  }}
}}
"""
    name = f"embedding_{rows}x{width}_{storage}"
    return Kernel(name, "embedding", buffers, ("N",), {"LANES": 64}, _GROUPS, text)


def packed_embedding(rows: int, width: int, fmt: Format) -> Kernel:
    """Rows of a packed table: a thread takes every ``LANES``-th chunk of columns of a row.

    Buffers: ids i32 [N], the parts of the table that products read as words, y f32 [N, width].  Sizes: N.  Ids must lie
    in the table.
    """
    words, chunks, groups = fmt.chunk_words, fmt.chunks(width), fmt.groups(width)
    group_chunks = fmt.group_size // fmt.chunk_columns if fmt.group_size else chunks
    loads = "\n".join(f"    let w{n} = codes[base + {TILE_ROWS * n}u];" for n in range(words))
    stores = "\n".join(
        f"    store(at + {4 * n}u, end, values({code}, zero, table) * scale);"
        for n, code in enumerate(quads_of(fmt, "w{}"))
    )
    table = f"(tile * {groups}u + group) * {fmt.levels * TILE_ROWS}u + lane" if fmt.codebook else "0u"
    text = f"""
{HALF}
{BYTES4}
{element_values(fmt)}
{scale_function(fmt)}
fn store(first: u32, end: u32, four: vec4<f32>) {{
  for (var i = 0u; i < 4u; i++) {{ if (first + i < end) {{ y[first + i] = four[i]; }} }}
}}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
  let token = id.y * {LARGEST_GRID}u + id.x;
  if (token >= sizes.N) {{ return; }}
  let tile = u32(ids[token]) / {TILE_ROWS}u;
  let lane = u32(ids[token]) % {TILE_ROWS}u;
  let end = (token + 1u) * {width}u;
  for (var c = thread; c < {chunks}u; c += LANES) {{
    let group = c / {group_chunks}u;
    let place = (tile * {groups}u + group) * {TILE_ROWS}u + lane;
    let base = (tile * {chunks}u + c) * {words * TILE_ROWS}u + lane;
    let at = token * {width}u + c * {fmt.chunk_columns}u;
{loads}
    let zero = {zero_point(fmt, "place")};
    let table = {table};
    let scale = scale_at(place);
{stores}
  }}
}}
"""
    name = f"packed_embedding_{rows}x{width}_{fmt.name.replace('.', 'p')}"
    buffers = (Buffer("ids", "i32"), *part_buffers(fmt), Buffer("y", written=True))
    details = {"format": fmt.name}
    return Kernel(name, "packed_embedding", buffers, ("N",), {"LANES": 64}, _GROUPS, text, details=details)


_GROUPS: tuple[Expression, ...] = (["min", "N", LARGEST_GRID], ["ceil", "N", LARGEST_GRID], 1)

"""Rows of a table in WGSL, widened to float32."""

from __future__ import annotations

from compressor.codegen.web.kernel import LARGEST_GRID, Buffer, Kernel
from compressor.codegen.web.values import four_stored, stored_element


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
    groups = (["min", "N", LARGEST_GRID], ["ceil", "N", LARGEST_GRID], 1)
    return Kernel(f"embedding_{rows}x{width}_{storage}", "embedding", buffers, ("N",), {"LANES": 64}, groups, text)

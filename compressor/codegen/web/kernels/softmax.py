"""Softmax over rows in WGSL, such as that of a router's scores: a workgroup a row."""

from __future__ import annotations

from compressor.codegen.web.kernel import LARGEST_GRID, Buffer, Kernel, joined


def softmax(width: int) -> Kernel:
    """``exp(x - max(x)) / sum(exp(x - max(x)))`` of each row.

    Buffers: x f32 [M, width], y like x.  Sizes: M.
    """
    text = f"""
var<workgroup> parts: array<f32, LANES>;

fn largest(thread: u32, part: f32) -> f32 {{
  {joined("parts", "max({}, {})")}
  return parts[0];
}}

fn total(thread: u32, part: f32) -> f32 {{
  workgroupBarrier();
  {joined("parts", "{} + {}")}
  return parts[0];
}}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
  let row = id.y * {LARGEST_GRID}u + id.x;
  if (row >= sizes.M) {{ return; }}
  let start = row * {width}u;
  var most = x[start];
  for (var i = thread; i < {width}u; i += LANES) {{ most = max(most, x[start + i]); }}
  most = largest(thread, most);
  var sum = 0.0;
  for (var i = thread; i < {width}u; i += LANES) {{ sum += exp(x[start + i] - most); }}
  sum = total(thread, sum);
  for (var i = thread; i < {width}u; i += LANES) {{ y[start + i] = exp(x[start + i] - most) / sum; }}
}}
"""
    groups = (["min", "M", LARGEST_GRID], ["ceil", "M", LARGEST_GRID], 1)
    buffers = (Buffer("x"), Buffer("y", written=True))
    return Kernel(f"softmax_{width}", "softmax", buffers, ("M",), {"LANES": 64}, groups, text)

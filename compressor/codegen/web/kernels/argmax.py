"""The likeliest token of each row of logits, in WGSL."""

from __future__ import annotations

from compressor.codegen.web.kernel import Buffer, Kernel


def argmax(width: int) -> Kernel:
    """Write the kernel that finds the index of each row's largest number, the first of several.

    Buffers: x f32 [M, width], y u32 [M].  Sizes: M.
    """
    text = f"""
var<workgroup> largest: array<f32, LANES>;
var<workgroup> places: array<u32, LANES>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
  var best = x[id.x * {width}u + min(thread, {width - 1}u)];
  var place = min(thread, {width - 1}u);
  for (var i = thread + LANES; i < {width}u; i += LANES) {{
    let value = x[id.x * {width}u + i];
    if (value > best) {{ best = value; place = i; }}
  }}
  largest[thread] = best;
  places[thread] = place;
  workgroupBarrier();
  if (thread == 0u) {{
    for (var i = 1u; i < LANES; i++) {{
      if (largest[i] > best || (largest[i] == best && places[i] < place)) {{ best = largest[i]; place = places[i]; }}
    }}
    y[id.x] = place;
  }}
}}
"""
    buffers = (Buffer("x"), Buffer("y", "u32", written=True))
    return Kernel(f"argmax_{width}", "argmax", buffers, ("M",), {"LANES": 256}, ("M", 1, 1), text)

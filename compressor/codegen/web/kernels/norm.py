"""Root-mean-square and layer normalisation in WGSL: a workgroup a row."""

from __future__ import annotations

from compressor.codegen.web.kernel import LARGEST_GRID, Buffer, Kernel, joined


def norm(width: int, eps: float, centred: bool, has_bias: bool) -> Kernel:
    """``(x - mean?) / sqrt(mean((x - mean?) ** 2) + eps) * weight + bias``.

    Buffers: x f32 [M, width], weight and bias (where there is one) f32 [width], y like x.  Sizes: M.

    Args:
        centred: layer norm (subtract the mean) or RMS norm.
    """
    buffers = (Buffer("x"), Buffer("weight"), *[Buffer("bias")] * has_bias, Buffer("y", written=True))
    family = "layer_norm" if centred else "rms_norm"
    name = f"{family}_{width}_{eps:g}{'_bias' if has_bias else ''}".replace("-", "m").replace(".", "p")
    mean = f"let mean = total(thread, part) / {float(width)};\n  part = 0.0;" if centred else "let mean = 0.0;"
    first = f"for (var i = thread; i < {width}u; i += LANES) {{ part += x[start + i]; }}" if centred else ""
    factor = f"1.0 / sqrt(variance + {eps!r})"
    if centred:  # a variance that overflows has no inverse
        factor = f"bitcast<f32>(select(bitcast<u32>({factor}), 0x7fc00000u, bitcast<u32>(variance) >= 0x7f800000u))"
    text = f"""
var<workgroup> sums: array<f32, LANES>;

fn total(thread: u32, part: f32) -> f32 {{
  workgroupBarrier();
  {joined("sums", "{} + {}")}
  return sums[0];
}}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
  let row = id.y * {LARGEST_GRID}u + id.x;
  if (row >= sizes.M) {{ return; }}
  let start = row * {width}u;
  var part = 0.0;
  {first}
  {mean}
  for (var i = thread; i < {width}u; i += LANES) {{ let d = x[start + i] - mean; part += d * d; }}
  let variance = total(thread, part) / {float(width)};
  let factor = {factor};
  for (var i = thread; i < {width}u; i += LANES) {{
    y[start + i] = (x[start + i] - mean) * factor * weight[i]{" + bias[i]" if has_bias else ""};
  }}
}}
"""
    groups = (["min", "M", LARGEST_GRID], ["ceil", "M", LARGEST_GRID], 1)
    return Kernel(name, family, buffers, ("M",), {"LANES": 64}, groups, text)

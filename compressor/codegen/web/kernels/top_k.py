"""The likeliest token of each row of logits, and several of one row, in WGSL: read back in place of all logits."""

from __future__ import annotations

from compressor.codegen.web.kernel import Buffer, Kernel

MOST = 128
"""The largest number that is served; ties at the end may fill up as much again."""


def top_k(width: int) -> Kernel:
    """Write the kernel that finds the ``K`` largest numbers of the first row, in no order, and those that tie with the
    last of them.

    One workgroup finds the ``K``-th largest number by its bits, eight a pass from the highest (radix selection, Alabi
    et al. 2012, Fast k-selection algorithms for graphics processors), and collects what is as large.

    Buffers: x f32 [M, width]; y u32 [1 + 4 * MOST]: how many there are (at most ``2 * MOST`` are stored), then of each
    its index and its bits.  Sizes: K, at most MOST.
    """
    text = f"""
var<workgroup> counts: array<atomic<u32>, 256>;
var<workgroup> digit: u32;
var<workgroup> missing: u32;
var<workgroup> found: atomic<u32>;

// Larger numbers have larger keys; both zeros have one.
fn key(value: f32) -> u32 {{
  let bits = select(bitcast<u32>(value), 0u, value == 0.0);
  return select(bits | 0x80000000u, ~bits, (bits >> 31u) != 0u);
}}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32) {{
  var prefix = 0u;
  var known = 0u;
  if (thread == 0u) {{
    missing = sizes.K;
    atomicStore(&found, 0u);
  }}
  for (var shift = 32u; shift > 0u; shift -= 8u) {{
    atomicStore(&counts[thread], 0u);
    workgroupBarrier();
    for (var i = thread; i < {width}u; i += 256u) {{
      let one = key(x[i]);
      if ((one & known) == prefix) {{ atomicAdd(&counts[(one >> (shift - 8u)) & 255u], 1u); }}
    }}
    workgroupBarrier();
    if (thread == 0u) {{
      digit = 255u;
      while (digit > 0u && atomicLoad(&counts[digit]) < missing) {{
        missing -= atomicLoad(&counts[digit]);
        digit -= 1u;
      }}
    }}
    workgroupBarrier();
    prefix |= digit << (shift - 8u);
    known |= 255u << (shift - 8u);
  }}
  for (var i = thread; i < {width}u; i += 256u) {{
    if (key(x[i]) >= prefix) {{
      let place = atomicAdd(&found, 1u);
      if (place < {2 * MOST}u) {{
        y[1u + 2u * place] = i;
        y[2u + 2u * place] = bitcast<u32>(x[i]);
      }}
    }}
  }}
  workgroupBarrier();
  if (thread == 0u) {{ y[0] = atomicLoad(&found); }}
}}
"""
    buffers = (Buffer("x"), Buffer("y", "u32", written=True))
    return Kernel(f"top_k_{width}", "top_k", buffers, ("K",), {}, (1, 1, 1), text)


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

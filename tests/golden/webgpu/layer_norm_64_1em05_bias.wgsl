const LANES: u32 = 64u;
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;
struct Sizes { M: u32 }
@group(0) @binding(4) var<uniform> sizes: Sizes;
var<workgroup> sums: array<f32, LANES>;

fn total(thread: u32, part: f32) -> f32 {
  workgroupBarrier();
  sums[thread] = part;
  workgroupBarrier();
  for (var half = LANES / 2u; half > 0u; half /= 2u) {
    if (thread < half) { sums[thread] = sums[thread] + sums[thread + half]; }
    workgroupBarrier();
  }
  return sums[0];
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let row = id.y * 65535u + id.x;
  if (row >= sizes.M) { return; }
  let start = row * 64u;
  var part = 0.0;
  for (var i = thread; i < 64u; i += LANES) { part += x[start + i]; }
  let mean = total(thread, part) / 64.0;
  part = 0.0;
  for (var i = thread; i < 64u; i += LANES) { let d = x[start + i] - mean; part += d * d; }
  let variance = total(thread, part) / 64.0;
  let factor = bitcast<f32>(select(bitcast<u32>(1.0 / sqrt(variance + 1e-05)), 0x7fc00000u, bitcast<u32>(variance) >= 0x7f800000u));
  for (var i = thread; i < 64u; i += LANES) {
    y[start + i] = (x[start + i] - mean) * factor * weight[i] + bias[i];
  }
}

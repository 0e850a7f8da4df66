const ROWS: u32 = 4u;
const LANES: u32 = 16u;
const TOKENS: u32 = 1u;
@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> weight: array<vec2<u32>>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;
struct Sizes { M: u32 }
@group(0) @binding(4) var<uniform> sizes: Sizes;
alias Real = f32;
fn x4(row: u32, q: u32) -> vec4<f32> {
  return x[row * 3u + q];
}
fn weight4(row: u32, q: u32) -> vec4<f32> {
  let both = weight[row * 3u + q];
  return vec4<f32>(unpack2x16float(both.x), unpack2x16float(both.y));
}
var<workgroup> sums: array<f32, ROWS * LANES * TOKENS>;

@compute @workgroup_size(ROWS * LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let first = id.y * TOKENS;
  let row = min(id.x * ROWS + thread / LANES, 7u);
  let token0 = min(first + 0u, sizes.M - 1u); // those behind the last are not stored
  var total0 = 0.0;
  for (var q = thread % LANES; q < 3u; q += LANES) {
    let w = vec4<Real>(weight4(row, q));
    total0 += f32(dot(w, vec4<Real>(x4(token0, q))));
  }
  sums[0u * ROWS * LANES + thread] = total0;
  workgroupBarrier();
  for (var i = thread; i < TOKENS * ROWS; i += ROWS * LANES) {
    let m = first + i / ROWS;
    let out = id.x * ROWS + i % ROWS;
    if (m < sizes.M && out < 8u) {
      var sum = bias[out];
      for (var lane = 0u; lane < LANES; lane++) { sum += sums[i * LANES + lane]; }
      y[m * 8u + out] = sum;
    }
  }
}

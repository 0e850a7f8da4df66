const LANES: u32 = 16u;
const TILES: u32 = 1u;
const TOKENS: u32 = 1u;
@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> codes: array<u32>;
@group(0) @binding(2) var<storage, read> scales: array<u32>;
@group(0) @binding(3) var<storage, read> zeros: array<u32>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;
struct Sizes { M: u32 }
@group(0) @binding(5) var<uniform> sizes: Sizes;
fn half(pair: u32, place: u32) -> f32 { return unpack2x16float(pair)[place & 1u]; }
alias Real = f32;
fn bytes4(word: u32) -> vec4<u32> {
  return (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u);
}
fn values(codes4: u32, zero: f32, table: u32) -> vec4<f32> {
  return vec4<f32>(bytes4(codes4)) - zero;
}
fn inputs(row: u32, q: u32) -> vec4<f32> {
  return x[row * 16u + q];
}
fn scale_at(place: u32) -> f32 { return half(scales[place >> 1u], place); }
var<workgroup> sums: array<f32, LANES * 16u * TILES * TOKENS>;

@compute @workgroup_size(LANES * 16u)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let first = id.y * TOKENS;
  let row = thread % 16u;
  let token0 = min(first + 0u, sizes.M - 1u); // those behind the last are not stored
  var total0_0 = 0.0;
  for (var c = thread / 16u; c < 2u; c += LANES) {
    let group = c / 1u;
    let tile0 = min(id.x * TILES + 0u, 0u);
    let place0 = (tile0 * 2u + group) * 16u + row;
    let base0 = (tile0 * 2u + c) * 48u + row;
    let w0_0 = codes[base0 + 0u];
    let w0_1 = codes[base0 + 16u];
    let w0_2 = codes[base0 + 32u];
    let zero0 = f32((zeros[place0 >> 2u] >> ((place0 & 3u) * 8u)) & 255u);
    let table0 = 0u;
    let scale0 = scale_at(place0);
    {
      let x0 = vec4<Real>(inputs(token0, c * 8u + 0u));
      let v0 = vec4<Real>(values(((w0_0 >> 0u) & 0x03030303u) | (((w0_2 >> 0u) & 0x01010101u) << 2u), zero0, table0) * scale0);
      total0_0 += f32(dot(v0, x0));
    }
    {
      let x0 = vec4<Real>(inputs(token0, c * 8u + 1u));
      let v0 = vec4<Real>(values(((w0_0 >> 2u) & 0x03030303u) | (((w0_2 >> 1u) & 0x01010101u) << 2u), zero0, table0) * scale0);
      total0_0 += f32(dot(v0, x0));
    }
    {
      let x0 = vec4<Real>(inputs(token0, c * 8u + 2u));
      let v0 = vec4<Real>(values(((w0_0 >> 4u) & 0x03030303u) | (((w0_2 >> 2u) & 0x01010101u) << 2u), zero0, table0) * scale0);
      total0_0 += f32(dot(v0, x0));
    }
    {
      let x0 = vec4<Real>(inputs(token0, c * 8u + 3u));
      let v0 = vec4<Real>(values(((w0_0 >> 6u) & 0x03030303u) | (((w0_2 >> 3u) & 0x01010101u) << 2u), zero0, table0) * scale0);
      total0_0 += f32(dot(v0, x0));
    }
    {
      let x0 = vec4<Real>(inputs(token0, c * 8u + 4u));
      let v0 = vec4<Real>(values(((w0_1 >> 0u) & 0x03030303u) | (((w0_2 >> 4u) & 0x01010101u) << 2u), zero0, table0) * scale0);
      total0_0 += f32(dot(v0, x0));
    }
    {
      let x0 = vec4<Real>(inputs(token0, c * 8u + 5u));
      let v0 = vec4<Real>(values(((w0_1 >> 2u) & 0x03030303u) | (((w0_2 >> 5u) & 0x01010101u) << 2u), zero0, table0) * scale0);
      total0_0 += f32(dot(v0, x0));
    }
    {
      let x0 = vec4<Real>(inputs(token0, c * 8u + 6u));
      let v0 = vec4<Real>(values(((w0_1 >> 4u) & 0x03030303u) | (((w0_2 >> 6u) & 0x01010101u) << 2u), zero0, table0) * scale0);
      total0_0 += f32(dot(v0, x0));
    }
    {
      let x0 = vec4<Real>(inputs(token0, c * 8u + 7u));
      let v0 = vec4<Real>(values(((w0_1 >> 6u) & 0x03030303u) | (((w0_2 >> 7u) & 0x01010101u) << 2u), zero0, table0) * scale0);
      total0_0 += f32(dot(v0, x0));
    }
  }
  sums[(0u * TOKENS + 0u) * LANES * 16u + thread] = total0_0;
  workgroupBarrier();
  for (var i = thread; i < TILES * TOKENS * 16u; i += LANES * 16u) {
    let sum_of = i / 16u;
    let out = (id.x * TILES + sum_of / TOKENS) * 16u + i % 16u;
    let m = first + sum_of % TOKENS;
    if (m < sizes.M && out < 16u) {
      var sum = 0.0;
      for (var lane = 0u; lane < LANES; lane++) {
        sum += sums[(sum_of * LANES + lane) * 16u + i % 16u];
      }
      y[m * 16u + out] = sum;
    }
  }
}

const LANES: u32 = 16u;
const TILES: u32 = 1u;
const TOKENS: u32 = 1u;
@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> codes: array<u32>;
@group(0) @binding(2) var<storage, read> scales: array<u32>;
@group(0) @binding(3) var<storage, read> tensor_scale: array<f32>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;
struct Sizes { M: u32 }
@group(0) @binding(5) var<uniform> sizes: Sizes;
fn half(pair: u32, place: u32) -> f32 { return unpack2x16float(pair)[place & 1u]; }
alias Real = f32;
fn bytes4(word: u32) -> vec4<u32> {
  return (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u);
}
fn e4m3(code: u32) -> f32 {
  let e = (code >> 3u) & 15u;
  let m = code & 7u;
  let normal = bitcast<f32>(((e + 120u) << 23u) | (m << 20u));
  let size = select(normal, f32(m) * 0.001953125, e == 0u);
  return select(size, -size, (code >> 7u) != 0u);
}
fn e2m1(code: u32) -> f32 {
  let e = (code >> 1u) & 3u;
  let m = code & 1u;
  let normal = bitcast<f32>(((e + 126u) << 23u) | (m << 22u));
  let size = select(normal, f32(m) * 0.5, e == 0u);
  return select(size, -size, (code >> 3u) != 0u);
}
fn values(codes4: u32, zero: f32, table: u32) -> vec4<f32> {
  let b = bytes4(codes4); return vec4<f32>(e2m1(b.x), e2m1(b.y), e2m1(b.z), e2m1(b.w));
}
fn inputs(row: u32, q: u32) -> vec4<f32> {
  return x[row * 16u + q];
}
fn scale_at(place: u32) -> f32 { return e4m3((scales[place >> 2u] >> ((place & 3u) * 8u)) & 255u) * tensor_scale[0]; }
var<workgroup> sums: array<f32, LANES * 16u * TILES * TOKENS>;

@compute @workgroup_size(LANES * 16u)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let first = id.y * TOKENS;
  let row = thread % 16u;
  let token0 = min(first + 0u, sizes.M - 1u); // those behind the last are not stored
  var total0_0 = 0.0;
  for (var c = thread / 16u; c < 8u; c += LANES) {
    let group = c / 2u;
    let tile0 = min(id.x * TILES + 0u, 0u);
    let place0 = (tile0 * 4u + group) * 16u + row;
    let base0 = (tile0 * 8u + c) * 16u + row;
    let w0_0 = codes[base0 + 0u];
    let zero0 = 8.0;
    let table0 = 0u;
    let scale0 = scale_at(place0);
    {
      let x0 = vec4<Real>(inputs(token0, c * 2u + 0u));
      let v0 = vec4<Real>(values(((w0_0 >> 0u) & 0x0f0f0f0fu), zero0, table0) * scale0);
      total0_0 += f32(dot(v0, x0));
    }
    {
      let x0 = vec4<Real>(inputs(token0, c * 2u + 1u));
      let v0 = vec4<Real>(values(((w0_0 >> 4u) & 0x0f0f0f0fu), zero0, table0) * scale0);
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

const LANES: u32 = 8u;
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
fn bytes4(word: u32) -> vec4<u32> {
  return (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u);
}
fn values(codes4: u32, zero: f32, table: u32) -> vec4<f32> {
  return vec4<f32>(bytes4(codes4)) - zero;
}
fn scale_at(place: u32) -> f32 { return half(scales[place >> 1u], place); }
fn inputs(m: u32, q: u32) -> vec4<f32> {
  if (m >= sizes.M) { return vec4<f32>(); }
  return x[m * 16u + q];
}
var<workgroup> sums: array<f32, LANES * 16u * TILES * TOKENS>;

@compute @workgroup_size(LANES * 16u)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let first = id.y * TOKENS;
  let row = thread % 16u;
  var total = array<f32, TILES * TOKENS>();
  for (var c = thread / 16u; c < 2u; c += LANES) {
    let group = c / 1u;
    var w = array<u32, 3u * TILES>();
    var zero = array<f32, TILES>();
    var table = array<u32, TILES>();
    var scale = array<f32, TILES>();
    for (var i = 0u; i < TILES; i++) {
      let tile = min(id.x * TILES + i, 0u);
      let place = ((tile) * 2u + group) * 16u + row;
      let base = (tile * 2u + c) * 48u + row;
      w[3u * i + 0u] = codes[base + 0u];
      w[3u * i + 1u] = codes[base + 16u];
      w[3u * i + 2u] = codes[base + 32u];
      zero[i] = f32((zeros[place >> 2u] >> ((place & 3u) * 8u)) & 255u);
      table[i] = 0u;
      scale[i] = scale_at(place);
    }
    var x4 = array<vec4<f32>, TOKENS>();
    var part = array<f32, TILES * TOKENS>();
    for (var m = 0u; m < TOKENS; m++) { x4[m] = inputs(first + m, c * 8u + 0u); }
    for (var i = 0u; i < TILES; i++) {
      let v = values(((w[3u * i + 0u] >> 0u) & 0x03030303u) | (((w[3u * i + 2u] >> 0u) & 0x01010101u) << 2u), zero[i], table[i]);
      for (var m = 0u; m < TOKENS; m++) { part[i * TOKENS + m] += dot(v, x4[m]); }
    }
    for (var m = 0u; m < TOKENS; m++) { x4[m] = inputs(first + m, c * 8u + 1u); }
    for (var i = 0u; i < TILES; i++) {
      let v = values(((w[3u * i + 0u] >> 2u) & 0x03030303u) | (((w[3u * i + 2u] >> 1u) & 0x01010101u) << 2u), zero[i], table[i]);
      for (var m = 0u; m < TOKENS; m++) { part[i * TOKENS + m] += dot(v, x4[m]); }
    }
    for (var m = 0u; m < TOKENS; m++) { x4[m] = inputs(first + m, c * 8u + 2u); }
    for (var i = 0u; i < TILES; i++) {
      let v = values(((w[3u * i + 0u] >> 4u) & 0x03030303u) | (((w[3u * i + 2u] >> 2u) & 0x01010101u) << 2u), zero[i], table[i]);
      for (var m = 0u; m < TOKENS; m++) { part[i * TOKENS + m] += dot(v, x4[m]); }
    }
    for (var m = 0u; m < TOKENS; m++) { x4[m] = inputs(first + m, c * 8u + 3u); }
    for (var i = 0u; i < TILES; i++) {
      let v = values(((w[3u * i + 0u] >> 6u) & 0x03030303u) | (((w[3u * i + 2u] >> 3u) & 0x01010101u) << 2u), zero[i], table[i]);
      for (var m = 0u; m < TOKENS; m++) { part[i * TOKENS + m] += dot(v, x4[m]); }
    }
    for (var m = 0u; m < TOKENS; m++) { x4[m] = inputs(first + m, c * 8u + 4u); }
    for (var i = 0u; i < TILES; i++) {
      let v = values(((w[3u * i + 1u] >> 0u) & 0x03030303u) | (((w[3u * i + 2u] >> 4u) & 0x01010101u) << 2u), zero[i], table[i]);
      for (var m = 0u; m < TOKENS; m++) { part[i * TOKENS + m] += dot(v, x4[m]); }
    }
    for (var m = 0u; m < TOKENS; m++) { x4[m] = inputs(first + m, c * 8u + 5u); }
    for (var i = 0u; i < TILES; i++) {
      let v = values(((w[3u * i + 1u] >> 2u) & 0x03030303u) | (((w[3u * i + 2u] >> 5u) & 0x01010101u) << 2u), zero[i], table[i]);
      for (var m = 0u; m < TOKENS; m++) { part[i * TOKENS + m] += dot(v, x4[m]); }
    }
    for (var m = 0u; m < TOKENS; m++) { x4[m] = inputs(first + m, c * 8u + 6u); }
    for (var i = 0u; i < TILES; i++) {
      let v = values(((w[3u * i + 1u] >> 4u) & 0x03030303u) | (((w[3u * i + 2u] >> 6u) & 0x01010101u) << 2u), zero[i], table[i]);
      for (var m = 0u; m < TOKENS; m++) { part[i * TOKENS + m] += dot(v, x4[m]); }
    }
    for (var m = 0u; m < TOKENS; m++) { x4[m] = inputs(first + m, c * 8u + 7u); }
    for (var i = 0u; i < TILES; i++) {
      let v = values(((w[3u * i + 1u] >> 6u) & 0x03030303u) | (((w[3u * i + 2u] >> 7u) & 0x01010101u) << 2u), zero[i], table[i]);
      for (var m = 0u; m < TOKENS; m++) { part[i * TOKENS + m] += dot(v, x4[m]); }
    }
    for (var i = 0u; i < TILES * TOKENS; i++) { total[i] += scale[i / TOKENS] * part[i]; }
  }
  for (var i = 0u; i < TILES * TOKENS; i++) { sums[i * LANES * 16u + thread] = total[i]; }
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

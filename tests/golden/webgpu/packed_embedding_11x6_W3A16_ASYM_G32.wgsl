const LANES: u32 = 64u;
@group(0) @binding(0) var<storage, read> ids: array<i32>;
@group(0) @binding(1) var<storage, read> codes: array<u32>;
@group(0) @binding(2) var<storage, read> scales: array<u32>;
@group(0) @binding(3) var<storage, read> zeros: array<u32>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;
struct Sizes { N: u32 }
@group(0) @binding(5) var<uniform> sizes: Sizes;
fn half(pair: u32, place: u32) -> f32 { return unpack2x16float(pair)[place & 1u]; }
fn bytes4(word: u32) -> vec4<u32> {
  return (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u);
}
fn values(codes4: u32, zero: f32, table: u32) -> vec4<f32> {
  return vec4<f32>(bytes4(codes4)) - zero;
}
fn scale_at(place: u32) -> f32 { return half(scales[place >> 1u], place); }
fn store(first: u32, end: u32, four: vec4<f32>) {
  for (var i = 0u; i < 4u; i++) { if (first + i < end) { y[first + i] = four[i]; } }
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let token = id.y * 65535u + id.x;
  if (token >= sizes.N) { return; }
  let tile = u32(ids[token]) / 16u;
  let lane = u32(ids[token]) % 16u;
  let end = (token + 1u) * 6u;
  for (var c = thread; c < 1u; c += LANES) {
    let group = c / 1u;
    let place = (tile * 1u + group) * 16u + lane;
    let base = (tile * 1u + c) * 48u + lane;
    let at = token * 6u + c * 32u;
    let w0 = codes[base + 0u];
    let w1 = codes[base + 16u];
    let w2 = codes[base + 32u];
    let zero = f32((zeros[place >> 2u] >> ((place & 3u) * 8u)) & 255u);
    let table = 0u;
    let scale = scale_at(place);
    store(at + 0u, end, values(((w0 >> 0u) & 0x03030303u) | (((w2 >> 0u) & 0x01010101u) << 2u), zero, table) * scale);
    store(at + 4u, end, values(((w0 >> 2u) & 0x03030303u) | (((w2 >> 1u) & 0x01010101u) << 2u), zero, table) * scale);
    store(at + 8u, end, values(((w0 >> 4u) & 0x03030303u) | (((w2 >> 2u) & 0x01010101u) << 2u), zero, table) * scale);
    store(at + 12u, end, values(((w0 >> 6u) & 0x03030303u) | (((w2 >> 3u) & 0x01010101u) << 2u), zero, table) * scale);
    store(at + 16u, end, values(((w1 >> 0u) & 0x03030303u) | (((w2 >> 4u) & 0x01010101u) << 2u), zero, table) * scale);
    store(at + 20u, end, values(((w1 >> 2u) & 0x03030303u) | (((w2 >> 5u) & 0x01010101u) << 2u), zero, table) * scale);
    store(at + 24u, end, values(((w1 >> 4u) & 0x03030303u) | (((w2 >> 6u) & 0x01010101u) << 2u), zero, table) * scale);
    store(at + 28u, end, values(((w1 >> 6u) & 0x03030303u) | (((w2 >> 7u) & 0x01010101u) << 2u), zero, table) * scale);
  }
}

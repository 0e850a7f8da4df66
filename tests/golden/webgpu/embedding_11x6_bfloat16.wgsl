const LANES: u32 = 64u;
@group(0) @binding(0) var<storage, read> table: array<u32>;
@group(0) @binding(1) var<storage, read> ids: array<i32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
struct Sizes { N: u32 }
@group(0) @binding(3) var<uniform> sizes: Sizes;
fn table4(row: u32, q: u32) -> vec4<f32> {
  var found = vec4<f32>();
  for (var i = 0u; i < 4u; i++) {
    let place = row * 6u + 4u * q + i;
    if (4u * q + i < 6u) { found[i] = bitcast<vec2<f32>>(vec2<u32>(table[place >> 1u] << 16u, table[place >> 1u] & 0xffff0000u))[place & 1u]; }
  }
  return found;
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let token = id.y * 65535u + id.x;
  if (token >= sizes.N) { return; }
  let row = u32(ids[token]);
  for (var q = thread; q < 2u; q += LANES) {
    let four = table4(row, q);
    for (var i = 0u; i < 4u && 4u * q + i < 6u; i++) { y[token * 6u + 4u * q + i] = four[i]; }
  }
}

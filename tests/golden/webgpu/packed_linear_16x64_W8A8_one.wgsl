const LANES: u32 = 16u;
const TILES: u32 = 1u;
const TOKENS: u32 = 1u;
@group(0) @binding(0) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> numbers: array<f32>;
@group(0) @binding(2) var<storage, read> codes: array<u32>;
@group(0) @binding(3) var<storage, read> scales: array<u32>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;
struct Sizes { M: u32 }
@group(0) @binding(5) var<uniform> sizes: Sizes;
fn half(pair: u32, place: u32) -> f32 { return unpack2x16float(pair)[place & 1u]; }

fn scale_at(place: u32) -> f32 { return half(scales[place >> 1u], place); }
var<workgroup> sums: array<f32, LANES * 16u * TILES * TOKENS>;

@compute @workgroup_size(LANES * 16u)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let first = id.y * TOKENS;
  let row = thread % 16u;
  let token0 = min(first + 0u, sizes.M - 1u); // those behind the last are not stored
  var total0_0 = 0.0;
  let tile0 = min(id.x * TILES + 0u, 0u);
  var sum0_0 = 0;
  for (var s = thread / 16u; s < 4u; s += LANES) {

    let base0 = (tile0 * 16u + s * 4u) * 16u + row;
    let w0_0_0 = codes[base0 + 0u];
    let w0_1_0 = codes[base0 + 16u];
    let w0_2_0 = codes[base0 + 32u];
    let w0_3_0 = codes[base0 + 48u];
    {
      let x0 = x[token0 * 4u + s * 1u + 0u];
      let c0_0 = (w0_0_0) ^ 0x80808080u;
      let c0_1 = (w0_1_0) ^ 0x80808080u;
      let c0_2 = (w0_2_0) ^ 0x80808080u;
      let c0_3 = (w0_3_0) ^ 0x80808080u;
      sum0_0 += dot4I8Packed(c0_0, x0.x) + dot4I8Packed(c0_1, x0.y) + dot4I8Packed(c0_2, x0.z) + dot4I8Packed(c0_3, x0.w);
    }

  }
  let factor0 = numbers[token0 * 5u + 0u];
  let place0 = (tile0 * 1u + 0u) * 16u + row;
  let scale0 = scale_at(place0);
  total0_0 += f32(sum0_0) * (scale0 * factor0);
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

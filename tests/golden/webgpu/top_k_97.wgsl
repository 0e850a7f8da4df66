@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<u32>;
struct Sizes { K: u32 }
@group(0) @binding(2) var<uniform> sizes: Sizes;
var<workgroup> counts: array<atomic<u32>, 256>;
var<workgroup> digit: u32;
var<workgroup> missing: u32;
var<workgroup> found: atomic<u32>;

// Larger numbers have larger keys; both zeros have one.
fn key(value: f32) -> u32 {
  let bits = select(bitcast<u32>(value), 0u, value == 0.0);
  return select(bits | 0x80000000u, ~bits, (bits >> 31u) != 0u);
}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32) {
  var prefix = 0u;
  var known = 0u;
  if (thread == 0u) {
    missing = sizes.K;
    atomicStore(&found, 0u);
  }
  for (var shift = 32u; shift > 0u; shift -= 8u) {
    atomicStore(&counts[thread], 0u);
    workgroupBarrier();
    for (var i = thread; i < 97u; i += 256u) {
      let one = key(x[i]);
      if ((one & known) == prefix) { atomicAdd(&counts[(one >> (shift - 8u)) & 255u], 1u); }
    }
    workgroupBarrier();
    if (thread == 0u) {
      digit = 255u;
      while (digit > 0u && atomicLoad(&counts[digit]) < missing) {
        missing -= atomicLoad(&counts[digit]);
        digit -= 1u;
      }
    }
    workgroupBarrier();
    prefix |= digit << (shift - 8u);
    known |= 255u << (shift - 8u);
  }
  for (var i = thread; i < 97u; i += 256u) {
    if (key(x[i]) >= prefix) {
      let place = atomicAdd(&found, 1u);
      if (place < 256u) {
        y[1u + 2u * place] = i;
        y[2u + 2u * place] = bitcast<u32>(x[i]);
      }
    }
  }
  workgroupBarrier();
  if (thread == 0u) { y[0] = atomicLoad(&found); }
}

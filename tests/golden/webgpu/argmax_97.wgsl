const LANES: u32 = 256u;
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<u32>;
struct Sizes { M: u32 }
@group(0) @binding(2) var<uniform> sizes: Sizes;
var<workgroup> largest: array<f32, LANES>;
var<workgroup> places: array<u32, LANES>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  var best = x[id.x * 97u + min(thread, 96u)];
  var place = min(thread, 96u);
  for (var i = thread + LANES; i < 97u; i += LANES) {
    let value = x[id.x * 97u + i];
    if (value > best) { best = value; place = i; }
  }
  largest[thread] = best;
  places[thread] = place;
  workgroupBarrier();
  if (thread == 0u) {
    for (var i = 1u; i < LANES; i++) {
      if (largest[i] > best || (largest[i] == best && places[i] < place)) { best = largest[i]; place = places[i]; }
    }
    y[id.x] = place;
  }
}

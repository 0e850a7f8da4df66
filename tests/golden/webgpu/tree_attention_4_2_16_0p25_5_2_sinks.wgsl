const LANES: u32 = 64u;
const QUERIES: u32 = 1u;
@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> keys: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> held: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> tree: array<vec4<i32>>;
@group(0) @binding(4) var<storage, read> sinks: array<f32>;
@group(0) @binding(5) var<storage, read_write> y: array<vec4<f32>>;
struct Sizes { S: u32, T: u32 }
@group(0) @binding(6) var<uniform> sizes: Sizes;
fn row_of(token: u32, j: u32) -> u32 {
  var node = tree[token];
  while (u32(node.x) > j && node.y >= 0) { node = tree[node.y]; }
  return select(j, u32(node.w), u32(node.x) == j);
}

const LOWEST = -3.0e38;
const HIDDEN = -3.4e38;
const ITEMS: u32 = QUERIES * 4u;
const PARTS: u32 = max(1u, LANES / ITEMS);
const EACH: u32 = (ITEMS * PARTS + LANES - 1u) / LANES;
var<workgroup> query: array<vec4<f32>, ITEMS>;
var<workgroup> scores: array<f32, QUERIES * LANES>;
var<workgroup> highest: array<f32, QUERIES>;
var<workgroup> shrink: array<f32, QUERIES>;
var<workgroup> sums: array<f32, QUERIES>;
var<workgroup> parts: array<vec4<f32>, ITEMS * PARTS>;

fn product(a: vec4<f32>, b: vec4<f32>) -> f32 { return dot(a, b); }

var<workgroup> rows: array<u32, LANES>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let first = id.x * QUERIES;
  let batch = id.y / 4u;
  let head = id.y % 4u;
  let base = (u32(tree[first].z) * 2u + head / 2u) * sizes.T;
  for (var i = thread; i < ITEMS; i += LANES) {
    let s = min(first + i / 4u, sizes.S - 1u);
    query[i] = q[(id.y * sizes.S + s) * 4u + i % 4u] * 0.25;
  }
  for (var n = thread; n < QUERIES; n += LANES) {
    highest[n] = sinks[head];
    sums[n] = 1.0;
  }
  var totals = array<vec4<f32>, EACH>();
  let end = u32(tree[first].x) + 1u;
  for (var at = u32(max(0, tree[first].x - 4)); at < end; at += LANES) {
    workgroupBarrier();
    let j = at + thread;
    var found0 = 0.0;
    if (j < end) {
      let row = row_of(first, j);
      rows[thread] = row;
      for (var i = 0u; i < 4u; i++) {
        let key = keys[(base + row) * 4u + i];
        found0 += product(query[4u * 0u + i], key);
      }
    }
    {
      let n = 0u;
      let score = found0;
      scores[n * LANES + thread] = select(HIDDEN, select(2.0 * tanh(clamp(score / 2.0, -20.0, 20.0)), score, (bitcast<u32>(score) & 0x7fffffffu) > 0x7f800000u), j < end && j <= u32(tree[first].x) && j + 5u > u32(tree[first].x));
    }
    workgroupBarrier();
    for (var n = thread; n < QUERIES; n += LANES) {
      var most = highest[n];
      for (var k = 0u; k < LANES; k++) { most = max(most, scores[n * LANES + k]); }
      shrink[n] = exp(highest[n] - most);
      highest[n] = most;
    }
    workgroupBarrier();
    for (var n = 0u; n < QUERIES; n++) {
      scores[n * LANES + thread] = exp(scores[n * LANES + thread] - highest[n]);
    }
    workgroupBarrier();
    for (var n = thread; n < QUERIES; n += LANES) {
      var sum = sums[n] * shrink[n];
      for (var k = 0u; k < LANES; k++) { sum += scores[n * LANES + k]; }
      sums[n] = sum;
    }
    let count = min(LANES, end - at);
    for (var e = 0u; e < EACH; e++) {
      let item = (e * LANES + thread) / PARTS;
      if (item < ITEMS) {
        let n = item / 4u;
        var total = totals[e] * shrink[n];
        for (var k = thread % PARTS; k < count; k += PARTS) {
          total += held[(base + rows[k]) * 4u + item % 4u] * scores[n * LANES + k];
        }
        totals[e] = total;
      }
    }
  }
  for (var e = 0u; e < EACH; e++) {
    let place = e * LANES + thread;
    if (place < ITEMS * PARTS) { parts[place] = totals[e]; }
  }
  workgroupBarrier();
  for (var item = thread; item < ITEMS; item += LANES) {
    let s = first + item / 4u;
    var total = parts[item * PARTS];
    for (var part = 1u; part < PARTS; part++) { total += parts[item * PARTS + part]; }
    let weight = sums[item / 4u];
    if (s < sizes.S) {
      y[((batch * sizes.S + s) * 4u + head) * 4u + item % 4u] = total / weight;
    }
  }
}

"""Attention of tokens in trees in WGSL: each attends as a single token does, over the rows that lie on its path.

A workgroup serves one query of one head in the order of the kernel for a single token
(:mod:`compressor.codegen.web.kernels.attention`): the same keys meet the same threads and are added in the same order,
so a verified token has the bits of a step's.  Only where a key lies differs: behind the position of its root it is in
the row of an ancestor, which is found by walking up the tree.
"""

from __future__ import annotations

from dataclasses import replace

from compressor.codegen.web.kernel import Buffer, Kernel
from compressor.codegen.web.kernels.attention import ONE, attention_text, cached_attention, element_of
from compressor.codegen.web.kernels.sight import Sight


def join_tree() -> Kernel:
    """Write the kernel that puts what is known of a token side by side, since a kernel may bind eight buffers only.

    Buffers: position, parent, slot, row i32 [S], tree i32 [S, 4].  Sizes: S.
    """
    text = """
@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let s = id.x;
  if (s < sizes.S) { tree[s] = vec4<i32>(position[s], parent[s], slot[s], row[s]); }
}
"""
    given = [Buffer(name, "i32") for name in ("position", "parent", "slot", "row")]
    buffers = (*given, Buffer("tree", "vec4<i32>", written=True))
    return Kernel("join_tree", "join_tree", buffers, ("S",), {"LANES": 64}, (["ceil", "S", "LANES"], 1, 1), text)


def write_rows(kv_heads: int, width: int) -> Kernel:
    """Write the kernel that stores keys or values of tokens in their rows of their sequences' caches.

    Buffers: added f32 [1, kv_heads, S, width], tree i32 [S, 4], cache f32 [N, kv_heads, T, width].  Sizes: S, T.
    """
    text = f"""
@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
  let token = tree[id.x];
  let to = (u32(token.z) * {kv_heads}u + id.y) * sizes.T + u32(token.w);
  for (var i = thread; i < {width}u; i += LANES) {{
    cache[to * {width}u + i] = added[(id.y * sizes.S + id.x) * {width}u + i];
  }}
}}
"""
    buffers = (Buffer("added"), Buffer("tree", "vec4<i32>"), Buffer("cache", written=True))
    name = f"write_rows_{kv_heads}x{width}"
    return Kernel(name, "write_rows", buffers, ("S", "T"), {"LANES": 64}, ("S", kv_heads, 1), text)


def tree_attention(
    heads: int,
    kv_heads: int,
    width: int,
    scale: float,
    window: int,
    softcap: float,
    has_sinks: bool,
    chunk: int = 0,
    has_slopes: bool = False,
    biases: int = 0,
) -> Kernel:
    """Attention of tokens in trees over caches that hold their keys and values already; see
    :func:`compressor.ops.tree_attention.tree_attention`.

    Buffers: q f32 [1, heads, S, width], keys and held f32 [N, kv_heads, T, width], tree i32 [S, 4] (:func:`join_tree`),
    sinks and slopes f32 [heads], biases f32 [``biases``, heads] (where there are any), y f32 [1, S, heads, width].
    Sizes: S, T.
    """
    sees = Sight(heads, window, softcap, has_sinks, chunk, has_slopes, biases)
    own = "u32(tree[first].x)"
    text = attention_text(
        heads,
        kv_heads,
        width,
        scale,
        places="sizes.T",
        begin=sees.begin("tree[first].x"),
        end=f"{own} + 1u",
        score=sees.score(own),
        seen=sees.seen(own),
        sink=sees.sink,
        sequence="u32(tree[first].z)",
        place="row_of(first, j)",
    )
    single, _ = cached_attention(heads, kv_heads, width, scale, window, softcap, has_sinks, chunk, has_slopes, biases)
    element = element_of(width)
    outer = [Buffer("q", element), Buffer("keys", element), Buffer("held", element)]
    buffers = (*outer, Buffer("tree", "vec4<i32>"), *sees.buffers, Buffer("y", element, written=True))
    return replace(
        single,
        name=f"tree_attention_{sees.name(kv_heads, width, scale)}",
        family="tree_attention",
        buffers=buffers,
        sizes=("S", "T"),
        constants=ONE,
        groups=("S", heads, 1),
        text=_ROW + text,
        limits={},
        space=(),
        order_of=single.name,
    )


_ROW = """
fn row_of(token: u32, j: u32) -> u32 {
  var node = tree[token];
  while (u32(node.x) > j && node.y >= 0) { node = tree[node.y]; }
  return select(j, u32(node.w), u32(node.x) == j);
}
"""
"""The row of the key at position ``j`` for a token: its own, an ancestor's, or before its root the position itself."""

"""Attention in WGSL: with a cache, causal, for decoders; with a mask of padding for encoders, and over a source.

A workgroup serves ``QUERIES`` queries of one head.  It takes ``LANES`` keys at a time: each thread scores one of them
for all queries, then threads add up the values' channels under a maximum and a sum that are corrected on the way
(online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867).  Where there are more threads than channels, each of
``PARTS`` takes every ``PARTS``-th key, and the parts are added at the end.
"""

from __future__ import annotations

from compressor.codegen.web.kernel import PROMPT_TOKENS, Buffer, Expression, Kernel, variants
from compressor.codegen.web.kernels.sight import Sight, capped

ONE, MANY = {"LANES": 64, "QUERIES": 1}, {"LANES": 64, "QUERIES": 8}
"""Shipped constants for one query, and for several."""
_ONE_CHOICES = {"LANES": (16, 32, 64, 128, 256), "QUERIES": (1,)}
_MANY_CHOICES = {"LANES": (16, 32, 64, 128, 256), "QUERIES": (2, 4, 8, 16)}
_KEYS = 256
"""Keys that a query is thought to see."""


def write_cache(kv_heads: int, width: int) -> Kernel:
    """Write the kernel that stores new keys or values in a cache, at their positions.

    Buffers: added f32 [B, kv_heads, S, width], position i32 [S], cache f32 [B, kv_heads, T, width].  Sizes: B, S, T.
    """
    text = f"""
@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
  for (var i = thread; i < {width}u; i += LANES) {{
    cache[(id.y * sizes.T + u32(position[id.x])) * {width}u + i] = added[(id.y * sizes.S + id.x) * {width}u + i];
  }}
}}
"""
    buffers = (Buffer("added"), Buffer("position", "i32"), Buffer("cache", written=True))
    groups: tuple[Expression, ...] = ("S", ["*", "B", kv_heads], 1)
    name = f"write_cache_{kv_heads}x{width}"
    return Kernel(name, "write_cache", buffers, ("B", "S", "T"), {"LANES": 64}, groups, text)


def cached_attention(
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
) -> tuple[Kernel, ...]:
    """Causal attention over a cache that holds the new keys and values already, for one query and for several; see
    :func:`compressor.ops.attention.cached_attention`.

    Buffers: q f32 [B, heads, S, width], keys and held f32 [B, kv_heads, T, width], position i32 [S], sinks and slopes
    f32 [heads], biases f32 [``biases``, heads] (where there are any), y f32 [B, S, heads, width].  Sizes: B, S, T.
    """
    sees = Sight(heads, window, softcap, has_sinks, chunk, has_slopes, biases)
    own, first = "u32(position[min(first + n, sizes.S - 1u)])", "position[first]"
    text = attention_text(
        heads,
        kv_heads,
        width,
        scale,
        places="sizes.T",
        begin=sees.begin(first),
        end="u32(position[min(first + QUERIES, sizes.S) - 1u]) + 1u",
        score=sees.score(own),
        seen=sees.seen(own),
        sink=sees.sink,
    )
    inner = [Buffer("position", "i32"), *sees.buffers]
    name = f"cached_attention_{sees.name(kv_heads, width, scale)}"
    return _kernels(name, "cached_attention", heads, width, inner, ("B", "S", "T"), text)


def masked_attention(
    heads: int,
    kv_heads: int,
    width: int,
    scale: float,
    window: int = 0,
    own: tuple[bool, bool, bool] | None = None,
    softcap: float = 0.0,
) -> tuple[Kernel, ...]:
    """Attention to all tokens that are none of padding, of the same text or of another; see
    :func:`compressor.ops.attention.masked_attention`.

    Buffers: q f32 [B, heads, S, width], keys and held f32 [B, kv_heads, N, width], mask f32 [B, N], bias f32 [B or 1,
    heads or 1, S or 1, N] (where there is one), y f32 [B, S, heads, width].  Sizes: B, S, N.

    Args:
        own: whether each text, each head and each query has a bias of its own; None without a bias.
    """
    name = f"masked_attention_{heads}_{kv_heads}_{width}_{scale:g}".replace("-", "m").replace(".", "p")
    seen, begin, end, score, inner = (
        "mask[batch * sizes.N + j] != 0.0",
        "0u",
        "sizes.N",
        capped(softcap),
        [Buffer("mask")],
    )
    name += f"_cap{softcap:g}".replace(".", "p") if softcap else ""
    if window:
        name += f"_window{window}"
        seen += f" && abs(i32(first + n) - i32(j)) < {window}"
        begin = f"u32(max(0, i32(first) - {window - 1}))"
        end = f"min(sizes.N, first + QUERIES + {window - 1}u)"
    if own is not None:
        name += f"_bias{''.join(str(int(each)) for each in own)}"
        batch, head, query = ("batch" if own[0] else "0u", "head" if own[1] else "0u", "0u")
        rows, query = ("sizes.S", "min(first + n, sizes.S - 1u)") if own[2] else ("1u", query)
        place = f"(({batch} * {heads if own[1] else 1}u + {head}) * {rows} + {query}) * sizes.N"
        score += f" + bias[{place} + min(j, sizes.N - 1u)]"
        inner.append(Buffer("bias"))
    text = attention_text(
        heads, kv_heads, width, scale, places="sizes.N", begin=begin, end=end, score=score, seen=seen, sink=None,
        may_see_nothing=window > 0,
    )  # fmt: skip
    return _kernels(name, "masked_attention", heads, width, inner, ("B", "S", "N"), text)


def _kernels(
    name: str, family: str, heads: int, width: int, inner: list[Buffer], sizes: tuple[str, ...], text: str
) -> tuple[Kernel, ...]:
    element = element_of(width)
    outer = [Buffer("q", element), Buffer("keys", element), Buffer("held", element)]
    buffers = (*outer, *inner, Buffer("y", element, written=True))

    def kernel(suffix: str, constants: dict[str, int], limits: dict[str, int]) -> Kernel:
        groups: tuple[Expression, ...] = (["ceil", "S", "QUERIES"], ["*", "B", heads], 1)
        space = _space(width, constants, 1 if limits else PROMPT_TOKENS)
        return Kernel(f"{name}{suffix}", family, buffers, sizes, constants, groups, text, limits, space)

    return kernel("_one", ONE, {"S": 1}), kernel("_many", MANY, {})


def _space(width: int, default: dict[str, int], queries: int) -> list[dict[str, int]]:
    """Other constants, by the steps that one thread takes: products, then what few threads do for all."""
    channels = 1 if width % 4 else 4

    def shared_bytes(LANES: int, QUERIES: int) -> int:
        items = QUERIES * width // channels
        return 4 * (items * channels * (1 + max(1, LANES // items)) + QUERIES * (LANES + 3))

    def cost(LANES: int, QUERIES: int) -> tuple[int, int]:
        return -(-queries // QUERIES), -(-_KEYS // LANES) * (2 * width * QUERIES + 2 * LANES)

    choices = _ONE_CHOICES if default is ONE else _MANY_CHOICES
    return variants(choices, default, threads=lambda LANES, **_: LANES, shared_bytes=shared_bytes, cost=cost)


def element_of(width: int) -> str:
    """Return the element type that vectors of channels are bound as."""
    return "f32" if width % 4 else "vec4<f32>"


def attention_text(
    heads: int,
    kv_heads: int,
    width: int,
    scale: float,
    *,
    places: str,
    begin: str,
    end: str,
    score: str,
    seen: str,
    sink: str | None,
    may_see_nothing: bool = False,
    sequence: str = "batch",
    place: str = "",
) -> str:
    """Write attention.

    Args:
        places: of a head's keys.
        begin, end: the keys that any of a workgroup's queries may see.
        score, seen: of key ``j`` and query ``first + n``.
        sequence: whose keys are read, an index along their first dimension.
        place: where key ``j`` lies among those of its head, if not at ``j``: then a workgroup has one query.
    """
    element, words = element_of(width), width if width % 4 else width // 4
    base = f"({sequence} * {kv_heads}u + head / {heads // kv_heads}u) * {places}"
    loop = f"  for (var at = {begin}; at < end; at += LANES) {{\n"
    return (
        _declarations(element, words)
        + ("var<workgroup> rows: array<u32, LANES>;\n\n" if place else "")
        + _queries(element, words, heads, scale, base, end, sink)
        + loop
        + _scores(words, score, seen, place)
        + _SOFTMAX
        + _values(words, "rows[k]" if place else "at + k")
        + _outputs(element, words, heads, may_see_nothing)
    )


def _declarations(element: str, words: int) -> str:
    """Declare what a workgroup shares, and the product of two vectors of channels."""
    product = "a * b" if element == "f32" else "dot(a, b)"
    return f"""
const LOWEST = -3.0e38;
const HIDDEN = -3.4e38;
const ITEMS: u32 = QUERIES * {words}u;
const PARTS: u32 = max(1u, LANES / ITEMS);
const EACH: u32 = (ITEMS * PARTS + LANES - 1u) / LANES;
var<workgroup> query: array<{element}, ITEMS>;
var<workgroup> scores: array<f32, QUERIES * LANES>;
var<workgroup> highest: array<f32, QUERIES>;
var<workgroup> shrink: array<f32, QUERIES>;
var<workgroup> sums: array<f32, QUERIES>;
var<workgroup> parts: array<{element}, ITEMS * PARTS>;

fn product(a: {element}, b: {element}) -> f32 {{ return {product}; }}

"""


def _queries(element: str, words: int, heads: int, scale: float, base: str, end: str, sink: str | None) -> str:
    """Load the scaled queries, and begin with nothing, or with the sink."""
    return f"""@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
  let first = id.x * QUERIES;
  let batch = id.y / {heads}u;
  let head = id.y % {heads}u;
  let base = {base};
  for (var i = thread; i < ITEMS; i += LANES) {{
    let s = min(first + i / {words}u, sizes.S - 1u);
    query[i] = q[(id.y * sizes.S + s) * {words}u + i % {words}u] * {scale!r};
  }}
  for (var n = thread; n < QUERIES; n += LANES) {{
    highest[n] = {sink or "LOWEST"};
    sums[n] = {"1.0" if sink else "0.0"};
  }}
  var totals = array<{element}, EACH>();
  let end = {end};
"""


def _scores(words: int, score: str, seen: str, place: str) -> str:
    """Multiply one key a thread with all queries of the workgroup."""
    find = f"\n      let row = {place};\n      rows[thread] = row;" if place else ""
    row = "row" if place else "j"
    return f"""    workgroupBarrier();
    let j = at + thread;
//# for n QUERIES
    var found$n$ = 0.0;
//# end
    if (j < end) {{{find}
      for (var i = 0u; i < {words}u; i++) {{
        let key = keys[(base + {row}) * {words}u + i];
//# for n QUERIES
        found$n$ += product(query[{words}u * $n$u + i], key);
//# end
      }}
    }}
//# for n QUERIES
    {{
      let n = $n$u;
      let score = found$n$;
      scores[n * LANES + thread] = select(HIDDEN, {score}, j < end && {seen});
    }}
//# end
"""


_SOFTMAX = """    workgroupBarrier();
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
"""
"""Rescale what there is to the highest score so far, and turn the new scores into weights that add to the sums."""


def _values(words: int, row: str) -> str:
    """Add the weighted values; the rest of the workgroup shares what few items leave."""
    return f"""    let count = min(LANES, end - at);
    for (var e = 0u; e < EACH; e++) {{
      let item = (e * LANES + thread) / PARTS;
      if (item < ITEMS) {{
        let n = item / {words}u;
        var total = totals[e] * shrink[n];
        for (var k = thread % PARTS; k < count; k += PARTS) {{
          total += held[(base + {row}) * {words}u + item % {words}u] * scores[n * LANES + k];
        }}
        totals[e] = total;
      }}
    }}
  }}
"""


def _outputs(element: str, words: int, heads: int, may_see_nothing: bool) -> str:
    """Add the parts of each output, and divide by the sum of weights, which is 0 for a query that sees nothing."""
    result = "total / weight"
    result = f"select({result}, {element}(), weight == 0.0)" if may_see_nothing else result
    return f"""  for (var e = 0u; e < EACH; e++) {{
    let place = e * LANES + thread;
    if (place < ITEMS * PARTS) {{ parts[place] = totals[e]; }}
  }}
  workgroupBarrier();
  for (var item = thread; item < ITEMS; item += LANES) {{
    let s = first + item / {words}u;
    var total = parts[item * PARTS];
    for (var part = 1u; part < PARTS; part++) {{ total += parts[item * PARTS + part]; }}
    let weight = sums[item / {words}u];
    if (s < sizes.S) {{
      y[((batch * sizes.S + s) * {heads}u + head) * {words}u + item % {words}u] = {result};
    }}
  }}
}}
"""

"""Experts in WGSL: how a router chooses, and where a routed linear finds its pairs of token and expert.

Pairs are sorted by expert first (:func:`sort_pairs`), once for all linears of the same routing.  The linears are those
of :mod:`compressor.codegen.web.kernels.packed_linear` and :mod:`compressor.codegen.web.kernels.dense_linear`, whose
workgroups each take pairs of one expert in place of tokens (:class:`Rows`): of few tokens one pair, of many a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from compressor.codegen.kernels.experts import Routing
from compressor.codegen.web.kernel import LARGEST_GRID, Buffer, Expression, Kernel

EXPERT = "var<private> expert: u32;"
"""Declaration of the expert whose weights a routed linear's workgroup reads."""


@dataclass(frozen=True)
class Rows:
    """Text by which a linear finds the rows that a workgroup computes; of plain linears, tokens in their order.

    Attributes:
        begin: statements that find ``first``, and ``expert`` and ``end`` where linears are routed.
        token: the row of x that the ``$m$``-th reads, an expression.
        end: the row (or slot) after the last.
        expert: the expert's number, empty for plain linears.
        groups: workgroups along y.
    """

    begin: str
    token: str
    end: str
    expert: str
    groups: Expression

    def outputs(self, rows: int, has_bias: bool, sum_of: str) -> str:
        """Return the statements that add ``sum_of``, a loop over ``sum``, to the bias, and store it."""
        if not self.expert:
            start, place, value = "bias[out]", f"m * {rows}u + out", "sum"
        else:
            start, place = f"bias[expert * {rows}u + out]", f"routes[ORDER + m] * {rows}u + out"
            value = "select(sum, 0.0, is_none)"
        return f"""      var sum = {start if has_bias else "0.0"};
{sum_of}
      y[{place}] = {value};"""


PLAIN = Rows(
    "  let first = id.y * TOKENS;",
    "min(first + $m$u, sizes.M - 1u); // those behind the last are not stored",
    "sizes.M",
    "",
    ["ceil", "M", "TOKENS"],
)
"""All tokens, one weight."""


def routed_rows(routing: Routing, is_few: bool) -> Rows:
    """Return the rows of one expert: of few tokens each pair has a workgroup of its own, of many blocks have."""
    experts, each = routing.experts, routing.each
    order = f"  let ORDER = {experts + 2}u;\n"
    if is_few:
        find = f"""  let first = id.y;
  let end = first + 1u;
  let group = routes[ORDER + sizes.M * {each}u + first];
"""
    else:
        find = f"""  var block = id.y;
  var group = 0u;
  for (; group <= {experts}u; group++) {{
    let blocks = (routes[group + 1u] - routes[group] + TOKENS - 1u) / TOKENS;
    if (block < blocks) {{ break; }}
    block -= blocks;
  }}
  if (group > {experts}u) {{ return; }}
  let first = routes[group] + block * TOKENS;
  let end = routes[group + 1u];
"""
    none = f"  let is_none = group == {experts}u; // outputs are zeros\n  expert = min(group, {experts - 1}u);"
    pair = "routes[ORDER + min(first + $m$u, end - 1u)]"
    pairs: Expression = ["*", "M", each]
    blocks: Expression = ["min", pairs, ["+", ["ceil", pairs, "TOKENS"], experts + 1]]
    token = pair if routing.own_rows else f"{pair} / {each}u"
    return Rows(order + find + none, f"{token};", "end", "expert", pairs if is_few else blocks)


def sort_pairs(experts: int, each: int) -> Kernel:
    """Write the kernel that sorts pairs of token and expert by expert, those of one expert by token.

    Buffers: index i32 [M, each], where other numbers than 0 to ``experts - 1`` mean that there is none; routes u32:
    where each expert's slots begin (``experts + 2`` numbers: after the experts come the pairs without one, then the
    number of pairs), the pair in each slot, and its expert, ``experts`` if it has none.  Sizes: M.
    """
    text = f"""
var<workgroup> begin: array<u32, {experts + 2}>;

fn group_of(pair: u32) -> u32 {{
  return min(u32(index[pair]), {experts}u); // negative ones are large
}}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32) {{
  let pairs = sizes.M * {each}u;
  for (var group = thread; group <= {experts}u; group += 256u) {{
    var count = 0u;
    for (var pair = 0u; pair < pairs; pair++) {{ count += select(0u, 1u, group_of(pair) == group); }}
    begin[group + 1u] = count;
  }}
  workgroupBarrier();
  if (thread == 0u) {{
    begin[0] = 0u;
    for (var group = 0u; group <= {experts}u; group++) {{ begin[group + 1u] += begin[group]; }}
  }}
  workgroupBarrier();
  for (var group = thread; group <= {experts}u; group += 256u) {{
    var slot = begin[group];
    routes[group] = slot;
    for (var pair = 0u; pair < pairs; pair++) {{
      if (group_of(pair) == group) {{
        routes[{experts + 2}u + slot] = pair;
        routes[{experts + 2}u + pairs + slot] = group;
        slot++;
      }}
    }}
  }}
  if (thread == 0u) {{ routes[{experts + 1}u] = pairs; }}
}}
"""
    buffers = (Buffer("index", "i32"), Buffer("routes", "u32", written=True))
    return Kernel(f"sort_pairs_{each}of{experts}", "sort_pairs", buffers, ("M",), {}, (1, 1, 1), text)


def choose(width: int, count: int) -> Kernel:
    """Write the kernel for :func:`compressor.ops.experts.top_k`: the places of each row's largest elements, in order.

    One after another: the largest of those behind the last one chosen, in the order of number and then place.

    Buffers: x f32 [M, width], y i32 [M, count].  Sizes: M.
    """
    text = f"""
var<workgroup> keys: array<u32, LANES>;
var<workgroup> places: array<u32, LANES>;

// Larger numbers have larger keys; both zeros have one, and NaN has the largest.
fn key(value: f32) -> u32 {{
  let bits = select(bitcast<u32>(value), 0u, value == 0.0);
  let ordered = select(bits | 0x80000000u, ~bits, (bits >> 31u) != 0u);
  return select(ordered, 0xffffffffu, (bits & 0x7fffffffu) > 0x7f800000u);
}}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
  let row = id.y * {LARGEST_GRID}u + id.x;
  if (row >= sizes.M) {{ return; }}
  var last = 0xffffffffu;
  var behind = 0u; // places of the last key from here on are left
  for (var n = 0u; n < {count}u; n++) {{
    var most = 0u; // no number has this key
    var place = 0u;
    for (var i = thread; i < {width}u; i += LANES) {{
      let one = key(x[row * {width}u + i]);
      if (one > most && (one < last || (one == last && i >= behind))) {{ most = one; place = i; }}
    }}
    keys[thread] = most;
    places[thread] = place;
    workgroupBarrier();
    for (var lane = 0u; lane < LANES; lane++) {{
      if (keys[lane] > most || (keys[lane] == most && places[lane] < place)) {{
        most = keys[lane];
        place = places[lane];
      }}
    }}
    workgroupBarrier();
    last = most;
    behind = place + 1u;
    if (thread == 0u) {{ y[row * {count}u + n] = i32(place); }}
  }}
}}
"""
    groups: tuple[Expression, ...] = (["min", "M", LARGEST_GRID], ["ceil", "M", LARGEST_GRID], 1)
    buffers = (Buffer("x"), Buffer("y", "i32", written=True))
    return Kernel(f"choose_{count}_of_{width}", "top_k", buffers, ("M",), {"LANES": 32}, groups, text)

"""The dense linear in WGSL, its weight in the type that it is stored in.

A workgroup computes ``ROWS`` rows: thread ``row * LANES + lane`` takes every ``LANES``-th four columns of its row, for
``TOKENS`` tokens at once.  Routed, it takes pairs of token and expert, as the packed linear does.
"""

from __future__ import annotations

from dataclasses import replace

from compressor.codegen.kernels.experts import Routing
from compressor.codegen.web.kernel import PROMPT_TOKENS, SINGLE, Buffer, Kernel, variants
from compressor.codegen.web.kernels.experts import EXPERT, PLAIN, Rows, routed_rows
from compressor.codegen.web.values import four_inputs, four_stored, stored_element

ONE, MANY = {"ROWS": 4, "LANES": 16, "TOKENS": 1}, {"ROWS": 8, "LANES": 8, "TOKENS": 8}
VERIFIED = {**ONE, "TOKENS": 4}
FEW = 2
_ONE_CHOICES = {"ROWS": (1, 2, 4, 8, 16), "LANES": (8, 16, 32, 64), "TOKENS": (1, 2)}
_MANY_CHOICES = {"ROWS": (2, 4, 8, 16), "LANES": (4, 8, 16, 32), "TOKENS": (4, 8, 16)}


def dense_linear(
    rows: int, columns: int, storage: str, has_bias: bool, routing: Routing | None = None, verifies: bool = False
) -> tuple[Kernel, ...]:
    """Kernels for ``y = x @ W.T + bias``: of few tokens, and of many.

    Buffers: x f32 [M, columns], weight [rows, columns] as words, bias f32 [rows] (where there is one), y f32 [M, rows].
    Sizes: M.

    Args:
        storage: ``float32``, ``float16`` or ``bfloat16``.
        routing, verifies: as of :func:`compressor.codegen.web.kernels.packed_linear.packed_linear`.
    """
    x = Buffer("x", "vec4<f32>" if columns % 4 == 0 else "f32")
    weight = Buffer("weight", stored_element(columns, storage))
    routes = [] if routing is None else [Buffer("routes", "u32")]
    buffers = (x, *routes, weight, *[Buffer("bias")] * has_bias, Buffer("y", written=True))
    family, name = "dense_linear", f"dense_linear_{rows}x{columns}_{storage}{'_bias' if has_bias else ''}"
    if routing is not None:
        family, name = "routed_linear", f"routed_{routing.name}_{name}"

    def kernel(suffix: str, constants: dict[str, int], limits: dict[str, int]) -> Kernel:
        which = PLAIN if routing is None else routed_rows(routing, bool(limits))
        text, groups = _text(rows, columns, storage, has_bias, which), (["ceil", rows, "ROWS"], which.groups, 1)
        space = _space(rows, -(-columns // 4), constants, 1 if limits else PROMPT_TOKENS)
        if routing is not None and limits:
            space = [one for one in space if one["TOKENS"] == 1]  # a workgroup has one pair
        return Kernel(f"{name}{suffix}", family, buffers, ("M",), constants, groups, text, limits, space)

    one = kernel("_one", ONE, {"M": FEW})
    if verifies:
        return one, replace(kernel("_few", VERIFIED, {}), space=(), order_of=one.name)
    return one, kernel("_many", MANY, {})


def _space(rows: int, quads: int, default: dict[str, int], tokens: int) -> list[dict[str, int]]:
    """Other constants, by the multiplications that they make of the call."""

    def cost(ROWS: int, LANES: int, TOKENS: int) -> tuple[int, int]:
        steps = 4 * -(-quads // LANES) * (1 + TOKENS) + TOKENS  # and their sum
        return -(-rows // ROWS) * -(-tokens // TOKENS), steps

    return variants(
        _ONE_CHOICES if default is ONE else _MANY_CHOICES,
        default,
        threads=lambda ROWS, LANES, **_: ROWS * LANES,
        shared_bytes=lambda ROWS, LANES, TOKENS: 4 * ROWS * LANES * TOKENS,
        cost=cost,
    )


def _text(rows: int, columns: int, storage: str, has_bias: bool, which: Rows) -> str:
    quads = -(-columns // 4)
    row = f"min(id.x * ROWS + thread / LANES, {rows - 1}u)"
    lanes = "      for (var lane = 0u; lane < LANES; lane++) { sum += sums[i * LANES + lane]; }"
    return f"""
{SINGLE}{f"{chr(10)}{EXPERT}" if which.expert else ""}
{four_inputs("x", columns)}
{four_stored("weight", columns, storage)}
var<workgroup> sums: array<f32, ROWS * LANES * TOKENS>;

@compute @workgroup_size(ROWS * LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
{which.begin}
  let row = {f"{which.expert} * {rows}u + {row}" if which.expert else row};
//# for m TOKENS
  let token$m$ = {which.token}
  var total$m$ = 0.0;
//# end
  for (var q = thread % LANES; q < {quads}u; q += LANES) {{
    let w = vec4<Real>(weight4(row, q));
//# for m TOKENS
    total$m$ += f32(dot(w, vec4<Real>(x4(token$m$, q))));
//# end
  }}
//# for m TOKENS
  sums[$m$u * ROWS * LANES + thread] = total$m$;
//# end
  workgroupBarrier();
  for (var i = thread; i < TOKENS * ROWS; i += ROWS * LANES) {{
    let m = first + i / ROWS;
    let out = id.x * ROWS + i % ROWS;
    if (m < {which.end} && out < {rows}u) {{
{which.outputs(rows, has_bias, lanes)}
    }}
  }}
}}
"""

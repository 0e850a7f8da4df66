"""The dense linear in WGSL, its weight in the type that it is stored in.

A workgroup computes ``ROWS`` rows: thread ``row * LANES + lane`` takes every ``LANES``-th four columns of its row, for
``TOKENS`` tokens at once.
"""

from __future__ import annotations

from compressor.codegen.web.kernel import Buffer, Kernel
from compressor.codegen.web.values import four_inputs, four_stored, stored_element

ONE, MANY = {"ROWS": 4, "LANES": 16, "TOKENS": 1}, {"ROWS": 8, "LANES": 8, "TOKENS": 8}
FEW = 2


def dense_linear(rows: int, columns: int, storage: str, has_bias: bool) -> tuple[Kernel, ...]:
    """Kernels for ``y = x @ W.T + bias``: of few tokens, and of many.

    Buffers: x f32 [M, columns], weight [rows, columns] as words, bias f32 [rows] (where there is one), y f32 [M, rows].
    Sizes: M.

    Args:
        storage: ``float32``, ``float16`` or ``bfloat16``.
    """
    x = Buffer("x", "vec4<f32>" if columns % 4 == 0 else "f32")
    weight = Buffer("weight", stored_element(columns, storage))
    buffers = (x, weight, *[Buffer("bias")] * has_bias, Buffer("y", written=True))
    name = f"dense_linear_{rows}x{columns}_{storage}{'_bias' if has_bias else ''}"
    text = _text(rows, columns, storage, has_bias)

    def kernel(suffix: str, constants: dict[str, int], limits: dict[str, int]) -> Kernel:
        groups = (["ceil", rows, "ROWS"], ["ceil", "M", "TOKENS"], 1)
        return Kernel(f"{name}{suffix}", "dense_linear", buffers, ("M",), constants, groups, text, limits)

    return kernel("_one", ONE, {"M": FEW}), kernel("_many", MANY, {})


def _text(rows: int, columns: int, storage: str, has_bias: bool) -> str:
    quads = -(-columns // 4)
    return f"""
{four_inputs("x", columns)}
{four_stored("weight", columns, storage)}
var<workgroup> sums: array<f32, ROWS * LANES * TOKENS>;

@compute @workgroup_size(ROWS * LANES)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
  let row = min(id.x * ROWS + thread / LANES, {rows - 1}u);
  let first = id.y * TOKENS;
  var total = array<f32, TOKENS>();
  for (var q = thread % LANES; q < {quads}u; q += LANES) {{
    let w = weight4(row, q);
    for (var m = 0u; m < TOKENS; m++) {{
      if (first + m < sizes.M) {{ total[m] += dot(w, x4(first + m, q)); }}
    }}
  }}
  for (var m = 0u; m < TOKENS; m++) {{ sums[m * ROWS * LANES + thread] = total[m]; }}
  workgroupBarrier();
  for (var i = thread; i < TOKENS * ROWS; i += ROWS * LANES) {{
    let m = i / ROWS;
    let out = id.x * ROWS + i % ROWS;
    if (first + m < sizes.M && out < {rows}u) {{
      var sum = {"bias[out]" if has_bias else "0.0"};
      for (var lane = 0u; lane < LANES; lane++) {{ sum += sums[(m * ROWS + i % ROWS) * LANES + lane]; }}
      y[(first + m) * {rows}u + out] = sum;
    }}
  }}
}}
"""

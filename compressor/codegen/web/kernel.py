"""A kernel in WGSL: its bindings, its numbers, and the constants that specialise it on the device.

Sizes that change from call to call (tokens, sequences) are numbers in a uniform buffer.  Tuning parameters of a device
(lanes, tokens at once) are constants: one text serves all variants, and the run-time writes ``const NAME: u32 =
value;`` before it.
Register tiles are not arrays, since some compilers do not unroll loops; lines are repeated instead, see
:func:`specialised`.  Shapes and formats are part of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

Expression = int | str | list[Any]
"""A number, the name of one, or ``[operator, left, right]`` with ``+ - * // % min max ceil`` (``ceil``: divided,
rounded up): a size in a manifest, which a run-time evaluates.
"""

_BEGIN, _END, _NUMBER = re.compile(r"\s*//# for (\w+) (\w+)"), "//# end", re.compile(r"\$(\w+)\$")
MOST_THREADS, MOST_SHARED_BYTES = 256, 16384
"""Limits of a workgroup on every device (maxComputeInvocationsPerWorkgroup, maxComputeWorkgroupStorageSize)."""
LANES_AT_ONCE = 4096
"""Threads that a mid-range device runs concurrently; the order of variants assumes it."""
PROMPT_TOKENS = 64
"""Number of tokens that the order of variants assumes for kernels of many tokens."""
SINGLE, HALF_PRECISION = "alias Real = f32;", "alias Real = f16;"
"""Type of the products of floats: a kernel that has some contains the first of these lines."""
LARGEST_GRID = 65535
"""Largest number of workgroups along one dimension on every device (maxComputeWorkgroupsPerDimension)."""


@dataclass(frozen=True)
class Buffer:
    """A storage buffer that a kernel binds.

    Attributes:
        element: WGSL type of its elements.
        written: whether the kernel writes to it.
    """

    name: str
    element: str = "f32"
    written: bool = False


@dataclass(frozen=True)
class Kernel:
    """One dispatch.

    Attributes:
        buffers: in the order of their bindings, all in group 0; the uniform numbers are the binding after the last.
        sizes: names of the numbers, u32, in order.
        constants: constants that specialise the text, with defaults for devices that have not tuned.
        groups: workgroups along x, y and z, as expressions in sizes and constants.
        text: the source after the bindings; its entry point is ``main``.
        limits: the kernel serves calls whose sizes are at most these.
        space: other constants that may be faster on a device, the likeliest first.
        details: further fields of its record in the manifest.
        order_of: the kernel in whose order it sums, by name: the constant ``LANES`` is the one with which that runs on
            the device, so that both give a row the same bits; empty for none.
    """

    name: str
    family: str
    buffers: tuple[Buffer, ...]
    sizes: tuple[str, ...]
    constants: Mapping[str, int]
    groups: tuple[Expression, ...]
    text: str
    limits: Mapping[str, int] = field(default_factory=dict)
    space: Sequence[Mapping[str, int]] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    order_of: str = ""

    @property
    def source(self) -> str:
        """The text with its bindings, without the constants."""
        lines = []
        for i, b in enumerate(self.buffers):
            access = "read_write" if b.written else "read"
            lines.append(f"@group(0) @binding({i}) var<storage, {access}> {b.name}: array<{b.element}>;")
        members = ", ".join(f"{name}: u32" for name in self.sizes)
        lines.append(f"struct Sizes {{ {members} }}")
        lines.append(f"@group(0) @binding({len(self.buffers)}) var<uniform> sizes: Sizes;")
        return "\n".join([*lines, self.text.strip(), ""])

    def record(self) -> dict[str, Any]:
        """Return the kernel's record in a program."""
        return {
            "source": self.source,
            "buffers": ["write" if b.written else "read" for b in self.buffers],
            "sizes": list(self.sizes),
            "constants": dict(self.constants),
            "groups": list(self.groups),
            **({"limits": dict(self.limits)} if self.limits else {}),
            **({"space": [[one[name] for name in self.constants] for one in self.space]} if self.space else {}),
            **({"order_of": self.order_of} if self.order_of else {}),
        }


IS_NAN = "(bitcast<u32>({}) & 0x7fffffffu) > 0x7f800000u"
"""Tells whether a float32 is NaN by its bits: WGSL lets a device assume that there are none."""


def joined(array: str, join: str) -> str:
    """Return statements that reduce all threads' ``part`` into ``array[0]``.

    Args:
        array: workgroup array of ``LANES`` numbers.
        join: the reduction of two numbers, with two places to fill; ``LANES`` is a power of two.
    """
    both = join.format(f"{array}[thread]", f"{array}[thread + half]")
    return f"""{array}[thread] = part;
  workgroupBarrier();
  for (var half = LANES / 2u; half > 0u; half /= 2u) {{
    if (thread < half) {{ {array}[thread] = {both}; }}
    workgroupBarrier();
  }}"""


def variants(
    choices: Mapping[str, Iterable[int]],
    default: Mapping[str, int],
    threads: Callable[..., int],
    shared_bytes: Callable[..., int],
    cost: Callable[..., tuple[int, int]],
) -> list[dict[str, int]]:
    """Return the constants to try in place of the default: all choices within every device's limits, the cheapest
    first.

    Args:
        choices: values to choose from, by constant.
        threads, shared_bytes: threads and shared memory of a workgroup, called with the constants by name.
        cost: (workgroups, steps of one of their threads), for the order: a device that tunes may stop early.
    """

    def time(choice: Mapping[str, int]) -> float:
        groups, steps = cost(**choice)
        return steps * max(1.0, groups * threads(**choice) / LANES_AT_ONCE)

    found = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    fits = [c for c in found if threads(**c) <= MOST_THREADS and shared_bytes(**c) <= MOST_SHARED_BYTES]
    return sorted((c for c in fits if c != default), key=time)


def specialised(source: str, constants: Mapping[str, int], *, half: bool = False) -> str:
    """Return the text that a device compiles: the constants, and the source with its repetitions expanded.

    Args:
        half: compute products of floats in float16 and accumulate in float32; needs WebGPU's ``shader-f16``.
    """
    declared = "".join(f"const {name}: u32 = {value}u;\n" for name, value in constants.items())
    if half:
        declared = "enable f16;\n" + declared
        source = source.replace(SINGLE, HALF_PRECISION)
    return declared + "\n".join(_written_out(source.split("\n"), constants, {}))


def _written_out(lines: Sequence[str], constants: Mapping[str, int], numbers: Mapping[str, int]) -> Iterator[str]:
    """Yield the lines, repeating those between ``//# for NAME COUNT`` and ``//# end`` as often as the constant COUNT
    says, with ``$NAME$`` counting up.
    """
    i = 0
    while i < len(lines):
        begin = _BEGIN.fullmatch(lines[i])
        if begin is None:
            yield _NUMBER.sub(lambda found: str(numbers[found[1]]), lines[i])
            i += 1
            continue
        end = i + 1
        depth = 1
        while depth:
            depth += (_BEGIN.fullmatch(lines[end]) is not None) - (lines[end].strip() == _END)
            end += 1
        for n in range(constants[begin[2]]):
            yield from _written_out(lines[i + 1 : end - 1], constants, {**numbers, begin[1]: n})
        i = end


def evaluate(expression: Expression, names: Mapping[str, int]) -> int:
    """Evaluate an expression."""
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return names[expression]
    operator, *operands = expression
    left, right = (evaluate(operand, names) for operand in operands)
    values = {
        "+": lambda: left + right,
        "-": lambda: left - right,
        "*": lambda: left * right,
        "//": lambda: left // right,
        "%": lambda: left % right,
        "min": lambda: min(left, right),
        "max": lambda: max(left, right),
        "ceil": lambda: -(-left // right),
    }
    return values[operator]()

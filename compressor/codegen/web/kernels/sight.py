"""Write the rules of attention over caches as text of kernels: visible keys, and terms added to their scores."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.codegen.web.kernel import IS_NAN, Buffer


@dataclass(frozen=True)
class Sight:
    """Hold the keys of a cache that a query sees, and the terms added to their scores; arguments are those of
    :func:`compressor.codegen.web.kernels.attention.cached_attention`.
    """

    heads: int
    window: int
    softcap: float
    has_sinks: bool
    chunk: int
    has_slopes: bool
    biases: int

    def name(self, kv_heads: int, width: int, scale: float) -> str:
        """Return the end of a kernel's name."""
        shape = "_".join(f"{n:g}" for n in (self.heads, kv_heads, width, scale, self.window, self.softcap))
        name = shape.replace("-", "m").replace(".", "p") + ("_sinks" if self.has_sinks else "")
        name += (f"_chunk{self.chunk}" if self.chunk else "") + ("_slopes" if self.has_slopes else "")
        return name + (f"_biases{self.biases}" if self.biases else "")

    @property
    def buffers(self) -> list[Buffer]:
        """Return the buffers that some models have."""
        parts = [*["sinks"] * self.has_sinks, *["slopes"] * self.has_slopes, *["biases"] * bool(self.biases)]
        return [Buffer(name) for name in parts]

    @property
    def sink(self) -> str | None:
        """Return the score of the sink, if there is one."""
        return "sinks[head]" if self.has_sinks else None

    def seen(self, own: str) -> str:
        """Return the condition for key ``j``; ``own`` is the query's position, u32."""
        seen = f"j <= {own}" + (f" && j + {self.window}u > {own}" if self.window else "")
        return seen + (f" && j / {self.chunk}u == {own} / {self.chunk}u" if self.chunk else "")

    def begin(self, first: str) -> str:
        """Return the first key that a query at position ``first``, i32, may see."""
        begin = f"u32(max(0, {first} - {self.window - 1}))" if self.window else "0u"
        return f"max({begin}, u32({first}) / {self.chunk}u * {self.chunk}u)" if self.chunk else begin

    def score(self, own: str) -> str:
        """Return the score of key ``j`` with all that is added to it."""
        score, back = capped(self.softcap), f"max(0, i32({own}) - i32(j))"
        score += f" - slopes[head] * f32({back})" if self.has_slopes else ""
        return score + (f" + biases[u32(min({back}, {self.biases - 1})) * {self.heads}u + head]" if self.biases else "")


def capped(softcap: float) -> str:
    """Return the expression of a score under a cap; 0 is none."""
    capped = f"{softcap!r} * tanh(clamp(score / {softcap!r}, -20.0, 20.0))"
    return f"select({capped}, score, {IS_NAN.format('score')})" if softcap else "score"

"""Options of a search of architectures: what is limited, and what may stand in the place of what."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.errors import UsageError
from compressor.recipe.gates import parse_amount
from compressor.search.front import check_limits

_COUNTED = ("weight_bytes", "cache_bytes", "parameters")


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Limit what a choice takes; at least one limit is given.

    Attributes:
        latency: of a decoder's step, or of one image, as a share of the model's at the same format.
        peak_memory: bytes of all activations that are live at once as kernels compute one image, of a network of
            images; a number, or text such as ``160 kB``.
        weight_bytes: of all parameters, the blocks' linears in ``scheme``, others as they are (of a network of images,
            all linears and convolutions in ``scheme``); a number, or text such as ``4 MB``.
        cache_bytes: of keys and values of one token; a number.
        parameters: a number of them.
        budgets: further limits of the one measure, as shares of the model's; the report then has a front of them all.
    """

    latency: float | None = None
    peak_memory: float | str | None = None
    weight_bytes: float | str | None = None
    cache_bytes: float | None = None
    parameters: float | None = None
    budgets: tuple[float, ...] = ()

    def check(self, pass_name: str) -> None:
        """Refuse options that limit nothing, or mean nothing.

        Raises:
            UsageError: says what to give.
        """
        _ = self.most_memory
        names = ("latency", "peak_memory", *_COUNTED)
        check_limits(pass_name, {name: getattr(self, name) for name in names}, self.budgets)

    @property
    def most_memory(self) -> float | None:
        """Return the largest peak of memory in bytes, where it is limited."""
        return None if self.peak_memory is None else parse_amount("weight_bytes", self.peak_memory, "peak_memory")

    def most(self) -> dict[str, float]:
        """Return the most of each measure that can be counted, where it is limited."""
        size = None if self.weight_bytes is None else parse_amount("weight_bytes", self.weight_bytes)
        given = {"weight_bytes": size, "cache_bytes": self.cache_bytes, "parameters": self.parameters}
        return {name: most for name, most in given.items() if most is not None}


@dataclass(frozen=True, kw_only=True)
class SpaceOptions:
    """Say what may stand in the place of each attention, each feed-forward network, and a block's convolutions.

    Attributes:
        attention: what may stand in the place of an attention beside itself: ``heads:`` and a share of its query heads,
            ``kv_heads:`` and a number of heads of keys, ``linear``, ``none``.
        ffn: the same of a feed-forward network: ``width:`` and a share of its channels, ``linear``, ``none``.
        convolution: the same of the convolutions that a network of images adds to a shortcut: ``width:``, ``none``.
        multiple: widths are rounded up to a multiple of this, which kernels like; convolutions have fewer channels.
        keep_first: blocks at the beginning of which nothing goes as a whole.
        keep_last: the same at the end.
    """

    attention: tuple[str, ...] = ("none",)
    ffn: tuple[str, ...] = ("width:0.75", "width:0.5", "width:0.25", "none")
    convolution: tuple[str, ...] = ("width:0.75", "width:0.5", "width:0.25", "none")
    multiple: int = 32
    keep_first: int = 1
    keep_last: int = 1

    def check_space(self, pass_name: str) -> None:
        """Refuse numbers out of their range.

        Raises:
            UsageError: says what to give.
        """
        if min(self.keep_first, self.keep_last) < 0 or self.multiple < 1:
            raise UsageError(f"{pass_name}: keep_first and keep_last are not below 0, and multiple is not below 1")

    @property
    def wanted(self) -> dict[str, tuple[str, ...]]:
        """Return the names of alternatives by part."""
        return {"attention": self.attention, "ffn": self.ffn, "convolution": self.convolution}

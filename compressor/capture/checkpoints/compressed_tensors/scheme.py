"""Arguments of quantised weights in compressed-tensors: bits, type, and which block of a weight a scale serves."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.capture.checkpoints.options import Options

_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")


@dataclass(frozen=True)
class Scheme:
    """How the weights of a group of modules are stored.

    Attributes:
        format: compressed-tensors' name of the layout.
        bits: of a code.
        is_float: codes are small floats, not integers.
        symmetric: there are no zero points.
        strategy: what one scale serves: tensor, channel, group, tensor_group (with a scale for the tensor) or block.
        rows: of a block.
        columns: of a block, or inputs of a group.
    """

    format: str
    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    rows: int = 0
    columns: int = 0

    @classmethod
    def read(cls, options: Options, layout: str) -> Scheme:
        """Read the arguments of a group's weights.

        Raises:
            UsageError: one of them is unknown, or they contradict each other or the layout.
        """
        is_float = options.word("type", ("int", "float"), "int") == "float"
        bits = options.number("num_bits", (4, 8) if is_float else tuple(range(1, 9)), 8)
        group_size = options.config.get("group_size")
        default = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
        strategy = options.word("strategy", _STRATEGIES, default)
        rows, columns = 1, 0
        if strategy in ("group", "tensor_group"):
            columns = options.number("group_size")
            if columns < 1:
                options.refuse("group_size", f"is {columns}, and the strategy is {strategy}")
        if strategy == "block":
            size = options.config.get("block_structure")
            if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
                options.refuse("block_structure", f"is {size!r:.40}; two sizes are meant")
            rows, columns = size
        wants = {"pack-quantized": (False, None), "int-quantized": (False, 8), "float-quantized": (True, 8),
                 "mxfp8-quantized": (True, 8), "naive-quantized": (is_float, 8), "nvfp4-pack-quantized": (True, 4),
                 "mxfp4-pack-quantized": (True, 4)}[layout]  # fmt: skip
        if wants[0] != is_float or (wants[1] or bits) != bits:
            kind = "float" if is_float else "int"
            options.refuse("num_bits", f"is {bits} of type {kind}, which {layout} cannot hold")
        symmetric = options.config.get("symmetric", True)
        if is_float and not symmetric:
            options.refuse("symmetric", "is false with codes that are floats")
        return cls(layout, bits, is_float, bool(symmetric), strategy, rows, columns)

    def block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the rows and columns of a weight [out, in] that a scale serves."""
        rows = shape[0] if self.strategy == "tensor" else self.rows
        return rows, self.columns or shape[1]

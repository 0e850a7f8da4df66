"""The table of operators: each definition names the operators that it is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from compressor.capture.onnx_in.values import Call, Value
from compressor.registry import enter, import_files

Definition: TypeAlias = Callable[[Call], "Value | tuple[Value, ...]"]

EXTRA_DOMAIN = "com.microsoft"
_RANDOM = "its result is random; export the model for inference"
_SIZES = "the size of its result depends on data; a graph of fixed operators cannot hold it"
_STRINGS = "strings are not read"
_SEQUENCES = "sequences and optional values are not read"
_FLOW = "control flow is not captured; unroll the loop, or fix the branch, where the model is exported"
REFUSED = {
    **dict.fromkeys(("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
                     "RandomUniformLike"), _RANDOM),
    **dict.fromkeys(("Compress", "NonMaxSuppression", "NonZero", "Unique"), _SIZES),
    **dict.fromkeys(("RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"), _STRINGS),
    **dict.fromkeys(("ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement", "SequenceAt",
                     "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength",
                     "SplitToSequence"), _SEQUENCES),
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), _FLOW),
}  # fmt: skip
"""Operators that are never captured, and why."""
OPERATORS: dict[str, Definition] = {}


def operator(*names: str) -> Callable[[Definition], Definition]:
    """Enter a definition under the names of its operators."""
    return enter(OPERATORS, names)


def load() -> dict[str, Definition]:
    """Import all families, the files of this folder, and return the table."""
    import_files(__name__.rpartition(".")[0])
    return OPERATORS

"""Prune attention heads: rows of what writes queries, keys and values and columns of what reads the outputs go.

    groups:       q [r heads] of a group, k, v, cache [1 head]  ->  attention  ->  o [:, r heads]     go together
    query_heads:  q [1 head]                                    ->  attention  ->  o [:, 1 head]      as many a group

Heads go whole, so that no rotary pair is halved and no scale of the scores changes.  The graph stays dense, with fewer
heads; of a decoder whose groups go, caches get smaller as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compressor.errors import UsageError
from compressor.numerics.sparsity.column_removal import Importance
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.structured.channels import Channels, What
from compressor.pipeline.structured.inner_pruning import InnerPruning


@dataclass(frozen=True)
class HeadPrune(InnerPruning, Pass):
    """Remove heads of attention, and refit what reads the others by least squares.

    Attributes:
        ratio: share of each attention's heads to remove, above 0 and below 1, rounded to whole heads.
        remove: ``groups`` removes heads of keys and values with all query heads that read them, which makes caches
            smaller; ``query_heads`` removes as many query heads from each group, and leaves keys and values alone.
        importance: ``obs`` removes in eight rounds what costs least once the other heads make up for it (optimal brain
            surgery, as ZipLM does to heads); ``activation`` goes by the size of a head's contribution to the outputs,
            ``magnitude`` by the weights that read it alone.
        refit: whether the linears that read the heads are refitted to the outputs that they had.
        targets: class names, module names or ``re:`` patterns of linears; attentions with one of them lose heads.
        ignore: patterns of linears; attentions with one of them lose none.
    """

    ratio: float = 0.25
    remove: Literal["groups", "query_heads"] = "groups"
    importance: Importance = "obs"
    refit: bool = True
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()

    @property
    def what(self) -> What:
        """What goes."""
        return self.remove

    def count_removed(self, channels: Channels) -> int:
        """Return how many heads of an attention go, as many of each group."""
        size = channels.family.count // channels.groups
        left = int((1 - self.ratio) * size + 0.5)
        if not 0 < left < size:
            what = f"{size} heads{' of a group' if channels.groups > 1 else ''}"
            lost = "its last head" if not left else "none"
            raise UsageError(
                f"{self.name}: {channels.readers[0]}: at ratio {self.ratio:g} of {what}, the attention would lose "
                f"{lost}; {1 / size:.3g} is one head: change `ratio`, or ignore it"
            )
        return (size - left) * channels.groups

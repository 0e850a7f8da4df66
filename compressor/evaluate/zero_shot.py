"""Tell pictures apart by the texts of their classes, with a model that embeds both."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule

from compressor.data.pairs import ZeroShot
from compressor.evaluate.quality import Classes, Hidden, graph_classes, graph_hidden
from compressor.graph.kinds.halves import pair_halves


def classify_by_texts(pictures: Classes, texts: Hidden, data: ZeroShot) -> Classes:
    """Return a classifier: similarities of a picture to the text of each class.

    Args:
        pictures: images [B, channels, height, width] -> embeddings [B, D].
        texts: ids and mask [classes, S] -> embeddings [classes, D].
    """
    classes = torch.as_tensor(texts(data.ids.numpy(), data.mask.numpy())).double()

    def classify(x: NDArray[np.float32]) -> Tensor:
        return data.scale * (torch.as_tensor(pictures(x)).double() @ classes.T) + data.bias

    return classify


def graph_by_texts(graph: GraphModule, data: ZeroShot) -> Classes:
    """Return the classifier that a captured graph in PyTorch is."""
    pictures, texts = pair_halves(graph)
    return classify_by_texts(graph_classes(pictures), graph_hidden(texts), data)

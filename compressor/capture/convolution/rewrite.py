"""Rewrite convolutions as linears over patches, and fold batch norms into what is in front of them.

    conv2d(x) [N, C, H, W]             becomes   permute -> patches -> dense_linear -> permute
    a depthwise one                    becomes   permute -> patches -> depthwise_linear -> permute
    one in groups                      becomes   a linear for each group, or depthwise over pixels repeated
    conv1d, conv3d                     become    conv2d, of images of height 1, or with the depth's taps as channels
    conv_transpose                     becomes   the convolution that makes all phases of the outputs, put in order
    linear or convolution -> batch_norm    becomes   linear or convolution, its weight and bias scaled
    batch_norm elsewhere               becomes   permute -> mul -> add -> permute
    permute -> relu -> permute         becomes   relu: channels stay last between convolutions

The weight becomes [out, kernel rows * kernel columns * in], so that every pass, format and kernel of linears serves it;
that of a depthwise one [channels, kernel rows * kernel columns].
"""

from __future__ import annotations

from torch.fx import GraphModule

from compressor.capture.convolution.batch_norms import BatchNorm
from compressor.capture.convolution.channels_last import ChannelsLast, DropPermutes, MeanOfPixels
from compressor.capture.convolution.images import Conv2d, obstacle
from compressor.capture.convolution.nodes import ATEN, CONVOLUTIONS, SHARED
from compressor.capture.convolution.ranks import Conv1d, Conv3d, UnevenPadding, why_not_images
from compressor.capture.convolution.transposed import Transposed, why_not_phases
from compressor.graph.provenance import module_path
from compressor.graph.rewrite import drop_dead_parameters
from compressor.graph.rules import Outcome, apply

_VIEWS = (ATEN.view.default, ATEN._unsafe_view.default)


def rewrite_convolutions(graph: GraphModule) -> list[Outcome]:
    """Fold batch norms, rewrite convolutions, and let element-wise operators keep the channels last; in place.

    Batch norms that cannot be folded become a product and a sum.  Convolutions that are not linears over patches stay
    as they are; :func:`dense_convolutions` names them.

    Returns:
        What each rule did.
    """
    outcomes = apply([BatchNorm(graph)], graph.graph)
    for rule in (Transposed(graph), UnevenPadding(graph), Conv3d(graph), Conv1d(graph), Conv2d(graph)):
        outcomes += apply([rule], graph.graph)
    outcomes += apply([DropPermutes(), ChannelsLast(graph), MeanOfPixels(graph)], graph.graph)
    for node in graph.graph.nodes:
        if node.target in _VIEWS:  # permuted images have other strides than the model's, which no view takes
            node.target = ATEN.reshape.default
    drop_dead_parameters(graph)
    graph.graph.lint()
    return outcomes


def dense_convolutions(graph: GraphModule) -> list[str]:
    """List the convolutions that stay as they are, a line each with the reason."""
    found = []
    for node in graph.graph.nodes:
        if getattr(node.target, "overloadpacket", None) in CONVOLUTIONS:
            name = module_path(node) or node.name
            why = why_not_phases(node) or why_not_images(node) or obstacle(node) or SHARED
            found.append(f"{name}: stays dense: {why}")
    return found

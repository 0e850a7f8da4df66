"""Patches of convolutions: values by torch's own unfold, gradients by finite differences."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import unfold

from compressor.ops.patches import patches

CASES = [  # kernel, stride, padding, dilation
    ((3, 3), (1, 1), (1, 1), (1, 1)),
    ((3, 2), (2, 1), (1, 0), (1, 2)),
    ((1, 1), (1, 1), (0, 0), (1, 1)),
    ((1, 1), (2, 2), (0, 0), (1, 1)),
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), CASES)
def test_values_and_gradients(
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]
) -> None:
    x = torch.randn(2, 5, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = patches(x, kernel, stride, padding, dilation)
    expected = unfold(x.permute(0, 3, 1, 2), kernel, dilation, padding, stride)  # [N, C * places, outputs]
    expected = expected.unflatten(1, (3, -1)).permute(0, 3, 2, 1)  # [N, outputs, places, C]
    assert torch.equal(found, expected.reshape(found.shape))
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: patches(x, kernel, stride, padding, dilation), x)

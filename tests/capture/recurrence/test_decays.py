"""Decays are stored as the scan reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import torch

from compressor.capture.capture import capture


def test_decays_are_computed_once(tmp_path: Path) -> None:
    cls, options = families.RECURRENT["Mamba"]
    model: Any = families.save(tmp_path, cls, {**options, "num_hidden_layers": 1}, True)
    graph, planned = capture(tmp_path), capture(tmp_path, weights=False)
    name = "backbone.layers.0.mixer.decays"
    expected = -model.backbone.layers[0].mixer.A_log.exp()  # [channels, states]
    torch.testing.assert_close(graph.get_parameter(name)[0], expected.t())
    names = dict(graph.named_parameters())
    assert not any("A_log" in name for name in names) and names.keys() == dict(planned.named_parameters()).keys()
    assert planned.get_parameter(name).is_meta and planned.get_parameter(name).shape == names[name].shape
    assert graph.meta["model"].parameters == sum(parameter.numel() for parameter in model.parameters())

"""Image classifiers of transformers as folders: the captured graph computes what the model does, or it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_images import NAMED, SIDE, SIZES, classifier, resnet, save
from tiny_models import relative_error

from compressor.capture.capture import capture
from compressor.errors import CaptureError
from compressor.graph.model import weight_bytes
from compressor.graph.sites import linear_sites

transformers = pytest.importorskip("transformers")
ATTENTION = torch.ops.compressor.masked_attention.default

# configuration, architecture, sites, attention layers that are one operator
FAMILIES: dict[str, tuple[Callable[[], Any], str, int, int]] = {
    "resnet": (resnet, "", 7, 0),
    "mobilenetv2": (lambda: transformers.MobileNetV2Config(depth_multiplier=0.25, image_size=SIDE, **NAMED), "", 36, 0),
    "regnet": (
        lambda: transformers.RegNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4, **NAMED
        ),
        "", 12, 0,
    ),
    "convnext": (
        lambda: transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, **NAMED), "", 7, 0
    ),
    "vit": (lambda: transformers.ViTConfig(**SIZES, **NAMED), "", 14, 2),
    "deit": (lambda: transformers.DeiTConfig(**SIZES, **NAMED), "DeiTForImageClassificationWithTeacher", 15, 2),
    "dinov2": (lambda: transformers.Dinov2Config(**SIZES, **NAMED), "", 14, 2),
    "swin": (
        lambda: transformers.SwinConfig(
            image_size=SIDE, patch_size=4, embed_dim=16, depths=[1, 2], num_heads=[2, 2], window_size=4, **NAMED
        ),
        "", 21, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_computes_what_the_model_does(family: str, tmp_path: Path) -> None:
    config, architecture, sites, attentions = FAMILIES[family]
    model = classifier(config(), architecture)
    graph = capture(save(model, tmp_path))
    info = graph.meta["model"]
    assert (info.kind, info.image_shape, info.classes) == ("module", (3, SIDE, SIDE), 3)
    assert info.class_names == ("cat", "dog", "bird") and info.source == tmp_path
    assert len(linear_sites(graph)) == sites
    assert sum(node.target is ATTENTION for node in graph.graph.nodes) == attentions
    for count in (1, 3):
        x = torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            expected = model.double()(pixel_values=x.double()).logits
            assert relative_error(graph(x).numpy(), expected) < 1e-5


def test_a_plan_reads_headers_only_and_a_model_in_memory_is_captured_too(tmp_path: Path) -> None:
    model = classifier(transformers.ViTConfig(**SIZES, **NAMED))
    folder = save(model, tmp_path)
    real, meta = capture(folder), capture(folder, weights=False)
    assert weight_bytes(meta) == weight_bytes(real) and all(p.is_meta for p in meta.parameters())
    x = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(capture(model)(x), real(x))


@pytest.mark.parametrize(("changes", "shape"), [
    ({"size": 24}, (24, 24)),
    ({"size": {"height": 24, "width": 40}}, (24, 40)),
    ({"size": {"shortest_edge": 40}, "crop_size": 24}, (24, 24)),
    ({"size": {"height": 40, "width": 24}, "crop_size": {"height": 24, "width": 32}}, (24, 32)),
    ({"size": {"height": 40, "width": 40}, "crop_size": 24, "do_center_crop": False}, (40, 40)),
    ({"size": None}, (SIDE, SIDE)),  # the configuration's
])  # fmt: skip
def test_the_size_is_the_preprocessor_s_and_else_the_configuration_s(
    changes: dict[str, Any], shape: tuple[int, int], tmp_path: Path
) -> None:
    config = resnet()
    config.image_size = SIDE
    graph = capture(save(classifier(config), tmp_path, **changes), weights=False)
    assert graph.meta["model"].image_shape == (3, *shape)


def test_what_is_no_classifier_or_has_no_size_is_refused_by_name(tmp_path: Path) -> None:
    body = transformers.ViTModel(transformers.ViTConfig(**SIZES))
    body.save_pretrained(tmp_path / "body")
    with pytest.raises(CaptureError, match="ViTModel is a model of images without a classifier"):
        capture(tmp_path / "body")
    folder = save(classifier(resnet()), tmp_path / "resnet", size=None)
    with pytest.raises(CaptureError, match=r"nothing says which size images have: give `crop_size`"):
        capture(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 10**9, "width": 8}}))
    with pytest.raises(CaptureError, match="as numbers up to 4096"):
        capture(folder)
    vit = save(classifier(transformers.ViTConfig(**SIZES)), tmp_path / "vit", size=24)
    with pytest.raises(CaptureError, match=r"24\*24"):
        capture(vit)  # positions for 32x32

"""Graphs of pictures with texts against transformers' own models, and how similarities and fillings are found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_pairs import END, POSITIONS, pair, save

from compressor.capture.capture import capture
from compressor.errors import CaptureError
from compressor.graph.kinds.halves import pair_halves
from compressor.graph.sites import linear_sites
from compressor.verify.independence.check import check_independence

TOLERANCE = 2e-6  # of embeddings of length 1: rounding to float32


@pytest.mark.parametrize("family", ["CLIP", "SigLIP", "AltCLIP", "Chinese CLIP"])  # others are as CLIP is
def test_a_graph_computes_what_the_model_does(family: str) -> None:
    """Both halves, for other numbers of pictures, texts and tokens than at capture, with padding."""
    model = pair(family)
    graph = capture(model)
    info = graph.meta["model"]
    rng = torch.Generator().manual_seed(1)
    pixels = torch.randn(3, *info.image_shape, generator=rng)
    length = POSITIONS - 4
    ids, mask = torch.randint(3, END, (3, length), generator=rng), torch.ones(3, length)
    ids[0, 5] = ids[1, 7] = ids[2, length - 1] = END
    ids[0, 6:], mask[0, 6:] = 0, 0
    wanted = model.double()(pixel_values=pixels.double(), input_ids=ids, attention_mask=mask)
    pictures, texts = (half(*given) for half, given in zip(pair_halves(graph), ((pixels,), (ids, mask)), strict=True))
    for found, expected in ((pictures, wanted.image_embeds), (texts, wanted.text_embeds)):
        assert float((found - expected).abs().max()) < TOLERANCE
    similarities = info.pair.scale * (pictures @ texts.T) + info.pair.bias
    assert float((similarities - wanted.logits_per_image).abs().max()) < 4 * TOLERANCE * info.pair.scale
    together = graph(pixels, ids, mask)
    assert torch.equal(together[0], pictures) and torch.equal(together[1], texts)
    assert check_independence(graph).independent
    sites = [site.name for site in linear_sites(graph)]
    assert sites == sorted(sites, key=lambda name: "vision" not in name and "visual" not in name)  # pictures first
    assert len(sites) >= 24


def test_how_texts_are_filled_up_is_the_tokenizers(tmp_path: Path) -> None:
    model = pair("CLIP")
    for masks in (True, False):
        folder = save(model, tmp_path / str(masks), masks)
        info = capture(folder, weights=False).meta["model"]
        assert (info.pair.pad_id, info.pair.is_filled) == (0, not masks)
        assert (info.pair.scale, info.max_positions, info.vocab_size) == (1.0, POSITIONS, 40)  # no weight was read
    (tmp_path / "True" / "preprocessor_config.json").write_text('{"size": {"height": 0, "width": 32}}')
    with pytest.raises(CaptureError, match=r"preprocessor_config.json: \[0, 32\] says which size images have"):
        capture(tmp_path / "True", weights=False)

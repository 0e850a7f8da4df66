"""The halves of an encoder-decoder, found in its dataflow, and the cuts between its layers."""

from __future__ import annotations

import torch
from captures import capture_once
from encoder_decoders import TEXT, VOCAB, make, relative, steps_of

from compressor.calibration.segment_runner import SegmentRunner, run_outputs
from compressor.codegen.lowering.entries import split
from compressor.graph.kinds.encoder_decoder import encoder_nodes, memory_node
from compressor.graph.segments import segments
from compressor.progress import Silent


def test_the_encoder_is_what_depends_on_the_source_alone() -> None:
    graph = capture_once(make(*TEXT["mBART"]))  # its encoder ends with a norm, behind the last linear
    inside, memory = encoder_nodes(graph), memory_node(graph)
    linears = [n for n in inside if n.target is torch.ops.compressor.dense_linear.default]
    assert len(linears) == 6 + 2 * 2  # an encoder layer, and keys and values of two decoder layers
    assert memory is not None and memory.target is torch.ops.aten.layer_norm.default
    assert sum(user.target is torch.ops.compressor.dense_linear.default for user in memory.users) == 4


def test_cuts_lie_in_both_halves_and_running_them_is_running_the_graph() -> None:
    for name in ("BART", "mBART"):
        graph = capture_once(make(*TEXT[name]))
        cut = segments(graph)
        assert len(cut) == 9  # two of the encoder's layer, three of each decoder layer's, the head
        assert max(len(segment.sites) for segment in cut) <= 4
        batches = [torch.randint(3, VOCAB, (2, length)) for length in (7, 5)]
        outputs = run_outputs(SegmentRunner(graph, batches), Silent())
        for ids, got in zip(batches, outputs, strict=True):
            expected = steps_of(graph, ids, [ids, torch.ones(ids.shape)], [ids.shape[1]])
            torch.testing.assert_close(got, expected)


def test_the_halves_compute_what_the_whole_does() -> None:
    graph = capture_once(make(*TEXT["BART"]))
    encoder, decoder = split(graph)
    ids, source, mask = torch.randint(3, VOCAB, (2, 4)), torch.randint(3, VOCAB, (2, 6)), torch.ones(2, 6)
    crossing = encoder(source, mask)
    assert [tuple(x.shape) for x in crossing] == [(2, 4, 6, 16)] * 4
    caches = [torch.zeros(2, 4, 4, 16)] * 4
    got = decoder(ids, torch.arange(4), torch.arange(4), *caches, mask, *crossing)[0]
    assert relative(got, steps_of(graph, ids, [source, mask], [4])) < 1e-6
    own = {name for half in (encoder, decoder) for name, _ in half.named_parameters()}
    assert own == {name for name, _ in graph.named_parameters()}

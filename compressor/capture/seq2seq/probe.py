"""Find the layers of an encoder-decoder and what its attention asks for, by one run with fake parameters."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from compressor.capture.attention.masks import MaskRequest, mask_rules
from compressor.capture.export import error_context
from compressor.capture.meta_model import MetaModel
from compressor.capture.recognition.probe import Probed
from compressor.capture.seq2seq.program import Seq2SeqProgram, SourceRecorder
from compressor.capture.seq2seq.settings import generation_notes, source_info
from compressor.errors import CaptureError
from compressor.graph.kinds.example_sources import example_source

_TOKENS, _LONGEST = 5, 4096
_INTERFACE = ", not through transformers' attention interface; encoder-decoders are served through it alone"


def probe_seq2seq(meta_model: MetaModel, positions: int) -> Probed:
    """Probe an encoder-decoder.

    Args:
        positions: longest target that the configuration states; 0 for none.
    Raises:
        CaptureError: it takes other arguments, or its layers cannot be served.
    """
    model, name = meta_model.model, meta_model.name
    if not meta_model.interface:
        raise CaptureError(f"{name}: {type(model).__name__} picks its attention from a table of its own{_INTERFACE}")
    _check_experts(model, name)
    program = Seq2SeqProgram(model)
    known = inspect.signature(model.forward).parameters
    needed = ["decoder_input_ids", program.audio or "input_ids"]
    if absent := [argument for argument in needed if argument not in known]:
        raise CaptureError(f"{name}: {type(model).__name__}.forward takes no {', '.join(absent)}")
    info = source_info(meta_model, program.audio)
    ids, position = torch.full((2, _TOKENS), 3), torch.arange(_TOKENS)
    given = example_source(info)
    mask = given[1] if len(given) > 1 else None
    recorder = SourceRecorder(program.names, position=position, source_mask=mask)
    try:
        with torch.no_grad(), error_context(model, name):
            program.run(recorder, ids, torch.zeros(3, dtype=torch.int64), given[0])
    except CaptureError as error:
        if MaskRequest.__name__ not in str(error):
            raise
        raise CaptureError(
            f"{name}: {type(model).__name__} applies its masks in code of its own{_INTERFACE}"
        ) from error
    layers = len(recorder.keys)
    if not layers or sorted(recorder.keys) != list(range(layers)) or len(recorder.crossing) != layers:
        raise CaptureError(
            f"{name}: {layers} layers of {type(model).__name__} store keys and values in a cache, and "
            f"{len(recorder.crossing)} attend to the encoder's output through transformers' attention interface; "
            "every layer of the decoder must do both"
        )
    sizes = {(int(x.shape[1]), int(x.shape[3])) for x in (*recorder.keys.values(), *recorder.values.values())}
    if len(sizes) != 1:
        raise CaptureError(f"{name}: layers differ in key-value heads and width: {sorted(sizes)}; not covered")
    both = [call for call in recorder.calls if call.module in recorder.bidirectional]
    causal = [call for call in recorder.calls if call.module not in recorder.bidirectional]
    with error_context(None, name):
        program.rules = mask_rules(causal, causal=True, positions=positions or _LONGEST)
        program.rules |= mask_rules(both, causal=False, positions=info.max_positions or _LONGEST)
    kv_heads, head_dim = next(iter(sizes))
    facts: dict[str, Any] = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "max_positions": positions}
    notes = (*sorted(recorder.notes), *generation_notes(meta_model.generation))
    return Probed(program, {**facts, "encoder_source": info}, False, notes)


def _check_experts(model: nn.Module, name: str) -> None:
    """Refuse experts that are modules of their own, each called with the rows that a loop gives it.

    Raises:
        CaptureError: names the module.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleDict | nn.ModuleList) and hasattr(module, "num_experts"):
            raise CaptureError(
                f"{name}: {path} ({type(module).__name__}) calls its experts in code of its own, not through "
                "transformers' interface for experts; experts are served through it alone"
            )

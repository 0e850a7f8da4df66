"""Serve the quality of compressed models: requests as JSON lines on stdin, answers as JSON lines on stdout.

    python benchmarks/quality_evaluate.py ENTRY IDS

ENTRY is a model's entry of quality.yaml as JSON; the samples to calibrate peers on go to the file IDS.  The first line
out tells of the dense model, whose predictions are kept.  A request is ``{"bundle": FOLDER}``, measured by the bundle's
own kernels, or ``{"folder": FOLDER}``: a peer's dequantised weights as a Hugging Face folder in float32, put in the
place of the dense model's in the graph.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_row import STRIDE, WINDOW, load_texts
from safetensors.torch import load_file
from torch import Tensor

from compressor.capture.capture import capture
from compressor.evaluate.models import BundleProcess
from compressor.evaluate.quality import GraphLogits, Ids, Logits, measure_quality


class Remembered:
    """The dense model's logits, computed once for each window."""

    def __init__(self, model: GraphLogits) -> None:
        self.model = model
        self.known: dict[bytes, Tensor] = {}

    def __call__(self, ids: Ids) -> Tensor:
        """Float32 [1, S, V]."""
        key = ids.tobytes()
        if key not in self.known:
            self.known[key] = self.model(ids)
        return self.known[key]


def main() -> None:
    """Answer until stdin ends."""
    entry, ids_file = json.loads(sys.argv[1]), sys.argv[2]
    graph = capture(entry["model"])
    samples, tokens = load_texts(entry, graph)
    np.save(ids_file, samples.ids.numpy())
    dense = Remembered(GraphLogits(graph))
    template: Any = None

    def answer(logits: Logits) -> None:
        figures = measure_quality(logits, tokens, window=WINDOW, stride=STRIDE, dense=dense).metrics()
        print(json.dumps(figures), flush=True)

    answer(dense)
    for line in sys.stdin:
        request = json.loads(line)
        if "bundle" in request:
            with BundleProcess(Path(request["bundle"])) as process:
                answer(process.logits)
            continue
        if template is None:
            template = capture(request["folder"])
        weights = load_file(Path(request["folder"]) / "model.safetensors")
        for name, parameter in template.named_parameters():
            if weights[name].shape != parameter.shape:
                raise ValueError(f"{request['folder']}: {name} has another shape")
            parameter.data = weights[name].to(torch.float32)
        answer(GraphLogits(template))


if __name__ == "__main__":
    main()

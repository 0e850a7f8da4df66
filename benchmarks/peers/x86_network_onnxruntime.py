"""ONNX Runtime, for benchmarks/x86_models.py.  VARIANT: f32, static; f32-fused, dynamic, dynamic-fused of encoders.

Fused is the graph of onnxruntime.transformers' optimizer, with whole attentions and embeddings as operators.  What
converts is imported there, so that the memory of those who load is theirs.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from benchmarks.peers.x86_serve import Arrays, Network, serve

_SETTINGS = {
    "f32": "not quantised",
    "static": "static QDQ, unsigned activations, signed weights by channel, after quant_pre_process",
    "dynamic": "quantize_dynamic, signed weights by channel",
}


class OnnxRuntime(Network):
    """A session on the CPU provider, all optimisations on."""

    packages = ("onnxruntime", "onnx", "torch", "transformers")

    def convert(self, out: Path) -> None:
        """Export by torch.onnx, fuse, quantise."""
        import onnx
        from onnxruntime import quantization
        from onnxruntime.quantization.shape_inference import quant_pre_process

        class Samples(quantization.CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
            def __init__(self, samples: list[Arrays]) -> None:
                self.left = iter(samples)

            def get_next(self) -> Arrays | None:
                return next(self.left, None)

        how, _, fused = self.variant.partition("-")
        int8, uint8 = quantization.QuantType.QInt8, quantization.QuantType.QUInt8
        options = {"DefaultTensorType": onnx.TensorProto.FLOAT}  # of what shape inference does not know
        with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
            exported, prepared = Path(scratch) / "exported.onnx", Path(scratch) / "prepared.onnx"
            self._export(exported)
            if fused:
                self._fuse(exported)
            if how == "f32":
                exported.rename(out / "model.onnx")
            elif how == "dynamic":
                quantization.quantize_dynamic(
                    exported, out / "model.onnx", per_channel=True, weight_type=int8, extra_options=options
                )
            else:
                # An attention's mask is the lowest float32: an addition of it that is quantised knows nothing else.
                operators = ["MatMul", "Gather"] if self.task["kind"] == "encoder" else None
                quant_pre_process(exported, prepared, skip_symbolic_shape=True)
                quantization.quantize_static(
                    prepared, out / "model.onnx", Samples(self.calibration()), per_channel=True,
                    quant_format=quantization.QuantFormat.QDQ, activation_type=uint8, weight_type=int8,
                    op_types_to_quantize=operators, extra_options=options,
                )  # fmt: skip

    def _export(self, file: Path) -> None:
        """Take the task's ONNX file, if it has one; else trace: the optimizer finds no attention in what torch.export
        gives.
        """
        given = self.model / "model.onnx"
        if given.exists():
            shutil.copyfile(given, file)
            return
        import torch

        from benchmarks.peers.x86_network import torch_network

        example = self.calibration()[0]
        free = {0: "batch", 1: "length"} if self.task["kind"] == "encoder" else {0: "batch"}
        torch.onnx.export(
            torch_network(self.task, attention="eager"), tuple(map(torch.from_numpy, example.values())), file,
            dynamo=False, input_names=list(example), output_names=["output"], opset_version=18,
            dynamic_axes={name: free for name in (*example, "output")},
        )  # fmt: skip

    def _fuse(self, file: Path) -> None:
        from onnxruntime.transformers import optimizer

        from benchmarks.peers.x86_network import torch_network

        network: Any = torch_network(self.task)
        bert = network.bert.config
        fused = optimizer.optimize_model(
            str(file), "bert", num_heads=bert.num_attention_heads, hidden_size=bert.hidden_size, opt_level=0
        )
        fused.save_model_to_file(str(file))

    def load(self) -> None:
        """With this many threads in an operator."""
        how, _, fused = self.variant.partition("-")
        self.settings = _SETTINGS[how] + (", fused by onnxruntime.transformers.optimizer" if fused else "")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        self.session = onnxruntime.InferenceSession(
            self.files / "model.onnx", options, providers=["CPUExecutionProvider"]
        )

    def run(self, inputs: Arrays) -> NDArray[np.float32]:
        """Return the output."""
        found: NDArray[np.float32] = self.session.run(None, inputs)[0]
        return found


if __name__ == "__main__":
    serve(OnnxRuntime)

"""OpenVINO, for benchmarks/x86_models.py.  VARIANT: STORED-HINT, where STORED is int8 or f32, and HINT f32 or default.

Default is the CPU's choice of arithmetic for what is not int8: bfloat16 where there is AMX.  What converts is imported
there, so that the memory of those who load is theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray

from benchmarks.peers.x86_serve import Arrays, Network, serve


class OpenVINO(Network):
    """A compiled model; its shapes stay dynamic, as ours do."""

    packages = ("openvino", "nncf", "optimum-intel", "transformers", "torch")

    def convert(self, out: Path) -> None:
        """NNCF's post-training quantisation, with its presets for the kind of model."""
        graph = self._dense()
        if self.variant.startswith("int8"):
            import nncf

            samples = [self._fed(graph, sample) for sample in self.calibration()]
            kind = nncf.ModelType.TRANSFORMER if self.task["kind"] == "encoder" else None
            graph = nncf.quantize(graph, nncf.Dataset(samples), model_type=kind, subset_size=len(samples))
        openvino.save_model(graph, out / "openvino_model.xml", compress_to_fp16=False)

    def _dense(self) -> Any:
        """Convert encoders by optimum-intel, as `optimum-cli export openvino` does, and plain modules by OpenVINO
        itself; the task's ONNX file, where it has one, is read.
        """
        given = self.model / "model.onnx"
        if given.exists():
            return openvino.Core().read_model(given)
        if self.task["kind"] == "encoder":
            from optimum.intel import OVModelForFeatureExtraction

            exported = OVModelForFeatureExtraction.from_pretrained(self.task["source"], export=True, compile=False)
            return exported.model
        import torch

        from benchmarks.peers.x86_network import torch_network

        ((name, example),) = self.calibration()[0].items()
        shape = [-1, *example.shape[1:]]
        graph = openvino.convert_model(
            torch_network(self.task), example_input=torch.from_numpy(example), input=[(shape, openvino.Type.f32)]
        )
        graph.input(0).set_names({name})
        return graph

    def load(self) -> None:
        """Read, compile for the CPU."""
        settings = {
            "INFERENCE_NUM_THREADS": self.threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,
        }  # fmt: skip
        stored, _, hint = self.variant.partition("-")
        if hint != "default":
            settings["INFERENCE_PRECISION_HINT"] = hint
        self.compiled = openvino.Core().compile_model(self.files / "openvino_model.xml", "CPU", settings)
        chosen = self.compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        how = "int8 by NNCF, post-training, static" if stored == "int8" else "not quantised"
        self.settings = f"{how}; inference_precision_hint {chosen}; latency, 1 stream"
        self.request = self.compiled.create_infer_request()

    def run(self, inputs: Arrays) -> NDArray[np.float32]:
        """Return the output, in OpenVINO's own memory."""
        self.request.infer(self._fed(self.compiled, inputs), share_inputs=True)
        found: NDArray[np.float32] = self.request.get_output_tensor(0).data
        return found

    @staticmethod
    def _fed(graph: Any, inputs: Arrays) -> Arrays:
        """With zeros for the types of tokens, which optimum's export makes an input."""
        first = next(iter(inputs.values()))
        names = [tensor.any_name for tensor in graph.inputs]
        return {name: inputs[name] if name in inputs else np.zeros_like(first) for name in names}


if __name__ == "__main__":
    serve(OpenVINO)

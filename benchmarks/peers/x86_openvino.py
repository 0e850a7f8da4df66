"""OpenVINO, for benchmarks/x86_llm.py: int4 by NNCF through optimum-intel.  VARIANT: f32, or default, the CPU's choice.

The last position is cut out in front of the head, as OpenVINO GenAI does, since nobody else computes all logits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino
from numpy.typing import NDArray
from openvino import opset13 as ops

from benchmarks.peers.x86_serve import Runtime, serve


class OpenVINO(Runtime):
    """A stateful decoder; the state is its cache."""

    packages = ("openvino", "nncf", "optimum-intel", "transformers", "torch")

    def convert(self, out: Path) -> None:
        """Convert like ``optimum-cli export openvino --weight-format int4 --sym --group-size 128 --ratio 1``."""
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

        quantization = OVWeightQuantizationConfig(bits=4, sym=True, group_size=128, ratio=1.0)
        model = OVModelForCausalLM.from_pretrained(
            self.model, export=True, compile=False, quantization_config=quantization
        )
        model.save_pretrained(out)

    def load(self) -> None:
        """Read, cut, compile for the CPU."""
        core = openvino.Core()
        graph = core.read_model(self.files / "openvino_model.xml")
        _keep_last_position(graph)
        settings = {
            "INFERENCE_NUM_THREADS": self.threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,
        }  # fmt: skip
        if self.variant != "default":
            settings["INFERENCE_PRECISION_HINT"] = self.variant
        compiled = core.compile_model(graph, "CPU", settings)
        told = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
        found = ", ".join(f"{name.lower()} {_word(compiled.get_property(name))}" for name in told)
        self.settings = f"int4 sym g128, embeddings and head int8; {found}"
        self.request = compiled.create_infer_request()
        self.beam = np.zeros(1, np.int32)

    def reset(self) -> None:
        """Empty the state."""
        self.request.reset_state()
        self.position = 0

    def step(self, ids: list[int]) -> int:
        """Append tokens and return the likeliest next one."""
        begin, self.position = self.position, self.position + len(ids)
        inputs = {
            "input_ids": np.array([ids]),
            "attention_mask": np.ones((1, self.position), np.int64),
            "position_ids": np.arange(begin, self.position)[None],
            "beam_idx": self.beam,
        }
        self.request.infer(inputs, share_inputs=True)
        self._logits: NDArray[np.float32] = self.request.get_output_tensor(0).data[0, -1]
        return int(self._logits.argmax())

    def logits(self) -> NDArray[np.float32]:
        """Return the logits of the last step, [V]."""
        return self._logits

    def embedding_bytes(self) -> int:
        """Return the table's bytes: NNCF stores it in int8, with a zero point and a float16 scale per row."""
        return self.embeddings + 3 * int(self.config["vocab_size"])


def _word(value: object) -> str:
    """Return a property's value in its shortest form."""
    name = getattr(value, "get_type_name", None)
    return str(name() if name else value)


def _keep_last_position(graph: openvino.Model) -> None:
    """Make the head multiply the last position only."""
    head = graph.output("logits").get_node().input_value(0).get_node()
    if head.get_type_name() != "MatMul":
        raise ValueError(f"the head is not a MatMul but a {head.get_type_name()}")
    hidden = head.input_value(0)
    most = np.iinfo(np.int64).max
    last = ops.slice(hidden, np.array([-1]), np.array([most]), np.array([1]), np.array([1]))
    head.input(0).replace_source_output(last.output(0))
    graph.validate_nodes_and_infer_types()


if __name__ == "__main__":
    serve(OpenVINO)

"""ONNX models for ONNX Runtime Web, as its users make them: decoders by onnxruntime-genai's builder, encoders by torch.

python -P benchmarks/peers/web_onnxruntime.py decoder MODEL OUT int4|fp32
python -P benchmarks/peers/web_onnxruntime.py encoder MODEL OUT int4|int8|fp32
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main(kind: str, model: str, out: str, precision: str) -> None:
    """Write ``OUT/model.onnx``, with the weights beside it where the builder puts them."""
    folder = Path(out)
    if kind == "decoder":
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", model, "-i", model, "-o", out]
        options = ["-p", precision, "-e", "cpu", "--extra_options", "prune_lm_head=true"]
        subprocess.run([*command, *options], check=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        _encoder(Path(model), Path(scratch) / "model.onnx", folder / "model.onnx", precision)


def _encoder(model: Path, exported: Path, out: Path, precision: str) -> None:
    import onnx
    import torch
    from onnxruntime import quantization
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.transformers import optimizer
    from transformers import AutoModel

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert: Any = AutoModel.from_pretrained(model, attn_implementation="eager")

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
            return found

    network = Hidden().eval().requires_grad_(False)

    example = (torch.ones(1, 8, dtype=torch.int64), torch.ones(1, 8))
    names, free = ["ids", "mask"], {0: "batch", 1: "length"}
    torch.onnx.export(
        network, example, exported, dynamo=False, input_names=names, output_names=["output"], opset_version=18,
        dynamic_axes={name: free for name in (*names, "output")},
    )  # fmt: skip
    config = network.bert.config
    fused = optimizer.optimize_model(
        str(exported), "bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size, opt_level=0
    )
    fused.save_model_to_file(str(exported))
    if precision == "int8":
        options = {"DefaultTensorType": onnx.TensorProto.FLOAT}  # of what shape inference does not know
        int8 = quantization.QuantType.QInt8
        quantization.quantize_dynamic(exported, out, per_channel=True, weight_type=int8, extra_options=options)
    elif precision == "int4":
        quantizer = MatMulNBitsQuantizer(onnx.load(exported), block_size=32, is_symmetric=True)
        quantizer.process()
        quantizer.model.save_model_to_file(str(out))
    else:
        exported.rename(out)


if __name__ == "__main__":
    main(*sys.argv[1:])

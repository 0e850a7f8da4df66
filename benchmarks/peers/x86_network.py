"""The models of benchmarks/x86_models.py in PyTorch, as other runtimes convert them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.resnet_model import load_resnet


class Encoder(nn.Module):
    """A BERT's last hidden state; ``attention`` is transformers' name of an implementation."""

    def __init__(self, folder: str, attention: str) -> None:
        super().__init__()
        from transformers import BertModel

        self.bert: Any = BertModel.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, S], [B, S] -> [B, S, H]."""
        hidden: Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return hidden


def torch_network(task: dict[str, Any], attention: str = "sdpa") -> nn.Module:
    """Load the task's model in float32, for inference."""
    network = Encoder(task["source"], attention) if task["kind"] == "encoder" else load_resnet(Path(task["source"]))
    return network.eval().requires_grad_(False)

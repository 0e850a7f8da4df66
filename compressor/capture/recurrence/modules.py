"""PyTorch's LSTM, GRU and RNN modules, unrolled over a fixed number of steps into linears and gates.

    LSTM(x)  becomes, for each layer and direction,  input_l0(x)  once, and  hidden_l0(h)  in each step

These linears are modules of their own while the module is captured, so that passes find them as ``<module>.input_l0``.
A module of one step is a stream's: both are Linears then.  With more steps ``hidden_l0`` is called again and again, and
each call would be packed anew: it has the module's own class, so that ``targets: Linear`` leaves it dense, stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from compressor.errors import CaptureError

MOST_STEPS = 1024
_UNROLLED = (nn.LSTM, nn.GRU, nn.RNN)


class Linear(nn.Module):
    """Place of a linear whose weight belongs to the module around it."""

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        """Run the linear."""
        return run()


@contextmanager
def recurrent_modules_unrolled(root: nn.Module) -> Iterator[None]:
    """Let recurrent modules run as linears and gates inside."""
    found = [module for module in root.modules() if type(module) in _UNROLLED]
    try:
        for module in found:
            for name in _names(cast(nn.RNNBase, module)):
                module.add_module(f"input_{name}", Linear())
                module.add_module(f"hidden_{name}", Linear())
            module.__dict__["forward"] = _Unrolled(cast(nn.RNNBase, module)).forward
        yield
    finally:
        for module in found:
            module.__dict__.pop("forward", None)
            for name in _names(cast(nn.RNNBase, module)):
                module._modules.pop(f"input_{name}", None)
                module._modules.pop(f"hidden_{name}", None)


def _names(module: nn.RNNBase) -> list[str]:
    """Return PyTorch's suffixes of the weights of all layers and directions."""
    directions = ("", "_reverse") if module.bidirectional else ("",)
    return [f"l{layer}{direction}" for layer in range(module.num_layers) for direction in directions]


class _Unrolled:
    """Forward of one module, step by step."""

    def __init__(self, module: nn.RNNBase) -> None:
        self.module, self.kind = module, type(module).__name__

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Return what the module returns: all outputs of the last layer, and the last states of all."""
        module = self.module
        if not isinstance(input, Tensor):
            raise CaptureError(f"{self.kind} gets a {type(input).__name__}; give tensors, whose sequences are as long")
        batched = input.dim() == 3
        x = input if batched else input.unsqueeze(0 if module.batch_first else 1)
        x = x if module.batch_first else x.transpose(0, 1)  # [B, S, in]
        if not isinstance(x.shape[1], int) or x.shape[1] > MOST_STEPS:
            raise CaptureError(
                f"{self.kind} runs over {x.shape[1]} steps; a fixed number of up to {MOST_STEPS} is unrolled: leave "
                "the steps out of dynamic_shapes, or capture the module around one step"
            )
        states, lasts = self._states(x, hx, batched), list[list[Tensor]]()
        names = _names(module)
        for layer in range(module.num_layers):
            outputs = []
            for name in names[layer * len(names) // module.num_layers : (layer + 1) * len(names) // module.num_layers]:
                y, last = self._direction(name, x, states[len(lasts)])
                outputs.append(y)
                lasts.append(last)
            x = torch.cat(outputs, dim=-1)  # dropout between layers is for training
        ends = [torch.stack(parts, 0) for parts in zip(*lasts, strict=True)]
        x = x if module.batch_first else x.transpose(0, 1)
        if not batched:
            x, ends = x.squeeze(0 if module.batch_first else 1), [end.squeeze(1) for end in ends]
        return x, (tuple(ends) if self.kind == "LSTM" else ends[0])

    def _states(self, x: Tensor, hx: Any, batched: bool) -> list[list[Tensor]]:
        """Return the first states of each layer and direction, [B, H] each."""
        module = self.module
        if hx is not None:
            given = list(hx) if self.kind == "LSTM" else [hx]
            given = given if batched else [part.unsqueeze(1) for part in given]
            return [[part[i] for part in given] for i in range(given[0].shape[0])]
        widths = [module.proj_size or module.hidden_size, *([module.hidden_size] if self.kind == "LSTM" else [])]
        return [[x.new_zeros(x.shape[0], width) for width in widths] for _ in _names(module)]

    def _direction(self, name: str, x: Tensor, held: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs [B, S, H] of one layer in one direction, and its last states."""
        read, steps = self._linear("input", "ih", name, x), list(range(x.shape[1]))
        steps = steps[::-1] if name.endswith("_reverse") else steps
        outputs: dict[int, Tensor] = {}
        step = {"LSTM": self._lstm, "GRU": self._gru, "RNN": self._rnn}[self.kind]
        for t in steps:
            held = step(name, read[:, t], held, len(steps))
            outputs[t] = held[0]
        return torch.stack([outputs[t] for t in range(len(steps))], dim=1), held

    def _linear(self, part: str, letters: str, name: str, x: Tensor, steps: int = 1) -> Tensor:
        weight: Tensor = getattr(self.module, f"weight_{letters}_{name}")
        bias: Tensor | None = getattr(self.module, f"bias_{letters}_{name}") if self.module.bias else None
        if steps > 1:
            return linear(x, weight, bias)
        done: Tensor = self.module.get_submodule(f"{part}_{name}")(lambda: linear(x, weight, bias))
        return done

    def _rnn(self, name: str, x: Tensor, held: list[Tensor], steps: int) -> list[Tensor]:
        function = torch.tanh if self.module.nonlinearity == "tanh" else torch.relu
        return [function(x + self._linear("hidden", "hh", name, held[0], steps))]

    def _gru(self, name: str, x: Tensor, held: list[Tensor], steps: int) -> list[Tensor]:
        (h,) = held
        given, own = x.chunk(3, -1), self._linear("hidden", "hh", name, h, steps).chunk(3, -1)
        reset, update = torch.sigmoid(given[0] + own[0]), torch.sigmoid(given[1] + own[1])
        new = torch.tanh(given[2] + reset * own[2])
        return [(1 - update) * new + update * h]

    def _lstm(self, name: str, x: Tensor, held: list[Tensor], steps: int) -> list[Tensor]:
        h, c = held
        i, f, g, o = (x + self._linear("hidden", "hh", name, h, steps)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        if self.module.proj_size:
            h = linear(h, getattr(self.module, f"weight_hr_{name}"))
        return [h, c]

"""Whittle on a decoder of Hugging Face: a super-network trained by its sandwich rule, and sub-networks.

    python -m benchmarks.peers.whittle_search MODEL FITTED.npy HELD.npy OUT --steps 200 --share 0.667 0.5

For benchmarks/architecture_search.py, which writes FITTED and HELD (int64 [samples, sequence]) and measures OUT/SHARE,
folders of Hugging Face.  Sub-networks are the first channels, heads, layers and coordinates of the stream, alike in all
layers, as LlamaConfig can say; the super-network learns the model's own predictions.  Of the front of losses and
parameters of all of them, the best within each ``--share`` of the parameters that a step reads is written.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litgpt import Config
from syne_tune.config_space import choice
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from whittle.loss.losses import forward_kl
from whittle.models.gpt import GPT
from whittle.models.gpt.extract import extract_current_sub_network
from whittle.sampling.random_sampler import RandomSampler
from whittle.search.multi_objective import get_pareto_optimal
from whittle.search.search_spaces import SimpleSearchSpace
from whittle.training_strategies.sandwich import SandwichStrategy

LINEARS = {"attn.proj": "self_attn.o_proj", "mlp.fc_1": "mlp.gate_proj", "mlp.fc_2": "mlp.up_proj"}
LINEARS |= {"mlp.proj": "mlp.down_proj", "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}


class Space(SimpleSearchSpace):
    """Sizes of a sub-network, alike in all layers."""

    def __init__(self, config: Config) -> None:
        super().__init__(
            {
                "n_embd": choice([config.n_embd * part // 4 for part in (2, 3, 4)]),
                "n_layers": choice(list(range(2, config.n_layer + 1))),
                "heads": choice([config.n_query_groups, config.n_head]),
                "intermediate": choice([config.intermediate_size * part // 4 for part in (1, 2, 3, 4)]),
            }
        )

    @staticmethod
    def cast(config: dict[str, Any]) -> dict[str, Any]:
        """Return the sizes as a super-network takes them."""
        return {
            "sub_network_n_embd": config["n_embd"],
            "sub_network_n_layers": config["n_layers"],
            "sub_network_num_heads": config["heads"],
            "sub_network_intermediate_size": config["intermediate"],
        }


def names(layers: int) -> dict[str, tuple[str, ...]]:
    """Return LitGPT's name of each tensor -> names of Hugging Face, whose rows follow one another."""
    found: dict[str, tuple[str, ...]] = {"transformer.ln_f.weight": ("model.norm.weight",)}
    found |= dict.fromkeys(("transformer.wte.weight", "lm_head.weight"), ("model.embed_tokens.weight",))
    for i in range(layers):
        theirs, ours = f"transformer.h.{i}.", f"model.layers.{i}."
        found |= {f"{theirs}{a}.weight": (f"{ours}{b}.weight",) for a, b in LINEARS.items()}
        found[f"{theirs}attn.qkv.weight"] = tuple(f"{ours}self_attn.{x}_proj.weight" for x in "qkv")
    return found


def super_network(folder: Path) -> GPT:
    """Return a model as a super-network, and check that it computes the same."""
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    facts, weights = net.config, net.state_dict()
    model = GPT(
        Config(
            name=folder.name, block_size=facts.max_position_embeddings, vocab_size=facts.vocab_size,
            padded_vocab_size=facts.vocab_size, n_layer=facts.num_hidden_layers, n_head=facts.num_attention_heads,
            n_query_groups=facts.num_key_value_heads, head_size=facts.head_dim, n_embd=facts.hidden_size,
            rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
            norm_eps=facts.rms_norm_eps, mlp_class_name="LLaMAMLP", intermediate_size=facts.intermediate_size,
            rope_base=int(facts.rope_parameters["rope_theta"]),
        )
    )  # fmt: skip
    own = {a: torch.cat([weights[b] for b in rows]) for a, rows in names(facts.num_hidden_layers).items()}
    model.load_state_dict(own)
    ids = torch.arange(64)[None] % facts.vocab_size
    with torch.no_grad():
        assert torch.allclose(model(ids), net(ids).logits, atol=1e-4), "the super-network is another model"
    return model


def train(model: GPT, ids: Tensor, space: Space, steps: int, batch: int, learning_rate: float) -> None:
    """Take steps of the sandwich rule towards the model's own predictions."""
    teacher = copy.deepcopy(model).eval()
    strategy = SandwichStrategy(
        random_samples=2, sampler=RandomSampler(space, seed=0), device="cpu",
        loss_function=lambda found, wanted: forward_kl(found.flatten(0, 1), wanted.flatten(0, 1), 1.0),
    )  # fmt: skip
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, learning_rate, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        own = ids[torch.randint(len(ids), (batch,), generator=generator)]
        with torch.no_grad():
            wanted = teacher(own)
        loss = strategy(model, own, wanted)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        rate.step()
        if step % 20 == 0:
            print(f"step {step}: {loss:.4f} of four networks", flush=True)


def read(config: PretrainedConfig, sizes: dict[str, Any]) -> int:
    """Return the parameters that a step of a sub-network reads: those of its linears, the last one included."""
    width, kv = sizes["n_embd"], 2 * config.num_key_value_heads * config.head_dim
    attention = width * (2 * sizes["heads"] * config.head_dim + kv)
    return int(sizes["n_layers"] * (attention + 3 * width * sizes["intermediate"]) + width * config.vocab_size)


@torch.no_grad()
def search(model: GPT, held: Tensor, space: Space, config: PretrainedConfig) -> list[tuple[float, int, dict[str, Any]]]:
    """Return (loss, parameters, sizes) of the front of all sub-networks: no search of Whittle's finds a better one."""
    found = []
    for values in itertools.product(*(one.categories for one in space.config_space.values())):
        sizes = dict(zip(space.config_space, values, strict=True))
        model.set_sub_network(**space.cast(sizes))
        logits = model(held)
        model.reset_super_network()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), held[:, 1:].flatten())
        found.append((float(loss), read(config, sizes), sizes))
    best = get_pareto_optimal(np.array([one[:2] for one in found]))
    return [one for one, is_best in zip(found, best, strict=True) if is_best]


def write(model: GPT, space: Space, sizes: dict[str, Any], folder: Path, out: Path) -> None:
    """Write a sub-network as a folder of Hugging Face, and check that it computes the same."""
    model.set_sub_network(**space.cast(sizes))
    own = extract_current_sub_network(model).eval()
    model.reset_super_network()
    config = AutoConfig.from_pretrained(folder)
    config.hidden_size, config.num_hidden_layers = sizes["n_embd"], sizes["n_layers"]
    config.num_attention_heads, config.intermediate_size = sizes["heads"], sizes["intermediate"]
    # A head becomes a class of its own where the two tensors have been trained apart.
    config.tie_word_embeddings, config.dtype = False, torch.float32
    net = AutoModelForCausalLM.from_config(config).eval()
    theirs, weights = own.state_dict(), {}
    for name, rows in names(sizes["n_layers"]).items():
        shapes = [net.state_dict()[row].shape[0] for row in rows]
        weights |= dict(zip(rows, theirs[name].split(shapes), strict=True))
    weights["lm_head.weight"] = theirs["lm_head.weight"]
    weights["model.embed_tokens.weight"] = theirs["transformer.wte.weight"]
    net.load_state_dict(weights)
    ids = torch.arange(64)[None] % config.vocab_size
    with torch.no_grad():
        assert torch.allclose(own(ids), net(ids).logits, atol=1e-3), "the sub-network's folder is another model"
    net.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)


def main() -> None:
    """Train, search, and write the best sub-network within the share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "fitted", "held", "out"):
        parser.add_argument(name, type=Path)
    for name, value in (("steps", 200), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--share", type=float, nargs="+", default=[0.667, 0.5])
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fitted, held = (torch.from_numpy(np.load(path)) for path in (given.fitted, given.held))
    begin, model, config = time.process_time(), super_network(given.model), AutoConfig.from_pretrained(given.model)
    space = Space(model.config)
    train(model, fitted, space, given.steps, given.batch, given.learning_rate)
    front = search(model.eval(), held, space, config)
    sizes = {"n_embd": config.hidden_size, "n_layers": config.num_hidden_layers}
    sizes |= {"heads": config.num_attention_heads, "intermediate": config.intermediate_size}
    whole, seconds = read(config, sizes), time.process_time() - begin
    for share in given.share:
        loss, cost, best = min((one for one in front if one[1] <= share * whole), key=lambda one: one[0])
        write(model, space, best, given.model, given.out / f"{share:g}")
        print(json.dumps({"share": share, "sizes": best, "loss": loss, "read": cost / whole, "cpu_s": seconds}))


if __name__ == "__main__":
    main()

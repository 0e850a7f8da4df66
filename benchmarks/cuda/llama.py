"""Time whole Llamas with random weights on a GPU, beside PyTorch in bfloat16.

    python benchmarks/cuda/llama.py --export DIR [--models 852m,7b] [--scheme W4A16_G128] [--wheel WHEEL ...]
    python benchmarks/cuda/llama.py --measure DIR [--bundle BUNDLE] [--save FILE] [--no-peers]

The first runs where TVM and nvcc are: DIR takes along the kernels, the run-time, and wheels that are missing over there
(``pip download --no-deps --python-version 3.12 --only-binary=:all: apache-tvm-ffi==...``).  The second runs where the
GPU is, and makes the weights: codes of any bits, and small scales.  Peers are the same model in PyTorch, with caches of
one size: eager, eager in a CUDA graph, and compiled layers in a CUDA graph.  ``--bundle`` is checked and timed as well.
A token's time is the median of 100, logits on the host, behind a prompt of 128 tokens; so is a prompt's, of 5.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MODELS = {  # hidden, layers, feed-forward, heads, heads of keys and values
    "852m": (2048, 16, 5632, 32, 8),
    "7b": (4096, 32, 11008, 32, 32),
}
VOCABULARY, POSITIONS, PROMPT, TOKENS = 32000, 2048, 128, 100
PROMPTS = (128, 1024)
SAFETENSORS = {"float16": "F16", "float32": "F32"}


def make_model(folder: Path, sizes: tuple[int, ...]) -> None:
    """Write a Hugging Face folder whose weights are a hole in a file: the kernels depend on shapes alone."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, feed, heads, kv_heads = sizes
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=feed, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=POSITIONS,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, dtype="float16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, parameter in model.named_parameters():
        begin, end = end, end + 2 * parameter.numel()
        header[name] = {"dtype": "F16", "shape": list(parameter.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCABULARY)}, unk_token="<0>"))
    words.save(str(folder / "tokenizer.json"))


def export(folder: Path, names: list[str], scheme: str, arch: str, wheels: list[Path]) -> None:
    """Compile the kernels of each model, and lay them beside what runs them."""
    import torch
    from torch import nn

    from compressor.capture.capture import capture
    from compressor.codegen.backend import make_backend
    from compressor.codegen.gpu.kernel_set import gpu_kernels
    from compressor.codegen.lowering.compile import compile_graph
    from compressor.codegen.targets.cuda import Cuda
    from compressor.export.native import copy_tvm_runtime
    from compressor.host.resources import runtime_files
    from compressor.plan.passes import plan_passes
    from compressor.recipe.recipe import Recipe

    shutil.rmtree(folder, ignore_errors=True)
    for wheel in wheels:
        zipfile.ZipFile(wheel).extractall(folder / "python")
    for name in names:
        began, out, model = time.perf_counter(), folder / name, folder / "model"
        make_model(model, MODELS[name])
        target = Cuda(arch)  # type: ignore[arg-type]
        passes = [{"rtn": {"scheme": scheme, "targets": "Linear"}}]
        recipe = Recipe.from_dict({"model": str(model), "passes": passes, "target": "cuda"})
        graph = plan_passes(capture(model, weights=False), recipe, make_backend(target)).final
        for place, parameter in list(graph.named_parameters()):  # memory that nothing touches, in place of none
            owner, _, leaf = place.rpartition(".")
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            graph.get_submodule(owner)._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
        library = compile_graph(graph, target, kernels=gpu_kernels, tune="off")
        out.mkdir()
        library.save(out / "model.so", target)
        for file, source in runtime_files().items():
            (out / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(source, out / file)
        copy_tvm_runtime(out / "lib", ["libtvm_runtime.so", "libtvm_runtime_cuda.so"])
        parameters = [(n, graph.get_parameter(n)) for n in library.parameters]
        info = graph.meta["model"]
        facts = {
            "kind": "decoder", "schema_version": 3, "format": "compressor bundle", "device": "cuda",
            "cuda_capabilities": list(library.isa.archs), "parameters": library.parameters,
            "files": {f"lib/{file.name}": {"sha256": ""} for file in (out / "lib").iterdir()},
            "types": [[str(p.dtype).removeprefix("torch."), list(p.shape)] for _, p in parameters],
            "weight_bytes": sum(p.numel() * p.element_size() for _, p in parameters),
            "model": {
                "layers": info.layers, "kv_heads": info.kv_heads, "head_dim": info.head_dim, "max_positions": POSITIONS,
                "vocab_size": VOCABULARY, "bos_id": 1, "eos_ids": [],
            },
            "kernels": library.kernels,
        }  # fmt: skip
        (out / "manifest.json").write_text(json.dumps(facts))
        shutil.rmtree(model)
        spilled = [k["name"] for k in library.kernels if k.get("spill_bytes")]
        print(f"{name}: {time.perf_counter() - began:.0f} s, spills: {spilled or 'none'}", flush=True)
    print(f"{sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) / 1e6:.1f} MB")


def random_parameters(manifest: dict[str, Any]) -> list[np.ndarray]:
    """Make weights: codes of any bits, norms of ones, scales and tables of small floats."""
    rng, found = np.random.default_rng(0), []
    for name, (kind, shape) in zip(manifest["parameters"], manifest["types"], strict=True):
        if kind.startswith("int"):
            found.append(rng.integers(-(1 << 31), 1 << 31, shape, np.int32).astype(kind))
        elif "norm" in name:
            found.append(np.ones(shape, kind))
        elif "scale" in name:
            found.append((0.002 * (1 + rng.random(shape, np.float32))).astype(kind))
        else:
            found.append((0.02 * rng.standard_normal(shape, np.float32)).astype(kind))
    return found


def ours(folder: Path) -> dict[str, Any]:
    """Time a model's kernels."""
    sys.path.insert(0, str(folder))
    import compressor_runtime.bundle as runtime
    from compressor_runtime import read_manifest
    from compressor_runtime.device.driver import Driver
    from compressor_runtime.device.gpu import Gpu
    from compressor_runtime.vm import load_tvm_runtime

    manifest = read_manifest(folder)
    arrays = random_parameters(manifest)
    runtime.read_parameters = lambda _root, _manifest: arrays  # type: ignore[attr-defined,assignment]
    driver = Driver(0)  # loads what TVM's library for GPUs is linked to
    load_tvm_runtime(folder, manifest)
    begin = time.perf_counter()
    bundle = runtime.Bundle(folder, manifest, 1, "model.so", Gpu(driver))
    bundle.device.driver.wait(bundle.device.stream)
    found: dict[str, Any] = {"load_s": time.perf_counter() - begin, "weight_bytes": manifest["weight_bytes"]}
    found["copy_bytes_per_s"] = bundle.read_bandwidth()
    found |= steps_of(bundle)
    found["bandwidth_fraction"] = found["weight_bytes"] / (found["decode_ms"] / 1e3) / found["copy_bytes_per_s"]
    return found


def steps_of(bundle: Any) -> dict[str, float]:
    """Time prompts, and tokens behind one, recorded and by plain calls."""
    found: dict[str, float] = {}
    vocabulary = bundle.model["vocab_size"]
    most = min(POSITIONS, bundle.limit)
    for count in PROMPTS:
        if count < most:
            session, ids = bundle.session(1, most), np.arange(count)[None] % vocabulary

            def run(session: Any = session, ids: Any = ids) -> None:
                session.position = 0
                session.step(ids)

            found[f"prompt_{count}_ms"] = median_ms(run, 5, 2)
    record = bundle._record
    for name, kept in (("plain_decode_ms", None), ("decode_ms", record)):
        bundle._record = kept
        session = bundle.session(1, most)
        logits = session.step(np.arange(PROMPT)[None] % vocabulary)
        chosen = []

        def token(session: Any = session, chosen: list[int] = chosen) -> None:
            nonlocal logits
            chosen.append(int(logits[0, -1].argmax()))
            logits = session.step([[chosen[-1]]])

        found[name] = median_ms(token, 20 if kept is None else TOKENS, 5)
        found[f"{name.removesuffix('_ms')}_first_tokens"] = chosen[:20]  # type: ignore[assignment]
        assert np.isfinite(logits).all()
    bundle._record = record
    return found


def median_ms(run: Callable[[], Any], count: int, untimed: int) -> float:
    """Return the median milliseconds of a call."""
    seconds = []
    for _ in range(count + untimed):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(seconds[untimed:])


def checked(bundle: Path) -> dict[str, Any]:
    """Compare a complete bundle with its stored vectors in a process of its own, and time it in another."""
    command = [sys.executable, "-B", str(bundle / "compressor_selfcheck.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    found: dict[str, Any] = {"exit_code": done.returncode, "message": done.stderr[-500:]}
    if done.stdout:
        found |= json.loads(done.stdout)
    child = [sys.executable, "-B", __file__, "--time", str(bundle)]
    timed = subprocess.run(child, capture_output=True, text=True)
    return found | (
        json.loads(timed.stdout.splitlines()[-1]) if not timed.returncode else {"failed": timed.stderr[-800:]}
    )


def timed_bundle(bundle: Path) -> dict[str, Any]:
    """Load a complete bundle and time it."""
    sys.path.insert(0, str(bundle))
    from compressor_runtime import load

    begin = time.perf_counter()
    loaded = load(bundle)
    return {"load_s": time.perf_counter() - begin, **steps_of(loaded)}


def measure(folder: Path, bundle: Path | None, has_peers: bool) -> dict[str, Any]:
    """Measure each model in processes of their own, so that memory and settings are theirs alone."""
    found: dict[str, Any] = {}
    if bundle is not None:
        found["bundle"] = checked(bundle)
        print("bundle", json.dumps(found["bundle"]), flush=True)
    names = [name for name in MODELS if (folder / name).is_dir()]
    for kind in ("--ours", *(["--peers"] if has_peers else [])):
        for name in names:
            command = [sys.executable, "-B", __file__, kind, str(folder / name)]
            done = subprocess.run(command, capture_output=True, text=True)
            lines = done.stdout.splitlines()
            result = json.loads(lines[-1]) if not done.returncode and lines else {"failed": done.stderr[-1500:]}
            found[f"{name} {kind[2:]}"] = result
            print(name, kind[2:], json.dumps(result), flush=True)
    return found


def main() -> None:
    """Export or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path)
    parser.add_argument("--models", default="852m")
    parser.add_argument("--scheme", default="W4A16_G128")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--wheel", type=Path, nargs="*", default=[])
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--no-peers", action="store_true")
    for name in ("--ours", "--peers", "--time"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure is not None:
        python = str((given.measure / "python").absolute())  # of the wheels, for the processes that measure as well
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (python, os.environ.get("PYTHONPATH"))))
    if given.export is not None:
        export(given.export, given.models.split(","), given.scheme, given.arch, given.wheel)
    elif given.ours is not None:
        print(json.dumps(ours(given.ours)))
    elif given.peers is not None:
        from llama_peers import peers

        print(json.dumps(peers(MODELS[given.peers.name], 60)))
    elif given.time is not None:
        print(json.dumps(timed_bundle(given.time)))
    else:
        found = measure(given.measure, given.bundle, not given.no_peers)
        if given.save is not None:
            given.save.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

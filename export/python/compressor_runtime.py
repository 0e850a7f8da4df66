"""Runs a Compressor bundle: loads it, checks it, steps the model, generates text.

This one file is shipped in every bundle and needs numpy, apache-tvm-ffi and (for text) tokenizers, neither PyTorch
nor the compiler.  From Python: ``load("bundle").generate("Once upon")``; from a shell:
``python compressor_runtime.py --prompt "Once upon"``.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from itertools import chain, pairwise
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np
import tvm_ffi
from numpy.typing import ArrayLike, NDArray

_PART_BYTES = 3 << 19
"""Of the largest value in a part of a batch, a thread: three quarters of a second-level cache."""
SCHEMA_VERSION = 2  # 1 had no vectors
MANIFEST, LIBRARY, WEIGHTS, TOKENIZER = "manifest.json", "model.so", "weights.safetensors", "tokenizer.json"
TVM_RUNTIME = "lib/libtvm_runtime.so"
PIECE_BYTES = 16 << 20  # a larger file's entry has `pieces`, the SHA-256 of each so many bytes: threads share the work
ALIGNMENT_BYTES = 64  # the kernels use aligned vector loads: an array at any other address ends the process
_LARGEST_HEADER_BYTES = 16 << 20  # of a manifest or a safetensors header: some 100,000 tensors
_MOST_LAYERS, _MOST_DIMENSIONS = 4096, 16  # no model has more
_SHARE_CORES = -3  # TVM's kSpecifyThreadShareAllCore: threads may run on all the given cores, none is pinned
_DENSE_CACHE = "FP32"  # the format of keys and values that are not packed
_DTYPES = {  # safetensors name -> numpy's
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "BF16": "uint16",  # numpy has no bfloat16; the kernels take the bits
    "BOOL": "bool",
}
# Control characters as JSON has them, but the new line and the tab.
_CONTROLS = re.compile(r"(?<!\\)(?:\\\\)*\\(?:u00[01]|[bfr])|[\x7f-\x9f]")
_libc = ctypes.CDLL(None)
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64
_configured = threading.local()  # .threads: how many this thread's pool of TVM workers was last set to


class BundleError(Exception):
    """The bundle cannot be used here; the message says what is wrong and what to do."""

    exit_code: ClassVar[int] = 1


class BrowserBundleError(BundleError):
    """The bundle is one for browsers."""


class DamagedBundleError(BundleError):
    """A file of the bundle is not what the manifest says it is."""

    exit_code: ClassVar[int] = 4


class RequestError(BundleError, ValueError):
    """An argument that this model cannot serve."""

    exit_code: ClassVar[int] = 2


def load(path: str | os.PathLike[str], *, threads: int | None = None, isa: str | None = None) -> Bundle:
    """Load a bundle, after every file has been compared with its size and SHA-256 in the manifest.

    Args:
        path: the bundle's folder.
        threads: worker threads of the kernels, and of this comparison; None takes the physical cores that this process
            may use.
        isa: instruction set of the kernels; None takes the best of those in the bundle that this CPU has.
    Raises:
        BundleError: no bundle, a newer schema, or a CPU without the instructions the kernels need.
        DamagedBundleError: a file is missing, or differs from the manifest.
    """
    if threads is not None and threads < 1:
        raise RequestError(f"threads={threads}: at least one is needed")
    root = Path(path)
    manifest = read_manifest(root)
    library = choose_library(root, manifest, isa)
    threads = threads or available_cores()
    check_files(root, manifest, threads)
    _load_tvm_runtime(root, manifest)
    return Bundle(root, manifest, threads, library)


def read_manifest(root: Path) -> dict[str, Any]:
    """The manifest of the bundle in ``root``, without reading anything else."""
    file = root / MANIFEST
    try:
        if not file.is_file():
            what = "no such folder" if not root.exists() else f"not a bundle: it has no {MANIFEST}"
            raise BundleError(f"{root}: {what}; give the folder that `compress run` wrote")
        if file.stat().st_size > _LARGEST_HEADER_BYTES:
            raise DamagedBundleError(f"{file}: {file.stat().st_size} bytes are too many for a manifest")
        text = _member(root, MANIFEST).read_bytes()
    except OSError as error:
        raise BundleError(f"{file}: cannot be read: {error}") from error
    try:
        manifest = _read_json(text)
    except (ValueError, RecursionError) as error:
        raise DamagedBundleError(f"{file}: not readable as JSON ({error}); copy the bundle again") from error
    if isinstance(manifest, dict) and manifest.get("format") == "compressor web bundle":
        raise BrowserBundleError(f"{root}: a bundle for browsers; `compress serve {root}` shows it in one")
    if not isinstance(manifest, dict) or manifest.get("format") != "compressor bundle":
        raise BundleError(f"{root}: not a Compressor bundle; give the folder that `compress run` wrote")
    if _field(manifest, "schema_version", int) > SCHEMA_VERSION:
        raise BundleError(
            f"{root}: schema version {manifest['schema_version']}, this run-time reads up to {SCHEMA_VERSION}; "
            "use the compressor_runtime.py inside the bundle, or a newer Compressor"
        )
    return manifest


def check_files(root: Path, manifest: dict[str, Any], threads: int | None = None) -> None:
    """Check that every file of the manifest is there, inside ``root``, and has the size and SHA-256 stated."""
    files = _field(manifest, "files", dict)
    for name in (LIBRARY, *(_field(entry, "file", str) for entry in _libraries(manifest)), WEIGHTS, TVM_RUNTIME):
        if name not in files:
            raise DamagedBundleError(f"{root / MANIFEST}: `files` does not list {name}")
    spans: list[tuple[Path, int, int, str]] = []  # file, first byte, end, SHA-256
    for name, entry in files.items():
        file, size_bytes, digest = _member(root, name), _field(entry, "bytes", int), _field(entry, "sha256", str)
        try:
            found_bytes = file.stat().st_size
        except OSError as error:
            raise BundleError(f"{file}: cannot be read: {error}") from error
        if found_bytes != size_bytes:
            raise DamagedBundleError(
                f"{file}: {found_bytes} bytes, the manifest says {size_bytes}; copy the bundle again"
            )
        if "pieces" not in entry:  # a small file, or an older bundle's
            spans.append((file, 0, size_bytes, digest))
            continue
        starts, pieces = range(0, size_bytes, PIECE_BYTES), _items(entry, "pieces", str)
        if len(starts) != len(pieces):
            raise DamagedBundleError(
                f"{root / MANIFEST}: `pieces` of {name}: {len(pieces)} of them, {size_bytes} bytes have {len(starts)} "
                f"of {PIECE_BYTES}; copy the bundle again"
            )
        ends = (min(start + PIECE_BYTES, size_bytes) for start in starts)
        spans += [(file, *span) for span in zip(starts, ends, pieces, strict=True)]
    with ThreadPoolExecutor(threads or available_cores(), "compressor-sha256") as pool:
        list(pool.map(lambda span: _check_span(*span), spans))


def _check_span(file: Path, start: int, end: int, digest: str) -> None:
    try:
        found = sha256(file, start, end)
    except OSError as error:
        raise BundleError(f"{file}: cannot be read: {error}") from error
    if found != digest:
        raise DamagedBundleError(
            f"{file}: its SHA-256 is not the manifest's (bytes {start} to {end}); copy the bundle again"
        )


def sha256(file: Path, start: int = 0, end: int = sys.maxsize) -> str:
    """Hexadecimal SHA-256 of a file's bytes from ``start`` to before ``end``, through a buffer.

    Mapped, they would count as this process's memory, and a disk that cannot read one would end it.
    """
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 18))
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        while count := stream.readinto(buffer[: max(0, end - start)]):
            digest.update(buffer[:count])
            start += count
    return digest.hexdigest()


def choose_library(root: Path, manifest: dict[str, Any], isa: str | None = None) -> str:
    """The file of kernels to load: the first that this CPU runs, of those for ``isa`` if it is given."""
    check_cpu(_items(manifest, "cpu_features", str), root)  # what all of them need
    entries = [entry for entry in _libraries(manifest) if isa in (None, _field(entry, "isa", str))]
    if not entries:
        names = ", ".join(str(entry["isa"]) for entry in _libraries(manifest))
        raise RequestError(f"{root}: isa={isa!r}: the bundle has kernels for {names or 'no instruction set'}")
    runs = (entry for entry in entries if not missing_features(_items(entry, "cpu_features", str)))
    chosen = next(runs, None)
    if chosen is None:
        chosen = entries[-1]
        check_cpu(_items(chosen, "cpu_features", str), root)  # raises: it says what the least demanding one lacks
    return str(_field(chosen, "file", str))


def _libraries(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries of the kernels, for the most demanding CPU first; older bundles have one and do not list it."""
    if "libraries" not in manifest:
        return [{"isa": "", "file": LIBRARY, "cpu_features": _items(manifest, "cpu_features", str)}]
    entries = _items(manifest, "libraries", dict)
    if not entries:
        raise DamagedBundleError(f"{MANIFEST}: `libraries` is empty; copy the bundle again")
    return entries


def check_cpu(required: Sequence[str], root: Path) -> None:
    """Raise a BundleError when the CPU lacks a feature; named as by Linux or LLVM ("avx512_vnni", "avx512vnni")."""
    if missing := missing_features(required):
        raise BundleError(f"{root}: this CPU lacks {', '.join(missing)}; compress again for this CPU")


def missing_features(required: Sequence[str]) -> list[str]:
    """Those that this CPU lacks, or that the system does not let processes use."""
    present = _cpu_flags()
    if present is None:
        return []  # not Linux: the loader will say what it cannot run
    missing = [name for name in required if _letters(name) not in present]
    return missing if missing or "amx_tile" not in required or allow_tiles() else ["amx_tile"]


@cache
def _cpu_flags() -> frozenset[str] | None:
    """The CPU's features, as Linux tells them; None where it does not."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(map(_letters, found[1].split() if found else ()))


def _letters(feature: str) -> str:
    return re.sub(r"\W|_", "", feature)


def allow_tiles() -> bool:
    """Ask Linux to let this process use AMX's tile registers, which it must before the first one; False if refused."""
    return bool(_libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def available_cores() -> int:
    """Physical cores that this process may use, by its affinity and its control group's quota."""
    cpus = os.sched_getaffinity(0)
    siblings = (Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus)
    cores = {file.read_text() if file.is_file() else file.parts[-3] for file in siblings}
    quota = Path("/sys/fs/cgroup/cpu.max")
    share = quota.read_text().split() if quota.is_file() else ["max"]
    return len(cores) if share[0] == "max" else max(1, min(len(cores), int(share[0]) // int(share[1])))


def read_safetensors(file: Path) -> dict[str, NDArray[Any]]:
    """Tensors of a safetensors file by name, memory-mapped (a private mapping); bfloat16 comes as its bits, uint16.

    Raises:
        DamagedBundleError: the file breaks the format: header, offsets, holes, sizes, unknown dtypes.
    """
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if header_bytes > min(_LARGEST_HEADER_BYTES, file.stat().st_size - 8):
                raise ValueError(f"a header of {header_bytes} bytes")
            header = _read_json(stream.read(header_bytes))
        header.pop("__metadata__", None)
        data = np.memmap(file, np.uint8, mode="c")[8 + header_bytes :]
        tensors, cursor = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            (start, end), shape = entry["data_offsets"], entry["shape"]
            dtype = np.dtype(_DTYPES[entry["dtype"]])
            whole = len(shape) <= _MOST_DIMENSIONS and all(type(n) is int and 0 <= n < 1 << 63 for n in shape)
            if start != cursor or not whole or end != start + math.prod(shape) * dtype.itemsize or end > data.size:
                raise ValueError(f"{name!r} has {entry['dtype']} {shape!r:.200} and offsets {start!r}, {end!r:.200}")
            tensors[name] = np.asarray(data[start:end]).view(dtype).reshape(shape)
            cursor = end
        if cursor != data.size:
            raise ValueError(f"{data.size} bytes of data, {cursor} described")
    except OSError as error:
        raise BundleError(f"{file}: cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedBundleError(f"{file}: not a valid safetensors file ({error}); copy the bundle again") from error
    return tensors


class Bundle:
    """A loaded bundle; made by :func:`load`.  Threads may share it: calls into its kernels take turns."""

    def __init__(self, root: Path, manifest: dict[str, Any], threads: int, library: str = LIBRARY) -> None:
        self.path, self.manifest, self.threads, self.library = root, manifest, threads, library
        self.kind: str = _field(manifest, "kind", str)  # "decoder", "encoder" or "module"
        self.model = _checked_model(manifest)
        self.limit: int = self.model["max_positions"] or sys.maxsize  # 0: the model states none
        parameters = _checked_parameters(root, manifest)
        self._parameters = tvm_ffi.convert([_to_tvm(array) for array in parameters])
        try:
            self._machine = tvm_ffi.load_module(str(_member(root, library).resolve()))["vm_load_executable"]()
            self._machine["vm_initialization"](1, 0, 2)  # one device: the CPU, number 0, with the pooled allocator
            self._main = self._machine["main"]
        except (RuntimeError, AttributeError) as error:
            raise BundleError(f"{root / library}: cannot be loaded: {error}") from error
        self._turn = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """The ``tokenizers.Tokenizer`` of the model."""
        from tokenizers import Tokenizer

        if TOKENIZER not in self.manifest["files"]:  # one that is there nevertheless was not checked
            raise BundleError(f"{self.path}: the manifest lists no {TOKENIZER}; give token ids in place of text")
        file = _member(self.path, TOKENIZER)
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises nothing more precise
            raise DamagedBundleError(f"{file}: not a tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def run(self, *inputs: ArrayLike) -> Any:
        """Run a bundle made of a plain module: arrays in, as at its capture; an array out, or a list of them.

        A batch whose entries do not depend on one another is computed in parts that fit the second-level caches.
        """
        arrays = [np.asarray(x) for x in inputs]
        count = self._parts(arrays)
        if count <= 1:
            return self.call(*map(_to_tvm, arrays))
        bounds = [len(arrays[0]) * i // count for i in range(count + 1)]
        parts = [self.call(*(_to_tvm(x[i:j]) for x in arrays)) for i, j in pairwise(bounds)]
        if isinstance(parts[0], list):
            return [np.concatenate(of_one) for of_one in zip(*parts, strict=True)]
        return np.concatenate(parts)

    def _parts(self, arrays: list[NDArray[Any]]) -> int:
        """Parts of a batch; 1 also where the inputs are none that fit together, which the kernels complain about."""
        entry_bytes: int = self.model.get("entry_bytes", 0)
        if len({x.shape[:1] for x in arrays}) != 1 or not arrays[0].ndim or not entry_bytes:
            return 1
        each = entry_bytes * (int(arrays[0].shape[1]) if self.kind == "encoder" else 1)
        return -(-len(arrays[0]) // max(1, self.threads * _PART_BYTES // max(1, each)))

    def encode(self, ids: ArrayLike, mask: ArrayLike | None = None) -> NDArray[np.float32]:
        """Last hidden state [B, S, H] of an encoder for ids [B, S]; mask [B, S] is 1 for tokens, 0 for padding."""
        if self.kind != "encoder":
            raise RequestError(f"{self.path}: holds a {self.kind}, only an encoder encodes")
        tokens = self._checked_ids(ids)
        given = np.ones(tokens.shape) if mask is None else np.asarray(mask)
        if given.shape != tokens.shape or tokens.shape[1] > self.limit:
            raise RequestError(
                f"ids {tokens.shape}, mask {given.shape}: they must agree, with at most {self.limit} tokens in a row"
            )
        hidden: NDArray[np.float32] = self.run(tokens, given.astype(np.float32))
        return hidden

    def session(self, batch: int = 1, capacity: int = 256) -> Session:
        """A new sequence of tokens per batch entry, with room for ``capacity`` tokens before it must grow."""
        if self.kind != "decoder":
            raise RequestError(f"{self.path}: holds a {self.kind}; only a decoder generates")
        return Session(self, batch, capacity)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: int | str | Iterable[int | str] = (),
    ) -> Iterator[str]:
        """Continue a prompt; yields pieces of text as soon as they are certain.

        Args:
            prompt: text, or token ids; empty starts from the model's beginning-of-sequence token.
            max_tokens: at most so many new tokens; fewer when the model's last position is reached.
            temperature: 0 takes the likeliest token, above 0 samples.
            top_k: sample among the k likeliest only; 0 for no limit.
            top_p: sample among the fewest tokens whose probabilities reach top_p (nucleus sampling, arXiv:1904.09751).
            seed: makes sampling repeatable.
            stop: token ids and strings that end the text; they are not part of it.
        Raises:
            RequestError: an argument out of range, or a prompt longer than the model's positions.
        """
        stops = [stop] if isinstance(stop, int | str) else list(stop)
        ends = [s for s in stops if isinstance(s, int)]
        ids = self._prompt_ids(prompt)
        tokens = self.generate_ids(
            ids, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=ends
        )
        return _pieces(TextStream(self.tokenizer, ids), tokens, [s for s in stops if isinstance(s, str) and s])

    def generate_ids(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Iterable[int] = (),
    ) -> Iterator[int]:
        """As :meth:`generate`, in token ids; ends before a stop id or one of the model's end-of-sequence ids."""
        if max_tokens < 0 or not 0 <= temperature < np.inf or top_k < 0 or not 0 < top_p <= 1:
            raise RequestError(
                f"max_tokens={max_tokens}, temperature={temperature}, top_k={top_k}, top_p={top_p}: max_tokens and "
                "top_k must be at least 0, temperature finite and at least 0, top_p above 0 and at most 1"
            )
        ids = self._checked_ids([self._prompt_ids(prompt)])
        session = self.session(capacity=ids.shape[1] + min(max_tokens, 256))
        session.make_room(ids.shape[1])
        ends = {*stop, *self.model["eos_ids"]}
        generator = np.random.default_rng(seed)

        def tokens() -> Iterator[int]:
            step = ids
            for _ in range(max_tokens):
                token = choose(session.step(step)[0, -1], generator, temperature, top_k, top_p)
                if token in ends:
                    return
                yield token
                if session.position == self.limit:
                    return  # no position is left for this token, so nothing can follow it
                step = np.array([[token]])

        return tokens()

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else [int(i) for i in prompt]
        if not ids and self.model.get("bos_id") is None:
            raise RequestError("the prompt is empty and the model has no beginning-of-sequence token; give a prompt")
        return ids or [self.model["bos_id"]]

    def _checked_ids(self, ids: ArrayLike) -> NDArray[np.int64]:
        tokens = np.asarray(ids)
        if tokens.ndim != 2 or tokens.size == 0 or tokens.dtype.kind not in "iu":
            raise RequestError(f"ids must be whole numbers [batch, tokens], not {tokens.dtype} {list(tokens.shape)}")
        if tokens.min() < 0 or tokens.max() >= self.model["vocab_size"]:  # the kernels would read outside the table
            raise RequestError(
                f"token ids from {tokens.min()} to {tokens.max()}: the model knows 0 to "
                f"{self.model['vocab_size'] - 1}; does the tokenizer belong to this model?"
            )
        return tokens.astype(np.int64, copy=False)

    def read_bandwidth(self, size_bytes: int = 256 << 20, repeats: int = 10) -> float:
        """Bytes per second at which the bundle's threads read memory, in blocks of 16 KiB; the best of the repeats."""
        words = _aligned((64, size_bytes >> 14, 4, 16), np.dtype(np.int32))
        words.fill(1)  # untouched pages would all be one page of zeros
        tensor, seconds = _to_tvm(words), []
        for _ in range(repeats):
            begin = time.perf_counter()
            self._call(self._machine["read_bandwidth"], tensor)
            seconds.append(time.perf_counter() - begin)
        return words.nbytes / min(seconds)

    def call(self, *tensors: Any) -> Any:
        """Call the library with 64-byte aligned tensors and the parameters; the result as numpy, not copied."""
        result = self._call(self._main, *tensors, self._parameters)
        return np.from_dlpack(result) if isinstance(result, tvm_ffi.Tensor) else [np.from_dlpack(r) for r in result]

    def _call(self, function: Any, *arguments: Any) -> Any:
        with self._turn:
            configured = self._executor is not None or getattr(_configured, "threads", None) == self.threads
            if not configured and not configure_threads(self.threads):
                # This thread's pool was made smaller, by somebody's earlier kernels, and cannot grow: use another.
                self._executor = ThreadPoolExecutor(1, "compressor", configure_threads, (self.threads,))
            executor = self._executor
            return function(*arguments) if executor is None else executor.submit(function, *arguments).result()


class Session:
    """Keys and values of the tokens seen so far.  ``position`` may be set back, to go on from an earlier token."""

    def __init__(self, bundle: Bundle, batch: int, capacity: int) -> None:
        if batch < 1:
            raise RequestError(f"batch={batch}: at least one is needed")
        self.bundle, self.batch, self.position, self.capacity = bundle, batch, 0, 0
        self._caches: list[Any] = []  # keys of every layer, then values: f32 [B, Hkv, T, D], or u8 of a row's bytes
        self._resize(max(1, min(capacity, bundle.limit)))

    def step(self, ids: ArrayLike, keep: ArrayLike | None = None) -> NDArray[np.float32]:
        """Append tokens.

        Args:
            ids: whole numbers [B, S].
            keep: indices [R] along S whose logits are wanted; None for the last.
        Returns:
            logits float32 [B, R, V].
        Raises:
            RequestError: ids out of range, another batch, or more tokens than the model has positions.
        """
        tokens = self.bundle._checked_ids(ids)
        count = tokens.shape[1]
        rows = np.array([count - 1]) if keep is None else np.asarray(keep)
        inside = rows.ndim == 1 and rows.size and rows.dtype.kind in "iu" and rows.min() >= 0 and rows.max() < count
        if tokens.shape[0] != self.batch or not inside:
            raise RequestError(
                f"ids {list(tokens.shape)}, keep {rows.tolist()}: the session's batch is {self.batch}, and keep must "
                "list indices of these tokens"
            )
        self.make_room(count)
        inputs = (tokens, np.arange(self.position, self.position + count), rows.astype(np.int64))
        logits: NDArray[np.float32] = self.bundle.call(*(_to_tvm(x) for x in inputs), *self._caches)
        self.position += count
        return logits

    def make_room(self, count: int) -> None:
        """Make sure that ``count`` more tokens fit, or say why they cannot."""
        needed, limit = self.position + count, self.bundle.limit
        if needed > limit:
            raise RequestError(
                f"{count} tokens after {self.position} others: the model ends at {limit} positions; "
                "give fewer tokens, or start a new session"
            )
        if needed > self.capacity:
            self._resize(min(limit, max(needed, 2 * self.capacity)))

    def _resize(self, capacity: int) -> None:
        model, caches = self.bundle.model, []
        size_bytes = model["cache_bytes_per_token"] * self.batch * capacity
        if size_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise RequestError(
                f"{self.batch} sequences of {capacity} tokens: their keys and values take {size_bytes} bytes, more "
                "than this machine's memory; give fewer or shorter ones"
            )
        dtype = np.dtype(np.float32 if model["cache_format"] == _DENSE_CACHE else np.uint8)
        row_bytes = model["cache_bytes_per_token"] // (2 * model["layers"] * model["kv_heads"])
        for index in range(2 * model["layers"]):
            cache = _aligned((self.batch, model["kv_heads"], capacity, row_bytes // dtype.itemsize), dtype)
            if self._caches:
                cache[:, :, : self.position] = np.from_dlpack(self._caches[index])[:, :, : self.position]
                self._caches[index] = None  # at most one layer is held twice
            caches.append(_to_tvm(cache))
        self._caches, self.capacity = caches, capacity


def choose(
    logits: NDArray[np.float32], generator: np.random.Generator, temperature: float, top_k: int, top_p: float
) -> int:
    """One token id from logits [V]; see :meth:`Bundle.generate` for the arguments."""
    if not np.isfinite(logits.max()):
        raise BundleError("the model computed logits that are no numbers (NaN or infinity); its weights may be damaged")
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / temperature
    tokens = np.arange(len(scaled)) if not 0 < top_k < len(scaled) else np.argpartition(-scaled, top_k - 1)[:top_k]
    if top_p < 1:
        tokens = tokens[np.argsort(-scaled[tokens], kind="stable")]
    weights = np.exp(scaled[tokens] - scaled[tokens].max())
    sums = np.cumsum(weights)
    if top_p < 1:
        sums = sums[: int(np.searchsorted(sums, top_p * sums[-1])) + 1]
    return int(tokens[min(np.searchsorted(sums, generator.random() * sums[-1], side="right"), len(sums) - 1)])


class TextStream:
    """Token ids to text, one at a time; keeps back what a later token could still change."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)  # some tokenizers write a word's space only after another word
        self._start, self._read = 0, len(self._ids)

    def push(self, token: int) -> str:
        """The text that ``token`` completes, possibly none."""
        self._ids.append(token)
        return self._new(whole=False)

    def rest(self) -> str:
        """What was kept back: at the end of the tokens, also an incomplete character."""
        return self._new(whole=True)

    def _new(self, whole: bool) -> str:
        before: str = self._tokenizer.decode(self._ids[self._start : self._read])
        known = before.rstrip("\ufffd")
        text: str = self._tokenizer.decode(self._ids[self._start :])
        if len(text) <= len(known) or (text.endswith("\ufffd") and not whole):
            return ""
        if known == before:  # otherwise the prompt ends within a character: do not begin there
            self._start = self._read
        self._read = len(self._ids)
        return text[len(known) :]


def _pieces(stream: TextStream, tokens: Iterator[int], stops: list[str]) -> Iterator[str]:
    """Text of ``tokens`` up to the first of ``stops``; keeps back any end that could be a stop's beginning."""
    text = ""
    for token in chain(tokens, (None,)):
        text += stream.rest() if token is None else stream.push(token)
        cuts = [cut for stop in stops if (cut := text.find(stop)) >= 0]
        lengths = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        sure = min(cuts) if cuts else len(text) - (0 if token is None else max(lengths, default=0))
        if sure:
            yield text[:sure]
        if cuts:
            return
        text = text[sure:]


def _field(entry: Any, key: str, kind: type) -> Any:
    """``entry[key]``, which must be a ``kind``."""
    value = entry.get(key) if isinstance(entry, dict) else None
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 1 << 63):
        raise DamagedBundleError(
            f"{MANIFEST}: `{key}` is missing or is no valid {kind.__name__}; copy the bundle again"
        )
    return value


def _items(entry: Any, key: str, kind: type) -> list[Any]:
    """``entry[key]``, which must be a list of ``kind``."""
    items: list[Any] = _field(entry, key, list)
    if any(type(item) is not kind for item in items):
        raise DamagedBundleError(f"{MANIFEST}: not all of `{key}` is {kind.__name__}; copy the bundle again")
    return items


def _checked_model(manifest: dict[str, Any]) -> dict[str, Any]:
    """What the manifest says about the model, all of it that this module computes with."""
    model: dict[str, Any] = _field(manifest, "model", dict)
    sizes = {"decoder": ("vocab_size", "layers", "kv_heads", "head_dim"), "encoder": ("vocab_size",), "module": ()}
    _field(model, "max_positions", int)
    _field({"entry_bytes": 0, **model}, "entry_bytes", int)
    wrong = [] if manifest["kind"] in sizes else ["kind"]
    wrong += [name for name in sizes.get(manifest["kind"], ()) if _field(model, name, int) == 0]
    if manifest["kind"] == "decoder":
        wrong += [] if model["layers"] <= _MOST_LAYERS else ["layers"]
        wrong += [] if type(model.get("bos_id")) in (int, type(None)) else ["bos_id"]
        _items(model, "eos_ids", int)
    if manifest["kind"] == "decoder" and not wrong:
        rows = 2 * model["layers"] * model["kv_heads"]
        dense_bytes = 4 * rows * model["head_dim"]
        # Bundles from before caches had formats do not mention them.
        cache_format, cache_bytes = (
            _field(model, key, type(default)) if key in model else model.setdefault(key, default)
            for key, default in (("cache_format", _DENSE_CACHE), ("cache_bytes_per_token", dense_bytes))
        )
        fits = cache_bytes == dense_bytes if cache_format == _DENSE_CACHE else cache_bytes > 0 == cache_bytes % rows
        wrong += [] if fits else ["cache_bytes_per_token"]
    if wrong:
        raise DamagedBundleError(f"{MANIFEST}: `{wrong[0]}` has a value that cannot be; copy the bundle again")
    return model


def _checked_parameters(root: Path, manifest: dict[str, Any]) -> list[NDArray[Any]]:
    """The parameters in the entry's order, each with the type and shape that the kernels were made for.

    The entry checks the same in every call; here it is found at loading.  It cannot check that ids lie in their table.
    """
    file = _member(root, WEIGHTS)
    stored = read_safetensors(file)
    names = _items(manifest, "parameters", str)
    stated = manifest["schema_version"] > 1 or "parameter_types" in manifest  # schema 1 did without
    types = _items(manifest, "parameter_types", dict) if stated else [None] * len(names)
    if len(names) != len(types):
        raise DamagedBundleError(f"{MANIFEST}: {len(names)} `parameters`, {len(types)} `parameter_types`")
    for name, expected in zip(names, types, strict=True):
        if name not in stored:
            raise DamagedBundleError(f"{file}: lacks {name!r}; copy the bundle again")
        if expected is None:
            continue
        dtype, shape = _field(expected, "dtype", str), tuple(_items(expected, "shape", int))
        if dtype not in _DTYPES or _DTYPES[dtype] != stored[name].dtype or shape != stored[name].shape:
            found = f"{stored[name].dtype} {list(stored[name].shape)}"
            raise DamagedBundleError(f"{file}: {name!r} is {found}, the kernels take {dtype} {list(shape)}")
    tables = [stored[name].shape[0] for name in names if stored[name].ndim == 2]
    if manifest["kind"] != "module" and manifest["model"]["vocab_size"] > max(tables, default=0):
        raise DamagedBundleError(f"{MANIFEST}: `vocab_size` exceeds the rows of every table in {WEIGHTS}")
    return [stored[name] for name in names]


def _read_json(data: bytes) -> Any:
    """JSON in UTF-8 without a key twice, NaN, infinity, half a character, or what a terminal would obey.

    Raises:
        ValueError: it is not; RecursionError: it is nested too deeply.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key is there twice")
        return found

    content = json.loads(data.decode(), object_pairs_hook=once)
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    text.encode()  # this line and the one above raise for what neither JSON nor UTF-8 can hold
    if _CONTROLS.search(text):
        raise ValueError("a text in it holds control characters")
    return content


def _member(root: Path, name: str) -> Path:
    """The file ``name`` of the bundle: it must lie inside and be no link, and ``name`` its only spelling."""
    file, named = root / name, PurePosixPath(name)
    plain = name == str(named) and name.isprintable() and "\\" not in name and not named.is_absolute()
    try:
        if not plain or file.resolve() != root.resolve() / name:
            raise DamagedBundleError(
                f"{root / MANIFEST}: {name!r} leads outside the bundle, or is no plain name; do not trust this bundle"
            )
        if file.is_file():
            return file
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a name that no file can have
        raise DamagedBundleError(f"{root / MANIFEST}: {name!r:.200} cannot be a file: {error}") from error
    raise DamagedBundleError(f"{file}: missing; copy the bundle again")


def _load_tvm_runtime(root: Path, manifest: dict[str, Any]) -> None:
    """Load TVM's run-time library, unless it is there already: a second copy of it would end the process."""
    if tvm_ffi.get_global_func("runtime.config_threadpool", allow_missing=True) is not None:
        return
    library = _member(root, TVM_RUNTIME).resolve()
    try:
        tvm = importlib.util.find_spec("tvm")
    except (ImportError, ValueError):
        tvm = None
    installed = Path(tvm.origin).parent / TVM_RUNTIME if tvm is not None and tvm.origin else None
    # The same library at the place where `import tvm` would look for it: so that this import still works afterwards.
    if installed is not None and installed.is_file() and sha256(installed) == manifest["files"][TVM_RUNTIME]["sha256"]:
        library = installed
    try:
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError as error:
        versions = manifest.get("versions")
        built = versions.get("apache-tvm-ffi") if isinstance(versions, dict) else None
        advice = f"install apache-tvm-ffi {built or 'as its README.md says'}"
        raise BundleError(f"{library}: cannot be loaded ({error}); {advice}") from error


def configure_threads(threads: int) -> bool:
    """Give this thread's pool of TVM workers ``threads`` of them, on the cores we may use; False if it is too small."""
    cpus = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    cpus *= -(-threads // len(cpus))  # TVM makes a pool as large as this list when it makes one
    tvm_ffi.get_global_func("runtime.config_threadpool")(_SHARE_CORES, threads, cpus)
    _configured.threads = threads
    return bool(tvm_ffi.get_global_func("runtime.NumThreads")() == threads)


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Zeros that begin at a multiple of 64 bytes."""
    size_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + size_bytes].view(dtype).reshape(shape)


def _to_tvm(array: NDArray[Any]) -> Any:
    """The array as the kernels take it: where it lies when that is aligned and contiguous, otherwise a copy."""
    if array.ctypes.data % ALIGNMENT_BYTES or not array.flags.c_contiguous or not array.flags.writeable:
        copy = _aligned(array.shape, array.dtype)
        copy[...] = array
        array = copy
    return tvm_ffi.from_dlpack(array)


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate text from a bundle; the process's exit code."""
    parser = argparse.ArgumentParser(description="Generate text from a Compressor bundle.")
    here = Path(__file__).resolve().parent
    parser.add_argument("bundle", nargs="?", type=Path, default=here, help="the bundle's folder (default: %(default)s)")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--max-tokens", type=int, default=64, help="at most so many new tokens (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=0, help="sample among the k likeliest; 0 for no limit")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest with this probability")
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")
    parser.add_argument("--threads", type=int, help="worker threads (default: the physical cores available)")
    options = vars(parser.parse_args(arguments))
    try:
        bundle = load(options.pop("bundle"), threads=options.pop("threads"))
        for piece in bundle.generate(options.pop("prompt"), **options):
            print(piece, end="", flush=True)
        print()
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

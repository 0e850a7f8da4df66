"""Load a bundle, and call its model: encode, run, generate."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compressor_runtime.arguments import array, check_inputs, prompt_ids, stops_of, token_ids, whole
from compressor_runtime.check import check_files
from compressor_runtime.cpu import choose_library, thread_count
from compressor_runtime.depth.tokens import counted_tokens, counts_of
from compressor_runtime.device.choice import choose_device
from compressor_runtime.device.gpu import Gpu
from compressor_runtime.device.host import Host
from compressor_runtime.device.recorded import Record, Recorder
from compressor_runtime.errors import BundleError, DamagedBundleError, RequestError
from compressor_runtime.generation import Depth, Generation, Sampler, TextStream, checked_sampler
from compressor_runtime.manifest import (
    GENERATING,
    TOKENIZER,
    checked_model,
    entry_indices,
    field,
    member,
    read_manifest,
    read_measurements,
)
from compressor_runtime.session import Session
from compressor_runtime.source.encoding import encode_source, source_of_prompt, tokens_left, without, wrong_source
from compressor_runtime.source.frames import frame_tokens, labels_frames
from compressor_runtime.source.pairs import INPUTS, embed_pictures, embed_texts, run_pair, similarity
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.kinds.registry import served
from compressor_runtime.tensors import read_parameters
from compressor_runtime.vm import Vm, load_tvm_runtime, tvm_ffi

Prompt: TypeAlias = str | os.PathLike[str] | ArrayLike
_PART_BYTES = 3 << 19
"""Bytes a thread of the largest value in a part of a batch: three quarters of a second-level cache."""


def load(
    path: str | os.PathLike[str], *, threads: int | None = None, isa: str | None = None, device: str | None = None
) -> Bundle:
    """Load a bundle, after every file has been compared with its size and SHA-256 in the manifest.

    Args:
        path: the bundle's folder.
        threads: worker threads of the kernels, and of this comparison; None takes the physical cores that this process
            may use.
        isa: instruction set of the kernels; None takes the best of those in the bundle that this CPU has.
        device: "cpu", "cuda" or "cuda:1"; None takes what the kernels are for.
    Raises:
        BundleError: no bundle, a newer schema, or a CPU, a GPU or a driver without what the kernels need.
        DamagedBundleError: a file is missing, or differs from the manifest.
        RequestError: more threads than processors, or kernels that the bundle does not have.
    """
    threads = thread_count(threads)
    try:
        root = Path(path)
    except TypeError as error:
        raise RequestError(f"path={path!r:.100}: give the folder of a bundle") from error
    manifest = read_manifest(root)
    library, driver = choose_library(root, manifest, isa), choose_device(root, manifest, device)
    check_files(root, manifest, threads)
    load_tvm_runtime(root, manifest)
    return Bundle(root, manifest, threads, library, Host() if driver is None else Gpu(driver))


class Bundle:
    """A loaded bundle; made by :func:`load`.  Threads may share it: calls into its kernels take turns."""

    def __init__(self, root: Path, manifest: dict[str, Any], threads: int, library: str, device: Host | Gpu) -> None:
        self.path, self.manifest, self.threads, self.library, self.device = root, manifest, threads, library, device
        self.kind: str = field(manifest, "kind", str)  # "decoder", "encoder", "seq2seq" or "module"
        self.model = checked_model(manifest)
        self.limit: int = self.model["max_positions"] or sys.maxsize  # 0: the model states none
        if (self.kind == "seq2seq" or "encoder_source" in self.model) and wrong_source(self.model):
            raise DamagedBundleError(f"{root}: the manifest's `encoder_source` cannot be; copy the bundle again")
        arrays = [device.put(array) for array in read_parameters(root, manifest)]
        used = entry_indices(manifest)
        self.entries = frozenset(used)  # functions of the kernels
        self._parameters = {name: tvm_ffi.convert([arrays[i] for i in indices]) for name, indices in used.items()}
        self.leaves_early = {"exits", "parts"} <= self.model.keys()  # set it to False to run all blocks
        self.vm = Vm(member(root, library), threads, device)
        self._record: Record | None = None
        if isinstance(device, Gpu) and self.kind in GENERATING:
            self._record = Recorder(self.vm, device, self._parameters["main"]).record

    @property
    def speculations(self) -> tuple[str, ...]:
        """The kinds of drafts that its kernels serve; none where they verify no drafted tokens."""
        return served(self.entries, self.model)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's ``tokenizers.Tokenizer``."""
        from tokenizers import Tokenizer

        if TOKENIZER not in self.manifest["files"]:  # one that is there nevertheless was not checked
            raise BundleError(f"{self.path}: the manifest lists no {TOKENIZER}; give token ids in place of text")
        file = member(self.path, TOKENIZER)
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises nothing more precise
            raise DamagedBundleError(f"{file}: not a tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def measurements(self) -> dict[str, Any]:
        """What the run that made the bundle measured, by the names of ``compress run --json``; empty if it is not here.

        Raises:
            DamagedBundleError: the file is not readable as JSON.
        """
        return read_measurements(self.path)

    def run(self, *inputs: ArrayLike) -> Any:
        """Run a bundle of a plain module on arrays as at its capture.

        Returns:
            An array, a list of them, or a dictionary with dotted names if the module returns its outputs by name.

        A batch whose entries do not depend on one another is computed in parts that fit the second-level caches.

        Raises:
            RequestError: not such a bundle, or arrays of other types or shapes than the model takes.
        """
        if self.kind != "module":
            raise RequestError(f"{self.path}: holds a {self.kind}; only a plain module is run on arrays")
        arrays = [array(f"input {i}", x) for i, x in enumerate(inputs)]
        result = self._run(arrays) if "pair" not in self.model else run_pair(self.model, self._run, arrays)
        names: list[str] | None = self.model.get("outputs")
        if names is None:
            return result
        return dict(zip(names, result if isinstance(result, list) else [result], strict=True))

    def _run(self, arrays: list[NDArray[Any]], entry: str = "main") -> Any:
        inputs: Any = self.model.get("inputs")
        check_inputs(inputs if "pair" not in self.model else inputs[INPUTS[entry]], arrays)
        try:
            return self._run_parts(arrays, entry)
        except (RuntimeError, TypeError, ValueError) as error:  # what the kernels' entry compares
            reason = str(error).strip().splitlines()
            raise RequestError(
                f"{self.path}: the kernels refuse these arrays: {reason[-1] if reason else error}"
            ) from error

    def _run_parts(self, arrays: list[NDArray[Any]], entry: str) -> Any:
        if entry != "main":
            return self.call(*map(self.device.put, arrays), entry=entry)
        count = self._parts(arrays)
        if count <= 1:
            return self.call(*map(self.device.put, arrays))
        bounds = [len(arrays[0]) * i // count for i in range(count + 1)]
        parts = [self.call(*(self.device.put(x[i:j]) for x in arrays)) for i, j in pairwise(bounds)]
        if isinstance(parts[0], list):
            return [np.concatenate(of_one) for of_one in zip(*parts, strict=True)]
        return np.concatenate(parts)

    def _parts(self, arrays: list[NDArray[Any]]) -> int:
        """Return how many parts a batch is divided into; 1 also for lengths that differ, which the kernels refuse."""
        entry_bytes: int = self.model.get("entry_bytes", 0)
        if not self.device.divides or len({x.shape[:1] for x in arrays}) != 1 or not arrays[0].ndim or not entry_bytes:
            return 1
        each = entry_bytes * (int(arrays[0].shape[1]) if self.kind == "encoder" else 1)
        return -(-len(arrays[0]) // max(1, self.threads * _PART_BYTES // max(1, each)))

    def embed_pictures(self, pictures: ArrayLike) -> NDArray[np.float32]:
        """Return embeddings of length 1, float32 [B, D], of pictures float32 [B, channels, height, width].

        Raises:
            RequestError: the bundle embeds no pictures, or they have another size.
        """
        return embed_pictures(self.model, self._run, pictures)

    def embed_texts(self, texts: str | Iterable[str] | ArrayLike, mask: ArrayLike | None = None) -> NDArray[np.float32]:
        """Return embeddings of length 1, float32 [B, D], of texts, or of token ids [B, S] with a mask as of `encode`.

        Raises:
            RequestError: the bundle embeds no pictures with texts, a text is too long, or ids are out of range.
        """
        return embed_texts(self.model, self._run, lambda: self.tokenizer, texts, mask)

    def similarity(self, pictures: ArrayLike, texts: ArrayLike) -> NDArray[np.float32]:
        """Return the model's logits float32 [pictures, texts] for embeddings of both."""
        return similarity(self.model, pictures, texts)

    def encode(self, ids: ArrayLike, mask: ArrayLike | None = None) -> NDArray[np.float32]:
        """Return an encoder's last hidden state float32 [B, S, H].

        Args:
            ids: whole numbers [B, S].
            mask: [B, S], 1 for tokens and 0 for padding; None for no padding.
        Raises:
            RequestError: not an encoder, ids out of range, or shapes that do not agree.
        """
        if self.kind != "encoder":
            raise RequestError(f"{self.path}: holds a {self.kind}, only an encoder encodes")
        tokens = token_ids(ids, self.model["vocab_size"])
        kept = np.ones(tokens.shape) if mask is None else array("mask", mask)
        if kept.shape != tokens.shape or tokens.shape[1] > self.limit:
            raise RequestError(
                f"ids {tokens.shape}, mask {kept.shape}: they must agree, with at most {self.limit} tokens in a row"
            )
        hidden: NDArray[np.float32] = self._run([tokens, kept.astype(np.float32)])
        return hidden

    def session(
        self, batch: int = 1, capacity: int = 256, source: ArrayLike | None = None, source_mask: ArrayLike | None = None
    ) -> Session:
        """Start a sequence of tokens per batch entry, with room for ``capacity`` tokens before it must grow.

        Args:
            source: an encoder-decoder's: whole numbers [B, N].  The encoder runs here, once.
            source_mask: [B, N], 1 for tokens and 0 for padding; None for no padding.
        Raises:
            RequestError: no model that generates, no source or one too many, or a source that the encoder cannot read.
        """
        self._check_generates()
        memory: list[Any] = []
        if self.kind == "seq2seq":
            encode = partial(self.call, entry="encode")
            memory = encode_source(self.model, encode, source, source_mask, batch, self.device.put)
        elif source is not None or source_mask is not None:
            raise RequestError(f"{self.path}: holds a decoder, which reads no source; give it to step()")
        entries = {name: partial(self.call, entry=name) for name in self.entries - {"main", "encode"}}
        return Session(self.model, self.limit, self.call, batch, capacity, memory, self.device, self._record, entries)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: int | str | Iterable[int | str] = (),
        speculate: str | None = None,
    ) -> Generation:
        """Continue a prompt; the result yields pieces of text as soon as they are certain.

        An encoder-decoder reads the prompt as its source, and generates what its decoder says to it.

        Args:
            prompt: text, or token ids; empty starts from the model's beginning-of-sequence token.  A model of speech
                takes a WAV file's path, or samples float32 in a row.
            max_tokens: at most so many new tokens; fewer when the model's last position is reached.
            temperature: 0 takes the likeliest token, above 0 samples.
            top_k: sample among the k likeliest only; 0 for no limit.
            top_p: sample among the fewest tokens whose probabilities reach top_p (nucleus sampling, arXiv:1904.09751).
            seed: makes sampling repeatable.
            stop: token ids and strings that end the text; they are not part of it.
            speculate: one of :attr:`speculations` drafts tokens, and verifies several in a step where that is faster;
                the text is that of the whole model, unless the manifest says that greedy ones are ``lossy``.  "off"
                does not; None does as the bundle's recipe says.
        Raises:
            RequestError: an argument out of range, too long a prompt, or drafts that the bundle cannot verify.
        """
        self._check_generates()
        (ends, texts), ids = stops_of(stop), self._prompt_ids(prompt) if self._reads_tokens else []
        sampler, counts = checked_sampler(temperature, top_k, top_p, seed), counts_of(self, speculate, temperature)
        tokens = self.continued(ids or prompt, max_tokens, sampler, ends, counts)
        before = ids if self.kind == "decoder" else self.model["encoder_source"]["start_ids"]
        return Generation(ids, tokens, TextStream(self.tokenizer, before), texts, counts)

    def generate_ids(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Iterable[int] = (),
        speculate: str | None = None,
    ) -> Generator[int, None, str]:
        """Continue a prompt; yield token ids, up to a stop id or one of the model's end-of-sequence ids.

        Arguments and errors are those of :meth:`generate`; the generator's value is :attr:`Generation.finish_reason`.
        """
        self._check_generates()
        sampler, counts = checked_sampler(temperature, top_k, top_p, seed), counts_of(self, speculate, temperature)
        return self.continued(prompt, max_tokens, sampler, stops_of(stop)[0], counts)

    def continued(
        self, prompt: Prompt, max_tokens: int, sampler: Sampler, stop: list[int], counts: Speculation | Depth | None
    ) -> Generator[int, None, str]:
        """Yield as :meth:`generate_ids`, with a sampler, and with the counts of drafts, or of blocks."""
        max_tokens, stops = whole("max_tokens", max_tokens, 0), dict.fromkeys(stop, "stop_sequence")
        if labels_frames(self.model):
            return frame_tokens(self.model, self._run, prompt, max_tokens, sampler.temperature, stops)
        facts: dict[str, Any] | None = self.model["encoder_source"] if self.kind == "seq2seq" else None
        if facts is None:
            first, source = token_ids([self._prompt_ids(prompt)], self.model["vocab_size"]), None
        else:
            first, source = np.array([facts["start_ids"]]), source_of_prompt(self.model, prompt, self._prompt_ids)
        session = self.session(1, first.shape[1] + min(max_tokens, 256), source)
        session.make_room(first.shape[1])
        ends = stops | dict.fromkeys(self.model["eos_ids"], "eos_token")
        room = self.limit + 1 - first.shape[1]  # nothing follows the last token
        count = tokens_left(facts, max_tokens, room)
        if isinstance(counts, Speculation):
            return self._drafts.tokens(session, first, sampler, ends, count, counts, room - count)

        def pick(logits: NDArray[np.float32], is_first: bool) -> int:
            return sampler.pick(without(logits, facts, is_first))

        return counted_tokens(session, self.model, first, pick, ends, count, counts)

    @cached_property
    def _drafts(self) -> Drafts:
        return Drafts(self.model["vocab_size"], entries=self.entries, facts=self.model)

    @property
    def _reads_tokens(self) -> bool:
        return self.kind == "decoder" or self.model["encoder_source"]["reads"] == "tokens"

    def _check_generates(self) -> None:
        if self.kind not in GENERATING and not labels_frames(self.model):
            raise RequestError(f"{self.path}: holds a {self.kind}; only a decoder generates")

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        return prompt_ids(prompt, lambda text: self.tokenizer.encode(text).ids, self.model.get("bos_id"))

    def read_bandwidth(self, size_bytes: int = 256 << 20, repeats: int = 10) -> float:
        """Return the bytes per second at which the kernels' memory is read; the best of the repeats.

        Each repeat reads ``size_bytes``.  On a GPU it also writes as many, and both are counted.
        """
        return self.device.read_bandwidth(self.vm, size_bytes, repeats)

    def call(self, *tensors: Any, entry: str = "main") -> Any:
        """Call the library with tensors of the device and the parameters; return the result as numpy."""
        function = self.vm.main if entry == "main" else self.vm.functions[entry]
        result = self.vm.call(function, *tensors, self._parameters[entry])
        return self.device.get(result) if isinstance(result, tvm_ffi.Tensor) else [*map(self.device.get, result)]

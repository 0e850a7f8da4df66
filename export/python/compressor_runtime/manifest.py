"""Read the manifest of a bundle, check its fields, and find the files that it names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from compressor_runtime.errors import BrowserBundleError, BundleError, DamagedBundleError
from compressor_runtime.speculation.kinds.registry import SPECULATIONS

MEASUREMENTS = "measurements.json"
WEB_FORMAT = "compressor web bundle"
SCHEMA_VERSION = 2  # 1 had no vectors
CUDA_SCHEMA_VERSION = 3  # of bundles whose kernels run on a GPU: older run-times refuse them
MANIFEST, LIBRARY, WEIGHTS, TOKENIZER = "manifest.json", "model.so", "weights.safetensors", "tokenizer.json"
TVM_RUNTIME, TVM_CUDA = "lib/libtvm_runtime.so", "lib/libtvm_runtime_cuda.so"
LARGEST_HEADER_BYTES = 16 << 20  # of a manifest or a safetensors header: some 100,000 tensors
GENERATING = ("decoder", "seq2seq")  # kinds of models that predict tokens from caches
DENSE_CACHE = "FP32"  # the format of keys and values that are not packed
_MOST_LAYERS = 4096  # no model has more
# Control characters as JSON has them, but the new line and the tab.
_CONTROLS = re.compile(r"(?<!\\)(?:\\\\)*\\(?:u00[01]|[bfr])|[\x7f-\x9f]")


def read_manifest(root: Path) -> dict[str, Any]:
    """Return the manifest of the bundle in ``root``, without reading any other file.

    Raises:
        BundleError: there is no bundle, or it has a newer schema or is for browsers.
        DamagedBundleError: the manifest is not valid JSON, or too large.
    """
    manifest = any_manifest(root)
    if manifest.get("format") == WEB_FORMAT:
        raise BrowserBundleError(f"{root}: a bundle for browsers; `compress serve {root}` shows it in one")
    if manifest.get("format") != "compressor bundle":
        raise BundleError(f"{root}: not a Compressor bundle; give the folder that `compress run` wrote")
    if field(manifest, "schema_version", int) == 0:
        raise DamagedBundleError(f"{root}: schema_version 0, which there has never been; copy the bundle again")
    if manifest["schema_version"] > CUDA_SCHEMA_VERSION:
        raise BundleError(
            f"{root}: schema version {manifest['schema_version']}, this run-time reads up to {CUDA_SCHEMA_VERSION}; "
            "use the compressor_runtime.py inside the bundle, or a newer Compressor"
        )
    if is_cuda(manifest) is not (manifest["schema_version"] == CUDA_SCHEMA_VERSION):
        raise DamagedBundleError(f"{MANIFEST}: `device` and `schema_version` do not agree; copy the bundle again")
    return manifest


def read_measurements(root: Path) -> dict[str, Any]:
    """Return what the run that made a bundle measured; empty if it is not there.

    Raises:
        DamagedBundleError: the file is not readable as JSON.
    """
    file = root / MEASUREMENTS
    if not file.is_file():
        return {}
    try:
        found = read_json(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedBundleError(f"{file}: not readable as JSON ({error})") from error
    return found if isinstance(found, dict) else {}


def is_cuda(manifest: dict[str, Any]) -> bool:
    """Tell whether a bundle's kernels run on NVIDIA GPUs."""
    return manifest.get("device") == "cuda"


def any_manifest(root: Path) -> dict[str, Any]:
    """Return the manifest of a bundle of whatever kind.

    Raises:
        BundleError: there is none.
        DamagedBundleError: it is not valid JSON, or too large.
    """
    file = root / MANIFEST
    try:
        if not file.is_file():
            what = "no such folder" if not root.exists() else f"not a bundle: it has no {MANIFEST}"
            raise BundleError(f"{root}: {what}; give the folder that `compress run` wrote")
        if file.stat().st_size > LARGEST_HEADER_BYTES:
            raise DamagedBundleError(f"{file}: {file.stat().st_size} bytes are too many for a manifest")
        text = member(root, MANIFEST).read_bytes()
    except OSError as error:
        raise BundleError(f"{file}: cannot be read: {error}") from error
    try:
        manifest = read_json(text)
    except (ValueError, RecursionError) as error:
        raise DamagedBundleError(f"{file}: not readable as JSON ({error}); copy the bundle again") from error
    if not isinstance(manifest, dict) or not str(manifest.get("format")).startswith("compressor "):
        raise BundleError(f"{root}: not a Compressor bundle; give the folder that `compress run` wrote")
    return manifest


def field(entry: Any, key: str, kind: type) -> Any:
    """Return ``entry[key]``, which must be a ``kind``.

    Raises:
        DamagedBundleError: it is missing, of another type, or a negative or huge number.
    """
    value = entry.get(key) if isinstance(entry, dict) else None
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 1 << 63):
        raise DamagedBundleError(
            f"{MANIFEST}: `{key}` is missing or is not a valid {kind.__name__}; copy the bundle again"
        )
    return value


def items(entry: Any, key: str, kind: type) -> list[Any]:
    """Return ``entry[key]``, which must be a list of ``kind``.

    Raises:
        DamagedBundleError: it is missing, or something else.
    """
    values: list[Any] = field(entry, key, list)
    if any(type(value) is not kind for value in values):
        raise DamagedBundleError(f"{MANIFEST}: not all of `{key}` is {kind.__name__}; copy the bundle again")
    return values


def libraries(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of the kernels, for the most demanding CPU first.

    Older bundles have one library and do not list it.
    """
    if "libraries" not in manifest:
        return [{"isa": "", "file": LIBRARY, "cpu_features": items(manifest, "cpu_features", str)}]
    entries = items(manifest, "libraries", dict)
    if not entries:
        raise DamagedBundleError(f"{MANIFEST}: `libraries` is empty; copy the bundle again")
    return entries


def checked_model(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest's facts about the model, after a check of all that the run-time computes with.

    Raises:
        DamagedBundleError: one is missing or impossible.
    """
    model: dict[str, Any] = field(manifest, "model", dict)
    caches = ("layers", "kv_heads", "head_dim")
    # Models whose layers are all recurrent have no caches.
    is_recurrent = manifest["kind"] == "decoder" and "states" in model and all(model.get(size) == 0 for size in caches)
    cached = ("vocab_size", *(() if is_recurrent else caches))
    sizes = {"decoder": cached, "seq2seq": cached, "encoder": ("vocab_size",), "module": ()}
    field(model, "max_positions", int)
    field({"entry_bytes": 0, **model}, "entry_bytes", int)
    is_pair = manifest["kind"] == "module" and "pair" in model
    has_tokens = is_pair or "encoder_source" in model
    sizes |= {"module": ("vocab_size",)} if has_tokens else {}
    others = {"decoder": (), "encoder": ("kv_heads",), "module": ("kv_heads", *(() if has_tokens else ("vocab_size",)))}
    wrong = [] if manifest["kind"] in sizes else ["kind"]
    wrong += ["kind"] if any(model.get(name) for name in others.get(manifest["kind"], ())) else []
    wrong += [name for name in sizes.get(manifest["kind"], ()) if field(model, name, int) == 0]
    if "inputs" in model:
        wrong += [] if all(_is_input(entry) for entry in items(model, "inputs", dict)) else ["inputs"]
    if "outputs" in model:
        wrong += [] if items(model, "outputs", str) else ["outputs"]
    if is_pair:
        wrong += [] if _pair_fits(model) else ["pair"]
    if manifest["kind"] in GENERATING:
        wrong += [] if model["layers"] <= _MOST_LAYERS else ["layers"]
        wrong += [] if "predicts" not in model or 0 < field(model, "predicts", int) < model["layers"] else ["predicts"]
        wrong += [] if model.get("speculate") in (None, *SPECULATIONS) else ["speculate"]
        wrong += [] if type(model.get("bos_id")) in (int, type(None)) else ["bos_id"]
        items(model, "eos_ids", int)
    if manifest["kind"] in GENERATING and not wrong:
        wrong += [] if _heads_fit(model) else ["uneven_heads"]
        wrong += [] if wrong or _cache_fits(model) else ["cache_bytes_per_token"]
        wrong += [] if _states_fit(model) else ["states"]
        wrong += [] if _parts_fit(model, manifest.get("entries", {})) else ["parts"]
        wrong += [] if _skips_fit(model) else ["skips"]
        wrong += [] if _lossy_fits(model) else ["lossy"]
    if wrong:
        raise DamagedBundleError(f"{MANIFEST}: `{wrong[0]}` has a value that cannot be; copy the bundle again")
    return model


def entry_indices(manifest: dict[str, Any]) -> dict[str, list[int]]:
    """Return, of each entry function of the kernels, the indices of its parameters; most bundles have ``main`` alone.

    Raises:
        DamagedBundleError: ``main`` is missing, an encoder-decoder's ``encode`` is, what embeds texts is (``text``),
            ``verify`` is among a decoder's, which may have others for drafts, or ``predict`` where it predicts caches,
            or an index is out of range.
    """
    count = len(items(manifest, "parameters", str))
    second = "encode" if manifest["kind"] == "seq2seq" else "text" if "pair" in manifest["model"] else "verify"
    if second == "verify" and (manifest["kind"] != "decoder" or "entries" not in manifest):
        return {"main": list(range(count))}
    entries = field(manifest, "entries", dict)
    second = "predict" if "predicts" in manifest["model"] else second
    others = (name for name in entries if name not in ("main", second) and second == "verify")
    found = {name: items(entries, name, int) for name in ("main", second, *others)}
    if any(not 0 <= index < count for indices in found.values() for index in indices):
        raise DamagedBundleError(f"{MANIFEST}: `entries` names parameters that are not there; copy the bundle again")
    return found


def _pair_fits(model: dict[str, Any]) -> bool:
    """Return whether what is said of pictures with texts can be: three inputs, and numbers for similarities."""
    facts = field(model, "pair", dict)
    numbers = [facts.get("scale"), facts.get("bias")]
    right = all(type(x) is float and math.isfinite(x) for x in numbers) and type(facts.get("is_filled")) is bool
    return right and field(facts, "pad_id", int) < model["vocab_size"] and len(items(model, "inputs", dict)) == 3


def _is_input(entry: dict[str, Any]) -> bool:
    return type(entry.get("dtype")) is str and all(type(size) in (int, str) for size in field(entry, "shape", list))


def cache_heads(model: Mapping[str, Any]) -> list[int]:
    """Return the heads of keys of each cache: of most bundles as many of all."""
    return list(model.get("uneven_heads") or [model["kv_heads"]] * model["layers"])


def _heads_fit(model: dict[str, Any]) -> bool:
    """Return whether heads that are stated cache by cache are as many numbers as there are caches, from 1."""
    if "uneven_heads" not in model:
        return True
    heads = items(model, "uneven_heads", int)
    return bool(len(heads) == model["layers"] and min(heads, default=0) > 0 and max(heads) == model["kv_heads"])


def _cache_fits(model: dict[str, Any]) -> bool:
    """Return whether the cache's bytes suit its format; bundles from before caches had formats get both here."""
    rows = 2 * sum(cache_heads(model))
    dense_bytes = 4 * rows * model["head_dim"]
    cache_format, cache_bytes = (
        field(model, key, type(default)) if key in model else model.setdefault(key, default)
        for key, default in (("cache_format", DENSE_CACHE), ("cache_bytes_per_token", dense_bytes))
    )
    return bool(cache_bytes == dense_bytes if cache_format == DENSE_CACHE else cache_bytes > 0 == cache_bytes % rows)


def _parts_fit(model: dict[str, Any], entries: Any) -> bool:
    """Return whether the parts of what verifies tokens, where there are any, are entries that fit together."""
    parts = items(model, "parts", dict) if "parts" in model else []
    caches = {f"{name}_cache_{layer}" for name in "kv" for layer in range(model["layers"] if parts else 0)}
    known = {"ids", "position", "keep", "parent", "slot", "row", *caches}
    for part in parts:
        gives, axes = items(part, "gives", str), items(part, "axes", int) if "axes" in part else []
        fits = field(part, "entry", str) in entries and known.issuperset(items(part, "takes", str))
        if not fits or len(axes) != len(gives):
            return False
        known.update(gives)
    return not parts or (len(parts) > 1 and "logits" in items(parts[-1], "gives", str))


def _skips_fit(model: dict[str, Any]) -> bool:
    """Return whether the subsets that draft, where there are any, leave out parts that there are."""
    if "skips" not in model:
        return True
    names, skips = {part["entry"] for part in model.get("parts", [])[1:-1]}, items(model, "skips", dict)
    numbers = [number for one in skips for number in (one.get("agreement"), one.get("cost"))]
    right = all(type(number) is float and 0 <= number < math.inf for number in numbers)
    return bool(right and skips) and all(names.issuperset(items(one, "without", str)) for one in skips)


def _lossy_fits(model: dict[str, Any]) -> bool:
    """Return whether a tolerance, with what was measured, is stated for drafts that may have one; or none is."""
    if "lossy" not in model:
        return True
    facts = field(model, "lossy", dict)
    numbers = [facts.get(name, 0.0) for name in ("lossless_agreement", "lossy_perplexity", "lossless_perplexity")]
    right = all(type(number) is float and 0 <= number < math.inf for number in numbers)
    return right and model.get("speculate") == "sparse" and 0 < field(facts, "tolerance", float) <= 1


def _states_fit(model: dict[str, Any]) -> bool:
    """Return whether the states of recurrent layers, where there are any, have sizes and the bytes that are stated."""
    if "states" not in model:
        return "state_bytes" not in model
    shapes = items(model, "states", list)
    right = all(shape and all(type(size) is int and 0 < size < 1 << 31 for size in shape) for shape in shapes)
    return bool(right and shapes) and field(model, "state_bytes", int) == 4 * sum(map(math.prod, shapes))


def read_json(data: bytes) -> Any:
    """Parse JSON in UTF-8 that has no key twice, no NaN, infinity or lone surrogate, and no control characters.

    Raises:
        ValueError: it is something else.
        RecursionError: it is nested too deeply.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) != len(pairs):
            raise ValueError("a key is there twice")
        return unique

    content = json.loads(data.decode(), object_pairs_hook=once)
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    text.encode()  # this line and the one above raise for what neither JSON nor UTF-8 can hold
    if _CONTROLS.search(text):
        raise ValueError("a text in it holds control characters")
    return content


def member(root: Path, name: str) -> Path:
    """Return the file ``name`` of the bundle, which must lie inside ``root`` and must not be a link.

    Raises:
        DamagedBundleError: it is missing, or ``name`` is not the only spelling of a place in the bundle.
    """
    file, named = root / name, PurePosixPath(name)
    plain = name == str(named) and name.isprintable() and "\\" not in name and not named.is_absolute()
    try:
        if not plain or file.resolve() != root.resolve() / name:
            raise DamagedBundleError(
                f"{root / MANIFEST}: {name!r} leads outside the bundle, or is not a plain name; "
                "do not trust this bundle"
            )
        if file.is_file():
            return file
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a name that no file can have
        raise DamagedBundleError(f"{root / MANIFEST}: {name!r:.200} cannot be a file: {error}") from error
    raise DamagedBundleError(f"{file}: missing; copy the bundle again")

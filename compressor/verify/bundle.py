"""``compress verify``: whether a bundle is what it says it is.

Nothing of a bundle is executed before its files and, where a key is given, its signature have passed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from compressor.codegen.backend import Check
from compressor.errors import CompressorError, VerificationError
from compressor.export.manifest import foreign_files
from compressor.export.schema import Manifest, SiteEntry, check_schema
from compressor.export.signing import MANIFEST, SIGNATURE, check_signature
from compressor.formats.cache import cache_bytes_per_token
from compressor.formats.extras import ColumnBlocks, KeptOfGroup, SingleZeros
from compressor.formats.format import Format
from compressor.formats.parts import PARTS, SAFETENSORS_TYPES, STEP, TILE_ROWS
from compressor.graph.model import state_bytes
from compressor.verify.smoke import SmokeResult, smoke_test
from compressor.verify.web import NOT_EXECUTED, web_bytes, web_files, web_schema

_SHOWN = 3
_INVALID = "the manifest is not valid"


@dataclass(frozen=True)
class Verification:
    """All checks of a bundle, in order; ``smoke`` is what its kernels measured here, None where they did not run."""

    checks: tuple[Check, ...]
    smoke: SmokeResult | None

    @property
    def verified(self) -> bool:
        """No check failed."""
        return not any(check.passed is False for check in self.checks)

    def content(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "verified": self.verified,
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "smoke": None if self.smoke is None else dataclasses.asdict(self.smoke),
        }


def verify_bundle(bundle: Path, *, threads: int | None = None, public_key: Path | None = None) -> Verification:
    """Check a bundle's files, schema, signature, bytes, kernels and declared evidence.

    Args:
        threads: of the kernels; None takes the physical cores.
        public_key: PEM file of the ed25519 key that must have signed the bundle; None does not check signatures.
    Raises:
        UsageError: the public key cannot be used.
        ToolchainError: a public key is given and the extra ``sign`` is not installed.
    """
    if (web := _web_manifest(bundle)) is not None:
        return _verify_web(bundle, web, public_key)
    checks = [_check("schema", lambda: _schema(bundle))]
    manifest = _read(bundle) if checks[0].passed else None
    if manifest is None:
        checks += [_skipped(name, _INVALID) for name in ("files", "bytes")]
    else:
        checks += [_check("files", lambda: _files(bundle, manifest)), _check("bytes", lambda: _bytes(bundle, manifest))]
    checks.append(_signature(bundle, public_key))
    smoke: SmokeResult | None = None
    if failed := [check.name for check in checks if check.passed is False]:
        kernels = _skipped("kernels", f"nothing of a bundle is executed when {' and '.join(failed)} failed")
    else:
        assert manifest is not None
        kernels, smoke = _kernels(bundle, manifest, threads)
    checks.append(kernels)
    checks.append(_skipped("evidence", _INVALID) if manifest is None else _evidence(manifest, kernels))
    return Verification(tuple(checks), smoke)


def _web_manifest(bundle: Path) -> dict[str, Any] | None:
    from compressor_runtime import BundleError
    from compressor_runtime.manifest import WEB_FORMAT, any_manifest

    try:
        manifest = any_manifest(bundle)
    except BundleError:
        return None  # the first check says what is wrong
    return manifest if manifest["format"] == WEB_FORMAT else None


def _verify_web(bundle: Path, manifest: dict[str, Any], public_key: Path | None) -> Verification:
    checks = [_check("schema", lambda: web_schema(manifest))]
    for name, check in (("files", web_files), ("bytes", web_bytes)):
        valid = checks[0].passed
        checks.append(_check(name, partial(check, bundle, manifest)) if valid else _skipped(name, _INVALID))
    checks += [_signature(bundle, public_key), _skipped("kernels", NOT_EXECUTED)]
    counts = Counter(str(kernel.get("evidence")) for kernel in manifest["kernels"]) if checks[0].passed else Counter()
    claimed = ", ".join(f"{count} {evidence}" for evidence, count in sorted(counts.items()))
    checks.append(_skipped("evidence", f"the manifest says: {claimed}" if claimed else _INVALID))
    return Verification(tuple(checks), None)


def _check(name: str, check: Callable[[], str]) -> Check:
    """Run a check that returns what it found, or raises."""
    from compressor_runtime import BrowserBundleError, BundleError

    try:
        return Check(name, True, check())
    except BrowserBundleError:  # nothing is wrong with it
        raise
    except (CompressorError, BundleError, OSError) as error:
        return Check(name, False, str(error))


def _skipped(name: str, reason: str) -> Check:
    return Check(name, None, reason)


def _read(bundle: Path) -> Manifest:
    from compressor.runtime import read_manifest

    return check_schema(read_manifest(bundle))


def _schema(bundle: Path) -> str:
    manifest = _read(bundle)
    return f"version {manifest.schema_version}, a {manifest.kind} with {len(manifest.sites)} compressed linears"


def _files(bundle: Path, manifest: Manifest) -> str:
    """Sizes and hashes, of pieces and of whole files; no file that is not listed."""
    from compressor_runtime import sha256

    from compressor.runtime import check_files

    check_files(bundle, manifest.model_dump(exclude_none=True))
    for name, entry in manifest.files.items():
        if entry.pieces is not None and sha256(bundle / name) != entry.sha256:
            raise VerificationError(f"{name}: its pieces have the SHA-256 of the manifest, the whole has another")
    if extra := foreign_files(bundle, manifest.files):
        shown = ", ".join(map(repr, extra[:_SHOWN])) + (", ..." if len(extra) > _SHOWN else "")
        cached = any("__pycache__" in name for name in extra)
        advice = "; not what this Python makes of the bundle's sources: delete __pycache__" if cached else ""
        raise VerificationError(f"not listed in the manifest: {shown}{advice}")
    return f"{len(manifest.files)} files have the sizes and SHA-256 of the manifest, and there are no others"


def _bytes(bundle: Path, manifest: Manifest) -> str:
    """Check the manifest's figures against the weights' header and the formats' arithmetic."""
    stored = _header(bundle / "weights.safetensors")
    sizes = {name: end - start for name, (_, _, (start, end)) in stored.items()}
    if set(stored) != set(manifest.parameters) or max(Counter(manifest.parameters).values(), default=1) > 1:
        odd = sorted(set(stored) ^ set(manifest.parameters)) or ["a name is listed twice"]
        raise VerificationError(f"weights.safetensors and `parameters` differ: {', '.join(odd[:_SHOWN])}")
    _equal("weight_bytes", manifest.weight_bytes, sum(sizes.values()), "weights.safetensors holds")
    latest = {site.site: site for site in manifest.sites}
    for site in latest.values():
        if not site.format:  # dense still, or merged into another
            dense = f"{site.site}.weight"
            if dense in sizes or not site.bytes_after:
                _equal(f"{site.site}: bytes_after", site.bytes_after, sizes.get(dense, 0), "it takes")
            continue
        _equal(f"{site.site}: bytes_after", site.bytes_after, _site_bytes(stored, site.site, site.format), "it takes")
    listed = sum(entry.bytes for entry in manifest.files.values())
    total = listed + (bundle / MANIFEST).stat().st_size
    _equal("bundle_bytes", manifest.bundle_bytes, total, "the files and the manifest take")
    model = manifest.model
    if manifest.kind in ("decoder", "seq2seq") and model.cache_bytes_per_token is not None:
        heads = model.uneven_heads or [model.kv_heads] * model.layers
        expected = cache_bytes_per_token(model.cache_format, heads, model.head_dim)
        _equal("cache_bytes_per_token", model.cache_bytes_per_token, expected, f"{model.cache_format} takes")
    if model.states is not None:
        _equal("state_bytes", model.state_bytes or 0, state_bytes(model.states), "states take")
    # Every dense weight is either still here or was one that a site replaced; a tied one is both.
    left = manifest.weight_bytes - sum(site.bytes_after for site in latest.values())
    first = {site.site: site for site in reversed(manifest.sites)}
    most = left + sum(site.bytes_before + _lost_bias(site, sizes) for site in first.values())
    if not left <= manifest.dense_weight_bytes <= most:
        raise VerificationError(
            f"dense_weight_bytes is {manifest.dense_weight_bytes}; by the sites it must be {left} to {most}"
        )
    return f"{manifest.weight_bytes} bytes of weights, {len(latest)} linears stored as the manifest says"


def _lost_bias(site: SiteEntry, sizes: Mapping[str, int]) -> int:
    """Return the most bytes that a bias has lost with rows that were removed from its dense weight."""
    if site.format or not site.bytes_after:
        return 0
    return sizes.get(f"{site.site}.bias", 0) * (site.bytes_before - site.bytes_after) // site.bytes_after


def _equal(name: str, stated: int, found: int, what: str) -> None:
    if stated != found:
        raise VerificationError(f"{name} is {stated}, {what} {found}")


_Stored = tuple[str, list[int], tuple[int, int]]
"""dtype, shape, begin and end among the data."""


def _header(file: Path) -> dict[str, _Stored]:
    """Return the header of a safetensors file, whose layout the run-time's reader has checked."""
    from compressor_runtime import read_safetensors

    read_safetensors(file)
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"], tuple(entry["data_offsets"])) for name, entry in header.items()}


def _site_bytes(stored: Mapping[str, _Stored], site: str, format_name: str) -> int:
    """Return the bytes of a site's weight, which for an expert is a slice of its weight's stacked parts.

    Experts that are stored in several formats are stacked by format (``<weight>.kind0``, ...): one has to fit.
    """
    parts = {part: stored[key] for part in PARTS if (key := f"{site}.{part}") in stored}
    weight, _, number = site.rpartition(".")
    if parts or not number.isdigit():
        return _packed_bytes(site, format_name, parts)
    kinds = [weight, *(f"{weight}.kind{i}" for i in range(int(number) + 1))]  # new ones come in the experts' order
    problem: VerificationError | None = None
    for kind in kinds:
        stacked = {part: stored[key] for part in PARTS if (key := f"{kind}.{part}") in stored}
        try:
            return _packed_bytes(site, format_name, {part: _slice(entry) for part, entry in stacked.items()})
        except VerificationError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _slice(entry: _Stored) -> _Stored:
    """Return what the header would say of one slice along the first dimension."""
    kind, shape, (begin, end) = entry
    return kind, shape[1:], (0, (end - begin) // max(1, shape[0] if shape else 1))


def _packed_bytes(site: str, name: str, parts: Mapping[str, _Stored]) -> int:
    """Return the bytes of a weight by its format's arithmetic, and check its stored parts against the format's layout.

    The weight's own shape is not stored, only its whole tiles and chunks.  All widths that fill these chunks take the
    same bytes, except that the type of ``outlier_columns`` may change between the narrowest and the widest of them.
    Of N:M, the widths are of whole groups.  Where blocks are left out, the bits say the width but for 64 blocks.  Where
    single weights are, the codes are as many as a share of the very shape.
    """
    fmt = Format.parse(name)
    found = {part: (kind, shape) for part, (kind, shape, _) in parts.items()}
    tiles, chunks = (*found.get("codes", ("", []))[1], 0, 0)[:2]
    rows, widest = tiles * TILE_ROWS, chunks * fmt.chunk_columns
    widths: Iterable[int] = (widest, widest - fmt.chunk_columns + 1)
    blocks = fmt.extra(ColumnBlocks)
    if blocks is not None and len(bits := found.get("kept", ("", []))[1]) == 2:  # a bit for each block
        widths = range(8 * bits[1] * blocks.width, max(0, (8 * bits[1] - 64) * blocks.width), -blocks.width)
    if (pattern := fmt.extra(KeptOfGroup)) is not None:  # chunks are of N of every M columns
        stored_columns = range(widest, max(0, widest - fmt.chunk_columns), -1)
        widths = [n // pattern.kept * pattern.size for n in stored_columns if n % pattern.kept == 0]
    if len(limits := found.get("thresholds", ("", []))[1]) == 1:  # one for each column; codes lie in panels of rows
        tiles, *_ = (*found.get("scales", ("", []))[1], 0)
        rows, widest, widths = tiles * TILE_ROWS, limits[0], limits
    heights: Iterable[int] = (rows,)
    if fmt.extra(SingleZeros) is not None and len(bits := found.get("kept", ("", []))[1]) == 4:
        rows, widest = bits[0] * TILE_ROWS, bits[1] * STEP
        heights, widths = (range(n, max(0, n - step), -1) for n, step in ((rows, TILE_ROWS), (widest, STEP)))
    shapes = itertools.product(heights, widths) if rows * widest else ()
    matching = next((shape for shape in shapes if _layout(fmt, *shape) == found), None)
    if matching is None:
        wanted = _layout(fmt, rows, widest) if rows * widest and widest in widths else "codes and scales"
        raise VerificationError(f"{site}: stored as {found}, {fmt.name} is {wanted}")
    expected = fmt.packed_bytes(*matching)
    _equal(
        f"{site}: packed_bytes of {fmt.name}",
        expected,
        sum(end - start for _, _, (start, end) in parts.values()),
        "stored are",
    )
    return expected


def _layout(fmt: Format, rows: int, columns: int) -> dict[str, tuple[str, list[int]]]:
    """Return the type and shape of each part, as a file of tensors names them."""
    return {part: (SAFETENSORS_TYPES[kind], list(shape)) for part, (kind, shape) in fmt.parts(rows, columns).items()}


def _signature(bundle: Path, public_key: Path | None) -> Check:
    if public_key is not None:
        try:
            check_signature(bundle, public_key)
        except VerificationError as error:
            return Check("signature", False, str(error))
        return Check("signature", True, f"the owner of {public_key} signed this manifest")
    if (bundle / SIGNATURE).exists():
        return _skipped("signature", "present; give --public-key to check it")
    return _skipped("signature", "none")


def _kernels(bundle: Path, manifest: Manifest, threads: int | None) -> tuple[Check, SmokeResult | None]:
    from compressor_runtime import BundleError, check_cpu
    from compressor_runtime.device.driver import why_not_here

    if manifest.schema_version < 2:
        return _skipped("kernels", "no vectors: schema version 1; compress the model again"), None
    try:
        check_cpu(manifest.cpu_features, bundle)
    except BundleError as error:
        return _skipped("kernels", f"not re-executed here: {error}"), None
    if manifest.cuda_capabilities is not None and (reason := why_not_here(manifest.cuda_capabilities)):
        return _skipped("kernels", f"not re-executed here: {reason}"), None
    try:
        smoke = smoke_test(bundle, threads)
    except VerificationError as error:
        return Check("kernels", False, str(error)), None
    for other in _others(manifest):
        try:
            smoke_test(bundle, threads, other)
        except VerificationError as error:
            return Check("kernels", False, f"for {other}: {error}"), None
    detail = (
        f"re-executed in a fresh process, relative error {smoke.error:.2g}, at most {smoke.tolerance:.2g}; "
        f"loads in {smoke.load_s:.2f} s, first token after {smoke.first_token_ms:.1f} ms"
    )
    return Check("kernels", True, detail), smoke


def _others(manifest: Manifest) -> list[str]:
    """Instruction sets of those libraries that this CPU runs, but for the best, which it takes by itself."""
    from compressor_runtime import missing_features

    return [entry.isa for entry in manifest.libraries or () if not missing_features(entry.cpu_features)][1:]


def _evidence(manifest: Manifest, kernels: Check) -> Check:
    """Check what the manifest claims about its kernels against what was executed here."""
    counts = Counter(kernel.evidence for kernel in manifest.kernels)
    claimed = ", ".join(f"{count} {evidence}" for evidence, count in sorted(counts.items()))
    if kernels.passed is None:
        return _skipped("evidence", f"the manifest says: {claimed}; not re-executed here")
    if not kernels.passed and {"executed", "emulated"} & counts.keys():
        return Check("evidence", False, f"the manifest says: {claimed}; refuted, see kernels")
    outcome = "executed here as well" if kernels.passed else "they fail here, see kernels"
    return Check("evidence", kernels.passed, f"the manifest says: {claimed}; {outcome}")

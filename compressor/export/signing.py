"""Signatures of bundles: ed25519 over the manifest, whose hashes cover every other file.

A signature is the 64 bytes of RFC 8032 in ``manifest.json.sig``, which OpenSSL verifies as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import ToolchainError, UsageError, VerificationError
from compressor.host.cache import replace_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

MANIFEST, SIGNATURE = "manifest.json", "manifest.json.sig"
_SIGNATURE_BYTES = 64


def sign_bundle(bundle: Path, key: Path) -> Path:
    """Sign the manifest of a bundle whose files are those of the manifest; returns the signature's file.

    Args:
        key: a private ed25519 key, PEM (PKCS 8), without a passphrase.
    Raises:
        ToolchainError: the extra ``sign`` is not installed.
        UsageError: the key cannot be used, or the bundle cannot be written to.
        DamagedBundleError: a file differs from the manifest.
    """
    from compressor.runtime import check_files, read_manifest

    private = _private_key(key)
    check_files(bundle, read_manifest(bundle))
    signature = private.sign((bundle / MANIFEST).read_bytes())
    try:
        replace_file(bundle / SIGNATURE, signature)
    except OSError as error:
        raise UsageError(f"{bundle}: the signature cannot be written: {error}") from error
    return bundle / SIGNATURE


def check_signature(bundle: Path, public_key: Path) -> None:
    """Check that the holder of the private key signed this manifest.

    Args:
        public_key: a public ed25519 key, PEM.
    Raises:
        ToolchainError: the extra ``sign`` is not installed.
        UsageError: the key cannot be used.
        VerificationError: there is no signature, or it is another key's or another manifest's.
    """
    public = _public_key(public_key)
    from cryptography.exceptions import InvalidSignature

    file = bundle / SIGNATURE
    if not file.is_file():
        raise VerificationError(f"{bundle}: is not signed: it has no {SIGNATURE}")
    if file.stat().st_size != _SIGNATURE_BYTES:
        raise VerificationError(f"{file}: {file.stat().st_size} bytes; a signature has {_SIGNATURE_BYTES}")
    try:
        public.verify(file.read_bytes(), (bundle / MANIFEST).read_bytes())
    except InvalidSignature as error:
        raise VerificationError(
            f"{file}: is not a signature of this manifest by the owner of {public_key}: the manifest was changed, or "
            "somebody else signed it; do not trust this bundle"
        ) from error


def _private_key(file: Path) -> Ed25519PrivateKey:
    serialization, ed25519 = _library()
    try:
        key = serialization.load_pem_private_key(_content(file), password=None)
    except TypeError as error:
        raise UsageError(f"{file}: has a passphrase; write it without one first: openssl pkey -in {file}") from error
    except ValueError as error:
        raise UsageError(f"{file}: not a private key in PEM: {_ADVICE}") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise UsageError(f"{file}: not an ed25519 key: {_ADVICE}")
    private: Ed25519PrivateKey = key
    return private


def _public_key(file: Path) -> Ed25519PublicKey:
    serialization, ed25519 = _library()
    try:
        key = serialization.load_pem_public_key(_content(file))
    except ValueError as error:
        raise UsageError(
            f"{file}: not a public key in PEM: openssl pkey -in key.pem -pubout -out public.pem"
        ) from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise UsageError(f"{file}: not an ed25519 key: {_ADVICE}")
    public: Ed25519PublicKey = key
    return public


_ADVICE = "make one with: openssl genpkey -algorithm ed25519 -out key.pem"


_LARGEST_KEY_BYTES = 1 << 16


def _content(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            content = stream.read(_LARGEST_KEY_BYTES + 1)  # a device such as /dev/zero has no end
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error}") from error
    if len(content) > _LARGEST_KEY_BYTES:
        raise UsageError(f"{file}: holds more than any key or signature; {_ADVICE}")
    return content


def _library() -> tuple[Any, Any]:
    """Import the modules ``serialization`` and ``ed25519`` of the package cryptography."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ToolchainError(
            "signatures need the package cryptography; install it with: pip install 'compressor[sign]'"
        ) from error
    return serialization, ed25519

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from compressor.errors import ToolchainError, UsageError, VerificationError
from compressor.export.signing import check_signature, sign_bundle
from compressor.runtime import DamagedBundleError

PEM = serialization.Encoding.PEM


@pytest.fixture
def bundle(module_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(module_bundle, tmp_path / "bundle"))


def write_keys(
    folder: Path, name: str, key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
) -> tuple[Path, Path]:
    private, public = folder / f"{name}.pem", folder / f"{name}_public.pem"
    plain = serialization.NoEncryption()
    private.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, plain))
    public.write_bytes(key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return write_keys(tmp_path, "key", ed25519.Ed25519PrivateKey.generate())


def test_openssl_makes_keys_for_us_and_verifies_our_signatures(
    bundle: Path, tmp_path: Path, require_tool: Callable[[str], Path]
) -> None:
    def openssl(*arguments: str | Path) -> int:
        command = [require_tool("openssl"), *arguments]
        return subprocess.run(command, capture_output=True, cwd=tmp_path, check=False).returncode

    assert openssl("genpkey", "-algorithm", "ed25519", "-out", "key.pem") == 0
    assert openssl("pkey", "-in", "key.pem", "-pubout", "-out", "public.pem") == 0
    signature = sign_bundle(bundle, tmp_path / "key.pem")
    assert signature == bundle / "manifest.json.sig"
    check_signature(bundle, tmp_path / "public.pem")
    verify = ("pkeyutl", "-verify", "-pubin", "-inkey", "public.pem", "-rawin", "-sigfile", signature, "-in")
    assert openssl(*verify, bundle / "manifest.json") == 0
    assert openssl(*verify, bundle / "README.md") != 0


def test_the_same_manifest_and_key_give_the_same_signature(bundle: Path, keys: tuple[Path, Path]) -> None:
    first = sign_bundle(bundle, keys[0]).read_bytes()
    assert sign_bundle(bundle, keys[0]).read_bytes() == first and len(first) == 64
    assert not list(bundle.glob(".*"))


def test_an_unsigned_bundle_another_key_and_any_changed_bit(
    bundle: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(VerificationError, match="is not signed"):
        check_signature(bundle, keys[1])
    file = sign_bundle(bundle, keys[0])
    check_signature(bundle, keys[1])
    _, stranger = write_keys(tmp_path, "stranger", ed25519.Ed25519PrivateKey.generate())
    with pytest.raises(VerificationError, match="somebody else signed it"):
        check_signature(bundle, stranger)
    signature, manifest = file.read_bytes(), (bundle / "manifest.json").read_bytes()
    for damaged in (bytes([signature[0] ^ 1]) + signature[1:], signature[:-1] + bytes([signature[-1] ^ 1])):
        file.write_bytes(damaged)
        with pytest.raises(VerificationError, match="the manifest was changed, or"):
            check_signature(bundle, keys[1])
    for damaged in (b"", signature[:-1], signature + b"\0"):
        file.write_bytes(damaged)
        with pytest.raises(VerificationError, match="bytes; a signature has"):
            check_signature(bundle, keys[1])
    file.write_bytes(signature)
    (bundle / "manifest.json").write_bytes(manifest + b" ")
    with pytest.raises(VerificationError, match="the manifest was changed, or"):
        check_signature(bundle, keys[1])


def test_a_damaged_bundle_is_not_signed(bundle: Path, keys: tuple[Path, Path]) -> None:
    with (bundle / "weights.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DamagedBundleError, match=r"weights\.safetensors"):
        sign_bundle(bundle, keys[0])
    assert not (bundle / "manifest.json.sig").exists()


def test_keys_that_cannot_be_used(bundle: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    private, public = keys
    other, other_public = write_keys(tmp_path, "curve", ec.generate_private_key(ec.SECP256R1()))
    locked = tmp_path / "locked.pem"
    key = serialization.load_pem_private_key(private.read_bytes(), None)
    lock = serialization.BestAvailableEncryption(b"secret")
    locked.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, lock))
    (tmp_path / "text").write_text("no key")
    for file, message in (
        (other, "not an ed25519 key.*openssl genpkey -algorithm ed25519"),
        (locked, "has a passphrase"),
        (tmp_path / "text", "not a private key in PEM"),
        (public, "not a private key in PEM"),
        (tmp_path / "nothing", "cannot be read"),
    ):
        with pytest.raises(UsageError, match=message):
            sign_bundle(bundle, file)
    sign_bundle(bundle, private)
    for file, message in (
        (other_public, "not an ed25519 key"),
        (private, "not a public key in PEM"),
        (tmp_path / "nothing", "cannot be read"),
    ):
        with pytest.raises(UsageError, match=message):
            check_signature(bundle, file)


def test_a_missing_library_is_named(bundle: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("cryptography.hazmat.primitives")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ToolchainError, match=r"pip install 'compressor\[sign\]'"):
        sign_bundle(bundle, keys[0])
    with pytest.raises(ToolchainError, match=r"pip install 'compressor\[sign\]'"):
        check_signature(bundle, keys[1])


@pytest.mark.parametrize("file", ["/dev/zero", "/dev/full"])
def test_a_device_without_an_end_is_no_key(file: str, bundle: Path) -> None:
    with pytest.raises(UsageError, match="holds more than any key"):
        sign_bundle(bundle, Path(file))

"""Run this project's own processes on an emulated ARM processor: QEMU, and a Python for aarch64 that it executes.

``python -m compressor.host.emulation CPU PYTHON ARGUMENTS`` runs ``PYTHON ARGUMENTS`` there: it takes the place of the
command, with the emulated Python in place of this machine's.  A signal that ends it, such as SIGILL, ends the command.

The Python is Debian's, unpacked out of its packages into the cache by apt with lists of its own, which checks their
signatures; its packages are wheels (:mod:`compressor.host.wheels`).  Nothing of the system is changed.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from compressor.errors import ToolchainError
from compressor.host.cache import cache_folder, partial_folder
from compressor.host.wheels import GUEST_PACKAGES, GUEST_PYTHON, fetch, settle

_SUITE, _MIRROR = "bookworm", "http://deb.debian.org/debian"  # of the Python that wheels are pinned for
_DEBIAN_PACKAGES = (f"python{GUEST_PYTHON}-minimal", f"libpython{GUEST_PYTHON}-stdlib", "libstdc++6")
_KEYRINGS = ("debian-archive-keyring.pgp", "debian-archive-keyring.gpg")
EMULATED = "COMPRESS_EMULATED_CPU"
"""Variable that tells an emulated process its processor, as compressor_runtime.remote.facts reads it: this module is
also run by Pythons that lack what that package imports."""
_APT = """\
Dir::State "{state}"; Dir::State::status "{state}/status"; Dir::State::lists "{state}/lists";
Dir::Cache "{state}/cache"; Dir::Etc "{state}/etc"; Dir::Etc::parts "{state}/etc/apt.conf.d";
APT::Architecture "arm64"; APT::Architectures {{ "arm64"; }}; APT::Install-Recommends "false";
APT::Sandbox::User "root"; Acquire::Languages "none"; Acquire::Retries "2";
"""


def launcher(cpu: str) -> tuple[str, ...]:
    """Return what stands before a command of this machine's Python to run it on an emulated processor."""
    return (sys.executable, "-m", "compressor.host.emulation", cpu)


@cache
def why_not() -> str:
    """Say why nothing can be emulated here, in words; an empty text if it can.

    The first call on a machine fetches 40 MB and takes half a minute.
    """
    try:
        _qemu()
        _guest()
    except ToolchainError as error:
        return str(error)
    return ""


def _qemu() -> str:
    for name in ("qemu-aarch64-static", "qemu-aarch64"):
        if path := shutil.which(name):
            return path
    raise ToolchainError(
        "qemu-aarch64-static is not on PATH, so that kernels for ARM cannot be executed here; "
        "`apt-get install qemu-user-static`"
    )


def _guest() -> Path:
    """Return the folder with ``root``, Debian's, and ``site``, packages, which is made when it is first asked for.

    Raises:
        ToolchainError: it cannot be made.
    """
    pins = "-".join(version for version, _ in GUEST_PACKAGES.values())
    place = cache_folder() / "emulation" / f"aarch64-{_SUITE}-{pins}"
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with partial_folder(place.parent, place.name) as partial:
            _unpack_python(partial)
            fetch(GUEST_PACKAGES, "aarch64", partial / "site")
            settle(partial, place)
        # Bytecode is written where it stays: without it each process would compile numpy under emulation.
        subprocess.run([*_command(place, "max"), "-c", "import json, numpy, tvm_ffi"], capture_output=True, check=False)
    return place


def _unpack_python(folder: Path) -> None:
    """Unpack Debian's Python for arm64 into ``folder/root``."""
    keyring = next((path for name in _KEYRINGS if (path := Path("/usr/share/keyrings") / name).is_file()), None)
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    missing += [] if keyring else ["debian-archive-keyring"]
    if missing:
        raise ToolchainError(
            f"Python for aarch64 comes out of Debian's packages, and {', '.join(missing)} is not here; "
            "kernels for ARM cannot be executed on this machine"
        )
    state = folder / "apt"
    for name in ("lists/partial", "cache/archives/partial", "etc/apt.conf.d", "etc/preferences.d"):
        (state / name).mkdir(parents=True)
    (state / "status").touch()
    source = f"deb [arch=arm64 signed-by={keyring}] {_MIRROR} {_SUITE} main\n"
    (state / "etc" / "sources.list").write_text(source, encoding="utf-8")
    (state / "apt.conf").write_text(_APT.format(state=state), encoding="utf-8")
    variables = {**os.environ, "APT_CONFIG": str(state / "apt.conf")}
    _call(["apt-get", "update", "--quiet"], variables)
    _call(["apt-get", "install", "--quiet", "--yes", "--download-only", *_DEBIAN_PACKAGES], variables)
    for package in sorted((state / "cache" / "archives").glob("*.deb")):
        _call(["dpkg-deb", "--extract", str(package), str(folder / "root")], variables)
    shutil.rmtree(state)


def _call(command: list[str], variables: dict[str, str]) -> None:
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith(("E:", "W:"))] or [done.stderr.strip()]
        raise ToolchainError(
            f"Python for aarch64 cannot be had from {_MIRROR}: {' '.join(command[:2])}: {said[-1]:.300}; it is needed "
            f"once, and then lies in {cache_folder()}: check the network"
        )


def _command(guest: Path, cpu: str) -> list[str]:
    """Return the command of the emulated Python, without arguments.

    Of this machine's packages it sees this project's two, which are Python only; the others lie behind its own.
    """
    own = {str(Path(str(spec.origin)).parents[1]): None for name in ("compressor", "compressor_runtime")
           if (spec := importlib.util.find_spec(name)) is not None}  # fmt: skip
    path = os.pathsep.join([str(guest / "site"), *own])
    root = guest / "root"
    emulator = [
        _qemu(),
        "-cpu",
        cpu,
        "-L",
        str(root),
        "-E",
        f"PYTHONPATH={path}",
        "-E",
        f"{EMULATED}={cpu}",
        "-U",
        "PYTHONHOME",
    ]
    return [*emulator, str(root / "usr" / "bin" / f"python{GUEST_PYTHON}")]


def main() -> None:
    """Become the emulated process."""
    _, cpu, _, *arguments = sys.argv
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # QEMU would write one of itself
    command = [*_command(_guest(), cpu), *arguments]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()

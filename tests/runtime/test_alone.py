"""A bundle without PyTorch, the compiler and Compressor: its command, and bundles of older layouts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import compressor_runtime
import pytest
from older_bundles import with_a_run_time_of_one_file
from tiny_bundle import RUNTIME, python

import compressor
from compressor.runtime import Bundle, DamagedBundleError, load


def test_a_bundle_runs_by_itself(bundle_folder: Path, bundle: Bundle) -> None:
    code = """
sys.modules["tvm"] = None
sys.path[:] = [sys.argv[1], *(p for p in sys.path if "export/python" not in p)]
import compressor_runtime
assert compressor_runtime.__file__.startswith(sys.argv[1])
sys.exit(compressor_runtime.main(["--prompt", "the rain", "--max-tokens", "9"]))
"""
    done = python(code, str(bundle_folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(bundle.generate("the rain", max_tokens=9)) + "\n"


@pytest.mark.parametrize("start", [["compressor_runtime.py"], ["-m", "compressor_runtime"]], ids=" ".join)
def test_a_shell_starts_it_in_the_bundle_s_folder(bundle_folder: Path, bundle: Bundle, start: list[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    if "-m" in start:  # the package is imported before it could say so itself
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, *start, "--prompt", "the rain", "--max-tokens", "9"]
    done = subprocess.run(command, cwd=bundle_folder, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "".join(bundle.generate("the rain", max_tokens=9)) + "\n"), done.stderr
    assert not list(bundle_folder.rglob("__pycache__"))


def test_a_bundle_from_before_the_run_time_was_a_package(copy: Path, bundle: Bundle) -> None:
    with_a_run_time_of_one_file(copy)
    text = "".join(bundle.generate("the rain", max_tokens=9))
    assert "".join(load(copy).generate("the rain", max_tokens=9)) == text
    code = "sys.path[:0] = [sys.argv[1]]\nimport compressor_runtime\n"
    code += "text = compressor_runtime.load(sys.argv[1]).generate('the rain', max_tokens=9)\n"
    code += "print(compressor_runtime.__file__, ''.join(text))"
    done = python(code, str(copy))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{copy / 'compressor_runtime.py'} {text}\n"
    (copy / "compressor_runtime.py").write_text("")
    with pytest.raises(DamagedBundleError, match=r"compressor_runtime\.py: 0 bytes, the manifest says"):
        load(copy)


def test_tvm_can_be_imported_after_a_bundle_was_loaded(bundle_folder: Path) -> None:
    code = "sys.path[:0] = [sys.argv[2]]\nfrom compressor_runtime import load\nload(sys.argv[1])\nimport tvm, tvm.relax"
    done = python(code, str(bundle_folder), str(RUNTIME.parent))
    assert done.returncode == 0, done.stderr[-2000:]


FORKS = """
import os
from compressor_runtime import RequestError, load
bundle = load(sys.argv[1], threads=2)
def in_a_fork():
    pid = os.fork()
    if pid == 0:
        try:
            sys.exit("".join(load(sys.argv[1], threads=2).generate("the rain", max_tokens=9)))
        except RequestError as error:
            sys.exit(str(error))
    os.waitpid(pid, 0)
in_a_fork()
text = "".join(bundle.generate("the rain", max_tokens=9))
in_a_fork()
print(text)
"""


def test_a_forked_process_computes_or_says_why_not(bundle_folder: Path, bundle: Bundle) -> None:
    done = python(f"sys.path[:0] = [{str(RUNTIME.parent)!r}]\n{FORKS}", str(bundle_folder))
    text = "".join(bundle.generate("the rain", max_tokens=9))
    assert done.stdout == text + "\n" and done.stderr.startswith(text + "\n"), done.stderr
    assert "forked from one that had computed with a bundle" in done.stderr[len(text) :]


def test_generating_does_not_import_torch_where_it_is_installed(bundle_folder: Path) -> None:
    code = """
import sys
sys.path[:0] = [sys.argv[2]]
import compressor_runtime
print("".join(compressor_runtime.load(sys.argv[1]).generate("the rain", max_tokens=9)) != "", "torch" in sys.modules)
import torch, tvm_ffi, numpy
print(numpy.from_dlpack(tvm_ffi.from_dlpack(torch.arange(3))).tolist())
"""
    command = [sys.executable, "-c", code, str(bundle_folder), str(RUNTIME.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "True False\n[0, 1, 2]\n", done.stderr


@pytest.fixture
def run_main(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = compressor_runtime.main([str(a) for a in arguments])
        return code, *capsys.readouterr()

    yield run


def test_the_command_gives_one_message_and_an_exit_code(
    copy: Path, run_main: Callable[..., tuple[int, str, str]], bundle: Bundle
) -> None:
    options = ["--temperature", "1.5", "--top-k", "40", "--top-p", "0.9", "--seed", "7", "--threads", "1"]
    expected = "".join(bundle.generate("so", max_tokens=64, temperature=1.5, top_k=40, top_p=0.9, seed=7))
    assert run_main(copy, "--prompt", "so", *options) == (0, expected + "\n", "")
    code, out, error = run_main(copy, "--prompt", "so", "--top-p", "7")
    assert (code, out) == (2, "") and error.startswith("error: ") and error.count("\n") == 1
    assert run_main(copy / "nowhere", "--prompt", "so")[0] == 1
    assert run_main(copy, "--prompt", "so", "--threads", "0")[0] == 2
    (copy / "model.so").unlink()  # this process has it mapped: emptied in place, it would end the process at its exit
    (copy / "model.so").write_bytes(b"")
    assert run_main(copy, "--prompt", "so")[0] == 4


def test_the_public_api_loads_bundles(bundle_folder: Path) -> None:
    assert isinstance(compressor.load(bundle_folder), compressor.Bundle)

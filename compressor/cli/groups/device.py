"""The command `device`: what kernels are timed and bundles checked on."""

from __future__ import annotations

from pathlib import Path

import click

from compressor.cli.invocation import emit, json_option, reported


@click.group()
def device() -> None:
    """Serve a device to a machine that compresses for it: `compress run --device rpc://HOST:PORT/KEY`."""


@device.command("serve")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; whoever reaches it may run "
              "programs here: prefer `ssh -L` to opening it.")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), default=9090, show_default=True, help="0 takes any free one.")
@click.option("--key", default="device", show_default=True, help="Name of this device.")
@click.option("--tracker", metavar="HOST:PORT", help="TVM's tracker to report to.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where files go [default: the temporary folder].")
@click.option("--runtime", type=click.Path(path_type=Path), help="TVM's run-time library [default: the installed one].")
@reported
def device_serve(
    host: str, port: int, key: str, tracker: str | None, folder: Path | None, runtime: Path | None
) -> None:
    """Serve this device until interrupted: time kernels, and run bundles, for one client at a time.

    Needs neither PyTorch nor the compiler.  On a device without Compressor, `python -m compressor_runtime.remote` in a
    bundle's folder, or in one that `compress device pack` made, does the same.
    """
    from compressor_runtime.remote.server import Address, ServeError, serve

    from compressor.errors import UsageError

    try:
        serve(Address(host, port), key, None if tracker is None else Address.parse(tracker), folder, runtime)
    except ServeError as error:
        raise UsageError(str(error)) from error


@device.command("pack")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--machine", type=click.Choice(["aarch64", "x86_64"]), default="aarch64", show_default=True)
@json_option
@reported
def device_pack(folder: Path, machine: str, as_json: bool) -> None:
    """Write into the new FOLDER what serves a device of another kind: copy it there, 6 MB."""
    import shutil

    from compressor.export.publish import publishing
    from compressor.host.resources import runtime_files
    from compressor.host.wheels import tvm_runtime

    library = tvm_runtime(machine) / "libtvm_runtime.so"
    with publishing(folder) as partial:
        for name, source in [*runtime_files().items(), (f"lib/{library.name}", library)]:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, partial / name)
    command = "pip install numpy apache-tvm-ffi==0.1.14.post1 && python -m compressor_runtime.remote"
    emit(
        as_json, {"folder": str(folder), "start": command}, lambda: click.echo(f"copy {folder} there; in it: {command}")
    )

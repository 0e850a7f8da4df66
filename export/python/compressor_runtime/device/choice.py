"""Find out whether a bundle's kernels run here: on the CPU, or on a GPU that has room for the weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from compressor_runtime.device.driver import Driver, serves
from compressor_runtime.errors import BundleError, RequestError
from compressor_runtime.manifest import field, is_cuda, items


def choose_device(root: Path, manifest: dict[str, Any], device: str | None) -> Driver | None:
    """Return the GPU that a bundle's kernels run on, None for the CPU; nothing is loaded yet.

    Args:
        device: "cpu", "cuda" (the first GPU), "cuda:1", ...; None takes what the kernels are for.
    Raises:
        RequestError: the kernels are for another kind of device, or there is no such kind.
        BundleError: there is no driver or no GPU, the GPU is one that the kernels were not made for, or its free memory
            does not hold the weights.
    """
    named = re.fullmatch(r"cpu|cuda(?::(\d{1,3}))?", device) if isinstance(device, str) else None
    if device is not None and named is None:
        raise RequestError(f"device={device!r:.80}: give 'cpu', 'cuda' or 'cuda:1'")
    made_for, wanted = "cuda" if is_cuda(manifest) else "cpu", None if named is None else named[0].partition(":")[0]
    if wanted not in (None, made_for):
        other = "cuda" if made_for == "cpu" else "x86"
        raise RequestError(
            f"{root}: device={device!r}: the bundle has kernels for {made_for}; compress again with `target: {other}`"
        )
    if made_for == "cpu":
        return None
    driver = Driver(int(named[1] or 0) if named is not None else 0)
    archs = items(manifest, "cuda_capabilities", str)
    if not all(re.fullmatch(r"(sm|compute)_\d{2,3}", arch) for arch in archs) or not serves(archs, driver.capability):
        major, minor = driver.capability
        raise BundleError(
            f"{root}: cuda:{driver.index} has compute capability {major}.{minor}, and the kernels are for "
            f"{', '.join(archs)}; compress again with `target: {{cuda: {{arch: any}}}}`, or take another GPU"
        )
    (free, total), weight_bytes = driver.memory(), field(manifest, "weight_bytes", int)
    if weight_bytes > free:
        raise BundleError(
            f"{root}: the weights take {weight_bytes} bytes, and cuda:{driver.index} has {free} of its {total} bytes "
            "free; end what else uses the GPU, or compress to fewer bits"
        )
    return driver

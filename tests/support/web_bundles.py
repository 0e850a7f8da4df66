"""Bundles for browsers in tests: their tensors, and their run-time in Node."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compressor.host.tensor_files import DTYPES


def web_tensors(bundle: Path) -> dict[str, Tensor]:
    """Return all tensors of a bundle, by name."""
    weights = json.loads((bundle / "manifest.json").read_text())["weights"]
    content = np.concatenate([np.fromfile(bundle / shard["file"], np.uint8) for shard in weights["shards"]])
    held = torch.from_numpy(content)
    return {
        name: held[t["offset"] : t["offset"] + t["bytes"]].clone().view(DTYPES[t["dtype"]]).reshape(t["shape"])
        for name, t in weights["tensors"].items()
    }


def in_node(bundle: Path, body: str, given: Any) -> Any:
    """Return what the body of a function of ``model`` and ``given`` returns in Node, in WebAssembly."""
    script = f"""
      const [bundle, given] = JSON.parse(process.argv[1]);
      const {{ load }} = await import(`file://${{bundle}}/runner.js`);
      const model = await load(bundle);
      const work = async () => {{ {body} }};
      console.log(JSON.stringify(await work()));
      process.exit();
    """
    command = ["node", "--input-type=module", "-e", script, json.dumps([str(bundle), given])]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

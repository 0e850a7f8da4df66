"""Write a bundle's README.md as a model card: what the hub reads, what was measured, how to run it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from compressor.report.figures import COMPARED, STATED, data_label, figure, interval_text, ratio
from compressor.report.sites import bits_a_weight

_TASKS = {"decoder": "text-generation", "encoder": "feature-extraction", "seq2seq": "text2text-generation"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_TAKEN_OVER = ("license", "license_name", "license_link", "language")
"""Fields of the dense model's card that hold for what is made of it."""
_LARGEST_CARD = 1 << 20
_MEANT = re.compile(r"([\\`*_{}\[\]<>#|&~!$])")


def model_card(manifest: Mapping[str, Any], metrics: Mapping[str, Any], source: Path | None, how_to_run: str) -> str:
    """Return the card, Markdown with the hub's metadata in front.

    Args:
        metrics: measured figures by their JSON names; empty where nothing was measured.
        source: folder of the dense model; None where there is none.
        how_to_run: text that follows the figures, with a heading of its own that is left out here; empty for none.
    """
    heading, _, rest = how_to_run.partition("\n")
    body = rest if heading.startswith("# ") else how_to_run
    name = str(manifest["model"].get("name") or "model")
    base = base_model(manifest)
    of = f"[{_plain(base)}](https://huggingface.co/{base})" if base else _plain(name)
    parts = [
        f"---\n{yaml.safe_dump(metadata(manifest, source), sort_keys=False, allow_unicode=True)}---\n",
        f"# {_plain(name)}, compressed\n",
        f"{of}, in {', '.join(map(_plain, manifest.get('formats') or ['dense']))}; "
        "`report.html` shows what was asked, what came out, and how it was checked.\n",
        _figures(manifest, metrics),
    ]
    parts += ["## How to run it\n", body.strip("\n")] if body.strip() else []
    return "\n".join(parts) + "\n"


def base_model(manifest: Mapping[str, Any]) -> str | None:
    """Return the hub's id of the dense model; None for folders and shipped models, which no hub knows by that name."""
    name = manifest.get("recipe", {}).get("model")
    return name if isinstance(name, str) and _HUB_ID.fullmatch(name) and not Path(name).exists() else None


def metadata(manifest: Mapping[str, Any], source: Path | None) -> dict[str, Any]:
    """Return what the hub reads of a card: base model and relation, library, task, tags, licence where it is known."""
    found: dict[str, Any] = {}
    if (base := base_model(manifest)) is not None:
        found |= {"base_model": base, "base_model_relation": "quantized"}
    found["library_name"] = "compressor"
    if (task := _task(manifest)) is not None:
        found["pipeline_tag"] = task
    tags = ["compressor", *sorted({fmt.lower() for fmt in manifest.get("formats") or []})]
    passes = [next(iter(entry)) for entry in manifest.get("recipe", {}).get("passes") or [] if entry]
    found["tags"] = list(dict.fromkeys([*tags, *map(str, passes)]))
    return found | _of_the_dense_card(source)


def _task(manifest: Mapping[str, Any]) -> str | None:
    model = manifest["model"]
    if (model.get("encoder_source") or {}).get("reads") == "audio":
        return "automatic-speech-recognition"
    if manifest["kind"] == "module":
        return "zero-shot-image-classification" if model.get("pair") else None
    return _TASKS.get(manifest["kind"])


def _of_the_dense_card(source: Path | None) -> dict[str, Any]:
    """Read a dense model's card as data; a card that cannot be read says nothing."""
    try:
        if source is None or not source.is_dir() or (source / "README.md").stat().st_size > _LARGEST_CARD:
            return {}
        text = (source / "README.md").read_text(encoding="utf-8")
        found = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
        read = yaml.safe_load(found[1]) if found else None
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    known = read if isinstance(read, dict) else {}
    return {key: known[key] for key in _TAKEN_OVER if isinstance(known.get(key), str | list)}


def _figures(manifest: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Return what was measured, as tables."""
    rows = []
    for what, key, form in COMPARED:
        ours, dense = metrics.get(key), metrics.get(f"dense_{key}")
        if ours is not None:
            rows.append((what, "" if dense is None else figure(dense, form), figure(ours, form), ratio(ours, dense)))
    lines = _table(("", "dense", "compressed", "ratio"), rows) if rows else []
    stated = [
        (what, figure(metrics[key], form), interval_text(metrics, key, form))
        for what, key, form in STATED
        if metrics.get(key) is not None
    ]
    bits = bits_a_weight(manifest)
    if bits is not None:
        stated.insert(0, ("bits a weight, of all that is stored", f"{bits:.3f}", ""))
    lines += ["", *_table(("", "figure", "95% confidence"), stated)] if stated else []
    told = ["", _where(manifest, metrics)] if len(rows) + len(stated) > 1 else []
    return "\n".join([*lines, *told, ""])


def _where(manifest: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Say on what, and on which machine, figures were measured."""
    label = data_label(manifest.get("recipe", {}).get("evaluation"))
    count = next(
        (f"{metrics[key]:,} {key}" for key in ("tokens", "texts", "images", "sounds") if metrics.get(key)), None
    )
    on = f"Quality: {count} of {_plain(label)}. " if count else ""
    if "threads" not in metrics:
        return f"{on}Speed was not measured."
    timed = f"{_plain(str(metrics.get('cpu')))}, {metrics['threads']} threads, medians of repeats"
    return f"{on}Speed: {timed}; dense is PyTorch eager float32."


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    marks = "|---|" + "---:|" * (len(headings) - 1)
    first, *others = (f"| {' | '.join(map(_plain, row))} |" for row in (headings, *rows))
    return [first, marks, *others]


def _plain(text: str) -> str:
    """Return text in which nothing means anything to Markdown, on one line."""
    return _MEANT.sub(r"\\\1", " ".join(text.split()))

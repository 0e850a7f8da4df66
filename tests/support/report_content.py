"""Content of a report with all that a run can leave, and names that would do harm if they were not escaped."""

from __future__ import annotations

from typing import Any

HOSTILE = "</style><script>fetch('https://evil.example')</script><img src=x onerror=alert(1)>\u202e\x00\ud800 & \"'"
SECTIONS = (
    "Asked, and what came out", "Dense against compressed", "Gates", "Notes", "Linears: error and bits", "Passes",
    "Plan against actual", "Search", "Drafts", "Roofline", "Kernels", "Provenance",
)  # fmt: skip
PEAKS = {"peak_flop": 1e-12, "peak_int8_op": 2.5e-13, "peak_read_byte": 5e-11, "cached_read_byte": 1e-11}
KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def whole_content(layers: int = 4, name: str = HOSTILE) -> dict[str, Any]:
    """Return content with every section; ``name`` stands wherever somebody else chose a name."""
    manifest = whole_manifest(layers, name)
    outcome = {
        **whole_metrics(),
        "gate_results": [
            {"metric": "kl_divergence", "expected": "<= 0.02", "found": "measured 0.0151", "passed": True},
            {"metric": "decode_tokens_per_s", "expected": ">= 2x dense", "found": f"1.5x {name}", "passed": False},
        ],
        "passes": [
            {"index": 0, "name": "capture", "seconds": 0.0, "weight_bytes": 6_958_080, "blocks": 0, "reused": 0},
            {"index": 1, "name": name, "seconds": 47.9, "weight_bytes": 2_060_288, "blocks": 10, "reused": 9},
        ],
        "predictions": {
            "weight_bytes": {"predicted": 2_060_288.0, "measured": 2_060_288},
            "compile": {"predicted": 21.0, "measured": 76.2},
            "seconds": {"predicted": 53.0, "measured": 463.0},
        },
        "fronts": [
            {"measure": "latency", "unit": " ms", "whole": 5.0, "score": "kl_divergence", "points": _points(name)}
        ],
        "checks": [
            {"name": "smoke test", "passed": True, "detail": name},
            {"name": "kernels for AVX2", "passed": None, "detail": "not executed"},
        ],
        "notes": [f"the machine is busy {name}"],
    }
    layer = {"name": name, "count": 5, "ops": 3.3e6, "bytes": 840_000, "binds": "memory", "ms": 0.0084}
    phase = {"phase": "decode", "tokens": 1, "layers": [layer], "ms": 0.042, "tokens_per_s": 23_800.0}
    machine = {"cpu": f"Zen {name}", "peaks": PEAKS}
    digest = {"manifest_sha256": "ab" * 32}
    return {"outcome": outcome, "manifest": manifest, "rooflines": [phase], "machine": machine, **digest}


def whole_metrics() -> dict[str, Any]:
    """Return figures as a run measures them of a decoder."""
    ratio = {"median": 7.5, "interval": [3.54, 26.3]}
    return {
        "perplexity": 13.748, "dense_perplexity": 13.592, "kl_divergence": 0.0150997,
        "kl_divergence_interval": [0.0148276, 0.0153718], "top1_agreement": 0.927, "tokens": 16_383,
        "top1_agreement_interval": [0.9229, 0.9309], "weight_bytes": 2_060_288, "dense_weight_bytes": 6_958_080,
        "bundle_bytes": 6_523_025, "decode_tokens_per_s": 33.3, "dense_decode_tokens_per_s": 5.1, "threads": 2,
        "latency_ms": 6.11, "dense_latency_ms": 153.4, "decode_spread": 0.12, "cpu": "Zen 5",
        "timings": {
            "confidence": 0.95,
            "figures": {"decode_tokens_per_s": {"interval": [22.1, 123.0], "samples": [22.1] * 7}},
            "ratios": {"decode_tokens_per_s": ratio, "first_token_ms": {"median": 0.27, "interval": None}},
        },
    }  # fmt: skip


def whole_manifest(layers: int, name: str) -> dict[str, Any]:
    """Return a manifest with the fields that pages read."""
    sites = [
        {
            "site": f"model.layers.{layer}.{kind}", "pass_name": "gptq", "format": "W4A16_G128", "note": "",
            "bytes_before": 131_072, "bytes_after": 33_792, "error": 1e-4 * (layer + 1 + place), "error_of": "output",
        }
        for layer in range(layers)
        for place, kind in enumerate(KINDS)
    ]  # fmt: skip
    sites.append({**sites[0], "site": name, "note": f"tied {name}", "error": float("nan")})
    return {
        "format": "compressor bundle", "kind": "decoder", "schema_version": 2, "weight_bytes": 2_060_288,
        "dense_weight_bytes": 6_958_080, "bundle_bytes": 6_523_025, "formats": ["W4A16_G128"], "sites": sites,
        "model": {"name": name, "architecture": name, "parameters": 3_476_224, "speculate": "lookup", "skips": [name]},
        "recipe": {
            "model": name, "seed": 0, "target": {"x86": {"isa": "native"}}, "passes": [{"gptq": {"scheme": name}}],
            "calibration": {"name": name}, "evaluation": {"text": [name]},
        },
        "calibration": {"source": name, "tokens": 32_768},
        "kernels": [{"name": name, "evidence": "executed", "format": "W4A16_G128"}],
        "versions": {"torch": "2.13"}, "files": {"model.so": {}},
    }  # fmt: skip


def _points(name: str) -> list[dict[str, Any]]:
    places = [(1.0, 0.9, True, False), (2.0, 0.3, True, True), (2.5, 0.6, False, False), (4.0, 0.1, True, False)]
    return [
        {
            "cost": cost,
            "score": score,
            "error": 0.01,
            "choice": [name],
            "uniform": False,
            "chosen": built,
            "front": front,
        }
        for cost, score, front, built in places
    ]

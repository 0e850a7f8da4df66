"""Put a page together: head with the style sheet and the policy, and the sections that there is data for."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from compressor.host.resources import resource
from compressor.report.page import costs, sections
from compressor.report.page.elements import Content, Html, element, joined
from compressor.version import __version__

_HALF = ("Gates", "Notes")  # sections that stand side by side on a wide page


def report_page(content: Mapping[str, Any]) -> str:
    """Return the report about one bundle, HTML.

    Args:
        content: as of :func:`compressor.report.bundle_pages.page_content`; what is missing has no section.
    """
    outcome, manifest = content.get("outcome") or {}, content.get("manifest") or {}
    machine = content.get("machine") or {}
    found: list[tuple[str, Content]] = [
        ("Asked, and what came out", sections.asked_and_got(outcome, manifest)),
        ("Dense against compressed", sections.compared(outcome, manifest)),
        ("Gates", sections.gates(outcome, manifest)),
        ("Notes", sections.notes(outcome, manifest)),
        ("Linears: error and bits", sections.sites(outcome, manifest)),
        ("Passes", costs.passes(outcome, manifest)),
        ("Plan against actual", costs.plan(outcome, manifest)),
        ("Search", costs.search(outcome, manifest)),
        ("Drafts", costs.drafts(outcome, manifest)),
        ("Roofline", costs.roofline(content.get("rooflines") or [], machine.get("peaks") or {}, outcome)),
        ("Kernels", costs.kernels(outcome, manifest)),
        ("Provenance", costs.provenance(machine, manifest, content.get("manifest_sha256") or "")),
    ]
    model = str(manifest.get("model", {}).get("name") or "model")
    return page(f"{model}, compressed", [sections.tiles(outcome, manifest)], found, _verdict(outcome))


def page(title: str, top: Content, found: Iterable[tuple[str, Content]], subtitle: Content = None) -> str:
    """Return a page of one file, which asks for no other and runs no script.

    Args:
        found: headings and sections; those without content are left out.
    """
    style = (resource("export") / "report" / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        Html(f"<style>{style}</style>"),
    )
    shown = [
        element("section", element("h2", heading), content, class_="half" if heading in _HALF else None)
        for heading, content in found
        if content
    ]
    made = element("p", f"made by Compressor {__version__}", class_="soft")
    header = element("header", element("h1", element("bdi", title)), subtitle)
    body = element("body", header, top, element("main", shown), element("footer", made))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _verdict(outcome: Mapping[str, Any]) -> Content:
    results = outcome.get("gate_results") or []
    failed = [result["metric"] for result in results if not result["passed"]]
    if not results:
        return element("p", "The recipe has no gates.")
    if failed:
        return element("p", element("span", f"FAILED: {', '.join(failed)}", class_="bad"))
    told = f"All {len(results)} gates passed" if len(results) > 1 else "The gate passed"
    return joined([element("p", element("span", f"{told}.", class_="good"))])

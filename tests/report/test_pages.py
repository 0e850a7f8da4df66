"""Pages about bundles: in a browser, with names that would do harm, and with next to nothing."""

from __future__ import annotations

import html.parser
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from report_content import HOSTILE, SECTIONS, whole_content, whole_manifest, whole_metrics

from compressor.export.manifest import finite
from compressor.report.model_card import model_card
from compressor.report.page.charts import Axis, Bar, Dot, Line, bars, scatter
from compressor.report.page.document import report_page
from compressor.report.page.elements import element, escaped
from compressor.report.sites import bits_a_weight, dense_bits

LARGEST_BYTES = 400_000
ALLOWED = {"class", "scope", "tabindex", "role", "aria-label", "title", "lang", "charset", "http-equiv", "content"}
ALLOWED |= {"name", "rel", "href", "xmlns", "viewbox", "d", "transform", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy"}
ALLOWED |= {"r", "width", "height"}


class Reader(html.parser.HTMLParser):
    """Collect tags, attributes and text, and check that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, set[str]] = {}
        self.open: list[str] = []
        self.texts: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for key, value in attrs:
            self.attributes.setdefault(key, set()).add(value or "")
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        self.texts.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_names_are_text_and_there_is_nothing_to_run_or_fetch() -> None:
    page = report_page(finite(whole_content()))
    reader = read(page)
    assert not {"script", "img", "iframe", "a", "form", "object", "base"} & set(reader.tags)
    assert set(reader.attributes) <= ALLOWED and reader.attributes["href"] == {"data:,"}
    assert "default-src 'none'" in "".join(reader.attributes["content"])
    told = "".join(reader.texts)
    assert "<script>fetch('https://evil.example')</script>" in told and "\x00" not in page
    page.encode()  # no surrogate is left
    assert reader.headings == [*SECTIONS]


def test_only_sections_with_data_appear() -> None:
    content = whole_content(name="plain")
    for key in ("fronts", "gate_results", "notes", "passes", "predictions"):
        del content["outcome"][key]
    content["manifest"]["model"].pop("speculate")
    content["manifest"]["sites"] = []
    reader = read(report_page({**content, "rooflines": []}))
    wanted = ["Asked, and what came out", "Dense against compressed", "Kernels", "Provenance"]
    assert reader.headings == wanted
    assert read(report_page({})).headings == ["Provenance"]


def test_figures_are_those_of_the_terminal() -> None:
    told = " ".join(read(report_page(finite(whole_content(name="plain")))).texts)
    for text in ("0.0151 nats", "0.0148 to 0.0154", "6.96 MB", "0.30x", "92.70%", "4.741", "4.12", "measured 0.0151"):
        assert text in told, text


@pytest.mark.parametrize("experts", [1, 40])
def test_a_large_model_has_a_page_of_bounded_size(experts: int) -> None:
    content = whole_content(layers=120, name="plain")
    sites = content["manifest"]["sites"]
    content["manifest"]["sites"] = [
        {**site, "site": site["site"].replace("mlp", f"mlp.experts.{number}")}
        for site in sites
        for number in range(experts)
    ]
    page = report_page(finite(content))
    assert len(page.encode()) < LARGEST_BYTES
    assert f"all {len({site['site'] for site in content['manifest']['sites']}):} linears" in page


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (400, "dark"), (1400, "light"), (1400, "dark")])
def test_a_browser_shows_it_without_a_request_or_a_cut(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    file = tmp_path / "report.html"
    file.write_text(report_page(finite(whole_content())), encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
    asked, said = [], []
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.goto(file.as_uri())
    assert asked == [file.as_uri()] and said == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("[...document.querySelectorAll('h2')].map(h => h.textContent)") == [*SECTIONS]
    assert page.evaluate(f"[...document.querySelectorAll('svg text')].filter({OUTSIDE}).map(t => t.textContent)") == []
    low = page.evaluate(CONTRAST)
    assert low == []
    context.close()


OUTSIDE = """text => {
  const box = text.getBoundingClientRect(), whole = text.closest('svg').getBoundingClientRect();
  return box.left < whole.left - 1 || box.right > whole.right + 1 || box.bottom > whole.bottom + 1;
}"""
CONTRAST = """() => {
  const channel = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const bright = rgb => { const [r, g, b] = rgb.map(channel); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const parse = text => text.match(/[0-9.]+/g).map(Number);
  const ground = node => {
    for (; node; node = node.parentElement) {
      const found = parse(getComputedStyle(node).backgroundColor);
      if (found.length === 3) return found;
    }
  };
  return [...document.querySelectorAll('td, th, p, dt, dd, summary, b, span')].filter(node => {
    if (!node.textContent.trim() || !node.offsetParent) return false;
    const [a, b] = [bright(parse(getComputedStyle(node).color).slice(0, 3)), bright(ground(node))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
  }).map(node => node.className + ': ' + node.textContent.slice(0, 40));
}"""
"""WCAG 2.2, 1.4.3: text and ground differ by 4.5 at least."""


@given(text=st.text())
@settings(max_examples=100, deadline=None)
def test_any_text_is_shown_as_it_is(text: str) -> None:
    reader = read(element("p", text, title=text))
    assert reader.tags == ["p"] and set(reader.attributes) == {"title"}
    shown = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]", "\ufffd", text)
    assert "".join(reader.texts) == shown.replace("\r", "\r") or "\r" in text
    assert "<" not in escaped(text) and '"' not in escaped(text)


@given(ends=st.tuples(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12)), log=st.booleans(), share=st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_ticks_lie_on_the_axis(ends: tuple[float, float], log: bool, share: float) -> None:
    least, most = (1e-3, 1e-3 + ends[1]) if log else (ends[0], ends[0] + max(ends[1], abs(ends[0]) * 1e-6))
    axis = Axis("x", least, most, 10, 110, str, log)
    places = [axis.place(tick) for tick in axis.ticks()]
    assert places == sorted(places) and all(9.9 <= place <= 110.1 for place in places)
    assert len(places) <= 9 and (log or len(places) >= 2)
    value = least * (most / least) ** share if log else least + share * (most - least)
    assert axis.place(value) == pytest.approx(10 + 100 * share, abs=0.05)


def test_charts_say_what_they_show_to_those_who_do_not_see() -> None:
    drawn = bars("time", "seconds", [Bar("a", 0.0, "0 s"), Bar("b", 3.0, "3 s", mark=4.0)], str, ("", "time", "plan"))
    reader = read(drawn)
    assert "img" in reader.attributes["role"] and "time, plan: a, 0 s; b, 3 s, 4.0" in reader.texts
    assert {"title", "desc", "table"} <= set(reader.tags)
    one = scatter(
        "s", ("x", str), ("y", str), [Dot(5, 5, "only")], ("", "x", "y"), lines=[Line([(5, 5), (6, 6)], "roof")]
    )
    assert read(one).tags.count("circle") == 1


def test_notes_do_not_tell_where_the_user_lives() -> None:
    content = whole_content(name="plain")
    content["outcome"]["notes"] = [f"blocks came from {Path.home()}/.cache/compressor"]
    assert "blocks came from ~/.cache/compressor" in read(report_page(finite(content))).texts


def test_bits_count_all_that_is_stored() -> None:
    manifest = whole_manifest(1, "plain")
    assert bits_a_weight(manifest) == 8 * 2_060_288 / 3_476_224
    assert dense_bits(manifest) == 16  # though norms have 32, and all together 16.01
    assert bits_a_weight({"model": {}}) is None is dense_bits({"model": {}, "dense_weight_bytes": 5})


# --- the card


def card(manifest: dict[str, Any], source: Path | None = None, **metrics: Any) -> str:
    return model_card(manifest, {**whole_metrics(), **metrics}, source, "# tiny\n\nRun it so.\n")


def test_the_card_is_one_that_the_hub_reads() -> None:
    manifest = whole_manifest(1, "plain")
    manifest["recipe"]["model"] = "org/Some-Model_1.5"
    text = card(manifest)
    data = ModelCard(text).data
    assert (data.base_model, data["base_model_relation"]) == ("org/Some-Model_1.5", "quantized")
    assert (data.library_name, data.pipeline_tag) == ("compressor", "text-generation")
    assert data.tags == ["compressor", "w4a16_g128", "gptq"]
    assert "| KL divergence | 0.0151 nats | 0.0148 to 0.0154 |" in text and "| 4.741 |" in text
    assert "Quality: 16,383 tokens of plain. Speed: Zen 5, 2 threads" in text
    assert text.endswith("## How to run it\n\nRun it so.\n") and "# tiny" not in text


def test_hostile_names_stay_text_in_the_card() -> None:
    manifest = whole_manifest(1, f"{HOSTILE}\n---\nlicense: mit\n---\n# | x [a](javascript:b)")
    text = card(manifest).encode("utf-8", "replace").decode()
    front = yaml.safe_load(text.split("---\n")[1])
    assert set(front) == {"library_name", "pipeline_tag", "tags"}  # a folder's name is not an id of the hub
    assert not re.search(r"(?<!\\)<(script|img)|(?<!\\)\]\(javascript|^license", text, re.MULTILINE)


def test_the_licence_comes_from_the_dense_model_s_card(tmp_path: Path) -> None:
    manifest = whole_manifest(1, "plain")
    for content, wanted in (
        (
            "---\nlicense: apache-2.0\nlanguage: [en, de]\ntags: [x]\n---\n# A",
            {"license": "apache-2.0", "language": ["en", "de"]},
        ),
        ("---\nlicense: {a: b}\n---\n", {}),
        ("---\n{ not yaml\n---\n", {}),
        ("no front matter", {}),
        ("---\n!!python/object/apply:os.system [id]\n---\n", {}),
    ):
        (tmp_path / "README.md").write_text(content)
        front = yaml.safe_load(card(manifest, tmp_path).split("---\n")[1])
        assert {key: front[key] for key in ("license", "language") if key in front} == wanted


def test_a_card_without_measurements_says_so() -> None:
    manifest = whole_manifest(1, "plain")
    text = model_card(manifest, {"weight_bytes": 2_060_288, "dense_weight_bytes": 6_958_080}, None, "Run.")
    assert "Speed was not measured." in text and "KL" not in text and "0.30x" in text


def test_numbers_that_json_lacks_are_shown() -> None:
    content = whole_content(name="plain")
    content["outcome"] |= {"perplexity": math.inf, "kl_divergence": math.nan}
    page = report_page(finite(json.loads(json.dumps(content))))
    assert "perplexity" in page and "Traceback" not in page

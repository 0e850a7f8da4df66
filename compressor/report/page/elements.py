"""Build HTML from data: whatever is not an element already is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = ("meta", "link", "line", "rect", "circle", "path")  # written without an end


class Html(str):
    """Text that is HTML, and is not escaped again."""

    __slots__ = ()


Content: TypeAlias = "str | Html | Iterable[Content] | None"


def element(tag: str, *content: Content, **attributes: object) -> Html:
    """Return an element; ``class_`` stands for ``class``, ``aria_label`` for ``aria-label``; None leaves one out."""
    names = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    written = "".join(f' {name}="{escaped(str(value))}"' for name, value in names.items())
    if tag in _VOID and not content:
        return Html(f"<{tag}{written}{'' if tag in ('meta', 'link') else '/'}>")
    return Html(f"<{tag}{written}>{joined(content)}</{tag}>")


def joined(content: Content) -> Html:
    """Return content as HTML: elements as they are, text escaped, one after another."""
    if content is None:
        return Html("")
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        return Html(escaped(content))
    return Html("".join(joined(part) for part in content))


def escaped(text: str) -> str:
    """Return text without meaning to HTML; characters that no page can hold become U+FFFD."""
    return html.escape(_UNSEEN.sub("\ufffd", text), quote=True)


def name(text: str) -> Html:
    """Return a name that came from somebody else: it may break anywhere, and does not turn the text around it."""
    return element("bdi", text, class_="name")


def table(
    headings: Sequence[str], rows: Iterable[Sequence[Content]], *, left: Sequence[int] = (0,), caption: str = ""
) -> Html:
    """Return a table that scrolls by itself where it is too wide; the first cell of a row is its heading.

    Args:
        left: columns of text; the others are figures.
    """
    kinds = ["left" if column in left else "figure" for column in range(len(headings))]
    head = [element("th", text, class_=kind, scope="col") for text, kind in zip(headings, kinds, strict=True)]
    body = []
    for row in rows:
        cells = [
            element("td" if column else "th", cell, class_=kind, scope=None if column else "row")
            for column, (cell, kind) in enumerate(zip(row, kinds, strict=True))
        ]
        body.append(element("tr", cells))
    shown = element("caption", caption) if caption else None
    whole = element("table", shown, element("thead", element("tr", head)), element("tbody", body))
    return element("div", whole, class_="wide", tabindex="0", role="group", aria_label=caption or "table")


def folded(summary: str, *content: Content) -> Html:
    """Return content that is shown once the reader asks for it."""
    return element("details", element("summary", summary), content)


def pairs(rows: Iterable[tuple[str, Content]]) -> Html:
    """Return a list of names and values."""
    return element("dl", [element("div", element("dt", key), element("dd", value)) for key, value in rows])

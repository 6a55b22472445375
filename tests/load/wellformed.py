"""Checks HTML pages as far as a browser would not complain."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

_VOID = {"meta"}


class _Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002 - inherited
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def check_page(text: str) -> None:
    """Every tag is closed, every SVG is XML with finite numbers, and nothing comes from elsewhere."""
    balance = _Balance()
    balance.feed(text)
    assert balance.open == []
    assert not re.search(r"<(link|img|script|iframe|image)\b|\b(src|href)=|url\(|@import", text)
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
        assert not re.search(r'="[^"]*\b(nan|inf)\b', svg)

"""Fails if a page of the built site asks for a script, style, font, picture or frame from another place.

Usage: python docs/check_site.py build/site
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
"""What a browser fetches by itself; a link that a reader follows is none of it."""

_NAMED_ONLY = {"canonical", "alternate", "next", "prev"}
"""Kinds of `link` that name a page and load nothing."""

_OUTSIDE = re.compile(r"(?:https?:)?//")
_CSS_LOAD = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        address = given.get(_LOADED.get(tag, ""), "")
        if _OUTSIDE.match(address) and given.get("rel") not in _NAMED_ONLY:
            self.found.append(address)
        # The theme's script fetches mermaid for a page that has a diagram.
        if "mermaid" in given.get("class", "").split():
            self.found.append("mermaid")
        self.found += _CSS_LOAD.findall(given.get("style", ""))
        self._in_style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.found += _CSS_LOAD.findall(data)

    def handle_endtag(self, _: str) -> None:
        self._in_style = False


def loads(page: str) -> list[str]:
    """What an HTML page loads from another place."""
    parser = _Loads()
    parser.feed(page)
    parser.close()
    return parser.found


def outside(site: Path) -> Iterator[str]:
    """Each thing that a file of the site loads from another place, behind the file's name.

    Raises:
        ValueError: there is no page.
    """
    pages = sorted(site.rglob("*.html"))
    if not pages:
        raise ValueError(f"{site} has no page: build the site first, with make docs")
    for page in pages:
        yield from (f"{page.relative_to(site)}: {address}" for address in loads(page.read_text(encoding="utf-8")))
    for sheet in sorted([*site.rglob("*.css"), *site.rglob("*.svg")]):
        text = sheet.read_text(encoding="utf-8")
        yield from (f"{sheet.relative_to(site)}: {address}" for address in _CSS_LOAD.findall(text))


def main() -> None:
    if found := list(outside(Path(sys.argv[1]))):
        sys.exit("\n".join(["the site loads something from another place:", *found]))


if __name__ == "__main__":
    main()

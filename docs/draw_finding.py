"""Draws the text of a finding as a picture of a terminal.

Usage: python docs/draw_finding.py docs/data/vllm-sleep.txt docs/vllm-leak.svg "a title"
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from lowtide.reports.hanging_text import HangingText, Parts

WIDTH = 112
"""Characters of a line: enough for the longest names, few enough to be read at the width of a page."""

# rich's own format asks a server for its font, and cuts the last line's descenders off.
CODE_FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
    font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
    font-size: {char_height}px;
    line-height: {line_height}px;
    font-variant-east-asian: full-width;
}}
.{unique_id}-title {{ font-size: 17px; font-weight: bold; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""

THEME = TerminalTheme(
    (27, 31, 36),
    (222, 226, 230),
    [
        (27, 31, 36),
        (248, 113, 113),
        (134, 239, 172),
        (253, 224, 71),
        (147, 197, 253),
        (216, 180, 254),
        (103, 232, 249),
        (222, 226, 230),
    ],
)

STYLES = (
    (re.compile(r"^()([\w-]+/[\w-]+)"), "bold red"),
    (re.compile(r"^( *-> )(\S+)"), "underline yellow"),
    (re.compile(r"^( *)(remedy: .*)"), "bold green"),
    (re.compile(r"^( *)(fingerprint .*)"), "dim"),
)
"""How a line begins, and the style of what comes then."""


def styled(line: str) -> Parts:
    """Return a line of a finding's text in the terminal's colours."""
    for pattern, style in STYLES:
        if match := pattern.match(line):
            return [(match[1], ""), (match[2], style), (line[match.end() :], "")]
    return [(line, "")]


def draw(text: str, title: str) -> str:
    """The picture, as SVG that asks for nothing outside itself."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(HangingText(*map(styled, text.rstrip("\n").split("\n"))))
    return console.export_svg(title=title, theme=THEME, code_format=CODE_FORMAT, unique_id="finding")


def main() -> None:
    source, target, title = sys.argv[1:]
    Path(target).write_text(draw(Path(source).read_text(encoding="utf-8"), title), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Prose on a terminal: a line that is too long goes on below, further to the right; elsewhere it stays whole."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lowtide.reports.escaping import escape_characters

Parts = Sequence[tuple[str, str]]
"""A line in parts, each with its style."""

_HANG = 2
"""Blanks by which a line that goes on is further to the right than its beginning."""

_LEAST_WIDTH = 20
"""Below this a line is not folded any further, however narrow the terminal is."""


class HangingText:
    """One or more lines, each of them escaped and folded by itself.

    Args:
        lines: a line break within one is data, and shown as such.
        style: of all of them.

    Attributes:
        lines: what is shown, escaped.
    """

    def __init__(self, *lines: str | Parts, style: str = "") -> None:
        parts: list[Parts] = [[(line, "")] if isinstance(line, str) else line for line in lines]
        # Before rich has them, which drops some control characters without a trace.
        self.lines = [
            Text.assemble(*((escape_characters(text), its) for text, its in line), style=style) for line in parts
        ]

    def __str__(self) -> str:
        return "\n".join(line.plain for line in self.lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Return the lines, as wide as the terminal at most; whole where its console does not fold."""
        if options.no_wrap:
            yield from self.lines
            return
        for line in self.lines:
            indent = len(line.plain) - len(line.plain.lstrip(" "))
            folded = line[indent:].wrap(console, max(_LEAST_WIDTH, options.max_width - indent - _HANG))
            for turn, part in enumerate(folded):
                part.pad_left(indent + (_HANG if turn else 0))
                yield part

"""Prose on a terminal: a line that is too long goes on below, further to the right; elsewhere it stays whole."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_HANG = 2
"""Blanks by which a line that goes on is further to the right than its beginning."""

_LEAST_WIDTH = 20
"""Below this a line is not folded any further, however narrow the terminal is."""


@dataclass(frozen=True)
class HangingText:
    """One or more lines of text, each of them folded by itself."""

    text: Text

    def __str__(self) -> str:
        return self.text.plain

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines, as wide as the terminal at most; whole where its console does not fold."""
        if options.no_wrap:
            yield self.text
            return
        for line in self.text.split("\n", allow_blank=True):
            indent = len(line.plain) - len(line.plain.lstrip(" "))
            folded = line[indent:].wrap(console, max(_LEAST_WIDTH, options.max_width - indent - _HANG))
            for turn, part in enumerate(folded):
                part.pad_left(indent + (_HANG if turn else 0))
                yield part

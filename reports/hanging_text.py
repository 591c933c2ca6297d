"""Prose on a terminal: a line that is too long goes on below, further to the right; elsewhere it stays whole."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lowtide.reports.finding_lines import REORDERING

_CONTROL = re.compile(rf"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff{REORDERING}]")
"""What would act on the terminal; a report may be from anywhere, and its texts are anything."""

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
        text = self.text.copy()
        # One character for one, so that styles stay where they are.
        text.plain = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.plain)
        if options.no_wrap:
            yield text
            return
        for line in text.split("\n", allow_blank=True):
            indent = len(line.plain) - len(line.plain.lstrip(" "))
            folded = line[indent:].wrap(console, max(_LEAST_WIDTH, options.max_width - indent - _HANG))
            for turn, part in enumerate(folded):
                part.pad_left(indent + (_HANG if turn else 0))
                yield part

"""Jinja's environment of all pages: what is put into one is escaped, cut, and without what no page may have."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from lowtide.reports.escaping import escape_characters, one_line
from lowtide.reports.finding_lines import (
    amount,
    growth_cells,
    holder_text,
    hop_facts,
    in_vain,
    shared_text,
    suppression_entry,
    trend_text,
    tried_effect,
)
from lowtide.reports.out_of_memory import out_of_memory_lines
from lowtide.reports.sizes import format_amount, format_bytes

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

LONGEST = 2000
"""Characters of one text; an `assert` of a large value in a reason can have millions."""

LONGEST_COPIED = 8000
"""Characters of code that can be copied; an entry for a finding has fewer. What is longer is cut, and not offered."""


@cache
def environment() -> Environment:
    """Return what renders templates: every text in it is escaped, and what no page may have is shown as an escape.

    One for all pages: to compile the templates takes longer than to render a page of a hundred tests.
    """
    # Not at the top: whoever loads this module may never render.
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("lowtide.reports.html"),
        autoescape=True,
        finalize=_printable,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters |= {
        "size": format_bytes,
        "amount": amount,
        "facts": hop_facts,
        "holder": holder_text,
        "shared": shared_text,
        "trend": trend_text,
        "in_vain": in_vain,
        "tried_effect": tried_effect,
        "cells": growth_cells,
        "entry": suppression_entry,
        "memory_lines": out_of_memory_lines,
        "whole": _whole,
    }
    made.globals["longest_copied"] = LONGEST_COPIED
    made.globals["counted"] = format_amount
    return made


def _printable(value: object) -> object:
    """Return each text on its way into the page; what the template itself made (`Markup`) is left alone."""
    if type(value) is not str:
        return value
    if len(value) > LONGEST:
        value = f"{value[:LONGEST]}… ({len(value):,} characters)"
    return one_line(value)


def _whole(code: str) -> Markup:
    """Code that is to be copied: a part of it would be something else."""
    from markupsafe import escape

    return escape("\n".join(map(escape_characters, code.split("\n"))))

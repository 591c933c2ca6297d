"""What a page offers to be copied: it is whole, and an entry is one that lowtide takes for its finding."""

from __future__ import annotations

import re
from datetime import date
from html import unescape
from pathlib import Path

import pytest

from lowtide.leakcheck.suppressions.entries import load
from lowtide.reports import schema
from lowtide.reports.html.jinja_environment import LONGEST_COPIED
from lowtide.reports.html.page import render_html
from tests.reports.small_reports import HOSTILE, finding, report, subject

LONG_TEXTS = ("y" * 3000, '"' * 3000, "\\" * 3000, "\x7f" * 3000, "\udc80" * 3000, "\n" * 3000, "x" * (1 << 20))


@pytest.mark.parametrize("text", [HOSTILE, "\x00\x85\u2028", *LONG_TEXTS], ids=map(str, range(2 + len(LONG_TEXTS))))
def test_the_entry_to_copy_knows_its_finding_whatever_that_says(text: str, tmp_path: Path) -> None:
    leak = finding(message=text, holder=text, stage=text)
    (entry,) = [code for code in copyable(render_html(report(subject(leak)))) if "[[" in code]
    file = tmp_path / "lowtide.toml"
    file.write_text(entry.replace("TODO: ", ""))
    assert load(file).apply([leak], date(2026, 1, 1)).used


@pytest.mark.parametrize(("length", "whole"), [(3000, True), (LONGEST_COPIED, True), (LONGEST_COPIED + 1, False)])
def test_code_is_offered_to_be_copied_as_a_whole_or_not_at_all(length: int, whole: bool) -> None:
    remedy = schema.Remedy(action="<" * length, returns_bytes=1)
    leak = finding(remedy=remedy, suppressed_by="x")
    html = render_html(report(subject(leak)))
    assert copyable(html) == (["<" * length] if whole else [])
    assert (f"… ({length:,} characters)" in html) is not whole


def copyable(html: str) -> list[str]:
    """The texts beside the buttons that copy."""
    return [unescape(code) for code in re.findall(r'<div class="code"><pre><code>(.*?)</code>', html, re.DOTALL)]

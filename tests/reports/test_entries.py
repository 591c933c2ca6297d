"""What the filter of a page looks through, and that it finds what the page does not show from the start."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

import pytest

from lowtide.reports.html.entries import CHUNK, LONGEST, entries_of, filterable
from lowtide.reports.html.page import FILTERED_FROM, MOST_OF_ONE, SHOWN_FINDINGS, render_html
from tests.reports.small_reports import HOSTILE, finding, report, subject


def stored(html: str, name: str) -> Any:
    found = re.search(f'<script type="application/x-zlib" id="stored-{name}">(.*?)</script>', html)
    assert found is not None
    return json.loads(zlib.decompress(base64.b64decode(found[1])))


def test_each_finding_is_an_entry_and_so_is_a_subject_without_one() -> None:
    subjects = [
        (0, subject(finding(), finding(suppressed_by="x"), name="a")),
        (1, subject(name="b", reason="no card")),
    ]
    entries = [entry for entry, _, _ in entries_of(subjects)]
    assert [(entry.place, entry.outcome, entry.subject) for entry in entries] == [
        ("s0f0", "leak", "a"),
        ("s0f1", "suppressed", "a"),
        ("s1", "clean", "b"),
    ]
    assert entries[2].title == "no card"


@pytest.mark.parametrize(
    "word", ["tensors/module-global", "48.0 MiB", "shutdown", "engine.cache.POOL[0]", "0123456789"]
)
def test_an_entry_has_the_words_by_which_a_finding_is_looked_for(word: str) -> None:
    ((entry, _, _),) = entries_of([(0, subject(finding()))])
    assert word in f"{entry.title} {entry.details}"


def test_texts_of_any_kind_and_length_are_cut_and_can_be_written() -> None:
    long = HOSTILE * 10_000
    ((entry, _, _),) = entries_of([(0, subject(finding(message=long, holder=long, fingerprint=long), name=long))])
    assert len(entry.subject) == LONGEST
    assert len(entry.details) <= 7 * (LONGEST + 10)
    json.dumps(entry).encode()


def test_parts_are_in_chunks_in_the_order_of_the_index() -> None:
    many = subject(*(finding(fingerprint=str(turn)) for turn in range(CHUNK + 3)))
    data = filterable([(0, many)], lambda _, found, place: f"{place} {found.fingerprint if found else ''}")
    assert data["index"]["chunk"] == CHUNK
    assert len(data["index"]["entries"]) == CHUNK + 3
    assert [len(data[f"entries-{turn}"]) for turn in (0, 1)] == [CHUNK, 3]
    assert data["entries-1"][0] == f"s0f{CHUNK} {CHUNK}"


def test_a_page_that_is_read_faster_than_filtered_has_no_filter() -> None:
    assert '<form class="filter"' not in render_html(report(*[subject(name="a")] * FILTERED_FROM))
    assert '<form class="filter"' in render_html(report(*[subject(name="a")] * (FILTERED_FROM + 1)))


def test_what_is_no_element_is_said_and_found_by_the_filter() -> None:
    leaks = [finding(fingerprint=f"{turn:04}") for turn in range(SHOWN_FINDINGS)]
    html = render_html(report(subject(*leaks, name="many"), subject(finding(fingerprint="last"), name="last")))
    assert html.count('<section class="finding"') == MOST_OF_ONE + 1
    assert f"{SHOWN_FINDINGS - MOST_OF_ONE} more findings: filter, or see leakcheck.json." in html
    entries = stored(html, "index")["entries"]
    assert len(entries) == SHOWN_FINDINGS + 1
    part = stored(html, "entries-0")[SHOWN_FINDINGS - 1]
    # As an element it may be on the page already: there it has another anchor.
    assert part.startswith(f'<section class="finding" id="ms0f{SHOWN_FINDINGS - 1}">')
    assert f"{SHOWN_FINDINGS - 1:04}" in part


def test_a_part_is_escaped_as_the_page_is() -> None:
    text = "<img src=x onerror=alert(1)>"
    leaks = [finding(message=text, holder=text) for _ in range(FILTERED_FROM + 1)]
    for part in stored(render_html(report(subject(*leaks))), "entries-0"):
        assert "<img" not in part
        assert "&lt;img" in part

"""Any report that the schema allows: it is read as it was written, every rendering takes it, and no text is markup."""

from __future__ import annotations

import io
import json
import unicodedata
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import zip_longest
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from rich.console import Console

from lowtide.reports import schema, terminal
from lowtide.reports.comparison.changes import compare_reports, render_as_markdown, render_as_page, render_for_terminal
from lowtide.reports.github import render_annotations
from lowtide.reports.html.fragment import render_fragment
from lowtide.reports.html.page import render_html
from lowtide.reports.junit import render_junit
from lowtide.reports.markdown import render_markdown
from lowtide.reports.openmetrics import render_openmetrics
from lowtide.reports.perfetto import render_trace
from lowtide.reports.sarif import render_sarif
from tests.reports.generated import REPORTS, filled_report, of_type

pytestmark = pytest.mark.nightly

BOUNDED = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
"""The same examples in each run, so that a change is judged and not the day's luck; to shrink one takes a minute."""

MARKUP = "\"'><script>alert(1)</script><b onload=x>]]></style>{{ 7 }}"


def printed(part: Any) -> str:
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as text:
        console.print(part)
    return text.get()


class Skeleton(HTMLParser):
    """Each element of a page with the names of its attributes, whatever stands in them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.found.append((f"/{tag}", ()))


def texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from texts_of(each)
    elif isinstance(value, dict):
        yield from value
        yield from texts_of(list(value.values()))


class Harmless:
    """Replaces the texts of a report by words: the same one by the same word, long ones by long ones, none by none.

    Words are in the order of their texts, because a page sorts some.
    """

    def __init__(self, report: schema.Report) -> None:
        texts = sorted(set(texts_of(msgspec.to_builtins(report))))
        self._words = {text: f"w{turn:05}".ljust(len(text), "w") for turn, text in enumerate(texts)}
        # "none" is a ledger's source that a page has other words for.
        self._words |= {"": "", "none": "none"}

    def word(self, text: str) -> str:
        return self._words[text]

    def __call__(self, value: Any, kind: Any) -> Any:
        info = kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind)
        if isinstance(value, str):
            literal = isinstance(info, msgspec.inspect.LiteralType) or (
                isinstance(info, msgspec.inspect.UnionType)
                and any(isinstance(each, msgspec.inspect.LiteralType) for each in info.types)
            )
            return value if literal else self.word(value)
        if isinstance(value, msgspec.Struct):
            fields = msgspec.inspect.type_info(type(value)).fields  # type: ignore[attr-defined]
            changed = {field.name: self(getattr(value, field.name), field.type) for field in fields}
            return type(value)(**changed)
        if isinstance(value, tuple):
            return tuple(self(each, info.item_type) for each in value)
        if isinstance(value, dict):
            of = next(each for each in getattr(info, "types", (info,)) if isinstance(each, msgspec.inspect.DictType))
            return {self.word(name): self(each, of.value_type) for name, each in value.items()}
        return value


def differing(page: list[Any], other: list[Any]) -> tuple[int, Any, Any] | None:
    """The first place at which two pages differ: to compare thousands of elements as text takes minutes."""
    pairs = enumerate(zip_longest(page, other))
    return next(((turn, one, another) for turn, (one, another) in pairs if one != another), None)


@BOUNDED
@given(REPORTS)
def test_a_report_is_read_as_it_was_written(report: schema.Report) -> None:
    assert schema.decode(schema.encode(report)) == report


def render_all(report: schema.Report) -> None:
    """Each rendering but the pages, and what reads it next can read it."""
    for wide in (False, True):
        text = printed(terminal.render(report, "a note", wide=wide))
        assert [char for char in text if char != "\n" and unicodedata.category(char) == "Cc"] == []
    render_markdown(report)
    render_annotations(report, Path.cwd())
    ElementTree.fromstring(render_junit(report))
    json.loads(render_sarif(report, Path.cwd()))
    json.loads(render_trace(report), parse_constant=pytest.fail)
    assert render_openmetrics(report).endswith("# EOF\n")
    schema.exit_code(report)


@BOUNDED
@given(REPORTS)
@example(filled_report(MARKUP))
@example(filled_report("x" * 3000 + ".py"))
@example(filled_report("\x1b[31m\x07\r\n"))
def test_every_rendering_takes_any_report(report: schema.Report) -> None:
    render_all(report)


@BOUNDED
@given(REPORTS, REPORTS)
def test_any_two_reports_are_compared(before: schema.Report, after: schema.Report) -> None:
    for changes in (compare_reports(before, after), compare_reports(after, after)):
        printed(render_for_terminal(changes))
        render_as_markdown(changes)
        page = Skeleton(render_as_page(changes, "before", "after")).found
        assert not [name for _, names in page for name in names if name.startswith("on")]


@settings(BOUNDED, max_examples=10)
@given(REPORTS)
@example(filled_report(MARKUP))
@example(filled_report(MARKUP * 100))
def test_no_element_and_no_attribute_of_a_page_stems_from_a_text(report: schema.Report) -> None:
    harmless = Harmless(report)(report, schema.Report)
    for render in (render_html, render_fragment):
        page = Skeleton(render(report)).found
        assert differing(page, Skeleton(render(harmless)).found) is None
        assert not [name for _, names in page for name in names if name.startswith("on")]


def test_a_type_of_the_schema_without_a_strategy_is_noticed() -> None:
    with pytest.raises(NotImplementedError, match="add one"):
        of_type(bytes)

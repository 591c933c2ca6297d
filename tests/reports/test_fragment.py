"""A report as a part of a notebook's page: what is on it, that no text is markup, and that it styles nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any

from lowtide.reports import schema
from lowtide.reports.html.fragment import MOST_FINDINGS, MOST_SUBJECTS, render_fragment, render_line
from tests.reports.small_reports import FINDING, HOSTILE, MIB, finding, report, subject

HOPS = (schema.Hop(type="module", edge="engine.cache"), schema.Hop(type="list", edge=".POOL", suspect=True))


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text without its rules of style."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.text = self.style = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["style"]:
            self.style += data
        else:
            self.text += f" {data}"


def text_of(made: schema.Report) -> str:
    return " ".join(Elements(render_fragment(made)).text.split())


def test_a_finding_has_what_how_much_since_which_stage_path_holder_and_remedy() -> None:
    leak = finding(path=HOPS, remedy=schema.Remedy(action="engine.cache.POOL.clear()", returns_bytes=48 * MIB))
    text = text_of(report(subject(leak)))
    assert text.startswith("LEAK: 1 of 1 subject leaked")
    assert "tensors/module-global 48.0 MiB" in text
    assert FINDING.message in text
    assert "since stage shutdown" in text
    assert "engine.cache module → .POOL list" in text
    assert "held by engine.cache.POOL[0]" in text
    assert "engine.cache.POOL.clear() gives back 48.0 MiB of 48.0 MiB" in text


def test_what_was_not_measured_is_on_it_once() -> None:
    missing = schema.NotMeasured(what="driver cuda:0", why="no driver reports it")
    text = text_of(report(subject(not_measured=(missing,)), subject(name="other", not_measured=(missing,))))
    assert text.count("driver cuda:0 : no driver reports it") == 1


def test_no_text_is_markup() -> None:
    def made(text: str) -> schema.Report:
        leak = finding(
            message=text, holder=text, stage=text, device=text, advice=text, fingerprint=text,
            path=(schema.Hop(type=text, edge=text),), changed=(text,),
            allocated_at=(schema.Frame(file=text, line=1, function=text),),
        )  # fmt: skip
        missing = schema.NotMeasured(what=text, why=text)
        return report(subject(leak, name=text, reason=text, not_measured=(missing,)))

    plain, hostile = (Elements(render_fragment(made(text))) for text in ("x", f"<script>\"' onclick=a {HOSTILE}"))
    assert hostile.found == plain.found
    assert not [tag for tag, _ in plain.found if tag in ("script", "iframe", "img", "link")]
    assert "<script>" in hostile.text


def test_its_style_is_for_nothing_else_and_knows_both_themes() -> None:
    style = Elements(render_fragment(report())).style
    rules = re.sub(r"@media[^{]+\{|/\*.*?\*/", "", style)
    selectors = [part for rule in re.findall(r"([^{}]+)\{[^}]*\}", rules) for part in re.split(r",(?![^(]*\))", rule)]
    assert len(selectors) > 10
    assert [selector for selector in selectors if ".lowtide-report" not in selector] == []
    for theme in ("prefers-color-scheme: dark", 'data-jp-theme-light="false"', ".vscode-dark"):
        assert theme in style


def test_a_large_report_is_cut_and_says_so() -> None:
    many: list[Any] = [subject(*[finding()] * (MOST_FINDINGS + 2), name="first")]
    many += [subject(name=f"test_{turn}") for turn in range(MOST_SUBJECTS)]
    html = render_fragment(report(*many))
    assert html.count("<section") == MOST_FINDINGS
    assert "2 more findings of it are in the report." in html
    assert "1 more subject is in the report." in html


def test_a_known_finding_says_by_what_it_is_suppressed() -> None:
    html = render_fragment(report(subject(finding(suppressed_by="lowtide.toml: a reason"))))
    assert "lowtide-known" in html
    assert "lowtide.toml: a reason" in html


def test_a_report_is_its_own_fragment_and_reading_one_loads_no_templates() -> None:
    made = report(subject(finding()))
    assert made._repr_html_() == render_fragment(made)
    code = "import sys, lowtide.reports.schema; print('jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_line_is_escaped() -> None:
    assert render_line("<b>") == '<p class="lowtide-report">&lt;b&gt;</p>'

"""The Markdown summary: short, the largest leaks first, and nothing in it can act as markup."""

from __future__ import annotations

import pytest

from lowtide.reports import schema
from lowtide.reports.markdown import render_markdown, verdict


def finding(holder: str | None = "cache", size: int = 1 << 20, suppressed_by: str | None = None) -> schema.Finding:
    return schema.Finding(
        resource="tensors",
        cause="lru-cache",
        bytes=size,
        count=3,
        device="cpu",
        stage="shutdown",
        message="did not come back",
        fingerprint="0123456789abcdef",
        holder=holder,
        remedy=schema.Remedy(action="cache.cache_clear()", returns_bytes=2 << 20),
        suppressed_by=suppressed_by,
    )


def leaking(*findings: schema.Finding, name: str = "test_a") -> schema.Subject:
    return schema.Subject(id=name, outcome="leak", findings=findings)


def report(*subjects: schema.Subject) -> schema.Report:
    machine = schema.Machine(
        platform="Linux", python="3.11", torch="2.13", cpus=2, memory=1 << 34, devices=(), driver="none"
    )
    return schema.Report(
        schema="lowtide-report/1",
        version="0.1.0",
        created="now",
        command="lowtide run",
        machine=machine,
        subjects=subjects,
    )


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| <code>")]


def test_a_leak_is_a_row_with_all_that_the_head_names() -> None:
    text = render_markdown(report(leaking(finding())))
    assert "| subject | resource | cause | bytes | since stage | holder | remedy |" in text
    assert rows(text) == [
        "| <code>test\\_a</code> | tensors | lru-cache | 1.0 MiB | shutdown | <code>cache</code> "
        "| <code>cache.cache\\_clear()</code> (gave back 2.0 MiB) |"
    ]


def test_what_has_no_bytes_is_counted() -> None:
    assert "| 3 tensors |" in render_markdown(report(leaking(finding(size=0))))


@pytest.mark.parametrize(
    ("outcomes", "line"),
    [
        ([], "NOTHING JUDGED: no subjects"),
        (["skipped"], "NOTHING JUDGED: 1 subject(s), all skipped"),
        (["clean", "skipped"], "CLEAN: 1 subject(s), everything came back"),
        (["clean", "error", "unsupported"], "NOT MEASURED: 2 of 3 subject(s) failed or could not be measured"),
        (["clean", "error", "leak"], "LEAK: 1 of 3 subject(s) leaked"),
    ],
)
def test_the_verdict_says_the_worst_outcome(outcomes: list[schema.Outcome], line: str) -> None:
    written = report(*(schema.Subject(id="a", outcome=outcome) for outcome in outcomes))
    assert verdict(written) == line
    assert f"**{line}**" in render_markdown(written)


def test_a_clean_verdict_admits_what_was_not_judged() -> None:
    missing = schema.NotMeasured(what="driver", why="no library")
    clean = schema.Subject(id="a", outcome="clean", not_measured=(missing,))
    assert verdict(report(clean)) == "CLEAN: 1 subject(s), everything that was judged came back"


def test_outcomes_are_counted() -> None:
    outcomes: list[schema.Outcome] = ["clean", "clean", "leak", "error", "skipped", "unsupported"]
    text = render_markdown(report(*(schema.Subject(id="a", outcome=outcome) for outcome in outcomes)))
    assert "2 clean · 1 leak · 1 error · 1 skipped · 1 unsupported" in text


def test_a_suppressed_finding_is_counted_and_no_leak() -> None:
    subject = schema.Subject(id="a", outcome="clean", findings=(finding(suppressed_by="known.toml:3"),))
    text = render_markdown(report(subject))
    assert rows(text) == []
    assert "1 clean · 1 suppressed finding(s)" in text


def test_what_was_not_measured_is_listed_once_with_its_subjects() -> None:
    missing = schema.NotMeasured(what="driver", why="two workers on one card")
    subjects = [schema.Subject(id="a", outcome="clean", not_measured=(missing,)) for _ in range(3)]
    assert render_markdown(report(*subjects)).count("- driver in 3 subject(s): two workers on one card") == 1


@pytest.mark.parametrize("outcome", ["error", "unsupported"])
def test_what_could_not_be_judged_is_listed_with_its_reason(outcome: schema.Outcome) -> None:
    subject = schema.Subject(id="a", outcome=outcome, reason="no card")
    assert f"- <code>a</code>: {outcome}: no card" in render_markdown(report(subject))


def test_of_many_leaks_the_largest_hundred_are_shown_and_the_rest_is_counted() -> None:
    text = render_markdown(report(leaking(*(finding(size=size) for size in range(1, 151)))))
    assert len(rows(text)) == 100
    assert "| 150 B |" in rows(text)[0]
    assert "… and 50 more leak(s)" in text


def test_a_hundred_leaks_are_all() -> None:
    assert "more leak(s)" not in render_markdown(report(leaking(*[finding()] * 100)))


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("a|b", "a&#124;b"),
        ("`a`", "\\`a\\`"),
        ("a\\|b", "a\\\\&#124;b"),
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("[a](http://b) ![c](d)", "\\[a\\](http://b) \\!\\[c\\](d)"),
        ("__init__ *b* ~c~", "\\_\\_init\\_\\_ \\*b\\* \\~c\\~"),
        ("a & b $c$", "a &amp; b &#36;c&#36;"),
        ("a\n# b\r\n\n| c", "a \\# b &#124; c"),
        ("a\0b\x1bc\x85\x90\udc80", "a�b�c ��"),
        ("🌊 café", "🌊 café"),
    ],
)
def test_no_name_can_act_as_markup(hostile: str, shown: str) -> None:
    text = render_markdown(report(leaking(finding(holder=hostile), name=hostile)))
    (row,) = rows(text)
    assert row.startswith(f"| <code>{shown}</code> | tensors |")
    assert f"| <code>{shown}</code> | <code>cache" in row
    # Every cell is where the head says.
    assert row.count("|") == 8
    text.encode()


def test_names_without_end_are_cut() -> None:
    text = render_markdown(report(*[leaking(finding(holder="y" * (1 << 20)), name="x" * (1 << 20))] * 50))
    assert "x" * 159 + "…</code>" in text
    assert "y" * 159 + "…</code>" in text
    assert len(text) < 50_000

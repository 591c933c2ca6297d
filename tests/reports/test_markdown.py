"""The Markdown summary: short, the largest leaks first, and nothing in it can act as markup."""

from __future__ import annotations

import msgspec
import pytest

from lowtide.reports import schema
from lowtide.reports.markdown import MOST_DETAILED, render_markdown, verdict
from lowtide.reports.outcomes import ENDED


def finding(
    holder: str | None = "cache",
    size: int = 1 << 20,
    suppressed_by: str | None = None,
    fingerprint: str = "0123456789abcdef",
) -> schema.Finding:
    return schema.Finding(
        resource="tensors",
        cause="lru-cache",
        bytes=size,
        count=3,
        device="cpu",
        stage="shutdown",
        message="did not come back",
        fingerprint=fingerprint,
        holder=holder,
        remedy=schema.Remedy(action="cache.cache_clear()", returns_bytes=size),
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
        "| <code>cache.cache\\_clear()</code> gives back 1.0 MiB of 1.0 MiB |"
    ]


def test_advice_stands_where_a_remedy_would() -> None:
    advised = msgspec.structs.replace(finding(), remedy=None, advice="unmap *it* | now")
    (row,) = rows(render_markdown(report(leaking(advised))))
    assert row.endswith(r"| <code>cache</code> | unmap \*it\* &#124; now |")


def test_what_has_no_bytes_is_counted() -> None:
    assert "| 3 tensors |" in render_markdown(report(leaking(finding(size=0))))


@pytest.mark.parametrize(
    ("outcomes", "line"),
    [
        ([], "NOTHING JUDGED: no subjects"),
        (["skipped"], "NOTHING JUDGED: 1 subject, all skipped"),
        (["clean", "skipped"], "CLEAN: 1 subject, everything came back"),
        (["clean", "error", "unsupported"], "NOT MEASURED: 2 of 3 subjects failed or could not be measured"),
        (["clean", "error", "leak"], "LEAK: 1 of 3 subjects leaked"),
    ],
)
def test_the_verdict_says_the_worst_outcome(outcomes: list[schema.Outcome], line: str) -> None:
    written = report(*(schema.Subject(id="a", outcome=outcome) for outcome in outcomes))
    assert verdict(written) == line
    assert f"**{line}**" in render_markdown(written)


def test_a_clean_verdict_admits_what_was_not_judged() -> None:
    missing = schema.NotMeasured(what="driver", why="no library")
    clean = schema.Subject(id="a", outcome="clean", not_measured=(missing,))
    assert verdict(report(clean)) == "CLEAN: 1 subject, everything that was judged came back"


def test_what_is_to_say_of_a_clean_subject_is_a_note() -> None:
    noted = schema.Subject(id="a|b", outcome="clean", reason="found: 8 MiB | <b>")
    text = render_markdown(report(noted, schema.Subject(id="quiet", outcome="clean")))
    assert text.split("### Notes")[1].split("\n\n")[1] == ("- <code>a&#124;b</code>: found: 8 MiB &#124; &lt;b&gt;")
    many = [schema.Subject(id=str(turn), outcome="clean", reason="said") for turn in range(101)]
    assert "… and 1 more line; all are in `leakcheck.json`" in render_markdown(report(*many))


def test_outcomes_are_counted() -> None:
    outcomes: list[schema.Outcome] = ["clean", "clean", "leak", "error", "skipped", "unsupported"]
    text = render_markdown(report(*(schema.Subject(id="a", outcome=outcome) for outcome in outcomes)))
    assert "2 clean · 1 leak · 1 error · 1 skipped · 1 unsupported" in text


def test_a_suppressed_finding_is_counted_and_no_leak() -> None:
    subject = schema.Subject(id="a", outcome="clean", findings=(finding(suppressed_by="known.toml:3"),))
    text = render_markdown(report(subject))
    assert rows(text) == []
    assert "1 clean · 1 suppressed finding" in text


def test_what_was_not_measured_is_listed_once_with_its_subjects() -> None:
    missing = schema.NotMeasured(what="driver", why="two workers on one card")
    subjects = [schema.Subject(id="a", outcome="clean", not_measured=(missing,)) for _ in range(3)]
    assert render_markdown(report(*subjects)).count("- driver in 3 subjects: two workers on one card") == 1


def test_processes_that_ended_are_one_entry_with_their_number() -> None:
    ended = [schema.NotMeasured(what=f"whether pid {pid} grew while it ran", why=ENDED) for pid in range(3)]
    subjects = [schema.Subject(id=f"{each}", outcome="clean", not_measured=(each, ended[0])) for each in ended]
    listed = [line for line in render_markdown(report(*subjects)).splitlines() if ENDED in line]
    assert len(listed) == 1
    assert "whether 3 processes grew while they ran in 3 subject" in listed[0]
    assert "whether pid 0 grew while it ran in 1 subject" in render_markdown(report(subjects[0]))


@pytest.mark.parametrize("outcome", ["error", "unsupported"])
def test_what_could_not_be_judged_is_listed_with_its_reason(outcome: schema.Outcome) -> None:
    subject = schema.Subject(id="a", outcome=outcome, reason="no card")
    assert f"- <code>a</code>: {outcome}: no card" in render_markdown(report(subject))


def test_of_many_leaks_the_largest_hundred_are_shown_and_the_rest_is_counted() -> None:
    text = render_markdown(report(leaking(*(finding(size=size, fingerprint=f"{size}") for size in range(1, 151)))))
    assert len(rows(text)) == 100
    assert "| 150 B |" in rows(text)[0]
    assert "… and 50 more leaks" in text


def test_a_hundred_leaks_are_all() -> None:
    assert "more leak" not in render_markdown(report(leaking(*[finding()] * 100)))


def test_a_clean_verdict_admits_what_is_known_not_to_come_back() -> None:
    clean = schema.Subject(id="a", outcome="clean", findings=(finding(suppressed_by="known.toml:3"),))
    assert verdict(report(clean)) == "CLEAN: 1 subject, everything came back but 1 known finding"


TOLD = msgspec.structs.replace(
    finding(holder="a_b", size=32 << 20),
    path=(
        schema.Hop(type="module", edge="engine", mark="innocent"),
        schema.Hop(type="my_dict", edge="['<x>']", suspect=True, mark="holding", retains_bytes=32 << 20),
    ),
    allocated_at=(schema.Frame(file="a_b.py", line=3, function="f"),),
    shared_bytes=8 << 20,
    tried=(schema.Remedy(action="gc.collect()", returns_bytes=0),),
    changed=("the *cache* is empty",),
    trend="bounded",
)


def details(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("- ")]


def test_a_leak_of_which_more_is_known_has_a_list_of_it() -> None:
    text = render_markdown(report(leaking(TOLD)))
    assert "\n\n### Who holds it\n\n<code>test\\_a</code>: tensors/lru-cache, 32.0 MiB\n\n- held by" in text
    assert details(text) == [
        "- held by a\\_b",
        "- count: 3",
        "- path:",
        "- <code>engine</code> (module) expected to stay",
        "- -&gt; <ins><code>\\['&lt;x&gt;'\\]</code></ins> (my\\_dict) should be gone, retains 32.0 MiB",
        "- allocated in f, a\\_b.py:3",
        "- 8.0 MiB of it is held by others too",
        "- trend: bounded (replaced or limited)",
        "- remedy: cache.cache\\_clear() gives back 32.0 MiB of 32.0 MiB",
        "- tried: gc.collect() gives nothing back",
        "- changed by trying: the \\*cache\\* is empty",
        "- fingerprint 0123456789abcdef",
    ]


def test_a_leak_of_which_the_row_says_all_has_no_list() -> None:
    assert "Who holds it" not in render_markdown(report(leaking(finding())))


@pytest.mark.parametrize(
    "known", ["path", "allocated_at", "shared_bytes", "tried", "changed", "trend"], ids=lambda known: str(known)
)
def test_any_one_thing_that_is_known_is_listed(known: str) -> None:
    one = msgspec.structs.replace(finding(), **{known: getattr(TOLD, known)})
    assert "### Who holds it" in render_markdown(report(leaking(one)))


def test_a_long_path_is_cut_and_only_the_largest_leaks_are_listed() -> None:
    long = msgspec.structs.replace(TOLD, path=TOLD.path * 20)
    each = (msgspec.structs.replace(long, fingerprint=f"{turn}") for turn in range(MOST_DETAILED + 5))
    text = render_markdown(report(leaking(*each)))
    assert text.count("- path:") == MOST_DETAILED
    assert "more in leakcheck.json" in text
    assert "… and 5 more; all are in `leakcheck.json`" in text
    assert text.count("<ins>") == 12 * MOST_DETAILED


def test_types_that_became_more_are_a_table() -> None:
    grown = schema.TypeGrowth(type="a.B|C", since="cycle 1", until="cycle_2", before=10, after=12)
    text = render_markdown(report(schema.Subject(id="a", outcome="clean", type_growth=(grown,) * 101)))
    assert (
        "### Objects that became more\n\n| subject | type | before | after | growth | between |\n"
        "|---|---|---:|---:|---:|---|\n"
        "| <code>a</code> | a.B&#124;C | 10 | 12 | +2 | cycle 1 → cycle\\_2 |\n"
    ) in text
    assert text.count("a.B&#124;C") == 100
    assert "… and 1 more row" in text


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
        ("a\n# b\r\n\n| c", "a\\\\n\\# b\\\\r\\\\n\\\\n&#124; c"),
        ("a\0b\x1bc\x85\x90\udc80", r"a\\x00b\\x1bc\\x85\\x90\\udc80"),
        ("a\u202eb\u2067c", r"a\\u202eb\\u2067c"),
        ("🌊 café 👩\u200d🔬", "🌊 café 👩\u200d🔬"),
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


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("- a", "\\- a"),
        ("+ a", "\\+ a"),
        ("12. a", "12\\. a"),
        ("1) *a", "1\\) \\*a"),
        ("-", "\\-"),
        ("1.5 MiB", "1.5 MiB"),
    ],
)
def test_no_text_begins_a_list(hostile: str, shown: str) -> None:
    missing = schema.NotMeasured(what=hostile, why="no card")
    text = render_markdown(report(schema.Subject(id="a", outcome="clean", not_measured=(missing,))))
    assert f"\n- {shown} in 1 subject: no card\n" in text


@pytest.mark.nightly
def test_names_without_end_are_cut() -> None:
    text = render_markdown(report(*[leaking(finding(holder="y" * (1 << 20)), name="x" * (1 << 20))] * 50))
    assert "x" * 159 + "…</code>" in text
    assert "y" * 159 + "…</code>" in text
    assert len(text) < 50_000

"""The page: whole by itself, findings first, every field shown, and no text of a report can act as markup."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser

import msgspec
import pytest
from rich.console import Console

from lowtide.reports import schema
from lowtide.reports.finding_lines import suppression_entry
from lowtide.reports.html.jinja_environment import LONGEST
from lowtide.reports.html.page import DETAILED, LISTED, MOST_OCCURRENCES, render_html
from lowtide.reports.html.tables import MOST_ROWS
from lowtide.reports.markdown import render_markdown
from lowtide.reports.terminal import render

VOID = {"meta", "link", "br"}
FINDING = schema.Finding(
    resource="tensors",
    cause="lru-cache",
    bytes=112 << 20,
    count=347,
    device="cuda:5",
    stage="wake(7)",
    message="did not come back [here]",
    fingerprint="0123456789abcdef",
    verdict="reachable",
    holder="supports_kw",
    path=(
        schema.Hop(type="module", edge="layers", mark="innocent"),
        schema.Hop(
            type="functools._lru_cache_wrapper",
            edge=".supports_kw",
            suspect=True,
            mark="holding",
            retains_bytes=64 << 20,
        ),
    ),
    allocated_at=(schema.Frame(file="model.py", line=1234, function="forward"),),
    remedy=schema.Remedy(action="supports_kw.cache_clear()", returns_bytes=96 << 20),
    shared_bytes=16 << 20,
    tried=(
        schema.Remedy(action="gc.collect()", returns_bytes=0),
        schema.Remedy(action="supports_kw.cache_clear()", returns_bytes=96 << 20),
    ),
    changed=("the cache is empty",),
    suppressed_by="known.toml:3",
    trend="growth",
)
REPORT = schema.Report(
    schema="lowtide-report/1",
    version="0.1.0",
    created="2026-01-31T12:00:00+00:00",
    command="lowtide run --cycles 9",
    machine=schema.Machine(
        platform="Linux-6",
        python="3.11.7",
        torch="2.13.0",
        cpus=64,
        memory=1 << 39,
        devices=("NVIDIA H200", "NVIDIA H100"),
        driver="nvml",
    ),
    subjects=(),
)


class Page(HTMLParser):
    """A page's tags, each closed where it was opened, and its text as a reader sees it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in ([], ["style"], ["script"]):
            self.texts.append((tuple(self.open), data))

    @property
    def text(self) -> str:
        return " ".join(" ".join(text for _, text in self.texts).split())

    def under(self, tag: str) -> str:
        return "".join(text for tags, text in self.texts if tag in tags)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def page(*subjects: schema.Subject) -> Page:
    return Page(render_html(msgspec.structs.replace(REPORT, subjects=subjects)))


def subject(outcome: schema.Outcome, name: str = "test_a", **rest: object) -> schema.Subject:
    return msgspec.structs.replace(schema.Subject(id=name, outcome=outcome), **rest)


def readings(tensors: int = 0, threads: int = 1, ledgers: tuple[schema.Ledger, ...] = ()) -> schema.Readings:
    return schema.Readings(
        tensors=tensors,
        allocated=None,
        reserved=0,
        arenas={"weights": tensors},
        pinned=0,
        host_pools=0,
        driver=None,
        rss=1 << 30,
        frozen_objects=7,
        cache_bytes=0,
        threads=threads,
        native_threads=2,
        processes=0,
        descriptors=3,
        shared_memory=0,
        ledgers=ledgers,
    )


def ledger(total: int, *, device: str = "cuda:0", **lines: int) -> schema.Ledger:
    parts = tuple(schema.LedgerLine(name=name, bytes=size << 20) for name, size in lines.items())
    return schema.Ledger(
        device=device, source="nvml", total=total << 20, lines=parts, unexplained=(total - sum(lines.values())) << 20
    )


def stage(name: str = "create", cycle: int = 1, **sides: schema.Readings) -> schema.Stage:
    return schema.Stage(
        name=name,
        cycle=cycle,
        seconds=0.25,
        before=sides.get("before", readings()),
        after=sides.get("after", readings()),
        tokens_per_second=98765.0,
        bytes_per_second=43.2e9,
    )


def table_rows(html: str) -> list[list[str]]:
    return [
        [re.sub("<[^>]+>", "", cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)]
        for row in re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    ]


def test_the_page_says_what_ran_where() -> None:
    text = page().text
    for fact in ("0.1.0", "2026-01-31T12:00:00+00:00", "lowtide run --cycles 9", "Linux-6 · 64 cores, 512.0 GiB"):
        assert fact in text
    assert "NVIDIA H200, NVIDIA H100" in text
    assert "Python 3.11.7 · torch 2.13.0" in text
    assert "driver figures nvml" in text


def test_a_process_without_torch_says_so_everywhere() -> None:
    machine = msgspec.structs.replace(REPORT.machine, torch="")
    without = msgspec.structs.replace(REPORT, machine=machine)
    console = Console(width=100)
    with console.capture() as printed:
        console.print(render(without))
    for text in (Page(render_html(without)).text, render_markdown(without), printed.get()):
        assert "· torch not loaded" in text


def test_an_empty_report_is_a_page_that_says_so() -> None:
    empty = page()
    assert "NOTHING JUDGED: no subjects" in empty.under("h1")
    assert empty.count("table") == 0


def test_it_starts_as_a_document_that_fits_a_phone() -> None:
    html = render_html(REPORT)
    assert html.startswith("<!doctype html>")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    assert "@media screen and (prefers-color-scheme: dark)" in html


def test_nothing_is_fetched_and_what_runs_is_allowed_by_its_hash() -> None:
    html = render_html(msgspec.structs.replace(REPORT, subjects=(subject("leak", findings=(FINDING,)),)))
    written = Page(html)
    links = [value for _, attrs in written.tags for name, value in attrs.items() if name in ("href", "src", "srcset")]
    assert links == ["data:,", "#s0"]
    # It copies a remedy when it is asked to.
    assert written.count("script") == 1
    assert written.count("img") == written.count("iframe") == 0
    assert page(subject("clean")).count("script") == 0
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'; script-src 'sha256-" in html


def test_outcomes_are_totalled() -> None:
    outcomes: list[schema.Outcome] = ["clean", "clean", "clean", "leak", "leak", "error", "skipped"]
    text = page(*(subject(outcome) for outcome in outcomes)).text
    assert "3 clean 2 leak 1 error 1 skipped Leaks and errors" in text, "what does not occur is not counted"


def test_the_largest_causes_come_first_with_what_to_do_and_where_they_were_seen() -> None:
    small = msgspec.structs.replace(FINDING, suppressed_by=None, remedy=None, advice="call close()", bytes=1 << 20)
    large = msgspec.structs.replace(
        small, fingerprint="1" * 16, advice="call stop()", bytes=2 << 20, holder="kept.LARGE"
    )
    known = msgspec.structs.replace(small, fingerprint="2" * 16, advice="leave it", suppressed_by="lowtide.toml:1")
    text = page(
        subject("leak", "test_a", findings=(small,)),
        subject("leak", "test_b", findings=(known, large, small)),
        subject("leak", "test_c", findings=(small,)),
    ).text
    first, rest = text.split("3 leak", 1)
    assert first.index("2.0 MiB held by kept.LARGE call stop() test_b") < first.index("call close() test_a")
    assert "call close() test_a; also in test_b, test_c" in first
    assert first.count("call close()") == 1
    assert "leave it" not in first
    assert "driver figures" not in first
    assert "This run lowtide 0.1.0" in rest


def test_every_field_of_a_finding_is_shown() -> None:
    text = page(subject("leak", findings=(FINDING,))).text
    for shown in (
        "tensors/lru-cache 112.0 MiB",
        "did not come back [here]",
        "bytes 112.0 MiB (117,440,512)",
        "count 347",
        "device cuda:5",
        "since stage wake(7)",
        "verdict reachable",
        "trend growth (kept growing)",
        "shared 16.0 MiB of it is held by others too",
        "tried gc.collect() gives nothing back changed by trying the cache is empty",
        "held by supports_kw",
        "layers module expected to stay .supports_kw functools._lru_cache_wrapper should be gone, retains 64.0 MiB",
        "allocated at model.py:1234 in forward",
        "remedy supports_kw.cache_clear() copy gives back 96.0 MiB of 112.0 MiB",
        "suppressed by known.toml:3",
        "fingerprint 0123456789abcdef",
    ):
        assert shown in text


def test_a_subject_has_seconds_where_its_stages_have_some() -> None:
    timed = subject("leak", "test_timed", findings=(FINDING,), stages=(stage(),))
    untimed = subject("leak", "test_untimed", findings=(FINDING,))
    rows = table_rows(render_html(msgspec.structs.replace(REPORT, subjects=(timed, untimed))))
    assert [row[-1] for row in rows if row[0] == "leak"] == ["0.250", ""]
    rows = table_rows(render_html(msgspec.structs.replace(REPORT, subjects=(untimed,))))
    assert [len(row) for row in rows] == [2, 2]


def test_what_a_finding_does_not_know_is_left_out() -> None:
    bare = msgspec.structs.replace(
        FINDING,
        verdict=None,
        holder=None,
        path=(),
        allocated_at=(),
        remedy=None,
        shared_bytes=0,
        tried=(),
        changed=(),
        suppressed_by=None,
        trend=None,
        bytes=0,
        device="",
    )
    text = page(subject("leak", findings=(bare,))).text
    assert f"count {bare.count} since stage wake(7) fingerprint" in text
    assert "None" not in text


def test_advice_is_shown_where_there_is_no_remedy() -> None:
    reported = msgspec.structs.replace(FINDING, advice="unmap <it>")
    assert "advice" not in page(subject("leak", findings=(reported,))).text
    assert "advice unmap <it>" in page(subject("leak", findings=(msgspec.structs.replace(reported, remedy=None),))).text


def test_of_a_hop_only_what_is_known_is_shown() -> None:
    hops = (schema.Hop(type="T", edge=".x"), schema.Hop(type="T", edge=".y", retains_bytes=0))
    written = page(subject("leak", findings=(msgspec.structs.replace(FINDING, path=hops),)))
    assert ".x T .y T retains 0 B" in written.text
    assert [attrs for tag, attrs in written.tags if (attrs.get("class") or "").startswith("facts")] == [
        {"class": "facts"}
    ]


def test_marks_differ_in_more_than_words() -> None:
    written = page(subject("leak", findings=(FINDING,)))
    classes = [attrs["class"] for tag, attrs in written.tags if tag == "span" and "class" in attrs]
    assert "facts innocent" in classes
    assert "facts holding" in classes


def test_a_page_takes_paths_and_stacks_of_any_depth() -> None:
    # A linked list, and a recursive function; a second leak, because the trees of one alone are left out.
    path = tuple(schema.Hop(type="Node", edge=f".next_{turn}") for turn in range(5000))
    stack = tuple(schema.Frame(file="a.py", line=turn, function="walk") for turn in range(5000))
    deep = msgspec.structs.replace(FINDING, path=path, allocated_at=stack, suppressed_by=None)
    other = msgspec.structs.replace(FINDING, fingerprint="f" * 16, suppressed_by=None)
    assert ".next_4999" in page(subject("leak", findings=(deep, other))).text


def test_types_that_became_more_are_a_table() -> None:
    grown = schema.TypeGrowth(type="dict", since="cycle 1", until="cycle 2", before=10, after=12)
    html = render_html(msgspec.structs.replace(REPORT, subjects=(subject("leak", type_growth=(grown,) * 205),)))
    rows = table_rows(html)
    assert ["type", "before", "after", "growth", "between"] in rows
    assert rows.count(["dict", "10", "12", "+2", "cycle 1 → cycle 2"]) == MOST_ROWS
    assert "5 more are in leakcheck.json." in html
    assert "Objects that became more" in page(subject("clean", type_growth=(grown,)), subject("leak")).under("details")
    assert "Objects that became more" not in page(subject("leak")).text


def test_a_remedy_and_an_entry_for_what_may_stay_are_code_to_copy() -> None:
    known = msgspec.structs.replace(FINDING, suppressed_by=None, message="it stays")
    written = page(subject("leak", findings=(known,)))
    buttons = [attrs["aria-label"] for tag, attrs in written.tags if tag == "button"]
    assert buttons == ["copy the remedy", "copy the entry"]
    assert suppression_entry(known) in written.under("details")
    # What is suppressed has an entry already.
    written = page(subject("leak", findings=(FINDING,)))
    assert [attrs["aria-label"] for tag, attrs in written.tags if tag == "button"] == ["copy the remedy"]


def test_the_same_leak_elsewhere_is_linked() -> None:
    other = msgspec.structs.replace(FINDING, fingerprint="f" * 16)
    written = page(
        subject("leak", "test_a", findings=(FINDING,)),
        subject("leak", "test_b", findings=(other, FINDING)),
    )
    places = [attrs["id"] for tag, attrs in written.tags if tag == "section"]
    assert places == ["s0f0", "s1f0", "s1f1"]
    links = [attrs["href"] for tag, attrs in written.tags if tag == "a" and "f" in (attrs["href"] or "")]
    # The list of what leaked links it, too.
    assert links == ["#s0f0", "#s1f1", "#s0f0"]
    assert written.text.count("also in") == 1
    assert written.text.count("The same cause as in test_a") == 1


def test_a_frame_has_the_text_of_its_line() -> None:
    frame = schema.Frame(file="model.py", line=7, function="forward", source="KEPT.append(torch.ones(9))")
    written = page(subject("leak", findings=(msgspec.structs.replace(FINDING, allocated_at=(frame,)),)))
    assert "model.py:7 in forward KEPT.append(torch.ones(9))" in written.text


def test_suspects_are_underlined_and_others_are_not() -> None:
    assert page(subject("leak", findings=(FINDING,))).under("u") == ".supports_kw"


def test_leaks_come_first_then_errors_and_the_rest_is_folded() -> None:
    written = page(
        subject("clean", "name-1"),
        subject("error", "name-2", reason="the worker died"),
        subject("skipped", "name-3", reason="no card"),
        subject("leak", "name-4"),
        subject("unsupported", "name-5", reason="no driver"),
    )
    assert re.findall(r"name-\d", written.under("h3")) == ["name-4", "name-2"]
    assert re.findall(r"name-\d", written.under("details")) == ["name-5", "name-3", "name-1"]
    assert "open" not in {name for tag, attrs in written.tags if tag == "details" for name in attrs}
    for reason in ("the worker died", "no card", "no driver"):
        assert reason in written.text


def test_the_table_of_leaks_leads_to_each() -> None:
    written = page(subject("clean"), subject("leak", "first"), subject("leak", "second", findings=(FINDING,)))
    targets = [attrs["id"] for tag, attrs in written.tags if tag == "article"]
    assert [attrs["href"] for tag, attrs in written.tags if tag == "a"] == [f"#{target}" for target in targets]
    # Who has findings comes before who has only a reason.
    assert re.findall("first|second", written.under("a")) == ["second", "first"]
    assert "tensors/lru-cache · 112.0 MiB · since wake(7) · suppressed" in written.text


def test_a_finding_of_a_clean_subject_is_shown_too() -> None:
    written = page(subject("clean", findings=(FINDING,)), subject("clean", "test_b"))
    assert "test_a 1 finding" in written.text
    assert "suppressed by known.toml:3" in written.text


def test_stages_show_both_sides_in_mib_and_a_dash_for_what_is_not_known() -> None:
    life = (stage(before=readings(0), after=readings(5 << 20, threads=4)),)
    html = render_html(msgspec.structs.replace(REPORT, subjects=(subject("leak", stages=life),)))
    head = next(row for row in table_rows(html) if row[:2] == ["cycle", "stage"])
    row = next(row for row in table_rows(html) if row[:2] == ["1", "create"])
    cells = dict(zip(head, row, strict=True))
    assert cells == {
        "cycle": "1",
        "stage": "create",
        "tensors": "0.0 → 5.0",
        "allocated": "—",
        "reserved": "0.0",
        "arena weights": "0.0 → 5.0",
        "pinned": "0.0",
        "host pools": "0.0",
        "driver": "—",
        "RSS": "1024.0",
        "shared memory": "0.0",
        "caches": "0.0",
        "frozen": "7",
        "threads": "1 → 4",
        "native threads": "2",
        "processes": "0",
        "descriptors": "3",
        "seconds": "0.250",
        "GB/s": "43.2",
        "tok/s": "98765",
    }


def test_one_byte_more_is_a_change_although_mib_do_not_show_it() -> None:
    life = (stage(before=readings(0), after=readings(1)),)
    html = render_html(msgspec.structs.replace(REPORT, subjects=(subject("leak", stages=life),)))
    assert '<td title="0 → 1 bytes">0.0 → 0.0</td>' in html


def test_a_soak_test_shows_its_last_stages_and_says_so() -> None:
    life = tuple(stage(cycle=cycle) for cycle in range(1, MOST_ROWS + 51))
    html = render_html(msgspec.structs.replace(REPORT, subjects=(subject("leak", stages=life),)))
    cycles = [row[0] for row in table_rows(html) if row[1:2] == ["create"]]
    assert cycles == [str(cycle) for cycle in range(51, MOST_ROWS + 51)]
    assert f"The last {MOST_ROWS}; 50 earlier ones are in leakcheck.json." in html


def test_the_ledger_is_that_of_the_last_cycle_and_adds_up() -> None:
    first, later = readings(ledgers=(ledger(9, context=9),)), readings(ledgers=(ledger(8, context=3, idle=0),))
    last = readings(ledgers=(ledger(17, context=3, arena=10),))
    life = (stage(before=first, after=first), stage(cycle=2, before=later, after=last))
    html = render_html(msgspec.structs.replace(REPORT, subjects=(subject("leak", stages=life),)))
    assert "Ledger of cuda:0, cycle 2 (MiB; this process, nvml)" in html
    rows = table_rows(html)
    began = rows.index(["line", "before create", "create"])
    assert rows[began : began + 5] == [
        ["line", "before create", "create"],
        ["context", "3.0", "3.0"],
        ["arena", "0.0", "10.0"],
        ["unexplained", "5.0", "4.0"],
        ["total", "8.0", "17.0"],
    ]


def test_a_device_that_came_up_in_between_has_gaps_and_not_zeros() -> None:
    life = (stage(before=readings(), after=readings(ledgers=(ledger(9, context=9),))),)
    html = render_html(msgspec.structs.replace(REPORT, subjects=(subject("leak", stages=life),)))
    assert ["context", "—", "9.0"] in table_rows(html)
    assert ["total", "—", "9.0"] in table_rows(html)


def test_how_resources_came_back_is_shown() -> None:
    back = schema.Return(
        resource="driver", device="cuda:0", stage="shutdown", cycle=4, bytes=64 << 20, rung="settle", seconds=1.25
    )
    text = page(subject("leak", returns=(back,))).text
    assert "cycle 4: driver on cuda:0 (64.0 MiB) at rung settle, 1.25 s after shutdown" in text


def test_what_was_not_measured_is_one_line_with_its_reason_and_subjects() -> None:
    missing = (schema.NotMeasured(what="driver", why="two workers on one card"),)
    html = render_html(
        msgspec.structs.replace(REPORT, subjects=(subject("clean", not_measured=missing),) * (DETAILED * 2))
    )
    assert ["driver", "two workers on one card", str(DETAILED * 2)] in table_rows(html)


def test_of_a_single_subject_everything_is_open() -> None:
    written = page(subject("clean", stages=(stage(),)))
    assert "test_a" not in written.under("details")
    assert written.under("h2") == "MeasuredThis run"
    assert (written.count("article"), written.under("h3").split()) == (1, ["clean", "test_a", "0.250", "s"])


def test_ten_thousand_clean_subjects_are_a_line_each() -> None:
    missing = (schema.NotMeasured(what="driver", why="two workers on one card"),)
    many = tuple(
        subject("clean", f"tests/test_a.py::test_b[{turn}]", stages=(stage(),), not_measured=missing)
        for turn in range(10_000)
    )
    html = render_html(msgspec.structs.replace(REPORT, subjects=many))
    lines = [line for line in html.splitlines() if 'class="line"' in line]
    assert len(lines) == LISTED - DETAILED
    assert f"{10_000 - LISTED:,} more: filter" in html
    assert all(line.startswith("<tr>") and line.endswith("</tr>") for line in lines)
    assert max(map(len, lines)) < 200


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
        ("\"><img src=x onerror='a'>&amp;", "\"><img src=x onerror='a'>&amp;"),
        ("{{ 7 * 7 }}{% raw %}", "{{ 7 * 7 }}{% raw %}"),
        ("a\0b\x1bc\x90d\udc80", r"a\x00b\x1bc\x90d\udc80"),
        ("cuda\u202e:0\u2066x", r"cuda\u202e:0\u2066x"),
        ("a|b `c`", "a|b `c`"),
        ("🌊 café", "🌊 café"),
        ("x" * (1 << 20), "x" * LONGEST + "… (1,048,576 characters)"),
    ],
    ids=["script", "attribute", "template", "control", "order", "markdown", "emoji", "long"],
)
def test_any_text_anywhere_is_shown_and_never_markup(hostile: str, shown: str) -> None:
    html = render_html(filled(hostile))
    written, plain = Page(html), Page(render_html(filled("y" * len(hostile))))
    assert [tag for tag, _ in written.tags] == [tag for tag, _ in plain.tags]
    assert [attrs.keys() for _, attrs in written.tags] == [attrs.keys() for _, attrs in plain.tags]
    assert shown in " ".join(text for _, text in written.texts)
    assert len(html) < 1_000_000
    html.encode()


def filled(text: str) -> schema.Report:
    """A report with `text` wherever the schema lets any text be."""
    finding = msgspec.structs.replace(
        FINDING,
        device=text,
        stage=text,
        message=text,
        fingerprint=text,
        holder=text,
        path=(schema.Hop(type=text, edge=text), schema.Hop(type=text, edge=text, suspect=True)),
        allocated_at=(schema.Frame(file=text, line=1, function=text),),
        remedy=schema.Remedy(action=f"{text}()", returns_bytes=1),
        tried=(schema.Remedy(action=text, returns_bytes=0),),
        changed=(text,),
        suppressed_by=text,
    )
    line = schema.LedgerLine(name=text, bytes=1, note=text)
    account = schema.Ledger(device=text, source=text, total=1, lines=(line,), unexplained=0)
    side = msgspec.structs.replace(readings(ledgers=(account,)), arenas={text: 1})
    back = schema.Return(resource="driver", device=text, stage=text, cycle=1, bytes=1, rung="raw", seconds=0)
    outcomes: tuple[schema.Outcome, ...] = ("leak", "clean", "skipped")
    subjects = tuple(
        schema.Subject(
            id=text,
            outcome=outcome,
            reason=text,
            stages=(stage(text, before=side, after=side),),
            findings=(finding,),
            returns=(back,),
            not_measured=(schema.NotMeasured(what=text, why=text),),
            type_growth=(schema.TypeGrowth(type=text, since=text, until=text, before=1, after=2),),
        )
        for outcome in outcomes
    )
    # An id with nothing to tell is shown in a way of its own.
    subjects += (schema.Subject(id=text, outcome="clean"),)
    machine = schema.Machine(platform=text, python=text, torch=text, cpus=1, memory=1, devices=(text,), driver=text)
    return schema.Report(
        schema="lowtide-report/1", version=text, created=text, command=text, machine=machine, subjects=subjects
    )


@pytest.mark.parametrize(("length", "cut"), [(LONGEST, False), (LONGEST + 1, True)])
def test_a_text_is_cut_only_when_it_is_longer_than_the_longest(length: int, cut: bool) -> None:
    assert (f"… ({length:,} characters)" in page(subject("error", reason="x" * length)).text) is cut


def test_importing_the_schema_does_not_load_the_template_engine() -> None:
    code = "import sys, lowtide.reports.schema, lowtide.reports.html.page; print('jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_what_was_measured_says_by_whom_and_how_often() -> None:
    known = readings(5 << 20, ledgers=(ledger(9, context=9),))
    life = (stage(before=readings(), after=known), stage("infer", before=known, after=readings()))
    html = render_html(msgspec.structs.replace(REPORT, subjects=(subject("clean", stages=life),)))
    rows = table_rows(html)
    rows = rows[rows.index(["figure", "counted by", "known in", "lowest (MiB)", "highest (MiB)"]) :]
    assert ["tensors", "lowtide", "4 of 4 readings", "0.0", "5.0"] in rows
    assert ["allocated", "torch", "0 of 4 readings", "—", "—"] in rows
    assert ["driver", "nvml", "0 of 4 readings", "—", "—"] in rows
    assert ["RSS", "the kernel", "4 of 4 readings", "1024.0", "1024.0"] in rows
    assert ["ledger of cuda:0", "nvml", "2 of 2 readings", "9.0", "9.0"] in rows
    assert "Measured" not in page(subject("clean")).under("h2")


def test_the_settings_are_shown_where_they_are_known() -> None:
    written = Page(render_html(msgspec.structs.replace(REPORT, settings={"tolerance": "4096", "<b>": "<i>"})))
    assert "Settings tolerance 4096 <b> <i>" in written.text
    assert "Settings" not in page().text


def test_a_leak_of_every_test_is_told_in_the_first_one_alone_with_links_to_some() -> None:
    html = render_html(
        msgspec.structs.replace(
            REPORT, subjects=tuple(subject("leak", f"t{n}", findings=(FINDING,)) for n in range(40))
        )
    )
    sections = re.findall(r'<section class="finding.*?</section>', html, re.DOTALL)
    assert [section.count('href="#s') for section in sections] == [MOST_OCCURRENCES, *[1] * 39]
    assert 'href="#s0f0"' not in sections[0]
    assert 'href="#s0f0"' in sections[39]
    assert [section.count("<ol") for section in sections] == [sections[0].count("<ol"), *[0] * 39]

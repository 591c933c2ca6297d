"""What `lowtide run` prints of a finding: its details in plain words, suspects underlined, and no text is markup."""

from __future__ import annotations

import msgspec
from rich.console import Console

from lowtide.reports import schema
from lowtide.reports.hanging_text import HangingText
from lowtide.reports.terminal import finding_text, is_long, render_subject, render_worst
from tests.reports.small_reports import LIFE, finding, report, subject

FINDING = schema.Finding(
    resource="tensors",
    cause="lru-cache",
    bytes=32 << 20,
    count=8,
    device="cpu",
    stage="create",
    message="32.0 MiB in 8 tensors [red]",
    fingerprint="0123456789abcdef",
    holder="engine.supports_kw",
    path=(
        schema.Hop(type="module", edge="engine", mark="innocent"),
        schema.Hop(type="dict", edge="['[bold]']", suspect=True, mark="holding", retains_bytes=32 << 20),
        *(schema.Hop(type="T\x1b", edge=f".e{turn}\x1b") for turn in range(30)),
    ),
    remedy=schema.Remedy(action="CACHE.clear()", returns_bytes=32 << 20),
    tried=(schema.Remedy(action="gc.collect()", returns_bytes=0),),
    changed=("CACHE is empty\x1b",),
)
GROWTH = schema.TypeGrowth(type="a.B[int]", since="cycle 1", until="cycle 2", before=10, after=12)


def styled(text: HangingText, style: str) -> list[str]:
    """The parts of a text that are shown in a style."""
    spans = [(line.plain, span) for line in text.lines for span in line.spans]
    return [line[span.start : span.end] for line, span in spans if str(span.style) == style]


def shown(subject: schema.Subject) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        for part in render_subject(subject):
            console.print(part)
    return captured.get()


def test_a_finding_is_shown_in_twelve_lines_with_where_the_rest_is() -> None:
    assert str(finding_text(FINDING)).splitlines() == [
        "tensors/lru-cache 32.0 MiB in 8 tensors [red]",
        "    held by engine.supports_kw",
        "    path:",
        "       engine  (module)  expected to stay",
        "    -> ['[bold]']  (dict)  should be gone, retains 32.0 MiB",
        *(rf"       .e{turn}\x1b  (T\x1b)" for turn in range(2)),
        "       … 28 more in the report (--report DIR)",
        "    remedy: CACHE.clear() gives back 32.0 MiB of 32.0 MiB",
        "    tried: gc.collect() gives nothing back",
        r"    changed by trying: CACHE is empty\x1b",
        "    fingerprint 0123456789abcdef",
    ]


def test_a_leak_is_red_its_suspects_underlined_and_its_fingerprint_dim() -> None:
    text = finding_text(FINDING)
    assert styled(text, "bold red") == ["tensors/lru-cache"]
    assert styled(text, "underline") == ["['[bold]']"]
    assert styled(text, "dim") == ["   … 28 more in the report (--report DIR)", "fingerprint 0123456789abcdef"]


def test_what_is_known_is_yellow_with_its_reason_and_nothing_is_red() -> None:
    text = finding_text(msgspec.structs.replace(FINDING, suppressed_by="lowtide.toml:3: [fixed] upstream"))
    assert str(text).startswith("known tensors/lru-cache 32.0 MiB")
    assert "    suppressed by lowtide.toml:3: [fixed] upstream\n" in str(text)
    assert "".join(styled(text, "yellow")) == "known tensors/lru-cache"
    assert styled(text, "bold red") == []


def test_a_subject_whose_leaks_are_known_is_clean_and_says_so() -> None:
    known = msgspec.structs.replace(FINDING, suppressed_by="lowtide.toml:3: known")
    assert "CLEAN: everything came back but 1 known finding" in shown(
        schema.Subject(id="a", outcome="clean", findings=(known,))
    )
    assert "LEAK: 1 finding, and 1 known" in shown(schema.Subject(id="a", outcome="leak", findings=(FINDING, known)))


UNEXPLAINED = finding(bytes=5, message="5 B", holder=None, path=(), remedy=None)


def test_types_that_became_more_are_a_table_before_what_nobody_is_known_to_hold() -> None:
    lines = shown(subject(UNEXPLAINED, type_growth=(GROWTH,))).splitlines()
    start = next(turn for turn, line in enumerate(lines) if "Objects that became more" in line)
    assert lines[start + 2].split() == ["type", "before", "after", "growth", "between"]
    assert lines[start + 4].split() == ["a.B[int]", "10", "12", "+2", "cycle", "1", "→", "cycle", "2"]
    assert start < next(turn for turn, line in enumerate(lines) if "5 B" in line)
    known = msgspec.structs.replace(UNEXPLAINED, suppressed_by="a reason")
    for told in (subject(FINDING, known, type_growth=(GROWTH,)), subject(UNEXPLAINED)):
        assert "Objects" not in shown(told)


def test_the_last_lines_are_the_largest_leak_and_what_to_do_about_it() -> None:
    known = msgspec.structs.replace(FINDING, bytes=1 << 40, fingerprint="known", suppressed_by="a reason")
    small = finding(bytes=1 << 10, message="1.0 KiB", fingerprint="f", advice="call close()", remedy=None)
    again = msgspec.structs.replace(FINDING, bytes=1 << 20, message="1.0 MiB of it")
    lines = shown(subject(known, FINDING, small, again)).splitlines()
    assert [line.split()[1:3] for line in lines if line.startswith(("tensors/", "known "))] == [
        ["tensors/lru-cache", "32.0"],
        ["1.0", "KiB;"],
        ["32.0", "MiB"],
        ["1.0", "MiB"],
    ]
    assert lines[-1] == ("LEAK: 3 findings, and 1 known; to do first: CACHE.clear() gives back 32.0 MiB of 32.0 MiB")
    assert shown(subject(small)).splitlines()[-1] == "LEAK: 1 finding; to do first: call close()"
    assert shown(subject(UNEXPLAINED)).splitlines()[-1] == "LEAK: 1 finding"
    grows = msgspec.structs.replace(FINDING, bytes=1 << 30, remedy=None, advice="bound the container")
    grown = shown(subject(FINDING, grows)).splitlines()[-1]
    assert grown == f"LEAK: 2 findings; to do first, for {grows.holder}: bound the container"


def test_of_many_types_the_first_are_shown_and_the_rest_is_counted() -> None:
    text = shown(subject(UNEXPLAINED, type_growth=(GROWTH,) * 12))
    assert text.count("a.B[int]") == 8
    assert "… 4 more are in the report" in text


def worst_of(*subjects: schema.Subject) -> list[str]:
    """The first line of each subject and each finding, and what is said of the rest."""
    console = Console(width=200)
    assert is_long(report(*subjects))
    with console.capture() as captured:
        console.print(render_worst(report(*subjects), "see elsewhere"))
    return [line for line in captured.get().splitlines()[2:] if not line.startswith(" ")]


def test_of_a_long_report_the_worst_findings_are_shown_and_the_rest_is_counted() -> None:
    small = [
        subject(finding(bytes=turn, message=f"{turn} B", fingerprint=f"{turn}"), name=f"small[{turn}]")
        for turn in range(30)
    ]
    known = subject(finding(bytes=1 << 40, message="known", suppressed_by="a reason"), name="known")
    large = subject(
        finding(bytes=1, message="1 B", fingerprint="f"), finding(bytes=1 << 30, message="1 GiB"), name="[red]\x1blarge"
    )
    unjudged = [schema.Subject(id=f"error[{turn}]", outcome="error", reason="why") for turn in range(2)]
    shown = worst_of(known, *unjudged, *small, subject(name="clean"), large)
    assert shown[:3] == [
        "[red]\\x1blarge",
        "tensors/module-global 1 GiB",
        "tensors/module-global 1 B",
    ]
    assert shown[3:5] == ["small[29]", "tensors/module-global 29 B"]
    assert shown[-3:-1] == ["small[12]", "tensors/module-global 12 B"]
    assert shown[-1] == "… 13 findings, 2 subjects that were not judged more: see elsewhere"


def test_that_a_run_has_not_come_to_its_end_is_said_before_all() -> None:
    end = schema.Subject(id=schema.END_OF_RUN, outcome="error", reason="it has not")
    leaks = [subject(finding(bytes=turn), name=f"test[{turn}]") for turn in range(30)]
    assert worst_of(*leaks, end)[0] == "the end of the run: it has not"
    assert shown(end).splitlines() == ["it has not", "NOT FINISHED: only what was finished is judged"]


def test_of_a_long_life_the_last_stages_are_shown() -> None:
    lines = worst_of(subject(name="run", stages=LIFE * 100))
    assert lines[-1] == "… 240 earlier stages more: see elsewhere"
    assert sum(line.startswith("create") for line in lines) <= 60


def test_a_short_report_is_shown_whole() -> None:
    assert not is_long(report(*[subject(finding(), name=f"test[{turn}]") for turn in range(20)]))
    assert not is_long(report(subject(name="run", stages=LIFE)))


def test_an_out_of_memory_error_is_told_with_who_held_it() -> None:
    held = schema.Finding(
        resource="tensors",
        cause="frame",
        bytes=8 << 20,
        count=2,
        device="cpu",
        stage="call",
        message="8.0 MiB in 2 tensors on cpu, held by train() f_locals['kept'][/bold]",
        fingerprint="0123456789abcdef",
        allocated_at=(schema.Frame(file="model.py", line=40, function="forward"),),
    )
    told = schema.OutOfMemory(
        error="RuntimeError: no room",
        device="cuda:0",
        stage="call",
        asked=20 << 30,
        memory=(schema.LedgerLine(name="of this free", bytes=25 << 30, note="the largest block has 2.0 GiB"),),
        held=(held,),
        others=3,
        other_bytes=1 << 20,
        advice="empty the cache",
        unread=(schema.NotMeasured(what="torch's snapshot", why="the disk is full"),),
        snapshot="snapshots/a.pickle",
    )
    text = shown(schema.Subject(id="life", outcome="error", reason="it raised", out_of_memory=told))
    assert [line.strip() for line in text.splitlines() if line.strip()][:11] == [
        "out of memory on cuda:0 in call: 20.0 GiB were asked for",
        "RuntimeError: no room",
        "of this free: 25.0 GiB (the largest block has 2.0 GiB)",
        "advice: empty the cache",
        "in use then, the largest first:",
        "8.0 MiB in 2 tensors on cpu, held by train() f_locals['kept'][/bold]",
        "allocated in forward, model.py:40",
        "… 3 others: 1.0 MiB",
        "not read: torch's snapshot (the disk is full)",
        "torch's snapshot: snapshots/a.pickle in the report's folder (lowtide snapshot FILE)",
        "it raised",
    ]

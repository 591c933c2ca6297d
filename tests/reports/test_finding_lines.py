"""A finding in plain lines: every field in words, the suspects kept where a path is cut, the same under pytest."""

from __future__ import annotations

import msgspec
import pytest

from lowtide.pytest_plugin.terminal import details, line
from lowtide.reports import schema
from lowtide.reports.finding_lines import (
    MOST_LINES,
    SHOWN_FRAMES,
    SHOWN_HOPS,
    finding_lines,
    first_line,
    growth_cells,
)

BARE = schema.Finding(
    resource="tensors",
    cause="lru-cache",
    bytes=32 << 20,
    count=1,
    device="cpu",
    stage="create",
    message="32.0 MiB did not come back",
    fingerprint="0123456789abcdef",
)


def changed(**fields: object) -> schema.Finding:
    return msgspec.structs.replace(BARE, **fields)


def texts(finding: schema.Finding, **how: object) -> list[str]:
    return [reported.text for reported in finding_lines(finding, **how)]  # type: ignore[arg-type]


def test_of_a_finding_of_which_nothing_is_known_only_the_fingerprint_is_reported() -> None:
    assert texts(BARE) == ["fingerprint 0123456789abcdef"]


@pytest.mark.parametrize(
    ("message", "is_shown"),
    [
        ("32 KiB did not come back", True),
        ("8.32 MiB did not come back", True),
        ("2.0 MiB in 132 tensors did not come back", True),
        ("32 tensors, 2.0 MiB, did not come back", False),
        ("2.0 MiB of 32 Bytes objects did not come back", False),
    ],
)
def test_how_many_there_are_is_reported_where_the_message_does_not_say_it(message: str, is_shown: bool) -> None:
    assert ("count: 32" in texts(changed(message=message, count=32))) == is_shown


def test_all_that_is_known_is_reported_in_order() -> None:
    full = changed(
        holder="engine.supports_kw",
        count=8,
        path=(
            schema.Hop(type="module", edge="engine"),
            schema.Hop(type="dict", edge=".CACHE", suspect=True, retains_bytes=32 << 20),
        ),
        allocated_at=(schema.Frame(file="model.py", line=12, function="forward"),),
        shared_bytes=8 << 20,
        trend="growth",
        remedy=schema.Remedy(action="CACHE.clear()", returns_bytes=24 << 20),
        tried=(
            schema.Remedy(action="gc.collect()", returns_bytes=0),
            schema.Remedy(action="CACHE.clear()", returns_bytes=24 << 20),
            schema.Remedy(action="gc.unfreeze()", returns_bytes=1 << 20),
        ),
        changed=("CACHE is empty", "the model is on the CPU"),
        suppressed_by="lowtide.toml:3: known",
    )
    assert texts(full) == [
        "suppressed by lowtide.toml:3: known",
        "held by engine.supports_kw",
        "count: 8",
        "path:",
        "   engine  (module)",
        "-> .CACHE  (dict)  retains 32.0 MiB",
        "allocated in forward, model.py:12",
        "8.0 MiB of it is held by others too",
        "trend: growth (kept growing)",
        "remedy: CACHE.clear() gives back 24.0 MiB of 32.0 MiB",
        "tried: gc.collect() gives nothing back",
        "tried: gc.unfreeze() gives back 1.0 MiB",
        "changed by trying: CACHE is empty",
        "changed by trying: the model is on the CPU",
        "fingerprint 0123456789abcdef",
    ]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "   .x  (T)"),
        ({"mark": "innocent"}, "   .x  (T)  expected to stay"),
        ({"mark": "holding", "suspect": True}, "-> .x  (T)  should be gone"),
        ({"retains_bytes": 32 << 20}, "   .x  (T)  retains 32.0 MiB"),
        ({"retains_bytes": 0}, "   .x  (T)  retains 0 B"),
        ({"mark": "holding", "retains_bytes": 5}, "   .x  (T)  should be gone, retains 5 B"),
    ],
)
def test_a_hop_is_a_line_with_its_edge_type_mark_and_what_it_retains(fields: dict[str, object], text: str) -> None:
    hop = msgspec.structs.replace(schema.Hop(type="T", edge=".x"), **fields)
    reported = finding_lines(changed(path=(hop,)))[1]
    assert reported.text == text
    assert (reported.edge, reported.suspect) == (".x", hop.suspect)


@pytest.mark.parametrize(
    ("trend", "text"),
    [
        ("growth", "trend: growth (kept growing)"),
        ("residue", "trend: residue (once, and no more)"),
        ("bounded", "trend: bounded (replaced or limited)"),
    ],
)
def test_a_trend_is_reported_in_words(trend: str, text: str) -> None:
    assert text in texts(changed(trend=trend))


@pytest.mark.parametrize(
    ("size", "returned", "text"),
    [
        (32 << 20, 32 << 20, "remedy: f() gives back 32.0 MiB of 32.0 MiB"),
        (32 << 20, 0, "remedy: f() gives back 0 B of 32.0 MiB"),
        (0, 0, "remedy: f() gives it back"),
        (0, 5, "remedy: f() gives back 5 B"),
    ],
)
def test_a_remedy_is_one_sentence(size: int, returned: int, text: str) -> None:
    remedy = schema.Remedy(action="f()", returns_bytes=returned)
    assert texts(changed(bytes=size, remedy=remedy))[0] == text


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"holder": "a.B", "message": "32.0 MiB, held by a.B"}, []),
        ({"holder": "a.B", "message": "32.0 MiB of a.B"}, ["held by a.B"]),
        ({"resource": "threads", "holder": "worker-1", "message": "1 thread: worker-1"}, []),
        ({"resource": "processes", "holder": "7 (python)", "message": "1 process: 7"}, ["processes: 7 (python)"]),
        ({"count": 8, "message": "32.0 MiB in 8 tensors"}, []),
        ({"count": 8, "bytes": 0}, []),
    ],
)
def test_what_the_message_says_is_not_said_again(fields: dict[str, object], reported: list[str]) -> None:
    assert texts(changed(**fields))[:-1] == reported


def path_of(length: int, *suspects: int) -> tuple[schema.Hop, ...]:
    return tuple(schema.Hop(type="T", edge=f".e{turn}", suspect=turn in suspects) for turn in range(length))


def test_advice_is_given_where_nothing_that_was_tried_gave_it_back() -> None:
    known = changed(advice="unmap it in wake")
    assert first_line(known).endswith("; unmap it in wake")
    assert texts(known) == ["fingerprint 0123456789abcdef"], "what the first line says is not said again"
    remedy = schema.Remedy(action="f()", returns_bytes=1)
    assert "unmap" not in first_line(msgspec.structs.replace(known, remedy=remedy))


def test_a_path_is_whole_unless_it_is_to_be_cut() -> None:
    long = changed(path=path_of(40))
    assert len(texts(long)) == 42
    assert texts(changed(path=path_of(SHOWN_HOPS)), whole=False, rest="with -v") == texts(
        changed(path=path_of(SHOWN_HOPS))
    )


def test_where_a_path_is_cut_its_suspects_stay_and_each_gap_says_how_much_is_left_out() -> None:
    hops = texts(changed(path=path_of(40, 20, 21, 39)), whole=False, rest="with -v")[1:-1]
    assert hops == [
        *(f"   .e{turn}  (T)" for turn in range(SHOWN_HOPS - 3)),
        "   … 11 more with -v",
        "-> .e20  (T)",
        "-> .e21  (T)",
        "   … 17 more with -v",
        "-> .e39  (T)",
    ]


def test_of_more_suspects_than_are_shown_the_first_are() -> None:
    hops = texts(changed(path=path_of(40, *range(5, 40))), whole=False, rest="with -v")[1:-1]
    assert hops == [
        "   … 5 more with -v",
        *(f"-> .e{turn}  (T)" for turn in range(5, 5 + SHOWN_HOPS)),
        f"   … {40 - 5 - SHOWN_HOPS} more with -v",
    ]


def test_a_long_allocation_stack_is_cut_and_says_so() -> None:
    stack = tuple(schema.Frame(file="a.py", line=turn, function="f") for turn in range(SHOWN_FRAMES + 2))
    cut = texts(changed(allocated_at=stack), whole=False, rest="with -v")
    assert cut[:-1] == [
        *(f"allocated in f, a.py:{turn}" for turn in range(SHOWN_FRAMES)),
        "… 2 more with -v",
    ]
    assert len(texts(changed(allocated_at=stack))) == len(stack) + 1


def test_growth_is_a_row_of_a_table() -> None:
    grown = schema.TypeGrowth(type="dict", since="cycle 1", until="cycle 2", before=10, after=12)
    assert growth_cells(grown) == ("dict", "10", "12", "+2", "cycle 1 → cycle 2")
    assert growth_cells(msgspec.structs.replace(grown, after=7))[3] == "-3"


# Under pytest


def leaking(*findings: schema.Finding) -> schema.Subject:
    return schema.Subject(id="test_a", outcome="leak", findings=findings)


def test_under_pytest_a_path_is_cut_and_whole_with_v() -> None:
    long = leaking(changed(path=path_of(20, 19), trend="residue"))
    short = details(long, 0).splitlines()
    assert short[:4] == [
        "test_a left something behind:",
        "  tensors/lru-cache: 32.0 MiB did not come back",
        "    path:",
        "       .e0  (T)",
    ]
    assert short[-4:] == [
        "       … 13 more with -v",
        "    -> .e19  (T)",
        "    trend: residue (once, and no more)",
        "    fingerprint 0123456789abcdef",
    ]
    # The line with the test, and the finding's.
    assert len(short) == 1 + MOST_LINES
    whole = details(long, 1).splitlines()
    assert len(whole) == 1 + 1 + 1 + 20 + 2
    assert "more with -v" not in "".join(whole)


def test_a_finding_of_which_much_is_known_takes_twelve_lines_and_begins_with_what_to_change() -> None:
    remedies = tuple(schema.Remedy(action=f"tried_{turn}()", returns_bytes=0) for turn in range(30))
    much = changed(
        path=path_of(40, 19, 30),
        allocated_at=tuple(schema.Frame(file="a.py", line=turn, function="f") for turn in range(9)),
        tried=remedies,
        changed=tuple(f"{turn} is deleted" for turn in range(30)),
        parts=tuple(changed(resource="threads", message=f"thread {turn}") for turn in range(30)),
        holder="a.B",
        count=8,
        trend="growth",
        shared_bytes=1,
        advice="detach it",
    )
    shown = details(leaking(much), 0).splitlines()[1:]
    assert shown[0] == "  tensors/lru-cache: 32.0 MiB did not come back; detach it"
    assert len(shown) <= MOST_LINES
    assert shown[-1] == "    fingerprint 0123456789abcdef"
    with_little = msgspec.structs.replace(much, path=(), allocated_at=(), changed=(), tried=())
    shown = details(leaking(with_little), 0).splitlines()
    assert "    includes threads/lru-cache: thread 2 … and 27 more" in shown
    assert "    includes threads/lru-cache: thread 0" in shown


def test_under_pytest_known_leaks_have_no_details_and_lines_stay_lines() -> None:
    text = details(leaking(changed(suppressed_by="x:1: y"), changed(holder="a\nb\x1b")), 0)
    assert text.count("tensors/lru-cache") == 1
    assert "    held by a\\nb\\x1b\n" in text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"holder": "a.B"}, "test_a tensors/lru-cache 32.0 MiB held by a.B"),
        ({}, "test_a tensors/lru-cache 32.0 MiB"),
        (
            {"resource": "threads", "cause": "thread", "bytes": 0, "count": 2, "holder": "one, two"},
            "test_a threads/thread 2 threads one, two",
        ),
    ],
)
def test_a_leak_on_one_line_of_pytest(fields: dict[str, object], text: str) -> None:
    assert line(leaking(), changed(**fields)) == text

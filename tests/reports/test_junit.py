"""The JUnit file: what a CI system reads back from it is what the report says."""

from __future__ import annotations

from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import msgspec
import pytest

from lowtide.reports import schema
from lowtide.reports.junit import render_junit

FINDING = schema.Finding(
    resource="tensors",
    cause="lru-cache",
    bytes=112,
    count=3,
    device="cuda:0",
    stage="shutdown",
    message="112 B did not come back",
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
            retains_bytes=96,
        ),
    ),
    allocated_at=(schema.Frame(file="model.py", line=12, function="forward"),),
    remedy=schema.Remedy(action="supports_kw.cache_clear()", returns_bytes=111),
    shared_bytes=16,
    tried=(
        schema.Remedy(action="gc.collect()", returns_bytes=0),
        schema.Remedy(action="supports_kw.cache_clear()", returns_bytes=111),
    ),
    changed=("the cache is empty",),
    suppressed_by=None,
    trend="growth",
)
READINGS = schema.Readings(
    tensors=0,
    allocated=None,
    reserved=None,
    arenas={},
    pinned=None,
    host_pools=0,
    driver=None,
    rss=0,
    frozen_objects=0,
    cache_bytes=0,
    threads=1,
    native_threads=1,
    processes=0,
    descriptors=0,
    shared_memory=0,
)


def subject(outcome: schema.Outcome, name: str = "test_a", **rest: object) -> schema.Subject:
    return msgspec.structs.replace(schema.Subject(id=name, outcome=outcome), **rest)


def report(*subjects: schema.Subject, created: str = "2026-01-31T12:00:00+00:00") -> schema.Report:
    machine = schema.Machine(
        platform="Linux", python="3.11", torch="2.13", cpus=2, memory=1 << 34, devices=("H200",), driver="nvml"
    )
    return schema.Report(
        schema="lowtide-report/1",
        version="0.1.0",
        created=created,
        command="lowtide run",
        machine=machine,
        subjects=subjects,
    )


def suite_of(written: schema.Report) -> Element:
    # From bytes, as a CI system reads it: the declaration counts.
    root = ElementTree.fromstring(render_junit(written).encode())
    assert root.tag == "testsuites"
    (suite,) = root
    assert suite.tag == "testsuite"
    return suite


def case_of(*subjects: schema.Subject) -> Element:
    (case,) = suite_of(report(*subjects)).iter("testcase")
    return case


def properties(element: Element) -> dict[str | None, str | None]:
    return {item.get("name"): item.get("value") for item in element.findall("properties/property")}


def test_every_outcome_is_counted_and_has_its_element() -> None:
    outcomes: list[schema.Outcome] = ["clean", "clean", "leak", "leak", "leak", "error", "skipped", "unsupported"]
    written = report(*(subject(outcome) for outcome in outcomes))
    suite = suite_of(written)
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "8", "failures": "3", "errors": "1", "skipped": "2"}
    for tag, count in (("testcase", 8), ("failure", 3), ("error", 1), ("skipped", 2)):
        assert len(list(suite.iter(tag))) == count
    root = ElementTree.fromstring(render_junit(written))
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("8", "3", "1")


def test_an_empty_report_is_an_empty_suite() -> None:
    suite = suite_of(report())
    assert suite.get("tests") == "0"
    assert suite.find("testcase") is None


def test_a_failure_says_what_to_change() -> None:
    advised = msgspec.structs.replace(FINDING, remedy=None, advice="call close()")
    failure = case_of(subject("leak", findings=(advised,))).find("failure")
    assert failure is not None
    assert failure.get("message") == "112 B did not come back; call close()"
    assert "(112 B, since shutdown): 112 B did not come back; call close()" in (failure.text or "")


def test_a_leak_is_a_failure_named_by_resource_and_cause() -> None:
    failure = case_of(subject("leak", findings=(FINDING,))).find("failure")
    assert failure is not None
    assert failure.attrib == {"type": "tensors/lru-cache", "message": "112 B did not come back"}
    assert failure.text is not None
    assert failure.text.splitlines() == [
        "tensors/lru-cache (112 B, since shutdown): 112 B did not come back",
        "  held by supports_kw",
        "  count: 3",
        "  path:",
        "     layers  (module)  expected to stay",
        "  -> .supports_kw  (functools._lru_cache_wrapper)  should be gone, retains 96 B",
        "  allocated in forward, model.py:12",
        "  16 B of it is held by others too",
        "  trend: growth (kept growing)",
        "  remedy: supports_kw.cache_clear() gives back 111 B of 112 B",
        "  tried: gc.collect() gives nothing back",
        "  changed by trying: the cache is empty",
        "  fingerprint 0123456789abcdef",
    ]


def test_several_leaks_of_a_subject_are_one_failure() -> None:
    (failure,) = case_of(subject("leak", findings=(FINDING, FINDING))).findall("failure")
    assert failure.get("message") == "112 B did not come back (and 1 more)"
    assert failure.text is not None
    assert failure.text.count("did not come back") == 2


def test_a_suppressed_finding_does_not_name_the_failure() -> None:
    known = msgspec.structs.replace(FINDING, resource="pinned", suppressed_by="known.toml:3")
    failure = case_of(subject("leak", findings=(known, FINDING))).find("failure")
    assert failure is not None
    assert failure.attrib == {"type": "tensors/lru-cache", "message": "112 B did not come back"}
    assert failure.text is not None
    assert "  suppressed by known.toml:3" in failure.text


def test_a_clean_subject_with_a_suppressed_finding_passes_and_says_so() -> None:
    case = case_of(subject("clean", findings=(msgspec.structs.replace(FINDING, suppressed_by="known.toml:3"),)))
    assert [child.tag for child in case] == ["properties"]
    assert properties(case)["leakcheck.1.suppressed_by"] == "known.toml:3"


def test_a_leak_without_a_finding_says_its_reason() -> None:
    failure = case_of(subject("leak", reason="the worker died")).find("failure")
    assert failure is not None
    assert failure.attrib == {"type": "leak", "message": "the worker died"}


def test_an_error_says_its_reason() -> None:
    error = case_of(subject("error", reason="the worker died")).find("error")
    assert error is not None
    assert error.get("message") == "the worker died"


@pytest.mark.parametrize("outcome", ["skipped", "unsupported"])
def test_what_was_not_judged_is_skipped_with_its_reason(outcome: schema.Outcome) -> None:
    skipped = case_of(subject(outcome, reason="no card")).find("skipped")
    assert skipped is not None
    assert skipped.attrib == {"type": outcome, "message": "no card"}


def test_a_findings_facts_are_properties() -> None:
    second = msgspec.structs.replace(
        FINDING,
        resource="pinned",
        holder=None,
        remedy=None,
        trend=None,
        verdict=None,
        shared_bytes=0,
        tried=(),
        changed=(),
    )
    assert properties(case_of(subject("leak", findings=(FINDING, second)))) == {
        "leakcheck.1.resource": "tensors",
        "leakcheck.1.cause": "lru-cache",
        "leakcheck.1.bytes": "112",
        "leakcheck.1.count": "3",
        "leakcheck.1.device": "cuda:0",
        "leakcheck.1.stage": "shutdown",
        "leakcheck.1.fingerprint": "0123456789abcdef",
        "leakcheck.1.verdict": "reachable",
        "leakcheck.1.holder": "supports_kw",
        "leakcheck.1.trend": "growth",
        "leakcheck.1.remedy": "supports_kw.cache_clear()",
        "leakcheck.1.returns_bytes": "111",
        "leakcheck.1.shared_bytes": "16",
        "leakcheck.1.tried.1": "gc.collect()",
        "leakcheck.1.tried.1.returns_bytes": "0",
        "leakcheck.1.tried.2": "supports_kw.cache_clear()",
        "leakcheck.1.tried.2.returns_bytes": "111",
        "leakcheck.1.changed.1": "the cache is empty",
        "leakcheck.2.resource": "pinned",
        "leakcheck.2.cause": "lru-cache",
        "leakcheck.2.bytes": "112",
        "leakcheck.2.count": "3",
        "leakcheck.2.device": "cuda:0",
        "leakcheck.2.stage": "shutdown",
        "leakcheck.2.fingerprint": "0123456789abcdef",
    }


def test_advice_is_a_property_where_there_is_no_remedy() -> None:
    reported = msgspec.structs.replace(FINDING, advice="unmap it")
    facts = properties(case_of(subject("leak", findings=(reported, msgspec.structs.replace(reported, remedy=None)))))
    assert {name: value for name, value in facts.items() if "advice" in name} == {"leakcheck.2.advice": "unmap it"}


def test_the_time_is_that_of_the_stages() -> None:
    stage = schema.Stage(name="create", cycle=1, seconds=0.5, before=READINGS, after=READINGS)
    suite = suite_of(report(subject("clean", stages=(stage, stage)), subject("clean", stages=(stage,))))
    assert [case.get("time") for case in suite.iter("testcase")] == ["1.000", "0.500"]
    assert suite.get("time") == "1.500"


@pytest.mark.parametrize(
    ("node", "group", "name"),
    [
        ("tests/core/test_a.py::TestB::test_c[1]", "tests.core.test_a.TestB", "test_c[1]"),
        ("test_a.py::test_b[c::d/e.py]", "test_a", "test_b[c::d/e.py]"),
        ("run[tiny]", "lowtide", "run[tiny]"),
        ("run[a::b]", "lowtide", "run[a::b]"),
    ],
)
def test_names_are_split_as_pytest_splits_them(node: str, group: str, name: str) -> None:
    case = case_of(subject("clean", node))
    assert (case.get("classname"), case.get("name")) == (group, name)


def test_a_group_is_cleaned_of_what_xml_cannot_hold_too() -> None:
    assert case_of(subject("clean", "a\0b.py::test_c")).get("classname") == r"a\x00b"


def test_machine_and_what_was_not_measured_are_properties_of_the_suite() -> None:
    missing = (schema.NotMeasured(what="driver", why="two workers on one card"),)
    found = properties(suite_of(report(subject("clean", not_measured=missing), subject("clean", not_measured=missing))))
    assert found == {
        "version": "0.1.0",
        "command": "lowtide run",
        "platform": "Linux",
        "python": "3.11",
        "torch": "2.13",
        "devices": "H200",
        "driver": "nvml",
        "not-measured.driver": "two workers on one card",
    }


@pytest.mark.parametrize(
    ("created", "stamp"), [("2026-01-31T12:00:00+00:00", "2026-01-31T12:00:00+00:00"), ("now", None)]
)
def test_only_a_time_is_a_timestamp(created: str, stamp: str | None) -> None:
    assert suite_of(report(created=created)).get("timestamp") == stamp


@pytest.mark.parametrize(
    ("hostile", "read_back"),
    [
        ("<script>&\"'|`]]>", "<script>&\"'|`]]>"),
        ("a\0b\x1bc\ufffed\udc80", r"a\x00b\x1bc\ufffed\udc80"),
        ("tab\tline\nend", r"tab\tline\nend"),
        ("🌊 café", "🌊 café"),
        ("x" * (1 << 20), "x" * (1 << 20)),
    ],
    ids=["markup", "illegal", "space", "emoji", "long"],
)
def test_any_text_is_read_back_whole_but_for_what_xml_cannot_hold(hostile: str, read_back: str) -> None:
    finding = msgspec.structs.replace(FINDING, message=hostile, holder=hostile)
    case = case_of(subject("leak", hostile, reason=hostile, findings=(finding,)))
    assert case.get("name") == read_back
    assert properties(case)["leakcheck.1.holder"] == read_back
    failure = case.find("failure")
    assert failure is not None
    assert failure.get("message") == read_back
    assert failure.text is not None
    assert failure.text.startswith(read_back)
    assert f"  held by {read_back}\n" in failure.text

"""The OpenMetrics text: what Prometheus's own parser reads from it is what the report says."""

from __future__ import annotations

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from lowtide.reports import schema
from lowtide.reports.openmetrics import render_openmetrics
from tests.reports.small_reports import HOSTILE, finding, report, subject

Samples = dict[tuple[tuple[str, str], ...], float]


def samples_of(written: schema.Report, name: str) -> Samples:
    families = {family.name: family for family in text_string_to_metric_families(render_openmetrics(written))}
    found: Samples = {}
    for sample in families[name].samples:
        key = tuple(sorted(sample.labels.items()))
        assert key not in found
        found[key] = sample.value
    return found


def labels(**values: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(values.items()))


def test_the_residue_is_summed_by_resource_device_stage_and_subject() -> None:
    part = finding(resource="threads", bytes=0, count=2, device="")
    written = report(
        subject(finding(), finding(fingerprint="other", bytes=1, count=1), finding(parts=(part,), device="cuda:1")),
        subject(finding(suppressed_by="known", bytes=5), name="life"),
    )
    where = {"stage": "shutdown", "subject": "tests/test_a.py::test_b"}
    one = labels(resource="tensors", device="cuda:0", **where)
    two = labels(resource="tensors", device="cuda:1", **where)
    threads = labels(resource="threads", device="", **where)
    known = labels(resource="tensors", device="cuda:0", stage="shutdown", subject="life")
    assert samples_of(written, "lowtide_residue_bytes") == {one: (48 << 20) + 1, two: 48 << 20, threads: 0, known: 5}
    assert samples_of(written, "lowtide_residue_things") == {one: 4, two: 3, threads: 2, known: 3}


def test_each_subject_has_the_state_of_its_outcome() -> None:
    written = report(subject(), subject(name="life", outcome="error", reason="timed out"))
    states = samples_of(written, "lowtide_outcome")
    assert [key for key, value in states.items() if value] == [
        labels(lowtide_outcome="clean", subject="tests/test_a.py::test_b"),
        labels(lowtide_outcome="error", subject="life"),
    ]
    assert len(states) == 10


def test_the_run_has_its_time_and_its_versions() -> None:
    assert list(samples_of(report(), "lowtide_run_timestamp_seconds").values()) == [1769860800]
    assert list(samples_of(report(), "lowtide_run")) == [
        labels(version="0.1.0", torch="2.13", devices="H200", driver="nvml")
    ]
    assert "timestamp" not in render_openmetrics(report(created="now"))


def test_any_text_is_one_label() -> None:
    written = report(subject(finding(stage=HOSTILE, device=HOSTILE), name=HOSTILE), version=HOSTILE)
    (key,) = samples_of(written, "lowtide_residue_bytes")
    shown = 'a"b\\c\\r\n\\x3a:error::x\n%0A,file=y:z {0} [text](1) <b>'
    assert dict(key)["subject"].startswith(shown)
    render_openmetrics(written).encode()

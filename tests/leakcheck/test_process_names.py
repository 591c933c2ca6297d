"""How a report names another process: parent, role, rank and device, of real child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from lowtide.leakcheck.processes.messages import Levels, Read, encode
from lowtide.leakcheck.processes.process_growth import HOST, ProcessGrowth
from lowtide.leakcheck.processes.process_levels import describe_process
from lowtide.probes.processes.agents import Agents
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import decode
from tests.waiting import wait_until

WAITING = "import sys; print('ready', flush=True); sys.stdin.read()"


@contextmanager
def child(code: str = WAITING, *, title: str = "", variables: Mapping[str, str] | None = None) -> Iterator[int]:
    """A Python that waits; `title` is what it calls itself."""
    clean = {name: value for name, value in os.environ.items() if "RANK" not in name}
    process = subprocess.Popen(
        [title or sys.executable, "-c", code],
        executable=sys.executable,
        env={**clean, **(variables or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_title_says_role_and_rank() -> None:
    with child(title="VLLM::Worker_TP1") as pid:
        named = describe_process(pid, devices=("cuda:1",))
    assert named == ProcessName(
        pid=pid,
        name="VLLM::Worker_TP1",
        parent=os.getpid(),
        role="vllm worker",
        rank=1,
        ranks="tp1",
        device="cuda:1",
    )
    assert named.text == f"pid {pid} (VLLM::Worker_TP1, rank 1)"


def test_several_dimensions_are_named_instead_of_one_number() -> None:
    with child(title="sglang::scheduler_DP0_TP2") as pid:
        named = describe_process(pid)
    assert (named.role, named.rank, named.ranks) == ("sglang scheduler", None, "dp0 tp2")
    assert named.text == f"pid {pid} (sglang::scheduler_DP0_TP2, rank dp0 tp2)"


def test_the_environment_says_the_rank() -> None:
    with child(variables={"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}) as pid:
        assert describe_process(pid).rank == 3
    with child(variables={"VLLM_DP_RANK": "2"}) as pid:
        assert describe_process(pid).rank == 2


def test_a_rank_that_a_process_gives_itself_is_known_by_its_agent() -> None:
    agents = Agents()
    agents.start()
    try:
        with child(f"import os; os.environ['RANK'] = '1'; {WAITING}") as pid:
            wait_until(lambda: agents.has_agent(pid))
            levels = msgspec.msgpack.decode(agents.ask(pid, encode(Read())), type=Levels)
            assert describe_process(pid).rank is None
            assert describe_process(pid, variables=levels.variables).rank == 1
    finally:
        agents.stop()


def test_a_process_without_any_of_that_says_nothing() -> None:
    with child() as pid:
        named = describe_process(pid)
    assert (named.role, named.rank, named.ranks, named.device) == ("", None, "", "")
    assert named.text == f"pid {pid} ({named.name})"


def test_a_process_that_has_ended_says_nothing() -> None:
    with child(title="VLLM::Worker_TP1") as pid:
        pass
    named = describe_process(pid)
    assert (named.parent, named.role, named.rank) == (None, "", None)


def test_a_finding_names_the_rank() -> None:
    growth = ProcessGrowth()
    for level in (100, 116, 132, 148):
        # The device is known from the second turn on: it is one process all the same.
        device = "cuda:1" if level > 100 else ""
        growth.note(ProcessName(pid=7, name="VLLM::Worker_TP1", rank=1, device=device), {HOST: level << 20})
    (finding,) = growth.findings()
    assert finding.message.startswith("pid 7 (VLLM::Worker_TP1, rank 1): host memory")
    assert finding.process is not None
    assert finding.process.device == "cuda:1"


def test_a_report_of_an_earlier_version_is_readable() -> None:
    report = (
        '{"schema": "lowtide-report/1", "version": "0.2", "created": "", "command": "", "machine": {"platform": "",'
        ' "python": "", "torch": "", "cpus": 1, "memory": 1, "devices": [], "driver": ""}, "subjects": [{"id": "x",'
        ' "outcome": "clean", "stages": [], "findings": [{"resource": "tensors", "cause": "unknown", "bytes": 1,'
        ' "count": 1, "device": "cpu", "stage": "infer", "message": "", "fingerprint": "", "process":'
        ' {"pid": 7, "name": "core"}}]}]}'
    )
    assert decode(report.encode()).subjects[0].findings[0].process == ProcessName(pid=7, name="core")

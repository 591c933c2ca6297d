"""`lowtide ask`: what has become more in a running program's processes since a mark."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from lowtide.leakcheck.cli import running as ask
from lowtide.leakcheck.cli.running import find_agents
from lowtide.probes.processes.agents import Agents
from lowtide.reports.schema import Finding, Subject, decode
from tests.leakcheck.cli.loaded_server import LoadedServer

EXEC = (sys.executable, "-m", "lowtide", "exec", "--settle", "0.3", "--")


def asked(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lowtide", "ask", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def since(server: LoadedServer, *words: object) -> tuple[int, Subject]:
    done = asked(server.pid, "since", "mark", "--json", *words)
    (subject,) = decode(done.stdout.encode()).subjects
    return done.returncode, subject


def of_server(subject: Subject) -> Finding:
    (finding,) = subject.findings
    assert finding.process is not None
    assert finding.process.name == "python server.py"
    return finding


@pytest.mark.nightly
def test_a_list_that_grows_is_named_in_its_process_by_request_and_as_a_whole(tmp_path: Path) -> None:
    with LoadedServer(tmp_path, keeps=True, wrapped_by=EXEC) as server:
        server.serve(300)
        marked = asked(server.pid, "mark")
        requests = server.serve(300)
        by_request, in_all = since(server, "--requests", requests), since(server)
        allowed = since(server, "--max-growth", "100MiB")
        unknown = asked(server.pid, "since", "warm")
    assert re.search(r"^lowtide: pid \d+ \(python server.py\) is marked as 'mark'", marked.stdout, re.MULTILINE)
    assert (marked.returncode, by_request[0], in_all[0]) == (0, 1, 1)
    finding = of_server(by_request[1])
    assert (finding.holder, [hop.edge for hop in finding.path]) == ("__main__.KEPT", ["__main__", ".KEPT"])
    assert f": __main__.KEPT takes 1 item (2.0 KiB) in each of {requests} requests, " in finding.message
    finding = of_server(in_all[1])
    assert f": __main__.KEPT has {requests} items (" in finding.message
    assert " more than at mark 'mark': " in finding.message
    assert (allowed[0], of_server(allowed[1]).suppressed_by) == (0, "--max-growth 100.0 MiB")
    assert (unknown.returncode, unknown.stderr) == (2, f"lowtide: pid {server.pid} has no mark 'warm', but 'mark'\n")


@pytest.mark.nightly
def test_its_quiet_twin_has_nothing_more(tmp_path: Path) -> None:
    with LoadedServer(tmp_path, keeps=False, wrapped_by=EXEC) as server:
        server.serve(300)
        asked(server.pid, "mark")
        requests = server.serve(300)
        for words in ((), ("--requests", requests)):
            status, subject = since(server, *words)
            assert (status, subject.outcome, subject.findings, subject.not_measured) == (0, "clean", (), ())


HOLDS = """
import ctypes, socket, sys
held, blocks, library = [], [], ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
for line in sys.stdin:
    if line == "descriptors\\n":
        held += [socket.socket() for _ in range(40)]
    elif line == "C\\n":
        for _ in range(200):
            ctypes.memset(library.malloc(1 << 16), 1, 1 << 16)
    elif line == "tensors\\n":
        import torch
        first = torch.ones(4)
        class Node: pass
        blocks = Node()
    elif line == "chain\\n":
        for _ in range(40):
            node, node.tensor, node.next = Node(), torch.ones(1 << 16), blocks
            blocks = node
    print("done", flush=True)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """A process with an agent that takes what it is told."""
    agents = Agents()
    agents.start()
    try:
        with subprocess.Popen(
            [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as running:
            try:
                told(running, "begin")
                yield running
            finally:
                running.kill()
    finally:
        agents.stop()


def told(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


@pytest.mark.parametrize(
    ("before", "word", "resource", "said"),
    [
        (
            "nothing",
            "descriptors",
            "file-descriptors",
            "40 file descriptors more than at mark 'mark': 40 of socket:[N]",
        ),
        ("nothing", "C", "host-memory", " more than at mark 'mark': malloc in use has "),
        (
            "tensors",
            "chain",
            "tensors",
            "(10.0 MiB) more than at mark 'mark': __main__.Node behind each other by .next",
        ),
    ],
)
@pytest.mark.nightly
def test_what_no_container_has_is_told_by_what_it_is(
    process: subprocess.Popen[str], before: str, word: str, resource: str, said: str
) -> None:
    told(process, before)
    assert asked(process.pid, "mark").returncode == 0
    told(process, word)
    done = asked(process.pid, "since", "mark", "--json")
    (subject,) = decode(done.stdout.encode()).subjects
    (finding,) = subject.findings
    assert (done.returncode, finding.resource) == (1, resource)
    assert said in finding.message


def test_that_they_do_not_rest_is_said_beside_the_report(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ask, "RESTS_WITHIN_S", -1.0)
    ask.ask(process.pid, ask.Asked.MARK)
    capsys.readouterr()
    with pytest.raises(typer.Exit) as ended:
        ask.ask(process.pid, ask.Asked.SINCE, "mark", as_json=True)
    out, err = capsys.readouterr()
    (subject,) = decode(out.encode()).subjects
    assert (ended.value.exit_code, subject.outcome) == (0, "clean")
    assert err.startswith("lowtide: the processes are still at work, which is counted")


def refused(*words: Any) -> str:
    done = asked(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_mark_that_nobody_has_made_is_none(process: subprocess.Popen[str]) -> None:
    said = refused(process.pid, "since", "warm")
    assert said == f"lowtide: pid {process.pid} has no mark 'warm': make one by `lowtide ask {process.pid} mark`\n"


@pytest.mark.nightly
def test_a_process_that_does_not_answer_in_time_is_said_to_be_stopped(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    assert refused(process.pid, "mark").endswith(
        f"lowtide: pid {process.pid} did not answer within 5 s: it is stopped\n"
    )


def test_a_process_that_is_not_there_has_no_agent_or_is_another_user_s_is_refused() -> None:
    assert refused(2**22 + 1, "mark") == f"lowtide: there is no process {2**22 + 1}: `lowtide ps` lists engines\n"
    with subprocess.Popen(["sleep", "600"]) as plain:
        assert f"lowtide: pid {plain.pid} (sleep) has no agent, nor has a process below it: " in refused(
            plain.pid, "mark"
        )
        plain.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts another user's process")
def test_another_user_s_process_is_refused_where_it_is_not_to_be_looked_into() -> None:
    with subprocess.Popen(["sleep", "600"], user="nobody") as other:
        assert refused(other.pid, "mark") == (
            f"lowtide: pid {other.pid} is nobody's, and agents answer their own user alone: run lowtide as nobody\n"
        )
        assert find_agents(other.pid, looks=True) is None
        other.kill()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("1", "mark", "a/b"), "lowtide: 'a/b' is no name of a mark: use letters, digits, '-', '_' and '.', 60 at"),
        (("1", "mark", "--requests", "3"), "lowtide: --requests, --max-growth and --json are about what has become"),
        (("1", "since", "mark", "--requests", "-3"), "lowtide: --requests -3 is not possible: use 1 or more"),
        (("1", "until", "mark"), "lowtide: Invalid value for 'mark|since': "),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], said: str) -> None:
    assert refused(*words).startswith(said)


@pytest.mark.nightly
def test_a_process_with_the_number_of_one_that_was_marked_is_not_compared(process: subprocess.Popen[str]) -> None:
    assert asked(process.pid, "mark").returncode == 0
    agents = Agents.of_process(process.pid)
    assert agents is not None
    assert agents.folder is not None
    file = agents.folder / "mark-mark"
    ((pid, moment),) = ask.msgspec.msgpack.decode(file.read_bytes())["moments"].items()
    file.write_bytes(ask.msgspec.msgpack.encode({"moments": {pid: {**moment, "started": moment["started"] - 1}}}))
    done = asked(process.pid, "since", "mark", "--json")
    (subject,) = decode(done.stdout.encode()).subjects
    assert (done.returncode, [each.why for each in subject.not_measured]) == (0, ["it began after the mark"])

"""Programs print the same and end with the same code, whether an agent is in them or not; `make test-all` runs more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.leakcheck.processes.messages import Read, encode
from lowtide.probes.host.process_files import catches, command_line, waits_for_a_signal
from lowtide.probes.processes import agents as agents_module
from lowtide.probes.processes.agents import BOOTSTRAP, AgentError, Agents, NoAgentError
from tests.probes.agent_programs import PROGRAMS, Outcome, outcomes
from tests.waiting import HANG_S

QUICK = [name for name, program in PROGRAMS.items() if program.quick]


@pytest.fixture
def agents() -> Iterator[Agents]:
    started = Agents()
    started.start()
    yield started
    started.stop()


def without(agents: Agents) -> dict[str, str]:
    """This process's variables as if there were no agents."""
    before = {name: value for name, value in os.environ.items() if name not in agents.environment()}
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", str(BOOTSTRAP))]
    return {**before, **({"PYTHONPATH": os.pathsep.join(path)} if path else {})}


@pytest.mark.nightly
def test_programs_do_not_notice_an_agent(agents: Agents, tmp_path: Path) -> None:
    found: list[dict[str, Outcome]] = []
    for environment in (without(agents), {**without(agents), **agents.environment()}):
        # The same name for both, which programs print.
        found.append(outcomes(sys.executable, environment, tmp_path / "run", QUICK))
        shutil.rmtree(tmp_path / "run")
    assert found[0] == found[1]


WATCHED = """
from lowtide.probes.host.process_tree import ProcessTree, TreeMemory
from lowtide.probes.processes.agents import Agents
agents, tree = Agents(), ProcessTree()
agents.start()
tree.start()
memory = TreeMemory(tree)
"""


def test_no_signal_is_lost_in_a_process_that_puts_agents_into_its_forks() -> None:
    code = f"{WATCHED}{PROGRAMS['SIGALRM in forks'].text}agents.stop()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lost, last = run.stdout.splitlines()
    assert last.startswith("True")
    # Python's own `logging` has functions that run at forks: _acquireLock, _releaseLock.
    assert [line for line in lost if "Lock" not in line] == []


WAITS = {
    "a read": "sys.stdin.read(1)",
    "a sleep": "import time\nwhile not select.select([0], [], [], 0)[0]: time.sleep(0.05)",
    "a wait for a blocked signal": """
asked.append(signal.sigtimedwait([signal.SIGUSR1], 120).si_signo)
""",
    "a lock": """
lock = threading.Lock()
lock.acquire()
threading.Thread(target=lambda: (sys.stdin.read(1), lock.release())).start()
lock.acquire()
""",
    "an event loop": """
import asyncio
async def main():
    read = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(read), sys.stdin)
    await read.read(1)
asyncio.run(main())
""",
}
"""How programs wait for a character on standard input, or for the signal that comes with it."""

AROUND = """
import os, select, signal, sys, threading
asked = []
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("ready", flush=True)
{wait}
print(asked, threading.active_count(), signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def test_a_program_goes_on_after_a_question_as_without_it(agents: Agents) -> None:
    printed: dict[str, list[str]] = {}
    for is_asked in (False, True):
        for name, wait in WAITS.items():
            process = subprocess.Popen(
                [sys.executable, "-c", AROUND.format(wait=wait)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            if is_asked:
                agents.ask(process.pid, encode(Read()))
            if "signal" in name:
                process.send_signal(10)
            printed.setdefault(name, []).append(process.communicate("x")[0])
            assert process.returncode == 0
    assert all(before == after for before, after in printed.values()), printed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())", "blocks signal 58"),
        ("signal.signal(58, signal.SIG_DFL)", "has taken back the handler of signal 58"),
        ("signal.signal(signal.SIGUSR1, print); print('ready', flush=True); signal.pause()", "waits for any signal"),
    ],
)
def test_a_program_that_would_notice_the_signal_is_not_sent_it(agents: Agents, text: str, why: str) -> None:
    code = f"import signal, sys\n{text}\nprint('ready', flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if "pause" in text:
            until = time.monotonic() + 60
            while not waits_for_a_signal(process.pid):
                assert time.monotonic() < until
                time.sleep(0.01)
        with pytest.raises(AgentError, match=why):
            agents.ask(process.pid, encode(Read()))
        assert process.poll() is None
        process.kill()


def test_a_fork_that_executes_another_program_as_it_is_asked_has_no_agent(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a child that somebody spawns, between two readings of it."""
    code = "import os, sys; print('ready', flush=True); sys.stdin.read(1); os.execv('/bin/sleep', ['sleep', '20'])"

    def executed(pid: int, number: int) -> bool | None:
        if process.stdin is not None and not process.stdin.closed:
            process.stdin.close()
        until = time.monotonic() + HANG_S
        while not command_line(pid).startswith("sleep "):
            assert time.monotonic() < until
            time.sleep(0.001)
        return catches(pid, number)

    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert agents.has_agent(process.pid)
        monkeypatch.setattr(agents_module, "catches", executed)
        with pytest.raises(NoAgentError, match="has no agent"):
            agents.ask(process.pid, encode(Read()))
        assert process.poll() is None
        process.kill()

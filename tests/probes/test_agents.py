"""Agents come into Python processes however these are started, answer, and are not noticed otherwise."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from lowtide.leakcheck.processes.messages import Begin, Levels, Read, RecordDriver, encode
from lowtide.probes.host.process_files import AGENTS_SIGNAL, MARK
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.processes import agents as module
from lowtide.probes.processes.agents import BOOTSTRAP, AgentError, Agents, NoAgentError, agent_environment
from tests.waiting import HANG_S, wait_until

READ = encode(Read())


@pytest.fixture
def agents() -> Iterator[Agents]:
    started = Agents()
    started.start()
    yield started
    started.stop()


def program(text: str, *flags: str, **environment: str) -> subprocess.Popen[str]:
    """Runs it until its input ends; it has printed a line by then."""
    process = subprocess.Popen(
        [sys.executable, *flags, "-c", f"{text}\nimport sys; print('ready', flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> str:
    """What it has printed besides."""
    out, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    return out


def levels(agents: Agents, pid: int) -> Levels:
    import msgspec

    return msgspec.msgpack.decode(agents.ask(pid, READ, 60.0), type=Levels)


_QUEUED = """
import time, torch
end = time.monotonic() + 60
while not [call for call, _ in torch.cuda._queued_calls if "DriverTrace.start" in str(call)]:
    assert time.monotonic() < end
    time.sleep(0.01)
"""


def test_a_process_is_asked_the_first_question_when_it_has_torch() -> None:
    agents = Agents(encode(RecordDriver()))
    agents.start()
    try:
        end(program(_QUEUED))
    finally:
        agents.stop()


def test_a_first_question_that_fails_is_told() -> None:
    agents = Agents(b"no question")
    agents.start()
    process = program("import torch")
    try:
        told = Path(f"{agents.folder}/{process.pid}.error")
        wait_until(lambda: told.exists() and bool(told.read_text()))
        assert told.read_text().startswith("ValidationError: ")
        # It answers others all the same.
        assert levels(agents, process.pid).has_torch
    finally:
        end(process)
        agents.stop()


def _waits(connection: Connection) -> None:
    connection.recv()


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_child_of_multiprocessing_has_one(agents: Agents, method: str) -> None:
    if method == "forkserver":
        # One that another test has left was started without agents.
        _end_forkserver()
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    child = context.Process(target=_waits, args=(there,))
    child.start()
    try:
        assert child.pid is not None
        wait_until(lambda: agents.has_agent(child.pid or 0))
        assert levels(agents, child.pid).tensors is not None
    finally:
        here.send(None)
        child.join()
        if method == "forkserver":
            _end_forkserver()
    assert not agents.has_agent(child.pid)


def _end_forkserver() -> None:
    from multiprocessing import forkserver

    forkserver._forkserver._stop()  # type: ignore[attr-defined]


FAMILY = """
import os, subprocess, sys
if not os.fork():
    sys.stdin.read()
    os._exit(0)
CHILD = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"])
"""


def test_a_program_has_one_and_so_have_its_forks_and_what_it_starts(agents: Agents) -> None:
    process = program(FAMILY)
    family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children())]
    assert len(family) == 3
    for pid in family:
        wait_until(functools.partial(agents.has_agent, pid))
        assert not levels(agents, pid).has_torch
    end(process)


def test_the_program_does_not_see_it(agents: Agents, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.own_sitecustomize = __file__")
    text = """
import sys, threading, os
print(sys.own_sitecustomize, threading.active_count(), [p for p in sys.path if "bootstrap" in p])
print(sorted(set(sys.modules) & {"torch", "numpy", "msgspec", "socket", "threading", "lowtide", "json"}))
import sitecustomize
print(sitecustomize.__file__)
"""
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path)])
    run = subprocess.run(
        [sys.executable, "-S", "-c", "import site; site.main()\n" + text],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    own = str(tmp_path / "sitecustomize.py")
    assert run.stdout.splitlines()[0] == f"{own} 1 []"
    assert run.stdout.splitlines()[1] == "['threading']"
    assert run.stdout.splitlines()[2] == own
    assert run.stderr == ""


@pytest.mark.parametrize("text", ["raise ValueError('mine')", "import not_there"])
def test_an_error_of_the_programs_own_sitecustomize_is_its_own(agents: Agents, tmp_path: Path, text: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(text)
    outputs = []
    for path in ([os.environ["PYTHONPATH"], str(tmp_path)], [str(tmp_path)]):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        run = subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True, env=environment)
        outputs.append((run.stdout, run.stderr.splitlines()[-1:], run.returncode))
    assert outputs[0] == outputs[1]


FORKS = """
import os
for _ in range(3):
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python warns of it since 3.12")
def test_a_fork_of_a_process_with_an_agent_is_one_of_a_single_thread(agents: Agents) -> None:
    process = program(FORKS, "-W", "error")
    wait_until(lambda: agents.has_agent(process.pid))
    levels(agents, process.pid)
    end(process)


def test_after_a_fork_it_answers_again(agents: Agents) -> None:
    process = program(
        "import os\nfor _ in range(3):\n    pid = os.fork()\n    if not pid: os._exit(0)\n    os.waitpid(pid, 0)"
    )
    assert levels(agents, process.pid).tensors == {}
    assert psutil.Process(process.pid).num_threads() == 2
    end(process)


def test_a_process_without_one_says_why(agents: Agents) -> None:
    process = program("", "-I")
    with pytest.raises(NoAgentError, match=f"pid {process.pid} has no agent: no Python, or started without"):
        agents.ask(process.pid, READ)
    end(process)
    with pytest.raises(NoAgentError, match=f"pid {process.pid} has ended"):
        agents.ask(process.pid, READ)


def test_a_stopped_process_is_unresponsive_within_the_limit(agents: Agents) -> None:
    process = program("")
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    with pytest.raises(AgentError, match=f"pid {process.pid} did not answer within 0.3 s: it is stopped"):
        agents.ask(process.pid, READ, patience=0.3)
    os.kill(process.pid, signal.SIGCONT)
    assert levels(agents, process.pid).tensors == {}
    end(process)


ENDS_AS_IT_ANSWERS = """
import os, sys, types
answers = types.ModuleType("lowtide.leakcheck.processes.answers")
answers.answer = lambda *_: os.kill(os.getpid(), 9)
sys.modules[answers.__name__] = answers
"""


def test_a_process_that_ends_in_the_middle_of_an_answer_has_ended(agents: Agents) -> None:
    process = program(ENDS_AS_IT_ANSWERS)
    with process, pytest.raises(NoAgentError, match=f"pid {process.pid} has ended"):
        agents.ask(process.pid, READ)


def test_a_question_that_is_none_and_a_failure_come_back_as_text(agents: Agents) -> None:
    process = program("")
    with pytest.raises(AgentError, match=rf"the agent of pid {process.pid} failed: ValidationError"):
        agents.ask(process.pid, encode(Levels(tensors={}, arenas={}, reserved={}, has_torch=False)))
    assert levels(agents, process.pid).tensors == {}
    end(process)


def test_another_version_is_refused(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    process = program("")
    monkeypatch.setattr(module._agent(), "MAGIC", b"LOWTIDE0")
    with pytest.raises(AgentError, match="is of another version of lowtide"):
        agents.ask(process.pid, READ)
    end(process)


ASKS_AS_ANOTHER_USER = """
import os, socket, sys
os.setgid(65534), os.setuid(65534)
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    try:
        connection.sendall(bytes.fromhex(sys.argv[2]))
        print(connection.recv(100))
    except ConnectionError:
        print(b"")
"""


def program_with_torch(folder: Path, text: str = "") -> subprocess.Popen[str]:
    """A program that has imported a library of torch's name, and forgotten it."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("from . import part")
    (folder / "torch" / "part.py").touch()
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(folder)])
    return program(f"import sys, torch; torch.part; del sys.modules['torch']\n{text}", PYTHONPATH=path)


@pytest.fixture
def listening(agents: Agents, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that listens all the time, since it has torch; and its socket."""
    process = program_with_torch(tmp_path)
    assert agents.folder is not None
    yield process, agents.folder / f"{process.pid}.sock"
    end(process)


CLOSES_ALL = """
import atexit, os, socket, time
while not os.path.exists(f"{os.environ['LOWTIDE_AGENTS']}/{os.getpid()}.sock"):
    time.sleep(0.01)
os.closerange(3, 64)
pairs = [socket.socketpair() for _ in range(8)]
if not os.fork():
    os._exit(0)
os.wait()
for here, there in pairs:
    here.sendall(b"data")
atexit.register(lambda: print([there.recv(100) for here, there in pairs] == [b"data"] * 8))
"""


def test_a_descriptor_that_the_program_has_closed_and_opened_again_is_its_own(agents: Agents, tmp_path: Path) -> None:
    process = program_with_torch(tmp_path, CLOSES_ALL)
    for _ in range(3):
        assert levels(agents, process.pid).tensors == {}
        time.sleep(0.3)
    assert end(process) == "True\n"


def test_a_process_with_torch_answers_while_its_main_thread_handles_no_signal(
    agents: Agents, listening: tuple[subprocess.Popen[str], Path]
) -> None:
    process, path = listening
    wait_until(path.exists)
    assert psutil.Process(process.pid).num_threads() == 2
    assert levels(agents, process.pid).tensors == {}


def test_a_process_that_was_killed_has_ended_though_nobody_has_waited_for_it(agents: Agents, tmp_path: Path) -> None:
    assert agents.folder is not None
    with program_with_torch(tmp_path) as process:
        path = agents.folder / f"{process.pid}.sock"
        wait_until(path.exists)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert path.exists()
        assert not agents.has_agent(process.pid)
        with pytest.raises(NoAgentError, match=f"pid {process.pid} has ended"):
            agents.ask(process.pid, READ)


def _waits_in_a_library(said: Connection) -> None:
    lock = ctypes.create_string_buffer(128)
    lock_it = ctypes.CDLL(None).pthread_mutex_lock
    lock_it(lock)
    said.send(os.getpid())
    lock_it(lock)


def test_a_fork_with_torch_answers_while_its_main_thread_handles_no_signal(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch") or ModuleType("torch"))
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_waits_in_a_library, args=(there,))
    child.start()
    try:
        assert child.pid == here.recv()
        assert agents.folder is not None
        # Or else it is woken, too.
        wait_until((agents.folder / f"{child.pid}.sock").exists)
        assert levels(agents, child.pid).tensors is not None
        assert psutil.Process(child.pid).num_threads() == 1 + len(module._agent().found().folders)
    finally:
        child.kill()
        child.join()


def test_forks_are_told_once_however_often_agents_begin() -> None:
    hook = module._agent()._stay_with_torch
    for _ in range(3):
        again = Agents()
        again.start()
        again.stop()
    assert [function for *_, function in multiprocessing.util._afterfork_registry].count(hook) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as another user")
def test_another_user_is_not_answered(agents: Agents, listening: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = listening
    wait_until(path.exists)
    assert agents.folder is not None
    # The folder alone keeps others out; here it does not.
    agents.folder.chmod(0o777)
    path.chmod(0o777)
    question = module._agent().MAGIC + len(READ).to_bytes(8, "big") + READ
    command = [sys.executable, "-c", ASKS_AS_ANOTHER_USER, str(path), question.hex()]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout == "b''\n"
    assert levels(agents, process.pid).tensors == {}


def test_a_question_over_the_limit_is_refused_before_it_is_read(listening: tuple[subprocess.Popen[str], Path]) -> None:
    _, path = listening
    wait_until(path.exists)
    agent = module._agent()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(agent.MAGIC + (agent.MOST_BYTES + 1).to_bytes(8, "big"))
        assert b"!this agent speaks LOWTIDE1" in connection.recv(100)


def test_a_silent_connection_holds_up_no_question(
    agents: Agents, listening: tuple[subprocess.Popen[str], Path]
) -> None:
    process, path = listening
    wait_until(path.exists)
    with contextlib.ExitStack() as silent:
        for _ in range(10):
            silent.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
        agents.ask(process.pid, READ, patience=4.0)


def test_the_folder_is_this_users_alone_and_goes_with_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    before = dict(os.environ)
    agents = Agents()
    agents.start()
    agents.start()
    folder = agents.folder
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["PYTHONPATH"] == f"{BOOTSTRAP}{os.pathsep}mine"
    # The mark is there where a tree is followed, too.
    assert agents.environment().keys() - {MARK} == {"PYTHONPATH", "LOWTIDE_AGENTS", "LOWTIDE_AGENT_ROOT"}
    assert agents.environment() == agent_environment()
    agents.stop()
    agents.stop()
    assert not folder.exists()
    assert dict(os.environ) == before
    assert agents.environment() == {}


def test_the_signal_is_known_by_one_number_and_handled_only_meanwhile() -> None:
    before = signal.getsignal(AGENTS_SIGNAL)
    outer, inner = Agents(), Agents()
    outer.start()
    inner.start()
    # It may be there already: of whoever checks these tests.
    assert module._agent().SIGNAL == AGENTS_SIGNAL
    inner.stop()
    assert module._agent().found() is not None
    outer.stop()
    assert signal.getsignal(AGENTS_SIGNAL) == before


@pytest.fixture
def folder_of_the_dead(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a run that was killed; where tests beside this one, which remove such, do not look."""
    place = tempfile.mkdtemp(prefix="lt-", dir="/tmp")
    monkeypatch.setenv("TMPDIR", place)
    monkeypatch.setattr(tempfile, "tempdir", None)
    code = (
        "import os; from lowtide.probes.processes.agents import Agents; a = Agents(); a.start(); "
        "print(a.folder, flush=True); os.kill(os.getpid(), 9)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    folder = Path(run.stdout.strip())
    assert folder.is_dir()
    assert str(folder.parent) == place
    yield folder
    shutil.rmtree(place, ignore_errors=True)


def test_the_next_run_removes_what_a_killed_one_has_left(folder_of_the_dead: Path, agents: Agents) -> None:
    assert not folder_of_the_dead.exists()
    assert agents.folder is not None
    other = Agents()
    other.start()
    assert agents.folder.exists()
    other.stop()


@pytest.mark.parametrize("whose", ["another user's", "another container's"])
def test_what_is_not_known_to_be_left_by_this_users_dead_stays(
    folder_of_the_dead: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    if whose == "another user's":
        monkeypatch.setattr(module.os, "geteuid", lambda: 65534)
    else:
        (folder_of_the_dead / "run").write_text("the same host pid:[4026531000]")
    agents = Agents()
    agents.start()
    agents.stop()
    assert folder_of_the_dead.exists()


def test_a_folder_that_another_user_calls_one_of_agents_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.gettempdir(), f"lowtide-agents-{os.getppid()}-x")
    folder.mkdir()
    try:
        assert os.getppid() in module.processes_with_agents()
        monkeypatch.setattr(module.os, "geteuid", lambda: os.getuid() + 1)
        assert os.getppid() not in module.processes_with_agents()
    finally:
        folder.rmdir()


def test_an_outer_run_keeps_its_place_in_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(BOOTSTRAP), "mine"]))
    agents = Agents()
    agents.start()
    agents.stop()
    assert os.environ["PYTHONPATH"] == os.pathsep.join([str(BOOTSTRAP), "mine"])


def test_without_a_path_before_there_is_none_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    agents = Agents()
    agents.start()
    agents.stop()
    assert "PYTHONPATH" not in os.environ


def test_a_child_with_tensors_says_how_much_and_follows_stages(agents: Agents) -> None:
    process = program("import torch; HELD = torch.zeros(3 << 20, dtype=torch.uint8)")
    agents.ask(process.pid, encode(Begin(stage="infer", cycle=1)), 60.0)
    found = levels(agents, process.pid)
    assert found.has_torch
    assert 3 << 20 <= found.tensors["cpu"] < 4 << 20
    assert found.of("cpu") == found.tensors["cpu"]
    assert found.of("cuda") == 0
    # torch alone takes more than that of each, and the tensor is in neither.
    assert found.heaps["malloc in use"] > 16 << 20
    assert found.heaps["Python's heap in use"] > 16 << 20
    held = sum(found.heaps.values())
    end(process)
    other = program("import torch; HELD = [torch.zeros(64 << 20, dtype=torch.uint8).fill_(1), b'x' * (32 << 20)]")
    more = sum(levels(agents, other.pid).heaps.values()) - held
    end(other)
    assert 24 << 20 < more < 48 << 20


FORKS_AND_COUNTS = """
import atexit, os
from lowtide.probes.host.counters import CounterReader
from lowtide.probes.host.readings import read_host

def counted():
    return sorted(CounterReader(None, card=False).read().items["file-descriptors"]), read_host().descriptors

before = counted()
kept = os.open("/dev/null", os.O_RDONLY)
for _ in range(2):
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
os.close(kept)
atexit.register(print, before == counted())
"""


def test_its_socket_is_no_descriptor_of_the_program(agents: Agents) -> None:
    process = program(FORKS_AND_COUNTS)
    assert end(process) == "True\n"


def test_agents_know_processes_that_nobody_here_has_started(agents: Agents) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        wait_until(lambda: agents.has_agent(child.pid))
        assert agents.elsewhere(()) == [child.pid]
        assert agents.elsewhere({child.pid}) == []
        assert agents.folder is not None
        # As if it had ended, and a later process of another program had its number.
        (agents.folder / f"{os.getppid()}.agent").touch()
        assert agents.elsewhere(()) == [child.pid]
        tree = ProcessTree()
        tree.adopt(agents.elsewhere(()))
        assert tree.orphans([]) == [child.pid]
        assert child.pid in tree.descendants()
        child.communicate(b"\n")
    assert agents.elsewhere(()) == []
    assert tree.orphans([]) == []


def test_without_agents_there_is_nothing_to_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWTIDE_AGENTS", raising=False)
    assert agent_environment() == {}


@pytest.fixture
def half_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A package whose import waits, once it has begun, until it is told to go on; then it replaces a module of its own.

    As `importlib` does with `importlib._bootstrap`: whoever imports `importlib.machinery` before gets a second one.
    """
    steps = SimpleNamespace(begun=threading.Event(), goes_on=threading.Event(), events=[])
    (tmp_path / "half_imported").mkdir()
    (tmp_path / "half_imported" / "__init__.py").write_text(
        "import sys, types\n"
        "from tests.probes.test_agents import STEPS\n"
        "STEPS[-1].begun.set()\n"
        "STEPS[-1].goes_on.wait(600)\n"
        "sys.modules['half_imported.part'] = types.SimpleNamespace(is_first=False)\n"
    )
    (tmp_path / "half_imported" / "part.py").write_text("is_first = True\n")
    (tmp_path / "half_imported" / "inner.py").write_text("from half_imported.part import is_first\n")
    monkeypatch.syspath_prepend(tmp_path)
    STEPS.append(steps)
    yield steps
    STEPS.clear()
    for name in ("half_imported", "half_imported.inner", "half_imported.part"):
        sys.modules.pop(name, None)


STEPS: list[SimpleNamespace] = []


def test_what_an_agent_imports_is_whole_before_the_program_sees_it(half_imported: SimpleNamespace) -> None:
    def imports() -> None:
        with module._agent().Importing("half_imported"):
            importlib.import_module("half_imported")

    agent = threading.Thread(target=imports)
    agent.start()
    assert half_imported.begun.wait(HANG_S)
    threading.Timer(0.2, half_imported.goes_on.set).start()
    assert not importlib.import_module("half_imported.inner").is_first
    agent.join()


def test_an_agent_waits_for_the_end_of_the_programs_import(half_imported: SimpleNamespace) -> None:
    program = threading.Thread(target=importlib.import_module, args=("half_imported",))
    program.start()
    assert half_imported.begun.wait(HANG_S)
    threading.Timer(0.2, half_imported.goes_on.set).start()
    with module._agent().Importing("half_imported.inner"):
        assert half_imported.goes_on.is_set()
        assert not importlib.import_module("half_imported.inner").is_first
    program.join()


def test_an_agent_does_not_wait_for_ever_for_a_program_that_runs_in_an_import(
    half_imported: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module._agent(), "OTHER_IMPORT_S", 0.1)
    program = threading.Thread(target=importlib.import_module, args=("half_imported",))
    program.start()
    assert half_imported.begun.wait(HANG_S)
    with module._agent().Importing("half_imported.inner"):
        assert not imp_lock_is_held()
    half_imported.goes_on.set()
    program.join()


def test_an_agent_locks_nothing_for_what_is_imported() -> None:
    with module._agent().Importing("importlib.util"):
        assert not imp_lock_is_held()
    with module._agent().Importing("no_such_module"):
        assert imp_lock_is_held()
    assert not imp_lock_is_held()


FORKS_MEANWHILE = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
import lowtide_agent

def forks():
    for _ in range(5):
        begun.set()
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)

begun = threading.Event()
forking = threading.Thread(target=forks)
with lowtide_agent.Importing("no_such_module"):
    forking.start()
    begun.wait()
    time.sleep(0.2)
    import logging
    logging.getLogger("of.what.is.imported")
forking.join()

def tries():
    taken.append(logging._lock.acquire(blocking=False))
    logging._lock.release()

taken = []
other = threading.Thread(target=tries)
other.start()
other.join()
print(taken, sys.getswitchinterval())
"""


@pytest.mark.parametrize("logs", [True, False])
def test_a_fork_while_an_agent_imports_ends(logs: bool) -> None:
    program = f"import logging\n{FORKS_MEANWHILE}" if logs else FORKS_MEANWHILE
    folder = str(Path(str(module._agent().__file__)).parent)
    ran = subprocess.run(
        # Python 3.12 and later warn of each fork beside a thread.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, folder],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert (ran.stdout, ran.stderr) == ("[True] 0.005\n", "")


def imp_lock_is_held() -> bool:
    import _imp

    return _imp.lock_held()


def test_a_process_that_has_ended_is_asked_about_once(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    stat = module.stat
    monkeypatch.setattr(module, "stat", lambda pid: (asked.append(pid), stat(pid))[1])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        wait_until(lambda: agents.has_agent(child.pid))
        child.communicate(b"\n")
    # What has changed within a tick of the clock is listed anew.
    time.sleep(0.2)
    assert agents.elsewhere(()) == []
    asked.clear()
    assert agents.elsewhere(()) == []
    assert asked == []


COMPUTES = """
import os, signal, threading, time
ends = os.pipe()
blocking = threading.Event()

def blocks():
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
    blocking.set()
    os.read(ends[0], 1)

threading.Thread(target=blocks, daemon=True).start()
blocking.wait()
resting = threading.Thread(target=os.read, args=(ends[0], 1), daemon=True)
if RESTS:
    resting.start()
print(resting.native_id or 0, flush=True)
while os.path.exists(GOES_ON):
    pass
"""


@pytest.mark.parametrize("rests", [True, False])
def test_a_thread_that_rests_takes_the_signal_of_a_main_thread_that_computes(
    agents: Agents, tmp_path: Path, rests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = tmp_path / "goes_on"
    goes_on.touch()
    names = {"SIGNAL": str(AGENTS_SIGNAL), "RESTS": str(rests), "GOES_ON": repr(str(goes_on))}
    text = COMPUTES
    for name, value in names.items():
        text = text.replace(name, value)
    sent: list[int] = []
    to_thread, to_process = module._SEND_TO_THREAD, module.os.kill

    def note_thread(pid: int, thread: int, number: int) -> int:
        sent.append(thread)
        return int(to_thread(pid, thread, number))

    def note_process(pid: int, number: int) -> None:
        sent.append(pid)
        to_process(pid, number)

    monkeypatch.setattr(module, "_SEND_TO_THREAD", note_thread)
    monkeypatch.setattr(module.os, "kill", note_process)
    process = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        resting = int(process.stdout.readline())
        wait_until(lambda: module.is_running(process.pid))
        assert agents.ask(process.pid, encode(Read()))
        # Where none rests, there is nobody else to ask.
        assert sent[0] == (resting if rests else process.pid)
    finally:
        goes_on.unlink()
        process.communicate()

"""`lowtide attach`: a look into a process that was not started with us, which runs on and keeps nothing of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lowtide.leakcheck.processes.attachment import Attachment
from lowtide.leakcheck.processes.messages import Begin, Look, Question, Trim
from lowtide.probes.host.process_files import status
from lowtide.probes.processes import injection
from lowtide.probes.processes.agents import AgentError, NoAgentError
from lowtide.probes.processes.injection import InjectionError, refuse_unless_possible, run_in
from lowtide.reports.schema import Finding, Subject, decode
from tests.leakcheck.cli.loaded_server import LoadedServer
from tests.waiting import wait_until

pytestmark = pytest.mark.nightly

needs_gdb = pytest.mark.skipif(
    sys.version_info < (3, 14) and shutil.which("gdb") is None, reason="there is no gdb: apt-get install gdb"
)

_OF_GLIBC = 1 << 32
"""Signal 33, for which glibc has a handler of its own from a process's first thread on."""


def attached(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lowtide", "attach", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def watched(server: LoadedServer, *words: str) -> tuple[int, Subject]:
    # In 20 intervals, 12 looks are enough: a busy machine may miss some.
    done = attached(server.pid, "--watch", "20s", "--json", *words)
    (subject,) = decode(done.stdout.encode()).subjects
    return done.returncode, subject


def left(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return what is in a server that was not in it before."""
    signals = [[f"{int(each, 16) & ~_OF_GLIBC:x}" for each in moment.pop("signals")] for moment in (before, after)]
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    return {**changed, **({"signals": signals} if signals[0] != signals[1] else {})}


@needs_gdb
@pytest.mark.parametrize("kind", ["threads", "one"])
def test_a_server_under_load_answers_on_and_has_nothing_of_ours_afterwards(tmp_path: Path, kind: str) -> None:
    with LoadedServer(tmp_path, keeps=False, kind=kind) as server:
        before = server.inside()
        done = attached(server.pid)
        after = server.inside()
        server.serve(20)
    assert (done.returncode, done.stderr, server.wrong) == (0, "", 0)
    assert left(before, after) == {}
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.stdout.startswith(f"pid {server.pid} (python server.py): Python 3.")
    assert "MiB Python's heap in use" in [" ".join(line[1:]) for line in lines]
    assert ["8", "8", "0", "B", "__main__.salt"] in lines


@needs_gdb
@pytest.mark.parametrize("kind", ["threads", "one"])
def test_of_a_hundred_attaches_a_server_under_load_notices_nothing(tmp_path: Path, kind: str) -> None:
    with LoadedServer(tmp_path, keeps=False, kind=kind, pause=0.002) as server:
        before, memory = server.inside(), int(status(server.pid)["RssAnon"].split()[0])
        for _ in range(100):
            with Attachment(server.pid) as attachment:
                assert attachment.ask(Look()).ids
        after = server.inside()
        server.serve(20)
        grown = int(status(server.pid)["RssAnon"].split()[0]) - memory
    assert (server.wrong, left(before, after)) == (0, {})
    assert grown < 4096, f"{grown} KiB"


@needs_gdb
def test_a_list_that_grows_is_named_with_its_path_and_may_grow_if_that_is_said(tmp_path: Path) -> None:
    with LoadedServer(tmp_path, keeps=True) as server:
        status_, subject = watched(server)
        allowed, known = watched(server, "--max-growth", "100MiB")
    finding = of_server(subject, server)
    assert (status_, allowed) == (1, 0)
    assert (finding.holder, [hop.edge for hop in finding.path]) == ("__main__.KEPT", ["__main__", ".KEPT"])
    assert "; that is " in finding.message
    assert of_server(known, server).suppressed_by == "--max-growth 100.0 MiB"


def of_server(subject: Subject, server: LoadedServer) -> Finding:
    (finding,) = subject.findings
    assert finding.process is not None
    assert (finding.process.pid, finding.process.name, finding.trend) == (server.pid, "python server.py", "growth")
    return finding


@needs_gdb
def test_its_quiet_twin_is_silent(tmp_path: Path) -> None:
    with LoadedServer(tmp_path, keeps=False) as server:
        status_, subject = watched(server)
    assert (status_, subject.outcome, subject.findings, subject.not_measured) == (0, "clean", (), ())


@contextmanager
def running(code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program that prints a line when it has begun, until the block ends."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, *words], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


LOCAL = """
import os, threading, time
class Core:
    def __init__(self):
        self.seen = []
def core():
    own = Core()
    while True:
        own.seen.append(os.urandom(2048))
        time.sleep(0.01)
print("begun", flush=True)
threading.Thread(target=core, name="requests", daemon=True).start()
while True:
    time.sleep(0.01)
"""


OF_THREAD = """
import os, sys, threading, time
class Core:
    def __init__(self):
        self.seen = []
held = threading.local()
def core():
    held.core = Core()
    while True:
        held.core.seen.append(os.urandom(2048))
        if len(held.core.seen) > int(sys.argv[1]):
            held.core.seen.clear()
        time.sleep(0.01)
print("begun", flush=True)
threading.Thread(target=core, daemon=True).start()
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def local() -> Iterator[subprocess.Popen[str]]:
    with running(LOCAL) as process:
        yield process


@needs_gdb
def test_what_only_a_running_function_of_another_thread_holds_has_a_path(local: subprocess.Popen[str]) -> None:
    done = attached(local.pid, "--watch", "13s", "--json")
    (subject,) = decode(done.stdout.encode()).subjects
    (finding,) = subject.findings
    assert str(finding.holder).startswith(".seen of thread 'requests', local 'own' of core() in ")
    assert [hop.edge for hop in finding.path[1:]] == ["f_locals['own']", ".seen"]


@needs_gdb
@pytest.mark.parametrize(("most", "holders"), [("1000000", ["__main__.held.core.seen"]), ("50", [])])
def test_what_another_thread_has_in_a_threading_local_is_seen(most: str, holders: list[str]) -> None:
    with running(OF_THREAD, most) as process:
        done = attached(process.pid, "--watch", "13s", "--json")
    (subject,) = decode(done.stdout.encode()).subjects
    assert [finding.holder for finding in subject.findings] == holders


@needs_gdb
def test_live_tensors_are_listed_by_type_and_shape() -> None:
    pytest.importorskip("torch")
    code = "import time, torch\nkept = [torch.ones(256, 1024) for _ in range(3)]\nprint('begun', flush=True)\n"
    with running(f"{code}while True: time.sleep(0.01)") as process:
        done = attached(process.pid)
    assert "\ntensors on cpu: 3.0 MiB\n" in done.stdout
    assert ["3.0", "MiB", "3", "float32", "256x1024"] in [line.split() for line in done.stdout.splitlines()]


GARBAGE = """
import gc, os, sys, time
class Last:
    def __del__(self):
        os.unlink(sys.argv[1])
gc.disable()
last = Last()
last.own = last
del last
print("begun", flush=True)
while True:
    time.sleep(0.01)
"""


@needs_gdb
def test_what_the_program_s_garbage_does_at_its_end_is_not_done_by_a_fork(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with running(GARBAGE, str(tmp_path / "file")) as process:
        with Attachment(process.pid) as attachment:
            attachment.ask(Look(lists=True))
            assert attachment.ask(Trim()) > 0
        assert (tmp_path / "file").exists()


@needs_gdb
def test_a_fork_imports_the_lowtide_that_asks_and_not_one_in_the_program_s_path(tmp_path: Path) -> None:
    (tmp_path / "lowtide").mkdir()
    (tmp_path / "lowtide" / "__init__.py").write_text("raise ImportError('another version')")
    code = f"import sys, time\nsys.path.insert(0, {str(tmp_path)!r})\nprint('begun', flush=True)\n"
    with running(f"{code}while True: time.sleep(0.01)") as process, Attachment(process.pid) as attachment:
        assert attachment.ask(Look()).ids


@needs_gdb
def test_whoever_attaches_may_be_killed_meanwhile(local: subprocess.Popen[str]) -> None:
    code = (
        "import time\nfrom lowtide.leakcheck.processes.attachment import Attachment\n"
        f"with Attachment({local.pid}) as attachment:\n    print(attachment.folder, flush=True)\n    time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as attaching:
        assert attaching.stdout is not None
        folder = Path(attaching.stdout.readline().strip())
        assert (folder / "questions").exists()
        assert int(status(local.pid)["Threads"]) == 3
        attaching.kill()
    wait_until(lambda: int(status(local.pid)["Threads"]) == 2)
    wait_until(lambda: not folder.exists())


class Misread(Question[bool], frozen=True, kw_only=True, tag="look"):
    """Is answered as `Look` is, by something else than is expected."""


@needs_gdb
def test_what_fails_in_a_fork_is_an_error_and_one_that_takes_too_long_is_ended(local: subprocess.Popen[str]) -> None:
    with Attachment(local.pid) as attachment:
        with pytest.raises(AgentError, match=f"a fork of pid {local.pid} answered something else: "):
            attachment.ask(Misread())
        with pytest.raises(AgentError, match=f"a fork of pid {local.pid} did not answer within 0.01 s, and was ended"):
            attachment.ask(Look(), limit=0.01)
        assert attachment.ask(Begin(stage="any", cycle=1)) is False
    assert local.poll() is None


def test_one_that_ends_before_it_is_asked_has_ended(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    asked = Attachment(process.pid)
    asked.folder, asked._pipe = tmp_path, os.open(os.devnull, os.O_WRONLY)
    with pytest.raises(NoAgentError):
        asked.ask(Look())
    asked.__exit__()


def test_a_process_that_is_not_there_is_lowtide_itself_or_no_python_is_refused() -> None:
    for pid, why in (
        (2**22 + 1, f"there is no process {2**22 + 1}: `lowtide ps` lists engines"),
        (os.getpid(), f"pid {os.getpid()} is lowtide itself"),
    ):
        with pytest.raises(InjectionError, match=why):
            refuse_unless_possible(pid)
    with subprocess.Popen(["sleep", "600"]) as plain:
        done = attached(plain.pid)
        plain.kill()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"lowtide: pid {plain.pid} (sleep) runs no Python that is known by its file's name\n"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("python_of", lambda _: ("3.9", False), r"runs Python 3\.9: it takes 3\.10 or newer"),
        ("python_of", lambda _: ("3.13", True), r"runs a free-threaded Python, whose threads would run on beside"),
        ("_files_of", str, r"is in another container: run lowtide in that one"),
        ("status", lambda _: {"TracerPid": "1"}, r"is traced by pid 1 \(.*\): end that first"),
    ],
)
def test_what_cannot_be_entered_is_refused(
    local: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, name: str, value: Any, why: str
) -> None:
    monkeypatch.setattr(injection, name, value)
    with pytest.raises(InjectionError, match=why):
        refuse_unless_possible(local.pid)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there it takes no gdb")
def test_without_gdb_it_is_named(local: subprocess.Popen[str], tmp_path: Path) -> None:
    done = attached(local.pid, env={**os.environ, "PATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (
        2,
        "lowtide: gdb was not found, by which processes of Python before 3.14 are entered: install gdb\n",
    )


AS_NOBODY = "os.setgid(65534); os.setuid(65534)"

REFUSED = f"""
import os, sys
from pathlib import Path
from lowtide.probes.processes import injection
{AS_NOBODY}
injection._YAMA = Path(sys.argv[2])
try:
    injection.refuse_unless_possible(int(sys.argv[1]))
except injection.InjectionError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize(
    ("yama", "is_own", "why"),
    [
        ("0", False, "pid {pid} is root's: run lowtide as root"),
        (
            "1",
            True,
            "kernel.yama.ptrace_scope is 1, which lets only root enter other processes: use sudo, or "
            "`sysctl kernel.yama.ptrace_scope=0`; in a container add --cap-add=SYS_PTRACE",
        ),
        ("3", True, "kernel.yama.ptrace_scope is 3, which forbids it to all until the next start of the host"),
        (
            "0",
            True,
            "the kernel does not let pid {pid} be entered: in Docker add --cap-add=SYS_PTRACE, in Kubernetes "
            "SYS_PTRACE to securityContext.capabilities",
        ),
    ],
)
def test_without_the_right_to_trace_it_the_reason_and_a_remedy_are_said(yama: str, is_own: bool, why: str) -> None:
    scope = f"/dev/shm/lowtide-test-{os.getpid()}"
    Path(scope).write_text(yama)
    # What has become another user's may not be traced by that one either.
    code = f"import os, time\n{AS_NOBODY if is_own else ''}\nprint('begun', flush=True)\ntime.sleep(600)"
    with running(code) as other:
        done = subprocess.run(
            [sys.executable, "-c", REFUSED, str(other.pid), scope], capture_output=True, text=True, check=False
        )
    Path(scope).unlink()
    assert done.stdout.strip() == why.format(pid=other.pid), done.stderr


@needs_gdb
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there it takes no gdb")
def test_a_process_that_rests_for_good_is_let_go_of_and_runs_on(tmp_path: Path) -> None:
    code = "import sys\nprint('begun', flush=True)\nfor line in sys.stdin: print(line, flush=True)"
    with running(code) as resting:
        assert resting.stdin is not None
        with pytest.raises(InjectionError, match=r"has run Python for 3 s: attach while it has work"):
            run_in(resting.pid, "1/0", tmp_path, patience=3.0)
        assert status(resting.pid)["TracerPid"] == "0"
        resting.stdin.write("once more\n")
        resting.stdin.flush()
        assert line_of(resting) == "once more\n"
        resting.stdin.close()
        assert resting.wait() == 0


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there it takes no gdb")
def test_a_gdb_that_does_not_end_is_named_and_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gdb = tmp_path / "gdb"
    gdb.write_text("#!/bin/sh\ntrap '' INT\necho waiting\nsleep 60\n")
    gdb.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(injection, "_BEGINS_S", 0.5)
    monkeypatch.setattr(injection, "_ENDS_S", 0.5)
    (tmp_path / "folder").mkdir()
    started: list[subprocess.Popen[str]] = []
    wait_for = injection._said_by
    monkeypatch.setattr(injection, "_said_by", lambda gdb, patience: started.append(gdb) or wait_for(gdb, patience))
    with pytest.raises(InjectionError, match=r"^gdb \(pid \d+\) has not let go for 0.5 s: "):
        run_in(os.getpid(), "1/0", tmp_path / "folder", patience=0.5)
    (stuck,) = started
    os.killpg(stuck.pid, signal.SIGKILL)
    stuck.communicate()


RESTS = """
import time
print("begun", flush=True)
try:
    time.sleep(50)
    print("woken", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@needs_gdb
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there it takes no gdb")
def test_an_interrupt_that_comes_while_it_is_entered_reaches_the_program(tmp_path: Path) -> None:
    with running(RESTS) as resting:
        entering = subprocess.Popen(
            [sys.executable, "-m", "lowtide", "attach", str(resting.pid)], stderr=subprocess.PIPE, text=True
        )
        wait_until(lambda: status(resting.pid).get("TracerPid", "0") != "0")
        time.sleep(1.0)  # gdb has gone on from attaching to waiting
        resting.send_signal(signal.SIGINT)
        assert line_of(resting) == "interrupted\n"
        _, said = entering.communicate()
    assert said == f"lowtide: pid {resting.pid} was interrupted meanwhile\n"


@needs_gdb
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there it takes no gdb")
def test_whoever_attaches_may_be_killed_while_gdb_waits(tmp_path: Path) -> None:
    # What is killed removes nothing.
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with running(RESTS) as resting:
        with subprocess.Popen([sys.executable, "-m", "lowtide", "attach", str(resting.pid)], env=env) as entering:
            wait_until(lambda: status(resting.pid).get("TracerPid", "0") != "0")
            time.sleep(1.0)  # gdb has gone on from attaching to waiting
            entering.kill()
        wait_until(lambda: status(resting.pid).get("TracerPid", "0") == "0")
        resting.send_signal(signal.SIGINT)
        assert (line_of(resting), resting.wait()) == ("interrupted\n", 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-growth", "1MiB"), "lowtide: --max-growth applies only with --watch TIME\n"),
        (("--json",), "lowtide: --json applies only with --watch TIME\n"),
        (("--watch", "5s"), "lowtide: --watch 5s is not possible: what grows shows after 12 s or more\n"),
        (("--watch", "soon"), "lowtide: --watch 'soon' is no time: use seconds such as 30, or a unit such as 30s, 5m,"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], said: str) -> None:
    done = attached(1, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)

"""`lowtide exec`: a command's own streams and status, the signals that it gets, and what its tree leaves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lowtide.reports.schema import Finding, Report, decode
from tests.waiting import HANG_S, wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("no_neighbours")]

LEFT = "CHILD = subprocess.Popen(['sleep', '3600'], start_new_session=True, stdout=-3, stderr=-3)"


def command(*words: str, settle: float = 0.3) -> list[str]:
    return [sys.executable, "-m", "lowtide", "exec", "--settle", str(settle), *words]


def execute(*words: str, settle: float = 0.3) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words, settle=settle), capture_output=True, text=True)


def python(code: str) -> list[str]:
    return ["--", sys.executable, "-c", "import os, socket, subprocess, sys\n" + textwrap.dedent(code)]


def judged(code: str, *options: str) -> tuple[int, Report]:
    done = execute("--json", *options, *python(code))
    return done.returncode, decode(done.stdout.encode())


@pytest.fixture
def name() -> Iterator[str]:
    """Of a file; gone afterwards in /dev/shm and among the temporary files."""
    made = f"lowtide-test-{uuid.uuid4().hex}"
    yield made
    for folder in ("/dev/shm", tempfile.gettempdir()):
        with contextlib.suppress(FileNotFoundError):
            Path(folder, made).unlink()


def kill_left(report: Report) -> None:
    for finding in report.subjects[0].findings:
        if finding.process is not None:
            os.kill(finding.process.pid, signal.SIGKILL)


def test_a_command_that_leaves_nothing_has_its_own_streams_and_status() -> None:
    done = execute(*python("print('out'); print('err', file=sys.stderr); child = subprocess.run(['true'])"))
    assert (done.returncode, done.stdout) == (0, "out\n")
    assert done.stderr.startswith("err\n")
    assert "CLEAN: everything came back" in done.stderr


def test_standard_input_is_the_commands() -> None:
    done = subprocess.run(command("cat"), input="hello", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "hello")


def test_a_command_that_fails_and_leaves_nothing_keeps_its_status() -> None:
    status, report = judged("sys.exit(3)")
    assert status == 3
    assert (report.subjects[0].outcome, report.subjects[0].reason) == ("clean", "the command ended with exit code 3")


def test_options_behind_the_command_are_the_commands() -> None:
    done = execute("sh", "-c", "echo $0", "--settle")
    assert (done.returncode, done.stdout) == (0, "--settle\n")


def test_an_orphan_is_a_finding_with_its_rank() -> None:
    waits = "import sys, time; print(1, flush=True); time.sleep(3600)"
    status, report = judged(
        f"""
        os.environ["RANK"] = "1"
        child = subprocess.Popen([sys.executable, "-c", {waits!r}], start_new_session=True, stdout=-1, stderr=-3)
        child.stdout.readline()
        os._exit(0)
        """
    )
    kill_left(report)
    assert status == 1
    (finding,) = report.subjects[0].findings
    assert (finding.resource, finding.stage) == ("processes", "end")
    assert finding.process is not None
    assert finding.process.rank == 1
    assert finding.message.startswith(f"{finding.process.text} runs on after the command has ended; it holds ")
    assert finding.bytes > 1 << 20
    assert finding.advice is not None
    assert finding.advice.endswith(f"now: kill {finding.process.pid}")


def test_an_orphan_that_ends_in_time_is_none() -> None:
    done = execute(*python("subprocess.Popen(['sleep', '1'], start_new_session=True); os._exit(0)"), settle=10)
    assert done.returncode == 0


def test_a_file_in_shared_memory_is_a_finding_until_it_is_removed(name: str) -> None:
    plant = f"open('/dev/shm/{name}', 'wb').write(b'x' * 8192)"
    status, report = judged(plant)
    assert status == 1
    (finding,) = report.subjects[0].findings
    assert (finding.resource, finding.bytes) == ("shared-memory", 8192)
    assert f"/dev/shm/{name}" in finding.message
    # It was there before this one, which is clean.
    assert judged("pass")[0] == 0
    assert judged(f"{plant}; os.unlink('/dev/shm/{name}')")[0] == 0


def test_a_socket_of_the_dead_is_a_finding_and_a_file_on_purpose_is_none(name: str) -> None:
    path = Path(tempfile.gettempdir(), name)
    bind = f"server = socket.socket(socket.AF_UNIX); server.bind('{path}')"
    status, report = judged(bind)
    assert status == 1
    (finding,) = report.subjects[0].findings
    assert (finding.resource, finding.message.partition(" ")[0]) == ("temporary-files", str(path))
    path.unlink()
    assert judged(f"{bind}; os.unlink('{path}')")[0] == 0
    assert judged(f"open('{path}', 'w').write('a result')")[0] == 0


SERVED = """
import time, uuid
for _ in range(9):
    server = socket.socket(socket.AF_UNIX); server.bind(f"{folder}/{uuid.uuid4()}"); served.append(server)
time.sleep(2)
"""


def test_sockets_of_one_kind_are_one_finding_with_who_bound_them() -> None:
    # Not pytest's own folder: a socket's path has 107 bytes at most.
    folder = Path(tempfile.mkdtemp())
    status, report = judged(f"folder, served = {str(folder)!r}, []" + SERVED)
    (finding,) = report.subjects[0].findings
    assert (status, finding.resource, finding.count) == (1, "temporary-files", 9)
    assert ", 1 more are left, and no living process uses them; bound in pid " in finding.message
    assert all(f"{path}" in (finding.advice or "") for path in folder.iterdir())
    # Not one of those that are drawn anew counts for its name.
    (again,) = judged(f"folder, served = {str(folder)!r}, []" + SERVED)[1].subjects[0].findings
    assert again.fingerprint == finding.fingerprint
    unlinked = "for server in served: os.unlink(server.getsockname())"
    assert judged(f"folder, served = {str(folder)!r}, []" + SERVED + unlinked)[0] == 0


@pytest.mark.parametrize("count", [2, 9])
def test_many_files_whose_names_differ_by_numbers_alone_are_one_finding(name: str, count: int) -> None:
    paths = [f"/dev/shm/{name}_{number}" for number in range(count)]
    status, report = judged(f"for path in {paths}: open(path, 'wb').write(b'x' * 8192)")
    found = report.subjects[0].findings
    assert (status, {finding.resource for finding in found}) == (1, {"shared-memory"})
    assert sum(finding.bytes for finding in found) == 8192 * count
    for path in paths:
        assert any(path in (finding.advice or "") for finding in found)
        Path(path).unlink()
    if count > 8:
        (finding,) = found
        assert finding.count == count
        assert f"{paths[2]} and 6 more (72.0 KiB) are left, and no living process uses them" in finding.message
    else:
        assert len(found) == count


def test_many_orphans_of_one_kind_are_one_finding() -> None:
    starts = "subprocess.Popen(['sleep', '3600'], start_new_session=True, stdout=-3, stderr=-3)"
    status, report = judged(f"for _ in range(9): {starts}")
    (finding,) = report.subjects[0].findings
    assert finding.advice is not None
    pids = [*map(int, finding.advice.partition("now: kill ")[2].split())]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert (status, finding.resource, finding.count, len({*pids})) == (1, "processes", 9, 9)
    assert re.search(
        r"\(sleep\) and 8 more of its kind run on after the command has ended; they hold ", finding.message
    )


def test_what_another_run_may_have_left_is_not_judged(name: str, neighbour: int) -> None:
    path = Path(tempfile.gettempdir(), name)
    bind = f"server = socket.socket(socket.AF_UNIX); server.bind('{path}')"
    status, report = judged(f"{bind}; open('/dev/shm/{name}', 'wb').write(b'x' * 8192)")
    (subject,) = report.subjects
    assert (status, subject.findings) == (2, ())
    assert sorted(item.what for item in subject.not_measured) == [f"/dev/shm/{name}", str(path)]
    assert {item.why for item in subject.not_measured} == {
        f"lowtide watches another program on this host (pid {neighbour}), which may have made it"
    }
    path.unlink()
    Path("/dev/shm", name).unlink()
    # What the command's own process had mapped is its own all the same.
    status, report = judged(
        f"""
        import mmap, time
        file = open('/dev/shm/{name}', 'wb+'); file.truncate(8192)
        held = mmap.mmap(file.fileno(), 8192)
        time.sleep(2)
        """
    )
    assert (status, [finding.resource for finding in report.subjects[0].findings]) == (1, ["shared-memory"])


def test_a_temporary_file_with_the_number_of_an_ended_process_is_a_finding() -> None:
    status, report = judged(f"open(f'{tempfile.gettempdir()}/lowtide-test-{{os.getpid()}}.lock', 'w')")
    (finding,) = report.subjects[0].findings
    path = Path(finding.message.partition(" ")[0])
    path.unlink()
    assert (status, finding.resource, path.suffix) == (1, "temporary-files", ".lock")


def test_a_semaphore_is_a_finding(name: str) -> None:
    status, report = judged(
        f"""
        import _multiprocessing, ctypes
        open_ = ctypes.CDLL(None, use_errno=True).sem_open
        open_(b"/{name}", os.O_CREAT, 0o600, 1)
        """
    )
    left = Path("/dev/shm", f"sem.{name}")
    left.unlink()
    (finding,) = report.subjects[0].findings
    assert (status, finding.resource) == (1, "shared-memory")
    assert "made by a named semaphore" in finding.message


SYSTEM_V = """
import ctypes, sys
libc = ctypes.CDLL(None)
if "shm" in sys.argv:
    print("-m", libc.shmget(0, 4096, 0o1600))
if "sem" in sys.argv:
    print("-s", libc.semget(0, 1, 0o1600))
if "used" in sys.argv:
    semaphores = libc.semget(0, 1, 0o1600)
    libc.semctl(semaphores, 0, 16, 1)
    print("-s", semaphores)
if "msg" in sys.argv:
    queue = libc.msgget(0, 0o1600)
    libc.msgsnd(queue, ctypes.byref((ctypes.c_long * 2)(1, 1)), ctypes.sizeof(ctypes.c_long), 0)
    print("-q", queue)
sys.stdout.flush()
"""
"""Makes objects of System V, and prints how `ipcrm` takes them: `SETVAL` is 16."""


def made(output: str) -> list[str]:
    """What was printed; the objects are gone then."""
    objects = re.findall(r"^-[msq] \d+$", output, re.MULTILINE)
    for each in objects:
        subprocess.run(["ipcrm", *each.split()], check=False, capture_output=True)
    return objects


def test_what_the_tree_has_made_or_used_of_system_v_is_a_finding() -> None:
    done = execute("--", sys.executable, "-c", SYSTEM_V, "shm", "used", "msg")
    objects = made(done.stdout)
    assert done.returncode == 1
    assert len(objects) == 3
    for each in objects:
        assert f"now: ipcrm {each}" in done.stderr
    for what in ("shared memory of System V", "a set of semaphores of System V", "a message queue of System V"):
        assert what in done.stderr


def beside(*kinds: str, lives: bool = False) -> tuple[int, str]:
    """The status of a command, and what is said of it, while another program makes objects of System V."""
    waiting = [*command("--", sys.executable, "-c", "print(flush=True); input()")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    other = [sys.executable, "-c", SYSTEM_V + "if 'lives' in sys.argv: input()", *kinds, *(["lives"] if lives else [])]
    with subprocess.Popen(waiting, **pipes, text=True) as process:  # type: ignore[call-overload]
        process.stdout.readline()
        with subprocess.Popen(other, **pipes, text=True) as maker:  # type: ignore[call-overload]
            objects = [maker.stdout.readline() for _ in kinds]
            if not lives:
                maker.wait(60)
            _, said = process.communicate("\n", timeout=60)
        assert len(made("".join(objects))) == len(kinds)
    return process.returncode, said


@pytest.mark.parametrize("lives", [True, False])
def test_what_another_program_has_made_of_system_v_meanwhile_is_none(lives: bool) -> None:
    status, said = beside("shm", "used", "msg", lives=lives)
    assert (status, "ipcrm" in said, "LEAK" in said) == (0, False, False)
    # Of one that has ended before it was seen nobody knows whose it was.
    assert said.count("not judged: ") == (0 if lives else 3)
    assert lives or re.search(r"not judged: shared memory of System V, number \d+ \(it is of pid \d+, which had", said)


def test_semaphores_that_nobody_has_used_are_not_judged() -> None:
    status, said = beside("sem")
    assert (status, "ipcrm" in said, "LEAK" in said) == (2, False, False)
    assert "(no process has used it, and the kernel does not name its maker)" in said


def test_a_known_leak_may_stay(tmp_path: Path, name: str) -> None:
    plant = f"open('/dev/shm/{name}', 'wb').write(b'x')"
    _, report = judged(plant)
    Path("/dev/shm", name).unlink()
    mark = report.subjects[0].findings[0].fingerprint
    entries = tmp_path / "known.toml"
    entries.write_text(
        f'[[suppressions]]\nfingerprint = "{mark}"\nreason = "it is looked at by hand"\nowner = "tests"\n'
        "expires = 2099-01-01\n"
    )
    assert judged(plant, "--suppressions", str(entries))[0] == 0


def test_the_report_is_written_and_the_commands_status_is_in_it(tmp_path: Path) -> None:
    done = execute("--report", str(tmp_path / "out"), *python("sys.exit(4)"))
    assert done.returncode == 4
    document = json.loads((tmp_path / "out" / "leakcheck.json").read_text())
    assert document["subjects"][0]["id"] == f"exec[{Path(sys.executable).name}]"
    assert "exit code 4" in document["subjects"][0]["reason"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "lowtide: there is no command: give one, as in `lowtide exec -- python serve.py`"),
        (["--", "no-such-program"], "lowtide: no-such-program was not found: give a program of PATH, or a path to one"),
        (["--", "/tmp"], "lowtide: /tmp cannot be started: Permission denied"),
        (["--settle", "-1", "true"], "lowtide: --settle -1.0 is not possible: use 0 or more seconds"),
    ],
    ids=["none", "not found", "a folder", "settle"],
)
def test_bad_input_is_one_line(words: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "lowtide", "exec", *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{said}\n")


HANDLES = """
import os, signal, sys, time
def end(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(7)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, end)
print(os.getpid(), flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_command_once_and_its_end_is_judged(number: signal.Signals) -> None:
    running = subprocess.Popen(
        command("--", sys.executable, "-c", HANDLES),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with running:
        assert running.stdout is not None
        running.stdout.readline()
        running.send_signal(number)
        out, err = running.communicate(timeout=HANG_S)
    assert (running.returncode, out) == (7, f"got {number.name}\n")
    assert "CLEAN" in err


def test_a_command_that_a_signal_ends_has_the_status_of_shells() -> None:
    assert judged("os.kill(os.getpid(), 9)")[0] == 128 + 9
    running = subprocess.Popen(command("sleep", "3600"), stderr=subprocess.DEVNULL, start_new_session=True)
    with running:
        wait_until(lambda: [child for child in psutil.Process(running.pid).children() if child.name() == "sleep"])
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=HANG_S) == 130


def test_a_signal_after_the_command_ends_the_waiting() -> None:
    running = subprocess.Popen(
        command("--json", *python(f"{LEFT}; print('left', file=sys.stderr, flush=True); os._exit(0)"), settle=3600),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with running:
        assert running.stderr is not None
        running.stderr.readline()
        wait_until(lambda: {child.name() for child in psutil.Process(running.pid).children()} <= {"sleep"})
        time.sleep(1)
        running.send_signal(signal.SIGINT)
        out, _ = running.communicate(timeout=HANG_S)
    report = decode(out.encode())
    kill_left(report)
    assert running.returncode == 1


def test_processes_of_the_command_have_agents_and_the_command_sees_nothing_of_it_afterwards() -> None:
    done = execute(*python("print(os.environ['LOWTIDE_AGENTS'])"))
    folder = Path(done.stdout.strip())
    assert folder.name.startswith("lowtide-agents-")
    assert not folder.exists()


LIFE = """
import multiprocessing as mp
from lowtide import stage

def core(pipe):
    import torch
    kept = []
    while (asked := pipe.recv()) != "end":
        if asked == "keep":
            kept.append(torch.ones(1 << 20, dtype=torch.uint8))
        elif asked == "keep the last":
            kept = [torch.ones(1 << 20, dtype=torch.uint8)]
        pipe.send(torch.ones(1 << 20, dtype=torch.uint8).numpy())

if __name__ == "__main__":
    pipe, other = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=core, args=(other,), name="EngineCore")
    process.start()
    import torch
    results = []
    for asked in ("keep nothing", *[{asked!r}] * 6):
        with stage("infer"):
            pipe.send(asked)
            results.append(torch.from_numpy(pipe.recv()))
    pipe.send("end")
    process.join()
    print("over")
"""


def tensors_in(done: subprocess.CompletedProcess[str]) -> list[Finding]:
    """What a command has left in tensors: other programs may have left files meanwhile."""
    (subject,) = decode(done.stdout.encode()).subjects
    return [finding for finding in subject.findings if finding.resource in ("tensors", "host-memory")]


@pytest.mark.parametrize(("asked", "leaks"), [("keep", True), ("keep the last", False)])
def test_a_program_that_marks_inferences_is_judged_by_what_they_keep_in_its_processes(
    tmp_path: Path, asked: str, leaks: bool
) -> None:
    script = tmp_path / "serve.py"
    script.write_text(LIFE.replace("{asked!r}", repr(asked)))
    done = execute("--json", "--", sys.executable, str(script))
    assert "over" in done.stderr
    found = tensors_in(done)
    if not leaks:
        assert found == []
        return
    (finding,) = found
    assert (done.returncode, finding.trend) == (1, "growth")
    assert "(EngineCore): tensors on cpu grow by 1.0 MiB with each infer" in finding.message
    assert finding.holder is not None
    assert "local 'kept' of core()" in finding.holder


ASLEEP = """
    with stage("sleep(1)"):
        pass
    pipe.send("end")
"""


def test_what_a_marked_sleep_keeps_there_is_told_once(tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(LIFE.replace("{asked!r}", "'keep'").replace('    pipe.send("end")\n', ASLEEP))
    done = execute("--json", "--", sys.executable, str(script))
    (finding,) = tensors_in(done)
    assert (done.returncode, finding.bytes) == (1, 6 << 20)
    assert finding.process is not None
    assert finding.process.name == "EngineCore"

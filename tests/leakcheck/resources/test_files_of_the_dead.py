"""What a killed child leaves: the process that it had started, its shared memory, its temporary files."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from lowtide import LeakCheck
from lowtide.leakcheck.lives.checked_life import CheckedLife, Lives
from lowtide.leakcheck.lives.lifecycle import check_run
from lowtide.leakcheck.lives.script import LifeError
from lowtide.leakcheck.resources.orphaned_files import OrphanedFiles, OwnSegments
from lowtide.leakcheck.targets.target import Capabilities
from lowtide.probes.device.driver import NoDriver
from lowtide.probes.host.makers import Makers
from lowtide.probes.host.process_files import stat
from lowtide.probes.host.process_tree import ProcessTree
from lowtide.probes.host.readings import mapped_shared_memory
from lowtide.probes.processes.agents import processes_with_agents
from lowtide.reports.schema import Subject

pytestmark = pytest.mark.nightly

ENGINE = """
import os, subprocess, sys, tempfile
from multiprocessing import resource_tracker, shared_memory
kinds = sys.argv[1:]
if 'process' in kinds:
    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'], stdout=subprocess.DEVNULL)
if 'segment' in kinds:
    # As of a library of C++: no tracker of Python's removes it.
    descriptor = os.open('/dev/shm/lowtide_test_segment', os.O_CREAT | os.O_RDWR)
    os.ftruncate(descriptor, 4096)
    os.close(descriptor)
if 'mapped' in kinds:
    import mmap, uuid
    # With a 1 between letters, which is no process's number.
    path = f'/dev/shm/vllm_offload_a1b1c1d1{str(uuid.uuid4())[8:]}.mmap'
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    os.ftruncate(descriptor, 1 << 20)
    region = mmap.mmap(descriptor, 1 << 20)
    region.write(bytes(1 << 20))
    os.close(descriptor)
if 'file' in kinds:
    held = tempfile.NamedTemporaryFile(prefix='lowtide_test_')
if 'folder' in kinds:
    os.mkdir(f'{tempfile.gettempdir()}/lowtide_test_{os.getpid()}')
if 'socket' in kinds:
    import socket
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(tempfile.mktemp(prefix='lowtide_test_'))
if 'stays' in kinds:
    import time
    held = b'1' * (64 << 20)
print('ready', flush=True)
if sys.stdin.read() == 'crash':
    os.abort()
if 'removes' in kinds:
    os.unlink(path)
if 'stays' in kinds:
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def tidy(no_neighbours: None) -> Iterator[None]:
    """What the engines below leave on purpose goes after each test."""
    tree = ProcessTree()
    tree.start()
    yield
    for pid in tree.orphans():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    tree.stop()
    Path("/dev/shm/lowtide_test_segment").unlink(missing_ok=True)
    for path in Path("/dev/shm").glob("vllm_offload_a1b1c1d1*"):
        path.unlink()
    for path in Path(tempfile.gettempdir()).glob("lowtide_test_*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def engine(*kinds: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", ENGINE, *kinds], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def killed(*kinds: str) -> None:
    with engine(*kinds) as process:
        process.kill()


def crashed(*kinds: str) -> None:
    with engine(*kinds) as process:
        process.communicate(b"crash")


def exited(*kinds: str) -> None:
    with engine(*kinds) as process:
        process.communicate()


def ended(*kinds: str) -> None:
    """The tidy twin: an engine whose owner removes what it made."""
    with engine(*kinds) as process:
        for path in Path(tempfile.gettempdir()).glob("lowtide_test_*"):
            path.rmdir() if path.is_dir() else path.unlink()
        Path("/dev/shm/lowtide_test_segment").unlink(missing_ok=True)
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        process.kill()


def left_by(block: Callable[[], None]) -> list[str]:
    with LeakCheck(settle=0.1) as check:
        block()
    (subject,) = check.report.subjects
    return sorted(finding.resource for finding in subject.findings)


@pytest.mark.parametrize(
    ("kinds", "resources"),
    [
        (["process"], ["processes"]),
        (["segment"], ["shared-memory"]),
        (["file"], ["temporary-files"]),
        (["folder"], ["temporary-files"]),
        (["socket"], ["temporary-files"]),
        ([], []),
    ],
)
def test_what_a_killed_child_leaves_is_found(kinds: list[str], resources: list[str]) -> None:
    assert left_by(lambda: killed(*kinds)) == resources


@pytest.mark.parametrize(
    ("kinds", "resources"),
    [
        (["segment"], ["shared-memory"]),
        (["folder"], ["temporary-files"]),
        (["socket"], ["temporary-files"]),
        (["segment", "folder", "socket"], ["shared-memory", "temporary-files"]),
        ([], []),
    ],
)
@pytest.mark.parametrize("ending", [crashed, exited])
def test_what_a_child_leaves_that_ends_by_itself_is_found(
    ending: Callable[..., None], kinds: list[str], resources: list[str]
) -> None:
    assert left_by(lambda: ending(*kinds)) == resources


def of_no_python(program: str) -> None:
    subprocess.run(["sh", "-c", program], check=True)


def of_a_fork_server(function: Callable[[], None]) -> None:
    process = get_context("forkserver").Process(target=function)
    process.start()
    process.join()


def makes_a_folder() -> None:
    Path(tempfile.gettempdir(), f"lowtide_test_{os.getpid()}").mkdir()


def makes_a_folder_and_removes_it() -> None:
    makes_a_folder()
    Path(tempfile.gettempdir(), f"lowtide_test_{os.getpid()}").rmdir()


def test_what_a_child_that_is_no_python_leaves_at_its_end_is_found() -> None:
    made = f"{tempfile.gettempdir()}/lowtide_test_$$"
    assert left_by(lambda: of_no_python(f"mkdir {made}")) == ["temporary-files"]
    assert left_by(lambda: of_no_python(f"mkdir {made}x; rmdir {made}x")) == []


def test_what_a_child_of_a_fork_server_leaves_is_found() -> None:
    assert left_by(lambda: of_a_fork_server(makes_a_folder)) == ["temporary-files"]
    assert left_by(lambda: of_a_fork_server(makes_a_folder_and_removes_it)) == []


@pytest.mark.parametrize("ends_before", [False, True])
def test_what_another_run_may_have_left_is_nobodys(neighbour: int, ends_before: bool) -> None:
    def leave() -> None:
        crashed("segment", "socket")
        if ends_before:
            os.kill(neighbour, signal.SIGKILL)
            while stat(neighbour) is not None:
                time.sleep(0.01)

    assert left_by(leave) == []


def test_the_folder_of_a_run_that_was_killed_is_no_neighbour() -> None:
    with engine() as process:
        folder = Path(tempfile.gettempdir(), f"lowtide-agents-{process.pid}-x")
        folder.mkdir()
        assert process.pid in processes_with_agents()
        # Left before this process began, by one that had its number.
        long_ago = time.time() - 60
        os.utime(folder, (long_ago, long_ago))
        assert process.pid not in processes_with_agents()
        folder.rmdir()
        process.kill()


def test_what_is_known_to_be_an_ended_childs_is_found_beside_another_run(neighbour: int) -> None:
    assert left_by(lambda: killed("mapped", "folder")) == ["shared-memory", "temporary-files"]


def test_a_child_of_an_earlier_block_leaves_nothing_in_a_later_one() -> None:
    with LeakCheck(settle=0.1) as check:
        exited()
    assert [finding for subject in check.report.subjects for finding in subject.findings] == []
    Path("/dev/shm/lowtide_test_segment").touch()
    assert left_by(lambda: None) == []


def test_a_socket_on_which_somebody_listens_is_no_leftover() -> None:
    with socket.socket(socket.AF_UNIX) as listening:

        def serve() -> None:
            exited()
            listening.bind(f"{tempfile.gettempdir()}/lowtide_test_served")

        assert "temporary-files" not in left_by(serve)


def bound(path: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    return listening


def test_a_socket_of_this_process_is_found_where_it_is_closed_and_not_unlinked() -> None:
    """Beside an ended child too, in whose time it was made."""

    def serve() -> None:
        exited()
        bound(f"{tempfile.gettempdir()}/lowtide_test_handshake").close()

    with LeakCheck(settle=0.1) as check:
        serve()
    (subject,) = check.report.subjects
    (finding,) = subject.findings
    path = Path(tempfile.gettempdir(), "lowtide_test_handshake")
    assert (finding.resource, finding.holder, finding.advice) == (
        "temporary-files",
        str(path),
        "call os.unlink() with the path where the socket is closed",
    )
    assert "; bound in bound, test_files_of_the_dead.py:" in finding.message


def in_a_new_folder() -> None:
    bound(f"{tempfile.mkdtemp(prefix='lowtide_test_')}/socket").close()


def by_zmq() -> None:
    zmq: Any = pytest.importorskip("zmq")
    with zmq.Context() as context, context.socket(zmq.REP) as answering:
        answering.bind(f"ipc://{tempfile.gettempdir()}/lowtide_test_zmq")


def in_a_new_folder_by_a_child() -> None:
    folder = tempfile.mkdtemp(prefix="lowtide_test_")
    code = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, f"{folder}/socket"], check=True)


@pytest.mark.parametrize("leaves", [in_a_new_folder, in_a_new_folder_by_a_child, by_zmq])
def test_a_socket_that_is_left_is_found_wherever_it_lies_and_whoever_binds_it(leaves: Callable[[], None]) -> None:
    assert left_by(leaves) == ["temporary-files"]


def in_a_folder_with_a_finalizer() -> None:
    folders.append(tempfile.TemporaryDirectory(prefix="lowtide_test_"))
    bound(f"{folders[-1].name}/socket").close()


def in_an_abstract_name() -> None:
    bound("\0lowtide_test_socket").close()


def unlinked() -> None:
    bound(f"{tempfile.gettempdir()}/lowtide_test_socket").close()
    Path(tempfile.gettempdir(), "lowtide_test_socket").unlink()


def of_a_child_that_has_it_still() -> None:
    with bound(f"{tempfile.gettempdir()}/lowtide_test_socket") as listening:
        running.append(subprocess.Popen(["sleep", "600"], stdin=listening))


folders: list[tempfile.TemporaryDirectory[str]] = []
running: list[subprocess.Popen[bytes]] = []


@pytest.fixture
def ending_of_sockets() -> Iterator[None]:
    yield
    while folders:
        folders.pop().cleanup()
    while running:
        with running.pop() as process:
            process.kill()


@pytest.mark.usefixtures("ending_of_sockets")
@pytest.mark.parametrize(
    "leaves",
    [in_a_folder_with_a_finalizer, in_an_abstract_name, unlinked, of_a_child_that_has_it_still],
)
def test_a_socket_that_somebody_has_or_will_remove_is_no_leftover(leaves: Callable[[], None]) -> None:
    assert "temporary-files" not in left_by(leaves)


def test_a_socket_in_a_folder_that_this_process_made_before_goes_with_that() -> None:
    makers = Makers()
    remains = OrphanedFiles(ProcessTree(), OwnSegments(), makers)
    makers.start()
    remains.start()
    folder = tempfile.mkdtemp(prefix="lowtide_test_")
    bound(f"{folder}/first").close()
    assert remains.temporary_files().keys() == {f"{folder}/first"}
    remains.mark()
    bound(f"{folder}/second").close()
    assert remains.temporary_files().keys() == {f"{folder}/first"}
    # The same path again.
    Path(folder, "first").unlink()
    with bound(f"{folder}/first"):
        assert remains.temporary_files() == {}
    remains.stop()
    makers.stop()


def test_what_somebody_removes_is_not() -> None:
    assert left_by(lambda: ended("process", "segment", "file", "folder", "socket")) == []


def test_files_that_this_process_made_are_its_own() -> None:
    def log() -> None:
        # Its child has it open as well, and it stays: whether that is right is for its maker to know.
        with (
            tempfile.NamedTemporaryFile(prefix="lowtide_test_", delete=False) as file,
            subprocess.Popen(
                [sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file
            ) as process,
        ):
            assert process.stdout is not None
            process.stdout.readline()
            process.kill()

    assert left_by(log) == []


def test_a_folder_of_this_process_is_its_own_though_a_killed_child_wrote_in_it() -> None:
    def serve() -> None:
        folder = tempfile.mkdtemp(prefix="lowtide_test_")
        code = ENGINE.replace("print('ready'", f"held = open('{folder}/log', 'w'); print('ready'")
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.kill()
        Path(folder, "log").unlink()

    assert left_by(serve) == []


def test_a_segment_without_a_dead_child_is_nobodys() -> None:
    assert left_by(lambda: Path("/dev/shm/lowtide_test_segment").touch()) == []


class Killed:
    """An engine whose core is killed in its shutdown, with what the core had made."""

    capabilities = Capabilities(prompt_lengths=(3,), max_tokens=2)
    kinds: Sequence[str] = ("process", "segment", "file")

    def create(self, config: Mapping[str, Any]) -> None:
        self.core = engine(*self.kinds)

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        return [list(range(max_tokens)) for _ in prompt_lengths]

    def shutdown(self) -> None:
        with self.core:
            self.core.kill()


class Tidy(Killed):
    kinds = ()


def lived(target: type[Killed]) -> Subject:
    return check_run("check", target, driver=NoDriver("a test"), cycles=1).run()


def test_what_a_killed_core_leaves_after_a_shutdown_is_found() -> None:
    found = {finding.resource: finding for finding in lived(Killed).findings}
    assert set(found) == {"processes", "shared-memory", "temporary-files"}
    assert "lowtide_test_segment" in found["shared-memory"].message
    assert "lowtide_test_" in found["temporary-files"].message


def test_a_killed_core_that_leaves_nothing_is_clean() -> None:
    assert lived(Tidy).findings == ()


class EndsByItself(Killed):
    """An engine whose core ends at its shutdown, and leaves the file in /dev/shm that it had mapped."""

    kinds = ("mapped",)

    def shutdown(self) -> None:
        assert self.core.stdin is not None
        assert self.core.stdout is not None
        self.core.stdin.close()
        self.core.stdout.close()
        self.core.wait()


class RemovesItsFile(EndsByItself):
    kinds = ("mapped", "removes")


def test_a_file_that_a_core_had_mapped_and_left_is_found_with_what_removes_it() -> None:
    (finding,) = lived(EndsByItself).findings
    assert (finding.resource, finding.cause, finding.bytes) == ("shared-memory", "unknown", 1 << 20)
    path = Path(finding.holder or "")
    assert re.fullmatch(r"/dev/shm/vllm_offload_\S+\.mmap", str(path))
    assert f"{path} (1.0 MiB, made by vLLM's KV offloading) is left, and no living process uses it" in finding.message
    assert finding.advice == f"unlink shared memory when its process ends, also when it is killed; now: rm -- {path}"
    assert path.exists()
    subprocess.run(shlex.split(finding.advice.partition("; now: ")[2]), check=True)
    assert not path.exists()


def test_a_core_that_removes_its_file_is_clean() -> None:
    assert lived(RemovesItsFile).findings == ()


def test_a_file_that_a_living_process_maps_is_not_left() -> None:
    tree = ProcessTree()
    tree.start()
    remains = OrphanedFiles(tree, OwnSegments(), Makers())
    remains.mark()
    first = engine("mapped", "removes")
    remains.look()
    (name,) = mapped_shared_memory([first.pid])
    # Another program opens it before the first one ends.
    with Path("/dev/shm", name).open("rb") as region, first:
        other = subprocess.Popen(["sleep", "600"], stdin=region)
        region.close()
        first.kill()
        first.wait()
        assert remains.shared_memory([name]) == set()
        other.kill()
        other.wait()
        assert remains.shared_memory([name]) == {name}
    Path("/dev/shm", name).unlink()
    tree.stop()


class Crashes(Killed):
    """An engine whose core crashes, and leaves a segment that it has no more open."""

    kinds = ("segment",)

    def shutdown(self) -> None:
        with self.core:
            self.core.communicate(b"crash")


class CrashesTidily(Crashes):
    kinds = ()


@pytest.mark.parametrize(("target", "resources"), [(Crashes, ["shared-memory"]), (CrashesTidily, [])])
def test_what_a_core_that_crashes_leaves_is_found_in_a_checked_life_too(
    target: type[Killed], resources: list[str]
) -> None:
    left: list[str] = []
    with Lives(target, explain=False) as lives:
        # What the warm-up has left.
        Path("/dev/shm/lowtide_test_segment").unlink(missing_ok=True)
        life = CheckedLife(lives)
        life.create()
        try:
            life.close()
        except LifeError as error:
            left = [finding.resource for finding in error.findings]
    assert left == resources


class StaysBehind(EndsByItself):
    """An engine whose core goes on after its shutdown."""

    kinds = ("stays",)

    def shutdown(self) -> None:
        left.append(self.core)
        assert self.core.stdin is not None
        assert self.core.stdout is not None
        self.core.stdin.close()
        self.core.stdout.close()


left: list[subprocess.Popen[bytes]] = []


@pytest.fixture
def ending() -> Iterator[None]:
    yield
    while left:
        process = left.pop()
        process.kill()
        process.wait()


@pytest.mark.usefixtures("ending")
@pytest.mark.parametrize("cycles", [1, 2])
def test_a_core_that_runs_on_is_found_with_what_it_holds_and_what_ends_it(cycles: int) -> None:
    subject = check_run("check", StaysBehind, driver=NoDriver("a test"), cycles=cycles).run()
    # What an earlier life has left running is this finding, and is judged by nothing else.
    (finding,) = subject.findings
    pids = [process.pid for process in left]
    assert (finding.resource, finding.cause, finding.stage, finding.count) == (
        "processes",
        "unknown",
        "shutdown",
        cycles,
    )
    assert all(f"pid {pid} (" in finding.message for pid in pids)
    assert re.search(r"runs on and holds \d+\.\d MiB on the host", finding.message)
    assert finding.bytes > cycles * 64 << 20
    assert (finding.advice or "").endswith(f"; now: kill {' '.join(map(str, pids))}")
    assert finding.process is not None
    assert finding.process.pid in pids
    assert [item for item in subject.not_measured if item.process is not None and item.process.pid in pids] == []


def test_os_kill_is_as_before_once_nobody_looks() -> None:
    originals = os.kill, os.killpg
    names = tempfile._get_candidate_names()
    remains = OrphanedFiles(ProcessTree(), OwnSegments(), Makers())
    remains.start()
    remains.start()
    assert os.kill is not originals[0]
    with pytest.raises(ProcessLookupError):
        os.kill(2**22 + 1, signal.SIGKILL)
    with pytest.raises(TypeError):
        os.kill("1", signal.SIGKILL)  # type: ignore[arg-type]
    remains.stop()
    remains.stop()
    assert (os.kill, os.killpg) == originals
    assert tempfile._get_candidate_names() is names


LIVES = """
import sys
from lowtide.leakcheck.lives.lifecycle import check_run
from lowtide.leakcheck.targets.target import Capabilities
from lowtide.probes.device.driver import NoDriver


class Engine:
    capabilities = Capabilities(device="cpu")
    lives = 0

    def create(self, config):
        import zmq

        Engine.lives += 1
        self.path = f"{sys.argv[1]}_{Engine.lives}"
        self.context = zmq.Context()
        self.answering = self.context.socket(zmq.REP)
        self.answering.bind(f"ipc://{self.path}")

    def infer(self, prompt_lengths, max_tokens):
        return [[0] for _ in prompt_lengths]

    def shutdown(self):
        import os

        self.answering.close()
        self.context.term()
        if sys.argv[2] == "removes":
            os.unlink(self.path)


subject = check_run("check", Engine, driver=NoDriver("a test"), cycles=2).run()
print([(each.resource, each.holder, each.count) for each in subject.findings])
"""


@pytest.mark.parametrize("ending", ["leaves", "removes"])
def test_each_lifes_socket_is_found_though_its_library_came_with_the_first_life(ending: str) -> None:
    pytest.importorskip("zmq")
    path = f"{tempfile.gettempdir()}/lowtide_test_zmq"
    done = subprocess.run([sys.executable, "-c", LIVES, path, ending], capture_output=True, text=True, check=True)
    found = [("temporary-files", f"{path}_1, {path}_2", 2)] if ending == "leaves" else []
    assert done.stdout.splitlines()[-1] == str(found)

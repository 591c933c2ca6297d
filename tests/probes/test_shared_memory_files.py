"""Files in /dev/shm whose makers and users have ended, by who has them open, and by their names."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lowtide.probes import originals
from lowtide.probes.processes import shared_memory_files
from lowtide.probes.processes.mapped_files import FilesInUse, files_in_use
from lowtide.probes.processes.shared_memory_files import SharedMemoryFile, SharedMemoryReading, read_shared_memory
from tests.waiting import HANG_S, wait_until

MIB = 1 << 20


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in shared memory, so that tests beside this one do not see its files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="lowtide-tests-") as folder:
        yield Path(folder)


def made(path: Path, size: int = 4096) -> Path:
    path.write_bytes(b"x" * size)
    return path


def found(path: Path) -> SharedMemoryFile | None:
    return next((file for file in read_shared_memory(path.parent).dead if file.path == str(path)), None)


def why_undecided(path: Path) -> str:
    (undecided,) = [each for each in read_shared_memory(path.parent).undecided if each.file.path == str(path)]
    return undecided.why


def test_what_a_living_process_has_open_is_not_dead(shm: Path) -> None:
    path = made(shm / "nccl-a1B2c3")
    with path.open("rb"):
        assert found(path) is None
    assert found(path) is not None


def test_who_opens_one_while_the_others_are_looked_at_is_seen(monkeypatch: pytest.MonkeyPatch, shm: Path) -> None:
    path, real, opened = made(shm / "nccl-a1B2c3"), shared_memory_files.files_in_use, ExitStack()

    def looked_at(pid: int, *rest: Any) -> FilesInUse:
        files = real(pid, *rest)
        if pid == os.getpid():
            opened.enter_context(path.open("rb"))
        return files

    monkeypatch.setattr(shared_memory_files, "files_in_use", looked_at)
    with opened:
        assert found(path) is None


def test_an_open_file_is_known_in_the_folder_of_another_name(shm: Path) -> None:
    path = made(shm / "nccl-a1B2c3")
    with path.open("rb"):
        folder = shm.rename(f"{shm}-moved")
        try:
            assert found(folder / path.name) is None
        finally:
            folder.rename(shm)


def test_while_the_process_lives_whose_number_it_has_it_is_not_dead(shm: Path) -> None:
    nobody = 2**22 + 1
    assert found(made(shm / f"torch_{os.getpid()}_1234_0")) is None
    assert found(made(shm / f"cuda.shm.0.{os.getpid():x}.1")) is None
    assert found(made(shm / f"torch_{nobody}_1234_0")) is not None
    assert found(made(shm / f"cuda.shm.0.{nobody:x}.1")) is not None


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("psm_0a1b2c3d", "Python's multiprocessing.shared_memory"),
        ("sem.mp-abcd1234", "a semaphore of Python's multiprocessing"),
        ("sem.gate", "a named semaphore"),
        ("torch_4194305_1234_0", "torch.multiprocessing"),
        ("vllm_offload_7f3a.mmap", "vLLM's KV offloading"),
        ("nccl-a1B2c3", "NCCL"),
        ("cuda.shm.0.400001.1", "the CUDA driver"),
        ("__KMP_REGISTERED_LIB_4194305_0", "LLVM's OpenMP"),
        ("model.safetensors", ""),
    ],
)
def test_who_makes_such_files_is_known_by_their_names(name: str, library: str, shm: Path) -> None:
    file = found(made(shm / name))
    assert file is not None
    assert file.library == library


def test_what_nobody_keeps_on_purpose_is_what_libraries_left() -> None:
    files = tuple(SharedMemoryFile(f"/dev/shm/{n}", library, n, n, 0, "", "") for n, library in [(1, "NCCL"), (2, "")])
    assert SharedMemoryReading(files, ()).left_by_libraries == 1


def test_a_folder_is_one_entry_with_all_below_it(shm: Path) -> None:
    folder = shm / "with blank"
    (folder / "deep").mkdir(parents=True)
    assert found(folder) is None
    with made(folder / "deep" / "a", MIB).open("rb"):
        made(folder / "b", MIB)
        assert found(folder) is None
    file = found(folder)
    assert file is not None
    assert file.bytes == 2 * MIB
    subprocess.run(file.remove, shell=True, check=True)
    assert not folder.exists()


def test_a_process_of_another_user_is_not_readable() -> None:
    # As root in a fork that is root no more; else the first process is another user's.
    pid = os.fork() if not os.geteuid() else 0
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return
    if not os.geteuid():
        os.setuid(65534)
        os._exit(files_in_use(os.getppid(), {(0, 0)}, ()).is_readable)
    assert not files_in_use(1, {(0, 0)}, ()).is_readable


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may not be read."""
    real, nobody = shared_memory_files.files_in_use, FilesInUse(frozenset(), False)
    monkeypatch.setattr(
        shared_memory_files, "files_in_use", lambda pid, *rest: nobody if pid == os.getpid() else real(pid, *rest)
    )


@pytest.mark.usefixtures("unreadable")
def test_where_a_process_of_its_owner_may_not_be_read_it_is_undecided(shm: Path) -> None:
    path = made(shm / "psm_0123abcd")
    assert found(path) is None
    assert why_undecided(path).startswith(f"process {os.getpid()} of ")


def test_a_process_that_the_kernel_does_not_let_be_read_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, shm: Path
) -> None:
    real, released = shared_memory_files.files_in_use, threading.Event()
    monkeypatch.setattr(
        shared_memory_files,
        "files_in_use",
        lambda pid, *rest: (pid == os.getpid() and released.wait(HANG_S)) or real(pid, *rest),
    )
    made(shm / "psm_0123abcd")
    reading = read_shared_memory(shm, patience=1.0)
    released.set()
    assert (reading.dead, len(reading.undecided)) == ((), 1)
    wait_until(lambda: not any(thread.name.startswith("lowtide-reader") for thread in threading.enumerate()))


@pytest.mark.usefixtures("unreadable")
def test_a_private_file_is_decided_where_a_stranger_s_process_may_not_be_read(
    monkeypatch: pytest.MonkeyPatch, shm: Path
) -> None:
    real = shared_memory_files._user_of
    monkeypatch.setattr(shared_memory_files, "_user_of", lambda pid: 54321 if pid == os.getpid() else real(pid))
    path = made(shm / "psm_0123abcd")
    path.chmod(0o666)
    assert why_undecided(path) == f"process {os.getpid()} of 54321 could not be read, and may use it"
    path.chmod(0o600)
    assert found(path) is not None


def test_another_user_s_file_is_undecided_for_whoever_is_not_root(monkeypatch: pytest.MonkeyPatch, shm: Path) -> None:
    monkeypatch.setattr(originals.os, "geteuid", lambda: 54321)
    path = made(shm / "psm_0123abcd")
    assert "and root may see whether" in why_undecided(path)
    (undecided,) = read_shared_memory(shm).undecided
    assert undecided.file.remove == f"sudo rm -- {path}"


def test_in_a_container_that_shares_it_with_its_host_nothing_is_decided(
    monkeypatch: pytest.MonkeyPatch, shm: Path
) -> None:
    inside = {"pid": "pid:[4026532221]", "ipc": "ipc:[4026531839]"}
    monkeypatch.setattr(shared_memory_files, "_namespace", inside.__getitem__)
    assert "shares /dev/shm with its host" in why_undecided(made(shm / "psm_0123abcd"))


def test_a_folder_that_cannot_be_read_is_not_measured(tmp_path: Path) -> None:
    reading = read_shared_memory(tmp_path / "none")
    assert reading.not_measured == f"{tmp_path / 'none'} cannot be read: No such file or directory"

"""Looks into a process that was not started with us, from a fork of it, and leaves nothing there.

It runs in a thread of that process, which blocks all signals, uses what every Python has loaded, and ends once nobody
asks any more: at the end of a pipe that whoever asks holds open.  For each question it forks the process.  The fork
sees the heap as it was at that moment, and may import, walk and count what it likes while the process goes on: it
answers into a file, and ends without running anything of the program's.  Where memory is short, it is what the kernel
ends first.

`folder`, with the pipe and the answers, `root`, which has the package `lowtide`, and `paths`, where there is what it
needs, are given by who starts it.
"""

import _signal  # type: ignore[import-not-found]
import _thread
import _weakref
import posix
import sys

ANSWERS = "lowtide.leakcheck.processes.answers"
"""The module whose `answer(question)` is called, as by an agent."""

FORKED = "lowtide.probes.processes.forked"
"""The module that lets a fork pass for its parent."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    folder = root = ""
    paths: list[str] = []


def serve() -> None:
    """Answer until the other end of the pipe is closed."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    # Without waiting, or it would wait for ever for somebody who has ended.
    pipe = posix.open(f"{folder}/questions", posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NONBLOCK)
    try:
        posix.set_blocking(pipe, True)
        _write("thread", str(_thread.get_native_id()).encode())
        while posix.read(pipe, 1):
            _answer_in_a_fork()
    finally:
        posix.close(pipe)
        _remove_folder()


def _remove_folder() -> None:
    """Remove the folder, for whoever asked may have been killed."""
    try:
        for name in posix.listdir(folder):
            posix.unlink(f"{folder}/{name}")
        posix.rmdir(folder)
    except OSError:  # it is removed
        pass


def _answer_in_a_fork() -> None:
    # A fork has one thread: what the others run, and who they are, is taken with it.
    frames = sys._current_frames()
    threads = dict(getattr(sys.modules.get("threading"), "_active", ()))
    marks = _marks_of_locals()
    try:
        child = posix.fork()
    except Exception as error:
        _write("error", f"it cannot be forked: {error}".encode(errors="replace"))
        return
    if not child:
        try:
            _look(frames, threads)
        finally:
            posix._exit(0)
    # What runs in other threads is not to be kept meanwhile.
    del frames, threads, marks
    try:
        posix.waitpid(child, 0)
    except OSError:  # the program lets nobody wait, or has done so itself
        pass


def _marks_of_locals() -> "list[Any]":
    """Return what marks each thread in each `threading.local`: in a fork that goes, and what the thread has there.

    Who refers to the classes is asked, for a list of all objects would be seen by the program's threads.
    """
    was_there = "gc" in sys.modules
    import gc

    if not was_there:
        del sys.modules["gc"]
    kinds = [_thread._local]
    for kind in kinds:
        kinds += type.__subclasses__(kind)
    locals_of_threads = [each for each in gc.get_referrers(*kinds) if any(type(each) is kind for kind in kinds)]
    tables = [table for table in gc.get_referents(*locals_of_threads) if type(table) is dict]
    return [key() for table in tables for key in list(table) if type(key) is _weakref.ref]


def _look(frames: "dict[int, Any]", threads: "dict[int, Any]") -> None:
    """Answer the question: in the fork."""
    _write("child", str(posix.getpid()).encode())
    nowhere = posix.open("/dev/null", posix.O_RDWR)
    for number in range(3):
        posix.dup2(nowhere, number)
    try:
        _write("/proc/self/oom_score_adj", b"1000")
    except OSError:
        pass
    try:
        _prepare()
        _import_lowtide()
        from importlib import import_module

        import_module(FORKED).pass_for_the_process(frames, threads)
        _keep_the_memory_as_it_was()
        _write("answer", import_module(ANSWERS).answer(_read(f"{folder}/question"), is_fork=True))
    except BaseException as error:
        _write("error", f"{type(error).__name__}: {error}".encode(errors="replace"))


def _prepare() -> None:
    import gc

    # Before anything is imported: collecting would run what the program's garbage does at its end.
    gc.disable()
    sys.dont_write_bytecode = True
    sys.path += [path for path in paths if path not in sys.path]


def _import_lowtide() -> None:
    """Import the lowtide that asks, and not another version that the program's path may have."""
    if "lowtide" not in sys.modules:
        from importlib.util import module_from_spec, spec_from_file_location

        package = f"{root}/lowtide"
        spec = spec_from_file_location("lowtide", f"{package}/__init__.py", submodule_search_locations=[package])
        assert spec is not None
        assert spec.loader is not None
        sys.modules["lowtide"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


def _keep_the_memory_as_it_was() -> None:
    """Let what is said of this process's memory be what it was before all that a look imports."""
    from lowtide.probes.host import memory_parts

    parts, malloc = memory_parts.read_parts(), memory_parts.malloc_in_use()
    memory_parts.read_parts, memory_parts.malloc_in_use = lambda: parts, lambda *_: malloc


def _read(path: str) -> bytes:
    number = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        parts = []
        while part := posix.read(number, 1 << 20):
            parts.append(part)
        return b"".join(parts)
    finally:
        posix.close(number)


def _write(name: str, text: bytes) -> None:
    """Write a file of the folder, or another one, which is there under its name only once it is whole."""
    path = name if name[:1] == "/" else f"{folder}/{name}.new"
    number = posix.open(path, posix.O_WRONLY | posix.O_CREAT | posix.O_CLOEXEC, 0o600)
    try:
        view = memoryview(text)
        while view:
            view = view[posix.write(number, view) :]
    finally:
        posix.close(number)
    if name[:1] != "/":
        posix.rename(path, f"{folder}/{name}")


try:
    serve()
except Exception as error:
    try:
        _write("error", f"{type(error).__name__}: {error}".encode(errors="replace"))
    except OSError:  # whoever asked has ended
        pass

"""A look into a process that was not started with us: a thread of ours in it, which forks it for each question.

What runs there is `lowtide_look`, beside the agent; what is asked and answered is the same as with an agent.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TypeVar

from lowtide.leakcheck.processes import messages
from lowtide.probes.host.process_files import stat
from lowtide.probes.originals import os, tempfile, time
from lowtide.probes.processes.agents import BOOTSTRAP, ROOT, AgentError, NoAgentError
from lowtide.probes.processes.injection import python_of, refuse_unless_possible, run_in

ANSWER_S = 120.0
"""Seconds for an answer: what looks for holders goes through the whole heap, at a low priority."""

_BEGINS_S = 5.0
"""Seconds for the thread to begin, and to end."""

_LOOKS_S = 0.005
"""Seconds between two looks at whether an answer is there."""

_RUN = "try:\n __import__('_thread').start_new_thread(exec, ({code!a}, {names!a}))\nexcept Exception:\n pass\n"
"""What is run in the process, of ASCII alone. It binds no name, since the namespace is that of its `__main__`."""

_CODE = (
    "import posix\n"
    "file = posix.open({path!a}, posix.O_RDONLY | posix.O_CLOEXEC)\n"
    "text = posix.read(file, 1 << 20)\n"
    "posix.close(file)\n"
    "exec(compile(text, 'lowtide_look.py', 'exec'), globals())\n"
)

_Answer = TypeVar("_Answer")


class Attachment:
    """Answers about a process that runs on, while the block lasts.

    Attributes:
        folder: with what is asked and answered, open to the process's user alone; None outside of the block.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.folder: Path | None = None
        self._pipe = -1
        self._thread = 0
        # Whether a fork may be at work.
        self._is_asked = False

    def __enter__(self) -> Attachment:
        """Start the thread in the process.

        Raises:
            InjectionError: that is not possible; the message says why.
        """
        refuse_unless_possible(self.pid)
        self.folder = Path(tempfile.mkdtemp(prefix="lowtide-attach-"))
        try:
            self._start(self.folder)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, folder: Path) -> None:
        os.mkfifo(folder / "questions", 0o600)
        # To read, too, or it would wait for a reader.
        self._pipe = os.open(folder / "questions", os.O_RDWR | os.O_CLOEXEC)
        look = folder / "look.py"
        shutil.copyfile(BOOTSTRAP / "lowtide_look.py", look)
        names = {
            "__name__": "lowtide.probes.look",
            "folder": str(folder),
            "root": str(ROOT),
            "paths": self._paths(),
        }
        for file in (folder, look, folder / "questions"):
            self._give(file)
        run_in(self.pid, _RUN.format(code=_CODE.format(path=str(look)), names=names), folder)
        self._thread = int(self._awaited("thread", _BEGINS_S) or 0)

    def _paths(self) -> list[str]:
        """Return where the fork may find what lowtide needs: if it is of the same Python."""
        python = python_of(self.pid)
        is_same = python is not None and python[0] == f"{sys.version_info.major}.{sys.version_info.minor}"
        return [path for path in sys.path if path.endswith("-packages") and is_same]

    def _give(self, file: Path) -> None:
        """Let the process use a file of ours, where it is another user's and we are root."""
        with contextlib.suppress(FileNotFoundError):  # it has ended, which is seen where it does not answer
            owner = os.stat(f"/proc/{self.pid}")
            if owner.st_uid != os.geteuid():
                os.chown(file, owner.st_uid, owner.st_gid)

    def ask(self, question: messages.Question[_Answer], limit: float = ANSWER_S) -> _Answer:
        """Return what a fork of the process answers.

        Args:
            question: what is asked.
            limit: seconds for the answer.

        Raises:
            NoAgentError: the process has ended.
            AgentError: its fork did not answer in time, or failed; the message says why.
        """
        return messages.ask(partial(self._answer, limit=limit), question, f"a fork of pid {self.pid}")

    def _answer(self, question: bytes, limit: float) -> bytes:
        assert self.folder is not None
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "answer").unlink()
        asked = self.folder / "question"
        asked.write_bytes(question)
        self._give(asked)
        self._is_asked = True
        os.write(self._pipe, b"?")
        data = self._awaited("answer", limit)
        self._is_asked = False
        if data is None:
            self._end_fork(self.folder)
            raise AgentError(f"a fork of pid {self.pid} did not answer within {limit:g} s, and was ended")
        return data

    def _awaited(self, name: str, limit: float) -> bytes | None:
        """Return what is in a file once it is there; None where it does not come in time.

        Raises:
            NoAgentError: the process has ended.
            AgentError: something has failed there.
        """
        assert self.folder is not None
        until = time.monotonic() + limit
        while time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                return (self.folder / name).read_bytes()
            with contextlib.suppress(FileNotFoundError):
                error = (self.folder / "error").read_text(errors="replace")
                (self.folder / "error").unlink()
                raise AgentError(self._explained(error))
            process = stat(self.pid)
            if process is None or process.state in ("Z", "X"):
                raise NoAgentError(f"pid {self.pid} has ended")
            time.sleep(_LOOKS_S)
        return None

    def _explained(self, error: str) -> str:
        python = python_of(self.pid)
        if error.startswith("ModuleNotFoundError") and python is not None:
            return f"a fork of pid {self.pid}, of Python {python[0]}, failed: {error}: install lowtide for that Python"
        return f"a fork of pid {self.pid} failed: {error}"

    def _end_fork(self, folder: Path) -> None:
        with contextlib.suppress(OSError, ValueError):
            child = int((folder / "child").read_text())
            process = stat(child)
            if process is not None and process.parent == self.pid:
                os.kill(child, signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        folder, self.folder = self.folder, None
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        until = time.monotonic() + _BEGINS_S
        while self._thread and time.monotonic() < until and os.path.exists(f"/proc/{self.pid}/task/{self._thread}"):
            if folder is not None and self._is_asked:
                self._end_fork(folder)
            time.sleep(_LOOKS_S)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

"""Lives of an engine that uses a library: what a second life does not make more of is first use, and no leak."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest

from lowtide.leakcheck.lives.lifecycle import LifecycleRun
from lowtide.probes.device.driver import NoDriver
from lowtide.reports.schema import Subject

pytestmark = pytest.mark.nightly

LIBRARY = """
import os, threading

KEPT = []
STOP = threading.Event()

def serve():
    KEPT.append(threading.Thread(target=STOP.wait, name="installed-server", daemon=True))
    KEPT[-1].start()

def serve_once():
    if not KEPT:
        serve()

def open_pipe():
    KEPT.append(os.pipe())
"""

Use = Callable[[Any], object]

OWN: list[threading.Thread] = []


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module as if it were installed."""
    module: Any = ModuleType("installed_library")
    module.__file__ = f"{sysconfig.get_path('purelib')}/installed_library.py"
    exec(compile(LIBRARY, module.__file__, "exec"), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    module.STOP.set()
    for kept in (*module.KEPT, *OWN):
        if isinstance(kept, tuple):
            os.close(kept[0])
            os.close(kept[1])
        else:
            kept.join()
    OWN.clear()


def lived(library: Any, use: Use, cycles: int) -> Subject:
    class Life:
        def create(self) -> None:
            use(library)

        def infer(self) -> Sequence[Sequence[int]]:
            return [[1]]

        def shutdown(self) -> None:
            """Nothing of the engine's own is left."""

    script = ("create", "infer", "shutdown")
    return LifecycleRun("uses", Life, device="cpu", driver=NoDriver("a test"), cycles=cycles, script=script).run()


def start_own(library: Any) -> None:
    if not OWN:
        OWN.append(threading.Thread(target=library.STOP.wait, daemon=True))
        OWN[0].start()


def test_what_a_library_keeps_once_is_no_leak_and_needs_no_word(library: Any) -> None:
    subject = lived(library, lambda library: library.serve_once(), cycles=2)
    assert (subject.outcome, subject.findings, subject.not_measured) == ("clean", (), ())


def test_what_a_library_keeps_is_listed_where_no_life_has_followed(library: Any) -> None:
    subject = lived(library, lambda library: library.serve_once(), cycles=1)
    assert subject.outcome == "clean"
    listed = [item for item in subject.not_measured if "installed_library" in item.what]
    assert [item.what.partition(": ")[0] for item in listed] == ["1 thread of installed_library"]
    assert "once so far" in listed[0].why


@pytest.mark.parametrize(
    ("use", "resource", "count", "trend"),
    [
        (lambda library: library.serve(), "threads", 3, "growth"),
        (lambda library: library.open_pipe(), "file-descriptors", 4, None),
        (start_own, "threads", 1, "residue"),
    ],
    ids=["a thread in each life", "a pipe in each life", "the program's own, once"],
)
def test_what_becomes_more_or_is_the_program_s_is_a_leak(
    library: Any, use: Use, resource: str, count: int, trend: str | None
) -> None:
    subject = lived(library, use, cycles=3)
    (finding,) = subject.findings
    assert (subject.outcome, finding.resource, finding.count) == ("leak", resource, count)
    assert finding.trend == trend

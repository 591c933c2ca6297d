"""What an import in another thread sets and takes is the process's, as an import of the main thread's is."""

from __future__ import annotations

import importlib
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lowtide import LeakCheck

MODULE = """
    import sys
    import threading

    import {gate}

    sys.setswitchinterval(0.006)
    TABLE = bytearray(b"x") * {size}
    {gate}.EXECUTED.set()
    assert {gate}.GO.wait(60)
"""
GATE = "import threading\nEXECUTED, GO = threading.Event(), threading.Event()"
SIZE = 100 << 20


@pytest.fixture
def slow_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that changes a setting, takes memory, and then waits until its gate is opened."""
    name = "imported_in_a_thread"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE.format(gate=f"{name}_gate", size=SIZE)))
    (tmp_path / f"{name}_gate.py").write_text(GATE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(f"{name}_gate")
    interval = sys.getswitchinterval()
    yield name
    sys.setswitchinterval(interval)
    for each in (name, f"{name}_gate"):
        sys.modules.pop(each, None)


def import_beside(name: str, *, meanwhile: Callable[[], object]) -> None:
    """Import a module in a thread, and do something once it has been executed and before its import is over."""
    gate = sys.modules[f"{name}_gate"]
    with ThreadPoolExecutor(1) as pool:
        imported = pool.submit(importlib.import_module, name)
        assert gate.EXECUTED.wait(60)
        meanwhile()
        gate.GO.set()
        imported.result()


def work() -> None:
    """Compute for longer than who only waits does."""
    sum(range(3_000_000))


def test_what_an_import_in_a_thread_sets_and_takes_is_no_leak(slow_module: str) -> None:
    with LeakCheck() as check:
        import_beside(slow_module, meanwhile=lambda: None)
    assert check.report.subjects[0].findings == ()


def test_what_a_thread_itself_sets_is_a_leak(slow_module: str) -> None:
    with LeakCheck() as check:
        thread = threading.Thread(target=sys.setswitchinterval, args=(0.007,))
        thread.start()
        thread.join()
    assert [finding.resource for finding in check.report.subjects[0].findings] == ["globals"]


def test_what_changed_while_other_threads_worked_beside_an_import_is_a_leak(slow_module: str) -> None:
    kept = []

    def take() -> None:
        work()
        kept.append(bytearray(b"x") * SIZE)

    with LeakCheck() as check:
        import_beside(slow_module, meanwhile=take)
    assert {finding.resource for finding in check.report.subjects[0].findings} >= {"host-memory"}


def test_a_thread_that_others_start_beside_an_import_is_a_leak(slow_module: str) -> None:
    stop = threading.Event()
    with LeakCheck(settle=0.1) as check:
        import_beside(slow_module, meanwhile=threading.Thread(target=stop.wait).start)
    stop.set()
    assert [finding.resource for finding in check.report.subjects[0].findings] == ["threads"]

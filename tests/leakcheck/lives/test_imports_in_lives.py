"""Lives whose calls import a module for the first time: what its import takes and changes belongs to the process."""

from __future__ import annotations

import atexit
import copyreg
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lowtide.leakcheck.judging.owners import Owner
from lowtide.leakcheck.lives.checked_life import CheckedLife, Lives
from lowtide.leakcheck.lives.lifecycle import LifecycleRun
from lowtide.leakcheck.lives.script import LifeError
from lowtide.leakcheck.watching.check import LeakCheck
from lowtide.leakcheck.watching.import_watch import ImportWatch
from lowtide.leakcheck.watching.watch import Watch
from lowtide.probes.device.driver import NoDriver
from lowtide.reports.schema import Subject
from tests.leakcheck.small_target import SmallTarget

pytestmark = pytest.mark.nightly

OUTER = "import imported_late_inside\n"
INNER = """
import atexit, copyreg, logging, os, sys, threading, warnings
import torch

class LateWarning(DeprecationWarning): pass

warnings.simplefilter("once", LateWarning)
os.environ["IMPORTED_LATE"] = "1"
os.environ["CHANGED_LATE"] = "new"
del os.environ["REMOVED_LATE"]
HANDLER = logging.NullHandler()
logging.getLogger("imported_late").addHandler(HANDLER)
sys.setrecursionlimit(sys.getrecursionlimit() + 17)
TABLE = torch.zeros(1 << 18)
HEAP = bytearray(80 << 20)
class Pickled: table = torch.zeros(1 << 18)
copyreg.pickle(Pickled, lambda item, table=torch.zeros(1 << 18): (Pickled, ()))
EXIT = lambda table=torch.zeros(1 << 18): None
atexit.register(EXIT)
STOP = threading.Event()
THREAD = threading.Thread(target=STOP.wait, name="imported late", daemon=True)
THREAD.start()
PIPE = os.pipe()
"""

STAGES = ("create", "infer", "sleep", "wake", "shutdown")


def import_late() -> None:
    importlib.import_module("imported_late")


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules that nobody has imported yet, and the process's settings as they were."""
    (tmp_path / "imported_late.py").write_text(OUTER)
    (tmp_path / "imported_late_inside.py").write_text(INNER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("REMOVED_LATE", "x")
    monkeypatch.setenv("CHANGED_LATE", "old")
    for name in ("IMPORTED_LATE", "OWN"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    limit = sys.getrecursionlimit()
    with warnings.catch_warnings():
        yield
    sys.setrecursionlimit(limit)
    undo()


def undo() -> None:
    """Take back what the import took."""
    sys.modules.pop("imported_late", None)
    late: Any = sys.modules.pop("imported_late_inside", None)
    if late is not None:
        copyreg.dispatch_table.pop(late.Pickled, None)
        atexit.unregister(late.EXIT)
        logging.getLogger("imported_late").removeHandler(late.HANDLER)
        late.STOP.set()
        late.THREAD.join()
        for number in late.PIPE:
            os.close(number)


class Acting(SmallTarget):
    """Does something in one of its calls, once it is asked to."""

    act: Callable[[], object] | None = None
    stage = ""

    def turn(self, stage: str) -> None:
        if self.act is not None and self.stage == stage:
            type(self).act()

    def create(self, config: Mapping[str, Any]) -> None:
        self.turn("create")
        super().create(config)

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        self.turn("infer")
        return super().infer(prompt_lengths, max_tokens)

    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        self.turn("sleep")
        return super().sleep(level, mode)

    def wake(self, tags: Sequence[str] | None) -> None:
        self.turn("wake")
        super().wake(tags)

    def shutdown(self) -> None:
        self.turn("shutdown")
        super().shutdown()


def walk(life: CheckedLife) -> None:
    life.create()
    life.infer([3], 1)
    life.sleep(1)
    life.wake()
    life.shutdown()
    life.close()


def test_what_an_import_takes_in_a_checked_life_is_no_finding_and_stays() -> None:
    class Target(Acting):
        """Whose calls import it."""

    # The module is imported anew for each stage, as another one would be.
    with Lives(Target, explain=False) as lives:
        for stage in STAGES:
            Target.stage, Target.act = stage, staticmethod(import_late)
            os.environ["REMOVED_LATE"] = "x"
            walk(CheckedLife(lives))
            lives.put_back()
            assert (os.environ["IMPORTED_LATE"], os.environ["CHANGED_LATE"]) == ("1", "new")
            assert "REMOVED_LATE" not in os.environ
            undo()


def test_what_an_import_sets_while_libraries_load_is_not_put_back() -> None:
    class Target(Acting):
        stage, act = "infer", staticmethod(import_late)

    with Lives(Target, explain=False) as lives:
        assert os.environ["CHANGED_LATE"] == "new"
        walk(CheckedLife(lives))


def set_and_import() -> None:
    os.environ["OWN"] = str(int(os.environ.get("OWN", "0")) + 1)
    import_late()


def test_what_the_call_sets_that_imports_is_found() -> None:
    class Target(Acting):
        stage = "wake"

    with Lives(Target, explain=False) as lives:
        Target.act = staticmethod(set_and_import)
        life = CheckedLife(lives)
        with pytest.raises(LifeError, match=r"1 process-wide setting .*os\.environ\['OWN'\] was not set, is '1'"):
            walk(life)
        life.abandon()


def lived(stage: str, cycle: int, act: Callable[[], object]) -> Subject:
    class Life:
        turn = 0

        def create(self) -> None:
            Life.turn += 1
            self.at("create")

        def infer(self) -> Sequence[Sequence[int]]:
            self.at("infer")
            return [[1]]

        def sleep(self, level: int) -> None:
            self.at("sleep")

        def wake(self) -> None:
            self.at("wake")

        def shutdown(self) -> None:
            self.at("shutdown")

        def at(self, name: str) -> None:
            if (name, Life.turn) == (stage, cycle):
                act()

    script = ("create", "infer", "sleep(1)", "wake", "shutdown")
    return LifecycleRun("late", Life, device="cpu", driver=NoDriver("a test"), cycles=2, script=script).run()


@pytest.mark.parametrize(("stage", "cycle"), [("create", 1), ("infer", 2), ("shutdown", 2)])
def test_what_an_import_takes_in_a_run_is_no_finding(stage: str, cycle: int) -> None:
    subject = lived(stage, cycle, import_late)
    assert (subject.outcome, subject.findings, subject.not_measured) == ("clean", (), ())


@pytest.mark.parametrize("cycle", [1, 2])
def test_what_a_call_of_a_run_sets_that_imports_is_found(cycle: int) -> None:
    subject = lived("infer", cycle, set_and_import)
    (finding,) = subject.findings
    assert finding.message.startswith("os.environ['OWN'] was not set, is '1', and not restored after shutdown")
    assert "os.environ.pop('OWN')" in (finding.remedy.action if finding.remedy is not None else finding.advice or "")


def test_a_block_does_not_own_what_it_imports_first() -> None:
    with LeakCheck() as check:
        import_late()
    assert check.report.subjects[0].findings == ()
    assert check.report.subjects[0].not_measured == ()


def test_two_watches_are_both_told_of_an_import() -> None:
    reported: list[tuple[int, str]] = []

    def watching(turn: int) -> ImportWatch:
        return ImportWatch(lambda owner: reported.append((turn, owner.name)), lambda: None)

    watches = [watching(turn) for turn in range(2)]
    for watch in watches:
        watch.install()
        watch.active = True
    try:
        import_late()
    finally:
        for watch in watches:
            watch.remove()
    assert sorted(reported) == [(0, "import of imported_late"), (1, "import of imported_late")]
    spec = sys.modules["imported_late"].__spec__
    assert spec is not None
    assert type(spec.loader).__name__ == "SourceFileLoader"


def test_a_level_that_one_import_sets_of_a_library_that_another_brought_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM sets that of httpx, which transformers has brought before."""
    name = "jinja2.logger_of_a_test"
    (tmp_path / "brings_a_logger.py").write_text(f"import logging, jinja2\nlogging.getLogger({name!r})\n")
    (tmp_path / "sets_its_level.py").write_text(f"import logging\nlogging.getLogger({name!r}).setLevel(30)\n")

    def both() -> None:
        importlib.import_module("brings_a_logger")
        importlib.import_module("sets_its_level")

    try:
        assert lived("create", 1, both).findings == ()
    finally:
        logging.root.manager.loggerDict.pop(name, None)
        sys.modules.pop("brings_a_logger", None)
        sys.modules.pop("sets_its_level", None)


def test_what_the_checker_imports_as_it_opens_its_watch_is_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    entered, opened = Watch.enter, Watch.open

    def note(watch: Watch, owner: Owner) -> None:
        if watch is lives.watch:
            reported.append(owner.name)
        entered(watch, owner)

    def open_late(watch: Watch) -> None:
        import_late()
        opened(watch)

    monkeypatch.setattr(Watch, "enter", note)
    monkeypatch.setattr(Watch, "open", open_late)
    lives = Lives(Acting, explain=False)
    with lives:
        assert "import of imported_late" not in reported

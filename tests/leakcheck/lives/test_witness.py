"""Engines that are killed: what stays is found, with who it is, and removed; of one that is right nothing stays."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from lowtide.leakcheck.cli import fuzz as fuzz_command
from lowtide.leakcheck.lives import sweep
from lowtide.leakcheck.lives import witness as module
from lowtide.leakcheck.lives.script import Call
from lowtide.leakcheck.lives.sweep import Swept
from lowtide.leakcheck.lives.witness import Killed, kill_in_each_stage
from lowtide.leakcheck.targets.faults import Seam
from lowtide.leakcheck.targets.target import Capabilities, TargetError, TargetSource
from lowtide.probes.device.driver import Driver, DriverReading, NoDriver
from lowtide.probes.host.process_files import has_ended
from lowtide.reports.schema import NotMeasured
from tests.leakcheck.small_target import SmallTarget

pytestmark = pytest.mark.nightly

NO_DRIVER = NoDriver("a test")


class Bare:
    """The least that a target can be, with a place where it can fail."""

    capabilities = Capabilities()

    def create(self, config: Mapping[str, Any]) -> None:
        self.take()
        self.take()

    def take(self) -> None: ...

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        return [[1] for _ in prompt_lengths]

    def shutdown(self) -> None: ...

    def fault_seams(self) -> Sequence[Seam]:
        return (Seam("map", Bare, "take", MemoryError),)


class Untidy(Bare):
    """A child that ends when its own time is over, and a segment that nobody but the shutdown removes."""

    def create(self, config: Mapping[str, Any]) -> None:
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.segment = Path(f"/dev/shm/lowtide-{os.getpid()}-test")
        self.segment.write_bytes(b"x" * 4096)
        super().create(config)

    def shutdown(self) -> None:
        self.child.kill()
        self.child.wait()
        self.segment.unlink(missing_ok=True)


class Tidy(Bare):
    """A child that ends with the pipe that it reads from, and a segment that multiprocessing's tracker removes."""

    def create(self, config: Mapping[str, Any]) -> None:
        self.child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        self.segment = shared_memory.SharedMemory(create=True, size=4096)
        super().create(config)

    def shutdown(self) -> None:
        self.child.communicate()
        self.segment.close()
        self.segment.unlink()


LEAVES_ITS_PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
"""


class Daemon(Bare):
    """A process that is nobody's child any more when its maker is killed."""

    def create(self, config: Mapping[str, Any]) -> None:
        subprocess.run([sys.executable, "-c", LEAVES_ITS_PARENT], check=True)
        super().create(config)


class Chatty(Bare):
    """Says more than a pipe holds, and several lines at a time."""

    def create(self, config: Mapping[str, Any]) -> None:
        sys.stderr.write("x" * 200_000)
        os.write(1, b"loading\n" * 20)
        super().create(config)


class EndsByItself(Bare):
    def create(self, config: Mapping[str, Any]) -> None:
        sys.exit("no licence")


def killed(target: type[Bare], stages: int = 1) -> list[Killed]:
    """What stays in the first stages: create, infer and shutdown are all there are."""
    source = TargetSource([f"from {__name__} import {target.__name__}"], target.__name__)
    return list(islice(kill_in_each_stage(source, target.capabilities, config={}, driver=NO_DRIVER), stages))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 1.0)


def test_what_ends_with_its_maker_is_nobody_s_leak() -> None:
    assert killed(Tidy) == [Killed("create", 2, 2, ())]


def test_an_engine_that_says_a_lot_is_heard() -> None:
    (found,) = killed(Chatty)
    assert (found.stage, found.findings) == ("create", ())


def test_it_is_killed_in_the_middle_of_each_stage_and_at_its_end_where_nothing_can_fail() -> None:
    assert killed(Bare, 3) == [Killed("create", 2, 2, ()), Killed("infer", 0, 0, ()), Killed("shutdown", 0, 0, ())]


def test_a_child_that_runs_on_and_a_segment_that_stays_are_named_and_ended() -> None:
    child, segment = killed(Untidy)[0].findings
    assert (child.resource, child.cause, child.count, child.stage) == ("processes", "not-restored", 1, "create")
    assert child.holder is not None
    assert child.holder.startswith("python")
    pid = int(child.message.rpartition(": ")[2].split()[0])
    assert has_ended(pid)
    assert (segment.resource, segment.bytes, segment.stage) == ("shared-memory", 4096, "create")
    assert segment.holder is not None
    assert segment.holder.startswith("lowtide-")
    assert not Path("/dev/shm", segment.holder).exists()


def test_a_process_that_has_left_its_parent_is_named_and_ended() -> None:
    (found,) = killed(Daemon)[0].findings
    assert (found.resource, found.cause, found.stage) == ("processes", "not-restored", "create")
    pids = [int(word.split()[0]) for word in found.message.rpartition(": ")[2].split(", ")]
    # Of the two lives in that process, one each.
    assert len(pids) == found.count == 2
    assert all(map(has_ended, pids))


class GivesBackLate:
    """A card that counts more for a while."""

    name = "a test"

    def __init__(self, *used: int) -> None:
        self._used = list(used)

    def read(self, device_index: int) -> DriverReading:
        used = self._used.pop(0) if len(self._used) > 1 else self._used[0]
        return DriverReading(f"cuda:{device_index}", "a test", None, used, None, "")

    def processes(self, device_index: int) -> Mapping[int, int | None]:
        return {}

    def close(self) -> None: ...


class Shared:
    """A card on which a neighbour takes a GiB when a killed process stands, whose own memory stays or not."""

    name = "a test"

    def __init__(self, stays: int) -> None:
        self._stays = stays
        self._asked = 0

    def read(self, device_index: int) -> DriverReading:
        self._asked += 1
        # The second time it stands.
        used = {1: 1000, 2: (1 << 30) + 2000}.get(self._asked, (1 << 30) + 1000 + self._stays)
        return DriverReading(f"cuda:{device_index}", "a test", None, used, None, "")

    def processes(self, device_index: int) -> Mapping[int, int | None]:
        if self._asked == 1:
            return {}
        own = {child.pid: 1000 for child in psutil.Process().children()} if self._asked == 2 else {}
        return {1: 1 << 30, **own}

    def close(self) -> None: ...


def test_what_stays_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    stayed = Killed("wake", 1, 2, (module._finding("processes", "wake", "cpu", "a child ran on", ["python"], 1),))
    monkeypatch.setattr(module, "kill_in_each_stage", lambda *args, **settings: iter([stayed]))
    monkeypatch.setattr(sweep, "shared_sweep", lambda *args, **settings: iter([]))
    subjected = fuzz_command.named_target(f"{__name__}:Bare")
    subject, program, _ = fuzz_command.fail_all(subjected, console=Console(quiet=True))
    assert (subject.outcome, subject.findings, program) == ("leak", stayed.findings, "")


def test_a_process_that_does_not_come_there_loses_nothing_of_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*args: Any, **settings: Any) -> Any:
        raise TargetError("it ended by itself")

    monkeypatch.setattr(module, "kill_in_each_stage", raises)
    subject, _, table = fuzz_command.fail_all(
        fuzz_command.named_target(f"{__name__}:Bare"), console=Console(quiet=True)
    )
    assert (subject.outcome, subject.reason) == ("error", "it ended by itself")
    assert table.row_count >= 2


def test_a_sweep_that_cannot_go_on_loses_nothing_of_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = module._finding("state", "create", "cpu", "it says something else", [], 1)

    def breaks_off(*args: Any, **settings: Any) -> Iterator[Swept]:
        yield Swept("create", "map", 2, 1, (finding,), (Call("create"),))
        # The same again is no second finding.
        yield Swept("infer", "map", 2, 1, (finding,), (Call("create"), Call("infer")))
        raise TargetError("it ended by itself")

    monkeypatch.setattr(sweep, "shared_sweep", breaks_off)
    subject, program, table = fuzz_command.fail_all(
        fuzz_command.named_target(f"{__name__}:Bare"), console=Console(quiet=True)
    )
    assert (subject.outcome, subject.reason, subject.findings) == ("leak", "it ended by itself", (finding,))
    assert "life.create()" in program
    assert "infer" not in program
    said = [str(line) for line in fuzz_command.verdict(subject, table)]
    assert "NOT MEASURED: it ended by itself; not everything was tried" in said
    assert "LEAK: 1 finding; not everything was tried" in said


def test_a_target_that_cannot_be_driven_at_all_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any, **settings: Any) -> Iterator[Swept]:
        raise TargetError("there is no engine")

    monkeypatch.setattr(sweep, "shared_sweep", refuses)
    with pytest.raises(TargetError, match="there is no engine"):
        fuzz_command.fail_all(fuzz_command.named_target(f"{__name__}:Bare"), console=Console(quiet=True))


def test_memory_that_a_card_still_counts_is_found_and_what_comes_back_late_is_not() -> None:
    late = module.EngineCard("cuda:0", GivesBackLate(1000, 1 << 30, 1 << 30, 1000))
    assert module._what_stays("wake", set(), set(), late) == []
    (finding,) = module._what_stays("wake", set(), set(), module.EngineCard("cuda:0", GivesBackLate(1000, 1 << 30)))
    assert (finding.resource, finding.device, finding.bytes) == ("driver", "cuda:0", (1 << 30) - 1000)
    # On a CPU no card is asked.
    assert module._what_stays("wake", set(), set(), module.EngineCard("cpu", GivesBackLate(0, 1 << 30))) == []


class OnCard(Bare):
    capabilities = Capabilities(device="cuda:0")


def killed_on_card(driver: Driver) -> Killed:
    source = TargetSource([f"from {__name__} import OnCard"], "OnCard")
    return next(kill_in_each_stage(source, OnCard.capabilities, config={}, driver=driver))


def test_what_a_neighbour_takes_meanwhile_is_not_what_a_killed_process_left() -> None:
    assert killed_on_card(Shared(stays=0)).findings == ()


def test_what_a_killed_process_left_is_found_beside_a_neighbour() -> None:
    (finding,) = killed_on_card(Shared(stays=100 << 20)).findings
    assert (finding.resource, finding.bytes) == ("driver", 100 << 20)


def test_a_card_of_which_the_driver_does_not_tell_is_not_measured() -> None:
    found = killed_on_card(NO_DRIVER)
    assert found.findings == ()
    (missing,) = found.not_measured
    assert missing.what == "what killed processes leave on cuda:0"
    assert missing.why == "no driver to ask: a test"


def test_what_is_not_measured_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = NotMeasured(what="what killed processes leave on cuda:0", why="a test")
    other = NotMeasured(what="driver cuda:0", why="another")
    dead = [Killed(stage, 1, 2, (), (missing,)) for stage in ("create", "wake")]
    swept = [Swept(stage, "map", 2, 2, not_measured=(other,)) for stage in ("create", "wake")]
    monkeypatch.setattr(module, "kill_in_each_stage", lambda *args, **settings: iter(dead))
    monkeypatch.setattr(sweep, "shared_sweep", lambda *args, **settings: iter(swept))
    subject, _, table = fuzz_command.fail_all(
        fuzz_command.named_target(f"{__name__}:Bare"), console=Console(quiet=True)
    )
    assert (subject.outcome, subject.not_measured) == ("clean", (other, missing))
    said = [str(line) for line in fuzz_command.verdict(subject, table)]
    assert "not judged: what killed processes leave on cuda:0 (a test)" in said


def test_a_process_that_does_not_come_there_is_reported_with_its_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match="to be killed in create ended by itself: no licence"):
        killed(EndsByItself)
    monkeypatch.setattr(module, "START_S", 0.05)
    with pytest.raises(TargetError, match=r"was not there after 0\.05 s"):
        killed(Bare)


class WithFiles(SmallTarget):
    def create(self, config: Mapping[str, Any]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        super().create(config)


def test_an_engine_with_everything_in_it_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = TargetSource(["from tests.leakcheck.lives.test_witness import WithFiles"], "WithFiles")
    found = next(kill_in_each_stage(source, WithFiles.capabilities, config={}, driver=NO_DRIVER))
    assert found.findings == ()
    # Not even temporary files, which only its own end would have removed.
    assert list(tmp_path.iterdir()) == []
    assert 0 < found.at <= found.points

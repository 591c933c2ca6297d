"""What grows with each inference in an engine's other processes: in which container of which of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
from msgspec.structs import replace

from lowtide.leakcheck.lives.lifecycle import check_run
from lowtide.leakcheck.processes.messages import ReadTurn
from lowtide.probes.device.driver import NoDriver
from lowtide.reports.schema import Finding, Subject
from tests.leakcheck import spawned_target
from tests.leakcheck.processes.growing_child import Child, child
from tests.leakcheck.spawned_target import SpawnedTarget

pytestmark = pytest.mark.nightly

__all__ = ["child"]

HOLDER = "tests.leakcheck.processes.growing_child.REQUESTS"


def remembered(child: Child, inferences: int, what: str = "remember each", cycle: int = 1) -> list[Finding]:
    for _ in range(inferences):
        child.infer(what, cycle)
    return child.asked.findings_at_end()


def test_a_container_that_grows_is_named_with_its_process(child: Child) -> None:
    (finding,) = remembered(child, 15)
    assert (finding.holder, finding.trend, finding.stage) == (HOLDER, "growth", "inferences")
    assert finding.process is not None
    assert (finding.process.pid, finding.process.name) == (child.pid, "engine-core")
    told = f"{finding.process.text}: {HOLDER} takes 1 item (2.1 KiB) in each of "
    assert finding.message.startswith(told)


@pytest.mark.parametrize("what", ["remember the last three", "keep nothing", "keep the last"])
def test_what_is_bounded_is_no_growth(child: Child, what: str) -> None:
    assert remembered(child, 15, what) == []


def test_it_is_told_by_the_last_reading_that_it_has_stopped(child: Child) -> None:
    assert len(remembered(child, 15)) == 1
    assert remembered(child, 10, "keep nothing") == []


def test_a_second_is_a_part_of_the_interval_of_the_window_that_is_told(child: Child) -> None:
    assert [rate_told(child, seconds) for seconds in (1.0, 4.0)] == [
        "1 item (2.1 KiB) a second",
        "0.2 items (532 B) a second",
    ]


def rate_told(child: Child, seconds: float) -> str:
    """What a window of such intervals says that a container takes each second."""
    for turn in range(1, 14):
        child.requests.send("remember each")
        assert child.requests.recv() == "done"
        asked = ReadTurn(turns="intervals", turn=turn, begins=turn == 1, anew=turn == 1, asked=True, seconds=seconds)
        last = turn == 13
        answers = child.asked.read_turn([child.pid], replace(asked, tells=last, ends=last))
    (finding,) = answers[child.pid].findings
    return finding.message.partition("that is ")[2]


def test_tensors_that_grow_are_told_by_these_alone(child: Child) -> None:
    (finding,) = remembered(child, 15, "keep one")
    assert finding.resource == "tensors"


def test_memory_that_c_keeps_there_is_told_by_what_each_adds(child: Child) -> None:
    (finding,) = remembered(child, 16, "take for C")
    assert (finding.resource, finding.trend) == ("host-memory", "growth")
    # An answer may leave some tens of KiB with each.
    assert re.search(
        r"host memory that is under no tensor grows by (1\.[01] MiB|1[01]\d\d\.\d KiB) with each infer", finding.message
    )


def test_each_life_counts_its_own_inferences(child: Child) -> None:
    remembered(child, 8)
    assert remembered(child, 8, cycle=2) == []
    assert len(remembered(child, 7, cycle=2)) == 1


def test_who_asks_for_it_is_told_after_the_last_turn(child: Child) -> None:
    child.asked.asks_turns = True
    remembered(child, 13)
    assert child.asked.look_at_turns() == 0
    (finding,) = child.asked.findings_at_end()
    assert "in each of 8 inferences" in finding.message


def test_what_began_late_is_not_decided_there(child: Child) -> None:
    child.asked.asks_turns = True
    remembered(child, 8, "keep nothing")
    remembered(child, 4)
    assert child.asked.look_at_turns() == 4
    (missing,) = child.asked.not_judged
    assert missing.what == f"whether host memory grows with each inference in pid {child.pid} (engine-core)"
    assert child.asked.findings_at_end() == []


def serve(requests: Connection, weights: int) -> None:
    """Remembers what is asked, in a process without torch."""
    seen: list[bytes] = []
    while (asked := requests.recv()) != "end":
        if asked == "remember":
            seen.append(bytes(2000 + len(seen)))
        requests.send(len(seen))


class Asked(SpawnedTarget):
    does = "nothing"

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        self.ask(self.does)
        return [list(range(max_tokens)) for _ in prompt_lengths]


class Remembers(Asked):
    does = "remember"


@contextmanager
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(spawned_target, "serve", serve)
        yield


def checked(target: type[SpawnedTarget], monkeypatch: pytest.MonkeyPatch) -> Subject:
    with served(monkeypatch):
        return check_run("check", target, driver=NoDriver("a test"), cycles=1, turns=12).run()


def test_a_life_whose_turns_were_asked_for_names_it_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = [finding for finding in checked(Remembers, monkeypatch).findings if finding.trend == "growth"]
    assert finding.process is not None
    assert finding.process.name == "EngineCore"
    assert (finding.holder or "").startswith("thread 'MainThread', local 'seen' of serve()")


def test_its_twin_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = checked(Asked, monkeypatch)
    assert [finding for finding in subject.findings if finding.trend == "growth"] == []
    assert [missing for missing in subject.not_measured if "grows" in missing.what] == []

"""`--turns N`: what grows in this process with each of many inferences in a row, and in which container or part."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from lowtide.leakcheck.lives.lifecycle import LifecycleRun
from lowtide.probes.device.driver import NoDriver
from lowtide.reports.schema import Finding, Subject

pytestmark = pytest.mark.nightly

LIBRARY = ctypes.CDLL(None)
LIBRARY.malloc.restype = ctypes.c_void_p
SEEN: dict[str, bytes] = {}


class Engine:
    """Infers, and keeps something beside."""

    def __init__(self, keeps: Callable[[Engine], None]) -> None:
        self.keeps = keeps
        self.requests: list[bytes] = []
        self.taken: list[int] = []
        self.inferred = 0

    def create(self) -> None: ...

    def infer(self) -> list[list[int]]:
        self.inferred += 1
        self.keeps(self)
        return [[1, 2]]

    def shutdown(self) -> None:
        for address in self.taken:
            LIBRARY.free(ctypes.c_void_p(address))
        SEEN.clear()


def keeps_each(engine: Engine) -> None:
    engine.requests.append(bytes(2000 + engine.inferred))


def keeps_in_a_module(engine: Engine) -> None:
    SEEN[f"request {engine.inferred}"] = bytes(2000 + engine.inferred)


def keeps_for_c(engine: Engine) -> None:
    engine.taken.append(LIBRARY.malloc(1 << 20))
    ctypes.memset(engine.taken[-1], 1, 1 << 20)


def keeps_some(engine: Engine) -> None:
    SEEN[f"request {engine.inferred % 4}"] = bytes(2000 + engine.inferred)
    if engine.inferred < 6:
        keeps_each(engine)


def keeps_each_at_last(engine: Engine) -> None:
    if engine.inferred > 9:
        keeps_each(engine)


def lived(
    keeps: Callable[[Engine], None],
    turns: int = 16,
    cycles: int = 1,
    *,
    until_decided: bool = False,
    native: bool = False,
) -> tuple[Subject, list[Engine]]:
    engines: list[Engine] = []

    def make() -> Engine:
        engines.append(Engine(keeps))
        return engines[-1]

    run = LifecycleRun(
        "engine",
        make,
        device="cpu",
        driver=NoDriver("a test"),
        cycles=cycles,
        script=("create", "infer", "shutdown"),
        turns=turns,
        until_decided=until_decided,
        native=native,
    )
    return run.run(), engines


def growth(subject: Subject) -> list[Finding]:
    return [finding for finding in subject.findings if finding.trend == "growth"]


def undecided(subject: Subject) -> list[str]:
    """Why it is not known what grows; a single life cannot say more of some levels, either."""
    return [missing.why for missing in subject.not_measured if missing.what.startswith("whether host memory grows")]


def test_a_container_that_grows_is_told_once_for_all_lives() -> None:
    subject, engines = lived(keeps_each, cycles=2)
    (finding,) = growth(subject)
    assert (subject.outcome, finding.holder) == ("leak", "engine.requests")
    assert finding.message.startswith("engine.requests takes 1 item (2.0 KiB) in each of 11 inferences")
    assert [engine.inferred for engine in engines] == [17, 17]


def test_so_is_one_of_a_module() -> None:
    (finding,) = growth(lived(keeps_in_a_module)[0])
    assert finding.holder == f"{__name__}.SEEN"


def test_memory_that_c_keeps_is_told_with_its_part() -> None:
    (finding,) = growth(lived(keeps_for_c)[0])
    assert "over 15 inferences, 1.0 MiB with each" in finding.message
    assert "malloc in use has" in finding.message


def test_what_fills_or_is_replaced_is_clean() -> None:
    subject, _ = lived(keeps_some)
    assert (subject.outcome, subject.findings, undecided(subject)) == ("clean", (), [])
    assert subject.reason.startswith("nothing grows over 16 inferences in a row: host memory ")


def test_without_turns_nothing_is_read() -> None:
    subject, engines = lived(keeps_each, turns=0)
    assert (growth(subject), [engine.inferred for engine in engines]) == ([], [1])


def test_what_began_late_is_not_decided() -> None:
    subject, engines = lived(keeps_each_at_last, turns=12)
    assert growth(subject) == []
    assert undecided(subject) == ["not decided after 12: 4 more may tell (--until-decided)"]
    assert subject.reason == ""
    assert [engine.inferred for engine in engines] == [13]


def test_it_goes_on_until_that_is_decided() -> None:
    subject, (engine,) = lived(keeps_each_at_last, turns=12, until_decided=True)
    (finding,) = growth(subject)
    assert (finding.holder, undecided(subject)) == ("engine.requests", [])
    assert 13 < engine.inferred <= 1 + 12 * 2


@pytest.mark.parametrize("keeps", [keeps_each, keeps_some])
def test_it_does_not_go_on_where_it_is_decided(keeps: Callable[[Engine], None]) -> None:
    _, (engine,) = lived(keeps, until_decided=True)
    assert engine.inferred == 17


def takes_by_c(engine: Engine) -> None:
    take = ctypes.pythonapi.PyMem_RawMalloc
    take.argtypes, take.restype = [ctypes.c_size_t], ctypes.c_void_p
    ctypes.memset(take(1 << 20), 1, 1 << 20)


@pytest.mark.nightly
def test_the_call_that_allocates_in_each_inference_is_named() -> None:
    subject, _ = lived(takes_by_c, cycles=2, native=True)
    (finding,) = growth(subject)
    assert "; 1.0 MiB of it with each inference allocated at test_inference_turns.py:" in finding.message
    assert finding.message.endswith(" in takes_by_c")
    assert not [missing for missing in subject.not_measured if "descriptor" in missing.what]


@pytest.mark.nightly
def test_without_it_the_option_is_named() -> None:
    subject, _ = lived(takes_by_c)
    (finding,) = growth(subject)
    assert "`--native` names the calls" in (finding.advice or "")

"""What a test leaves under a fixture in the place of what lay there before: clean, without a full reading."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lowtide.leakcheck.judging.owners import Claims, Owner
from lowtide.leakcheck.watching import deep_reading
from lowtide.leakcheck.watching.full_reading import Renewals
from lowtide.leakcheck.watching.watch import Watch
from lowtide.leakcheck.watching.watched import Policy
from lowtide.probes.objects.identities import Identities, identities
from lowtide.reports.schema import Finding


class Batch:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Engine:
    def __init__(self) -> None:
        self.buffer = torch.zeros(8)
        self.batch: Batch | None = None
        self.others: list[object] = []


class Session:
    """Judges tests that use one fixture of a wider scope.

    Attributes:
        engine: what the fixture holds.
        program: a module.
        readings: how many full readings the last test took.
    """

    def __init__(self, program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.program, self.readings = program, 0
        self.watch = Watch(Policy(card=False, settle=0.01, remedies="later"))
        self.watch.open()
        self.engine = Engine()
        self.owner = Owner("fixture", lambda: [self.engine])
        read_heap = deep_reading.read_heap

        def read(*args: Any) -> Any:
            self.readings += 1
            return read_heap(*args)

        monkeypatch.setattr(deep_reading, "read_heap", read)
        self.watch.begin(module="test_program.py")
        self.watch.enter(self.owner)
        self.watch.leave()
        self.watch.end()

    def judge(self, test: Callable[[Engine], object]) -> tuple[Finding, ...]:
        self.readings = 0
        self.watch.begin(module="test_program.py")
        test(self.engine)
        self.watch.used([self.owner])
        return self.watch.end().findings


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    module = types.ModuleType("program")
    vars(module).update(KEPT=[])
    sys.modules["program"] = module
    session = Session(module, monkeypatch)
    yield session
    session.watch.close()
    del sys.modules["program"]


def view(engine: Engine) -> None:
    engine.batch = Batch(engine.buffer[:2])


def test_a_view_in_a_new_object_takes_one_full_reading_for_all_tests(session: Session) -> None:
    assert (session.judge(view), session.readings) == ((), 1)
    for _ in range(3):
        assert (session.judge(view), session.readings) == ((), 0)


def test_so_it_is_where_the_heap_was_frozen_before(session: Session) -> None:
    gc.freeze()
    try:
        session.judge(view)
        assert (session.judge(view), session.readings) == ((), 0)
    finally:
        gc.unfreeze()


def test_where_the_test_itself_froze_the_heap_for_a_while_it_is_read_in_full(session: Session) -> None:
    def freezes(engine: Engine) -> None:
        view(engine)
        gc.freeze()
        gc.unfreeze()

    session.judge(view)
    assert (session.judge(freezes), session.readings) == ((), 1)


def test_what_lies_in_another_place_is_read_in_full(session: Session) -> None:
    session.judge(view)
    assert session.judge(lambda engine: engine.others.append(Batch(engine.buffer[:2]))) == ()
    assert session.readings == 1


def test_a_new_storage_under_the_fixture_is_read_in_full(session: Session) -> None:
    session.judge(view)

    def adds(engine: Engine) -> None:
        engine.batch = Batch(torch.ones(16))

    assert (session.judge(adds), session.readings) == ((), 1)


def test_what_grows_in_known_places_is_found(session: Session) -> None:
    def grows(engine: Engine) -> None:
        view(engine)
        engine.others.append(torch.ones(64))

    for _ in range(6):
        assert session.judge(grows) == ()
        assert session.readings == 1
    session.watch.begin(module="test_program.py")
    session.watch.ending(session.owner)
    grown = session.watch.end().of_owners[session.owner.label]
    assert [(finding.resource, finding.count, finding.trend) for finding in grown] == [("tensors", 6, "growth")]


def test_what_the_test_keeps_itself_is_found_beside_it(session: Session) -> None:
    def leaks(engine: Engine) -> None:
        view(engine)
        session.program.KEPT.append(torch.ones(32))

    session.judge(view)
    (found,) = session.judge(leaks)
    assert (found.resource, found.bytes, found.holder) == ("tensors", 128, "program.KEPT[0]")


def test_what_the_process_has_more_is_found_beside_it(session: Session) -> None:
    def leaks(engine: Engine) -> None:
        view(engine)
        session.program.KEPT.append(b"x" * (96 << 20))

    session.judge(view)
    assert [finding.resource for finding in session.judge(leaks)] == ["host-memory"]


def test_at_the_address_of_what_lay_under_the_fixture_it_is_found_too(session: Session) -> None:
    memory = bytearray(64)

    def under_fixture(engine: Engine) -> None:
        engine.batch = Batch(torch.frombuffer(memory, dtype=torch.float32))

    def leaks(engine: Engine) -> None:
        engine.batch = None
        session.program.KEPT.append(torch.frombuffer(memory, dtype=torch.float32))

    session.judge(under_fixture)
    assert (session.judge(under_fixture), session.readings) == ((), 0)
    assert [finding.holder for finding in session.judge(leaks)] == ["program.KEPT[0]"]


def explained(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether one tensor in an attribute renews another one."""
    holder = Batch(before)
    owner = Owner("fixture", lambda: [holder])
    renewals = Renewals()
    renewals.note(Claims([owner]), [before], ())
    holder.tensor = after
    return renewals.explain([after], [owner], Identities(identities([after])))


def test_only_a_storage_of_the_same_length_renews_another_one() -> None:
    memory = bytearray(64)
    before, same = (torch.frombuffer(memory, dtype=torch.float32) for _ in range(2))
    shorter = torch.frombuffer(memory, dtype=torch.float32, count=8)
    assert explained(before, same)
    assert not explained(before, shorter)
    assert not explained(before, torch.ones(16))


def test_what_may_have_a_gradient_or_a_graph_is_read_in_full() -> None:
    before = torch.ones(16)
    assert explained(before, before[:2])
    assert not explained(before, before[:2].requires_grad_())


def test_what_cannot_be_read_renews_nothing() -> None:
    unreadable = torch.ones(16).to_mkldnn()
    assert not explained(unreadable, unreadable)


def test_what_another_owner_holds_renews_nothing() -> None:
    before = torch.ones(16)
    holder = Batch(before)
    owner, other = Owner("fixture", lambda: [holder]), Owner("other", lambda: [holder])
    renewals = Renewals()
    renewals.note(Claims([owner]), [before], {("cpu", before.data_ptr())})
    born = Identities(identities([before]))
    assert renewals.explain([before], [owner], born)
    assert not renewals.explain([before], [other], born)
    assert not renewals.explain([], [owner], born)
    assert not renewals.explain([before], [owner], None)


def test_what_was_bound_in_a_module_since_is_no_owners(session: Session) -> None:
    before = torch.ones(16)
    holder = Batch(before)
    owner = Owner("fixture", lambda: [holder])
    renewals = Renewals()
    renewals.note(Claims([owner]), [before], {("cpu", before.data_ptr())})
    born = Identities(identities([before]))
    assert renewals.explain([before], [owner], born)
    session.program.holder = holder
    assert not renewals.explain([before], [owner], born)


def test_what_is_gone_by_the_next_full_reading_is_not_known_any_more() -> None:
    before = torch.ones(16)
    holder = Batch(before)
    owner = Owner("fixture", lambda: [holder])
    renewals, born = Renewals(), Identities(identities([before]))
    renewals.note(Claims([owner]), [before], {("cpu", before.data_ptr())})
    renewals.note(Claims([owner]), [], {("cpu", before.data_ptr())})
    assert renewals.explain([before], [owner], born)
    renewals.note(Claims([owner]), [], set())
    assert not renewals.explain([before], [owner], born)

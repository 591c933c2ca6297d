"""What a test leaves under a fixture in the place of what lay there before: clean, without a full reading."""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lowtide.leakcheck.judging.owners import Claims, Owner
from lowtide.leakcheck.judging.storages import HeapReading
from lowtide.leakcheck.watching import full_reading
from lowtide.leakcheck.watching.full_reading import Renewals
from lowtide.leakcheck.watching.watch import Watch
from lowtide.leakcheck.watching.watched import Policy
from lowtide.probes.heap import holders
from lowtide.probes.heap.births import Births
from lowtide.probes.objects.identities import Identities, identities
from lowtide.reports.schema import Finding


class Batch:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Engine:
    def __init__(self) -> None:
        self.buffer = torch.zeros(8)
        self.old = torch.zeros(8)
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
        read_heap = full_reading.read_heap

        def read(*args: Any) -> Any:
            self.readings += 1
            return read_heap(*args)

        monkeypatch.setattr(full_reading, "read_heap", read)
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

    def ended(self) -> list[Finding]:
        """What the fixture leaves when it has ended."""
        self.watch.begin(module="test_program.py")
        self.engine = Engine()
        return [*self.watch.end([self.owner]).of_owners[self.owner.label]]

    def ending(self) -> list[Finding]:
        """What has grown under the fixture when it ends."""
        self.watch.begin(module="test_program.py")
        self.watch.ending(self.owner)
        return [*self.watch.end().of_owners.get(self.owner.label, ())]


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


def fresh(engine: Engine) -> None:
    engine.batch = Batch(torch.ones(16))


def test_what_a_fixture_has_a_view_of_is_not_the_fixtures(session: Session) -> None:
    session.watch.begin(module="test_program.py")
    session.watch.enter(Owner("import of program", only_adds=True))
    session.program.WEIGHTS = torch.ones(1000)
    session.watch.leave()
    assert session.watch.end().findings == ()
    assert session.judge(lambda engine: engine.others.extend([session.program.WEIGHTS[10:], torch.ones(50)])) == ()
    assert session.ended() == []


def test_memory_that_an_older_tensor_gets_in_a_test_is_the_fixtures_with_the_new_tensor_over_it(
    session: Session,
) -> None:
    def give(engine: Engine) -> None:
        new = torch.ones(1000)
        engine.others.append(new)
        engine.old.data = new

    assert session.judge(give) == ()
    session.program.KEPT.append(session.engine.old)
    assert [finding.bytes for finding in session.ended()] == [4000]


def test_a_view_in_a_new_object_takes_one_full_reading_for_all_tests(session: Session) -> None:
    assert (session.judge(view), session.readings) == ((), 1)
    for _ in range(3):
        assert (session.judge(view), session.readings) == ((), 0)


def test_a_tensor_in_the_place_of_one_that_is_gone_takes_one_full_reading_for_all_tests(session: Session) -> None:
    assert (session.judge(fresh), session.readings) == ((), 1)
    for _ in range(4):
        assert (session.judge(fresh), session.readings) == ((), 0)
    assert session.ending() == []


@pytest.mark.parametrize("drops_first", [False, True])
def test_so_it_is_where_two_take_turns(session: Session, *, drops_first: bool) -> None:
    memories = [bytearray(64), bytearray(64)]

    def alternates(engine: Engine) -> None:
        if drops_first:
            # Most likely the next tensor is an object at the same address.
            engine.batch = None
        engine.batch = Batch(torch.frombuffer(memories[0], dtype=torch.float32))
        memories.reverse()

    session.judge(alternates)
    for _ in range(4):
        assert (session.judge(alternates), session.readings) == ((), 0)


def keep_before(engine: Engine) -> None:
    engine.others.append(engine.batch)
    fresh(engine)


def two(engine: Engine) -> None:
    engine.batch = Batch(torch.ones(4))
    engine.batch.other = torch.ones(4)  # type: ignore[attr-defined]


def larger(engine: Engine) -> None:
    engine.batch = Batch(torch.ones(17))


def with_view_of_old(engine: Engine) -> None:
    engine.batch = Batch(engine.old[:2])


@pytest.mark.parametrize("test", [keep_before, two, larger, with_view_of_old])
def test_where_there_is_more_than_before_it_is_read_in_full(session: Session, test: Callable[[Engine], object]) -> None:
    session.judge(fresh)
    assert (session.judge(fresh), session.readings) == ((), 0)
    assert (session.judge(test), session.readings) == ((), 1)


def test_what_grows_while_others_are_renewed_is_found(session: Session) -> None:
    for _ in range(6):
        session.judge(fresh)
        session.judge(keep_before)
    (found,) = session.ending()
    assert (found.resource, found.trend, found.bytes) == ("tensors", "growth", 7 * 64)


@pytest.mark.nightly
def test_what_lies_under_the_fixture_at_its_end_is_known(session: Session) -> None:
    session.judge(fresh)
    session.judge(fresh)
    session.program.KEPT.append(session.engine)
    session.watch.begin(module="test_program.py")
    (found,) = session.watch.end([session.owner]).of_owners[session.owner.label]
    # What took the place of what its first test left.
    assert (found.resource, found.bytes, found.count) == ("tensors", 64, 1)


def test_a_tensor_that_was_frozen_meanwhile_is_not_taken_for_gone(session: Session) -> None:
    session.judge(fresh)
    session.judge(fresh)
    gc.freeze()
    try:
        assert (session.judge(keep_before), session.readings) == ((), 1)
    finally:
        gc.unfreeze()


@pytest.mark.nightly
def test_a_tensor_that_the_test_before_leaked_is_not_reported_again(session: Session) -> None:
    def leaks(engine: Engine) -> None:
        fresh(engine)
        assert engine.batch is not None
        session.program.KEPT.append(torch.ones(8))
        # No view, which would keep the first tensor.
        session.program.KEPT.append(torch.empty(0).set_(engine.batch.tensor.untyped_storage()))

    session.judge(fresh)
    assert [finding.bytes for finding in session.judge(leaks)] == [32]
    assert (session.judge(fresh), session.readings) == ((), 1)

    def freezes(engine: Engine) -> None:
        gc.freeze()

    try:
        assert [finding.resource for finding in session.judge(freezes)] == ["gc-frozen"]
    finally:
        gc.unfreeze()


def test_so_it_is_where_the_heap_was_frozen_before(session: Session) -> None:
    gc.freeze()
    try:
        session.judge(view)
        assert (session.judge(view), session.readings) == ((), 0)
    finally:
        gc.unfreeze()


def test_where_the_test_itself_froze_the_heap_for_a_while_new_memory_alone_is_read_in_full(session: Session) -> None:
    def freezes(engine: Engine) -> None:
        view(engine)
        gc.freeze()
        gc.unfreeze()

    def leaks(engine: Engine) -> None:
        session.program.KEPT.append(torch.ones(8))
        freezes(engine)

    session.judge(view)
    assert (session.judge(freezes), session.readings) == ((), 0)
    assert [finding.bytes for finding in session.judge(leaks)] == [32]


def test_what_lies_in_another_place_is_read_in_full(session: Session) -> None:
    session.judge(view)
    assert session.judge(lambda engine: engine.others.append(Batch(engine.buffer[:2]))) == ()
    assert session.readings == 1


def test_a_new_storage_under_the_fixture_is_read_in_full(session: Session) -> None:
    session.judge(view)

    assert (session.judge(fresh), session.readings) == ((), 1)


@pytest.mark.nightly
def test_what_grows_in_known_places_is_found(session: Session) -> None:
    def grows(engine: Engine) -> None:
        view(engine)
        engine.others.append(torch.ones(64))

    for _ in range(6):
        assert session.judge(grows) == ()
        assert session.readings == 1
    grown = session.ending()
    assert [(finding.resource, finding.count, finding.trend) for finding in grown] == [("tensors", 6, "growth")]


@pytest.mark.nightly
def test_what_the_test_keeps_itself_is_found_beside_it(session: Session) -> None:
    def leaks(engine: Engine) -> None:
        view(engine)
        session.program.KEPT.append(torch.ones(32))

    session.judge(view)
    (found,) = session.judge(leaks)
    assert (found.resource, found.bytes, found.holder) == ("tensors", 128, "program.KEPT[0]")


@pytest.mark.nightly
def test_what_the_process_has_more_is_found_beside_it(session: Session) -> None:
    def leaks(engine: Engine) -> None:
        view(engine)
        session.program.KEPT.append(b"x" * (96 << 20))

    session.judge(view)
    assert [finding.resource for finding in session.judge(leaks)] == ["host-memory"]


@pytest.mark.nightly
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


class Known:
    """What was known of one tensor in an attribute of what an owner holds."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.holder = Batch(tensor)
        self.owner = Owner("fixture", lambda: [self.holder])
        births = Births()
        births.mark()
        self.renewals = Renewals(births)
        self.note([tensor], {("cpu", tensor.data_ptr())})

    def note(self, tensors: list[torch.Tensor], alive: set[tuple[str, int]]) -> None:
        heap = HeapReading(held=(), claimed={}, alive=frozenset(alive), unreadable={}, new_on_cpu=0)
        self.renewals.note(Claims([self.owner]), tensors, heap)

    def explains(self, *tensors: torch.Tensor, owner: Owner | None = None, knows_born: bool = True) -> bool:
        """Whether what is there now has renewed it."""
        born = Identities(identities(list(tensors))) if knows_born else None
        return self.renewals.explain(tensors, [owner or self.owner], born, ()) is not None

    def renewed_by(self, tensor: torch.Tensor) -> bool:
        self.holder.tensor = tensor
        return self.explains(tensor)


def test_only_a_storage_of_the_same_length_renews_another_one() -> None:
    memory = bytearray(64)
    before, same = (torch.frombuffer(memory, dtype=torch.float32) for _ in range(2))
    shorter = torch.frombuffer(memory, dtype=torch.float32, count=8)
    assert Known(before).renewed_by(same)
    assert not Known(before).renewed_by(shorter)
    assert not Known(before).renewed_by(torch.ones(16))


def test_what_may_have_a_gradient_or_a_graph_is_read_in_full() -> None:
    before = torch.ones(16)
    assert Known(before).renewed_by(before[:2])
    assert not Known(before).renewed_by(before[:2].requires_grad_())


def test_what_cannot_be_read_renews_nothing() -> None:
    known = Known(torch.ones(16))
    assert not known.renewed_by(torch.ones(16).to_mkldnn())


def test_what_another_owner_holds_renews_nothing() -> None:
    before = torch.ones(16)
    known = Known(before)
    assert known.explains(before)
    assert not known.explains(before, owner=Owner("other", lambda: [known.holder]))
    assert not known.explains()
    assert not known.explains(before, knows_born=False)


def test_what_was_bound_in_a_module_since_is_no_owners(session: Session) -> None:
    before = torch.ones(16)
    known = Known(before)
    assert known.explains(before)
    session.program.holder = known.holder
    assert not known.explains(before)


def test_what_is_gone_by_the_next_full_reading_is_not_known_any_more() -> None:
    before = torch.ones(16)
    known = Known(before)
    known.note([], {("cpu", before.data_ptr())})
    assert known.explains(before)
    known.note([], set())
    assert not known.explains(before)


def test_what_lies_under_an_owner_by_known_ways_is_told_from_the_rest() -> None:
    before, other = torch.ones(16), torch.ones(16)
    known = Known(before)
    born = Identities(identities([before, other]))
    assert known.renewals.elsewhere([before, other], [known.owner], born) == [id(other)]
    assert known.renewals.elsewhere([before, other], [], born) == [id(before), id(other)]
    assert known.renewals.elsewhere([before], [known.owner], None) == [id(before)]


@pytest.mark.nightly
def test_a_leak_that_was_seen_before_takes_no_walk_beside_what_is_renewed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaks(engine: Engine) -> None:
        view(engine)
        session.program.KEPT.append(torch.ones(32))

    session.judge(leaks)
    monkeypatch.setattr(holders, "Graph", None)
    assert [finding.holder for finding in session.judge(leaks)] == ["program.KEPT[1]"]


@pytest.mark.nightly
def test_what_is_left_beside_tensors_and_no_heap_gives_back_takes_one_reading_and_one_walk(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[object] = []
    graph = holders.Graph
    monkeypatch.setattr(holders, "Graph", lambda *args: walks.append(args) or graph(*args))
    stop = threading.Event()

    def waits(tensor: torch.Tensor) -> None:
        stop.wait()

    def leaks(engine: Engine) -> None:
        threading.Thread(target=waits, args=(torch.ones(32),), daemon=True).start()

    try:
        (found,) = session.judge(leaks)
    finally:
        stop.set()
    assert [found.resource, *(part.resource for part in found.parts)] == ["tensors", "threads"]
    assert (session.readings, len(walks)) == (1, 1)

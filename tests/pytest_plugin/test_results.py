"""What the end of a session adds to what was said of a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec
import pytest
import torch

from lowtide.leakcheck.findings import remedies as unproven
from lowtide.leakcheck.findings.item_findings import ItemLeak
from lowtide.leakcheck.findings.remedies import DeferredRemedies, UnprovenLeak, try_deferred
from lowtide.leakcheck.findings.storage_watch import StorageWatch
from lowtide.pytest_plugin.results import DeferredProofs, Proven, proven_as_json, proven_from_json, with_proven
from lowtide.reports.schema import Cause, Finding, Hop, Remedy, Subject

KEY = "workspaces cuda:0"
DONE = Remedy(action="del m.KEPT[0]", returns_bytes=8)


def finding(mark: str, cause: Cause = "module-global", known: str | None = None) -> Finding:
    return Finding(
        resource="tensors",
        cause=cause,
        bytes=1 << 20,
        count=1,
        device="cuda:0",
        stage="call",
        message=mark,
        fingerprint=mark,
        suppressed_by=known,
    )


def leak(mark: str) -> UnprovenLeak:
    return UnprovenLeak(finding(mark), {}, frozenset(), StorageWatch(()))


@pytest.mark.parametrize(
    ("swept", "held", "told"),
    [(False, False, False), (True, False, True), (False, True, True)],
    ids=["by known ways", "all was collected", "the earlier one is held"],
)
def test_what_a_leak_may_have_replaced_is_collected_where_nothing_was(*, swept: bool, held: bool, told: bool) -> None:
    class Engine:
        def __init__(self) -> None:
            self.itself, self.tensor = self, torch.ones(1)

    def left(engine: Engine) -> UnprovenLeak:
        key = ("cpu", engine.tensor.untyped_storage().data_ptr())
        found = msgspec.structs.replace(finding("a"), path=(Hop(edge="program", type="module"),))
        return UnprovenLeak(found, {key: 4}, frozenset(), StorageWatch([key], [engine.tensor]))

    proofs, engine, later = DeferredProofs(), Engine(), Engine()
    before = DeferredRemedies((left(engine),))
    proofs.add(Subject(id="a", outcome="leak", findings=(before.tensors[0].finding,)), before, "module")
    # From here on it is garbage that nobody has collected.
    del engine
    now = left(later)
    asked: list[object] = []

    def is_held(leaks: Sequence[UnprovenLeak]) -> bool:
        asked.extend(leaks)
        return held

    found = proofs.news([now.finding], DeferredRemedies((now,)), "in b", "module", 0, swept=swept, is_held=is_held)
    assert bool(found) is told
    assert asked == ([] if swept else [before.tensors[0]])


def test_what_has_other_parts_replaces_nothing_and_nothing_is_collected_for_it() -> None:
    kept = torch.ones(1)
    keys = [("cpu", kept.untyped_storage().data_ptr())]
    path = (Hop(edge="program", type="module"),)
    found = msgspec.structs.replace(finding("a"), path=path, parts=(finding("b"),))
    waiting = UnprovenLeak(found, dict.fromkeys(keys, 4), frozenset(), StorageWatch(keys, [kept]))
    proofs = DeferredProofs()
    proofs.add(Subject(id="a", outcome="leak", findings=(found,)), DeferredRemedies((waiting,)), "module")

    def unasked(leaks: Sequence[UnprovenLeak]) -> bool:
        raise AssertionError

    told = proofs.news([found], DeferredRemedies((waiting,)), "in b", "module", 0, swept=False, is_held=unasked)
    assert told == [found]


def test_when_a_leak_came_back_is_what_was_noted_first_after_it() -> None:
    kept = [torch.ones(1), torch.ones(2)]
    keys = [("cpu", each.untyped_storage().data_ptr()) for each in kept]
    waiting = UnprovenLeak(finding("a"), dict.fromkeys(keys, 4), frozenset(), StorageWatch(keys, kept))
    waiting.note("before")
    del kept[0]
    waiting.note("when one was left")
    kept.clear()
    waiting.note("then")
    waiting.note("later")
    assert waiting.came_back == "then"
    nothing = leak("b")
    nothing.note("then")
    assert nothing.came_back == ""


def workspace() -> ItemLeak:
    return ItemLeak(finding("workspace", "library-workspace"), KEY, {"workspace at 0x10": 1 << 20}, 0)


def test_a_block_of_a_workspaces_size_is_looked_at_again_beside_a_leak_and_else_not() -> None:
    both = DeferredRemedies((leak("a"), leak("b")), (workspace(),))
    assert [item.finding.fingerprint for item in both.only(frozenset({"a"})).tensors] == ["a"]
    assert len(both.only(frozenset({"a"})).items) == 1
    assert both.only(frozenset()) == DeferredRemedies()


THERE = {"workspace at 0x10": 1 << 20}


def proven_with(
    left: dict[str, int], monkeypatch: pytest.MonkeyPatch, before: Mapping[str, int] = MappingProxyType(THERE)
) -> Finding:
    """Return the finding about a workspace of which some is left once another finding's remedy was tried."""
    there = dict(before)
    tried = Finding(
        resource="tensors",
        cause="module-global",
        bytes=8,
        count=1,
        device="cuda:0",
        stage="call",
        message="a",
        fingerprint="a",
        remedy=DONE,
        tried=(DONE,),
    )

    def prove(leaks: object, context: object) -> list[Finding]:
        there.clear()
        there.update(left)
        return [tried]

    monkeypatch.setattr(unproven, "prove", prove)
    (found,) = try_deferred([DeferredRemedies((leak("a"),), (workspace(),))], lambda key: dict(there), lambda: 0, 0.1)
    return found["workspace"]


def test_what_goes_with_a_tensor_is_no_librarys_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = proven_with({}, monkeypatch)
    assert (gone.cause, gone.remedy) == ("native", Remedy(action="del m.KEPT[0]", returns_bytes=1 << 20))
    assert gone.fingerprint != "workspace"


def test_what_went_before_anything_was_tried_goes_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = proven_with({}, monkeypatch, before={})
    assert (gone.cause, gone.fingerprint, gone.remedy) == ("library-workspace", "workspace", None)


def test_what_stays_may_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stayed = proven_with(THERE, monkeypatch)
    assert (stayed.cause, stayed.fingerprint, stayed.remedy) == ("library-workspace", "workspace", None)


def test_remedies_are_added_and_what_is_known_stays_known_unless_it_is_something_else() -> None:
    before = Subject(
        id="t", outcome="leak", findings=(finding("a"), finding("b", known="shipped"), finding("c", known="shipped"))
    )
    clean = Subject(id="t", outcome="clean")
    proven = Proven("t", {"a": finding("a"), "b": finding("other", "native"), "c": finding("c")})
    assert proven_from_json(proven_as_json([proven])) == [proven]
    reported = with_proven([clean, before, before], [proven])
    assert reported[0] is clean
    assert [(item.fingerprint, item.suppressed_by) for item in reported[1].findings] == [
        ("a", None),
        ("other", None),
        ("c", "shipped"),
    ]
    assert reported[2] is before

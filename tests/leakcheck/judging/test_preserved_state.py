"""What must survive a sleep: lost contents, moved buffers and stale pointers are named, and what is right is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.pages.cpu import CpuPages
from lowtide.leakcheck.judging import contract as module
from lowtide.leakcheck.judging.contract import PreservedState
from lowtide.probes.memory.pointers import LabelledRange

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena("kv_cache", MIB, CpuPages())
    yield arena
    arena.close()


def survival(tensors: dict[str, torch.Tensor]) -> PreservedState:
    known = PreservedState("cpu")
    known.before_sleep(tensors)
    return known


def test_tensors_that_are_the_same_are_no_finding() -> None:
    tensors = {"weight": torch.arange(1000.0), "table": torch.arange(10)}
    assert survival(tensors).after_wake("wake", tensors, {}) == []


def test_a_tensor_that_changed_is_named_with_its_bytes() -> None:
    tensors = {"weight": torch.arange(1000.0), "table": torch.arange(10)}
    known = survival(tensors)
    tensors["table"][3] = 0
    (found,) = known.after_wake("wake", tensors, {})
    assert (found.resource, found.cause, found.stage, found.holder) == ("contents", "not-restored", "wake", "table")
    assert (found.bytes, found.count) == (80, 1)
    assert found.message == "table changed its contents between sleep and wake"


@pytest.mark.parametrize("lost", ["", "weight", "table"])
def test_what_was_written_while_the_rest_slept_is_what_must_be_there(lost: str) -> None:
    tensors = {"weight": torch.arange(1000.0), "table": torch.arange(10)}
    known = survival(tensors)
    tensors["weight"].add_(1)
    known.rewritten({"weight": tensors["weight"], "another": torch.zeros(3)})
    if lost:
        tensors[lost][3] = 0
    assert [found.holder for found in known.after_wake("wake", tensors, {})] == ([lost] if lost else [])
    known.rewritten(tensors)
    assert known.after_wake("wake", tensors, {}) == []


def test_it_is_said_where_what_was_lost_lay(arena: Arena) -> None:
    inside, outside = arena.allocate((4,), torch.int64), torch.zeros(4, dtype=torch.int64)
    inside.zero_()
    how = "lost in a sleep: put it where a sleep drops nothing, or write it again before wake returns"
    for tensor, where in ((inside, "what lies in arena 'kv_cache' is"), (outside, "it is")):
        known = survival({"table": tensor})
        tensor.fill_(1)
        (found,) = known.after_wake("wake", {"table": tensor}, {})
        assert found.advice == f"{where} {how}"


def test_where_one_part_ends_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(4, dtype=torch.int64)
    start = tensor.data_ptr()
    parts = [
        LabelledRange(start, start + 16, "arena 'its own'"),
        LabelledRange(start + 16, start + 32, "arena 'after'"),
        LabelledRange(start - 16, start, "arena 'before'"),
    ]
    monkeypatch.setattr(PreservedState, "_arenas", lambda self: parts)
    known = survival({"table": tensor})
    tensor.fill_(1)
    (found,) = known.after_wake("wake", {"table": tensor}, {})
    assert (found.advice or "").startswith("what lies in arena 'its own' is lost in a sleep")


def test_a_few_are_all_named() -> None:
    tensors = {f"t{place}": torch.zeros(2) for place in range(3)}
    known = survival(tensors)
    for tensor in tensors.values():
        tensor.fill_(1)
    (found,) = known.after_wake("wake", tensors, {})
    assert (found.count, found.holder) == (3, "t0, t1, t2")


def test_many_are_counted_and_the_first_are_named() -> None:
    tensors = {f"t{place}": torch.zeros(2) for place in range(5)}
    known = survival(tensors)
    for tensor in tensors.values():
        tensor.fill_(1)
    (found,) = known.after_wake("wake", tensors, {})
    assert (found.count, found.holder) == (5, "t0, t1, t2 and 2 more")
    assert found.message == "5 tensors (t0, t1, t2 and 2 more) changed their contents between sleep and wake"


def test_a_tensor_that_is_missing_is_lost() -> None:
    known = survival({"weight": torch.ones(3)})
    (found,) = known.after_wake("wake", {}, {})
    assert (found.resource, found.holder) == ("contents", "weight")


def test_a_buffer_that_a_graph_reads_elsewhere_is_named() -> None:
    old, new = torch.arange(4), torch.arange(4)
    known = survival({"pointers": old})
    recorded = {"pointers": (old.data_ptr(), old.nbytes)}
    assert known.after_wake("wake", {"pointers": old}, recorded) == []
    known.before_sleep({"pointers": old})
    (found,) = known.after_wake("wake", {"pointers": new}, recorded)
    assert (found.resource, found.cause, found.holder) == ("pointers", "cuda-graph", "pointers")
    there = f"pointers is read at {old.data_ptr():#x}, where 32 B have been released"
    assert found.message == f"pointers is not where a captured graph reads it; {there}"
    assert found.advice == "leave it at its address in wake, or capture the graphs again there"


def test_a_buffer_without_a_name_here_must_have_memory_behind_it(arena: Arena) -> None:
    arena.map_to(64 << 10)
    known = survival({})
    recorded = {"keys": (arena.bytes_at(0, 1).data_ptr(), 4096)}
    assert known.after_wake("wake", {}, recorded) == []
    known.before_sleep({})
    arena.unmap_to(0)
    (found,) = known.after_wake("wake", {}, recorded)
    assert (found.resource, found.cause, found.holder) == ("pointers", "cuda-graph", "keys")


def test_of_several_moved_buffers_the_first_is_reported_in_full() -> None:
    old = torch.arange(8)
    recorded = {"a": (old.data_ptr(), 32), "b": (old.data_ptr() + 32, 32)}
    (found,) = survival({}).dangling("wake", {"a": torch.arange(4), "b": torch.arange(4)}, recorded)
    assert found.count == 2
    assert f"; a is read at {old.data_ptr():#x}, " in found.message


def test_what_lives_now_where_a_graph_reads_is_named() -> None:
    memory = torch.arange(8)
    recorded = {"keys": (memory.data_ptr(), 64)}
    (found,) = survival({}).dangling("wake", {"keys": torch.arange(8), "values": memory}, recorded)
    assert found.message.endswith(f"; keys is read at {memory.data_ptr():#x}, where values is now")


def test_a_pointer_to_pages_that_are_gone_is_found_and_one_to_pages_that_are_back_is_not(arena: Arena) -> None:
    arena.map_to(64 << 10)
    inside = arena.bytes_at(0, 1).data_ptr() + 4096
    tensors = {"table": torch.tensor([0, inside, 0, 0]), "numbers": torch.arange(100)}
    known = survival(tensors)
    arena.unmap_to(0)
    (found,) = known.after_wake("wake", tensors, {})
    assert (found.resource, found.cause, found.holder) == ("pointers", "not-restored", "table")
    where = f"table has {inside:#x} at byte 8, which was in arena 'kv_cache'"
    assert found.message == f"table holds pointers to memory that is not mapped any more; {where}"
    assert found.advice == "write the addresses again in wake, once the memory that they lead to is mapped"
    arena.map_to(64 << 10)
    known.before_sleep(tensors)
    arena.unmap_to(0)
    arena.map_to(64 << 10)
    assert known.after_wake("wake", tensors, {}) == []


def test_pointers_are_counted_with_their_bytes_and_only_in_whole_numbers(arena: Arena) -> None:
    arena.map_to(64 << 10)
    inside = arena.bytes_at(0, 1).data_ptr()
    table = torch.tensor([inside, 0, inside + 16, inside + 4096])
    tensors = {"table": table, "weights": table.view(torch.float64).clone()}
    known = survival(tensors)
    arena.unmap_to(0)
    (found,) = known.after_wake("wake", tensors, {})
    # What is no integer points to nothing, whatever its bytes look like.
    assert (found.holder, found.count, found.bytes) == ("table", 1, 3 * 8)
    assert found.message.startswith("table holds pointers to memory that is not mapped any more; ")


def test_a_buffer_may_lie_anywhere_in_the_tensor_of_its_name_and_not_beyond_it() -> None:
    data = torch.arange(8)
    known = survival({"pointers": data})
    for start, length, is_there in ((0, 64, True), (8, 56, True), (0, 65, False), (64, 8, False)):
        recorded = {"pointers": (data.data_ptr() + start, length)}
        assert (known.dangling("wake", {"pointers": data}, recorded) == []) is is_there


def test_only_the_arenas_of_the_engine_s_device_count(arena: Arena) -> None:
    arena.map_to(64 << 10)
    inside = arena.bytes_at(0, 1).data_ptr()
    tensors = {"table": torch.tensor([inside])}
    elsewhere = PreservedState("cuda:0")
    elsewhere.before_sleep(tensors)
    arena.unmap_to(0)
    assert elsewhere.after_wake("wake", tensors, {}) == []


def test_what_another_arena_has_mapped_is_not_gone(arena: Arena) -> None:
    other = Arena("weights", MIB, CpuPages())
    try:
        for each in (arena, other):
            each.map_to(64 << 10)
        tables = {name: torch.tensor([each.bytes_at(0, 1).data_ptr()]) for name, each in (("k", arena), ("w", other))}
        known = survival(tables)
        arena.unmap_to(0)
        (found,) = known.after_wake("wake", tables, {})
        assert (found.holder, found.bytes) == ("k", 8)
    finally:
        other.close()


def test_reading_is_warmed_up_by_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"words": torch.zeros(8, dtype=torch.int64)}
    read: list[object] = []
    monkeypatch.setattr(module, "take_fingerprints", lambda asked: read.append(("contents", asked)))
    monkeypatch.setattr(module, "find_pointers", lambda asked, ranges: read.append(("pointers", asked, len(ranges))))
    PreservedState("cpu").warm_up(tensors)
    assert read == [("contents", tensors), ("pointers", tensors, 1)]


def test_an_engine_that_tells_nothing_is_not_judged() -> None:
    known = PreservedState("cpu")
    assert known.after_wake("wake", {"weight": torch.ones(1)}, {}) == []
    known.before_sleep({})
    assert known.after_wake("wake", {}, {}) == []


def test_fingerprints_tell_which_tensors_it_was() -> None:
    marks = []
    for name in ("a", "b", "a"):
        tensors = {name: torch.zeros(4)}
        known = survival(tensors)
        tensors[name].fill_(2)
        marks += [found.fingerprint for found in known.after_wake("wake", tensors, {})]
    assert marks[0] == marks[2] != marks[1]


def test_warming_up_keeps_nothing() -> None:
    PreservedState("cpu").warm_up({"words": torch.zeros(8, dtype=torch.int64)})

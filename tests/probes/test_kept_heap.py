"""Heaps in files: the same paths as findings have, who holds what alone, nothing of contents, and damaged files."""

from __future__ import annotations

import functools
import gc
import io
import json
import random
import re
import sys
import types
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from lowtide.probes.heap.graph import Graph
from lowtide.probes.heap.heap_copy import HeapCopy, copy_heap
from lowtide.probes.heap.holders import find_paths, trace
from lowtide.probes.objects.listed import collector_paused
from lowtide.probes.original_numpy import np
from lowtide.reports.heap.kept_heap import FORMAT, read_heap, write_heap
from lowtide.reports.heap.questions import AskedError, AskedHeap
from lowtide.reports.reading.json_files import UnreadableError
from lowtide.reports.schema import ReportError
from tests.probes.kept_heaps import SECRET, Attributed, Leak, as_shown, kept, shown
from tests.probes.small_heaps import SmallHeap

MIB = 1 << 20


class Slotted:
    __slots__ = ("held",)

    held: object


class Property:
    """Has what it holds under a name that its class has for a property."""

    @property
    def held(self) -> None:
        raise AssertionError("foreign code runs")


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType("helper")
    sys.modules["helper"] = made
    yield made
    del sys.modules["helper"]


LINES = [
    "helper .engine .model @leak",
    "helper .engine .blocks ['kv'] [3] @leak",
    "helper .on_step cell 'scale' @leak",
    "helper .supports lru_cache key [0] @leak",
    "helper .table lru_cache value @leak",
    "helper .engine .runner .graphs [0] ['buffers'] [1] cell 'out' .storage @leak",
    "_pytest.of_this_test .kept @leak\n helper .a .b .c .d @leak",
    "helper .ring @ring .next .next @ring\n helper .ring .last [0] @leak",
]


def test_a_path_is_that_of_the_living_heap(tmp_path: Path) -> None:
    numbered = [
        re.sub("@([a-z]+)", rf"@\g<1>{turn}", line.replace("helper", f"helper{turn}"))
        for turn, line in enumerate(LINES)
    ]
    with SmallHeap("\n".join(numbered)) as heap:
        leaks = heap.take(*(f"leak{turn}" for turn in range(len(LINES))))
        expected = sorted(map(shown, find_paths(leaks)))
        asked = kept(tmp_path, *leaks)
        del leaks
    paths = [asked.path(each.id) for each in asked.overview().left]
    assert sorted(map(as_shown, paths)) == expected


@pytest.mark.nightly
def test_a_library_s_namespace_is_reached_from_its_module(module: Any, tmp_path: Path) -> None:
    library = types.ModuleType("_pytest.of_this_test")
    exec("def function(): pass", vars(library))
    leak = Leak()
    vars(library)["kept"] = leak
    # By the function the way is no longer, and the program's own.
    module.function = vars(library)["function"]
    sys.modules["_pytest.of_this_test"] = library
    try:
        (expected,) = find_paths([leak])
        asked = kept(tmp_path, leak)
    finally:
        del sys.modules["_pytest.of_this_test"]
    (left,) = asked.overview().left
    assert as_shown(asked.path(left.id)) == shown(expected)
    assert left.path == "_pytest.of_this_test.kept"


def _generator(held: object) -> Iterator[object]:
    yield
    yield held


def _started(held: object) -> Iterator[object]:
    made = _generator(held)
    next(made)
    return made


HOLDERS: dict[str, Callable[[Any], object]] = {
    "slot": lambda held: _with(Slotted(), held),
    "attribute": Attributed,
    "attribute_in_its_dict": lambda held: _with_dict(Attributed(held)),
    "hidden_attribute": lambda held: _hidden(Property(), held),
    "list_in_a_list": lambda held: [0, [held]],
    "tuple": lambda held: (1, held),
    "deque": lambda held: deque([held]),
    "set": lambda held: {held},
    "key": lambda held: {(held,): 1},
    "class": lambda held: type("Made", (), {"kept": held}),
    "default": lambda held: _function(held),
    "bound_method": lambda held: types.MethodType(len, held),
    "partial": lambda held: functools.partial(len, held),
    "generator": _started,
    "property": lambda held: property(held),
    "numpy_s_objects": lambda held: np.array([held, None], dtype=object),
}


def _with(item: Any, held: object) -> object:
    item.held = held
    return item


def _with_dict(item: Any) -> object:
    item.__dict__  # noqa: B018 - this makes it
    return item


def _hidden(item: Any, held: object) -> object:
    item.__dict__["held"] = held
    return item


def _function(held: object) -> Callable[..., object]:
    def made(first: object = held) -> object:
        return first

    return made


@pytest.mark.nightly
def test_holders_are_named_as_in_the_living_heap(module: Any, tmp_path: Path) -> None:
    leaks = []
    for name, holding in HOLDERS.items():
        if name == "hidden_attribute" and sys.version_info >= (3, 13):
            continue  # to find its name would make a dict of each instance's attributes
        leaks.append(Leak())
        setattr(module, name, holding(leaks[-1]))
    with trace(leaks, thorough=True) as living:
        expected = sorted(shown(living.path(place)) for place in range(len(leaks)))
    asked = kept(tmp_path, *leaks)
    assert sorted(as_shown(asked.path(node)) for node in asked.find("Leak").tolist()) == expected


@pytest.mark.nightly
def test_who_holds_a_type_is_counted_by_type_and_edge(module: Any, tmp_path: Path) -> None:
    module.first = [Leak() for _ in range(5)]
    module.second = [Attributed(leak) for leak in module.first[:3]]
    asked = kept(tmp_path)
    rows = [(row.holder, row.edge, row.count) for row in asked.holders("Leak")]
    assert rows == [("list", "[…]", 5), (f"{Attributed.__module__}.Attributed", ".held", 3)]


@pytest.mark.nightly
def test_types_retain_what_none_of_their_own_does(module: Any, tmp_path: Path) -> None:
    chain: Attributed | None = None
    for _ in range(10):
        chain = Attributed([chain, bytearray(10_000)])
    module.chain = chain
    del chain
    asked = kept(tmp_path)
    (row,) = [row for row in asked.overview(5000).types if row.type == f"{Attributed.__module__}.Attributed"]
    (first, *_) = asked.dominated(int(asked.find("Attributed")[0]))
    assert row.count == 10
    assert row.retained == max(asked.alone(node).retained for node in asked.find("Attributed").tolist())
    # On Python 3.10 an attribute lies in a dict.
    assert first.type == ("list" if sys.version_info >= (3, 11) else "dict")


@pytest.mark.nightly
def test_what_findings_are_about_is_known_and_the_edge_to_what_is_new_is_marked(module: Any, tmp_path: Path) -> None:
    module.kept = Attributed(Leak())
    asked = kept(tmp_path, module.kept.held, born=True)
    (left,) = asked.overview().left
    assert left.path == "helper.kept.held"
    assert [hop.edge for hop in asked.path(left.id).hops if hop.suspect] == [".held"]
    (row,) = [row for row in asked.overview(5000).types if row.type.endswith(".Leak")]
    assert (row.newborn, row.left) == (1, 1)


def test_no_contents_are_in_the_file(module: Any, tmp_path: Path) -> None:
    module.values = {"name": [SECRET, Leak()], "bytes": SECRET.encode(), "number": 47114711471147}
    module.text, module.leak = SECRET, Attributed(SECRET)
    kept(tmp_path)
    with zipfile.ZipFile(tmp_path / "one.heap.npz") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    assert b"['name']" in parts["meta.json"]
    for part in parts.values():
        assert SECRET.encode() not in part
        assert b"47114711471147" not in part


@pytest.mark.nightly
def test_no_code_of_the_programs_runs(module: Any, tmp_path: Path) -> None:
    def fail(*_: object) -> Any:
        raise AssertionError("foreign code runs")

    special = ("__getattr__", "__getattribute__", "__eq__", "__hash__", "__repr__", "__sizeof__", "__iter__", "__len__")
    hostile = type("Hostile", (dict,), dict.fromkeys(special, fail))
    bare = type("Bare", (), dict.fromkeys(special, fail))
    module.holders = [hostile(), bare()]
    object.__setattr__(module.holders[1], "kept", Leak())
    dict.__setitem__(module.holders[0], "key", Leak())
    asked = kept(tmp_path)
    paths = {asked.path(node).text for node in asked.find("Leak").tolist()}
    assert "helper.holders[0]['key']" in paths


@pytest.mark.nightly
def test_an_object_that_no_root_leads_to_has_no_path(tmp_path: Path) -> None:
    cycle: list[object] = [Leak()]
    cycle.append(cycle)
    gc.collect()
    with collector_paused():
        del cycle
        graph = Graph()
        copied = copy_heap(graph)
        graph.close()
    write_heap(copied, str(tmp_path), "one", "a test", "0.0")
    asked = AskedHeap(read_heap(tmp_path / "one"))
    assert asked.path(int(asked.find("Leak")[0])).hops == ()
    assert asked.overview().unreached
    gc.collect()


@pytest.mark.nightly
def test_what_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    asked = kept(tmp_path)
    for asked_for in ("helper.Absent", "999999999", "9" * 40, "\x1b[31m"):
        with pytest.raises(AskedError) as error:
            asked.find(asked_for)
        assert str(error.value).isprintable()


def numbers(*values: int) -> Any:
    return np.array(values, np.int32)


SMALL = HeapCopy(
    types=("module", "dict", "helper.Engine", "storage on cuda:0"),
    registries=(2,),
    roots=((0, "module", "helper", ""),),
    texts=(".__dict__", "['ENGINE']", "storage"),
    kinds=numbers(0, 1, 2, 3),
    sizes=numbers(72, 64, 48, MIB),
    flags=numbers(0, 0, 3, 0),
    turns=numbers(0, 0, 0, 1),
    counts=numbers(1, 1, 1, 0),
    edges=numbers(1, 2, 3),
    labels=numbers(0, 1, 2),
    namespaces=numbers(1),
    modules=numbers(0),
)


@pytest.fixture
def written(tmp_path: Path) -> bytes:
    write_heap(SMALL, str(tmp_path), "small", "a test", "0.0")
    return (tmp_path / "small").read_bytes()


def test_a_small_heap_is_read_as_it_was_written(written: bytes, tmp_path: Path) -> None:
    asked = AskedHeap(read_heap(tmp_path / "small"))
    found = asked.overview()
    assert [(each.id, each.path, each.retained) for each in found.left] == [(2, "helper.ENGINE", MIB + 48)]
    assert (found.objects, found.references, found.bytes, found.devices) == (3, 3, 184, {"cuda:0": MIB})
    assert [each.id for each in asked.dominated(None)] == [0]
    assert [(each.type, each.retained) for each in asked.dominated(2)] == [("storage on cuda:0", MIB)]


def said_of(data: bytes, tmp_path: Path) -> str:
    path = tmp_path / "damaged.heap.npz"
    path.write_bytes(data)
    with pytest.raises(UnreadableError) as error:
        read_heap(path)
    assert str(error.value).isprintable()
    return str(error.value)


def rewritten(data: bytes, tmp_path: Path, **parts: bytes | None) -> bytes:
    """The file with parts in place of its own, or without them."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(data)
    with zipfile.ZipFile(old) as given, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made:
        for name in given.namelist():
            part = parts.get(name.partition(".")[0], given.read(name))
            if part is not None:
                made.writestr(name, part)
    return new.read_bytes()


@pytest.mark.parametrize(
    "data",
    [b"", b"no heap", b"PK\x05\x06" + bytes(18), b'{"schema": "lowtide-report/1"}', b"\x1f\x8b" + bytes(100)],
    ids=["empty", "text", "empty archive", "report", "gzip"],
)
def test_another_file_is_refused(data: bytes, tmp_path: Path) -> None:
    assert FORMAT in said_of(data, tmp_path)


@pytest.mark.parametrize("part", [0.001, 0.3, 0.7, 0.9999])
def test_a_file_that_is_cut_off_is_refused(part: float, written: bytes, tmp_path: Path) -> None:
    said_of(written[: int(part * len(written))], tmp_path)


def test_a_newer_version_is_named(written: bytes, tmp_path: Path) -> None:
    meta = json.dumps({"format": "lowtide-heap/2", "version": "9.9", "more": []}).encode()
    said = said_of(rewritten(written, tmp_path, meta=meta), tmp_path)
    assert "written by lowtide 9.9 as lowtide-heap/2, which is newer" in said


def test_an_array_of_pickles_is_not_loaded(written: bytes, tmp_path: Path) -> None:
    file = io.BytesIO()
    numpy.lib.format.write_array(file, numpy.array([{}], dtype=object), allow_pickle=True)
    assert "damaged" in said_of(rewritten(written, tmp_path, edges=file.getvalue()), tmp_path)


@pytest.mark.parametrize("name", ["edges", "labels", "kinds", "counts", "modules", "namespaces", "sizes"])
def test_numbers_that_lead_nowhere_are_refused(name: str, written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "whole"
    path.write_bytes(written)
    with zipfile.ZipFile(path) as archive:
        array = bytearray(archive.read(f"{name}.npy"))
    array[-4:] = b"\xff\xff\xff\x7f"
    assert "contradicts itself" in said_of(rewritten(written, tmp_path, **{name: bytes(array)}), tmp_path)


def test_whatever_is_damaged_the_outcome_is_a_heap_or_one_line(written: bytes, tmp_path: Path) -> None:
    chance, said = random.Random(1), list[str]()
    path = tmp_path / "damaged"
    for _ in range(1000):
        data = bytearray(written)
        for _ in range(chance.choice([1, 3, 50])):
            # Most often where it says what is where.
            at = chance.choice([chance.randrange(len(data)), len(data) - 1 - chance.randrange(1000)])
            data[at] = chance.randrange(256)
        path.write_bytes(data)
        try:
            asked = AskedHeap(read_heap(path))
        except UnreadableError as error:
            said.append(str(error))
        else:
            # What was read is whole: whatever is asked of it has an answer.
            asked.overview()
            asked.holders("0")
    assert len(said) > 500
    assert all(map(str.isprintable, said))


def test_a_file_that_cannot_be_written_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ReportError, match="cannot be written"):
        write_heap(SMALL, str(tmp_path), "taken", "a test", "0.0")
    assert [each.name for each in tmp_path.iterdir()] == ["taken"]

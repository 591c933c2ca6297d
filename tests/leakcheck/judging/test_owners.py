"""Owners: what they took at their setup, and what of the things that appeared later is theirs because they hold it."""

from __future__ import annotations

import io
import multiprocessing
import os
import select
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
import torch
from torch import nn

from lowtide.leakcheck.judging.owners import Claims, Owner
from lowtide.probes.host.counters import Counters
from lowtide.probes.objects.opened_in_c import numbers_of_mappings


class Engine:
    """Holds whatever it is given."""

    def __init__(self) -> None:
        self.held: list[object] = []


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def owner(engine: Engine) -> Owner:
    return Owner("module fixture 'engine'", lambda: [engine])


def counters(*threads: str, host: int | None = 0, dtype: str = "float32") -> Counters:
    return Counters({"threads": dict.fromkeys(threads, 1)}, {"host-memory": host}, {"dtype": dtype})


def taken(before: Counters, after: Counters, *live: Owner, nested: tuple[Owner, ...] = ()) -> Owner:
    owner = Owner("fixture")
    owner.before = before
    owner.take(after, live, nested)
    return owner


def test_it_takes_what_appeared() -> None:
    owner = taken(counters("main"), counters("main", "a", host=10, dtype="float64"))
    assert owner.items == {"threads": {"a"}, "globals": {"dtype"}}
    assert owner.growth == {"host-memory": 10}
    assert owner.settings == {"dtype": "float64"}


def test_it_takes_nothing_where_nothing_appeared() -> None:
    owner = taken(counters("main"), counters("main"))
    assert owner.items == {}
    assert owner.settings == {}
    assert not owner.storages
    assert not any(owner.growth.values())


def test_it_does_not_take_what_is_another_s() -> None:
    other = taken(counters("main"), counters("main", "a", host=10))
    owner = taken(counters("main"), counters("main", "a", "b", host=25), other, nested=(other,))
    assert owner.items == {"threads": {"b"}}
    assert owner.growth == {"host-memory": 15}


def test_what_falls_meanwhile_is_a_fixture_s_and_not_an_import_s() -> None:
    owner, imported = Owner("fixture"), Owner("import of heavy", only_adds=True)
    for each in (owner, imported):
        each.before = counters(host=10)
        each.take(counters(host=4), (), ())
    assert owner.growth == {"host-memory": -6}
    assert imported.growth == {"host-memory": 0}


def test_a_level_that_cannot_be_reported_has_no_growth() -> None:
    assert taken(counters(host=None), counters(host=5)).growth == {}
    assert taken(counters(host=5), counters(host=None)).growth == {}


def test_the_same_fixture_set_up_again_has_another_label() -> None:
    first, second = Owner("fixture"), Owner("fixture")
    assert first.stage == second.stage == "setup of fixture"
    assert first.label != second.label
    assert first.serial < second.serial


def test_an_owner_can_be_given_the_stage_of_what_it_sets_up() -> None:
    owner = Owner("fixture", stage="import")
    assert owner.stage == "import"
    assert owner.label == f"import #{owner.serial}"


def test_what_it_holds_is_its_own_and_what_it_does_not_is_not(owner: Owner, engine: Engine) -> None:
    mine, other = torch.ones(3), torch.ones(3)
    engine.held.append({"deep": [mine]})
    claims = Claims([owner])
    assert claims.owner_of(mine) is owner
    assert claims.owner_of(other) is None


def test_of_two_that_hold_it_the_first_has_it(owner: Owner, engine: Engine) -> None:
    later = Owner("later", lambda: [engine])
    engine.held.append(mine := torch.ones(3))
    assert Claims([owner, later]).owner_of(mine) is owner


def test_what_a_library_keeps_in_a_global_is_not_held_by_who_gives_it_out(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ModuleType("installed_library")
    library.__file__ = f"{sysconfig.get_path('purelib')}/installed_library.py"
    monkeypatch.setitem(sys.modules, library.__name__, library)
    given, under, mine = Engine(), torch.ones(3), torch.ones(3)
    given.held.append(under)
    engine.held += [given, mine]
    owners = [Owner("fixture", lambda: [engine]), Owner("event_loop_policy", lambda: [given])]
    assert Claims(owners).owner_of(under) is owners[0]
    library.POLICY = given  # type: ignore[attr-defined]
    assert Claims(owners).owner_of(under) is None
    assert Claims(owners).owner_of(mine) is owners[0]
    # The program's own global does live with who gives it out.
    library.__file__ = __file__
    assert Claims(owners).owner_of(under) is owners[0]


def test_what_the_classes_and_functions_hold_that_its_setup_made_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    of_class, of_base, of_function, of_module = (torch.ones(3) for _ in range(4))

    class Base:
        kept: ClassVar[list[object]] = [of_base]

    class Made(Base):
        own: ClassVar[list[object]] = [of_class]

    def made() -> None: ...

    vars(made)["kept"] = of_function
    monkeypatch.setattr(Engine, "kept", of_module, raising=False)
    roots = [Made(), made, Engine()]
    owner = Owner("fixture", lambda: roots)
    assert not any(Claims([owner]).owner_of(item) for item in (of_class, of_base, of_function, of_module))
    owner.note_made({id(Base), id(Made), id(made), id(Engine)})
    assert [Claims([owner]).owner_of(item) for item in (of_class, of_base, of_function)] == [owner] * 3
    # A class that a module has is as old as the module, wherever that was imported.
    assert Claims([owner]).owner_of(of_module) is None
    # What others have made is theirs.
    user = Owner("user", lambda: roots)
    user.note_made({id(Made)})
    assert [Claims([user]).owner_of(item) for item in (of_class, of_base, of_function)] == [user, None, None]


def test_an_owner_without_roots_has_nothing(engine: Engine) -> None:
    engine.held.append(mine := torch.ones(3))
    assert Claims([Owner("fixture")]).owner_of(mine) is None
    assert Claims([]).owner_of(mine) is None


def test_it_is_not_asked_before_somebody_wants_to_know() -> None:
    def roots() -> list[object]:
        raise AssertionError("asked")

    Claims([Owner("fixture", roots)])


def key_of(tensor: torch.Tensor) -> tuple[str, int]:
    return "cpu", tensor.untyped_storage().data_ptr()


def test_the_gradient_of_what_it_holds_is_its_own(owner: Owner, engine: Engine) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    engine.held.append(model)
    for each in (model, other):
        each(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    assert other.weight.grad is not None
    found = Claims([owner]).by_storage
    assert (found.get(key_of(model.weight.grad)), found.get(key_of(other.weight.grad))) == (owner, None)


@pytest.mark.parametrize("is_freed", [False, True])
def test_what_the_graph_of_what_it_holds_has_saved_is_its_own(is_freed: bool, owner: Owner, engine: Engine) -> None:
    weight, other = nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(10))
    hidden = weight.exp()
    loss = hidden.square().sum()
    other.square().sum().backward()
    if is_freed:
        loss.backward()
    engine.held.append(loss)
    assert other.grad is not None
    claims = Claims([owner])
    found = [key_of(each) in claims.by_storage for each in (weight, hidden, other, other.grad)]
    assert found == [True, not is_freed, False, False]


def test_the_gradient_of_what_a_graph_has_saved_is_its_own_too(owner: Owner, engine: Engine) -> None:
    weight = nn.Parameter(torch.ones(10))
    loss = weight.square().sum()
    loss.backward()
    engine.held.append(loss)
    assert weight.grad is not None
    assert Claims([owner]).by_storage[key_of(weight.grad)] is owner


def test_asking_for_gradients_makes_none(owner: Owner, engine: Engine) -> None:
    model = nn.Linear(2, 2)
    engine.held.append(model)
    assert Claims([owner]).by_storage.keys() == {key_of(each) for each in model.parameters()}
    assert model.weight.grad is None


@pytest.fixture
def event() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_thread_that_it_started_later_is_its_own(owner: Owner, engine: Engine, event: threading.Event) -> None:
    mine, other = (threading.Thread(target=event.wait, daemon=True) for _ in range(2))
    engine.held.append(mine)
    mine.start()
    other.start()
    assert Claims([owner]).names("threads") == {f"{mine.name} ({mine.ident})": owner}


def test_a_process_that_it_started_later_is_its_own(owner: Owner, engine: Engine) -> None:
    mine, other = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    engine.held.append(mine)
    try:
        assert Claims([owner]).names("processes") == {str(mine.pid): owner}
    finally:
        for child in (mine, other):
            child.kill()
            child.wait()


def test_a_process_of_multiprocessing_is_its_own(owner: Owner, engine: Engine) -> None:
    mine = multiprocessing.get_context("spawn").Process(target=print)
    engine.held.append(mine)
    mine.start()
    try:
        assert Claims([owner]).names("processes") == {str(mine.pid): owner}
    finally:
        mine.join()
        mine.close()


def test_files_sockets_and_polls_that_it_opened_later_are_its_own(owner: Owner, engine: Engine) -> None:
    with Path(__file__).open() as file, socket.socket() as end, select.epoll() as poll, socket.socket():
        engine.held += [file, end, poll]
        numbers = {f"{item.fileno()} ->" for item in (file, end, poll)}
        assert set(Claims([owner]).names("file-descriptors")) == numbers


def test_a_closed_file_is_no_descriptor_of_its(owner: Owner, engine: Engine) -> None:
    with Path(__file__).open() as file:
        number = file.fileno()
    engine.held.append(file)
    assert f"{number} ->" not in Claims([owner]).names("file-descriptors")


def test_a_pipe_that_it_opened_later_is_its_own(owner: Owner, engine: Engine) -> None:
    reader, writer = os.pipe()
    with io.FileIO(reader), io.FileIO(writer, "w") as file:
        engine.held.append(file)
        assert set(Claims([owner]).names("file-descriptors")) == {f"{writer} ->"}


def test_shared_memory_that_it_made_later_is_its_own(owner: Owner, engine: Engine) -> None:
    mine, other = (shared_memory.SharedMemory(create=True, size=4096) for _ in range(2))
    engine.held.append(mine)
    try:
        assert Claims([owner]).names("shared-memory") == {mine.name.lstrip("/"): owner}
    finally:
        for memory in (mine, other):
            memory.close()
            memory.unlink()


def test_the_descriptor_of_shared_memory_is_its_own_by_its_target(owner: Owner, engine: Engine) -> None:
    mine, other = (shared_memory.SharedMemory(create=True, size=4096) for _ in range(2))
    engine.held.append(mine)
    try:
        target = os.readlink(f"/proc/self/fd/{mine._fd}")  # type: ignore[attr-defined]  # noqa: PTH115 - no path
        assert target == f"/dev/shm/{mine.name.lstrip('/')}"
        # That of its map has a number of its own.
        (mapped,) = numbers_of_mappings([mine._mmap])  # type: ignore[attr-defined]
        assert Claims([owner]).names("file-descriptors") == {target: owner, f"{mapped} ->": owner}
    finally:
        for memory in (mine, other):
            memory.close()
            memory.unlink()


def test_of_other_resources_it_claims_nothing(owner: Owner) -> None:
    assert Claims([owner]).names("globals") == {}

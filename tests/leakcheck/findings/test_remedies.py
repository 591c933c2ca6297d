"""What gives a leak back: tried on programs that leak, measured to the byte, told with all that it changed."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch

from lowtide.leakcheck.explaining.cut import Cut, Place
from lowtide.leakcheck.findings.remedies import Wording, named, prove
from lowtide.leakcheck.findings.storage_holders import Context, explain_storages
from lowtide.leakcheck.findings.storage_watch import StorageWatch
from lowtide.leakcheck.findings.tensor_findings import TensorLeak, tensor_leaks
from lowtide.leakcheck.judging.ladder import ACTIONS
from lowtide.leakcheck.judging.owners import Claims
from lowtide.leakcheck.judging.storages import read_heap, storage_keys
from lowtide.leakcheck.resources.resource import Rung
from lowtide.probes.heap.births import Births
from lowtide.reports.schema import Finding, Remedy
from tests.waiting import HANG_S

pytestmark = pytest.mark.nightly

Step = tuple[str, Callable[[], object]]


def leaks_of(*steps: Step, is_over: bool = False) -> tuple[list[TensorLeak], Context]:
    """What some steps, each in a stage, leave in tensors, as the checker finds it."""
    births = Births()
    births.start()
    try:
        gc.collect()
        births.mark(steps[0][0])
        for stage, step in steps:
            births.begin(stage)
            step()
        held = read_heap(births, Claims(()), (), ()).held
        context = Context(born=births.born(), is_over=is_over)
    finally:
        births.stop()
    explained = explain_storages({storage.key for storage in held}, context)
    return tensor_leaks([held], [Rung.RAW], explained, context), context


def proven(*steps: Step, is_over: bool = False) -> list[Finding]:
    """The same, with what gives it back."""
    leaks, context = leaks_of(*steps, is_over=is_over)
    return prove(leaks, context)


def numbers(size: int) -> torch.Tensor:
    """A tensor of so many bytes."""
    return torch.zeros(size, dtype=torch.uint8)


def sparse(size: int) -> torch.Tensor:
    """A sparse tensor of so many values: 8 bytes for each place, 4 for each value."""
    return torch.sparse_coo_tensor(torch.arange(size).reshape(1, size), torch.ones(size), (9,), check_invariants=False)


Load = Callable[[str], Any]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Writes a program's source and imports it as a module of its own."""
    folder = tmp_path_factory.mktemp("programs")
    sys.path.insert(0, str(folder))
    loaded: list[str] = []

    def load(source: str) -> Any:
        name = f"program_{len(loaded)}"
        (folder / f"{name}.py").write_text(source)
        loaded.append(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield load
    sys.path.remove(str(folder))
    for name in loaded:
        del sys.modules[name]


# --- many leaks, one after the other --------------------------------------------------------------------------------

PROGRAM = """
import functools
import torch

TABLE = {"old": [1]}
ONE, TWO = {}, {}
ROWS, SOME = [], []
GRAPH, SAVED = [], {}
SPARSE, BROKEN = {}, {}
BEGINS_AS_NONE = None
BEGINS_OTHERWISE = ()
ENGINES = {}
WEIGHT = torch.ones(100, requires_grad=True)


class Engine:
    pass


@functools.lru_cache
def cached(size):
    return torch.zeros(size, dtype=torch.uint8)


def stream(batch):
    try:
        yield
    finally:
        raise ValueError("in the end")


def relay():
    make = yield
    yield from stream(make())


class Key:
    broken = False

    def __hash__(self):
        if self.broken:
            raise OSError("no hash")
        return 1


RELAY, KEY = relay(), Key()
next(RELAY)
"""


def leak_in_many_ways(program: Any) -> None:
    program.TABLE["a"] = numbers(1001)
    program.ONE["x"] = program.TWO["x"] = numbers(1002)
    program.ROWS.extend([numbers(301), numbers(302), numbers(303)])
    program.SOME.extend([numbers(404), numbers(404), Thing(), numbers(404), numbers(404)])
    hidden = program.WEIGHT * 2
    program.GRAPH.append((hidden * hidden).sum())
    program.SAVED["hidden"] = hidden
    program.SPARSE["s"] = sparse(3)
    program.RELAY.send(lambda: numbers(1005))
    program.BROKEN[program.KEY] = numbers(1011)
    program.KEY.broken = True
    program.BEGINS_AS_NONE = numbers(1006)
    program.BEGINS_OTHERWISE = (numbers(1007),)
    program.cached(1008)
    program.ENGINES["e"] = engine = program.Engine()
    engine.weight = numbers(1009)


class Thing:
    """What no one leaks."""


@pytest.fixture(scope="module")
def program(load: Load) -> Any:
    return load(PROGRAM)


@pytest.fixture(scope="module")
def findings(program: Any) -> list[Finding]:
    def infer() -> None:
        program.ENGINES["e"].cache = numbers(1010)

    return proven(("create", lambda: leak_in_many_ways(program)), ("infer", infer))


def held_by(findings: Sequence[Finding], holder: str, stage: str = "create") -> Finding:
    (found,) = [finding for finding in findings if f".{holder}" in str(finding.holder) and finding.stage == stage]
    return found


def reported(finding: Finding) -> tuple[Remedy | None, tuple[Remedy, ...], tuple[str, ...]]:
    return finding.remedy, finding.tried, finding.changed


def remedy(action: str, size: int) -> Remedy:
    return Remedy(action=action, returns_bytes=size)


NAME = "program_0"


def test_an_entry_gives_back_every_byte(findings: list[Finding]) -> None:
    action = remedy(f"del {NAME}.TABLE['a']", 1001)
    found = held_by(findings, "TABLE")
    assert reported(found) == (action, (action,), (f"{NAME}.TABLE['a'] is deleted",))
    assert found.message.endswith(f"; del {NAME}.TABLE['a'] returns 1001 B")


def test_a_cache_gives_back_every_byte(findings: list[Finding]) -> None:
    action = remedy(f"{NAME}.cached.cache_clear()", 1008)
    assert reported(held_by(findings, "cached")) == (action, (action,), (f"{NAME}.cached is empty",))


def test_a_global_that_begins_as_none_gives_back_every_byte(findings: list[Finding], program: Any) -> None:
    action = remedy(f"{NAME}.BEGINS_AS_NONE = None", 1006)
    assert reported(held_by(findings, "BEGINS_AS_NONE")) == (action, (action,), (f"{NAME}.BEGINS_AS_NONE is None",))
    assert program.BEGINS_AS_NONE is None


def test_a_global_that_begins_otherwise_is_left_alone(findings: list[Finding], program: Any) -> None:
    assert reported(held_by(findings, "BEGINS_OTHERWISE")) == (None, (), ())
    assert program.BEGINS_OTHERWISE[0].numel() == 1007


def test_of_two_holders_both_are_reported_and_only_the_second_gives_anything_back(findings: list[Finding]) -> None:
    (found,) = [finding for finding in findings if finding.bytes == 1002]
    first, second = found.tried
    assert {first.action, second.action} == {f"del {NAME}.ONE['x']", f"del {NAME}.TWO['x']"}
    assert (first.returns_bytes, second.returns_bytes) == (0, 1002)
    assert found.remedy == remedy(f"{first.action}; {second.action}", 1002)
    assert set(found.changed) == {f"{NAME}.ONE['x'] is deleted", f"{NAME}.TWO['x'] is deleted"}


def test_all_items_of_a_container_are_cleared(findings: list[Finding], program: Any) -> None:
    action = remedy(f"{NAME}.ROWS.clear()", 301 + 302 + 303)
    found = held_by(findings, "ROWS")
    assert (found.remedy, found.tried) == (action, (action,))
    assert sorted(found.changed) == [f"{NAME}.ROWS[{place}] is deleted" for place in range(3)]
    assert program.ROWS == []


def test_some_items_of_a_container_are_deleted_and_the_others_stay(findings: list[Finding], program: Any) -> None:
    found = held_by(findings, "SOME")
    assert found.remedy is not None
    assert found.remedy.action == "del " + ", ".join(f"{NAME}.SOME[{place}]" for place in (4, 3, 1, 0))
    assert found.remedy.returns_bytes == 4 * 404
    assert sorted(found.changed) == [f"{NAME}.SOME[{place}] is deleted" for place in (0, 1, 3, 4)]
    assert [type(item) for item in program.SOME] == [Thing]


def test_what_an_autograd_graph_holds_as_well_is_not_said_to_come_back(findings: list[Finding]) -> None:
    (hidden,) = [finding for finding in findings if finding.bytes == 400]
    # The loss that keeps the graph is tried for another finding, which comes later: it is the smaller one.
    assert hidden.tried[0] == remedy(f"del {NAME}.SAVED['hidden']", 0)
    assert hidden.tried[-1].action == f"del {NAME}.GRAPH[0]"
    assert sum(tried.returns_bytes for tried in hidden.tried) == 400
    loss = held_by(findings, "GRAPH")
    assert loss.remedy == remedy(f"del {NAME}.GRAPH[0]", 4)


def test_a_sparse_tensor_gives_back_both_of_its_parts(findings: list[Finding]) -> None:
    assert held_by(findings, "SPARSE").remedy == remedy(f"del {NAME}.SPARSE['s']", 3 * 8 + 3 * 4)


def test_a_cut_that_raises_is_advice_with_what_it_raised_and_gave_back(findings: list[Finding]) -> None:
    action = remedy(f"{NAME}.RELAY.gi_yieldfrom.close() (raised ValueError: in the end)", 1005)
    found = held_by(findings, "RELAY")
    assert (found.remedy, found.tried) == (None, (action,))
    assert found.advice == f"{action.action}: tried, it returns 1005 B"


def test_an_entry_whose_key_raises_when_it_is_hashed_goes_without_that(findings: list[Finding], program: Any) -> None:
    found = held_by(findings, "BROKEN")
    # By its key it could be deleted only if that were hashed.
    action = remedy(f"dict.popitem({NAME}.BROKEN)", 1011)
    assert reported(found) == (action, (action,), (f"{NAME}.BROKEN[<{NAME}.Key>] is deleted",))
    assert program.BROKEN == {}


def test_an_action_that_helps_two_findings_is_reported_with_both_and_done_once(findings: list[Finding]) -> None:
    created, inferred = (held_by(findings, "ENGINES['e']", stage) for stage in ("create", "infer"))
    assert created.remedy == remedy(f"del {NAME}.ENGINES['e']", 1009)
    assert inferred.remedy == remedy(f"del {NAME}.ENGINES['e']", 1010)
    assert sorted([*created.changed, *inferred.changed]) == [f"{NAME}.ENGINES['e'] is deleted"]


def test_nothing_else_of_the_program_has_changed(findings: list[Finding], program: Any) -> None:
    assert findings
    assert program.TABLE == {"old": [1]}
    assert torch.equal(program.WEIGHT.detach(), torch.ones(100))
    assert [program.ONE, program.TWO, program.SAVED, program.SPARSE, program.ENGINES] == [{}, {}, {}, {}, {}]


def test_everything_that_can_change_is_listed(findings: list[Finding]) -> None:
    said = {text for finding in findings for text in finding.changed}
    assert said == {
        f"{NAME}.{what}"
        for what in (
            "TABLE['a'] is deleted",
            f"BROKEN[<{NAME}.Key>] is deleted",
            "ONE['x'] is deleted",
            "TWO['x'] is deleted",
            *(f"ROWS[{place}] is deleted" for place in range(3)),
            *(f"SOME[{place}] is deleted" for place in (0, 1, 3, 4)),
            "SAVED['hidden'] is deleted",
            "GRAPH[0] is deleted",
            "SPARSE['s'] is deleted",
            "RELAY.gi_yieldfrom is closed",
            "BEGINS_AS_NONE is None",
            "cached is empty",
            "ENGINES['e'] is deleted",
        )
    }


# --- one at a time --------------------------------------------------------------------------------------------------


def test_a_tensor_whose_memory_only_native_code_holds_is_not_said_to_come_back(load: Load) -> None:
    program = load("TABLE = {}\nOWNER = []")
    capsules: list[int] = []

    def leak() -> None:
        tensor = numbers(2001)
        program.TABLE["a"] = tensor
        # A capsule holds what is under the tensor, in C++, and C alone the capsule.
        capsule = tensor.__dlpack__()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(capsule))
        capsules.append(id(capsule))

    try:
        (found,) = proven(("call", leak))
    finally:
        ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(capsules[0]))
    assert program.TABLE == {}
    assert found.remedy is None
    assert found.tried == (remedy(f"del {program.__name__}.TABLE['a']", 0),)
    assert found.changed == (f"{program.__name__}.TABLE['a'] is deleted",)
    assert "returns" not in found.message


def test_three_holders_are_found_one_after_the_other_and_a_fourth_is_not_looked_for(load: Load) -> None:
    program = load("A, B, C = {}, {}, {}")

    def leak(*tables: Any) -> None:
        tensor = numbers(2003)
        for table in tables:
            table["x"] = tensor

    (found,) = proven(("call", lambda: leak(program.A, program.B, program.C)))
    assert [tried.returns_bytes for tried in found.tried] == [0, 0, 2003]
    assert found.remedy is not None
    assert found.remedy.action.count("del ") == 3
    fourth: dict[str, Any] = {}
    program.D = fourth
    (found,) = proven(("call", lambda: leak(program.A, program.B, program.C, program.D)))
    assert [tried.returns_bytes for tried in found.tried] == [0, 0, 0]
    assert found.remedy is None
    del program.D
    for table in (program.A, program.B, program.C, fourth):
        table.clear()


RELAY = """
def stream(batch, error):
    try:
        yield
    finally:
        raise error()


def relay():
    make, error = yield
    yield from stream(make(), error)


RELAY, TABLE = relay(), {}
next(RELAY)
"""


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise ValueError("unreadable")


@pytest.mark.parametrize("error", [UnreadableError, SystemExit, pytest.fail.Exception])
def test_whatever_a_cut_raises_nothing_is_lost(load: Load, error: type[BaseException]) -> None:
    program = load(RELAY)

    def leak() -> None:
        program.RELAY.send((lambda: numbers(5001), error))
        program.TABLE["a"] = numbers(5000)

    first, second = proven(("call", leak))
    assert (first.bytes, second.bytes) == (5001, 5000)
    assert first.remedy is None
    assert f"(raised {error.__name__}" in (first.advice or "")
    assert second.remedy == remedy(f"del {program.__name__}.TABLE['a']", 5000)


def test_an_interrupt_is_nobodys_to_keep(load: Load) -> None:
    program = load(RELAY)
    leaks, context = leaks_of(("call", lambda: program.RELAY.send((lambda: numbers(5001), KeyboardInterrupt))))
    with pytest.raises(KeyboardInterrupt):
        prove(leaks, context)


class Noisy:
    """Raises where nobody can catch it."""

    def __init__(self, size: int) -> None:
        self.weight = numbers(size)

    def __del__(self) -> None:
        raise RuntimeError("in the end")


def test_what_is_raised_where_nobody_can_catch_it_is_reported_and_holds_nothing(load: Load) -> None:
    program = load("TABLE = {}")
    before = sys.unraisablehook
    (found,) = proven(("call", lambda: program.TABLE.update(noisy=Noisy(6001))))
    action = f"del {program.__name__}.TABLE['noisy']"
    assert found.remedy == remedy(action, 6001)
    assert found.tried == (remedy(f"{action} (raised RuntimeError: in the end)", 6001),)
    assert sys.unraisablehook is before


def test_what_an_earlier_action_has_cut_is_not_cut_again(load: Load) -> None:
    program = load("TABLE = {}\nclass Engine: ...")

    def create() -> None:
        for number in (1, 2):
            program.TABLE[number] = program.Engine()
            program.TABLE[number].weight = numbers(3000)

    def infer() -> None:
        program.TABLE[2].cache = numbers(10)
        program.TABLE[3] = numbers(20)

    created, inferred = proven(("create", create), ("infer", infer))
    name = program.__name__
    assert (created.bytes, inferred.bytes) == (6000, 30)
    assert set(created.changed) == {f"{name}.TABLE[1] is deleted", f"{name}.TABLE[2] is deleted"}
    assert inferred.changed == (f"{name}.TABLE[3] is deleted",)
    assert inferred.tried[-1] == remedy(f"del {name}.TABLE[3]", 20)


def test_the_action_on_several_items_of_a_list_is_code_that_does_it(load: Load) -> None:
    program = load("ROWS = []")
    before: list[int] = []

    def leak() -> None:
        program.ROWS.extend([numbers(5), Thing(), numbers(5), Thing(), numbers(5)])
        before.extend(map(id, program.ROWS))

    (found,) = proven(("call", leak))
    assert list(map(id, program.ROWS)) == [before[1], before[3]]
    assert found.remedy is not None
    rows = list(before)
    exec(found.remedy.action.replace(f"{program.__name__}.ROWS", "rows"), {"rows": rows})
    assert rows == [before[1], before[3]]


class Kept(list[torch.Tensor]):
    """A list that can be referred to weakly."""


class HeldByThread:
    """A thread that holds a tensor in its arguments, until it is told to stop or for some seconds."""

    def __init__(self, seconds: float) -> None:
        self.stop, self.ready, self.seconds = threading.Event(), threading.Event(), seconds
        self.kept: Any = weakref.proxy(self)

    def start(self, *sizes: int) -> None:
        kept = Kept(map(numbers, sizes))
        self.kept = weakref.proxy(kept)
        self.thread = threading.Thread(target=self.run, args=(kept,), name="worker", daemon=True)
        self.thread.start()
        assert self.ready.wait(HANG_S)

    def run(self, *_: object) -> None:
        self.ready.set()
        self.stop.wait(self.seconds)

    def __enter__(self) -> HeldByThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()


JOIN = "next(thread for thread in threading.enumerate() if thread.name == 'worker').join()"


def test_a_thread_that_ends_by_itself_is_waited_for() -> None:
    with HeldByThread(60) as held:
        leaks, context = leaks_of(("call", lambda: held.start(4001)))
        # Only now: how long the explaining takes is the machine's affair.
        threading.Timer(2.0, held.stop.set).start()
        (found,) = prove(leaks, msgspec.structs.replace(context, patience=20))
        action = remedy(JOIN, 4001)
        assert reported(found) == (action, (action,), ())


def test_a_thread_that_does_not_end_is_not_waited_for_long() -> None:
    with HeldByThread(60) as held:
        leaks, context = leaks_of(("call", lambda: held.start(4001)))
        (found,) = prove(leaks, msgspec.structs.replace(context, patience=0.3))
        assert reported(found) == (None, (remedy(JOIN, 0),), ())
        assert held.thread.is_alive()


def test_a_thread_that_holds_several_leaks_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[float | None] = []
    with HeldByThread(60) as held:
        leaks, context = leaks_of(
            ("create", lambda: held.start(10)),
            ("infer", lambda: held.kept.append(numbers(20))),
            ("sleep", lambda: held.kept.append(numbers(30))),
        )
        monkeypatch.setattr(threading.Thread, "join", lambda thread, timeout=None: joined.append(timeout))
        found = prove(leaks, msgspec.structs.replace(context, patience=0.4))
        monkeypatch.undo()
    assert [finding.bytes for finding in found] == [30, 20, 10]
    assert joined == [pytest.approx(0.4, abs=0.1)]


def test_compiled_code_is_reset_and_that_is_listed(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    program = load("COMPILED = ()")
    optimized: Any = type("OptimizedModule", (), {"__module__": "torch._dynamo.eval_frame"})

    class Dynamo:
        def reset(self) -> None:
            del program.COMPILED[0].kept

    def leak() -> None:
        program.COMPILED = (optimized(),)
        program.COMPILED[0].kept = numbers(70)

    monkeypatch.setitem(sys.modules, "torch._dynamo", Dynamo())
    (found,) = proven(("call", leak))
    assert found.cause == "compiled-code"
    assert found.remedy == remedy(ACTIONS[Rung.RESET_COMPILED], 70)
    assert len(found.changed) == 1


def test_a_gradient_of_an_old_parameter_is_dropped(load: Load) -> None:
    program = load("import torch\nNETWORK = torch.nn.Linear(10, 5, bias=False)")

    def step() -> None:
        program.NETWORK(torch.ones(3, 10)).sum().backward()
        assert program.NETWORK.weight.grad is not None

    (found,) = proven(("step", step))
    name = f"{program.__name__}.NETWORK.weight"
    assert (found.bytes, found.holder, found.cause) == (200, f"{name}.grad", "instance-attribute")
    assert reported(found) == (
        remedy(f"{name}.grad = None", 200),
        (remedy(f"{name}.grad = None", 200),),
        (f"{name}.grad is None",),
    )
    assert program.NETWORK.weight.grad is None
    assert program.NETWORK.weight is not None


def test_without_leaks_nothing_is_tried() -> None:
    assert prove([], Context()) == []


# --- the watch ------------------------------------------------------------------------------------------------------


def keys_of(*tensors: Any) -> set[tuple[str, int]]:
    return storage_keys(tensors)


def test_a_view_that_keeps_much_more_than_it_shows_is_told_so() -> None:
    shown_in_part = ("a view", "views of all", "shown twice as large", "with its whole", "its storage", "most of it")
    kept: dict[str, list[Any]] = {name: [] for name in (*shown_in_part, "little")}

    def keep() -> None:
        whole = torch.ones(1 << 20)
        kept["a view"].append(whole[:4])
        kept["views of all"].append(torch.ones(1 << 19).split(1 << 16))
        kept["shown twice as large"].append(torch.ones(1 << 18).expand(2, -1))
        both = torch.ones(1 << 17)
        kept["with its whole"].append([both, both[:4]])
        kept["its storage"].append(torch.ones(1 << 16)[:4].untyped_storage())
        kept["most of it"].append(torch.ones(1 << 19)[: 3 << 17])
        kept["little"].append(torch.ones(1 << 13)[:4])

    leaks, _ = leaks_of(("keep", keep))
    told = [leak.finding.message for leak in leaks if "view of" in leak.finding.message]
    assert len(leaks) == len(kept)
    (message,) = told
    assert "4.0 MiB in 1 tensor" in message
    assert "; a view of 16 B keeps 4.0 MiB: keep a clone() of it" in message


def test_of_many_entries_that_which_hides_most_is_told() -> None:
    kept: dict[str, Any] = {}

    def keep() -> None:
        kept["whole"] = torch.ones(1 << 20)
        for name, size in (("small", 1 << 17), ("large", 1 << 18), ("smallest", 1 << 16)):
            kept[name] = torch.ones(size)[:4]

    (leak,), _ = leaks_of(("keep", keep))
    assert "5.8 MiB in 4 tensors" in leak.finding.message
    assert "; a view of 16 B keeps 1.0 MiB: keep a clone() of it" in leak.finding.message


@pytest.mark.parametrize(("count", "is_told"), [(20, True), (2, False)])
def test_views_of_little_each_are_told_where_they_hide_much_together(count: int, is_told: bool) -> None:
    kept: list[Any] = []
    (leak,), _ = leaks_of(("keep", lambda: kept.extend(torch.ones(1 << 11)[:1] for _ in range(count))))
    assert ("; a view of 4 B keeps 8.0 KiB: keep a clone() of it" in leak.finding.message) == is_told


def test_a_storage_is_gone_when_its_last_view_is() -> None:
    tensor = numbers(100)
    view = tensor[10:20]
    watch = StorageWatch(keys_of(tensor))
    assert watch.gone() == set()
    keys = keys_of(tensor)
    del tensor
    assert watch.gone() == set()
    del view
    assert watch.gone() == keys


def test_each_storage_is_reported_by_itself() -> None:
    one, other = numbers(100), numbers(200)
    keys = keys_of(one)
    watch = StorageWatch(keys | keys_of(other))
    del one
    assert watch.gone() == keys


def test_a_storage_object_holds_it_as_well() -> None:
    tensor = numbers(100)
    storage = tensor.untyped_storage()
    keys = keys_of(tensor)
    watch = StorageWatch(keys)
    del tensor
    assert watch.gone() == set()
    del storage
    assert watch.gone() == keys


def test_what_only_native_code_holds_is_not_gone() -> None:
    tensor = torch.ones(10, requires_grad=True) * 2
    loss = (tensor * tensor).sum()
    keys = keys_of(tensor)
    watch = StorageWatch(keys)
    del tensor
    gc.collect()
    assert watch.gone() == set()
    del loss
    assert watch.gone() == keys


def test_memory_that_was_given_to_somebody_else_is_gone_all_the_same() -> None:
    size = 1 << 16
    tensor = numbers(size)
    keys = keys_of(tensor)
    watch = StorageWatch(keys)
    del tensor
    # The allocator gives the same address again.
    others = [numbers(size) for _ in range(20)]
    assert watch.gone() == keys
    del others


@pytest.mark.parametrize(
    "make",
    [
        lambda: sparse(2),
        lambda: torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), check_invariants=False),
        lambda: torch.ones(5).as_subclass(Own),
        lambda: torch.nn.Parameter(torch.ones(5)),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_tensor_is_reported(make: Callable[[], Any]) -> None:
    tensor = make()
    keys = keys_of(tensor)
    assert keys
    watch = StorageWatch(keys)
    assert watch.gone() == set()
    del tensor
    gc.collect()
    assert watch.gone() == keys


class Own(torch.Tensor):
    """A subclass that answers for nothing."""

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> Any:
        raise NotImplementedError


def test_no_tensor_has_a_weak_reference_from_it() -> None:
    one, other = numbers(10), numbers(20)
    watch = StorageWatch(keys_of(one, other))
    assert weakref.getweakrefcount(one) == 0
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]
    assert (one.numel(), other.numel()) == (20, 10)
    assert watch.gone() == set()
    del watch
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]
    assert (one.numel(), other.numel()) == (10, 20)


def test_the_tensors_that_a_proof_leaves_can_be_swapped(load: Load) -> None:
    program = load("TABLE = {}\nKEPT = ()")

    def leak() -> None:
        program.TABLE["a"] = numbers(10)
        program.KEPT = (numbers(20),)

    proven(("call", leak))
    mine = numbers(30)
    torch.utils.swap_tensors(program.KEPT[0], mine)  # type: ignore[no-untyped-call]
    assert (program.KEPT[0].numel(), mine.numel()) == (30, 20)
    program.KEPT = ()


def test_nothing_to_watch() -> None:
    assert StorageWatch(()).gone() == set()


# --- the words ------------------------------------------------------------------------------------------------------


def entry(key: str, size: int = 99, container: str = "m.TABLE", position: int = 0, ordered: str = "dict") -> Cut:
    place = Place(hash(container), container, key, size, position, f"{container}.clear()", True, ordered)
    return Cut(f"del {container}{key}", "", int, place=place)


def items(*positions: int, size: int = 99, ordered: str = "list") -> list[Cut]:
    return [entry(f"[{place}]", size, "m.ROWS", place, ordered) for place in positions]


def other_cut(action: str, *, is_code: bool = True) -> Cut:
    return Cut(action, "", int, is_code=is_code)


@pytest.mark.parametrize(
    ("cuts", "action"),
    [
        ([entry("['a']")], "del m.TABLE['a']"),
        ([entry("['a']", 1)], "del m.TABLE['a']"),
        ([other_cut("m.X = None")], "m.X = None"),
        ([entry("['a']"), entry("['b']", position=1)], "del m.TABLE['b'], m.TABLE['a']"),
        ([entry("['a']", 2), entry("['b']", 2, position=1)], "m.TABLE.clear()"),
        ([entry("['a']"), entry("['a']", 1, "m.OTHER")], "del m.TABLE['a']; del m.OTHER['a']"),
        ([entry("['a']"), other_cut("m.X = None")], "del m.TABLE['a']; m.X = None"),
        ([other_cut(f"m.{name} = None") for name in "ABC"], "m.A = None; m.B = None; m.C = None"),
        (
            [other_cut(f"m.NET.{name} = None") for name in "abcd"],
            "for name in ('a', 'b', 'c', 'd'): setattr(m.NET, name, None)",
        ),
        (
            [other_cut(f"m.{name}.a = None") for name in "ABCD"],
            "m.A.a = None; m.B.a = None; m.C.a = None; m.D.a = None",
        ),
        (
            [other_cut("m.NET.clear()"), *(other_cut(f"m.NET.{name} = None") for name in "abcd")],
            "m.NET.clear(); m.NET.a = None; m.NET.b = None; m.NET.c = None; m.NET.d = None",
        ),
        (items(1, 5, 3), "del m.ROWS[5], m.ROWS[3], m.ROWS[1]"),
        (items(*range(3, 20)), "del m.ROWS[3:20]"),
        (items(*range(80, 99), ordered="deque"), "[m.ROWS.pop() for _ in range(19)]"),
        ([entry(f"[{n}]", position=80 + n) for n in range(19)], "[m.TABLE.popitem() for _ in range(19)]"),
        (
            [other_cut(f"m.NET.layers[{place}].cache = None") for place in range(32)],
            "for i in reversed(range(0, 32)): m.NET.layers[i].cache = None",
        ),
        (
            [other_cut(f"m.NET[{place}].cache = None") for place in range(0, 32, 3)],
            "for i in (30, 27, 24, 21, 18, 15, 12, 9, 6, 3, 0): m.NET[i].cache = None",
        ),
    ],
)
def test_several_changes_are_named_as_one_action(cuts: list[Cut], action: str) -> None:
    assert named(cuts) == Wording(action)
    compile(action, "remedy", "exec")


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        (items(*range(0, 40, 2)), "delete 20 of the 99 entries of m.ROWS"),
        ([entry(f"[{n}]", position=n) for n in range(19)], "delete 19 of the 99 entries of m.TABLE"),
        ([other_cut(f"m.A{name} = None") for name in "abcdefghij"], "m.Aa = None, m.Ab = None, m.Ac = None and 7 more"),
        ([other_cut("discard the torch.Tensor from m.X", is_code=False)], "discard the torch.Tensor from m.X"),
        (
            [other_cut("m.A = None"), other_cut("discard the Thing from m.X", is_code=False)],
            "m.A = None, discard the Thing from m.X",
        ),
    ],
)
def test_what_has_no_code_of_a_bearable_length_is_words(cuts: list[Cut], words: str) -> None:
    assert named(cuts) == Wording(words, is_code=False)


def test_a_proof_leaves_the_leaks_as_they_were(load: Load) -> None:
    program = load("TABLE = {}")
    leaks, context = leaks_of(("call", functools.partial(program.TABLE.__setitem__, "a", numbers(10))))
    before = [copy.copy(leak.finding) for leak in leaks]
    prove(leaks, context)
    assert [leak.finding for leak in leaks] == before
    program.TABLE.clear()


REGISTRY = """import torch
import weakref
INFO = weakref.WeakKeyDictionary()
class Layer(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.weight.loader = self.load
    def load(self): ...
class Head(torch.nn.Module): ...
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head, self.own = Layer(torch.zeros(1000)), Head(), [self]
        INFO[self.head] = {"loader": self.embedding.load}
MODEL = None
"""


def test_what_is_garbage_only_after_other_garbage_has_died_comes_back_too(load: Load) -> None:
    """The registry's value dies with its key, in the first collection; the cycle that it held, in the second."""
    program = load(REGISTRY)

    def step() -> None:
        program.MODEL = program.Model()

    (finding,) = proven(("call", step))
    assert finding.remedy == Remedy(action=f"{program.__name__}.MODEL = None", returns_bytes=4000)

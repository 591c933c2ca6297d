"""Until the session ends nothing is changed that a later test may use, whoever leaked it; then remedies are proven."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

pytestmark = pytest.mark.nightly

LIBRARY = """
import functools
import torch


@functools.lru_cache
def table(key):
    return torch.ones(64)


@functools.lru_cache
def supports(method):
    return True


class Plain:
    def method(self):
        pass
"""

CACHES = """
import pytest
import torch
import library


@pytest.fixture(scope="module")
def warmed():
    # What belongs to the fixture: a table, and a module that nobody else holds.
    library.table("warm")
    library.supports(torch.nn.ReLU())


def test_warms_up(warmed):
    pass


def test_leaks(warmed):
    library.table(library.Plain().method)
    library.supports(library.Plain().method)


def test_relies_on_the_table(warmed):
    assert library.table.cache_info().currsize == 2
    assert library.supports.cache_info().currsize == 2
"""

FREEZES = """
import gc
import pytest
import torch

KEPT = []


@pytest.fixture(scope="module")
def engine():
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_leaks_beside_a_frozen_engine(engine):
    KEPT.append(torch.ones(10))


def test_relies_on_the_freeze(engine):
    assert gc.get_freeze_count() > 1000


def test_checks_in_the_middle(leakcheck, engine):
    KEPT.append(torch.ones(10))
    with pytest.raises(pytest.fail.Exception):
        leakcheck.check()
    assert gc.get_freeze_count() > 1000


def test_freezes_by_itself_and_checks(leakcheck):
    gc.unfreeze()
    gc.freeze()
    with pytest.raises(pytest.fail.Exception):
        leakcheck.check()
    assert gc.get_freeze_count() > 1000
    gc.unfreeze()
"""

GROUPS = """
import torch
import torch.distributed


def test_leaks_a_group(tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, world_size=1, rank=0)


def test_relies_on_the_group():
    torch.distributed.all_reduce(torch.ones(2))
"""


RETURNED = """
import functools
import pytest
import torch

STORE = {}
TWO = []


@functools.lru_cache
def warn_once(layer):
    return None


@pytest.fixture(scope="module")
def tokenizer():
    yield None
    STORE.clear()


def test_warns():
    warn_once(torch.nn.Linear(300, 400))


def test_clears():
    warn_once.cache_clear()


def test_stores():
    STORE["a"] = torch.ones(1 << 18)


def test_keeps_two():
    TWO.extend([torch.ones(1 << 18), torch.ones(1 << 19)])


def test_gives_back_one(tokenizer):
    TWO.pop()
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    files = {
        "library.py": LIBRARY,
        "test_1.py": CACHES,
        "test_2.py": FREEZES,
        "test_3.py": GROUPS,
        "test_4.py": RETURNED,
    }
    return run_inner(files)


@pytest.mark.parametrize(
    "test",
    [
        "test_1.py::test_relies_on_the_table",
        "test_2.py::test_relies_on_the_freeze",
        "test_3.py::test_relies_on_the_group",
    ],
)
def test_what_a_later_test_needs_is_there(run: InnerRun, test: str) -> None:
    (call,) = [phase for phase in run.phases[test] if phase.when == "call"]
    assert call.outcome == "passed", call.message


def test_a_check_unfreezes_nothing(run: InnerRun) -> None:
    for test in ("test_checks_in_the_middle", "test_freezes_by_itself_and_checks"):
        assert "AssertionError" not in run.message(f"test_2.py::{test}")


@pytest.mark.parametrize(
    ("test", "resource", "action"),
    [
        ("test_1.py::test_leaks", "tensors", "library.table.cache_clear()"),
        ("test_1.py::test_leaks", "lru-cache", "library.supports.cache_clear()"),
        ("test_3.py::test_leaks_a_group", "process-groups", "torch.distributed.destroy_process_group()"),
    ],
)
def test_the_remedy_is_proven_at_the_end(run: InnerRun, test: str, resource: str, action: str) -> None:
    (found,) = [found for found in run.subject(test).findings if found.resource == resource]
    assert found.remedy is not None
    assert found.remedy.action == action


def test_what_a_wider_fixture_put_into_a_cache_is_no_tests_leak(run: InnerRun) -> None:
    assert run.is_clean("test_1.py::test_warms_up")
    table, supports = run.subject("test_1.py::test_leaks").findings
    # What one cache keeps is one finding: here a tensor, and the object in its key.
    assert [(part.resource, part.count) for part in table.parts] == [("lru-cache", 1)]
    assert (supports.resource, supports.count) == ("lru-cache", 1)


@pytest.mark.parametrize(
    ("test", "when", "change"),
    [
        ("test_warns", "in test_4.py::test_clears", "test_4.warn_once.cache_clear()"),
        ("test_stores", "when module fixture 'tokenizer' ended", "del test_4.STORE['a']"),
    ],
)
def test_what_the_program_has_given_back_itself_is_told_with_when(
    run: InnerRun, test: str, when: str, change: str
) -> None:
    (finding,) = run.subject(f"test_4.py::{test}").findings
    assert finding.message.endswith(f"; came back {when}")
    assert (finding.remedy, finding.tried, finding.advice) == (None, (), f"in the test itself: {change}")


def test_what_has_come_back_in_part_is_tried_for_the_rest(run: InnerRun) -> None:
    (finding,) = run.subject("test_4.py::test_keeps_two").findings
    assert "came back" not in finding.message
    assert finding.remedy is not None
    assert (finding.bytes, finding.remedy.returns_bytes) == (3 << 20, 1 << 20)


HELD = """
import collections
import contextvars

BY_NAME, OTHERS, ENGINES, SIZED, NEW, CYCLIC, GROWING = {}, {}, {}, {}, {}, {}, []
ONE = None
ITEMS, TWO = [None], collections.deque(maxlen=2)
VALUE = contextvars.ContextVar("value")
"""

SLOTS = """
import threading
import held
import pytest
import torch


class Manager:
    last = None

    def __init__(self, size=20):
        self.table = torch.zeros(size)


class Engine(Manager):
    def __init__(self):
        super().__init__()
        self.ended = threading.Event()
        threading.Thread(target=self.ended.wait, daemon=True).start()


@pytest.mark.parametrize("turn", range(3))
def test_slots(turn):
    held.BY_NAME["last"], held.ONE, Manager.last, held.ITEMS[0] = Manager(21), Manager(22), Manager(23), Manager(24)
    held.VALUE.set(Manager(25))


# What was there before goes only with a collection; arrays, their buffers and a class of its own lie on the way.
@pytest.mark.parametrize("turn", range(4))
def test_cycle(turn):
    manager = type("Own", (Manager,), {})(26)
    manager.itself, manager.buffer = manager, memoryview(manager.table.numpy())
    del manager.table
    held.CYCLIC["last"] = manager


@pytest.mark.parametrize("turn", range(3))
def test_growing(turn):
    held.GROWING.append(Manager(27))


@pytest.mark.parametrize("turn", range(4))
def test_queue(turn):
    held.TWO.append(Manager())


@pytest.mark.parametrize("size", [20, 10, 20, 30, 30])
def test_size(size):
    held.SIZED["last"] = Manager(size)


@pytest.mark.parametrize("turn", range(2))
def test_engine(turn):
    held.ENGINES["last"] = Engine()


@pytest.mark.parametrize("turn", range(2))
def test_another_key(turn):
    held.NEW[f"key {turn}"] = Manager()


@pytest.mark.parametrize("turn", range(3))
def test_cleared_between(turn):
    held.OTHERS.clear()
    if turn != 1:
        held.OTHERS["last"] = Manager()
"""

SLOTS_ELSEWHERE = """
import pytest
import test_slots as slots


@pytest.mark.parametrize("turn", range(2))
def test_elsewhere(turn):
    slots.held.BY_NAME["last"] = slots.Manager(21)
"""


SLOT_FILES = {"held.py": HELD, "test_slots.py": SLOTS, "test_slots_elsewhere.py": SLOTS_ELSEWHERE}


@pytest.fixture(scope="module")
def slots(run_inner: RunInner) -> InnerRun:
    return run_inner(SLOT_FILES)


@pytest.fixture(scope="module")
def slots_without_remedies(run_inner: RunInner) -> InnerRun:
    return run_inner(SLOT_FILES, "--leakcheck-remedies", "off")


def red(run: InnerRun, name: str) -> list[str]:
    """The parameters with which a test left something that is reported."""
    assert run.report is not None
    names = [subject.id for subject in run.report.subjects if subject.findings and f"::{name}[" in subject.id]
    return [each.rpartition("[")[2].rstrip("]") for each in names]


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("test_slots", ["0"]),
        ("test_cycle", ["0"]),
        ("test_growing", ["0", "1", "2"]),
        # Until it is full it grows.
        ("test_queue", ["0", "1"]),
        ("test_size", ["20_0", "30_0"]),
        # Each of these leaves a thread.
        ("test_engine", ["0", "1"]),
        ("test_another_key", ["0", "1"]),
        ("test_cleared_between", ["0", "2"]),
        ("test_elsewhere", ["0"]),
    ],
)
def test_what_only_replaces_what_an_earlier_test_left_is_told_once_in_a_module(
    slots: InnerRun, slots_without_remedies: InnerRun, name: str, turns: list[str]
) -> None:
    assert red(slots, name) == turns
    assert red(slots_without_remedies, name) == turns


def test_the_first_says_in_how_many_tests_it_was_replaced_and_what_gives_back_the_last(slots: InnerRun) -> None:
    findings = slots.subject("test_slots.py::test_slots[0]").findings
    assert len(findings) == 5
    told = {finding.holder: finding for finding in findings}
    item = told["held.ITEMS[0].table"]
    assert item.message.endswith("; del held.ITEMS[0] returns 96 B; replaced in 2 later tests")
    assert item.trend == "bounded"
    # In the other module it was told again, and stands for itself.
    assert "; replaced in 2 later tests" in told["held.BY_NAME['last'].table"].message
    (elsewhere,) = slots.subject("test_slots_elsewhere.py::test_elsewhere[0]").findings
    assert elsewhere.message.endswith("; replaced in 1 later test")

"""Proof under `pytest --leakcheck`: what gives a leak back is measured when no test follows any more."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from lowtide.reports.schema import Finding, Remedy

pytestmark = pytest.mark.nightly

if TYPE_CHECKING:
    from tests.pytest_plugin.conftest import InnerRun, RunInner

MAKE = """
import torch


def make(size):
    return torch.zeros(size, dtype=torch.uint8)
"""

ENGINE = f"""
import functools
import threading
from collections import OrderedDict, deque

{MAKE}


class Config:
    def __init__(self, name):
        self.name = name
        self.table = ()


class Model:
    def __init__(self, size):
        self.weight = make(size)

    def forward(self):
        return self.weight


class Noisy(Model):
    def __del__(self):
        raise RuntimeError("in the end")


class Registry:
    shared = None
    limits = (1, 2)

    def __init__(self):
        self.held = None
        self.mask = (0, 1)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.mask = (0,)


def registered(function):
    return Config(function.__name__)


@registered
def kernel(): ...


@functools.lru_cache
def supports(method):
    return True


@functools.lru_cache
def tokenizer(name):
    return {{"table": torch.nn.Parameter(make(1021), requires_grad=False)}}


def serve():
    while True:
        request = yield


ROWS = ["old"]
NOISY, CALLBACKS = [], []
TABLE = OrderedDict(old=["old"])
SLOTS = [None, None, None]
STATE = {{"model": None, "tokenizer": None}}
ENGINE = None
TOKENIZERS = None
CURRENT = Config("old")
REGISTRY = Registry()
NETWORK = Network()
LOCAL = threading.local()
LOCAL.held = None
QUEUE = deque(["old"])
SERVER = serve()
next(SERVER)
vars(CURRENT)
vars(REGISTRY)


def build():
    global ENGINE
    if ENGINE is None:
        ENGINE = Model(1005)
    return ENGINE


def state():
    global TOKENIZERS
    if TOKENIZERS is None:
        TOKENIZERS = {{"large": make(1020)}}
    return TOKENIZERS["large"]


READY = False


def rope():
    global READY, ROPE
    if not READY:
        ROPE, READY = make(1022), True
    return ROPE


def start():
    global STARTED
    STARTED = Model(1004)


def step(batch):
    step.last = batch
    return step.count


step.count = 1
step.last = None
"""


@dataclass(frozen=True)
class Proof:
    """A leak, what the tests that follow find of it, and what is left when its remedy was tried.

    Attributes:
        leak: the first test's body.
        size: bytes that it leaves.
        still: what the second one finds.
        remedy: the action that gives it back.
        after: what is true of the program when that was tried.
        holder: part of the holder.
    """

    leak: str
    size: int
    still: str
    remedy: str
    after: str
    holder: str = ""


PROOFS: Mapping[str, Proof] = {
    "bound_method_in_an_lru_cache": Proof(
        "engine.supports(engine.Model(1001).forward)",
        1001,
        "engine.supports.cache_info().currsize == 1",
        "engine.supports.cache_clear()",
        "engine.supports.cache_info().currsize == 0",
        "engine.supports (lru_cache key)",
    ),
    "dict_in_an_lru_cache": Proof(
        "engine.tokenizer('small')",
        1021,
        "engine.tokenizer('small')['table'].numel() == 1021",
        "engine.tokenizer.cache_clear()",
        "engine.tokenizer.cache_info().currsize == 0",
        "engine.tokenizer (lru_cache value)",
    ),
    "item_of_an_old_list": Proof(
        "engine.ROWS.append(engine.make(1002))",
        1002,
        "engine.ROWS[1].numel() == 1002",
        "del engine.ROWS[1]",
        "engine.ROWS == ['old']",
    ),
    "entry_of_an_old_dict": Proof(
        "engine.TABLE['new'] = engine.make(1003)",
        1003,
        "engine.TABLE['new'].numel() == 1003",
        "del engine.TABLE['new']",
        "dict(engine.TABLE) == {'old': ['old']}",
    ),
    "item_of_an_old_deque": Proof(
        "engine.QUEUE.append(engine.make(1013))",
        1013,
        "engine.QUEUE[1].numel() == 1013",
        "del engine.QUEUE[1]",
        "list(engine.QUEUE) == ['old']",
    ),
    "object_whose_end_raises": Proof(
        "engine.NOISY.append(engine.Noisy(1019))",
        1019,
        "engine.NOISY[0].weight.numel() == 1019",
        "del engine.NOISY[0]",
        "engine.NOISY == []",
    ),
    "new_global": Proof(
        "engine.start()",
        1004,
        "engine.STARTED.weight.numel() == 1004",
        "engine.STARTED = None",
        "engine.STARTED is None",
    ),
    "global_that_begins_as_none": Proof(
        "engine.build()",
        1005,
        "engine.build().forward().numel() == 1005",
        "engine.ENGINE = None",
        "engine.ENGINE is None",
    ),
    "dict_at_a_global_that_begins_as_none": Proof(
        "engine.state()",
        1020,
        "engine.state().numel() == 1020",
        "del engine.TOKENIZERS['large']",
        "engine.TOKENIZERS == {}",
    ),
    "value_with_a_flag_beside_it": Proof(
        "engine.rope()",
        1022,
        "engine.rope().numel() == 1022",
        "engine.ROPE = None",
        "engine.ROPE is None",
    ),
    "old_global_that_begins_otherwise": Proof(
        "engine.CURRENT = engine.Config('new')\nengine.CURRENT.table = engine.make(1006)",
        1006,
        "engine.CURRENT.table.numel() == 1006",
        "engine.CURRENT = None",
        "engine.CURRENT is None",
        "engine.CURRENT.table",
    ),
    "attribute_that_begins_as_none": Proof(
        "engine.REGISTRY.held = engine.make(1007)",
        1007,
        "engine.REGISTRY.held.numel() == 1007",
        "engine.REGISTRY.held = None",
        "engine.REGISTRY.held is None",
    ),
    "attribute_that_begins_otherwise": Proof(
        "engine.REGISTRY.mask = engine.make(1008)",
        1008,
        "engine.REGISTRY.mask.numel() == 1008",
        "engine.REGISTRY.mask = None",
        "engine.REGISTRY.mask is None",
    ),
    "class_attribute_that_begins_as_none": Proof(
        "engine.Registry.shared = engine.make(1009)",
        1009,
        "engine.Registry.shared.numel() == 1009",
        "engine.Registry.shared = None",
        "engine.Registry.shared is None",
    ),
    "class_attribute_that_begins_otherwise": Proof(
        "engine.Registry.limits = engine.make(1010)",
        1010,
        "engine.Registry.limits.numel() == 1010",
        "engine.Registry.limits = None",
        "engine.Registry.limits is None",
    ),
    "attribute_of_a_torch_module": Proof(
        "engine.NETWORK.mask = (engine.make(1011),)",
        1011,
        "engine.NETWORK.mask[0].numel() == 1011",
        "engine.NETWORK.mask = None",
        "engine.NETWORK.mask is None",
    ),
    "gradient_of_a_torch_module": Proof(
        "engine.NETWORK.linear.weight.sum().backward()\nassert engine.NETWORK.linear.weight.grad is not None",
        64,
        "engine.NETWORK.linear.weight.grad is not None",
        "engine.NETWORK.linear.weight.grad = None",
        "engine.NETWORK.linear.weight.grad is None",
    ),
    "closure_in_a_list": Proof(
        "buffer = engine.make(1023)\nengine.CALLBACKS.append(lambda: buffer)",
        1023,
        "engine.CALLBACKS[0]().numel() == 1023",
        "del engine.CALLBACKS[0]",
        "engine.CALLBACKS == []",
    ),
    "slot_of_a_list": Proof(
        "engine.SLOTS[1] = engine.make(1012)",
        1012,
        "engine.SLOTS[1].numel() == 1012",
        "engine.SLOTS[1] = None",
        "engine.SLOTS == [None, None, None]",
    ),
    "key_of_a_dict_that_begins_as_none": Proof(
        "engine.STATE['model'] = engine.make(1014)",
        1014,
        "engine.STATE['model'].numel() == 1014",
        "engine.STATE['model'] = None",
        "engine.STATE == {'model': None, 'tokenizer': None}",
    ),
    "attribute_of_a_function": Proof(
        "assert engine.step(engine.make(1015)) == 1",
        1015,
        "engine.step.last.numel() == 1015",
        "engine.step.last = None",
        "engine.step.last is None",
    ),
    "old_generator": Proof(
        "engine.SERVER.send(engine.make(1016))",
        1016,
        "engine.SERVER.gi_frame is not None",
        "engine.SERVER.close()",
        "engine.SERVER.gi_frame is None",
        "engine.SERVER",
    ),
    "thread_local": Proof(
        "engine.LOCAL.held = engine.make(1017)",
        1017,
        "engine.LOCAL.held.numel() == 1017",
        "engine.LOCAL.held = None",
        "engine.LOCAL.held is None",
    ),
    "what_a_module_that_the_test_imports_has_decorated": Proof(
        "import lazy\nlazy.kernel.table = lazy.make(1018)",
        1018,
        "__import__('lazy').kernel.table.numel() == 1018",
        "lazy.kernel = None",
        "__import__('lazy').kernel is None",
        "lazy.kernel",
    ),
}

TESTS = """
import pytest
import engine

STILL = {still}


@pytest.mark.parametrize("name", STILL)
def test_still_there(name):
    assert eval(STILL[name])


"""

AT_THE_END = """
import json
import pathlib

AFTER = {after}


def pytest_unconfigure():
    import engine

    told = {{name: bool(eval(code, {{'engine': engine}})) for name, code in AFTER.items()}}
    pathlib.Path("after.json").write_text(json.dumps(told))
"""


def leak(name: str, proof: Proof) -> str:
    return f"def test_{name}():\n{textwrap.indent(proof.leak, '    ')}\n\n\n"


@pytest.fixture(scope="module")
def proofs(run_inner: RunInner) -> InnerRun:
    head, _, later = TESTS.format(still={name: proof.still for name, proof in PROOFS.items()}).partition("@pytest")
    tests = head + "".join(leak(name, proof) for name, proof in PROOFS.items()) + "@pytest" + later
    conftest = AT_THE_END.format(after={name: proof.after for name, proof in PROOFS.items()})
    return run_inner({"test_proofs.py": tests, "engine.py": ENGINE, "lazy.py": ENGINE, "conftest.py": conftest})


def finding_of(run: InnerRun, test: str) -> Finding:
    (found,) = run.subject(test).findings
    return found


@pytest.mark.parametrize("name", PROOFS)
def test_each_leak_is_found_with_its_bytes_and_its_holder(proofs: InnerRun, name: str) -> None:
    found = finding_of(proofs, f"test_proofs.py::test_{name}")
    assert (found.resource, found.bytes, found.stage) == ("tensors", PROOFS[name].size, "call")
    assert PROOFS[name].holder in (found.holder or "")


@pytest.mark.parametrize("name", PROOFS)
def test_what_gives_it_back_was_measured(proofs: InnerRun, name: str) -> None:
    found, proof = finding_of(proofs, f"test_proofs.py::test_{name}"), PROOFS[name]
    remedy = Remedy(action=proof.remedy, returns_bytes=proof.size)
    assert found.remedy == remedy
    # What was raised stands with the attempt.
    assert [item.action.partition(" (raised ")[0] for item in found.tried] == [proof.remedy]
    assert len(found.changed) == 1


@pytest.mark.parametrize("name", PROOFS)
def test_the_next_tests_find_everything_as_it_was(proofs: InnerRun, name: str) -> None:
    again = f"test_proofs.py::test_still_there[{name}]"
    assert proofs.counted(again) == "passed", proofs.message(again)


@pytest.mark.parametrize("name", PROOFS)
def test_what_it_changed_is_what_the_remedy_says(proofs: InnerRun, name: str) -> None:
    assert json.loads((proofs.folder / "after.json").read_text())[name]


@pytest.mark.parametrize("name", PROOFS)
def test_the_remedy_stands_with_the_failure(proofs: InnerRun, name: str) -> None:
    test, proof = f"test_proofs.py::test_{name}", PROOFS[name]
    assert proofs.counted(test) == "failed"
    size = f"{proof.size} B"
    assert f"remedy: {proof.remedy} gives back {size} of {size}" in proofs.out


def test_each_edge_is_reported_with_what_it_retains(proofs: InnerRun) -> None:
    found = finding_of(proofs, "test_proofs.py::test_old_global_that_begins_otherwise")
    assert [(hop.edge, hop.suspect, hop.retains_bytes) for hop in found.path] == [
        ("engine", False, None),
        (".CURRENT", True, 1006),
        (".table", True, 1006),
    ]


def test_nothing_is_said_of_where_it_was_allocated_on_the_host(proofs: InnerRun) -> None:
    assert proofs.report is not None
    assert {finding.allocated_at for subject in proofs.report.subjects for finding in subject.findings} == {()}


# --- off, in the middle, and over the turns of a stage ----------------------------------------------------------------

KEPT = f"""
import functools

{MAKE}

ROWS, LATEST, TABLE, LAYERS = [], [], {{}}, {{}}


@functools.lru_cache
def cached(size):
    return torch.nn.Parameter(make(size), requires_grad=False)
"""

OFF = """
import kept


def test_leaks():
    kept.ROWS.append(kept.make(2001))
    kept.TABLE["a"] = kept.make(2002)
    kept.cached(2003)


def test_finds_everything_still_there():
    assert kept.ROWS.pop().numel() == 2001
    assert kept.TABLE.pop("a").numel() == 2002
    assert kept.cached.cache_info().currsize == 1
    kept.cached.cache_clear()
"""

STAGES = """
import kept
import lowtide


def test_check_in_the_middle(leakcheck):
    kept.ROWS.append(kept.make(3001))
    kept.TABLE["a"] = kept.make(3002)
    kept.cached(3003)
    for _ in range(2):
        found = {finding.bytes: finding for finding in leakcheck.check()}
        assert set(found) == {3001, 3002, 3003}
        assert [(finding.remedy, finding.tried, finding.changed) for finding in found.values()] == [(None, (), ())] * 3
        assert [tensor.numel() for tensor in kept.ROWS] == [3001]
        assert kept.TABLE["a"].numel() == 3002
        assert kept.cached.cache_info().currsize == 1
    kept.ROWS.clear()
    kept.TABLE.clear()
    kept.cached.cache_clear()


def test_every_turn(leakcheck):
    for _ in range(3):
        with leakcheck.stage("wake"):
            kept.ROWS.append(kept.make(100))


def test_every_turn_of_an_engines_own_stage():
    for _ in range(4):
        with lowtide.stage("wake"):
            kept.ROWS.append(kept.make(100))


def test_the_first_turn_only(leakcheck):
    for turn in range(3):
        with leakcheck.stage("wake"):
            if turn == 0:
                kept.ROWS.append(kept.make(100))


def test_replaced_each_turn(leakcheck):
    for _ in range(3):
        with leakcheck.stage("wake"):
            kept.TABLE["x"] = kept.make(100)


def test_some_turns(leakcheck):
    for turn in range(4):
        with leakcheck.stage("wake"):
            if turn in (0, 2):
                kept.ROWS.append(kept.make(100))


def test_a_cache_of_two(leakcheck):
    for turn in range(5):
        with leakcheck.stage("wake"):
            kept.LATEST.append(kept.make(100))
            del kept.LATEST[:-2]


def test_two_turns(leakcheck):
    for _ in range(2):
        with leakcheck.stage("wake"):
            kept.ROWS.append(kept.make(100))


def test_turns_in_another_stage(leakcheck):
    with leakcheck.stage("outer"):
        for _ in range(3):
            with leakcheck.stage("wake"):
                kept.ROWS.append(kept.make(100))
        kept.TABLE["outer"] = kept.make(50)


def test_each_test_counts_from_one(leakcheck):
    with leakcheck.stage("wake"):
        kept.ROWS.append(kept.make(100))


def test_layers():
    for layer in range(5):
        kept.LAYERS[f"layer{layer}"] = kept.make(10 + layer)


def test_two_stories():
    kept.TABLE["story"] = kept.make(10)
    kept.ROWS.append(kept.make(20))
"""


@pytest.fixture(scope="module")
def off(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_off.py": OFF, "kept.py": KEPT}, "--leakcheck-remedies=off", "--leakcheck-stacks=off")


def test_switched_off_nothing_is_tried(off: InnerRun) -> None:
    found = off.subject("test_off.py::test_leaks").findings
    assert sorted(finding.bytes for finding in found) == [2001, 2002, 2003]
    assert [(finding.remedy, finding.tried, finding.changed) for finding in found] == [(None, (), ())] * 3


def test_switched_off_nothing_is_changed(off: InnerRun) -> None:
    test = "test_off.py::test_finds_everything_still_there"
    assert off.counted(test) == "passed", off.message(test)
    assert off.is_clean(test)


def test_without_stacks_nothing_is_said_of_where_it_was_allocated(off: InnerRun) -> None:
    assert [finding.allocated_at for finding in off.subject("test_off.py::test_leaks").findings] == [()] * 3


@pytest.fixture(scope="module")
def stages(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_stages.py": STAGES, "kept.py": KEPT}, "--leakcheck-action=warn")


def test_a_check_in_the_middle_tries_nothing_and_changes_nothing(stages: InnerRun) -> None:
    test = "test_stages.py::test_check_in_the_middle"
    assert stages.counted(test) == "passed", stages.message(test)
    assert stages.is_clean(test)


@pytest.mark.parametrize(
    ("test", "trend", "count"),
    [
        ("every_turn", "growth", 3),
        ("every_turn_of_an_engines_own_stage", "growth", 4),
        ("the_first_turn_only", "residue", 1),
        ("replaced_each_turn", "bounded", 1),
        ("some_turns", "bounded", 2),
        ("a_cache_of_two", "bounded", 2),
        ("two_turns", None, 2),
        ("each_test_counts_from_one", None, 1),
    ],
)
def test_a_stage_that_runs_again_and_again_has_a_trend(
    stages: InnerRun, test: str, trend: str | None, count: int
) -> None:
    found = finding_of(stages, f"test_stages.py::test_{test}")
    assert (found.stage, found.trend, found.count, found.bytes) == ("wake", trend, count, 100 * count)
    assert found.remedy is not None
    assert found.remedy.returns_bytes == 100 * count


def test_the_turns_of_a_stage_inside_another_one_count_by_themselves(stages: InnerRun) -> None:
    subject = stages.subject("test_stages.py::test_turns_in_another_stage")
    found = {finding.stage: (finding.trend, finding.bytes) for finding in subject.findings}
    assert found == {"outer/wake": ("growth", 300), "outer": (None, 50)}


def test_findings_of_one_fingerprint_are_one_with_a_count(stages: InnerRun) -> None:
    found = finding_of(stages, "test_stages.py::test_layers")
    assert (found.count, found.bytes) == (5, 10 + 11 + 12 + 13 + 14)
    assert found.holder == "kept.LAYERS"
    assert found.remedy == Remedy(action="kept.LAYERS.clear()", returns_bytes=60)


def test_findings_of_two_fingerprints_are_two(stages: InnerRun) -> None:
    found = stages.subject("test_stages.py::test_two_stories").findings
    assert sorted((finding.count, finding.bytes) for finding in found) == [(1, 10), (1, 20)]
    assert len({finding.fingerprint for finding in found}) == 2


# --- where it was allocated, and what stays the same ------------------------------------------------------------------

STACKS = """
import pytest

import kept


def allocate(size):
    return kept.make(size)


def test_list():
    kept.ROWS.append(allocate(10))


def test_deep():
    kept.TABLE["deep"] = {"layers": [(1, allocate(20)), (2, allocate(21))]}


def test_cycle_through_native_code():
    weight = kept.torch.ones(10, requires_grad=True)
    weight.loss = (weight * 2).sum()


def test_two_places():
    kept.TABLE["first"] = allocate(40)
    kept.TABLE["second"] = kept.torch.ones(41, dtype=kept.torch.uint8)


@pytest.mark.parametrize("size", [50, 51])
def test_parameters(size):
    kept.cached(size)
"""

REVERSED = """
def pytest_collection_modifyitems(items):
    items.reverse()
"""


@pytest.fixture(scope="module")
def with_stacks(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_stacks.py": STACKS, "kept.py": KEPT}, "--leakcheck-stacks=all")


@pytest.fixture(scope="module")
def reversed_elsewhere(run_inner: RunInner) -> InnerRun:
    files = {"test_stacks.py": STACKS, "kept.py": KEPT, "conftest.py": REVERSED}
    return run_inner(files, "--leakcheck-stacks=all")


def functions(finding: Finding) -> list[str]:
    return [frame.function for frame in finding.allocated_at]


def test_all_stacks_name_the_function_that_allocated(with_stacks: InnerRun) -> None:
    found = finding_of(with_stacks, "test_stacks.py::test_list")
    assert functions(found) == ["make", "allocate", "test_list"]
    assert found.allocated_at[0].file.endswith("/kept.py")
    assert found.allocated_at[1].file.endswith("/test_stacks.py")
    lines = STACKS.splitlines()
    assert lines[found.allocated_at[1].line - 1].strip() == "return kept.make(size)"
    assert lines[found.allocated_at[2].line - 1].strip() == "kept.ROWS.append(allocate(10))"


def test_the_stack_stands_with_the_failure(with_stacks: InnerRun) -> None:
    text = " ".join(phase.text for phase in with_stacks.phases["test_stacks.py::test_list"])
    assert "allocated in make, " in text
    assert "/kept.py:" in text


def test_each_finding_has_its_own_stack(with_stacks: InnerRun) -> None:
    found = with_stacks.subject("test_stacks.py::test_two_places").findings
    assert {finding.bytes: functions(finding) for finding in found} == {
        40: ["make", "allocate", "test_two_places"],
        41: ["test_two_places"],
    }


def marks(run: InnerRun) -> dict[str, list[tuple[int, str]]]:
    assert run.report is not None
    return {
        subject.id: sorted((finding.bytes, finding.fingerprint) for finding in subject.findings)
        for subject in run.report.subjects
    }


def test_fingerprints_are_the_same_in_another_folder_and_another_order(
    with_stacks: InnerRun, reversed_elsewhere: InnerRun
) -> None:
    assert with_stacks.folder != reversed_elsewhere.folder
    assert list(with_stacks.phases) == list(reversed_elsewhere.phases)[::-1]
    one, other = marks(with_stacks), marks(reversed_elsewhere)
    assert all(one.values())
    assert one == other


def test_the_same_leak_in_two_tests_has_one_fingerprint(with_stacks: InnerRun) -> None:
    found = marks(with_stacks)
    (first,), (second,) = found["test_stacks.py::test_parameters[50]"], found["test_stacks.py::test_parameters[51]"]
    assert first[1] == second[1]


def test_different_leaks_have_different_fingerprints(with_stacks: InnerRun) -> None:
    found = [mark for name, reported in marks(with_stacks).items() if "[51]" not in name for _, mark in reported]
    assert len(found) == len(set(found))


def test_the_order_does_not_change_what_gives_it_back(with_stacks: InnerRun, reversed_elsewhere: InnerRun) -> None:
    def remedies(run: InnerRun) -> dict[str, list[Remedy | None]]:
        assert run.report is not None
        return {subject.id: [finding.remedy for finding in subject.findings] for subject in run.report.subjects}

    assert remedies(with_stacks) == remedies(reversed_elsewhere)


# --- what is not tried ------------------------------------------------------------------------------------------------

NOT_TRIED = """
import pathlib

import pytest
import kept


def test_known():
    kept.ROWS.append(kept.make(10))


@pytest.mark.no_leakcheck(reason="it is not judged")
def test_not_judged():
    kept.TABLE["a"] = kept.make(20)


@pytest.mark.xfail(reason="it leaks", strict=True)
def test_expected():
    kept.LAYERS["a"] = kept.make(30)


def test_given_back_later():
    kept.LATEST.append(kept.make(40))


def test_gives_it_back():
    kept.LATEST.clear()


def test_tried():
    kept.cached(50)
"""

LEFT = """
import json
import pathlib


def pytest_unconfigure(config):
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import kept

        left = [len(kept.ROWS), len(kept.TABLE), kept.cached.cache_info().currsize]
        pathlib.Path(__file__).with_name("left.json").write_text(json.dumps(left))
"""

KNOWN = """
[[suppressions]]
path = "kept.ROWS*"
reason = "it is known"
"""


@pytest.fixture(scope="module", params=["here", "in a worker"])
def not_tried(run_inner: RunInner, request: pytest.FixtureRequest) -> InnerRun:
    files = {"test_not_tried.py": NOT_TRIED, "kept.py": KEPT, "conftest.py": LEFT, "lowtide.toml": KNOWN}
    if request.param == "here":
        return run_inner(files)
    pytest.importorskip("xdist")
    return run_inner(files, "-n", "1", using=("xdist",))


def test_what_is_known_or_not_judged_stays_as_it_is(not_tried: InnerRun) -> None:
    assert json.loads((not_tried.folder / "left.json").read_text()) == [1, 1, 0], not_tried.out
    known = finding_of(not_tried, "test_not_tried.py::test_known")
    assert known.suppressed_by is not None
    assert (known.remedy, known.tried, known.changed) == (None, (), ())


def test_what_came_back_before_the_end_has_no_remedy(not_tried: InnerRun) -> None:
    found = finding_of(not_tried, "test_not_tried.py::test_given_back_later")
    assert (found.bytes, found.remedy, found.tried) == (40, None, ())


BREAKS = """
from lowtide.leakcheck.watching.watch import Watch


def prove(self, each):
    raise OSError("no luck")


Watch.prove = prove
"""


@pytest.mark.parametrize("where", ["here", "in a worker"])
def test_that_nothing_could_be_tried_is_reported_and_the_leaks_are_too(run_inner: RunInner, where: str) -> None:
    files = {
        "test_kept.py": "import kept\n\ndef test_leak():\n    kept.cached(50)\n",
        "kept.py": KEPT,
        "conftest.py": BREAKS,
    }
    args, using = ([], []) if where == "here" else (["-n", "1"], ["xdist"])
    run = run_inner(files, *args, using=using)
    assert finding_of(run, "test_kept.py::test_leak").bytes == 50
    said = run.subject("the end of the session")
    assert (said.outcome, "OSError: no luck" in said.reason) == ("error", True)
    assert "could not try what gives the leaks back: OSError: no luck" in run.out
    assert run.code == 1


def test_what_was_tried_is_in_the_report_and_in_what_pytest_shows(not_tried: InnerRun) -> None:
    remedy = Remedy(action="kept.cached.cache_clear()", returns_bytes=50)
    assert finding_of(not_tried, "test_not_tried.py::test_tried").remedy == remedy
    assert "remedy: kept.cached.cache_clear() gives back 50 B of 50 B" in not_tried.out

"""What grows with each test, and no single test shows: in which container, or in which part of the process's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytestmark = pytest.mark.nightly

if TYPE_CHECKING:
    from lowtide.reports.schema import Finding
    from tests.pytest_plugin.conftest import InnerRun, RunInner

KEEPER = """
    import collections
    import ctypes
    import functools
    import gc

    import pytest

    TIMES = pytest.mark.parametrize("turn", range(16))
    REQUESTS = {}
    NAMES = []
    LAST = collections.deque(maxlen=64)
    FROZEN = []

    class Answer:
        def __init__(self, turn):
            self.text = f"{turn}" * 2000

    class Server:
        def __init__(self):
            self.answers = set()
            self.cached = {}
            self.native = []

        def encode(self):
            self.native.append(take(1 << 20))

        def close(self):
            for address in self.native:
                C.free(ctypes.c_void_p(address))

    C = ctypes.CDLL(None)
    C.malloc.restype = ctypes.c_void_p

    def take(size):
        address = C.malloc(size)
        ctypes.memset(address, 1, size)
        return address

    @functools.cache
    def compiled(turn):
        return bytes(3000)

    @functools.lru_cache(maxsize=64)
    def remembered(turn):
        return bytes(3000)
"""

CONTAINERS = """
    import gc

    import pytest
    from keeper import FROZEN, LAST, NAMES, REQUESTS, TIMES, Answer, Server, compiled, remembered

    @pytest.fixture(scope="module")
    def server():
        made = Server()
        yield made
        made.answers.clear()

    @TIMES
    def test_keeps(server, turn):
        REQUESTS[f"request {turn}"] = bytes(2000 + turn)
        server.answers.add(Answer(turn))
        compiled(turn)
        FROZEN.append([Answer(turn), Answer(turn)])
        # None of these is growth: two are bounded, one is full, and names are no memory to speak of.
        LAST.append(bytes(4000))
        remembered(turn)
        server.cached[turn % 5] = Answer(turn)
        NAMES.append(f"test {turn}")
"""

FREEZES = """
    import gc
    import pytest

    @pytest.fixture(scope="session", autouse=True)
    def frozen():
        import keeper
        gc.collect()
        gc.freeze()
        yield
        gc.unfreeze()
"""

NATIVE = """
    from keeper import TIMES, take

    @TIMES
    def test_takes(turn):
        take(1 << 20)
"""

REFERENCES = """
    import ctypes
    from keeper import TIMES

    @TIMES
    def test_refers(turn):
        for number in range(4000):
            # A reference too many, as C takes it that forgets to give it back.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(bytes(200 + number % 50)))
"""

TEXT = """
    from keeper import TIMES

    class Log:
        lines, last = "", ""
        header = "-" * (4 << 20)

    @TIMES
    def test_writes(turn):
        Log.lines += chr(ord("a") + turn) * (1 << 20)
        Log.last = chr(ord("a") + turn) * (2 << 20)
"""

HELD = """
    import pytest
    from keeper import TIMES, Server

    @pytest.fixture(scope="module")
    def tokenizer():
        made = Server()
        yield made
        made.close()

    @TIMES
    def test_encodes(tokenizer, turn):
        tokenizer.encode()
        tokenizer.native[:-1] = [*tokenizer.native[:-1]]
"""

CLEAN = """
    import ctypes
    import pytest
    from keeper import C, TIMES, Answer, take

    KEPT = {}

    @TIMES
    def test_fills(turn):
        if turn < 6:
            take(1 << 20)

    @TIMES
    def test_gives_back(turn):
        C.free(ctypes.c_void_p(take(1 << 20)))

    @TIMES
    def test_fragments(turn):
        parts = [take(60_000) for _ in range(40)]
        KEPT[0] = bytes(100)
        for address in parts:
            C.free(ctypes.c_void_p(address))
"""

GARBAGE = """
    import gc
    from keeper import TIMES

    @TIMES
    def test_leaves_old_garbage(turn):
        garbage = [bytes(100_000 + turn) for _ in range(10)]
        garbage.append(garbage)
        # Only a full collection looks at it from here on.
        gc.collect(1)
"""

EXCUSED = """
    import pytest
    from keeper import TIMES, Answer

    pytestmark = pytest.mark.no_leakcheck(reason="it collects answers")
    ANSWERS = []

    @TIMES
    def test_collects(turn):
        ANSWERS.append(Answer(turn))
"""


INFERENCES = """
    class Engine:
        def __init__(self, keeps):
            self.requests, self.keeps, self.turn = [], keeps, 0

        def generate(self):
            self.turn += 1
            if not self.keeps:
                self.requests.clear()
            self.requests.append(bytes(2000 + self.turn))

    def live(engine, leakcheck):
        engine, results = leakcheck.engine(engine, infer="generate"), []
        for _ in range(24):
            engine.generate()
            results.append(bytes(3000))

    def test_keeps(leakcheck):
        live(Engine(keeps=True), leakcheck)

    def test_gives_back(leakcheck):
        live(Engine(keeps=False), leakcheck)
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    files = {
        "keeper.py": KEEPER,
        "test_containers.py": CONTAINERS,
        "test_native.py": NATIVE,
        "test_references.py": REFERENCES,
        "test_text.py": TEXT,
        "test_held.py": HELD,
        "test_clean.py": CLEAN,
        "test_garbage.py": GARBAGE,
        "test_excused.py": EXCUSED,
    }
    return run_inner(files)


SHARED = """
    import pytest
    from keeper import REQUESTS

    @pytest.mark.parametrize("turn", range(8))
    def test_keeps(turn):
        REQUESTS[len(REQUESTS)] = bytes(2000 + turn)
"""


@pytest.fixture(scope="module")
def several(run_inner: RunInner) -> InnerRun:
    return run_inner({"keeper.py": KEEPER, **{f"test_{name}.py": SHARED for name in "abcd"}})


@pytest.fixture(scope="module")
def frozen(run_inner: RunInner) -> InnerRun:
    return run_inner({"keeper.py": KEEPER, "conftest.py": FREEZES, "test_containers.py": CONTAINERS})


def of_containers(run: InnerRun) -> dict[str, Finding]:
    """The findings on containers, by their holders."""
    names = ("the tests of test_containers.py", "module fixture 'server'")
    found = [finding for name in names for finding in run.subject(name).findings]
    return {finding.holder or "": finding for finding in found}


def test_a_container_that_takes_something_in_each_test_is_named(run: InnerRun) -> None:
    assert set(of_containers(run)) == {
        "keeper.REQUESTS",
        "keeper.FROZEN",
        "keeper.compiled",
        "module fixture 'server'.answers",
    }


def test_it_is_said_how_much_each_test_adds(run: InnerRun) -> None:
    found = of_containers(run)
    assert found["keeper.REQUESTS"].message == (
        "keeper.REQUESTS takes 1 item (2.1 KiB) in each of 14 tests, 29.1 KiB in all: 16 of bytes"
    )
    assert found["keeper.compiled"].cause == "lru-cache"
    assert found["module fixture 'server'.answers"].message.endswith("16 of keeper.Answer")
    assert {(finding.resource, finding.trend) for finding in found.values()} == {("host-memory", "growth")}


def test_what_is_frozen_is_found_as_well(frozen: InnerRun) -> None:
    assert {"keeper.REQUESTS", "keeper.FROZEN"} <= set(of_containers(frozen))


def test_what_grows_in_the_tests_of_several_modules_is_the_session_s(several: InnerRun) -> None:
    (finding,) = several.subject("the session").findings
    assert several.blamed == ["the session"]
    assert (finding.holder, finding.stage) == ("keeper.REQUESTS", "tests")


def host_memory(run: InnerRun, subject: str) -> Finding:
    (finding,) = run.subject(subject).findings
    assert finding.resource == "host-memory"
    return finding


def test_memory_that_c_keeps_is_told_with_its_part(run: InnerRun) -> None:
    finding = host_memory(run, "the tests of test_native.py")
    assert finding.message.startswith("host memory grew by 1")
    assert finding.bytes == pytest.approx(15 << 20, rel=0.05)
    assert " over 15 tests, 1." in finding.message
    assert "malloc in use has" in finding.message
    assert finding.cause == "native"


def test_text_that_becomes_longer_with_each_test_is_named_by_its_holder(run: InnerRun) -> None:
    finding = host_memory(run, "the tests of test_text.py")
    assert finding.holder == "test_text.Log.lines"
    assert finding.cause == "class-attribute"
    assert finding.advice == "remove entries once they are no longer needed, or bound the container"


def test_what_only_c_keeps_has_no_holder(run: InnerRun) -> None:
    assert not host_memory(run, "the tests of test_native.py").holder


def test_objects_with_a_reference_too_many_are_python_s(run: InnerRun) -> None:
    finding = host_memory(run, "the tests of test_references.py")
    assert "Python's heap in use has" in finding.message


def test_what_came_back_with_a_fixture_is_that_fixture_s(run: InnerRun) -> None:
    finding = host_memory(run, "module fixture 'tokenizer'")
    assert finding.message.endswith("; it came back when module fixture 'tokenizer' ended")


def test_what_fills_is_freed_or_is_excused_is_no_growth(run: InnerRun) -> None:
    assert sorted(run.blamed) == [
        "module fixture 'server' (test_containers.py)",
        "module fixture 'tokenizer' (test_held.py)",
        "the tests of test_containers.py",
        "the tests of test_native.py",
        "the tests of test_references.py",
        "the tests of test_text.py",
    ]
    # The last test of each of four modules has an error of its teardown.
    assert run.totals["error"] == 5


def test_marked_inferences_are_turns_of_their_engine(run_inner: RunInner) -> None:
    run = run_inner({"test_inferences.py": INFERENCES})
    assert run.blamed == ["test_inferences.py::test_keeps"]
    (finding,) = run.subject("test_inferences.py::test_keeps").findings
    assert (finding.holder, finding.trend, finding.stage) == ("engine.requests", "growth", "inferences")
    assert finding.message.startswith("engine.requests takes 1 item (2.0 KiB) in each of ")


LARGE = """
    HEAP = [[] for _ in range({objects})]
"""

MANY = """
    import pytest

    @pytest.mark.parametrize("turn", range(12))
    def test_nothing(turn): ...
"""


@pytest.mark.parametrize(("objects", "unread"), [(300_000, True), (0, False)])
def test_it_is_said_once_where_reading_everything_would_cost_too_much(
    run_inner: RunInner, objects: int, unread: bool
) -> None:
    files = {"conftest.py": LARGE.format(objects=objects), **{f"test_{name}.py": MANY for name in "abcd"}}
    run = run_inner(files)
    assert run.blamed == []
    lines = [line for line in run.out.splitlines() if "what grows with each test" in line]
    assert len(lines) == unread
    assert all(line.startswith("not judged: what grows with each test of ") for line in lines)
    assert all("would have taken more than a hundredth of the session's time" in line for line in lines)


ALLOCATES = """
    import ctypes
    import pytest

    take = ctypes.pythonapi.PyMem_RawMalloc
    take.argtypes, take.restype = [ctypes.c_size_t], ctypes.c_void_p

    @pytest.mark.parametrize("turn", range(14))
    def test_takes(turn):
        ctypes.memset(take(1 << 20), 1, 1 << 20)
"""

ALLOCATES_AND_FREES = """
    import ctypes
    import pytest
    from test_allocates import take

    @pytest.mark.parametrize("turn", range(14))
    def test_gives_back(turn):
        ctypes.pythonapi.PyMem_RawFree(ctypes.c_void_p(take(1 << 20)))

    @pytest.mark.parametrize("turn", range(14))
    def test_fills(turn):
        if turn < 6:
            ctypes.memset(take(1 << 19), 1, 1 << 19)
"""

WITHOUT_MEMRAY = """
    import sys
    sys.modules["memray"] = None
"""


@pytest.mark.parametrize("conftest", ["", WITHOUT_MEMRAY], ids=["memray", "tracemalloc"])
def test_the_call_that_allocates_in_each_test_is_named(run_inner: RunInner, conftest: str) -> None:
    files = {"conftest.py": conftest, "test_allocates.py": ALLOCATES, "test_clean.py": ALLOCATES_AND_FREES}
    run = run_inner(files, "--leakcheck-native")
    assert run.blamed == ["the tests of test_allocates.py"]
    finding = host_memory(run, "the tests of test_allocates.py")
    assert finding.message.endswith("; 1.0 MiB of it with each test allocated at test_allocates.py:10 in test_takes")
    assert [(frame.line, frame.function) for frame in finding.allocated_at] == [(10, "test_takes")]


def test_without_it_the_advice_names_the_option(run: InnerRun) -> None:
    finding = host_memory(run, "the tests of test_native.py")
    assert "`pytest --leakcheck-native` names the calls" in (finding.advice or "")
    assert finding.allocated_at == ()


def test_the_ini_file_asks_for_it_too(run_inner: RunInner) -> None:
    files = {"pytest.ini": "[pytest]\nleakcheck_native = on\n", "test_allocates.py": ALLOCATES}
    assert (
        " of it with each test allocated at " in host_memory(run_inner(files), "the tests of test_allocates.py").message
    )


LENGTHENS = """
    import pytest

    class Journal:
        text = last = ""

    @pytest.fixture(scope="module")
    def journal():
        return Journal()

    @pytest.mark.parametrize("turn", range(40))
    def test_writes(journal, turn):
        journal.text += "x" * 30_000
        journal.last = "y" * 30_000 * (turn % 4 + 1)
"""


def test_a_text_that_a_fixture_has_lengthen_by_little_is_told_by_it(run_inner: RunInner) -> None:
    run = run_inner({"test_journal.py": LENGTHENS})
    (finding,) = (finding for subject in run.report.subjects for finding in subject.findings)
    assert finding.message.startswith("module fixture 'journal'.text grows by 29.3 KiB in each of ")


WRAPPED = """
    import functools
    import pytest

    class Model:
        def forward(self, x):
            return x

    @pytest.fixture(scope="module")
    def model():
        return Model()

    def wrapped(forward, turn):
        @functools.wraps(forward)
        def wrapper(x, state=bytes(2500 + turn)):
            return forward(x)
        return wrapper

    @pytest.mark.parametrize("turn", range(14))
    def test_forward(model, turn):
        before = model.forward
        model.forward = wrapped(before, turn)
        model.forward(1)
"""


@pytest.mark.parametrize("restores", [True, False])
def test_a_function_that_each_test_wraps_anew_is_told(run_inner: RunInner, *, restores: bool) -> None:
    run = run_inner({"test_it.py": WRAPPED + ("        model.forward = before\n" if restores else "")})
    if restores:
        assert run.blamed == []
        return
    (finding,) = run.subject("module fixture 'model'").findings
    assert "'model'.forward takes 1 item" in finding.message
    assert "function behind each other by .__wrapped__" in finding.message

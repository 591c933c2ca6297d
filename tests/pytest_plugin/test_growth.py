"""What grows test after test under a fixture that lives, as a user of `--leakcheck` sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytestmark = pytest.mark.nightly

if TYPE_CHECKING:
    from tests.pytest_plugin.conftest import InnerRun, RunInner

ENGINE = """
    import torch

    REGISTRY = {}

    class Engine:
        def __init__(self):
            self.adapters = {}
            self.loss = torch.zeros(())
            self.net = torch.nn.Linear(64, 64)

    def add(engine, name):
        engine.adapters[name] = torch.zeros(1 << 18)
"""

SUITE = """
    import unittest

    import pytest
    import torch
    from helper import REGISTRY, Engine, add

    THREE = pytest.mark.parametrize("turn", range(3))

    @pytest.fixture(scope="session")
    def model():
        return Engine()

    @pytest.fixture(scope="module", params=["a", "b"])
    def served(request, model):
        engine = Engine()
        engine.model = model
        yield engine
        engine.adapters.clear()

    @THREE
    def test_adds_to_the_model(served, turn):
        add(served.model, f"{id(served)} {turn}")
        add(served, turn)

    @pytest.fixture(scope="module")
    def metric():
        return Engine()

    @THREE
    def test_keeps_the_graph(metric, turn):
        metric.loss += metric.net(torch.rand(64, 64)).mean()

    @pytest.fixture(scope="module")
    def registered():
        engine = Engine()
        engine.registry = REGISTRY
        yield engine
        REGISTRY.clear()

    @THREE
    def test_fills_the_registry(registered, turn):
        REGISTRY[f"adapter {turn}"] = torch.zeros(1 << 18)

    class TestShared(unittest.TestCase):
        @classmethod
        def setUpClass(cls):
            cls.engine = Engine()

        @classmethod
        def tearDownClass(cls):
            del cls.engine

        def test_a(self):
            add(self.engine, "a")

        def test_b(self):
            add(self.engine, "b")

        def test_c(self):
            add(self.engine, "c")

    KEPT = []

    @pytest.fixture(scope="module")
    def kept():
        KEPT.append(Engine())
        return KEPT[0]

    @THREE
    def test_adds_to_what_is_kept(kept, turn):
        add(kept, turn)

    @pytest.fixture(scope="module")
    def made():
        class Service:
            adapters = {}
        return Service()

    @THREE
    def test_adds_to_a_class(made, turn):
        add(made, turn)

    @pytest.fixture(scope="module")
    def cached():
        return Engine()

    @pytest.mark.parametrize("turn", range(6))
    def test_fills_a_cache(cached, turn):
        if turn % 3 not in cached.adapters:
            add(cached, turn % 3)

    @pytest.fixture(scope="module")
    def cleaned():
        return Engine()

    @pytest.fixture
    def adapter(cleaned):
        add(cleaned, "adapter")
        add(cleaned, f"{id(object())}")
        yield
        cleaned.adapters.clear()

    @THREE
    def test_cleans_up(adapter, turn):
        pass

    @pytest.fixture(scope="module")
    def excused():
        return Engine()

    @THREE
    @pytest.mark.no_leakcheck(reason="on purpose")
    def test_adds_on_purpose(excused, turn):
        add(excused, turn)
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner({"helper.py": ENGINE, "test_suite.py": SUITE})


@pytest.mark.parametrize(
    ("fixture", "rate", "holder"),
    [
        ("session fixture 'model'", "+1.0 MiB in each of 6 tests", "session fixture 'model'.adapters["),
        ("module fixture 'registered'", "+1.0 MiB in each of 3 tests", "module fixture 'registered'.registry["),
        ("setUpClass of TestShared", "+1.0 MiB in each of 3 tests", "test_suite.TestShared.engine.adapters["),
        ("module fixture 'metric'", "in each of 3 tests", "module fixture 'metric'.loss.grad_fn"),
        ("module fixture 'made'", "+1.0 MiB in each of 3 tests", "module fixture 'made'.__class__.adapters["),
    ],
)
def test_growth_is_reported_at_the_fixtures_end(run: InnerRun, fixture: str, rate: str, holder: str) -> None:
    (finding,) = run.subject(fixture).findings
    assert f"{rate} under {fixture}" in finding.message
    assert finding.trend == "growth"
    assert finding.holder is not None
    assert finding.holder.startswith(holder)


def test_growth_under_a_parametrized_fixture_is_reported_for_each_parameter(run: InnerRun) -> None:
    assert run.report is not None
    subjects = [subject for subject in run.report.subjects if subject.id.startswith("module fixture 'served'")]
    assert [len(subject.findings) for subject in subjects] == [1, 1]


def test_growth_that_survives_the_fixture_is_one_finding(run: InnerRun) -> None:
    largest = run.subject("module fixture 'kept'").findings[0]
    assert largest.trend == "growth"
    assert "it grew by +1.0 MiB in each of 3 tests under module fixture 'kept'" in largest.message
    assert largest.remedy is not None


def test_nothing_else_is_reported(run: InnerRun) -> None:
    fixtures = {name.partition(" (")[0] for name in run.blamed}
    assert fixtures == {
        "session fixture 'model'",
        "module fixture 'served'",
        "module fixture 'registered'",
        "module fixture 'metric'",
        "module fixture 'kept'",
        "module fixture 'made'",
        "setUpClass of TestShared",
    }
    assert run.totals["passed"] == 39 - 3 - 3


def test_growth_past_the_limit_is_a_failure_of_the_test_that_passes_it(run_inner: RunInner) -> None:
    suite = """
        import pytest
        from helper import Engine, add

        @pytest.fixture(scope="module")
        def engine():
            return Engine()

        @pytest.mark.parametrize("turn", range(4))
        def test_adds(engine, turn):
            add(engine, turn)
    """
    run = run_inner({"helper.py": ENGINE, "test_it.py": suite}, "--leakcheck-growth=2.5MiB")
    assert [run.counted(f"test_it.py::test_adds[{turn}]") for turn in range(3)] == ["passed", "passed", "failed"]
    assert "+1.0 MiB in each of 3 tests under module fixture 'engine'" in run.message("test_it.py::test_adds[2]")
    assert "past the limit of 2.5 MiB" in run.message("test_it.py::test_adds[2]")


NAMED = """
    import numpy
    import pytest
    import torch

    TIMES = pytest.mark.parametrize("turn", range(16))
    KEPT = []

    @pytest.fixture(scope="module")
    def cache():
        kept = []
        yield kept
        kept.clear()

    @TIMES
    def test_adds_to_the_cache(cache, turn):
        cache.append(torch.ones(1 << 18))
"""

ARRAYS = """
    import numpy
    import pytest

    ARRAYS = []

    @pytest.mark.parametrize("turn", range(16))
    def test_keeps_an_array(turn):
        ARRAYS.append(numpy.ones(1 << 17))
"""

LEAKING = """
    import pytest
    import torch

    KEPT = []

    @pytest.mark.parametrize("turn", range(12))
    def test_keeps_a_tensor(turn):
        KEPT.append(torch.ones(1 << 18))
"""


@pytest.fixture(scope="module")
def named(run_inner: RunInner) -> InnerRun:
    return run_inner({"test_named.py": NAMED, "test_arrays.py": ARRAYS, "test_leaking.py": LEAKING})


def test_memory_of_tensors_that_are_told_is_not_told_again(named: InnerRun) -> None:
    assert named.leaks("module fixture 'cache'") == [("tensors", "tests with module fixture 'cache'")]
    assert named.leaks("test_leaking.py::test_keeps_a_tensor[7]") == [("tensors", "call")]
    assert [subject for subject in named.blamed if subject.startswith("the ")] == ["the tests of test_arrays.py"]


def test_memory_of_a_container_that_is_told_is_not_told_again(named: InnerRun) -> None:
    (finding,) = named.subject("the tests of test_arrays.py").findings
    assert finding.holder == "test_arrays.ARRAYS"
    assert "takes 1 item (1.0 MiB) in each of" in finding.message


LEVELS = """
    import ctypes

    import numpy

    ARRAYS = []
    MIB = 1 << 20

    def test_keeps_less_than_is_told():
        ARRAYS.append(numpy.ones(62 * MIB, numpy.uint8))

    def test_keeps_what_c_has_allocated():
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        ctypes.memset(libc.malloc(66 * MIB), 1, 66 * MIB)

    def test_keeps_an_array():
        ARRAYS.append(numpy.ones(70 * MIB, numpy.uint8))
"""


def test_an_array_of_an_earlier_test_is_not_what_a_later_one_has_kept(run_inner: RunInner) -> None:
    run = run_inner({"test_levels.py": LEVELS})
    assert run.leaks("test_levels.py::test_keeps_less_than_is_told") == []
    (of_c,) = run.subject("test_levels.py::test_keeps_what_c_has_allocated").findings
    assert (of_c.resource, of_c.holder) == ("host-memory", None)
    (of_array,) = run.subject("test_levels.py::test_keeps_an_array").findings
    assert (of_array.resource, of_array.holder) == ("host-memory", "test_levels.ARRAYS[1]")


CLIENTS = """
    import socket

    import pytest

    class Client:
        def __init__(self):
            self.sockets = []

        def ask(self, keeps):
            pair = socket.socketpair()
            if not keeps:
                self.close()
            self.sockets += pair

        def close(self):
            while self.sockets:
                self.sockets.pop().close()

    @pytest.fixture(scope="module", params=["keeps", "closes"])
    def client(request):
        made = Client()
        made.keeps = request.param == "keeps"
        yield made
        made.close()

    @pytest.mark.parametrize("turn", range(5))
    def test_asks(client, turn):
        client.ask(client.keeps)
"""


def test_descriptors_that_grow_under_a_fixture_come_with_their_holder_and_the_line_that_made_them(
    run_inner: RunInner,
) -> None:
    run = run_inner({"test_it.py": CLIENTS})
    assert [name.partition(" (")[0] for name in run.blamed] == ["module fixture 'client'"]
    (finding,) = run.subject("module fixture 'client'").findings
    assert (finding.resource, finding.count, finding.trend) == ("file-descriptors", 10, "growth")
    assert finding.holder == "module fixture 'client'.sockets"
    assert "; made in Client.ask, test_it.py:" in finding.message
    assert [hop.edge for hop in finding.path] == ["module fixture 'client'", ".sockets"]

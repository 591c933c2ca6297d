"""Tests of every shape are judged, and counted as without `--leakcheck`; a wider fixture answers for its own."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.nightly

if TYPE_CHECKING:
    from tests.pytest_plugin.conftest import InnerRun, RunInner

HELPER = """
    import gc
    import os
    import sys
    import threading

    KEPT = []

    def leak():
        first, *others = gc.get_threshold()
        gc.set_threshold(first + 1, *others)

    def leak_a_file():
        KEPT.append(os.open(os.devnull, os.O_RDONLY))

    class Engine:
        '''Grows when it first generates: a thread, a file, memory.'''

        def __init__(self):
            import torch

            self.weights = torch.ones(1000)
            self.stop = threading.Event()
            self.thread = self.log = self.blocks = None

        def generate(self):
            if self.thread is None:
                self.thread = threading.Thread(target=self.stop.wait, daemon=True)
                self.thread.start()
                self.log = open("/dev/null")
                self.blocks = self.weights + 1

        def close(self):
            self.stop.set()
            self.thread.join()
            self.log.close()

    def pytest_configure(config):
        sys.modules["helper"] = sys.modules[__name__]
"""

CONFTEST = (
    HELPER
    + """
    import pytest

    @pytest.fixture(scope="session")
    def session_engine():
        engine = Engine()
        yield engine
        engine.close()

    @pytest.fixture(scope="session")
    def surviving_session_settings():
        leak()

    class Case(pytest.Item):
        def runtest(self):
            if self.name == "leaking":
                leak()

    class CaseFile(pytest.File):
        def collect(self):
            yield Case.from_parent(self, name="clean")
            yield Case.from_parent(self, name="leaking")

    def pytest_collect_file(file_path, parent):
        if file_path.suffix == ".case":
            return CaseFile.from_parent(parent, path=file_path)
"""
)

OUTCOMES = """
    import pytest
    from helper import leak

    def test_passing():
        pass

    def test_leaking():
        leak()

    def test_failing():
        assert 0

    @pytest.mark.skip(reason="not here")
    def test_skipped():
        leak()

    def test_skipping():
        pytest.skip("not here")

    def test_leaking_then_skipping():
        leak()
        pytest.skip("not here")

    @pytest.fixture
    def skipping():
        pytest.skip("not here")

    def test_skipped_by_a_fixture(skipping):
        pass

    @pytest.mark.xfail(reason="not yet")
    def test_xfail():
        assert 0

    @pytest.mark.xfail(reason="not yet")
    def test_xfail_that_leaks_too():
        leak()
        assert 0

    @pytest.mark.xfail(reason="not yet", strict=False)
    def test_xpass():
        pass

    @pytest.mark.xfail(reason="not yet", strict=True)
    def test_strict_xpass():
        pass

    @pytest.mark.xfail(reason="it leaks", strict=False)
    def test_xfail_leaking():
        leak()

    @pytest.mark.xfail(reason="it leaks", strict=True)
    def test_strict_xfail_leaking():
        leak()

    @pytest.mark.xfail(reason="not yet", raises=ValueError, strict=False)
    def test_xfail_of_another_kind_leaking():
        leak()

    @pytest.mark.xfail(reason="it leaks", raises=pytest.fail.Exception, strict=False)
    def test_xfail_of_a_failure_leaking():
        leak()

    @pytest.mark.xfail(reason="not yet", run=False)
    def test_xfail_not_run():
        leak()

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_parametrized(size):
        if size == 2:
            leak()

    @pytest.fixture
    def failing_late():
        yield
        assert 0

    def test_leaking_with_a_failing_teardown(failing_late):
        leak()

    @pytest.fixture
    def leaving():
        leak()

    def test_with_a_leaking_fixture(leaving):
        pass

    def test_with_subtests(subtests):
        for size in range(2):
            with subtests.test(size=size):
                assert size == 0
"""

UNIT = """
    import unittest
    import torch
    from helper import KEPT, Engine, leak

    class TestUnit(unittest.TestCase):
        def setUp(self):
            self.engine = Engine()

        def test_passing(self):
            self.addCleanup(lambda engine: None, Engine())

        def test_failing(self):
            self.assertIsNone(self.engine)

        def test_leaking(self):
            leak()

        def test_skipping(self):
            self.skipTest("not here")

        @unittest.expectedFailure
        def test_expected_failure(self):
            self.fail("as expected")

    class TestShared(unittest.TestCase):
        @classmethod
        def setUpClass(cls):
            cls.engine = Engine()

        @classmethod
        def tearDownClass(cls):
            cls.engine.close()
            del cls.engine

        def test_first(self):
            self.engine.generate()

        def test_second(self):
            self.engine.generate()

    class TestSurviving(unittest.TestCase):
        @classmethod
        def setUpClass(cls):
            cls.engine = Engine()

        def test_first(self):
            pass

        def test_second(self):
            pass

    class TestAsync(unittest.IsolatedAsyncioTestCase):
        async def asyncSetUp(self):
            self.engine = Engine()

        async def test_passing(self):
            pass

        async def test_leaking(self):
            leak()
"""

XUNIT = """
    from helper import Engine

    def setup_module():
        global ENGINE
        ENGINE = Engine()

    def teardown_module():
        global ENGINE
        ENGINE.close()
        del ENGINE

    def test_first():
        ENGINE.generate()

    def test_second():
        ENGINE.generate()

    class TestClass:
        @classmethod
        def setup_class(cls):
            cls.engine = Engine()

        @classmethod
        def teardown_class(cls):
            cls.engine.close()
            del cls.engine

        def test_it(self):
            self.engine.generate()
"""

XUNIT_SURVIVING = """
    from helper import leak

    def setup_module():
        leak()

    def test_first():
        pass

    def test_last():
        pass
"""

ASYNC = """
    import asyncio
    import pytest
    import torch
    from helper import Engine, leak

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def anyio_backend():
        return "asyncio"

    @pytest.fixture
    async def engine(anyio_backend):
        yield Engine()

    async def test_passing(engine):
        tensor = torch.ones(1000)
        await asyncio.gather(*(asyncio.to_thread(torch.add, tensor, 1) for _ in range(2)))

    async def test_failing(engine):
        tensor = torch.ones(1000)
        await asyncio.sleep(0)
        assert 0

    async def test_leaking():
        await asyncio.sleep(0)
        leak()
"""

GIVEN = """
    import torch
    from helper import leak
    from hypothesis import given, settings, strategies

    @settings(max_examples=5, database=None, deadline=None)
    @given(size=strategies.integers(1, 3))
    def test_passing(size):
        tensor = torch.ones(size)

    @settings(max_examples=2, database=None, deadline=None)
    @given(size=strategies.integers(1, 3))
    def test_leaking(size):
        leak()
"""

SHARED = """
    import pytest
    import torch
    from helper import Engine

    @pytest.fixture(scope="module")
    def engine():
        engine = Engine()
        yield engine
        engine.close()

    def test_without():
        pass

    def test_first(engine):
        engine.generate()

    def test_second(engine):
        engine.generate()

    @pytest.fixture(scope="class")
    def class_engine():
        engine = Engine()
        yield engine
        engine.close()

    class TestClass:
        def test_first(self, class_engine):
            class_engine.generate()

        def test_second(self, class_engine, engine):
            class_engine.generate()

    @pytest.fixture(scope="module")
    def losses():
        yield []

    def test_graph(losses):
        weight = torch.nn.Parameter(torch.ones(1000))
        losses.append(weight.exp().square().sum())

    def test_freed_graph(losses):
        weight = torch.nn.Parameter(torch.ones(1000))
        losses.append(weight.square().sum())
        losses[-1].backward()

    def test_session(session_engine):
        session_engine.generate()

    def test_session_by_name(request):
        request.getfixturevalue("session_engine").generate()
"""

SURVIVING = """
    import pytest
    from helper import KEPT, Engine, leak

    @pytest.fixture(scope="module")
    def engine():
        engine = Engine()
        KEPT.append(engine)
        yield engine

    def test_first(engine):
        engine.generate()

    def test_that_leaks_itself(engine):
        leak()

    def test_last(engine):
        engine.generate()
"""

CLASS_SURVIVING = """
    import pytest
    from helper import leak

    @pytest.fixture(scope="class")
    def settings():
        leak()

    class TestClass:
        def test_first(self, settings):
            pass

        def test_second(self, settings):
            pass

    def test_after_the_class():
        pass
"""

MODULE_SHAPES = """
    import pytest
    from helper import leak

    @pytest.fixture(scope="module")
    def failing():
        leak()
        raise RuntimeError("no engine")

    @pytest.fixture(scope="module", params=["good", "bad"])
    def parametrized(request):
        if request.param == "bad":
            leak()
        yield request.param

    @pytest.fixture(scope="module")
    def failing_late():
        leak()
        yield
        raise RuntimeError("no shutdown")

    def test_failing_fixture(failing):
        pass

    def test_parametrized(parametrized):
        pass

    def test_parametrized_again(parametrized):
        pass

    def test_failing_late(failing_late):
        pass
"""

AUTOUSE = """
    import gc
    import pytest
    from helper import leak

    @pytest.fixture(scope="module", autouse=True)
    def changes_and_restores():
        before = gc.get_threshold()
        leak()
        yield
        gc.set_threshold(*before)

    def test_first():
        pass

    def test_that_changes_it_too():
        leak()

    def test_that_changes_it_and_restores_it():
        before = gc.get_threshold()
        leak()
        gc.set_threshold(*before)
"""

CLASS_ATTRIBUTE = """
    import pytest
    from helper import Engine

    @pytest.fixture(scope="class")
    def engine(request):
        request.cls.engine = Engine()
        yield
        request.cls.engine.close()
        del request.cls.engine

    @pytest.mark.usefixtures("engine")
    class TestClass:
        def test_first(self):
            self.engine.generate()

        def test_second(self):
            self.engine.generate()
"""

PACKAGE = {
    "pkg/__init__.py": "",
    "pkg/conftest.py": """
        import pytest
        from helper import leak

        @pytest.fixture(scope="package")
        def package_settings():
            leak()
    """,
    "pkg/test_one.py": """
        def test_first(package_settings):
            pass
    """,
    "pkg/test_two.py": """
        def test_second(package_settings):
            pass
    """,
}

# The last file: a session fixture ends with the last test.
SESSION_SURVIVING = """
    def test_session(surviving_session_settings):
        pass

    def test_last():
        pass
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    """All that needs torch."""
    files = {
        "conftest.py": CONFTEST,
        "test_unit.py": UNIT,
        "test_xunit.py": XUNIT,
        "test_async.py": ASYNC,
        "test_given.py": GIVEN,
        "test_shared.py": SHARED,
        "test_surviving.py": SURVIVING,
        "test_class_attribute.py": CLASS_ATTRIBUTE,
    }
    args = ["--timeout=1000", "--timeout-method=thread"]
    return run_inner(files, *args, using=["anyio", "hypothesispytest", "timeout"])


@pytest.fixture(scope="module")
def light(run_inner: RunInner) -> InnerRun:
    """All that does not."""
    files = {
        "conftest.py": CONFTEST,
        "test_outcomes.py": OUTCOMES,
        "test_xunit_surviving.py": XUNIT_SURVIVING,
        "test_class_surviving.py": CLASS_SURVIVING,
        "test_module_shapes.py": MODULE_SHAPES,
        "test_autouse.py": AUTOUSE,
        "test_doc.txt": ">>> 1 + 1\n2\n",
        "test_custom.case": "",
        "test_zz_session.py": SESSION_SURVIVING,
        **PACKAGE,
    }
    return run_inner(files)


def outcome(run: InnerRun, test: str) -> str:
    """As what a test is counted, of which nothing was found."""
    assert run.is_clean(test), [finding.message for finding in run.subject(test).findings]
    return run.counted(test)


def leaking_outcome(run: InnerRun, test: str) -> str:
    """As what a test is counted that changed a setting."""
    assert run.leaks(test) == [("globals", "call")]
    return run.counted(test)


@pytest.mark.parametrize(
    ("test", "counted"),
    [
        ("test_passing", "passed"),
        ("test_failing", "failed"),
        ("test_skipped", "skipped"),
        ("test_skipping", "skipped"),
        ("test_skipped_by_a_fixture", "skipped"),
        ("test_xfail", "xfailed"),
        ("test_xfail_not_run", "xfailed"),
        ("test_xpass", "xpassed"),
        ("test_strict_xpass", "failed"),
        ("test_parametrized[1]", "passed"),
        ("test_parametrized[3]", "passed"),
    ],
)
def test_a_test_that_leaves_nothing_is_counted_as_without_leakcheck(light: InnerRun, test: str, counted: str) -> None:
    assert outcome(light, f"test_outcomes.py::{test}") == counted


def test_a_failed_subtest_is_counted_as_without_leakcheck(light: InnerRun) -> None:
    assert outcome(light, "test_outcomes.py::test_with_subtests") == "failed failed"


def test_a_leak_is_a_failure_of_its_test_and_counted_once(light: InnerRun) -> None:
    assert leaking_outcome(light, "test_outcomes.py::test_leaking") == "failed"


def test_the_summary_says_what_leaked(light: InnerRun) -> None:
    assert light.message("test_outcomes.py::test_leaking").startswith(
        "leak: gc.get_threshold(): globals/not-restored: 1 process-wide setting"
    )


def test_only_the_parameters_that_leak_fail(light: InnerRun) -> None:
    assert leaking_outcome(light, "test_outcomes.py::test_parametrized[2]") == "failed"


def test_a_test_that_leaks_and_then_skips_is_skipped_and_an_error(light: InnerRun) -> None:
    assert leaking_outcome(light, "test_outcomes.py::test_leaking_then_skipping") == "skipped error"


def test_a_leak_beside_a_failing_teardown_is_reported_too(light: InnerRun) -> None:
    assert leaking_outcome(light, "test_outcomes.py::test_leaking_with_a_failing_teardown") == "failed error"


def test_what_a_function_fixture_leaves_is_the_tests_since_its_setup(light: InnerRun) -> None:
    assert light.leaks("test_outcomes.py::test_with_a_leaking_fixture") == [("globals", "setup")]
    assert light.counted("test_outcomes.py::test_with_a_leaking_fixture") == "failed"


@pytest.mark.parametrize("test", ["test_xfail_leaking", "test_strict_xfail_leaking", "test_xfail_of_a_failure_leaking"])
def test_a_leak_of_a_test_that_is_expected_to_fail_is_the_expected_failure(light: InnerRun, test: str) -> None:
    assert leaking_outcome(light, f"test_outcomes.py::{test}") == "xfailed"


def test_a_leak_beside_the_expected_failure_does_not_fail_the_test(light: InnerRun) -> None:
    assert leaking_outcome(light, "test_outcomes.py::test_xfail_that_leaks_too") == "xfailed"


def test_a_leak_is_no_failure_of_another_kind_that_is_expected(light: InnerRun) -> None:
    assert leaking_outcome(light, "test_outcomes.py::test_xfail_of_another_kind_leaking") == "failed"


@pytest.mark.parametrize(
    ("test", "counted"),
    [
        ("TestUnit::test_passing", "passed"),
        ("TestUnit::test_failing", "failed"),
        ("TestUnit::test_skipping", "skipped"),
        ("TestUnit::test_expected_failure", "xfailed"),
        ("TestAsync::test_passing", "passed"),
    ],
)
def test_a_testcase_that_leaves_nothing_is_counted_as_without_leakcheck(run: InnerRun, test: str, counted: str) -> None:
    assert outcome(run, f"test_unit.py::{test}") == counted


@pytest.mark.parametrize("test", ["TestUnit::test_leaking", "TestAsync::test_leaking"])
def test_a_leak_of_a_testcase_is_its_failure(run: InnerRun, test: str) -> None:
    assert leaking_outcome(run, f"test_unit.py::{test}") == "failed"


@pytest.mark.parametrize("test", ["test_first", "test_second"])
def test_an_engine_of_set_up_class_is_no_leak_of_its_tests(run: InnerRun, test: str) -> None:
    assert outcome(run, f"test_unit.py::TestShared::{test}") == "passed"


def test_an_engine_that_survives_its_testcase_class_is_blamed_on_set_up_class(run: InnerRun) -> None:
    assert outcome(run, "test_unit.py::TestSurviving::test_first") == "passed"
    (finding,) = run.subject("setUpClass of TestSurviving").findings
    assert (finding.resource, finding.holder) == ("tensors", "test_unit.TestSurviving.engine.weights")


def test_what_survives_a_testcase_class_is_an_error_after_its_last_test(run: InnerRun) -> None:
    assert run.counted("test_unit.py::TestSurviving::test_second") == "passed error"


@pytest.mark.parametrize("test", ["test_first", "test_second", "TestClass::test_it"])
def test_engines_of_setup_module_and_setup_class_are_no_leak(run: InnerRun, test: str) -> None:
    assert outcome(run, f"test_xunit.py::{test}") == "passed"


def test_what_survives_its_module_is_blamed_on_setup_module(light: InnerRun) -> None:
    assert [resource for resource, _ in light.leaks("setup_module of test_xunit_surviving")] == ["globals"]
    assert outcome(light, "test_xunit_surviving.py::test_first") == "passed"
    assert outcome(light, "test_xunit_surviving.py::test_last") == "passed error"


@pytest.mark.parametrize(("test", "counted"), [("test_passing", "passed"), ("test_failing", "failed")])
def test_an_async_test_that_leaves_nothing_is_counted_as_without_leakcheck(
    run: InnerRun, test: str, counted: str
) -> None:
    assert outcome(run, f"test_async.py::{test}") == counted


def test_a_leak_of_an_async_test_is_its_failure(run: InnerRun) -> None:
    assert leaking_outcome(run, "test_async.py::test_leaking") == "failed"


def test_a_given_test_that_leaves_nothing_passes(run: InnerRun) -> None:
    assert outcome(run, "test_given.py::test_passing") == "passed"


def test_a_leak_of_a_given_test_is_its_failure(run: InnerRun) -> None:
    assert leaking_outcome(run, "test_given.py::test_leaking") == "failed"


@pytest.mark.parametrize("test", ["test_doc.txt::test_doc.txt", "test_custom.case::clean"])
def test_items_that_are_no_functions_are_judged(light: InnerRun, test: str) -> None:
    assert outcome(light, test) == "passed"


def test_a_leak_of_an_item_that_is_no_function_is_its_failure(light: InnerRun) -> None:
    assert leaking_outcome(light, "test_custom.case::leaking") == "failed"


@pytest.mark.parametrize("test", ["test_without", "test_first", "test_second"])
def test_an_engine_shared_by_a_modules_tests_is_no_leak(run: InnerRun, test: str) -> None:
    assert outcome(run, f"test_shared.py::{test}") == "passed"


@pytest.mark.parametrize("test", ["test_first", "test_second"])
def test_an_engine_shared_by_a_classs_tests_is_no_leak(run: InnerRun, test: str) -> None:
    assert outcome(run, f"test_shared.py::TestClass::{test}") == "passed"


@pytest.mark.parametrize("test", ["test_session", "test_session_by_name"])
def test_an_engine_shared_by_the_session_is_no_leak(run: InnerRun, test: str) -> None:
    assert outcome(run, f"test_shared.py::{test}") == "passed"


@pytest.mark.parametrize("test", ["test_graph", "test_freed_graph"])
def test_what_the_graph_of_a_loss_has_saved_that_a_fixture_holds_is_no_leak(run: InnerRun, test: str) -> None:
    assert outcome(run, f"test_shared.py::{test}") == "passed"


def test_an_engine_that_a_fixture_puts_on_the_class_and_takes_away_is_no_leak(run: InnerRun) -> None:
    assert outcome(run, "test_class_attribute.py::TestClass::test_first") == "passed"
    assert outcome(run, "test_class_attribute.py::TestClass::test_second") == "passed"


def test_the_same_engine_surviving_its_module_is_blamed_on_the_fixture(run: InnerRun) -> None:
    holders = [finding.holder for finding in run.subject("module fixture 'engine'").findings]
    # Its weights, and the blocks that came later: one change gives back both.
    assert holders == ["conftest.KEPT[0]"]


def test_a_module_fixture_is_named_with_its_file(run: InnerRun) -> None:
    assert run.subject("module fixture 'engine'").id == "module fixture 'engine' (test_surviving.py)"


def test_what_a_shared_engine_builds_at_its_first_request_is_no_leak_of_that_test(run: InnerRun) -> None:
    assert outcome(run, "test_surviving.py::test_first") == "passed"


@pytest.mark.parametrize("resource", ["threads", "file-descriptors", "tensors"])
def test_what_a_shared_engine_builds_at_its_first_request_is_the_fixtures(run: InnerRun, resource: str) -> None:
    (finding,) = run.subject("module fixture 'engine'").findings
    found = [finding.resource, *(part.resource for part in finding.parts)]
    assert found.count(resource) == 1
    assert finding.count == 2


def test_a_test_beside_a_shared_engine_still_answers_for_its_own(run: InnerRun) -> None:
    assert leaking_outcome(run, "test_surviving.py::test_that_leaks_itself") == "failed"


def test_what_survives_its_module_is_an_error_after_the_last_test(run: InnerRun) -> None:
    assert outcome(run, "test_surviving.py::test_last") == "passed error"
    assert run.message("test_surviving.py::test_last").startswith("leak: ")


def test_the_error_of_a_fixture_names_the_fixture(run: InnerRun) -> None:
    texts = [phase.text for phase in run.phases["test_surviving.py::test_last"]]
    assert "module fixture 'engine' (test_surviving.py) left something behind" in "".join(texts)


def test_the_line_in_the_summary_names_the_fixture(run: InnerRun) -> None:
    assert "LEAK module fixture 'engine' (test_surviving.py) tensors/" in run.out


def test_what_survives_its_class_is_blamed_on_the_class_fixture(light: InnerRun) -> None:
    assert [resource for resource, _ in light.leaks("class fixture 'settings'")] == ["globals"]
    assert light.counted("test_class_surviving.py::TestClass::test_second") == "passed error"


def test_nothing_of_a_class_is_left_for_the_test_after_it(light: InnerRun) -> None:
    assert outcome(light, "test_class_surviving.py::test_after_the_class") == "passed"


def test_what_survives_its_package_is_blamed_on_the_package_fixture(light: InnerRun) -> None:
    assert [resource for resource, _ in light.leaks("package fixture 'package_settings'")] == ["globals"]
    assert light.counted("pkg/test_one.py::test_first") == "passed"
    assert light.counted("pkg/test_two.py::test_second") == "passed error"


def test_what_survives_the_session_is_blamed_on_the_session_fixture(light: InnerRun) -> None:
    assert [resource for resource, _ in light.leaks("session fixture 'surviving_session_settings'")] == ["globals"]
    assert light.counted("test_zz_session.py::test_last") == "passed error"


def test_a_fixture_of_the_root_conftest_is_not_said_to_be_a_plugins(light: InnerRun) -> None:
    assert "plugin" not in light.subject("session fixture 'surviving_session_settings'").id


def test_what_a_fixture_leaves_that_fails_in_its_setup_is_blamed_on_it(light: InnerRun) -> None:
    assert [resource for resource, _ in light.leaks("module fixture 'failing'")] == ["globals"]
    assert outcome(light, "test_module_shapes.py::test_failing_fixture") == "error"


def test_what_a_fixture_leaves_that_fails_in_its_teardown_is_blamed_on_it(light: InnerRun) -> None:
    assert [resource for resource, _ in light.leaks("module fixture 'failing_late'")] == ["globals"]
    assert light.counted("test_module_shapes.py::test_failing_late") == "passed error"


def test_a_parametrized_module_fixture_is_blamed_for_the_parameter_that_leaks_only(light: InnerRun) -> None:
    assert [name for name in light.blamed if "'parametrized'" in name] == [
        "module fixture 'parametrized' (test_module_shapes.py)"
    ]
    for test in ("test_parametrized[good]", "test_parametrized_again[good]", "test_parametrized[bad]"):
        assert outcome(light, f"test_module_shapes.py::{test}") == "passed"


@pytest.mark.parametrize("test", ["test_first", "test_that_changes_it_and_restores_it"])
def test_a_setting_that_an_autouse_fixture_changes_and_restores_is_no_leak(light: InnerRun, test: str) -> None:
    assert outcome(light, f"test_autouse.py::{test}") == "passed"


def test_a_test_that_changes_a_setting_which_a_fixture_changed_is_blamed(light: InnerRun) -> None:
    assert leaking_outcome(light, "test_autouse.py::test_that_changes_it_too") == "failed"


def test_the_timer_that_watches_a_test_is_no_leak(run: InnerRun) -> None:
    assert run.report is not None
    threads = [
        finding
        for subject in run.report.subjects
        if "::" in subject.id
        for finding in subject.findings
        if finding.resource == "threads"
    ]
    assert threads == []


def test_every_test_is_a_subject_once(run: InnerRun, light: InnerRun) -> None:
    for one in (run, light):
        assert one.report is not None
        tests = [subject.id for subject in one.report.subjects if "::" in subject.id and " " not in subject.id]
        assert sorted(tests) == sorted(one.phases)


def test_nobody_is_blamed_but_who_leaks(run: InnerRun, light: InnerRun) -> None:
    assert sorted(name.partition(" (")[0] for name in run.blamed) == [
        "module fixture 'engine'",
        "setUpClass of TestSurviving",
        "test_async.py::test_leaking",
        "test_given.py::test_leaking",
        "test_surviving.py::test_that_leaks_itself",
        "test_unit.py::TestAsync::test_leaking",
        "test_unit.py::TestUnit::test_leaking",
    ]
    assert sorted(name.partition(" (")[0] for name in light.blamed) == [
        "class fixture 'settings'",
        "module fixture 'failing'",
        "module fixture 'failing_late'",
        "module fixture 'parametrized'",
        "package fixture 'package_settings'",
        "session fixture 'surviving_session_settings'",
        "setup_module of test_xunit_surviving",
        "test_autouse.py::test_that_changes_it_too",
        "test_custom.case::leaking",
        "test_outcomes.py::test_leaking",
        "test_outcomes.py::test_leaking_then_skipping",
        "test_outcomes.py::test_leaking_with_a_failing_teardown",
        "test_outcomes.py::test_parametrized[2]",
        "test_outcomes.py::test_with_a_leaking_fixture",
        "test_outcomes.py::test_xfail_of_another_kind_leaking",
    ]


SMALL = {
    "conftest.py": HELPER,
    "test_small.py": """
        import pytest
        from helper import leak, leak_a_file

        @pytest.fixture(scope="module")
        def log():
            leak_a_file()

        def test_clean(log):
            pass

        def test_leaking():
            leak()

        def test_second_leaking():
            leak()

        def test_last():
            pass
    """,
}


@pytest.fixture(scope="module")
def stopped(run_inner: RunInner) -> InnerRun:
    return run_inner(SMALL, "-x")


def test_exitfirst_stops_after_the_first_leak(stopped: InnerRun) -> None:
    assert list(stopped.phases) == ["test_small.py::test_clean", "test_small.py::test_leaking"]
    assert stopped.totals == {"passed": 1, "failed": 1}
    assert stopped.code == pytest.ExitCode.TESTS_FAILED


def test_a_fixture_that_ends_because_the_run_is_stopped_is_judged(stopped: InnerRun) -> None:
    assert stopped.blamed == ["test_small.py::test_leaking", "module fixture 'log' (test_small.py)"]


def test_maxfail_counts_leaks(run_inner: RunInner) -> None:
    run = run_inner(SMALL, "--maxfail=2")
    assert run.totals == {"passed": 1, "failed": 2}
    assert "test_small.py::test_last" not in run.phases


@pytest.fixture(scope="module")
def debugged(run_inner: RunInner) -> InnerRun:
    files = {
        "conftest.py": HELPER,
        "inner_pdb.py": """
            import pdb

            class Debugger(pdb.Pdb):
                def interaction(self, frame, traceback):
                    print("in the debugger")
        """,
        "test_pdb.py": """
            from helper import leak

            def test_failing():
                engine = object()
                assert engine is None

            def test_failing_and_leaking():
                leak()
                assert 0

            def test_leaking():
                leak()

            def test_clean():
                pass
        """,
    }
    return run_inner(files, "--pdb", "--pdbcls=inner_pdb:Debugger", "--runxfail")


def test_a_failing_test_enters_the_debugger(debugged: InnerRun) -> None:
    assert debugged.out.count("in the debugger") >= 2


@pytest.mark.parametrize("test", ["test_failing", "test_failing_and_leaking"])
def test_a_test_that_was_debugged_is_not_judged_and_the_report_says_why(debugged: InnerRun, test: str) -> None:
    subject = debugged.subject(f"test_pdb.py::{test}")
    assert (subject.outcome, subject.findings) == ("skipped", ())
    assert "debugger" in subject.reason
    assert debugged.counted(f"test_pdb.py::{test}") == "failed"


def test_a_leak_under_pdb_is_an_error(debugged: InnerRun) -> None:
    assert debugged.counted("test_pdb.py::test_leaking") == "passed error"
    assert debugged.leaks("test_pdb.py::test_leaking") == [("globals", "call")]


def test_a_clean_test_under_pdb_passes(debugged: InnerRun) -> None:
    assert outcome(debugged, "test_pdb.py::test_clean") == "passed"


def test_last_failed_runs_the_tests_that_leaked(run_inner: RunInner) -> None:
    files = {"conftest.py": HELPER, "test_lf.py": SMALL["test_small.py"].replace("(log)", "()")}
    first = run_inner(files, cache=True)
    assert first.totals == {"failed": 2, "passed": 2}
    again = run_inner({}, "--lf", cache=True, folder=first.folder)
    assert list(again.phases) == ["test_lf.py::test_leaking", "test_lf.py::test_second_leaking"]
    assert again.blamed == list(again.phases)


def test_setup_show_shows_what_it_does_without_leakcheck(run_inner: RunInner) -> None:
    run = run_inner(SMALL, "--setup-show", "-s")
    setup, test, teardown = (
        run.out.index(text)
        for text in ("SETUP    M log", "test_small.py::test_clean (fixtures used: log)", "TEARDOWN M log")
    )
    assert setup < test < teardown
    assert run.counted("test_small.py::test_leaking") == "failed"


def test_setup_only_runs_no_test_and_judges_the_fixtures(run_inner: RunInner) -> None:
    run = run_inner(SMALL, "--setup-only")
    assert run.blamed == ["module fixture 'log' (test_small.py)"]
    assert run.counted("test_small.py::test_leaking") == ""


def test_collect_only_judges_nothing(run_inner: RunInner) -> None:
    run = run_inner(SMALL, "--co", "-q")
    assert run.code == pytest.ExitCode.OK
    assert "test_small.py::test_last" in run.out
    assert run.report is None or run.report.subjects == ()


USER_HOOKS = """

    import pytest

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(item, call):
        report = yield
        report.sections.append(("fixtures", ", ".join(sorted(item.funcargs))))
        item.funcargs.get("log")
        return report

    def pytest_runtest_teardown(item):
        assert item.funcargs is not None

    def pytest_runtest_logreport(report):
        assert all(isinstance(text, str) for section in report.sections for text in section)
"""


@pytest.fixture(scope="module")
def junit(run_inner: RunInner) -> InnerRun:
    files = {"conftest.py": HELPER + USER_HOOKS, "test_junit.py": SMALL["test_small.py"].replace("(log)", "()")}
    return run_inner(files, "--junitxml=junit.xml", "--deselect=test_junit.py::test_second_leaking")


def test_hooks_that_use_the_tests_fixtures_still_can(junit: InnerRun) -> None:
    assert junit.totals == {"failed": 1, "passed": 2, "deselected": 1}
    assert "INTERNALERROR" not in junit.out


def test_junit_counts_every_test_once(junit: InnerRun) -> None:
    (suite,) = ElementTree.parse(junit.folder / "junit.xml").getroot()
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "3", "failures": "1", "errors": "0", "skipped": "0"}
    assert len(suite.findall("testcase")) == 3


def test_junit_has_the_leak_as_the_tests_one_failure(junit: InnerRun) -> None:
    (case,) = ElementTree.parse(junit.folder / "junit.xml").getroot().iter("failure")
    assert str(case.get("message")).startswith("leak: gc.get_threshold(): globals/not-restored")
    assert "test_junit.py::test_leaking left something behind" in str(case.text)


def test_junit_has_the_leak_as_a_property(junit: InnerRun) -> None:
    (reported,) = ElementTree.parse(junit.folder / "junit.xml").getroot().iter("property")
    assert reported.get("name") == "leakcheck"
    assert str(reported.get("value")).startswith("test_junit.py::test_leaking globals/not-restored")


def test_the_report_folder_has_a_junit_file_of_its_own(junit: InnerRun) -> None:
    cases = ElementTree.parse(junit.folder / "report" / "junit.xml").getroot().iter("testcase")
    assert [case.get("name") for case in cases] == ["test_clean", "test_leaking", "test_last"]


@pytest.mark.parametrize(
    "args",
    [
        ["-p", "no:logging", "-p", "no:warnings", "-p", "no:junitxml", "-p", "no:faulthandler", "-s"],
        ["-p", "no:terminal"],
        ["--capture=sys", "-p", "no:unittest", "-p", "no:skipping", "-p", "no:debugging", "-p", "no:threadexception"],
    ],
    ids=["no-logging-no-warnings-no-capture", "no-terminal", "capture-sys-no-unittest-no-skipping-no-debugging"],
)
def test_leaks_are_found_without_plugins_of_pytests_own(run_inner: RunInner, args: list[str]) -> None:
    run = run_inner(SMALL, *args)
    assert run.code == pytest.ExitCode.TESTS_FAILED, run.out + run.err
    assert run.counted("test_small.py::test_clean") == "passed"
    assert run.counted("test_small.py::test_leaking") == "failed"
    assert run.blamed == [
        "test_small.py::test_leaking",
        "test_small.py::test_second_leaking",
        "module fixture 'log' (test_small.py)",
    ]


@pytest.fixture(scope="module", params=["KeyboardInterrupt()", "pytest.exit.Exception('enough')"])
def interrupted(request: pytest.FixtureRequest, run_inner: RunInner) -> InnerRun:
    source = f"""
        import pytest
        from helper import leak, leak_a_file

        @pytest.fixture(scope="module")
        def log():
            leak_a_file()

        def test_leaking(log):
            leak()

        def test_interrupted():
            raise {request.param}

        def test_never_run():
            pass
    """
    return run_inner({"conftest.py": HELPER, "test_interrupt.py": source})


def test_an_interrupt_ends_the_run_as_without_leakcheck(interrupted: InnerRun) -> None:
    assert interrupted.code == pytest.ExitCode.INTERRUPTED
    assert "INTERNALERROR" not in interrupted.out
    assert "test_interrupt.py::test_never_run" not in interrupted.phases


def test_what_was_judged_before_an_interrupt_is_reported(interrupted: InnerRun) -> None:
    assert "test_interrupt.py::test_leaking" in interrupted.blamed
    assert "LEAK test_interrupt.py::test_leaking" in interrupted.out


def test_a_fixture_that_ends_because_of_an_interrupt_is_judged(interrupted: InnerRun) -> None:
    assert "module fixture 'log' (test_interrupt.py)" in interrupted.blamed


THIRD_PARTY = {
    "conftest.py": HELPER,
    "test_async.py": """
        import asyncio
        import pytest
        import torch
        from helper import Engine, leak

        pytestmark = pytest.mark.asyncio

        import pytest_asyncio

        @pytest_asyncio.fixture
        async def engine():
            yield Engine()

        async def test_passing(engine):
            tensor = torch.ones(1000)
            await asyncio.gather(*(asyncio.to_thread(torch.add, tensor, 1) for _ in range(2)))

        async def test_failing(engine):
            tensor = torch.ones(1000)
            assert 0

        async def test_leaking():
            leak()
    """,
    "test_policy.py": """
        import asyncio
        import threading

        def test_leaking_a_loop_with_a_thread():
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)

            async def wait():
                # Python waits for it at its exit.
                loop.run_in_executor(None, threading.Event().wait, 6)

            loop.run_until_complete(wait())
    """,
    "test_rerun.py": """
        import unittest
        import pytest
        import torch
        from hypothesis import given, settings, strategies
        from helper import Engine, leak

        RUNS = []

        @pytest.fixture
        def engine():
            return Engine()

        def test_passing(engine):
            pass

        def test_failing(engine):
            tensor = torch.ones(1000)
            assert 0

        def test_leaking():
            leak()

        @pytest.fixture
        def failing_engine():
            tensor = torch.ones(1000)
            raise RuntimeError(tensor)

        def test_failing_fixture(failing_engine):
            pass

        @pytest.mark.flaky(reruns=2)
        def test_rerun_until_it_passes(engine):
            tensor = torch.ones(1000)
            RUNS.append(1)
            assert len(RUNS) == 2

        class TestClass:
            runs = []

            @pytest.mark.flaky(reruns=1)
            def test_rerun(self):
                assert not hasattr(self, "weights")
                self.weights = torch.ones(1000)
                self.runs.append(1)
                assert len(self.runs) == 2

        class TestUnit(unittest.TestCase):
            runs = []

            @pytest.mark.flaky(reruns=1)
            def test_rerun(self):
                assert not hasattr(self, "weights")
                self.weights = torch.ones(1000)
                self.runs.append(1)
                self.assertEqual(len(self.runs), 2)

        class TestGiven:
            runs = []

            @pytest.mark.flaky(reruns=1)
            @settings(max_examples=1, database=None, deadline=None)
            @given(strategies.booleans())
            def test_rerun(self, value):
                assert len(self.runs) == 2

            def setup_method(self):
                self.runs.append(1)

        @pytest.mark.flaky(reruns=1)
        def test_rerun_and_failing(engine):
            tensor = torch.ones(1000)
            assert 0

        LEAKS = []

        @pytest.mark.flaky(reruns=2)
        def test_leaking_once():
            LEAKS.append(1)
            if len(LEAKS) == 1:
                leak()

        @pytest.mark.flaky(reruns=1)
        def test_leaking_every_time():
            leak()
    """,
}


@pytest.fixture(scope="module")
def asynchronous(run_inner: RunInner) -> InnerRun:
    pytest.importorskip("pytest_asyncio", reason="pytest-asyncio is not installed")
    files = {name: THIRD_PARTY[name] for name in ("conftest.py", "test_async.py", "test_policy.py")}
    return run_inner(files, "-o", "asyncio_default_fixture_loop_scope=function", using=["asyncio"])


@pytest.mark.parametrize(("test", "counted"), [("test_passing", "passed"), ("test_failing", "failed")])
def test_a_test_of_pytest_asyncio_that_leaves_nothing_is_counted_as_without_leakcheck(
    asynchronous: InnerRun, test: str, counted: str
) -> None:
    assert outcome(asynchronous, f"test_async.py::{test}") == counted


def test_what_a_test_leaves_in_the_process_s_loop_is_the_test_s_and_not_pytest_asyncio_s(
    asynchronous: InnerRun,
) -> None:
    assert asynchronous.leaks("test_policy.py::test_leaking_a_loop_with_a_thread")[0] == ("threads", "call")
    assert not [name for name in asynchronous.blamed if "event_loop_policy" in name]


def test_a_leak_of_a_test_of_pytest_asyncio_is_its_failure(asynchronous: InnerRun) -> None:
    assert leaking_outcome(asynchronous, "test_async.py::test_leaking") == "failed"


@pytest.fixture(scope="module")
def rerun(run_inner: RunInner) -> InnerRun:
    pytest.importorskip("pytest_rerunfailures", reason="pytest-rerunfailures is not installed")
    files = {name: THIRD_PARTY[name] for name in ("conftest.py", "test_rerun.py")}
    return run_inner(files, using=["rerunfailures"])


@pytest.mark.parametrize(
    ("test", "counted"), [("test_passing", "passed"), ("test_failing", "failed"), ("test_failing_fixture", "error")]
)
def test_where_pytest_rerunfailures_is_installed_a_test_that_leaves_nothing_is_clean(
    rerun: InnerRun, test: str, counted: str
) -> None:
    assert outcome(rerun, f"test_rerun.py::{test}") == counted


def test_where_pytest_rerunfailures_is_installed_a_leak_is_a_failure_of_its_test(rerun: InnerRun) -> None:
    assert leaking_outcome(rerun, "test_rerun.py::test_leaking") == "failed"


@pytest.mark.parametrize("kind", ["TestClass", "TestUnit", "TestGiven"])
def test_a_test_of_a_class_that_is_run_again_has_an_instance(rerun: InnerRun, kind: str) -> None:
    assert rerun.counted(f"test_rerun.py::{kind}::test_rerun") == "rerun passed"
    assert not [name for name in rerun.blamed if kind in name]


def test_a_test_that_is_run_again_and_passes_is_clean(rerun: InnerRun) -> None:
    assert rerun.counted("test_rerun.py::test_rerun_until_it_passes") == "rerun passed"
    assert not [name for name in rerun.blamed if "test_rerun_until_it_passes" in name]


def test_a_test_that_is_run_again_and_fails_is_clean(rerun: InnerRun) -> None:
    assert rerun.counted("test_rerun.py::test_rerun_and_failing") == "rerun failed"
    assert not [name for name in rerun.blamed if "test_rerun_and_failing" in name]


def test_a_test_that_leaks_is_run_again(rerun: InnerRun) -> None:
    assert rerun.counted("test_rerun.py::test_leaking_once") == "passed rerun passed"


def test_a_test_that_leaks_every_time_is_an_error_in_the_end(rerun: InnerRun) -> None:
    assert rerun.counted("test_rerun.py::test_leaking_every_time").endswith("error")
    assert "test_rerun.py::test_leaking_every_time" in rerun.blamed


def test_nobody_else_is_blamed_where_tests_are_run_again(rerun: InnerRun) -> None:
    assert set(rerun.blamed) <= {
        "test_rerun.py::test_leaking",
        "test_rerun.py::test_leaking_once",
        "test_rerun.py::test_leaking_every_time",
    }
    assert rerun.code == pytest.ExitCode.TESTS_FAILED


def test_what_another_program_leaves_in_shared_memory_meanwhile_is_nobodys_leak(
    run_inner: RunInner, tmp_path: Path
) -> None:
    shared = Path("/dev/shm", f"another_programs_{tmp_path.parent.name}_{uuid.uuid4().hex}")
    asked = tmp_path / "asked"
    source = f"""
        import time
        from pathlib import Path

        def test_while_another_program_runs():
            Path({str(asked)!r}).touch()
            while not Path({str(shared)!r}).exists():
                time.sleep(0.01)
    """
    script = f"""if True:
        import time
        from pathlib import Path

        while not Path({str(asked)!r}).exists():
            time.sleep(0.01)
        Path({str(shared)!r}).write_bytes(b"x")
    """
    other = subprocess.Popen([sys.executable, "-c", script])
    try:
        run = run_inner({"test_meanwhile.py": source})
    finally:
        other.kill()
        other.wait()
        shared.unlink(missing_ok=True)
    assert run.is_clean("test_meanwhile.py::test_while_another_program_runs")


def test_a_run_whose_only_leaks_are_expected_failures_ends_well(run_inner: RunInner) -> None:
    source = """
        import pytest
        from helper import leak

        @pytest.mark.xfail(reason="it leaks", strict=False)
        def test_xfail():
            leak()

        @pytest.mark.no_leakcheck(reason="it leaks")
        def test_excused():
            leak()
    """
    run = run_inner({"conftest.py": HELPER, "test_expected.py": source})
    assert run.totals == {"xfailed": 1, "passed": 1}
    assert run.code == pytest.ExitCode.OK
    assert run.blamed == []


def test_a_strict_xfail_that_leaks_does_not_stop_a_run_that_stops_at_the_first_failure(run_inner: RunInner) -> None:
    source = """
        import gc
        import pytest

        @pytest.mark.xfail(strict=True, reason="it leaks")
        def test_leaking():
            first, *others = gc.get_threshold()
            gc.set_threshold(first + 1, *others)

        def test_after_it():
            pass
    """
    stopped = run_inner({"test_strict.py": source}, "-x")
    assert stopped.counted("test_strict.py::test_leaking") == "xfailed"
    assert stopped.counted("test_strict.py::test_after_it") == "passed"

"""What pytest itself keeps alive is no test's leak: one test for each thing that it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytestmark = pytest.mark.nightly

if TYPE_CHECKING:
    from tests.pytest_plugin.conftest import InnerRun, RunInner

CONFTEST = """
    import weakref
    import torch

    PROBES = {}

    class Engine:
        def __init__(self):
            self.weights = torch.ones(1000)

    def probe(name):
        engine = Engine()
        PROBES[name] = weakref.ref(engine), weakref.ref(engine.weights)
        return engine

    def pytest_configure(config):
        import sys
        sys.modules["helper"] = sys.modules[__name__]
        config.addinivalue_line("markers", "needs(engine): a mark with an argument")
"""

RAISED = """
    import sys
    import pytest
    from helper import probe
    if sys.version_info < (3, 11):
        from exceptiongroup import ExceptionGroup

    def test_failing():
        engine = probe("failing")
        assert engine is None

    def test_failing_deep_in_a_call():
        def generate(engine):
            raise RuntimeError(engine)
        generate(probe("failing deep"))

    def test_failing_with_a_cause():
        try:
            test_failing_deep_in_a_call()
        except RuntimeError as error:
            raise ValueError("no") from error

    @pytest.mark.xfail(reason="not yet", strict=True)
    def test_xfailing():
        engine = probe("xfailing")
        assert engine is None

    def test_calling_xfail():
        engine = probe("calling xfail")
        pytest.xfail("not yet")

    def test_skipping():
        engine = probe("skipping")
        pytest.skip("not here")

    def test_excinfo():
        def generate():
            engine = probe("excinfo")
            raise ValueError("no")
        with pytest.raises(ValueError) as excinfo:
            generate()
        assert excinfo.match("no")

    def test_excinfo_of_a_failing_test():
        with pytest.raises(RuntimeError) as excinfo:
            test_failing_deep_in_a_call()
        assert excinfo is None

    def test_raises_group():
        def generate():
            engine = probe("raises group")
            raise ExceptionGroup("all", [ValueError("no")])
        with pytest.RaisesGroup(ValueError) as excinfo:
            generate()
        assert excinfo.value.exceptions
"""

EXPECTED = """
    import pytest
    from helper import probe

    @pytest.mark.parametrize("raises", [pytest.raises(RuntimeError)])
    def test_raises_as_a_parameter(raises):
        engine = probe("raises as a parameter")
        with raises:
            raise RuntimeError("no")
"""

GIVEN = """
    import unittest
    import torch
    from helper import probe
    from hypothesis import HealthCheck, given, settings, strategies

    @settings(max_examples=5, database=None, deadline=None)
    @given(size=strategies.integers(0, 3))
    def test_failing_example(size):
        engine = probe("failing example")
        assert size < 2

    @settings(max_examples=5, database=None, deadline=None)
    @given(size=strategies.integers(0, 3))
    def test_passing_examples(size):
        engine = probe("passing example")

    class TestMethods:
        @settings(max_examples=5, database=None, deadline=None)
        @given(size=strategies.integers(0, 3))
        def test_passing(self, size):
            self.engine = probe("passing @given method")

        @settings(max_examples=5, database=None, deadline=None)
        @given(size=strategies.integers(0, 3))
        def test_failing(self, size):
            self.engine = probe("failing @given method")
            assert size < 2

    class TestUnit(unittest.TestCase):
        @settings(max_examples=5, database=None, deadline=None)
        @given(size=strategies.integers(0, 3))
        def test_passing(self, size):
            self.engine = probe("@given method of a TestCase")
"""

UNREPORTED = """
    import select
    import threading
    import time
    import pytest
    from helper import probe

    def raising_later():
        def run():
            time.sleep(0.1)
            engine, polls = probe("raised in a thread"), select.epoll()
            raise RuntimeError("no")
        threading.Thread(target=run).start()

    def test_thread_that_raises_after_its_test():
        raising_later()

    def test_where_it_is_reported():
        pass

    class Raising:
        def __init__(self):
            self.itself = self

        def __del__(self):
            engine, polls = probe("raised in a finalizer"), select.epoll()
            raise RuntimeError("no")

    def test_finalizer_that_raises_when_it_is_collected():
        Raising()

    def test_where_that_is_reported():
        pass
"""

FIXTURES = """
    import pytest
    from helper import probe

    @pytest.fixture
    def engine():
        return probe("fixture")

    @pytest.fixture
    def yielded_engine():
        engine = probe("yield fixture")
        yield engine

    @pytest.fixture
    def failing():
        engine = probe("failing fixture")
        raise RuntimeError(engine)

    @pytest.fixture
    def failing_late():
        engine = probe("late failing fixture")
        yield engine
        raise RuntimeError(engine)

    def test_fixture(engine):
        pass

    def test_yield_fixture(yielded_engine):
        pass

    def test_failing_with_a_fixture(engine):
        assert not engine

    def test_fixture_by_name(request):
        request.getfixturevalue("engine")

    def test_failing_fixture(failing):
        pass

    def test_fixture_that_fails_late(failing_late):
        pass
"""

FAILED_MODULE_FIXTURE = """
    import pytest
    from helper import probe

    @pytest.fixture(scope="module")
    def engine():
        engine = probe("failed module fixture")
        raise RuntimeError(engine)

    def test_first(engine):
        pass

    def test_second(engine):
        pass

    def test_without():
        pass
"""

FAILED_SESSION_FIXTURE = """
    import pytest
    from helper import probe

    @pytest.fixture(scope="session")
    def session_engine():
        engine = probe("failed session fixture")
        raise RuntimeError(engine)

    def test_first(session_engine):
        pass

    def test_without():
        pass
"""

CLASSES = """
    import unittest
    from helper import probe

    class TestInstance:
        def test_attribute(self):
            self.engine = probe("instance attribute")

        def test_attribute_of_a_failing_test(self):
            self.engine = probe("instance attribute of a failing test")
            assert not self.engine

        def setup_method(self):
            self.first = probe("setup_method")

        def test_setup_method(self):
            assert self.first

    class TestUnit(unittest.TestCase):
        def setUp(self):
            self.engine = probe("setUp")

        def test_passing(self):
            self.other = probe("TestCase attribute")

        def test_failing(self):
            engine = probe("failing TestCase")
            self.assertIsNone(engine)

        def test_with_subtests(self):
            for size in range(2):
                with self.subTest(size=size):
                    self.engine = probe("subTest")
"""

WARNINGS = """
    import gc
    import warnings
    import pytest
    from helper import probe

    @pytest.mark.filterwarnings("always")
    def test_source():
        engine = probe("warning source")
        warnings.warn("engine was not closed", ResourceWarning, source=engine)

    @pytest.fixture
    def closing():
        yield
        warnings.warn("engine was not closed", ResourceWarning, source=probe("warning source in teardown"))

    @pytest.mark.filterwarnings("always")
    def test_source_in_teardown(closing):
        pass

    @pytest.mark.filterwarnings("always")
    def test_source_in_setup_and_failing():
        warnings.warn("engine was not closed", ResourceWarning, source=probe("warning source, failing"))
        assert 0

    class Slow(UserWarning):
        def __init__(self, text, batch):
            super().__init__(text)
            self.batch = batch

    class Told(UserWarning):
        def __init__(self, batch):
            self.batch = batch

        def __str__(self):
            return f"told of {type(self.batch).__name__}"

    @pytest.mark.filterwarnings("always")
    def test_message_with_attribute():
        warnings.warn(Slow("slow batch", probe("attribute of a warning")))

    @pytest.mark.filterwarnings("always")
    def test_message_with_argument():
        warnings.warn(UserWarning("slow", [probe("argument of a warning, in a list")]))

    @pytest.mark.filterwarnings("always")
    def test_message_that_says_itself():
        warnings.warn(Told(probe("attribute that a warning shows")))

    @pytest.mark.filterwarnings("always")
    def test_message_from_an_error():
        try:
            raise ValueError(probe("error behind a warning"))
        except ValueError as error:
            warning = UserWarning("from an error")
            warning.__cause__ = error
            warnings.warn(warning)
            del warning

    def test_recwarn():
        with pytest.warns(ResourceWarning) as recorded:
            warnings.warn("engine was not closed", ResourceWarning, source=probe("recorded warning"))
        assert len(recorded) == 1
"""

LOGS = """
    import logging
    import pytest
    from helper import probe

    LOG = logging.getLogger("engine")

    @pytest.fixture
    def in_setup():
        LOG.warning("%s", probe("log in setup"))

    @pytest.fixture
    def in_teardown():
        yield
        LOG.warning("%s", probe("log in teardown"))

    def test_setup(in_setup):
        pass

    def test_call():
        LOG.warning("%s", probe("log in call"))

    def test_teardown(in_teardown):
        pass

    def test_failing():
        LOG.warning("%s", probe("log in a failing call"))
        assert 0

    def test_with_exc_info():
        try:
            raise ValueError(probe("log with exc_info"))
        except ValueError:
            LOG.exception("no")

    def test_caplog(caplog):
        LOG.warning("%s", probe("caplog"))
        assert len(caplog.records) == 1
"""

# As `flaky` does: it asks the instance for its class, and has it until the test has run for the last time.
ANOTHER_RUNNER = """
    import pytest
    from _pytest import runner

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(item, nextitem):
        instance = getattr(item, "instance", None)
        for _ in range(2 if "again" in item.name else 1):
            runner.pytest_runtest_protocol(item, nextitem)
        return True
"""

RUN_BY_ANOTHER = """
    import ctypes
    import unittest
    import torch

    KEPT = []
    SEEN = []
    CLOSED = []

    class TestUnit(unittest.TestCase):
        def setUp(self):
            self.weights = torch.ones(1000)

        def test_attribute(self):
            self.more = torch.ones(10)

        def test_again(self):
            assert not hasattr(self, "more")
            self.more = torch.ones(10)
            SEEN.append(len(self.weights))

        def test_kept(self):
            KEPT.append(self)

    def show():
        '''
        >>> torch.ones(3)
        tensor([1., 1., 1.])
        '''

    class TestFinalized(unittest.IsolatedAsyncioTestCase):
        def test_finalizer_of_unittest(self):
            self.weights = torch.ones(1000)

    class TestOwnFinalizer:
        def test_finalizer(self):
            self.closed = True

        def __del__(self):
            CLOSED.append(hasattr(self, "closed"))

    class TestOwnMethod:
        def test_own_method(self):
            self.weights = torch.ones(1000)
            self.run = self.test_own_method

        def test_own_method_kept(self):
            self.weights = torch.ones(1000)
            self.run = self.test_own_method
            KEPT.append(self.run)

    class Engine:
        def __init__(self, on_token):
            self.on_token, self.weights = on_token, torch.ones(1000)
            self.model = {"engine": self}

    def step():
        weights = torch.ones(1000)
        raise ValueError

    class TestOwnCycles:
        def on_token(self):
            pass

        def test_engine(self):
            self.engine = Engine(self.on_token)

        def test_engine_kept(self):
            self.engine = Engine(self.on_token)
            KEPT.append(self.engine)

        def test_engine_kept_from_within(self):
            self.engine = Engine(self.on_token)
            KEPT.append(self.engine.on_token)

        def test_error(self):
            try:
                step()
            except ValueError as error:
                self.error = error

        def test_error_kept(self):
            try:
                step()
            except ValueError as error:
                self.error = error
                KEPT.append(error)

    class TestExpected(unittest.TestCase):
        @unittest.expectedFailure
        def test_expected_failure(self):
            self.weights = torch.ones(1000)
            garbage = [self]
            garbage.append(garbage)
            self.fail()

    class TestPlain:
        def test_attribute(self):
            self.weights = torch.ones(1000)

        def test_again(self):
            assert not hasattr(self, "weights")
            self.weights = torch.ones(1000)
            SEEN.append(len(self.weights))

        def test_kept(self):
            self.weights = torch.ones(1000)
            KEPT.append(self)

        def test_kept_by_native_code(self):
            self.weights = torch.ones(1000)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def test_they_were_run_twice():
        assert SEEN == [1000] * 4
        assert True in CLOSED
"""

KEPT_BY_DESIGN = """
    import pytest
    from helper import Engine

    @pytest.mark.parametrize("engines", [[]], ids=["empty"])
    def test_parametrize(engines):
        engines.append(Engine())

    @pytest.mark.needs([])
    def test_mark(request):
        request.node.get_closest_marker("needs").args[0].append(Engine())

    def test_record_property(record_property):
        record_property("engine", Engine())

    def test_record_property_text(record_property):
        record_property("engine", repr(Engine()))
"""

LEAKS = """
    import torch

    KEPT = []

    def test_failing_and_leaking():
        KEPT.append(torch.ones(1000))
        assert 0

"""

LAST = """
    from helper import PROBES

    def test_what_is_alive():
        print("alive:", [name for name, references in PROBES.items() if any(one() is not None for one in references)])
        assert 0
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner(
        {
            "conftest.py": CONFTEST,
            "test_raised.py": RAISED,
            "test_expected.py": EXPECTED,
            "test_given.py": GIVEN,
            "test_unreported.py": UNREPORTED,
            "test_fixtures.py": FIXTURES,
            "test_failed_module_fixture.py": FAILED_MODULE_FIXTURE,
            "test_failed_session_fixture.py": FAILED_SESSION_FIXTURE,
            "test_classes.py": CLASSES,
            "test_warnings.py": WARNINGS,
            "test_logs.py": LOGS,
            "test_kept_by_design.py": KEPT_BY_DESIGN,
            "test_leaks.py": LEAKS,
            "test_zz_last.py": LAST,
        }
    )


def held_back(run: InnerRun, test: str) -> str:
    """As what the summary counts a test of which nothing may have been said to leak."""
    assert run.is_clean(test), [finding.message for finding in run.subject(test).findings]
    assert not any(phase.message.startswith("leak") for phase in run.phases[test])
    return run.counted(test)


@pytest.mark.parametrize(
    "test",
    ["test_failing", "test_failing_deep_in_a_call", "test_failing_with_a_cause", "test_excinfo_of_a_failing_test"],
)
def test_the_locals_of_a_failing_test_are_no_leak(run: InnerRun, test: str) -> None:
    assert held_back(run, f"test_raised.py::{test}") == "failed"


@pytest.mark.parametrize("test", ["test_xfailing", "test_calling_xfail"])
def test_the_locals_of_a_test_that_fails_as_expected_are_no_leak(run: InnerRun, test: str) -> None:
    assert held_back(run, f"test_raised.py::{test}") == "xfailed"


def test_the_locals_of_a_test_that_skips_are_no_leak(run: InnerRun) -> None:
    assert held_back(run, "test_raised.py::test_skipping") == "skipped"


@pytest.mark.parametrize("test", ["test_excinfo", "test_raises_group"])
def test_the_cycle_of_an_excinfo_is_no_leak(run: InnerRun, test: str) -> None:
    assert held_back(run, f"test_raised.py::{test}") == "passed"


def test_the_locals_of_a_failing_example_are_no_leak(run: InnerRun) -> None:
    assert held_back(run, "test_given.py::test_failing_example") == "failed"


def test_the_locals_of_passing_examples_are_no_leak(run: InnerRun) -> None:
    assert held_back(run, "test_given.py::test_passing_examples") == "passed"


@pytest.mark.parametrize("test", ["TestMethods::test_passing", "TestUnit::test_passing"])
def test_the_instance_that_hypothesis_keeps_of_a_given_method_is_no_leak(run: InnerRun, test: str) -> None:
    assert held_back(run, f"test_given.py::{test}") == "passed"


def test_the_instance_of_a_failing_given_method_is_no_leak(run: InnerRun) -> None:
    assert held_back(run, "test_given.py::TestMethods::test_failing") == "failed"


@pytest.mark.parametrize(
    "test", ["test_thread_that_raises_after_its_test", "test_finalizer_that_raises_when_it_is_collected"]
)
def test_the_locals_of_what_pytest_has_still_to_report_are_no_leak(run: InnerRun, test: str) -> None:
    assert held_back(run, f"test_unreported.py::{test}") == "passed"


@pytest.mark.parametrize("test", ["test_where_it_is_reported", "test_where_that_is_reported"])
def test_what_was_raised_in_a_thread_or_a_finalizer_is_reported_all_the_same(run: InnerRun, test: str) -> None:
    assert run.counted(f"test_unreported.py::{test}") == "error"


@pytest.mark.parametrize("test", ["test_fixture", "test_yield_fixture", "test_fixture_by_name"])
def test_the_values_of_a_tests_fixtures_are_no_leak(run: InnerRun, test: str) -> None:
    assert held_back(run, f"test_fixtures.py::{test}") == "passed"


def test_the_fixtures_of_a_failing_test_are_no_leak(run: InnerRun) -> None:
    assert held_back(run, "test_fixtures.py::test_failing_with_a_fixture") == "failed"


def test_the_locals_of_a_fixture_that_fails_are_no_leak(run: InnerRun) -> None:
    assert held_back(run, "test_fixtures.py::test_failing_fixture") == "error"


def test_the_locals_of_a_fixture_whose_teardown_fails_are_no_leak(run: InnerRun) -> None:
    assert held_back(run, "test_fixtures.py::test_fixture_that_fails_late") == "passed error"


@pytest.mark.parametrize("scope", ["module", "session"])
def test_a_failed_fixture_of_a_wider_scope_is_no_leak_of_the_test_that_asked_for_it(run: InnerRun, scope: str) -> None:
    assert held_back(run, f"test_failed_{scope}_fixture.py::test_first") == "error"


def test_a_failed_module_fixture_is_no_leak_of_the_next_test_that_asks_for_it(run: InnerRun) -> None:
    assert held_back(run, "test_failed_module_fixture.py::test_second") == "error"


@pytest.mark.parametrize("scope", ["module", "session"])
def test_a_failed_fixture_of_a_wider_scope_is_no_leak_of_other_tests(run: InnerRun, scope: str) -> None:
    assert held_back(run, f"test_failed_{scope}_fixture.py::test_without") == "passed"


def test_no_fixture_that_failed_is_blamed(run: InnerRun) -> None:
    assert not [name for name in run.blamed if "fixture '" in name]


@pytest.mark.parametrize("test", ["test_attribute", "test_setup_method"])
def test_the_attributes_of_a_test_classs_instance_are_no_leak(run: InnerRun, test: str) -> None:
    assert held_back(run, f"test_classes.py::TestInstance::{test}") == "passed"


def test_the_attributes_of_a_failing_tests_instance_are_no_leak(run: InnerRun) -> None:
    assert held_back(run, "test_classes.py::TestInstance::test_attribute_of_a_failing_test") == "failed"


@pytest.mark.parametrize("test", ["test_passing", "test_with_subtests"])
def test_the_attributes_of_a_testcase_are_no_leak(run: InnerRun, test: str) -> None:
    assert held_back(run, f"test_classes.py::TestUnit::{test}") == "passed"


@pytest.fixture(scope="module")
def by_another(run_inner: RunInner) -> InnerRun:
    files = {"conftest.py": ANOTHER_RUNNER, "test_by_another.py": RUN_BY_ANOTHER}
    return run_inner(files, "--doctest-modules")


@pytest.mark.parametrize("test", ["TestUnit::test_attribute", "TestPlain::test_attribute"])
def test_an_instance_that_only_another_runner_has_is_no_leak(by_another: InnerRun, test: str) -> None:
    assert held_back(by_another, f"test_by_another.py::{test}") == "passed"


@pytest.mark.parametrize("kind", ["TestUnit", "TestPlain"])
def test_a_test_that_is_run_again_gets_another_instance(by_another: InnerRun, kind: str) -> None:
    name = f"test_by_another.py::{kind}::test_again"
    assert by_another.counted(name) == "passed passed"
    assert name not in by_another.blamed
    assert by_another.counted("test_by_another.py::test_they_were_run_twice") == "passed"


@pytest.mark.parametrize("test", ["TestUnit::test_kept", "TestPlain::test_kept"])
def test_an_instance_that_somebody_else_has_too_leaks(by_another: InnerRun, test: str) -> None:
    (finding,) = by_another.subject(f"test_by_another.py::{test}").findings
    assert (finding.resource, finding.bytes) == ("tensors", 4000)
    assert "test_by_another.KEPT" in (finding.holder or "")
    assert by_another.counted(f"test_by_another.py::{test}") == "failed"


def test_an_instance_with_a_finalizer_is_emptied_of_nothing_that_it_needs(by_another: InnerRun) -> None:
    for name in ("TestFinalized::test_finalizer_of_unittest", "TestOwnFinalizer::test_finalizer"):
        assert held_back(by_another, f"test_by_another.py::{name}") == "passed"
    assert "Exception ignored" not in by_another.out


def test_an_instance_that_garbage_has_too_is_no_leak(by_another: InnerRun) -> None:
    assert by_another.is_clean("test_by_another.py::TestExpected::test_expected_failure")


def test_an_instance_that_has_a_method_of_its_own_is_no_leak_unless_somebody_else_has_it(by_another: InnerRun) -> None:
    assert by_another.is_clean("test_by_another.py::TestOwnMethod::test_own_method")
    assert "test_by_another.py::TestOwnMethod::test_own_method_kept" in by_another.blamed


@pytest.mark.parametrize("test", ["test_engine", "test_error"])
def test_an_instance_to_which_its_own_attributes_lead_is_no_leak(by_another: InnerRun, test: str) -> None:
    assert held_back(by_another, f"test_by_another.py::TestOwnCycles::{test}") == "passed"


@pytest.mark.parametrize("test", ["test_engine_kept", "test_engine_kept_from_within", "test_error_kept"])
def test_an_instance_to_which_what_somebody_keeps_leads_leaks(by_another: InnerRun, test: str) -> None:
    name = f"test_by_another.py::TestOwnCycles::{test}"
    assert any(finding.resource == "tensors" for finding in by_another.subject(name).findings)


def test_the_value_that_a_doctest_showed_last_is_no_leak(by_another: InnerRun) -> None:
    assert by_another.is_clean("test_by_another.py::test_by_another.show")


def test_an_instance_that_native_code_has_too_leaks(by_another: InnerRun) -> None:
    (finding,) = by_another.subject("test_by_another.py::TestPlain::test_kept_by_native_code").findings
    assert (finding.resource, finding.bytes) == ("tensors", 4000)


def test_the_frames_of_an_expected_error_are_no_leak_where_what_expects_it_is_a_parameter(run: InnerRun) -> None:
    assert held_back(run, "test_expected.py::test_raises_as_a_parameter[raises0]") == "passed"


def test_the_locals_of_a_failing_testcase_are_no_leak(run: InnerRun) -> None:
    assert held_back(run, "test_classes.py::TestUnit::test_failing") == "failed"


@pytest.mark.parametrize(
    "test",
    [
        "test_source",
        "test_source_in_teardown",
        "test_recwarn",
        "test_message_with_attribute",
        "test_message_with_argument",
        "test_message_that_says_itself",
        "test_message_from_an_error",
    ],
)
def test_what_a_warning_is_about_is_no_leak(run: InnerRun, test: str) -> None:
    assert held_back(run, f"test_warnings.py::{test}") == "passed"


def test_what_a_failing_tests_warning_is_about_is_no_leak(run: InnerRun) -> None:
    assert held_back(run, "test_warnings.py::test_source_in_setup_and_failing") == "failed"


def test_warnings_are_still_shown_at_the_end(run: InnerRun) -> None:
    assert run.out.count("ResourceWarning: engine was not closed") == 3
    for text in ("Slow: slow batch", "Told: told of ", "UserWarning: from an error"):
        assert run.out.count(text) == 1


@pytest.mark.parametrize("test", ["test_setup", "test_call", "test_teardown", "test_with_exc_info", "test_caplog"])
def test_the_arguments_of_log_records_are_no_leak(run: InnerRun, test: str) -> None:
    assert held_back(run, f"test_logs.py::{test}") == "passed"


def test_the_log_records_of_a_failing_test_are_no_leak(run: InnerRun) -> None:
    assert held_back(run, "test_logs.py::test_failing") == "failed"


def test_the_log_of_a_failing_test_is_still_shown(run: InnerRun) -> None:
    assert "Captured log call" in run.out


def kept_for_the_session(run: InnerRun, test: str) -> str:
    """What is said of a test that left an object where pytest keeps it for the whole session."""
    assert run.counted(test) == "failed"
    assert run.leaks(test) == [("tensors", "call")]
    text = " ".join(phase.text for phase in run.phases[test])
    assert "for the whole session" in text
    return text


def test_an_object_in_a_parametrized_value_leaks_and_the_message_says_that_pytest_keeps_those(run: InnerRun) -> None:
    assert "parametrize" in kept_for_the_session(run, "test_kept_by_design.py::test_parametrize[empty]")


def test_an_object_in_a_marks_argument_leaks_and_the_message_says_that_pytest_keeps_those(run: InnerRun) -> None:
    assert "@pytest.mark.needs" in kept_for_the_session(run, "test_kept_by_design.py::test_mark")


def test_an_object_given_to_record_property_leaks_and_the_message_says_that_pytest_keeps_those(run: InnerRun) -> None:
    assert "record_property" in kept_for_the_session(run, "test_kept_by_design.py::test_record_property")


def test_lowtide_is_never_named_as_a_holder(run: InnerRun) -> None:
    assert run.report is not None
    findings = [finding for subject in run.report.subjects for finding in subject.findings]
    assert [finding.holder for finding in findings if "meta_path" in str(finding.holder)] == []


def test_text_given_to_record_property_is_no_leak(run: InnerRun) -> None:
    assert held_back(run, "test_kept_by_design.py::test_record_property_text") == "passed"


def test_a_failing_test_is_reported_with_its_own_failure(run: InnerRun) -> None:
    assert run.counted("test_leaks.py::test_failing_and_leaking") == "failed"
    assert run.message("test_leaks.py::test_failing_and_leaking") == "assert 0"


def test_what_a_failing_test_leaves_elsewhere_is_its_leak(run: InnerRun) -> None:
    (finding,) = run.subject("test_leaks.py::test_failing_and_leaking").findings
    assert (finding.resource, finding.holder) == ("tensors", "test_leaks.KEPT[0]")


def test_the_leak_of_a_failing_test_is_reported_beside_its_failure(run: InnerRun) -> None:
    _, _, failures = run.out.partition("____ test_failing_and_leaking ____")
    assert "test_leaks.py::test_failing_and_leaking left something behind:" in failures


def test_every_object_that_pytest_kept_is_gone_with_its_test_or_scope(run: InnerRun) -> None:
    # The session fixture's own scope has not ended when the last test looks.
    assert "alive: ['failed session fixture']" in run.out

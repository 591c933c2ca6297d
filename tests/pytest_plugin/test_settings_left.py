"""Process-wide settings in a whole run: found with what they were, put back at the end, and not what is not left."""

from __future__ import annotations

import pytest

from lowtide.reports.finding_lines import in_vain
from tests.pytest_plugin.conftest import InnerRun, RunInner

pytestmark = pytest.mark.nightly

LIBRARY = """
    import logging, os, sys, warnings

    os.environ["LOWTIDE_AT_IMPORT"] = "1"
    sys.path.append("/lowtide/at-import")
    logging.getLogger().addHandler(logging.StreamHandler())
    logging.getLogger("lowtide_inner").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="lowtide")
"""

LEFT = """
    import logging, os, signal, sys, warnings

    import pytest
    import torch


    def stop(*_):
        pass


    @pytest.fixture
    def one_thread():
        torch.set_num_threads(1)


    def test_a_fixture(one_thread):
        pass


    def test_the_same_value_again():
        torch.set_num_threads(1)


    def test_threads_put_back():
        torch.set_num_threads(3)


    def test_environment():
        os.environ["LOWTIDE_TOKEN"] = "abc"
        os.environ["LOWTIDE_PLAIN"] = "1"


    def test_signal():
        signal.signal(signal.SIGUSR2, stop)


    def test_many():
        logging.getLogger("lowtide_late").setLevel(10)
        torch.set_grad_enabled(False)
        os.chdir("/")


    def test_last():
        # What was left is left alone while tests follow.
        assert (os.getcwd(), torch.is_grad_enabled()) == ("/", False)
"""

CLEAN = """
    import contextlib, logging, os, signal, sys, warnings

    import pytest
    import torch
    from unittest import mock


    def test_filters_that_pytest_puts_back():
        warnings.simplefilter("ignore")


    def test_what_an_import_sets():
        import library


    def test_what_a_library_sets_for_itself():
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        cache_dir()


    def test_put_back(monkeypatch, caplog, tmp_path):
        monkeypatch.setenv("LOWTIDE_A", "1")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        caplog.set_level(10, logger="torch")
        with mock.patch.dict(os.environ, {"LOWTIDE_B": "1"}), mock.patch("torch.Event"), torch.no_grad():
            with torch.autocast("cpu"), torch.device("meta"):
                pass


    @pytest.fixture(scope="module")
    def settled():
        import library_of_a_fixture

        handler = logging.StreamHandler()
        logging.getLogger().addHandler(handler)
        torch.set_default_dtype(torch.float64)
        yield
        logging.getLogger().removeHandler(handler)
        torch.set_default_dtype(torch.float32)


    def test_a_wider_fixture(settled):
        pass


    def test_that_ends_a_wider_fixture(settled):
        pass
"""


VENDOR = """
    import sys, types

    import torch


    def nothing_at_import():
        pass


    def nothing_at_start():
        pass


    def start():
        torch.accelerator.empty_cache = nothing_at_start


    torch.accelerator.empty_cache = nothing_at_import
    sys.modules["vendor_native"] = types.ModuleType("vendor_native")
"""

REPLACED = """
    import importlib, signal, sys, time, types
    from unittest import mock

    import pytest
    import torch


    def fake(*_, **__):
        pass


    def test_clean_import():
        import json.tool
        import vendor


    def test_clean_first_uses():
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
        torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2))
        torch._dynamo.reset()


    def test_clean_reload():
        importlib.reload(torch.utils.hooks)


    def test_clean_mock(monkeypatch):
        monkeypatch.setattr(torch.nn.Linear, "cuda", fake)
        monkeypatch.setitem(sys.modules, "lowtide_native", None)
        with mock.patch.object(torch.nn.Module, "register_parameter"), mock.patch.object(torch.Tensor, "to"):
            with mock.patch("time.time"), mock.patch.dict(sys.modules, {"lowtide_fake": mock.MagicMock()}):
                pass


    def test_clean_by_hand():
        # What a class had inherited is its own then, and a class method a bound one.
        to, load = torch.Tensor.to, torch.nn.Embedding.from_pretrained
        torch.Tensor.to = torch.nn.Embedding.from_pretrained = fake
        torch.Tensor.to, torch.nn.Embedding.from_pretrained = to, load


    @pytest.fixture(scope="module")
    def patched():
        with mock.patch("torch.nn.functional.relu", fake):
            yield


    def test_clean_fixture(patched):
        pass


    def test_of_a_vendor():
        import vendor

        vendor.start()


    def test_methods():
        register = torch.nn.Module.register_parameter
        torch.nn.Module.register_parameter = lambda self, name, value: register(self, name, value)
        torch.Tensor.to = fake
        torch.empty = torch.zeros


    def test_library_decorator():
        torch.Tensor.cpu = torch.no_grad()(lambda self: self)


    def test_started_mock():
        mock.patch.object(torch.nn.Linear, "forward", autospec=True).start()


    def test_time():
        time.time = lambda: 0.0


    def test_option():
        torch.compiler.config.job_id = "a"


    def test_clean_options():
        with torch._dynamo.config.patch(recompile_limit=9), mock.patch.object(torch._dynamo.config, "verbose", True):
            pass
        # The same names: in a larger table their order is another one.
        many = set(map(str, range(1000)))
        names = torch._dynamo.config.allowed_functions_module_string_ignorelist
        torch._dynamo.config.allowed_functions_module_string_ignorelist = ({*names} | many) - many


    def test_timer():
        signal.setitimer(signal.ITIMER_PROF, 1000)


    def test_stub_of_the_same_kind():
        sys.modules["vendor_native"] = types.ModuleType("vendor_native")


    def test_stub():
        sys.modules["lowtide_native"] = types.ModuleType("lowtide_native")


    def test_class_default():
        torch.distributions.Distribution.set_default_validate_args(not torch.distributions.Distribution._validate_args)
"""


AGAIN = """
    import logging.config, logging.handlers, signal, sys, time

    import pytest

    CONFIGURATION = {
        "version": 1,
        "handlers": {"h": {"class": "logging.StreamHandler"}},
        "loggers": {"lowtide_app": {"handlers": ["h"], "level": "INFO"}},
    }
    thrice = pytest.mark.parametrize("turn", range(3))


    class Finder:
        def find_spec(self, *_):
            pass


    @thrice
    def test_configured(turn):
        logging.config.dictConfig(CONFIGURATION)


    @thrice
    def test_handler(turn):
        signal.signal(signal.SIGUSR1, lambda *_: None)


    @thrice
    def test_hook(turn):
        sys.displayhook = lambda *_: None


    @thrice
    def test_finder(turn):
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder) is not Finder]
        sys.meta_path.append(Finder())


    @thrice
    def test_clock(turn):
        time.time = lambda: 0.0


    @thrice
    def test_one_more(turn):
        logging.getLogger("lowtide_grows").addHandler(logging.StreamHandler())


    @thrice
    def test_replaced_and_one_more(turn):
        logger = logging.getLogger("lowtide_doubles")
        logger.handlers[:] = [logging.StreamHandler() for _ in range(len(logger.handlers) + 1)]


    @thrice
    def test_another_kind(turn):
        kinds = (logging.StreamHandler, logging.Handler, logging.handlers.BufferingHandler)
        handler = kinds[turn](*[1] * (turn == 2))
        logging.getLogger("lowtide_kinds").handlers[:] = [handler]


    def test_put_back():
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


    def test_handler_after_it_was_put_back():
        signal.signal(signal.SIGUSR1, lambda *_: None)


    @pytest.fixture(scope="module")
    def configured():
        logger, handler = logging.getLogger("lowtide_fixture"), logging.StreamHandler()
        logger.addHandler(handler)
        before = signal.signal(signal.SIGUSR2, Finder().find_spec)
        yield logger
        signal.signal(signal.SIGUSR2, before)
        logger.removeHandler(handler)


    def test_of_a_wider_scope(configured):
        configured.handlers[:] = [logging.StreamHandler()]
        signal.signal(signal.SIGUSR2, Finder().find_spec)


    def test_that_uses_it_too(configured):
        pass
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    of_a_fixture = LIBRARY.replace("at-", "in-")
    files = {"library.py": LIBRARY, "library_of_a_fixture.py": of_a_fixture, "test_1_clean.py": CLEAN}
    return run_inner(
        {**files, "vendor.py": VENDOR, "test_2_left.py": LEFT, "test_3_replaced.py": REPLACED, "test_4_again.py": AGAIN}
    )


def message(run: InnerRun, test: str) -> str:
    (finding,) = run.subject(f"test_2_left.py::{test}").findings
    assert (finding.resource, finding.cause) == ("globals", "not-restored")
    return finding.message


@pytest.mark.parametrize("test", ["import", "first_uses", "reload", "mock", "by_hand", "fixture", "options"])
def test_what_is_put_back_or_a_librarys_own_is_not_reported(run: InnerRun, test: str) -> None:
    subject = run.subject(f"test_3_replaced.py::test_clean_{test}")
    assert not [finding for finding in subject.findings if finding.resource == "globals"], subject.findings


@pytest.mark.parametrize(
    ("test", "holder", "code"),
    [
        (
            "of_a_vendor",
            "torch.accelerator.empty_cache",
            "torch.accelerator.empty_cache = torch.accelerator.memory.empty_cache",
        ),
        (
            "methods",
            "torch.Tensor.to, torch.empty, torch.nn.Module.register_parameter",
            "del torch.Tensor.to; torch.empty = torch._C._VariableFunctions.empty; torch.nn.Module.register_parameter "
            "= torch.nn.Module.register_parameter.__closure__[0].cell_contents",
        ),
        ("library_decorator", "torch.Tensor.cpu", "del torch.Tensor.cpu"),
        ("started_mock", "torch.nn.Linear.forward", "putting torch.nn.Linear.forward back"),
        ("time", "time.time", "time"),
        ("option", "torch.compiler.config.job_id", "torch.compiler.config.job_id = None"),
        ("timer", "interval timer signal.ITIMER_PROF", "signal.setitimer(signal.ITIMER_PROF, 0)"),
        (
            "class_default",
            "torch.distributions.Distribution._validate_args",
            "torch.distributions.Distribution._validate_args = False",
        ),
        ("stub", "sys.modules['lowtide_native']", "sys.modules.pop('lowtide_native')"),
    ],
)
def test_what_is_put_in_the_place_of_a_function_is_reported_and_put_back(
    run: InnerRun, test: str, holder: str, code: str
) -> None:
    (finding,) = run.subject(f"test_3_replaced.py::test_{test}").findings
    assert (finding.resource, finding.cause, finding.holder) == ("globals", "not-restored", holder)
    assert code in (finding.advice or "" if finding.remedy is None else finding.remedy.action)
    assert "it returns it" in (finding.advice or "") or "returns it" in finding.message
    # What it says that it returns is not said to have been in vain, too.
    assert in_vain(finding) == []


@pytest.mark.parametrize(
    "test",
    [
        "test_1_clean.py::test_filters_that_pytest_puts_back",
        "test_1_clean.py::test_what_an_import_sets",
        "test_1_clean.py::test_what_a_library_sets_for_itself",
        "test_1_clean.py::test_put_back",
        "test_1_clean.py::test_a_wider_fixture",
        "test_1_clean.py::test_that_ends_a_wider_fixture",
        "test_2_left.py::test_the_same_value_again",
        "test_2_left.py::test_last",
        "test_3_replaced.py::test_stub_of_the_same_kind",
    ],
)
def test_what_is_not_left_is_not_reported(run: InnerRun, test: str) -> None:
    assert run.is_clean(test), run.subject(test).findings


def test_no_fixture_is_blamed_for_what_it_imports(run: InnerRun) -> None:
    assert not [name for name in run.blamed if "fixture" in name]


def test_what_a_fixture_sets_is_of_its_setup(run: InnerRun) -> None:
    # The inner run has one thread from the start.
    assert run.is_clean("test_2_left.py::test_a_fixture")
    assert run.leaks("test_2_left.py::test_threads_put_back") == [("globals", "call")]


def test_a_secret_is_nowhere_in_the_report(run: InnerRun) -> None:
    reported = message(run, "test_environment")
    assert "os.environ['LOWTIDE_PLAIN'] was not set, is '1' (set in test_environment, test_2_left.py:" in reported
    assert "os.environ['LOWTIDE_TOKEN'] was not set, is a value that is not shown" in reported
    assert "abc" not in (run.folder / "report" / "leakcheck.json").read_text() + run.out


def test_a_handler_is_named(run: InnerRun) -> None:
    reported = message(run, "test_signal")
    assert "signal.getsignal(signal.SIGUSR2) was signal.SIG_DFL, is test_2_left.stop" in reported


@pytest.mark.parametrize(
    ("test", "remedy"),
    [
        ("test_threads_put_back", "torch.set_num_threads(1)"),
        ("test_environment", "os.environ.pop('LOWTIDE_PLAIN'); os.environ.pop('LOWTIDE_TOKEN')"),
        ("test_signal", "signal.signal(signal.SIGUSR2, signal.SIG_DFL)"),
    ],
)
def test_the_code_that_puts_it_back_was_run_at_the_end(run: InnerRun, test: str, remedy: str) -> None:
    (finding,) = run.subject(f"test_2_left.py::{test}").findings
    assert finding.remedy is not None
    assert finding.remedy.action == remedy


def test_many_are_one_finding(run: InnerRun) -> None:
    (finding,) = run.subject("test_2_left.py::test_many").findings
    assert finding.count == 3
    assert finding.stage == "call"
    assert finding.remedy is not None
    lines = ["logging.getLogger('lowtide_late').setLevel(0)", f"os.chdir({str(run.folder)!r})"]
    assert finding.remedy.action == "; ".join([*lines, "torch.set_grad_enabled(True)"])


@pytest.mark.parametrize("test", ["configured", "handler", "hook", "finder", "clock"])
def test_what_takes_the_place_of_its_like_is_reported_once(run: InnerRun, test: str) -> None:
    found = [run.leaks(f"test_4_again.py::test_{test}[{turn}]") for turn in range(3)]
    assert found == [[("globals", "call")], [], []]


@pytest.mark.parametrize("test", ["one_more", "replaced_and_one_more", "another_kind"])
def test_what_becomes_more_or_is_of_another_kind_is_reported_each_time(run: InnerRun, test: str) -> None:
    for turn in range(3):
        (finding,) = run.subject(f"test_4_again.py::test_{test}[{turn}]").findings
        assert (finding.resource, finding.count) == ("globals", 1)


def test_what_was_put_back_in_between_is_reported_again(run: InnerRun) -> None:
    assert run.is_clean("test_4_again.py::test_put_back")
    assert run.leaks("test_4_again.py::test_handler_after_it_was_put_back") == [("globals", "call")]


def test_what_takes_the_place_of_a_fixtures_own_is_reported_as_replaced(run: InnerRun) -> None:
    (finding,) = run.subject("test_4_again.py::test_of_a_wider_scope").findings
    handler = "handler logging.StreamHandler of logging.getLogger('lowtide_fixture')"
    assert f"{handler} was replaced by another one" in finding.message
    assert "signal.getsignal(signal.SIGUSR2) was replaced by another test_4_again.Finder.find_spec" in finding.message


def test_many_loggers_that_a_configuration_disables_are_one_sentence_and_one_line_of_code(run: InnerRun) -> None:
    (finding,) = run.subject("test_4_again.py::test_configured[0]").findings
    assert finding.count is not None
    assert finding.count > 20
    assert f"disabled of {finding.count - 2} loggers was False, is True (logging.getLogger('" in finding.message
    assert finding.message.count("getLogger(") < 10
    assert finding.remedy is not None
    # Of a later test's handler: it has taken the place of the first.
    app = "logging.getLogger('lowtide_app')"
    assert finding.remedy.action.endswith(f"; {app}.removeHandler({app}.handlers[0]); {app}.setLevel(0)")

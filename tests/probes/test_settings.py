"""Process-wide settings: each change is seen and undone, nothing foreign runs, a library's own is told apart."""

from __future__ import annotations

import asyncio
import builtins
import copyreg
import ctypes
import decimal
import faulthandler
import functools
import gc
import importlib
import locale
import logging
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.leakcheck.resources.settings import (
    ABSENT,
    SettingChange,
    advice,
    changes_between,
    describe_change,
    put_back,
    run,
    undo,
    undoing,
)
from lowtide.probes.host import replaced as replaced_attributes
from lowtide.probes.host import torch_settings
from lowtide.probes.host.counters import SettingReader
from lowtide.probes.host.settings import library_values
from tests.loaded_modules import load_instead

# (No test of a card needs it.)
uvicorn: Any = pytest.importorskip("uvicorn")


def hook(*_: object) -> None:
    """What a test leaves where hooks go."""


class Engine:
    """Has a method to be called by a signal."""

    def stop(self, *_: object) -> None:
        pass


class Finder:
    """Finds no module."""

    @classmethod
    def find_spec(cls, *_: object) -> None:
        pass


class Policy(asyncio.DefaultEventLoopPolicy):
    """Of the program's own."""


class OwnLogger(logging.Logger):
    """Of the program's own."""


class FunctionMode(TorchFunctionMode):
    """Changes nothing."""


class DispatchMode(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def assign(item: Any, name: str, value: object) -> Callable[[ExitStack], None]:
    def change(stack: ExitStack) -> None:
        stack.callback(setattr, item, name, getattr(item, name))
        setattr(item, name, value)

    return change


def call(do: Callable[[], Any], undo_it: Callable[[], Any]) -> Callable[[ExitStack], None]:
    def change(stack: ExitStack) -> None:
        stack.callback(undo_it)
        do()

    return change


def entered(make: Callable[[], Any]) -> Callable[[ExitStack], None]:
    return lambda stack: stack.enter_context(make())


def added(logger: logging.Logger, handler: logging.Handler) -> Callable[[ExitStack], None]:
    return call(lambda: logger.addHandler(handler), lambda: logger.removeHandler(handler))


def replaced(holder: Any, name: str, value: object = None) -> Callable[[ExitStack], None]:
    """As `monkeypatch.setattr`, which takes away again what a class had inherited."""

    def change(stack: ExitStack) -> None:
        patch = pytest.MonkeyPatch()
        # The remedy may have taken it away.
        stack.push(lambda *_: patch.undo() if name in vars(holder) else None)
        patch.setattr(holder, name, value or stand_in)

    return change


def stand_in(*_: object, **__: object) -> None:
    """What a test leaves in the place of a function or a method."""


def wrapper(function: Any) -> Any:
    return lambda *args, **kwargs: function(*args, **kwargs)


def module_put(name: str, value: object) -> Callable[[ExitStack], None]:
    return lambda stack: stack.enter_context(pytest.MonkeyPatch.context()).setitem(sys.modules, name, value)  # type: ignore[arg-type]


prctl = ctypes.CDLL(None).prctl

ROOT, ENGINE = logging.getLogger(), logging.getLogger("lowtide_tests.engine")
THREADS, LOCALE = torch.get_num_threads(), locale.setlocale(locale.LC_ALL)

FILES = resource.getrlimit(resource.RLIMIT_NOFILE)


def in_tokyo() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "JST-9")
        time.tzset()


def of_monitoring() -> dict[str, tuple[Callable[[ExitStack], None], str]]:
    """A tool that is left registered, as cProfile is one; Python 3.11 has none."""
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is None:
        return {}

    def register() -> None:
        monitoring.use_tool_id(3, "lowtide_tests")
        monitoring.set_events(3, monitoring.events.PY_START)

    def free() -> None:
        if monitoring.get_tool(3) is not None:
            monitoring.set_events(3, 0)
            monitoring.free_tool_id(3)

    line = "sys.monitoring.set_events(3, 0); sys.monitoring.free_tool_id(3)"
    return {"sys.monitoring.get_tool(3)": (call(register, free), line)}


CHANGES: dict[str, tuple[Callable[[ExitStack], None], str]] = {
    "torch.get_num_threads()": (
        call(lambda: torch.set_num_threads(THREADS + 1), lambda: torch.set_num_threads(THREADS)),
        f"torch.set_num_threads({THREADS})",
    ),
    "torch.is_grad_enabled()": (
        call(lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
        "torch.set_grad_enabled(True)",
    ),
    "torch.is_inference_mode_enabled()": (entered(torch.inference_mode), ""),
    "torch.is_anomaly_enabled()": (
        call(lambda: torch.set_anomaly_enabled(True), lambda: torch.set_anomaly_enabled(False)),
        "torch.set_anomaly_enabled(False)",
    ),
    "torch.backends.cudnn.benchmark": (
        assign(torch.backends.cudnn, "benchmark", True),
        "torch.backends.cudnn.benchmark = False",
    ),
    "torch.backends.mkldnn.deterministic": (
        assign(torch.backends.mkldnn, "deterministic", True),
        "torch.backends.mkldnn.deterministic = False",
    ),
    "torch.backends.cuda.flash_sdp_enabled()": (
        call(lambda: torch.backends.cuda.enable_flash_sdp(False), lambda: torch.backends.cuda.enable_flash_sdp(True)),
        "torch.backends.cuda.enable_flash_sdp(True)",
    ),
    "torch._C._get_autograd_fallback_mode()": (
        call(
            lambda: torch._C._set_autograd_fallback_mode("nothing"),
            lambda: torch._C._set_autograd_fallback_mode("warn"),
        ),
        "torch._C._set_autograd_fallback_mode('warn')",
    ),
    "torch._C._get_graph_executor_optimize()": (
        call(
            lambda: torch._C._set_graph_executor_optimize(False),
            lambda: torch._C._set_graph_executor_optimize(True),
        ),
        "torch._C._set_graph_executor_optimize(True)",
    ),
    "torch._C._accelerator_getAllocatorSettings()": (
        call(
            lambda: torch._C._accelerator_setAllocatorSettings("max_split_size_mb:128"),
            lambda: torch._C._accelerator_setAllocatorSettings(""),
        ),
        "torch._C._accelerator_setAllocatorSettings('')",
    ),
    "torch.is_autocast_enabled('cpu')": (
        call(lambda: torch.set_autocast_enabled("cpu", True), lambda: torch.set_autocast_enabled("cpu", False)),
        "torch.set_autocast_enabled('cpu', False)",
    ),
    "torch.set_flush_denormal": (
        call(lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
        "torch.set_flush_denormal(False)",
    ),
    "torch._tensor_str.PRINT_OPTS": (
        call(lambda: torch.set_printoptions(precision=2), lambda: torch.set_printoptions(profile="default")),
        "torch.set_printoptions(precision=4, threshold=1000, edgeitems=3, linewidth=80, sci_mode=None)",
    ),
    "torch.Event": (assign(torch, "Event", object), ""),
    "torch.empty": (assign(torch, "empty", torch.zeros), "torch.empty = torch._C._VariableFunctions.empty"),
    "torch.Tensor.to": (replaced(torch.Tensor, "to"), "del torch.Tensor.to"),
    "torch.nn.Linear.cuda": (replaced(torch.nn.Linear, "cuda"), "del torch.nn.Linear.cuda"),
    "torch.nn.Module.register_parameter": (
        replaced(torch.nn.Module, "register_parameter", wrapper(torch.nn.Module.register_parameter)),
        "torch.nn.Module.register_parameter = torch.nn.Module.register_parameter.__closure__[0].cell_contents",
    ),
    "torch.nn.Linear.forward": (replaced(torch.nn.Linear, "forward", torch.nn.Bilinear.forward), ""),
    "torch.nn.Embedding.from_pretrained": (replaced(torch.nn.Embedding, "from_pretrained"), ""),
    "torch.nn.functional.linear": (
        replaced(torch.nn.functional, "linear"),
        "torch.nn.functional.linear = torch._C._nn.linear",
    ),
    "torch.backends.mha._is_fastpath_enabled": (
        call(
            lambda: torch.backends.mha.set_fastpath_enabled(False),
            lambda: torch.backends.mha.set_fastpath_enabled(True),
        ),
        "torch.backends.mha._is_fastpath_enabled = True",
    ),
    "torch.distributions.Distribution._validate_args": (
        call(
            lambda: torch.distributions.Distribution.set_default_validate_args(False),
            lambda: torch.distributions.Distribution.set_default_validate_args(True),
        ),
        "torch.distributions.Distribution._validate_args = True",
    ),
    "torch.sparse.check_sparse_tensor_invariants.is_enabled()": (
        entered(torch.sparse.check_sparse_tensor_invariants),
        "torch._C._set_check_sparse_tensor_invariants(False)",
    ),
    "torch.compiler.config.job_id": (
        assign(torch.compiler.config, "job_id", "a"),
        "torch.compiler.config.job_id = None",
    ),
    "interval timer signal.ITIMER_PROF": (
        call(lambda: signal.setitimer(signal.ITIMER_PROF, 1000), lambda: signal.setitimer(signal.ITIMER_PROF, 0)),
        "signal.setitimer(signal.ITIMER_PROF, 0)",
    ),
    "name of logging level 27": (
        call(lambda: logging.addLevelName(27, "TRACE"), lambda: logging._levelToName.pop(27, None)),
        "logging._nameToLevel.pop(logging._levelToName.pop(27), None)",
    ),
    "name of logging level 20": (
        call(lambda: logging.addLevelName(20, "NOTE"), lambda: logging.addLevelName(20, "INFO")),
        "logging.addLevelName(20, 'INFO')",
    ),
    "copyreg.dispatch_table entry tests.probes.test_settings.FunctionMode": (
        call(
            lambda: copyreg.pickle(FunctionMode, lambda mode: (FunctionMode, ())),  # type: ignore[arg-type]
            lambda: copyreg.dispatch_table.pop(FunctionMode, None),
        ),
        "copyreg.dispatch_table.pop(tests.probes.test_settings.FunctionMode)",
    ),
    "builtins.lowtide_tests_added": (
        call(
            lambda: vars(builtins).__setitem__("lowtide_tests_added", hook),
            lambda: vars(builtins).pop("lowtide_tests_added", None),
        ),
        "del builtins.lowtide_tests_added",
    ),
    "os.sched_getaffinity(0)": (
        call(
            lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1]),
            functools.partial(os.sched_setaffinity, 0, os.sched_getaffinity(0)),
        ),
        f"os.sched_setaffinity(0, {set(os.sched_getaffinity(0))})",
    ),
    "the child subreaper": (
        call(lambda: prctl(36, 1, 0, 0, 0), lambda: prctl(36, 0, 0, 0, 0)),
        "ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)",
    ),
    "signal.pthread_sigmask(signal.SIG_BLOCK, ())": (
        call(
            lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]),
            lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1]),
        ),
        "signal.pthread_sigmask(signal.SIG_SETMASK, set())",
    ),
    "sys.getdlopenflags()": (
        call(lambda: sys.setdlopenflags(1), functools.partial(sys.setdlopenflags, sys.getdlopenflags())),
        f"sys.setdlopenflags({sys.getdlopenflags()})",
    ),
    "time.time": (replaced(time, "time"), ""),
    "pathlib.Path.exists": (replaced(Path, "exists"), ""),
    "threading.Thread.is_alive": (replaced(threading.Thread, "is_alive"), ""),
    "sys.modules['lowtide_tests_stub']": (
        module_put("lowtide_tests_stub", ModuleType("lowtide_tests_stub")),
        "sys.modules.pop('lowtide_tests_stub')",
    ),
    "sys.modules['lowtide_tests_blocked']": (
        module_put("lowtide_tests_blocked", None),
        "sys.modules.pop('lowtide_tests_blocked')",
    ),
    "sys.modules['json.decoder']": (
        module_put("json.decoder", mock.MagicMock()),
        "sys.modules['json.decoder'] = json.decoder",
    ),
    "torch function mode tests.probes.test_settings.FunctionMode": (entered(FunctionMode), ""),
    "torch dispatch mode tests.probes.test_settings.DispatchMode": (entered(DispatchMode), ""),
    "torch's default hook for saved tensors": (entered(torch.autograd.graph.save_on_cpu), ""),
    "torch hook tests.probes.test_settings.hook in torch.nn.modules.module._global_forward_hooks": (
        lambda stack: stack.callback(torch.nn.modules.module.register_module_forward_hook(hook).remove),  # type: ignore[arg-type]
        "",
    ),
    "os.environ['LOWTIDE_TESTS_SET']": (
        call(
            lambda: os.environ.__setitem__("LOWTIDE_TESTS_SET", "1"),
            lambda: os.environ.pop("LOWTIDE_TESTS_SET", None),
        ),
        "os.environ.pop('LOWTIDE_TESTS_SET')",
    ),
    "os.environ['HOME']": (
        call(
            functools.partial(os.environ.pop, "HOME"),
            functools.partial(os.environ.__setitem__, "HOME", os.environ["HOME"]),
        ),
        f"os.environ['HOME'] = {os.environ['HOME']!r}",
    ),
    "os.getcwd()": (
        call(lambda: os.chdir("/"), functools.partial(os.chdir, Path.cwd())),
        f"os.chdir('{Path.cwd()}')",
    ),
    "umask": (call(lambda: os.umask(0o77), lambda: os.umask(0o22)), "os.umask(0o22)"),
    "sys.getrecursionlimit()": (
        call(
            lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 7),
            functools.partial(sys.setrecursionlimit, sys.getrecursionlimit()),
        ),
        "",
    ),
    "sys.getprofile()": (call(lambda: sys.setprofile(hook), lambda: sys.setprofile(None)), "sys.setprofile(None)"),
    **of_monitoring(),
    "sys.getswitchinterval()": (
        call(lambda: sys.setswitchinterval(0.01), lambda: sys.setswitchinterval(0.005)),
        "sys.setswitchinterval(0.005)",
    ),
    "gc.callbacks entry tests.probes.test_settings.hook": (
        call(lambda: gc.callbacks.append(hook), lambda: gc.callbacks.remove(hook)),
        "",
    ),
    "sys.meta_path entry tests.probes.test_settings.Finder": (
        call(lambda: sys.meta_path.insert(0, Finder), lambda: sys.meta_path.remove(Finder)),  # type: ignore[arg-type]
        "del sys.meta_path[0]",
    ),
    "threading.stack_size()": (
        call(lambda: threading.stack_size(1 << 20), lambda: threading.stack_size(0)),
        "threading.stack_size(0)",
    ),
    "sys.dont_write_bytecode": (
        assign(sys, "dont_write_bytecode", not sys.dont_write_bytecode),
        f"sys.dont_write_bytecode = {sys.dont_write_bytecode}",
    ),
    "sys.get_coroutine_origin_tracking_depth()": (
        call(lambda: sys.set_coroutine_origin_tracking_depth(2), lambda: sys.set_coroutine_origin_tracking_depth(0)),
        "sys.set_coroutine_origin_tracking_depth(0)",
    ),
    "resource.getrlimit(resource.RLIMIT_NOFILE)": (
        call(
            lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[0] - 1, FILES[1])),
            lambda: resource.setrlimit(resource.RLIMIT_NOFILE, FILES),
        ),
        f"resource.setrlimit(resource.RLIMIT_NOFILE, {FILES})",
    ),
    "time.tzname": (lambda stack: (stack.callback(time.tzset), in_tokyo())[0], "time.tzset()"),
    "asyncio.get_event_loop_policy()": (
        call(lambda: asyncio.set_event_loop_policy(Policy()), lambda: asyncio.set_event_loop_policy(None)),
        "asyncio.set_event_loop_policy(None)",
    ),
    "tracemalloc.is_tracing()": (call(tracemalloc.start, tracemalloc.stop), "tracemalloc.stop()"),
    "logging.getLoggerClass()": (
        call(lambda: logging.setLoggerClass(OwnLogger), lambda: logging.setLoggerClass(logging.Logger)),
        "logging.setLoggerClass(logging.Logger)",
    ),
    "logging.getLogRecordFactory()": (
        call(lambda: logging.setLogRecordFactory(hook), lambda: logging.setLogRecordFactory(logging.LogRecord)),
        "logging.setLogRecordFactory(logging.LogRecord)",
    ),
    "disabled of logging.getLogger('lowtide_tests.engine')": (
        # As `logging.config.dictConfig` does it.
        call(
            lambda: (setattr(ENGINE, "disabled", True), logging.root.manager._clear_cache())[0],  # type: ignore[attr-defined]
            lambda: setattr(ENGINE, "disabled", False),
        ),
        "logging.getLogger('lowtide_tests.engine').disabled = False",
    ),
    "propagate of logging.getLogger('lowtide_tests.engine')": (
        call(
            lambda: (setattr(ENGINE, "propagate", False), logging.root.manager._clear_cache())[0],  # type: ignore[attr-defined]
            lambda: setattr(ENGINE, "propagate", True),
        ),
        "logging.getLogger('lowtide_tests.engine').propagate = True",
    ),
    "gc.get_debug()": (call(lambda: gc.set_debug(gc.DEBUG_SAVEALL), lambda: gc.set_debug(0)), "gc.set_debug(0)"),
    "signal.getsignal(signal.SIGUSR2)": (
        call(lambda: signal.signal(signal.SIGUSR2, hook), lambda: signal.signal(signal.SIGUSR2, signal.SIG_DFL)),
        "signal.signal(signal.SIGUSR2, signal.SIG_DFL)",
    ),
    "sys.breakpointhook": (assign(sys, "breakpointhook", hook), ""),
    "sys.get_asyncgen_hooks()": (
        call(lambda: sys.set_asyncgen_hooks(hook), lambda: sys.set_asyncgen_hooks(None)),
        "sys.set_asyncgen_hooks(None, None)",
    ),
    "torch._C._autograd._saved_tensors_hooks_is_enabled()": (
        entered(lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here")),
        "",
    ),
    "sys.excepthook": (assign(sys, "excepthook", hook), ""),
    "threading.excepthook": (assign(threading, "excepthook", hook), ""),
    "level of logging.getLogger('lowtide_tests.engine')": (
        call(lambda: ENGINE.setLevel(logging.ERROR), lambda: ENGINE.setLevel(0)),
        "logging.getLogger('lowtide_tests.engine').setLevel(0)",
    ),
    "handler logging.StreamHandler of logging.root": (added(ROOT, logging.StreamHandler()), ""),
    "handler logging.StreamHandler of logging.getLogger('lowtide_tests.engine')": (
        # A handler that is made in the test, so that it is new.
        lambda stack: added(ENGINE, logging.StreamHandler())(stack),
        "logging.getLogger('lowtide_tests.engine').removeHandler("
        "logging.getLogger('lowtide_tests.engine').handlers[0])",
    ),
    "logging.root.manager.disable": (
        call(lambda: logging.disable(10), lambda: logging.disable(0)),
        "logging.disable(0)",
    ),
    "warnings filter (ignore, UserWarning, 'lowtide tests')": (
        lambda stack: (
            stack.enter_context(warnings.catch_warnings()),
            warnings.filterwarnings("ignore", "lowtide tests", UserWarning),
        )[0],
        "",
    ),
    "locale.setlocale(locale.LC_ALL)": (
        call(lambda: locale.setlocale(locale.LC_ALL, "C"), lambda: locale.setlocale(locale.LC_ALL, LOCALE)),
        f"locale.setlocale(locale.LC_ALL, {LOCALE!r})",
    ),
    "decimal.getcontext().prec": (
        call(
            lambda: setattr(decimal.getcontext(), "prec", 5),
            lambda: setattr(decimal.getcontext(), "prec", 28),
        ),
        "decimal.getcontext().prec = 28",
    ),
    "sys.path entry '/lowtide/tests'": (
        entered(lambda: mock.patch.object(sys, "path", ["/lowtide/tests", *sys.path])),
        "sys.path[:] = [entry for entry in sys.path if entry != '/lowtide/tests']",
    ),
    "socket.getdefaulttimeout()": (
        call(lambda: socket.setdefaulttimeout(3.0), lambda: socket.setdefaulttimeout(None)),
        "socket.setdefaulttimeout(None)",
    ),
    "multiprocessing.get_start_method()": (
        call(
            lambda: multiprocessing.set_start_method("spawn", force=True),
            lambda: multiprocessing.set_start_method("fork", force=True),
        ),
        "multiprocessing.set_start_method('fork', force=True)",
    ),
    "faulthandler.is_enabled()": (
        call(faulthandler.disable, lambda: faulthandler.enable(file=sys.__stderr__)),
        "",
    ),
    "numpy.geterr()": (entered(lambda: np.errstate(all="ignore")), ""),
    "numpy.geterrcall()": (call(lambda: np.seterrcall(hook), lambda: np.seterrcall(None)), "numpy.seterrcall(None)"),
    "numpy.get_printoptions()['precision']": (
        entered(lambda: np.printoptions(precision=3)),
        "numpy.set_printoptions(precision=8)",
    ),
}
"""Changes that end with the stack, by what each setting is called, and the code that undoes them; empty where a runner
has a part in what stands there, or there is none."""


LEFT_ALONE: Mapping[str, Callable[[], object]] = {
    "the warnings that were given": lambda: vars(builtins).__setitem__("__warningregistry__", {"version": 1}),
    "a library's own": lambda: vars(builtins).__setitem__("lowtide_tests_added", logging.getLogger),
    "an object of a library's class": lambda: vars(builtins).__setitem__("lowtide_tests_added", np.float32(1)),
    "what was shown last": lambda: sys.displayhook(5),
    "a library's reducer": lambda: copyreg.pickle(FunctionMode, copyreg.pickle_complex),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_libraries_put_into_tables_of_the_interpreter_is_no_change(name: str, reader: SettingReader) -> None:
    before = reader.read()
    LEFT_ALONE[name]()
    try:
        assert changes_between(before, reader.read()) == []
    finally:
        for added in ("lowtide_tests_added", "_", "__warningregistry__"):
            vars(builtins).pop(added, None)
        copyreg.dispatch_table.pop(FunctionMode, None)


@pytest.fixture
def reader() -> SettingReader:
    return SettingReader()


@contextmanager
def changed(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        CHANGES[name][0](stack)
        yield


def test_the_command_line_is_put_back_as_it_was(reader: SettingReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", "--port", "8000"])
    before = reader.read()
    monkeypatch.setattr(sys, "argv", ["other"])
    (change,) = changes_between(before, reader.read())
    assert (change.setting, undo(change)) == ("sys.argv", "sys.argv = ['serve', '--port', '8000']")


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_undone_by_the_code_that_is_named(name: str, reader: SettingReader) -> None:
    before = reader.read()
    with ExitStack() as stack:
        CHANGES[name][0](stack)
        changes = changes_between(before, reader.read())
        assert [change.setting for change in changes] == [name]
        line = undo(changes[0])
        if CHANGES[name][1]:
            assert line == CHANGES[name][1]
        if line is not None:
            run([line])
            assert changes_between(before, reader.read()) == []
            if "removeHandler" in line or "remove(" in line or line.startswith("del "):
                stack.pop_all()
        else:
            assert advice(changes)
            if undoing(changes):
                put_back(changes)
                assert changes_between(before, reader.read()) == []
    assert reader.read() == before


_WITH_INTERPRETER = """
import importlib
import sys

from lowtide.leakcheck.resources.settings import changes_between, undo
from lowtide.probes.host.counters import SettingReader

# Private before Python 3.14, where `concurrent.interpreters` comes.
name = "_xxsubinterpreters" if sys.version_info < (3, 13) else "_interpreters"
interpreters, reader = importlib.import_module(name), SettingReader()
before = reader.read()
made = interpreters.create()
(change,) = changes_between(before, reader.read())
assert change.setting == f"interpreter {int(made)} of {name}", change
line = undo(change)
assert line == f"{name}.destroy({int(made)})", line
exec(f"import {name}; {line}")
assert changes_between(before, reader.read()) == []
"""


def test_an_interpreter_that_is_left_is_a_change_and_ended_by_the_code_that_is_named() -> None:
    """In a process of its own: where there was one, Python answers whether a thread holds the GIL by yes for ever."""
    subprocess.run([sys.executable, "-c", _WITH_INTERPRETER], check=True, cwd=Path(__file__).parents[2])


def test_the_code_for_a_handler_of_the_root_logger_holds_where_pytest_has_put_others(reader: SettingReader) -> None:
    before, handlers = reader.read(), list(ROOT.handlers)
    mine = logging.FileHandler(os.devnull, delay=True)
    ROOT.addHandler(mine)
    try:
        (change,) = changes_between(before, reader.read())
        line = undo(change)
        assert line is not None
        # As pytest does with its own around each phase of a test; another of that class was there before.
        ROOT.handlers[:] = [logging.FileHandler(os.devnull, delay=True), logging.NullHandler(), mine, *handlers]
        run([line])
        assert mine not in ROOT.handlers
        assert len(ROOT.handlers) == len(handlers) + 2
    finally:
        ROOT.handlers[:] = handlers


def test_the_code_for_the_last_callback_holds_where_those_of_lowtide_are_gone(reader: SettingReader) -> None:
    def own(phase: str, info: dict[str, int]) -> None:
        """Is there before, as the callbacks of lowtide are."""

    gc.callbacks.append(own)
    before = reader.read()
    gc.callbacks.append(hook)
    try:
        line = undo(changes_between(before, reader.read())[0])
        gc.callbacks.remove(own)
        assert line is not None
        run([line])
        assert hook not in gc.callbacks
    finally:
        gc.callbacks[:] = [each for each in gc.callbacks if each not in (own, hook)]


def test_reading_leaves_the_stack_size_of_new_threads_as_it_is(reader: SettingReader) -> None:
    threading.stack_size(1 << 20)
    try:
        reader.read()
        reader.read()
    finally:
        assert threading.stack_size(0) == 1 << 20


def test_deterministic_algorithms_are_put_back_with_one_line() -> None:
    # Not run: torch imports half of its compiler for it.
    before = {"torch.are_deterministic_algorithms_enabled()": "False"}
    before["torch.is_deterministic_algorithms_warn_only_enabled()"] = "False"
    changes = changes_between(before, dict.fromkeys(before, "True"))
    assert undoing(changes) == ["torch.use_deterministic_algorithms(False)"]


def test_of_what_does_not_change_the_answer_is_the_same_object(reader: SettingReader) -> None:
    reader.read()
    first = reader.read()
    assert reader.read() is first
    assert reader.read(of_libraries=False) is first


def test_what_libraries_have_is_taken_over_where_it_is_not_asked_for(reader: SettingReader) -> None:
    before = reader.read()
    with changed("torch.get_num_threads()"):
        assert reader.read(of_libraries=False) is before
        assert reader.read() != before


class Raising:
    """Raises whatever is asked of it."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    def __hash__(self) -> int:
        raise AssertionError

    def __bool__(self) -> bool:
        raise AssertionError

    def __repr__(self) -> str:
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    def __call__(self, *_: object) -> None:
        raise AssertionError


def test_no_object_of_the_program_is_asked_anything(reader: SettingReader, monkeypatch: pytest.MonkeyPatch) -> None:
    before = reader.read()
    monkeypatch.setattr(sys, "displayhook", Raising())
    monkeypatch.setattr(threading, "excepthook", Raising())
    monkeypatch.setattr(torch, "Event", Raising())
    monkeypatch.setattr(sys, "path", [*sys.path, Raising()])
    # Python's part of `signal` asks a handler itself.
    set_handler = vars(importlib.import_module("_signal"))["signal"]
    set_handler(signal.SIGUSR2, Raising())
    try:
        changes = changes_between(before, reader.read())
        assert changes
        assert all(describe_change(change) and advice([change]) for change in changes)
        assert {change.name for change in changes} >= {
            "sys.displayhook",
            "replaced torch.Event",
            "threading.excepthook",
        }
    finally:
        set_handler(signal.SIGUSR2, 0)


def test_the_method_of_an_object_is_named_by_its_class(reader: SettingReader) -> None:
    before = reader.read()
    previous = signal.signal(signal.SIGUSR2, Engine().stop)
    try:
        (change,) = changes_between(before, reader.read())
        assert describe_change(change).endswith("is tests.probes.test_settings.Engine.stop")
    finally:
        signal.signal(signal.SIGUSR2, previous)


def test_a_handler_that_a_library_made_for_itself_is_no_change(reader: SettingReader) -> None:
    from torch.utils.data._utils import signal_handling

    before = reader.read()
    previous = signal.signal(signal.SIGUSR2, signal_handling._set_SIGCHLD_handler)
    try:
        assert changes_between(before, reader.read()) == []
    finally:
        signal.signal(signal.SIGUSR2, previous)


def test_a_logger_that_an_installed_library_makes_late_is_its_own_as_it_is(reader: SettingReader) -> None:
    before = reader.read()
    late = logging.getLogger("numpy.lowtide_tests.late")
    late.setLevel(logging.ERROR)
    handler = logging.StreamHandler()
    late.addHandler(handler)
    assert changes_between(before, reader.read()) == []
    late.setLevel(logging.DEBUG)
    (change,) = changes_between(before, reader.read())
    assert change.setting == "level of logging.getLogger('numpy.lowtide_tests.late')"
    late.removeHandler(handler)
    late.setLevel(logging.NOTSET)


def test_a_handler_that_is_gone_is_seen(reader: SettingReader) -> None:
    ENGINE.addHandler(logging.StreamHandler())
    before = reader.read()
    ENGINE.handlers.clear()
    gc.collect()
    (change,) = changes_between(before, reader.read())
    assert (
        describe_change(change)
        == "handler logging.StreamHandler of logging.getLogger('lowtide_tests.engine') was removed"
    )


def test_what_pytest_sets_for_each_test_is_not_read(reader: SettingReader, caplog: pytest.LogCaptureFixture) -> None:
    assert not any("PYTEST_CURRENT_TEST" in name or "_pytest" in name for name in reader.read())
    assert any(type(handler) is type(caplog.handler) for handler in ROOT.handlers)


def test_a_folder_that_is_gone_is_no_error(
    reader: SettingReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    monkeypatch.chdir(place)
    place.rmdir()
    assert reader.read()["os.getcwd()"] == "'a folder that is gone'"


def test_the_matmul_precision_is_one_setting_with_two_names(reader: SettingReader) -> None:
    before = reader.read()
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        changes = changes_between(before, reader.read())
        names = ["torch.backends.cuda.matmul.allow_tf32", "torch.get_float32_matmul_precision()"]
        assert [change.name for change in changes] == names
        assert undoing(changes) == ["torch.set_float32_matmul_precision('highest')"]
    finally:
        torch.set_float32_matmul_precision(was)
    assert changes_between(before, reader.read()) == []


def test_no_flag_of_torch_s_profiler_is_set_in_the_place_of_its_end(reader: SettingReader) -> None:
    before = reader.read()
    with torch.autograd.profiler.profile(use_cpu=True):
        changes = changes_between(before, reader.read())
    assert undoing(changes) == []
    assert advice(changes) == "torch.autograd._profiler_enabled(): stop the profiler: use it in a with statement"
    assert changes_between(before, reader.read()) == []


SECRETS = {"HF_TOKEN": "hf_abc", "AWS_SECRET_ACCESS_KEY": "abc", "DB": "postgres://me:abc@host/db"}


@pytest.mark.parametrize(("name", "value"), SECRETS.items(), ids=list(SECRETS))
def test_a_secret_is_shown_nowhere(name: str, value: str) -> None:
    for before, now in ((ABSENT, repr(value)), (repr(value), ABSENT), (repr(value), repr(value + "2"))):
        change = SettingChange(f"os.environ[{name!r}]", before, now)
        texts = (describe_change(change), advice([change]), undo(change) or "")
        assert not any("abc" in text for text in texts)
    assert undo(SettingChange(f"os.environ[{name!r}]", ABSENT, repr(value))) == f"os.environ.pop({name!r})"


def test_a_command_line_that_may_have_a_secret_is_not_shown() -> None:
    before = repr(["serve", "--api-key", "abc"])
    change = SettingChange("sys.argv", before, repr(["serve"]))
    texts = (describe_change(change), advice([change]), undo(change) or "")
    assert not any("abc" in text for text in texts)
    assert "abc" in describe_change(SettingChange("sys.argv", repr(["abc"]), repr(["serve"])))


def test_a_long_value_is_shortened_and_no_code() -> None:
    change = SettingChange("os.environ['LONG']", repr("x" * 5000), repr("y" * 5000))
    assert len(describe_change(change)) < 300
    assert undo(change) is None


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({}, {"torch.get_num_threads()": "4"}, []),
        ({"torch.get_num_threads()": "4"}, {}, []),
        ({}, {"os.environ['A']": "'1'"}, ["os.environ['A'] was not set, is '1'"]),
        ({"os.environ['A']": "'1'"}, {}, ["os.environ['A'] was '1', is not set any more"]),
        ({}, {"sys.path entry '/a'": "there"}, ["sys.path entry '/a' was added"]),
        ({"umask": "0o22"}, {"umask": "0o77"}, ["umask was 0o22, is 0o77"]),
        ({}, {"replaced a.B": "c.D at 0x2 in place of a.B at 0x1"}, ["a.B was replaced by c.D"]),
        ({"replaced a.B": "c.D at 0x2 in place of a.B at 0x1"}, {}, []),
    ],
)
def test_only_what_can_be_added_was_something_before(
    before: Mapping[str, str], now: Mapping[str, str], found: list[str]
) -> None:
    assert [describe_change(change) for change in changes_between(before, now)] == found


@pytest.mark.parametrize(
    ("handler", "counts"), [("a library's pytest_timeout.set.handler at 0x1", False), ("own.on at 0x1", True)]
)
def test_a_time_limit_that_a_failing_test_ended_is_no_change(handler: str, counts: bool) -> None:
    name = "signal.getsignal(signal.SIGALRM)"
    assert bool(changes_between({name: handler}, {name: "signal.SIG_DFL"})) is counts


def test_a_handler_of_a_library_on_its_own_logger_is_the_library_s(reader: SettingReader) -> None:
    kind: Any = type("LazyHandler", (logging.Handler,), {"__module__": "torch._logging"})
    mine, torchs = kind(), logging.getLogger("torch")
    torchs.addHandler(mine)
    before = reader.read()
    torchs.removeHandler(mine)
    assert changes_between(before, reader.read()) == []
    # On another logger it is who put it there.
    with ExitStack() as stack:
        added(ROOT, mine)(stack)
        assert len(changes_between(before, reader.read())) == 1


def test_what_a_library_configures_of_its_own_loggers_is_the_library_s_however_often(
    reader: SettingReader, uvicorns_loggers: None
) -> None:
    before = reader.read()
    for _ in range(2):
        uvicorn.Config(None)
        assert logging.getLogger("uvicorn.error").level == logging.INFO
        assert logging.getLevelName(5) == "TRACE"
        now = reader.read()
        assert changes_between(before, now) == changes_between(now, before) == []
    # What somebody else gives them stays somebody else's.
    mine = logging.StreamHandler()
    logging.getLogger("uvicorn").addHandler(mine)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    logging.addLevelName(5, "DETAIL")
    logging.addLevelName(6, "DETAIL OF MINE")
    assert [change.setting for change in changes_between(before, reader.read())] == [
        "handler logging.StreamHandler of logging.getLogger('uvicorn')",
        "level of logging.getLogger('uvicorn.error')",
        "name of logging level 5",
        "name of logging level 6",
    ]


def test_a_level_of_a_library_s_logger_that_the_program_sets_is_the_program_s(
    reader: SettingReader, uvicorns_loggers: None
) -> None:
    before = reader.read()
    logging.getLogger("uvicorn.error").setLevel(logging.INFO)
    logging.addLevelName(5, "TRACE")
    assert len(changes_between(before, reader.read())) == 2


@pytest.fixture
def uvicorns_loggers() -> Iterator[None]:
    """Have uvicorn's loggers, and the levels' names, be afterwards as they were before."""
    loggers: list[Any] = [logging.getLogger(f"uvicorn{part}") for part in ("", ".access", ".asgi", ".error")]
    attributes = [(logger, {**vars(logger), "handlers": list(logger.handlers)}) for logger in loggers]
    both: tuple[Any, ...] = (logging._levelToName, logging._nameToLevel)
    tables = [(table, dict(table)) for table in both]
    yield
    for logger, values in attributes:
        vars(logger).update(values)
        logger.manager._clear_cache()
    for table, names in tables:
        table.clear()
        table.update(names)


def test_of_two_long_values_that_is_reported_by_which_they_differ() -> None:
    path = "/some/folder:" * 20
    change = SettingChange("os.environ['PATH']", repr(f"{path}/bin"), repr(f"{path}/bin:/opt"))
    assert describe_change(change) == "os.environ['PATH'] was …er:/some/folder:/bin', is …er:/some/folder:/bin:/opt'"


def test_who_disables_all_loggers_is_told_how_not_to() -> None:
    many = [SettingChange(f"disabled of logging.getLogger('a{turn}')", ABSENT, "True") for turn in range(30)]
    assert describe_change(many[0]) == "disabled of logging.getLogger('a0') was False, is True"
    lines = ["give logging.config disable_existing_loggers=False", *undoing(many)]
    assert len(lines) == 2
    assert advice(many) == "; ".join(lines)
    assert not advice(many[:1]).startswith("give")


def test_loggers_that_are_disabled_together_are_enabled_together_but_for_those_that_were_disabled_before(
    reader: SettingReader,
) -> None:
    loggers = [logging.getLogger(f"lowtide_tests_many.{turn}") for turn in range(8)]
    try:
        loggers[0].disabled = True
        before = reader.read()
        for logger in loggers:
            logger.disabled = True
        reader.read()
        # What was assigned further down is seen with the next change.
        loggers[1].setLevel(logging.ERROR)
        changes = [change for change in changes_between(before, reader.read()) if "disabled of" in change.name]
        assert len(changes) in (7, 8)
        changes = [change for change in changes if "many.0" not in change.name]
        (line,) = undoing(changes)
        assert line.endswith("and logger is not logging.getLogger('lowtide_tests_many.0')]")
        run([line])
        assert [logger.disabled for logger in loggers] == [True] + [False] * 7
    finally:
        for logger in loggers:
            logger.disabled = False
            logger.setLevel(logging.NOTSET)


class Card:
    """Stands for torch with a card: a current stream, set as torch sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.initialized = True
        self.stream = (0, 1, 1)
        self.fractions = [1.0, 1.0]
        self.asked = 0
        cuda = SimpleNamespace(
            is_initialized=lambda: self.initialized,
            set_stream=lambda stream: setattr(self, "stream", stream),
            default_stream=lambda: (0, 1, 1),
            Stream=lambda stream_id, device_index, device_type: (stream_id, device_index, device_type),
        )
        core = SimpleNamespace(
            _cuda_getMemoryFraction=lambda index: self.fractions[index],
            _cuda_getDeviceCount=lambda: 2,
            _cuda_getDevice=lambda: 1,
            _cuda_getCurrentStream=self.current,
        )
        self.torch = ModuleType("torch")
        vars(self.torch).update(cuda=cuda, _C=core)
        load_instead(monkeypatch, "torch", self.torch)

    def current(self, index: int) -> tuple[int, int, int]:
        self.asked += 1
        assert index == 1
        return self.stream

    def value(self, name: str = "torch.cuda.current_stream()") -> str:
        (value,) = (item for item in torch_settings._card(self.torch) if item.name == name)
        return value.text(value.read())


def test_a_limit_of_a_card_is_a_share_of_it_and_any_other_number_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    name = "torch.cuda.get_per_process_memory_fraction()"
    without = card.value(name)
    card.fractions = [122888273.8, 1.0]
    assert card.value(name) == without
    card.fractions = [122888273.8, 0.5]
    assert card.value(name) == "(1.0, 0.5)"


@pytest.mark.parametrize(
    ("before", "now"), [((0, 1, 1), (35, 1, 1)), ((35, 1, 1), (36, 1, 1)), ((35, 1, 1), (0, 1, 1))]
)
def test_a_current_stream_that_is_left_is_seen_and_undone(
    before: tuple[int, int, int], now: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(monkeypatch)
    card.stream = before
    was = card.value()
    card.stream = now
    assert card.value() != was
    lines = undoing([SettingChange("torch.cuda.current_stream()", was, card.value())])
    assert lines[0].startswith("torch.cuda.set_stream(torch.cuda.")
    run(lines)
    assert (card.stream, card.value()) == (before, was)


def test_that_torch_begins_on_a_card_is_no_change_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    card.initialized = False
    before = card.value()
    assert not card.asked
    card.initialized = True
    assert card.value() == before


def warning_of(module: str) -> type[Warning]:
    """A category that says that this module defines it."""
    return type("LateWarning", (DeprecationWarning,), {"__module__": module})


@pytest.mark.parametrize(("module", "comes", "shown"), [
    ("jinja2.late_of_a_test", True, False),
    ("jinja2.late_of_a_test", False, True),
    ("late_of_a_test", True, True),
])  # fmt: skip
def test_a_filter_is_a_library_s_only_if_it_comes_with_the_library_s_module(
    module: str, comes: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jinja2  # noqa: F401 - an installed package

    if not comes:
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    reader = SettingReader()
    with warnings.catch_warnings():
        before = reader.read()
        assert reader.read() == before
        if comes:
            monkeypatch.setitem(sys.modules, module, ModuleType(module))
        warnings.simplefilter("once", warning_of(module))
        name = f"warnings filter (once, {module}.LateWarning)"
        for _ in range(2):
            assert (name in reader.read()) is shown


def made_by_torch() -> Callable[..., str]:
    """A function as one of torch's makes it when it is first needed."""
    namespace: dict[str, Any] = {"__name__": "torch.nn.modules.linear"}
    exec("def route(*arguments): return ''", namespace)
    route: Any = namespace["route"]
    route.__qualname__ = "Overrides.setup.<locals>.route"
    return route  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("function", "shown"), [(made_by_torch(), False), (torch.nn.Module.cpu, True), (lambda *arguments: "", True)]
)
def test_what_a_library_makes_of_its_own_is_no_replacement(
    function: Any, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = SettingReader()
    reader.read()
    monkeypatch.setattr(torch.nn.Linear, "extra_repr", functools.partial(function))
    assert any("torch.nn.Linear.extra_repr" in name for name in reader.read()) is shown


@pytest.mark.parametrize("with_extension", [True, False])
def test_what_an_extension_puts_beside_itself_is_no_stub(with_extension: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Cython's modules do, for the types that they share."""
    reader = SettingReader()
    reader.read()
    monkeypatch.setitem(sys.modules, "lowtide_shared_types", ModuleType("lowtide_shared_types"))
    if with_extension:
        extension = ModuleType("lowtide_extension")
        loader = ExtensionFileLoader("lowtide_extension", "/lowtide_extension.so")
        extension.__spec__ = ModuleSpec("lowtide_extension", loader)
        monkeypatch.setitem(sys.modules, "lowtide_extension", extension)
    for _ in range(2):
        names = [name for name in reader.read() if "lowtide_shared_types" in name]
        assert bool(names) is not with_extension


def test_a_filter_of_a_module_that_came_long_before_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    import jinja2  # noqa: F401 - an installed package

    module = "jinja2.late_of_a_test"
    reader = SettingReader()
    with warnings.catch_warnings():
        reader.read()
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        # A reading in which the filters are as they were.
        reader.read()
        warnings.simplefilter("once", warning_of(module))
        assert f"warnings filter (once, {module}.LateWarning)" in reader.read()


def test_without_what_is_written_in_c_the_most_used_modules_and_classes_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replaced_attributes, "_marks_of", replaced_attributes._slow_marks)
    first = replaced_attributes.FirstValues()
    before = set(first.read())
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "to", stand_in)
        patched.setattr(torch.nn.Module, "register_parameter", stand_in)
        patched.setattr(time, "time", stand_in)
        found = set(first.read())
    assert found - before == {
        f"replaced {name}" for name in ("torch.Tensor.to", "torch.nn.Module.register_parameter", "time.time")
    }
    assert set(first.read()) == before


def test_what_is_built_in_is_read_before_anybody_imports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("locale", "tracemalloc"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    values = library_values()
    before = values.texts()
    assert before["tracemalloc.is_tracing()"] == "False"
    assert "locale.setlocale(locale.LC_ALL)" in before
    tracemalloc.start(1)
    after = values.texts()
    tracemalloc.stop()
    assert {name for name in after if after[name] != before[name]} == {"tracemalloc.is_tracing()"}
    assert values.texts() == before

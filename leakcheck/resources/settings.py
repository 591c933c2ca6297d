"""Process-wide settings: which changed, from what to what, who changed them, and the code that puts them back.

A change that puts back what a setting was before an earlier test changed it is none that stays (`SettingHistory`). No
sentence about a change has a secret. Where no code puts a setting back, there is advice.
"""

from __future__ import annotations

import ast
import functools
import importlib
import logging as logging_module
import os as os_module
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, FunctionType, ModuleType
from typing import Any

import msgspec
from msgspec.structs import replace

from lowtide.probes.host.replaced import A_MODULE, FIRST, INHERITED, NOTHING, split
from lowtide.probes.host.settings import REPLACED, is_entry
from lowtide.probes.host.torch_settings import CARD_LIMITS, DEFAULT_STREAM, NO_LIMIT
from lowtide.probes.objects.described import LIBRARYS, is_of_python, is_of_site, is_of_tools, is_text_of_tool
from lowtide.probes.objects.foreign import MISSING, cells_of, is_a, type_name
from lowtide.probes.originals import StandIns, gc, loaded, logging, os, sys
from lowtide.reports.sizes import first_of

ABSENT = ""
"""The text of what is not there."""

_MOST = 80
"""Characters of a value that are shown."""

_OF_FOLDER = 30
"""Characters of a test's name in that of its folder (`_pytest/tmpdir.py`)."""

_BEFORE = 20
"""Characters of a long value that are shown before the place where it was changed."""

_MANY_DISABLED = 5
"""Loggers that nobody disables one by one."""

_SHOWN_LOGGERS = 3

_IDENTITY = re.compile(r"(?: at |^)0x[0-9a-f]+")
_SECRET = re.compile(r"TOKEN|KEY|PASS|PWD|SECRET|CREDENTIAL|AUTH|COOKIE|SIGNATURE|PRIVATE|DSN|SALT", re.IGNORECASE)
_LOGIN = re.compile(r"//[^/@\s]+@")
_VARIABLE = re.compile(r"os\.environ\[(.+)\]", re.DOTALL)
_HANDLER = re.compile(r"handler .+ of logging\.getLogger\((.+)\) at (0x[0-9a-f]+)", re.DOTALL)
_OF_A_LOGGER = re.compile(r"(?:disabled|level|propagate) of logging\.getLogger\((.+)\)", re.DOTALL)
_FOLDERS = ("PWD", "OLDPWD")

_MATMUL = ("torch.get_float32_matmul_precision()", "torch.backends.cuda.matmul.allow_tf32")
_TOLD_WITH: Mapping[str, tuple[str, ...]] = {
    "torch.backends.cuda.matmul.fp32_precision": _MATMUL,
    "torch.backends.mkldnn.matmul.fp32_precision": _MATMUL,
    "torch.backends.cudnn.conv.fp32_precision": ("torch.backends.cudnn.allow_tf32",),
    "torch.backends.cudnn.rnn.fp32_precision": ("torch.backends.cudnn.allow_tf32",),
    "torch.is_grad_enabled()": ("torch.is_inference_mode_enabled()",),
    "torch.autograd.forward_ad._is_fwd_grad_enabled()": ("torch.is_inference_mode_enabled()",),
    "torch._C._is_multithreading_enabled()": ("torch.is_inference_mode_enabled()",),
    "torch.is_deterministic_algorithms_warn_only_enabled()": ("torch.are_deterministic_algorithms_enabled()",),
    "torch.is_anomaly_check_nan_enabled()": ("torch.is_anomaly_enabled()",),
    f"{REPLACED}torch.Storage": ("torch.get_default_dtype()",),
    **{f"{REPLACED}time.{name}": ("time.tzname",) for name in ("altzone", "daylight", "timezone")},
}
"""What changes, and is put back, with another setting."""


_OF_A_COMPILER = {"sys.getrecursionlimit()": "2000"}
"""What `torch.compile` sets with the first thing that it compiles (torch/_inductor/compile_fx.py), and leaves so."""


class SettingChange(msgspec.Struct, frozen=True):
    """One setting that is not what it was.

    Attributes:
        name: as the probe names it.
        before: what it was, as text; `ABSENT` if it was not there.
        now: what it is.
        beside: how many of its kind there were before and are there, of an object that was added.
    """

    name: str
    before: str
    now: str
    beside: int = 0

    @property
    def setting(self) -> str:
        """The name, the same in every run."""
        return _IDENTITY.sub("", self.name.removeprefix(REPLACED))

    @property
    def added(self) -> int:
        """The identity of an object that was added; 0 where none was."""
        found = _IDENTITY.search(self.name) if self.before == ABSENT else None
        return int(found.group().removeprefix(" at "), 16) if found else 0

    @property
    def is_replaced(self) -> bool:
        """Whether it is an attribute of a module or a class, or a module, in whose place another one is now."""
        return self.name.startswith(REPLACED)

    @property
    def first(self) -> str:
        """What was there before the first change of it, as far as that is known."""
        return split(self.now)[1] if self.is_replaced else self.before

    @property
    def is_of_same_kind(self) -> bool:
        """Whether an object was put in the place of another one that has the same name."""
        is_object = _IDENTITY.search(self.before) is not None
        return is_object and _IDENTITY.sub("", self.before) == _IDENTITY.sub("", self.now)

    def is_undone_by(self, text: str) -> bool:
        """Return whether a setting with this text is as it was: before this change, or before all."""
        return text == self.before or (self.is_replaced and text == ABSENT)

    def followed_in(self, settings: Mapping[str, str]) -> SettingChange:
        """Return the same of the last object of its kind, where that has taken the place of the one that was added."""
        same = _of_kind(self.name, settings) if self.before == ABSENT and self.name not in settings else []
        return replace(self, name=same[-1]) if len(same) > self.beside else self


def changes_between(
    before: Mapping[str, str], now: Mapping[str, str], names: Iterable[str] | None = None
) -> list[SettingChange]:
    """Return what changed, sorted by name, but for what changes with something else.

    Nor does it count that an installed library's own function was set somewhere, as at the library's first use, or that
    a tool that runs tests took its own away, as a time limit does when a test fails.

    Args:
        before: the settings as they should be.
        now: as they are.
        names: those to look at; None for all.
    """
    found = []
    for name in now.keys() | before.keys() if names is None else names:
        then, is_now = before.get(name, ABSENT), now.get(name, ABSENT)
        if then == is_now:
            continue
        if _OF_A_COMPILER.get(name) == is_now:
            continue
        # What is as it was first, whoever had changed it, needs nothing; nor does a timer that has ended.
        if name.startswith((REPLACED, "interval timer ")) and is_now == ABSENT:
            continue
        if LIBRARYS in name or is_now.startswith(LIBRARYS) or is_text_of_tool(then):
            continue
        # Of what its library had not been there for at one of the moments, nothing is known.
        if is_entry(name) or (name in before and name in now):
            beside = len([other for other in _of_kind(name, before) if other in now]) if then == ABSENT else 0
            found.append(SettingChange(name, then, is_now, beside))
    changed = {change.name for change in found}
    implied = {name for name in changed if changed & set(_TOLD_WITH.get(name, ()))}
    return sorted((change for change in found if change.name not in implied), key=lambda change: change.name)


def _of_kind(name: str, settings: Mapping[str, str]) -> list[str]:
    """Return the names of the objects of the kind of one, where there may be several."""
    kind, _, identity = name.rpartition(" at ")
    return [other for other in settings if other.startswith(f"{kind} at 0x")] if _IDENTITY.fullmatch(identity) else []


def describe_change(change: SettingChange) -> str:
    """Say `torch.get_num_threads() was 4, is 1`; no secret, and no more of a value than one reads."""
    if change.is_replaced:
        return _replacement(change)
    was, now = _both_shown(change)
    if change.name.startswith(("disabled of ", "propagate of ")):
        usual = str(change.name.startswith("propagate of "))
        return f"{change.setting} was {was or usual}, is {now or usual}"
    if change.name.startswith(("level of ", "os.environ[", "name of logging level ")):
        return f"{change.setting} was {was or 'not set'}, is {now or 'not set any more'}"
    if change.name.startswith("interval timer "):
        return f"{change.setting} is {now}"
    if is_entry(change.name):
        return f"{change.setting} was {'added' if change.before == ABSENT else 'removed'}"
    if change.is_of_same_kind:
        return f"{change.name} was replaced by another {now}"
    return f"{change.name} was {was}, is {now}"


def sentences(changes: Sequence[SettingChange], places: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return what each setting is called, with a sentence on it; one on loggers that are disabled, if these are many.

    And one on an object that was added to several and another one of its kind that was removed.

    Args:
        changes: what has changed.
        places: where a setting was set last, by its name; empty where that is not known.
    """
    disabled = disabled_loggers(changes)
    found = []
    if disabled:
        shown = first_of([change.setting.removeprefix("disabled of ") for change in disabled], _SHOWN_LOGGERS)
        found.append(
            (
                f"disabled of {len(disabled)} loggers",
                f"disabled of {len(disabled)} loggers was False, is True ({shown})",
            )
        )
    removed = Counter(change.setting for change in changes if change.now == ABSENT and _is_one_of_several(change))
    added = Counter(change.setting for change in changes if change.before == ABSENT and _is_one_of_several(change))
    both = removed & added
    for change in changes:
        if change in disabled:
            continue
        if both[change.setting] and change.before == ABSENT:
            both[change.setting] -= 1
            found.append((change.setting, f"{change.setting} was replaced by another one"))
        elif removed[change.setting] and change.now == ABSENT and added[change.setting]:
            added[change.setting] -= 1
        else:
            place = places.get(change.name)
            found.append((change.setting, describe_change(change) + (f" ({place})" if place else "")))
    return found


def is_of_tests_own_logger(setting: str, test: str) -> bool:
    """Return whether a level or switch is of a logger that is named after the test: nobody else asks for that one.

    So `unittest`'s `logging.getLogger(self.id())`, or a name that ends with that of pytest's `tmp_path`, which has 30
    characters of the test's and a number.  What a handler on it holds stays, and is judged like any other's.

    Args:
        setting: as `level of logging.getLogger('tests.test_retry.Retry.test_logs')`.
        test: its node id.
    """
    logger = _OF_A_LOGGER.fullmatch(setting)
    place, _, function = test.partition("[")[0].rpartition("::")
    if logger is None or not place:
        return False
    name = str(ast.literal_eval(logger[1]))
    return name.rpartition(".")[2] == function or name.rstrip(string.digits).endswith(function[:_OF_FOLDER])


def _is_one_of_several(change: SettingChange) -> bool:
    return not change.is_replaced and change.name != change.setting


def disabled_loggers(changes: Sequence[SettingChange]) -> list[SettingChange]:
    """Return the changes by which loggers were disabled, as `logging.config` does by default, if these are many."""
    found = [change for change in changes if change.name.startswith("disabled of ") and change.now == "True"]
    return found if len(found) >= _MANY_DISABLED else []


def _replacement(change: SettingChange) -> str:
    """Say `torch.empty was replaced by test.zeros`; of a plain value what it was and is."""
    first = change.first
    (was, _), (now, _) = split(change.before), split(change.now)
    if now == NOTHING:
        return f"{change.setting} was removed"
    if first == NOTHING:
        return f"{change.setting} was added: {_shortened(now)}"
    if _IDENTITY.search(first) or _IDENTITY.search(now) or first in (INHERITED, A_MODULE):
        return f"{change.setting} was replaced by {_shortened(now)}"
    return f"{change.setting} was {_shortened(was or first)}, is {_shortened(now)}"


def _shortened(text: str) -> str:
    text = _IDENTITY.sub("", text)
    return text if len(text) <= _MOST else f"{text[:_MOST]}…"


def is_secret(name: str, text: str) -> bool:
    """Return whether a variable, by its name or look, or the command line, by what is in it, may have a secret."""
    if name == "sys.argv":
        return (_SECRET.search(text) or _LOGIN.search(text)) is not None
    named = _variable(name)
    is_named_so = _SECRET.search(named) is not None and named not in _FOLDERS
    return bool(named) and (is_named_so or _LOGIN.search(text) is not None)


def _both_shown(change: SettingChange) -> tuple[str, str]:
    """Return what it was and what it is; of two long texts what is around the place where they begin to differ."""
    was, now = (_text(change, text) for text in (change.before, change.now))
    pairs = enumerate(zip(was, now, strict=False))
    alike = next((place for place, (old, new) in pairs if old != new), min(len(was), len(now)))
    start = alike - _BEFORE if max(len(was), len(now)) > _MOST and alike > _MOST // 2 else 0
    shown = (f"…{text[start:]}" if start and text else text for text in (was, now))
    was, now = map(_shortened, shown)
    return was, now


def _text(change: SettingChange, text: str) -> str:
    if text and (is_secret(change.name, change.before) or is_secret(change.name, change.now)):
        return "another value" if text == change.now and change.before else "a value that is not shown"
    return _IDENTITY.sub("", text.removeprefix(LIBRARYS))


class SettingHistory:
    """The values that each setting had before it was changed and left so, oldest first."""

    def __init__(self) -> None:
        self._earlier: dict[str, list[str]] = {}
        self._left: dict[str, str] = {}

    def note(self, name: str, before: str, now: str) -> None:
        """Note that a test, or a fixture, is over and left a setting changed."""
        self._left[name] = now
        earlier = self._earlier.setdefault(name, [])
        if now in earlier:
            del earlier[earlier.index(now) :]
        else:
            earlier.append(before)

    def begin(self, settings: Mapping[str, str]) -> None:
        """Begin a test: what was put back by whomever is as it was, and may be left changed again."""
        for name, earlier in self._earlier.items():
            if settings.get(name) in earlier:
                del earlier[earlier.index(settings[name]) :]

    def is_earlier(self, name: str, value: str) -> bool:
        """Return whether a setting had this value before somebody changed it and left it so."""
        return value in self._earlier.get(name, ())

    def news(self, changes: Sequence[SettingChange]) -> list[SettingChange]:
        """Return the changes that neither put back what somebody had left, nor put its like in its place.

        As a test that configures `logging` as the one before did: each has a handler of its own then, and there is one.
        """
        if not changes:
            return []
        put_back = [change for change in changes if self.is_earlier(change.name, change.now)]
        given_up = Counter(change.setting for change in put_back if change.now == ABSENT)
        found = []
        for change in changes:
            if change in put_back or (self._left.get(change.name) == change.before and change.is_of_same_kind):
                continue
            if change.before == ABSENT and given_up[change.setting]:
                given_up[change.setting] -= 1
                continue
            found.append(change)
        return found


_CURRENT_TEST = b"PYTEST_CURRENT_TEST"
"""In it pytest says three times per test what runs."""

_RUNNERS = ("/_pytest/", "/pluggy/")


_STACKS = "the card's cudaLimitStackSize"


class EnvironmentSetters:
    """Notes who sets or deletes each variable, and which library makes a handler of `logging`, from `start` to `stop`.

    `os.putenv` and `os.unsetenv`, which `os.environ` calls for each, and what `logging` calls with each new handler are
    stood in for meanwhile.

    Args:
        communicates: whether a library for communication between cards was first used in the test of now.
    """

    def __init__(self, communicates: Callable[[], bool] = lambda: False) -> None:
        self._communicates = communicates
        self._places: dict[bytes, tuple[str, int, str, str]] = {}
        # By variable, whether it was the library's own before, or nobody's.
        self._by_libraries: dict[bytes, bool] = {}
        # By file. A fixture may empty the whole environment and fill it again, before and after every test.
        self._asks_for_another: dict[str, bool] = {}
        # By a handler's identity, the package that has made it.
        self._handlers: dict[int, str] = {}
        self._stand_ins = StandIns()

    def start(self) -> None:
        """Begin to note; legal twice."""
        self._stand_ins.put(os_module, "putenv", functools.partial(self._noting, "set"))
        self._stand_ins.put(os_module, "unsetenv", functools.partial(self._noting, "deleted"))
        self._stand_ins.put(logging_module, "_addHandlerRef", self._noting_handlers)

    def stop(self) -> None:
        """End it; legal twice."""
        self._stand_ins.restore()

    def _noting(self, what: str, original: Callable[..., None]) -> Callable[..., None]:
        def ours(name: Any, *value: Any) -> None:
            original(name, *value)
            if name != _CURRENT_TEST:
                self._note(name if type(name) is bytes else os.fsencode(name), what, sys._getframe(1))

        return ours

    def _noting_handlers(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def ours(handler: Any) -> None:
            original(handler)
            frame = self._asking(sys._getframe(1))
            if frame is not None and is_of_site(frame.f_code.co_filename):
                self._handlers[id(handler)] = str(frame.f_globals.get("__name__")).partition(".")[0]
            else:
                self._handlers.pop(id(handler), None)

        return ours

    def is_librarys(self, setting: str) -> bool:
        """Return whether code of an installed library set or deleted a variable last, by itself.

        Args:
            setting: as `os.environ['NAME']`.
        """
        return os.fsencode(_variable(setting)) in self._by_libraries

    def is_own_of_library(self, change: SettingChange) -> bool:
        """Return whether a library set a variable that nobody had set but itself, or deleted one.

        Or has made the first handler of its kind for a logger of its own, as one that configures itself when it is
        first used: a second one writes everything twice.

        With NCCL's first communicator between two cards the room for stacks grows on each (1,024 to 1,760 bytes, H200).
        """
        if change.name == _STACKS:
            return ABSENT not in (change.before, change.now) and (
                int(change.before) < int(change.now) and self._communicates()
            )
        if self._is_own_handler(change):
            return change.before == ABSENT and not change.beside
        own = ABSENT in (change.before, change.now) or self._by_libraries.get(
            os.fsencode(_variable(change.name)), False
        )
        return own and self.is_librarys(change.name)

    def without_own_of_libraries(self, changes: Sequence[SettingChange]) -> list[SettingChange]:
        """Return changes without libraries' own, nor what a library took away for another one of that kind."""
        own = [change for change in changes if self.is_own_of_library(change)]
        renewed = {change.setting for change in own if change.before == ABSENT}
        return [
            change
            for change in changes
            if change not in own and not (change.setting in renewed and self._is_own_handler(change))
        ]

    def _is_own_handler(self, change: SettingChange) -> bool:
        handler = _HANDLER.fullmatch(change.name)
        if handler is None:
            return False
        return self._handlers.get(int(handler[2], 16)) == str(ast.literal_eval(handler[1])).partition(".")[0]

    def place_of(self, setting: str) -> str:
        """Return where a variable was set or deleted last: `set in function, file.py:12`; empty where unknown."""
        place = self._places.get(os.fsencode(_variable(setting)))
        return "" if place is None else f"{place[3]} in {place[2]}, {os.path.basename(place[0])}:{place[1]}"

    def _note(self, variable: bytes, what: str, frame: FrameType | None) -> None:
        frame = self._asking(frame)
        was_own = self._by_libraries.pop(variable, None)
        self._places.pop(variable, None)
        if frame is None or is_of_site(frame.f_code.co_filename):
            # `os.environ` has it a moment later.
            self._by_libraries[variable] = os.fsdecode(variable) not in os.environ if was_own is None else was_own
        else:
            self._places[variable] = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, what)

    def _asking(self, frame: FrameType | None) -> FrameType | None:
        """Return whose code it is: Python's library and the test runner set what somebody else wants to have set."""
        known = self._asks_for_another
        while frame is not None:
            file = frame.f_code.co_filename
            if file not in known:
                known[file] = is_of_python(file) or any(part in file for part in _RUNNERS)
            if not known[file]:
                break
            frame = frame.f_back
        return frame


def _variable(setting: str) -> str:
    found = _VARIABLE.fullmatch(setting)
    return "" if found is None else str(ast.literal_eval(found[1]))


_LONGEST_LINE = 240
"""Characters of code beyond which nobody reads it."""

_MOST_LINES = 8
"""Lines of advice about one finding."""

PR_SET_CHILD_SUBREAPER = 36

_GETTER = re.compile(r"\.(_?)get(\w+)\(\)$")
_MODULE = re.compile(r"\b([a-z_]\w*)\.")

_SETTERS: Mapping[str, str] = {
    "gc.get_threshold()": "gc.set_threshold{}",
    "sys.dont_write_bytecode": "sys.dont_write_bytecode = {}",
    "sys.argv": "sys.argv = {}",
    "time.tzname": "time.tzset()",
    "os.getcwd()": "os.chdir({})",
    "os.sched_getaffinity(0)": "os.sched_setaffinity(0, {})",
    "os.getpriority(os.PRIO_PROCESS, 0)": "os.setpriority(os.PRIO_PROCESS, 0, {})",
    "signal.pthread_sigmask(signal.SIG_BLOCK, ())": "signal.pthread_sigmask(signal.SIG_SETMASK, {})",
    "the child subreaper": f"ctypes.CDLL(None).prctl({PR_SET_CHILD_SUBREAPER}, {{}}, 0, 0, 0)",
    **{
        f"the card's {name}": f"ctypes.CDLL('libcuda.so.1').cuCtxSetLimit({number}, ctypes.c_size_t({{}}))"
        for name, number in CARD_LIMITS.items()
    },
    "umask": "os.umask({})",
    "threading.stack_size()": "threading.stack_size({})",
    "logging.root.manager.disable": "logging.disable({})",
    "locale.setlocale(locale.LC_ALL)": "locale.setlocale(locale.LC_ALL, {})",
    "multiprocessing.get_start_method()": "multiprocessing.set_start_method({}, force=True)",
    "numpy.geterr()": "numpy.seterr(**{})",
    "torch.is_grad_enabled()": "torch.set_grad_enabled({})",
    "torch.is_anomaly_enabled()": "torch.set_anomaly_enabled({})",
    "torch.is_anomaly_check_nan_enabled()": "torch.set_anomaly_enabled(torch.is_anomaly_enabled(), {})",
    "torch.are_deterministic_algorithms_enabled()": "torch.use_deterministic_algorithms({})",
    "torch.is_deterministic_algorithms_warn_only_enabled()": (
        "torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only={})"
    ),
    "torch.is_warn_always_enabled()": "torch.set_warn_always({})",
    "torch.is_autocast_cache_enabled()": "torch.set_autocast_cache_enabled({})",
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()": (
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp({})"
    ),
    "torch.backends.nnpack.enabled": "torch.backends.nnpack.set_flags({})",
    "torch.backends.quantized.engine": "torch._C._set_qengine({})",
    "torch.sparse.check_sparse_tensor_invariants.is_enabled()": "torch._C._set_check_sparse_tensor_invariants({})",
    "torch.autograd.forward_ad._is_fwd_grad_enabled()": "torch._C._set_fwd_grad_enabled({})",
    "torch._C._is_view_replay_enabled()": "torch._C._set_view_replay_enabled({})",
    "torch._C._jit_texpr_fuser_enabled()": "torch._C._jit_set_texpr_fuser_enabled({})",
    "torch._C._is_multithreading_enabled()": "torch._C._set_multithreading_enabled({})",
    "torch._C._accelerator_getAllocatorSettings()": "torch._C._accelerator_setAllocatorSettings({})",
    "torch._tensor_str.PRINT_OPTS": "torch.set_printoptions({})",
    "torch.set_flush_denormal": "torch.set_flush_denormal({})",
    "torch.cuda.current_device()": "torch.cuda.set_device({})",
    "torch.cuda.memory._record_memory_history": "torch.cuda.memory._record_memory_history({})",
}
"""The code that sets a setting, with a place for what it was, where that is not `set` for `get`."""

_PATTERNS: Mapping[str, str] = {
    r"torch\.is_autocast_enabled\((.+)\)": "torch.set_autocast_enabled({name}, {value})",
    r"torch\.get_autocast_dtype\((.+)\)": "torch.set_autocast_dtype({name}, {value})",
    r"torch\.backends\.cuda\.(\w+_sdp)_enabled\(\)": "torch.backends.cuda.enable_{name}({value})",
    r"(torch\.backends\..+[^)])": "{name} = {value}",
    r"(decimal\.getcontext\(\)\.(?!traps).+)": "{name} = {value}",
    r"(logging\.raiseExceptions)": "{name} = {value}",
    r"resource\.getrlimit\((.+)\)": "resource.setrlimit({name}, {value})",
    r"numpy\.get_printoptions\(\)\['(\w+)'\]": "numpy.set_printoptions({name}={value})",
}

_ENTRIES: Mapping[str, tuple[str, str | None]] = {
    r"os\.environ\[(.+)\]": ("os.environ.pop({name})", "os.environ[{name}] = {value}"),
    r"level of (.+)": ("{name}.setLevel(0)", "{name}.setLevel({value})"),
    r"disabled of (.+)": ("{name}.disabled = False", "{name}.disabled = {value}"),
    r"propagate of (.+)": ("{name}.propagate = True", "{name}.propagate = {value}"),
    r"interval timer (.+)": ("signal.setitimer({name}, 0)", None),
    r"name of logging level (.+)": (
        "logging._nameToLevel.pop(logging._levelToName.pop({name}), None)",
        "logging.addLevelName({name}, {value})",
    ),
    # (Later tests may have added the same again, each by a call of its own.)
    r"sys\.path entry (.+)": (
        "sys.path[:] = [entry for entry in sys.path if entry != {name}]",
        "sys.path.append({name})",
    ),
}
"""For what is an entry of something, the code that puts it back if it was not there before, and if it was."""

_ADVICE: Mapping[str, str] = {
    "torch.get_num_interop_threads()": (
        "it can be set once in a process: set it in conftest.py, or run the test in a process of its own"
    ),
    "torch.is_inference_mode_enabled()": "leave torch.inference_mode() again: use it in a with statement",
    "torch.autograd._profiler_enabled()": "stop the profiler: use it in a with statement",
    "torch dispatch mode ": "leave the mode again: use it in a with statement",
    "torch function mode ": "leave the mode again: use it in a with statement",
    "torch hook ": "call remove() of the handle that registering the hook gave",
    "torch._C._autograd._saved_tensors_hooks_is_enabled()": (
        "leave torch.autograd.graph.disable_saved_tensors_hooks again: use it in a with statement"
    ),
    "torch's default hook for saved tensors": "leave saved_tensors_hooks again: use it in a with statement",
    "decimal.getcontext().traps": "change them in a with decimal.localcontext() block only",
    "os.environ[": "monkeypatch.setenv and monkeypatch.delenv put a variable back when the test ends",
    "copyreg.dispatch_table entry ": "take it out of copyreg.dispatch_table when the test ends",
    "warnings filter ": "change the filters in a with warnings.catch_warnings() block only",
    "asyncio.get_event_loop_policy()": "keep the policy that was there, and set it again when the test ends",
    "gc.callbacks entry ": "remove it from gc.callbacks when the test ends",
    "cupy.cuda.get_allocator()": "use an allocator in a with cupy.cuda.using_allocator() block only",
}
_SECOND_NAMES = {
    "torch.get_float32_matmul_precision()": "torch.backends.cuda.matmul.allow_tf32",
    "torch.autograd._profiler_enabled()": "torch.autograd.profiler._is_profiler_enabled",
}
"""What else changes with a setting, and what puts that back with it."""

_REDUCER = "copyreg.dispatch_table entry "
_OTHERWISE = "keep what was there before, and put it back at the end (in a test, monkeypatch.setattr does)"


def undoing(changes: Iterable[SettingChange]) -> list[str]:
    """Return the lines of code that put settings back; none if one of the settings can be put back by nobody.

    Where there is no expression for what a replaced function was, words stand for what `put_back` does.
    """
    enabling, others = _apart(changes)
    lines = [undo(change) or _without_code(change) for change in others]
    return [] if None in lines else [*enabling, *(line for line in dict.fromkeys(lines) if line is not None)]


def _apart(changes: Iterable[SettingChange]) -> tuple[list[str], list[SettingChange]]:
    """Return the line that enables loggers again, if many were disabled together, and all other changes.

    It leaves out those that had been disabled before. Of a setting that has two names the second one is left out.
    """
    found = {change.name: change for change in changes}
    second = {_SECOND_NAMES.get(name) for name in found}
    found = {name: change for name, change in found.items() if change.setting not in second}
    many = disabled_loggers([*found.values()])
    if not many:
        return [], [*found.values()]
    known = logging.root.manager.loggerDict
    disabled = {f"disabled of logging.getLogger({name!r})" for name, item in known.items() if _is_disabled(item)}
    before = sorted(disabled - {change.name for change in many})
    but = "".join(f" and logger is not {name.removeprefix('disabled of ')}" for name in before)
    loggers = "logging.root.manager.loggerDict.values()"
    line = f"[setattr(logger, 'disabled', False) for logger in {loggers} if hasattr(logger, 'disabled'){but}]"
    return [line], [change for change in found.values() if change not in many]


def _is_disabled(logger: object) -> bool:
    return is_a(logger, logging.Logger) and vars(logger).get("disabled") is True


def put_back(changes: Iterable[SettingChange]) -> None:
    """Do what `undoing` says."""
    enabling, others = _apart(changes)
    run(enabling)
    for change in others:
        line = undo(change)
        if line is not None:
            run([line])
        elif _without_code(change) is not None:
            FIRST.put_back(change.setting)


def is_code(changes: Iterable[SettingChange]) -> bool:
    """Return whether all that `undoing` says can be written."""
    return all(undo(change) is not None for change in _apart(changes)[1])


def _without_code(change: SettingChange) -> str | None:
    is_known = change.is_replaced and FIRST.first_of(change.setting) is not MISSING
    return f"putting {change.setting} back" if is_known else None


def advice(changes: Sequence[SettingChange]) -> str:
    """Return what to do about settings: the code that puts them back, and words where there is none."""
    enabling, others = _apart(changes)
    lines = ["give logging.config disable_existing_loggers=False", *enabling] if enabling else []
    for change in others:
        words = next((text for start, text in _ADVICE.items() if change.name.startswith(start)), _OTHERWISE)
        lines.append(undo(change) or f"{change.setting}: {words}")
    lines = list(dict.fromkeys(lines))
    return "; ".join(lines[:_MOST_LINES]) + (f"; and {len(lines) - _MOST_LINES} more" if lines[_MOST_LINES:] else "")


def undo(change: SettingChange) -> str | None:
    """Return the code that puts one setting back; None where it takes an object that has no expression, or a secret."""
    line = _entry(change) if is_entry(change.name) else _value(change.name, change.before)
    return line if line is not None and len(line) <= _LONGEST_LINE else None


def run(lines: Iterable[str]) -> None:
    """Run the lines of code that put settings back."""
    for line in lines:
        names = [name for name in _MODULE.findall(line) if name in sys.modules]
        exec(line, {name: importlib.import_module(name) for name in names})


def _entry(change: SettingChange) -> str | None:
    name, before = change.name, change.before
    if change.is_replaced:
        return _replaced(change)
    for pattern, (added, changed) in _ENTRIES.items():
        if match := re.fullmatch(pattern, name, re.DOTALL):
            if before == ABSENT:
                return added.format(name=match[1])
            return None if changed is None or is_secret(name, before) else changed.format(name=match[1], value=before)
    if name.startswith("handler ") and before == ABSENT:
        return _removing_handler(name)
    if name.startswith(_REDUCER) and before == ABSENT:
        cls = _expression(name.removeprefix(_REDUCER))
        return None if cls is None else f"copyreg.dispatch_table.pop({cls})"
    if (match := re.fullmatch(r"interpreter (\d+) of (\w+)", name)) and before == ABSENT:
        return f"{match[2]}.destroy({match[1]})"
    for place in ("sys.meta_path", "sys.path_hooks", "gc.callbacks"):
        if name.startswith(f"{place} entry ") and before == ABSENT:
            return _removing_from(place, name.rpartition(" at ")[2])
    return None


def _replaced(change: SettingChange) -> str | None:
    if change.first == NOTHING:
        if not change.setting.startswith("sys.modules["):
            return f"del {change.setting}"
        return change.setting.replace("sys.modules[", "sys.modules.pop(").removesuffix("]") + ")"
    if change.first == INHERITED:
        return f"del {change.setting}"
    first = FIRST.first_of(change.setting)
    is_object = " at 0x" in change.first or change.setting.startswith("sys.modules[")
    found = _expression(change.first) or _elsewhere(first, change.setting) if is_object else change.first
    return None if found is None else f"{change.setting} = {found}"


def _elsewhere(first: Any, setting: str) -> str | None:
    """Return an expression for what an attribute was, that what replaced it holds, or a module under another name."""
    if first is MISSING:
        return None
    holder, _, name = setting.rpartition(".")
    now = None if setting.startswith("sys.modules[") else vars(_evaluated(holder)).get(name)
    for place, cell in enumerate(cells_of(now) or () if type(now) is FunctionType else ()):
        # (An empty cell refers to nothing.)
        if any(held is first for held in gc.get_referents(cell)):
            return f"{setting}.__closure__[{place}].cell_contents"
    if getattr(getattr(loaded("torch._C"), "_VariableFunctions", None), name, None) is first:
        return f"torch._C._VariableFunctions.{name}"
    for module in [module for module in list(sys.modules.values()) if type(module) is ModuleType]:
        if is_of_tools(module.__name__):
            continue
        for alias, value in list(vars(module).items()):
            if value is first and f"{module.__name__}.{alias}" != setting:
                return f"{module.__name__}.{alias}"
    return None


def _evaluated(path: str) -> Any:
    """Return the module or class of this name."""
    module = path
    while module not in sys.modules:
        module = module.rpartition(".")[0]
    found: Any = sys.modules[module]
    for name in path.removeprefix(module).split(".")[1:]:
        found = vars(found)[name]
    return found


def _removing_from(place: str, identity: str) -> str | None:
    """Return the deletion of an entry of a list of the interpreter's, by its place."""
    module, _, attribute = place.partition(".")
    found: Any = vars(sys.modules[module])[attribute]
    places = [turn for turn, item in enumerate(found) if hex(id(item)) == identity] if type(found) is list else []
    # Counted from the end, the last one's place is the same where the entries of lowtide and of pytest are not there.
    last = bool(places) and places[0] == len(found) - 1 > 0
    return f"del {place}[{-1 if last else places[0]}]" if places else None


def _removing_handler(name: str) -> str | None:
    where, _, identity = name.partition(" of logging.")[2].rpartition(" at ")
    named = re.fullmatch(r"getLogger\((.+)\)", where, re.DOTALL)
    logger = logging.root if named is None else logging.getLogger(ast.literal_eval(named[1]))
    # Somebody may have put something else there.
    handlers = logger.handlers if type(logger.handlers) is list else []
    places = [place for place, item in enumerate(handlers) if hex(id(item)) == identity]
    if not places:
        return None
    there = f"logging.{where}.handlers"
    if logger is logging.root:
        # Its places change: pytest has handlers of its own there, around each phase of a test, and before all others.
        kind = type_name(type(handlers[places[0]])).rpartition(".")[2]
        found = f"next(each for each in reversed({there}) if type(each).__name__ == {kind!r})"
    else:
        found = f"{there}[{places[0]}]"
    return f"logging.{where}.removeHandler({found})"


def _value(name: str, before: str) -> str | None:
    if name in _SETTERS:
        return None if is_secret(name, before) else _SETTERS[name].format(before)
    for pattern, code in _PATTERNS.items():
        if match := re.fullmatch(pattern, name):
            return code.format(name=match[1], value=before)
    if name == "asyncio.get_event_loop_policy()":
        return "asyncio.set_event_loop_policy(None)" if before == "default" else None
    if name == "sys.get_asyncgen_hooks()":
        return f"sys.set_asyncgen_hooks{before}" if before == "(None, None)" else None
    if name == "tracemalloc.is_tracing()":
        return f"tracemalloc.{'start' if before == 'True' else 'stop'}()"
    if match := re.fullmatch(r"sys\.monitoring\.get_tool\((\d)\)", name):
        # (A tool that is free may still be called: what it has registered for is another thing.)
        freed = f"sys.monitoring.set_events({match[1]}, 0); sys.monitoring.free_tool_id({match[1]})"
        return freed if before == "None" else None
    if name in ("gc.isenabled()", "faulthandler.is_enabled()"):
        return f"{name.partition('.')[0]}.{'enable' if before == 'True' else 'disable'}()"
    if name == "torch.get_default_device()":
        return f"torch.set_default_device({None if before == 'cpu' else before!r})"
    if match := re.fullmatch(r"(torch\.backends\.cuda\.preferred_\w+_library)\(\)", name):
        return f"{match[1]}({before.rpartition('.')[2].lower()!r})"
    if name == "torch.cuda.get_per_process_memory_fraction()":
        if before == NO_LIMIT:
            every = "for card in range(torch.cuda.device_count())"
            return f"[torch.cuda.set_per_process_memory_fraction(1.0, card) {every}]"
        shares = enumerate(ast.literal_eval(before))
        return "; ".join(f"torch.cuda.set_per_process_memory_fraction({share}, {card})" for card, share in shares)
    if name == "torch.cuda.current_stream()":
        stream = "default_stream()" if before == DEFAULT_STREAM else f"Stream{before}"
        return f"torch.cuda.set_stream(torch.cuda.{stream})"
    if name in _ADVICE:
        return None
    setter = _GETTER.sub(r".\1set\2", name)
    expression = _expression(before) if setter == name or " at " in before else before
    if expression is None or expression == name:
        return None
    if setter != name:
        return f"{setter}({expression})"
    if name.startswith("signal.getsignal("):
        return f"signal.signal({name.removeprefix('signal.getsignal(')[:-1]}, {expression})"
    return f"{name} = {expression}" if re.fullmatch(r"[\w.]+", name) else None


def _expression(text: str) -> str | None:
    """Return an expression for an object, by its text: a constant, or the name under which its module has it still."""
    path, _, identity = text.rpartition(" at ")
    if not path:
        return text if text == "None" or text.startswith("signal.") else None
    module, _, name = path.rpartition(".")
    # The interpreter keeps its own hooks under a second name.
    for candidate in (name, f"__{name.lstrip('_')}__"):
        found: Any = getattr(sys.modules.get(module), candidate, None)
        if found is not None and hex(id(found)) == identity:
            return f"{module}.{candidate}"
    return None

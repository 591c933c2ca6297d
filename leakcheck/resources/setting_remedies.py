"""The code that puts process-wide settings back, or advice where there is none."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from lowtide.leakcheck.resources.settings import ABSENT, SettingChange, disabled_loggers, is_secret
from lowtide.probes.host.replaced import FIRST, INHERITED, NOTHING
from lowtide.probes.host.settings import is_entry
from lowtide.probes.host.torch_settings import CARD_LIMITS, DEFAULT_STREAM, NO_LIMIT
from lowtide.probes.objects.described import is_of_tools
from lowtide.probes.objects.foreign import MISSING, cells_of, is_a
from lowtide.probes.originals import gc, loaded, logging

_LONGEST_LINE = 240
"""Characters of code beyond which nobody reads it."""

_MOST_LINES = 8
"""Lines of advice about one finding."""

PR_SET_CHILD_SUBREAPER = 36

_MODULE = re.compile(r"\b([a-z]\w*)\.")

_SETTERS: Mapping[str, str] = {
    "gc.get_threshold()": "gc.set_threshold{}",
    "gc.get_debug()": "gc.set_debug({})",
    "sys.getrecursionlimit()": "sys.setrecursionlimit({})",
    "sys.getswitchinterval()": "sys.setswitchinterval({})",
    "sys.get_int_max_str_digits()": "sys.set_int_max_str_digits({})",
    "sys.get_coroutine_origin_tracking_depth()": "sys.set_coroutine_origin_tracking_depth({})",
    "sys.dont_write_bytecode": "sys.dont_write_bytecode = {}",
    "time.tzname": "time.tzset()",
    "os.getcwd()": "os.chdir({})",
    "os.sched_getaffinity(0)": "os.sched_setaffinity(0, {})",
    "os.getpriority(os.PRIO_PROCESS, 0)": "os.setpriority(os.PRIO_PROCESS, 0, {})",
    "sys.getdlopenflags()": "sys.setdlopenflags({})",
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
    "socket.getdefaulttimeout()": "socket.setdefaulttimeout({})",
    "multiprocessing.get_start_method()": "multiprocessing.set_start_method({}, force=True)",
    "numpy.geterr()": "numpy.seterr(**{})",
    "torch.get_default_dtype()": "torch.set_default_dtype({})",
    "torch.get_num_threads()": "torch.set_num_threads({})",
    "torch.is_grad_enabled()": "torch.set_grad_enabled({})",
    "torch.is_anomaly_enabled()": "torch.set_anomaly_enabled({})",
    "torch.is_anomaly_check_nan_enabled()": "torch.set_anomaly_enabled(torch.is_anomaly_enabled(), {})",
    "torch.are_deterministic_algorithms_enabled()": "torch.use_deterministic_algorithms({})",
    "torch.is_deterministic_algorithms_warn_only_enabled()": (
        "torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only={})"
    ),
    "torch.is_warn_always_enabled()": "torch.set_warn_always({})",
    "torch.is_autocast_cache_enabled()": "torch.set_autocast_cache_enabled({})",
    "torch.get_float32_matmul_precision()": "torch.set_float32_matmul_precision({})",
    "torch.backends.cuda.flash_sdp_enabled()": "torch.backends.cuda.enable_flash_sdp({})",
    "torch.backends.cuda.mem_efficient_sdp_enabled()": "torch.backends.cuda.enable_mem_efficient_sdp({})",
    "torch.backends.cuda.math_sdp_enabled()": "torch.backends.cuda.enable_math_sdp({})",
    "torch.backends.cuda.cudnn_sdp_enabled()": "torch.backends.cuda.enable_cudnn_sdp({})",
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
    "torch.__future__.get_swap_module_params_on_conversion()": (
        "torch.__future__.set_swap_module_params_on_conversion({})"
    ),
    "torch.__future__.get_overwrite_module_params_on_conversion()": (
        "torch.__future__.set_overwrite_module_params_on_conversion({})"
    ),
    "torch._tensor_str.PRINT_OPTS": "torch.set_printoptions({})",
    "torch.set_flush_denormal": "torch.set_flush_denormal({})",
    "torch.multiprocessing.get_sharing_strategy()": "torch.multiprocessing.set_sharing_strategy({})",
    "torch.cuda.current_device()": "torch.cuda.set_device({})",
    "torch.cuda.memory._record_memory_history": "torch.cuda.memory._record_memory_history({})",
}
"""The code that sets a setting, with a place for what it was."""

_PATTERNS: Mapping[str, str] = {
    r"torch\.is_autocast_enabled\((.+)\)": "torch.set_autocast_enabled({name}, {value})",
    r"torch\.get_autocast_dtype\((.+)\)": "torch.set_autocast_dtype({name}, {value})",
    r"(torch\.backends\..+[^)])": "{name} = {value}",
    r"(decimal\.getcontext\(\)\.(?!traps).+)": "{name} = {value}",
    r"(logging\.raiseExceptions)": "{name} = {value}",
    r"resource\.getrlimit\((.+)\)": "resource.setrlimit({name}, {value})",
    r"numpy\.get_printoptions\(\)\['(\w+)'\]": "numpy.set_printoptions({name}={value})",
}

_ADVICE: Mapping[str, str] = {
    "torch.get_num_interop_threads()": (
        "it can be set once in a process: set it in conftest.py, or run the test in a process of its own"
    ),
    "torch.is_inference_mode_enabled()": "leave torch.inference_mode() again: use it in a with statement",
    "torch.autograd._profiler_enabled()": "stop the profiler: use it in a with statement",
    "torch dispatch mode ": "leave the mode again: use it in a with statement",
    "torch function mode ": "leave the mode again: use it in a with statement",
    "torch hook ": "call remove() of the handle that registering the hook gave",
    "torch's default hook for saved tensors": "leave saved_tensors_hooks again: use it in a with statement",
    "decimal.getcontext().traps": "change them in a with decimal.localcontext() block only",
    "os.environ[": "monkeypatch.setenv and monkeypatch.delenv put a variable back when the test ends",
    "warnings filter ": "change the filters in a with warnings.catch_warnings() block only",
    "asyncio.get_event_loop_policy()": "keep the policy that was there, and set it again when the test ends",
    "gc.callbacks entry ": "remove it from gc.callbacks when the test ends",
}
_OTHERWISE = "keep what was there before, and put it back when the test ends (monkeypatch.setattr does)"


def undoing(changes: Iterable[SettingChange]) -> list[str]:
    """Return the lines of code that put settings back; none if one of the settings can be put back by nobody.

    Where there is no expression for what a replaced function was, words stand for what `put_back` does.
    """
    found = _each_once(changes)
    many = disabled_loggers(found)
    lines = [undo(change) or _without_code(change) for change in found if change not in many]
    if None in lines:
        return []
    return [*filter(None, [_enabling(many)]), *(line for line in dict.fromkeys(lines) if line is not None)]


def _enabling(changes: Sequence[SettingChange]) -> str | None:
    """Return the line that enables loggers again that were disabled together, but for those that had been before."""
    if not changes:
        return None
    known = logging.root.manager.loggerDict
    disabled = {f"disabled of logging.getLogger({name!r})" for name, item in known.items() if _is_disabled(item)}
    others = sorted(disabled - {change.name for change in changes})
    but = "".join(f" and logger is not {name.removeprefix('disabled of ')}" for name in others)
    loggers = "logging.root.manager.loggerDict.values()"
    return f"[setattr(logger, 'disabled', False) for logger in {loggers} if hasattr(logger, 'disabled'){but}]"


def _is_disabled(logger: object) -> bool:
    return is_a(logger, logging.Logger) and vars(logger).get("disabled") is True


def put_back(changes: Iterable[SettingChange]) -> None:
    """Do what `undoing` says."""
    found = _each_once(changes)
    many = disabled_loggers(found)
    run(filter(None, [_enabling(many)]))
    for change in found:
        line = None if change in many else undo(change)
        if line is not None:
            run([line])
        elif _without_code(change) is not None:
            FIRST.put_back(change.setting)


def is_code(changes: Iterable[SettingChange]) -> bool:
    """Return whether all that `undoing` says can be written."""
    return all(undo(change) is not None for change in _each_once(changes))


def _without_code(change: SettingChange) -> str | None:
    is_known = change.is_replaced and FIRST.first_of(change.setting) is not MISSING
    return f"putting {change.setting} back" if is_known else None


def advice(changes: Sequence[SettingChange]) -> str:
    """Return what to do about settings: the code that puts them back, and words where there is none."""
    found = _each_once(changes)
    many = disabled_loggers(found)
    lines = ["give logging.config disable_existing_loggers=False", _enabling(many) or ""] if many else []
    for change in found:
        if change not in many:
            words = next((text for start, text in _ADVICE.items() if change.name.startswith(start)), _OTHERWISE)
            lines.append(undo(change) or f"{change.setting}: {words}")
    lines = list(dict.fromkeys(lines))
    return "; ".join(lines[:_MOST_LINES]) + (f"; and {len(lines) - _MOST_LINES} more" if lines[_MOST_LINES:] else "")


def _each_once(changes: Iterable[SettingChange]) -> list[SettingChange]:
    """Leave out the second name of a setting that has two."""
    found = {change.name: change for change in changes}
    if "torch.get_float32_matmul_precision()" in found:
        found.pop("torch.backends.cuda.matmul.allow_tf32", None)
    return list(found.values())


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
    if name.startswith("os.environ["):
        if before == ABSENT:
            return f"os.environ.pop({name.removeprefix('os.environ[')[:-1]})"
        return None if is_secret(name, before) else f"{name} = {before}"
    if name.startswith("level of "):
        return f"{name.removeprefix('level of ')}.setLevel({before or 0})"
    if name.startswith("interval timer "):
        return f"signal.setitimer({name.removeprefix('interval timer ')}, 0)" if before == ABSENT else None
    if name.startswith("name of logging level "):
        level = name.removeprefix("name of logging level ")
        taken = f"logging._nameToLevel.pop(logging._levelToName.pop({level}), None)"
        return taken if before == ABSENT else f"logging.addLevelName({level}, {before})"
    if name.startswith("sys.path entry "):
        entry = name.removeprefix("sys.path entry ")
        return f"sys.path.remove({entry})" if before == ABSENT else f"sys.path.append({entry})"
    if name.startswith("handler ") and before == ABSENT:
        return _removing_handler(name)
    for switch, usual in (("disabled", False), ("propagate", True)):
        if name.startswith(f"{switch} of "):
            return f"{name.removeprefix(f'{switch} of ')}.{switch} = {before or usual}"
    for place in ("sys.meta_path", "sys.path_hooks", "gc.callbacks"):
        if name.startswith(f"{place} entry ") and before == ABSENT:
            return _removing_from(place, name.rpartition(" at ")[2])
    return None


def _replaced(change: SettingChange) -> str | None:
    if change.first == NOTHING:
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
    return f"del {place}[{places[0]}]" if places else None


def _removing_handler(name: str) -> str | None:
    where, _, identity = name.partition(" of logging.")[2].rpartition(" at ")
    named = re.fullmatch(r"getLogger\((.+)\)", where, re.DOTALL)
    logger = logging.root if named is None else logging.getLogger(ast.literal_eval(named[1]))
    # Somebody may have put something else there.
    handlers = logger.handlers if type(logger.handlers) is list else []
    places = [place for place, item in enumerate(handlers) if hex(id(item)) == identity]
    return f"logging.{where}.removeHandler(logging.{where}.handlers[{places[0]}])" if places else None


def _value(name: str, before: str) -> str | None:
    if name in _SETTERS:
        return _SETTERS[name].format(before)
    for pattern, code in _PATTERNS.items():
        if match := re.fullmatch(pattern, name):
            return code.format(name=match[1], value=before)
    if name == "asyncio.get_event_loop_policy()":
        return "asyncio.set_event_loop_policy(None)" if before == "default" else None
    if name == "tracemalloc.is_tracing()":
        return f"tracemalloc.{'start' if before == 'True' else 'stop'}()"
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
    expression = _expression(before)
    if expression is None or expression == name:
        return None
    if name.startswith("signal.getsignal("):
        return f"signal.signal({name.removeprefix('signal.getsignal(')[:-1]}, {expression})"
    if name.startswith(("sys.get", "threading.get", "logging.get", "numpy.get")):
        return f"{name.replace('.get', '.set', 1).removesuffix('()')}({expression})"
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

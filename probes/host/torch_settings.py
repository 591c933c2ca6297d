"""The settings of torch: threads, modes, flags of its backends, global hooks.

They are read through torch's own C functions, each in some tens of nanoseconds, and only while torch is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

from lowtide.probes.device.allocation_history import history_of_program
from lowtide.probes.host.settings import Value, Values, is_loaded
from lowtide.probes.objects.described import described, identified, is_tools
from lowtide.probes.objects.foreign import type_name
from lowtide.probes.originals import loaded, os, torch_with_cuda

_PLAIN = {
    "torch.get_num_threads()": "get_num_threads",
    "torch.get_num_interop_threads()": "get_num_interop_threads",
    "torch.is_grad_enabled()": "is_grad_enabled",
    "torch.is_inference_mode_enabled()": "is_inference_mode_enabled",
    "torch.is_anomaly_enabled()": "is_anomaly_enabled",
    "torch.is_anomaly_check_nan_enabled()": "is_anomaly_check_nan_enabled",
    "torch.are_deterministic_algorithms_enabled()": "_get_deterministic_algorithms",
    "torch.is_deterministic_algorithms_warn_only_enabled()": "_get_deterministic_algorithms_warn_only",
    "torch.utils.deterministic.fill_uninitialized_memory": "_get_deterministic_fill_uninitialized_memory",
    "torch.is_warn_always_enabled()": "_get_warnAlways",
    "torch.is_autocast_cache_enabled()": "is_autocast_cache_enabled",
    "torch.autograd._profiler_enabled()": "_autograd._profiler_enabled",
    "torch._C._autograd._saved_tensors_hooks_is_enabled()": "_autograd._saved_tensors_hooks_is_enabled",
    "torch._C._is_torch_function_enabled()": "_is_torch_function_enabled",
    "torch._C._is_multithreading_enabled()": "_is_multithreading_enabled",
    "torch.sparse.check_sparse_tensor_invariants.is_enabled()": "_check_sparse_tensor_invariants",
    "torch.autograd.forward_ad._is_fwd_grad_enabled()": "_is_fwd_grad_enabled",
    "torch._C._is_view_replay_enabled()": "_is_view_replay_enabled",
    "torch._C._jit_texpr_fuser_enabled()": "_jit_texpr_fuser_enabled",
    "torch.backends.cudnn.enabled": "_get_cudnn_enabled",
    "torch.backends.cudnn.benchmark": "_get_cudnn_benchmark",
    "torch.backends.cudnn.deterministic": "_get_cudnn_deterministic",
    "torch.backends.mkldnn.enabled": "_get_mkldnn_enabled",
    "torch.backends.mkldnn.deterministic": "_get_mkldnn_deterministic",
    "torch.backends.nnpack.enabled": "_get_nnpack_enabled",
    "torch.backends.cuda.flash_sdp_enabled()": "_get_flash_sdp_enabled",
    "torch.backends.cuda.mem_efficient_sdp_enabled()": "_get_mem_efficient_sdp_enabled",
    "torch.backends.cuda.math_sdp_enabled()": "_get_math_sdp_enabled",
    "torch.backends.cuda.cudnn_sdp_enabled()": "_get_cudnn_sdp_enabled",
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()": "_get_math_sdp_allow_fp16_bf16_reduction",
    "torch.backends.cuda.matmul.allow_fp16_accumulation": "_get_cublas_allow_fp16_accumulation",
    "torch.backends.cuda.preferred_linalg_library()": "_get_linalg_preferred_backend",
    "torch.backends.cuda.preferred_blas_library()": "_get_blas_preferred_backend",
    "torch.backends.quantized.engine": "_get_qengine",
    "torch._C._get_autograd_fallback_mode()": "_get_autograd_fallback_mode",
    "torch._C._get_graph_executor_optimize()": "_get_graph_executor_optimize",
    "torch._C._accelerator_getAllocatorSettings()": "_accelerator_getAllocatorSettings",
}
"""Settings by the function of `torch._C` that reads them; what a version of torch does not have is left out."""

_LEGACY = {
    "torch.get_float32_matmul_precision()": "_get_float32_matmul_precision",
    "torch.backends.cuda.matmul.allow_tf32": "_get_cublas_allow_tf32",
    "torch.backends.cudnn.allow_tf32": "_get_cudnn_allow_tf32",
}
"""These warn when they are read, up to torch 2.12, in favour of the precisions."""

_PRECISIONS = {
    "torch.backends.fp32_precision": ("generic", "all"),
    "torch.backends.cuda.matmul.fp32_precision": ("cuda", "matmul"),
    "torch.backends.cudnn.conv.fp32_precision": ("cuda", "conv"),
    "torch.backends.cudnn.rnn.fp32_precision": ("cuda", "rnn"),
    "torch.backends.mkldnn.matmul.fp32_precision": ("mkldnn", "matmul"),
    "torch.backends.mkldnn.conv.fp32_precision": ("mkldnn", "conv"),
    "torch.backends.mkldnn.rnn.fp32_precision": ("mkldnn", "rnn"),
}

_AUTOCAST = ("cpu", "cuda")


def torch_values() -> Values:
    """Return the settings of torch that are always there."""
    return Values(
        libraries={
            "torch": _torch,
            "torch.multiprocessing": lambda module: [
                Value("torch.multiprocessing.get_sharing_strategy()", lambda: str(module._sharing_strategy))
            ],
            "torch.backends.opt_einsum": _opt_einsum,
        }
    )


def _torch(torch: Any) -> list[Value]:
    core = torch._C
    if not hasattr(torch, "_GLOBAL_DEVICE_CONTEXT"):
        return []
    values = [Value("torch.get_default_dtype()", torch.get_default_dtype, str), _default_device(torch)]
    plain = _PLAIN | (_LEGACY if _version(torch) >= (2, 13) else {})
    for name, function in plain.items():
        try:
            values.append(Value(name, operator.attrgetter(function)(core), _text))
        except AttributeError:  # not this version
            continue
    for name in ("fp16", "bf16"):
        read = getattr(core, f"_get_cublas_allow_{name}_reduced_precision_reduction", None)
        if read is not None:
            values.append(
                Value(f"torch.backends.cuda.matmul.allow_{name}_reduced_precision_reduction", read, _reduction)
            )
    precision = getattr(core, "_get_fp32_precision_getter", None)
    if precision is not None:
        values += [Value(name, functools.partial(precision, *of), _precision) for name, of in _PRECISIONS.items()]
    for device in _AUTOCAST:
        values.append(
            Value(f"torch.is_autocast_enabled({device!r})", functools.partial(core.is_autocast_enabled, device))
        )
        values.append(
            Value(f"torch.get_autocast_dtype({device!r})", functools.partial(core.get_autocast_dtype, device), str)
        )
    values.append(_saved_tensors_hooks(core))
    conversion = loaded("torch.__future__")
    for name in ("swap", "overwrite"):
        attribute = f"_{name}_module_params_on_conversion"
        if hasattr(conversion, attribute):
            read = functools.partial(getattr, conversion, attribute)
            values.append(Value(f"torch.__future__.get{attribute}()", read))
    printing = getattr(loaded("torch._tensor_str"), "PRINT_OPTS", None)
    if printing is not None:
        parts = ("precision", "threshold", "edgeitems", "linewidth", "sci_mode")
        values.append(
            Value(
                "torch._tensor_str.PRINT_OPTS",
                functools.partial(operator.attrgetter(*parts), printing),
                lambda found: ", ".join(f"{part}={value!r}" for part, value in zip(parts, found, strict=True)),
            )
        )
    return [*values, _denormals(), *_card(torch)]


def _version(torch: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in str(torch.__version__).split("+")[0].split(".")[:2] if part.isdigit())


def _text(value: Any) -> str:
    return repr(value) if type(value) in (int, bool, str, list) else str(value)


def _reduction(value: Any) -> str:
    # A flag alone up to torch 2.9, then one for splitting along the inner dimension, too.
    return str(value) if type(value) is bool or value[1] else repr(value)


def _precision(value: str) -> str:
    # What was never set, and is inherited from nobody, computes as IEEE says.
    return repr("ieee" if value == "none" else value)


def _default_device(torch: Any) -> Value:
    core = torch._C
    contexts = torch._GLOBAL_DEVICE_CONTEXT

    def read() -> str:
        # As `torch.get_default_device()`, which may run a function mode, and begin to use a card.
        own = getattr(contexts, "device_context", None)
        count = core._len_torch_function_stack()
        if own is None and not count:
            return "cpu"
        modes = [own, *map(core._get_function_stack_at, range(count))]
        devices = [mode.device for mode in modes if _is_device_context(mode)]
        return str(devices[-1]) if devices else "cpu"

    return Value("torch.get_default_device()", read, str)


def _is_device_context(mode: object) -> bool:
    return type_name(type(mode)) == "torch.utils._device.DeviceContext"


def _saved_tensors_hooks(core: Any) -> Value:
    def top() -> Any:
        return core._autograd._top_saved_tensors_default_hooks(True)

    def raw() -> object:
        hooks = top()
        return None if hooks is None else tuple(map(id, hooks))

    return Value("torch's default hook for saved tensors", raw, lambda found: str(found and identified(top()[0])))


def _denormals() -> Value:
    smallest = sys.float_info.min
    return Value("torch.set_flush_denormal", lambda: smallest / 2 == 0.0)


def _opt_einsum(module: Any) -> list[Value]:
    return [
        Value(f"torch.backends.opt_einsum.{name}", getattr(module, f"_get_{name}")) for name in ("enabled", "strategy")
    ]


NO_LIMIT = "1.0 on each card"
"""What the share of the memory of each card is that a process may take, where nobody has set one."""


DEFAULT_STREAM = "the default one"
"""What the current stream is where nobody has set one."""


def _card(torch: Any) -> list[Value]:
    """Return those of each card on which torch has begun to work: until then there is nothing, and nothing is begun."""
    core = torch._C
    fraction = getattr(core, "_cuda_getMemoryFraction", None)
    if fraction is None:
        return []
    initialized = torch_with_cuda().cuda.is_initialized

    def fractions() -> object:
        # Before torch has begun there is no limit either, and that it begins is no change.
        asked = tuple(fraction(index) for index in range(core._cuda_getDeviceCount())) if initialized() else ()
        # More than all of a card is no limit: cudaMallocAsync gives any number as long as none is set.
        shares = tuple(share if 0 <= share <= 1 else 1.0 for share in asked)
        return shares if any(share != 1.0 for share in shares) else NO_LIMIT

    def device() -> int:
        return int(core._cuda_getDevice()) if initialized() else 0

    def stream() -> object:
        # Of the current card: setting a stream makes its card the current one. The default stream has the number 0.
        number, card, kind = core._cuda_getCurrentStream(core._cuda_getDevice()) if initialized() else (0, 0, 0)
        return f"(stream_id={number}, device_index={card}, device_type={kind})" if number else DEFAULT_STREAM

    def sync_debug_mode() -> int:
        return int(core._cuda_get_sync_debug_mode()) if initialized() else 0

    return [
        Value("torch.cuda.get_per_process_memory_fraction()", fractions, str),
        Value("torch.cuda.current_device()", device),
        Value("torch.cuda.current_stream()", stream, str),
        Value("torch.cuda.get_sync_debug_mode()", sync_debug_mode),
        Value("torch.cuda.memory._record_memory_history", lambda: history_of_program(torch)),
    ]


CARD_LIMITS = {"cudaLimitStackSize": 0, "cudaLimitPrintfFifoSize": 1, "cudaLimitMallocHeapSize": 2}
"""The limits of a card that are read, with CUDA's numbers for them."""


class CardLimits:
    """Bytes that the current card sets aside for its threads: of their stacks, their output and their heap.

    Until torch has begun to work on a card there is none, and nothing is begun.
    """

    def __init__(self) -> None:
        self._driver: Any = None
        self._value = ctypes.c_size_t()
        self._place = ctypes.byref(self._value)

    def raw(self) -> object:
        """Return the limits, in the order of their names."""
        torch = torch_with_cuda()
        if torch is None or not torch.cuda.is_initialized():
            return ()
        if self._driver is None:
            self._driver = _loaded_driver()
        return tuple(map(self._limit, CARD_LIMITS.values())) if self._driver is not None else ()

    def texts(self) -> dict[str, str]:
        """Return each by the name that it has in CUDA's runtime."""
        limits: Any = self.raw()
        return {
            f"the card's {name}": str(value) for name, value in zip(CARD_LIMITS, limits, strict=False) if value >= 0
        }

    def _limit(self, number: int) -> int:
        # Fails where no card is current in this thread.
        return self._value.value if self._driver.cuCtxGetLimit(self._place, number) == 0 else -1


def _loaded_driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return None


class Modes:
    """The function and dispatch modes that are active."""

    def __init__(self) -> None:
        self._torch: Any = None
        self._stacks: list[tuple[str, Callable[[], int], Callable[[int], Any]]] = []

    def raw(self) -> object:
        """Return their identities."""
        if loaded("torch") is not self._torch:
            self._bind()
        return [tuple(id(at(place)) for place in range(count)) for _, length, at in self._stacks if (count := length())]

    def texts(self) -> dict[str, str]:
        """Return each by the name of its class."""
        found = {}
        for kind, length, at in self._stacks:
            for mode in [at(place) for place in range(length())]:
                # The default device, which is a setting of its own, and this checker's own.
                if not _is_device_context(mode) and not is_tools(type(mode)):
                    found[f"torch {kind} mode {type_name(type(mode))} at {id(mode):#x}"] = "there"
        return found

    def _bind(self) -> None:
        torch: Any = loaded("torch")
        self._torch, self._stacks = None, []
        if torch is not None and is_loaded(torch) and hasattr(torch, "_C"):
            core = torch._C
            self._torch = torch
            self._stacks = [
                ("function", core._len_torch_function_stack, core._get_function_stack_at),
                ("dispatch", core._len_torch_dispatch_stack, core._get_dispatch_stack_at),
            ]


_GLOBAL_HOOKS = {
    "torch.nn.modules.module": (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
        "_global_module_registration_hooks",
        "_global_parameter_registration_hooks",
        "_global_buffer_registration_hooks",
    ),
    "torch.optim.optimizer": ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
}


class ModuleHooks:
    """Hooks on all modules and on all optimizers."""

    def __init__(self) -> None:
        self._bound: list[Any] = []
        self._tables: list[tuple[str, dict[int, Any]]] = []

    def raw(self) -> object:
        """Return the numbers of their handles, which are never used again."""
        modules: list[Any] = [loaded(name) for name in _GLOBAL_HOOKS]
        if len(self._bound) != len(modules) or any(map(operator.is_not, modules, self._bound)):
            self._bound = modules
            self._tables = [
                (f"{module.__name__}.{name}", vars(module)[name])
                for module, names in zip(modules, _GLOBAL_HOOKS.values(), strict=True)
                if module is not None and is_loaded(module)
                for name in names
                if isinstance(vars(module).get(name), dict)
            ]
        return [tuple(hooks) for _, hooks in self._tables]

    def texts(self) -> dict[str, str]:
        """Return each by its place and its name."""
        return {
            f"torch hook {described(hook)} in {place}": "there"
            for place, hooks in self._tables
            for hook in hooks.values()
        }

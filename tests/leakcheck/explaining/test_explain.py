"""Explanations: verdict, cause and holder of what is still alive, one test per kind of leak."""

from __future__ import annotations

import concurrent.futures
import contextvars
import functools
import gc
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lowtide.leakcheck.explaining.explain import Explanation, explain
from lowtide.leakcheck.judging.fingerprints import fingerprint
from tests.waiting import HANG_S


class Engine:
    """Holds what it is given."""

    def __init__(self, model: object = None) -> None:
        self.model = model


class Leak:
    """A tensor that one way of holding it keeps, and how that is to be explained."""

    def __init__(self, cause: str, holder: str, put: Callable[[Any, Any], object]) -> None:
        self.cause, self.holder, self.put = cause, holder, put


LEAKS: dict[str, Leak] = {}


def leak(cause: str, holder: str) -> Callable[[Callable[[Any, Any], object]], None]:
    """Registers a way to leak; it gets a module `helper_` and its name, and a tensor, and returns what is innocent."""

    def register(put: Callable[[Any, Any], object]) -> None:
        LEAKS[put.__name__] = Leak(cause, holder, put)

    return register


@leak("module-global", "helper.CACHE['a'][0]")
def container_in_a_global(helper: Any, tensor: Any) -> None:
    helper.CACHE = {"a": [tensor]}


@leak("module-global", "helper.ENGINE.model")
def object_in_a_global(helper: Any, tensor: Any) -> None:
    helper.ENGINE = Engine(tensor)


@leak("module-global", "helper.CALLBACK.__self__.model")
def bound_method_in_a_global(helper: Any, tensor: Any) -> None:
    helper.CALLBACK = types.MethodType(len, Engine(tensor))


@leak("class-attribute", "helper.Engine.instances[0]")
def attribute_of_a_class(helper: Any, tensor: Any) -> None:
    helper.Engine = type("Engine", (), {"instances": [tensor]})


@leak("closure", "helper.hook, closure cell 'scale'")
def cell_of_a_closure(helper: Any, tensor: Any) -> None:
    def make(scale: object) -> Callable[[], object]:
        return lambda: scale

    helper.hook = make({"deep": tensor})


@leak("closure", "helper.hook.__defaults__[0]")
def default_of_a_function(helper: Any, tensor: Any) -> None:
    def hook(scale: object = tensor) -> None: ...

    helper.hook = hook


@leak("lru-cache", "helper.supports_kw (lru_cache key)")
def bound_method_in_the_key_of_a_cache(helper: Any, tensor: Any) -> None:
    helper.supports_kw = functools.lru_cache(lambda method: True)
    helper.supports_kw(types.MethodType(len, Engine(tensor)))


@leak("lru-cache", "helper.load (lru_cache value)")
def result_in_an_unbounded_cache(helper: Any, tensor: Any) -> None:
    results = [tensor]
    helper.load = functools.cache(lambda name: results.pop())
    helper.load("name")


@leak("lru-cache", "helper.ENGINE.supports (lru_cache key)")
def cache_of_an_object_in_a_global(helper: Any, tensor: Any) -> None:
    helper.ENGINE = Engine()
    helper.ENGINE.supports = functools.lru_cache(lambda argument: True)
    helper.ENGINE.supports(tensor)


@leak("module-global", "helper.stream f_locals['batch']")
def variable_of_a_suspended_generator(helper: Any, tensor: Any) -> None:
    def stream(batch: object) -> Iterator[int]:
        yield 1
        del batch

    helper.stream = stream(tensor)
    next(helper.stream)


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        ctx.kept = kept.pop()
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


@leak("autograd", "helper.LOSSES[0].grad_fn.kept")
def context_of_an_autograd_function(helper: Any, tensor: Any) -> None:
    kept = [tensor]
    helper.LOSSES = [Keeping.apply(torch.ones(1, requires_grad=True), kept)]  # type: ignore[no-untyped-call]


def instance_of(module: str, name: str, tensor: object) -> object:
    """An object of a library's class, as far as its name goes."""
    thing = type(name, (Engine,), {"__module__": module})(tensor)
    del module, name
    return thing


@leak("cuda-graph", "helper.GRAPHS[0].model")
def static_buffer_of_a_cuda_graph(helper: Any, tensor: Any) -> None:
    helper.GRAPHS = [instance_of("torch.cuda.graphs", "CUDAGraph", tensor)]


@leak("compiled-code", "helper.COMPILED.model")
def what_compiled_code_keeps(helper: Any, tensor: Any) -> None:
    helper.COMPILED = instance_of("torch._dynamo.eval_frame", "OptimizedModule", tensor)


@leak("module-global", "helper.PENDING[0].model")
def what_passes_through_a_module_with_offload_in_its_name(helper: Any, tensor: Any) -> None:
    helper.PENDING = [instance_of("engine.offload", "Request", tensor)]


@leak("instance-attribute", "helper.ENGINE.model")
def attribute_of_an_innocent_object(helper: Any, tensor: Any) -> object:
    helper.ENGINE = Engine(tensor)
    return helper.ENGINE


@leak("module-global", "helper.CACHE['a']")
def entry_of_an_innocent_container(helper: Any, tensor: Any) -> object:
    helper.CACHE = {"a": tensor}
    return helper.CACHE


@leak("module-global", "helper.LAYERS[1].model")
def one_of_several(helper: Any, tensor: Any) -> None:
    helper.LAYERS = [Engine(), Engine(tensor)]


@leak("module-global", "helper.workspace[0]")
def workspace_of_ones_own(helper: Any, tensor: Any) -> None:
    helper.workspace = [tensor]


@pytest.fixture(scope="module")
def explained() -> dict[str, Explanation]:
    """One walk for one tensor per kind of leak."""
    tensors = []
    helpers = {}
    innocent = []
    for name, kind in LEAKS.items():
        helpers[name] = types.ModuleType(f"helper_{name}")
        sys.modules[f"helper_{name}"] = helpers[name]
        tensors.append(torch.zeros(2))
        innocent.append(kind.put(helpers[name], tensors[-1]))
    found = dict(zip(LEAKS, explain(tensors, innocent=set(map(id, innocent)) - {id(None)}), strict=True))
    for name in LEAKS:
        del sys.modules[f"helper_{name}"]
    # A cut holds what it would cut.
    return {name: msgspec.structs.replace(reported, cut=None) for name, reported in found.items()}


@pytest.mark.parametrize("name", LEAKS)
def test_the_cause_is_the_most_telling_edge(explained: dict[str, Explanation], name: str) -> None:
    assert (explained[name].verdict, explained[name].cause) == ("reachable", LEAKS[name].cause)


@pytest.mark.parametrize("name", LEAKS)
def test_the_holder_is_the_path_as_code(explained: dict[str, Explanation], name: str) -> None:
    assert explained[name].holder == LEAKS[name].holder.replace("helper", f"helper_{name}", 1)


@pytest.fixture
def helper() -> Iterator[Any]:
    module = types.ModuleType("helper")
    sys.modules["helper"] = module
    yield module
    del sys.modules["helper"]


def test_what_an_unfinished_operation_holds_is_in_flight_and_what_a_finished_one_holds_is_reachable(
    helper: Any,
) -> None:
    waiting: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    tensors = [torch.zeros(2), torch.zeros(2)]
    waiting.block, done.block = tensors  # type: ignore[attr-defined]
    done.set_result(None)
    helper.FUTURES = [waiting, done]
    assert [reported.verdict for reported in explain(tensors)] == ["in-flight", "reachable"]


def test_the_path_starts_at_the_root_and_marks_the_suspects(explained: dict[str, Explanation]) -> None:
    assert [(hop.type, hop.edge, hop.suspect) for hop in explained["object_in_a_global"].path] == [
        ("module", "helper_object_in_a_global", False),
        (f"{__name__}.Engine", ".ENGINE", True),
        ("torch.Tensor", ".model", True),
    ]


def test_a_class_is_no_suspect(explained: dict[str, Explanation]) -> None:
    assert [hop.suspect for hop in explained["attribute_of_a_class"].path] == [False, False, True, True]


def test_what_the_caller_names_as_innocent_is_no_suspect(explained: dict[str, Explanation]) -> None:
    assert [hop.suspect for hop in explained["attribute_of_an_innocent_object"].path] == [False, False, True]


def test_the_last_of_what_was_all_there_before_is_the_suspect_and_not_expected_to_stay(helper: Any) -> None:
    helper.KEPT, tensor = [], torch.zeros(2)
    helper.KEPT.append(tensor)
    (found,) = explain([tensor], innocent={id(helper.KEPT), id(tensor)})
    marked = [(hop.edge, hop.suspect, hop.mark) for hop in found.path[1:]]
    assert marked == [(".KEPT", False, "innocent"), ("[0]", True, None)]


def test_suspects_leave_out_what_changes_from_run_to_run(explained: dict[str, Explanation]) -> None:
    assert explained["one_of_several"].suspects == (
        "helper_one_of_several .LAYERS",
        "list [*]",
        f"{__name__}.Engine .model",
    )


def test_the_local_of_a_running_function_names_the_function() -> None:
    tensor = torch.zeros(2)
    [explanation] = explain([tensor])
    line = sys._getframe().f_lineno - 1
    function = "test_the_local_of_a_running_function_names_the_function"
    assert explanation.cause == "frame"
    assert explanation.holder == f"local 'tensor' of {function}() in test_explain.py:{line}"


def test_what_a_local_leads_to_is_named_from_it_up_to_its_last_attribute() -> None:
    def serve() -> Explanation:
        loop = {"engine": types.SimpleNamespace(worker=types.SimpleNamespace(sent=[torch.zeros(2)]))}
        [explanation] = explain([*loop["engine"].worker.sent])
        return explanation

    explanation = serve()
    assert explanation.holder is not None
    assert explanation.holder.startswith("['engine'].worker.sent of local 'loop' of ")
    assert re.search(r"serve\(\) in test_explain\.py:[0-9]+$", explanation.holder)


def test_a_global_of_code_that_is_no_module_names_the_code() -> None:
    code = compile("explanations = explain(made)", "script.py", "exec")
    namespace: dict[str, Any] = {"explain": explain, "made": [], "kept": torch.zeros(2)}
    namespace["made"].append(namespace["kept"])
    exec(code, namespace)
    [explanation] = namespace["explanations"]
    assert (explanation.cause, explanation.holder) == ("module-global", "global 'kept' of <module>() in script.py:1")


def test_an_argument_of_a_running_thread_names_the_thread() -> None:
    ready, stop = threading.Event(), threading.Event()

    def run(*_: object) -> None:
        del _
        ready.set()
        stop.wait(HANG_S)

    thread = threading.Thread(target=run, args=(torch.zeros(2),), name="worker")
    thread.start()
    try:
        assert ready.wait(HANG_S)
        argument, itself = explain([thread._args[0], thread])  # type: ignore[attr-defined]
    finally:
        stop.set()
        thread.join()
    assert (argument.cause, argument.holder) == ("thread", "thread 'worker'")
    assert (itself.cause, itself.holder) == ("thread", "thread 'worker'")


class Server:
    """Runs a method in a thread, and keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def serve(self) -> None:
        del self
        Server.started.set()
        Server.ended.wait(HANG_S)

    started, ended = threading.Event(), threading.Event()


def test_what_hangs_on_whose_method_a_thread_runs_is_named_from_that() -> None:
    server = Server()
    server.seen.append(torch.zeros(2))
    thread = threading.Thread(target=server.serve, name="server")
    made = [*server.seen]
    thread.start()
    del server
    try:
        assert Server.started.wait(HANG_S)
        [explanation] = explain(made)
    finally:
        Server.ended.set()
        thread.join()
    assert (explanation.cause, explanation.holder) == ("thread", "Server.seen of thread 'server'")


def test_a_local_of_another_thread_names_both() -> None:
    ready, stop = threading.Event(), threading.Event()
    made: list[torch.Tensor] = []

    def run() -> None:
        batch = torch.zeros(2)
        made.append(batch)
        ready.set()
        stop.wait(HANG_S)

    thread = threading.Thread(target=run, name="worker")
    thread.start()
    try:
        assert ready.wait(HANG_S)
        [explanation] = explain(made)
    finally:
        stop.set()
        thread.join()
    assert explanation.cause == "thread"
    assert explanation.holder.startswith("thread 'worker', local 'batch' of run() in test_explain.py:")


def test_a_context_variable_counts_as_its_thread() -> None:
    variable = contextvars.ContextVar[list[torch.Tensor]]("scope")

    def run() -> Explanation:
        variable.set([torch.zeros(2)])
        return explain([variable.get()[0]])[0]

    explanation = contextvars.copy_context().run(run)
    assert (explanation.cause, explanation.holder) == ("thread", "context variable 'scope'")


def test_a_workspace_in_a_kernel_librarys_global() -> None:
    library = types.ModuleType("flashinfer")
    sys.modules["flashinfer"] = library
    try:
        library.workspace_buffers = [torch.zeros(2)]  # type: ignore[attr-defined]
        [explanation] = explain(list(library.workspace_buffers))
    finally:
        del sys.modules["flashinfer"]
    assert explanation.cause == "library-workspace"


@pytest.fixture(scope="module")
def pathless() -> dict[str, Explanation]:
    """One walk for what no root reaches."""
    gc.collect()
    activation, batch, cycle = torch.ones(2, requires_grad=True) * 2, torch.ones(2), Engine(torch.zeros(2))
    loss = (activation * activation).sum() + (batch * torch.ones(2, requires_grad=True)).sum()
    cycle.itself = cycle  # type: ignore[attr-defined]
    lost = {
        "activation": activation,
        "batch": batch,
        "in garbage": cycle.model,
        "unknown": torch.zeros(2),
        "no tensor": Engine(),
    }
    names, targets = list(lost), list(lost.values())
    gc.disable()
    try:
        del activation, batch, cycle, lost
        reported = [msgspec.structs.replace(explanation, cut=None) for explanation in explain(targets)]
        return dict(zip(names, reported, strict=True))
    finally:
        gc.enable()
        gc.collect()
        del loss


def test_a_tensor_that_an_autograd_graph_saved_is_held_by_native_code(pathless: dict[str, Explanation]) -> None:
    made_by = "autograd graph, made by MulBackward0"
    assert pathless["activation"] == Explanation("native-held", "autograd", made_by, (), (made_by,))


def test_an_input_that_an_autograd_graph_saved_is_held_by_native_code(pathless: dict[str, Explanation]) -> None:
    assert pathless["batch"] == Explanation("native-held", "native", "native code", (), ("native code",))


def test_a_tensor_in_uncollected_garbage_is_in_a_cycle(pathless: dict[str, Explanation]) -> None:
    # From Python 3.11 on the instance itself is the holder, on 3.10 its dict.
    name = f"{__name__}.Engine" if sys.version_info >= (3, 11) else "dict"
    assert pathless["in garbage"] == Explanation("unexplained", "cycle", f"garbage: {name}", (), (f"garbage {name}",))


def test_a_tensor_of_which_nothing_is_known_stays_unexplained(pathless: dict[str, Explanation]) -> None:
    assert pathless["unknown"] == Explanation("unexplained", "unknown", "", (), ())


def test_something_that_is_no_tensor_is_never_native_held(pathless: dict[str, Explanation]) -> None:
    assert pathless["no tensor"] == Explanation("unexplained", "unknown", "", (), ())


def test_suspects_of_two_modules_make_two_fingerprints(explained: dict[str, Explanation]) -> None:
    one, other = (
        fingerprint(resource="tensors", device="cpu", stage="shutdown", suspects=explained[name].suspects)
        for name in ("object_in_a_global", "workspace_of_ones_own")
    )
    assert one != other


def test_a_long_holder_is_shortened_in_the_middle(helper: Any) -> None:
    deep: Any = torch.zeros(2)
    tensor = deep
    for _ in range(60):
        deep = [deep]
    helper.DEEP = deep
    holder = explain([tensor])[0].holder
    del deep, tensor
    assert len(holder) == 120
    assert holder.startswith("helper.DEEP[0][0]")
    assert holder.endswith("[0][0]")


FROZEN = """
import gc, sys, types
sys.path.insert(0, sys.argv[1])
import torch
from lowtide.leakcheck.explaining.explain import explain

class Engine:
    pass

helper = types.ModuleType("helper")
sys.modules["helper"] = helper
helper.ENGINE = Engine()
helper.ENGINE.model = torch.zeros(2)
Engine.current = torch.zeros(2)
cycle = Engine()
cycle.itself, cycle.model = cycle, torch.zeros(2)
tensors = [helper.ENGINE.model, Engine.current, cycle.model]
gc.freeze()
del cycle
helper.fresh = [torch.zeros(2)]
tensors.append(helper.fresh[0])
for explanation in explain(tensors):
    print(explanation.verdict, explanation.cause, explanation.holder)
"""


@pytest.mark.nightly
def test_a_frozen_heap() -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", FROZEN, root], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "frozen-holder module-global helper.ENGINE.model",
        "reachable class-attribute __main__.Engine.current",
        "frozen-garbage frozen-garbage the heap frozen by gc.freeze()",
        "reachable module-global helper.fresh[0]",
    ]

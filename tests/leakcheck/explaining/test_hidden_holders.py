"""What holds tensors where the collector does not look: arrays, the interpreter's and torch's own tables, C++."""

from __future__ import annotations

import asyncio
import atexit
import codecs
import concurrent.futures
import ctypes
import encodings
import functools
import gc
import importlib.machinery
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import types
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.leakcheck.explaining.explain import Explanation, explain, expressions_to
from lowtide.leakcheck.explaining.path_reading import marks
from lowtide.leakcheck.watching.import_watch import ImportWatch
from lowtide.probes.references import cxx_holders

pytestmark = [pytest.mark.nightly, pytest.mark.no_leakcheck(reason="what C alone holds here is never given back")]

MONITORING: Any = getattr(sys, "monitoring", None)
HELD: dict[str, Any] = {}
HERE = f"{__name__}.HELD"


class Engine:
    """Has weights, a method to register, and a name for each of them."""

    def __init__(self) -> None:
        self.weights = torch.zeros(8)

    def called(self, *_: object) -> None: ...


def holders_of(tensors: dict[str, torch.Tensor], older: Sequence[object] = ()) -> dict[str, Explanation]:
    """What is said of each tensor, by one walk."""
    items = list(tensors.values())
    found = explain(items, ignore={id(items), id(tensors)}, innocent=set(map(id, older)))
    return dict(zip(tensors, found, strict=True))


def test_a_file_of_safetensors_has_the_storage_over_all_of_it_while_it_is_open(tmp_path: Path) -> None:
    saving = pytest.importorskip("safetensors.torch")
    saving.save_file({"weights": torch.zeros(1000)}, tmp_path / "weights.safetensors")
    with saving.safe_open(tmp_path / "weights.safetensors", "pt") as file:
        HELD["file"] = [file]
        (storage,) = cxx_holders.storage_of_file(file)
        (found,) = explain([storage], ignore=set(), innocent=set())
        assert (found.holder, found.verdict) == (f"{HERE}['file'][0] (its mapped file)", "reachable")
        of_tensor = file.get_tensor("weights").untyped_storage()
    assert cxx_holders.storage_of_file(file) == []
    (found,) = explain([storage], ignore={id(of_tensor)}, innocent=set())
    assert "its mapped file" not in found.holder
    assert cxx_holders.storage_of_file(saving.safe_open(tmp_path / "weights.safetensors", "numpy")) == []


# --- numpy ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arrays() -> Iterator[dict[str, Explanation]]:
    """Each array holds the only reference to its tensor but for the one that is asked about."""
    names = ("view", "slice", "memory view", "buffer", "objects", "fields", "scalar", "tuple", "nested", "iterator")
    tensors = {name: torch.zeros(8) for name in names}
    HELD["view"] = tensors["view"].numpy()
    HELD["slice"] = tensors["slice"].numpy()[2:]
    HELD["memory view"] = memoryview(tensors["memory view"].numpy())
    HELD["buffer"] = (ctypes.c_char * 4).from_buffer(tensors["buffer"].numpy().view(np.uint8))
    HELD["objects"] = np.empty((2, 2), dtype=object)
    HELD["objects"][1, 0] = tensors["objects"]
    HELD["fields"] = np.empty(3, dtype=[("tensor", object), ("size", float)])
    HELD["fields"]["tensor"][2] = tensors["fields"]
    records = np.empty(1, dtype=[("tensor", object)])
    records["tensor"][0] = tensors["scalar"]
    HELD["scalar"] = records[0]
    HELD["tuple"] = (tensors["tuple"].numpy(), 1)
    HELD["nested"] = {"a": {"b": tensors["nested"].numpy()}}
    HELD["iterator"] = tensors["iterator"].numpy().flat
    del records
    # What a view keeps is another tensor over the same memory.
    for name in ("view", "slice", "memory view", "buffer", "tuple", "nested", "iterator"):
        tensors[name] = base_of(HELD[name])
    gc.collect()
    try:
        yield holders_of(tensors)
    finally:
        HELD.clear()


def base_of(holder: Any) -> torch.Tensor:
    """The tensor at the end of a chain of views."""
    while not isinstance(holder, torch.Tensor):
        if isinstance(holder, tuple):
            holder = holder[0]
        elif isinstance(holder, dict):
            holder = next(iter(holder.values()))
        elif isinstance(holder, ctypes.Array):
            holder = holder._objects["ffffffff"]  # type: ignore[index]
        else:
            holder = holder.obj if isinstance(holder, memoryview) else holder.base
    return holder


@pytest.mark.parametrize(
    ("name", "edge"),
    [
        ("view", ".base"),
        ("slice", ".base.base"),
        ("memory view", ".obj.base"),
        ("buffer", "._objects['ffffffff'].obj.base.base"),
        ("objects", "[1, 0]"),
        ("fields", "['tensor'][2]"),
        ("scalar", ".base['tensor'][0]"),
        ("tuple", "[0].base"),
        ("nested", "['a']['b'].base"),
        ("iterator", ".base.base"),
    ],
)
def test_an_array_holds_its_memory_and_its_objects(arrays: dict[str, Explanation], name: str, edge: str) -> None:
    reported = arrays[name]
    assert (reported.verdict, reported.holder) == ("reachable", f"{HERE}[{name!r}]{edge}")


def test_a_capsule_holds_the_tensor_that_it_exports() -> None:
    """As another library gets a tensor by DLPack, whoever keeps the capsule: the program, or an array made of it."""
    tensors = {name: torch.zeros(8) for name in ("capsule", "array", "used up", "other")}
    HELD["capsule"] = torch.utils.dlpack.to_dlpack(tensors["capsule"])  # type: ignore[attr-defined]
    HELD["array"] = np.from_dlpack(tensors["array"][2:])  # type: ignore[arg-type]
    HELD["used up"] = torch.utils.dlpack.to_dlpack(tensors["used up"])  # type: ignore[attr-defined]
    torch.from_dlpack(HELD["used up"])
    try:
        reported = holders_of(tensors)
        (code,) = expressions_to([HELD["array"]])
    finally:
        for name in ("capsule", "array", "used up"):
            del HELD[name]
    assert reported["capsule"].holder == f"{HERE}['capsule'] (exported memory)"
    assert reported["array"].holder == f"{HERE}['array'].base (exported memory)"
    assert [reported[name].verdict for name in ("used up", "other")] == ["unexplained", "unexplained"]
    assert code == f"{HERE}['array']"


def test_cupys_memory_holds_the_tensor_whose_capsule_it_has_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a card there is no cupy: its module and the object that it makes are written here as they are there."""

    class Memory(int):
        """As cupy's: the collector is shown no reference of it."""

        __slots__ = ()
        ptr = property(int)

    cupy = types.ModuleType("cupy._core.dlpack")
    cupy.DLPackMemory = Memory  # type: ignore[attr-defined]
    loader = importlib.machinery.SourceFileLoader(cupy.__name__, "")
    cupy.__spec__ = importlib.machinery.ModuleSpec(cupy.__name__, loader)
    monkeypatch.setitem(sys.modules, cupy.__name__, cupy)
    tensors = {name: torch.zeros(8) for name in ("exported", "other")}
    HELD["view"] = [Memory(tensors["exported"].data_ptr())]
    try:
        reported = holders_of(tensors)
    finally:
        del HELD["view"]
    assert reported["exported"].holder == f"{HERE}['view'][0] (exported memory)"
    assert reported["other"].verdict == "unexplained"


def test_what_was_made_of_something_new_is_new(arrays: dict[str, Explanation]) -> None:
    """Nobody notes when an array is made: a view's age is that of what it views, an array of objects passes for old."""
    tensor = torch.zeros(2)
    view, table = tensor.numpy(), np.array([None, None], dtype=object)
    older = {id(HELD), id(view), id(table)}
    assert marks([HELD, view, view.base], innocent=older, ages_known=True) == ["innocent", None, None]
    assert marks([HELD, table, tensor], innocent=older, ages_known=True) == ["innocent", "innocent", None]


def test_a_capsule_is_as_new_as_what_it_exports() -> None:
    tensor = torch.zeros(2)
    capsule = tensor.__dlpack__()
    older = {id(HELD), id(capsule)}
    assert marks([HELD, capsule, tensor], innocent=older, ages_known=True) == ["innocent", None, None]
    older.add(id(tensor))
    assert marks([HELD, capsule, tensor], innocent=older, ages_known=True) == ["innocent"] * 3


def test_the_view_of_an_array_that_should_be_gone_is_as_new_as_that() -> None:
    table = np.zeros(10)
    view = table[:2]
    older = {id(HELD), id(view), id(table)}
    assert marks([HELD, view, table], innocent=older, ages_known=True)[:2] == ["innocent", None]


# --- callers ---------------------------------------------------------------------------------------------------------


def test_an_exception_that_an_import_keeps_holds_who_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of what watches imports lie between the two, and hide neither."""
    (tmp_path / "keeps_error.py").write_text(
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    STORED = error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    watch = ImportWatch(lambda owner: None, lambda: None)

    def imports() -> dict[str, torch.Tensor]:
        tensor = torch.zeros(8)
        importlib.import_module("keeps_error")
        return {"kept": tensor}

    watch.install()
    watch.active = True
    try:
        reported = holders_of(imports())["kept"]
    finally:
        watch.remove()
        del sys.modules["keeps_error"]
    assert reported.holder == "keeps_error.STORED.__traceback__.tb_frame.f_back … .f_back f_locals['tensor']"


# --- torch's own objects --------------------------------------------------------------------------------------------


class Scripted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8))
        self.register_buffer("offset", torch.zeros(8))
        self.table = torch.zeros(8)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        # TorchScript takes a comment behind the first line for a type of its own.
        result: torch.Tensor = value * self.weight + self.offset + self.table  # type: ignore[operator]
        return result


@pytest.fixture(scope="module")
def torchs() -> Iterator[dict[str, Explanation]]:
    result = torch.zeros(8)
    HELD["future"] = torch.futures.Future()  # type: ignore[no-untyped-call]
    HELD["future"].set_result([result])
    HELD["failed"] = torch.futures.Future()  # type: ignore[no-untyped-call]
    HELD["error"] = ValueError()
    HELD["failed"].set_exception(HELD["error"])
    with warnings.catch_warnings():
        # It is deprecated.
        warnings.simplefilter("ignore")
        with tempfile.TemporaryFile() as file:
            torch.jit.save(torch.jit.script(Scripted()), file)
            file.seek(0)
            HELD["script"] = torch.jit.load(file)
    own = HELD["script"]._c
    tensors = {"future": result, **{name: own.getattr(name) for name in ("weight", "offset", "table")}}
    try:
        yield holders_of(tensors)
        # Asking a future that has failed leaves nothing of the checker in its exception.
        assert HELD["error"].__traceback__ is None
    finally:
        HELD.clear()


@pytest.mark.parametrize(
    ("name", "holder"),
    [
        ("future", "['future'].value()[0]"),
        ("weight", "['script'].weight"),
        ("offset", "['script'].offset"),
        ("table", "['script'].table"),
    ],
)
def test_what_torch_keeps_in_c_is_its_owners(torchs: dict[str, Explanation], name: str, holder: str) -> None:
    assert torchs[name].holder == f"{HERE}{holder}"


# --- the interpreter's and torch's own tables -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def registered() -> Iterator[dict[str, Explanation]]:
    """Explained while each of them is registered, and nothing else holds it."""
    engines = {
        name: Engine()
        for name in (
            *("signal", "exit", "arguments", "codec", "errors", "dispatch", "function", "hooks", "profile"),
            *("generators", *(["monitoring"] if MONITORING else [])),
        )
    }
    tensors = {name: engine.weights for name, engine in engines.items()}
    before = signal.signal(signal.SIGUSR1, engines["signal"].called)
    exit_function = engines["exit"].called
    atexit.register(exit_function)
    with_arguments = atexit.register(functools.partial(print, end=""), engines["arguments"])
    codecs.register(engines["codec"].called)
    codecs.register_error("lowtide.test", engines["errors"].called)
    dispatch, function = DispatchMode(engines["dispatch"]), FunctionMode(engines["function"])
    hooks = torch.autograd.graph.saved_tensors_hooks(engines["hooks"].called, lambda saved: saved)
    profiler, before_generators = sys.getprofile(), sys.get_asyncgen_hooks()
    if MONITORING:
        MONITORING.use_tool_id(3, "lowtide_tests")
        MONITORING.register_callback(3, MONITORING.events.RAISE, engines["monitoring"].called)
    with hooks, dispatch, function:
        sys.set_asyncgen_hooks(firstiter=engines["generators"].called)
        sys.setprofile(engines["profile"].called)
        try:
            del dispatch, function, hooks, engines
            reported = holders_of(tensors)
        finally:
            sys.setprofile(profiler)
            sys.set_asyncgen_hooks(*before_generators)
            if MONITORING:
                MONITORING.register_callback(3, MONITORING.events.RAISE, None)
                MONITORING.free_tool_id(3)
    try:
        yield reported
    finally:
        signal.signal(signal.SIGUSR1, before)
        atexit.unregister(exit_function)
        atexit.unregister(with_arguments)
        # It compares by identity, and nothing else may have the method.
        for table in gc.get_referrers(encodings.search_function):  # type: ignore[attr-defined]
            if type(table) is list:
                del table[-1]
        codecs.register_error("lowtide.test", codecs.strict_errors)


class DispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class FunctionMode(torch.overrides.TorchFunctionMode):
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "holder"),
    [
        ("signal", "signal.getsignal(signal.SIGUSR1).__self__.weights"),
        ("exit", f"atexit.register(method {__name__}.Engine.called).__self__.weights"),
        ("arguments", "atexit.register(functools.partial of function print) with[0].weights"),
        ("codec", "codecs.register()[*].__self__.weights"),
        ("errors", "codecs.register_error()['lowtide.test'].__self__.weights"),
        ("dispatch", "torch.utils._python_dispatch._get_current_dispatch_mode_stack()[*].engine.weights"),
        ("function", "torch.overrides._get_current_function_mode_stack()[*].engine.weights"),
        ("hooks", "torch._C._autograd._top_saved_tensors_default_hooks(True)[0].__self__.weights"),
        ("profile", "sys.getprofile().__self__.weights"),
        ("generators", "sys.get_asyncgen_hooks().firstiter.__self__.weights"),
        pytest.param(
            "monitoring",
            f"sys.monitoring.register_callback(method {__name__}.Engine.called).__self__.weights",
            marks=pytest.mark.skipif(MONITORING is None, reason="came with Python 3.12"),
        ),
    ],
)
def test_what_the_process_itself_holds_has_a_name(registered: dict[str, Explanation], name: str, holder: str) -> None:
    reported = registered[name]
    begin, _, end = holder.partition("*")
    assert reported.verdict == "reachable"
    assert reported.holder.startswith(begin)
    assert reported.holder.endswith(end)
    assert reported.path[0].type == "interpreter"


def test_what_cannot_be_removed_is_named_with_how_to_do_without() -> None:
    """In a process of its own."""
    source = f"""
        import os, sys
        from {__name__} import Engine, holders_of
        engine, forked = Engine(), Engine()
        tensors = {{"audit": engine.weights, "fork": forked.weights}}
        sys.addaudithook(engine.called)
        os.register_at_fork(after_in_child=forked.called)
        del engine, forked
        reported = holders_of(tensors)
        print(reported["audit"].holder)
        print(reported["fork"].holder.partition("[")[0], reported["fork"].advice.partition(":")[2])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    audit, fork = done.stdout.splitlines()
    assert audit == f"sys.addaudithook(method {__name__}.Engine.called).__self__.weights", done.stderr
    assert fork.startswith("os.register_at_fork()  Python keeps what is registered for as long as the process runs")
    assert fork.endswith("a function that looks its object up, as by a weakref.WeakMethod")


# --- kernels and callbacks ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def called() -> Iterator[dict[str, Explanation]]:
    """Functions that torch's C++ code is to call."""
    names = ("kernel", "backward", "destroyed", "callback", "then", "abandoned", "loop", "pool", "completed")
    engines = {name: Engine() for name in names}
    tensors = {name: engine.weights for name, engine in engines.items()}
    library = torch.library.Library("lowtide_hidden", "DEF")
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", engines["kernel"].called, "CPU")
    torch.library.register_autograd("lowtide_hidden::scaled", engines["backward"].called, lib=library)
    other = torch.library.Library("lowtide_destroyed", "DEF")
    other.define("scaled(Tensor x) -> Tensor")
    other.impl("scaled", engines["destroyed"].called, "CPU")
    other._destroy()
    HELD["callback"], HELD["then"] = future(), future()
    HELD["callback"].add_done_callback(engines["callback"].called)
    HELD["child"] = HELD["then"].then(engines["then"].called)
    future().then(engines["abandoned"].called)
    HELD["event loop"] = asyncio.new_event_loop()
    HELD["loop"] = HELD["event loop"].create_future()
    HELD["loop"].add_done_callback(engines["loop"].called)
    HELD["pool"] = concurrent.futures.Future()
    HELD["pool"].add_done_callback(engines["pool"].called)
    done = future()
    done.add_done_callback(engines["completed"].called)
    done.set_result(None)
    del engines, done
    gc.collect()
    try:
        yield holders_of(tensors, older=[*HELD.values()])
    finally:
        HELD["event loop"].close()
        for name in ("callback", "then", "child", "event loop", "loop", "pool"):
            del HELD[name]
        library._destroy()


def future() -> Any:
    """One of torch's that is not done."""
    return torch.futures.Future()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("name", "holder", "advice"),
    [
        (
            "kernel",
            "torch.library kernel of lowtide_hidden::",
            "for as long as the process runs",
        ),
        (
            "backward",
            "torch.library kernel of lowtide_hidden::",
            "no tensors",
        ),
        (
            "destroyed",
            f"destroyed torch.library kernel, method {__name__}.Engine.called.__self__.weights",
            "no tensors",
        ),
        ("callback", f"{HERE}['callback'] (its callback)", "complete the future with set_result()"),
        ("then", f"{HERE}['then'] (its callback)", "complete the future with set_result()"),
        (
            "abandoned",
            f"callback of a torch.futures.Future, method {__name__}.Engine.called.__self__.weights",
            "complete the future with set_result()",
        ),
        ("loop", f"{HERE}['loop']._callbacks[0][0].__self__.weights", "remove_done_callback()"),
        ("pool", f"{HERE}['pool']._done_callbacks[0].__self__.weights", "let go of the future"),
    ],
)
def test_what_torch_and_futures_will_call_has_a_name(
    called: dict[str, Explanation], name: str, holder: str, advice: str
) -> None:
    reported = called[name]
    assert reported.verdict in ("reachable", "in-flight")
    assert reported.holder.startswith(holder)
    assert advice in reported.advice


def test_a_future_that_is_done_holds_no_callback(called: dict[str, Explanation]) -> None:
    assert called["completed"].verdict == "unexplained"


@pytest.mark.parametrize(("place", "reported"), [(2, {"callback of a torch.futures.Future"}), (5, set())])
def test_what_lies_in_the_block_behind_a_callback_is_not_the_callback_s(place: int, reported: set[str]) -> None:
    engine, waiting = Engine(), future()
    waiting.add_done_callback(engine.called)
    other = Engine()
    with cxx_holders._opened() as memory:
        assert memory is not None
        block = next(block for _, block, name in memory.holders_of(bound_to(engine)) if "PythonFunctionGuard" in name)
        table = int(memory._words(block, 1)[0])
    # As the C library's heap has them: the size of a block, 32 bytes with its own, and what is in it; then the next.
    words = np.zeros(1 << 14, np.int64)
    begin = 1 if words.ctypes.data % 16 else 2
    # One by one: numpy would copy a list to the heap first, and leave a table there without the size of its block.
    for offset, word in enumerate((0x21, table, 1 << 32 | 1, 0, 0x31), start=-1):
        words[begin + offset] = word
    words[begin + place] = id(other)
    found = set(cxx_holders.held_as([id(other)]).values())
    # Nobody may come across it in what will be free memory.
    words[:] = 0
    assert found == reported


@pytest.mark.parametrize("unwritten", ["of the wrapper", "of a function", "behind the last function"])
def test_what_a_future_s_memory_was_before_is_none_of_its_callbacks(unwritten: str) -> None:
    engines, waiting, other = [Engine() for _ in range(3)], future(), future()
    for engine in engines:
        waiting.add_done_callback(engine.called)
    stranger = Engine()
    other.add_done_callback(stranger.called)
    with cxx_holders._opened() as memory:
        assert memory is not None
        guard = next(block for _, block, name in memory.holders_of(bound_to(stranger)) if "PythonFunctionGuard" in name)
        words = memory._block(int(memory._block(memory._value_of(waiting))[2])).tolist()
        # Three functions, each with a flag, and room for a fourth.
        functions, end = next(
            (begin, end)
            for begin, end, room in zip(words, words[1:], words[2:], strict=False)
            if memory._is_heap(begin) and 0 < end - begin < room - begin and 3 * (room - begin) == 4 * (end - begin)
        )
        # The last one of the wrapper, where the function would be that it does not have.
        places = {"of the wrapper": memory._value_of(waiting) + 40, "of a function": functions + 8}
    ctypes.c_int64.from_address(places.get(unwritten, end)).value = guard
    called = [item.__self__ for item in cxx_holders.callbacks_of(waiting) if isinstance(item, types.MethodType)]
    assert sorted(map(id, called)) == sorted(map(id, engines))


def bound_to(engine: Engine) -> list[int]:
    methods = [item for item in gc.get_objects() if type(item) is types.MethodType]
    return [id(method) for method in methods if method.__self__ is engine]


# --- what C++ alone holds -------------------------------------------------------------------------------------------


class Quadrature:
    """Hooks itself into the graph of its own output, as gpytorch's does (gpytorch#2734)."""

    def __init__(self) -> None:
        self.weights = torch.zeros(8, requires_grad=True)
        self.output = self.weights + 1
        assert self.output.grad_fn is not None
        self.output.grad_fn.register_hook(functools.partial(Quadrature.clear, self))

    def clear(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def pathless() -> dict[str, Explanation]:
    tensors = {}
    gc.disable()
    for name in ("object", "dict", "behind", "garbage"):
        engine = Engine()
        tensors[name] = engine.weights
        holder: Any = {"object": engine, "dict": {"engine": engine}, "behind": Engine(), "garbage": [engine]}[name]
        if name == "behind":
            holder.inner = [engine]
        if name == "garbage":
            holder.append(holder)
            engine.holder = holder  # type: ignore[attr-defined]
        else:
            # A reference that no object has.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder))
        del holder, engine
    tensors["hook"] = Quadrature().weights
    try:
        return holders_of(tensors)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("name", "holder"),
    [
        ("object", f"{__name__}.Engine, held from C or C++"),
        ("dict", "dict, held from C or C++"),
        ("behind", f"{__name__}.Engine, held from C or C++"),
        ("hook", f"hook functools.partial of function {__name__}.Quadrature.clear, held from C or C++"),
    ],
)
def test_the_outermost_object_that_c_holds_is_named(pathless: dict[str, Explanation], name: str, holder: str) -> None:
    reported = pathless[name]
    assert (reported.verdict, reported.holder) == ("native-held", holder)
    assert reported.path[0].type == "native"
    # Nobody can write a change to what has no name.
    assert reported.cut is None


def test_the_path_begins_at_the_outermost_object(pathless: dict[str, Explanation]) -> None:
    assert [hop.edge for hop in pathless["behind"].path[1:]] == [".inner", "[0]", ".weights"]


def test_garbage_that_nothing_holds_is_garbage(pathless: dict[str, Explanation]) -> None:
    reported = pathless["garbage"]
    assert (reported.verdict, reported.cause, reported.path) == ("unexplained", "cycle", ())


def test_no_code_of_what_is_on_the_way_runs() -> None:
    class Hostile:
        def __init__(self) -> None:
            self.weights = torch.zeros(8)

        def fails(self, *_: object) -> Any:
            raise AssertionError

        __eq__ = __hash__ = __bool__ = __repr__ = __getattr__ = __len__ = __iter__ = __call__ = fails

    table = np.empty(1, dtype=object)
    tensors = {}
    for name in ("array", "c"):
        item = Hostile()
        tensors[name] = item.weights
        if name == "array":
            table[0] = item
        elif name == "c":
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
    HELD["table"] = table
    del item, table
    try:
        reported = holders_of(tensors)
    finally:
        del HELD["table"]
    assert reported["array"].holder == f"{HERE}['table'][0].weights"
    assert reported["c"].verdict == "native-held"

"""Reads a path: what its objects say of themselves, its verdict, its cause, its suspect edges, and what it is called.

A path is called by code where there is code for it, else by words that say where to look.

That each object says whether it is meant to live, to be gone by now, or at work that has not ended, is the idea of
LeakCanary's object inspectors: many small clues, each about one kind of object.  A clue reads attributes as they lie in
the object and runs no foreign code; where it knows nothing, it says nothing.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import re
from collections.abc import Callable, Container, Sequence
from types import FunctionType, MemberDescriptorType
from typing import Any

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.judging.storages import is_module
from lowtide.leakcheck.resources.resource import without_numbers
from lowtide.probes.heap.paths import Mark, Path, PathStep, is_named_logger, module_expression
from lowtide.probes.heap.roots import RootKind, is_library
from lowtide.probes.objects.foreign import LRU_CACHE, attribute, is_a, mro_of, namespace_of, type_name
from lowtide.probes.objects.listed import any_frozen
from lowtide.probes.originals import gc, loaded, threading
from lowtide.probes.references.entries import Kind
from lowtide.probes.references.unseen_references import is_view_of
from lowtide.reports.schema import Cause, Hop, Verdict

_CAUSE_OF_KIND: dict[Kind, Cause] = {
    "module-global": "module-global",
    "class-attribute": "class-attribute",
    "instance-attribute": "instance-attribute",
    "closure": "closure",
    # A default value lives and dies with its function, as what the function closes over does.
    "default": "closure",
    "frame-local": "frame",
    "generator-local": "frame",
    "thread": "thread",
    "context-variable": "thread",
    "lru-cache-key": "lru-cache",
    "lru-cache-value": "lru-cache",
}
# What the interpreter or torch holds for the whole process is a global of theirs.
_CAUSE_OF_ROOT: dict[RootKind, Cause] = {"thread": "thread", "interpreter": "module-global", "native": "native"}
AUTOGRAD = re.compile(r"(torch\.autograd\.(function|graph)\..*|\w+Backward\d*|AccumulateGrad)")
_CUDA_GRAPH = re.compile(r"torch\.cuda\.graphs\..*|torch\._inductor\.cudagraph_.*|(.*\.)?_?CUDAGraph\w*")
_COMPILED = re.compile(r"torch\.(_dynamo|_inductor|_functorch|fx)\..*|torch\.(_dynamo|_inductor)")
_WORKSPACE = re.compile(r"(?i).*workspace.*")
# As `hash` gives it.
_NEGATIVE_KEY = re.compile(r"\[-(?=\d+\])")
# Libraries that keep buffers for their kernels in globals of their own.
_KERNEL_LIBRARIES = frozenset(
    {"cutlass", "deep_gemm", "flash_attn", "flashinfer", "torch", "transformer_engine", "triton", "xformers"}
)


_TELLING_TYPES: tuple[tuple[Cause, re.Pattern[str]], ...] = (
    ("autograd", AUTOGRAD),
    ("cuda-graph", _CUDA_GRAPH),
    ("compiled-code", _COMPILED),
)


_CACHE = type_name(LRU_CACHE)

_LONGEST_HOLDER = 120

_LONGEST_CODE = 2000
"""Characters of a path as code; Python itself does not compile an expression of some thousand parts."""

_REMEMBERED = 4
"""Steps that may be asked for again when the one behind them was."""

_OF_MOCKS = re.compile(r"\._mock_(return_value|call_args_list|call_args|side_effect|mock_calls|wraps)")


class Shown(msgspec.Struct, frozen=True):
    """A path as it is shown: from the last object on it that the program knows by a name of its own.

    Attributes:
        whole: from the root of the process on.
        path: what is shown.
        skipped: how many steps of the whole path lead to the root of what is shown.
        is_code: whether that root is an expression.
    """

    whole: Path
    path: Path
    skipped: int
    is_code: bool


def shown_from_landmark(path: Path) -> Shown:
    """Return the path from its last landmark on; all of it if there is none or a module's global name is shorter."""
    for turn in reversed(range(len(path.steps))):
        name = path.steps[turn].landmark
        if name and (turn or path.root_kind != "module" or is_library(path.root_name)):
            rest = path.steps[turn + 1 :]
            # What is leaked itself may be the value of a fixture.
            steps = rest or (replace(path.steps[turn], edge=""),)
            skipped = turn + 1 if rest else turn
            cut = replace(path, root_kind="object", root_name=name, steps=steps)
            return Shown(path, cut, skipped, name.startswith(("logging.", "asyncio.")))
    return Shown(path, path, 0, path.root_kind not in ("interpreter", "native"))


def holder_name(path: Path, first: int) -> str:
    """Return the path as code from its root, up to where something holds on to all that follows and has no code for it.

    Args:
        path: the path.
        first: its first suspect step.
    """
    if path.root_kind == "frame" and path.steps:
        sort = "local" if path.steps[0].kind == "frame-local" else "global"
        frame = variable_of_frame(path.root_name, path.steps[0].edge, sort)
        frame = f"thread '{path.thread}', {frame}" if path.thread else frame
        # A loop's `self` leads to everything: what has a name behind it says more.
        way = _to_last_attribute(path, 1)
        return f"{_shortened(way.lstrip())} of {frame}" if way else frame
    if path.root_kind in ("thread", "context"):
        # A thread that runs a method is known by whose that is.
        runs = [step.edge for step in path.steps[:2]] == ["._target", ".__self__"]
        way = _to_last_attribute(path, 2) if runs else ""
        own = path.steps[1].type_name.rpartition(".")[2] if way else ""
        return f"{_shortened(own + way)} of {path.root}" if way else path.root
    if path.root_kind == "native":
        hidden = ", or by what is frozen" if any_frozen() else ""
        return f"{_shortened(path.root_name)}, held from C or C++{hidden}"
    for turn, step in enumerate(path.steps):
        if step.kind in ("lru-cache-key", "lru-cache-value", "opaque"):
            edge = step.edge.strip(".<>") if step.kind == "opaque" else step.edge
            return f"{_shortened(code_of(path, turn))} ({edge})"
        if step.kind == "closure" and turn >= first:
            return f"{_shortened(code_of(path, turn))}, closure {step.edge}"
    return _shortened(code_of(path, len(path.steps)))


def variable_of_frame(root: str, edge: str, sort: str = "local") -> str:
    """Return the name of a variable of a function that runs, `root`, by the edge to it."""
    function, _, place = root.partition(" in ")
    variable = edge.removeprefix("f_locals[").removeprefix("f_globals[").removesuffix("]")
    return f"{sort} {variable} of {function}() in {place}"


def _to_last_attribute(path: Path, first: int) -> str:
    """Return the path as code from a step on up to the last one that is an attribute; empty if there is none."""
    last = max((turn for turn, step in enumerate(path.steps) if step.edge.startswith(".")), default=0)
    code = CodeOfPath(path)
    return code(last + 1)[len(code(first)) :] if last >= first else ""


def way_text(path: Sequence[Hop]) -> str:
    """Return a finding's path from its root on, as code."""
    return "".join(
        hop.edge if hop.edge.startswith((".", "[")) or not (turn and hop.edge) else f" {hop.edge}"
        for turn, hop in enumerate(path)
    )


def code_of(path: Path, end: int) -> str:
    """Return the path as code from its root up to a step."""
    return CodeOfPath(path)(end)


class CodeOfPath:
    """Writes a path as code, from its root up to one step after the other.

    What is longer than anybody reads keeps its beginning and its end: else the texts for all steps of a long path would
    be as long, together, as the square of its length.

    Args:
        path: the path.
    """

    def __init__(self, path: Path) -> None:
        self._steps = path.steps
        code = module_expression(path.root_name) if path.root_kind == "module" else path.root_name
        if path.root_kind == "frame":
            code = path.root_name.partition(" in ")[0]
        # Up to the steps that were asked for last, as it is in front of a further one.
        self._root = code
        self._codes = {0: code}

    def __call__(self, end: int) -> str:
        """Return the code up to a step."""
        end = max(0, min(end, len(self._steps)))
        if not end:
            return self._root
        if end - 1 not in self._codes and end - 1 < max(self._codes):
            self._codes = {0: self._root}
        for turn in range(max(self._codes), end - 1):
            self._codes[turn + 1] = self._with_step(turn, is_last=False)
            self._codes.pop(turn - _REMEMBERED, None)
        return self._with_step(end - 1, is_last=True)

    def _with_step(self, turn: int, *, is_last: bool) -> str:
        text = _public(self._steps, turn, is_last=is_last)
        code = self._codes[turn]
        code += text if text.startswith((".", "[", "<", "{")) or not text else f" {text}"
        half = _LONGEST_CODE // 2
        return code if len(code) <= _LONGEST_CODE else f"{code[:half]}…{code[1 - half :]}"


def _public(steps: Sequence[PathStep], turn: int, *, is_last: bool) -> str:
    """Return a step's edge; for a mock, what the mock offers in its place."""
    edge = steps[turn].edge
    if turn and edge.startswith("['") and steps[turn - 1].edge == "._mock_children":
        return f".{edge[2:-2]}"
    if edge == "._mock_children" and not is_last:
        return ""
    is_mocks = turn and steps[turn - 1].type_name.startswith("unittest.mock.")
    return _OF_MOCKS.sub(r".\1", edge) if is_mocks else edge


def _shortened(code: str) -> str:
    if len(code) <= _LONGEST_HOLDER:
        return code
    half = _LONGEST_HOLDER // 2
    return f"{code[:half]}…{code[1 - half :]}"


def verdict_of(steps: Sequence[PathStep]) -> Verdict:
    """Return whether a path passes a frozen holder or what is still under way, or is just one."""
    if any(_is_frozen_holder(step) for step in steps[:-1]):
        return "frozen-holder"
    return "in-flight" if any(step.mark == "pending" for step in steps) else "reachable"


def _is_frozen_holder(step: PathStep) -> bool:
    # Where a program freezes its heap all its functions and classes are frozen, and that is as it should be.
    return step.frozen and not step.definition


def suspect_steps(steps: Sequence[PathStep]) -> tuple[int, int]:
    """Return the places of the first and the last step that may be the mistake.

    From where the path leaves what is meant to live, to the first object that is known to be wrong where it is.
    """
    named = [turn for turn, step in enumerate(steps) if step.mark == "innocent"]
    first = named[-1] + 1 if named else 0
    while first < len(steps) and steps[first].definition:
        first += 1
    # The suspect itself cannot be meant to live, whatever it is.
    first = max(0, min(first, len(steps) - 1))
    wrong = (turn for turn, step in enumerate(steps) if turn >= first and step.mark == "holding")
    return first, next(wrong, len(steps) - 1)


def first_registered(steps: Sequence[PathStep], first: int) -> int:
    """Return the first function or class right before a step that is not meant to live: somebody registered it.

    Where there are none, the step itself. A cache is no such thing: it is emptied, wherever it is.

    Args:
        steps: those of a path, of which it is known what was there before the leak.
        first: the first suspect step.
    """
    while first and steps[first - 1].definition and steps[first - 1].mark != "innocent":
        if steps[first - 1].type_name == _CACHE:
            break
        first -= 1
    return first


def cause_of_edge(path: Path, place: int) -> Cause:
    """Return the cause that a step stands for: an entry of a container counts as the edge to the container."""
    for step in reversed(path.steps[: place + 1]):
        if step.kind in _CAUSE_OF_KIND:
            cause = _CAUSE_OF_KIND[step.kind]
            return "thread" if cause == "frame" and path.thread else cause
    return _CAUSE_OF_ROOT.get(path.root_kind, "unknown")


def telling_cause(path: Path) -> Cause | None:
    """Return what the path says whatever its first suspect edge is; the first rule that answers decides."""
    return next((cause for cause, crosses in _TELLING if crosses(path)), None)


def telling_type(cls: type) -> Cause | None:
    """Return what a path says that leads through an object of a type, whatever its first suspect edge is."""
    if cls is LRU_CACHE:
        return "lru-cache"
    name = type_name(cls)
    return next((cause for cause, pattern in _TELLING_TYPES if pattern.fullmatch(name)), None)


def _crosses_cache(path: Path) -> bool:
    return any(step.kind in ("lru-cache-key", "lru-cache-value") for step in path.steps)


def _crosses_type(pattern: re.Pattern[str]) -> Callable[[Path], bool]:
    """Return a test of whether a path leads from a module, or through an object of a type, of such a name."""

    def crosses(path: Path) -> bool:
        # Of a long path the types are few.
        names = {step.type_name for step in path.steps[:-1]}
        if path.root_kind in ("module", "class"):
            names.add(path.root_name)
        return any(pattern.fullmatch(name) for name in names)

    return crosses


def _crosses_workspace(path: Path) -> bool:
    is_kernel_library = path.root_kind == "module" and path.root_name.partition(".")[0] in _KERNEL_LIBRARIES
    return is_kernel_library and any(_WORKSPACE.fullmatch(step.edge) for step in path.steps)


def suspects_of(path: Path, first: int, last: int) -> tuple[str, ...]:
    """Return the suspect edges with what they start from, and every number, address, digest and UUID in them as `*`.

    What a cache keeps by the hashes of its keys is one thing, whatever these are.
    """
    root = path.root_name
    if path.root_kind == "frame":
        root = root.rpartition(":")[0]
    edges = []
    for turn, step in enumerate(path.steps[first : last + 1], first):
        owner = path.steps[turn - 1].type_name if turn else root
        if turn == first and turn:
            # Where the suspect part starts at a definition, its name says more than that it is a function.
            owner = "".join([root, *(before.edge for before in path.steps[:turn])])
        edges.append(without_numbers(_NEGATIVE_KEY.sub("[", f"{owner} {step.edge}")))
    return tuple(edges)


_TELLING: tuple[tuple[Cause, Callable[[Path], bool]], ...] = (
    ("lru-cache", _crosses_cache),
    *((cause, _crosses_type(pattern)) for cause, pattern in _TELLING_TYPES),
    ("library-workspace", _crosses_workspace),
)


# What a class calls the method that ends its instances' life, and how an instance says that this has happened.
_ENDINGS = ("close", "shutdown", "stop", "terminate", "destroy")
_FLAGS = (
    "closed",
    "_closed",
    "is_closed",
    "_is_closed",
    "_shutdown",
    "is_shutdown",
    "_is_shutdown",
    "_shut_down",
    "_shutdown_thread",
)
_STATES = ("state", "_state", "status", "_status")
_ENDED = frozenset({"closed", "shutdown", "shut_down", "stopped", "terminated", "destroyed", "dead"})
_ALIVE = frozenset({"running", "asleep", "sleeping", "awake", "ready", "active", "idle", "started"})


_ENTERED = frozenset({list, tuple, dict, collections.deque, collections.defaultdict, collections.OrderedDict})
"""What holds things as its entries, which no program has given a name each."""


def marks(
    items: Sequence[object],
    *,
    innocent: Container[int] = (),
    ages_known: bool = False,
    living: bool = False,
    hollow: bool = False,
) -> list[Mark | None]:
    """Return one mark for each object that a path leads to, from the root on.

    Args:
        items: the objects.
        innocent: identities of those that were there before the leak.
        ages_known: whether that is all of them.
        living: whether an engine that has not ended is meant to live now, and with it the modules that it owns; at the
            end of a test, what the test started should be gone.
        hollow: whether the path begins at an engine that was shut down and that its caller still has: then its parts
            that were asked to end as well may be there, and should be empty.
    """
    found: list[Mark | None] = []
    owned = False
    young = _young_by_what_they_hold(items, innocent)
    for holder, item in zip((None, *items), items, strict=False):
        mark = _clue(item)
        is_live = living and mark == "innocent"
        was_there = mark != "holding" and id(item) in innocent and id(item) not in young
        is_of_unknown_age = not gc.is_tracked(item) or (type(item) is dict and type(holder) not in _ENTERED)
        if ages_known and is_of_unknown_age and id(item) not in young:
            # The collector does not know an empty dict: one seems born when its first entry comes. Of what it does not
            # track nobody knows when it was made. They are taken for as old as what holds them; but a dict among the
            # entries of a container was filled before it came there, far more often than behind an attribute.
            was_there = (was_there and gc.is_tracked(item)) or not found or found[-1] == "innocent"
        is_module_of_engine = owned and is_module(item)
        if (hollow and can_end(item)) or was_there or is_live or is_module_of_engine or is_named_logger(item):
            mark = "innocent"
        elif mark == "innocent":
            mark = None
        owned = owned or is_live
        found.append(mark)
    return found


def _young_by_what_they_hold(items: Sequence[object], innocent: Container[int]) -> set[int]:
    """Return those of the objects on a path of which it is unknown when they were made, but that hold what came later.

    What they hold was there before them: a view's base, the cells of a function. The last one is what should be gone.
    """
    young: set[int] = set()
    for item, held in zip(reversed(items[:-1]), reversed(items[1:]), strict=True):
        is_suspect = held is items[-1] and not gc.is_tracked(held)
        if is_view_of(item, held) and (is_suspect or id(held) not in innocent or id(held) in young):
            young.add(id(item))
        if type(item) is FunctionType and any(id(cell) not in innocent for cell in item.__closure__ or ()):
            young.add(id(item))
    return young


def _clue(item: object) -> Mark | None:
    return next((mark for clue in _CLUES if (mark := clue(item)) is not None), None)


def _future(item: object) -> Mark | None:
    """Mark a future whose result is not there yet."""
    if is_a(item, concurrent.futures.Future):
        return "pending" if attribute(item, "_state") in ("PENDING", "RUNNING") else None
    # A class written in C, whose own method is asked past the object's.
    if is_a(item, asyncio.Future):
        return None if asyncio.Future.done(item) else "pending"  # type: ignore[arg-type]
    return None


def _thread(item: object) -> Mark | None:
    """Mark a thread that has ended."""
    if not is_a(item, threading.Thread):
        return None
    started = attribute(item, "_started")
    if type(started) is not threading.Event or not started.is_set():
        return None
    return None if any(item is thread for thread in threading.enumerate()) else "holding"


def _transfer(item: object) -> Mark | None:
    """Mark a collective operation or another piece of torch's asynchronous work that has not ended."""
    distributed: Any = loaded("torch.distributed")
    if distributed is None or not hasattr(distributed, "Work") or not is_a(item, distributed.Work):
        return None
    return None if distributed.Work.is_completed(item) else "pending"


def _resource(item: object) -> Mark | None:
    """Mark what can be closed or shut down, and says whether it was: executors, pools, connections, engines."""
    if not can_end(item):
        return None
    if any(_flag(item, flag) is True for flag in _FLAGS):
        return "holding"
    for name in _STATES:
        state = attribute(item, name)
        # An enumeration's member has its name in `_name_`.
        text = state if type(state) is str else attribute(state, "_name_")
        if type(text) is str and text.lower() in _ENDED:
            return "holding"
        if type(text) is str and text.lower() in _ALIVE:
            return "innocent"
    return None


def _flag(item: object, name: str) -> object:
    """Return an attribute, or a slot."""
    for base in mro_of(type(item)):
        member = namespace_of(base).get(name)
        if type(member) is MemberDescriptorType:
            try:
                return member.__get__(item)
            except AttributeError:
                return None  # unset
    return attribute(item, name)


def _file(item: Any) -> Mark | None:
    """Mark a closed file of Python's own, or what reads from one; another one's answer would be foreign code."""
    name = type_name(type(item))
    try:
        if name == "_io.TextIOWrapper":
            return _file(item.buffer)
        if name in ("_io.BufferedReader", "_io.BufferedWriter", "_io.BufferedRandom"):
            return _file(item.raw)
        if name in ("_io.FileIO", "_io.BytesIO", "_io.StringIO", "mmap.mmap"):
            return "holding" if item.closed else None
    except ValueError:  # detached
        return "holding"
    return None


def can_end(item: object) -> bool:
    """Return whether an object has a life of its own, by a method that ends it."""
    return any(name in namespace_of(base) for base in mro_of(type(item)) for name in _ENDINGS)


_CLUES: tuple[Callable[[object], Mark | None], ...] = (_future, _thread, _transfer, _file, _resource)

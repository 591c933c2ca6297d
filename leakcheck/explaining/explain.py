"""Says who holds a suspect: reads a path (`lowtide.probes.heap.holders`) as verdict, cause, holder and suspects.

Which edges of a path are suspects follows LeakCanary's Shark: what lies between the last object that is meant to live
and the leaked one. Meant to live are:

- the root, and after it modules, classes, functions and caches for as long as the path passes nothing else: a program
  defines them once, at import;
- every object that the caller names as innocent (what was alive before the leak), and whatever the path passes before.

So `helper.ENGINE.model.weight` is a `module-global` leak: the engine is not meant to live, and the first suspect edge
is `.ENGINE`. If the caller names the engine as innocent, the same path is an `instance-attribute` leak of `.model`.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import msgspec

from lowtide.leakcheck.explaining.cuts import Cut, Names, Refused, cut_of
from lowtide.leakcheck.explaining.expressions import of_public_global, of_root, one_step
from lowtide.leakcheck.explaining.inspectors import marks
from lowtide.leakcheck.explaining.library_objects import (
    Territory,
    advice_for,
    advice_for_finalizer,
    advice_for_root,
    library_of,
    offered_function,
    offered_method,
    territories,
)
from lowtide.leakcheck.explaining.path_names import Shown, holder_name, shown_from_landmark
from lowtide.leakcheck.judging.budget import Budget
from lowtide.probes.heap.edges import Kind
from lowtide.probes.heap.graph import RootKind, is_library
from lowtide.probes.heap.holders import Inspector, Link, Mark, Path, SharedWalk, Step, Traces, trace
from lowtide.probes.memory.tensors import plain_tensors, torch_member
from lowtide.probes.objects.foreign import HOOK, is_a
from lowtide.probes.objects.listed import FROZEN_AT_STARTUP, Census
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
_AUTOGRAD = re.compile(r"(torch\.autograd\.(function|graph)\..*|\w+Backward\d*|AccumulateGrad)")
_CUDA_GRAPH = re.compile(r"torch\.cuda\.graphs\..*|torch\._inductor\.cudagraph_.*|(.*\.)?_?CUDAGraph\w*")
_COMPILED = re.compile(r"torch\.(_dynamo|_inductor|_functorch|fx)\..*|torch\.(_dynamo|_inductor)")
_TRANSFER = re.compile(r"(?i).*(transfer|offload)\w*(\..*)?")
_WORKSPACE = re.compile(r"(?i).*workspace.*")
# Libraries that keep buffers for their kernels in globals of their own.
_KERNEL_LIBRARIES = frozenset(
    {"cutlass", "deep_gemm", "flash_attn", "flashinfer", "torch", "transformer_engine", "triton", "xformers"}
)
_LETTING_HOOK_GO = (
    "remove the {} with the handle that registering it gave, or let it hold its owner by a weak reference"
)
_CACHED = ("lru-cache-key", "lru-cache-value")
_SWEEPING = 2.0
"""Seconds for finding out what edges retain; a sweep takes 15 ms at 500,000 objects."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why one suspect is alive.

    Attributes:
        verdict: `reachable`; `frozen-holder` if a holder on the path, other than the program's own code, is hidden
            by `gc.freeze()`; without a path, `native-held` for a tensor that torch says C++ holds, `frozen-garbage`
            for what is itself frozen, `unexplained` for anything else.
        cause: the most telling edge of the path, else the kind of its first suspect edge.
        holder: who holds it, on one line: `helper.CACHE['a'][0]`, `helper.supports_kw (lru_cache key)`; empty if
            nobody is known to.
        path: from the root to the suspect.
        suspects: the suspect edges without what changes from run to run, for `fingerprint()`.
        freed: for each hop of the path the targets, by their place, that nothing would hold if it alone were cut; None
            where that was not worked out.
        cut: how to cut the first suspect edge that can be, live objects included; None if none can.
        thread: the name of the running thread that holds it, if one does.
        new: the identities of what lies behind the first suspect edge of the path, that of the suspect last.
        also: how to cut what else holds a part of the same memory.
        advice: what to do where what holds it lies inside a library, and is not to be cut; empty elsewhere.
        root: the identity of the object that C or C++ holds and that the path begins at; 0 if it begins elsewhere.
        through: the identities of the objects that the path leads through.
    """

    verdict: Verdict
    cause: Cause
    holder: str
    path: tuple[Hop, ...]
    suspects: tuple[str, ...]
    freed: tuple[frozenset[int] | None, ...] = field(default=(), repr=False, compare=False)
    cut: Cut | None = field(default=None, repr=False, compare=False)
    thread: str = ""
    new: frozenset[int] = field(default=frozenset(), repr=False, compare=False)
    also: tuple[Cut, ...] = field(default=(), repr=False, compare=False)
    advice: str = field(default="", compare=False)
    root: int = field(default=0, repr=False, compare=False)
    through: frozenset[int] = field(default=frozenset(), repr=False, compare=False)

    @property
    def is_of_node(self) -> bool:
        """Whether the path begins at a node of an autograd graph that C++ holds."""
        return bool(self.root) and _AUTOGRAD.fullmatch(self.path[0].edge) is not None

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """All cuts that it takes."""
        return self.also if self.cut is None else (self.cut, *self.also)

    def with_parts(self, parts: Sequence[Explanation], holder: str) -> Explanation:
        """The same for memory of which other explanations' suspects hold parts, and so each of them all of it."""
        also = tuple(cut for part in parts if part is not self for cut in part.cuts)
        new = self.new.union(*(part.new for part in parts))
        return dataclasses.replace(self, holder=holder, new=new, also=(*self.also, *also))


def explain(
    targets: Sequence[object],
    *,
    ignore: Collection[int] = (),
    innocent: Container[int] = (),
    living: bool = False,
    roots: Sequence[tuple[str, object]] = (),
    names: Names | None = None,
    budget: Budget | None = None,
    walk: SharedWalk | None = None,
) -> list[Explanation]:
    """Explains each of `targets`, in their order, by one walk over the heap.

    Args:
        targets: the objects that should be gone.
        ignore: ids of containers in which the caller keeps them; no path leads through those.
        innocent: ids of objects that were alive before the leak and are meant to stay.
        living: whether an engine that says that it runs is meant to live, with the modules that it owns.
        roots: further roots, by name.
        names: what is known of the program before the leak, for cuts that do no harm.
        budget: how long may be spent on what each holder retains; a few seconds at most.
        walk: the walk to ask, if it is shared with others.
    """
    known = names or Names()

    def inspect(root: RootKind, items: Sequence[object]) -> Sequence[Mark | None]:
        # What an engine that was shut down is made of is new and may be there all the same.
        hollow = root == "object"
        found = marks(items, innocent=innocent, ages_known=known.older is not None, living=living, hollow=hollow)
        ages_tell = known.are_free and known.older is not None and not hollow
        return _past_first_new(found, items, known) if ages_tell else found

    with trace(targets, ignore=ignore, roots=roots, thorough=True, walk=walk) as found:
        natively = frozenset(id(target) for place, target in enumerate(targets) if found.is_held_from_c(place))
        paths = [
            None if _may_hold_its_root(target, found.root(place), natively) else found.path(place, inspect)
            for place, target in enumerate(targets)
        ]
        found.will_be_cut(
            {place: _suspect_steps(path.steps)[0] for place, path in enumerate(paths) if path is not None}
        )
        sweeps = _Sweeps(found, (budget or Budget()).within(_SWEEPING))
        explained = [
            None if path is None else _with_path(path, place, found, sweeps, known) for place, path in enumerate(paths)
        ]
        lost = [place for place, told in enumerate(explained) if told is None]
        holders = dict(zip(lost, found.types_of_holders(lost, {id(targets), *ignore}), strict=True)) if lost else {}
        some_frozen = bool(lost) and gc.get_freeze_count() > FROZEN_AT_STARTUP
        return [
            told or _without_path(target, natively, holders[place], frozen=some_frozen and found.is_frozen(place))
            for place, (target, told) in enumerate(zip(targets, explained, strict=True))
        ]


def _past_first_new(found: Sequence[Mark | None], items: Sequence[object], names: Names) -> Sequence[Mark | None]:
    """Marks without the innocence of what only something new leads to.

    When the program is over it is known of few objects that they are new, those on the path as it was before: another
    path may lead through other parts of the same thing.
    """
    first = next((turn for turn, item in enumerate(items) if not names.may_have_been_there(item)), len(items))
    return [None if mark == "innocent" and turn > first else mark for turn, mark in enumerate(found)]


def expression_to(item: object, walk: SharedWalk | None = None) -> str | None:
    """The expression that leads to an object from a module, say; None where there is none.

    Args:
        item: the object.
        walk: the walk over the heap to ask, if it is shared with others.
    """
    with trace([item], walk=walk) as found:
        path = found.path(0)
        way = None if path is None else _Way(shown_from_landmark(path), 0, found)
        return None if way is None else way.code(len(way.links))


@dataclass(frozen=True, slots=True)
class Holder:
    """The first object on the way to a suspect that should be gone: it holds all that lies behind it.

    Attributes:
        identity: its identity.
        path: the way to it, from the root on.
        target: the suspect itself, as code; None where no expression leads to it.
        way: the way to the suspect.
    """

    identity: int
    path: tuple[Hop, ...]
    target: str | None = None
    way: tuple[Hop, ...] = ()


def first_holders(
    targets: Sequence[object],
    *,
    ignore: Collection[int] = (),
    innocent: Container[int] = (),
    living: bool = False,
    roots: Sequence[tuple[str, object]] = (),
    not_roots: Collection[int] = (),
    walk: SharedWalk | None = None,
) -> list[Holder | None]:
    """For each of `targets` what holds it of the program; None where only the system or a running frame does.

    Arguments are those of `explain`, and `not_roots`: the ids of running threads that hold nothing by themselves, as
    any that is a target does not. By one walk over the heap.
    """

    def inspect(root: RootKind, items: Sequence[object]) -> Sequence[Mark | None]:
        return marks(items, innocent=innocent, ages_known=True, living=living, hollow=root == "object")

    not_roots = {*map(id, targets), *not_roots}
    with trace(targets, ignore=ignore, roots=roots, not_roots=not_roots, walk=walk) as found:
        return [_first_holder(found, place, inspect) for place in range(len(targets))]


def _first_holder(found: Traces, place: int, inspect: Inspector) -> Holder | None:
    path = found.path(place, inspect)
    if path is None or not path.steps or path.root_kind not in ("module", "object"):
        return None
    first, _ = _suspect_steps(path.steps)
    shown = shown_from_landmark(path)
    if first < shown.skipped:
        # What it has a name of its own for is the program's; a fixture's value is the test runner's to end.
        named = Hop(type=path.steps[shown.skipped - 1].type_name, edge=shown.path.root_name, suspect=True)
        held = found.link(place, shown.skipped - 1).held
        return Holder(held, (named,), None, (named,)) if shown.is_code else None
    hops = [Hop(type=step.type_name, edge=step.edge) for step in shown.path.steps]
    turn = first - shown.skipped
    hops[turn] = msgspec.structs.replace(hops[turn], suspect=True)
    root = Hop(type=shown.path.root_kind, edge=shown.path.root_name)
    way = _Way(shown, place, found)
    code = way.code(len(way.links))
    return Holder(found.link(place, first).held, (root, *hops[: turn + 1]), code, (root, *hops))


def _may_hold_its_root(target: Any, root: object, held_from_c: Container[int]) -> bool:
    """Whether a path begins at a suspect that C++ holds, and ends at a tensor by whose graph it may do so."""
    torch = sys.modules.get("torch")
    if root is None or id(root) not in held_from_c or torch is None or not hasattr(torch, "Tensor"):
        return False
    if not is_a(target, torch.Tensor) or target is root:
        return False
    with plain_tensors(torch):
        return torch_member(target, "grad_fn") is not None


class _Sweeps:
    """What each edge retains, each asked for once: the suspects behind one edge share the answer."""

    def __init__(self, found: Traces, budget: Budget) -> None:
        self._found = found
        self._budget = budget
        self._freed: dict[tuple[int, str, int], frozenset[int]] = {}

    def freed(self, links: Sequence[Link], place: int, first: int, last: int) -> list[frozenset[int] | None]:
        """For the links of a path from `first` on, which targets each of them retains.

        None where it is not known: past the last suspect, and when sweeping has taken its time.
        """
        # An edge of a cache stands for all of its entries.
        keys = [
            (id(link.owner), link.kind, 0) if link.kind in _CACHED else (id(link.owner), link.edge, link.held)
            for link in links
        ]
        wanted = keys[: last + 1 - first]
        if any(key not in self._freed for key in wanted) and not self._budget.is_spent:
            self._freed.update(zip(keys, self._found.freed_by_cutting(place, first), strict=True))
        return [self._freed.get(key) for key in keys]


def _with_path(path: Path, place: int, found: Traces, sweeps: _Sweeps, names: Names) -> Explanation:
    first, last = _suspect_steps(path.steps)
    shown = shown_from_landmark(path)
    # How the walk came to what the program knows by a name says nothing.
    cause = _telling_cause(shown.path) or _cause_of_edge(path, first)
    way = _Way(shown, place, found)
    links = way.links[first:]
    freed = [*[None] * first, *sweeps.freed(links, place, first, last)]
    hops = (
        Hop(
            type=step.type_name,
            edge=step.edge,
            suspect=first <= turn <= last,
            mark=None if step.mark == "pending" else step.mark,
        )
        for turn, step in enumerate(shown.path.steps, shown.skipped)
    )
    begin = max(0, first - shown.skipped)
    new = frozenset(link.held for link in links)
    if not first and path.root_kind in ("interpreter", "native") and not names.may_have_been_there(links[0].owner):
        new |= {id(links[0].owner)}
    running = path.thread or (path.root_name if path.root_kind == "thread" else "")
    if shown.path.root_kind == "interpreter":
        cut = _cut_of_root(way, first, names)
    else:
        cut = _cut_of_new_dict(way, first, names) or _first_cut(way, first, names)
    advice = way.advice(first, has_cut=cut is not None)
    if shown.path.root_kind == "interpreter" and cut is None:
        advice = advice_for_root(shown.path.root_name) or advice
    if path.root_kind == "context" and cut is None:
        advice = f"call reset() of {shown.path.root} with the token that its set() returned"
    if path.root_kind == "native" and path.root_name.startswith(HOOK):
        advice = _LETTING_HOOK_GO.format(path.root_name)
        cut = None if cut is None else dataclasses.replace(cut, action=advice)
    return Explanation(
        verdict="native-held" if path.root_kind == "native" else _verdict(path.steps),
        cause=cause,
        holder=holder_name(shown.path, begin),
        path=(Hop(type=shown.path.root_kind, edge=shown.path.root_name), *hops),
        suspects=_suspects(shown.path, begin, max(0, last - shown.skipped)),
        freed=(None, *freed[shown.skipped :]),
        cut=cut,
        thread=running,
        new=new,
        advice=advice,
        root=id(found.root(place)) if path.root_kind == "native" else 0,
        through=frozenset(id(item) for link in way.links for item in (link.owner, link.carrier)),
    )


class _Way:
    """A path with its objects, each as the expression that leads to it, and with what of it lies inside a library."""

    def __init__(self, shown: Shown, place: int, found: Traces) -> None:
        self.shown = shown
        self.links = [found.link(place, turn) for turn in range(len(shown.whole.steps))]
        self.begin, root = shown.skipped, shown.path.root_name if shown.path.root_kind == "module" else ""
        code = shown.path.root_name if shown.is_code else None
        if not self.begin:
            code = of_root(shown.whole, found.root(place))
        public = self._public_name()
        if public is not None:
            self.begin, code, root = 1, *public
        self._code: list[str | None] = [*[None] * self.begin, code]
        self._territories = territories(root, self.links[self.begin :])

    def _public_name(self) -> tuple[str, str] | None:
        """By what a module that is written in C holds something, under no name of its own: another module's name."""
        if self.begin or len(self.links) < 2 or self.links[0].kind != "opaque":
            return None
        return of_public_global(self.links[1].owner)

    def can_cut(self, turn: int) -> bool:
        """Whether changing what a step starts from may be of use: not past what nobody can look into.

        Nor where what is leaked is itself what the runner keeps, as a fixture's value: that is not the program's entry.
        """
        if self.shown.skipped and not self.shown.path.steps[0].edge:
            return False
        if self._is_finalizers:
            # It is still called when its object dies, or at exit.
            return False
        return turn >= self.begin and all(link.kind != "opaque" for link in self.links[self.begin : turn + 1])

    @property
    def _is_finalizers(self) -> bool:
        return self.shown.path.root_name.startswith("weakref.finalize(")

    def code(self, turn: int) -> str | None:
        """What a step starts from, as code; None where no expression leads to it."""
        while len(self._code) <= turn:
            before = self._code[-1]
            self._code.append(None if before is None else one_step(before, self.links[len(self._code) - 1]))
        return self._code[turn]

    def territory(self, turn: int) -> Territory:
        """Whose the object is that a step starts from."""
        return self._territories[max(0, turn - self.begin)]

    def advice(self, first: int, *, has_cut: bool) -> str:
        """What to do where the first suspect edge lies inside a library, unless it can be cut there."""
        turn = max(first, self.begin)
        if self._is_finalizers:
            return advice_for_finalizer(self.shown.path.root_name, [link.owner for link in self.links])
        if has_cut and turn < len(self.links) and not self.territory(turn).is_ground:
            return ""
        if turn >= len(self.links) or self.links[turn].kind in _CACHED or not self.territory(turn).is_librarys:
            return ""
        if self.shown.path.root_kind == "thread" and self.territory(turn).inside == "threading":
            # What a running thread has is let go of by ending the thread.
            return ""
        library, words = self.territory(turn).inside, self.shown.code(turn + 1)
        if not library:
            return f"{words} is {self.territory(turn).shared}'s: put back what was there, or take out what was added"
        # What it leads to may itself have a way to end, as a timer has.
        return advice_for(library, [link.owner for link in self.links[: turn + 2]], words)

    def offer(self, turn: int) -> Cut | None:
        """What the library offers by which what lies inside it is let go of."""
        offer = offered_function(self.shown.code(turn + 1))
        if offer is not None:
            return Cut(offer.call, offer.changed, functools.partial(offer.do, None), ends_anyway=True)
        for before in reversed(range(self.begin, turn + 1)):
            code, owner = self.code(before), self.links[before].owner
            method = offered_method(owner)
            if method is not None and code is not None:
                do = functools.partial(method.do, owner)
                return Cut(f"{code}.{method.call}", f"{code} {method.changed}", do, ends_anyway=True)
        return None


def _cut_of_root(way: _Way, first: int, names: Names) -> Cut | None:
    """The cut of what the interpreter holds and gives back on request."""
    path, held = way.shown.path, way.links[0].owner
    if first or not names.are_free or names.may_have_been_there(held):
        return None
    number = next((number for number in signal.valid_signals() if signal.getsignal(number) is held), None)
    if path.root_name.startswith("signal.") and number is not None:
        default = f"signal.signal({path.root_name.partition('(')[2][:-1]}, signal.SIG_DFL)"
        return Cut(default, "the signal has its default handler", lambda: signal.signal(number, signal.SIG_DFL))
    if path.root_name == "sys.getprofile()":
        return Cut("sys.setprofile(None)", "nothing is profiled", lambda: sys.setprofile(None))
    if path.root_name == "sys.gettrace()":
        return Cut("sys.settrace(None)", "nothing is traced", lambda: sys.settrace(None))
    return None


def _cut_of_new_dict(way: _Way, first: int, names: Names) -> Cut | None:
    """The cut of a name whose dict may be new itself: an empty one would be left there, and not what there was.

    (A dict passes for older, since the collector does not know an empty one.)
    """
    shown, before = way.shown, first - 1
    if names.older is None or not first or shown.whole.steps[before].type_name != "dict" or not way.can_cut(before):
        return None
    link = way.links[before]
    # A cache keeps what was made for it, and fills itself again.
    if link.kind not in _CACHED and (link.held in names.older or way.territory(before).is_ground):
        return None
    try:
        known = dataclasses.replace(names.of(*_home(shown.whole, before)), are_free=False)
        return cut_of(link, way.code(before), known, shown.code(before))
    except Refused:
        return None


def _first_cut(way: _Way, first: int, names: Names) -> Cut | None:
    """The first edge from the first suspect on that can be cut without harm; what lies behind it is gone with it."""
    for turn, link in enumerate(way.links[first:], first):
        inside = bool(turn >= way.begin and way.territory(turn).inside and link.kind not in _CACHED)
        if inside and names.are_free and (offer := way.offer(turn)) is not None:
            # Once nothing runs any more, the library may be told to let go.
            return offer
        if not way.can_cut(turn) or _is_part_of_librarys_object(way.links, turn):
            continue
        if names.older is None and not names.are_free and turn < len(way.links) - 1 and link.kind not in _CACHED:
            # Nobody knows whether what it leads to was there before; the leaked thing itself, at the end, was not.
            continue
        known = names.of(*_home(way.shown.whole, turn))
        is_ground = link.kind not in _CACHED and way.territory(turn).is_ground
        if is_ground:
            if inside or names.older is None:
                # Its insides are nobody else's to change.
                return None
            # To what is public the program may have added something, and that it can take back.
            known = dataclasses.replace(known, are_free=False)
        try:
            cut = cut_of(link, way.code(turn), known, way.shown.code(turn))
            if is_ground and cut is not None and not cut.is_deletion:
                return None
        except Refused:
            return None
        if cut is not None or link.kind in ("frame-local", "thread"):
            # Running code that holds something should let go of all of it; what lies behind is only a part.
            return cut
    return None


def _is_part_of_librarys_object(links: Sequence[Link], turn: int) -> bool:
    """Whether a link is a container's that an instance of a library's class fills itself, and needs: its list, say."""
    link = links[turn]
    if link.kind != "instance-attribute" or turn + 1 >= len(links) or not library_of(link.owner):
        return False
    return any(type(links[turn + 1].owner) is kind for kind in (list, dict, set, deque))


def _home(path: Path, turn: int) -> tuple[ModuleType | None, ModuleType | None, str]:
    """The module whose code made what a step starts from, that of the root, and by which name it is known there.

    It is that of the nearest object of a class of the program's own; containers and libraries' types tell nothing.
    """
    names = (step.edge[1:] for step in reversed(path.steps[:turn]) if step.edge.startswith("."))
    name = next(names, "")
    root = sys.modules.get(path.root_name) if path.root_kind == "module" else None
    for step in reversed(path.steps[:turn]):
        module = step.type_name.rpartition(".")[0]
        while module and module not in sys.modules:  # a class within a class
            module = module.rpartition(".")[0]
        if module and not is_library(module):
            return sys.modules[module], root, name
    return root, root, name


def _verdict(steps: Sequence[Step]) -> Verdict:
    if any(_is_frozen_holder(step) for step in steps[:-1]):
        return "frozen-holder"
    return "in-flight" if any(step.mark == "pending" for step in steps) else "reachable"


def _is_frozen_holder(step: Step) -> bool:
    # Where a program freezes its heap all its functions and classes are frozen, and that is as it should be.
    return step.frozen and not step.definition


def _without_path(target: Any, natively: Collection[int], holders: Collection[str], *, frozen: bool) -> Explanation:
    """Explains what no root reaches: C++ holds it, or it is garbage that nobody has collected yet.

    Args:
        target: the object.
        natively: the identities of those to which C or C++ refers.
        holders: the types of what refers to it.
        frozen: whether it is hidden by `gc.freeze()`.
    """
    return _held_by_native_code(target, referred=id(target) in natively) or _garbage(
        frozen=frozen and gc.is_tracked(target), holders=holders
    )


def _held_by_native_code(target: Any, *, referred: bool) -> Explanation | None:
    """For what C or C++ refers to, and a tensor that torch's own counter says is held from C++, else None."""
    torch = sys.modules.get("torch")
    node = ""
    if torch is not None and hasattr(torch, "Tensor") and Census([target]).instances_of(torch.Tensor):
        with plain_tensors(torch):
            # Python's own reference to the C++ tensor counts one.
            referred = referred or torch_member(target, "_use_count")() >= 2
            grad_fn = torch_member(target, "grad_fn")
            node = "" if grad_fn is None else grad_fn.name()
    if not referred:
        return None
    if not node:
        return Explanation("native-held", "native", "native code", (), ("native code",))
    holder = f"autograd graph, made by {node}"
    return Explanation("native-held", "autograd", holder, (), (holder,))


def _garbage(*, frozen: bool, holders: Collection[str]) -> Explanation:
    if frozen:
        return Explanation("frozen-garbage", "frozen-garbage", "", (), ("frozen garbage",))
    if holders:
        name = min(holders)
        return Explanation("unexplained", "cycle", f"garbage: {name}", (), (f"garbage {name}",))
    return Explanation("unexplained", "unknown", "", (), ())


def _suspect_steps(steps: Sequence[Step]) -> tuple[int, int]:
    """The places of the first and the last step that may be the mistake.

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


def _cause_of_edge(path: Path, place: int) -> Cause:
    """The cause that the step at `place` stands for: an entry of a container counts as the edge to the container."""
    for step in reversed(path.steps[: place + 1]):
        if step.kind in _CAUSE_OF_KIND:
            cause = _CAUSE_OF_KIND[step.kind]
            return "thread" if cause == "frame" and path.thread else cause
    return _CAUSE_OF_ROOT.get(path.root_kind, "unknown")


def _telling_cause(path: Path) -> Cause | None:
    """What the path says whatever its first suspect edge is; the first rule that answers decides."""
    return next((cause for cause, crosses in _TELLING if crosses(path)), None)


def _crosses_cache(path: Path) -> bool:
    return any(step.kind in ("lru-cache-key", "lru-cache-value") for step in path.steps)


def _crosses_type(pattern: re.Pattern[str]) -> Callable[[Path], bool]:
    """Whether the path leads from a module, or through an object of a type, of such a name; its end does not count."""

    def crosses(path: Path) -> bool:
        names = [step.type_name for step in path.steps[:-1]]
        if path.root_kind in ("module", "class"):
            names.append(path.root_name)
        return any(pattern.fullmatch(name) for name in names)

    return crosses


def _crosses_workspace(path: Path) -> bool:
    is_kernel_library = path.root_kind == "module" and path.root_name.partition(".")[0] in _KERNEL_LIBRARIES
    return is_kernel_library and any(_WORKSPACE.fullmatch(step.edge) for step in path.steps)


_TELLING: tuple[tuple[Cause, Callable[[Path], bool]], ...] = (
    ("lru-cache", _crosses_cache),
    ("autograd", _crosses_type(_AUTOGRAD)),
    ("cuda-graph", _crosses_type(_CUDA_GRAPH)),
    ("compiled-code", _crosses_type(_COMPILED)),
    ("pending-transfer", _crosses_type(_TRANSFER)),
    ("library-workspace", _crosses_workspace),
)


def _suspects(path: Path, first: int, last: int) -> tuple[str, ...]:
    """The suspect edges with what they start from, and every number in them as `*`."""
    root = path.root_name
    if path.root_kind == "frame":
        root = root.rpartition(":")[0]
    edges = []
    for turn, step in enumerate(path.steps[first : last + 1], first):
        owner = path.steps[turn - 1].type_name if turn else root
        if turn == first and turn:
            # Where the suspect part starts at a definition, its name says more than that it is a function.
            owner = "".join([root, *(before.edge for before in path.steps[:turn])])
        edges.append(re.sub(r"\d+", "*", f"{owner} {step.edge}"))
    return tuple(edges)

"""Says who holds a suspect: reads a path (`lowtide.probes.heap.holders`) as verdict, cause, holder and suspects.

Which edges of a path are suspects follows LeakCanary's Shark: what lies between the last object that is meant to live
and the leaked one. Meant to live are:

- the root, and after it modules, classes, functions and caches for as long as the path passes nothing else: a program
  defines them once, at import;
- every object that the caller names as innocent (what was alive before the leak), and whatever the path passes before.

What is cut may come before the first suspect: a function or class that is newer than the module that the path begins at
was registered there, and is taken out whole.

So `helper.ENGINE.model.weight` is a `module-global` leak: the engine is not meant to live, and the first suspect edge
is `.ENGINE`. If the caller names the engine as innocent, the same path is an `instance-attribute` leak of `.model`.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Hashable, Sequence
from collections.abc import Set as AbstractSet
from types import CellType, FunctionType
from typing import Any

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.explaining import path_reading
from lowtide.leakcheck.explaining.cut import Cut, Names
from lowtide.leakcheck.explaining.cuts import CACHED, Way, cut_of_new_dict, cut_of_root, first_cut, is_declared
from lowtide.leakcheck.explaining.library_objects import advice_for_root, is_installed
from lowtide.leakcheck.judging.judge import Budget
from lowtide.leakcheck.judging.ladder import MEANINGS
from lowtide.leakcheck.resources.resource import Rung
from lowtide.probes.heap.holders import SharedWalk, Traces, trace
from lowtide.probes.heap.paths import Inspector, Link, Mark, Path
from lowtide.probes.heap.roots import RootKind
from lowtide.probes.memory.tensors import plain_tensors, torch_member
from lowtide.probes.objects.foreign import HOOK, is_a
from lowtide.probes.objects.listed import Census, any_frozen
from lowtide.probes.originals import gc, loaded
from lowtide.reports.schema import Cause, Hop, Verdict

_LETTING_HOOK_GO = (
    "remove the {} with the handle that registering it gave, or let it hold its owner by a weak reference"
)
_OLD = "old"
"""What an object says of a path that was there before the leak."""
MOST_STEPS = 10_000
"""Steps of the paths behind one edge that are looked at one by one, before some of them stand for all others."""
_SWEEPING = 2.0
"""Seconds for finding out what edges retain; a sweep takes 15 ms at 500,000 objects."""


class Explanation(msgspec.Struct, frozen=True):
    """Why one suspect is alive.

    Attributes:
        verdict: `reachable`; `frozen-holder` if a holder on the path, other than the program's own code, is hidden
            by `gc.freeze()`; without a path, `native-held` for a tensor that torch says C++ holds, `frozen-garbage`
            for what is itself frozen, `unexplained` for anything else.
        cause: the most significant edge of the path, else the kind of its first suspect edge.
        holder: who holds it, on one line: `helper.CACHE['a'][0]`, `helper.supports_kw (lru_cache key)`; empty if
            nobody is known to.
        path: from the root to the suspect.
        suspects: the suspect edges without what changes from run to run, for `fingerprint()`.
        freed: for each hop of the path the targets, by their place, that nothing would hold if it alone were cut; None
            where that was not worked out.
        is_part: whether the path ends at the edge that is to be cut, which it has in common with many other suspects.
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
    freed: tuple[AbstractSet[int] | None, ...] = ()
    cut: Cut | None = None
    thread: str = ""
    new: frozenset[int] = frozenset()
    also: tuple[Cut, ...] = ()
    advice: str = ""
    root: int = 0
    through: frozenset[int] = frozenset()
    is_part: bool = False

    @property
    def is_of_node(self) -> bool:
        """Return whether the path begins at a node of an autograd graph that C++ holds."""
        return bool(self.root) and path_reading.AUTOGRAD.fullmatch(self.path[0].edge) is not None

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """All cuts that it takes."""
        return self.also if self.cut is None else (self.cut, *self.also)

    def with_parts(self, parts: Sequence[Explanation], holder: str) -> Explanation:
        """Return it for memory of which other explanations' suspects hold parts, and so each of them all."""
        also = tuple(cut for part in parts if part is not self for cut in part.cuts)
        new = self.new.union(*(part.new for part in parts))
        return replace(self, holder=holder, new=new, also=(*self.also, *also))


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
    """Explain each of `targets`, in their order, by one walk over the heap.

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
        found = path_reading.marks(
            items, innocent=innocent, ages_known=known.older is not None, living=living, hollow=hollow
        )
        ages_tell = known.are_free and known.older is not None and not hollow
        return _past_first_new(found, items, known) if ages_tell else found

    with trace(targets, ignore=ignore, roots=roots, thorough=True, walk=walk) as found:
        natively = frozenset(id(target) for place, target in enumerate(targets) if found.is_held_from_c(place))
        # When the program is over it is known of few objects that they are new: age says nothing behind the first.
        parts = _Parts(found, () if known.are_free and known.older is not None else innocent)
        drafts: list[_Draft | None] = []
        for place, target in enumerate(targets):
            has_path = not (natively and _may_hold_its_root(target, found.root(place), natively))
            draft = parts.of(place) if has_path else None
            if draft is None and has_path and (path := found.path(place, inspect)) is not None:
                draft = parts.note(_with_path(path, place, found, known))
            drafts.append(draft)
        own = {draft.place: draft for draft in drafts if draft is not None}
        found.will_be_cut({place: draft.first for place, draft in own.items()})
        sweeps = _Sweeps(found, (budget or Budget()).within(_SWEEPING))
        whole = {place: sweeps.with_freed(draft) for place, draft in own.items()}
        explained = [
            None if draft is None else parts.explanation(draft, whole[draft.place], is_own=draft.place == place)
            for place, draft in enumerate(drafts)
        ]
        lost = [place for place, explanation in enumerate(explained) if explanation is None]
        holders = dict(zip(lost, found.types_of_holders(lost, {id(targets), *ignore}), strict=True)) if lost else {}
        some_frozen = bool(lost) and any_frozen()
        return [
            explanation
            or _without_path(target, natively, holders[place], frozen=some_frozen and found.is_frozen(place))
            for place, (target, explanation) in enumerate(zip(targets, explained, strict=True))
        ]


def _past_first_new(found: Sequence[Mark | None], items: Sequence[object], names: Names) -> Sequence[Mark | None]:
    """Return marks without the innocence of what only something new leads to.

    When the program is over it is known of few objects that they are new, those on the path as it was before: another
    path may lead through other parts of the same thing.
    """
    first = next((turn for turn, item in enumerate(items) if not names.may_have_been_there(item)), len(items))
    return [None if mark == "innocent" and turn > first else mark for turn, mark in enumerate(found)]


def expressions_to(items: Sequence[object], walk: SharedWalk | None = None) -> list[str | None]:
    """Return the expressions that lead to some objects from a module, say; None where there is none.

    Args:
        items: the objects.
        walk: the walk over the heap to ask, if it is shared with others.
    """
    with trace(items, walk=walk) as found:
        paths = [found.path(place) for place in range(len(items))]
        ways = [path and Way(path_reading.shown_from_landmark(path), place, found) for place, path in enumerate(paths)]
        return [way.code(len(way.links)) if way else None for way in ways]


class Holder(msgspec.Struct, frozen=True):
    """The first object on the way to a suspect that should be gone: it holds all that lies behind it.

    Attributes:
        identity: its identity.
        path: the way to it, from the root on.
        target: the suspect itself, as code; None where no expression leads to it.
        way: the way to the suspect.
        cause: what the way to it is.
        through: the identities of the objects that the way leads through.
    """

    identity: int
    path: tuple[Hop, ...]
    target: str | None = None
    way: tuple[Hop, ...] = ()
    cause: Cause = "unknown"
    through: frozenset[int] = frozenset()


def first_holders(
    targets: Sequence[object],
    *,
    ignore: Collection[int] = (),
    innocent: Container[int] = (),
    living: bool = False,
    roots: Sequence[tuple[str, object]] = (),
    not_roots: Collection[int] = (),
    names: Names | None = None,
    walk: SharedWalk | None = None,
) -> list[Holder | None]:
    """Return for each of `targets` what of the program holds it; None where only the system or a frame does.

    Arguments are those of `explain`, and `not_roots`: the ids of running threads that hold nothing by themselves, as
    any that is a target does not. By one walk over the heap.
    """

    def inspect(root: RootKind, items: Sequence[object]) -> Sequence[Mark | None]:
        return path_reading.marks(items, innocent=innocent, ages_known=True, living=living, hollow=root == "object")

    # The arguments of a function at exit are held by nothing else.
    not_roots = {*(id(target) for target in targets if type(target) is not tuple), *not_roots}
    with trace(targets, ignore=ignore, roots=roots, not_roots=not_roots, walk=walk) as found:
        holders = (_first_holder(found, place, inspect, names) for place in range(len(targets)))
        return [
            holder or _holder_in_c(found.path(place), target)
            for place, (holder, target) in enumerate(zip(holders, targets, strict=True))
        ]


def _holder_in_c(path: Path | None, target: object) -> Holder | None:
    """Return the holder of what the interpreter refers to itself: what a function at exit is to be given."""
    if path is None or path.steps or path.root_kind != "interpreter":
        return None
    root = Hop(type="interpreter", edge=path.root_name.removesuffix(" with"), suspect=True)
    return Holder(id(target), (root,), None, (root,), "module-global")


def _first_holder(found: Traces, place: int, inspect: Inspector, names: Names | None) -> Holder | None:
    path = found.path(place, inspect)
    if path is not None and names is not None and names.by_source:
        path = _with_declared(path, [found.link(place, turn) for turn in range(len(path.steps))], names)
    if path is None or not path.steps or path.root_kind not in ("module", "object", "interpreter", "context"):
        return None
    first, _ = path_reading.suspect_steps(path.steps)
    cause = path_reading.telling_cause(path) or path_reading.cause_of_edge(path, first)
    shown = path_reading.shown_from_landmark(path)
    if first < shown.skipped:
        # What it has a name of its own for is the program's; what a test runner names, as a fixture, is that's to end.
        named = Hop(type=path.steps[shown.skipped - 1].type_name, edge=shown.path.root_name, suspect=True)
        held = found.link(place, shown.skipped - 1).held
        through = found.through(place)
        is_runners = any(step.type_name.startswith("_pytest.") for step in path.steps[: shown.skipped])
        return None if is_runners else Holder(held, (named,), None, (named,), cause, through)
    hops = [Hop(type=step.type_name, edge=step.edge) for step in shown.path.steps]
    turn = first - shown.skipped
    hops[turn] = msgspec.structs.replace(hops[turn], suspect=True)
    root = Hop(type=shown.path.root_kind, edge=shown.path.root_name)
    way = Way(shown, place, found)
    code = way.code(len(way.links))
    held, through = found.link(place, first).held, found.through(place)
    return Holder(held, (root, *hops[: turn + 1]), code, (root, *hops), cause, through)


def _may_hold_its_root(target: Any, root: object, held_from_c: Container[int]) -> bool:
    """Return whether a path begins at a suspect that C++ holds, and ends at a tensor by whose graph it may do so."""
    torch = loaded("torch")
    if root is None or id(root) not in held_from_c or torch is None or not hasattr(torch, "Tensor"):
        return False
    if not is_a(target, torch.Tensor) or target is root:
        return False
    with plain_tensors(torch):
        return torch_member(target, "grad_fn") is not None


class _Draft(msgspec.Struct, frozen=True, eq=False):
    """What is known of a suspect without asking what its edges retain.

    Attributes:
        explanation: as far as it is known.
        place: the suspect's.
        links: the edges of the path, from the first suspect one on.
        first: the first suspect step.
        last: the last one.
        decided: the step at which it was decided what to cut; past the last one if nothing was.
        skipped: how many steps lead to the root of what is shown.
        holder: who holds what lies behind the step that decided.
    """

    explanation: Explanation
    place: int
    links: Sequence[Link]
    first: int
    last: int
    decided: int
    skipped: int
    holder: str = ""

    @property
    def end(self) -> int:
        """Return the number of steps that are shown up to the one that decided."""
        return max(self.decided, self.first, self.skipped) - self.skipped + 1


class _Sweeps:
    """What each edge retains, each asked for once: the suspects behind one edge share the answer."""

    def __init__(self, found: Traces, budget: Budget) -> None:
        self._found = found
        self._budget = budget
        self._freed: dict[tuple[int, str, int], AbstractSet[int]] = {}

    def with_freed(self, draft: _Draft) -> Explanation:
        """Return an explanation with the targets that each of its edges retains.

        None where that is not known: past the last suspect, and when sweeping has taken its time.
        """
        # An edge of a cache stands for all of its entries.
        keys = [
            (id(link.owner), link.kind, 0) if link.kind in CACHED else (id(link.owner), link.edge, link.held)
            for link in draft.links
        ]
        wanted = keys[: draft.last + 1 - draft.first]
        if any(key not in self._freed for key in wanted) and not self._budget.is_spent:
            self._freed.update(zip(keys, self._found.freed_by_cutting(draft.place, draft.first), strict=True))
        freed = [*[None] * draft.first, *(self._freed.get(key) for key in keys)]
        return replace(draft.explanation, freed=(None, *freed[draft.skipped :]))


class _Parts:
    """Explains many suspects behind one edge by a few of them: a list of a million nodes has a million paths.

    What is cut, and what is said of that, is the same for all that lies behind the edge that decides it. Only the way
    on from there is each suspect's own, and the ways of all of them are as long as the square of their number.

    Args:
        found: the paths.
        innocent: ids of objects behind which another edge is the first suspect.
    """

    def __init__(self, found: Traces, innocent: Container[int]) -> None:
        self._found = found
        self._innocent = innocent
        self._telling: dict[int, Cause | None] = {}
        self._steps: list[int] = []
        self._drafts: dict[tuple[int, frozenset[Hashable]], _Draft] = {}
        self._cut_short: dict[int, Explanation] = {}

    def of(self, place: int) -> _Draft | None:
        """Return the draft that stands for a suspect, too; None if it is to be explained by itself."""
        if not self._steps:
            return None
        behind = self._found.behind(place, self._what_it_says)
        if behind is None or self._steps[behind[0]] < MOST_STEPS or _OLD in behind[1]:
            return None
        return self._drafts.get(behind)

    def note(self, draft: _Draft) -> _Draft:
        """Note what was found of a suspect, and return it."""
        steps = draft.first + len(draft.links)
        # The step behind the first suspect one is part of the advice.
        decided = max(draft.decided, draft.first + 1, draft.skipped)
        if decided < steps - 1:
            behind = self._found.behind(draft.place, self._what_it_says)
            if behind is None:
                self._found.mark(draft.place, decided, len(self._steps))
                self._steps.append(0)
                behind = self._found.behind(draft.place, self._what_it_says)
            if behind is not None:
                self._steps[behind[0]] += steps
                self._drafts.setdefault(behind, draft)
        return draft

    def explanation(self, draft: _Draft, whole: Explanation, *, is_own: bool) -> Explanation:
        """Return what is said of a suspect: all of it if the draft is its own, else what it has in common with that."""
        if is_own:
            return whole
        if draft.place not in self._cut_short:
            end = draft.end + 1
            path = whole.path[:end]
            self._cut_short[draft.place] = replace(
                whole,
                path=path,
                freed=whole.freed[:end],
                holder=whole.holder if len(path) == len(whole.path) else draft.holder,
                is_part=True,
            )
        return self._cut_short[draft.place]

    def _what_it_says(self, item: object) -> str | None:
        kind = type(item)
        if id(kind) not in self._telling:
            self._telling[id(kind)] = path_reading.telling_type(kind)
        was_there = id(item) in self._innocent and kind is not dict and gc.is_tracked(item)
        return _OLD if was_there else self._telling[id(kind)]


def _with_path(path: Path, place: int, found: Traces, names: Names) -> _Draft:
    if names.by_source:
        path = _with_declared(path, [found.link(place, turn) for turn in range(len(path.steps))], names)
    is_declared_to_live = names.by_source and path.steps[0].mark == "innocent"
    blamed, last = path_reading.suspect_steps(path.steps)
    # What came with a module, as it was imported, is a part of that.
    is_whole = names.older is not None and names.may_have_been_there(found.root(place))
    first = path_reading.first_registered(path.steps, blamed) if is_whole or is_declared_to_live else blamed
    if first == blamed > 0 and names.older is not None and _was_put_there(found.link(place, blamed).owner, path):
        first -= 1
    shown = path_reading.shown_from_landmark(path)
    # How the walk came to what the program knows by a name says nothing.
    cause = path_reading.telling_cause(shown.path) or path_reading.cause_of_edge(path, blamed)
    way = Way(shown, place, found)
    links = way.links[first:]
    hops = (
        Hop(
            type=step.type_name,
            edge=step.edge,
            suspect=first <= turn <= last,
            # Where all there is was there before, the last of it is the suspect, and not expected to stay.
            mark=None if step.mark == "pending" or (step.mark == "innocent" and first <= turn <= last) else step.mark,
        )
        for turn, step in enumerate(shown.path.steps, shown.skipped)
    )
    begin = max(0, first - shown.skipped)
    new = frozenset(link.held for link in links)
    # The cells of a function that is new itself: what else has them is, too.
    new |= {id(link.carrier) for link in links[1:] if type(link.carrier) is CellType}
    # A way to what the interpreter holds itself has no link.
    is_new = bool(links) and not first and path.root_kind in ("interpreter", "native")
    if is_new and not names.may_have_been_there(links[0].owner):
        new |= {id(links[0].owner)}
    running = path.thread or (path.root_name if path.root_kind == "thread" else "")
    decided = first
    if not way.links:
        # The interpreter's own list, which no code leads to.
        cut = None
    elif shown.path.root_kind == "interpreter":
        cut = cut_of_root(way, first, names)
    else:
        cut = cut_of_new_dict(way, first, names)
        if cut is None:
            cut, decided = first_cut(way, first, names)
    advice = way.advice(first, has_cut=cut is not None)
    if shown.path.root_kind == "interpreter" and cut is None:
        advice = advice_for_root(shown.path.root_name) or advice
    if path.root_kind == "context" and cut is None:
        advice = f"call reset() of {shown.path.root} with the token that its set() returned"
    if path.root_kind == "native" and path.root_name.startswith(HOOK):
        advice = _LETTING_HOOK_GO.format(path.root_name)
        cut = None if cut is None else replace(cut, code=advice)
    explanation = Explanation(
        verdict="native-held" if path.root_kind == "native" else path_reading.verdict_of(path.steps),
        cause=cause,
        holder=path_reading.holder_name(shown.path, begin),
        path=(Hop(type=shown.path.root_kind, edge=shown.path.root_name), *hops),
        suspects=path_reading.suspects_of(shown.path, max(0, blamed - shown.skipped), max(0, last - shown.skipped)),
        cut=cut,
        thread=running,
        new=new,
        advice=advice,
        root=id(found.root(place)) if path.root_kind == "native" else 0,
        through=found.through(place),
    )
    draft = _Draft(explanation, place, links, first, last, decided, shown.skipped)
    common = replace(shown.path, steps=shown.path.steps[: draft.end])
    return replace(draft, holder=path_reading.holder_name(common, begin))


def _was_put_there(item: object, path: Path) -> bool:
    """Return whether an installed library's module has a function that another package has made."""
    if path.root_kind != "module" or type(item) is not FunctionType or type(item.__module__) is not str:
        return False
    return is_installed(path.root_name) and item.__module__.partition(".")[0] != path.root_name.partition(".")[0]


def _with_declared(path: Path, links: Sequence[Link], names: Names) -> Path:
    """Return the path with what the program's own source makes marked as meant to live."""
    steps = list(path.steps)
    for turn, link in enumerate(links[:-1]):
        if not is_declared(link, names):
            break
        steps[turn] = replace(steps[turn], mark=steps[turn].mark or "innocent")
    return replace(path, steps=tuple(steps))


def _without_path(target: Any, natively: Collection[int], holders: Collection[str], *, frozen: bool) -> Explanation:
    """Explain what no root reaches: C++ holds it, or it is garbage that nobody has collected yet.

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
    """Explain what C or C++ refers to, and a tensor that by torch's own counter is held from C++; else None."""
    torch = loaded("torch")
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
        holder = MEANINGS[Rung.UNFREEZE].holder or ""
        return Explanation("frozen-garbage", "frozen-garbage", holder, (), ("frozen garbage",))
    if holders:
        name = min(holders)
        return Explanation("unexplained", "cycle", f"garbage: {name}", (), (f"garbage {name}",))
    return Explanation("unexplained", "unknown", "", (), ())

"""A path with its objects: what of it lies inside a library, and where it can be cut without harm."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from lowtide.leakcheck.explaining.container_entries import delete_from_dict
from lowtide.leakcheck.explaining.cut import Cut, Names, Refused
from lowtide.leakcheck.explaining.cuts import cut_of
from lowtide.leakcheck.explaining.expressions import of_public_global, of_root, one_step
from lowtide.leakcheck.explaining.library_objects import (
    HANDLE,
    Offer,
    Territory,
    advice_for,
    advice_for_finalizer,
    is_hook,
    library_of,
    offered_by_module,
    offered_by_torch,
    offered_function,
    offered_method,
    territories,
)
from lowtide.leakcheck.explaining.path_names import CodeOfPath, Shown
from lowtide.probes.heap.holders import Traces
from lowtide.probes.heap.paths import Link, Path
from lowtide.probes.heap.roots import is_library
from lowtide.probes.objects.foreign import is_a
from lowtide.probes.originals import loaded, signal, sys

CACHED = ("lru-cache-key", "lru-cache-value")

_LONGEST_CODE = 2000
"""Characters of an expression; Python itself does not compile one of some thousand parts."""


class Way:
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
        self._words = CodeOfPath(shown.path)
        opaque = (turn for turn, link in enumerate(self.links) if turn >= self.begin and link.kind == "opaque")
        self._first_opaque = next(opaque, len(self.links))
        self._homes = _Homes(shown.whole)
        # By step, the last one at or before which a library offers a method.
        self._offering: list[int] = []

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
        return self.begin <= turn < self._first_opaque

    @property
    def _is_finalizers(self) -> bool:
        return self.shown.path.root_name.startswith("weakref.finalize(")

    def code(self, turn: int) -> str | None:
        """What a step starts from, as code; None where no expression leads to it that anybody would write."""
        while len(self._code) <= turn:
            before = self._code[-1]
            code = None if before is None else one_step(before, self.links[len(self._code) - 1])
            self._code.append(None if code is None or len(code) > _LONGEST_CODE else code)
        return self._code[turn]

    def words(self, turn: int) -> str:
        """What a step starts from, as the path has it."""
        return self._words(turn - self.shown.skipped)

    def names(self, turn: int, known: Names) -> Names:
        """What is known of the program for what a step starts from."""
        return known.of(*self._homes(turn))

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
        if turn >= len(self.links) or self.links[turn].kind in CACHED or not self.territory(turn).is_librarys:
            return ""
        if self.shown.path.root_kind == "thread" and self.territory(turn).inside == "threading":
            # What a running thread has is let go of by ending the thread.
            return ""
        library, words = self.territory(turn).inside, self.words(turn + 1)
        if not library:
            return f"{words} is {self.territory(turn).shared}'s: put back what was there, or take out what was added"
        # What it leads to may itself have a way to end, as a timer has.
        return advice_for(library, [link.owner for link in self.links[: turn + 2]], words)

    def traceback_behind(self, turn: int) -> int | None:
        """The step behind another one by which an exception has its traceback, if code leads there."""
        turns = (behind for behind in range(turn + 1, len(self.links)) if _is_only_traceback(self.links[behind]))
        trace = next(turns, None)
        if trace is None or not self.can_cut(trace) or self.territory(trace).is_ground:
            return None
        return trace if self.code(trace) is not None else None

    def offer(self, turn: int) -> Cut | None:
        """What the library offers by which what lies inside it is let go of."""
        offer = offered_function(self.words(turn + 1)) or self._offer_of_module()
        if offer is not None:
            return Cut(offer.call, offer.changed, functools.partial(offer.do, None), ends_anyway=True)
        for at, link in enumerate(self.links[turn : turn + 2], turn):
            if link.kind == "item" and is_a(link.carrier, dict) and is_hook(self.words(at + 1)):
                # As its handle does; whoever registered it has that.
                remove = functools.partial(delete_from_dict, link.carrier, [link.held])
                return Cut(f"hook {link.edge}: {HANDLE}", f"hook {link.edge} is removed", remove, is_code=False)
        owner = self._offering_at(turn)
        if owner < 0:
            return None
        method, code = offered_method(self.links[owner].owner), self.code(owner)
        assert method is not None
        do = functools.partial(method.do, self.links[owner].owner)
        return Cut(f"{code}.{method.call}", f"{code} {method.changed}", do, ends_anyway=True)

    def _offer_of_module(self) -> Offer | None:
        """The function by which a library's module empties the global that the path begins with."""
        link = self.links[0]
        if link.kind != "module-global" or not is_a(link.owner, ModuleType):
            return None
        return offered_by_module(link.owner, link.edge[1:])

    def undoing(self, turn: int) -> Cut | None:
        """The call by which torch takes out again what it has put into a module, where a step leads to such a thing."""
        link, code = self.links[turn], self.code(turn)
        if link.kind != "instance-attribute" or code is None:
            return None
        behind = self.links[turn + 1].edge if turn + 1 < len(self.links) else ""
        offer = offered_by_torch(link.owner, link.edge[1:], behind)
        if offer is None:
            return None
        home, function, parameter = offer
        do: Any = getattr(loaded(home), function)
        undo = functools.partial(do, link.owner, parameter)
        call = f"{home}.{function}({code}, {parameter!r})"
        return Cut(call, f"{parameter} of {code} is plain again", undo, ends_anyway=True)

    def _offering_at(self, turn: int) -> int:
        """The last step up to one that starts from what has a method of its own to end; -1 if none does."""
        while len(self._offering) <= turn:
            at, before = len(self._offering), self._offering[-1] if self._offering else -1
            offers = at >= self.begin and offered_method(self.links[at].owner) is not None
            self._offering.append(at if offers and self.code(at) is not None else before)
        return self._offering[turn]


def cut_of_root(way: Way, first: int, names: Names) -> Cut | None:
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


def cut_of_new_dict(way: Way, first: int, names: Names) -> Cut | None:
    """The cut of a name whose dict may be new itself: an empty one would be left there, and not what there was.

    (A dict passes for older, since the collector does not know an empty one.)
    """
    shown, before = way.shown, first - 1
    if names.older is None or not first or shown.whole.steps[before].type_name != "dict" or not way.can_cut(before):
        return None
    link = way.links[before]
    # A cache keeps what was made for it, and fills itself again.
    if link.kind not in CACHED and (link.held in names.older or way.territory(before).is_ground):
        return None
    try:
        known = replace(way.names(before, names), are_free=False)
        return cut_of(link, way.code(before), known, way.words(before))
    except Refused:
        return None


def first_cut(way: Way, first: int, names: Names) -> tuple[Cut | None, int]:
    """The first edge from the first suspect on that can be cut without harm; what lies behind it is gone with it.

    Returns:
        The cut, and the step that decided: whatever lies behind that has the same.
    """
    for turn, link in enumerate(way.links[first:], first):
        inside = bool(turn >= way.begin and way.territory(turn).inside and link.kind not in CACHED)
        if inside and names.are_free and (offer := way.offer(turn)) is not None:
            # Once nothing runs any more, the library may be asked to release it.
            return offer, turn
        if names.are_free and way.can_cut(turn) and (undoing := way.undoing(turn)) is not None:
            return undoing, turn
        if not way.can_cut(turn) or _is_part_of_librarys_object(way.links, turn):
            continue
        if names.older is None and not names.are_free and turn < len(way.links) - 1 and link.kind not in CACHED:
            # Nobody knows whether what it leads to was there before; the leaked thing itself, at the end, was not.
            continue
        known = way.names(turn, names)
        is_ground = link.kind not in CACHED and way.territory(turn).is_ground
        if is_ground:
            if inside or names.older is None:
                # Its insides are nobody else's to change.
                return None, turn
            # To what is public the program may have added something, and that it can take back.
            known = replace(known, are_free=False)
        try:
            cut = cut_of(link, way.code(turn), known, way.words(turn))
            if cut is not None and cut.sets_none and (trace := way.traceback_behind(turn)) is not None:
                # The program may still ask for the exception, or whether there is one.
                turn, link = trace, way.links[trace]
                cut = cut_of(link, way.code(turn), known, way.words(turn))
            if is_ground and cut is not None and cut.sets_none:
                return None, turn
        except Refused:
            return None, turn
        if cut is not None or link.kind in ("frame-local", "thread"):
            # Running code that holds something should let go of all of it; what lies behind is only a part.
            return cut, turn
    return None, len(way.links)


def _is_only_traceback(link: Link) -> bool:
    """Whether an edge leads to the traceback of an exception that has no other exception in it."""
    if link.edge != ".__traceback__" or not is_a(link.owner, BaseException):
        return False
    chained = (BaseException.__dict__[name].__get__(link.owner) for name in ("__context__", "__cause__"))
    return all(exception is None for exception in chained)


def _is_part_of_librarys_object(links: Sequence[Link], turn: int) -> bool:
    """Whether a link is a container's that an instance of a library's class fills itself, and needs: its list, say."""
    link = links[turn]
    if link.kind != "instance-attribute" or turn + 1 >= len(links) or not library_of(link.owner):
        return False
    return any(type(links[turn + 1].owner) is kind for kind in (list, dict, set, deque))


class _Homes:
    """By step, the module whose code made what it starts from, that of the root, and by which name it is known there.

    It is that of the nearest object of a class of the program's own; containers and libraries' types identify nothing.

    Args:
        path: from the root of the process on.
    """

    def __init__(self, path: Path) -> None:
        self._steps = path.steps
        self._root = sys.modules.get(path.root_name) if path.root_kind == "module" else None
        self._found: list[tuple[ModuleType | None, str]] = [(None, "")]

    def __call__(self, turn: int) -> tuple[ModuleType | None, ModuleType | None, str]:
        """Return the two modules and the name."""
        while len(self._found) <= turn:
            step = self._steps[len(self._found) - 1]
            home, name = self._found[-1]
            name = step.edge[1:] if step.edge.startswith(".") else name
            own = _own_module(step.type_name)
            self._found.append((home if own is None else own, name))
        home, name = self._found[turn]
        return self._root if home is None else home, self._root, name


def _own_module(type_name: str) -> ModuleType | None:
    """The module of a class, by the class's name, where it is the program's own."""
    module = type_name.rpartition(".")[0]
    while module and module not in sys.modules:  # a class within a class
        module = module.rpartition(".")[0]
    return sys.modules[module] if module and not is_library(module) else None

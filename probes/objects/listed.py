"""Every object that the garbage collector knows of, those hidden by `gc.freeze()` included, without touching them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from inspect import CO_OPTIMIZED
from types import FrameType, ModuleType
from typing import Any

from lowtide.probes import native
from lowtide.probes.objects.foreign import flags_of
from lowtide.probes.originals import gc, sys

# More at once takes more memory for what is in flight, which then is fetched anew from the kernel each time.
_CHUNK = 8_000

# The frames of the checker hold what it looks at; they are never part of an answer.
CHECKER = ("lowtide.probes.", "lowtide.leakcheck.", "lowtide.pytest_plugin.")

_HEAP_TYPE = 1 << 9

# So few objects are asked for their types one by one in less time than numpy takes to begin.
_FEW = 1000

# Each full collection of CPython 3.12 moves what is immortal to the permanent generation: the tuples of bases and of
# the method resolution order of the interpreter's own types, 375 of them before a program's first line. (3.13 does not
# track such tuples.) A program's `gc.freeze()` freezes everything there is, and the barest interpreter has over 4,000
# objects: so few frozen ones as this are never a program's.
FROZEN_AT_STARTUP = 2000


def frozen_by_program(count: int) -> int:
    """Return how many objects a program has frozen: of so few as the interpreter itself keeps there, none.

    Args:
        count: what `gc.get_freeze_count()` said.
    """
    return count if count > FROZEN_AT_STARTUP else 0


def any_frozen() -> bool:
    """Return whether a program has frozen objects; takes some microseconds, however many these are."""
    count = gc.get_freeze_count() if _frozen is None else _frozen(FROZEN_AT_STARTUP + 1)[0]
    return frozen_by_program(count) > 0


class FrozenCount:
    """Counts what a program has frozen, and anew only where that may have become more.

    To count takes 0.1 s where a vLLM engine is frozen. But `gc.freeze()` appends to a list, and `gc.unfreeze()` empties
    it: while its first and its last object are the same, neither was called. So a count may include objects that have
    died since, as long as nothing else is frozen.
    """

    def __init__(self) -> None:
        # No list of both: it would be frozen itself, and die with the next count.
        self._first = self._last = self._count = 0

    def read(self) -> int:
        """Return how many objects a program has frozen, and not unfrozen since."""
        if _frozen is None:
            return frozen_by_program(gc.get_freeze_count())
        _, first, last = _frozen(0)
        if (first, last) != (self._first, self._last):
            self._count, self._first, self._last = _frozen(-1)
        return frozen_by_program(self._count)


def _frozen_can_be_read() -> bool:
    """Return whether the collector has what is frozen in a list as `native.frozen` takes it to be."""
    if native.frozen is None or sys.maxsize < 1 << 32:
        return False
    try:
        return native.frozen(-1)[0] == gc.get_freeze_count()
    except NotImplementedError:
        return False


_frozen = native.frozen if _frozen_can_be_read() else None


def lists_can_be_read() -> bool:
    """Return whether `native` finds the collector's lists."""
    return _frozen is not None


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from running in the block, then leaves it on or off as it was.

    A walk makes so many containers that automatic collections would cost more than the walk, and would change the
    heap that is being read.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def all_objects() -> list[object]:
    """Return every tracked object that is reachable or unfrozen, once each, in no order that means anything.

    `gc.get_objects()` leaves out what `gc.freeze()` moved to the permanent generation, and unfreezing it to look would
    freeze too much afterwards. So where a program has frozen its heap, what it leaves out is found by a walk forward
    (`gc.get_referents`, which does see frozen objects) from all unfrozen objects, the modules, the classes and the
    locals of every running frame. Frozen objects that nothing reaches (frozen garbage) stay unseen.

    The list keeps its objects alive: drop it as soon as it is read.
    """
    with collector_paused():
        # What is returned must not hold this function's frame: from Python 3.12 on that frame can be among the objects,
        # and list and frame would keep each other, and with them the whole heap, until the next collection. So no local
        # variable holds what the collector lists, and of what a walk meets no frame is left.
        if not any_frozen():
            return gc.get_objects()
        found = gc.get_objects()
        try:
            _add_what_is_reached(found)
        except BaseException:
            found.clear()
            raise
        return found


def all_instances(*classes: type) -> list[Any]:
    """Return every object whose type derives from one of some classes, hidden by `gc.freeze()` or not.

    Where C can read the collector's lists, this takes 30 ns for each object there is, and nothing but what is returned
    gets a reference: a thread of the program that runs meanwhile sees no other object owned once more. (With one owner
    more a buffer cannot be resized, for instance.) Frozen garbage is found there alone.

    Args:
        classes: what to look for; not what a class says of its instances or below, as in `Census`.
    """
    if _frozen is None or native.all_instances is None:
        return Census(all_objects()).instances_of(*classes)
    return native.all_instances(classes, False)


def frozen_instances(*classes: type) -> list[Any]:
    """Return what is hidden by `gc.freeze()` of that, frozen garbage included; nothing where C cannot read it."""
    return [] if _frozen is None or native.all_instances is None else native.all_instances(classes, True)


class Census:
    """Some objects and, taken once for all questions, the real type of each.

    Going to every object of a large heap to see its type is what costs; the questions after that are cheap.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        # Not at the top: a program without tensors shall not load numpy for being watched.
        from lowtide.probes.objects.identities import identities, object_at, types_of
        from lowtide.probes.original_numpy import np

        self._objects = objects if type(objects) is list else list(objects)
        # By identity, and so never by the `__hash__` or `__eq__` of a metaclass.
        self._types: dict[int, type]
        if len(self._objects) < _FEW:
            kinds = list(map(type, self._objects))
            self._kinds = np.fromiter(map(id, kinds), np.int64, len(kinds))
            self._types = dict(zip(self._kinds.tolist(), kinds, strict=True))
        else:
            self._kinds = types_of(identities(self._objects))
            self._types = {kind: object_at(kind) for kind in np.unique(self._kinds).tolist()}

    @classmethod
    def of_kinds(cls, objects: list[object], kinds: Any, types: dict[int, type]) -> Census:
        """Return the census of objects whose types are known.

        Args:
            objects: the objects.
            kinds: the identity of each one's type, shape [len(objects)].
            types: the types, by their identities.
        """
        census = cls([])
        census._objects, census._kinds, census._types = objects, kinds, types
        return census

    def types(self) -> list[type]:
        """Return the types of the objects, once each."""
        return [*self._types.values()]

    def among(self, ids: Collection[int]) -> Census:
        """Return the census of those of the objects that have these identities."""
        from lowtide.probes.objects.identities import Identities, identities
        from lowtide.probes.original_numpy import np

        wanted = ids if type(ids) is Identities else Identities(np.fromiter(ids, np.int64, len(ids)))
        places = np.flatnonzero(wanted.holds(identities(self._objects)))
        return Census([self._objects[place] for place in places.tolist()])

    def instances_of(self, *classes: type) -> list[Any]:
        """Return the objects whose type derives from one of the classes.

        Not `isinstance`: it asks the object, and a weak proxy answers for its target, other objects warn or run code.
        """
        # Not `issubclass`, which a metaclass may answer.
        wanted = set(map(id, classes))
        matching = {
            kind
            for kind, candidate in self._types.items()
            if not wanted.isdisjoint(map(id, type.__dict__["__mro__"].__get__(candidate)))
        }
        return self._of(matching)

    def referred_to(self, *classes: type) -> list[Any]:
        """Return instances of classes that the collector does not track, which the objects refer to, once each."""
        from lowtide.probes.objects.identities import identities, types_of
        from lowtide.probes.original_numpy import np

        found = gc.get_referents(*self._objects)
        wanted = np.isin(types_of(identities(found)), np.fromiter(map(id, classes), np.int64, len(classes)))
        return list({id(item): item for item in map(found.__getitem__, np.flatnonzero(wanted).tolist())}.values())

    def exactly(self, cls: type) -> list[Any]:
        """Return the objects whose type is `cls` itself."""
        return self._of({id(cls)} & self._types.keys())

    def _of(self, kinds: set[int]) -> list[Any]:
        if not kinds:
            return []
        from lowtide.probes.original_numpy import np

        places = np.flatnonzero(np.isin(self._kinds, np.fromiter(kinds, np.int64, len(kinds))))
        return [self._objects[place] for place in places.tolist()]


def _add_what_is_reached(found: list[object]) -> None:
    """Add to the objects every tracked one that they, the modules, classes and frames lead to; take out the frames.

    A step is a few calls per chunk, all of them in C: on a heap of a million objects that is the difference between
    a third of a second and ten.
    """
    # Not at the top: see `Census`.
    from lowtide.probes.objects.identities import Tracked, identities, objects_at, places_of, types_of
    from lowtide.probes.original_numpy import np

    table, tracked = places_of(identities(found)), Tracked()

    def add(met: list[object]) -> None:
        # Untracked objects (numbers, strings, tuples of them) refer to nothing that is tracked.
        found.extend(objects_at(table.add_new(identities(met), tracked.among)))

    add(list(_roots()))
    seen = [np.zeros(0, np.int64)]
    done = 0
    while done < len(found):
        chunk = found[done : done + _CHUNK]
        seen.append(types_of(identities(chunk)))
        done += len(chunk)
        referents = gc.get_referents(*chunk)
        chunk.clear()
        add(referents)
        # The frame of this very call may be in them, and would keep them.
        referents.clear()
    all_kinds = np.concatenate(seen)
    # The last takes the place of each frame: so few that nothing else need be moved.
    for place in reversed(np.flatnonzero(all_kinds == id(FrameType)).tolist()):
        found[place] = found[-1]
        found.pop()


def _roots() -> Iterator[object]:
    """Yield what a frozen object may hang on without an unfrozen tracked object in between."""
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType):
            yield module
    yield from _classes()
    for frame in _running_frames():
        yield frame.f_globals
        yield from frame_locals(frame)


def _classes() -> Iterator[object]:
    """Yield all classes and, for those written in C, what their namespaces hold: a static type has no referents."""
    for cls in all_classes():
        yield cls
        if not flags_of(cls) & _HEAP_TYPE:
            yield from gc.get_referents(type.__dict__["__dict__"].__get__(cls))


def all_classes(*bases: type) -> Iterator[type]:
    """Give every class that there is, or each that derives from some and these themselves, once."""
    seen: set[int] = set()
    waiting = [*bases] or [object]
    while waiting:
        cls = waiting.pop()
        if id(cls) not in seen:
            seen.add(id(cls))
            yield cls
            waiting.extend(type.__subclasses__(cls))


def _running_frames() -> Iterator[FrameType]:
    """Yield the frames of all threads, except those of the probes, whose locals are the walk itself."""
    waiting: list[FrameType | None] = list(sys._current_frames().values())
    while waiting:
        # Nothing of this is left in a local variable at the end: one of the frames is this function's own.
        frame = waiting.pop()
        if frame is not None:
            waiting.append(frame.f_back)
            if not str(dict.get(frame.f_globals, "__name__", "")).startswith("lowtide.probes."):
                yield frame


def running_locals() -> list[object]:
    """Return the local variables of all functions that run, in any thread; those of inner functions come last."""
    return [value for frame in [*_running_frames()][::-1] for value in frame_locals(frame)]


def is_checkers(frame: FrameType) -> bool:
    """Return whether the frame is the checker's, which holds what it looks at."""
    name = dict.get(frame.f_globals, "__name__", "")
    return type(name) is str and f"{name}.".startswith(CHECKER)


def frame_locals(frame: FrameType, *, is_checkers: bool = False) -> list[object]:
    """Return the values of a frame's local variables, leaving nothing behind.

    Args:
        frame: of a running function.
        is_checkers: whether it is one of the checker's own, of whose variables nobody else holds a dict for long.

    Up to Python 3.12 reading `f_locals` leaves in the frame a dict of the function's locals, which keeps them alive
    after the function dropped them; it is emptied here, unless somebody else holds it (a debugger, or the function by
    `locals()`). A module's or class body's `f_locals` is its namespace, and is never emptied.
    """
    namespace = frame.f_locals
    values = list(namespace.values())
    # 2: the frame's own reference and `namespace`; `getrefcount` adds its argument.
    if (
        sys.version_info < (3, 13)
        and frame.f_code.co_flags & CO_OPTIMIZED
        and type(namespace) is dict
        and (is_checkers or sys.getrefcount(namespace) <= 3)
    ):
        namespace.clear()
    return values

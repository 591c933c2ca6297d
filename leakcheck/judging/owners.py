"""Whose memory it is: what a fixture of a wider scope sets up, or an import makes, is not the test's.

`Ownership` keeps the books of one test: its baseline, who owns what, since which stage, and what is above what it
should be. It knows counters only, and reads nothing itself but who maps a new entry of /dev/shm.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, Optional

import msgspec

from lowtide.leakcheck.growth.series import KeptSteps, LevelKey, rises
from lowtide.leakcheck.judging.exemptions import exempt, waiting_workers
from lowtide.leakcheck.resources import resource_of
from lowtide.leakcheck.resources.orphaned_files import OwnSegments
from lowtide.leakcheck.resources.settings import (
    ABSENT,
    EnvironmentSetters,
    SettingChange,
    SettingHistory,
    changes_between,
    describe_change,
    is_of_tests_own_logger,
)
from lowtide.probes.heap.reach import module_namespaces, reach, ways_to
from lowtide.probes.heap.stand_ins import files_beside, owned
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.makers import Makers
from lowtide.probes.host.process_files import descendants_of, numbers_in
from lowtide.probes.host.readings import mapped_shared_memory
from lowtide.probes.memory.autograd import saved_behind
from lowtide.probes.memory.tensors import keys_of_each, plain_tensors, survey_storages, torch_member
from lowtide.probes.objects.described import library_globals
from lowtide.probes.objects.foreign import is_a, place_of_definition, thread_ident, thread_key
from lowtide.probes.objects.identities import Identities
from lowtide.probes.objects.listed import Census
from lowtide.probes.originals import gc, loaded, os, threading, weakref
from lowtide.reports.schema import ResourceName

Key = tuple[str, int]
"""A storage: its device and its address."""

ANYTHING = sys.maxsize
"""What a test may add that is not judged, in bytes."""


class Lying(msgspec.Struct, frozen=True):
    """A storage under an owner.

    Attributes:
        bytes: its length.
        turn: in which test that used the owner it appeared there; 0: before the first.
    """

    bytes: int
    turn: int


class Count(msgspec.Struct, frozen=True):
    """How many things of a kind belong to an owner.

    Attributes:
        now: all of them.
        came: those of them that came in this turn.
    """

    now: int = 0
    came: int = 0


class OwnerHistory:
    """Kept for an owner from its setup to its end; a turn is a test that used it.

    A turn in which nothing was read has the level of the one before: only a test that leaves something young under the
    owner can have raised it, and such a test is read.

    Attributes:
        limit_passed: bytes by which it had grown when that was last reported.
        storages: what lay under the owner when it was last read.
    """

    def __init__(self) -> None:
        self.limit_passed = 0
        self.storages: dict[Key, Lying] = {}
        self._is_new = True
        self._allowed: list[int] = []
        self._levels: dict[LevelKey, list[int]] = {}
        # How many storages there are, beside their bytes.
        self._numbers: dict[LevelKey, list[int]] = {}

    @property
    def turns(self) -> int:
        """How many tests have used the owner."""
        return len(self._allowed)

    @property
    def sizes(self) -> dict[Key, int]:
        """The bytes of each storage that lay under the owner."""
        return {key: lying.bytes for key, lying in self.storages.items()}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever read."""
        return not self._levels

    def begin_turn(self, allowed: int) -> None:
        """Begin a turn: a test uses the owner, and may add so many bytes."""
        self._allowed.append(allowed)
        for levels in (*self._levels.values(), *self._numbers.values()):
            levels.append(levels[-1])

    def note(self, storages: Mapping[Key, int], fresh: Collection[Key], counts: Mapping[ResourceName, Count]) -> None:
        """Note what lies under the owner at the end of a turn.

        Args:
            storages: all storages with their bytes.
            fresh: those of them that are known to have appeared in this turn.
            counts: things that are counted, by resource.
        """
        self.storages = {key: Lying(size, self._turn_of(key, size, fresh)) for key, size in storages.items()}
        self._is_new = False
        now = {LevelKey(resource): count for resource, count in counts.items()}
        numbers: dict[LevelKey, Count] = {}
        for (device, _), lying in self.storages.items():
            key, came = LevelKey("tensors", device), lying.turn == self.turns
            for levels, amount in ((now, lying.bytes), (numbers, 1)):
                level = levels.get(key, Count())
                levels[key] = Count(level.now + amount, level.came + amount * came)
        self._set(self._levels, now)
        self._set(self._numbers, numbers)

    def _set(self, levels: dict[LevelKey, list[int]], now: Mapping[LevelKey, Count]) -> None:
        for key in {*levels, *now}:
            count = now.get(key, Count())
            levels.setdefault(key, [count.now - count.came] * (self.turns + 1))[-1] = count.now

    def forget(self, gone: Collection[Key]) -> None:
        """Forget storages in whose place others lie."""
        self.storages = {key: lying for key, lying in self.storages.items() if key not in gone}

    def take(self, key: Key, size: int) -> None:
        """Take down a storage that lies in the place of one that is gone: the levels stay as they are."""
        self.storages[key] = Lying(size, self.turns)

    def _turn_of(self, key: Key, size: int, fresh: Collection[Key]) -> int:
        known = self.storages.get(key)
        if key in fresh or (known is not None and known.bytes != size):
            return self.turns
        if known is not None:
            return known.turn
        # Of what lies there at the first reading, only what is known to be new is.
        return 0 if self._is_new else self.turns

    def steps(self, key: LevelKey) -> KeptSteps:
        """Return what each turn added for good to a level."""
        return KeptSteps.between(
            self._levels[key], self._allowed if key.resource == "tensors" else self._allowed_of_things
        )

    @property
    def _allowed_of_things(self) -> Sequence[int]:
        return [limit if limit == ANYTHING else 0 for limit in self._allowed]

    def growing(self) -> list[LevelKey]:
        """Return the levels that grow test after test."""
        return sorted(key for key in self._levels if self._grows(key))

    def _grows(self, key: LevelKey) -> bool:
        """Return whether a level grows; one that goes up and down only if the number of things grows."""
        if not self.steps(key).grows:
            return False
        numbers = self._numbers.get(key)
        return rises(self._levels[key]) or (
            numbers is not None and KeptSteps.between(numbers, self._allowed_of_things).grows
        )

    def repeated_bytes(self) -> int:
        """Return the bytes of tensors by which it has grown, as far as that repeats."""
        return sum(self.steps(key).repeated for key in self._levels if key.resource == "tensors")

    @property
    def may_grow(self) -> bool:
        """Whether so many turns have added something that one more would make a growth of it."""
        return any(len(self.steps(key).turns) > 1 for key in self._levels)


# pytest's own objects lead from any fixture to all of the session, and this checker's to all that it judges.
_PACKAGES = ("_pytest", "pytest", "pluggy", "lowtide")

_MOST_LOOKED_AT = 20_000
"""Objects among which what a setup has made is looked for."""


_serial = itertools.count()


class Owner:
    """Something that memory belongs to for longer than one test.

    Args:
        name: as a finding calls it: `module fixture 'engine'`.
        roots: what it holds now, by which to see what grew under it later.
        stage: in which stage what it sets up appeared, if not in its setup.
        only_adds: whether it comes in the middle of a test's own work, as an import does: what falls meanwhile (garbage
            that is collected, frozen objects that die) was not its own to give back.
        ends_with_test: whether it lives no longer than one test all the same, whose memory its own is.

    Attributes:
        label: what the births during its setup are called; no other owner's is the same.
        where: the file that defines it; empty if none does.
        serial: its place in the order in which owners were made.
        items: what is its own, by name, per resource.
        storages: the storages that are its own.
        growth: by how much its setup raised each level.
        settings: the process-wide settings that its setup changed, or that were not known before, as it left them.
        lines: the first threads of the lines of its threads, of which each started the next one.
        has_settled: whether its setup is over.
        before: the counters before its setup.
        ledger: what lies under it, test by test.
        made: weak references to the classes and functions that its setup made: what these hold lies under it.
    """

    def __init__(
        self,
        name: str,
        roots: Callable[[], Iterable[object]] = tuple,
        stage: str | None = None,
        *,
        only_adds: bool = False,
        ends_with_test: bool = False,
    ) -> None:
        self.name = name
        self.only_adds = only_adds
        self.ends_with_test = ends_with_test
        self.stage = stage or f"setup of {name}"
        self.where = ""
        self.serial = next(_serial)
        # The same fixture is set up again for every parameter.
        self.label = f"{self.stage} #{self.serial}"
        self.has_settled = False
        self.settings: dict[str, str] = {}
        self.roots = roots
        self.items: dict[str, set[str]] = {}
        self.lines: frozenset[str] = frozenset()
        self.storages: dict[tuple[str, int], str] = {}
        self.growth: dict[str, int] = {}
        self.before = Counters({}, {}, {})
        self.ledger = OwnerHistory()
        self.made: list[weakref.ref[Any]] = []

    def named(self) -> Iterable[tuple[str, object]]:
        """Return those of its roots whose name says who owns them; drop it soon."""
        return ()

    def note_made(self, born: Collection[int]) -> None:
        """Note which classes and functions its setup has made that its roots lead to; those of a module it has not.

        Args:
            born: the identities of what was born in the test that it was set up for.
        """
        roots = list(self.roots())
        if roots:
            objects, _ = reach(roots, packages=_PACKAGES, enters=_those(born), max_objects=_MOST_LOOKED_AT)
            definitions = (item for item in objects if type(item) is FunctionType or is_a(item, type))
            made = (item for item in definitions if id(item) in born and place_of_definition(item) is None)
            self.made = [weakref.ref(item) for item in made]

    def take(self, now: Counters, live: Sequence[Owner], nested: Sequence[Owner]) -> None:
        """Take what appeared between `before` and `now`, but for what is another's.

        Args:
            now: the counters when its setup was over.
            live: the other owners that are alive.
            nested: those whose setup began and ended meanwhile.
        """
        for key, names in now.items.items():
            new = names.keys() - self.before.items.get(key, {}).keys()
            # There is a live owner for every import: they are gone through only where there is something new.
            if new and (own := new - {name for other in live for name in other.items.get(key, ())}):
                self.items[key] = own
        for key, level in now.amounts.items():
            then = self.before.amounts.get(key, 0)
            if level is not None and then is not None:
                grown = level - then - sum(other.growth.get(key, 0) for other in nested)
                self.growth[key] = max(grown, 0) if self.only_adds else grown
        if now.settings is self.before.settings:
            return
        # What a nested one set is that one's; what was not known before, as of a library that came, is as it is now.
        others = {setting for other in nested for setting in other.settings.items()}
        known = self.before.settings
        self.settings = {
            name: value
            for name in known.keys() | now.settings.keys()
            if known.get(name, ABSENT) != (value := now.settings.get(name, ABSENT)) and (name, value) not in others
        }
        changed = {change.name for change in changes_between(known, now.settings, self.settings)}
        if changed:
            self.items["globals"] = changed


class Claims:
    """What the live owners hold at this moment, by a walk from their roots.

    Args:
        owners: those that are alive, the innermost last.
        only: the objects to walk through; None for all.
        stops: those of what is not to be entered, if that is known: modules' namespaces, and what libraries keep there.
    """

    def __init__(
        self, owners: Sequence[Owner], only: Identities | None = None, stops: frozenset[int] = frozenset()
    ) -> None:
        self.owners = tuple(owners)
        self._only, self._stops = only, stops

    @functools.cached_property
    def _reached(self) -> list[tuple[Owner, dict[int, Any]]]:
        """Walked when first asked for: most tests claim nothing."""
        reached = []
        stops = self._stops
        for owner in self.owners:
            roots = list(owner.roots())
            if roots:
                # What a library keeps in a global lives with the library: a fixture that gives it out does not hold it.
                stops = stops or module_namespaces() | library_globals()
                made = {id(reference()) for reference in owner.made}
                objects, _ = reach(roots, packages=_PACKAGES, namespaces=stops, only=self._only, enters=_those(made))
                reached.append((owner, {id(item): item for item in objects}))
        return reached

    def owner_of(self, item: object) -> Owner | None:
        """Return the first owner that reaches an object."""
        for owner, reached in self._reached:
            if id(item) in reached:
                return owner
        return None

    def ways(self, items: Collection[int]) -> set[int]:
        """Return the identities of the objects on ways from the owners to some objects, by these ones' identities."""
        return set().union(
            *(ways_to(items, set(map(id, owner.roots())), list(reached.values())) for owner, reached in self._reached)
        )

    @functools.cached_property
    def _tensors(self) -> list[tuple[Owner, list[Any], list[frozenset[Key]]]]:
        """Return the tensors and storages that each owner holds, with the keys of what lies under each of them."""
        torch: Any = loaded("torch")
        if not hasattr(torch, "UntypedStorage"):
            return []
        held = [(owner, held_in_all(torch, Census(reached.values()))) for owner, reached in self._reached]
        return [(owner, tensors, keys_of_each(tensors)) for owner, tensors in held]

    @functools.cached_property
    def by_storage(self) -> dict[Key, Owner]:
        """All storages that owners hold, each with the first that does.

        By a tensor, by its gradient, which Python may never have seen, or by what an autograd graph has saved.
        """
        found: dict[Key, Owner] = {}
        for owner, _, keys in self._tensors:
            for key in frozenset[Key]().union(*keys):
                found.setdefault(key, owner)
        return found

    def storages(self, known: Mapping[int, Mapping[Key, int]], fresh: Collection[Key]) -> dict[int, dict[Key, int]]:
        """Return the storages with their bytes, by the identity of the first owner that holds them.

        Args:
            known: the bytes of storages that were asked before, by owner: to ask again would take 40 µs each.
            fresh: storages that may have another length than one at their address had before.
        """
        found: dict[int, dict[Key, int]] = {}
        for owner, tensors, keys in self._tensors:
            sizes = {key: size for key, size in known.get(id(owner), {}).items() if key not in fresh}
            unknown = [tensor for tensor, under in zip(tensors, keys, strict=True) if under - sizes.keys()]
            sizes |= survey_storages(unknown).sizes
            under_it = frozenset[Key]().union(*keys) & sizes.keys()
            found[id(owner)] = {key: sizes[key] for key in under_it if self.by_storage[key] is owner}
        return found

    def names(self, key: str) -> dict[str, Owner]:
        """Return the items of a resource, as the counters name them or as prefixes of that, that an owner holds."""
        found: dict[str, Owner] = {}
        for owner, reached in self._reached:
            # The collector does not track an epoll: it is found behind what holds it.
            census = Census([*reached.values(), *gc.get_referents(*reached.values())])
            own = [(resource, name) for resource, name, _ in owned(census)]
            names = [f"{name} ->" if key == "file-descriptors" else name for resource, name in own if resource == key]
            if key == "file-descriptors":
                names += [f"/dev/shm/{name}" for resource, name in own if resource == "shared-memory"]
                names += files_beside(census)
            found.update(dict.fromkeys(names, owner))
        return found

    def unclaimed(self, key: str, items: Mapping[str, int]) -> dict[str, int]:
        """Return those items of a resource that no owner holds; the others are the owners' from now on."""
        if not items:
            return {}
        owners = self.names(key)
        resource = resource_of(key)
        objects = {} if resource is None else resource.objects(items)
        left = {}
        for name, amount in items.items():
            number, _, target = name.partition(" -> ")
            owner = owners.get(name) or owners.get(f"{number} ->") or owners.get(target)
            if owner is None and name in objects:
                owner = self.owner_of(objects[name])
            if owner is None:
                left[name] = amount
            else:
                owner.items.setdefault(key, set()).add(name)
        return left


def _those(identities: Container[int]) -> Callable[[Any], bool]:
    return lambda item: id(item) in identities


def gradients_of(tensors: Iterable[Any]) -> list[Any]:
    """Return the gradients of those that collect one, None where there is none yet; call it within `plain_tensors`."""
    collecting = (item for item in tensors if torch_member(item, "requires_grad") and torch_member(item, "is_leaf"))
    return [torch_member(item, "grad") for item in collecting]


def held_in_all(torch: Any, census: Census) -> list[Any]:
    """Return the tensors and storages among some objects, the tensors' gradients, and what their graphs have saved."""
    tensors = census.instances_of(torch.Tensor)
    seen: set[Any] = set()
    with plain_tensors(torch):
        outputs = [tensor for tensor in tensors if not torch_member(tensor, "is_leaf")]
        saved = [saved.tensor for output in outputs for saved in saved_behind(output, seen)]
        gradients = [gradient for gradient in gradients_of([*tensors, *saved]) if gradient is not None]
    return [*tensors, *census.instances_of(torch.UntypedStorage), *saved, *gradients]


Subject = Optional[Owner]  # noqa: UP045 - evaluated, and Python 3.10's `|` does not know strings
"""Who is judged: an owner that has ended, or (None) the test."""


class Ownership:
    """Kept by the watch; knows counters only, and reads nothing itself but who maps a new entry of /dev/shm.

    Args:
        segments: the shared memory that this process made.
        left: which of some new entries of /dev/shm were left by a process that has ended.
        environment: who set which environment variable.
        makers: who made threads, processes and descriptors.
        sockets: the temporary files to which some processes have bound sockets.
        may_be_new: whether an object was born in this test; also where that is not known.
    """

    def __init__(
        self,
        segments: OwnSegments,
        left: Callable[[Collection[str]], set[str]] = lambda names: set(),
        environment: EnvironmentSetters | None = None,
        makers: Makers | None = None,
        sockets: Callable[[Collection[int]], set[str]] = lambda pids: set(),
        may_be_new: Callable[[object], bool] = lambda item: True,
    ) -> None:
        self._segments = segments
        self._may_be_new = may_be_new
        self._left_behind = left
        self._sockets_of = sockets
        self._environment = environment or EnvironmentSetters()
        self._makers = makers or Makers()
        self._lines: frozenset[str] = frozenset()
        self._at_end: Counters | None = None
        self.baseline = Counters({}, {}, {})
        self.live: list[Owner] = []
        self._opened: list[Owner] = []
        self._entered: list[tuple[Owner, int, set[str]]] = []
        self._since: dict[tuple[str, str], str] = {}
        self._unread = ""
        self._levels: list[tuple[str, Counters]] = []
        # Those whose scope ended with the test.
        self._ended: list[Owner] = []
        self._history = SettingHistory()
        self._were_put_back = False
        self._test = ""

    def forget_settings(self) -> None:
        """Forget that settings changed: whoever judges has put them back."""
        self._history = SettingHistory()
        self._were_put_back = True

    def begin(self, stage: str, now: Counters, test: str = "") -> None:
        """Begin a test, by its node id: what is there now is its baseline."""
        # What is there when the first one begins has not been changed by anybody.
        unknown = self._were_put_back or not self._levels
        for subject in () if unknown else (None, *self._ended):
            for change in self._changes(now, subject, self._ended):
                self._history.note(change.name, change.before, change.now)
        self._were_put_back, self._test = False, test
        self._ended.clear()
        self._history.begin(now.settings)
        self.baseline = now
        self._lines = self._lines_of(now.items.get("threads", ()))
        self._makers.forget_ended_threads()
        if "file-descriptors" in now.items:
            self._makers.forget_closed(now.items["file-descriptors"])
        self._at_end = None
        self._opened.clear()
        self._entered.clear()
        self._since.clear()
        self._unread = ""
        self._levels = [(stage, now)]

    def attribute(self, stage: str, now: Counters, *, settings_later: bool = False) -> None:
        """Attribute what is new since the last call to `stage`.

        Args:
            stage: the one that ends.
            now: the counters.
            settings_later: whether the settings in it are old: what has changed at the next call changed in `stage`.
        """
        before = self.last
        for key, names in now.items.items():
            known = before.items.get(key, {})
            if names is not known and names.keys() != known.keys():
                fresh = names.keys() - known.keys()
                self._since.update(dict.fromkeys(((key, name) for name in fresh), stage))
                if key == "shared-memory":
                    self._leave_to_processes(fresh)
        if now.settings is not before.settings:
            for change in changes_between(before.settings, now.settings):
                self._since[("globals", change.setting)] = self._unread or stage
        self._unread = stage if settings_later else ""
        self._levels.append((stage, now))

    @property
    def last(self) -> Counters:
        """The counters of the last `begin` or `attribute`."""
        return self._levels[-1][1]

    def enter(self, owner: Owner, now: Counters) -> None:
        """Count what appears from here to `leave` as the owner's."""
        owner.before = now
        self._entered.append((owner, len(self._opened), self._makers.bound_files()))

    @property
    def innermost(self) -> Owner:
        """The owner entered last."""
        return self._entered[-1][0]

    def leave(self, now: Counters) -> Owner:
        """Return the owner entered last, with what it took."""
        owner, first, bound = self._entered.pop()
        owner.take(now, self.live, self._opened[first:])
        self._take_sockets(owner, self._makers.bound_files() - bound)
        self._settle(owner)
        return owner

    def _settle(self, owner: Owner) -> None:
        self._take_lines(owner)
        owner.has_settled = True
        self.live.append(owner)
        self._opened.append(owner)

    def take_of_thread(self, owner: Owner, baseline: Counters, before: Counters, now: Counters) -> None:
        """Count as the owner's what a thread of the program has set and made beside the test.

        Args:
            owner: who did it; nobody has entered it.
            baseline: that of the test that was running before; nothing is taken where another one runs now.
            before: what there was then, read by the calling thread, as `now`.
            now: what there is.
        """
        if baseline is not self.baseline:
            return
        owner.before = before
        owner.take(now, self.live, ())
        # Not by `current_thread`, which makes an object for a thread of C's.
        here = [thread for thread in threading.enumerate() if thread_ident(thread) == threading.get_ident()]
        name = thread_key(here[0]) if here else None
        for key in owner.items.keys() - {"globals"}:
            makers = {item: self._makers.of_item(key, item) for item in owner.items[key]}
            owner.items[key] = {item for item, maker in makers.items() if maker is not None and maker.thread == name}
        self._settle(owner)

    def over(self, now: Counters) -> None:
        """Note that the test is over: what other threads make from here on is not its."""
        self._at_end = now

    def close(self, owners: Iterable[Owner]) -> list[Owner]:
        """End these owners; return those of them that were alive."""
        gone = [owner for owner in owners if any(owner is other for other in self.live)]
        if gone:
            self.live = [owner for owner in self.live if not any(owner is other for other in gone)]
        self._ended += gone
        return gone

    def new_items(self, key: str, now: Counters, subject: Subject, ended: Sequence[Owner]) -> dict[str, int]:
        """Return what is there now, by name, and should not be: the test's, or an ended owner's."""
        if key == "globals":
            return dict.fromkeys(map(describe_change, self.left(now, subject, ended)), 1)
        names = now.items.get(key, {})
        if subject is not None:
            own = subject.items.get(key, ())
            may_have_heirs = key == "threads" and bool(subject.lines)
            found = {
                name: amount
                for name, amount in names.items()
                if name in own or (may_have_heirs and self._is_heir(name, subject.lines, now))
            }
        else:
            known = self.baseline.items.get(key, {})
            if names.keys() <= known.keys():
                return {}
            fresh = names.keys() - known.keys()
            owned = {name for owner in (*self.live, *ended) for name in owner.items.get(key, ())}
            found = {name: names[name] for name in sorted(fresh - owned) if not self._is_anothers(key, name, now)}
        stays = exempt(key, found)
        if key == "threads" and subject is None:
            stays |= self._waiting_in_older_pools(found.keys() - stays)
        heirs = self._living_heirs(stays, subject) if key == "threads" and stays else {}
        found = {name: amount for name, amount in found.items() if name not in stays} | heirs
        return self._own_shared_memory(found) if key == "shared-memory" else found

    def _waiting_in_older_pools(self, threads: Collection[str]) -> set[str]:
        """Return the workers that wait for work in pools that were there before the test.

        A pool starts another one while all that it has are at work, up to a limit; it keeps them, as a cache that
        fills, and who made the pool answers for them.
        """
        waiting = waiting_workers(threads) if threads else {}
        return {name for name, pool in waiting.items() if not self._may_be_new(pool)}

    def _take_lines(self, owner: Owner) -> None:
        """Take the threads that its setup seems to have started, but for the heirs of what was there."""
        known = self._known_lines()
        own = {name for name in owner.items.get("threads", ()) if not self._lines_of([name]) <= known}
        if own:
            owner.items["threads"], owner.lines = own, self._lines_of(own)
        else:
            owner.items.pop("threads", None)

    def _take_sockets(self, owner: Owner, bound: set[str]) -> None:
        """Take the files of the sockets that its setup has bound, here or in processes: they may outlive these."""
        pids = [int(name) for name in owner.items.get("processes", ())]
        files = bound | (self._sockets_of(pids) if pids else set())
        if files:
            others = {name for other in self.live for name in other.items.get("temporary-files", ())}
            owner.items["temporary-files"] = owner.items.get("temporary-files", set()) | (files - others)

    def _known_lines(self) -> frozenset[str]:
        """Return the lines of the threads that were there before the test, and of the owners'."""
        return self._lines.union(*(owner.lines for owner in (*self.live, *self._ended)))

    def _lines_of(self, threads: Iterable[str]) -> frozenset[str]:
        """Return the first threads of the lines of some threads, but the main one, which makes what the tests make."""
        makers = {name: self._makers.of_item("threads", name) for name in threads}
        main = thread_key(threading.main_thread())
        return frozenset(maker.line if maker and maker.line else name for name, maker in makers.items() if name != main)

    def _is_heir(self, thread: str, lines: Collection[str], now: Counters) -> bool:
        """Return whether a thread goes on for one that started it and has ended, like a timer that arms itself."""
        maker = self._makers.of_item("threads", thread)
        return maker is not None and maker.line in lines and maker.thread not in now.items.get("threads", ())

    def _living_heirs(self, threads: Collection[str], subject: Subject) -> dict[str, int]:
        """Return the subject's threads that go on in place of some that have ended since they were read.

        Args:
            threads: those that are no leak, which have ended or may stay.
            subject: whose.
        """
        lines = self._lines_of(threads)
        lines = lines - self._known_lines() if subject is None else lines & subject.lines
        living = Counters({"threads": dict.fromkeys(map(thread_key, threading.enumerate()), 1)}, {}, {})
        # One that may stay goes on for whoever started it, too.
        return {name: 1 for name in living.items["threads"].keys() - threads if self._is_heir(name, lines, living)}

    def _is_anothers(self, key: str, name: str, now: Counters) -> bool:
        """Return whether a thread made something, or its heir is it, that was there before the test.

        A thread that an earlier test has left makes what it makes for itself. One of an owner that is alive may make
        it for the test, as an executor's does, but not when the test is over.
        """
        known = self._known_lines()
        maker = self._makers.of_item(key, name) if known else None
        if maker is None or maker.line not in known:
            return False
        if not any(maker.line in owner.lines for owner in (*self.live, *self._ended)):
            return True
        is_late = self._at_end is not None and name not in self._at_end.items.get(key, ())
        return is_late or (key == "threads" and maker.thread not in now.items.get("threads", ()))

    def shares(self, key: str, now: Counters, ended: Sequence[Owner]) -> dict[int, int | None]:
        """Return how far a level is too high, by the identity of the subject: an owner answers for what it took."""
        level, base = now.amounts.get(key, 0), self.baseline.amounts.get(key, 0)
        if level is None or base is None:
            return dict.fromkeys((id(subject) for subject in (None, *ended)), None)
        expected = base + self.growth(key)
        if ended:
            # It should fall by what they took, but not below where it was before they took it.
            floor = min(self._floor(key, owner) for owner in ended)
            expected = max(expected - sum(owner.growth.get(key, 0) for owner in ended), floor)
        excess = level - expected
        found: dict[int, int | None] = {}
        for owner in reversed(ended):
            share = min(max(excess, 0), max(owner.growth.get(key, 0), 0))
            found[id(owner)] = share
            excess -= share
        found[id(None)] = excess
        return found

    def growth(self, key: str) -> int:
        """Return by how much the owners' setups since the baseline have raised a level."""
        return sum(owner.growth.get(key, 0) for owner in self._opened)

    def share(self, key: str, now: Counters, subject: Subject, ended: Sequence[Owner]) -> int | None:
        """Return how far a level is too high by one subject; None where that is not known."""
        return self.shares(key, now, ended)[id(subject)]

    def _floor(self, key: str, owner: Owner) -> int:
        later = sum(other.growth.get(key, 0) for other in self.live if other.serial > owner.serial)
        return (owner.before.amounts.get(key, 0) or 0) + later

    def since(self, key: str, names: Iterable[str]) -> str:
        """Return the stage in which the first of these items, or else most of the level, appeared; empty if unknown."""
        if key == "globals":
            # These are reported as sentences that begin with the setting.
            names = [name for _, name in self._since if any(text.startswith(f"{name} ") for text in names)]
        stages = [self._since[(key, name)] for name in names if (key, name) in self._since]
        if stages:
            return stages[0]
        growth: list[tuple[int, str]] = []
        for (_, before), (stage, after) in itertools.pairwise(self._levels):
            then, now = before.amounts.get(key, 0), after.amounts.get(key, 0)
            if then is not None and now is not None and now > then:
                growth.append((now - then, stage))
        return max(growth)[1] if growth else ""

    def left(self, now: Counters, subject: Subject, ended: Sequence[Owner]) -> list[SettingChange]:
        """Return the settings that are not what they should be, and not as an earlier test has left them either."""
        return self._history.news(self._changes(now, subject, ended))

    def _changes(self, now: Counters, subject: Subject, ended: Sequence[Owner]) -> list[SettingChange]:
        """Return the settings that a test or an ended owner left changed."""
        if subject is not None:
            changes = changes_between(subject.before.settings, now.settings, subject.items.get("globals", ()))
            return self._environment.without_own_of_libraries(changes)
        if now.settings is self.baseline.settings:
            return []
        before = dict(self.baseline.settings)
        # An owner that changed one and ended put it back to what it was before that owner.
        for owner in reversed(ended):
            for name in owner.items.get("globals", ()):
                before[name] = owner.before.settings.get(name, ABSENT)
        left = {setting for owner in ended for setting in owner.settings.items()}
        # One that is alive changed it during this test: what it left is what is to be found.
        for owner in self._opened:
            if owner in self.live:
                before.update(owner.settings)
            if owner.only_adds:
                # To put back what an import has changed is no change: to what it was before it, or before the test.
                earlier = (owner.before.settings, self.baseline.settings)
                left |= {(name, settings.get(name, ABSENT)) for settings in earlier for name in owner.settings}
        # What an ended one left as it had set it, is its own.
        changes = changes_between({name: text for name, text in before.items() if text != ABSENT}, now.settings)
        changes = [change for change in changes if (change.name, change.now) not in left]
        changes = self._environment.without_own_of_libraries(changes)
        return [change for change in changes if not is_of_tests_own_logger(change.name, self._test)]

    def _leave_to_processes(self, names: Collection[str]) -> None:
        """Take new entries of /dev/shm for those of living owners whose processes have made them, and not this one.

        torch counts in one what another process has of the tensors that it has exported, as long as it lives.
        """
        for owner in self.live:
            started = set(map(int, owner.items.get("processes", ())))
            family = {pid for start in started for pid in (start, *descendants_of(start))}
            theirs = {name for name in names if family & numbers_in(name)}
            theirs |= set(names) & mapped_shared_memory(family) if family else set()
            if theirs:
                owner.items.setdefault("shared-memory", set()).update(theirs - mapped_shared_memory([os.getpid()]))

    def _own_shared_memory(self, names: Mapping[str, int]) -> dict[str, int]:
        """Return those entries of /dev/shm that this process has to answer for, with their bytes.

        It made them, or it or a child of it has or had them open, or they carry the number of one of these.
        """
        if not names:
            return {}
        family = {os.getpid(), *descendants_of(os.getpid())}
        mine = mapped_shared_memory(family) | self._segments.names | self._left_behind(names)
        found = {}
        for name in names:
            own = name in mine or bool(family & numbers_in(name))
            try:
                facts = os.stat(f"/dev/shm/{name}")
            except OSError:  # it is gone by now
                continue
            if own and facts.st_uid == os.geteuid():
                found[name] = max(facts.st_size, 1)
        return found

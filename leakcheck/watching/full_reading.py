"""Takes full readings of a suspect test, without what libraries are excused for, rung by rung of the release ladder.

What tests leave under owners that live is noted beside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.findings.cached_values import CachedValues, SortedValues
from lowtide.leakcheck.findings.causes import of_library
from lowtide.leakcheck.findings.heap_file import HeapFile
from lowtide.leakcheck.findings.owner_growth import COUNTED, growth_of, limit_passed, note_growth, rest_of
from lowtide.leakcheck.findings.storage_holders import Context, behind_frozen_holders
from lowtide.leakcheck.judging.device_memory import IDLE_POOL, MEMORY_POOL, allocation_name
from lowtide.leakcheck.judging.ladder import LadderStep, climb
from lowtide.leakcheck.judging.metrics import Metric, Reading
from lowtide.leakcheck.judging.owners import Claims, Owner, Subject
from lowtide.leakcheck.judging.storages import (
    HeapReading,
    HeldStorage,
    Key,
    is_storage,
    is_tensor,
    read_heap,
    survey_births,
    thaw,
)
from lowtide.leakcheck.resources import resource_of
from lowtide.leakcheck.resources.first_use import JUDGED, LibraryItems, NewItems, Sorted, unheld_threads
from lowtide.leakcheck.resources.resource import Items, Rung
from lowtide.leakcheck.watching.watched import Verdict, Watched
from lowtide.probes.heap.births import Births, Newborn
from lowtide.probes.heap.graph import References
from lowtide.probes.heap.holders import SharedWalk, sharing_walk
from lowtide.probes.heap.reach import BoundSince
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.readings import mapped_shared_memory, shared_file_bytes
from lowtide.probes.memory.ranges import common
from lowtide.probes.memory.tensors import keys_of_each, plain_tensors, survey_storages, torch_member
from lowtide.probes.objects.identities import Identities
from lowtide.probes.objects.listed import any_frozen
from lowtide.probes.originals import loaded, os
from lowtide.probes.stages import announced_pools
from lowtide.reports.schema import Finding, NotMeasured

_RUNGS = (Rung.IPC_COLLECT, Rung.EMPTY_CACHE, Rung.CLEAR_HOST_CACHE)
"""What a plain test may have to climb, once everything is collected; what needs more is a leak in any case."""


class Unsettled(msgspec.Struct, frozen=True):
    """What a walk of the known ways could not tell, since others than its objects refer to some of these.

    Attributes:
        references: how often.
        wanted: the identities of what was asked for.
        leads: those of what is new and leads there.
        older: those of what is older and refers to that.
    """

    references: References
    wanted: tuple[int, ...]
    leads: frozenset[int]
    older: frozenset[int]


class Case(msgspec.Struct, frozen=True):
    """What is to be judged.

    Attributes:
        ended: the owners that ended with the test, which are judged too.
        final: whether the test is over; else nothing is changed to prove a remedy.
        stage: the stage that ends here.
        tolerance: bytes that the test may leave.
        seen: the storages at the last full reading.
        context: what else is known around it; its module is the test's.
        known: a walk of the ways to what was explained before, if all that is left hangs on these: nothing of that is
            garbage, and no full collection was needed to see it.
        things: the names of what seems to be left, by resource, where it is nothing but process-wide settings, or
            things of which `known` shows who holds them: the heap is not read, and nothing tried that gives back what
            nobody holds.
        heap: where the heap is kept in which something is left.
        unsettled: what the known ways could not tell, and a walk over the heap may settle for the next time.
    """

    ended: Sequence[Owner]
    final: bool
    stage: str
    tolerance: int
    seen: frozenset[Key]
    context: Context
    known: SharedWalk | None = None
    things: Mapping[str, Collection[str]] | None = None
    heap: HeapFile | None = None
    unsettled: Unsettled | None = None

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """Return the test itself, as None, and the owners."""
        return (None, *self.ended)


class Deep(msgspec.Struct, frozen=True):
    """A full reading.

    Attributes:
        readings: one per subject.
        heap: the storages behind them.
        explained: bytes of new host memory that are judged by name: under new tensors and in new files of /dev/shm.
    """

    readings: tuple[Reading, ...]
    heap: HeapReading
    explained: int

    @classmethod
    def of_no_heap(cls, subjects: int, alive: frozenset[Key]) -> Deep:
        """Return what a reading takes over where nothing in the heap is to be judged.

        Args:
            subjects: how many there are.
            alive: the storages at the last full reading.
        """
        return cls((Reading({"lru-cache": {}}, {}),) * subjects, HeapReading((), {}, alive, {}, 0), 0)

    def with_hidden(self, hidden: Sequence[HeldStorage]) -> Deep:
        """Return the same with storages of the test's that no walk could find."""
        own, *others = self.readings
        more: dict[str, dict[str, int]] = {}
        for held in hidden:
            more.setdefault(f"tensors {held.key[0]}", {})[held.name] = held.bytes
        items = {**own.items, **{key: {**own.items.get(key, {}), **found} for key, found in more.items()}}
        heap = replace(self.heap, held=(*self.heap.held, *hidden))
        return replace(self, readings=(replace(own, items=items), *others), heap=heap)

    def settled(self, distinguished: Sorted, now: Counters) -> Deep:
        """Return the same without what libraries are excused for, and with what they are not excused for any more."""
        return self._changed(lambda key, found: distinguished.applied(key, found, now.items.get(key, {})))

    def without(self, storages: Collection[Key]) -> Deep:
        """Return the same without some storages, whoever's they are."""
        if not storages:
            return self
        names = {(f"tensors {held.key[0]}", held.name) for held in self.heap.held if held.key in storages}
        left = tuple(held for held in self.heap.held if held.key not in storages)
        kept = self._changed(lambda key, found: {name: found[name] for name in found if (key, name) not in names})
        return replace(kept, heap=replace(self.heap, held=left))

    def _changed(self, change: Callable[[str, Items], Items]) -> Deep:
        """Return the same with the items of each key that something makes of them."""
        changed = ({key: change(key, found) for key, found in reading.items.items()} for reading in self.readings)
        readings = [replace(reading, items=items) for reading, items in zip(self.readings, changed, strict=True)]
        return replace(self, readings=tuple(readings))


_MOST_KNOWN = 10_000
"""Objects on known ways that are remembered."""


class Renewal(msgspec.Struct, frozen=True):
    """What took the place of what under the owners that are alive.

    Attributes:
        gone: storages that lay there.
        fresh: those that do now, with their owner and their bytes.
    """

    gone: frozenset[Key] = frozenset()
    fresh: Mapping[Key, tuple[Owner, int]] = msgspec.field(default_factory=dict)


class Renewals:
    """Tells that what a test left under owners that live only took the place of what lay there before.

    A full reading notes over which storages of an owner the test's tensors lie, and the ways there. A later test has
    added nothing where each of its tensors is reached from an owner now, by known objects and by those that it made,
    and lies over as long a storage there as then (the same, or another one at the address of one that is gone), or over
    a new one, for which one is gone that tests had made.

    Holds identities only.
    """

    def __init__(self, births: Births) -> None:
        self._births = births
        self._known: dict[int, None] = {}
        self._sizes: dict[str, dict[Key, int]] = {}
        # Of the storages that tests have made, the tensors that lay over each of them when a test was over.
        self._over: dict[Key, set[int]] = {}
        self._frozen = 0
        self._bound = BoundSince()

    def note(self, claims: Claims, tensors: Sequence[Any], heap: HeapReading) -> None:
        """Take down what lies under the owners, in a full reading.

        Args:
            claims: what these hold.
            tensors: what the test has made, and is there.
            heap: the storages.
        """
        self._keep({owner.label for owner in claims.owners}, heap.alive)
        if self._births.frozen_before != self._frozen:
            # What is frozen is not looked for.
            self._frozen = self._births.frozen_before
            self._over.clear()
        owned = [(item, owner) for item in tensors if (owner := claims.owner_of(item)) is not None]
        for item, owner in owned:
            for key, size in _sizes([item]).items():
                self._take(key, size, owner, {id(item)}, is_made=key in heap.claimed)
        for item, keys in zip(tensors, keys_of_each(tensors), strict=True):
            for key in keys & self._over.keys():
                self._over[key].add(id(item))
        if owned:
            self._known.update(dict.fromkeys(claims.ways([id(item) for item, _ in owned])))
            for identity in list(self._known)[: max(0, len(self._known) - _MOST_KNOWN)]:
                del self._known[identity]
            self._bound.note()

    def _keep(self, labels: Collection[str], alive: Collection[Key]) -> None:
        """Forget what is gone, and what belonged to others."""
        self._sizes = {
            label: {key: size for key, size in self._sizes.get(label, {}).items() if key in alive} for label in labels
        }
        self._over = {key: over for key, over in self._over.items() if key in alive}

    def _take(self, key: Key, size: int, owner: Owner, over: set[int], *, is_made: bool) -> None:
        """Take down a storage under an owner, with the tensors over it."""
        self._sizes[owner.label][key] = size
        if is_made or key in self._over:
            self._over[key] = self._over.get(key, set()) | over

    def explain(
        self, tensors: Sequence[Any], owners: Sequence[Owner], born: Collection[int] | None, seen: Collection[Key]
    ) -> Renewal | None:
        """Return what took the place of what, if that is all that a test has left; else None.

        Args:
            tensors: what it has left.
            owners: those that are alive.
            born: the identities of what was born in the test.
            seen: the storages that there were before, as far as tests have made them.
        """
        if not self._known or not tensors or not isinstance(born, Identities) or _any_with_gradient(tensors):
            return None
        claims = self._claims(owners, born)
        there: dict[Key, tuple[Owner, int, set[int]]] = {}
        for item in tensors:
            owner, sizes = claims.owner_of(item), _sizes([item])
            if owner is None or owner.label not in self._sizes or not sizes:
                return None
            for key, size in sizes.items():
                there.setdefault(key, (owner, size, set()))[2].add(id(item))
        fresh = {key: of for key, of in there.items() if self._sizes[of[0].label].get(key) != of[1]}
        gone = self._gone(there, set(map(id, tensors))) if fresh else frozenset()
        owned = {key for owner in owners for key in owner.storages}
        if any(key in seen or key in owned for key in fresh) or not self._are_no_more(fresh, gone):
            return None
        for known in self._sizes.values():
            for key in gone & known.keys():
                del known[key], self._over[key]
        for key, (owner, size, over) in there.items():
            self._take(key, size, owner, over, is_made=key in fresh)
        return Renewal(gone, {key: (owner, size) for key, (owner, size, _) in fresh.items()})

    def elsewhere(self, tensors: Sequence[Any], owners: Sequence[Owner], born: Collection[int] | None) -> list[int]:
        """Return the identities of those of some tensors that are not reached from an owner by known ways.

        Arguments are those of `explain`.
        """
        if not self._known or not isinstance(born, Identities):
            return [*map(id, tensors)]
        claims = self._claims(owners, born)
        return [id(item) for item in tensors if claims.owner_of(item) is None]

    def _claims(self, owners: Sequence[Owner], born: Identities) -> Claims:
        """Return what owners hold by known objects and by those that a test has made."""
        return Claims(owners, born.and_also(self._known), self._bound.stops())

    def _gone(self, there: Collection[Key], new: Collection[int]) -> frozenset[Key]:
        """Return the storages that tests have made and over which no tensor lies any more that one of them left.

        Args:
            there: the storages under what the test has left.
            new: the identities of that: who had them before is gone.
        """
        waiting = {key: over - set(new) for key, over in self._over.items() if key not in there}
        if not waiting or self._births.frozen_before != self._frozen:
            return frozenset()
        alive = self._births.unfrozen_among(set().union(*waiting.values()))
        return frozenset(key for key, over in waiting.items() if over.isdisjoint(alive))

    def _are_no_more(self, fresh: Mapping[Key, tuple[Owner, int, set[int]]], gone: Collection[Key]) -> bool:
        """Return whether no owner has got more storages, or more bytes, on any device than are gone there."""
        for owner, device in {(owner.label, key[0]) for key, (owner, *_) in fresh.items()}:
            came = [size for key, (of, size, _) in fresh.items() if (of.label, key[0]) == (owner, device)]
            went = [size for key, size in self._sizes[owner].items() if key in gone and key[0] == device]
            if len(came) > len(went) or sum(came) > sum(went):
                return False
        return True


def _any_with_gradient(tensors: Sequence[Any]) -> bool:
    """Return whether one of some tensors may hold more than its storage: a gradient, or what its graph has saved."""
    torch: Any = loaded("torch")
    with plain_tensors(torch):
        return any(torch_member(item, "requires_grad") for item in tensors if not is_storage(item))


def _sizes(tensors: Sequence[Any]) -> dict[Key, int]:
    """Return the bytes of the storages under some tensors; none where one of them cannot be read."""
    survey = survey_storages(tensors)
    return {} if survey.unreadable else survey.sizes


class OwnersInUse:
    """Follows the owners that the tests of one watch use, and what the tests leave under them.

    That is judged when an owner ends, or passes the policy's limit.

    Attributes:
        tolerance: bytes that the test of now may leave.
        any_used: whether it has used any owner, or one is ending.
        renewals: what the last tests left under owners, which the next ones may put others in the place of.
        grown: what has grown under each owner that is ending, by its label.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self.tolerance = 0
        self.any_used = False
        self.renewals = Renewals(watched.births)
        self._users: dict[int, Owner] = {}
        self.grown: dict[str, list[Finding]] = {}
        self._passed: list[Finding] = []

    def forget(self) -> None:
        """Let go of what was found: the test was judged, or another one begins."""
        self.any_used = False
        self._users.clear()
        self.grown.clear()
        self._passed.clear()

    def used(self, owners: Iterable[Owner], *, allowed: int | None = None) -> None:
        """Note that the test uses some owners: what it leaves under them may be growth.

        Args:
            owners: those that are alive.
            allowed: bytes that it may leave there, if not what it may leave of its own.
        """
        for owner in owners:
            self.any_used = True
            if id(owner) not in self._users:
                self._users[id(owner)] = owner
                owner.ledger.begin_turn(self.tolerance if allowed is None else allowed)

    def ending(self, owner: Owner) -> None:
        """Judge what has grown under an owner that is about to end, and still holds all that it held for the tests."""
        if not owner.ledger.may_grow or not any(owner is other for other in self._watched.ownership.live):
            return
        self.any_used = True
        now = self._watched.counters.read()
        # Again even where its last test was read: others may have emptied since what they had filled.
        claims = Claims(self._watched.ownership.live)
        for key in COUNTED:
            claims.unclaimed(key, self._watched.ownership.new_items(key, now, None, ()))
        note_growth([owner], claims, frozenset(), now, self._watched.ownership.baseline)
        # What it reached is not to be found there as a holder.
        del claims
        self.grown[owner.label] = growth_of(owner, self._watched.stacks.stacks_at, now, self._watched.makers.of_item)
        self._report([owner])

    def add(self, owner: Owner, grown: Sequence[Finding]) -> None:
        """Add to what has grown under an owner that is about to end."""
        if grown:
            self.any_used = True
            self.grown.setdefault(owner.label, []).extend(grown)

    def note(self, claims: Claims, heap: HeapReading, born: Sequence[Newborn], now: Counters) -> None:
        """Write down what lies under the owners that the test used, or under which it left something."""
        self.renewals.note(claims, [each.item for each in born if is_tensor(each.item)], heap)
        before = self._watched.ownership.baseline
        claimed = set(map(id, heap.claimed.values()))
        changed = [
            owner
            for owner in self._watched.ownership.live
            if id(owner) in claimed
            or any(owner.items.get(key, set()) - before.items.get(key, {}).keys() for key in COUNTED)
        ]
        self.used(owner for owner in changed if owner.has_settled)
        known = [owner for owner in self._users.values() if not owner.ledger.is_empty]
        wanted = {id(owner): owner for owner in (*changed, *known)}
        note_growth(wanted.values(), claims, heap.claimed.keys(), now, before)

    def renew(self, found: Renewal) -> None:
        """Write down what took the place of what under owners, in the middle of no reading."""
        for owner in self._watched.ownership.live:
            owner.storages = {key: text for key, text in owner.storages.items() if key not in found.gone}
            owner.ledger.forget(found.gone)
        for key, (owner, size) in found.fresh.items():
            owner.storages.setdefault(key, owner.stage)
            owner.ledger.take(key, size)

    def report_limits(self) -> None:
        """Report the owners that the test used and that have grown past the limit."""
        self._report(self._users.values())

    def _report(self, owners: Iterable[Owner]) -> None:
        limit = self._watched.policy.growth
        if limit is not None:
            for owner in owners:
                self._passed += limit_passed(owner, limit, self._watched.stacks.stacks_at)

    def with_growth(self, verdict: Verdict) -> Verdict:
        """Return the verdict with what has grown under the owners that ended, or past the limit."""
        of_owners = {
            label: (*found, *rest_of(self.grown.get(label, ()), found))
            for label in {**verdict.of_owners, **self.grown}
            for found in [verdict.of_owners.get(label, ())]
        }
        findings = (*verdict.findings, *self._passed)
        return replace(verdict, findings=findings, of_owners=of_owners)


class FullReadings:
    """Takes the full readings of one watch.

    Args:
        watched: what is followed.
        in_use: notes what the owners that are alive hold, where a test is over.

    Attributes:
        subject: the test of now, as a later finding calls it.
        any_kept: whether a memo has kept values so far, whose use is noted test by test.
        distinguished: what of this judgement's items libraries are excused for; None before its first reading.
        values: the cached values among its storages.
    """

    def __init__(self, watched: Watched, in_use: OwnersInUse) -> None:
        self._watched = watched
        self._in_use = in_use
        self._library_items = LibraryItems(watched.makers)
        self._cached_values = CachedValues()
        self.subject = ""
        self.any_kept = False
        self.distinguished: Sorted | None = None
        self.values = SortedValues()

    def mark(self) -> None:
        """Note which of the caches that keep values the last test has used."""
        self._cached_values.mark()

    def begin(self) -> None:
        """Begin a judgement, whose first reading settles what libraries are excused for."""
        self.distinguished = None

    def forget(self) -> None:
        """Let go of the caches that the values were found in."""
        self.values = SortedValues()

    @property
    def listed(self) -> tuple[NotMeasured, ...]:
        """Return what libraries were excused for, and which cards' allocations could not be listed."""
        excused = () if self.distinguished is None else self.distinguished.listed
        return (*excused, *self.values.listed, *self._watched.device_memory.not_measured)

    def read(
        self, case: Case, *, last: Deep | None = None, notes: bool = False, walk: SharedWalk | None = None
    ) -> Deep:
        """Return a full reading, without what libraries are excused for; that is settled with a judgement's first.

        Args:
            case: what is judged.
            last: an earlier reading, if nothing has been done since by which an object could have gone.
            notes: whether what the owners that are alive hold is noted.
            walk: the walk over the heap to ask, if it is shared with others.
        """
        if case.things is not None:
            last = Deep.of_no_heap(len(case.subjects), case.seen)
        with sharing_walk(walk) as walk:
            deep = self._read(case, notes=notes, walk=walk, last=last)
            if self.distinguished is None:
                self.values = self._cached_values.sort(
                    deep.heap.held, self._watched.caches.known(), self.subject, case.known or walk
                )
                self.any_kept = self._cached_values.any_kept
                new = {
                    key: {name: size for part in deep.readings for name, size in part.items.get(key, {}).items()}
                    for key in JUDGED
                }
                unheld = unheld_threads(new["threads"], case.known or walk, case.context.born)
        now = self._watched.counters.read()
        if self.distinguished is None:
            tensors = [(address, 1) for device, address in deep.heap.alive if device == "cpu"]
            items = NewItems(
                new,
                tensors,
                self.values.natively,
                unheld,
                lambda: of_library(replace(case.context, walk=None)) is not None,
                case.context.midway,
            )
            self.distinguished = self._library_items.sort(items, now, self.subject)
        return deep.settled(self.distinguished, now).without(self.values.excused)

    def _read(self, case: Case, *, notes: bool, walk: SharedWalk, last: Deep | None) -> Deep:
        """Return a full reading as it is; for the arguments see `read`."""
        watched = self._watched
        now = watched.counters.read()
        claims = Claims(watched.ownership.live)
        born: Sequence[Newborn] = ()
        if last is None:
            survey = survey_births(watched.births)
            heap = read_heap(watched.births, claims, case.ended, case.seen, survey)
            born = survey[1]
            del survey
        else:
            heap = last.heap
        explained = heap.new_on_cpu + self._named_shared_memory(now)
        storages = {**dict.fromkeys(heap.alive, 0), **{held.key: held.bytes for held in heap.held}}
        cards = watched.device_memory.new_items(now, now.devices, storages, watched.ownership.baseline)
        readings: list[Reading] = []
        for subject in case.subjects:
            items: dict[str, Mapping[str, int]] = {}
            for key in (*now.items, "globals"):
                items[key] = watched.ownership.new_items(key, now, subject, case.ended)
                # No object stands for a setting.
                if subject is None and key != "globals":
                    items[key] = claims.unclaimed(key, items[key])
            items |= self._idle_pools(now, subject, case.ended)
            for key in [key for key in items if key.startswith("arena ")]:
                items[key] = _without_tensors(key.partition(" ")[2], items[key], heap.alive)
            tensors: dict[str, dict[str, int]] = {}
            for held in heap.held:
                if held.owner is subject:
                    tensors.setdefault(f"tensors {held.key[0]}", {})[held.name] = held.bytes
            items |= tensors
            items |= self._own_allocations(now, subject)
            if subject is None:
                items |= {key: _unowned_on_card(key, found, claims) for key, found in cards.items()}
                items["unreadable"] = dict.fromkeys(heap.unreadable, 1)
                judged = {held.key for held in heap.held}
                known = None if last is None else last.readings[len(readings)].items["lru-cache"]
                items["lru-cache"] = watched.caches.held(born, judged, walk) if known is None else known
            readings.append(Reading(items, self._levels(now, subject, case.ended, explained)))
        if notes and case.final and last is None:
            self._in_use.note(claims, heap, born, now)
        return Deep(tuple(readings), heap, explained)

    def _named_shared_memory(self, now: Counters) -> int:
        """Return the bytes of the new files in /dev/shm that are mapped here: whoever's they are, they have names."""
        before = self._watched.ownership.baseline
        new = now.items.get("shared-memory", {}).keys() - before.items.get("shared-memory", {}).keys()
        mapped = new & mapped_shared_memory([os.getpid()]) if new else set()
        return sum(map(shared_file_bytes, mapped))

    def _own_allocations(self, now: Counters, owner: Subject) -> dict[str, dict[str, int]]:
        """Return the driver's allocations that an owner's setup made and that are still there."""
        found = {}
        for key, names in () if owner is None else owner.items.items():
            if names and key.startswith("allocations "):
                there = self._watched.device_memory.all_items(now, key.partition(" ")[2], {}).get(key, {})
                found[key] = {name: size for name, size in there.items() if name in names}
        return found

    def _idle_pools(self, now: Counters, subject: Subject, ended: Sequence[Owner]) -> dict[str, dict[str, int]]:
        """Return what the driver's memory pools keep of what a subject has freed."""
        found = {}
        for key in now.amounts:
            share = self._watched.ownership.share(key, now, subject, ended) if key.startswith(MEMORY_POOL) else None
            if share is not None and share > 0:
                found[key] = {IDLE_POOL: share}
        return found

    def _levels(self, now: Counters, subject: Subject, ended: Sequence[Owner], explained: int) -> dict[str, int | None]:
        """Return by how much each level is above what it should be, as far as nothing finer explains it."""
        levels: dict[str, int | None] = {}
        for key in now.amounts:
            share = self._watched.ownership.share(key, now, subject, ended)
            if key.startswith(("allocated ", "reserved ", MEMORY_POOL)):
                continue  # their parts are judged one by one
            if key.startswith("driver ") and self._watched.device_memory.lists_allocations(key.partition(" ")[2]):
                continue
            if share is not None and subject is None and key == "host-memory":
                share -= explained
            levels[key] = share
        return levels

    def climb(
        self,
        case: Case,
        above: Callable[[Deep], Sequence[Metric]],
        give_back: Callable[[Rung], bool],
        walk: SharedWalk,
    ) -> tuple[list[LadderStep[Deep]], frozenset[Key]]:
        """Return the readings after each rung that a plain test may have to climb, and the storages behind frozen ones.

        Everything has been collected by now.  A storage is behind a frozen holder where the test itself has frozen it.

        Args:
            case: what is judged.
            above: which metrics of a reading are not back.
            give_back: does what a rung does; False where there is nothing to act on.
            walk: the walk over the heap to ask; it is closed before anything is done.
        """
        first = self.read(case, notes=True, walk=walk)
        if case.things is not None:
            return [LadderStep(Rung.RAW, first, 0.0)], frozenset()
        if self._tries_blas_handles(first):
            walk.close()
            first = self.read(case)
        steps: list[LadderStep[Deep]] = []
        frozen: frozenset[Key] = frozenset()
        if case.final and any_frozen() and not self._watched.froze_before and above(first):
            walk.close()
            # Undoes what this test froze; a freeze that was there before, or an owner's, is not to be undone.
            frozen = behind_frozen_holders({held.key for held in first.heap.held}, case.context)
            hidden = thaw(self._watched.births.froze_in, first.heap.held, case.seen)
            steps = [LadderStep(Rung.RAW, first.with_hidden(hidden), 0.0)]
            steps.append(LadderStep(Rung.UNFREEZE, self.read(case), 0.0))

        has_cards = bool(self._watched.counters.read().devices)

        def is_settled(deep: Deep) -> bool:
            # At which rung it comes back is a diagnosis; whether it is a leak may be known before. Of a tensor's memory
            # that is not on a card no pool has a part, and beside cards only the heap gives back anything here.
            late = [metric for metric in above(deep) if metric.rung.order > Rung.COLLECT.order]
            left = [metric for metric in above(deep) if metric.key != "tensors cpu"] if has_cards else late
            return not left or not (self._watched.policy.explain or late)

        def read_after(rung: Rung, before: Deep) -> Deep:
            # What is free in the process's heap, or pinned, no object holds.
            return self.read(case, last=before if rung is Rung.CLEAR_HOST_CACHE else None)

        if not is_settled(first):
            walk.close()
        steps = climb(
            lambda: first,
            is_settled,
            rungs=_RUNGS,
            climbed=steps or [LadderStep(Rung.RAW, first, 0.0)],
            give_back=give_back,
            read_after=read_after,
        )
        return steps, frozen

    def _tries_blas_handles(self, deep: Deep) -> bool:
        """Return whether some allocations are known now: handles that torch keeps for the next thread, or a trial's.

        What a second run of the same call does not take again is a first use.
        """
        found = False
        for key, items in deep.readings[0].items.items():
            if not key.startswith("allocations "):
                continue
            device = key.partition(" ")[2]
            trial = self._watched.handles.tried(int(device.rpartition(":")[2]), items)
            known = {*trial.kept, *(allocation_name(address) for address, _ in trial.taken)}
            if known:
                self._watched.device_memory.forget_allocations(device, known)
                found = True
        return found


def _unowned_on_card(key: str, items: Mapping[str, int], claims: Claims) -> Mapping[str, int]:
    """Leave out what a live owner holds: other libraries' arrays, gradients of its tensors that Python has not seen."""
    if resource_of(key) is not None:
        return claims.unclaimed(key, items)
    if not items or not key.startswith("native "):
        return items
    starts = {name: int(name.rpartition(" ")[2], 16) for name in items}
    held = [address for _, address in claims.by_storage]
    return {
        name: size
        for name, size in items.items()
        if not any(starts[name] <= address < starts[name] + size for address in held)
    }


def _without_tensors(device: str, items: Mapping[str, int], alive: Iterable[Key]) -> dict[str, int]:
    """Leave out the parts of arenas under a live tensor: those are the tensor's."""
    if not items:
        return {}
    parts = {
        f"{pool.tag} at {address:#x}": (address, length)
        for pool in announced_pools()
        if pool.kind == "arena" and pool.device == device
        for address, length in pool.ranges
    }
    tensors = [(address, 1) for where, address in alive if where == device]
    return {name: size for name, size in items.items() if name in parts and not common([parts[name]], tensors)}

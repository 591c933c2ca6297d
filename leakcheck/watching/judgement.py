"""The judgement of a suspect test: readings up the ladder, who holds what is left, findings, and what gives it back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.explaining.explain import Explanation
from lowtide.leakcheck.findings import item_findings
from lowtide.leakcheck.findings.causes import CommonCause, Leak, by_cause, with_causes
from lowtide.leakcheck.findings.empty_pools import with_pool_holders
from lowtide.leakcheck.findings.heap_file import HeapFile
from lowtide.leakcheck.findings.host_memory import with_memory_holder, with_native_holder
from lowtide.leakcheck.findings.owner_growth import merged
from lowtide.leakcheck.findings.remedies import (
    DeferredRemedies,
    UnprovenLeak,
    actions_for,
    defer,
    prove,
    try_actions,
    try_deferred,
    try_holders,
    with_change,
)
from lowtide.leakcheck.findings.running_threads import works_for
from lowtide.leakcheck.findings.storage_holders import Context, Explained, explain_storages, marked_as_frozen
from lowtide.leakcheck.findings.storage_watch import StorageWatch
from lowtide.leakcheck.findings.tensor_findings import TensorLeak, frames, tensor_leaks, with_free_beside, with_stage
from lowtide.leakcheck.judging.device_memory import IDLE_POOL, MEMORY_POOL
from lowtide.leakcheck.judging.judge import FROZEN, REMEDIES_SHARE, Budget, judge, listed, missing
from lowtide.leakcheck.judging.ladder import LadderStep, collect, release
from lowtide.leakcheck.judging.metrics import NOT_OF_PYTHON, Metric, Reading, may_be_of_libraries, plain_metrics
from lowtide.leakcheck.judging.storages import Key, live_keys, tensors_in
from lowtide.leakcheck.resources.first_use import excused_by_libraries
from lowtide.leakcheck.resources.library_caches import Emptied, empty_library_caches
from lowtide.leakcheck.resources.resource import Rung
from lowtide.leakcheck.watching.full_reading import Case, Deep, FullReadings, OwnersInUse, Unsettled
from lowtide.leakcheck.watching.watched import Thing, Verdict, Watched
from lowtide.probes.device.torch_allocator import any_graph_alive
from lowtide.probes.heap.graph import Graph, NewBehindKnown, References
from lowtide.probes.heap.holders import SharedWalk
from lowtide.probes.heap.stand_ins import stand_ins
from lowtide.probes.objects.foreign import thread_key
from lowtide.probes.objects.identities import Identities
from lowtide.probes.objects.listed import Census, collector_paused
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import threading
from lowtide.reports.schema import Finding, Frame, NotMeasured
from lowtide.reports.statement import noted

_MOST_CLEARINGS = 5
"""How often a process's BLAS workspaces are cleared to find them: the next test allocates them again."""

_OF_BLOCKS = ("native ", "workspaces ", "in-flight ", "cuda-ipc ")
"""The beginnings of the keys of blocks of torch's allocator in which no tensor lies."""

_MOST_KNOWN = 10_000
"""Objects on known ways that are remembered; of a linked list the end alone may have as many."""

_Read = Callable[[], Deep]


class KnownWays:
    """The ways to what was explained earlier in the process: what hangs on their end takes no walk of the heap.

    A way is never taken on trust. It is walked again, from its module or from a new thread on, through objects that
    each refer to the next one now; and only if nothing else in the process refers to what is new behind it is that all
    that there is to say. A running thread's own stack does, which nobody can read: as often as an earlier one's did, of
    which a walk over the whole heap has shown that nothing else refers to it, is nothing else here, either. Holds
    identities only.
    """

    def __init__(self) -> None:
        self._known: dict[int, None] = {}
        self._from_c: set[References] = {()}

    def note(self, explanations: Iterable[Explanation | CommonCause]) -> None:
        """Remember the ways to what was explained."""
        for found in explanations:
            if found.path and found.path[0].type == "module":
                self.add(found.through)

    def add(self, through: Collection[int]) -> None:
        """Remember objects on such a way."""
        if len(through) <= _MOST_KNOWN:
            self._known.update(dict.fromkeys(through))
        for identity in list(self._known)[: max(0, len(self._known) - _MOST_KNOWN)]:
            del self._known[identity]

    def to(
        self, tensors: Collection[int], names: Mapping[str, Sequence[str]], born: Collection[int] | None
    ) -> SharedWalk | Unsettled | None:
        """Return a walk of what is new behind the ways, if that answers who holds some objects.

        It does if each of them is found there and nothing else refers to anything new that is: then they are no garbage
        either. The caller must not hold them. Where something else may refer to it, it is returned what; else None.

        Args:
            tensors: the identities of some of them, those of the oldest first.
            names: those of the things for which others stand, by resource.
            born: the identities of what was born in the test.
        """
        if not isinstance(born, Identities):
            return None
        with collector_paused():
            graph = NewBehindKnown(self._known, born)
            standing = _standing_for(names, graph.census()) if names and graph.roots else []
            references = None
            if graph.roots and standing is not None:
                # What a thread works for is asked for with it, who holds that too.
                wanted = tuple(dict.fromkeys((*tensors, *standing, *_new_work(names.get("threads", ()), born))))
                references = graph.unseen_references(wanted) if wanted else None
            if references in self._from_c:
                return SharedWalk(graph)
            found = None
            if references is not None:
                leads, older = (
                    frozenset(id(graph.objects[node]) for node in nodes.tolist())
                    for nodes in graph.leading_to(graph.find_ids(wanted), born)
                )
                found = Unsettled(references, wanted, leads, older)
            graph.close()
            return found

    def hold(self, leaks: Sequence[UnprovenLeak]) -> bool:
        """Return whether such ways lead to all that some leaks have left; else it may be garbage.

        Args:
            leaks: they are looked for among the objects that were new with them.
        """
        left = {key for leak in leaks for key in leak.left()}
        new = np.fromiter({identity for leak in leaks for identity in leak.new}, np.int64)
        with collector_paused(), contextlib.closing(SharedWalk(NewBehindKnown(self._known, Identities(new)))) as walk:
            return left <= {key for _, keys in tensors_in(left, walk) for key in keys}

    def settle(self, asked: Unsettled, graph: Graph, born: Collection[int] | None) -> None:
        """Learn from a walk over the whole heap whether what was asked for has no holders but those found then.

        Args:
            asked: what.
            graph: the heap.
            born: the identities of what was born in the test.
        """
        assert isinstance(born, Identities)
        leads, older = graph.leading_to(graph.find_ids(asked.wanted), born)
        # What no older object refers to is C's, as the method that a thread runs; but what C runs at exit is a root.
        others = [node for node in leads.tolist() if id(graph.objects[node]) not in asked.leads]
        is_root = any(node < len(graph.roots) for node in others)
        if not is_root and asked.older.issuperset(id(graph.objects[node]) for node in older.tolist()):
            self._from_c.add(asked.references)


def _standing_for(names: Mapping[str, Iterable[str]], census: Census) -> list[int] | None:
    """Return the identities of the objects that stand for some things; None where one of these has no object."""
    found = stand_ins(census, {key: [*own] for key, own in names.items()})
    is_complete = all((key, name) in found for key, own in names.items() for name in own)
    return [*dict.fromkeys(map(id, found.values()))] if is_complete else None


def _new_work(names: Collection[str], born: Collection[int]) -> list[int]:
    """Return the identities of what some threads work for, by the threads' names, as far as it is new."""
    running = (thread for thread in (threading.enumerate() if names else ()) if thread_key(thread) in names)
    return [id(item) for thread in running for item in works_for(thread) if id(item) in born]


class WatchJudge:
    """Judges what one watch finds suspect.

    Args:
        watched: what is followed.
        in_use: what tests leave under owners that live.

    Attributes:
        readings: the full readings.
        ways: those to what was explained so far.
        trials: tries what gives leaks back.
    """

    def __init__(self, watched: Watched, in_use: OwnersInUse) -> None:
        self._watched = watched
        self._in_use = in_use
        self.readings = FullReadings(watched, in_use)
        self.trials = RemedyTrials(watched)
        self.ways = KnownWays()
        # What libraries kept on cards beside torch, and have given back for the judgement.
        self._emptied = Emptied()

    def __call__(self, case: Case, *, card_came: bool) -> tuple[Verdict, Deep]:
        """Return the verdict on a test, and on the owners that ended with it, with the last reading.

        Args:
            case: what.
            card_came: whether a card was first used in the test: what that takes is known.
        """
        self.readings.begin()
        self._emptied = Emptied()
        metrics = plain_metrics(["cpu", *self._watched.counters.read().devices], case.tolerance)
        with contextlib.closing(SharedWalk()) as walk:
            climb = functools.partial(
                self.readings.climb, above=lambda deep: _above(metrics, deep), give_back=self._give_back, walk=walk
            )
            steps, frozen = climb(case)
            known = case.known
            if known is not None and not _suffices(known, case, _above(metrics, steps[0].reading), steps[0].reading):
                # There is more, or an owner has got it, of which a collection may give back some.
                known.close()
                walk.close()
                collect()
                case = replace(case, known=None, things=None)
                steps, frozen = climb(case)
            if case.final:
                self._in_use.report_limits()
            for key, owner in steps[0].reading.heap.claimed.items():
                owner.storages.setdefault(key, owner.stage)
            context = replace(case.context, hints=(*case.context.hints, *self.readings.values.hints))
            verdict = self._verdict(case, metrics, steps, frozen, context, case.known or walk, card_came=card_came)
        return verdict, steps[-1].reading

    def _give_back(self, rung: Rung) -> bool:
        """Do what a rung of the ladder does; return False where there is nothing to act on."""
        if not release(rung):
            return False
        if rung is Rung.EMPTY_CACHE:
            self._emptied = empty_library_caches()
        return True

    def _verdict(
        self,
        case: Case,
        metrics: Sequence[Metric],
        steps: Sequence[LadderStep[Deep]],
        frozen: frozenset[Key],
        context: Context,
        walk: SharedWalk,
        *,
        card_came: bool,
    ) -> Verdict:
        """Say what each subject has left, explained, with the remedies tried for which now is the time."""
        policy = self._watched.policy
        left = {held.key: held.owner for held in steps[-1].reading.heap.held if policy.explain}
        notes = case.final and policy.remedies != "now"
        # Until here nothing but reading: whoever asks for a holder asks one walk.
        with contextlib.closing(walk):
            above = {metric.resource for metric in _above(metrics, steps[-1].reading)}
            if policy.explain and "host-memory" in above:
                # Before the walk is made, which then has them in it.
                walk.buffers_besides(context.old_arrays)
            if policy.explain and case.unsettled is not None:
                self.ways.settle(case.unsettled, walk.graph(), case.context.born)
            # What the setup of a fixture has made was there before the test that its end is judged with.
            contexts = [replace(context, walk=walk), replace(context, walk=walk, born=None)]
            explained = [
                marked_as_frozen(explain_storages([key for key in left if (left[key] is None) is of_test], of), frozen)
                for of_test, of in zip((True, False), contexts, strict=True)
            ]
            leaks = [
                self._leaks_of(case, turn, metrics, steps, explained[turn > 0], contexts[turn > 0])
                for turn in range(len(case.subjects))
            ]
            self.ways.note(found for part in explained for found in part.by_key.values())
            del explained
            caused = [
                with_causes(found, contexts[turn > 0]) if policy.explain else (found, [None] * len(found))
                for turn, found in enumerate(leaks)
            ]
            leaks, of_leaks = [found for found, _ in caused], [known for _, known in caused]
            self.ways.note(cause for known in of_leaks for cause in known if cause is not None)
            del caused
            for leak in leaks[0]:
                self.ways.add(leak.through if isinstance(leak, item_findings.ItemLeak) else ())
            watches = _watches_of(leaks, walk) if notes else {}
            if case.heap is not None and any(leaks):
                _keep(case.heap, leaks, context, walk)
        for turn, owner in enumerate(case.ended, 1):
            grown = self._in_use.grown.get(owner.label, ())
            leaks[turn] = [replace(leak, finding=merged(leak.finding, grown)) for leak in leaks[turn]]
        things = [_things_of(leak) for leak in leaks[0]]
        unproven = [DeferredRemedies() for _ in case.subjects]
        read = functools.partial(self.readings.read, case)
        if case.final and policy.remedies == "now":
            findings = self.trials.try_now(leaks, context, read)
        elif notes and policy.remedies == "later":
            findings, unproven = self.trials.defer(leaks, watches, context, read)
        else:
            findings = [
                [
                    with_change(leak) if policy.remedies == "never" and policy.names_changes else leak.finding
                    for leak in found
                ]
                for found in leaks
            ]
            # Nothing is tried, but whether it is there still is asked later.
            unproven = [
                defer([leak for leak in found if isinstance(leak, TensorLeak)], watches) if notes else none
                for found, none in zip(leaks, unproven, strict=True)
            ]
        causes = [
            {id(finding): cause for finding, cause in zip(found, known, strict=True)}
            for found, known in zip(findings, of_leaks, strict=True)
        ]
        leaks.clear()
        about: dict[str, frozenset[Thing]] = {}
        for finding, of in zip(findings[0], things, strict=True):
            about[finding.fingerprint] = about.get(finding.fingerprint, frozenset()) | of
        own, excused = self._excused(findings[0], about, card_came=card_came)
        reported = [by_cause(found, known) for found, known in zip((own, *findings[1:]), causes, strict=True)]
        for finding in reported[0]:
            for part in finding.parts:
                about[finding.fingerprint] |= about[part.fingerprint]
        labels = [owner.label for owner in case.ended]
        return Verdict(
            findings=reported[0],
            not_measured=(
                *excused,
                *self.readings.listed,
                *self._emptied.notes,
                *(() if case.heap is None else case.heap.not_measured),
            ),
            of_owners=dict(zip(labels, reported[1:], strict=True)),
            swept=case.known is None and case.things is None,
            unproven=unproven[0],
            unproven_of_owners=dict(zip(labels, unproven[1:], strict=True)),
            things=about,
        )

    def _excused(
        self, findings: Sequence[Finding], about: Mapping[str, frozenset[Thing]], *, card_came: bool
    ) -> tuple[tuple[Finding, ...], tuple[NotMeasured, ...]]:
        """Return the test's findings without those that may be a library's, and these."""
        now = self._watched.counters.read()
        return excused_by_libraries(
            findings,
            # What a card's first use takes is known where the card was warmed up.
            now if card_came else self._watched.ownership.baseline,
            now,
            self._watched.first_use,
            any_graph_alive,
            lambda finding: [(key, str(name)) for _, key, name in about[finding.fingerprint]],
            self._emptied.prepared_by,
        )

    def _leaks_of(
        self,
        case: Case,
        turn: int,
        metrics: Sequence[Metric],
        steps: Sequence[LadderStep[Deep]],
        explained: Explained,
        context: Context,
    ) -> list[Leak]:
        """Return what one subject has left: what, since which stage, from where, held by whom."""
        subject = case.subjects[turn]
        own = [LadderStep(step.rung, step.reading.readings[turn], step.seconds) for step in steps]
        context = replace(context, module=(subject.where if subject is not None else "") or context.module)
        found: list[Leak] = []
        judged = judge(metrics, Reading(), own, stage=case.stage, cycle=1)
        for finding, metric in zip(judged.findings, judged.metrics, strict=True):
            if finding.resource == "tensors" and finding.verdict not in NOT_OF_PYTHON and finding.bytes:
                held = [
                    [
                        storage
                        for storage in step.reading.heap.held
                        if storage.owner is subject and storage.key[0] == finding.device
                    ]
                    for step in steps
                ]
                found += tensor_leaks(held, [step.rung for step in steps], explained, context)
                continue
            leak = self._item_leak(case, turn, finding, metric.key, own)
            # By the devices of now: a card's first use is what takes most.
            of_libraries = may_be_of_libraries(leak.finding, self._watched.counters.read().devices)
            named = [
                with_memory_holder(
                    item_findings.with_fingerprint(part, context.module), context, may_be_of_libraries=of_libraries
                )
                for part in with_pool_holders(leak, context)
            ]
            found += [
                with_native_holder(part, context) for part in named if part.explanation is not None or not of_libraries
            ]
        with_free = iter(with_free_beside([leak for leak in found if isinstance(leak, TensorLeak)]))
        return [next(with_free) if isinstance(leak, TensorLeak) else leak for leak in found]

    def _item_leak(
        self, case: Case, turn: int, finding: Finding, key: str, steps: Sequence[LadderStep[Reading]]
    ) -> item_findings.ItemLeak:
        """Return a finding about things with names, with these, and since when they are there."""
        watched, subject = self._watched, case.subjects[turn]
        names = item_findings.frozen_items() if key == FROZEN else steps[0].reading.items.get(key, {})
        if finding.resource == "reserved" and finding.remedy is None:
            # Emptying the cache gave back the segments of pools that nobody holds any more.
            names = steps[-1].reading.items.get(key, names)
        if subject is None:
            filled = [watched.caches.stage_of(name) for name in names]
            level = _level_of(key, finding.device)
            since = next(filter(None, filled), "") or watched.ownership.since(level, names) or case.stage
        else:
            since = subject.stage
        finding = with_stage(finding, since)
        more = "" if self.readings.distinguished is None else self.readings.distinguished.addition(key, names)
        finding = msgspec.structs.replace(
            noted(finding, more) if more else finding,
            holder=listed(key, names),
            allocated_at=self._stack_of(finding.device, key, names),
            changed=(item_findings.UNFROZEN,) if key == FROZEN and finding.remedy is not None else (),
        )
        leak = item_findings.ItemLeak(finding, key, names, turn, cached=watched.caches.of(names))
        if key != "globals":
            return leak
        return item_findings.with_changes(
            leak, watched.ownership.left(watched.counters.read(), subject, case.ended), watched.environment.place_of
        )

    def _stack_of(self, device: str, key: str, names: Mapping[str, int]) -> tuple[Frame, ...]:
        """Return where the largest of some blocks was allocated."""
        if not names or not key.startswith(("native ", "workspaces ", "cuda-ipc ")):
            return ()
        largest = int(max(names, key=lambda name: names[name]).rpartition(" ")[2], 16)
        return frames(self._watched.stacks.stacks_at(device, [largest]).get(largest, ()))


def _above(metrics: Sequence[Metric], deep: Deep) -> list[Metric]:
    """Return the metrics of a reading that are not back."""
    nothing = Reading()
    return [item.metric for reading in deep.readings for item in missing(metrics, nothing, reading)]


def _suffices(known: SharedWalk, case: Case, above: Sequence[Metric], deep: Deep) -> bool:
    """Return whether what is left is nothing but what a case is of, or tensors and things in a walk of known ways."""
    left = {
        metric.key: {*deep.readings[0].items.get(metric.key, ())} for metric in above if metric.resource != "tensors"
    }
    if case.things is not None:
        return left == {key: {*names} for key, names in case.things.items()}
    held = {storage.key for storage in deep.heap.held}
    found = {key for _, keys in tensors_in(held, known) for key in keys}
    return held <= found and left.keys() <= STANDING and _standing_for(left, known.census()) is not None


STANDING = frozenset({"file-descriptors", "processes", "shared-memory", "threads"})
"""Resources for which objects stand that hold what they have as long as they live."""


def _level_of(key: str, device: str) -> str:
    """Return the key of the level that shows since when something on a card is there."""
    return f"driver {device}" if key == f"allocations {device}" or key == f"unlisted {device}" else key


def _things_of(leak: Leak) -> frozenset[Thing]:
    """Return what a leak is about."""
    if isinstance(leak, TensorLeak):
        return frozenset(("storage", device, address) for device, address in leak.keys)
    # A level is one thing, and has no names.
    names = () if leak.key == FROZEN else leak.names
    return frozenset(("item", leak.key, name) for name in names or ("",))


def _watches_of(leaks: Sequence[Sequence[Leak]], walk: SharedWalk) -> dict[int, StorageWatch]:
    """Return for each leak of tensors, by the identity of its sizes, what reports which of its storages are freed."""
    sizes = [leak.sizes for found in leaks for leak in found if isinstance(leak, TensorLeak)]
    return dict(zip(map(id, sizes), StorageWatch.of_each(sizes, walk), strict=True))


def _keep(file: HeapFile, leaks: Sequence[Sequence[Leak]], context: Context, walk: SharedWalk) -> None:
    """Keep the heap, with what the leaks are about."""
    found = [leak for of_subject in leaks for leak in of_subject]
    items: dict[str, list[str]] = {}
    for leak in found:
        if not isinstance(leak, TensorLeak):
            items.setdefault(leak.key, []).extend(leak.names)
    storages = {key for leak in found if isinstance(leak, TensorLeak) for key in leak.keys}
    file.keep(walk, born=context.born, storages=storages, items=items, roots=context.roots)


class RemedyTrials:
    """Tries what gives leaks back: with the verdict, or when nothing of the program runs any more."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._workspaces_cleared = 0
        self._in_vain: set[str] = set()

    def prove(self, each: Sequence[DeferredRemedies]) -> list[dict[str, Finding]]:
        """Return the findings of some subjects, by their fingerprints before, with what gave each back.

        Nothing of the program may run afterwards.
        """
        policy = self._watched.policy
        budget = Budget(REMEDIES_SHARE * policy.budget)
        return try_deferred(each, self._left_now, self._driver_bytes, policy.settle, budget)

    def defer(
        self, leaks: Sequence[Sequence[Leak]], watches: Mapping[int, StorageWatch], context: Context, read: _Read
    ) -> tuple[list[list[Finding]], list[DeferredRemedies]]:
        """Try what changes nothing that the next test could need; return the findings, and what is left for the end."""
        findings: list[list[Finding]] = []
        unproven = []
        for found in leaks:
            findings.append([])
            later: list[Leak] = []
            for leak in found:
                if isinstance(leak, item_findings.ItemLeak):
                    leak = self._confirmed(leak, read)
                is_over = False
                if isinstance(leak, item_findings.ItemLeak) and item_findings.is_harmless(leak):
                    leak = self._tried_harmless(leak, context, read)
                    is_over = not leak.endings or leak.finding.remedy is not None
                findings[-1].append(leak.finding)
                later += [] if is_over else [leak]
            unproven.append(defer(later, watches))
        return findings, unproven

    def try_now(self, leaks: list[list[Leak]], context: Context, read: _Read) -> list[list[Finding]]:
        """Return the findings with what gave each back: tensors first, which often hold all the rest.

        Args:
            leaks: of each subject; they are let go of on the way, since they hold what holds the tensors.
            context: what is known around them.
            read: takes a full reading.
        """
        findings = [[leak.finding for leak in found] for found in leaks]
        resources = {finding.resource for found in findings for finding in found}
        may_unfreeze = FROZEN in resources and not self._watched.froze_before
        places = [(turn, place) for turn, found in enumerate(leaks) for place in range(len(found))]
        tensors = [(at, leak) for at in places if isinstance(leak := leaks[at[0]][at[1]], TensorLeak)]
        items = [(at, leak) for at in places if isinstance(leak := leaks[at[0]][at[1]], item_findings.ItemLeak)]
        leaks.clear()
        proven = prove([leak for _, leak in tensors], context, may_unfreeze=may_unfreeze)
        for ((turn, place), _), finding in zip(tensors, proven, strict=True):
            findings[turn][place] = finding
        tensors.clear()
        cuts = dict.fromkeys(each.remedy.action for each in proven if each.remedy is not None and each.tried)
        after = read() if cuts else None
        for (turn, place), leak in items:
            if after is not None:
                leak = leak.without(leak.left(after.readings[leak.subject].items.get), "; ".join(cuts))
            if leak.held is not None:
                (findings[turn][place],) = try_holders([(leak, leak.held)], context)
                continue
            leak = self._confirmed(leak, read)
            actions = actions_for(leak, context.patience, may_unfreeze=may_unfreeze)
            findings[turn][place] = try_actions(leak, actions, self._left(leak, read), self._driver_bytes)
        return findings

    def _left_now(self, key: str) -> Mapping[str, int] | None:
        now = self._watched.counters.read()
        device = key.partition(" ")[2]
        if device not in now.devices:
            return now.items.get(key)
        if key.startswith(MEMORY_POOL):
            return {IDLE_POOL: now.amounts.get(key) or 0}
        # Only blocks are distinguished by what Python's tensors hold.
        storages = dict.fromkeys(live_keys() if key.startswith(_OF_BLOCKS) else (), 0)
        return self._watched.device_memory.all_items(now, device, storages).get(key)

    def _tried_harmless(self, leak: item_findings.ItemLeak, context: Context, read: _Read) -> item_findings.ItemLeak:
        """Return the leak with what waiting has shown."""
        waiting = replace(leak, endings=())
        mark = leak.finding.fingerprint
        # What was waited for in vain once is only looked at again: it was waited for before it was judged, too.
        actions = actions_for(waiting, 0.0 if mark in self._in_vain else context.patience, may_unfreeze=False)
        # Which threads there are shows without a reading of all that there is.
        of_names = leak.finding.resource in item_findings.HARMLESS
        left = (lambda: leak.left(self._left_now)) if of_names else self._left(leak, read)
        finding = try_actions(waiting, actions, left, self._driver_bytes)
        if of_names and (finding.remedy, finding.advice) == (None, leak.finding.advice):
            self._in_vain.add(mark)
        return replace(leak, finding=finding)

    def _confirmed(self, leak: item_findings.ItemLeak, read: _Read) -> item_findings.ItemLeak:
        if leak.finding.cause != "library-workspace" or leak.finding.resource != "tensors" or not leak.names:
            return leak
        is_first = self._watched.first_use.of_blas or self._workspaces_cleared >= _MOST_CLEARINGS
        self._workspaces_cleared += not is_first
        return item_findings.confirmed_workspaces(leak, self._left(leak, read), is_first=is_first)

    def _left(self, leak: item_findings.ItemLeak, read: _Read) -> Callable[[], Mapping[str, int]]:
        return lambda: leak.left(lambda key: read().readings[leak.subject].items.get(key, {}))

    def _driver_bytes(self) -> int:
        amounts = self._watched.counters.read().amounts
        return sum(amount or 0 for key, amount in amounts.items() if key.startswith("driver "))

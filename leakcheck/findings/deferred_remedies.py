"""Leaks whose remedies are tried when nothing of the program runs any more.

What gives a leak back changes the program: the next test may need the very thing, and a flag beside it may say that it
is there.  Until the end nothing is kept of a leak but identities, addresses and weak references.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lowtide.leakcheck.explaining.explain import Explanation
from lowtide.leakcheck.findings.empty_pools import pool_holder
from lowtide.leakcheck.findings.item_findings import ItemLeak, with_followers
from lowtide.leakcheck.findings.remedies import actions_for, prove, try_actions
from lowtide.leakcheck.findings.storage_holders import Context, explain_storages
from lowtide.leakcheck.findings.storage_watch import StorageWatch
from lowtide.leakcheck.findings.tensor_findings import TensorLeak
from lowtide.leakcheck.judging.judge import FROZEN, Budget
from lowtide.leakcheck.judging.storages import Key
from lowtide.probes.heap.holders import sharing_walk
from lowtide.reports.schema import Finding
from lowtide.reports.sizes import format_amount
from lowtide.reports.statement import noted

_NO_HOLDERS = ("threads", "globals")
"""The resources whose remedies change nothing by which a pool is held."""

Left = Callable[[str], "Mapping[str, int] | None"]
"""What there is now, by a metric's key: names, with bytes or 1 each; None where that cannot be read any more."""


@dataclass(eq=False)
class UnprovenLeak:
    """A leak of tensors.

    Attributes:
        finding: as far as it is known without trying anything.
        sizes: bytes of the storages, by storage.
        new: the identities of what the leak added to the program: they are on the suspect part of its path.
        watch: reports which of the storages are freed.
        change: code that lets go of it, as the program says; empty where there is none.
        came_back: when all of it was given back, by no trial; empty where it was not.
        replaced: in how many later tests something else of its kind, and no more of it, took its place.
    """

    finding: Finding
    sizes: Mapping[Key, int]
    new: frozenset[int]
    watch: StorageWatch
    change: str = ""
    came_back: str = ""
    replaced: int = 0

    def supersede(self, later: UnprovenLeak) -> None:
        """Stand from now on for what has taken its place, of which nothing is said."""
        self.sizes, self.new, self.watch, self.change = later.sizes, later.new, later.watch, later.change
        self.came_back = ""
        self.replaced += 1

    def note(self, when: str) -> None:
        """Note that the program itself has given it back by now, where it has.

        Args:
            when: since this was asked last.
        """
        if not self.came_back and self.watch.all_gone:
            self.came_back = when

    def left(self) -> dict[Key, int]:
        """Return the storages that are still there; another one at the address of one that went is not meant."""
        gone = self.watch.gone()
        return {key: size for key, size in self.sizes.items() if key not in gone}


@dataclass(frozen=True)
class DeferredRemedies:
    """What one subject left."""

    tensors: tuple[UnprovenLeak, ...] = ()
    items: tuple[ItemLeak, ...] = ()
    new: frozenset[int] = frozenset()

    def only(self, fingerprints: frozenset[str]) -> DeferredRemedies:
        """Return the part that these findings are about.

        And blocks of a workspace's size, though they pass for known: they are something else if they go with a tensor.
        """
        tensors = tuple(leak for leak in self.tensors if leak.finding.fingerprint in fingerprints)
        items = [
            item
            for item in self.items
            if item.finding.fingerprint in fingerprints or (tensors and item.finding.cause == "library-workspace")
        ]
        return DeferredRemedies(tensors, tuple(items), self.new)

    def __add__(self, other: DeferredRemedies) -> DeferredRemedies:
        return DeferredRemedies((*self.tensors, *other.tensors), (*self.items, *other.items), self.new | other.new)


def defer(leaks: Sequence[TensorLeak | ItemLeak], watches: Mapping[int, StorageWatch]) -> DeferredRemedies:
    """Return what is to be remembered of some leaks of one subject.

    By the identity of a tensor leak's sizes, `watches` report which of its storages are freed.
    """
    tensors = tuple(
        UnprovenLeak(
            leak.finding, leak.sizes, _new_in(leak.explanations.values()), watches[id(leak.sizes)], _change_of(leak)
        )
        for leak in leaks
        if isinstance(leak, TensorLeak)
    )
    items = [leak for leak in leaks if isinstance(leak, ItemLeak)]
    new = _new_in(item.explanation for item in items if item.explanation is not None)
    # Of two with one fingerprint, as a pool's pipes and another pipe, it would be unclear what is proven of which.
    counted = Counter(item.finding.fingerprint for item in items)
    distinguished = [item for item in items if counted[item.finding.fingerprint] == 1]
    return DeferredRemedies(tensors, tuple(replace(item, explanation=None) for item in distinguished), new)


def try_deferred(
    each: Sequence[DeferredRemedies],
    left: Left,
    driver: Callable[[], int],
    patience: float,
    budget: Budget | None = None,
) -> list[dict[str, Finding]]:
    """Return the findings of some subjects, with what gave each back; changes the program as it likes.

    By the fingerprints that they had before: what goes with a tensor is no library's workspace any more.

    Args:
        each: what each subject left.
        left: reads what there is now.
        driver: reads the driver's bytes of this process, on all cards.
        patience: seconds to wait for a thread to end.
        budget: how long may be spent on all of it; what is not tried then says so.
    """
    budget = budget or Budget()
    # Until something is changed.
    readings = functools.cache(left)
    every = [leak for subject in each for leak in subject.tensors]
    # What went before anything was tried, nothing that is tried gives back.
    there = {
        id(item): item.left(readings)
        for subject in each
        for item in subject.items
        if every or item.cached or item.endings or item.key == FROZEN
    }
    for leak in every:
        leak.note("by the end of the session")
    sizes = {id(leak): leak.left() for leak in every}
    new = frozenset().union(*(subject.new for subject in each), *(leak.new for leak in every))
    context = Context(born=new, is_over=True, patience=patience, budget=budget)
    explained = explain_storages({key for keys in sizes.values() for key in keys}, context).by_key
    # All together: what gives back the leak of one may give back another's too.
    done = iter(prove([_as_leak(leak, sizes[id(leak)], explained) for leak in every], context))
    readings.cache_clear()
    found = [{leak.finding.fingerprint: _with_return(next(done), leak) for leak in subject.tensors} for subject in each]
    # Again, since what was tried for the tensors may have changed by which way a pool is held.
    holders = _PoolHolders([item for subject in each for item in subject.items], context)
    for subject, findings in zip(each, found, strict=True):
        cuts = dict.fromkeys(each.remedy.action for each in findings.values() if each.remedy is not None and each.tried)
        for item in map(with_followers, subject.items):
            with sharing_walk() as walk:
                draft = item.among(there.get(id(item), item.names))
                # Its cache may have been emptied for another subject's tensors already.
                emptied = [
                    action.code
                    for action in (actions_for(draft, patience, may_unfreeze=True, walk=walk) if draft.cached else ())
                ]
                if cuts or emptied:
                    draft = draft.without(draft.left(readings), "; ".join(cuts or emptied))
                if not budget.is_spent and item.finding.resource == "reserved":
                    draft = replace(draft.among(draft.left(readings)), explanation=holders.of(item))
                actions = actions_for(draft, patience, may_unfreeze=True, walk=walk)
            finding = try_actions(draft, actions, functools.partial(item.left, left), driver, budget)
            if actions and draft.names:
                readings.cache_clear()
                holders.forget(draft)
            findings[item.finding.fingerprint] = finding
    return found


class _PoolHolders:
    """Who holds the private pools that some findings are about, found out for all of them by one walk."""

    def __init__(self, items: Sequence[ItemLeak], context: Context) -> None:
        self._waiting = [item for item in items if item.finding.resource == "reserved"]
        self._context = context
        self._known: dict[int, Explanation | None] = {}

    def of(self, item: ItemLeak) -> Explanation | None:
        """Return who holds the pools of one of them, each asked for once and in their order."""
        if id(item) not in self._known:
            with sharing_walk() as walk:
                context = replace(self._context, walk=walk)
                self._known = {id(each): pool_holder(each, context) for each in self._waiting}
        self._waiting = [each for each in self._waiting if each is not item]
        return self._known.pop(id(item))

    def forget(self, given_back: ItemLeak) -> None:
        """Note what was given back: what was cut for it may be on the way to others, or have been in front of it."""
        if given_back.finding.resource in _NO_HOLDERS:
            return
        cut = None if given_back.explanation is None else given_back.explanation.cut
        if cut is not None and not cut.ends_anyway:
            ways = [explanation.through for explanation in self._known.values() if explanation is not None]
            if cut.place is None or not any(cut.place.container in way for way in ways):
                return
        self._known.clear()


def _as_leak(leak: UnprovenLeak, sizes: Mapping[Key, int], explained: Mapping[Key, Explanation]) -> TensorLeak:
    return TensorLeak(leak.finding, sizes, {key: explained[key] for key in sizes if key in explained})


def _with_return(finding: Finding, leak: UnprovenLeak) -> Finding:
    """Return a finding, with what took its place, and when the program itself gave that back."""
    if leak.replaced:
        tests = format_amount(leak.replaced, "later tests")
        finding = noted(finding, f"; replaced in {tests}", trend="bounded")
    if not leak.came_back:
        return finding
    change = f"in the test itself: {leak.change}" if leak.change else None
    return noted(finding, f"; came back {leak.came_back}", advice=finding.advice or change)


def _change_of(leak: TensorLeak) -> str:
    cuts = {each.cut.code for each in leak.explanations.values() if each.cut is not None and each.cut.is_code}
    return "; ".join(sorted(cuts)) if len(cuts) == 1 else ""


def _new_in(explanations: Iterable[Explanation]) -> frozenset[int]:
    return frozenset().union(*(explanation.new for explanation in explanations))

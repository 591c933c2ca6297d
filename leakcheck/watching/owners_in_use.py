"""What tests leave under owners that live, and what has grown there when an owner ends or passes a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from lowtide.leakcheck.baseline.deep_reading import unclaimed
from lowtide.leakcheck.baseline.owners import Claims, Owner
from lowtide.leakcheck.baseline.records import Ownership
from lowtide.leakcheck.baseline.storages import HeapReading
from lowtide.leakcheck.findings.owner_growth import COUNTED, growth_of, limit_passed, note_growth, rest_of
from lowtide.leakcheck.watching.verdict import Verdict
from lowtide.probes.allocation_stacks import AllocationStacks
from lowtide.probes.host.counters import Counters
from lowtide.reports.schema import Finding


class OwnersInUse:
    """Follows the owners that the tests of one watch use.

    Args:
        read: reads the counters.
        ownership: who owns what.
        stacks: from where memory was allocated.
        limit: bytes by which an owner may grow before that is reported at once; None: when it ends.
    """

    def __init__(
        self, read: Callable[[], Counters], ownership: Ownership, stacks: AllocationStacks, limit: int | None
    ) -> None:
        self._read = read
        self._ownership = ownership
        self._stacks = stacks
        self._limit = limit
        self._tolerance = 0
        self._users: dict[int, Owner] = {}
        self._grown: dict[str, list[Finding]] = {}
        self._passed: list[Finding] = []

    def begin(self, tolerance: int) -> None:
        """A test begins, which may leave so many bytes."""
        self._tolerance = tolerance
        self._users.clear()

    @property
    def grown(self) -> Mapping[str, Sequence[Finding]]:
        """By the label of an owner that is ending, what has grown under it."""
        return self._grown

    def forget(self) -> None:
        """The test was judged."""
        self._grown.clear()
        self._passed.clear()

    def used(self, owners: Iterable[Owner], *, allowed: int | None = None) -> None:
        """The test uses these owners: what it leaves under them may be growth.

        Args:
            owners: those that are alive.
            allowed: bytes that it may leave there, if not what it may leave of its own.
        """
        for owner in owners:
            if id(owner) not in self._users:
                self._users[id(owner)] = owner
                owner.ledger.begin_turn(self._tolerance if allowed is None else allowed)

    def ending(self, owner: Owner) -> None:
        """An owner is about to end, and still holds all that it held for the tests: judge what has grown under it."""
        if not owner.ledger.may_grow or not any(owner is other for other in self._ownership.live):
            return
        now = self._read()
        # Again even where its last test was read: others may have emptied since what they had filled.
        claims = Claims(self._ownership.live)
        for key in COUNTED:
            unclaimed(key, self._ownership.new_items(key, now, None, ()), claims)
        note_growth([owner], claims, frozenset(), now, self._ownership.baseline)
        # What it reached is not to be found there as a holder.
        del claims
        self._grown[owner.label] = growth_of(owner, self._stacks.stacks_at, now)
        self._report([owner])

    def add(self, owner: Owner, grown: Sequence[Finding]) -> None:
        """More that has grown under an owner that is about to end."""
        if grown:
            self._grown.setdefault(owner.label, []).extend(grown)

    def note(self, claims: Claims, heap: HeapReading, now: Counters) -> None:
        """Writes down what lies under the owners that the test used, or under which it left something."""
        before = self._ownership.baseline
        claimed = set(map(id, heap.claimed.values()))
        changed = [
            owner
            for owner in self._ownership.live
            if id(owner) in claimed
            or any(owner.items.get(key, set()) - before.items.get(key, {}).keys() for key in COUNTED)
        ]
        self.used(owner for owner in changed if owner.has_settled)
        known = [owner for owner in self._users.values() if not owner.ledger.is_empty]
        wanted = {id(owner): owner for owner in (*changed, *known)}
        note_growth(wanted.values(), claims, heap.claimed.keys(), now, before)

    def report_limits(self) -> None:
        """Reports the owners that the test used and that have grown past the limit."""
        self._report(self._users.values())

    def _report(self, owners: Iterable[Owner]) -> None:
        if self._limit is not None:
            for owner in owners:
                self._passed += limit_passed(owner, self._limit, self._stacks.stacks_at)

    def with_growth(self, verdict: Verdict) -> Verdict:
        """The verdict with what has grown under the owners that ended, and with what has grown past the limit."""
        of_owners = {
            label: (*found, *rest_of(self._grown.get(label, ()), found))
            for label in {**verdict.of_owners, **self._grown}
            for found in [verdict.of_owners.get(label, ())]
        }
        findings = (*verdict.findings, *self._passed)
        return replace(verdict, findings=findings, of_owners=of_owners)

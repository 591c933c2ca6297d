"""Notices that a test process begins to use a card: whatever its first use takes belongs to the process."""

from __future__ import annotations

from collections.abc import Callable

from lowtide.leakcheck.judging.device_memory import DeviceMemory
from lowtide.leakcheck.judging.owners import Owner
from lowtide.leakcheck.judging.records import Ownership
from lowtide.leakcheck.resources.first_use import FirstUse, may_be_a_drivers
from lowtide.leakcheck.resources.warm_up import BlasHandles, CardsWithoutTorch, WarmUp
from lowtide.leakcheck.watching.attribution import Attribution
from lowtide.leakcheck.watching.deep_reading import devices_of
from lowtide.leakcheck.watching.verdict import Policy
from lowtide.probes.host.counters import Counters
from lowtide.probes.originals import loaded
from lowtide.reports.schema import NotMeasured


class CardArrival:
    """The first use of a card, by torch or past it.

    Args:
        policy: how strictly is watched.
        read: reads the counters.
        ownership: who owns what.
        device_memory: what is on the cards besides tensors.
        first_use: which libraries were used for the first time.
        handles: the BLAS library's handles.
        attribution: makes what the warm-up takes its own.

    Attributes:
        warm_up: uses a card once.
        came_in_this_test: whether a card was warmed up since the test began.
    """

    def __init__(
        self,
        policy: Policy,
        read: Callable[[], Counters],
        ownership: Ownership,
        device_memory: DeviceMemory,
        first_use: FirstUse,
        handles: BlasHandles,
        attribution: Attribution,
    ) -> None:
        self._policy = policy
        self._read = read
        self._ownership = ownership
        self._device_memory = device_memory
        self._first_use = first_use
        self._attribution = attribution
        self._past_torch = CardsWithoutTorch()
        self._is_in_a_test = False
        self.warm_up = WarmUp(handles, self._warming_up)
        self.came_in_this_test = False

    def begin_test(self) -> None:
        """A test begins."""
        self._is_in_a_test = True
        self.came_in_this_test = False

    def end_test(self) -> None:
        """It has ended."""
        self._is_in_a_test = False

    def not_measured(self, now: Counters) -> tuple[NotMeasured, ...]:
        """What of cards could not be judged."""
        return self.warm_up.not_measured() + (self._past_torch.not_measured(now) if self._policy.card else ())

    def queue(self) -> None:
        """Have a card warmed up once it is used.

        Again and again: torch may have been imported meanwhile, or a card used by another thread.
        """
        if self._policy.card and self._policy.warm_up != "off":
            self.warm_up.queue()

    def joins(self, now: Counters) -> bool:
        """Whether torch has just been warmed up on a card that the program uses without it, to be judged from here on.

        The program has a context there already.
        """
        may_warm_up = self._policy.card and self._policy.warm_up != "off" and loaded("torch") is not None
        if not may_warm_up or self.warm_up.is_done or not self._past_torch.cards(now):
            return False
        self.warm_up.now()
        return True

    def _warming_up(self, use: Callable[[], None]) -> None:
        """What the first use of a card takes belongs to the process, whoever's test it is in."""
        if not self._is_in_a_test:
            use()
            # A card that another thread has used before is known as it was then.
            self._device_memory.forget()
            return
        owner = Owner("the card's warm-up", only_adds=True)
        self._attribution.enter(owner)
        try:
            use()
        finally:
            self._attribution.leave()
            now = self._read()
            self._first_use.adopt()
            self.came_in_this_test = True
            # The driver has opened its own before it could be known that it would.
            new = now.items["file-descriptors"].keys() - self._ownership.baseline.items["file-descriptors"].keys()
            owner.items.setdefault("file-descriptors", set()).update(filter(may_be_a_drivers, new))
            # Nothing of the program is on a card that was used by nobody before.
            self._device_memory.adopt(
                now, [device for device in devices_of(now) if not self._device_memory.knows(device)], {}
            )

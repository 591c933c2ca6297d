"""Attributes what appears to stages and owners; whatever the first use of a card takes belongs to the process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lowtide.leakcheck.judging.owners import Owner
from lowtide.leakcheck.judging.storages import is_tensor, storage_keys
from lowtide.leakcheck.resources.first_use import CardsWithoutTorch, WarmUp, may_be_a_drivers
from lowtide.leakcheck.watching.watched import Watched
from lowtide.probes.heap.caches import LRU_CACHE
from lowtide.probes.host.counters import Counters
from lowtide.probes.originals import in_main_thread, initialized_torch, loaded, time, torch_with_cuda
from lowtide.reports.schema import NotMeasured

_FORGETTING = 1.0
_FORGETTING_SHARE = 0.1
"""Seconds, and of what a test takes the share, that finding the dead among what was born may cost."""


class Attribution:
    """To which stage, and to which owner, belongs what appears now.

    Args:
        watched: what is followed.

    Attributes:
        turns: how often each stage has run since the test began.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._labels: list[str] = []
        self._begun = self._forgetting = 0.0
        self._unread = ""
        self.turns: dict[str, int] = {}

    def _begin_attribution(self, stage: str) -> None:
        """Attribute what appears from here on to the first stage of a test."""
        self._watched.births.mark(stage)
        self._begun, self._forgetting = time.perf_counter(), 0.0
        self.turns = {stage: 1}
        self._unread = ""

    @property
    def stage_now(self) -> str:
        """Return the stage to which what appears is attributed."""
        return self._watched.births.label

    def stage(self, label: str, *, again: bool = False) -> None:
        """Attribute tensors that appear from here on to stage `label`.

        Args:
            label: the stage.
            again: whether this is a new turn of it, not the return from a stage inside it.
        """
        self._watched.others.look()
        self.attribute_births(label, again=again)

    def attribute_births(self, label: str, *, again: bool = False) -> None:
        """Attribute as `stage` does, where no other process can have begun since the last reading."""
        if again:
            self.turns[label] = self.turns.get(label, 0) + 1
            if self.turns[label] > 1:
                self._forget_dead()
        self._watched.births.begin(label, self.turns.setdefault(label, 1))

    def _forget_dead(self) -> None:
        """Let no new object pass for a dead one of an earlier turn.

        Not for ever in a loop over a frozen heap, where it takes half a second each time.
        """
        now = time.perf_counter()
        if self._forgetting > _FORGETTING + _FORGETTING_SHARE * (now - self._begun):
            return
        self._watched.births.forget_dead()
        self._forgetting += time.perf_counter() - now

    def phase(self, label: str, *, again: bool = False, settings_later: bool = False) -> None:
        """Attribute as `stage` does, and all that is counted but the cards' levels.

        Args:
            label: the stage that begins.
            again: see `stage`.
            settings_later: whether the process-wide settings are left to the next reading, since nothing can change
                them before; what has changed then is of the stage that ends here.
        """
        ending = self._take_ending()
        last = self._watched.ownership.last
        now = (
            self._watched.counters.read_in_part(last, settings="none")
            if settings_later
            else self._watched.counters.read(last)
        )
        self._watched.others.look(always=True, now=now)
        self.attribute_births(label, again=again)
        self._watched.caches.note(ending)
        self._watched.ownership.attribute(ending, now, settings_later=settings_later)

    def unread_phase(self, label: str) -> None:
        """Attribute what is born as `stage` does; what is counted at the next reading is still of the stage before.

        Args:
            label: the stage that begins, in which no code of the program's is known to run.
        """
        self._unread = self._unread or self._watched.births.label
        self.attribute_births(label)

    def _take_ending(self) -> str:
        """Return the stage of what is counted at this reading; what the next one finds is of the stage of now."""
        ending, self._unread = self._unread or self.stage_now, ""
        return ending

    def full_phase(self, label: str) -> Counters:
        """Attribute as `phase` does, and the cards' levels too; return what was read."""
        ending = self._take_ending()
        self.stage(label)
        self._watched.caches.note(ending)
        now = self._watched.counters.read()
        self._watched.ownership.attribute(ending, now)
        return now

    def enter(self, owner: Owner) -> None:
        """Attribute what appears from here to `leave` to `owner`; nests."""
        self._labels.append(self._watched.births.label)
        if owner.only_adds:
            now = self._watched.counters.read()
            self._watched.others.look(now=now)
            ending = self._take_ending()
            self._watched.caches.note(ending)
            self._watched.ownership.attribute(ending, now)
            # Modules are imported by the thousand, so that this must not look at all young objects each time.
            self._watched.births.begin_aside(owner.label)
        else:
            now = self.full_phase(owner.label)
        self._watched.caches.enter()
        self._watched.ownership.enter(owner, now)

    def leave(self) -> None:
        """End the setup of the owner entered last, whether it succeeded or not."""
        before = self._labels.pop()
        born = self._watched.births.end_aside() if self._watched.ownership.innermost.only_adds else None
        if born is None:
            self.stage(before)
        now = self._watched.counters.read()
        owner = self._watched.ownership.leave(now)
        if not owner.only_adds:
            self._watched.others.follow()
            owner.note_made(self._watched.births.born() or ())
        self._watched.ownership.attribute(owner.stage, now)
        for device in now.devices:
            # Listing takes some tenths of a second.
            if owner.growth.get(f"driver {device}", 0) > 0 and self._watched.device_memory.knows(device):
                self._take_allocations(owner, device, now)
        survivors = self._watched.births.survivors(owner.label) if born is None else born
        self._watched.caches.add(born.item for born in survivors if type(born.item) is LRU_CACHE)
        self._watched.caches.leave()
        own = [born.item for born in survivors if is_tensor(born.item)]
        owner.storages = dict.fromkeys(storage_keys(own), owner.stage) if own else {}

    def _take_allocations(self, owner: Owner, device: str, now: Counters) -> None:
        """Give an owner the driver's allocations that its setup made, unless a library was first used there."""
        names = self._watched.device_memory.adopt_allocations(now, device)
        if names and not self._watched.first_use.libraries():
            owner.items[f"allocations {device}"] = set(names)


class CardArrival:
    """Notices the first use of a card, by torch or past it.

    Args:
        watched: what is followed.
        attribution: makes what the warm-up takes its own.

    Attributes:
        warm_up: uses a card once.
        came_in_this_test: whether a card was warmed up since the test began.
    """

    def __init__(self, watched: Watched, attribution: Attribution) -> None:
        self._watched = watched
        self._attribution = attribution
        self._past_torch = CardsWithoutTorch()
        self._is_in_a_test = False
        self.warm_up = WarmUp(watched.handles, self._warming_up)
        self.came_in_this_test = False

    def begin_test(self) -> None:
        """Give what a card takes from here on to an owner of its own."""
        self._is_in_a_test = True
        self.came_in_this_test = False

    def end_test(self) -> None:
        """Take what comes from here on for no test's."""
        self._is_in_a_test = False

    def not_measured(self, now: Counters) -> tuple[NotMeasured, ...]:
        """Return what of cards could not be judged."""
        found: tuple[NotMeasured, ...] = self.warm_up.not_measured() if self.warm_up.problem else ()
        if self._watched.policy.card and self._may_be_past_torch(now):
            found += self._past_torch.not_measured(now)
        return found + self._watched.device_memory.not_measured if now.devices else found

    def queue(self) -> None:
        """Have a card warmed up once it is used.

        Again and again: torch may have been imported meanwhile, or a card used by another thread.
        """
        has_news = not self.warm_up.is_queued or initialized_torch() is not None
        if self._warms_up and has_news and torch_with_cuda() is not None:
            self.warm_up.queue()

    def joins(self, now: Counters) -> bool:
        """Return whether torch has just been warmed up on a card that the program uses without it.

        It is judged from here on: the program has a context there already.
        """
        if not self._warms_up or loaded("torch") is None or self.warm_up.is_done:
            return False
        if not self._may_be_past_torch(now) or not self._past_torch.cards(now):
            return False
        self.warm_up.now()
        return True

    def meet(self) -> None:
        """Take what the first use of a further card takes for the process's, where the test has used one.

        What the program has there by its end is judged, but for memory to which no address leads: nobody knows how
        much the context was.
        """
        torch = initialized_torch()
        if not (self._warms_up and self.warm_up.is_done and in_main_thread()) or torch is None:
            return
        memory = self._watched.device_memory
        if torch.cuda.device_count() == 1:
            return
        for device in self._watched.counters.read().devices:
            if not memory.knows(device):
                index = int(device.rpartition(":")[2])
                self._aside(partial(self.warm_up.use_too, index))
                memory.adopt_first_use(self._watched.counters.read(), device, self._watched.handles.sizes(index))

    def _may_be_past_torch(self, now: Counters) -> bool:
        return now.items["file-descriptors"] is not self._past_torch.without_driver

    @property
    def _warms_up(self) -> bool:
        return self._watched.policy.card and self._watched.policy.warm_up != "off"

    def _warming_up(self, use: Callable[[], None]) -> None:
        """Give the process what the first use of a card takes, whoever's test it is in."""
        watched = self._watched
        if not self._is_in_a_test:
            use()
            # A card that another thread has used before is known as it was then.
            watched.device_memory.forget()
            return
        now = self._aside(use)
        watched.first_use.adopt()
        # Nothing of the program is on a card that was used by nobody before.
        unknown = [device for device in now.devices if not watched.device_memory.knows(device)]
        watched.device_memory.adopt(now, unknown, {})

    def _aside(self, use: Callable[[], None]) -> Counters:
        """Use a card, and give the process what comes meanwhile; return the counters then."""
        watched = self._watched
        owner = Owner("the card's warm-up", only_adds=True)
        self._attribution.enter(owner)
        try:
            use()
        finally:
            self._attribution.leave()
            now = watched.counters.read()
            self.came_in_this_test = True
            # The driver has opened its own before it could be known that it would.
            new = now.items["file-descriptors"].keys() - watched.ownership.baseline.items["file-descriptors"].keys()
            owner.items.setdefault("file-descriptors", set()).update(filter(may_be_a_drivers, new))
        return now

"""A card that is used without torch: until torch has initialised it, nothing on it can be judged, and that is said."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lowtide.probes.device.contexts import cards_with_contexts
from lowtide.probes.device.torch_allocator import initialized_torch
from lowtide.probes.host.counters import Counters
from lowtide.probes.originals import os
from lowtide.reports.schema import CardMemory, NotMeasured, OtherProcess

_CARD = re.compile(r"\d+ -> /dev/(nvidia|dxg)")
"""Descriptors that CUDA's driver opens, for a context and for less than that."""

_ADVICE = "call torch.cuda.init() before the card is used, as in a session fixture, to have it judged"


class CardsWithoutTorch:
    """Tells whether the process has a context on a card that torch has not initialised."""

    def __init__(self) -> None:
        self._descriptors: Mapping[str, int] = {}
        self._any_open = False

    def cards(self, now: Counters) -> list[int]:
        """The numbers of these cards; next to free where no driver is open.

        Args:
            now: the counters, by which it is known whether there is anything to ask.
        """
        if initialized_torch() is not None:
            return []
        descriptors = now.items.get("file-descriptors", {})
        if descriptors is not self._descriptors:
            self._descriptors = descriptors
            self._any_open = any(map(_CARD.match, descriptors))
        return cards_with_contexts() if self._any_open else []

    def not_measured(self, now: Counters) -> tuple[NotMeasured, ...]:
        """What is not judged for it; a test of which that is said is not clean."""
        cards = [f"cuda:{index}" for index in self.cards(now)]
        if not cards:
            return ()
        process = OtherProcess(
            pid=os.getpid(),
            name="this process",
            host=None,
            cards=tuple(CardMemory(device=device, bytes=None) for device in cards),
        )
        what = f"memory on {', '.join(cards)} that was taken without torch"
        return (NotMeasured(what=what, why=_ADVICE, process=process),)

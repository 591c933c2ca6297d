"""How strictly a process is watched, and what a judgement says of a test."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lowtide.leakcheck.findings.deferred_remedies import DeferredRemedies
from lowtide.reports.schema import Finding, NotMeasured


@dataclass(frozen=True)
class Policy:
    """How strictly to watch.

    Attributes:
        tolerance: bytes that may stay of each resource that is counted in bytes.
        settle: seconds without any movement after which waiting for threads, processes or the driver ends.
        stacks: whose memory's allocation is recorded with its stack: `auto`: that of cards, which is cheap; `all`: the
            process's own too, which takes a dispatch mode around every operation; `off`: none.
        remedies: whether to try what would give a leak back, which changes the program: `now`, with the verdict;
            `later`, when `prove` is called and nothing of the program runs any more; `never`.
        explain: whether the holder of a tensor that stays is reported, which takes walks through the whole heap.
        card: whether cards are judged.
        warm_up: whether a card is used once before a test uses it: `now`, as soon as the watch opens; `first-use`, when
            torch initialises it; `off`.
        processes: whether agents in the program's other processes are asked what these keep.
        driver: whether the driver's figures are; not where several workers share a card, and make what nobody has open.
        growth: bytes by which an owner may grow, test after test, before that is reported at once; None: it is reported
            when the owner ends.
        warnings_filters: whether these are (not where the test runner puts them back itself).
        budget: seconds that may be spent for one test on what its holders retain; on the remedies of a session, four
            times as many.
    """

    tolerance: int = 0
    settle: float = 0.5
    stacks: Literal["auto", "all", "off"] = "auto"
    remedies: Literal["now", "later", "never"] = "later"
    explain: bool = True
    card: bool = True
    warm_up: Literal["now", "first-use", "off"] = "off"
    processes: bool = True
    driver: bool = True
    growth: int | None = None
    warnings_filters: bool = True
    budget: float = math.inf


Thing = tuple[str, str, int | str]
"""What a finding is about: `storage` with device and address, or `item` with a metric's key and the item's name."""


@dataclass(frozen=True)
class Verdict:
    """What a test, and the owners that ended with it, left behind.

    Attributes:
        findings: the test's own.
        of_owners: those of each owner that ended, by its label.
        not_measured: what a driver does not report, and what may be a leak or what a library keeps from its first use,
            which cannot be distinguished.
        climbed: whether the cheap pass was not enough.
        collected: what came back only because this judgement collected, where it is worth a note.
        unproven: what is to be given to `prove` at the end, for the test and for each owner.
        things: what each of the test's findings is about, by the finding's fingerprint.
    """

    findings: tuple[Finding, ...] = ()
    of_owners: Mapping[str, tuple[Finding, ...]] = field(default_factory=dict)
    not_measured: tuple[NotMeasured, ...] = ()
    climbed: bool = False
    collected: Finding | None = None
    unproven: DeferredRemedies = field(default_factory=DeferredRemedies)
    unproven_of_owners: Mapping[str, DeferredRemedies] = field(default_factory=dict)
    things: Mapping[str, frozenset[Thing]] = field(default_factory=dict)

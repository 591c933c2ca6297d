"""What a subject's outcome is where other processes of the program hold memory that was not seen."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from lowtide.reports.schema import NotMeasured, Outcome, Subject

KNOW_GROWTH = 'mark four or more inferences in one test (lowtide.stage("infer")) or use lowtide check --turns'
"""What tells of a process that ends within a test whether it grows while it runs."""

ENDED = f"only what is left after a process has ended is judged; to know, {KNOW_GROWTH}"
"""Why it is not known of an ended process whether it grew. It makes nothing less clean: no process is named with it."""

_SHOWN = 3

_WORST_FIRST = ("leak", "error", "unsupported", "clean", "skipped")


def judged_as(outcome: Outcome, not_measured: Sequence[NotMeasured]) -> tuple[Outcome, str]:
    """Return the outcome of a subject in which nothing went wrong, and its reason: clean only if all engines were seen.

    Args:
        outcome: as far as this process knows it.
        not_measured: what was not judged.
    """
    others = [missing for missing in not_measured if missing.process is not None]
    if outcome != "clean" or not others:
        return outcome, ""
    shown = "; ".join(missing.what for missing in others[:_SHOWN])
    more = f"; and of {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    return "unsupported", f"not judged: {shown}{more}; {others[0].why}"


def tries_as_one(subjects: Iterable[Subject], *, of_all: bool = False) -> list[Subject]:
    """Return the subjects, the tries of a test that was run again as one: what any of them left, and the worst outcome.

    What was read from stage to stage is that of the last one.

    Args:
        subjects: in their order.
        of_all: whether whatever else has one name is one, too, as a fixture that was set up for each parameter.
    """
    tries: dict[object, list[Subject]] = {}
    for turn, subject in enumerate(subjects):
        is_test = "::" in subject.id
        tries.setdefault(subject.id if is_test or of_all else turn, []).append(subject)
    return [_as_one(same) for same in tries.values()]


def _as_one(tries: Sequence[Subject]) -> Subject:
    if len(tries) == 1:
        return tries[0]
    worst = min(tries, key=lambda each: _WORST_FIRST.index(each.outcome))
    return msgspec.structs.replace(
        tries[-1],
        outcome=worst.outcome,
        reason=worst.reason,
        findings=tuple(finding for each in tries for finding in each.findings),
        not_measured=tuple(dict.fromkeys(missing for each in tries for missing in each.not_measured)),
        out_of_memory=next((each.out_of_memory for each in tries if each.out_of_memory is not None), None),
    )


def largest_of_each(not_measured: Iterable[NotMeasured]) -> tuple[NotMeasured, ...]:
    """Return of one program's processes, which each life starts anew, the one that held most; all else once."""
    found: dict[object, NotMeasured] = {}
    for missing in not_measured:
        key: object = missing
        if missing.process is not None:
            # `SpawnProcess-7` is the seventh of its kind.
            key = re.sub(r"\d+", "", missing.process.name), missing.why
        before = found.get(key)
        if before is None or held_by_process(missing) > held_by_process(before):
            found[key] = missing
    return tuple(found.values())


def held_by_process(missing: NotMeasured) -> tuple[int, int]:
    """Return the bytes on cards and on the host of the process that it is about; 0 where it is about none."""
    process = missing.process
    if process is None:
        return 0, 0
    return sum(card.bytes or 1 for card in process.cards), process.host or 0

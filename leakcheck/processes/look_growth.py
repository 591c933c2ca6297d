"""What has become more in a process between two looks at it, or look by look."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

import msgspec

from lowtide.leakcheck.findings.growing_host_memory import growth_of_host_memory
from lowtide.leakcheck.findings.life_findings import LEAST
from lowtide.leakcheck.findings.turn_growth import FEWEST_TURNS
from lowtide.leakcheck.growth.containers import ContainerCourses, Course
from lowtide.leakcheck.growth.host_levels import LEAST_IN_ALL, HostGrowth, HostLevels
from lowtide.leakcheck.growth.series import TurnSeries
from lowtide.leakcheck.growth.slope import Slope
from lowtide.leakcheck.judging.fingerprints import fingerprint
from lowtide.leakcheck.processes.attachment import Attachment
from lowtide.leakcheck.processes.messages import ExplainGrown, Findings, GrownContainer, Look, Seen
from lowtide.leakcheck.processes.process_levels import describe_process
from lowtide.leakcheck.processes.timed_growth import INTERVALS, growth_on_card, intervals
from lowtide.probes.heap.container_lengths import ContainerLengths
from lowtide.probes.host.memory_parts import NAMES, MemoryParts
from lowtide.probes.host.process_files import descriptors_of, stat, status, thread_names
from lowtide.probes.original_numpy import np
from lowtide.probes.originals import time
from lowtide.probes.processes.agents import AgentError, NoAgentError
from lowtide.reports.schema import Finding, NotMeasured, ResourceName
from lowtide.reports.sizes import format_amount, format_bytes
from lowtide.reports.statement import Note, StatedFinding, Statement, in_process

REQUESTS = "requests"
"""What turns are called that somebody has counted."""

_MARKED = "marks"
"""The same where nobody has, in a fingerprint."""

Explain = Callable[[ExplainGrown], Findings]
"""Asks the process who holds what has grown in it."""

_Answer = TypeVar("_Answer")


class Moment(msgspec.Struct, frozen=True):
    """A process at one moment.

    Attributes:
        started: when it began, in ticks since boot: another one may have its number.
        seen: what there is, as it says itself.
        descriptors: how many it has open of each kind.
        threads: how many it has of each name.
    """

    started: int
    seen: Seen
    descriptors: Mapping[str, int]
    threads: Mapping[str, int]


def moment_of(pid: int, seen: Seen) -> Moment:
    """Return a process as it is, with what it has just said itself."""
    process = stat(pid)
    return Moment(
        started=0 if process is None else process.started,
        seen=seen,
        descriptors=counted(descriptors_of(pid)),
        threads=counted(thread_names(pid)),
    )


def counted(names: Iterable[str]) -> Counter[str]:
    """Return how many there are of each name, numbers aside."""
    return Counter(re.sub(r"\d+", "N", name) for name in names)


def lengths_in(seen: Seen) -> ContainerLengths:
    """Return the lengths of containers that a process has said."""
    ids, kinds, lengths = (np.frombuffer(each, np.int64) for each in (seen.ids, seen.kinds, seen.lengths))
    return ContainerLengths(ids, kinds, lengths)


def asked_for(courses: Iterable[Course]) -> tuple[GrownContainer, ...]:
    """Return containers as a process is asked who holds them."""
    return tuple(GrownContainer(each.identity, each.kind, each.turns, each.lengths) for each in courses)


def grown_between(before: Moment, now: Moment, since: str, requests: int, explain: Explain) -> list[Finding]:
    """Return what a process has more of than at an earlier moment, each cause once.

    Containers come with their holders; host memory and tensors are told where these do not explain half of them.

    Args:
        before: the earlier moment.
        now: this one.
        since: what the earlier one is called.
        requests: how many the process has had in between; 0 where nobody has counted: then what is more by as little as
            `FEWEST_TURNS` turns would add is none.
        explain: see `Explain`.
    """
    found = _containers(before.seen, now.seen, since, requests, explain)
    since = "" if requests else since
    known = sum(finding.bytes for finding in found)
    for device, size in now.seen.tensors.items():
        more = size - before.seen.tensors.get(device, 0)
        if more >= LEAST and 2 * known < more:
            found.append(_of_tensors(device, more, since, requests))
            known += more if device == "cpu" else 0
    host = _host_growth(before.seen, now.seen, requests)
    if host is not None and 2 * known < host.bytes:
        found.append(growth_of_host_memory(host, REQUESTS if requests else _MARKED, "", since=since))
    found += _more_of("file-descriptors", "descriptors", before.descriptors, now.descriptors, since, requests)
    found += _more_of("threads", "threads", before.threads, now.threads, since, requests)
    return found


class WatchedLooks:
    """Judges looks at one process that follow each other at equal distances, as of any turns.

    Args:
        seconds: from one look to the next.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._containers = ContainerCourses()
        self._host = HostLevels(lambda: self._levels, lambda: self._parts, lambda: 0)
        self._levels = (0, 0)
        self._parts = MemoryParts(0, 0, 0, 0, 0, 0, 0, 0)
        self._on_cards: dict[str, TurnSeries] = {}
        self.turn = self.looks = 0

    def note(self, turn: int, seen: Seen, anonymous: int) -> None:
        """Note a look.

        Args:
            turn: which interval has ended.
            seen: what the process has said.
            anonymous: bytes of its memory that are no file's, as the kernel counts them.
        """
        self.turn, self.looks = turn, self.looks + 1
        self._levels, self._parts = (anonymous, seen.malloc), MemoryParts(**seen.parts)
        self._containers.note(turn, lengths_in(seen))
        self._host.note(self._levels)
        for device, size in seen.tensors.items():
            if device != "cpu":
                self._on_cards.setdefault(device, TurnSeries()).add(size)

    @property
    def is_known(self) -> bool:
        """Return whether a container has grown in each of enough looks, and no other one may yet."""
        is_enough = self.looks >= FEWEST_TURNS
        return is_enough and bool(self._containers.growing(self.turn)) and self.is_decided

    @property
    def is_decided(self) -> bool:
        """Return whether no container has begun to grow of which it is not known whether it does."""
        return not self._containers.undecided(self.turn)

    def found_by(self, asked: Attachment) -> list[Finding]:
        """Return what grows, each cause once, with holders that the process is asked for."""
        growing = self._containers.growing(self.turn)
        fixed = _fixed_beside(growing, self._containers)
        question = ExplainGrown(containers=asked_for(growing), turns=INTERVALS, seconds=self._seconds, fixed=fixed)
        found = list(asked.ask(question, Findings).findings) if growing else []
        process = describe_process(asked.pid)
        for device, series in self._on_cards.items():
            on_card = growth_on_card(process, device, series, self._seconds)
            if on_card is not None and 2 * sum(finding.bytes for finding in found) < on_card.bytes:
                found.append(on_card)
        host = self._host.grown() if self._host.seem_to_grow() else None
        if (
            host is not None
            and 2 * sum(finding.bytes for finding in found if finding.device in ("", "cpu")) < host.bytes
        ):
            found.append(growth_of_host_memory(host, INTERVALS, "", self._seconds))
        return found


class LookedGrowth:
    """Looks at processes at intervals until it is known what grows, or the time is over: as `TimedGrowth`, by looks.

    Args:
        looks: asks each process, by its number.
        seconds: for how long, `SHORTEST_S` or more.
        tell: takes what grows as soon as it is known.

    Attributes:
        is_over: whether what grows is known, or the time is over.
        processes: what each is called.
        not_judged: of what it cannot be said whether it grows: nothing, since all that is seen is.
    """

    not_judged: tuple[NotMeasured, ...] = ()

    def __init__(
        self, looks: Mapping[int, Attachment], seconds: float, tell: Callable[[str], object] = lambda text: None
    ) -> None:
        self._asked, self._seconds, self._tell = dict(looks), seconds, tell
        self.interval = intervals(seconds)
        self._began = time.monotonic()
        self._turn = 0
        self._watched = {pid: WatchedLooks(self.interval) for pid in looks}
        self.processes = {pid: describe_process(pid) for pid in looks}
        self._silent: dict[int, str] = {}
        self._found: list[Finding] = []
        self.is_over = False

    @property
    def has_begun(self) -> bool:
        """Return whether the first look has been made."""
        return self._turn > 0

    @property
    def seconds_read(self) -> float:
        """Return the seconds from the first look to the last one."""
        return max(0, self._turn - 1) * self.interval

    def look(self) -> None:
        """Look, if that is due; to be called a few times a second."""
        turn = 1 + int((time.monotonic() - self._began) / self.interval)
        if self.is_over or turn <= self._turn:
            return
        self._turn = turn
        for pid in self._asked.keys() - self._silent.keys():
            seen = self._answer(pid, lambda asked: asked.ask(Look(), Seen))
            if seen is not None:
                self.processes[pid] = describe_process(pid, variables=seen.variables, called=seen.called)
                self._watched[pid].note(turn, seen, anonymous_bytes_of(pid))
        watched = [self._watched[pid] for pid in self._asked.keys() - self._silent.keys()]
        is_known = any(each.is_known for each in watched) and all(each.is_decided for each in watched)
        if not watched or is_known or turn > round(self._seconds / self.interval):
            self._end()

    def _end(self) -> None:
        self.is_over = True
        for pid in self._asked.keys() - self._silent.keys():
            watched = self._watched[pid]
            if watched.looks < FEWEST_TURNS:
                self._silent[pid] = (
                    f"there were {watched.looks} of {FEWEST_TURNS} looks that it takes, which take long here: "
                    "watch it longer"
                )
                continue
            found = self._answer(pid, watched.found_by)
            for finding in found or ():
                self._found.append(in_process(finding, self.processes[pid]))
                self._tell(self._found[-1].message)

    def _answer(self, pid: int, question: Callable[[Attachment], _Answer]) -> _Answer | None:
        try:
            return question(self._asked[pid])
        except NoAgentError:
            self._silent[pid] = "it has ended"
        except AgentError as error:
            self._silent[pid] = str(error)
        return None

    def findings(self) -> list[Finding]:
        """Return what grows, once the looks are over."""
        return self._found

    def end(self, status: int | None = None) -> None:
        """Note that the program has ended: whoever is asked then does not answer."""

    @property
    def not_measured(self) -> tuple[NotMeasured, ...]:
        """Return what is not known of those that did not answer."""
        return tuple(
            NotMeasured(what=f"what grows in {self.processes[pid].text}", why=why) for pid, why in self._silent.items()
        )


def anonymous_bytes_of(pid: int) -> int:
    """Return the bytes of a process that are no file's, as the kernel counts them."""
    fields = status(pid)
    return sum(int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))


def _containers(before: Seen, now: Seen, since: str, requests: int, explain: Explain) -> list[Finding]:
    courses = ContainerCourses()
    courses.note(0, lengths_in(before))
    courses.note(requests or FEWEST_TURNS, lengths_in(now))
    risen = courses.risen()
    if not risen:
        return []
    question = ExplainGrown(
        containers=asked_for(risen),
        turns=REQUESTS if requests else _MARKED,
        since="" if requests else since,
        fixed=_fixed_beside(risen, courses),
    )
    return list(explain(question).findings)


def _fixed_beside(growing: Collection[Course], courses: ContainerCourses) -> tuple[int, ...]:
    return tuple(courses.fixed(min(course.items for course in growing))) if growing else ()


def _host_growth(before: Seen, now: Seen, requests: int) -> HostGrowth | None:
    """Return by how much host memory that is no file's has grown; what Python's heap has free nobody holds."""
    parts = MemoryParts(**now.parts).since(MemoryParts(**before.parts))
    own = {name: size for name, size in parts.items() if name not in (NAMES["files"], NAMES["shared"])}
    kept = sum(own.values()) - max(0, own[NAMES["python_free"]])
    if kept < LEAST_IN_ALL:
        return None
    part = max(own, key=lambda name: own[name])
    rate = kept / max(1, requests)
    return HostGrowth(Slope(rate, rate, rate), max(1, requests), kept, part, own[part], (0, 0))


def _with_each(more: str, each: str, since: str, requests: int) -> str:
    return f"{more} more than at {since}" if since else f"{more} more over {requests} {REQUESTS}, {each} with each"


def _of_tensors(device: str, more: int, since: str, requests: int) -> Finding:
    said = _with_each(format_bytes(more), format_bytes(round(more / max(1, requests))), since, requests)
    return StatedFinding(
        resource="tensors",
        cause="unknown",
        bytes=more,
        count=max(1, requests),
        device=device,
        stage=REQUESTS if requests else _MARKED,
        statement=Statement(amount=f"tensors on {device} have {said}", came=None),
        fingerprint=fingerprint(resource="tensors", device=device, stage=_MARKED, suspects=("growth",)),
        advice="look for what keeps tensors of each request, in no list, dict, set or deque that grows",
        trend="growth",
    )


def _more_of(
    resource: ResourceName,
    unit: str,
    before: Mapping[str, int],
    now: Mapping[str, int],
    since: str,
    requests: int,
) -> list[Finding]:
    more = sum(now.values()) - sum(before.values())
    if more < FEWEST_TURNS:
        return []
    grown = Counter(now)
    grown.subtract(before)
    ((kind, count),) = grown.most_common(1)
    said = _with_each(format_amount(more, unit), f"{more / max(1, requests):.2g}", since, requests)
    return [
        StatedFinding(
            resource=resource,
            cause="unknown",
            bytes=0,
            count=more,
            device="",
            stage=REQUESTS if requests else _MARKED,
            statement=Statement(amount=said, came=None, notes=(Note(f": {count} of {kind}"),)),
            fingerprint=fingerprint(resource=resource, device="", stage=_MARKED, suspects=("growth", kind)),
            advice=f"close or end with each request the {unit} that it opens or starts",
            trend="growth",
        )
    ]

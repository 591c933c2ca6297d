"""A server watched while it works: in windows of time, each twice as long as the one before.

What fills once, as a cache does, grows for a while and then no more, or ever more slowly. So what has grown in one
window is told at once, and decided where it grows on in the next, by as much with each request, or each second where
nobody counts requests. A server that ends or answers no more is a finding, too.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.processes.held_series import GrownLevel, HeldSeries
from lowtide.leakcheck.processes.process_growth import ToldGrowth, is_on_card
from lowtide.leakcheck.processes.process_levels import describe_process, pid_of
from lowtide.leakcheck.processes.timed_growth import SHORTEST_S, TimeWindow
from lowtide.probes.originals import time
from lowtide.probes.processes.process_ends import ProcessEnds
from lowtide.reports.schema import Finding, NotMeasured
from lowtide.reports.sizes import format_bytes
from lowtide.reports.statement import Statement, noted

STEADY = 0.6
"""The part of its rate in one window by which something must grow on in the next, so that it is known to."""

HANGS_S = 60.0
"""Seconds without an answer to any question after which a server that is asked hangs."""

SLOW_S = 15.0
"""The same after which nothing that was read says that it is well."""

STARTS_S = 600.0
"""Seconds within which a server must answer first."""

_MINUTES = 5
"""Of which it is told what a server held that has ended."""

_NOTED_S = 2
"""Seconds between two notes of that."""

_STAYS_S = 5.0
"""Seconds after which a process is a part of the server, whose end is worth a word."""

_MAY_FAIL = 10
"""Of so many requests one may fail: of a server that fails more often it is not known what it does at work."""

_LATELY_S, _TOGETHER_S = 60.0, 0.05
"""Seconds before the server's own end in which that may have to do with it; and so few that nobody was the first."""


class Client(Protocol):
    """Whoever asks a server, and counts what it answers.

    Attributes:
        answered: how many requests have come to the end that they should.
        failed: how many have not.
        failure: what went wrong with most of these.
        is_needed: whether the watch waits until the server answers.
        url: where it is asked.
    """

    answered: int
    failed: int
    is_needed: bool
    url: str

    @property
    def failure(self) -> str: ...  # noqa: D102

    def silent_for(self) -> float | None: ...  # noqa: D102 - said where it is done, as below

    def requests(self) -> int | None: ...  # noqa: D102

    def stop(self) -> None: ...  # noqa: D102


@dataclass
class ServerWatch:
    """Watches the processes of a server until it is known what grows, or for so long as is asked.

    Attributes:
        begin: begins a window of so many seconds; the first one waits until the server has started.
        seconds: for how long at most, `SHORTEST_S` or more, from the first reading on.
        tell: takes what is to be said while it goes on.
        client: asks the server; None where nobody does.
        stacks: tells what its threads do, by process.
        held: gives the bytes that each of its processes holds.
        series: follows what its processes hold, from one watch to the next; None where nobody wants to know.
        is_over: whether it is known what grows, or the time is over, or the server has come to its end.
        rates: what has grown in the last window, each with the bytes of a second.
        tensors: bytes that torch had given out on each card, by process, at the last reading.
    """

    begin: Callable[[float, bool], TimeWindow]
    seconds: float
    tell: Callable[[str], object]
    client: Client | None = None
    stacks: Callable[[], Sequence[str]] = lambda: ()
    held: Callable[[], Mapping[int, int]] = dict
    series: HeldSeries | None = None
    is_over: bool = field(default=False, init=False)
    rates: Sequence[tuple[Finding, float]] = field(default=(), init=False)
    tensors: Mapping[int, Mapping[str, int]] = field(default_factory=dict, init=False)
    _made: float = field(default_factory=time.monotonic, init=False)
    _too_late: tuple[NotMeasured, ...] = field(default=(), init=False)
    _window: TimeWindow | None = field(default=None, init=False)
    _length: float = field(default=SHORTEST_S, init=False)
    _began: float | None = field(default=None, init=False)
    _requests: int | None = field(default=None, init=False)
    # By process, fingerprint and whether requests were counted: bytes by request, or by second, in the window before.
    _rates: dict[tuple[int, str, bool], float] = field(default_factory=dict, init=False)
    _found: list[Finding] = field(default_factory=list, init=False)
    _read: float = field(default=0.0, init=False)
    # Its processes, by number: what each is called, and since when it is there; and when others have ended.
    _processes: dict[int, tuple[str, float]] = field(default_factory=dict, init=False)
    _gone: dict[str, float] = field(default_factory=dict, init=False)
    _ends: ProcessEnds = field(default_factory=ProcessEnds, init=False)
    # What its processes held in its last minutes: when, and how many bytes.
    _course: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_MINUTES * 60 // _NOTED_S))

    def look(self) -> None:
        """Read what grows, if that is due; to be called a few times a second."""
        if self.is_over:
            return
        self._note()
        if self.client is not None and not self._is_answered(self.client):
            return
        if self._window is None:
            self._window = self.begin(self._length, self._began is None)
        window = self._window
        window.look()
        # Those of the window before, until the next one has read.
        self.tensors = window.tensors or self.tensors
        if self.series is not None:
            self.series.look(has_begun=window.has_begun)
        if not window.has_begun:
            self._requests = None
        elif self._requests is None:
            if self._began is None:
                self._began = time.monotonic()
                # What an agent imports to read them counts from here on.
                self._course.clear()
                self._note()
            self._requests = self._count()
        if window.is_over:
            self._judge(window)

    def _note(self) -> None:
        """Note what its processes hold, and which of them have ended."""
        now, held = time.monotonic(), self.held()
        for pid in held.keys() - self._processes.keys():
            self._processes[pid] = (describe_process(pid).text, now)
            self._ends.follow(pid)
        for pid in self._processes.keys() - held.keys():
            self._note_end(pid, now)
        if not self._course or now - self._course[-1][0] >= _NOTED_S:
            self._course.append((now, sum(held.values())))

    def _note_end(self, pid: int, now: float) -> None:
        name, since = self._processes.pop(pid)
        ended = self._ends.of(pid) or now
        # One that comes and goes is no part of it.
        if ended - since >= _STAYS_S:
            self._gone[name] = ended

    def _is_answered(self, client: Client) -> bool:
        """Return whether the server answers; where it does no more, that is the end of the watch."""
        silent = client.silent_for()
        if client.is_needed and silent is None and time.monotonic() - self._made > STARTS_S:
            self._too_late = (_unanswered(client, f"after {STARTS_S:g} s"),)
            self._end([])
        if silent is not None and silent > HANGS_S:
            self._end([_hanging(silent, self._last_minutes(time.monotonic()))])
            for line in self.stacks():
                self.tell(line)
        return not self.is_over and (silent is not None or not client.is_needed)

    def _count(self) -> int:
        """Return how many requests the server has answered; 0 where nobody knows."""
        return 0 if self.client is None else self.client.requests() or 0

    def _judge(self, window: TimeWindow) -> None:
        """Decide what a window has shown, or begin the next one."""
        count = self._count() - (self._requests or 0)
        if self.series is not None:
            self.series.settle()
        grown = self._grown(window)
        found = [each.finding for each in grown]
        # Of what is counted there are no bytes.
        self.rates = [(each.finding, each.rate) for each in grown if each.finding.bytes]
        # Rates by request and by second do not compare.
        counted, by = count > 0, window.seconds_read / count if count > 0 else 1.0
        rates = {(*_key(each.finding), counted): each.rate * by for each in grown}
        steady = [
            each
            for each in grown
            if each.rate * by >= STEADY * self._rates.get((*_key(each.finding), counted), float("inf"))
        ]
        self._read += window.seconds_read
        left = self.seconds - (time.monotonic() - (self._began or 0.0))
        silent = None if self.client is None else self.client.silent_for()
        if not found and silent is not None and silent > SLOW_S:
            why = f"the last answer of the server came {silent:.0f} s ago: watch it for longer"
            self._too_late = (NotMeasured(what="whether the server hangs", why=why),)
        # Whoever sees the server end says so; and what was read once may be read in the next window, which is longer.
        is_lost = bool(window.not_measured) and not (window.seconds_read or window.is_gone)
        if steady or left < SHORTEST_S or is_lost:
            self._end([_by_request(each, count, window) for each in steady or grown])
            return
        self._rates, self._requests, self._too_late = rates, None, ()
        # A last one that is shorter than the one before sees less.
        self._length = float(int(left if left < 4 * self._length else 2 * self._length))
        self._window = None
        if found:
            self.tell(f"whether that goes on is watched for {self._length:.0f} s more")

    def _grown(self, window: TimeWindow) -> list[GrownLevel]:
        """Return what grows in a window, and what does over all readings and is not explained by that."""
        seconds = window.seconds_read
        found = [GrownLevel(each, seconds) for each in window.findings() if seconds]
        if self.series is None:
            return found
        explained = ToldGrowth()
        for each in found:
            explained.add((pid_of(each.finding), is_on_card(each.finding)), each.rate)
        told = {_counted_in(each.finding) for each in found}
        more = self.series.grown(explained)
        return [*found, *(each for each in more if each.finding.bytes or _counted_in(each.finding) not in told)]

    def _end(self, found: Sequence[Finding]) -> None:
        self._found += found
        self.is_over = True
        self._ends.close()
        if self.client is not None:
            # What is asked from here on may find no server.
            self.client.stop()

    @property
    def _has_come_to_its_end(self) -> bool:
        return any(each.resource == "processes" for each in self._found)

    def end(self, status: int | None = None, *, asked: bool = False) -> None:
        """Note that the server has ended; of what has grown in the last window that is known that had grown before.

        Args:
            status: what it has ended with, as `subprocess` counts it; None where that is not known.
            asked: whether somebody has asked it to end.
        """
        if self.is_over:
            return
        if self._window is not None:
            self._window.end()
            found = [] if self._window.not_measured else self._grown(self._window)
            before = {(pid, name) for pid, name, _ in self._rates}
            self._found += [each.finding for each in found if _key(each.finding) in before]
        now = time.monotonic()
        for pid in [pid for pid in self._processes if self._ends.of(pid) is not None]:
            self._note_end(pid, now)
        # Where all have ended it may be some time since then: nobody has looked before.
        last = now if self._processes else max(self._gone.values(), default=now)
        self._end([] if asked else [_ended(status, self._last_minutes(last))])

    def _last_minutes(self, now: float) -> str:
        """Say what its processes have held in its last minutes, and which had ended before."""
        held = [size for _, size in self._course if size]
        if not held:
            return ""
        since = now - self._course[0][0]
        before = f", and {format_bytes(held[0])} {since:.0f} s before" if since >= _STAYS_S else ""
        lately = {name: now - since for name, since in self._gone.items() if _TOGETHER_S < now - since < _LATELY_S}
        ended = [f"; {name} had ended {seconds:.1f} s before" for name, seconds in lately.items()]
        return f"; its processes held {format_bytes(held[-1])}{before}{''.join(ended)}"

    def findings(self) -> list[Finding]:
        """Return what grows, and how the server has ended, if it has."""
        return self._found

    @property
    def seconds_read(self) -> float:
        """Return for how many seconds it was read what grows, in all windows."""
        return self._read

    @property
    def not_measured(self) -> tuple[NotMeasured, ...]:
        """Return what could not be measured in the last window, or at all."""
        of_window = () if self._window is None or self._found else tuple(self._window.not_measured)
        is_unseen = self._window is None and self._began is None and not (self._found or self._too_late)
        if is_unseen:
            of_window = (_unanswered(self.client, "when the watch ended"),)
        return (*self._too_late, *of_window, *(self._failed_requests() if self._fails_at_work else ()))

    @property
    def not_judged(self) -> tuple[NotMeasured, ...]:
        """Return what it is not known of whether it grows."""
        of_window = () if self._window is None else tuple(self._window.not_judged)
        if self._fails_at_work or self._has_come_to_its_end:
            return of_window
        return (*of_window, *self._failed_requests())

    @property
    def _fails_at_work(self) -> bool:
        """Return whether nothing is known of what it does at work, as too many requests have failed."""
        client = self.client
        return client is not None and not self._found and client.failed * _MAY_FAIL > client.answered + client.failed

    def _failed_requests(self) -> tuple[NotMeasured, ...]:
        client = self.client
        if client is None or not client.failed:
            return ()
        asked = client.answered + client.failed
        some = f"{client.failed} of {asked} failed, most often" if client.answered else f"all {asked} failed"
        why = f"{some}: {client.failure}"
        return (NotMeasured(what="requests that should have been answered", why=why),)


def _key(finding: Finding) -> tuple[int, str]:
    return pid_of(finding), finding.fingerprint


def _counted_in(finding: Finding) -> tuple[int, str]:
    return pid_of(finding), finding.resource


def _by_request(grown: GrownLevel, count: int, window: TimeWindow) -> Finding:
    """Say how much that is by request, where it has grown in the window in which these were counted."""
    finding = grown.finding
    if count <= 0 or grown.seconds != window.seconds_read:
        return finding
    more = format_bytes(round(finding.bytes / count)) if finding.bytes else f"{finding.count / count:.2g}"
    return noted(finding, f"; {more} a request over {count} requests")


def _unanswered(client: Client | None, until: str) -> NotMeasured:
    where, hint = ("", "") if client is None else (f" at {client.url}", ": --url says where it listens")
    why = f"it had not answered{where} {until}{hint}"
    return NotMeasured(what="what grows in the server", why=why)


def _hanging(silent: float, course: str) -> Finding:
    said = f"the server has answered nothing for {silent:.0f} s, and its processes are there{course}"
    return _of_server(said, "hangs", "look at what its threads do: the stacks of all that answer are printed")


def _ended(status: int | None, course: str) -> Finding:
    how = "" if status is None else f" with exit code {status}" if status >= 0 else f" by signal {-status}"
    said = f"the server ended{how} while it was watched{course}"
    # A shell says 137 of what was killed below it. No kernel makes a server end with another code.
    killed = status in (None, -signal.SIGKILL, 128 + signal.SIGKILL)
    hint = "; `dmesg` tells whether the kernel ended it" if killed else ""
    return _of_server(said, "ended", f"look at what it has written last{hint}")


def _of_server(said: str, what: str, advice: str) -> Finding:
    statement = Statement(amount=said, came=None)
    return finding_of("processes", device="", stage="watch", statement=statement, suspects=(what,), advice=advice)

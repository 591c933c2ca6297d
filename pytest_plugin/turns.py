"""Tests as turns: after which of them it is read what grows, and whose that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

from lowtide.leakcheck.findings.turn_growth import FEWEST_TURNS, SECOND, TurnGrowth, call_recorder, is_read
from lowtide.leakcheck.growth.host_levels import read_levels
from lowtide.leakcheck.processes.other_processes import OtherProcesses
from lowtide.leakcheck.watching.watched import Verdict
from lowtide.pytest_plugin.items import FixtureOwner
from lowtide.reports.schema import Finding, NotMeasured
from lowtide.reports.statement import noted

SESSION = "the session"
"""What has grown since before the last module."""

_UNREAD = (
    "reading how much their containers hold would have taken more than a hundredth of the session's time: run one of "
    "them alone"
)


class TestTurns:
    """Follows the tests of a session, and those of each module.

    Args:
        owners: gives the fixtures of a wider scope that are set up.
        others: the other processes.
        native: whether calls are recorded that allocate, while host memory seems to grow.
    """

    __test__ = False

    def __init__(self, owners: Callable[[], Iterable[FixtureOwner]], others: OtherProcesses, *, native: bool) -> None:
        self._owners = owners
        self._others = others
        calls = call_recorder(wanted=native)
        self._growth = TurnGrowth("tests", self._named, calls=calls, native_option="pytest --leakcheck-native")
        self._of_modules: Counter[str] = Counter()
        self._all = 0
        self._turn = 0
        self._turn_of_module = 0
        self._last_read = 0
        self._stretches: tuple[str, ...] = ()
        # The modules in which a container may have grown unseen.
        self._unread: list[str] = []
        self._is_over = False
        self._found: dict[str, list[Finding]] = {}
        self._host: list[tuple[str, Finding, tuple[int, int]]] = []

    def close(self) -> None:
        """Close what follows the tests: no other comes."""
        self._growth.close()

    def plan(self, items: Sequence[pytest.Item]) -> None:
        """Count the tests of the session; a worker of xdist runs some of them."""
        self._of_modules, self._all = Counter(map(_module_of, items)), len(items)

    def ends(self, item: pytest.Item, nextitem: pytest.Item | None, *, judged: bool) -> None:
        """End a turn: a test is about to be torn down, and all that wider fixtures hold is there.

        Args:
            item: the test.
            nextitem: the one that follows.
            judged: whether it matters what it leaves.
        """
        if not judged:
            self._growth.break_off()
            self._others.break_off()
        self._turn += 1
        self._turn_of_module += 1
        self._is_over = nextitem is None
        module = _module_of(item)
        is_last = nextitem is None or _module_of(nextitem) != module
        whole, count = self._all, self._of_modules[module]
        # Where one module has most of the tests, its readings show the session's growth, too.
        several = 2 * count < whole
        in_session = several and is_read(self._turn, whole, is_last=nextitem is None)
        if in_session or is_read(self._turn_of_module, count, is_last=is_last):
            begins = self._turn_of_module <= SECOND or count < FEWEST_TURNS
            self._growth.read(self._turn, begins=begins)
            self._others.read_turn(self._turn, begins=begins)
            self._last_read = self._turn
        self._stretches = (module, SESSION) if several else (module,)
        if is_last:
            first, self._turn_of_module = self._turn - self._turn_of_module, 0
            self._growth.note(*self._stretches)
            self._end(module, module, first)
            if self._growth.take_unread():
                self._unread.append(module)
            if nextitem is None and several:
                self._end(SESSION, "", 0)
            self._stretches = ()

    def judged(
        self, verdict: Verdict, ended: Sequence[FixtureOwner], held: int | None
    ) -> Iterator[tuple[str, Sequence[Finding]]]:
        """Yield a test was judged: give what was found to grow, by the subject that it belongs to.

        Args:
            verdict: of the test, and of the fixtures that ended with it.
            ended: those.
            held: the process's own memory then, in bytes.
        """
        if any(finding.resource in ("host-memory", "tensors") for finding in verdict.findings):
            # A leak of its own explains more memory; what is told of each test is not told of all.
            self._growth.forget_levels()
            self._host.clear()
        elif self._stretches:
            self._growth.note(*self._stretches, held=held)
        for name, finding, levels in self._host:
            came_back = max(then - now for then, now in zip(levels, read_levels(), strict=True))
            ends = " and ".join(owner.name for owner in ended)
            if ended and 2 * came_back >= finding.bytes:
                subject = f"{ended[0].name} ({ended[0].where})" if len(ended) == 1 else name
                self._found.setdefault(subject, []).append(noted(finding, f"; it came back when {ends} ended"))
            else:
                self._found.setdefault(name, []).append(finding)
        found, self._found, self._host = self._found, {}, []
        # A container of tensors is told by these.
        told = {finding.holder for findings in verdict.of_owners.values() for finding in findings}
        for name, findings in found.items():
            if news := [finding for finding in findings if not (finding.process and finding.holder in told)]:
                yield name, news

    def take_unread(self) -> tuple[NotMeasured, ...]:
        """Return, after the last test, what grows with each test and may not have been seen; nothing before it."""
        if not (self._is_over and self._unread):
            return ()
        modules, self._unread = self._unread, []
        named = modules[0] if len(modules) == 1 else f"{len(modules)} modules, {modules[0]} the first of them"
        return (NotMeasured(what=f"what grows with each test of {named}", why=_UNREAD),)

    def _end(self, stretch: str, module: str, since: int) -> None:
        subject = f"the tests of {module}" if module else SESSION
        grown = self._growth.end(stretch, module, self._tensors_of_owners, since=since)
        elsewhere = self._others.grown_in_turns(self._turn, module, since) if self._last_read == self._turn else []
        for finding in (*grown.containers, *elsewhere):
            # What has grown since before this module is the session's.
            own = subject if module and finding.stage.endswith(module) else SESSION
            self._found.setdefault(self._place_of(finding) or own, []).append(finding)
        if grown.host is not None:
            # The session's has it in it.
            self._growth.forget_levels()
            self._host.append((subject, grown.host, grown.levels))

    def _place_of(self, finding: Finding) -> str:
        """Return the fixture that has a container, or the process that this is in; empty if none has."""
        label = "" if finding.process is None else self._others.owner_of(finding.process.pid)
        root = finding.path[0].edge if finding.path and finding.process is None else ""
        holders = (owner for owner in self._owners() if owner.label == label or owner.name == root)
        return next((f"{owner.name} ({owner.where})" for owner in holders), "")

    def _tensors_of_owners(self) -> int:
        """Return the bytes of the tensors that tests have left under living fixtures: these are told when they end."""
        return sum(
            lying.bytes
            for owner in self._owners()
            for (device, _), lying in owner.ledger.storages.items()
            if device == "cpu" and lying.turn
        )

    def _named(self) -> Iterator[tuple[str, object]]:
        for owner in self._owners():
            yield from owner.named()


def _module_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]

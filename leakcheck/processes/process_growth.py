"""Whether an engine's other processes grow from inference to inference: their tensors, and host memory beside them.

The first inference of a process fills what is filled once, and so does the first one after a sleep: what an inference
adds is judged where it comes right after another one. Each life may have processes of its own: those of one name are
turns of one. What grows test after test in a process that belongs to a fixture is told by the same levels, and by its
tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import msgspec

from lowtide.leakcheck.findings.owner_growth import ADVICE
from lowtide.leakcheck.growth.host_levels import LEAST_A_TURN, LEAST_IN_ALL
from lowtide.leakcheck.growth.series import TurnSeries
from lowtide.leakcheck.growth.steps import FEWEST_STEPS, KeptSteps, rises
from lowtide.leakcheck.judging.fingerprints import finding_of, fingerprint
from lowtide.leakcheck.processes.counted_things import COUNTED, MAKING, UNITS, kind_of
from lowtide.leakcheck.processes.process_levels import role_of
from lowtide.probes.processes.mapped_files import mapped_shared_memory
from lowtide.probes.stages import UPDATE
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding, ResourceName
from lowtide.reports.sizes import first_of, format_amount, format_bytes
from lowtide.reports.statement import HolderFacts, Note, Statement, reworded, with_holder

HOST = "host-memory"
"""The key of the level that is no card's."""

_ADVICE = {
    "infer": "let go of what each request adds when it ends, or bound what is kept",
    UPDATE: f"let go in {UPDATE} of what was sent, once it is copied; and of what it replaces",
}
"""What to do about what each turn of a stage leaves."""

_TENSORS = "tensors "
"""What the key of a level begins with that is counted under tensors, with the device behind it."""

SHARED = "shared-memory"
"""The key of the level of shared memory that a process maps."""

_LEVELS: Mapping[str, ResourceName] = {HOST: "host-memory", SHARED: "shared-memory", **{key: key for key in COUNTED}}
"""The levels that are on no card and under no tensor, with what they are called."""

_EXPLAINED_BY = {SHARED: (f"{_TENSORS}cpu",), HOST: (SHARED, f"{_TENSORS}cpu")}
"""What lies under which level, too: a tensor over a mapping, and pages of it that no other process maps."""

_LISTED_PIDS = 3

_FEWEST_OF_THINGS = 5
"""Turns that must add some of what is counted: a pool of threads or connections fills by one with each, too."""

ALLOWED = 4 << 20
"""Bytes of host memory that an inference may add for good: allocators take memory in pieces of this order."""


_FIRST = ("create", "reload", "shutdown")
"""What the names of stages begin with after which the next inference is the first one of an engine, or as good as."""

_FILLING = ("sleep", "wake")
"""The same of stages that may leave something to be filled by the next inference, the first time that they come."""


@dataclass
class Turns:
    """Counts the turns of a stage, inferences or another's, and those by which growth is judged.

    An inference is, where it came right after another one, or after the same sleeps and wakes as one before it: a loop
    that trains between two inferences has no others. An update of weights is, where it is not the first.

    Attributes:
        stage: its name.
        count: how many there were.
        again: the numbers, from 1, of those that followed another one.
    """

    stage: str = "infer"
    count: int = 0
    again: list[int] = field(default_factory=list)
    _had_one: bool = False
    # What there has been since the last inference that may leave something to be filled, and before earlier ones.
    _between: tuple[str, ...] = ()
    _known: set[tuple[str, ...]] = field(default_factory=lambda: {()})

    @property
    def follows(self) -> bool:
        """Return whether the last one followed another one."""
        return self.again[-1:] == [self.count]

    @property
    def missing(self) -> int:
        """Return how many more turns in a row would show growth."""
        return max(0, FEWEST_STEPS - len(self.again))

    def after(self, stage: str) -> None:
        """Note that a stage has ended."""
        if stage == self.stage:
            self.count += 1
            self.again += [self.count] if self._had_one and self._between in self._known else []
            self._known.add(self._between)
            self._had_one, self._between = True, ()
        elif stage.startswith(_FIRST if self.stage == "infer" else "create"):
            self.break_off()
        elif self.stage == "infer" and stage.startswith(_FILLING):
            self._between += (stage,)

    def break_off(self) -> None:
        """Note that the next one comes after no other."""
        self._had_one, self._between, self._known = False, (), {()}


class _Growing(NamedTuple):
    """A level of a process that grows.

    Attributes:
        process: which.
        steps: what each turn has added for good.
        allowed: bytes of a step that are no growth.
    """

    process: ProcessName
    steps: list[int]
    allowed: int


@dataclass
class _Role:
    """One level of the processes of one name.

    Attributes:
        allowed: bytes that an inference may add for good: tensors are counted to the byte.
        fewest: turns that must add something.
        levels: of each process, in the order in which they were first seen, the levels after its inferences.
        again: for each of these, whether the inference came right after another one.
        processes: each of them as it was described last: its device may be known only later.
    """

    allowed: int
    fewest: int = FEWEST_STEPS
    levels: dict[int, list[int]] = field(default_factory=dict)
    again: dict[int, list[bool]] = field(default_factory=dict)
    processes: dict[int, ProcessName] = field(default_factory=dict)

    @property
    def steps(self) -> dict[ProcessName, list[int]]:
        """Return what each inference has added to a process for good that came right after another one.

        Not one with a sleep before it for the first time: its host copy, or a cache of pinned memory, is there from
        then on, once.
        """
        found = {}
        for pid, levels in self.levels.items():
            steps = [
                step for step, again in zip(KeptSteps.between(levels).sizes, self.again[pid][1:], strict=True) if again
            ]
            if steps:
                found[self.processes[pid]] = steps
        return found

    def growing(self) -> _Growing | None:
        """Return the process that grows most; the last one and all steps, if only these show it.

        One rank of several may grow alone; and of lives with few inferences each, no process shows growth by itself.
        """
        steps = self.steps
        alone = {process: own for process, own in steps.items() if self._grows(own)}
        if alone:
            process = max(alone, key=lambda each: sum(alone[each]))
            return _Growing(process, alone[process], self.allowed)
        rising = {process: own for process, own in steps.items() if self.allowed and self._rises(process.pid)}
        if rising:
            process = max(rising, key=lambda each: sum(rising[each]))
            return _Growing(process, rising[process], 0)
        together = [step for own in steps.values() for step in own]
        # That steps of different processes alternate with others says nothing: what fills once in each does so, too.
        often = sum(step > self.allowed for step in together) * 3 > len(together)
        return _Growing(list(steps)[-1], together, self.allowed) if often and self._grows(together) else None

    def _rises(self, pid: int) -> bool:
        moves = [after - before for before, after in pairwise(self.levels[pid])]
        in_a_row = [move for move, again in zip(moves, self.again[pid][1:], strict=True) if again]
        return rises_slowly([0, *accumulate(in_a_row)])

    def _grows(self, steps: list[int]) -> bool:
        kept = KeptSteps(steps, self.allowed)
        return kept.grows and len(kept.turns) >= self.fewest


def rises_slowly(levels: Sequence[int]) -> bool:
    """Return whether host memory rises turn by turn, by less than one of a few turns may add, in bytes."""
    series = TurnSeries()
    for level in levels:
        series.add(level)
    return series.rise(LEAST_A_TURN, LEAST_IN_ALL) is not None


class ProcessGrowth:
    """Collects the levels of processes after inferences, or the turns of another stage, and judges them at the end.

    Args:
        stage: whose turns they are.

    Attributes:
        turns: those so far.
    """

    def __init__(self, stage: str = "infer") -> None:
        self.turns = Turns(stage)
        # By the processes' name, and the level.
        self._roles: dict[tuple[str, str], _Role] = {}

    def note(self, process: ProcessName, levels: Mapping[str, int], *, again: bool = True) -> None:
        """Note a process's levels after an inference.

        Args:
            process: which.
            levels: bytes, as of `levels_of`, and numbers of things.
            again: whether the inference came right after another one.
        """
        for key, size in self._with_gone(process, levels).items():
            fewest = _FEWEST_OF_THINGS if key in COUNTED else FEWEST_STEPS
            fresh = _Role(ALLOWED if key == HOST else 0, fewest)
            role = self._roles.setdefault((role_of(process.name), key), fresh)
            role.levels.setdefault(process.pid, []).append(size)
            role.again.setdefault(process.pid, []).append(again)
            role.processes[process.pid] = process

    def correct(self, process: ProcessName, levels: Mapping[str, int]) -> None:
        """Another reading after the same inference, as of a heap that was trimmed; as `note`."""
        for key, size in self._with_gone(process, levels).items():
            role = self._roles.get((role_of(process.name), key))
            if role is not None and process.pid in role.levels:
                role.levels[process.pid][-1] = size

    def _with_gone(self, process: ProcessName, levels: Mapping[str, int]) -> Mapping[str, int]:
        """Return the levels, with 0 for a device on which there is no tensor any more."""
        name = role_of(process.name)
        known = [key for (of, key), role in self._roles.items() if of == name and process.pid in role.levels]
        return {**{key: 0 for key in known if key.startswith(_TENSORS)}, **levels}

    @property
    def noted(self) -> Collection[int]:
        """Return the processes whose host memory is known."""
        return {pid for (_, key), role in self._roles.items() if key == HOST for pid in role.levels}

    @property
    def judged(self) -> Collection[int]:
        """Return the processes of which there were enough turns to say whether they grow."""
        return {
            pid
            for (_, key), role in self._roles.items()
            if key == HOST and sum(map(len, role.steps.values())) >= FEWEST_STEPS
            for pid in role.levels
        }

    @property
    def suspects(self) -> Collection[ProcessName]:
        """Return the processes of all names that grow."""
        growing = [role for role in self._roles.values() if role.growing() is not None]
        return list({process.pid: process for role in growing for process in role.processes.values()}.values())

    def findings(self) -> list[Finding]:
        """One for each name whose processes grow, and for each of their levels that does."""
        growing = {place: found for place, role in self._roles.items() if (found := role.growing()) is not None}
        return [
            _of_turns(self.turns.stage, key, *found)
            for (name, key), found in growing.items()
            if not any(
                sum(growing[name, other].steps) * 2 > sum(found.steps)
                for other in _EXPLAINED_BY.get(key, ())
                if (name, other) in growing
            )
        ]


def one_of_each(grown: Sequence[Finding], containers: Sequence[Finding]) -> list[Finding]:
    """Return what has grown, each cause once: a container that grows is what its process has more.

    Args:
        grown: of levels of processes.
        containers: the containers that take something with each turn.
    """
    told = {(_role_in(each), each.holder) for each in grown if each.holder}
    named = [each for each in containers if (_role_in(each), each.holder) not in told]
    by_role = Counter[str]()
    for each in named:
        by_role[_role_in(each)] += each.bytes
    explained = [
        each
        for each in grown
        if each.resource != "host-memory" or each.holder or by_role[_role_in(each)] * 2 < each.bytes
    ]
    return [*explained, *named]


def _role_in(finding: Finding) -> str:
    return "" if finding.process is None else role_of(finding.process.name)


def levels_of(private: int | None, resident: int, tensors: Mapping[str, int]) -> dict[str, int]:
    """Return the levels by which a process's growth is judged.

    Args:
        private: bytes of host memory that only it has; None where that is not known.
        resident: bytes of that under live tensors and in announced pools, which are followed by themselves.
        tensors: bytes under its tensors outside pools, by device.
    """
    host = {} if private is None else {HOST: private - resident}
    return {**host, **{f"{_TENSORS}{device}": size for device, size in tensors.items()}}


def _of_turns(stage: str, key: str, process: ProcessName, steps: Sequence[int], allowed: int) -> Finding:
    kept = [step for step in steps if step > allowed]
    usual = sorted(kept)[len(kept) // 2]
    more = f"in {len(kept)} of {len(steps)} that followed another one"
    if key in COUNTED:
        said = f"{format_amount(usual, UNITS[key])} more with each {stage}, {sum(kept)} {more}"
        advice = f"{MAKING[key]} each {stage}"
        return _finding(process, key, stage, 0, said, count=sum(kept), trend="growth", advice=advice)
    what = {
        HOST: "host memory that is under no tensor grows",
        SHARED: "shared memory that it maps grows",
    }.get(key, f"tensors on {_device(key)} grow")
    looking = f"look in that process for what keeps bytes of each {stage}, as with `memray attach`"
    said = f"{what} by {format_bytes(usual)} with each {stage}, {format_bytes(sum(kept))} {more}"
    return _finding(
        process,
        key,
        stage,
        sum(kept),
        said,
        count=len(kept),
        trend="growth",
        advice=looking if key == HOST else _ADVICE[stage],
    )


def growth_on_card(process: ProcessName, device: str, series: TurnSeries, seconds: float) -> Finding | None:
    """Return the finding on memory of torch's on a card, of which a process takes more with time; None if it does not.

    Args:
        process: which.
        device: the card.
        series: bytes there after each interval.
        seconds: of an interval.
    """
    rise = series.rise(LEAST_A_TURN)
    if rise is None:
        return None
    rate, turns = rise.slope.rate, rise.turns
    each, in_time = (format_bytes(round(size)) for size in (rate, rate / seconds))
    size = round(rate * turns)
    said = (
        f"tensors on {device} grow by {format_bytes(size)} over {turns} intervals, "
        f"{each} with each ({in_time} a second)"
    )
    advice = "look in that process for what keeps tensors of each request, in no list, dict, set or deque that grows"
    key = f"{_TENSORS}{device}"
    return _finding(process, key, "intervals", size, said, count=turns, trend="growth", advice=advice)


Left = Sequence[tuple[Finding, Mapping[int, int]]]
"""Each holder of tensors that inferences have made, with their bytes by the inference's number, from 1."""


def growing_holder(left: Left, device: str, stage: str = "infer") -> HolderFacts | None:
    """Return who keeps most of what each inference leaves on a device; None where nobody keeps some of most of them.

    Args:
        left: who keeps something; the first inference fills what is filled once.
        device: on which the tensors grow.
        stage: whose turns have left it.
    """
    last = max((turn for _, by_turn in left for turn in by_turn), default=0)
    kept = [
        (sum(later.values()), finding)
        for finding, by_turn in left
        for later in [{turn: size for turn, size in by_turn.items() if turn > 1}]
        if finding.device == device and finding.holder and later and 2 * len(later) >= last - 1
    ]
    return _facts_of(max(kept, key=lambda each: each[0])[1], stage) if kept else None


def _facts_of(finding: Finding, stage: str) -> HolderFacts:
    return HolderFacts(
        note=Note(", held by " if finding.holder else "", finding.holder or ""),
        cause=finding.cause,
        verdict=finding.verdict,
        path=finding.path,
        advice=finding.advice or _ADVICE[stage],
    )


def is_under(root: str, finding: Finding) -> bool:
    """Return whether what a finding is about is held by a part of a root."""
    return bool(finding.path) and finding.path[0].edge == root


def grown_under(root: str, left: Left, turns: Turns) -> list[Finding]:
    """Return what has grown under one root, as an engine in this process, for each of its parts that keeps it.

    Args:
        root: the name of what the paths of the root's own begin at: what others keep of the results is theirs.
        left: what the turns of a stage have left.
        turns: which there were.
    """
    nobody = ProcessName(pid=0, name="")
    return [
        held_by(
            _of_turns(turns.stage, f"{_TENSORS}{finding.device}", nobody, steps.sizes, 0),
            _facts_of(finding, turns.stage),
        )
        for finding, steps in _growing(left, turns.again, 0)
        if is_under(root, finding)
    ]


def _growing(left: Left, turns: Collection[int], tolerance: int) -> Iterator[tuple[Finding, KeptSteps]]:
    """Yield the holders that keep more with each of some turns, with what each turn has added to them."""
    for finding, by_turn in left:
        steps = [by_turn.get(turn, 0) for turn in turns]
        kept = KeptSteps(steps, tolerance)
        if kept.grows:
            yield finding, kept


def held_by(finding: Finding, facts: HolderFacts) -> Finding:
    """Return a finding of this module with who holds what grows."""
    found = with_holder(finding, facts)
    if found.resource != "tensors":
        return found
    role = "" if found.process is None else role_of(found.process.name)
    suspects = ("other process", role, facts.note.holder)
    mark = fingerprint(resource=found.resource, device=found.device, stage=found.stage, suspects=suspects)
    return msgspec.structs.replace(found, fingerprint=mark)


def shared_bytes(pid: int) -> int | None:
    """Return the bytes of shared memory that a process maps; None where that may not be read."""
    mapped = mapped_shared_memory(pid)
    return None if mapped is None else sum(each.bytes for each in mapped)


def mappings_of(pid: int, others: Collection[int]) -> HolderFacts | None:
    """Say of which files a process maps most shared memory, and which other processes map these, too.

    Args:
        pid: the process.
        others: who may have made them, or have them, too.
    """
    mapped = mapped_shared_memory(pid)
    if not mapped:
        return None
    sizes = Counter[str]()
    for each in mapped:
        sizes[each.path] += each.bytes
    ((path, _),) = sizes.most_common(1)
    files = {each.file for each in mapped if each.path == path}
    sharing = [
        other
        for other in sorted(set(others) - {pid})
        if any(each.file in files for each in mapped_shared_memory(other) or ())
    ]
    whose = (
        f"mapped by pid {first_of([str(each) for each in sharing], _LISTED_PIDS)}, too"
        if sharing
        else "which nobody else maps"
    )
    return HolderFacts(
        note=Note(": ", f"{format_amount(len(files), 'mappings')} of {path}, {whose}"),
        cause="unknown",
        verdict=None,
        path=(),
        advice="close each bucket as often as it is opened, once it is copied",
    )


def things_held(finding: Finding, new: Sequence[str], holder: HolderFacts | None) -> HolderFacts | None:
    """Say what most of the things are that a process has more, and who holds them.

    Args:
        finding: that they become more with each turn.
        new: what each of them is.
        holder: who holds them, where that is known.
    """
    if not new:
        return None
    said = f": {kind_of(new)}"
    if holder is None:
        holder = HolderFacts(note=Note(said), cause="unknown", verdict=None, path=(), advice=None)
    else:
        note = msgspec.structs.replace(holder.note, text=f"{said};{holder.note.text}")
        holder = msgspec.structs.replace(holder, note=note)
    # What ends one of them does not end what the next turn makes.
    return msgspec.structs.replace(holder, advice=finding.advice)


class ProcessTurns:
    """The levels of one process after each test that used it, in bytes."""

    def __init__(self) -> None:
        self._last_turn = 0
        self._levels: dict[str, list[int]] = {}
        self._unknown: set[str] = set()

    def note(self, turn: int, private: int | None, cards: Mapping[str, int | None]) -> None:
        """Its levels after a test; what is not known once is never judged.

        Args:
            turn: the test's number; again, the reading replaces that of before.
            private: host memory that only it maps.
            cards: what the driver counts for it, by device.
        """
        known = {HOST: private, **cards}
        for key in {*known, *self._levels}:
            size = known.get(key, 0)
            if size is None:
                self._unknown.add(key)
            levels = self._levels.setdefault(key, [])
            if turn == self._last_turn and levels:
                levels.pop()
            levels.append(size or 0)
        self._last_turn = turn

    @property
    def can_show_growth(self) -> bool:
        """Return whether so many tests were noted that growth would show."""
        return len(self._levels.get(HOST, ())) > FEWEST_STEPS

    @property
    def last_turn(self) -> int:
        """Return the number of the test that was noted last; 0 before the first."""
        return self._last_turn

    def findings(self, process: ProcessName, stage: str, named: Mapping[str, int]) -> list[tuple[Finding, int]]:
        """Return what grows, each with the usual step.

        Args:
            process: which it is.
            stage: since when.
            named: bytes of tensors that are reported by name, by device.
        """
        found = []
        for key, levels in self._levels.items():
            if key in self._unknown or len(levels) < 2:
                continue
            steps = KeptSteps.between(levels, ALLOWED)
            if not steps.grows or not rises(levels):
                if key != HOST or not rises_slowly(levels):
                    continue
                steps = KeptSteps(steps.sizes)
            sizes = steps.added
            if sum(sizes) <= named.get(_device(key), 0) * 2:
                continue
            said = f"{_what(key)} {steps.said(format_bytes)}"
            facts = {"count": len(sizes), "trend": "growth", "advice": ADVICE}
            found.append((_finding(process, key, stage, sum(sizes), said, **facts), sorted(sizes)[len(sizes) // 2]))
        return found


def left_by_test(process: ProcessName, key: str, size: int) -> Finding:
    """Return what one test has left in a process that no fixture owns.

    Args:
        process: which it is.
        key: `HOST`, or a card as `cuda:0`.
        size: bytes.
    """
    return _finding(process, key, "test", size, f"{format_bytes(size)} more {_what(key)} than before the test")


def _finding(process: ProcessName, key: str, stage: str, size: int, said: str, **facts: Any) -> Finding:
    """Return a finding about a level of a process; one without a name is this one, in which an engine is."""
    resource: ResourceName = "tensors" if key.startswith(_TENSORS) else _LEVELS.get(key, "driver")
    return finding_of(
        resource,
        bytes=size,
        device=_device(key),
        stage=stage,
        statement=Statement(amount=said, came=None, process=process.text if process.name else ""),
        suspects=("other process", role_of(process.name)),
        process=process if process.name else None,
        **facts,
    )


def _device(key: str) -> str:
    if key in COUNTED:
        return ""
    return "cpu" if key in _LEVELS else key.removeprefix(_TENSORS)


def _what(key: str) -> str:
    return "host memory" if key == HOST else f"memory on {key}"


def growing_tensors(
    left: Left, turns: Collection[int], tolerance: int, process: ProcessName, stage: str
) -> list[Finding]:
    """Find those holders of tensors that have kept some of most tests that used a process.

    A cache that is full keeps what the last tests made, and nothing of the first ones.

    Args:
        left: each holder, with its bytes by the test in which they appeared.
        turns: the tests that used the process, by their numbers.
        tolerance: bytes that a test may leave.
        process: which it is.
        stage: as the finding calls its time.
    """
    found = []
    for finding, steps in _growing(left, turns, tolerance):
        if steps.turns[0] > (len(steps.sizes) + 1) // 2:
            continue
        total = sum(steps.added)
        message = f"{steps.said(format_bytes)}, {format_bytes(total)} on {finding.device} in all"
        held = f", held by {finding.holder}" if finding.holder else ""
        found.append(
            reworded(
                finding,
                f"{process.text}: {message}{held}",
                bytes=total,
                count=len(steps.turns),
                stage=stage,
                fingerprint=fingerprint(
                    resource="tensors",
                    device=finding.device,
                    stage=stage,
                    suspects=("growth", role_of(process.name), finding.holder or ""),
                ),
                former_fingerprint="",
                trend="growth",
                advice=ADVICE,
                process=process,
            )
        )
    return found

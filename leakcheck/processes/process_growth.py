"""Whether an engine's other processes grow from turn to turn: their tensors, and host memory beside them.

The first inference of a process fills what is filled once, and so does the first one after a sleep: what an inference
adds is judged where it comes right after another one. Each life may have processes of its own: those of one name are
turns of one. The same is asked of a process that belongs to a fixture, of which tests are the turns.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.findings.owner_growth import ADVICE
from lowtide.leakcheck.growth.quantities import HOST, IN_USE, QUANTITIES, SHARED, Quantity, Things, kind_of, things_of
from lowtide.leakcheck.growth.series import FEWEST_STEPS, KeptSteps, LevelKey, TurnSeries, rises
from lowtide.leakcheck.judging.fingerprints import finding_of, fingerprint
from lowtide.leakcheck.processes.messages import ExplainNew
from lowtide.leakcheck.processes.process_levels import pid_of, role_of
from lowtide.probes.host.process_files import things_sign
from lowtide.probes.processes.mapped_files import mapped_shared_memory
from lowtide.probes.stages import UPDATE
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding, ResourceName
from lowtide.reports.sizes import first_of, format_amount, format_bytes
from lowtide.reports.statement import HolderFacts, Note, Statement, reworded, with_holder

_ADVICE = {
    "infer": "let go of what each request adds when it ends, or bound what is kept",
    UPDATE: f"let go in {UPDATE} of what was sent, once it is copied; and of what it replaces",
}
"""What to do about the memory that each turn of a stage leaves."""

_TENSORS = LevelKey("tensors", "cpu")

_EXPLAINED_BY = {SHARED: (_TENSORS,), HOST: (SHARED, _TENSORS)}
"""What lies under which level, too: a tensor over a mapping, and pages of it that no other process maps."""

_LISTED_PIDS = 3

NOBODY = ProcessName(pid=0, name="")

_NONE: Mapping[str, int] = MappingProxyType({})

_FIRST = ("create", "reload", "shutdown")
"""What the names of stages begin with after which the next inference is the first one of an engine, or as good as."""

_FILLING = ("sleep", "wake")
"""The same of stages that may leave something to be filled by the next inference, the first time that they come."""


class Turns(msgspec.Struct):
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
    again: list[int] = msgspec.field(default_factory=list)
    _had_one: bool = False
    # What there has been since the last inference that may leave something to be filled, and before earlier ones.
    _between: tuple[str, ...] = ()
    _known: set[tuple[str, ...]] = msgspec.field(default_factory=lambda: {()})

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


class _Course(msgspec.Struct):
    """One level of one process after each turn, in bytes or how many, and whether it was known each time.

    The process is as it was described last, since its device may be known only later. For each level it is noted
    whether the turn came right after another one; `turn` is the last one's number.
    """

    process: ProcessName
    levels: list[int] = msgspec.field(default_factory=list)
    again: list[bool] = msgspec.field(default_factory=list)
    turn: int = 0
    is_known: bool = True

    def steps(self, allowed: int) -> KeptSteps:
        """Return what each turn has added for good that came right after another one.

        Not one with a sleep before it for the first time: its host copy, or a cache of pinned memory, is there from
        then on, once.
        """
        kept = KeptSteps.between(self.levels).sizes
        return KeptSteps([step for step, again in zip(kept, self.again[1:], strict=True) if again], allowed)

    def lower(self, size: int) -> None:
        """Take so many bytes out of the last level, and out of those before what had come by then if each turn did."""
        last = max(1, len(self.levels) - 1)
        self.levels = [
            level - size * max(turn, len(self.levels) == 1) // last for turn, level in enumerate(self.levels)
        ]

    def slow_steps(self, least: float, in_all: float) -> KeptSteps | None:
        """Return what each turn adds where that is less than one of a few turns may add, yet at least `least`.

        It is as much in each: of what few turns have taken besides, none is what grows.
        """
        series = TurnSeries()
        moves = (after - before for before, after in pairwise(self.levels))
        in_a_row = (move for move, again in zip(moves, self.again[1:], strict=True) if again)
        for level in accumulate(in_a_row, initial=0):
            series.add(level)
        rise = series.rise(least, in_all)
        return None if rise is None else KeptSteps([round(rise.slope.rate)] * rise.turns)


class ProcessGrowth:
    """Collects the levels of processes after inferences, or the turns of another stage, and judges them at the end.

    Args:
        stage: whose turns they are.
        of_tests: whether these are tests: one leaves more or less than another, and what goes up and down is none.

    Attributes:
        turns: those so far.
    """

    def __init__(self, stage: str = "infer", *, of_tests: bool = False) -> None:
        self.turns = Turns(stage)
        self._of_tests = of_tests
        # By the processes' name, and what it is a level of: of each process, in the order in which they came.
        self._courses: dict[tuple[str, LevelKey], dict[int, _Course]] = defaultdict(dict)

    def note(
        self, process: ProcessName, levels: Mapping[LevelKey, int | None], *, again: bool = True, turn: int = 0
    ) -> None:
        """Note a process's levels after a turn; one that is not known once is never judged.

        Args:
            process: which.
            levels: bytes, as of `levels_of`, and numbers of things.
            again: whether the turn came right after another one.
            turn: its number, where it may be read twice: then the later reading counts.
        """
        for key, size in self._with_gone(process, levels).items():
            course = self._courses[self._role_of(process), key].setdefault(process.pid, _Course(process))
            if turn and course.turn == turn:
                course.levels.pop()
                course.again.pop()
            course.process, course.turn = process, turn
            course.is_known = course.is_known and size is not None
            course.levels.append(size or 0)
            course.again.append(again)

    def correct(self, process: ProcessName, levels: Mapping[LevelKey, int | None]) -> None:
        """Another reading after the same turn, of a heap that was trimmed; as `note`.

        What was free in it may have come with any turn, or before all: each counts for as much.
        """
        for key, size in self._with_gone(process, levels).items():
            course = self._courses.get((self._role_of(process), key), {}).get(process.pid)
            if course is not None:
                course.is_known = course.is_known and size is not None
                course.lower(course.levels[-1] - (size or 0))

    def _with_gone(self, process: ProcessName, levels: Mapping[LevelKey, int | None]) -> Mapping[LevelKey, int | None]:
        """Return the levels, with 0 for a device on which there is nothing any more."""
        name = self._role_of(process)
        known = [key for (of, key), courses in self._courses.items() if of == name and process.pid in courses]
        return {**{key: 0 for key in known if key.resource in ("tensors", "driver")}, **levels}

    def _role_of(self, process: ProcessName) -> str:
        # Each process of a fixture is judged by itself, and may get its title late.
        return "" if self._of_tests else role_of(process.name)

    @property
    def noted(self) -> Collection[int]:
        """Return the processes whose host memory is known."""
        return {pid for (_, key), courses in self._courses.items() if key == HOST for pid in courses}

    @property
    def judged(self) -> Collection[int]:
        """Return the processes of which there were enough turns to say whether they grow."""
        return {
            pid
            for (_, key), courses in self._courses.items()
            if key == HOST and sum(len(course.steps(0).sizes) for course in courses.values()) >= FEWEST_STEPS
            for pid in courses
        }

    @property
    def suspects(self) -> Collection[ProcessName]:
        """Return the processes of all names that grow."""
        growing = (courses for place, courses in self._courses.items() if self._growing(*place) is not None)
        return list({pid: course.process for courses in growing for pid, course in courses.items()}.values())

    def _growing(self, name: str, key: LevelKey) -> tuple[ProcessName, KeptSteps] | None:
        """Return the process of a name that grows most; the last one and all steps, if only these show it.

        What a process takes and gives back to answer moves the pages that the kernel counts, as much as many turns add;
        what its heaps have given out it does not.
        """
        if key == IN_USE:
            return None
        found = self._grown_by(name, key)
        return self._grown_by(name, IN_USE) if found is None and key == HOST else found

    def _grown_by(self, name: str, key: LevelKey) -> tuple[ProcessName, KeptSteps] | None:
        """Return the same by one level.

        One rank of several may grow alone; and of lives with few inferences each, no process shows growth by itself.
        """
        quantity, courses = QUANTITIES[key.resource], self._courses.get((name, key), {}).values()
        steps = [(course, course.steps(quantity.allowed)) for course in courses if course.is_known]
        alone = [(course, own) for course, own in steps if self._grow(course.levels, own, quantity)]
        if not alone and quantity.is_slow:
            alone = [
                (course, slow)
                for course, _ in steps
                if (slow := course.slow_steps(_least(key, len(course.levels)), quantity.in_all)) is not None
            ]
        if alone:
            course, own = max(alone, key=lambda each: sum(each[1].sizes))
            return course.process, own
        judged = [(course, own) for course, own in steps if own.sizes]
        together = KeptSteps([size for _, own in judged for size in own.sizes], quantity.allowed)
        # That steps of different processes alternate with others says nothing: what fills once in each does so, too.
        often = len(together.turns) * 3 > len(together.sizes)
        is_any = len(judged) > 1 and often and self._grow([], together, quantity)
        return (judged[-1][0].process, together) if is_any else None

    def _grow(self, levels: Sequence[int], steps: KeptSteps, quantity: Quantity) -> bool:
        is_steady = not self._of_tests or rises(levels)
        return steps.grows and len(steps.turns) >= quantity.fewest and is_steady

    def findings(self, named: Mapping[str, int] = _NONE) -> list[Finding]:
        """Return one for each name whose processes grow, and for each of their levels that does.

        What is told already is `named`, in bytes on each device.
        """
        growing = {place: found for place in self._courses if (found := self._growing(*place)) is not None}
        return [
            self._told(key, process, steps)
            for (name, key), (process, steps) in growing.items()
            if not any(
                sum(growing[name, other][1].sizes) * 2 > sum(steps.sizes)
                for other in _EXPLAINED_BY.get(key, ())
                if (name, other) in growing
            )
            and named.get(key.device, 0) * 2 < sum(steps.added)
        ]

    def usual_step(self, finding: Finding) -> int:
        """Return how much a turn usually adds to the level that a finding is about, which grows."""
        role = self._role_of(finding.process or NOBODY)
        growing = self._growing(role, LevelKey(finding.resource, finding.device))
        return 0 if growing is None else growing[1].usual

    def _told(self, key: LevelKey, process: ProcessName, steps: KeptSteps) -> Finding:
        if not self._of_tests:
            return _of_turns(self.turns.stage, key, process, steps)
        quantity, total = QUANTITIES[key.resource], sum(steps.added)
        if quantity.things:
            return risen(key, total, steps.said(quantity.amount), self.turns.stage, process=process, advice=ADVICE)
        said = f"{_what(key)} {steps.said(format_bytes)}"
        return risen(key, total, said, self.turns.stage, process=process, count=len(steps.added), advice=ADVICE)


class ToldGrowth:
    """What of what has grown is told already, by where it is, in bytes or bytes a second: half explains the rest."""

    def __init__(self) -> None:
        self._known: dict[Hashable, float] = defaultdict(float)

    def add(self, place: Hashable, amount: float) -> None:
        """Note what is told."""
        self._known[place] += amount

    def explains(self, place: Hashable, amount: float) -> bool:
        """Return whether so much growth is explained; what is not counts as told from here on."""
        if 2 * self._known[place] >= amount:
            return True
        self.add(place, amount)
        return False


def is_on_card(finding: Finding) -> bool:
    """Return whether what a finding is about lies on a card."""
    return finding.device not in ("", "cpu")


def one_of_each(grown: Sequence[Finding], containers: Sequence[Finding]) -> list[Finding]:
    """Return what has grown, each cause once: a container that grows is what its process has more."""
    told = {(_role_in(each), each.holder) for each in grown if each.holder}
    named = [each for each in containers if (_role_in(each), each.holder) not in told]
    by_role = Counter[str]()
    for each in named:
        by_role[_role_in(each)] += each.bytes
    unexplained = [
        each
        for each in grown
        if each.resource != "host-memory" or each.holder or by_role[_role_in(each)] * 2 < each.bytes
    ]
    return [*unexplained, *named]


def _role_in(finding: Finding) -> str:
    return "" if finding.process is None else role_of(finding.process.name)


_LEAST_TO_THE_BYTE = 16 << 10
"""Bytes that each of many turns must add by an exact reading: tables of a runtime grow by less."""


def _least(key: LevelKey, turns: int) -> float:
    """Return the bytes that each turn must add; of many less where a reading is exact, as they are no less in all."""
    quantity = QUANTITIES[key.resource]
    return max(_LEAST_TO_THE_BYTE, min(quantity.least, quantity.in_all / turns)) if key == IN_USE else quantity.least


def levels_of(private: int | None, resident: int, tensors: Mapping[str, int], in_use: int = 0) -> dict[LevelKey, int]:
    """Return the levels by which a process's growth is judged.

    Args:
        private: bytes of host memory that only it has; None where that is not known.
        resident: bytes of that under live tensors and in announced pools, which are followed by themselves.
        tensors: bytes under its tensors outside pools, by device.
        in_use: bytes that its heaps have given out besides; 0 where it does not say.
    """
    host = {} if private is None else {HOST: private - resident, **({IN_USE: in_use} if in_use else {})}
    return {**host, **{LevelKey("tensors", device): size for device, size in tensors.items()}}


def _of_turns(stage: str, key: LevelKey, process: ProcessName, steps: KeptSteps) -> Finding:
    quantity, total = QUANTITIES[key.resource], sum(steps.added)
    adding, count = len(steps.added), len(steps.sizes)
    more = f"in {adding} of {count} that followed another one"
    each = f"each {stage}" if 2 * adding >= count else f"one {stage} in {round(count / adding)}"
    if quantity.things:
        said = f"{quantity.amount(steps.usual)} more with {each}, {total} {more}"
        return risen(key, total, said, stage, turn=stage, process=process)
    what = {HOST: "host memory that is under no tensor grows", SHARED: f"{quantity.what} grows"}
    grows = what.get(key, f"tensors on {key.device} grow")
    said = f"{grows} by {format_bytes(steps.usual)} with {each}, {format_bytes(total)} {more}"
    advice = {} if key == HOST else {"advice": _ADVICE[stage]}
    return risen(key, total, said, stage, turn=stage, process=process, count=len(steps.added), **advice)


def left_by_test(process: ProcessName, key: LevelKey, size: int) -> Finding:
    """Return what a test has left, in bytes, in a process that no fixture owns: host memory, or the driver's."""
    said = f"{format_bytes(size)} more {_what(key)} than before the test"
    return risen(key, size, said, "test", process=process, trend=None, advice=None)


def _what(key: LevelKey) -> str:
    return QUANTITIES[key.resource].what if key in (HOST, SHARED) else f"memory on {key.device}"


def risen(
    key: LevelKey,
    more: int,
    said: str,
    stage: str,
    *,
    turn: str = "request",
    process: ProcessName = NOBODY,
    suspects: Sequence[str] = (),
    **facts: Any,
) -> Finding:
    """Return the finding on a level of a process that is higher than it was.

    Args:
        key: which.
        more: by how much: bytes, or how many.
        said: that in words, with since when, and how fast.
        stage: as the finding calls that time.
        turn: what is to give it back.
        process: whose; without a name: this one's, in which an engine is, or one that is named later.
        suspects: what its fingerprint is made of, too, where that is not the role of the process.
        facts: what else is known, as of `Finding`.
    """
    quantity = QUANTITIES[key.resource]
    known: dict[str, Any] = {"trend": "growth", "advice": quantity.advice.format(turn=turn)}
    return finding_of(
        key.resource,
        device=key.device,
        stage=stage,
        statement=Statement(amount=said, came=None, process=process.text if process.name else ""),
        suspects=suspects or ("other process", role_of(process.name)),
        process=process if process.name else None,
        **{**known, "count" if quantity.things else "bytes": more, **facts},
    )


Left = Sequence[tuple[Finding, Mapping[int, int]]]
"""Each holder of tensors that inferences have made, with their bytes by the inference's number, from 1."""


def growing_holder(left: Left, grown: Finding) -> HolderFacts | None:
    """Return who keeps what turns leave, as a finding says; None where nobody keeps some of half of those that do.

    The first turn of a stage fills what is filled once.
    """
    last = max((turn for _, by_turn in left for turn in by_turn), default=0)
    adding = min(grown.count, last - 1)
    kept = [
        (sum(later.values()), finding)
        for finding, by_turn in left
        for later in [{turn: size for turn, size in by_turn.items() if turn > 1}]
        if finding.device == grown.device and finding.holder and later and 2 * len(later) >= adding
    ]
    return _facts_of(max(kept, key=lambda each: each[0])[1], grown.stage) if kept else None


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

    What others keep of the results than what the paths of the root's own begin at is theirs.
    """
    return [
        held_by(
            _of_turns(turns.stage, LevelKey("tensors", finding.device), NOBODY, steps),
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
    if finding.resource == "host-memory":
        # To let go of the arrays that are there would not keep the next turn from adding some.
        facts = replace(facts, advice=_ADVICE.get(finding.stage, ADVICE))
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
    """Say of which files a process maps most shared memory, and which `others` map these, too."""
    mapped = mapped_shared_memory(pid)
    if not mapped:
        return None
    sizes = Counter[str]()
    for each in mapped:
        sizes[each.path] += each.bytes
    ((path, size),) = sizes.most_common(1)
    # Each bucket may have a name of its own.
    are_alike = 2 * size < sizes.total()
    files = {each.file for each in mapped if are_alike or each.path == path}
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
        note=Note(": ", f"{format_amount(len(files), 'mappings')} {'as' if are_alike else 'of'} {path}, {whose}"),
        cause="unknown",
        verdict=None,
        path=(),
        advice="close each bucket as often as it is opened, once it is copied",
    )


class CountedThings:
    """The threads and descriptors of some processes: how many each has, and what those are that came later.

    Args:
        ask: asks a process who holds some; None where it does not answer, or nobody is known to.
    """

    def __init__(self, ask: Callable[[int, ExplainNew], HolderFacts | None]) -> None:
        self._ask = ask
        self._first: dict[int, Things] = {}
        # What it had last, by what moves with that.
        self._latest: dict[int, tuple[object, Mapping[LevelKey, int | None]]] = {}

    def levels(self, pid: int) -> dict[LevelKey, int]:
        """Return how many a process has; what it has when it is read first is not new."""
        things = things_of(pid)
        self._first.setdefault(pid, things)
        return {LevelKey(resource): len(each) for resource, each in things.items()}

    def all_levels(self, pid: int) -> Mapping[LevelKey, int | None]:
        """Return these, and the bytes of shared memory that it maps; as last read where nothing has come or gone.

        To list all that takes 2 ms for a process with torch, and to see whether there are as many of them a fortieth.
        """
        sign = things_sign(pid)
        before, levels = self._latest.get(pid, (None, {}))
        if sign is None or sign != before:
            levels = {**self.levels(pid), SHARED: shared_bytes(pid)}
            self._latest[pid] = sign, levels
        return levels

    def named(self, finding: Finding) -> HolderFacts | None:
        """Say what most of the things are that a process has more, and who holds them, where that is known."""
        pid = pid_of(finding)
        known = self._first.get(pid, {}).get(finding.resource, {})
        things = things_of(pid).get(finding.resource, {})
        new = {number: what for number, what in things.items() if known.get(number) != what}
        if not new:
            return None
        said = f": {kind_of([*new.values()])}"
        held = self._holder(pid, finding.resource, things.keys() - new.keys())
        # What ends one of them does not end what the next turn makes.
        advice = finding.advice
        if held is None:
            return HolderFacts(note=Note(said), cause="unknown", verdict=None, path=(), advice=advice)
        note = msgspec.structs.replace(held.note, text=f"{said};{held.note.text}")
        return msgspec.structs.replace(held, note=note, advice=advice)

    def of_mappings(self, pid: int, others: Collection[int]) -> HolderFacts | None:
        """Say what `mappings_of` does, and who holds the descriptors of what is mapped, where that is known."""
        facts = mappings_of(pid, others)
        if facts is None:
            return None
        known = things_of(pid)["file-descriptors"]
        of_mapped = things_of(pid, mapped=True)["file-descriptors"].keys() - known.keys()
        held = self._holder(pid, "file-descriptors", known.keys()) if of_mapped else None
        if held is None:
            return facts
        note = msgspec.structs.replace(held.note, text=f": {facts.note.holder};{held.note.text}")
        return msgspec.structs.replace(held, note=note, advice=facts.advice)

    def _holder(self, pid: int, resource: ResourceName, known: Collection[int]) -> HolderFacts | None:
        return self._ask(pid, ExplainNew(resource=resource, known=tuple(known)))


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

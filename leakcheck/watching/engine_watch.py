"""Watches an engine in this process where it says in which stage it is: what sleeps and inferences leave behind.

What an engine keeps of each inference, or of each update of its weights, is looked for while it lives, since its end
may give it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from lowtide.leakcheck.explaining.explain import explain
from lowtide.leakcheck.findings.causes import with_holders
from lowtide.leakcheck.findings.item_findings import NamedGrowth
from lowtide.leakcheck.findings.life_findings import ENGINE, LEAST, SleptTensors, largest_of_cause, not_judged
from lowtide.leakcheck.findings.storage_holders import Context
from lowtide.leakcheck.findings.turn_growth import FEWEST_TURNS as FEWEST_TO_GROW
from lowtide.leakcheck.findings.turn_growth import INFERENCES, OpenEnd, TurnGrowth
from lowtide.leakcheck.growth.series import FEWEST_STEPS
from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.processes.process_growth import Turns, grown_under
from lowtide.leakcheck.resources import read_items
from lowtide.leakcheck.watching.watch import Watch
from lowtide.probes.device.allocations import read_allocations
from lowtide.probes.host.counters import CounterReader
from lowtide.probes.memory.pointers import LabelledRange, TensorPointers, find_pointers, gone_since
from lowtide.probes.memory.ranges import Range, merge
from lowtide.probes.memory.tensors import plain_tensors
from lowtide.probes.objects.listed import all_instances, collector_paused
from lowtide.probes.originals import loaded
from lowtide.probes.stages import UPDATE, EnteredStage, PoolReading, announced_pools
from lowtide.reports.schema import Finding, NotMeasured, ResourceName
from lowtide.reports.statement import as_held

_MOST_WORDS = 1 << 23
"""Words of a tensor that is read on the host: a block table of 64 MiB; a card reads 141 GB in 31 ms."""

_PART = 0.1
"""The part of the time that readings of containers may take: a test names an engine so that its turns are judged."""

_UNREAD = "reading how much its containers hold would have taken more than a tenth of the session's time: run it alone"

_WIDER = 1.25
"""How many times as many turns there are at the next look, where one has found growth: it may have ended since."""


class SleepWatch:
    """Remembers the mapped parts of the announced arenas when a stage `sleep` begins.

    When a stage `wake…` ends, all live tensors of 64-bit integers are searched for pointers to what of it is not mapped
    any more.  An arena that is asleep still, as after a wake of another part, is looked at after the next wake.

    What a sleep gives back and a wake makes is compared besides: see `SleptTensors`.

    Args:
        elsewhere: says whether the engine's tensors are in other processes, whose sleep is judged by them.

    Attributes:
        engine: the one whose stage it is, where that is known; whoever sets it lets go of it.
    """

    def __init__(self, elsewhere: Callable[[], bool] = lambda: False) -> None:
        self._memory: dict[str, list[LabelledRange]] = {}
        self._findings: list[Finding] = []
        self._slept = SleptTensors(beside_arenas=False)
        self.engine: object = None
        self._elsewhere = elsewhere
        self._unjudged: dict[str, NotMeasured] = {}

    def entered(self, stage: EnteredStage) -> None:
        """Note what is there when a stage begins."""
        if _sleeps_or_wakes(stage):
            self._slept.begin(stage.name)
        if _is_outermost(stage, "sleep"):
            self._memory = {}
            for pool in _arenas():
                self._memory.setdefault(pool.device, []).extend(
                    LabelledRange(address, address + length, pool.tag) for address, length in pool.ranges
                )

    def left(self, stage: EnteredStage, error: BaseException | None) -> None:
        """Judge a stage that has ended; a wake that failed may be made again."""
        if _sleeps_or_wakes(stage):
            self._compare(stage.name, failed=error is not None)
        if self._memory and error is None and _is_outermost(stage, "wake"):
            for device, memory in list(self._memory.items()):
                pools = [pool for pool in _arenas() if pool.device == device]
                awake = {pool.tag for pool in pools if pool.mapped}
                asleep = {pool.tag for pool in pools} - awake
                gone = gone_since(memory, [part for pool in pools for part in pool.ranges])
                self._memory[device] = [part for part in memory if part.label in asleep]
                judged = [part for part in gone if part.label not in asleep]
                if judged:
                    self._search(device, stage.name, judged, gone)
            self._memory = {device: memory for device, memory in self._memory.items() if memory}

    def take(self) -> tuple[Finding, ...]:
        """Return what was found since the last call."""
        found, self._findings = largest_of_cause(self._findings), []
        return tuple(found)

    def take_unjudged(self) -> tuple[NotMeasured, ...]:
        """Return the sleeps since the last call that have given back nothing, where nobody says what they should."""
        unjudged, self._unjudged = tuple(self._unjudged.values()), {}
        return unjudged

    def _compare(self, stage: str, *, failed: bool) -> None:
        self._slept.end()
        if failed:
            return
        if stage.startswith("wake"):
            self._findings += self._slept.more_awake(stage, lambda: Context(roots=[(ENGINE, self.engine)], living=True))
            return
        self._findings += self._slept.only_collected(stage)
        sizes = self._slept.kept_asleep()
        # Tensors that are none of the engine's are held, too.
        if sizes is not None and sizes[0] - sizes[1] < LEAST and not self._elsewhere():
            self._unjudged[stage] = not_judged(stage, sizes, self._slept.kind)

    def _search(self, device: str, stage: str, judged: Sequence[LabelledRange], gone: Iterable[LabelledRange]) -> None:
        torch: Any = loaded("torch")
        with collector_paused(), plain_tensors(torch):
            tensors = _tables(torch, device, [(part.start, part.stop - part.start) for part in gone])
            found = find_pointers({str(place): tensor for place, tensor in enumerate(tensors)}, judged).pointers
            held = [tensors[int(item.name)] for item in found]
            explanations = explain(held, ignore={id(held), id(tensors)}) if held else []
        for item, explanation in zip(found, explanations, strict=True):
            # What nothing holds is of an engine before this one, whose memory had these addresses too.
            if not explanation.path:
                continue
            finding = finding_of(
                "pointers",
                cause="not-restored",
                bytes=8 * item.aligned,
                device=device,
                stage=stage,
                message=_message(item, explanation.holder or "a tensor"),
                suspects=(*explanation.suspects[:1], "not-restored"),
                holder=explanation.holder,
                verdict=explanation.verdict,
                path=explanation.path,
                advice=f"write the addresses again in {stage}, once the memory that they lead to is mapped",
            )
            self._findings.append(finding)


def _message(item: TensorPointers, holder: str) -> str:
    first = item.hits[0]
    more = f", and {item.aligned - 1} more" if item.aligned > 1 else ""
    return (
        f"{holder} holds pointers to memory that is not mapped any more: "
        f"{first.value:#x} at byte {first.offset}, which was in arena {first.label!r} when the sleep began{more}"
    )


def _is_outermost(stage: EnteredStage, name: str) -> bool:
    # An engine's own mark within that of its test is the same sleep.
    return stage.name.startswith(name) and not any(part.startswith(name) for part in stage.path[:-1])


def _sleeps_or_wakes(stage: EnteredStage) -> bool:
    return _is_outermost(stage, "sleep") or _is_outermost(stage, "wake")


def _arenas() -> list[PoolReading]:
    return [pool for pool in announced_pools() if pool.kind == "arena"]


def _tables(torch: Any, device: str, gone: Sequence[Range]) -> list[Any]:
    """Return the live tensors of 64-bit integers whose memory can be read."""
    readable = _readable(device)
    kinds = [getattr(torch, name, None) for name in ("int64", "uint64")]
    found: list[Any] = []
    known: set[int] = set()
    for tensor in all_instances(torch.Tensor):
        if type(tensor) is not torch.Tensor:
            continue
        if str(tensor.device) != device or tensor.layout is not torch.strided or tensor.numel() == 0:
            continue
        if not any(tensor.dtype is kind for kind in kinds) or (device == "cpu" and tensor.numel() > _MOST_WORDS):
            continue
        start = tensor.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        stop = start + (last + 1) * tensor.element_size()
        if start in known or any(address < stop and start < address + length for address, length in gone):
            continue
        # A card that is asked for what is not mapped does not answer any more.
        if readable is None or any(address <= start and stop <= address + length for address, length in readable):
            found.append(tensor)
            known.add(start)
    return found


def _readable(device: str) -> Sequence[Range] | None:
    """Return what is mapped on a card, from its driver's list; None where all can be read, nothing where no list is."""
    if device == "cpu":
        return None
    return merge(read_allocations(int(device.partition(":")[2])) or ())


class _Followed(msgspec.Struct):
    """A stage whose turns are followed: how the watch calls it, after how many is looked next, and what was found last.

    What was found of an engine holds until it is looked at again: a pool may have filled meanwhile.
    """

    turns: Turns
    label: str = ""
    next: int = FEWEST_STEPS
    found: dict[int, dict[str, Finding]] = msgspec.field(default_factory=dict)


class EngineGrowth:
    """Looks at the engine of a test, at a growing number of turns of a stage, since a look goes through the heap."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        # One for all tests: what it may cost is that of the session.
        self._containers = TurnGrowth(INFERENCES, self._named_engine, part=_PART)
        self._engine: object = None
        counters = CounterReader(None, card=False, warnings_filters=False, resources=read_items)
        self._named = NamedGrowth(UPDATE, lambda: counters.read_in_part(settings="none").items)
        self._begin()

    def _begin(self) -> None:
        """Begin a test: nothing is known of its engine."""
        self._followed = [_Followed(Turns("infer")), _Followed(Turns(UPDATE))]
        self._inferences, self._readings = 0, OpenEnd()
        self._of_containers: tuple[Finding, ...] = ()
        # By resource, with who held it when it was looked at last.
        self._held: dict[ResourceName, Finding] = {}

    def before(self, stage: str, engine: object) -> None:
        """Look before a stage that may give back what has grown: a shutdown."""
        for followed in self._followed if stage == "shutdown" else ():
            if not followed.turns.missing:
                self._look(followed, engine)
        self._named.begin(stage)

    def after(self, stage: str, engine: object, label: str) -> None:
        """Note that a stage of an engine has ended, which the watch calls `label`."""
        self._named.end(stage)
        for followed in self._followed:
            followed.turns.after(stage)
            if stage == followed.turns.stage:
                followed.label = label
            if len(followed.turns.again) >= followed.next:
                self._look(followed, engine)
                turns = len(followed.turns.again)
                followed.next = math.ceil(_WIDER * turns) if followed.found else 2 * turns
        if stage == "infer":
            self._read_containers(engine)

    def _look(self, followed: _Followed, engine: object) -> None:
        left = self._watch.kept_of(followed.label, ENGINE, engine, followed.turns.again)
        found = {each.fingerprint: each for each in grown_under(ENGINE, left, followed.turns)}
        for leak in self._named.leaks() if followed.turns.stage == UPDATE else ():
            context = Context(roots=[(ENGINE, engine)], living=True, maker_of=self._watch.maker_of)
            self._held[leak.finding.resource] = with_holders(leak, context, with_cause=True)
        followed.found.pop(id(engine), None)
        if found:
            followed.found[id(engine)] = found

    def _read_containers(self, engine: object) -> None:
        self._inferences += 1
        if not self._readings.is_read(self._inferences):
            return
        self._engine = engine
        try:
            self._containers.read(self._inferences, begins=self._readings.begins)
            if self._inferences >= FEWEST_TO_GROW:
                self._of_containers = self._containers.so_far()
        finally:
            self._engine = None

    def _named_engine(self) -> list[tuple[str, object]]:
        return [(ENGINE, self._engine)]

    def take_unjudged(self) -> tuple[NotMeasured, ...]:
        """Return that containers of an engine may have grown unseen since the last verdict, where that is so."""
        unread = self._containers.take_unread()
        are_enough = self._inferences >= FEWEST_TO_GROW
        return (NotMeasured(what="what grows with each inference", why=_UNREAD),) if unread and are_enough else ()

    def take(self, known: Sequence[Finding]) -> tuple[Finding, ...]:
        """Return what was found since the last call.

        Args:
            known: what the test has left: what an engine still keeps is told by that alone.
        """
        of_tensors = {finding.device for finding in known if finding.resource == "tensors"}
        of_items = {finding.resource for finding in known}
        of_engines = [found for followed in self._followed for found in followed.found.values()]
        grown = [*{mark: each for found in of_engines for mark, each in found.items()}.values()]
        found = [each for each in grown if each.device not in of_tensors]
        under_tensors = sum(each.bytes for each in found if each.device == "cpu")
        named = [each for each in self._named.findings() if each.resource not in of_items]
        # A tensor over a mapping is one thing.
        named = [each for each in named if each.resource != "shared-memory" or 2 * under_tensors < each.bytes]
        found += [as_held(each, self._held[each.resource]) if each.resource in self._held else each for each in named]
        self._named.forget()
        # A container of tensors is told by these.
        holders = {finding.holder for finding in (*known, *found)}
        found += [each for each in self._of_containers if each.holder not in holders]
        self._containers.break_off()
        self._begin()
        return tuple(found)

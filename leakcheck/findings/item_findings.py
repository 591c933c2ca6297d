"""Findings about things with names that are no tensors: who holds them, if that is known, and what ends them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.explaining.explain import Explanation
from lowtide.leakcheck.growth.series import KeptSteps
from lowtide.leakcheck.judging.device_memory import MEMORY_POOL
from lowtide.leakcheck.judging.filled_caches import CachedItem
from lowtide.leakcheck.judging.fingerprints import finding_of, fingerprint, fingerprint_of_items, whereabouts
from lowtide.leakcheck.judging.judge import FROZEN, listed
from lowtide.leakcheck.judging.ladder import ALLOCATOR_HOLDER, release
from lowtide.leakcheck.resources import resource_of
from lowtide.leakcheck.resources.resource import Change, Items, Rung
from lowtide.leakcheck.resources.settings import ABSENT, SettingChange, advice, describe_change, sentences
from lowtide.probes.device.torch_allocator import any_graph_alive, stranded_segments
from lowtide.probes.host.counters import SettingReader
from lowtide.probes.memory.stack_frames import StackFrame, allocating_function
from lowtide.probes.objects.listed import FROZEN_AT_STARTUP
from lowtide.probes.originals import gc, os
from lowtide.probes.processes.mapped_files import mapped_shared_memory
from lowtide.reports.schema import Finding, Remedy, ResourceName
from lowtide.reports.sizes import first_of, format_amount, format_bytes
from lowtide.reports.statement import Note, noted, restated

UNFROZEN = "the heap is not frozen any more"
"""What is different after `gc.unfreeze()`."""

HARMLESS = ("threads",)
"""The resources whose remedy changes nothing, and only waits.

No cache is emptied, process group destroyed or heap unfrozen while tests follow: these may be older than the leak, and
a later test may need them.
"""

_SHOWN_SETTINGS = 3
_TOLD_SETTINGS = 8


class HeldMemory(msgspec.Struct, frozen=True):
    """What host memory is said to be of.

    Attributes:
        items: the identities of the objects; of a container that does not go itself, which of its entries.
        otherwise: what is known where it turns out that it is not of these; None where their sizes are the evidence.
    """

    items: Mapping[int, range | None]
    otherwise: Finding | None = None


class ItemLeak(msgspec.Struct, frozen=True, eq=False):
    """A finding about things with names.

    Attributes:
        finding: as far as it is known.
        key: the metric's key, as `threads`, `reserved cuda:0`.
        names: what is there and should not be, with bytes or 1 each.
        subject: whose it is, by its place among those that are judged.
        explanation: who holds it, where there is a path to that.
        cached: of what caches keep, where each of the names is.
        module: the test module in which it leaked, or the file of the fixture.
        changes: of process-wide settings, each with what it was.
        endings: of threads, what ends them.
        through: of threads, the identities of what they work for, and of the objects on the program's ways there.
        held: of host memory, the objects that it is said to be of.
    """

    finding: Finding
    key: str
    names: Mapping[str, int]
    subject: int
    explanation: Explanation | None = None
    cached: Mapping[str, CachedItem] = msgspec.field(default_factory=dict)
    module: str = ""
    changes: tuple[SettingChange, ...] = ()
    endings: tuple[Change, ...] = ()
    through: frozenset[int] = frozenset()
    held: HeldMemory | None = None

    def without(self, left: Mapping[str, int], action: str) -> ItemLeak:
        """Return the same after an action that was meant for something else, and may have ended some of this too."""
        names = {name: size for name, size in self.names.items() if name in left}
        if len(names) == len(self.names):
            return self
        returned = sum(self.names.values()) - sum(names.values()) if self.finding.bytes else 0
        remedy = Remedy(action=action, returns_bytes=returned)
        # What goes with a tensor is no library's workspace, of whatever size it is.
        finding = self.finding if self.finding.cause != "library-workspace" else _as_native(self, self.names)
        gave = format_bytes(returned) if returned else "" if names else "it"
        finding = noted(finding, f"; {action} returns {gave}" if gave else "", remedy=remedy, tried=(remedy,))
        return replace(self, finding=finding, names=names)

    def among(self, left: Mapping[str, int]) -> ItemLeak:
        """Return the same, of what is there still."""
        return replace(self, names={name: size for name, size in self.names.items() if name in left})

    def left(self, read: Callable[[str], Mapping[str, int] | None]) -> Mapping[str, int]:
        """Return what is still there of it; all of it if that is unknown.

        By a metric's key, `read` gives what there is now, None if that cannot be read.
        """
        if self.key == FROZEN:
            return frozen_items()
        if self.changes:
            return {describe_change(change): 1 for change in still_changed(self.changes)}
        if self.cached:
            return {name: size for name, size in self.names.items() if self.cached[name].is_there}
        resource = resource_of(self.finding.resource)
        there = None if resource is None else resource.still_there(self.names)
        if there is not None:
            return {name: self.names[name] for name in there}
        now = read(self.key)
        return self.names if now is None else now


def is_harmless(leak: ItemLeak) -> bool:
    """Return whether a remedy takes nothing that a program that goes on could need."""
    return leak.finding.resource in HARMLESS or leak.key.startswith(MEMORY_POOL)


def with_changes(leak: ItemLeak, changes: Sequence[SettingChange], place_of: Callable[[str], str]) -> ItemLeak:
    """Return a finding about process-wide settings, with what each was and is, and what puts it back.

    Where a setting was set last, by its name, `place_of` says; empty where that is not known.
    """
    told = sentences(changes, {change.name: place_of(change.name) for change in changes})
    names = tuple(dict.fromkeys(name for name, _ in told))
    finding = restated(
        leak.finding,
        {
            "holder": first_of(names, _SHOWN_SETTINGS),
            "advice": advice(changes),
        },
        amount=format_amount(len(changes), "process-wide settings"),
        is_since=False,
        things=tuple(sentence for _, sentence in told),
        most=_TOLD_SETTINGS,
        names=names,
    )
    return replace(leak, finding=finding, changes=tuple(changes))


def still_changed(changes: Iterable[SettingChange]) -> list[SettingChange]:
    """Return those of the settings that are not what they were."""
    now = SettingReader().read()
    return [change for change in changes if not change.is_undone_by(now.get(change.name, ABSENT))]


def with_followers(leak: ItemLeak) -> ItemLeak:
    """Return the same, of the objects that later tests have put in the place of those that were added to settings."""
    if not leak.changes:
        return leak
    now = SettingReader().read()
    return replace(leak, changes=tuple(change.followed_in(now) for change in leak.changes))


def with_fingerprint(leak: ItemLeak, module: str) -> ItemLeak:
    """Return the leak, of which all is known by now, with the fingerprint that names it in its test module."""
    explanation = leak.explanation
    holders = () if explanation is None or not explanation.path else explanation.suspects[:1]
    mark = fingerprint_of_items(
        leak.key,
        # Which segments of a pool are empty says nothing where it is known who holds the pool.
        () if leak.key == FROZEN or holders else [change.setting for change in leak.changes] or leak.names,
        **whereabouts(leak.finding),
        suspects=(leak.finding.cause, *holders),
        allocated_in=allocating_function(_stack(leak.finding)),
        module="" if holders else module,
    )
    finding = msgspec.structs.replace(leak.finding, fingerprint=mark)
    return replace(leak, finding=finding, module=module)


def only(leak: ItemLeak, names: dict[str, int]) -> ItemLeak:
    """Return the leak of some of the things, with the fingerprint that they would have alone."""
    finding, resource = leak.finding, resource_of(leak.key)
    advice = finding.advice
    if resource is not None and advice == resource.advice([*leak.names]):
        advice = resource.advice([*names])
    finding = restated(
        finding,
        {
            "advice": advice,
            "bytes": sum(names.values()) if finding.bytes else 0,
            "count": len(names) if not finding.bytes else finding.count,
            "holder": listed(leak.key, names),
        },
        things=tuple(sorted(names)),
        most=None,
        notes=(),
    )
    return with_fingerprint(replace(leak, finding=finding, names=names), leak.module)


def _stack(finding: Finding) -> list[StackFrame]:
    return [StackFrame(frame.file, frame.line, frame.function) for frame in finding.allocated_at]


def confirmed_workspaces(leak: ItemLeak, left: Callable[[], Mapping[str, int]], *, is_first: bool) -> ItemLeak:
    """Tell BLAS workspaces from other blocks of their size: clearing the workspaces gives the former back.

    Those that come with the first use of a library are taken for what they seem to be, since clearing them only makes
    the next test take them again; and while a CUDA graph is alive nothing is cleared, for the graph may have captured
    the workspace. Which blocks are there is read by `left`.
    """
    if is_first or any_graph_alive():
        return leak
    release(Rung.CLEAR_WORKSPACES)
    names = {name: size for name, size in left().items() if name in leak.names}
    if not names:
        return leak
    return ItemLeak(_as_native(leak, names), leak.key, names, leak.subject)


def _as_native(leak: ItemLeak, names: Mapping[str, int]) -> Finding:
    """Return a finding about blocks of a workspace's size that turned out to be something else."""
    size = sum(names.values())
    blocks = [name.replace("workspace", "block", 1) for name in names]
    facts = {**whereabouts(leak.finding), "resource": "tensors", "suspects": ("native",)}
    mark = fingerprint_of_items(
        f"native {leak.finding.device}",
        blocks,
        allocated_in=allocating_function(_stack(leak.finding)),
        module=leak.module,
        **facts,
    )
    former = fingerprint(**facts, by_phase=True)
    return restated(
        leak.finding,
        {
            "cause": "native",
            "bytes": size,
            "holder": listed(leak.key, blocks),
            "fingerprint": mark,
            "former_fingerprint": former,
        },
        what=f"memory that native code holds on {leak.finding.device}",
        is_since=True,
        things=tuple(sorted(blocks)),
        notes=(Note(" (of a BLAS workspace's size)"),),
    )


def frozen_items() -> dict[str, int]:
    """Return the objects that the program has frozen, as one thing with their number."""
    frozen = gc.get_freeze_count()
    return {"frozen objects": frozen} if frozen > FROZEN_AT_STARTUP else {}


_COUNTED: tuple[ResourceName, ...] = ("threads", "processes", "file-descriptors")
"""What is read with the counters. Files in `/dev/shm` are not: any process of the host may make them meanwhile."""

_MAPPED: ResourceName = "shared-memory"
"""What this process maps of those, or of files without a name."""

_FOLDER = re.compile("^/dev/shm/")

_STRANDED: ResourceName = "reserved"
"""What torch's allocator keeps for streams that are gone: each segment's name is its device, stream and address."""


class NamedGrowth:
    """Follows what is counted by name through the turns of one stage.

    By resource, `read` gives what there is now, as the counters have it.
    """

    def __init__(self, stage: str, read: Callable[[], Mapping[str, Items]]) -> None:
        self._stage = stage
        self._read = read
        self._before: Mapping[ResourceName, Items] = {}
        self._after: Mapping[ResourceName, Items] = {}
        # For each turn so far, what it has brought, by resource.
        self._brought: list[dict[ResourceName, set[str]]] = []

    def forget(self) -> None:
        """Forget all turns: another engine follows."""
        self._brought, self._after = [], {}

    def begin(self, stage: str) -> None:
        """Note what there is when the stage begins; nothing where it is another one."""
        if stage == self._stage:
            self._before = self._now()

    def end(self, stage: str) -> None:
        """Note what it has brought."""
        if stage != self._stage:
            return
        self._after = self._now()
        self._brought.append({key: items.keys() - self._before[key].keys() for key, items in self._after.items()})

    def findings(self) -> list[Finding]:
        """Report what turns had left when the last one ended; the first may fill what is filled once."""
        return [leak.finding for leak in self.leaks()]

    def leaks(self) -> list[ItemLeak]:
        """Report the same with the things by their names, as the objects that stand for them have these."""
        found = []
        mapped: set[str] = set()
        for key, items in self._after.items():
            # Python's `mmap` keeps a descriptor of what it maps: that is one thing.
            left = {name for name in items if name.partition(" -> ")[2] not in mapped}
            turns: list[set[str]] = []
            # What a later turn has brought under the same name is not what an earlier one had brought.
            for brought in reversed(self._brought[1:]):
                turns.insert(0, left & brought[key])
                left -= brought[key]
            if KeptSteps([len(turn) for turn in turns]).grows:
                grown = {name: items[name] for turn in turns for name in turn}
                mapped |= {name.partition(", inode ")[0] for name in grown}
                growth_of = _stranding_of if key == _STRANDED else _growth_of
                names = {_FOLDER.sub("", name.partition(", inode ")[0]): 1 for name in grown}
                found.append(ItemLeak(growth_of(self._stage, key, grown, len(turns)), key, names, subject=0))
        return found

    def _now(self) -> Mapping[ResourceName, Items]:
        items = self._read()
        mapped = mapped_shared_memory(os.getpid()) or ()
        return {
            _MAPPED: {f"{each.path}, inode {each.file[1]}": each.bytes for each in mapped},
            _STRANDED: {f"{at.device} {at.stream:#x} {at.address:#x}": at.bytes for at in stranded_segments()},
            **{key: items.get(key, {}) for key in _COUNTED},
        }


def _growth_of(stage: str, resource: ResourceName, grown: Items, turns: int) -> Finding:
    known = resource_of(resource)
    unit = "mappings of shared memory" if known is None or known.rule.unit == "bytes" else known.rule.unit
    names = sorted(grown)
    told = listed(resource, names) or ""
    return finding_of(
        resource,
        bytes=sum(grown.values()) if resource == _MAPPED else 0,
        count=len(names),
        device="cpu" if resource == _MAPPED else "",
        stage=stage,
        message=f"{format_amount(len(names), unit)} more, which {turns} calls of {stage} in a row have left: {told}",
        suspects=("growth", stage),
        known_by={"device": ""},
        items=names,
        holder=told or None,
        trend="growth",
        advice=f"close in {stage} what it has opened",
    )


def _stranding_of(stage: str, resource: ResourceName, grown: Items, turns: int) -> Finding:
    places = [name.split() for name in grown]
    devices, streams = sorted({device for device, _, _ in places}), {(device, stream) for device, stream, _ in places}
    size = format_bytes(sum(grown.values()))
    return finding_of(
        resource,
        cause="allocator-cache",
        bytes=sum(grown.values()),
        count=len(streams),
        device=", ".join(devices),
        stage=stage,
        suspects=("growth", "streams", stage),
        message=f"{size} reserved on {', '.join(devices)} for {format_amount(len(streams), 'streams')} that no longer "
        f"exist, which {turns} calls of {stage} in a row have left: no other stream gets what was freed on one",
        verdict="cached",
        holder=ALLOCATOR_HOLDER,
        trend="growth",
        advice=f"use one stream for all calls of {stage}, or call torch.cuda.empty_cache() when it ends",
    )

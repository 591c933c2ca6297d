"""Says of an error that memory was not enough how much was asked for, what there was, and who held the rest.

torch tells an observer of such an error (`torch._C._cuda_attach_out_of_memory_observer`): in the middle of an
allocation, of those too that the program catches, and none is ever taken off again. So nothing is attached, and the
error itself is read when it has got through: the frames in its traceback still have what their functions held. What is
freed on its way up, by a `finally` or an engine's own rollback, is seen where it leaves a stage inside of that: there
it is only listed what lies where, as the program may catch the error and go on (a quarter of a second where there are
700,000 objects; who holds it takes some seconds there).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from lowtide.leakcheck.findings.host_memory import MOST, HeldArray, held_arrays
from lowtide.leakcheck.findings.storage_holders import Context, Stacks
from lowtide.leakcheck.findings.tensor_findings import frames, leaks_of
from lowtide.leakcheck.judging.fingerprints import finding_of
from lowtide.leakcheck.judging.judge import Budget
from lowtide.leakcheck.judging.ladder import trim_heap
from lowtide.leakcheck.judging.storages import HeldStorage, is_tensor, new_storages, survey_births, without_overlaps
from lowtide.probes.device.allocator_snapshots import FOLDER, AllocatorSnapshots
from lowtide.probes.device.torch_allocator import read_room, unexplained_blocks
from lowtide.probes.heap.births import Births
from lowtide.probes.heap.holders import sharing_walk
from lowtide.probes.host.counters import anonymous_bytes
from lowtide.probes.host.memory_parts import address_space, memory_of_group
from lowtide.probes.memory.buffers import large_buffers
from lowtide.probes.memory.stack_frames import StackFrame
from lowtide.probes.memory.tensors import survey_storages
from lowtide.probes.objects.foreign import traceback_of, type_name, with_errors_behind
from lowtide.probes.objects.listed import CHECKER, frame_locals
from lowtide.probes.originals import initialized_torch, lines_of
from lowtide.probes.references.edges import variables_of
from lowtide.probes.stages import EnteredStage
from lowtide.reports.escaping import one_line
from lowtide.reports.schema import Finding, LedgerLine, NotMeasured, OutOfMemory, ResourceName, as_written
from lowtide.reports.sizes import format_amount, format_bytes
from lowtide.reports.statement import Note, Statement, noted

_SHOWN = 10
"""Of what was in use, so many parts are shown, the largest."""

_MOST_EXPLAINED = 4096
"""Storages, the largest, whose holders are looked for."""

_SECONDS = 2.0
"""For what each holder retains besides."""

_LONGEST = 500
"""Characters of an error's message."""

_WORDS = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|(?:CUDA|HIP) (?:error: )?out of memory|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED"
)
"""What errors say that have no class of their own."""

_ASKED = re.compile(r"(?:[Tt]ried to allocate|Unable to allocate) ([\d.]+) ?(bytes|[KMGTPE]iB)")
_ROOM = re.compile(
    r"(?:GPU|device) (\d+) has a total capacity of ([\d.]+) ([KMGT]iB) of which ([\d.]+) (bytes|[KMGT]iB)"
)
_NUMBER = re.compile(r" #\d+$")
_CARD = re.compile(r"\b(?:CUDA|HIP|CUBLAS|CUDNN|GPU)\b|\b(?:CUBLAS|CUDNN)_")
_UNITS = {unit: 1 << 10 * turn for turn, unit in enumerate(("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))}

_RUNNERS = (*CHECKER, "_pytest.", "pluggy.", "pytest.", "unittest.")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory was not enough: Python's, torch's, or an engine's own, by its name."""
    if isinstance(error, MemoryError) or any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and _WORDS.search(_text(error)) is not None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an error's own `__str__` may raise anything
        return ""


def _said(error: BaseException) -> str:
    """Return an error's type and what it says, on one line."""
    return one_line(f"{type_name(type(error))}: {_text(error)[:_LONGEST]}".rstrip(": "))


class _Asked(msgspec.Struct, frozen=True):
    """What an error itself says, so far as it does: on which device memory was not enough, and bytes, rounded."""

    device: str
    asked: int | None = None
    total: int | None = None
    free: int | None = None


def _asked(error: BaseException) -> _Asked:
    text = _text(error)
    asked, room = _ASKED.search(text), _ROOM.search(text)
    size = _size(asked[1], asked[2]) if asked else None
    if room is not None:
        return _Asked(f"cuda:{room[1]}", size, _size(room[2], room[3]), _size(room[4], room[5]))
    torch = initialized_torch()
    is_on_card = torch is not None and _CARD.search(text) is not None
    return _Asked(f"cuda:{torch.cuda.current_device()}" if is_on_card else "cpu", size)


def _size(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


class _Moment(msgspec.Struct):
    """What was in use at a moment; holds nothing of the program.

    Attributes:
        mark: of the error.
        asked: what it says.
        stage: in which stage.
        held: the storages on its device, the largest first.
        native: bytes of torch's blocks there that no storage explains, by address.
        stacks: on which all that was allocated, by address.
        memory: what there was.
        advice: what the figures say.
        unread: what could not be read.
    """

    mark: tuple[int, str]
    asked: _Asked
    stage: str
    held: list[HeldStorage] = msgspec.field(default_factory=list)
    native: dict[int, int] = msgspec.field(default_factory=dict)
    stacks: dict[int, Sequence[StackFrame]] = msgspec.field(default_factory=dict)
    memory: list[LedgerLine] = msgspec.field(default_factory=list)
    advice: str = ""
    unread: list[NotMeasured] = msgspec.field(default_factory=list)

    def stacks_at(self, device: str, addresses: Collection[int]) -> dict[int, Sequence[StackFrame]]:
        """Return the stacks at some addresses, as they were then."""
        return {address: self.stacks[address] for address in addresses if address in self.stacks}

    @contextlib.contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Note what is raised where something is read in the block, as memory may be short for that too."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the program's own error is to be seen
            self.unread.append(NotMeasured(what=what, why=_said(error)))


class OutOfMemoryWatch:
    """Reads what was in use when an error said that memory was not enough.

    Before the first stage it is `before`, in words.
    """

    def __init__(self, births: Births, stacks: Stacks, before: str) -> None:
        self._births = births
        self._before = before
        self._stacks = stacks
        self._left: _Moment | None = None

    def stage_entered(self, stage: EnteredStage) -> None:
        """Do nothing: memory is missing later."""

    def stage_left(self, stage: EnteredStage, error: BaseException | None) -> None:
        """Note what is in use where an error leaves a stage: once for each, the first time."""
        first = None if error is None else _first(error)
        if first is not None and (self._left is None or self._left.mark != _mark(first)):
            self._left = self._moment(first)

    def read(
        self, error: BaseException, snapshots: AllocatorSnapshots | None = None, name: str = ""
    ) -> OutOfMemory | None:
        """Return what was in use, and who holds it; None for an error that says nothing of memory.

        It raises nothing, allocates nothing on a card, and keeps nothing of the program. What torch's allocator has on
        a card is kept by `snapshots`, if anybody does, under the name of what ended with the error.
        """
        first = _first(error)
        if first is None:
            return None
        moment = self._left if self._left is not None and self._left.mark == _mark(first) else self._moment(first)
        self._left = None
        snapshot = ""
        if moment.asked.device != "cpu" and snapshots is not None:
            name = f"{name} out of memory"
            why = snapshots.keep(name)
            snapshot = "" if why else f"{FOLDER}/{snapshots.file(name)}"
            moment.unread += [NotMeasured(what="torch's snapshot", why=why)] if why else []
        found = _native(moment)
        with moment.reading("who holds it"), sharing_walk() as walk:
            context = Context(
                roots=_local_variables(error), living=True, stacks=moment.stacks_at, budget=Budget(_SECONDS), walk=walk
            )
            found += _of_storages(moment.held[:_MOST_EXPLAINED], context)
            found += _of_arrays(context) if moment.asked.device == "cpu" else ()
        # What the walk has taken and freed is no memory of the program's.
        trim_heap()
        found.sort(key=lambda each: -each.bytes)
        rest = [*(each.bytes for each in found[_SHOWN:]), *(each.bytes for each in moment.held[_MOST_EXPLAINED:])]
        return OutOfMemory(
            error=_said(first),
            device=moment.asked.device,
            stage=moment.stage,
            asked=moment.asked.asked,
            memory=tuple(moment.memory),
            held=tuple(found[:_SHOWN]),
            others=len(rest),
            other_bytes=sum(rest),
            advice=moment.advice,
            unread=tuple(moment.unread),
            snapshot=snapshot,
        )

    def _moment(self, error: BaseException) -> _Moment:
        """Read what is in use now, and not who holds it."""
        asked = _asked(error)
        moment = _Moment(_mark(error), asked, self._births.label or self._before)
        with moment.reading("tensors"):
            moment.held = self._storages(asked.device)
        if asked.device == "cpu":
            with moment.reading("the memory of the host"):
                moment.memory = list(_of_host())
        else:
            with moment.reading("the memory of the card"):
                _read_card(moment)
        with moment.reading("where it was allocated"):
            addresses = [*(each.key[1] for each in moment.held), *moment.native]
            moment.stacks = dict(self._stacks(asked.device, addresses))
        return moment

    def _storages(self, device: str) -> list[HeldStorage]:
        """Return the storages on a device, the largest first, each with the stage in which it appeared."""
        census, survivors = survey_births(self._births)
        new, _ = new_storages([born for born in survivors if is_tensor(born.item)], {})
        # Of the owner that was being set up, without the number by which it is told from others of its name.
        held = [HeldStorage.of(each, _NUMBER.sub("", stage), turn=turn) for each, stage, turn in new.values()]
        older = (storage for storage in survey_storages(census).storages if storage.key not in new)
        held += [HeldStorage.of(storage, self._before) for storage in older]
        return sorted(without_overlaps(each for each in held if each.key[0] == device), key=lambda each: -each.bytes)


def _first(error: BaseException) -> BaseException | None:
    """Return, of an error and those behind it, the one with which memory was not enough; None if none says so.

    An engine may raise its own from torch's, which says more.
    """
    found = [each for each in with_errors_behind([error]) if is_out_of_memory(each)]
    return next((each for each in reversed(found) if _ASKED.search(_text(each))), found[-1] if found else None)


def _mark(error: BaseException) -> tuple[int, str]:
    """Return what tells an error from others; an error itself would keep its frames, and knows no weak reference."""
    return id(error), _text(error)


def _local_variables(error: BaseException) -> list[tuple[str, object]]:
    """Return the variables of the program's functions that an error has left, by the function's name."""
    found: dict[int, tuple[str, object]] = {}
    for each in with_errors_behind([error]):
        trace = traceback_of(each)
        while trace is not None:
            frame, trace = trace.tb_frame, trace.tb_next
            module = frame.f_globals.get("__name__")
            is_runners = type(module) is str and f"{module}.".startswith(_RUNNERS)
            if is_runners or id(frame) in found:
                continue
            variables = dict(variables_of(frame))
            frame_locals(frame)  # undoes what reading them left behind
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            found[id(frame)] = (f"{name}() f_locals", variables)
    return [(name, variables) for name, variables in found.values() if variables]


def _of_storages(held: Sequence[HeldStorage], context: Context) -> list[Finding]:
    """Return who holds storages, and of those that are gone what they were."""
    now = survey_storages().sizes
    living = [each for each in held if now.get(each.key, 0) >= each.bytes]
    gone = [each for each in held if now.get(each.key, 0) < each.bytes]
    found = [leak.finding for leak in leaks_of(living, context)]
    found += [noted(leak.finding, "; it was freed while the error went up") for leak in leaks_of(gone, context)]
    return [as_written(each) for each in found]


def _of_arrays(context: Context) -> list[Finding]:
    """Return who holds the large arrays of the host that are no tensors."""
    largest = sorted(large_buffers(), key=lambda buffer: -buffer.bytes)[:MOST]
    groups: dict[object, list[HeldArray]] = {}
    for _, each in held_arrays(largest, context):
        groups.setdefault((each.kind, each.container), []).append(each)
    return [_of_group(group) for group in groups.values()]


def _of_group(group: Sequence[HeldArray]) -> Finding:
    first, size = group[0], sum(each.bytes for each in group)
    explanation = first.explanation
    return _part(
        "host-memory",
        size,
        len(group),
        f"{format_bytes(size)} in {format_amount(len(group), f'{first.kind}s')}",
        (Note(", held by ", explanation.holder),),
        holder=explanation.holder,
        cause=explanation.cause,
        verdict=explanation.verdict,
        path=explanation.path,
    )


def _native(moment: _Moment) -> list[Finding]:
    """Return torch's blocks that no tensor of Python's explains, by where they were allocated."""
    by_stack: dict[tuple[StackFrame, ...], list[int]] = {}
    for address, size in moment.native.items():
        by_stack.setdefault(tuple(moment.stacks.get(address, ())), []).append(size)
    return [
        _part(
            "tensors",
            sum(sizes),
            len(sizes),
            f"{format_bytes(sum(sizes))} in {format_amount(len(sizes), 'blocks')} that native code holds",
            (),
            device=moment.asked.device,
            cause="native",
            verdict="native-held",
            allocated_at=frames(stack),
        )
        for stack, sizes in by_stack.items()
    ]


def _part(resource: ResourceName, size: int, count: int, amount: str, notes: tuple[Note, ...], **more: Any) -> Finding:
    """Return what is said of a part of what was in use."""
    return as_written(
        finding_of(
            resource,
            bytes=size,
            count=count,
            stage="",
            suspects=(more.get("holder") or "",),
            statement=Statement(amount=amount, came=None, notes=notes),
            **{"device": "cpu", **more},
        )
    )


def _read_card(moment: _Moment) -> None:
    """Read what there is on a card, and what of torch's memory there no storage explains; makes no context."""
    torch: Any = initialized_torch()
    index = int(moment.asked.device.partition(":")[2])
    free, total = moment.asked.free, moment.asked.total
    if free is None or total is None:
        free, total = torch.cuda.mem_get_info(index)
    moment.memory += [LedgerLine(name="the card", bytes=total), LedgerLine(name="free on it", bytes=free)]
    room = read_room(index)
    if room is None:
        moment.unread.append(NotMeasured(what="torch's allocator", why="it gives no snapshot"))
        return
    inside = room.reserved - room.in_use
    note = f"the largest block has {format_bytes(room.largest_free)}"
    moment.memory += [
        LedgerLine(name="torch's", bytes=room.reserved),
        LedgerLine(name="of this in use", bytes=room.in_use),
        LedgerLine(name="of this free", bytes=inside, note=note),
        LedgerLine(name="other processes', the driver's and libraries'", bytes=max(0, total - free - room.reserved)),
    ]
    asked = moment.asked.asked
    if asked is not None and room.largest_free < asked <= inside + free:
        moment.advice = (
            "enough is free, but in pieces: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or "
            "torch.cuda.empty_cache() before what is large"
        )
    unexplained = unexplained_blocks(index, [each.key[1] for each in moment.held])
    moment.native = {} if unexplained is None else unexplained.native


def _of_host() -> Iterator[LedgerLine]:
    """Read what there is on the host, and what limits this process."""
    yield LedgerLine(name="this process's own", bytes=anonymous_bytes())
    machine = dict(line.split(":", 1) for line in lines_of("/proc/meminfo"))
    total, available = (int(machine[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    yield LedgerLine(name="the machine", bytes=total, note=f"{format_bytes(available)} available")
    limits = (("the limit of its control group", memory_of_group()), ("the limit of its addresses", address_space()))
    for name, limit in limits:
        if limit is not None:
            yield LedgerLine(name=name, bytes=limit.most, note=f"{format_bytes(limit.used)} used")

"""What an agent is asked, and what it answers: plain data by msgspec, never objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, get_args

import msgspec

from lowtide.probes.objects.engine_pools import SlotReading
from lowtide.reports.schema import Finding, as_written, encoded
from lowtide.reports.statement import HolderFacts

if TYPE_CHECKING:
    from lowtide.probes.processes.agents import Agents

_Answer = TypeVar("_Answer")


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages."""


class _Said(_Message, frozen=True, kw_only=True):
    """What a process says, with what names it.

    Attributes:
        variables: those of its environment that say its rank, as they are now: an engine may set them in the process.
        called: its name in `multiprocessing`; empty for a main process.
    """

    variables: dict[str, str] = {}
    called: str = ""


class Levels(_Said, frozen=True, kw_only=True):
    """What one process holds; bytes.

    Attributes:
        tensors: under live tensors, by device.
        arenas: mapped by announced arenas, by device and tag.
        reserved: what torch's allocator took from the driver, by device, without segments of pools that sleep and have
            no pages; None where it does not say.
        has_torch: whether the process has imported torch.
        resident: bytes of host memory, that is no file's, under tensors, in pools, in torch's cache of pinned memory,
            and free where malloc does not give it back.
        communicators: its process groups of several ranks that have buffers on a card, as `0 (nccl, 2 ranks)`.
        outside: what others than torch and the arenas have asked the driver for, by device, where it lists that.
        libraries: of this, what was seen to be asked for, by device and library.
        heaps: what Python's heap and C's hold besides what is under tensors and in pools, as `Heaps.beside` says it;
            without what malloc does not give back.
    """

    tensors: dict[str, int]
    arenas: dict[str, dict[str, int]]
    reserved: dict[str, int | None]
    has_torch: bool
    resident: int = 0
    communicators: tuple[str, ...] = ()
    outside: dict[str, int] = {}
    libraries: dict[str, dict[str, int]] = {}
    heaps: dict[str, int] = {}

    def of(self, kind: str) -> int:
        """Return the bytes on all devices of a kind, `cpu` or `cuda`: in arenas, and under tensors that lie in none."""
        devices = {*self.tensors, *self.arenas}
        return sum(
            self.tensors.get(device, 0) + sum(self.arenas.get(device, {}).values())
            for device in devices
            if device.partition(":")[0] == kind
        )


class GrownContainers(_Said, frozen=True, kw_only=True):
    """The containers that grow; and host memory beside them, where that was read.

    Attributes:
        findings: on these.
        more: how many more turns may tell whether others do; 0 where that is known, or was not asked.
        cards: bytes that torch has given out to tensors and others on each card, where turns are parts of the time.
        imported: how many modules the program has imported since the turn that was read before.
    """

    findings: tuple[Finding, ...] = ()
    more: int = 0
    cards: dict[str, int] = {}
    imported: int = 0


class TensorKind(msgspec.Struct, frozen=True):
    """The live tensors of one type and shape on one device.

    Attributes:
        dtype: their data type; empty where no tensor views the storage, as `shape`.
        shape: as `2x3`, of the largest tensor over each storage.
        device: `cpu`, `cuda:0`.
        count: how many storages there are.
        bytes: under them.
    """

    dtype: str
    shape: str
    device: str
    count: int
    bytes: int


class FilledCache(msgspec.Struct, frozen=True):
    """An `lru_cache` with entries.

    Attributes:
        name: module and qualified name of the function.
        entries: how many it has.
        maxsize: how many it may have; None without bound.
        tensor_bytes: bytes under tensors that its entries reach.
    """

    name: str
    entries: int
    maxsize: int | None
    tensor_bytes: int


class Seen(_Said, frozen=True, kw_only=True):
    """What there is in a process at one moment.

    Attributes:
        ids: identities of its containers, and of whoever refers to large values (`OF_VALUES`), in their order, as the
            others: 8 bytes each, as the machine has them.
        kinds: those of their types.
        lengths: how many things each holds, or KiB.
        parts: bytes of its memory by part, as of `MemoryParts`.
        malloc: what malloc has given out.
        tensors: bytes under live tensors, by device.
        tensor_kinds: the largest kinds of these, where they are listed.
        caches: where they are listed.
    """

    ids: bytes
    kinds: bytes
    lengths: bytes
    parts: dict[str, int]
    malloc: int
    tensors: dict[str, int]
    tensor_kinds: tuple[TensorKind, ...] = ()
    caches: tuple[FilledCache, ...] = ()


Left: TypeAlias = list[tuple[Finding, dict[int, int]]]
"""What has appeared and is there, by holder: with its bytes by the cycle in which they appeared, or by the turn of the
stage that was asked for, from 1."""

ThreadStacks: TypeAlias = list[tuple[str, tuple[str, ...]]]
"""Of each thread its name, and its frames, `FUNCTION FILE:LINE`, the innermost one first."""


class Question(_Message, Generic[_Answer], frozen=True, kw_only=True):
    """What is asked, with the type of what is answered."""


class Begin(Question[bool], frozen=True, kw_only=True, tag="begin"):
    """A stage begins: what appears from here on, appeared in it, if the process has torch: the answer says whether.

    The first one of a process with torch opens its watch.

    Attributes:
        stage: its name.
        cycle: the life, from 1.
    """

    stage: str
    cycle: int


class Read(Question[Levels], frozen=True, kw_only=True, tag="read"):
    """How much the process holds.

    Attributes:
        collects: whether it collects its garbage first, which looks like what is kept.
    """

    collects: bool = False


class ReadSlots(Question[SlotReading], frozen=True, kw_only=True, tag="read-slots"):
    """Which slots of an engine's pools no request has that waits or runs."""


class ExplainAsleep(Question[list[Finding]], frozen=True, kw_only=True, tag="explain-asleep"):
    """Who holds what the engine still has from inferring while it sleeps.

    Attributes:
        cycle: the life, from 1.
        kind: of the engine's device: `cpu` or `cuda`.
    """

    cycle: int
    kind: str


class ExplainAwake(Question[list[Finding]], frozen=True, kw_only=True, tag="explain-awake"):
    """Who holds what there is more after a wake than before the sleep.

    Attributes:
        stage: the wake, which has ended.
        kind: of the engine's device.
    """

    stage: str
    kind: str


class ExplainHeld(Question[list[Finding]], frozen=True, kw_only=True, tag="explain-held"):
    """Who holds the largest tensors.

    Attributes:
        stage: since when they should be gone.
        kind: of their device: `cpu` or `cuda`.
        most: how many storages are looked at.
    """

    stage: str
    kind: str
    most: int = 16


class ExplainLeft(Question[Left], frozen=True, kw_only=True, tag="explain-left"):
    """Who holds the tensors that appeared in one cycle, or in any, and are there.

    The process collects its garbage first.

    Attributes:
        cycle: which; None: all since the first `Begin`.
        stage: of which stage, counted by how often that has begun; empty: of all, counted by cycle.
    """

    cycle: int | None = None
    stage: str = ""


class ClearCaches(Question[list[Finding]], frozen=True, kw_only=True, tag="clear-caches"):
    """Clear some `lru_cache`s that hold tensors, and measure what each gives back.

    Attributes:
        holders: the caches, as findings name them.
    """

    holders: tuple[str, ...]


class ExplainHostMemory(Question[HolderFacts | None], frozen=True, kw_only=True, tag="explain-host-memory"):
    """Who holds the arrays that are some new host memory, by their size; None where there are none.

    Attributes:
        bytes: of the arrays.
        grown: what there is more after all turns, of which each adds so many bytes; 0 where it came at once.
    """

    bytes: int
    grown: int = 0


class ExplainNew(Question[HolderFacts | None], frozen=True, kw_only=True, tag="explain-new"):
    """Who holds the threads or descriptors that are new; None where nothing of the program does.

    Attributes:
        resource: `threads` or `file-descriptors`.
        known: the kernel's numbers of those that are not.
    """

    resource: str
    known: tuple[int, ...]


class RememberPreserved(Question[int], frozen=True, kw_only=True, tag="remember-preserved"):
    """Remember what must survive the sleep that begins; the answer is of how many tensors.

    Attributes:
        kind: of the device: `cpu` or `cuda`.
    """

    kind: str


class ComparePreserved(Question[list[Finding]], frozen=True, kw_only=True, tag="compare-preserved"):
    """What was lost, has moved, or points to where nothing is since then.

    Attributes:
        stage: which one has ended.
    """

    stage: str


class Trim(Question[int], frozen=True, kw_only=True, tag="trim"):
    """Collect garbage, and give back what is free in torch's allocator and in the heap.

    What is free there looks from outside like what the process keeps. The answer is how many bytes the process has
    taken for lowtide's own modules meanwhile.
    """


class ReadTurn(Question[GrownContainers], frozen=True, kw_only=True, tag="read-turn"):
    """How much each container holds after a turn, for what grows.

    Attributes:
        turns: what a turn is, in the plural: `inferences`; turns of each kind are followed by themselves.
        turn: its number.
        begins: whether it is the first that is read of a stretch.
        anew: whether what came before it is of no interest.
        asked: whether somebody has asked for it: then it is read in a process without torch, too, and at any cost.
        tells: whether it is told what grows.
        ends: whether it is told for the last time: what grows is forgotten, then.
        module: the module to which the turns belong; empty if to none.
        since: the turn before the module's first one.
        seconds: how long a turn takes, where turns are parts of the time; then the process's own memory is read after
            each, too.
    """

    turns: str
    turn: int
    begins: bool = False
    anew: bool = False
    asked: bool = False
    tells: bool = False
    ends: bool = False
    module: str = ""
    since: int = 0
    seconds: float = 0.0


class Look(Question[Seen], frozen=True, kw_only=True, tag="look"):
    """What there is now, to be compared with another moment.

    Attributes:
        lists: whether tensors and caches are listed, too.
    """

    lists: bool = False


class RecordDriver(Question[None], frozen=True, kw_only=True, tag="record-driver"):
    """Which library asks a card's driver for memory, from torch's first use of one on."""


class TellStacks(Question[ThreadStacks], frozen=True, kw_only=True, tag="tell-stacks"):
    """What the process's threads do."""


class ExplainGrown(Question[list[Finding]], frozen=True, kw_only=True, tag="explain-grown"):
    """Who holds some containers that have grown, and what they took.

    Attributes:
        containers: of each what its `Course` has: identity, kind, turns and lengths.
        turns: what a turn is, in the plural: `requests`.
        seconds: how long a turn takes; 0 where it may take any time.
        since: the moment from which they have grown, where that is not told by turns.
        fixed: identities of those that have not changed their lengths meanwhile.
    """

    containers: tuple[tuple[int, int, list[int], list[int]], ...]
    turns: str
    seconds: float = 0.0
    since: str = ""
    fixed: tuple[int, ...] = ()


QUESTIONS: msgspec.msgpack.Decoder[Question[Any]] = msgspec.msgpack.Decoder(reduce(or_, Question.__subclasses__()))
"""Decodes any question."""


def written(found: Iterable[Finding]) -> list[Finding]:
    """Return findings with what is written of them, as they are sent."""
    return list(map(as_written, found))


def encode(message: object) -> bytes:
    """Return a question or an answer as bytes."""
    return encoded(msgspec.msgpack.encode, message)


def ask(send: Callable[[bytes], bytes], question: Question[_Answer], whom: str) -> _Answer:
    """Return what somebody, in words, answers to a question; `send` gives the answer's bytes.

    Raises:
        AgentError: the answer is of another kind; and what `send` raises.
    """
    # Whoever answers has no use for it.
    from lowtide.probes.processes.agents import AgentError

    (base,) = getattr(type(question), "__orig_bases__")  # noqa: B009 - of a generic class
    kind: Any = get_args(base)[0]
    try:
        return msgspec.msgpack.decode(send(encode(question)), type=kind)  # type: ignore[no-any-return]
    except msgspec.DecodeError as error:
        raise AgentError(f"{whom} answered something else: {error}") from error


def ask_agent(agents: Agents, pid: int, question: Question[_Answer], limit: float = 60.0) -> _Answer:
    """Return what the agent of a process answers, within so many seconds; for the errors see `Agents.ask`."""
    return ask(lambda data: agents.ask(pid, data, limit), question, f"the agent of pid {pid}")

"""What an agent is asked, and what it answers: plain data by msgspec, never objects."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from lowtide.reports.schema import Finding, as_written, encoded
from lowtide.reports.statement import HolderFacts


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Begin(_Message, frozen=True, kw_only=True, tag="begin"):
    """A stage begins: what appears from here on, appeared in it; answered by `Followed`.

    The first one of a process with torch opens its watch.

    Attributes:
        stage: its name.
        cycle: the life, from 1.
    """

    stage: str
    cycle: int


class Read(_Message, frozen=True, kw_only=True, tag="read"):
    """How much the process holds; answered by `Levels`.

    Attributes:
        collects: whether it collects its garbage first, which looks like what is kept.
    """

    collects: bool = False


class ExplainAsleep(_Message, frozen=True, kw_only=True, tag="explain-asleep"):
    """Who holds what the engine still has from inferring while it sleeps; answered by `Findings`.

    Attributes:
        cycle: the life, from 1.
        kind: of the engine's device: `cpu` or `cuda`.
    """

    cycle: int
    kind: str


class ExplainAwake(_Message, frozen=True, kw_only=True, tag="explain-awake"):
    """Who holds what there is more after a wake than before the sleep; answered by `Findings`.

    Attributes:
        stage: the wake, which has ended.
        kind: of the engine's device.
    """

    stage: str
    kind: str


class ExplainHeld(_Message, frozen=True, kw_only=True, tag="explain-held"):
    """Who holds the largest tensors; answered by `Findings`.

    Attributes:
        stage: since when they should be gone.
        kind: of their device: `cpu` or `cuda`.
        most: how many storages are looked at.
    """

    stage: str
    kind: str
    most: int = 16


class ExplainLeft(_Message, frozen=True, kw_only=True, tag="explain-left"):
    """Who holds the tensors that appeared in one cycle, or in any, and are there; answered by `Left`.

    The process collects its garbage first.

    Attributes:
        cycle: which; None: all since the first `Begin`.
        stage: of which stage, counted by how often that has begun; empty: of all, counted by cycle.
    """

    cycle: int | None = None
    stage: str = ""


class ClearCaches(_Message, frozen=True, kw_only=True, tag="clear-caches"):
    """Clear some `lru_cache`s that hold tensors, and measure what each gives back; answered by `Findings`.

    Attributes:
        holders: the caches, as findings name them.
    """

    holders: tuple[str, ...]


class ExplainHostMemory(_Message, frozen=True, kw_only=True, tag="explain-host-memory"):
    """Which arrays are some new host memory, by their size; answered by `HostHolder`.

    Attributes:
        bytes: of the arrays.
    """

    bytes: int


class RememberPreserved(_Message, frozen=True, kw_only=True, tag="remember-preserved"):
    """Remember what must survive the sleep that begins; answered by `PreservedAnswer`.

    Attributes:
        kind: of the device: `cpu` or `cuda`.
    """

    kind: str


class ComparePreserved(_Message, frozen=True, kw_only=True, tag="compare-preserved"):
    """What was lost, has moved, or points to where nothing is since then; answered by `Findings`.

    Attributes:
        stage: which one has ended.
    """

    stage: str


class Trim(_Message, frozen=True, kw_only=True, tag="trim"):
    """Collect garbage, and give back what is free in torch's allocator and in the heap; answered by `Trimmed`.

    What is free there looks from outside like what the process keeps.
    """


class ReadTurn(_Message, frozen=True, kw_only=True, tag="read-turn"):
    """How much each container holds after a turn, for what grows; answered by `GrownContainers`.

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


class Look(_Message, frozen=True, kw_only=True, tag="look"):
    """What there is now, to be compared with another moment; answered by `Seen`.

    Attributes:
        lists: whether tensors and caches are listed, too.
    """

    lists: bool = False


class TellStacks(_Message, frozen=True, kw_only=True, tag="tell-stacks"):
    """What the process's threads do; answered by `ThreadStacks`."""


class GrownContainer(msgspec.Struct, frozen=True):
    """How much a container held at some moments; see `Course`."""

    identity: int
    kind: int
    turns: list[int]
    lengths: list[int]


class ExplainGrown(_Message, frozen=True, kw_only=True, tag="explain-grown"):
    """Who holds some containers that have grown, and what they took; answered by `Findings`.

    Attributes:
        containers: these.
        turns: what a turn is, in the plural: `requests`.
        seconds: how long a turn takes; 0 where it may take any time.
        since: the moment from which they have grown, where that is not told by turns.
        fixed: identities of those that have not changed their lengths meanwhile.
    """

    containers: tuple[GrownContainer, ...]
    turns: str
    seconds: float = 0.0
    since: str = ""
    fixed: tuple[int, ...] = ()


Question: TypeAlias = (
    Begin
    | Read
    | ExplainAsleep
    | ExplainAwake
    | ExplainHeld
    | ExplainLeft
    | ClearCaches
    | ExplainHostMemory
    | RememberPreserved
    | ComparePreserved
    | Trim
    | ReadTurn
    | Look
    | ExplainGrown
    | TellStacks
)


class Levels(_Message, frozen=True, kw_only=True):
    """What one process holds; bytes.

    Attributes:
        tensors: under live tensors, by device.
        arenas: mapped by announced arenas, by device and tag.
        reserved: what torch's allocator took from the driver, by device, without segments of pools that sleep and have
            no pages; None where it does not say.
        has_torch: whether the process has imported torch.
        resident: bytes of host memory, that is no file's, under tensors, in pools and in torch's cache of pinned
            memory.
        variables: those of its environment that say its rank, as they are now: an engine may set them in the process.
        communicators: its process groups of several ranks that have buffers on a card, as `0 (nccl, 2 ranks)`.
        called: its name in `multiprocessing`; empty for a main process.
    """

    tensors: dict[str, int]
    arenas: dict[str, dict[str, int]]
    reserved: dict[str, int | None]
    has_torch: bool
    resident: int = 0
    variables: dict[str, str] = {}
    communicators: tuple[str, ...] = ()
    called: str = ""

    def of(self, kind: str) -> int:
        """Return the bytes on all devices of a kind, `cpu` or `cuda`: in arenas, and under tensors that lie in none."""
        devices = {*self.tensors, *self.arenas}
        return sum(
            self.tensors.get(device, 0) + sum(self.arenas.get(device, {}).values())
            for device in devices
            if device.partition(":")[0] == kind
        )


class Findings(_Message, frozen=True, kw_only=True):
    """What a process has found in itself."""

    findings: tuple[Finding, ...] = ()

    def __post_init__(self) -> None:
        """Keep of the findings what is written."""
        msgspec.structs.force_setattr(self, "findings", tuple(map(as_written, self.findings)))


class Followed(_Message, frozen=True, kw_only=True):
    """What appears from here on is known to have appeared in the stage.

    Attributes:
        watches: whether the process follows its tensors: it has torch.
    """

    watches: bool = False


class HostHolder(_Message, frozen=True, kw_only=True):
    """Who holds the arrays of a size; None where there are none."""

    facts: HolderFacts | None = None


class PreservedAnswer(_Message, frozen=True, kw_only=True):
    """What a process says must survive a sleep.

    Attributes:
        tensors: how many.
    """

    tensors: int = 0


class Left(Findings, frozen=True, kw_only=True):
    """What has appeared and is there: a finding for each holder.

    Attributes:
        by_turn: for each finding, its bytes by the cycle in which they appeared, or by the turn of the stage that was
            asked for, from 1.
    """

    by_turn: tuple[dict[int, int], ...] = ()


class GrownContainers(Findings, frozen=True, kw_only=True):
    """The containers that grow; and host memory beside them, where that was read.

    Attributes:
        more: how many more turns may tell whether others do; 0 where that is known, or was not asked.
        cards: bytes that torch has given out to tensors and others on each card, where turns are parts of the time.
        imported: how many modules the program has imported since the turn that was read before.
        variables: as of `Levels`.
        called: as of `Levels`.
    """

    more: int = 0
    cards: dict[str, int] = {}
    imported: int = 0
    variables: dict[str, str] = {}
    called: str = ""


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


class Seen(_Message, frozen=True, kw_only=True):
    """What there is in a process at one moment.

    Attributes:
        ids: identities of its containers, in their order, as the others: 8 bytes each, as the machine has them.
        kinds: those of their types.
        lengths: how many things each holds.
        parts: bytes of its memory by part, as of `MemoryParts`.
        malloc: what malloc has given out.
        tensors: bytes under live tensors, by device.
        tensor_kinds: the largest kinds of these, where they are listed.
        caches: where they are listed.
        variables: as of `Levels`.
        called: as of `Levels`.
    """

    ids: bytes
    kinds: bytes
    lengths: bytes
    parts: dict[str, int]
    malloc: int
    tensors: dict[str, int]
    tensor_kinds: tuple[TensorKind, ...] = ()
    caches: tuple[FilledCache, ...] = ()
    variables: dict[str, str] = {}
    called: str = ""


class ThreadStacks(_Message, frozen=True, kw_only=True):
    """What the threads of a process do.

    Attributes:
        threads: of each its name, and its frames, `FUNCTION FILE:LINE`, the innermost one first.
    """

    threads: tuple[tuple[str, tuple[str, ...]], ...]


class Trimmed(_Message, frozen=True, kw_only=True):
    """What is free has been given back.

    Attributes:
        imported: bytes that the process has taken for lowtide's own modules meanwhile.
    """

    imported: int


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as bytes."""
    return encoded(msgspec.msgpack.encode, message)


def decode_question(data: bytes) -> Question:
    """Return a question from bytes.

    Raises:
        msgspec.DecodeError: it is none.
    """
    question: Question = msgspec.msgpack.decode(data, type=Question)
    return question

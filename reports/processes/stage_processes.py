"""The engine's other processes in a report of a life: who they are, and what each held after a stage."""

from __future__ import annotations

import msgspec

from lowtide.reports.reading.json_schemas import Int64


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all parts: immutable, named fields only, and unknown ones are an error."""


class ProcessName(_Record, frozen=True, kw_only=True):
    """A process of the program's other than the checked one, and how a person knows it.

    Attributes:
        pid: its process identifier.
        name: its own title (`VLLM::Worker_TP1`), its name in `multiprocessing`, or its command.
        parent: the process identifier of its parent; None where that is not known.
        role: its part in an engine, as `vllm worker`; empty if unknown.
        rank: its rank among all, or in the one dimension that its title shows; None if unknown.
        ranks: its rank in each dimension that its title shows, as `dp0 tp1`; empty if it shows none.
        device: where it holds memory, as `cuda:1` or `cpu`; empty if unknown.
    """

    pid: Int64
    name: str
    parent: Int64 | None = None
    role: str = ""
    rank: Int64 | None = None
    ranks: str = ""
    device: str = ""

    @property
    def text(self) -> str:
        """`pid 123 (VLLM::Worker_TP1, rank 1)`; without a rank where none is known."""
        rank = str(self.rank) if self.rank is not None else self.ranks
        return f"pid {self.pid} ({self.name}{f', rank {rank}' if rank else ''})"


class ProcessStage(_Record, frozen=True, kw_only=True):
    """What another process of the engine's held after a stage.

    Attributes:
        tensors: bytes under live tensors outside of arenas, by device.
        arenas: bytes mapped by announced arenas, by device and tag.
        reserved: bytes that torch's allocator took from the driver, by device; None where it does not say.
        cards: bytes that the driver counts for the process, by device; None where it does not say.
        host: bytes of host memory that only the process has; None where that may not be read.
        contexts: bytes of `cards` that a process takes there which has a context and nothing else, by device.
        kernels: bytes of `cards` that are in no allocation that anybody has asked the driver for, besides such a
            context, by device: the code of kernels and what libraries have the driver keep; nothing where it lists no
            allocations.
        libraries: bytes of `cards` that a library was seen to ask the driver for, by device and library.
        heaps: bytes of `host` that Python's heap and C's have besides what is under tensors and in pools, in use and
            free, by name.
        unexplained: bytes of `host` (as `cpu`) and `cards` that are under no tensor, in no arena, in no such context,
            not among `kernels`, no library's, in no heap and in nothing that torch has reserved: stacks and data of
            libraries, and what nobody knows of; None where not known.
    """

    process: ProcessName
    tensors: dict[str, Int64]
    arenas: dict[str, dict[str, Int64]]
    reserved: dict[str, Int64 | None]
    cards: dict[str, Int64 | None] = {}
    host: Int64 | None = None
    contexts: dict[str, Int64] = {}
    kernels: dict[str, Int64] = {}
    libraries: dict[str, dict[str, Int64]] = {}
    heaps: dict[str, Int64] = {}
    unexplained: dict[str, Int64 | None] = {}

    @property
    def beside_tensors(self) -> int | None:
        """Bytes of host memory that are under no tensor and in no pool; None where not known."""
        left = self.unexplained.get("cpu")
        return None if left is None else left + sum(self.heaps.values())

    @property
    def bytes(self) -> int:
        """Bytes on cards, as the driver counts them; on the CPU those under tensors and in arenas."""
        if self.cards:
            return sum(size or 0 for size in self.cards.values())
        return sum(self.tensors.values()) + sum(sum(tags.values()) for tags in self.arenas.values())

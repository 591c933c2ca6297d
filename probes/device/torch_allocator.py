"""What torch's allocators hold: per device and pool, the BLAS libraries' workspaces, graphs, the pinned host cache."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import msgspec

from lowtide.probes.memory.ranges import Range, merge
from lowtide.probes.memory.tensors import survey_storages
from lowtide.probes.objects.engine_pools import owners_of_pools
from lowtide.probes.objects.listed import all_instances
from lowtide.probes.originals import initialized_torch, loaded, sys, threading

_KIB = 1024


def workspace_sizes(torch: ModuleType, index: int) -> frozenset[int]:
    """Return the sizes in bytes that torch gives to the BLAS libraries' workspaces on a device."""
    properties = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    sizes = {
        blas_workspace_bytes(os.environ, properties.major, hip, str(getattr(properties, "gcnArchName", ""))),
        blas_lt_workspace_bytes(os.environ, hip),
    }
    # In newer torch a program can set other sizes; then these two know.
    for getter in ("_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize"):
        if hasattr(torch._C, getter):
            sizes.add(int(getattr(torch._C, getter)()))
    return frozenset(sizes - {0})


def blas_workspace_bytes(environment: Mapping[str, str], major: int, hip: bool, arch: str = "") -> int:
    """Size of the workspace that torch allocates per BLAS handle and stream, in bytes.

    As `parseChosenWorkspaceSize` in torch's ATen/cuda/CublasHandlePool.cpp: a list of `:KIB:COUNT` in
    CUBLAS_WORKSPACE_CONFIG, else 32 MiB on compute capability 9 and later, 8320 KiB before; on ROCm 128 MiB on the
    Instinct MI300 and MI350 families and 32 MiB elsewhere.
    """
    names = ("CUBLAS_WORKSPACE_CONFIG", "HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG")
    for name in names if hip else names[:1]:
        if name in environment:
            parts = re.findall(r":([0-9]+):([0-9]+)", environment[name])
            if parts:
                return sum(int(size) * _KIB * int(count) for size, count in parts)
            break
    if hip:
        return (128 if arch.startswith(("gfx94", "gfx95")) else 32) * _KIB * _KIB
    return 32 * _KIB * _KIB if major >= 9 else (4096 * 2 + 16 * 8) * _KIB


def blas_lt_workspace_bytes(environment: Mapping[str, str], hip: bool) -> int:
    """Size of a cublasLt or hipBLASLt workspace that is not shared with cuBLAS, in bytes.

    As `_parseChosenWorkspaceSize` in torch's ATen/cuda/CUDABlas.cpp: KiB in CUBLASLT_WORKSPACE_SIZE, else 1 MiB, on
    ROCm 76 MiB.
    """
    names = ("CUBLASLT_WORKSPACE_SIZE", "HIPBLASLT_WORKSPACE_SIZE")
    for name in names if hip else names[:1]:
        if name in environment:
            if environment[name].strip().isdigit():
                return int(environment[name]) * _KIB
            break
    return (76 * _KIB if hip else _KIB) * _KIB


# A memory segment and a block in it, as `torch.cuda.memory_snapshot()` gives them.
Segment = Mapping[str, Any]
Block = Mapping[str, Any]


class PoolSegments(msgspec.Struct, frozen=True):
    """The segments of one pool of torch's allocator.

    Attributes:
        pool_id: (0, 0) for the default pool; others are private pools, of CUDA graphs and `MemPool`s.
        reserved: bytes of its segments.
        allocated: bytes of the blocks in use, those awaiting a stream included.
        workspaces: those of the allocated bytes that are BLAS workspaces.
        empty: bytes of the segments in which no block is in use; reserved for the next allocation only.
        unclaimed: bytes of the blocks in use that neither a live storage nor a workspace explains: what native code
            holds, such as tensors that autograd saved and caches in C++.
        pending: bytes of the blocks that were freed while a stream still worked on them.
        empty_at: address and bytes of each segment in which no block is in use.
        exported_at: those of each block that was exported by CUDA IPC, that no live storage explains any more, and that
            waits for its importers; in `unclaimed` it is not.
        segments: of a private pool, address, bytes, and bytes in use of each segment.
        asleep: bytes of the segments behind which the driver has no memory, since the pool sleeps, and those of them
            that are in use; as far as somebody has asked the driver (`allocations.with_sleepers`).
        owner: who keeps the pool, where an engine says it: `weights of vLLM's CuMemAllocator`.
    """

    pool_id: tuple[int, int]
    reserved: int
    allocated: int
    workspaces: int
    empty: int
    unclaimed: int
    pending: int
    empty_at: tuple[tuple[int, int], ...] = ()
    exported_at: tuple[tuple[int, int], ...] = ()
    segments: tuple[tuple[int, int, int], ...] = ()
    asleep: int = 0
    asleep_in_use: int = 0
    owner: str = ""

    @property
    def private(self) -> bool:
        """Whether this is the pool of a CUDA graph or a `MemPool`."""
        return self.pool_id != (0, 0)


class AllocatorReading(msgspec.Struct, frozen=True):
    """torch's allocator on one device; None where the allocator cannot report it.

    Attributes:
        device: `cuda:0` (HIP devices too, as torch names them).
        allocated: bytes of blocks in use.
        reserved: bytes taken from the driver.
        pools: per pool, sorted by id; empty where there is no snapshot (`note` says why).
        library_workspaces: bytes that BLAS libraries keep between calls.
        trusted: whether the counters are the native allocator's, and so say what the process holds.
        note: why something is None or not to be trusted; empty if all is well.
    """

    device: str
    allocated: int | None
    reserved: int | None
    pools: tuple[PoolSegments, ...]
    library_workspaces: int | None
    trusted: bool
    note: str


class PinnedReading(msgspec.Struct, frozen=True):
    """torch's cache of page-locked host memory; None where torch is too old to report it.

    Attributes:
        torch_allocated: bytes handed out to tensors.
        torch_reserved: bytes that the cache holds, handed out or free.
    """

    torch_allocated: int | None
    torch_reserved: int | None


def read_allocators(claimed: Collection[int] | None = None) -> tuple[AllocatorReading, ...]:
    """Read torch's allocator on every device that has a context; empty before CUDA is initialised.

    Args:
        claimed: the addresses of all live storages, which separate tensors from a library's workspaces; looked up by
            default.
    """
    torch = initialized_torch()
    if torch is None:
        return ()
    if claimed is None:
        claimed = {storage.address for storage in survey_storages().storages}
    backend = str(torch.cuda.get_allocator_backend())
    segments, note = all_segments(torch)
    return tuple(
        _read_device(torch, index, backend, segments, note, claimed)
        for index in range(torch.cuda.device_count())
        if has_context(torch, index)
    )


def read_pinned() -> PinnedReading:
    """Read torch's pinned host cache; zero before CUDA is initialised, for nothing can be pinned before."""
    torch = initialized_torch()
    if torch is None:
        return PinnedReading(0, 0)
    if not hasattr(torch.cuda, "host_memory_stats"):
        return PinnedReading(None, None)
    return parse_pinned(torch.cuda.host_memory_stats())


def has_context(torch: Any, index: int) -> bool:
    """Return whether this process has a context on the device; asking makes none."""
    return bool(torch._C._cuda_hasPrimaryContext(index))


def all_segments(torch: Any) -> tuple[list[Segment] | None, str]:
    """Return the segments of torch's allocators, with the stacks of their blocks; None and why, if there is no list."""
    snapshot = torch.cuda.memory_snapshot
    try:
        # Newer torch can leave out the allocation history, which may be long and is not read here.
        light = "include_traces" in snapshot.__code__.co_varnames
        with without_compiler():
            return list(snapshot(include_traces=False) if light else snapshot()), ""
    except RuntimeError as error:  # cudaMallocAsync and pluggable allocators have none
        return None, f"no memory snapshot: {_first_line(error)}"


def full_snapshot(torch: Any) -> Mapping[str, Any]:
    """Return what torch's allocators have, with the history of their events.

    Raises:
        RuntimeError: this allocator has no list.
    """
    with without_compiler():
        found: Mapping[str, Any] = torch.cuda.memory._snapshot()
    return found


_COMPILER = "torch._inductor"


class _Unimported(ModuleType):
    """Stands for a module: to one thread it has nothing, and any other has it imported.

    Args:
        name: the module's.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._thread:
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Keep torch from importing its compiler to name Python's frames, while the block reads stacks.

    It looks for frames of compiled code in `torch._inductor` (`torch/csrc/profiler/python/combined_traceback.cpp`),
    which is imported when it is asked for: two seconds, and eight hundred modules that the program has no use for.
    """
    torch: Any = loaded("torch")
    if torch is None or _COMPILER in sys.modules or "_inductor" in vars(torch):
        yield
        return
    torch._inductor = stand_in = _Unimported(_COMPILER)
    try:
        yield
    finally:
        # It may have been imported by another thread.
        if vars(torch).get("_inductor") is stand_in:
            del torch._inductor


def _read_device(
    torch: Any, index: int, backend: str, segments: list[Segment] | None, note: str, claimed: Collection[int]
) -> AllocatorReading:
    notes = [note] if note else []
    if backend != "native":
        notes.append(f"the {backend} allocator's counters do not say what the process holds")
    try:
        stats = torch.cuda.memory_stats(index)
    except RuntimeError as error:  # a pluggable allocator without counters
        stats = {}
        notes.append(f"no memory stats: {_first_line(error)}")
    pools: tuple[PoolSegments, ...] = ()
    workspaces: int | None = None
    if segments is not None:
        pools = parse_pools(segments, index, claimed, workspace_sizes(torch, index), _exported(), owners_of_pools())
        workspaces = sum(pool.workspaces for pool in pools)
    return AllocatorReading(
        f"cuda:{index}",
        allocated=stats.get("allocated_bytes.all.current"),
        reserved=stats.get("reserved_bytes.all.current"),
        pools=pools,
        library_workspaces=workspaces,
        trusted=backend == "native" and segments is not None,
        note="; ".join(notes),
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def any_exported() -> bool:
    """Return whether this process has exported anything by CUDA IPC that it has not freed."""
    return bool(_exported())


def _exported() -> frozenset[int]:
    """Return the addresses of what this process has exported by CUDA IPC and not freed; none before CUDA is used."""
    if initialized_torch() is None:
        return frozenset()
    # numpy, which only who has a card needs.
    from lowtide.probes.device.cuda_ipc import read_exports

    return frozenset(export.address for export in read_exports())


def parse_pools(
    segments: Iterable[Segment],
    device: int,
    claimed: Collection[int],
    workspace_sizes: Collection[int],
    exported: Collection[int] = (),
    owners: Mapping[tuple[int, int], str] = MappingProxyType({}),
) -> tuple[PoolSegments, ...]:
    """Add up the segments of one device by pool; sorted by pool id.

    Args:
        segments: as `torch.cuda.memory_snapshot()` gives them.
        device: index of the device.
        claimed: addresses of the live storages.
        workspace_sizes: sizes in bytes that a BLAS workspace may have.
        exported: addresses of what CUDA IPC has exported.
        owners: who keeps private pools, by their ids.
    """
    addresses = sorted(claimed)
    sums: dict[tuple[int, int], Counter[str]] = {}
    empty_at: dict[tuple[int, int], list[tuple[int, int]]] = {}
    exported_at: dict[tuple[int, int], list[tuple[int, int]]] = {}
    parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for segment in segments:
        if segment["device"] != device:
            continue
        first, second = segment.get("segment_pool_id", (0, 0))
        pool_id = int(first), int(second)
        held = sums.setdefault(pool_id, Counter())
        held["reserved"] += segment["total_size"]
        in_use = [block for block in segment["blocks"] if block["state"] != "inactive"]
        if not in_use:
            held["empty"] += segment["total_size"]
            empty_at.setdefault(pool_id, []).append((segment["address"], segment["total_size"]))
        if pool_id != (0, 0):
            used = sum(block["size"] for block in in_use)
            parts.setdefault(pool_id, []).append((segment["address"], segment["total_size"], used))
        for block in in_use:
            kind = unexplained(block, addresses, workspace_sizes, exported)
            held["allocated"] += block["size"]
            held[kind] += block["size"]
            if kind == "exported":
                exported_at.setdefault(pool_id, []).append((block["address"], block["size"]))
    return tuple(
        PoolSegments(
            pool_id,
            reserved=held["reserved"],
            allocated=held["allocated"],
            workspaces=held["workspaces"],
            empty=held["empty"],
            unclaimed=held["native"],
            pending=held["pending"],
            empty_at=tuple(sorted(empty_at.get(pool_id, ()))),
            exported_at=tuple(sorted(exported_at.get(pool_id, ()))),
            segments=tuple(sorted(parts.get(pool_id, ()))),
            owner=owners.get(pool_id, ""),
        )
        for pool_id, held in sorted(sums.items())
    )


def unexplained(
    block: Block, addresses: Sequence[int], workspace_sizes: Collection[int], exported: Collection[int] = ()
) -> str:
    """Return what a block in use is in which no live storage begins, by its name in `UnexplainedBlocks`; else empty.

    Args:
        block: with `address`, `size`, `requested_size` and `state`.
        addresses: of the live storages, sorted.
        workspace_sizes: sizes in bytes that a BLAS workspace may have.
        exported: addresses of what CUDA IPC has exported.
    """
    if block["state"] != "active_allocated":
        # Its name differs: `active_pending_free` in snapshots, `active_awaiting_free` in torch's documentation.
        return "pending" if str(block["state"]).startswith("active_") else ""
    nearest = bisect_left(addresses, block["address"])
    if nearest < len(addresses) and addresses[nearest] < block["address"] + block["size"]:
        return ""
    if block["address"] in exported:
        return "exported"
    # What was asked for, not what was given: a block may be larger by less than a split is worth.
    is_workspace = block.get("requested_size", block["size"]) in workspace_sizes
    return "workspaces" if is_workspace else "native"


class UnexplainedBlocks(NamedTuple):
    """Bytes, by address, of the blocks of a card that are not free and in which no live storage begins.

    Attributes:
        native: nothing visible to Python explains them.
        workspaces: those of the BLAS libraries.
        pending: freed, but a stream had not finished with them.
        exported: given up by this process, and kept for those to which CUDA IPC has exported them.
    """

    native: dict[int, int]
    workspaces: dict[int, int]
    pending: dict[int, int]
    exported: dict[int, int]


def unexplained_blocks(index: int, claimed: Collection[int]) -> UnexplainedBlocks | None:
    """Return the blocks of a card that no storage at a `claimed` address explains; None without a snapshot."""
    torch = initialized_torch()
    segments = None if torch is None else all_segments(torch)[0]
    if torch is None or segments is None:
        return None
    addresses = sorted(claimed)
    sizes = workspace_sizes(torch, index)
    exported = _exported()
    found = UnexplainedBlocks({}, {}, {}, {})
    for segment in segments:
        if segment["device"] != index:
            continue
        for block in segment["blocks"]:
            kind = unexplained(block, addresses, sizes, exported)
            if kind:
                getattr(found, kind)[block["address"]] = block["size"]
    return found


def workspace_sizes_here(index: int) -> frozenset[int]:
    """Return the sizes in bytes that workspaces of BLAS libraries may have on a card; none before torch uses cards."""
    torch = initialized_torch()
    return frozenset() if torch is None else workspace_sizes(torch, index)


def read_segments(index: int) -> list[tuple[tuple[int, int], int, int, bool]] | None:
    """Pool, address, bytes of each segment of a card, and whether anything in it is in use; None without a snapshot."""
    torch = initialized_torch()
    segments = None if torch is None else all_segments(torch)[0]
    if segments is None:
        return None
    return [
        (
            (int(segment.get("segment_pool_id", (0, 0))[0]), int(segment.get("segment_pool_id", (0, 0))[1])),
            segment["address"],
            segment["total_size"],
            any(block["state"] != "inactive" for block in segment["blocks"]),
        )
        for segment in segments
        if segment["device"] == index
    ]


class Room(NamedTuple):
    """How torch's memory on a card is divided; bytes.

    Attributes:
        reserved: what it has taken from the driver.
        in_use: of this, in blocks that are not free.
        largest_free: the largest block that is.
    """

    reserved: int
    in_use: int
    largest_free: int


def read_room(index: int) -> Room | None:
    """Return how torch's memory on a card is divided; None without a snapshot."""
    torch = initialized_torch()
    segments = None if torch is None else all_segments(torch)[0]
    if segments is None:
        return None
    blocks = [
        (block["size"], block["state"] == "inactive")
        for segment in segments
        if segment["device"] == index
        for block in segment["blocks"]
    ]
    free = [size for size, is_free in blocks if is_free]
    reserved = sum(size for size, _ in blocks)
    return Room(reserved, reserved - sum(free), max(free, default=0))


class StrandedSegment(NamedTuple):
    """A segment of the default pool with nothing in use, of a stream for which no object of Python's stands any more.

    A free block serves its own stream alone, so that nothing takes it again but what empties the cache (vllm#52950).
    torch takes streams from a pool of 32 for each card: after as many others one may come round again.

    Attributes:
        device: `cuda:0`.
        stream: its handle.
        address: of the segment.
        bytes: of the segment.
    """

    device: str
    stream: int
    address: int
    bytes: int


def stranded_segments() -> tuple[StrandedSegment, ...]:
    """Return the segments that wait for streams that are gone, sorted; go through the heap where there may be any."""
    torch = initialized_torch()
    segments = None if torch is None else all_segments(torch)[0]
    found = [
        StrandedSegment(f"cuda:{segment['device']}", segment["stream"], segment["address"], segment["total_size"])
        for segment in segments or ()
        if segment.get("stream")
        and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
        and all(block["state"] == "inactive" for block in segment["blocks"])
    ]
    if torch is None or not found:
        return ()
    living = {stream.cuda_stream for stream in all_instances(torch.cuda.Stream)}
    return tuple(sorted(segment for segment in found if segment.stream not in living))


class AllocatedRanges(NamedTuple):
    """Where torch's allocator has memory on a card.

    Attributes:
        reserved: address and bytes of its segments, merged.
        in_use: those of the blocks that are not free, merged.
    """

    reserved: tuple[Range, ...]
    in_use: tuple[Range, ...]


def allocated_ranges(index: int) -> AllocatedRanges | None:
    """Return the segments of a card, and the blocks in them that are in use; None without a snapshot."""
    torch = initialized_torch()
    segments = None if torch is None else all_segments(torch)[0]
    if segments is None:
        return None
    here = [segment for segment in segments if segment["device"] == index]
    return AllocatedRanges(
        merge((segment["address"], segment["total_size"]) for segment in here),
        merge(
            (block["address"], block["size"])
            for segment in here
            for block in segment["blocks"]
            if block["state"] != "inactive"
        ),
    )


def free_beside(index: int, groups: Sequence[Collection[int]]) -> list[int]:
    """Return the bytes that are free in the segments in which some addresses lie: no `empty_cache()` gives these back.

    Args:
        index: of the card, as torch numbers it.
        groups: addresses; what is free in one segment counts for the first group that has one there.

    Returns:
        The bytes for each group; all 0 without a snapshot.
    """
    torch = initialized_torch()
    segments = None if torch is None else all_segments(torch)[0]
    found = [0] * len(groups)
    for segment in segments or ():
        if segment["device"] != index:
            continue
        low = segment["address"]
        high = low + segment["total_size"]
        place = next((at for at, group in enumerate(groups) if any(low <= address < high for address in group)), None)
        if place is not None:
            found[place] += sum(block["size"] for block in segment["blocks"] if block["state"] == "inactive")
    return found


def parse_pinned(stats: Mapping[str, Any]) -> PinnedReading:
    """Read `torch.cuda.host_memory_stats()`, whose names changed between torch versions.

    Earlier, `allocated_bytes` was what tensors hold and `reserved_bytes` what the cache holds; later `active_bytes` and
    `allocated_bytes` are the two.
    """
    if "active_bytes.current" in stats:
        return PinnedReading(stats["active_bytes.current"], stats.get("allocated_bytes.current"))
    return PinnedReading(stats.get("allocated_bytes.current"), stats.get("reserved_bytes.current"))


def any_graph_alive() -> bool:
    """Return whether there is any object of torch's graph type; goes through the whole heap if that is loaded."""
    torch: Any = loaded("torch")
    kind = None if torch is None else getattr(torch.cuda, "CUDAGraph", None)
    return kind is not None and bool(all_instances(kind))

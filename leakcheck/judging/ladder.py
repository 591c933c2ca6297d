"""The release ladder: one kind of release after the other, with a reading after each.

The rung at which bytes come back is the diagnosis.  A helper that collects, unfreezes and empties caches all at once
before it measures destroys it.  What a driver gives back seconds after an engine has given it up (vllm#37533, on ROCm)
is waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from lowtide.leakcheck.resources.resource import MIB, Rung
from lowtide.probes.device.torch_allocator import any_exported
from lowtide.probes.objects.listed import any_frozen
from lowtide.probes.originals import gc, loaded, time, torch_with_cuda
from lowtide.reports.schema import Cause, Verdict

_MOST_COLLECTIONS = 8
"""Collections in a row; a chain of holders of which each waits for the death of the one before is seldom longer."""


_LIBRARY = ctypes.CDLL(None)
"""The C library, opened once: each opening leaves a cycle, for which a full collection would find garbage."""


ALLOCATOR_HOLDER = "torch's caching allocator"


class Meaning(NamedTuple):
    """What a rung does, and what it means that something came back there and no earlier.

    Attributes:
        action: what it does, as code that a user could run; empty where it does nothing but wait.
        cause: why that was there still.
        verdict: likewise, where there is one.
        holder: who had it, where nobody in Python did.
    """

    action: str
    cause: Cause
    verdict: Verdict | None = None
    holder: str | None = None


_CLEARING = "[c.cache_clear() for c in gc.get_objects() if type(c) is functools._lru_cache_wrapper]"
_TRIMMING = "ctypes.CDLL(None).malloc_trim(0); getattr(torch._C, '_host_emptyCache', int)()"

MEANINGS = {
    Rung.SETTLE: Meaning("", "driver"),
    Rung.COLLECT: Meaning("gc.collect()", "cycle"),
    Rung.UNFREEZE: Meaning(
        "gc.unfreeze(); gc.collect()", "frozen-garbage", "frozen-garbage", "the heap frozen by gc.freeze()"
    ),
    Rung.IPC_COLLECT: Meaning(
        "torch.cuda.ipc_collect()", "pending-transfer", "cached", "torch's list of what it has exported"
    ),
    Rung.EMPTY_CACHE: Meaning("torch.cuda.empty_cache()", "allocator-cache", "cached", ALLOCATOR_HOLDER),
    Rung.CLEAR_CACHES: Meaning(_CLEARING, "lru-cache", "reachable"),
    Rung.RESET_COMPILED: Meaning("torch._dynamo.reset()", "compiled-code"),
    Rung.CLEAR_WORKSPACES: Meaning("torch._C._cuda_clearCublasWorkspaces()", "library-workspace"),
    Rung.CLEAR_HOST_CACHE: Meaning(_TRIMMING, "allocator-cache", "cached", "torch's cache of pinned memory"),
}

ACTIONS = {rung: meaning.action for rung, meaning in MEANINGS.items() if meaning.action}

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class LadderStep(msgspec.Struct, Generic[T_co], frozen=True):
    """A reading, taken after a rung; `seconds` is what the rung took, waiting included."""

    rung: Rung
    reading: T_co
    seconds: float


class SettlePolicy(msgspec.Struct, frozen=True):
    """How long to wait for a driver that gives memory back in its own time.

    The wait ends as soon as everything is back, or when nothing has moved for `stability` seconds, or after `limit`.
    """

    stability: float = 0.5
    limit: float = 60.0
    first_pause: float = 0.001
    longest_pause: float = 0.1


def climb(
    read: Callable[[], T],
    is_back: Callable[[T], bool],
    *,
    still_waiting: Callable[[T], bool] = lambda reading: False,
    moved: Callable[[T, T], bool] = lambda then, now: False,
    policy: SettlePolicy | None = None,
    rungs: Sequence[Rung] = tuple(Rung),
    peek: Callable[[], object] | None = None,
    climbed: Sequence[LadderStep[T]] = (),
    give_back: Callable[[Rung], bool] | None = None,
    read_after: Callable[[Rung, T], T] | None = None,
) -> list[LadderStep[T]]:
    """Climb until `is_back` says that nothing is missing, or to the top; the readings after each rung, `raw` first.

    Every judgement climbs here: a test's, a life's, and that of a fuzzed call.

    Args:
        read: takes a reading.
        is_back: whether a reading has everything back.
        still_waiting: whether anything that a reading misses may come back by waiting alone; default: nothing may.
        moved: whether two readings differ in what is waited for.
        policy: how long to wait at `settle`.
        rungs: which rungs to climb, in the ladder's order.
        peek: a figure that costs little and moves with what is waited for: only when it has, is a reading taken.
        climbed: the steps that were taken before, which the new ones follow; default: a first reading is taken.
        give_back: does what a rung does; False where it has nothing to act on.  Default: `release`.
        read_after: takes a reading after a rung, given the one before; default: `read`.
    """
    steps = list(climbed) or [LadderStep(Rung.RAW, read(), 0.0)]
    give_back = give_back or release
    for rung in rungs:
        if is_back(steps[-1].reading):
            break
        if rung is Rung.RAW:
            continue
        started = time.perf_counter()
        if rung is Rung.SETTLE:
            if not still_waiting(steps[-1].reading):
                continue
            reading = settle(read, still_waiting, moved, steps[-1].reading, policy or SettlePolicy(), peek)
        elif give_back(rung):
            reading = read() if read_after is None else read_after(rung, steps[-1].reading)
        else:
            continue
        steps.append(LadderStep(rung, reading, time.perf_counter() - started))
    return steps


def settle(
    read: Callable[[], T],
    still_waiting: Callable[[T], bool],
    moved: Callable[[T, T], bool],
    last: T,
    policy: SettlePolicy,
    peek: Callable[[], object] | None = None,
) -> T:
    """Wait as the policy says; return the last reading.  For the arguments see `climb`."""
    glimpse: object = None
    started = stable_since = time.perf_counter()
    pause = policy.first_pause
    while True:
        time.sleep(pause)
        pause = min(pause * 2, policy.longest_pause)
        now = time.perf_counter()
        if peek is not None and (seen := peek()) == glimpse:
            if now - stable_since >= policy.stability or now - started >= policy.limit:
                return read()
            continue
        if peek is not None:
            glimpse = seen
        reading = read()
        now = time.perf_counter()
        if not still_waiting(reading):
            return reading
        if moved(last, reading):
            stable_since, last = now, reading
        if now - stable_since >= policy.stability or now - started >= policy.limit:
            return reading


def release(rung: Rung) -> bool:
    """Do what a rung does; False where it has nothing to act on in this process."""
    torch: Any = torch_with_cuda()
    on_card = torch is not None and torch.cuda.is_initialized()
    if rung is Rung.COLLECT:
        collect()
    elif rung is Rung.UNFREEZE and any_frozen():
        gc.unfreeze()
        collect()
    elif rung is Rung.IPC_COLLECT and on_card and any_exported():
        torch.cuda.ipc_collect()
    elif rung is Rung.EMPTY_CACHE and on_card:
        torch.cuda.empty_cache()
    elif rung is Rung.CLEAR_CACHES:
        _clear_lru_caches()
        collect()
    elif rung is Rung.RESET_COMPILED and compiled_anything():
        reset_compiled()
        if on_card:
            torch.cuda.empty_cache()
    elif rung is Rung.CLEAR_WORKSPACES and on_card:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    elif rung is Rung.CLEAR_HOST_CACHE:
        trimmed = trim_heap()
        if on_card:
            torch._C._host_emptyCache()
        return trimmed or on_card
    else:
        return False
    return True


def collect(is_enough: Callable[[], bool] = lambda: False) -> None:
    """Collect until there is no garbage left.

    What one collection frees may be all that held other objects: the value of a `WeakKeyDictionary` is dropped after
    its key has died, and a cycle that it held is garbage from then on only. (vLLM's `LAYERWISE_INFO` holds a tied
    embedding so.)

    Args:
        is_enough: asked after each collection; true ends it.
    """
    for _ in range(_MOST_COLLECTIONS):
        if not gc.collect() or is_enough():
            return
        # What asking has left in cycles is young, and no reason to collect once more.
        gc.collect(1)


def reset_compiled() -> None:
    """Drop what torch.compile has compiled, and collect."""
    with warnings.catch_warnings():
        # It imports parts of torch that warn of each other.
        warnings.simplefilter("ignore")
        loaded("torch._dynamo").reset()
    collect()


def compiled_anything() -> bool:
    """Return whether torch.compile has compiled anything in this process."""
    utils: Any = loaded("torch._dynamo.utils")
    counters = getattr(utils, "counters", {})
    return bool(counters.get("frames", {}).get("total", 0))


_TRIMS: Sequence[tuple[str, tuple[Any, ...]]] = (
    ("malloc_trim", (0,)),
    # gperftools' tcmalloc.
    ("MallocExtension_ReleaseFreeMemory", ()),
    # jemalloc: what this thread keeps, then all arenas, for which this number stands.
    ("mallctl", (b"thread.tcache.flush", None, None, None, 0)),
    ("mallctl", (b"arena.4096.purge", None, None, None, 0)),
    ("mi_collect", (True,)),
)
"""What gives the free memory of an allocator back, by C function: glibc's, and those that may stand in its place."""


def trim_heap() -> bool:
    """Give the free parts of the heap back to the kernel; False where no allocator is known.

    A program may have replaced the C library's allocator (`LD_PRELOAD`, as vLLM advises on CPUs); pyarrow has its own.
    """
    known = [(getattr(_LIBRARY, name), arguments) for name, arguments in _TRIMS if hasattr(_LIBRARY, name)]
    for trim, arguments in known:
        trim(*arguments)
    # Another version, or half an import.
    with contextlib.suppress(Exception):
        arrow: Any = loaded("pyarrow")
        if arrow is not None:
            arrow.default_memory_pool().release_unused()
    return bool(known)


def _clear_lru_caches() -> None:
    # By type, never isinstance: a foreign object's __class__ may answer for another, or have side effects.
    kind = functools._lru_cache_wrapper
    for candidate in gc.get_objects():
        if issubclass(type(candidate), kind):
            candidate.cache_clear()


DRIVER_PATIENCE = SettlePolicy(stability=4.0)
"""A driver may be still for seconds before it gives anything back (vllm#43023); what never moves costs all of it."""

RELEASE_SLACK = 8 * MIB
"""Bytes by which a driver's figure for a process may move by itself."""


class Late(NamedTuple):
    """What came back while it was waited for: bytes, as the driver counts them, and in how many seconds."""

    bytes: int
    seconds: float


def wait_for_release(read: Callable[[], int], held: int, dropped: int, policy: SettlePolicy) -> Late | None:
    """Wait until the driver counts as much less as was given up, or does not move any more.

    Args:
        read: the driver's bytes of this process.
        held: what it counted before.
        dropped: bytes that were given up since.
        policy: how long to wait.

    Returns:
        What came late; None where all of it was back at once, or not all of it came.
    """
    target = held - dropped + RELEASE_SLACK
    started, first = time.perf_counter(), read()
    if first <= target:
        return None
    left = wait_until_within(read, target, policy, first)
    return Late(first - left, time.perf_counter() - started) if left <= target else None


def wait_until_within(read: Callable[[], int], allowed: int, policy: SettlePolicy, first: int | None = None) -> int:
    """Wait until the driver counts no more than what is allowed, or does not move any more.

    Args:
        read: what the driver counts, in bytes.
        allowed: bytes.
        policy: how long to wait.
        first: what it counted just now; read where it is not given.

    Returns:
        What it counted last.
    """
    now = read() if first is None else first
    return now if now <= allowed else settle(read, lambda left: left > allowed, operator.ne, now, policy)

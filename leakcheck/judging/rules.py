"""The one table of what must come back: each resource's tolerance and rung, in a test and in an engine's life.

Tests, `LeakCheck` and the fuzzer's lives are judged by the column of tests, `lowtide run` and `check` by that of lives.
`plain_metrics` and `shutdown_metrics` add how each is read; `docs/write_reference.py` writes the table into the pages.
"""

from __future__ import annotations

from lowtide.leakcheck.resources import RESOURCES
from lowtide.leakcheck.resources.resource import MIB, Bound, Rule, Rung

AWAITING_A_STREAM = "memory that waits for a stream"


_EXACT = Bound()
_SET = Bound(cause="not-restored")
_NATIVE = "memory that native code holds"
_POOLS = Bound(
    16 * MIB,
    rung=Rung.EMPTY_CACHE,
    settles=True,
    what="memory that the driver's own pools keep",
    cause="allocator-cache",
)

_HELD = (
    Rule(
        "lru-cache",
        "lru-cache",
        "process",
        "`torch.nn.Module`s and objects of bound methods that are new and that only caches hold; not those whose "
        "tensors are findings already",
        test=Bound(cause="lru-cache"),
        life=None,
        unit="modules and objects of bound methods in caches",
    ),
    Rule(
        "pinned-cache",
        "pinned",
        "process",
        "torch's cache of page-locked memory",
        test=None,
        life=_EXACT,
    ),
    Rule(
        "pinned",
        "pinned",
        "process",
        "announced page-locked pools (torch's own pinned tensors are `tensors`)",
        test=_EXACT,
        life=Bound(cause="native"),
    ),
    Rule("gc-frozen", "gc-frozen", "process", "objects frozen by `gc.freeze()`", _SET, _SET, unit="frozen objects"),
)

_OF_PROCESS = (
    Rule("globals", "globals", "process", "process-wide settings", _SET, _SET, unit="process-wide settings"),
    Rule(
        "host-pools",
        "host-memory",
        "process",
        "announced host memory that is not page-locked",
        test=None,
        life=Bound(cause="native"),
    ),
    Rule(
        "host-memory",
        "host-memory",
        "process",
        "the process's own memory that nothing else here explains; what arrays are of it counts with a card as without",
        # Heaps fragment, libraries build tables, threads get stacks; on an H200 a process's first engine, with its
        # libraries, took 516 MiB.
        test=Bound(64 * MIB, with_card=768 * MIB, rung=Rung.CLEAR_HOST_CACHE),
        # The heap of a process moves by some MiB with every life, by up to 34 MiB in one of 36 runs with a card that a
        # dozen processes share.
        life=Bound(32 * MIB, with_card=64 * MIB, first_use=True),
    ),
)

_OF_DEVICES = (
    Rule("tensors", "tensors", "device", "storages of live tensors, each byte once", test=_EXACT, life=_EXACT),
    Rule("arena", "arena", "device", "mapped parts of arenas over which no tensor lives", test=_EXACT, life=_EXACT),
    Rule(
        "native",
        "tensors",
        "card",
        "torch's blocks in use that no tensor and no library's workspace explains",
        test=Bound(what=_NATIVE, cause="native"),
        life=Bound(first_use=True, what=_NATIVE, cause="native"),
        verdict="native-held",
    ),
    Rule(
        "workspaces",
        "tensors",
        "card",
        "torch's blocks that have the size of a BLAS workspace; back if the library is new or clearing releases them",
        test=Bound(what="workspaces of BLAS libraries", cause="library-workspace"),
        life=None,
        verdict="native-held",
    ),
    Rule(
        "in-flight",
        "tensors",
        "card",
        "torch's blocks that were freed while a stream still worked on them",
        test=Bound(rung=Rung.EMPTY_CACHE, what=AWAITING_A_STREAM, cause="pending-transfer"),
        life=Bound(rung=Rung.EMPTY_CACHE, what=AWAITING_A_STREAM, cause="pending-transfer"),
        verdict="in-flight",
    ),
    Rule(
        "empty-segments",
        "reserved",
        "card",
        "segments of torch's default pool in which nothing is in use",
        test=None,
        life=Bound(first_use=True),
    ),
    Rule(
        "reserved",
        "reserved",
        "card",
        "empty segments of private pools (`MemPool`, CUDA graphs)",
        test=Bound(rung=Rung.EMPTY_CACHE, cause="allocator-cache"),
        life=Bound(what="private pools"),
    ),
    Rule(
        "memory-pool",
        "driver",
        "card",
        "memory that the driver's own pools keep: what was freed in the default one, and that of graphs' memory nodes",
        test=_POOLS,
        life=_POOLS,
        verdict="cached",
    ),
    Rule(
        "unlisted",
        "driver",
        "card",
        "what the driver counts beyond all that it lists",
        # The driver takes memory for code in steps of 2 MiB.
        test=Bound(
            16 * MIB,
            rung=Rung.EMPTY_CACHE,
            settles=True,
            what="memory that the driver counts and does not list",
            cause="driver",
        ),
        life=None,
        verdict="unexplained",
    ),
    Rule(
        "driver",
        "driver",
        "card",
        "the driver's bytes of this process that arenas and torch do not explain; in a test only where the driver "
        "cannot list its allocations (ROCm)",
        # Kernels load on first use.
        test=Bound(64 * MIB, rung=Rung.EMPTY_CACHE, settles=True, cause="driver"),
        # Measured: the driver's figure for a process moves by up to 8 MiB from life to life.
        life=Bound(8 * MIB, first_use=True, settles=True, cause="driver"),
        verdict="unexplained",
    ),
)

RULES = (*_HELD, *(resource.rule for resource in RESOURCES), *_OF_PROCESS, *_OF_DEVICES)
"""All that must come back, in the order in which it is judged and reported."""

PEAK = Rule(
    "peak",
    "peak",
    "device",
    "how far memory rises above what there was at the start, where a marker says how far it may: the process's "
    "resident memory, and what torch has allocated on a card",
    test=None,
    life=None,
)
"""No matter of coming back: judged with `@pytest.mark.leakcheck(peak=SIZE)` and `LeakCheck(peak=SIZE)` alone."""

COLLECTED = 16 * MIB
"""Bytes of tensors, or of host memory, that a test may leave to the collector before that is noted: nobody knows when
they come back."""

_BY_KEY = {rule.key: rule for rule in RULES}


def rule_of(key: str) -> Rule:
    """Return the row with this key."""
    return _BY_KEY[key]


def bound_of_test(key: str) -> Bound:
    """Return when what this row counts is back after a test.

    Raises:
        KeyError: it is not judged there.
    """
    bound = _BY_KEY[key].test
    if bound is None:
        raise KeyError(key)
    return bound

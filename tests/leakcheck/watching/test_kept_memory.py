"""What tests keep of host memory, each less than the tolerance: the sum is judged; what ends or is little is not."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator
from multiprocessing import shared_memory

import pytest

from lowtide.leakcheck.watching import first_pass
from lowtide.leakcheck.watching.first_pass import SmallRetention
from lowtide.leakcheck.watching.watch import Watch
from lowtide.leakcheck.watching.watched import Policy, Verdict
from lowtide.probes.host.counters import own_bytes
from lowtide.reports.schema import Finding

MIB = 1 << 20


def judged(*shares: int, kept: SmallRetention | None = None) -> list[Finding | None]:
    """What is told after each of some tests that kept so many MiB."""
    kept = kept or SmallRetention()
    found = []
    for turn, share in enumerate(shares):
        kept.add(f"test_{turn}", share * MIB)
        found.append(kept.finding("call") if kept.is_too_much(64 * MIB) else None)
    return found


def test_three_tests_that_keep_less_than_the_tolerance_are_too_much_together() -> None:
    *before, finding = judged(40, 40, 40)
    assert before == [None, None]
    assert finding is not None
    assert (finding.bytes, finding.count, finding.trend) == (120 * MIB, 3, "growth")
    assert finding.message == (
        "120.0 MiB of host-memory kept over the session, +40.0 MiB in each of 3 tests: test_0, test_1, test_2"
    )


def test_what_one_test_keeps_more_than_the_others_counts_as_theirs() -> None:
    *_, finding = judged(40, 70, 40)
    assert finding is not None
    assert (finding.bytes, finding.count) == (120 * MIB, 3)
    assert finding.message.startswith("120.0 MiB of host-memory kept over the session, +40.0 MiB to +70.0 MiB in each")


def test_the_sum_is_reported_once() -> None:
    kept = SmallRetention()
    assert judged(40, 40, 40, kept=kept)[-1] is not None
    assert judged(40, kept=kept) == [None]


@pytest.mark.parametrize(
    "shares",
    [(60, 60), (60, 10, 12, 9), (7,) * 50, (40, -40, 40, -40, 40), (1, -1) * 30],
    ids=["two", "first uses", "little", "given back", "noise"],
)
def test_no_sum_is_reported(shares: tuple[int, ...]) -> None:
    assert judged(*shares) == [None] * len(shares)


def test_what_was_given_back_between_two_tests_was_not_kept() -> None:
    kept = SmallRetention()
    judged(40, 40, kept=kept)
    kept.fell(40 * MIB)
    assert judged(40, kept=kept) == [None]


def test_what_tests_keep_that_are_not_judged_does_not_count() -> None:
    kept = SmallRetention()
    for turn in range(3):
        kept.add(f"test_{turn}", 40 * MIB, counts=False)
    assert judged(20, kept=kept) == [None]


def test_shared_memory_without_a_file_and_what_is_swapped_are_the_process_s_own() -> None:
    status = b"Name:\tpython\nRssAnon:\t     100 kB\nRssFile:\t 7 kB\nRssShmem:\t  20 kB\nVmSwap:\t   3 kB\n"
    assert own_bytes(status) == 123 * 1024
    assert own_bytes(b"Name:\tpython\nRssAnon:\t100 kB\n") == 100 * 1024


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch(Policy(card=False, explain=False, remedies="never", settle=0.0))
    watch.open()
    yield watch
    watch.close()


def of_host_memory(verdict: Verdict) -> int:
    return sum(finding.bytes for finding in verdict.findings if finding.resource == "host-memory")


def leave_free(size: int) -> None:
    """Leaves that much memory free in the C library's heap, below something that is in use."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    blocks = [ctypes.c_void_p(libc.malloc(ctypes.c_size_t(64 << 10))) for _ in range(size >> 16)]
    for block in blocks:
        libc.memset(block, 1, ctypes.c_size_t(64 << 10))
    for block in blocks[:-1]:
        libc.free(block)


def test_what_an_earlier_test_left_free_hides_nothing(watch: Watch) -> None:
    watch.begin()
    leave_free(60 * MIB)
    assert watch.end().findings == ()
    watch.begin()
    kept = mmap.mmap(-1, 80 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    kept.write(b"1" * (80 * MIB))
    assert of_host_memory(watch.end()) > 64 * MIB
    kept.close()


def test_shared_memory_without_a_file_is_found(watch: Watch) -> None:
    watch.begin()
    kept = mmap.mmap(-1, 80 * MIB)
    kept.write(b"1" * (80 * MIB))
    assert of_host_memory(watch.end()) > 64 * MIB
    kept.close()


def test_shared_memory_with_a_file_is_found_by_its_name_only(watch: Watch) -> None:
    watch.begin()
    kept = shared_memory.SharedMemory(create=True, size=80 * MIB)
    kept.buf[:] = b"1" * (80 * MIB)
    verdict = watch.end()
    assert of_host_memory(verdict) == 0
    assert "shared-memory" in {finding.resource for finding in verdict.findings}
    kept.close()
    kept.unlink()


def test_the_sum_of_what_clean_tests_keep_is_found(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    def long_containers() -> dict[int, int]:
        """Leave free pieces below one that is in use, as looking at a large heap does."""
        pieces = [bytes(2000) for _ in range(10_000)]
        pinned.append(pieces.pop())
        return {}

    pinned: list[bytes] = []
    monkeypatch.setattr(first_pass, "long_containers", long_containers)
    kept = []
    reported = []
    for turn in range(3):
        watch.begin(subject=f"test_{turn}")
        kept.append(mmap.mmap(-1, 30 * MIB))
        kept[-1].write(b"1" * (30 * MIB))
        reported.append(of_host_memory(watch.end()) // MIB)
    assert reported[:2] == [0, 0]
    assert 80 <= reported[2] <= 91
    for memory in kept:
        memory.close()


def test_garbage_that_nobody_has_collected_is_not_kept(watch: Watch) -> None:
    gc.disable()
    try:
        for turn in range(4):
            watch.begin(subject=f"test_{turn}")
            cycle: list[object] = [bytearray(b"1") * (30 * MIB)]
            cycle.append(cycle)
            del cycle
            assert of_host_memory(watch.end()) == 0
    finally:
        gc.enable()

"""Libraries that were used for the first time, and so may keep what they took without anybody having leaked it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from datetime import date

import msgspec

from lowtide.leakcheck.suppressions.entries import shipped
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.libraries import resident_code
from lowtide.reports.schema import Finding, NotMeasured
from lowtide.reports.sizes import first_of

VENDOR_LIBRARIES = (
    r"lib(cublas|cublasLt|cudnn\w*|cusolver\w*|cusparse\w*|cufft\w*|curand|cutensor|magma\w*|nccl|nvrtc|nvJitLink|nvshmem\w*"
    r"|hipblas\w*|rocblas|hipsolver|rocsolver|hipsparse|rocsparse|hipfft|rocfft|MIOpen|rccl)(-\w+)?\.so[.\d]*"
)
"""Those that make a handle, with memory of its own on the card, when they are first used, and never give it back."""

_WITH_DESCRIPTORS = r"lib(nccl|rccl|nvshmem\w*)\b.*"
"""Those of them that talk to other processes, and open sockets and pipes for it."""

_FIRST_USE_BYTES = 256 << 10
"""Code that must newly be in memory: the kernel brings in 64 KiB around every page that is touched."""

_TABLES_BYTES = 16 << 20
"""What a library may keep for a kind of what it prepares: cuFFT 6 MiB for lengths with a large prime (H200)."""

_PREPARED = "has made plans here, and keeps tables of its own for each kind of them"

_SHOWN_LIBRARIES = 2


class FirstUse:
    """Keeps how much code of each library was in memory at the last look."""

    def __init__(self) -> None:
        self._resident: dict[str, int] = {}

    def adopt(self) -> None:
        """What is in memory now has been used."""
        self._resident = _read()

    @property
    def any_loaded(self) -> bool:
        """Whether any of them was in use at the last look."""
        return any(self._resident.values())

    @property
    def of_blas(self) -> bool:
        """Whether a BLAS library was first used since the last `adopt`."""
        return any(re.match(r"lib(cu|roc|hip)blas", name) for name in self.libraries())

    def libraries(self) -> list[str]:
        """Those of which much more is in memory than at the last `adopt`, sorted."""
        return sorted(name for name, size in _read().items() if size - self._resident.get(name, 0) >= _FIRST_USE_BYTES)


def _read() -> dict[str, int]:
    try:
        return resident_code(VENDOR_LIBRARIES)
    except OSError:  # not this kernel: then nothing is excused
        return {}


def excused_by_libraries(
    findings: Sequence[Finding],
    before: Counters,
    now: Counters,
    first_use: FirstUse,
    any_graph_alive: Callable[[], bool] = lambda: False,
    descriptors: Callable[[Finding], Collection[str]] = lambda finding: (),
    prepared_by: Collection[str] = (),
) -> tuple[tuple[Finding, ...], tuple[NotMeasured, ...]]:
    """Tells apart what a library that was first used in a test may have taken for good.

    Args:
        findings: the test's.
        before: the counters at its baseline.
        now: the counters now.
        first_use: what was in use before.
        any_graph_alive: whether captured graphs are, for which the driver keeps memory, too; asked where it matters.
        descriptors: gives those that a finding is about, as the counters name them.
        prepared_by: libraries that have prepared something in the test, such as plans, which was given back.

    Returns:
        The findings, with the library as their holder where it is known to keep memory (these are suppressed by the
        shipped list); and what may be a library's or a leak, which cannot be distinguished.
    """
    may_be = [
        finding
        for finding in findings
        if finding.resource == "driver"
        or (finding.resource == "file-descriptors" and all(map(may_be_a_drivers, descriptors(finding))))
    ]
    # Loaded they are with a torch that was built for cards, used only where a card is.
    is_open = driver_is_open(now) or any(finding.resource == "driver" for finding in may_be)
    if not may_be or not is_open:
        return tuple(findings), ()
    libraries = first_use.libraries()
    holders = libraries
    graphs = False
    if driver_is_open(now) and not driver_is_open(before):
        of_memory = "the card's driver was first used here, and keeps descriptors and memory of its own"
        of_descriptors = of_memory
        holders = ["context", *libraries]
    elif libraries:
        graphs = any(finding.resource == "driver" for finding in may_be) and any_graph_alive()
        of_memory = _beside_graphs(libraries) if graphs else _used_first(libraries, "memory")
        talking = [name for name in libraries if re.fullmatch(_WITH_DESCRIPTORS, name)]
        of_descriptors = "libraries were first used here, and some keep descriptors of their own"
        if talking:
            of_descriptors = _used_first(talking, "descriptors")
    elif now.native_threads > before.native_threads and first_use.any_loaded:
        of_memory = "a native thread started here, and libraries keep memory of their own for each thread"
        of_descriptors = "a native thread started here, and may keep descriptors of its own"
    elif prepared_by:
        may_be = [each for each in may_be if each.resource == "driver" and (each.bytes or 0) <= _TABLES_BYTES]
        of_memory = of_descriptors = f"{first_of(sorted(prepared_by), _SHOWN_LIBRARIES)} {_PREPARED}"
    else:
        return tuple(findings), ()
    known = {id(finding): None if graphs else _known(finding, holders) for finding in may_be}
    excused = tuple(
        NotMeasured(what=finding.message, why=of_memory if finding.resource == "driver" else of_descriptors)
        for finding in may_be
        if known[id(finding)] is None
    )
    kept = (known.get(id(finding), finding) for finding in findings)
    return tuple(finding for finding in kept if finding is not None), excused


def _beside_graphs(libraries: Sequence[str]) -> str:
    used = f"{first_of(libraries, _SHOWN_LIBRARIES)} {'was' if len(libraries) == 1 else 'were'} first used here"
    return f"{used}, and CUDA graphs are alive: each of them keeps memory of its own"


def _used_first(libraries: Sequence[str], what: str) -> str:
    used = f"was first used here, and keeps {what} of its own"
    if len(libraries) > 1:
        used = f"were first used here, and keep {what} of their own"
    return f"{first_of(libraries, _SHOWN_LIBRARIES)} {used}"


def _known(finding: Finding, holders: Sequence[str]) -> Finding | None:
    """The finding as that of libraries, if the shipped list knows each of them; else None."""
    if not holders or finding.resource != "driver":
        return None
    findings = [
        msgspec.structs.replace(finding, cause="driver" if holder == "context" else "library-workspace", holder=holder)
        for holder in holders
    ]
    applied = shipped().apply(findings, date.today()).findings
    if any(item.suppressed_by is None for item in applied):
        return None
    return msgspec.structs.replace(applied[0], holder=", ".join(holders))


def driver_is_open(counters: Counters) -> bool:
    """Whether the process has a descriptor of a card's driver."""
    return any(" -> /dev/nvidia" in name or "/dev/kfd" in name for name in counters.items["file-descriptors"])


def may_be_a_drivers(name: str) -> bool:
    """Whether a descriptor, as the counters name it, is of a kind that drivers and libraries open for themselves."""
    return name.partition(" -> ")[2].partition(":")[0] in ("socket", "pipe", "anon_inode")

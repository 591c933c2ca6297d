"""First uses: a library of which much more code is in memory than before was used for the first time."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import msgspec
import pytest
import torch
from msgspec.structs import replace

from lowtide import LeakCheck
from lowtide.leakcheck.resources import first_use
from lowtide.leakcheck.resources.first_use import VENDOR_LIBRARIES, FirstUse, excused_by_libraries
from lowtide.probes.device.torch_allocator import any_graph_alive
from lowtide.probes.host.counters import Counters
from lowtide.reports.schema import Finding, ResourceName

MUCH = 256 << 10


class Memory:
    """Says how much code of each library is in memory."""

    def __init__(self) -> None:
        self.resident: dict[str, int] = {}

    def read(self, pattern: str) -> dict[str, int]:
        assert pattern == VENDOR_LIBRARIES
        return dict(self.resident)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(first_use, "resident_code", memory.read)
    return memory


@pytest.fixture
def uses(memory: Memory) -> FirstUse:
    memory.resident = {"libcublas.so.12": 64 << 10, "libcudnn.so.9": 8 << 20}
    uses = FirstUse()
    uses.adopt()
    return uses


def test_of_nothing_new_nothing_is_reported(uses: FirstUse) -> None:
    assert uses.libraries() == []


@pytest.mark.parametrize(("more", "reported"), [(MUCH, ["libcublas.so.12"]), (MUCH - 4096, [])])
def test_a_library_of_which_much_more_is_in_memory_is_reported(
    uses: FirstUse, memory: Memory, more: int, reported: list[str]
) -> None:
    memory.resident["libcublas.so.12"] += more
    assert uses.libraries() == reported


def test_a_library_that_was_loaded_meanwhile_is_reported_if_it_was_used(uses: FirstUse, memory: Memory) -> None:
    memory.resident |= {"libnccl.so.2": MUCH, "libcufft.so.11": 64 << 10}
    assert uses.libraries() == ["libnccl.so.2"]


def test_several_are_sorted(uses: FirstUse, memory: Memory) -> None:
    memory.resident |= {"libnccl.so.2": MUCH, "libcufft.so.11": MUCH}
    assert uses.libraries() == ["libcufft.so.11", "libnccl.so.2"]


NOTHING = Counters({"file-descriptors": {}}, {}, {})


def why_of_a_finding(uses: FirstUse) -> str:
    """What excuses 2 MiB of driver memory of a test in which the card was in use before."""
    finding = Finding(
        resource="driver",
        cause="unknown",
        bytes=2 << 20,
        count=1,
        device="cuda:0",
        stage="call",
        message="2.0 MiB of driver on cuda:0 did not come back",
        fingerprint="0",
    )
    findings, (excused,) = excused_by_libraries([finding], NOTHING, NOTHING, uses)
    assert (findings, excused.what) == ((), finding.message)
    return excused.why


def test_one_library_that_may_keep_memory_is_named(uses: FirstUse, memory: Memory) -> None:
    memory.resident["libfirst.so.1"] = MUCH
    assert why_of_a_finding(uses) == "libfirst.so.1 was first used here, and keeps memory of its own"


def test_of_many_the_first_are_named(uses: FirstUse, memory: Memory) -> None:
    memory.resident |= dict.fromkeys(("liba.so.1", "libb.so.1", "libc.so.1", "libd.so.1"), MUCH)
    reported = "liba.so.1, libb.so.1 and 2 more were first used here, and keep memory of their own"
    assert why_of_a_finding(uses) == reported


def finding_of(resource: ResourceName, message: str) -> Finding:
    return Finding(
        resource=resource,
        cause="unknown",
        bytes=0,
        count=2,
        device="",
        stage="call",
        message=message,
        fingerprint="0",
    )


DRIVER = Counters({"file-descriptors": {"5 -> /dev/nvidiactl": 1}}, {}, {})
PIPES = finding_of("file-descriptors", "2 file descriptors still open: 7 -> pipe:[1], 8 -> pipe:[1]")
OF_DRIVER = finding_of("driver", "152.0 MiB of driver on cuda:0 did not come back")


@pytest.mark.parametrize(
    ("library", "why"),
    [
        ("libcublasLt.so.12", "libraries were first used here, and some keep descriptors of their own"),
        ("libnccl.so.2", "libnccl.so.2 was first used here, and keeps descriptors of its own"),
    ],
)
def test_a_library_is_named_for_descriptors_only_if_it_has_some(
    uses: FirstUse, memory: Memory, library: str, why: str
) -> None:
    memory.resident[library] = MUCH
    findings, (excused,) = excused_by_libraries([PIPES], DRIVER, DRIVER, uses)
    assert (findings, excused.what, excused.why) == ((), PIPES.message, why)


def test_what_no_library_opens_is_not_excused(uses: FirstUse, memory: Memory) -> None:
    memory.resident["libnccl.so.2"] = MUCH
    opened = [("file-descriptors", "7 -> pipe:[1]"), ("file-descriptors", "8 -> /etc/hostname")]
    assert excused_by_libraries([PIPES], DRIVER, DRIVER, uses, things=lambda finding: opened) == ((PIPES,), ())
    assert excused_by_libraries([PIPES], DRIVER, DRIVER, uses, things=lambda finding: opened[:1])[0] == ()


@pytest.mark.parametrize(("path", "outcome"), [("/etc/hostname", "leak"), ("", "clean")])
def test_a_block_excuses_a_library_s_pipes_and_no_file(
    monkeypatch: pytest.MonkeyPatch, path: str, outcome: str
) -> None:
    monkeypatch.setattr(first_use, "driver_is_open", lambda counters: True)
    monkeypatch.setattr(FirstUse, "libraries", lambda self: ["libnccl.so.2"])
    opened: list[int] = []
    with LeakCheck("block") as check:
        opened += [os.open(path, os.O_RDONLY)] if path else os.pipe()
    (subject,) = check.report.subjects
    for number in opened:
        os.close(number)
    assert (subject.outcome, len(subject.not_measured)) == (outcome, int(not path))


def test_without_a_card_libraries_are_loaded_and_not_used(memory: Memory) -> None:
    """A torch that was built for cards loads them; nobody adopts what is loaded where there is no card."""
    memory.resident["libnccl.so.2"] = MUCH
    assert excused_by_libraries([PIPES], NOTHING, NOTHING, FirstUse()) == ((PIPES,), ())


@pytest.mark.parametrize(("names", "is_excused"), [((), True), (("Thread-1",), False)])
def test_descriptors_are_excused_for_a_thread_that_is_none_of_python_s(
    uses: FirstUse, memory: Memory, names: Sequence[str], *, is_excused: bool
) -> None:
    memory.resident["libnccl.so.2"] = MUCH
    uses.adopt()
    now = replace(DRIVER, items={**DRIVER.items, "threads": dict.fromkeys(names, 1)}, native_threads=1)
    findings, (excused, *_) = excused_by_libraries([OF_DRIVER, PIPES], DRIVER, now, uses)
    # What a library keeps for each thread it may keep for Python's, too.
    assert excused.what == OF_DRIVER.message
    assert findings == (() if is_excused else (PIPES,))


@pytest.mark.parametrize(("size", "is_excused"), [(64 << 20, True), (518 << 20, False)])
def test_a_thread_excuses_what_a_handle_takes_and_no_context(
    uses: FirstUse, memory: Memory, size: int, *, is_excused: bool
) -> None:
    memory.resident["libcublas.so.12"] = MUCH
    uses.adopt()
    finding = msgspec.structs.replace(OF_DRIVER, bytes=size)
    findings, _ = excused_by_libraries([finding], DRIVER, replace(DRIVER, native_threads=1), uses)
    assert findings == (() if is_excused else (finding,))


@pytest.mark.parametrize(("key", "is_excused"), [("native cuda:0", True), ("tensors cuda:0", False)])
def test_a_block_of_a_library_s_state_is_excused_and_no_tensor(
    uses: FirstUse, memory: Memory, key: str, *, is_excused: bool
) -> None:
    block = msgspec.structs.replace(finding_of("tensors", "6.2 MiB of memory that native code holds"), cause="native")

    def judged() -> tuple[Finding, ...]:
        return excused_by_libraries([block], DRIVER, DRIVER, uses, things=lambda finding: [(key, "block at 0x7f")])[0]

    memory.resident["libcudnn_adv.so.9"] = MUCH
    assert judged() == (() if is_excused else (block,))
    uses.adopt()
    assert judged() == (block,)


def test_a_compiler_keeps_nothing_on_a_card() -> None:
    assert re.fullmatch(VENDOR_LIBRARIES, "libcublasLt.so.13")
    assert not re.fullmatch(VENDOR_LIBRARIES, "libnvrtc-builtins.so.13.0")


def test_tables_of_a_library_that_has_made_plans_are_its_own_up_to_a_limit(uses: FirstUse) -> None:
    tables, more = (msgspec.structs.replace(OF_DRIVER, bytes=size) for size in (6 << 20, 64 << 20))
    findings, (excused,) = excused_by_libraries([tables, more, PIPES], DRIVER, DRIVER, uses, prepared_by=["libcufft"])
    assert findings == (more, PIPES)
    assert excused.why == "libcufft has made plans here, and keeps tables of its own for each kind of them"
    assert excused_by_libraries([tables], DRIVER, DRIVER, uses) == ((tables,), ())


@pytest.mark.parametrize("library", ["libcublasLt.so.12", "libnccl.so.2"])
def test_graphs_that_are_alive_are_named_beside_a_library(uses: FirstUse, memory: Memory, library: str) -> None:
    memory.resident[library] = MUCH
    findings, excused = excused_by_libraries([OF_DRIVER, PIPES], NOTHING, NOTHING, uses, lambda: True)
    assert (findings, [item.what for item in excused]) == ((), [OF_DRIVER.message, PIPES.message])
    reported = f"{library} was first used here, and CUDA graphs are alive: each of them keeps memory of its own"
    assert excused[0].why == reported


def test_without_graphs_a_library_that_is_known_is_the_holder(uses: FirstUse, memory: Memory) -> None:
    memory.resident["libnccl.so.2"] = MUCH
    (finding,), excused = excused_by_libraries([OF_DRIVER], NOTHING, NOTHING, uses, lambda: False)
    assert (finding.holder, excused) == ("libnccl.so.2", ())


def test_graphs_are_looked_for_only_where_memory_may_be_theirs(uses: FirstUse, memory: Memory) -> None:
    def asked() -> bool:
        raise AssertionError

    memory.resident["libcublasLt.so.12"] = MUCH
    excused_by_libraries([PIPES], DRIVER, DRIVER, uses, asked)
    uses.adopt()
    assert excused_by_libraries([OF_DRIVER], NOTHING, NOTHING, uses, asked) == ((OF_DRIVER,), ())


def test_a_graph_that_is_alive_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        """Stands for torch's type, of which there is no object without a card."""

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    assert not any_graph_alive()
    kept = [Graph()]
    assert any_graph_alive()
    kept.clear()
    assert not any_graph_alive()


def test_a_library_that_has_left_memory_is_not(uses: FirstUse, memory: Memory) -> None:
    memory.resident = {"libcudnn.so.9": 64 << 10}
    assert uses.libraries() == []


def test_what_was_adopted_is_reported_no_more(uses: FirstUse, memory: Memory) -> None:
    memory.resident["libcublas.so.12"] += MUCH
    uses.adopt()
    assert uses.libraries() == []


def test_looking_adopts_nothing(uses: FirstUse, memory: Memory) -> None:
    memory.resident["libcublas.so.12"] += MUCH
    assert uses.libraries() == uses.libraries() == ["libcublas.so.12"]


@pytest.mark.parametrize(("size", "any_loaded"), [(64 << 10, True), (0, False)])
def test_one_is_loaded_if_any_of_its_code_is_in_memory(memory: Memory, size: int, any_loaded: bool) -> None:
    memory.resident = {"libcublas.so.12": size}
    uses = FirstUse()
    assert not uses.any_loaded
    uses.adopt()
    assert uses.any_loaded is any_loaded


def test_where_it_cannot_be_read_nothing_is_excused(uses: FirstUse, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(pattern: str) -> dict[str, int]:
        raise OSError

    monkeypatch.setattr(first_use, "resident_code", fails)
    assert uses.libraries() == []


@pytest.mark.parametrize(
    "name",
    [
        "libcublas.so.12",
        "libcublasLt.so.12",
        "libcublas-1b2c3d4e.so.12.8.4.1",
        "libcudnn.so.9",
        "libcudnn_engines_precompiled.so.9",
        "libcusparseLt.so.0",
        "libcusolverMg.so.11",
        "libnccl.so.2",
        "libMIOpen.so.1",
        "librocblas.so.4",
    ],
)
def test_a_library_that_keeps_memory_of_its_own_is_known(name: str) -> None:
    assert re.fullmatch(VENDOR_LIBRARIES, name)


@pytest.mark.parametrize(
    "name", ["libc.so.6", "libcudart.so.12", "libtorch_cuda.so", "libcublas.a", "mylibcublas.so.12", "libcublas2.so"]
)
def test_another_library_is_not(name: str) -> None:
    assert not re.fullmatch(VENDOR_LIBRARIES, name)

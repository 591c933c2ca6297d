"""A thousand different leaks have a thousand fingerprints, and each leak has the same one in every run."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lowtide.leakcheck.explaining.explain import Explanation
from lowtide.leakcheck.findings.item_findings import ItemLeak, with_fingerprint
from lowtide.leakcheck.findings.storage_holders import Context, Explained
from lowtide.leakcheck.findings.tensor_findings import tensor_leaks, with_stage
from lowtide.leakcheck.judging.fingerprints import identity_of
from lowtide.leakcheck.judging.judge import judge
from lowtide.leakcheck.judging.ladder import LadderStep
from lowtide.leakcheck.judging.metrics import Reading, plain_metrics
from lowtide.leakcheck.judging.storages import HeldStorage
from lowtide.leakcheck.resources import processes as child_processes
from lowtide.leakcheck.resources.resource import Rung, without_numbers
from lowtide.probes.memory.stack_frames import StackFrame
from lowtide.reports.schema import Finding, Frame, Hop
from tests.loaded_modules import load_instead

EACH = 50
"""Different leaks of each kind."""

CARD = "cuda:0"
Key = tuple[str, int]


def word(number: int) -> str:
    """A name without a number: `engine_aa`, `engine_ab` and so on."""
    return "".join(("engine", "_", *(chr(ord("a") + digit) for digit in divmod(number, 26))))


# Of each kind of thing: its metric's key, and the item of a number in a run; what has a name is told apart by it.
NAMED = {
    "thread": ("threads", lambda n, run: f"{word(n)}-{run} ({7000 + run + n})"),
    "file": ("file-descriptors", lambda n, run: f"{10 + run + n} -> /srv/models/{word(n)}/part-{run}.bin"),
    "temporary file": (
        "file-descriptors",
        lambda n, run: f"{run} -> {tempfile.gettempdir()}/pytest-of-me/pytest-{run}/test_{word(n)}0/kept (deleted)",
    ),
    "cache": ("lru-cache", lambda n, run: f"serving.{word(n)}.Model at {0x7F00 + run + n:#x} in serving.supports"),
    "another cache": ("lru-cache", lambda n, run: f"torch.nn.ReLU at {0x7F00 + run + n:#x} in serving.{word(n)}"),
    "process": ("processes", lambda n, run: str(40_000 + 1000 * run + n)),
    "segment": ("shared-memory", lambda n, run: f"{word(n)}_{4711 + run}"),
    "setting": ("globals", lambda n, run: f"serving.{word(n)} was {n}, is {run}"),
    "arena": (f"arena {CARD}", lambda n, run: f"{word(n)} at {0x7F00 + run:#x}"),
}

# What has no name is told apart by its test module.
UNNAMED = {
    "made-up thread": ("threads", lambda n, run: f"Thread-{run} (run) ({7000 + n})"),
    "executor": ("threads", lambda n, run: f"ThreadPoolExecutor-{run}_{run} ({7000 + n})"),
    "socket": ("file-descriptors", lambda n, run: f"{10 + run} -> socket:[{91 * run + n}]"),
    "made-up file": ("file-descriptors", lambda n, run: f"3 -> {tempfile.gettempdir()}/tmpab3d_f{run:02}"),
    "made-up segment": ("shared-memory", lambda n, run: f"psm_{0xABCDEF01 + run + n:08x}"),
    "group": ("process-groups", lambda n, run: str(run)),
    "block": (f"native {CARD}", lambda n, run: f"block at {0x7F00 + run + n:#x}"),
    "allocation": (f"driver {CARD}", lambda n, run: f"allocation at {0x7F00 + run + n:#x}"),
    "pool": (f"reserved {CARD}", lambda n, run: f"pool (0, {run}), segment at {0x7F00 + n:#x}"),
    "level": ("host-memory", None),
}


def found_by_the_judge(key: str, item: str | None) -> Finding:
    """As a test's verdict has it before its stage is known."""
    resource, _, device = key.partition(" ")
    wanted = {"native": "tensors", "process-groups": "process-groups"}.get(resource, resource)
    metrics = [
        metric for metric in plain_metrics(["cpu", CARD]) if (metric.resource, metric.device) == (wanted, device)
    ]
    if item is None:
        reading = Reading(amounts={key: 1 << 40})
        metrics = [metric for metric in metrics if not metric.is_named]
    else:
        reading = Reading(items={metric: {item: 1 << 20} for metric in (key, key.replace("driver", "allocations"))})
    steps = [LadderStep(Rung.RAW, reading, 0.0)]
    (found,) = judge(metrics or plain_metrics([CARD])[:1], Reading(), steps, stage="teardown", cycle=1).findings
    return found


def of_item(key: str, item: str | None, module: str, site: str = "") -> Finding:
    stack = (Frame(file=f"{module}", line=3, function=site),) if site else ()
    dated = msgspec.structs.replace(with_stage(found_by_the_judge(key, item), "call"), allocated_at=stack)
    names = {} if item is None else {item: 1 << 20}
    return with_fingerprint(ItemLeak(dated, key, names, 0), module).finding


def of_tensor(run: int, module: str, text: str, site: str = "", suspect: str = "") -> Finding:
    key = ("cpu", 0x7F0000000000 + 4096 * run)
    path = (Hop(type="module", edge="serving"), Hop(type="dict", edge=suspect, suspect=True))
    explanation = (
        Explanation("reachable", "module-global", suspect, path, (suspect,))
        if suspect
        else Explanation("unexplained", "unknown", "", (), ())
    )
    held = HeldStorage(key, 100 + run, text, "call", None)
    stacks = (lambda device, keys: {key[1]: [StackFrame(module, 3, site)]}) if site else Context().stacks
    context = Context(stacks=stacks, module=module)
    (leak,) = tensor_leaks([[held]], [Rung.RAW], Explained({key: explanation}, {}), context)
    return leak.finding


def leaks(run: int) -> Iterator[Finding]:
    """All of them; what changes from run to run differs with `run`."""
    for n in range(EACH):
        for key, name in NAMED.values():
            yield of_item(key, name(n, run), f"tests/test_{run}.py")
        for key, name in UNNAMED.values():
            yield of_item(key, None if name is None else name(n, run), f"tests/test_{n}.py")
        yield of_item(f"native {CARD}", f"block at {0x7F00 + run:#x}", "tests/test_kernels.py", word(n))
        yield of_tensor(run, "tests/test_any.py", "float32 [10]", suspect=f"serving.{word(n)} ['layer {run}']")
        yield of_tensor(run, "tests/test_any.py", f"float32 [{run + 1}]", site=word(n))
        yield of_tensor(run, f"tests/test_{n}.py", f"float32 [{run + 1}x20]")


@pytest.fixture(autouse=True)
def command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that are not there: each runs a program of its own with a port and a temporary file."""

    def line(pid: str) -> list[str]:
        if not pid.isdigit():
            return []
        run, n = divmod(int(pid) - 40_000, 1000)
        return [
            "/usr/bin/python3",
            f"/srv/{word(n)}.py",
            f"--port={run}",
            f"--at={tempfile.gettempdir()}/pytest-of-me/pytest-{run}/x",
        ]

    monkeypatch.setattr(child_processes, "_command_line", line)


def test_no_two_of_a_thousand_different_leaks_share_a_fingerprint() -> None:
    found = list(leaks(run=1))
    assert len(found) >= 1000
    marks = Counter(finding.fingerprint for finding in found)
    assert [finding.message for finding in found if marks[finding.fingerprint] > 1] == []
    # As lowtide 0.1 had it: what had no path was told apart by its resource alone.
    former = Counter(finding.former_fingerprint or finding.fingerprint for finding in found)
    assert len(former) < 150


def test_each_of_them_has_the_same_one_in_another_run() -> None:
    assert [leak.fingerprint for leak in leaks(run=1)] == [leak.fingerprint for leak in leaks(run=23)]


def test_numbers_addresses_digests_and_uuids_are_left_out() -> None:
    text = "r-17 at 0x7fa01b2c3d4e of 3f2504e0-4f89-11d3-9a0c-0305e82c3301 in run_1f0a93bc77"
    assert without_numbers(text) == "r-* at * of * in run_*"
    assert without_numbers("decade facade") == "decade facade"


def run_forever(done: threading.Event) -> None:
    done.wait()


def test_a_thread_is_called_by_what_it_runs_or_else_by_its_class() -> None:
    done = threading.Event()
    threads = [
        threading.Thread(target=run_forever, args=(done,)),
        threading.Thread(target=functools.partial(run_forever, done)),
        threading.Thread(target=done.wait),
        threading.Thread(target=done.wait, name="poller-7"),
    ]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        threads += pool._threads
        for thread in threads[:4]:
            thread.start()
        found = [identity_of("threads", [f"{thread.name} ({thread.ident})"]) for thread in threads]
        done.set()
    for thread in threads:
        thread.join()
    own, partial, library, named, executor = found
    assert own == partial
    assert (own.names[0].endswith("test_stable_names.run_forever"), own.are_named) == (True, True)
    assert not library.are_named
    assert (named.names[0].endswith("poller-*"), named.are_named) == (True, True)
    assert not executor.are_named


def test_a_child_is_called_by_its_command_and_a_fork_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    code = "print(1, flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, "/srv/a 1"], **pipes) as child:  # type: ignore[call-overload]
        child.stdout.readline()
        named = identity_of("processes", [str(child.pid)])
        child.communicate(b"\n")
    assert (named.names, named.are_named) == (("python -c print(*, flush=True); input() /srv/a *",), True)
    assert not identity_of("processes", ["self"]).are_named


@pytest.mark.parametrize(
    ("target", "name", "is_given"),
    [
        ("/srv/a.log", "/srv/a.log", True),
        ("{tmp}/144dc81b-9203-4503-9262-0c7212fdfcbd", "<tmp>/*", False),
        ("{cwd}/logs/run-7.log", "./logs/run-*.log", True),
        ("{tmp}/tmpq2w_e4r5", "<tmp>/tmp*", False),
        ("{tmp}/tmpq2w_e4r5.bin", "<tmp>/tmp*.bin", False),
        ("{tmp}/tmpq2w_e4r5/weights.bin", "<tmp>/tmp*/weights.bin", True),
        ("{tmp}/pytest-of-root/pytest-7/popen-gw1/test_it0/store", "<tmp>/test_it*/store", True),
        ("/scratch/ci-8/test_it0/store", "<tmp>/test_it*/store", True),
        ("{tmp}/pytest-of-root/pytest-7/shared0/store", "<tmp>/shared*/store", True),
        ("/dev/shm/psm_1f0a93bc", "psm_*", False),
        ("/dev/shm/kv-cache", "kv-cache", True),
        ("anon_inode:[eventpoll]", "anon_inode:[eventpoll]", False),
        ("pipe:[4711]", "pipe", False),
    ],
)
def test_a_descriptor_is_called_by_its_target(target: str, name: str, is_given: bool) -> None:
    target = target.format(cwd=Path.cwd(), tmp=tempfile.gettempdir())
    found = identity_of("file-descriptors", [f"7 -> {target}"])
    assert (found.names, found.are_named) == ((name,), is_given)


def test_several_things_of_one_name_are_one_and_one_without_a_name_makes_the_module_count() -> None:
    found = identity_of("threads", ["poller-1 (7)", "poller-2 (8)"])
    assert (found.names, found.are_named) == (("poller-*",), True)
    mixed = identity_of("file-descriptors", ["3 -> /srv/a", "4 -> socket:[7]"])
    assert (mixed.names, mixed.are_named) == (("/srv/a", "socket"), False)


def test_a_group_is_called_by_its_backend_and_description(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        group_desc = "tp:1"

    group: Any = Group()
    world = type(
        "World", (), {"pg_names": {group: "7"}, "pg_map": {group: ("nccl", None)}, "pg_group_ranks": {group: [0]}}
    )
    load_instead(monkeypatch, "torch.distributed.distributed_c10d", type("Module", (), {"_world": world}))  # type: ignore[arg-type]
    assert identity_of("process-groups", ["7"]).names == ("(nccl, * rank) tp:*",)

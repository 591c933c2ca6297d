"""A user's target goes through the fixed life: what `lowtide check` finds in it, and what it leaves alone."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.leakcheck.lives.lifecycle import LifecycleRun, TargetLife, check_run, script_of
from lowtide.leakcheck.targets.target import Capabilities, LifecycleTarget
from lowtide.probes.device.driver import NoDriver
from lowtide.reports.schema import Finding, Subject
from tests.leakcheck.small_target import SmallTarget

pytestmark = pytest.mark.nightly

KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    KEPT.clear()


def lived(target: type[LifecycleTarget], cycles: int = 1) -> Subject:
    run: LifecycleRun = check_run("check", target, driver=NoDriver("a test"), cycles=cycles)
    return run.run()


def only(target: type[LifecycleTarget], cycles: int = 1) -> Finding:
    (finding,) = lived(target, cycles).findings
    return finding


@pytest.mark.parametrize(
    ("able", "stages"),
    [
        (Capabilities(), "create infer shutdown"),
        (Capabilities(sleep_levels=(1,)), "create infer sleep(1) wake infer shutdown"),
        (
            Capabilities(sleep_levels=(3, 12), reload=True),
            "create infer sleep(3) wake infer sleep(12) wake infer reload infer shutdown",
        ),
    ],
)
def test_a_life_has_the_stages_that_the_target_is_able_to(able: Capabilities, stages: str) -> None:
    assert " ".join(script_of(able)) == stages


class Counts(SmallTarget):
    capabilities = replace(SmallTarget.capabilities, sleep_levels=(3,), preserving_levels=(3,), max_requests=2)

    def create(self, config: Mapping[str, Any]) -> None:
        KEPT.append(config)
        super().create(config)

    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        KEPT.append((level, mode))
        return super().sleep(level, mode)

    def wake(self, tags: Sequence[str] | None) -> None:
        KEPT.append(tags)
        super().wake(tags)

    def reload(self) -> None:
        KEPT.append("reload")
        super().reload()

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        assert len(prompt_lengths) <= 2
        KEPT.append(tuple(prompt_lengths))
        return super().infer(prompt_lengths, max_tokens)


def test_an_engine_that_is_right_is_clean_in_every_life() -> None:
    subject = lived(Counts, cycles=2)
    assert (subject.outcome, subject.reason, subject.findings) == ("clean", "", ())
    stages = ["create", "infer", "sleep(3)", "wake", "infer", "reload", "infer", "shutdown"]
    assert [stage.name for stage in subject.stages] == stages * 2
    inferred = [(3, 17), (40,)]
    assert [{"size": 8}, *inferred, (3, "wait"), None, *inferred, "reload", *inferred] * 2 == KEPT


class Keeps(SmallTarget):
    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        if not KEPT:
            KEPT.append(torch.ones(1000))
        return super().infer(prompt_lengths, max_tokens)


def test_what_it_leaves_is_found_with_holder_stage_and_remedy() -> None:
    finding = only(Keeps)
    assert (finding.resource, finding.stage, finding.bytes) == ("tensors", "infer", 4000)
    assert finding.holder == f"{__name__}.KEPT[0]"
    assert finding.remedy is not None
    assert finding.remedy.returns_bytes == 4000


class Forgets(SmallTarget):
    def fill(self) -> None:
        self.weights.copy_(torch.arange(1000))

    def drop(self, tags: Sequence[str]) -> None:
        super().drop(tags)
        self.table.zero_()


def test_what_a_sleep_must_preserve_is_compared() -> None:
    finding = only(Forgets)
    assert (finding.resource, finding.cause, finding.holder) == ("contents", "not-restored", "table")


class MayForget(Forgets):
    capabilities = replace(SmallTarget.capabilities, preserving_levels=())


def test_what_it_does_not_promise_to_preserve_is_not() -> None:
    assert lived(MayForget).outcome == "clean"


class SaysOtherThings(MayForget):
    def fill(self) -> None:
        self.weights.copy_(torch.arange(1000) + 1)


def test_the_tokens_are_those_from_before_in_any_case() -> None:
    finding = only(SaysOtherThings)
    assert (finding.resource, finding.stage) == ("contents", "infer")


class HoldsABlock(SmallTarget):
    def reset_prefix_cache(self) -> bool:
        return not self.held

    @property
    def held(self) -> int:
        return 1

    def kv_usage(self) -> Any:
        return SimpleNamespace(total=10, available=9, evictable=0, held=1, pending_transfer=1)


def test_blocks_that_no_request_holds_are_found() -> None:
    finding = only(HoldsABlock)
    assert (finding.resource, finding.holder, finding.count) == ("kv-blocks", "pending transfers", 1)
    assert finding.remedy is None


class ForgetsNoPrefix(HoldsABlock):
    def kv_usage(self) -> Any:
        return SimpleNamespace(total=10, available=10, evictable=0, held=0, pending_transfer=0)


def test_prefixes_that_cannot_be_forgotten_are_found_where_no_block_is_held_either() -> None:
    finding = only(ForgetsNoPrefix)
    assert (finding.resource, finding.holder) == ("kv-blocks", "a holder that the engine does not name")


class TakesThemInAtAStep(HoldsABlock):
    stepped = False

    @property
    def held(self) -> int:
        return not self.stepped

    def step(self) -> Mapping[str, Sequence[int]]:
        self.stepped = True
        return super().step()


def test_that_a_step_gives_them_back_is_reported() -> None:
    finding = only(TakesThemInAtAStep)
    assert finding.remedy is not None
    assert finding.remedy.action == "engine.step()"


class TellsNothing:
    """The least that a target can be."""

    capabilities = Capabilities(prefix_cache=True)
    resets = True

    def create(self, config: Mapping[str, Any]) -> None:
        assert config == {}

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        return [[1] * max_tokens for _ in prompt_lengths]

    def reset_prefix_cache(self) -> bool:
        return self.resets

    def shutdown(self) -> None: ...


class NeverResets(TellsNothing):
    resets = False


def test_a_target_that_tells_nothing_of_itself_is_driven_too() -> None:
    assert lived(TellsNothing).outcome == "clean"
    assert only(NeverResets).holder == "a holder that the engine does not name"


def test_paths_are_distinguished_from_the_engine_that_the_target_has() -> None:
    life = TargetLife(TellsNothing)
    assert type(life.engine) is TellsNothing
    life.engine.engine = "the engine"  # type: ignore[attr-defined]
    assert life.engine == "the engine"


class MakesItsEngine(TellsNothing):
    """In its create, and keeps in it what it has inferred; until its shutdown."""

    capabilities = Capabilities(sleep_levels=(1,), emptying_levels=(1,))
    engine: Any = None

    def create(self, config: Mapping[str, Any]) -> None:
        self.engine = SimpleNamespace(outputs=[])

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        self.engine.outputs.append(torch.zeros(1000))
        return super().infer(prompt_lengths, max_tokens)

    def sleep(self, level: int, mode: str) -> None: ...

    def wake(self, tags: Sequence[str] | None) -> None: ...

    def shutdown(self) -> None:
        self.engine = None


def test_what_it_holds_asleep_is_named_from_the_engine_that_its_create_has_made() -> None:
    holders = {finding.holder for finding in lived(MakesItsEngine).findings}
    assert holders == {"engine.outputs", "engine.outputs[0]"}


class OfArrays(TellsNothing):
    """Has its memory in arrays of numpy, and gives all of it up in its sleep."""

    capabilities = Capabilities(sleep_levels=(1,), emptying_levels=(1,))
    size = 64 << 20

    def create(self, config: Mapping[str, Any]) -> None:
        self.wake(None)

    def sleep(self, level: int, mode: str) -> None:
        self.weights = None

    def wake(self, tags: Sequence[str] | None) -> None:
        self.weights = np.ones(self.size, np.uint8)

    def shutdown(self) -> None:
        self.weights = None


class KeepsItsArrays(OfArrays):
    def sleep(self, level: int, mode: str) -> None: ...


def test_a_sleep_that_keeps_host_memory_in_no_tensor_is_told_with_who_holds_it() -> None:
    assert lived(OfArrays, cycles=2).outcome == "clean"
    (finding,) = lived(KeepsItsArrays, cycles=2).findings
    assert (finding.stage, finding.holder, finding.advice) == (
        "sleep(1)",
        "engine.weights",
        "let go of engine.weights in sleep(1)",
    )
    assert finding.bytes == pytest.approx(OfArrays.size, rel=0.2)


class Refuses(TellsNothing):
    def __init__(self) -> None:
        if KEPT:
            raise OSError("no licence")
        KEPT.append("one is enough")


def test_a_target_that_cannot_be_made_again_is_said_to_be_the_reason() -> None:
    subject = lived(Refuses)
    assert subject.outcome == "error"
    assert "made no target: it raised OSError: no licence" in subject.reason
    assert "lowtide itself" not in subject.reason


class Imports(SmallTarget):
    """Imports, as an engine does in its create, a module that has a table and a list of its own."""

    keeps = False

    def create(self, config: Mapping[str, Any]) -> None:
        super().create(config)
        import table_of_a_life

        if self.keeps:
            table_of_a_life.KEPT.append(torch.ones(1000))


class ImportsAndKeeps(Imports):
    keeps = True


@pytest.fixture
def module_with_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    lines = (
        "import torch, torch.cuda",
        "torch.cuda.set_stream = lambda stream: None",
        "KEPT, TABLE = [], torch.ones(1000)",
    )
    (tmp_path / "table_of_a_life.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "set_stream", torch.cuda.set_stream)
    yield
    sys.modules.pop("table_of_a_life", None)


@pytest.mark.usefixtures("module_with_table")
def test_what_a_module_makes_when_a_life_imports_it_is_the_process_s() -> None:
    subject = lived(Imports, cycles=2)
    assert (subject.outcome, subject.findings) == ("clean", ())


@pytest.mark.usefixtures("module_with_table")
def test_what_a_life_puts_into_such_a_module_is_a_leak() -> None:
    finding = only(ImportsAndKeeps)
    assert (finding.stage, finding.bytes, finding.holder) == ("create", 4000, "table_of_a_life.KEPT[0]")


class Serving(SmallTarget):
    """Leaves a worker with a thread and sockets, a process and a segment, each life its own."""

    def create(self, config: Mapping[str, Any]) -> None:
        super().create(config)
        KEPT.append(Worker())
        KEPT.append(subprocess.Popen(["sleep", "1000"]))
        KEPT.append(shared_memory.SharedMemory(create=True, size=4096))


class Worker:
    def __init__(self) -> None:
        self.own, self.others = socket.socketpair()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        self.own.recv(1)

    def close(self) -> None:
        self.others.close()
        self.thread.join()
        self.own.close()


class Ending(Serving):
    def shutdown(self) -> None:
        super().shutdown()
        end_kept()


def end_kept() -> None:
    for item in KEPT:
        if isinstance(item, subprocess.Popen):
            item.kill()
            item.wait()
            continue
        item.close()
        if isinstance(item, shared_memory.SharedMemory):
            item.unlink()
    KEPT.clear()


def test_what_lives_leave_is_told_by_what_it_is_and_who_holds_it() -> None:
    try:
        found = {finding.resource: finding for finding in lived(Serving, cycles=2).findings}
    finally:
        end_kept()
    assert found.keys() == {"threads", "processes", "shared-memory", "file-descriptors"}
    kept = f"{__name__}.KEPT"
    assert f"they run {__name__}.Worker.serve (" in found["threads"].message
    assert f"held by {kept}[0] (and 1 more)" in found["threads"].message
    assert found["threads"].holder == f"{kept}[0] (and 1 more)"
    assert "started in Worker.__init__, test_target_life.py:" in found["threads"].message
    assert f"held by {kept}" in found["processes"].message
    assert "started in Serving.create, test_target_life.py:" in found["processes"].message
    assert "made in Worker.__init__, test_target_life.py:" in found["file-descriptors"].message
    assert f"held by {kept}" in found["shared-memory"].message
    assert found["shared-memory"].advice == f"call unlink() of each that {kept} holds in teardown"
    assert found["file-descriptors"].path[1].edge == ".KEPT"


def test_what_lives_end_is_no_leak() -> None:
    assert lived(Ending, cycles=2).findings == ()


class Owner:
    """Has a tensor, a socket and a thread, which `close` ends all."""

    def __init__(self) -> None:
        self.weights = torch.zeros(1 << 20)
        self.socket = socket.socket()
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        self.ends.wait()

    def close(self) -> None:
        self.ends.set()
        self.thread.join()
        self.socket.close()


class KeepsItsOwner(SmallTarget):
    def create(self, config: Mapping[str, Any]) -> None:
        super().create(config)
        KEPT.append(Owner())


class KeepsTwoThings(SmallTarget):
    def create(self, config: Mapping[str, Any]) -> None:
        super().create(config)
        KEPT.append((socket.socket(),))
        KEPT.append([torch.zeros(1 << 20)])


def test_what_one_object_holds_of_several_lives_is_one_finding() -> None:
    try:
        finding = only(KeepsItsOwner, cycles=2)
    finally:
        for owner in KEPT:
            owner.close()
    assert finding.resource == "tensors"
    assert {part.resource for part in finding.parts} == {"threads", "file-descriptors"}
    assert ".close() in teardown" in (finding.advice or "")


def test_what_several_objects_hold_is_not() -> None:
    found = lived(KeepsTwoThings, cycles=2).findings
    for (held,) in KEPT:
        if isinstance(held, socket.socket):
            held.close()
    assert {finding.resource for finding in found} == {"tensors", "file-descriptors"}


class LeavesAFile(SmallTarget):
    """Maps a file in shared memory by a name that `tempfile` makes up, each life its own."""

    def create(self, config: Mapping[str, Any]) -> None:
        super().create(config)
        descriptor, self.path = tempfile.mkstemp(prefix="offload-", dir="/dev/shm")
        os.truncate(descriptor, 1 << 20)
        self.offloaded = mmap.mmap(descriptor, 1 << 20)
        os.close(descriptor)
        self.offloaded[:] = bytes(1 << 20)
        KEPT.append((self.path, self.offloaded))


class RemovesIt(LeavesAFile):
    def shutdown(self) -> None:
        super().shutdown()
        KEPT.clear()
        self.offloaded.close()
        Path(self.path).unlink()


def test_what_each_life_leaves_by_another_name_is_one_finding_that_grows() -> None:
    try:
        found = lived(LeavesAFile, cycles=3).findings
    finally:
        for path, mapped in KEPT:
            mapped.close()
            Path(path).unlink()
    every = [*found, *(part for finding in found for part in finding.parts)]
    left = {finding.resource: finding for finding in every}
    assert sorted(left) == sorted(finding.resource for finding in every)
    assert (left["shared-memory"].bytes, left["shared-memory"].trend) == (3 << 20, "growth")


def test_its_twin_that_removes_the_file_is_clean() -> None:
    assert lived(RemovesIt, cycles=3).findings == ()

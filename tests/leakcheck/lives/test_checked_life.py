"""One life in which every call is checked: each way to go wrong is told, and an engine that is right passes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from lowtide.engine.device_allocator.arena import Arena
from lowtide.engine.pages.cpu import CpuPages
from lowtide.leakcheck.judging.ladder import SettlePolicy
from lowtide.leakcheck.lives import checked_life
from lowtide.leakcheck.lives.checked_life import CheckedLife, Lives
from lowtide.leakcheck.lives.fuzz import fuzz
from lowtide.leakcheck.lives.script import Call, Fault, LifeError
from lowtide.leakcheck.resources.resource import Rung
from lowtide.leakcheck.targets.faults import Seam
from lowtide.leakcheck.targets.target import Capabilities, TargetError, TargetFactory
from lowtide.probes.host.counters import Counters
from lowtide.reports.schema import NotMeasured
from tests.leakcheck.small_target import KEPT, KIB, NoRoomError, SmallTarget
from tests.leakcheck.swept import sweep
from tests.pytest_plugin.test_lost_slots import FILES as SCHEDULER

pytestmark = pytest.mark.nightly

Play = Callable[[CheckedLife], object]

LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    KEPT.clear()
    gc.collect()


def live(target: TargetFactory, play: Play) -> CheckedLife:
    with Lives(target) as lives:
        life = CheckedLife(lives)
        try:
            play(life)
            life.close()
        except BaseException:
            life.abandon()
            raise
        return life


def fails(target: TargetFactory, play: Play, resource: str, message: str, cause: str | None = None) -> LifeError:
    with pytest.raises(LifeError, match=message) as caught:
        live(target, play)
    (finding, *_) = caught.value.findings
    assert finding.resource == resource
    assert cause is None or finding.cause == cause
    # And it is not the play that is wrong.
    live(SmallTarget, play)
    return caught.value


def sleeps(life: CheckedLife) -> None:
    life.create()
    life.sleep(1)
    life.wake()


def test_an_engine_that_is_right_passes_through_every_call() -> None:
    def play(life: CheckedLife) -> None:
        life.illegal("infer")
        life.create({"size": 16})
        life.illegal("create")
        life.illegal("wake")
        life.infer([3, 17], 6)
        life.start([3], 6)
        life.illegal("infer")
        life.illegal("reload")
        life.step()
        life.start([17, 40], 4)
        life.abort(2)
        life.sleep(1, "wait")
        life.illegal("reload")
        life.wake(["weights"])
        life.reload()
        life.illegal("infer")
        life.wake()
        assert life.reset_prefix_cache()
        life.start([3], 4)
        life.sleep(1, "abort")
        life.shutdown()
        life.illegal("step")
        life.create()
        life.infer([40], 1)

    life = live(SmallTarget, play)
    assert str(life.calls[1]) == "create(config={'size': 16})"
    assert str(life.calls[2]) == "illegal('create')"
    assert life.model.phase == "closed"


def test_calls_are_written_as_they_are_made_again() -> None:
    assert (
        str(Call("wake", {"tags": ["weights"]}, Fault("map", 2)))
        == "wake(tags=['weights'], fault=Fault(kind='map', at=2))"
    )


# --- answers --------------------------------------------------------------------------------------------------------


class ForgetsAtWake(SmallTarget):
    def fill(self) -> None:
        self.weights.zero_()


def test_contents_that_a_sleep_lost_are_named() -> None:
    error = fails(ForgetsAtWake, sleeps, "contents", "weights changed its contents", "not-restored")
    assert error.findings[0].holder == "weights"


class SaysOtherThings(SmallTarget):
    slept = False

    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        done = super().sleep(level, mode)
        self.slept = True
        return done

    def say(self, length: int, count: int) -> list[int]:
        return [token + self.slept for token in super().say(length, count)]


def test_tokens_are_those_of_a_fresh_engine() -> None:
    def play(life: CheckedLife) -> None:
        sleeps(life)
        life.infer([3], 2)

    fails(SaysOtherThings, play, "contents", r"a prompt of 3 tokens gives \[4, 5\]; a fresh engine gives \[3, 4\]")


def test_tokens_that_come_out_of_a_step_are_compared_too() -> None:
    def play(life: CheckedLife) -> None:
        sleeps(life)
        life.start([17], 1)
        life.step()

    fails(SaysOtherThings, play, "contents", "a prompt of 17 tokens")


class LosesOutputs(SmallTarget):
    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        super().sleep(level, mode)
        return {}


def test_a_sleep_that_waits_gives_the_outputs_of_what_it_waited_for() -> None:
    def play(life: CheckedLife) -> None:
        life.create()
        life.start([3], 4)
        life.sleep(1, "wait")

    fails(LosesOutputs, play, "state", "lost the outputs of unfinished requests")


class AnswersLess(SmallTarget):
    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        return super().infer(prompt_lengths, max_tokens)[:1]


def test_every_prompt_has_an_answer() -> None:
    def play(life: CheckedLife) -> None:
        life.create()
        life.infer([3, 17], 1)

    class OnlyThen(AnswersLess):
        def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
            return (
                super().infer(prompt_lengths, max_tokens)
                if len(prompt_lengths) == 2
                else super(AnswersLess, self).infer(prompt_lengths, max_tokens)
            )

    fails(OnlyThen, play, "contents", "infer gave 1 outputs for 2 prompts")


# --- state ----------------------------------------------------------------------------------------------------------


class WithSlots(SmallTarget):
    """Has vLLM's scheduler beside it, of whose blocks it gives back all but those of a request of two tokens."""

    loses = False

    def create(self, config: Mapping[str, Any]) -> None:
        super().create(config)
        self.scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler()

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        self.scheduler.start("request")
        answer = super().infer(prompt_lengths, max_tokens)
        if self.loses and max_tokens == 2:
            del self.scheduler.requests["request"]
        else:
            self.scheduler.end("request")
        return answer


class LosesSlots(WithSlots):
    loses = True


def test_blocks_of_vllm_that_no_request_has_are_lost_after_the_call_that_lost_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in SCHEDULER.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def play(life: CheckedLife) -> None:
        life.create()
        life.infer([3], 1)
        life.infer([3], 2)

    try:
        live(WithSlots, play)
        failed = fails(LosesSlots, play, "kv-blocks", "2 KV blocks of vLLM's BlockPool .* not given back after infer")
        assert "a request that the scheduler does not know (request)" in failed.findings[0].message
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


class SaysItRuns(SmallTarget):
    def state(self) -> str:
        return "running" if self.phase == "asleep" else self.phase


def test_the_engine_s_state_is_that_of_its_history() -> None:
    fails(SaysItRuns, sleeps, "state", "says that it is running after sleep; it must be asleep")


class TakesAnything(SmallTarget):
    def require(self, *phases: str) -> None:
        pass


class RaisesAnything(SmallTarget):
    def require(self, *phases: str) -> None:
        if self.phase not in phases:
            raise ValueError("no")


class ChangesThough(SmallTarget):
    def require(self, *phases: str) -> None:
        if self.phase == "running" and "new" in phases:
            self.drop(("kv_cache",))
        super().require(*phases)


@pytest.mark.parametrize(
    ("target", "resource", "message"),
    [
        (TakesAnything, "state", "create while running did not raise RefusedError"),
        (RaisesAnything, "state", "create while running raised ValueError: no, not RefusedError"),
        (ChangesThough, "arena", "'kv_cache' has 0 B mapped after create, which was refused, 128.0 KiB before"),
    ],
)
def test_an_illegal_call_is_refused_with_the_declared_error_and_changes_nothing(
    target: type[SmallTarget], resource: str, message: str
) -> None:
    def play(life: CheckedLife) -> None:
        life.create()
        life.illegal("create")

    fails(target, play, resource, message)


class RaisesOnce(SmallTarget):
    def reset_prefix_cache(self) -> bool:
        if self.requests:
            raise OSError("what?")
        return super().reset_prefix_cache()


def test_a_legal_call_does_not_raise() -> None:
    def play(life: CheckedLife) -> None:
        life.create()
        life.start([3], 2)
        life.reset_prefix_cache()

    fails(RaisesOnce, play, "state", "reset_prefix_cache raised OSError: what")


# --- memory ---------------------------------------------------------------------------------------------------------


class SleepsWithItsCache(SmallTarget):
    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        done = super().sleep(level, mode)
        self.map("kv_cache")
        return done


class WakesHalf(SmallTarget):
    def wake(self, tags: Sequence[str] | None) -> None:
        super().wake(tags)
        self.drop(("kv_cache",))


@pytest.mark.parametrize(
    ("target", "message", "amount"),
    [
        (SleepsWithItsCache, "'kv_cache' has 128.0 KiB mapped after sleep, not 0 B", 128 * KIB),
        (WakesHalf, "'kv_cache' has 0 B mapped after wake, not 128.0 KiB", 128 * KIB),
    ],
)
def test_what_sleeps_has_no_pages_and_what_is_awake_has_all(
    target: type[SmallTarget], message: str, amount: int
) -> None:
    assert fails(target, sleeps, "arena", message).findings[0].bytes == amount


class Arenaless:
    """Has its cache in no arena, and makes it again in the wake."""

    empties: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.cache: torch.Tensor | None = None
        self.spare: torch.Tensor | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(sleep_levels=(1,), emptying_levels=self.empties)

    def create(self, config: Mapping[str, object]) -> None:
        self.cache = torch.zeros(1 << 23, dtype=torch.uint8)

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        return [[1] * max_tokens for _ in prompt_lengths]

    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        self.cache = None
        return {}

    def wake(self, tags: Sequence[str] | None) -> None:
        self.cache = torch.zeros(1 << 23, dtype=torch.uint8)

    def shutdown(self) -> None:
        self.cache = self.spare = None


class KeepsAView(Arenaless):
    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        assert self.cache is not None
        self.spare = self.cache[:100]
        return super().sleep(level, mode)


class EmptiesNothing(KeepsAView):
    empties = (1,)


@pytest.mark.parametrize(
    ("target", "stage", "message"),
    [
        (KeepsAView, "wake", "8.0 MiB more on cpu after wake than before the sleep: engine.spare kept"),
        (EmptiesNothing, "sleep(1)", "gave back 0 B of 8.0 MiB .* the largest held by engine.spare"),
    ],
)
def test_an_engine_without_arenas_is_judged_by_its_tensors(target: type[Arenaless], stage: str, message: str) -> None:
    (finding,) = fails(target, sleeps, "tensors", message).findings
    assert (finding.stage, finding.bytes) == (stage, 1 << 23)
    live(Arenaless, sleeps)


class KeepsATensor(SmallTarget):
    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        if self.awake and len(prompt_lengths) == 2:
            KEPT.append(torch.ones(1000))
        return super().infer(prompt_lengths, max_tokens)


def test_what_a_life_leaves_is_found_with_its_holder_and_its_stage() -> None:
    def play(life: CheckedLife) -> None:
        life.create()
        life.infer([3, 3], 1)
        life.shutdown()

    (finding,) = fails(KeepsATensor, play, "tensors", "4000 B|3.9 KiB").findings
    assert (finding.stage, finding.bytes) == ("infer", 4000)
    assert "KEPT[0]" in str(finding.holder)


def test_it_is_found_when_the_life_is_closed_too() -> None:
    def play(life: CheckedLife) -> None:
        life.create()
        life.infer([3, 3], 1)

    fails(KeepsATensor, play, "tensors", "KEPT")


class Freezes(SmallTarget):
    def create(self, config: Mapping[str, Any]) -> None:
        super().create(config)
        gc.freeze()
        torch.accelerator.synchronize = torch.accelerator.current_stream


def test_what_the_warm_up_has_left_changed_already_is_found_in_every_life() -> None:
    before = torch.accelerator.synchronize
    with Lives(Freezes, explain=False) as lives:
        assert gc.get_freeze_count() < 2000
        assert torch.accelerator.synchronize is before
        for _ in range(2):
            life = CheckedLife(lives)
            life.create()
            with pytest.raises(LifeError) as caught:
                life.close()
            assert {finding.resource for finding in caught.value.findings} >= {"gc-frozen", "globals"}
            life.abandon()
            assert torch.accelerator.synchronize is before
    assert gc.get_freeze_count() < 2000


class SetsOnce(SmallTarget):
    """As a library that sets a variable for the process when it is first used, and reads it ever after."""

    name = "LOWTIDE_TEST_ONCE"
    has_set: ClassVar[bool] = False

    def create(self, config: Mapping[str, Any]) -> None:
        if not SetsOnce.has_set:
            os.environ[self.name] = "1"
            SetsOnce.has_set = True
        assert os.environ[self.name] == "1"
        super().create(config)


def test_a_variable_that_the_warm_up_has_added_is_there_for_the_lives_that_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SetsOnce.name, "")
    monkeypatch.delenv(SetsOnce.name)
    live(SetsOnce, sleeps)


class MadeOnce(SmallTarget):
    """As vLLM with its sleep mode: a second one cannot be made in the process."""

    made: ClassVar[int] = 0

    def create(self, config: Mapping[str, Any]) -> None:
        MadeOnce.made += 1
        if MadeOnce.made == 2:
            raise AssertionError("can only be used for one instance per process")
        super().create(config)


class NeverInfers(SmallTarget):
    ended: ClassVar[list[str]] = []

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        raise ValueError("no kernel for this card")

    def shutdown(self) -> None:
        self.ended.append(self.phase)
        super().shutdown()
        raise ValueError("cannot be shut down after that")


def test_a_target_that_fails_before_anything_is_judged_is_refused_in_a_line() -> None:
    with pytest.raises(TargetError, match=r"create raised AssertionError: can only be used for one instance .*; lives"):
        Lives(MadeOnce).__enter__()
    with pytest.raises(TargetError, match=r"infer raised ValueError: no kernel for this card \(.*_life\.py:"):
        Lives(NeverInfers).__enter__()
    # It was shut down all the same.
    assert NeverInfers.ended == ["running"]


class KeepsOnAFailure(SmallTarget):
    def create(self, config: Mapping[str, Any]) -> None:
        try:
            super().create(config)
        except MemoryError:
            KEPT.append(torch.ones(1000))
            raise


def test_what_a_create_left_that_failed_is_found() -> None:
    (finding,) = fails(KeepsOnAFailure, lambda life: life.create(fault=Fault("map", 1)), "tensors", "KEPT").findings
    assert finding.stage == "create"


class HoldsABlock(SmallTarget):
    def kv_usage(self) -> Any:
        return SimpleNamespace(total=10, available=9, evictable=0, held=1, pending_transfer=0)


class LosesABlock(SmallTarget):
    def kv_usage(self) -> Any:
        return SimpleNamespace(total=10, available=8, evictable=1, held=0, pending_transfer=0)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (HoldsABlock, "1 KV blocks are held by no request after create"),
        (LosesABlock, "do not add up after create: 8 available and 1 evictable are not 10 less 0 held"),
    ],
)
def test_kv_blocks_add_up_and_nobody_holds_one_for_good(target: type[SmallTarget], message: str) -> None:
    fails(target, lambda life: life.create(), "kv-blocks", message)


class NeverResets(SmallTarget):
    def reset_prefix_cache(self) -> bool:
        super().reset_prefix_cache()
        return False

    def kv_usage(self) -> Any:
        return SimpleNamespace(total=10, available=9, evictable=0, held=1, pending_transfer=1)


def test_a_prefix_cache_can_be_reset_while_no_request_runs() -> None:
    def play(life: CheckedLife) -> None:
        life.create()
        life.reset_prefix_cache()

    error = fails(NeverResets, play, "kv-blocks", "1 KV blocks are held by pending transfers", "pending-transfer")
    assert error.findings[0].holder == "pending transfers"


class PointsAway(SmallTarget):
    """The table has the address of memory that a later call unmaps."""

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        if self.awake and len(prompt_lengths) == 2:
            self.table[3] = self.arenas["spare"].bytes_at(0, 8).data_ptr()
            self.drop(("spare",))
        return super().infer(prompt_lengths, max_tokens)

    def create(self, config: Mapping[str, Any]) -> None:
        super().create(config)
        self.arenas["spare"] = Arena("workspace", 4 * KIB, CpuPages())
        self.arenas["spare"].map_to(4 * KIB)


def test_a_pointer_to_what_is_not_mapped_any_more_is_found() -> None:
    def play(life: CheckedLife) -> None:
        life.create()
        life.infer([3, 3], 1)

    error = fails(PointsAway, play, "pointers", "table holds pointers to memory that is not mapped any more")
    assert error.findings[0].holder == "table"


# --- faults ---------------------------------------------------------------------------------------------------------


class DoesNotRollBack(SmallTarget):
    def drop(self, tags: Sequence[str]) -> None:
        if self.phase != "asleep":
            super().drop(tags)


class RaisesSomethingElse(SmallTarget):
    def wake(self, tags: Sequence[str] | None) -> None:
        try:
            super().wake(tags)
        except MemoryError:
            raise KeyError("weights") from None


class Swallows(SmallTarget):
    def wake(self, tags: Sequence[str] | None) -> None:
        try:
            super().wake(tags)
        except KeyboardInterrupt:
            super().wake(tags)


def failing_wake(fault: Fault) -> Play:
    def play(life: CheckedLife) -> None:
        life.create()
        life.sleep(1)
        assert not life.wake(fault=fault)
        life.wake()

    return play


def test_a_fault_that_is_undone_passes_and_so_does_one_that_is_not_reached() -> None:
    live(SmallTarget, failing_wake(Fault("map", 0)))
    live(SmallTarget, failing_wake(Fault("map", 1)))
    live(SmallTarget, failing_wake(Fault("interrupt", 1)))

    def play(life: CheckedLife) -> None:
        life.create()
        life.sleep(1)
        assert life.wake(fault=Fault("map", 2))
        assert life.points == 2

    live(SmallTarget, play)


def test_counting_makes_nothing_fail() -> None:
    def play(life: CheckedLife) -> None:
        assert life.create(fault=Fault("map", None))
        assert life.points == 3

    live(SmallTarget, play)


def test_an_error_of_the_engine_s_own_may_have_it_as_its_cause() -> None:
    class Wraps(SmallTarget):
        def wake(self, tags: Sequence[str] | None) -> None:
            try:
                super().wake(tags)
            except MemoryError as error:
                raise NoRoomError from error

    live(Wraps, failing_wake(Fault("map", 1)))


@pytest.mark.parametrize(
    ("target", "fault", "resource", "message"),
    [
        (
            DoesNotRollBack,
            Fault("map", 1),
            "arena",
            "'weights' has 64.0 KiB mapped after wake, which failed, 0 B before",
        ),
        (
            RaisesSomethingElse,
            Fault("map", 0),
            "state",
            "wake raised KeyError: 'weights' although what failed in it was M",
        ),
        (Swallows, Fault("interrupt", 0), "state", "Ctrl-C in wake was swallowed"),
    ],
)
def test_what_is_left_of_a_fault_is_reported(
    target: type[SmallTarget], fault: Fault, resource: str, message: str
) -> None:
    fails(target, failing_wake(fault), resource, message)


class LosesCtrlC(SmallTarget):
    """And has a connection to a process of its own, which has ended of it."""

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        if self.is_interrupted:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            raise BrokenPipeError
        return super().infer(prompt_lengths, max_tokens)

    is_interrupted = False


def test_what_breaks_after_a_ctrl_c_that_got_lost_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(life: CheckedLife) -> None:
        monkeypatch.setattr(LosesCtrlC, "is_interrupted", True)
        life.create()
        life.infer([3], 1)

    # A worker of pytest-xdist is deaf to it.
    known = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            live(LosesCtrlC, play)
    finally:
        signal.signal(signal.SIGINT, known)


class FailsInShutdown(SmallTarget):
    """Its shutdown has a step that can fail before it lets go."""

    def shutdown(self) -> None:
        self.say_goodbye()
        super().shutdown()

    def say_goodbye(self) -> None:
        pass

    def fault_seams(self) -> Sequence[Seam]:
        return (Seam("collective", FailsInShutdown, "say_goodbye", RuntimeError),)


class FailsTwiceInShutdown(FailsInShutdown):
    """And the second one fails too."""

    def __init__(self) -> None:
        super().__init__()
        self.has_failed = False

    def shutdown(self) -> None:
        if self.has_failed:
            self.has_failed = False
            raise KeyError("gone")
        try:
            super().shutdown()
        except RuntimeError:
            self.has_failed = True
            raise


class ForgetsAfterAFailure(FailsInShutdown):
    """The second one has forgotten the pages."""

    kept: ClassVar[list[Any]] = []

    def shutdown(self) -> None:
        try:
            super().shutdown()
        except RuntimeError:
            self.kept.append(self.arenas)
            self.arenas = {}
            raise


def failing_shutdown(life: CheckedLife) -> None:
    life.create()
    assert not life.shutdown(fault=Fault("collective", 0))


def test_a_shutdown_that_fails_is_made_again_and_does_the_rest() -> None:
    life = live(FailsInShutdown, failing_shutdown)
    assert life.model.phase == "closed"

    def twice(life: CheckedLife) -> None:
        failing_shutdown(life)
        # The process can have another engine after it.
        life.create()
        assert life.shutdown(fault=Fault("collective", 1))

    live(FailsInShutdown, twice)


def test_a_second_shutdown_that_fails_too_is_reported() -> None:
    with pytest.raises(LifeError, match=r"shutdown raised: KeyError: 'gone'") as caught:
        live(FailsTwiceInShutdown, failing_shutdown)
    assert [finding.resource for finding in caught.value.findings] == ["teardown"]


def test_what_a_second_shutdown_does_not_give_back_is_reported() -> None:
    try:
        with pytest.raises(LifeError) as caught:
            live(ForgetsAfterAFailure, failing_shutdown)
        assert "arena" in [finding.resource for finding in caught.value.findings]
    finally:
        for arenas in ForgetsAfterAFailure.kept:
            for arena in arenas.values():
                arena.close()
        ForgetsAfterAFailure.kept.clear()


def test_a_ctrl_c_of_the_user_s_own_ends_the_life() -> None:
    class Interrupted(SmallTarget):
        def reset_prefix_cache(self) -> bool:
            if self.requests:
                raise KeyboardInterrupt
            return super().reset_prefix_cache()

    def play(life: CheckedLife) -> None:
        life.create()
        life.start([3], 2)
        life.reset_prefix_cache(fault=Fault("map", 5))

    with pytest.raises(KeyboardInterrupt):
        live(Interrupted, play)


# --- what lives share -----------------------------------------------------------------------------------------------


def test_each_life_begins_with_torch_s_cache_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    with Lives(SmallTarget) as lives:
        released: list[object] = []
        monkeypatch.setattr(checked_life, "release", released.append)
        life = CheckedLife(lives)
        assert released == [Rung.EMPTY_CACHE]
        life.create()
        life.close()


def test_coverage_counts_lives_calls_states_and_edges() -> None:
    with Lives(SmallTarget) as lives:
        for _ in range(2):
            life = CheckedLife(lives)
            life.create()
            life.sleep(1)
            life.close()
        coverage = lives.coverage
    assert (coverage.lives, coverage.calls) == (2, 6)
    assert coverage.states == {"new", "running", "asleep at level 1", "closed"}
    assert coverage.edges == {
        ("new", "create", "running"),
        ("running", "sleep", "asleep at level 1"),
        ("asleep at level 1", "shutdown", "closed"),
    }


def test_an_engine_that_can_little_is_asked_little() -> None:
    class Bare:
        capabilities = Capabilities()

        def create(self, config: Mapping[str, Any]) -> None:
            self.weights = torch.arange(100)

        def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
            return [self.weights[length : length + max_tokens].tolist() for length in prompt_lengths]

        def shutdown(self) -> None:
            self.__dict__.pop("weights", None)

    with Lives(Bare) as lives:
        life = CheckedLife(lives)
        life.create()
        life.infer([3, 17], 2)
        life.close()


def test_host_memory_that_is_nobodys_is_reported() -> None:
    class Hoards(SmallTarget):
        def sleep(self, level: int, mode: str) -> None:
            super().sleep(level, mode)
            KEPT.append(mmap.mmap(-1, 128 * KIB * KIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            KEPT[-1].write(b"x" * len(KEPT[-1]))

    fails(Hoards, sleeps, "host-memory", "of host memory are unexplained after sleep")


def host_buffer() -> mmap.mmap:
    buffer = mmap.mmap(-1, 128 * KIB * KIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.write(b"x" * len(buffer))
    return buffer


class HasHostMemory(SmallTarget):
    """Has host memory outside all pools while it is awake, and gives it back."""

    buffers: tuple[mmap.mmap, ...] = ()
    keeps_it_asleep = False

    def create(self, config: Mapping[str, Any]) -> None:
        super().create(config)
        self.buffers = (host_buffer(),)

    def sleep(self, level: int, mode: str) -> Mapping[str, Sequence[int]]:
        if not self.keeps_it_asleep:
            self.give_back()
        return super().sleep(level, mode)

    def wake(self, tags: Sequence[str] | None) -> None:
        super().wake(tags)
        self.buffers = self.buffers or (host_buffer(),)

    def shutdown(self) -> None:
        super().shutdown()
        self.give_back()

    def give_back(self) -> None:
        for buffer in self.buffers:
            buffer.close()
        self.buffers = ()


def test_host_memory_of_an_engine_at_work_is_its_own_and_asleep_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with Lives(HasHostMemory) as lives:
        life = CheckedLife(lives)
        sleeps(life)
        life.close()
        # Only a bug that comes later than the warm-up can be told from what an engine needs.
        monkeypatch.setattr(HasHostMemory, "keeps_it_asleep", True)
        life = CheckedLife(lives)
        life.create()
        with pytest.raises(LifeError, match=r"12[78]\.\d MiB of host memory are unexplained after sleep"):
            life.sleep(1)
        life.abandon()


class TakesItFromTheHeap(SmallTarget):
    """Its host memory is in small blocks, which the C library keeps when they are freed."""

    blocks: tuple[ctypes.c_void_p, ...] = ()

    def create(self, config: Mapping[str, Any]) -> None:
        super().create(config)
        self.blocks = tuple(ctypes.c_void_p(LIBC.malloc(ctypes.c_size_t(64 * KIB - 64))) for _ in range(2000))
        for block in self.blocks:
            ctypes.memset(block, 1, 64 * KIB - 64)

    def shutdown(self) -> None:
        super().shutdown()
        # The last one keeps the end of the heap where it is.
        for block in self.blocks[:-1]:
            LIBC.free(block)
        self.blocks = ()


def test_what_stays_free_in_the_heap_is_nobodys_leak() -> None:
    with Lives(TakesItFromTheHeap) as lives:
        for _ in range(3):
            life = CheckedLife(lives)
            life.create()
            life.close()


def test_what_settings_add_to_host_memory_may_come_together() -> None:
    plain = {"offload": 0, "size": 1}
    others = [({"offload": 2, "size": 1}, 30), ({"offload": 3, "size": 1}, 50), ({"offload": 0, "size": 9}, 17)]
    levels = [(config, {"running": level, "asleep": 5}) for config, level in others]
    assert checked_life.added_up(plain, {"running": 10, "asleep": 5}, levels) == {"running": 57, "asleep": 5}


class CountingDriver:
    """Counts prepared figures in MiB for a card, the last one for ever; None where it does not tell."""

    def __init__(self, *counts: int | None) -> None:
        self.counts = list(counts)

    def read(self) -> Counters:
        count = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
        if count is None:
            return Counters({}, {"driver cuda:0": None}, {}, unmeasured={"driver cuda:0": "it is not listed"})
        return Counters({}, {"driver cuda:0": count * KIB * KIB}, {})


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[CountingDriver, CountingDriver], CheckedLife]]:
    """Makes a life whose card's driver counts so before it and in it."""
    monkeypatch.setattr(checked_life, "DRIVER_PATIENCE", SettlePolicy(stability=0.05, longest_pause=0.01))
    with Lives(SmallTarget) as lives:

        def make(before: CountingDriver, then: CountingDriver) -> CheckedLife:
            life = CheckedLife(lives)
            at_first = before.read()
            amounts = {**life._baseline.amounts, **at_first.amounts}
            monkeypatch.setattr(life, "_device", "cuda:0")
            monkeypatch.setattr(life, "_baseline", Counters({}, amounts, {}, unmeasured=at_first.unmeasured))
            monkeypatch.setattr(life, "calls", [Call("sleep")])
            monkeypatch.setattr(lives, "counters", then)
            monkeypatch.setattr(lives, "of_libraries", 0)
            return life

        yield make


@pytest.mark.parametrize(
    ("counts", "is_reported"),
    [((164,), False), ((1200, 700, 164), False), ((165,), True), ((1200, 700, 165), True), ((165, None), True)],
)
def test_what_a_driver_counts_besides_is_reported_if_it_stays(
    counts: tuple[int | None, ...],
    is_reported: bool,
    on_card: Callable[[CountingDriver, CountingDriver], CheckedLife],
) -> None:
    life = on_card(CountingDriver(100), CountingDriver(*counts))
    if is_reported:
        message = r"counts 65.0 MiB more on cuda:0 after sleep, unexplained: 165.0 MiB outside .*, 100.0 MiB before"
        with pytest.raises(LifeError, match=message) as caught:
            life._check_ledger("sleep")
        (finding,) = caught.value.findings
        assert (finding.resource, finding.bytes) == ("driver", 65 * KIB * KIB)
    else:
        life._check_ledger("sleep")
    assert life._lives.not_measured == {}


@pytest.mark.parametrize(("before", "then"), [(None, 100), (100, None), (None, None)])
def test_what_a_driver_does_not_tell_is_not_measured(
    before: int | None, then: int | None, on_card: Callable[[CountingDriver, CountingDriver], CheckedLife]
) -> None:
    life = on_card(CountingDriver(before), CountingDriver(then))
    life._check_ledger("sleep")
    life._check_ledger("wake")
    assert list(life._lives.not_measured) == [NotMeasured(what="driver cuda:0", why="it is not listed")]


class ElsewhereOnCard(SmallTarget):
    """Its memory is that of another process: this one has never used the card."""

    capabilities = replace(SmallTarget.capabilities, device="cuda:0")


NOT_USED = NotMeasured(what="driver cuda:0", why="this process has not used the card")


def test_what_is_not_measured_is_said_with_what_a_search_or_a_sweep_found() -> None:
    assert fuzz(ElsewhereOnCard, examples=2, seed=1).not_measured == (NOT_USED,)
    (swept,) = sweep(ElsewhereOnCard, config={}, kinds=("map",), among=("reload",))
    assert swept.not_measured == (NOT_USED,)
    assert fuzz(SmallTarget, examples=2, seed=1).not_measured == ()


def test_what_is_not_measured_is_said_with_a_life_that_fails() -> None:
    class Hoards(ElsewhereOnCard):
        def shutdown(self) -> None:
            super().shutdown()
            KEPT.append(torch.ones(1000))

    found = fuzz(Hoards, examples=2, seed=1)
    assert [finding.resource for finding in found.findings] == ["tensors"]
    assert found.not_measured == (NOT_USED,)

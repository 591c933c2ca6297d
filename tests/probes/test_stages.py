"""Stages: who hears of them, in which order, and what happens when a listener fails."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError

import pytest
import torch

from lowtide.probes import stages
from lowtide.probes.stages import (
    EnteredStage,
    PoolReading,
    PoolSourceError,
    Preserved,
    announce,
    announced_pools,
    announced_preserved,
    listening,
    stage,
    withdraw,
)
from tests.waiting import HANG_S


class Recorder:
    """A listener that remembers what it heard."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, BaseException | None]] = []
        self.stages: list[EnteredStage] = []

    def stage_entered(self, stage: EnteredStage) -> None:
        self.stages.append(stage)
        self.heard.append(("entered", "/".join(stage.path), None))

    def stage_left(self, stage: EnteredStage, error: BaseException | None) -> None:
        self.heard.append(("left", "/".join(stage.path), error))


class RaisesOnEntering(Recorder):
    def stage_entered(self, stage: EnteredStage) -> None:
        raise LookupError("entering failed")


class RaisesOnLeaving(Recorder):
    def stage_left(self, stage: EnteredStage, error: BaseException | None) -> None:
        raise LookupError("leaving failed")


def test_without_a_listener_every_stage_is_the_same_object(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not even `--leakcheck`, where this suite runs under it.
    monkeypatch.setattr(stages, "_listeners", ())
    assert stage("create") is stage("infer")


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, lowtide, lowtide.probes.stages;"
        "print([name for name in ('torch', 'numpy', 'psutil', 'pynvml', 'rich', 'msgspec') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_stage_knows_its_name_path_and_thread() -> None:
    recorder = Recorder()
    with listening(recorder), stage("create"), stage("load_weights"):
        pass
    assert recorder.stages[1] == EnteredStage("load_weights", ("create", "load_weights"), threading.get_ident())


def test_a_stage_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        EnteredStage("create", ("create",), 1).name = "other"  # type: ignore[misc]


def test_nested_stages_are_heard_from_outside_in_and_back() -> None:
    recorder = Recorder()
    with listening(recorder), stage("a"), stage("b"):
        pass
    assert recorder.heard == [
        ("entered", "a", None),
        ("entered", "a/b", None),
        ("left", "a/b", None),
        ("left", "a", None),
    ]


def test_the_path_is_shorter_again_after_a_nested_stage() -> None:
    recorder = Recorder()
    with listening(recorder), stage("a"):
        with stage("b"):
            pass
        with stage("c"):
            pass
    assert [s.path for s in recorder.stages] == [("a",), ("a", "b"), ("a", "c")]


def test_the_error_that_ends_a_stage_is_reported_and_goes_on() -> None:
    recorder = Recorder()
    error = ValueError("broken")
    with pytest.raises(ValueError, match="broken"), listening(recorder), stage("a"):
        raise error
    assert recorder.heard[-1] == ("left", "a", error)


def test_nothing_is_heard_after_listening_ends() -> None:
    recorder = Recorder()
    with listening(recorder):
        pass
    with stage("a"):
        pass
    assert recorder.heard == []


def test_a_listener_that_stops_inside_a_stage_does_not_hear_its_end() -> None:
    recorder = Recorder()
    span = None
    with listening(recorder):
        span = stage("a")
        span.__enter__()
    span.__exit__(None, None, None)
    assert recorder.heard == [("entered", "a", None)]


def test_several_listeners_hear_the_same() -> None:
    first, second = Recorder(), Recorder()
    with listening(first), listening(second), stage("a"):
        pass
    assert first.heard == second.heard
    assert len(first.heard) == 2


def test_a_listener_that_listens_twice_and_stops_once_hears_once() -> None:
    recorder = Recorder()
    with listening(recorder):
        with listening(recorder):
            pass
        with stage("a"):
            pass
    assert recorder.heard == [("entered", "a", None), ("left", "a", None)]


def test_each_thread_has_its_own_path() -> None:
    recorder = Recorder()
    inside = threading.Barrier(2, timeout=HANG_S)

    def work(name: str) -> None:
        with stage(name):
            inside.wait()
            with stage("inner"):
                inside.wait()

    with listening(recorder):
        threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    paths = {s.path: s.thread for s in recorder.stages}
    assert set(paths) == {("one",), ("two",), ("one", "inner"), ("two", "inner")}
    assert paths["one",] == paths["one", "inner"] != paths["two",]


def test_interleaved_asyncio_tasks_have_their_own_paths() -> None:
    recorder = Recorder()

    async def request(name: str) -> None:
        with stage(name):
            await asyncio.sleep(0)
            with stage("step"):
                await asyncio.sleep(0)

    async def serve() -> None:
        await asyncio.gather(request("one"), request("two"))

    with listening(recorder):
        asyncio.run(serve())
    assert {s.path for s in recorder.stages} == {("one",), ("two",), ("one", "step"), ("two", "step")}


def test_a_listener_that_fails_to_enter_keeps_the_body_from_running() -> None:
    ran = []
    with pytest.raises(LookupError, match="entering failed"), listening(RaisesOnEntering()), stage("a"):
        ran.append(1)
    assert ran == []


def test_those_who_heard_of_a_stage_hear_that_it_failed_to_begin() -> None:
    recorder = Recorder()
    with pytest.raises(LookupError) as raised, listening(recorder), listening(RaisesOnEntering()), stage("a"):
        pass
    assert recorder.heard == [("entered", "a", None), ("left", "a", raised.value)]


def test_a_stage_that_failed_to_begin_is_not_on_the_path_of_the_next() -> None:
    recorder = Recorder()
    with pytest.raises(LookupError), listening(RaisesOnEntering()), stage("a"):
        pass
    with listening(recorder), stage("b"):
        pass
    assert recorder.stages[0].path == ("b",)


def test_what_a_listener_raises_on_leaving_reaches_the_caller() -> None:
    with pytest.raises(LookupError, match="leaving failed"), listening(RaisesOnLeaving()), stage("a"):
        pass


def test_a_listener_that_raises_does_not_keep_the_others_from_hearing() -> None:
    first, last = Recorder(), Recorder()
    with (
        pytest.raises(LookupError),
        listening(first),
        listening(RaisesOnLeaving()),
        listening(last),
        stage("a"),
    ):
        pass
    assert first.heard[-1] == last.heard[-1] == ("left", "a", None)


def test_the_engines_own_error_wins_over_a_listeners_which_is_noted_on_it() -> None:
    with pytest.raises(ValueError, match="the engine's") as raised, listening(RaisesOnLeaving()), stage("a"):
        raise ValueError("the engine's")
    (note,) = raised.value.__notes__
    assert "RaisesOnLeaving" in note
    assert "LookupError: leaving failed" in note


def test_where_two_listeners_raise_the_second_is_noted_on_the_first() -> None:
    with (
        pytest.raises(LookupError) as raised,
        listening(RaisesOnLeaving()),
        listening(RaisesOnLeaving()),
        stage("a"),
    ):
        pass
    assert len(raised.value.__notes__) == 1


def test_under_torchs_profiler_a_stage_is_an_event() -> None:
    with torch.profiler.profile() as profile, stage("create"), stage("load_weights"):
        torch.ones(1)
    names = {event.name for event in profile.events() or ()}
    assert {"lowtide:create", "lowtide:create/load_weights"} <= names


def test_after_the_profiler_stages_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_listeners", ())
    with torch.profiler.profile():
        pass
    assert stage("a") is stage("b")


def test_under_nsight_a_stage_is_an_nvtx_range(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Nvtx:
        rangePushA = staticmethod(lambda label: calls.append(f"push {label}"))  # noqa: N815 - the binding's name
        rangePop = staticmethod(lambda: calls.append("pop"))  # noqa: N815

    monkeypatch.setattr(stages, "_nsight_attached", True)
    monkeypatch.setattr(torch._C, "_nvtx", Nvtx, raising=False)
    with pytest.raises(ValueError), stage("create"):
        raise ValueError
    assert calls == ["push lowtide:create", "pop"]


def test_under_nsight_without_an_nvtx_build_a_stage_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_nsight_attached", True)
    monkeypatch.delattr(torch._C, "_nvtx", raising=False)
    recorder = Recorder()
    with listening(recorder), stage("create"):
        pass
    assert len(recorder.heard) == 2


class Source:
    """An allocator outside torch."""

    def __init__(self, *pools: PoolReading) -> None:
        self.pools = pools

    def read_pools(self) -> tuple[PoolReading, ...]:
        return self.pools

    def __eq__(self, other: object) -> bool:
        raise AssertionError("a source was compared by its own code")

    __hash__ = None  # type: ignore[assignment]


def pool(tag: str, device: str = "cpu") -> PoolReading:
    return PoolReading("arena", tag, device, reserved=8192, mapped=4096, ranges=((1 << 20, 4096),))


def test_announced_pools_are_sorted_over_all_sources() -> None:
    one, two = Source(pool("weights"), pool("kv_cache", "cuda:0")), Source(pool("kv_cache"))
    announce(one)
    announce(two)
    assert announced_pools() == (pool("kv_cache"), pool("weights"), pool("kv_cache", "cuda:0"))


def test_announcing_twice_counts_once() -> None:
    source = Source(pool("weights"))
    announce(source)
    announce(source)
    assert announced_pools() == (pool("weights"),)


def test_a_withdrawn_source_is_not_read() -> None:
    source = Source(pool("weights"))
    announce(source)
    withdraw(source)
    assert announced_pools() == ()


def test_withdrawing_what_was_never_announced_changes_nothing() -> None:
    kept = Source(pool("weights"))
    announce(kept)
    withdraw(Source())
    assert announced_pools() == (pool("weights"),)


def test_announcing_keeps_nothing_alive() -> None:
    source = Source(pool("weights"))
    announce(source)
    gc.disable()
    try:
        del source
        assert announced_pools() == ()
        assert stages._sources == {}
    finally:
        gc.enable()


def test_a_source_without_weak_references_is_refused_with_the_remedy() -> None:
    class Slotted:
        __slots__ = ()

        def read_pools(self) -> tuple[PoolReading, ...]:
            return ()

    with pytest.raises(PoolSourceError, match="__weakref__"):
        announce(Slotted())


def test_a_source_that_raises_is_named() -> None:
    class Broken:
        def read_pools(self) -> tuple[PoolReading, ...]:
            raise OSError("no such range")

    source = Broken()
    announce(source)
    with pytest.raises(PoolSourceError, match=r"Broken\.read_pools\(\) raised OSError: no such range"):
        announced_pools()


def test_sources_come_and_go_in_many_threads_at_once() -> None:
    finished: list[int] = []

    def churn() -> None:
        for _ in range(200):
            source = Source(pool("weights"))
            announce(source)
            announced_pools()
            withdraw(source)
        finished.append(1)

    threads = [threading.Thread(target=churn) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(finished) == 8
    assert announced_pools() == ()


class Engine:
    """Says what must survive a sleep."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.table = torch.arange(4)

    def preserved_tensors(self) -> dict[str, torch.Tensor]:
        return {self.name: self.table}

    def graph_addresses(self) -> dict[str, tuple[int, int]]:
        return {self.name: (self.table.data_ptr(), 32)}


def test_what_must_survive_a_sleep_is_asked_of_all_living_engines() -> None:
    one, two = Engine("one.table"), Engine("two.table")
    for engine in (one, two):
        announce(engine)
    preserved = announced_preserved()
    assert preserved.tensors["one.table"] is one.table
    assert preserved.graph_addresses["two.table"] == (two.table.data_ptr(), 32)
    # An engine is no pool.
    assert announced_pools() == ()
    withdraw(one)
    del two, preserved, engine
    gc.collect()
    assert announced_preserved() == Preserved({}, {})


def test_an_engine_that_cannot_say_what_must_survive_is_named() -> None:
    class Closed(Engine):
        def graph_addresses(self) -> dict[str, tuple[int, int]]:
            raise RuntimeError("it is closed")

    closed = Closed("table")
    announce(closed)
    with pytest.raises(PoolSourceError, match=r"Closed\.graph_addresses\(\) raised RuntimeError: it is closed"):
        announced_preserved()


def test_what_has_nothing_to_report_cannot_be_announced() -> None:
    with pytest.raises(PoolSourceError, match=r"object cannot be announced: it needs read_pools\(\), or "):
        announce(object())  # type: ignore[arg-type]

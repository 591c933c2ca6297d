"""Updates of weights in lives: what was sent must be there and say what it must, and nothing may pile up."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from lowtide.leakcheck.lives.checked_life import CheckedLife, Lives
from lowtide.leakcheck.lives.lifecycle import MORE_UPDATES, LifecycleRun, TargetLife, script_of
from lowtide.leakcheck.lives.script import LifeError
from lowtide.leakcheck.lives.sweep import stages
from lowtide.leakcheck.targets.reference import ReferenceTarget
from lowtide.leakcheck.targets.target import Capabilities
from lowtide.probes.device.driver import NoDriver
from lowtide.reports.schema import Finding, Subject

pytestmark = pytest.mark.nightly

KIB = 1 << 10
SIZE = 2 * KIB

KEPT_DESCRIPTORS: list[int] = []


@pytest.fixture(autouse=True)
def close_descriptors() -> Iterator[None]:
    yield
    while KEPT_DESCRIPTORS:
        with suppress(OSError):
            os.close(KEPT_DESCRIPTORS.pop())


class Engine:
    """Has two weights, which say their sum as tokens; `does` says what is wrong with its updates."""

    def __init__(self, does: str) -> None:
        self.does = does
        self.kept: list[torch.Tensor] = []
        self.sent: list[bytes] = []
        self.recent: dict[int, bytes] = {}
        self.weights: dict[str, torch.Tensor] = {}

    def load(self, sent: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in sent.items():
            if self.does == "moves nothing" or (self.does == "moves a part" and name == "b"):
                continue
            self.weights[name].copy_(tensor)
        if self.does == "rounds":
            self.weights["b"] += 1
        if self.does == "fails":
            raise MemoryError("no room")
        bucket = torch.ones(SIZE, dtype=torch.uint8)
        if self.does == "keeps each" or (self.does == "keeps the first" and not self.kept):
            self.kept.append(bucket)
        elif self.does == "keeps the last":
            self.kept = [bucket]
        elif self.does == "keeps each on the host":
            self.sent.append(bytes(SIZE))
        elif self.does == "keeps one of each version on the host":
            self.recent[int(self.weights["a"][0])] = bytes(SIZE)
        elif self.does == "keeps garbage":
            cycle: list[object] = [bucket]
            cycle.append(cycle)
        elif self.does == "leaves a descriptor":
            KEPT_DESCRIPTORS.append(os.memfd_create("bucket"))
        elif self.does == "opens the next bucket before it closes the last":
            KEPT_DESCRIPTORS.append(os.memfd_create("bucket"))
            for last in KEPT_DESCRIPTORS[:-1]:
                KEPT_DESCRIPTORS.remove(last)
                os.close(last)


class Target:
    """As a user writes it."""

    capabilities = Capabilities(update_weights=True, prompt_lengths=(3,), max_tokens=2)

    def __init__(self, does: str = "") -> None:
        self.engine = Engine(does)

    def create(self, config: Mapping[str, Any]) -> None:
        self.engine.weights = {name: torch.zeros(4) for name in "ab"}

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
        said = int(sum(tensor.sum() for tensor in self.engine.weights.values()))
        if self.engine.does == "says otherwise when it comes back" and self.engine.kept:
            said += 1
        return [[said] * max_tokens for _ in prompt_lengths]

    def update_weights(self, version: int) -> Mapping[str, Any] | None:
        sent = {name: torch.full((4,), version) for name in "ab"}
        self.engine.load({name: tensor.float() for name, tensor in sent.items()})
        if self.engine.does == "says otherwise when it comes back" and version == 0:
            self.engine.kept = [torch.ones(1)]
        return {name: tensor.float() for name, tensor in sent.items()}

    def weights(self) -> Mapping[str, Any]:
        return self.engine.weights

    def shutdown(self) -> None:
        self.engine = Engine(self.engine.does)
        while KEPT_DESCRIPTORS:
            os.close(KEPT_DESCRIPTORS.pop())


class SilentTarget(Target):
    """Says nothing of its weights."""

    def update_weights(self, version: int) -> None:
        super().update_weights(version)

    def weights(self) -> Mapping[str, Any]:
        return {}


def lived(does: str, kind: type[Target] = Target, *, turns: int = 0) -> Subject:
    run = LifecycleRun(
        "engine",
        lambda: TargetLife(lambda: kind(does)),
        device="cpu",
        driver=NoDriver("a test"),
        cycles=1,
        script=script_of(kind.capabilities),
        turns=turns,
    )
    return run.run()


def found(does: str, kind: type[Target] = Target) -> Finding:
    subject = lived(does, kind)
    assert subject.outcome == "leak", subject
    assert len({finding.fingerprint for finding in subject.findings}) == 1, subject.findings
    return subject.findings[0]


def test_a_life_ends_with_weights_of_both_versions() -> None:
    script = ("create", "infer", "update_weights(1)", "infer", "update_weights(0)", "infer", "shutdown")
    assert script_of(Target.capabilities) == script
    assert [each.name for each in stages(Target.capabilities, {})] == ["create", "infer", "update_weights", "shutdown"]


@pytest.mark.parametrize(
    ("does", "kind"),
    [
        ("", SilentTarget),
        ("keeps the first", Target),
        ("keeps the last", Target),
        ("keeps garbage", Target),
        ("keeps one of each version on the host", Target),
        ("opens the next bucket before it closes the last", Target),
    ],
)
def test_what_is_loaded_and_does_not_add_up_is_clean(does: str, kind: type[Target]) -> None:
    subject = lived(does, kind)
    assert (subject.outcome, subject.findings) == ("clean", ())
    names = [stage.name for stage in subject.stages]
    assert names == ["create", "infer", "update_weights", "infer", "update_weights", "infer", "shutdown"]


@pytest.mark.parametrize("turns", [0, 12])
def test_as_many_updates_follow_as_turns_are_asked_for(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    versions: list[int] = []
    load = Target.update_weights
    monkeypatch.setattr(
        Target, "update_weights", lambda self, version: (versions.append(version), load(self, version))[1]
    )
    assert lived("", turns=turns).outcome == "clean"
    assert len(versions) == 2 + max(MORE_UPDATES, turns)


def test_an_update_that_moves_nothing_is_found_by_its_contents() -> None:
    finding = found("moves nothing")
    assert (finding.resource, finding.cause, finding.stage, finding.count) == (
        "contents",
        "not-restored",
        "update_weights",
        2,
    )
    assert finding.message == "update_weights moved nothing: 2 of 2 weights are what the engine had before: a, b"


def test_an_update_that_moves_nothing_is_found_by_its_tokens_alone() -> None:
    finding = found("moves nothing", SilentTarget)
    assert (finding.resource, finding.stage) == ("contents", "infer")
    assert finding.message == (
        "update_weights moved nothing: with other weights the engine gives the same tokens for 1 prompt"
    )


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("moves a part", "update_weights moved only a part: 1 of 2 weights is what the engine had before: b"),
        ("rounds", "1 of 2 weights is not what update_weights has sent: b"),
    ],
)
def test_what_is_not_what_was_sent_is_named(does: str, message: str) -> None:
    assert found(does).message == message


def test_the_same_weights_sent_again_must_say_the_same() -> None:
    finding = found("says otherwise when it comes back")
    assert finding.message == (
        "1 of 1 prompts give other tokens after update_weights than the same weights gave before"
    )


def test_what_each_update_leaves_in_tensors_is_growth_and_its_holder_is_named() -> None:
    finding = found("keeps each")
    assert (finding.resource, finding.trend, finding.stage) == ("tensors", "growth", "update_weights")
    assert (finding.holder, finding.bytes, finding.count) == ("engine.kept", 5 * SIZE, 5)
    assert finding.message.startswith("tensors on cpu grow by 2.0 KiB with each update_weights, 10.0 KiB in 5 of 5")
    assert "let go in update_weights of what was sent" in (finding.advice or "")


def test_what_each_update_leaves_on_the_host_is_growth_though_the_shutdown_frees_it() -> None:
    finding = found("keeps each on the host")
    assert (finding.resource, finding.trend, finding.holder) == ("host-memory", "growth", "engine.sent")
    assert finding.message.startswith("engine.sent takes 1 item (2.1 KiB) in each of 4 weight updates, ")


def test_what_each_update_leaves_open_is_growth_by_name() -> None:
    finding = found("leaves a descriptor")
    assert (finding.resource, finding.trend, finding.count) == ("file-descriptors", "growth", 5)
    assert "5 file descriptors more, which 5 calls of update_weights in a row have left: " in finding.message
    assert "; made in Engine.load, test_weight_syncs.py:" in finding.message
    assert "/memfd:bucket" in finding.message


@pytest.mark.parametrize(
    ("does", "kind", "said"),
    [
        ("moves nothing", Target, "update_weights moved nothing: 2 of 2 weights are"),
        ("moves nothing", SilentTarget, "update_weights moved nothing: with other weights"),
        ("rounds", Target, "1 of 2 weights is not what update_weights has sent: b"),
        ("fails", Target, "update_weights raised MemoryError"),
    ],
)
def test_a_life_that_is_checked_call_by_call_stops_at_a_wrong_update(does: str, kind: type[Target], said: str) -> None:
    faults = [""]
    with Lives(lambda: kind(faults[-1])) as lives:
        faults.append(does)
        life = CheckedLife(lives)
        life.create()
        if kind is SilentTarget:
            # What a fresh engine says with these weights was asked of one that is broken, too.
            lives._tokens[3, 1] = lives._tokens[3, 0]
        with pytest.raises(LifeError, match=said):
            life.update_weights(1)
        life.abandon()


def test_a_life_that_is_checked_call_by_call_goes_on_with_what_was_sent() -> None:
    with Lives(Target) as lives:
        life = CheckedLife(lives)
        life.create()
        for version in (1, 1, 0, 1):
            assert life.update_weights(version)
            assert life.infer([3], 2)
        life.close()


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("call", ["update", "reload"])
def test_weights_that_are_written_while_the_cache_sleeps_are_those_to_be_kept(call: str, elsewhere: bool) -> None:
    def play(life: CheckedLife, loses: str) -> None:
        life.create()
        life.update_weights(1)
        life.sleep(level=1)
        life.wake(tags=["weights"])
        life.update_weights(0) if call == "update" else life.reload()
        if loses:
            worker = life.target.engine._core.worker
            worker.preserved_tensors()[loses].add_(1)
        life.wake()

    make = functools.partial(ReferenceTarget, "cpu", {"engine_process": elsewhere})
    with Lives(make) as lives:
        life = CheckedLife(lives)
        play(life, "")
        life.close()
    for loses in () if elsewhere else ("model.norm.weight", "rotary.table"):
        with Lives(make) as lives:
            life = CheckedLife(lives)
            with pytest.raises(LifeError, match=f"{loses} changed its contents"):
                play(life, loses)
            life.abandon()

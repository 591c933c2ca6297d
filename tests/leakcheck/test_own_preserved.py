"""What a process that is asked says it lost in a sleep: contents of the tensors that its engine has announced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from lowtide.leakcheck.processes import answers
from lowtide.leakcheck.processes.messages import ComparePreserved, Findings, PreservedAnswer, RememberPreserved, encode
from lowtide.leakcheck.processes.own_tensors import OwnPreserved
from lowtide.probes.stages import PoolReading, announce, withdraw


class Engine:
    """A table outside of any pool, and one in an arena that a sleep may empty."""

    def __init__(self) -> None:
        self.table = torch.arange(100)
        self.paged = torch.arange(100, 200)
        self.mapped = [(self.paged.data_ptr(), 400), (self.paged.data_ptr() + 400, 400)]

    def preserved_tensors(self) -> dict[str, torch.Tensor]:
        return {"table": self.table, "paged": self.paged}

    def graph_addresses(self) -> dict[str, tuple[int, int]]:
        return {}

    def read_pools(self) -> list[PoolReading]:
        span = (self.paged.data_ptr(), 800)
        mapped = sum(length for _, length in self.mapped)
        return [PoolReading("arena", "runtime", "cpu", 800, mapped, tuple(self.mapped), span)]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    announce(engine)
    yield engine
    withdraw(engine)


def asked(question: Any, kind: type[Any]) -> Any:
    return msgspec.msgpack.decode(answers.answer(encode(question)), type=kind)


def test_what_has_not_changed_is_no_finding(engine: Engine) -> None:
    preserved = OwnPreserved("cpu")
    assert preserved.tensors == 2
    engine.table = engine.table.clone()
    assert preserved.compare("wake") == []


def test_contents_that_changed_are_found(engine: Engine) -> None:
    preserved = OwnPreserved("cpu")
    engine.table[7] = 0
    (finding,) = preserved.compare("wake")
    assert (finding.resource, finding.holder, finding.stage) == ("contents", "table", "wake")


def test_a_tensor_without_pages_is_not_read_and_counts_as_lost(engine: Engine) -> None:
    preserved = OwnPreserved("cpu")
    # On a card to read it would break the process.
    engine.mapped = engine.mapped[:1]
    assert OwnPreserved("cpu").tensors == 1
    (finding,) = preserved.compare("wake")
    assert (finding.resource, finding.holder) == ("contents", "paged")


def test_tensors_on_other_devices_are_another_matter(engine: Engine) -> None:
    assert OwnPreserved("cuda").tensors == 0


def test_an_agent_remembers_from_one_question_to_the_next(engine: Engine) -> None:
    assert asked(RememberPreserved(kind="cpu"), PreservedAnswer) == PreservedAnswer(tensors=2)
    engine.paged.zero_()
    lost = asked(ComparePreserved(stage="wake"), Findings)
    assert [finding.holder for finding in lost.findings] == ["paged"]
    # Each sleep is compared once.
    assert asked(ComparePreserved(stage="wake"), Findings) == Findings()


def test_a_process_that_announces_nothing_preserves_nothing() -> None:
    assert asked(RememberPreserved(kind="cpu"), PreservedAnswer) == PreservedAnswer()
    assert asked(ComparePreserved(stage="wake"), Findings) == Findings()

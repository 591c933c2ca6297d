"""Bugs of weight updates that show on a card alone, each with its twin; run as `lowtide defects --verify` does."""

from __future__ import annotations

import re

import pytest
import torch

from lowtide.engine.defects import DEFECTS
from lowtide.leakcheck.cli.defects import Verified, verify
from lowtide.reports.schema import Finding

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card"),
]

NAMES = ("ipc-counter", "stranded-streams")


@pytest.fixture(scope="module")
def verified() -> dict[str, Verified]:
    return {item.defect.name: item for item in verify([DEFECTS[name] for name in NAMES], "cuda", jobs=4)}


def finding_of(item: Verified) -> Finding:
    assert item.bug is not None
    assert item.bug.subject is not None, item.note
    assert len(item.bug.subject.findings) == 1, [found.message for found in item.bug.subject.findings]
    (finding,) = item.bug.subject.findings
    return finding


def test_a_bucket_that_is_closed_twice_is_told_with_its_counter(verified: dict[str, Verified]) -> None:
    finding = finding_of(verified["ipc-counter"])
    assert (finding.resource, finding.cause, finding.stage) == ("cuda-ipc", "pending-transfer", "shutdown")
    assert re.search(r", exported by pid \d+; counter -1: freed by nobody", finding.message)


def test_buckets_of_streams_that_are_gone_are_told_with_the_streams(verified: dict[str, Verified]) -> None:
    finding = finding_of(verified["stranded-streams"])
    assert (finding.resource, finding.cause, finding.stage) == ("reserved", "allocator-cache", "update_weights")
    assert re.search(r" for \d+ streams that no longer exist, which \d+ calls of update_weights", finding.message)


@pytest.mark.parametrize("name", NAMES)
def test_without_the_bug_nothing_is_found(name: str, verified: dict[str, Verified]) -> None:
    item = verified[name]
    assert item.note == ""
    assert item.twin is not None
    assert item.twin.subject is not None
    assert (item.twin.subject.outcome, item.twin.subject.findings) == ("clean", ())

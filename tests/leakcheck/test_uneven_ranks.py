"""Ranks of one engine after a sleep: one that keeps more than its peers is named, with what it alone has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lowtide.leakcheck.processes.process_levels import RankLevels, explain_uneven_rank, uneven_ranks
from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Finding

MIB = 1 << 20


def rank(number: int | None, at_work: int, asleep: int, *, role: str = "vllm worker", ranks: str = "") -> RankLevels:
    """Sizes in MiB."""
    name = ProcessName(pid=100 + (number or 0), name=f"VLLM::Worker_TP{number}", role=role, rank=number, ranks=ranks)
    return RankLevels(name, at_work * MIB, asleep * MIB, {})


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_rank_that_a_sleep_did_not_reach_is_found_with_its_excess(kind: str) -> None:
    ranks = [rank(0, 5000, 200), rank(1, 5000, 1200), rank(2, 5000, 200)]
    (uneven,) = uneven_ranks(ranks, kind)
    assert (uneven.rank, uneven.peer, uneven.excess) == (ranks[1], ranks[0], 1000 * MIB)


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(0, 5000, 200), rank(1, 5000, 200)],
        [rank(0, 5000, 200), rank(1, 5000, 260)],
        # Rank 0 has an embedding that the others lack: it keeps the same part.
        [rank(0, 7500, 300), rank(1, 5000, 200)],
        # It has a buffer that no sleep gives up, at work and asleep.
        [rank(0, 6000, 1200), rank(1, 5000, 200)],
        [rank(0, 5000, 200)],
        [rank(None, 5000, 200), rank(None, 5000, 1200)],
        # A detokenizer and a scheduler with the rank of their environment are no peers.
        [rank(0, 5000, 200), rank(1, 5000, 1200, role="sglang detokenizer")],
        # Two lives' workers of the same rank.
        [rank(0, 5000, 200), rank(0, 5000, 1200)],
        [rank(0, 0, 0), rank(1, 5000, 1200)],
    ],
    ids=[
        "equal",
        "rounded",
        "more at work, and the same part asleep",
        "more by the same at work and asleep",
        "alone",
        "without ranks",
        "of other roles",
        "of one rank",
        "empty",
    ],
)
@pytest.mark.parametrize("kind", ["cuda"])
def test_ranks_that_do_not_keep_more_are_silent(ranks: list[RankLevels], kind: str) -> None:
    assert uneven_ranks(ranks, kind) == []


def test_what_is_counted_exactly_has_a_smaller_limit() -> None:
    ranks = [rank(0, 100, 10), rank(1, 100, 20)]
    assert [each.excess for each in uneven_ranks(ranks, "cpu")] == [10 * MIB]
    assert uneven_ranks(ranks, "cuda") == []


def test_ranks_are_told_apart_by_all_dimensions() -> None:
    workers = [rank(None, 5000, 200, ranks="dp0 tp1"), rank(None, 5000, 1200, ranks="dp1 tp1")]
    assert len(uneven_ranks(workers, "cuda")) == 1


def held(holder: str, size: int) -> Finding:
    return Finding(
        resource="tensors",
        cause="module-global",
        bytes=size * MIB,
        count=1,
        device="cuda:0",
        stage="",
        message="",
        fingerprint="",
        holder=holder,
    )


def test_the_holder_is_what_the_peer_does_not_have() -> None:
    (uneven,) = uneven_ranks([rank(0, 5000, 200), rank(1, 5000, 1200)], "cuda")
    answers = {100: [held("model.weights", 150)], 101: [held("model.weights", 150), held("model.CACHE", 100)]}
    finding = explain_uneven_rank(uneven, "sleep(1)", "cuda", "cuda:0", answers.__getitem__)
    assert (finding.holder, finding.bytes, finding.stage) == ("model.CACHE", 1000 * MIB, "sleep(1)")
    assert finding.process == uneven.rank.process
    assert finding.message == (
        "pid 101 (VLLM::Worker_TP1, rank 1) keeps 1000.0 MiB more in sleep(1) than pid 100 (VLLM::Worker_TP0, rank 0): "
        "1.2 GiB of 4.9 GiB, the other 200.0 MiB of 4.9 GiB; 100.0 MiB held by model.CACHE"
    )


def test_without_a_holder_an_arena_is_named_or_nothing() -> None:
    def nobody(pid: int) -> Sequence[Finding]:
        return ()

    levels = [rank(0, 5000, 200), rank(1, 5000, 1200)]
    (uneven,) = uneven_ranks(levels, "cuda")
    plain = explain_uneven_rank(uneven, "sleep(1)", "cuda", "cuda:0", nobody)
    assert (plain.resource, plain.holder, plain.device) == ("driver", None, "cuda:0")
    mapped = RankLevels(levels[1].process, levels[1].at_work, levels[1].asleep, {"kv_cache": 900 * MIB})
    (uneven,) = uneven_ranks([levels[0], mapped], "cuda")
    finding = explain_uneven_rank(uneven, "sleep(1)", "cuda", "cuda:0", nobody)
    assert (finding.resource, finding.holder) == ("arena", "arena 'kv_cache'")

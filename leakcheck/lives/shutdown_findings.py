"""What is said of the findings of a shutdown beyond their figures: who holds pools and arrays, what went together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import msgspec

from lowtide.leakcheck.findings.empty_pools import of_cached_pools, of_empty_pools
from lowtide.leakcheck.findings.host_arrays import with_array_holder
from lowtide.leakcheck.findings.item_findings import ItemLeak
from lowtide.leakcheck.findings.tensor_findings import Context
from lowtide.leakcheck.judging.judge import Judgement
from lowtide.leakcheck.judging.metrics import NOT_OF_PYTHON
from lowtide.probes.snapshot import Snapshot
from lowtide.reports.schema import Finding, Return


def with_pools(judgement: Judgement, start: Snapshot, now: Snapshot, context: Callable[[], Context]) -> Judgement:
    """With who holds the private pools of torch's allocator; those that its cache held are reported with the rest."""
    told = list(zip(judgement.findings, judgement.metrics, judgement.keys, strict=True))
    for pools in [each for each in told if each[1].key]:
        finding, metric, key = pools
        others = [each for each in told if each is not pools and _is_cached_like(each[0], finding)]
        if left := metric.new_items(start, now):
            place = told.index(pools)
            told[place : place + 1] = [
                (each, metric, key) for each in of_empty_pools(finding, metric.key, left, context())
            ]
        elif finding.cause == "allocator-cache" and others:
            told.remove(pools)
            told[told.index(others[0])] = (of_cached_pools(finding, others[0][0]), *others[0][1:])
        elif finding.cause == "allocator-cache":
            told[told.index(pools)] = (of_cached_pools(finding, None), metric, key)
    findings, metrics, keys = zip(*told, strict=True) if told else ((), (), ())
    return dataclasses.replace(judgement, findings=findings, metrics=metrics, keys=keys)


def with_arrays(judgement: Judgement, context: Context) -> Judgement:
    """With who holds the arrays that the host memory is which nothing else explains."""
    findings = []
    for finding in judgement.findings:
        if finding.resource == "host-memory" and finding.cause == "unknown":
            told = with_array_holder(ItemLeak(finding, finding.resource, {}, 0), context).finding
            # It stays the same leak as in the lives before, of which only the level is known.
            mark, former = finding.fingerprint, finding.former_fingerprint
            findings.append(msgspec.structs.replace(told, fingerprint=mark, former_fingerprint=former))
        else:
            findings.append(finding)
    return dataclasses.replace(judgement, findings=tuple(findings))


def is_told(item: Finding | Return, devices: Collection[str]) -> bool:
    """Whether tensors are what it is about, and those on its device are reported one by one."""
    is_plain = item.resource == "tensors" and item.bytes > 0 and getattr(item, "verdict", None) not in NOT_OF_PYTHON
    return is_plain and item.device in devices


def less(finding: Finding, rest: Finding) -> Finding:
    """A finding with what is left of it; as it was where that is no less."""
    if (rest.bytes, rest.count) >= (finding.bytes, finding.count):
        return finding
    return msgspec.structs.replace(
        finding, bytes=rest.bytes, count=rest.count, message=rest.message, holder=rest.holder
    )


def _is_cached_like(finding: Finding, other: Finding) -> bool:
    """Whether torch's cache on one card is the cause of both."""
    return finding.cause == "allocator-cache" and (finding.resource, finding.device) == (other.resource, other.device)

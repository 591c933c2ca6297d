"""What there is in this process at one moment, as plain data, and who holds what has grown between two of these."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from lowtide.leakcheck.findings.growing_containers import growth_of_containers
from lowtide.leakcheck.growth.containers import Course
from lowtide.leakcheck.processes.messages import ExplainGrown, FilledCache, Findings, Seen, TensorKind
from lowtide.probes.heap.caches import read_caches
from lowtide.probes.heap.container_lengths import read_lengths
from lowtide.probes.heap.roots import is_library
from lowtide.probes.host.memory_parts import malloc_in_use, read_parts
from lowtide.probes.memory.tensors import StorageSurvey, summarize, survey_storages
from lowtide.probes.stages import announced_pools

_LISTED = 20
"""Kinds of tensors, and caches, that are listed."""

_MOST_BEHIND_CACHES = 300_000
"""Objects that are looked at behind all caches together."""


def look(*, lists: bool) -> Seen:
    """Return what there is now.

    Args:
        lists: whether tensors and caches are listed, too, which takes a walk behind the caches.
    """
    # First, since all else takes memory.
    parts, malloc = read_parts(), malloc_in_use()
    lengths, _ = read_lengths()
    survey = survey_storages()
    return Seen(
        ids=lengths.ids.tobytes(),
        kinds=lengths.kinds.tobytes(),
        lengths=lengths.lengths.tobytes(),
        parts=asdict(parts),
        malloc=malloc,
        tensors={each.device: each.bytes for each in summarize(survey, announced_pools()).per_device},
        tensor_kinds=_kinds_of(survey) if lists else (),
        caches=_filled_caches() if lists else (),
    )


def _kinds_of(survey: StorageSurvey) -> tuple[TensorKind, ...]:
    counts, sizes = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for storage in survey.storages:
        kind = storage.dtype, storage.shape, storage.device
        counts[kind] += 1
        sizes[kind] += storage.bytes
    return tuple(TensorKind(*kind, counts[kind], size) for kind, size in sizes.most_common(_LISTED))


def _filled_caches() -> tuple[FilledCache, ...]:
    """Return the largest caches; of libraries' those alone that reach tensors."""
    caches = [
        cache
        for cache in read_caches(max_in_all=_MOST_BEHIND_CACHES)
        if cache.tensor_bytes or not is_library(cache.name)
    ]
    largest = sorted(caches, key=lambda cache: (-cache.tensor_bytes, -cache.entries))
    return tuple(
        FilledCache(cache.name, cache.entries, cache.maxsize, cache.tensor_bytes) for cache in largest[:_LISTED]
    )


def explain_grown(question: ExplainGrown) -> Findings:
    """Return a finding on each of some containers that have grown and that the program holds."""
    courses = [Course(each.identity, each.kind, each.turns, each.lengths) for each in question.containers]
    _, containers = read_lengths({course.identity for course in courses})
    found = growth_of_containers(
        courses,
        containers,
        turns=question.turns,
        module_of=lambda _: "",
        by_frames=True,
        seconds=question.seconds,
        since=question.since,
        tensors=True,
        fixed=question.fixed,
    )
    return Findings(findings=tuple(found.values()))

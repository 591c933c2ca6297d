"""Which leaks of one test have one cause: what the backend of a process group opens, and arrays behind a finding."""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from lowtide.leakcheck.causes import by_cause, with_causes
from lowtide.leakcheck.filled_caches import CachedItem
from lowtide.leakcheck.item_findings import ItemLeak
from lowtide.leakcheck.tensor_findings import Context
from lowtide.reports.schema import Finding, Resource


def leak(resource: Resource, *names: str, size: int = 0) -> ItemLeak:
    told = f": {', '.join(names)}" if names else ""
    finding = Finding(
        resource=resource,
        cause="unknown",
        bytes=size,
        count=len(names) or 1,
        device="",
        stage="call",
        message=f"{len(names)} {resource.replace('-', ' ')} did not come back, since call{told}",
        fingerprint=resource,
    )
    return ItemLeak(finding, resource, dict.fromkeys(names, 1), 0)


def told(*leaks: ItemLeak) -> list[list[str]]:
    """The resources of each finding with those of its parts."""
    drafts, causes = with_causes(leaks, Context())
    findings = [draft if isinstance(draft, Finding) else draft.finding for draft in drafts]
    merged = by_cause(findings, {id(finding): cause for finding, cause in zip(findings, causes, strict=True)})
    return [[finding.resource, *(part.resource for part in finding.parts)] for finding in merged]


GROUPS = ("0", "1")
OF_GROUPS = ("990001 -> socket:[1]", "990002 -> anon_inode:[eventpoll]", "990003 -> pipe:[2]")


def test_what_a_backend_opens_belongs_to_its_process_groups() -> None:
    assert told(leak("file-descriptors", *OF_GROUPS), leak("process-groups", *GROUPS)) == [
        ["process-groups", "file-descriptors"]
    ]


def test_a_file_beside_process_groups_is_a_leak_of_its_own() -> None:
    beside = leak("file-descriptors", *OF_GROUPS, "990004 -> /etc/hostname")
    assert told(beside, leak("process-groups", *GROUPS)) == [
        ["process-groups", "file-descriptors"],
        ["file-descriptors"],
    ]
    drafts, _ = with_causes([beside, leak("process-groups", *GROUPS)], Context())
    messages = [draft.finding.message for draft in drafts if isinstance(draft, ItemLeak)]
    assert "1 file descriptor did not come back, since call: 990004 -> /etc/hostname" in messages


def test_without_process_groups_descriptors_stay_as_they_are() -> None:
    assert told(leak("file-descriptors", *OF_GROUPS), leak("threads", "gone (1)")) == [
        ["file-descriptors"],
        ["threads"],
    ]


@contextmanager
def holding(size: int) -> Iterator[str]:
    """A thread that holds an array of that many bytes, as the counters name it."""
    started, release = threading.Event(), threading.Event()

    def work(array: object) -> None:
        started.set()
        release.wait(60)

    thread = threading.Thread(target=work, args=(np.ones(size, np.uint8),), name="holding")
    thread.start()
    started.wait(60)
    try:
        yield f"holding ({thread.ident})"
    finally:
        release.set()
        thread.join()


@pytest.mark.parametrize(
    ("size", "resources"),
    [
        (100_000, [["threads", "host-memory"]]),
        # Half of it is somebody else's.
        (50_000, [["threads"], ["host-memory"]]),
    ],
)
def test_host_memory_that_lies_behind_another_finding_is_part_of_that(size: int, resources: list[list[str]]) -> None:
    with holding(size) as name:
        assert told(leak("threads", name), leak("host-memory", size=100_000)) == resources


class Application:
    """It has an array and, beside that, an object that is known by its bound method."""

    def __init__(self, size: int) -> None:
        self.table = np.ones(size, np.uint8)
        self.parts = [Part()]


class Part:
    pass


@pytest.mark.parametrize("maxsize", [8, None])
@pytest.mark.parametrize(
    ("leaked", "resources"),
    [
        (0, [["lru-cache", "host-memory"]]),
        # The entry that leads to this one has little memory; another one has, and was there before.
        (1, [["lru-cache"], ["host-memory"]]),
    ],
)
def test_what_hangs_on_a_cache_entry_is_part_of_the_finding_about_it(
    maxsize: int | None, leaked: int, resources: list[list[str]]
) -> None:
    cache = functools.lru_cache(maxsize)(lambda application, *_: None)
    applications = [Application(100_000), Application(1_000)]
    for application in applications:
        cache(application, "of a key of two")
    part = applications[leaked].parts[0]
    kept = dataclasses.replace(
        leak("lru-cache", "part"), cached={"part": CachedItem(weakref.ref(cache), "cache", id(part))}
    )
    assert told(kept, leak("host-memory", size=100_000)) == resources

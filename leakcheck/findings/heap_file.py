"""Keeps the walked heap of what is about to be reported in a file, which `lowtide heap` reads later and elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence

from lowtide.leakcheck.judging.ladder import trim_heap
from lowtide.leakcheck.judging.storages import Key, tensors_over
from lowtide.probes.heap.heap_copy import copy_heap
from lowtide.probes.heap.holders import SharedWalk
from lowtide.probes.heap.stand_ins import stand_ins
from lowtide.probes.objects.listed import collector_paused
from lowtide.probes.originals import os
from lowtide.reports.heap.kept_heap import FOLDER, file_name, write_heap
from lowtide.reports.schema import NotMeasured, ReportError


class HeapFile:
    """The file of one test, block or life; one of before goes, since it must not pass for this one's."""

    def __init__(self, folder: str, name: str, subject: str, version: str) -> None:
        self._folder, self._name, self._subject, self._version = folder, name, subject, version
        self._unwritten = ""
        self.is_there = False
        """Whether it was written."""
        self.drop()

    @classmethod
    def beside(cls, report: str, subject: str, version: str) -> HeapFile:
        """Return that of a subject of the report in a folder."""
        return cls(f"{report}/{FOLDER}", file_name(subject), subject, version)

    @property
    def not_measured(self) -> tuple[NotMeasured, ...]:
        """Return why it could not be written; nothing if it was, or was not to be."""
        return (NotMeasured(what="the kept heap", why=self._unwritten),) if self._unwritten else ()

    def keep(
        self,
        walk: SharedWalk,
        *,
        born: Collection[int] | None,
        storages: Collection[Key],
        items: Mapping[str, Sequence[str]],
        roots: Sequence[tuple[str, object]],
    ) -> None:
        """Write the whole heap, which is walked if nobody has done so.

        It says what was born in the test, and which storages and things, by name and resource, are left; there are
        further roots, by name.
        """
        with collector_paused():
            graph = walk.graph([held for _, held in roots])
            over = tensors_over(storages, walk) if storages else []
            named = stand_ins(graph.census(), {key: [*names] for key, names in items.items()}) if items else {}
            left = {*map(id, over), *map(id, named.values())}
            del over, named
            copied = copy_heap(graph, born=born, left=left, given=roots)
        try:
            write_heap(copied, self._folder, self._name, self._subject, self._version)
            self.is_there = True
        except ReportError as error:
            self._unwritten = str(error)
        del copied
        # What it took is no memory of the program's, which is read again.
        trim_heap()

    def drop(self) -> None:
        """Take it away: nothing is reported."""
        self.is_there = False
        with contextlib.suppress(OSError):
            os.unlink(f"{self._folder}/{self._name}")

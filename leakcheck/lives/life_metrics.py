"""What of an engine's shutdown is judged in one life: without what imports and libraries' first use have left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lowtide.leakcheck.baseline.import_watch import Imported
from lowtide.leakcheck.judging.metrics import Metric, as_counted
from lowtide.leakcheck.libraries.library_items import JUDGED, LibraryItems
from lowtide.probes.host.counters import Counters
from lowtide.probes.host.makers import Makers
from lowtide.probes.snapshot import Snapshot
from lowtide.reports.schema import NotMeasured


class LifeMetrics:
    """The metrics of a run's lives, and what is known of imports and libraries by which they are read.

    Args:
        table: what is judged at a shutdown.
        makers: knows which code made the threads, processes and descriptors.
        imported: what imported modules made and changed.
        tensors_of_imports: bytes of the tensors that imported modules hold, by device.
        device: "cpu" or "cuda:N".
    """

    def __init__(
        self,
        table: Callable[[], Sequence[Metric[Snapshot]]],
        makers: Makers,
        imported: Imported,
        tensors_of_imports: Callable[[], dict[str, int]],
        device: str,
    ) -> None:
        self._table = table
        self._library_items = LibraryItems(makers)
        self._imported = imported
        self._tensors_of_imports = tensors_of_imports
        self.device = device
        # Bytes of imported modules' tensors by device, and by how much imports raised each level, at each snapshot.
        self._imported_bytes: dict[float, dict[str, int]] = {}
        # By resource, what libraries have from their first use, with the life.
        self._first_use: dict[str, dict[str, int]] = {}
        self.used_before: dict[str, set[int]] = {}
        """By resource, the lives that left some of what libraries had from their first use and that is more since."""
        self.once_so_far: tuple[NotMeasured, ...] = ()
        """What to say of a first use as long as no life has followed."""

    def all(self) -> tuple[Metric[Snapshot], ...]:
        """All that is judged, without what libraries have from their first use and what imports left."""
        return tuple(map(self._without_first_use, self._without_what_imports_left()))

    def note_imports(self, snapshot: Snapshot) -> None:
        """How much of a snapshot, taken just now, is of imports."""
        found = self._tensors_of_imports()
        # Tensors are counted by themselves.
        of_host = max(0, self._imported.growth("host-memory") - found.get("cpu", 0))
        of_driver = self._imported.growth(f"driver {self.device}")
        levels = {**found, "host-memory cpu": of_host, f"driver {self.device}": of_driver}
        self._imported_bytes[snapshot.taken_at] = levels

    def note_first_use(self, cycle: int, baseline: Snapshot, now: Snapshot) -> None:
        """Tell apart what a library made and keeps: it is a leak once a later life makes more of it."""
        new: dict[str, dict[str, int]] = {}
        there: dict[str, dict[str, int]] = {}
        for metric in self._without_what_imports_left():
            key: str = metric.resource
            if key in JUDGED and metric.items is not None:
                new[key] = {as_counted(key, name): size for name, size in metric.new_items(baseline, now).items()}
                there[key] = {as_counted(key, name): size for name, size in metric.items(now).items()}
        tensors = now.tensors.on("cpu").ranges
        found = self._library_items.sort(new, Counters(there, {}, {}), f"cycle {cycle}", tensors)
        for key in JUDGED:
            known = self._first_use.setdefault(key, {})
            for name in found.excused.get(key, ()):
                known.setdefault(name, cycle)
            for name in {name for names in found.earlier.get(key, {}).values() for name in names if name in known}:
                self.used_before.setdefault(key, set()).add(known.pop(name))
        self.once_so_far = found.listed

    def _without_first_use(self, metric: Metric[Snapshot]) -> Metric[Snapshot]:
        """Of what is counted, without what libraries have from their first use."""
        items = metric.items
        if metric.resource not in JUDGED or items is None:
            return metric

        def left(snapshot: Snapshot) -> dict[str, int]:
            known = self._first_use.get(metric.resource, ())
            found = items(snapshot).items()
            return {name: size for name, size in found if as_counted(metric.resource, name) not in known}

        return dataclasses.replace(metric, read=lambda snapshot: sum(left(snapshot).values()), items=left)

    def _without_what_imports_left(self) -> list[Metric[Snapshot]]:
        return list(map(self._without_imports, self._table()))

    def _without_imports(self, metric: Metric[Snapshot]) -> Metric[Snapshot]:
        """Without what modules made for themselves when a life imported them: tensors that Python holds, what has a
        name, and by how much the levels of the process rose."""
        if metric.items is not None:
            items = metric.items

            def left(snapshot: Snapshot) -> dict[str, int]:
                names = self._imported.names(metric.resource)
                found = items(snapshot)
                return {name: found[name] for name in found if as_counted(metric.resource, name) not in names}

            return dataclasses.replace(metric, read=lambda snapshot: sum(left(snapshot).values()), items=left)
        if metric.resource == "tensors" and metric.unit == "bytes" and metric.cause == "unknown":
            key = metric.device
        elif metric.resource in ("host-memory", "driver"):
            key = f"{metric.resource} {metric.device}"
        else:
            return metric

        def read(snapshot: Snapshot) -> int | None:
            level = metric.read(snapshot)
            return None if level is None else level - self._imported_bytes.get(snapshot.taken_at, {}).get(key, 0)

        return dataclasses.replace(metric, read=read)

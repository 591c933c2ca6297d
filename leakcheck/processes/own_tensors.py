"""This process's tensors, for another one that asks: the same reading and explaining as in the checked process."""

from __future__ import annotations

import gc
import sys

from lowtide.leakcheck.baseline.storages import Held, Key, text_of
from lowtide.leakcheck.findings.life_findings import LeftoverTensors
from lowtide.leakcheck.findings.storage_holders import explain_storages
from lowtide.leakcheck.findings.tensor_findings import tensor_leaks
from lowtide.leakcheck.judging.ladder import Rung
from lowtide.leakcheck.processes.messages import Levels
from lowtide.probes.device.torch_allocator import read_allocators
from lowtide.probes.memory.tensors import StorageReading, summarize, survey_storages
from lowtide.probes.objects.listed import Census, all_objects, collector_paused
from lowtide.probes.stages import announced_pools
from lowtide.reports.schema import Finding


class OwnTensors:
    """Follows this process's tensors through the stages of a life that another process tells of."""

    def __init__(self) -> None:
        self._leftovers: LeftoverTensors | None = None
        self._modules: frozenset[str] = frozenset()

    def begin(self, stage: str, cycle: int) -> None:
        """From here on, what appears belongs to this stage."""
        if self._leftovers is None:
            self._leftovers = LeftoverTensors(card=_uses_cards())
            self._leftovers.open()
            self._modules = frozenset(sys.modules)
        self._leftovers.stage(stage, cycle)

    def asleep(self, cycle: int, kind: str) -> list[Finding]:
        """Who holds what is left of inferring."""
        if self._leftovers is None:
            return []
        pools = announced_pools()
        found: list[Finding] = []
        for device in _devices(kind):
            found += self._leftovers.explain_asleep(None, cycle, device, pools)
        return found

    def left(self, cycle: int | None) -> list[tuple[Finding, dict[int, int]]]:
        """Who holds what appeared in one cycle, or in any, and is not garbage; with its bytes by cycle."""
        if self._leftovers is None:
            return []
        gc.collect()
        found = self._leftovers.explain_turns(cycle, announced_pools())
        return [(finding, sizes) for finding, sizes in found if not self._is_of_import(finding)]

    def _is_of_import(self, finding: Finding) -> bool:
        """Whether a module that was imported since the watch began has it in its namespace, as from its import."""
        holder = finding.holder or ""
        imported = [name for name in list(sys.modules) if name not in self._modules]
        return finding.cause == "module-global" and any(holder.startswith(f"{name}.") for name in imported)

    def held(self, stage: str, kind: str, most: int) -> list[Finding]:
        """Who holds the largest storages on devices of a kind, arenas aside."""
        leftovers = self._leftovers or LeftoverTensors(card=False)
        context = leftovers.context(None)
        with collector_paused():
            survey = survey_storages(Census(all_objects()))
        pooled = [part for pool in announced_pools() for part in pool.ranges]
        rows: dict[str, list[Held]] = {}
        for storage in sorted(survey.storages, key=lambda each: -each.bytes):
            device = storage.device
            inside = any(start <= storage.address < start + length for start, length in pooled)
            if device.partition(":")[0] == kind and not inside and len(rows.setdefault(device, [])) < most:
                rows[device].append(_held(storage, stage))
        keys: set[Key] = {held.key for row in rows.values() for held in row}
        explained = explain_storages(keys, context)
        found = []
        for row in rows.values():
            found += [leak.finding for leak in tensor_leaks([row], [Rung.RAW], explained, context)]
        return found

    def levels(self) -> Levels:
        """How much this process holds."""
        pools = announced_pools()
        with collector_paused():
            survey = survey_storages(Census(all_objects()))
        tensors = summarize(survey, pools)
        arenas: dict[str, dict[str, int]] = {}
        for pool in pools:
            if pool.kind == "arena":
                of_device = arenas.setdefault(pool.device, {})
                of_device[pool.tag] = of_device.get(pool.tag, 0) + pool.mapped
        allocators = read_allocators({storage.address for storage in survey.storages})
        return Levels(
            tensors={each.device: each.bytes - each.in_pools for each in tensors.per_device},
            arenas=arenas,
            reserved={each.device: each.reserved for each in allocators},
            has_torch=True,
        )


def _held(storage: StorageReading, stage: str) -> Held:
    return Held((storage.device, storage.address), storage.bytes, text_of(storage), stage, None)


def _devices(kind: str) -> list[str]:
    with collector_paused():
        survey = survey_storages(Census(all_objects()))
    return sorted({each.device for each in survey.storages if each.device.partition(":")[0] == kind})


def _uses_cards() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()

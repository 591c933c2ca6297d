"""Modules under the names that they had before: the old name still imports the same module.

Where the old name was documented it stays part of the public interface; the others warn whoever imports them.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

RENAMED = {
    "lowtide.engine.arena": "lowtide.engine.device_allocator.arena",
    "lowtide.engine.attention": "lowtide.engine.model_executor.attention",
    "lowtide.engine.block_pool": "lowtide.engine.kv.block_pool",
    "lowtide.engine.block_table": "lowtide.engine.model_executor.block_table",
    "lowtide.engine.checkpoint": "lowtide.engine.model_executor.checkpoint",
    "lowtide.engine.cuda_graphs": "lowtide.engine.model_executor.cuda_graphs",
    "lowtide.engine.forward_context": "lowtide.engine.model_executor.forward_context",
    "lowtide.engine.host_blocks": "lowtide.engine.kv.host_blocks",
    "lowtide.engine.host_memory": "lowtide.engine.device_allocator.host_memory",
    "lowtide.engine.kv_cache": "lowtide.engine.kv.kv_cache",
    "lowtide.engine.kv_offload": "lowtide.engine.kv.kv_offload",
    "lowtide.engine.kv_transfer": "lowtide.engine.kv.kv_transfer",
    "lowtide.engine.kv_transport": "lowtide.engine.kv.kv_transport",
    "lowtide.engine.memory": "lowtide.engine.device_allocator.memory",
    "lowtide.engine.model": "lowtide.engine.model_executor.model",
    "lowtide.engine.offloading_connector": "lowtide.engine.kv.offloading_connector",
    "lowtide.engine.rope": "lowtide.engine.model_executor.rope",
    "lowtide.engine.sampling": "lowtide.engine.model_executor.sampling",
    "lowtide.engine.transfer": "lowtide.engine.device_allocator.transfer",
    "lowtide.engine.triton_kernels": "lowtide.engine.model_executor.triton_kernels",
    "lowtide.engine.weights": "lowtide.engine.model_executor.weights",
    "lowtide.engine.workspace": "lowtide.engine.device_allocator.workspace",
    "lowtide.leakcheck.blas_handles": "lowtide.leakcheck.libraries.blas_handles",
    "lowtide.leakcheck.books": "lowtide.leakcheck.baseline.records",
    "lowtide.leakcheck.budget": "lowtide.leakcheck.judging.budget",
    "lowtide.leakcheck.cached_values": "lowtide.leakcheck.findings.cached_values",
    "lowtide.leakcheck.cards": "lowtide.leakcheck.baseline.device_memory",
    "lowtide.leakcheck.causes": "lowtide.leakcheck.findings.causes",
    "lowtide.leakcheck.changed_settings": "lowtide.leakcheck.settings.changed_settings",
    "lowtide.leakcheck.check": "lowtide.leakcheck.watching.check",
    "lowtide.leakcheck.checked_life": "lowtide.leakcheck.lives.checked_life",
    "lowtide.leakcheck.cli.exits": "lowtide.leakcheck.cli.console",
    "lowtide.leakcheck.cli.progress": "lowtide.leakcheck.cli.console",
    "lowtide.leakcheck.contract": "lowtide.leakcheck.judging.contract",
    "lowtide.leakcheck.cuts": "lowtide.leakcheck.explaining.cuts",
    "lowtide.leakcheck.damage": "lowtide.leakcheck.targets.damaged_checkpoints",
    "lowtide.leakcheck.declarations": "lowtide.leakcheck.explaining.declarations",
    "lowtide.leakcheck.deep_reading": "lowtide.leakcheck.baseline.deep_reading",
    "lowtide.leakcheck.empty_pools": "lowtide.leakcheck.findings.empty_pools",
    "lowtide.leakcheck.endings": "lowtide.leakcheck.explaining.teardown_methods",
    "lowtide.leakcheck.entries": "lowtide.leakcheck.explaining.container_entries",
    "lowtide.leakcheck.environment_setters": "lowtide.leakcheck.settings.environment_setters",
    "lowtide.leakcheck.exemptions": "lowtide.leakcheck.judging.exemptions",
    "lowtide.leakcheck.explain": "lowtide.leakcheck.explaining.explain",
    "lowtide.leakcheck.expressions": "lowtide.leakcheck.explaining.expressions",
    "lowtide.leakcheck.fault_sweep": "lowtide.leakcheck.fuzzing.fault_sweep",
    "lowtide.leakcheck.faults": "lowtide.leakcheck.targets.faults",
    "lowtide.leakcheck.filled_caches": "lowtide.leakcheck.baseline.filled_caches",
    "lowtide.leakcheck.fingerprints": "lowtide.leakcheck.judging.fingerprints",
    "lowtide.leakcheck.first_use": "lowtide.leakcheck.libraries.first_use",
    "lowtide.leakcheck.fuzz": "lowtide.leakcheck.fuzzing.fuzz",
    "lowtide.leakcheck.fuzz_command": "lowtide.leakcheck.cli.fuzz_command",
    "lowtide.leakcheck.graph_parts": "lowtide.leakcheck.findings.graph_parts",
    "lowtide.leakcheck.growth": "lowtide.leakcheck.judging.buffer_growth",
    "lowtide.leakcheck.host_arrays": "lowtide.leakcheck.findings.host_arrays",
    "lowtide.leakcheck.imported": "lowtide.leakcheck.baseline.imported_modules",
    "lowtide.leakcheck.imports": "lowtide.leakcheck.baseline.import_watch",
    "lowtide.leakcheck.inspectors": "lowtide.leakcheck.explaining.inspectors",
    "lowtide.leakcheck.interrupts": "lowtide.leakcheck.lives.interrupts",
    "lowtide.leakcheck.item_findings": "lowtide.leakcheck.findings.item_findings",
    "lowtide.leakcheck.judge": "lowtide.leakcheck.judging.judge",
    "lowtide.leakcheck.kept_memory": "lowtide.leakcheck.baseline.small_retention",
    "lowtide.leakcheck.ladder": "lowtide.leakcheck.judging.ladder",
    "lowtide.leakcheck.late_release": "lowtide.leakcheck.judging.late_release",
    "lowtide.leakcheck.ledger": "lowtide.leakcheck.baseline.owner_levels",
    "lowtide.leakcheck.leftovers": "lowtide.leakcheck.findings.life_findings",
    "lowtide.leakcheck.level_growth": "lowtide.leakcheck.judging.level_growth",
    "lowtide.leakcheck.library_caches": "lowtide.leakcheck.libraries.library_caches",
    "lowtide.leakcheck.library_items": "lowtide.leakcheck.libraries.library_items",
    "lowtide.leakcheck.life_model": "lowtide.leakcheck.targets.life_model",
    "lowtide.leakcheck.lifecycle": "lowtide.leakcheck.lives.lifecycle",
    "lowtide.leakcheck.listing": "lowtide.leakcheck.judging.items",
    "lowtide.leakcheck.metrics": "lowtide.leakcheck.judging.metrics",
    "lowtide.leakcheck.native_files": "lowtide.leakcheck.libraries.native_files",
    "lowtide.leakcheck.native_holders": "lowtide.leakcheck.explaining.native_holders",
    "lowtide.leakcheck.owner_growth": "lowtide.leakcheck.findings.owner_growth",
    "lowtide.leakcheck.owners": "lowtide.leakcheck.baseline.owners",
    "lowtide.leakcheck.past_torch": "lowtide.leakcheck.libraries.cards_without_torch",
    "lowtide.leakcheck.path_names": "lowtide.leakcheck.explaining.path_names",
    "lowtide.leakcheck.plain": "lowtide.leakcheck.judging.tolerances",
    "lowtide.leakcheck.process_state": "lowtide.leakcheck.lives.process_state",
    "lowtide.leakcheck.progress": "lowtide.leakcheck.cli.console",
    "lowtide.leakcheck.readings": "lowtide.leakcheck.baseline.readings",
    "lowtide.leakcheck.reference": "lowtide.leakcheck.targets.reference",
    "lowtide.leakcheck.reference_target": "lowtide.leakcheck.targets.reference_target",
    "lowtide.leakcheck.remains": "lowtide.leakcheck.baseline.orphaned_files",
    "lowtide.leakcheck.remedies": "lowtide.leakcheck.findings.remedies",
    "lowtide.leakcheck.running_threads": "lowtide.leakcheck.findings.running_threads",
    "lowtide.leakcheck.setting_history": "lowtide.leakcheck.settings.setting_history",
    "lowtide.leakcheck.setting_remedies": "lowtide.leakcheck.settings.setting_remedies",
    "lowtide.leakcheck.shared_card": "lowtide.leakcheck.baseline.shared_card",
    "lowtide.leakcheck.shared_memory": "lowtide.leakcheck.baseline.shared_memory",
    "lowtide.leakcheck.shared_sweep": "lowtide.leakcheck.fuzzing.shared_sweep",
    "lowtide.leakcheck.shorten": "lowtide.leakcheck.fuzzing.shorten",
    "lowtide.leakcheck.sleep_watch": "lowtide.leakcheck.watching.sleep_watch",
    "lowtide.leakcheck.small_checkpoint": "lowtide.leakcheck.targets.small_checkpoint",
    "lowtide.leakcheck.source": "lowtide.leakcheck.fuzzing.target_source",
    "lowtide.leakcheck.stable_names": "lowtide.leakcheck.judging.stable_names",
    "lowtide.leakcheck.storages": "lowtide.leakcheck.baseline.storages",
    "lowtide.leakcheck.suppression_toml": "lowtide.leakcheck.suppressions.toml",
    "lowtide.leakcheck.suppression_writing": "lowtide.leakcheck.suppressions.writing",
    "lowtide.leakcheck.survival": "lowtide.leakcheck.baseline.preserved_state",
    "lowtide.leakcheck.target": "lowtide.leakcheck.targets.target",
    "lowtide.leakcheck.target_life": "lowtide.leakcheck.lives.target_life",
    "lowtide.leakcheck.tensor_findings": "lowtide.leakcheck.findings.tensor_findings",
    "lowtide.leakcheck.territory": "lowtide.leakcheck.explaining.library_objects",
    "lowtide.leakcheck.transformers_target": "lowtide.leakcheck.targets.transformers_target",
    "lowtide.leakcheck.trend": "lowtide.leakcheck.judging.trend",
    "lowtide.leakcheck.type_growth": "lowtide.leakcheck.explaining.type_growth",
    "lowtide.leakcheck.unproven": "lowtide.leakcheck.findings.deferred_remedies",
    "lowtide.leakcheck.unseen": "lowtide.leakcheck.processes.unmeasured_processes",
    "lowtide.leakcheck.watching.unmeasured_processes": "lowtide.leakcheck.processes.unmeasured_processes",
    "lowtide.leakcheck.verify": "lowtide.leakcheck.cli.verify",
    "lowtide.leakcheck.warm_up": "lowtide.leakcheck.libraries.warm_up",
    "lowtide.leakcheck.watch": "lowtide.leakcheck.watching.watch",
    "lowtide.leakcheck.witness": "lowtide.leakcheck.fuzzing.witness",
    "lowtide.probes.address_table": "lowtide.probes.objects.address_table",
    "lowtide.probes.autograd": "lowtide.probes.memory.autograd",
    "lowtide.probes.births": "lowtide.probes.heap.births",
    "lowtide.probes.buffers": "lowtide.probes.memory.buffers",
    "lowtide.probes.c_modules": "lowtide.probes.objects.c_modules",
    "lowtide.probes.caches": "lowtide.probes.heap.caches",
    "lowtide.probes.capsules": "lowtide.probes.memory.capsules",
    "lowtide.probes.contents": "lowtide.probes.memory.contents",
    "lowtide.probes.counters": "lowtide.probes.host.counters",
    "lowtide.probes.cxx_holders": "lowtide.probes.references.cxx_holders",
    "lowtide.probes.described": "lowtide.probes.objects.described",
    "lowtide.probes.dispatch_modes": "lowtide.probes.memory.dispatch_modes",
    "lowtide.probes.edges": "lowtide.probes.references.edges",
    "lowtide.probes.foreign": "lowtide.probes.objects.foreign",
    "lowtide.probes.gc_state": "lowtide.probes.objects.gc_state",
    "lowtide.probes.heap_graph": "lowtide.probes.heap.graph",
    "lowtide.probes.identities": "lowtide.probes.objects.identities",
    "lowtide.probes.interpreter_holders": "lowtide.probes.references.interpreter_holders",
    "lowtide.probes.interpreter_settings": "lowtide.probes.host.interpreter_settings",
    "lowtide.probes.landmarks": "lowtide.probes.heap.landmarks",
    "lowtide.probes.libraries": "lowtide.probes.host.libraries",
    "lowtide.probes.makers": "lowtide.probes.host.makers",
    "lowtide.probes.native_references": "lowtide.probes.references.native_references",
    "lowtide.probes.object_places": "lowtide.probes.objects.object_places",
    "lowtide.probes.passing_for": "lowtide.probes.host.passing_for",
    "lowtide.probes.pointers": "lowtide.probes.memory.pointers",
    "lowtide.probes.process_events": "lowtide.probes.host.process_events",
    "lowtide.probes.process_tree": "lowtide.probes.host.process_tree",
    "lowtide.probes.ranges": "lowtide.probes.memory.ranges",
    "lowtide.probes.reach": "lowtide.probes.heap.reach",
    "lowtide.probes.settings": "lowtide.probes.host.settings",
    "lowtide.probes.small_files": "lowtide.probes.originals",
    "lowtide.probes.stand_ins": "lowtide.probes.heap.stand_ins",
    "lowtide.probes.tensors": "lowtide.probes.memory.tensors",
    "lowtide.probes.thread_names": "lowtide.probes.objects.thread_names",
    "lowtide.probes.torch_settings": "lowtide.probes.host.torch_settings",
    "lowtide.probes.unseen_references": "lowtide.probes.references.unseen_references",
    "lowtide.probes.whose_code": "lowtide.probes.objects.whose_code",
}
"""By a module's old name, the new one."""

DOCUMENTED = frozenset(
    f"lowtide.leakcheck.{name}"
    for name in ("checked_life", "fuzz", "reference_target", "small_checkpoint", "target", "transformers_target")
)
"""The old names that users have from the documentation, or from programs that `lowtide fuzz` printed: no warning."""


RENAMED_MEMBERS: Mapping[str, Mapping[str, str]] = {
    "lowtide.leakcheck.baseline.device_memory": {"Cards": "DeviceMemory"},
    "lowtide.leakcheck.baseline.orphaned_files": {"Remains": "OrphanedFiles"},
    "lowtide.leakcheck.baseline.preserved_state": {"Survival": "PreservedState"},
    "lowtide.leakcheck.baseline.records": {"Books": "Ownership"},
    "lowtide.leakcheck.baseline.shared_memory": {"MadeSegments": "OwnSegments"},
    "lowtide.leakcheck.baseline.small_retention": {"KeptMemory": "SmallRetention"},
    "lowtide.leakcheck.findings.deferred_remedies": {
        "Unproven": "DeferredRemedies",
        "prove_now": "try_deferred",
        "put_off": "defer",
    },
    "lowtide.leakcheck.findings.life_findings": {"Leftovers": "LeftoverTensors"},
    "lowtide.leakcheck.findings.tensor_findings": {"restaged": "with_stage", "told_as_frozen": "marked_as_frozen"},
    "lowtide.leakcheck.libraries.cards_without_torch": {"PastTorch": "CardsWithoutTorch"},
    "lowtide.leakcheck.processes.unmeasured_processes": {"UnseenMemory": "UnmeasuredProcesses"},
}
"""By module, the old names of classes and functions in it, with the new ones: for whoever has the old module's name."""


class OldNames:
    """Finds a renamed module by its old name; asked last, so only for what nothing else finds.

    A finder and a loader without the base classes of `importlib.abc`, which take half of the time to import lowtide.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's specification, or None where no module had this name."""
        new = RENAMED.get(fullname)
        if new is None:
            return None
        if fullname not in DOCUMENTED:
            # The frames of the import system do not count: level 2 is whoever imports.
            warnings.warn(f"{fullname} is now {new}: import it from there", DeprecationWarning, stacklevel=2)
        loader: Any = self
        return importlib.machinery.ModuleSpec(fullname, loader, origin=new)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The renamed module itself, so that there is only one of it."""
        module = importlib.import_module(RENAMED[spec.name])
        for old, new in RENAMED_MEMBERS.get(module.__name__, {}).items():
            setattr(module, old, getattr(module, new))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module back its own specification, which the import system has just replaced."""
        spec = module.__spec__
        if spec is not None:
            module.__spec__ = spec.loader_state


def install() -> None:
    """Makes the old names importable; again it does nothing."""
    if not any(type(finder) is OldNames for finder in sys.meta_path):
        sys.meta_path.append(OldNames())

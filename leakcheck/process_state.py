"""What a life of an engine left changed in its process besides memory: groups of torch.distributed, global settings."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from lowtide.leakcheck.fingerprints import fingerprint, fingerprint_of_items
from lowtide.leakcheck.item_findings import Action, ItemLeak, actions_for, try_actions
from lowtide.leakcheck.listing import listed
from lowtide.probes.counters import CounterReader, Counters, process_groups
from lowtide.reports.schema import Finding, Resource
from lowtide.reports.sizes import format_amount


class ProcessState:
    """Reads it at the beginning of a life and compares after its end.

    Args:
        driver: reads the driver's bytes of this process, on all cards: a group of a card's library holds some.
    """

    def __init__(self, driver: Callable[[], int]) -> None:
        self._driver = driver
        self._reader = CounterReader(None, card=False)
        self._baseline: Counters | None = None
        self._functions: Mapping[str, object] = {}

    def mark(self) -> None:
        """A life begins."""
        self._baseline = self._reader.read()
        # The functions themselves: what replaced one tells nothing of it, and it is what must be put back.
        self._functions = {name: _function(name) for name, text in self._baseline.settings.items() if _is_id(text)}

    def findings(self, stage: str, *, remedies: bool) -> list[Finding]:
        """What is there now and was not at the mark, or is not as it was.

        Args:
            stage: after which this is.
            remedies: whether to undo each, to show that this ends it.
        """
        assert self._baseline is not None
        now = self._reader.read()
        groups = now.items["process-groups"].keys() - self._baseline.items["process-groups"].keys()
        found = []
        if groups:
            leak = _leak("process-groups", dict.fromkeys(sorted(groups), 1), stage, "process groups")
            actions = actions_for(leak, patience=0, may_unfreeze=False) if remedies else []
            found.append(try_actions(leak, actions, _groups_now, self._driver))
        for name, then in self._baseline.settings.items():
            text = now.settings.get(name, then)
            if text != then:
                found.append(self._changed(name, then, text, stage, remedies=remedies))
        return found

    def _changed(self, name: str, then: str, now: str, stage: str, *, remedies: bool) -> Finding:
        leak = _leak("globals", {name: 1}, stage, "process-wide settings")
        told = f"{name} was replaced" if _is_id(now) else f"{name} was {then}, is {now}"
        finding = msgspec.structs.replace(leak.finding, message=f"{told}, and not restored at {stage}")
        action = _undoing(name, then, self._functions.get(name))
        left = functools.partial(self._still, name, then)
        leak = ItemLeak(finding, leak.key, leak.names, leak.subject)
        return try_actions(leak, [action] if remedies and action is not None else [], left, self._driver)

    def _still(self, name: str, then: str) -> Mapping[str, int]:
        return {} if self._reader.read().settings.get(name) == then else {name: 1}


def _leak(resource: Resource, names: Mapping[str, int], stage: str, unit: str) -> ItemLeak:
    holder = listed(resource, names)
    # Groups are numbered through the process's life; settings have names of their own.
    suspects = tuple(names) if resource == "globals" else ()
    former = fingerprint(resource=resource, device="", stage=stage, suspects=(*suspects, "not-restored"))
    mark = former
    if resource != "globals":
        mark = fingerprint_of_items(
            resource, names, resource=resource, device="", stage=stage, suspects=("not-restored",)
        )
    finding = Finding(
        resource=resource,
        cause="not-restored",
        bytes=0,
        count=len(names),
        device="",
        stage=stage,
        message=f"{format_amount(len(names), unit)} did not come back at {stage}: {holder}",
        fingerprint=mark,
        former_fingerprint=former if former != mark else "",
        holder=holder,
    )
    return ItemLeak(finding, resource, names, 0)


def _groups_now() -> Mapping[str, int]:
    return dict.fromkeys(process_groups(), 1)


def _is_id(text: str) -> bool:
    return text.startswith("0x")


def _function(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return vars(sys.modules[module]).get(attribute)


def _undoing(name: str, then: str, function: object) -> Action | None:
    """What puts one setting back."""
    torch: Any = sys.modules.get("torch")
    if function is not None:
        module, _, attribute = name.rpartition(".")
        return Action(f"putting {name} back", "", functools.partial(setattr, sys.modules[module], attribute, function))
    if name == "gc.isenabled()":
        return Action("gc.enable()", "", gc.enable) if then == "True" else Action("gc.disable()", "", gc.disable)
    if name == "gc.get_threshold()":
        values = tuple(int(part) for part in then.strip("()").split(","))
        return Action(f"gc.set_threshold{then}", "", lambda: gc.set_threshold(*values))
    if name == "torch.get_default_dtype()":
        dtype = getattr(torch, then.removeprefix("torch."))
        return Action(f"torch.set_default_dtype({then})", "", lambda: torch.set_default_dtype(dtype))
    if name == "torch.get_default_device()":
        return Action(f"torch.set_default_device({then!r})", "", lambda: torch.set_default_device(then))
    return None

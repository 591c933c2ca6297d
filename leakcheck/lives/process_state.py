"""What a life of an engine left changed in its process besides memory: groups of torch.distributed, global settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import msgspec

from lowtide.leakcheck.findings.item_findings import ItemLeak, still_changed
from lowtide.leakcheck.findings.remedies import actions_for, try_actions
from lowtide.leakcheck.judging.fingerprints import fingerprint, fingerprint_of_items
from lowtide.leakcheck.judging.judge import listed
from lowtide.leakcheck.judging.owners import Owner
from lowtide.leakcheck.judging.rules import rule_of
from lowtide.leakcheck.resources import LISTED, read_items, resource_of
from lowtide.leakcheck.resources.resource import Resource, Rule
from lowtide.leakcheck.resources.settings import (
    ABSENT,
    EnvironmentSetters,
    SettingChange,
    advice,
    changes_between,
    describe_change,
)
from lowtide.probes.host.counters import CounterReader, Counters
from lowtide.reports.schema import Finding
from lowtide.reports.statement import StatedFinding, Statement, restated


class ProcessState:
    """Reads it at the beginning of a life and compares after its end.

    Args:
        driver: reads the driver's bytes of this process, on all cards: a group of a card's library holds some.
        read: reads the counters; the same that reads what an import takes, because a reader knows what libraries have
            set since it was made.
        environment: who set which environment variable; None: what is added, and not only replaced or removed, is not
            judged, as where a library's first use adds some and nobody knows who did.
    """

    def __init__(
        self,
        driver: Callable[[], int],
        read: Callable[[], Counters] | None = None,
        environment: EnvironmentSetters | None = None,
    ) -> None:
        self._driver = driver
        self._environment = environment
        self._read = read or CounterReader(None, card=False, resources=read_items).read
        self._baseline: Counters | None = None
        # What earlier lives left, by resource: one remedy ends it and what later lives leave.
        self._of_earlier: dict[str, tuple[str, ...]] = {}
        # What earlier lives left, with what was there before the first that did: a later life begins with it.
        self._left: dict[str, SettingChange] = {}

    def mark(self) -> None:
        """Note what is there when a life begins."""
        self._baseline = self._read()

    def adopt(self, owner: Owner) -> None:
        """Take what the import of a module has set or made for what lives must leave as it is.

        Args:
            owner: the import, with what it took.
        """
        if self._baseline is None:
            return
        settings = {
            name: text for name, text in {**self._baseline.settings, **owner.settings}.items() if text != ABSENT
        }
        keys = [resource.rule.key for resource in LISTED]
        made = {key: dict.fromkeys(owner.items.get(key, ()), 1) for key in keys}
        items = {**self._baseline.items, **{key: {**made[key], **self._baseline.items[key]} for key in keys}}
        self._baseline = dataclasses.replace(self._baseline, settings=settings, items=items)

    def findings(self, stage: str, *, remedies: bool) -> list[Finding]:
        """Report what was not there, or not so, at the mark; of what has a name, what was not there at the first mark.

        Args:
            stage: after which this is.
            remedies: whether to undo each, to show that this ends it.
        """
        assert self._baseline is not None
        now = self._read()
        found = [
            try_actions(
                leak,
                actions_for(leak, patience=0, may_unfreeze=False) if remedies else [],
                resource.read,
                self._driver,
            )
            for resource in LISTED
            if resource.rule.life is not None and (leak := self._left_of(resource, now, stage)) is not None
        ]
        changes = {change.name: change for change in changes_between(self._baseline.settings, now.settings)}
        changes = {
            name: change
            for name, change in changes.items()
            # What puts back what an earlier life had changed is no change.
            if self._is_judged(change) and not (name in self._left and self._left[name].before == change.now)
        }
        if remedies:
            changes |= {first.name: first for first in self._left.values() if still_changed((first,))}
        found += [self._changed(change, stage, remedies=remedies) for change in changes.values()]
        for name, change in changes.items():
            self._left.setdefault(name, change)
        if remedies:
            self._left.clear()
        return found

    def _left_of(self, resource: Resource, now: Counters, stage: str) -> ItemLeak | None:
        """Return what is there of a resource that was not there at the first mark."""
        assert self._baseline is not None
        key = resource.rule.key
        there = now.items[key].keys()
        new = there - self._baseline.items[key].keys()
        new -= set(resource.staying(new)) if new else set()
        left = [name for name in self._of_earlier.get(key, ()) if name in there and name not in new] + sorted(new)
        self._of_earlier[key] = tuple(left)
        return _leak(resource.rule, dict.fromkeys(left, 1), stage) if left else None

    def _is_judged(self, change: SettingChange) -> bool:
        if self._environment is None:
            return change.before != ABSENT or change.is_replaced
        return ABSENT not in (change.before, change.now) or not self._environment.is_librarys(change.name)

    def _changed(self, change: SettingChange, stage: str, *, remedies: bool) -> Finding:
        leak = _leak(rule_of("globals"), {change.setting: 1}, stage)
        finding = restated(leak.finding, amount=describe_change(change), came=", and not restored", things=())
        leak = ItemLeak(finding, leak.key, leak.names, leak.subject, changes=(change,))
        actions = actions_for(leak, patience=0, may_unfreeze=False)
        if not remedies:
            return msgspec.structs.replace(leak.finding, advice=advice((change,)))
        return try_actions(leak, actions, lambda: _still(change), self._driver)


def _leak(rule: Rule, names: Mapping[str, int], stage: str) -> ItemLeak:
    assert rule.life is not None
    resource, cause = rule.resource, rule.life.cause
    kind = resource_of(rule.key)
    holder = listed(resource, names)
    # Groups are numbered through the process's life; settings have names of their own.
    suspects = tuple(names) if resource == "globals" else ()
    former = fingerprint(resource=resource, device="", stage=stage, suspects=(*suspects, cause))
    mark = former
    if resource != "globals":
        mark = fingerprint_of_items(resource, names, resource=resource, device="", stage=stage, suspects=(cause,))
    finding = StatedFinding(
        resource=resource,
        cause=cause,
        bytes=0,
        count=len(names),
        device="",
        stage=stage,
        statement=Statement(unit=rule.unit, things=(holder,) if holder else ()),
        fingerprint=mark,
        former_fingerprint=former if former != mark else "",
        holder=holder,
        advice=(kind.advice(names) or None) if kind is not None else None,
    )
    return ItemLeak(finding, resource, names, 0)


def _still(change: SettingChange) -> Mapping[str, int]:
    return {left.setting: 1 for left in still_changed((change,))}

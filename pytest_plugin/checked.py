"""What failed calls of `leakcheck.check()` found in a test, until the test's verdict reports it."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.leakcheck.findings.storage_watch import StorageWatch
from lowtide.leakcheck.watching.watched import Thing, Verdict
from lowtide.reports.schema import Finding
from lowtide.reports.statement import noted

_BACK = "leakcheck.check() found it; it was back at the end of the test"


@dataclass(frozen=True, eq=False)
class _Checked:
    """A finding with what distinguishes it from a later one; holds nothing of the program."""

    finding: Finding
    things: frozenset[Thing]
    storages: StorageWatch

    def is_in(self, verdict: Verdict) -> bool:
        """Whether a later verdict is about the same leak: about the same things, those that are gone excepted."""
        gone = {("storage", *key) for key in self.storages.gone()}
        return any((self.things - gone) & things for things in verdict.things.values())


class CheckedLeaks:
    """Those of one test, each once however often it is found."""

    def __init__(self) -> None:
        self._found: list[_Checked] = []

    def clear(self) -> None:
        """Another test begins."""
        self._found = []

    def add(self, verdict: Verdict) -> None:
        """A check failed with this verdict."""
        self._found = [known for known in self._found if not known.is_in(verdict)]
        for finding in verdict.findings:
            things = verdict.things.get(finding.fingerprint, frozenset())
            storages = StorageWatch([(device, int(address)) for kind, device, address in things if kind == "storage"])
            self._found.append(_Checked(finding, things, storages))

    def missing_from(self, verdict: Verdict) -> list[Finding]:
        """What the verdict on the whole test does not report, since it was released after the check."""
        return [noted(known.finding, f"; {_BACK}") for known in self._found if not known.is_in(verdict)]

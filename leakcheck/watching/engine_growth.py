"""What an engine in this process keeps of each inference, looked for while it lives: its end may give it back."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.leakcheck.findings.life_findings import ENGINE
from lowtide.leakcheck.judging.growth import FEWEST_TURNS
from lowtide.leakcheck.processes.process_growth import Inferences, grown_under
from lowtide.leakcheck.watching.watch import Watch
from lowtide.reports.schema import Finding


class EngineGrowth:
    """Looks at the engine of a test, at a growing number of inferences, since a look goes through the heap.

    Args:
        watch: knows what appeared in which inference.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._inferences = Inferences()
        self._label = ""
        self._next = FEWEST_TURNS
        self._found: dict[str, Finding] = {}

    def before(self, stage: str, engine: object) -> None:
        """A stage begins; a shutdown may give back what has grown."""
        if stage == "shutdown" and len(self._inferences.again) >= FEWEST_TURNS:
            self._look(engine)

    def after(self, stage: str, engine: object, label: str) -> None:
        """A stage has ended.

        Args:
            stage: its name.
            engine: whose.
            label: how the watch calls the stage.
        """
        self._inferences.after(stage)
        if stage == "infer":
            self._label = label
        if len(self._inferences.again) >= self._next:
            self._look(engine)
            self._next = 2 * len(self._inferences.again)

    def _look(self, engine: object) -> None:
        left = self._watch.kept_of(self._label, ENGINE, engine)
        for finding in grown_under(ENGINE, left, self._inferences.again):
            self._found[finding.fingerprint] = finding

    def take(self, known: Sequence[Finding]) -> tuple[Finding, ...]:
        """What was found since the last call.

        Args:
            known: what the test has left: what an engine still keeps is told by that alone.
        """
        left = {finding.device for finding in known if finding.resource == "tensors"}
        found = tuple(finding for finding in self._found.values() if finding.device not in left)
        self._inferences, self._next, self._found = Inferences(), FEWEST_TURNS, {}
        return found

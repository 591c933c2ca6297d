"""`LeakCheck`: the judgement of `pytest --leakcheck` around any block of code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import date
from types import TracebackType
from typing import Literal

from msgspec.structs import asdict

import lowtide
from lowtide.leakcheck.findings.heap_file import HeapFile
from lowtide.leakcheck.findings.turn_growth import FEWEST_TURNS, SECOND, TurnGrowth, call_recorder, is_read
from lowtide.leakcheck.suppressions.entries import shipped
from lowtide.leakcheck.watching.engine_watch import SleepWatch
from lowtide.leakcheck.watching.import_watch import ImportWatch
from lowtide.leakcheck.watching.watch import Watch
from lowtide.leakcheck.watching.watched import Policy
from lowtide.probes.heap.births import young_generations_tell
from lowtide.probes.objects.collector import NEEDS, observed_collector, why_unusable
from lowtide.probes.originals import gc, os, threading
from lowtide.probes.stages import EnteredStage, listening
from lowtide.reports.from_snapshot import report_of
from lowtide.reports.outcomes import judged_as
from lowtide.reports.schema import NotMeasured, Report, Subject
from lowtide.reports.sizes import parse_bytes


class LeakCheckError(RuntimeError):
    """`LeakCheck` was used in a way that cannot work; the message says what would."""


class LeakCheck:
    """What a block of code leaves behind: `with LeakCheck() as check: …`, then `check.report`.

    Local variables of the block outlive it: delete those that hold what should be gone, or put the code into a
    function. Stages that the code marks with `lowtide.stage` are those of its findings. Blocks do not nest.

    Args:
        name: what to call the block in the report.
        tolerance: bytes, or a size such as "1MiB", that may stay of each resource.
        settle: seconds without movement after which waiting for threads, processes or the driver ends.
        stacks: whose memory's allocation is recorded with its stack: "auto" (cards), "all" (the host too), "off".
        remedies: whether to try what would give a leak back, right after the block.  That changes the program: it
            deletes what the block left, and what it changed is listed with the finding.
        processes: whether what the block leaves in other processes is judged, by agents in those that start in it.
        turns: how often the block does the same (requests, steps), and calls `turn` afterwards, 12 times or more: then
            it is judged, too, what grows with each.
        peak: bytes, or a size such as "2GiB", by which memory may rise meanwhile, on the host and on each card; None:
            by any.
        on_turn: hears, after each turn, its number from 1 and by how much there is more of each resource than when the
            block began: bytes or a count, `{"host-memory": 1048576, "reserved cuda:0": 0, "threads": 1}`.
        keep_heap: a file, as `leak.heap.npz`, into which the walked heap is written if the block leaves something;
            `lowtide heap` says later what holds what in it. None: it is not written.
        native: whether, where host memory seems to grow with each of the turns, the calls of those that follow are
            recorded which allocate and do not free: by memray (extra `native`), with those of native code, else by
            tracemalloc; and whether it is recorded which library asks a card's driver for memory (extra `cupti`).

    Raises:
        LeakCheckError: `tolerance` or `peak` is no size.
    """

    _names_changes = True

    def __init__(
        self,
        name: str = "block",
        *,
        tolerance: int | str = 0,
        settle: float = 0.5,
        stacks: Literal["auto", "all", "off"] = "auto",
        remedies: bool = False,
        processes: bool = True,
        turns: int = 0,
        peak: int | str | None = None,
        on_turn: Callable[[int, Mapping[str, int]], object] | None = None,
        keep_heap: str | os.PathLike[str] | None = None,
        native: bool = False,
    ) -> None:
        self._name = name
        self._keep_heap = "" if keep_heap is None else os.path.abspath(keep_heap)
        self._peak = None if peak is None else _size_of("peak", peak)
        policy = Policy(
            tolerance=_size_of("tolerance", tolerance),
            settle=settle,
            stacks=stacks,
            remedies="now" if remedies else "never",
            names_changes=self._names_changes,
            processes=processes,
            native=native,
        )
        own = (("peak", self._peak), ("keep_heap", keep_heap))
        self._settings = {name: str(value) for name, value in (*asdict(policy).items(), *own)}
        self._watch = Watch(policy)
        self._imports = ImportWatch(self._watch.enter, self._watch.leave, self._watch.thread_imports)
        self._stack = ExitStack()
        self._report: Report | None = None
        self._outer: list[str] = []
        self._turns, self._turn = turns, 0
        self._on_turn, self._begun = on_turn, dict[str, int]()
        calls = call_recorder(wanted=native)
        self._growth = TurnGrowth(
            "turns", by_frames=True, asked=True, calls=calls, native_option="LeakCheck(native=True)"
        )
        self._sleeps = SleepWatch(lambda: bool(self._watch.others.readings))

    def __enter__(self) -> LeakCheck:
        if not young_generations_tell():
            raise LeakCheckError(f"LeakCheck needs {NEEDS}: {why_unusable(observed_collector())}")
        # What is garbage already must not come back during the block.
        gc.collect()
        with ExitStack() as stack:
            stack.callback(self._watch.close)
            stack.callback(self._growth.close)
            self._watch.open()
            stack.enter_context(listening(self))
            stack.callback(self._imports.remove)
            self._imports.install()
            if self._keep_heap:
                self._watch.heap = HeapFile(*os.path.split(self._keep_heap), self._name, lowtide.__version__)
            self._watch.begin("block", module=self._name, peak=self._peak)
            self._imports.active = True
            self._stack = stack.pop_all()
        self._begun = {} if self._on_turn is None else self._watch.amounts()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._imports.active = False
        with self._stack:
            if error is not None:
                # Its traceback holds the frames of the block: nothing can be said yet.
                self._report = self._report_of(
                    Subject(
                        id=self._name,
                        outcome="error",
                        reason=f"the block raised {type(error).__name__}",
                        out_of_memory=self._watch.out_of_memory.read(error),
                    )
                )
                return
            # Before the verdict collects: what the block holds is there.
            grown = self._growth.end(self._name, "")
            verdict = self._watch.end()
            # A leak that is told by name explains more memory, and what turns add with a name what has none.
            is_named = grown.host is not None and bool(grown.host.path)
            left = [each for each in verdict.findings if each.resource != "host-memory" or each.path or not is_named]
            is_told = any(finding.resource in ("host-memory", "tensors") for finding in left)
            of_turns = grown.containers if is_told or grown.host is None else (*grown.containers, grown.host)
            found = (*left, *self._sleeps.take(), *of_turns)
            findings = shipped().apply(found, date.today()).findings
            leaks = any(finding.suppressed_by is None for finding in findings)
            if self._watch.heap is not None and not leaks:
                self._watch.heap.drop()
            not_measured = (*verdict.not_measured, *self._sleeps.take_unjudged(), *self._turns_missed())
            outcome, reason = judged_as("leak" if leaks else "clean", not_measured)
            self._report = self._report_of(
                Subject(
                    id=self._name,
                    outcome=outcome,
                    reason=reason,
                    findings=findings,
                    not_measured=not_measured,
                )
            )

    def _turns_missed(self) -> tuple[NotMeasured, ...]:
        """Return that it is not known what grows with each turn, where too few were made of those that were to be."""
        if self._turns < FEWEST_TURNS or self._turn >= FEWEST_TURNS:
            return ()
        made = f"{self._turn} of {self._turns} turns were made"
        why = f"{made}, and it shows from {FEWEST_TURNS} on: call turn() after each"
        return (NotMeasured(what="what grows with each turn", why=why),)

    def turn(self) -> None:
        """Say that the block has done once what it does `turns` times.

        Raises:
            LeakCheckError: it was not said how often that will be, and nobody hears of it.
        """
        if self._turns < FEWEST_TURNS and self._on_turn is None:
            raise LeakCheckError(
                f"what grows with each turn shows from {FEWEST_TURNS} turns on: use LeakCheck(turns={FEWEST_TURNS})"
            )
        self._turn += 1
        if self._on_turn is not None:
            now = self._watch.amounts()
            self._on_turn(self._turn, {key: size - self._begun.get(key, 0) for key, size in sorted(now.items())})
        if self._turns < FEWEST_TURNS:
            return
        self._growth.note(self._name)
        if self._turn == self._turns // 2:
            self._watch.note_midway()
        if is_read(self._turn, self._turns, is_last=self._turn == self._turns, asked=True):
            self._growth.read(self._turn, begins=self._turn == SECOND)

    @property
    def report(self) -> Report:
        """Return what was found.

        Raises:
            LeakCheckError: the block has not ended.
        """
        if self._report is None:
            raise LeakCheckError("there is no report before the block has ended: ask for it after the with statement")
        return self._report

    def _repr_html_(self) -> str:
        # Only a notebook asks for it.
        from lowtide.reports.html.fragment import render_fragment, render_line

        if self._report is None:
            return render_line("lowtide: the block has not ended; its report is here afterwards")
        return render_fragment(self._report)

    def stage_entered(self, stage: EnteredStage) -> None:
        """Attribute what appears from here on to this stage."""
        if stage.thread == threading.main_thread().ident:
            self._outer.append(self._watch.stage_now)
            self._watch.phase("/".join(stage.path), again=True)
            self._sleeps.entered(stage)
            self._watch.others.entered(stage)

    def stage_left(self, stage: EnteredStage, error: BaseException | None) -> None:
        """Attribute what appears from here on to the stage around it."""
        self._watch.out_of_memory.stage_left(stage, error)
        if stage.thread == threading.main_thread().ident:
            self._watch.phase(self._outer.pop())
            self._sleeps.left(stage, error)
            self._watch.others.left(stage, error)
            self._watch.slots_after(stage)

    def _report_of(self, subject: Subject) -> Report:
        return report_of([subject], lowtide.__version__, shlex.join(sys.argv), settings=self._settings)


def _size_of(name: str, size: int | str) -> int:
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise LeakCheckError(f"LeakCheck({name}=…): {error}") from None

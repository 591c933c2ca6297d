"""`--leakcheck` at work: baselines, verdicts and reports around each test's protocol."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from lowtide.leakcheck.findings.remedies import DeferredRemedies
from lowtide.leakcheck.judging.owners import ANYTHING, Owner
from lowtide.leakcheck.judging.rules import COLLECTED
from lowtide.leakcheck.processes.process_exit import awaited
from lowtide.leakcheck.watching.watched import Verdict
from lowtide.probes.originals import weakref
from lowtide.probes.stages import listening, stage
from lowtide.pytest_plugin import terminal
from lowtide.pytest_plugin.failures import LeakFailure, hide_own_frames, run_by_another, run_test, shown
from lowtide.pytest_plugin.items import (
    FixtureOwner,
    WiderFixtures,
    clear_tracebacks,
    clear_unreported,
    empty_instance,
    errors_of_parameters,
    fixture_name,
    has_own_setup,
    has_own_teardown,
    hints,
    read_markers,
    release_test,
    release_warnings,
)
from lowtide.pytest_plugin.results import (
    CheckedLeaks,
    DeferredProofs,
    KeptHeaps,
    Proven,
    Results,
    attach,
    attached,
    is_bad,
    proven_as_json,
    proven_from_json,
)
from lowtide.pytest_plugin.session_watch import (
    SessionWatch,
    Spent,
    StageRecords,
    count_workers,
    insist_on_a_card,
    watch_policy,
)
from lowtide.pytest_plugin.settings import Settings
from lowtide.pytest_plugin.turns import SESSION, TestTurns
from lowtide.reports.escaping import one_line
from lowtide.reports.out_of_memory import TITLE, out_of_memory_lines
from lowtide.reports.outcomes import judged_as, tries_as_one
from lowtide.reports.schema import Finding, NotMeasured, OutOfMemory, Subject
from lowtide.reports.sizes import first_of


class Checker:
    """One run under `--leakcheck`.

    Args:
        config: pytest's.
        settings: of this run.

    Raises:
        pytest.UsageError: a setting makes no sense on this machine, or the file of suppressions does not.
    """

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.settings = settings
        self._config = config
        self._is_worker = hasattr(config, "workerinput")
        self.shares_card = count_workers(config) > 1
        self._spent = Spent()
        self._session = SessionWatch(watch_policy(config, self.settings, shares_card=self.shares_card), self._spent)
        if self.settings.device == "cuda":
            insist_on_a_card()
        self._has_judged = False
        # Whether a failed test can end the session.
        self._may_stop = bool(config.getoption("maxfail", 0) or config.getoption("stepwise", False))
        self._owns_protocol = False
        self._fixtures = WiderFixtures()
        self._debugged = False
        self._cycles: int | None = None
        self._setup: Owner | None = None
        self._records: StageRecords | None = None
        self._raised: list[BaseException] = []
        self._out_of_memory: OutOfMemory | None = None
        self._instance: Callable[[], object] = _nothing
        self._checked = CheckedLeaks()
        self._results = Results(config, self.settings)
        self._deferred = DeferredProofs()
        self._heaps = KeptHeaps(config, self.settings)
        self._turns = TestTurns(lambda: self._fixtures.living, self._session.watch.others, native=self.settings.native)

    # The session.

    def pytest_report_header(self) -> list[str]:
        """Return what is measured here, and what cannot be."""
        return terminal.header(self.settings, shares_card=self.shares_card)

    def pytest_sessionstart(self) -> None:
        """Begin to keep what is judged, and to see what processes the program's modules start."""
        self._session.start_agents(self._config)
        self._results.begin()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        """Refuse markers that make no sense before anything runs."""
        if self._is_worker:
            return  # an error here ends the worker without a word: each such test fails instead
        for item in items:
            read_markers(item)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Judge what `-x` left until after the last teardown, and write the report."""
        self._turns.close()
        if self._session.is_open:
            leftovers = self._fixtures.take_ended()
            if leftovers:
                self._session.failure = ""
                with self._session.guarded():
                    self._results.add(self._owner_subjects(self._session.watch.end(leftovers), leftovers))
                if self._session.failure:
                    reason = f"lowtide could not judge what ended with the session: {self._session.failure}"
                    self._results.add([Subject(id="the end of the session", outcome="error", reason=reason)])
            proven = self._prove(session)
            self._session.close()
        else:
            proven = []
        if self._is_worker:
            self._config.workeroutput["lowtide_proven"] = proven_as_json(proven)  # type: ignore[attr-defined]
            self._config.workeroutput.update(self._results.as_output())  # type: ignore[attr-defined]
            self._config.workeroutput["lowtide_spent"] = self._spent.both()  # type: ignore[attr-defined]
            return
        self._results.retell(proven)
        self._results.tell_causes_once()
        if self._results.find_problems() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.settings.action == "fail" and session.exitstatus == pytest.ExitCode.OK and self._results.leaks():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._results.write_report()
        if self._results.unwritten and session.exitstatus == pytest.ExitCode.OK:
            # Who needs the report must not take the session for a clean one.
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take what an xdist worker that is done judged outside of tests."""
        output = getattr(node, "workeroutput", None) or {}
        self._spent.add(output.get("lowtide_spent", (0.0, 0.0)))
        self._results.add_output(output)
        self._results.retell(proven_from_json(output.get("lowtide_proven", "[]")))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write one line per leak."""
        results = self._results
        settings = replace(self.settings, report=None) if results.unwritten else self.settings
        terminal.summary(terminalreporter, tries_as_one(results.subjects), settings, results.problems, self._spent)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Leave nothing of the watch behind, whatever ended the session; name what keeps Python from ending."""
        self._session.close()
        if not self._is_worker:
            terminal.last_lines(
                self._config.pluginmanager.get_plugin("terminalreporter"), awaited(), self._results.unwritten
            )

    def _prove(self, session: pytest.Session) -> list[Proven]:
        """Try what gives the leaks back, now that no test follows; the subjects with what is known then."""
        is_over = self._deferred.is_empty or session.exitstatus == pytest.ExitCode.INTERRUPTED
        if is_over or not self.settings.remedies:
            return []
        self._session.failure = ""
        proven: list[Proven] = []
        with self._spent.on_remedies(), self._session.guarded():
            proven = self._deferred.prove(self._session.watch)
        if self._session.failure:
            reason = f"lowtide could not try what gives the leaks back: {self._session.failure}"
            self._results.add([Subject(id="the end of the session", outcome="error", reason=reason)])
        return proven

    # One test.

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a test as pytest does, but report its call only when it is known what it left.

        So a leak is a failure of its test, counted once everywhere. Where another plugin runs the test (to run it
        again, or in a child process), or a debugger may be entered, the verdict is an error of the teardown instead.
        """
        if item.config.getoption("usepdb", False):
            return None
        run = functools.partial(self._run, item, nextitem)
        if not run_by_another(item, nextitem, run, but=self):
            run()
        return True

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Run a test, report it, and let its report wait for what it left."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self._owns_protocol = True
        try:
            run_test(
                item,
                nextitem,
                functools.partial(self._judge, item),
                may_stop=self._may_stop,
                fails=self.settings.action == "fail",
            )
        finally:
            self._owns_protocol = False
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        """Yield the baseline, before anything of the test is set up."""
        if not self._session.is_open:
            self._session.open()
        self._debugged = False
        self._session.failure = ""
        self._checked.clear()
        self._setup = self._out_of_memory = None
        others = lambda: self._session.watch.others.readings  # noqa: E731
        card = self.settings.device != "cpu"
        self._records = StageRecords(card=card, others=others) if self.settings.report is not None else None
        wrong = ""
        tolerance, peak, judged, self._cycles = None, None, True, self.settings.cycles
        try:
            markers = read_markers(item)
            judged = not markers.excused
            peak = markers.peak if judged else None
            tolerance = None if self.settings.tolerance_is_final else markers.tolerance
            if markers.cycles is not None and self._config.getoption("leakcheck_cycles") is None:
                self._cycles = markers.cycles
        except pytest.UsageError as error:
            wrong = str(error)
        with self._session.guarded():
            module = item.nodeid.partition("::")[0]
            self._session.watch.collected = COLLECTED if self._cycles is None else self._cycles
            self._session.watch.begin(
                "setup",
                tolerance,
                module=module,
                subject=item.nodeid,
                judged=judged,
                follows=self._has_judged,
                peak=peak,
            )
            self._session.imports.active = True
        if "leakcheck" not in getattr(item, "fixturenames", ()):
            with listening(self._session):
                yield
            if wrong:
                # Not before the other plugins have set the test up: their teardown relies on that.
                pytest.fail(wrong, pytrace=False)
            return
        # For `leakcheck.check()` in the middle, what the test's fixtures hold is nothing that must be back.
        self._setup = Owner("the test's fixtures", stage="setup", ends_with_test=True)
        with self._session.owned_by(self._setup), listening(self._session):
            yield
        if wrong:
            pytest.fail(wrong, pytrace=False)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Yield what appears from here on is the call's."""
        with self._session.guarded():
            if has_own_setup(item):
                self._session.watch.phase("call")
            else:
                self._session.watch.attribute_births("call")
        with listening(self._session):
            yield

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Plan after which tests it is read what grows."""
        self._turns.plan(session.items)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
        """Yield the outermost part of the teardown; where another plugin runs the test, the verdict too."""
        with self._session.guarded():
            excused = read_markers(item).excused
            self._turns.ends(item, nextitem, judged=not excused)
            self._deferred.note(f"in {item.nodeid}")
            if has_own_teardown(item, nextitem, but=self):
                self._session.watch.phase("teardown", settings_later=True)
            else:
                self._session.watch.unread_phase("teardown")
            # Before an engine ends that is this test's own.
            self._session.watch.look_at_slots("call")
            allowed = ANYTHING if excused else None
            self._session.watch.used(self._fixtures.used_by(item), allowed=allowed)
        instance = getattr(item, "_instance", None)
        # Weakly, so that this function does not have it while it is judged.
        has_weak = instance is not None and type(instance).__weakrefoffset__
        self._instance = weakref.ref(instance) if has_weak else _nothing
        del instance
        with listening(self._session):
            yield
        if not self._owns_protocol:
            subjects = self._judge(item)
            item.stash[_PENDING] = subjects
            leaks = [subject for subject in subjects if is_bad(subject)]
            if leaks and self.settings.action == "fail":
                raise LeakFailure("\n".join(terminal.details(leak, self._config.get_verbosity()) for leak in leaks))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
        """Note what was raised; where another plugin runs the test, its teardown's report carries what was judged."""
        if call.excinfo is not None:
            hide_own_frames(call.excinfo.value)
        report = yield
        if call.excinfo is not None:
            self._raised.append(call.excinfo.value)
            if report.failed and self._session.is_open:
                self._note_out_of_memory(item, call.excinfo.value, report)
        if call.when == "teardown" and _PENDING in item.stash:
            subjects = item.stash[_PENDING]
            attach(report, subjects)
            if call.excinfo is not None and isinstance(call.excinfo.value, LeakFailure) and report.failed:
                leaks = [subject for subject in subjects if is_bad(subject)]
                verbosity = self._config.get_verbosity()
                texts = [terminal.details(leak, verbosity) for leak in leaks]
                report.longrepr = shown(item, terminal.headline(leaks[0]), texts)
            for subject in subjects:
                report.user_properties += [("leakcheck", terminal.line(subject, found)) for found in subject.findings]
            del item.stash[_PENDING]
        return report

    def _note_out_of_memory(self, item: pytest.Item, error: BaseException, report: Any) -> None:
        """Say of a test that ends with such an error who held the memory, while its frames still have what they had."""
        with self._session.guarded():
            found = self._session.watch.out_of_memory.read(error, self._results.snapshots, item.nodeid)
            if found is not None:
                self._out_of_memory = found
                lines = map(one_line, out_of_memory_lines(found))
                report.sections.append((f"leakcheck: {TITLE.lower()}", "\n".join(lines)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what was judged, here or in a worker."""
        self._results.add(attached(report))

    @pytest.hookimpl(trylast=True)
    def pytest_warning_recorded(self, warning_message: Any) -> None:
        """Pytest keeps every warning for the session's summary, and each would keep the object that it is about."""
        warning_message.source = None

    def pytest_enter_pdb(self) -> None:
        """Somebody looks at the test in a debugger, which then holds its frames."""
        self._debugged = True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """Yield a fixture of a wider scope owns what its setup makes, whether it succeeds or not."""
        if fixturedef.scope == "function" or not self._session.is_open:
            return (yield)
        owner = FixtureOwner(fixturedef, request)
        try:
            with self._session.owned_by(owner):
                return (yield)
        finally:
            owner.was_set_up()
            self._fixtures.add(fixturedef, owner)
            # Called after the teardown of all that depends on the fixture, and before its own.
            fixturedef.addfinalizer(functools.partial(self._ending, owner))

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Note that its scope has ended: it is judged once the teardown is over."""
        if fixturedef.scope != "function":
            with self._session.guarded():
                self._deferred.note(f"when {fixture_name(fixturedef)} ended")
        self._fixtures.end(fixturedef)

    def _ending(self, owner: Owner) -> None:
        with self._session.guarded():
            self._session.watch.ending(owner)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Attribute threads, descriptors and levels, too, to a stage of a test."""
        self._session.watch.full_phase(self._session.watch.stage_now)
        with contextlib.ExitStack() as stack:
            if self._records is not None:
                stack.enter_context(self._records.record(name, self._spent))
            stack.enter_context(stage(name))
            try:
                yield
            finally:
                self._session.watch.full_phase(self._session.watch.stage_now)

    @contextlib.contextmanager
    def stage_of(self, engine: object, name: str) -> Iterator[None]:
        """Look at a stage of an engine's for what it keeps of each inference."""
        self._session.has_stages = True
        with self._session.guarded():
            self._session.engines.before(name, engine)
        self._session.sleeps.engine = engine
        try:
            with self.stage(name):
                label = self._session.watch.stage_now
                yield
        finally:
            self._session.sleeps.engine = None
        with self._session.guarded():
            self._session.engines.after(name, engine, label)

    def check(self) -> tuple[Finding, ...]:
        """Judge in the middle of a test what was made since its call began.

        Raises:
            LeakFailure: something is not back, and a leak fails; it is one of the test, whoever catches this.
        """
        verdict = self._session.watch.check()
        subject = self._results.subject("the test so far", verdict.findings)
        if is_bad(subject) and self.settings.action == "fail":
            self._checked.add(verdict)
            raise LeakFailure(terminal.details(subject, self._config.get_verbosity()))
        return subject.findings

    def _let_go(self) -> None:
        """Drop what pytest holds of a suspect test for what it has still to report."""
        release_warnings()
        clear_unreported(self._config)
        empty_instance(self._instance)

    def _judge(self, item: pytest.Item) -> list[Subject]:
        """Return the test's subject, then one for each fixture that ended and left something."""
        self._session.imports.active = False
        ended = self._fixtures.take_ended()
        release_test(item, owns_protocol=self._owns_protocol)
        clear_tracebacks([*self._raised, *errors_of_parameters(item)])
        self._raised.clear()
        try:
            excused = read_markers(item).excused
        except pytest.UsageError as error:
            return [Subject(id=item.nodeid, outcome="error", reason=str(error))]
        own_setup = [] if self._setup is None else [self._setup]
        verdict = Verdict()
        heap = self._session.watch.heap = self._heaps.file(item.nodeid) if not (excused or self._debugged) else None
        # A time limit for the test may pass while it is judged, and is raised here: the test is over.
        with self._session.guarded((Exception, pytest.fail.Exception)):
            self._has_judged = True
            verdict = self._session.watch.end([*own_setup, *ended], let_go=self._let_go, hints=tuple(hints(item)))
            self._deferred.note(f"in {item.nodeid}")
        of_engines, unjudged = self._session.take_of_engines(verdict.findings)
        not_measured = (*verdict.not_measured, *unjudged)
        if self._session.failure:
            return [self._not_judged(item)]
        later = sum(
            (verdict.unproven_of_owners.get(owner.label, DeferredRemedies()) for owner in own_setup), verdict.unproven
        )
        module = item.nodeid.partition("::")[0]
        if excused or self._debugged:
            reason = excused or "a debugger was entered, which holds the test's frames"
            own = Subject(id=item.nodeid, outcome="skipped", reason=reason)
        else:
            of_setup = [finding for owner in own_setup for finding in verdict.of_owners.get(owner.label, ())]
            missing = self._checked.missing_from(verdict)
            held = [*verdict.findings, *of_setup]
            watch, when = self._session.watch, f"in {item.nodeid}"
            held = self._deferred.news(
                held, later, when, module, watch.tolerance, swept=verdict.swept, is_held=watch.are_held
            )
            back = verdict.collected
            told = [] if back is None or self._cycles is None else [back]
            own = self._results.subject(item.nodeid, [*held, *missing, *of_engines, *told])
            outcome, reason = judged_as(own.outcome, not_measured) if not_measured else (own.outcome, "")
            if outcome == "clean" and back is not None and not told:
                reason = back.message
            own = msgspec.structs.replace(own, outcome=outcome, reason=reason)
        self._deferred.add(own, later, module)
        if self._records is not None:
            not_measured = (*not_measured, *self._records.not_measured())
            own = msgspec.structs.replace(own, stages=tuple(self._records.stages))
            self._records.close()
        own = msgspec.structs.replace(own, not_measured=not_measured, out_of_memory=self._out_of_memory)
        grown = self._turns.judged(verdict, ended, self._session.watch.host_memory)
        of_turns = [self._results.subject(name, findings) for name, findings in grown]
        unread = self._turns.take_unread()
        of_turns += [Subject(id=SESSION, outcome="clean", not_measured=unread)] if unread else []
        subjects = [self._results.with_snapshot(own), *self._owner_subjects(verdict, ended), *of_turns]
        if heap is not None:
            self._heaps.settle(heap, any(map(is_bad, subjects)))
        return subjects

    def _not_judged(self, item: pytest.Item) -> Subject:
        """Return the subject of a test of which a reading failed; no error where that may be the test's own doing."""
        if not self._session.replaced:
            reason = f"lowtide could not judge this test: {self._session.failure}"
            return Subject(id=item.nodeid, outcome="error", reason=reason)
        what = f"what a test leaves with {first_of(self._session.replaced, 3)} replaced"
        missing = NotMeasured(what=what, why=self._session.failure)
        return Subject(id=item.nodeid, outcome="unsupported", reason=missing.why, not_measured=(missing,))

    def _owner_subjects(self, verdict: Verdict, ended: Sequence[FixtureOwner]) -> list[Subject]:
        subjects = []
        for owner in ended:
            name = f"{owner.name} ({owner.where})"
            if verdict.of_owners.get(owner.label) and owner.excused:
                subjects.append(Subject(id=name, outcome="skipped", reason=owner.excused))
            elif verdict.of_owners.get(owner.label):
                subjects.append(self._results.subject(name, verdict.of_owners[owner.label]))
                self._deferred.add(subjects[-1], verdict.unproven_of_owners.get(owner.label, DeferredRemedies()))
        return subjects


def _nothing() -> None:
    """Stands for a weak reference to what is gone."""


_PENDING = pytest.StashKey[Sequence[Subject]]()

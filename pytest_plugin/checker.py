"""`--leakcheck` at work: baselines, verdicts and reports around each test's protocol."""

from __future__ import annotations

import contextlib
import functools
import threading
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from _pytest.runner import call_and_report, show_test_item

import lowtide
from lowtide.leakcheck.baseline.import_watch import ImportWatch
from lowtide.leakcheck.baseline.owner_levels import ANYTHING
from lowtide.leakcheck.baseline.owners import Owner
from lowtide.leakcheck.baseline.readings import this_machine
from lowtide.leakcheck.findings.deferred_remedies import Unproven
from lowtide.leakcheck.suppressions.entries import SuppressionError, Suppressions, find, load, problems, shipped
from lowtide.leakcheck.watching.sleep_watch import SleepWatch
from lowtide.leakcheck.watching.watch import Policy, Verdict, Watch
from lowtide.probes.device.driver import find_driver
from lowtide.probes.stages import Stage, listening, stage
from lowtide.pytest_plugin import terminal
from lowtide.pytest_plugin.checked import CheckedLeaks
from lowtide.pytest_plugin.failures import LeakFailure, fail_report, is_strict_xpass
from lowtide.pytest_plugin.proven import Proven, proven_as_json, proven_from_json, retell, with_proven
from lowtide.pytest_plugin.retention import (
    clear_tracebacks,
    clear_unreported,
    empty_instance,
    errors_of_parameters,
    hints,
    release_test,
    release_warnings,
)
from lowtide.pytest_plugin.scopes import FixtureOwner, has_own_setup
from lowtide.pytest_plugin.settings import Settings, read_markers
from lowtide.pytest_plugin.spent import Spent
from lowtide.pytest_plugin.stage_records import MOST_STAGES, StageRecords
from lowtide.reports.folder import write_folder
from lowtide.reports.outcomes import judged_as
from lowtide.reports.schema import Finding, NotMeasured, Report, ReportError, Subject

_SUBJECTS = "lowtide_subjects"
"""The attribute under which a test's report carries what was judged, as JSON, also from an xdist worker."""


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
        worker = getattr(config, "workerinput", None)
        self._is_worker = worker is not None
        workers = int(worker["workercount"]) if worker is not None else _workers(config)
        self.shares_card = workers > 1
        self.watch = Watch(
            Policy(
                tolerance=self.settings.tolerance,
                settle=self.settings.settle,
                stacks=self.settings.stacks,
                remedies="later" if self.settings.remedies else "never",
                card=self.settings.device != "cpu",
                warm_up=_warm_up(self.settings),
                driver=not self.shares_card,
                growth=self.settings.growth,
                budget=self.settings.budget,
                # It puts them back after each test.
                warnings_filters=not config.pluginmanager.has_plugin("warnings"),
            )
        )
        if self.settings.device == "cuda":
            _insist_on_a_card()
        self._spent = Spent()
        self._imports = ImportWatch(self._import_entered, self._import_left)
        self._is_open = self._has_judged = False
        # Whether a failed test can end the session.
        self._may_stop = bool(config.getoption("maxfail", 0) or config.getoption("stepwise", False))
        self._failure = ""
        self._owns_protocol = False
        self._owners: dict[int, FixtureOwner] = {}
        self._ended: list[FixtureOwner] = []
        self._debugged = False
        self._setup: Owner | None = None
        self._records: StageRecords | None = None
        self._raised: list[BaseException] = []
        self._instance: Callable[[], object] = _nothing
        self._checked = CheckedLeaks()
        self._suppressions = _suppressions(config, self.settings.suppressions)
        self._used: set[str] = set()
        self._problems: tuple[str, ...] = ()
        self._stages: list[str] = []
        self._sleeps = SleepWatch()
        self._unproven: list[tuple[str, Unproven]] = []
        self.subjects: list[Subject] = []

    # The session.

    def pytest_report_header(self) -> list[str]:
        """What is measured here, and what cannot be."""
        return terminal.header(self.settings, shares_card=self.shares_card)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        """Refuse markers that make no sense before anything runs."""
        if self._is_worker:
            return  # an error here ends the worker without a word: each such test fails instead
        for item in items:
            read_markers(item)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """After the last teardown: what `-x` left to it is judged here, and the report written."""
        if self._is_open:
            leftovers = self._take_ended()
            if leftovers:
                self._failure = ""
                with self._guarded():
                    self._record(self._owner_subjects(self.watch.end(leftovers), leftovers))
                if self._failure:
                    reason = f"lowtide could not judge what ended with the session: {self._failure}"
                    self._record([Subject(id="the end of the session", outcome="error", reason=reason)])
            proven = self._prove(session)
            self._close()
        else:
            proven = []
        if self._is_worker:
            self._config.workeroutput["lowtide_proven"] = proven_as_json(proven)  # type: ignore[attr-defined]
            self._config.workeroutput["lowtide"] = _encode(self.subjects)  # type: ignore[attr-defined]
            self._config.workeroutput["lowtide_used"] = sorted(self._used)  # type: ignore[attr-defined]
            self._config.workeroutput["lowtide_spent"] = self._spent.both()  # type: ignore[attr-defined]
            return
        self._tell_proven(proven)
        if self.subjects:
            self._problems = self._suppression_problems()
        if self._problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.settings.action == "fail" and session.exitstatus == pytest.ExitCode.OK and self._open_leaks():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._write_report()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """An xdist worker is done: take what it judged outside of tests."""
        output = getattr(node, "workeroutput", None) or {}
        self._used |= set(output.get("lowtide_used", ()))
        self._spent.add(output.get("lowtide_spent", (0.0, 0.0)))
        self.subjects += [subject for subject in _decode(output.get("lowtide", "[]")) if subject not in self.subjects]
        self._tell_proven(proven_from_json(output.get("lowtide_proven", "[]")))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line per leak."""
        terminal.summary(terminalreporter, self.subjects, self.settings, self._problems, self._spent)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Nothing of the watch stays behind, whatever ended the session."""
        self._close()

    def _prove(self, session: pytest.Session) -> list[Proven]:
        """Try what gives the leaks back, now that no test follows; the subjects with what is known then."""
        unproven, self._unproven = self._unproven, []
        if not unproven or session.exitstatus == pytest.ExitCode.INTERRUPTED:
            return []
        self._failure = ""
        found: list[dict[str, Finding]] = []
        with self._spent.on_remedies(), self._guarded():
            found = self.watch.prove([later for _, later in unproven])
        if self._failure:
            reason = f"lowtide could not try what gives the leaks back: {self._failure}"
            self._record([Subject(id="the end of the session", outcome="error", reason=reason)])
        return [Proven(name, findings) for (name, _), findings in zip(unproven, found, strict=False)]

    def _tell_proven(self, proven: Sequence[Proven]) -> None:
        """Puts what was proven into the subjects, and into what the terminal has still to show."""
        told = with_proven(self.subjects, proven)
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            texts: dict[str, str] = {}
            for before, after in zip(self.subjects, told, strict=True):
                if before is not after and _is_bad(before):
                    verbosity = self._config.get_verbosity()
                    texts[terminal.details(before, verbosity)] = terminal.details(after, verbosity)
                    texts[terminal.headline(before)] = terminal.headline(after)
            retell(reporter.stats, texts)
        self.subjects = told

    def _close(self) -> None:
        self._imports.remove()
        self.watch.close()
        self._is_open = False

    def _write_report(self) -> None:
        if self.settings.report is None:
            return
        driver = find_driver()
        try:
            report = Report(
                schema="lowtide-report/1",
                version=lowtide.__version__,
                created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                command=" ".join(["pytest", *self._config.invocation_params.args]),
                machine=this_machine(driver),
                subjects=tuple(self.subjects),
            )
            write_folder(report, self.settings.report)
        except ReportError as error:
            raise pytest.UsageError(f"--leakcheck-report: {error}") from None
        finally:
            driver.close()

    # One test.

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a test as pytest does, but report its call only when it is known what it left.

        So a leak is a failure of its test, counted once everywhere. Where another plugin runs the test (to run it
        again, or in a child process), or a debugger may be entered, the verdict is an error of the teardown instead.
        """
        if item.config.getoption("usepdb", False):
            return None
        for plugin in item.ihook.pytest_runtest_protocol.get_hookimpls()[::-1]:
            if plugin.wrapper or plugin.hookwrapper or plugin.plugin is self or plugin.plugin_name == "runner":
                continue
            arguments = {"item": item, "nextitem": nextitem}
            if plugin.function(**{name: arguments[name] for name in plugin.argnames}) is not None:
                return True
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self._owns_protocol = True
        try:
            self._run(item, nextitem)
        finally:
            self._owns_protocol = False
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, item: Any, nextitem: pytest.Item | None) -> None:
        """As `_pytest.runner.runtestprotocol`, with the reports of a passed call and of the teardown held back."""
        log = item.ihook.pytest_runtest_logreport
        if hasattr(item, "_request") and not item._request:
            item._initrequest()
        call = None
        try:
            setup = call_and_report(item, "setup", log=True)
            if setup.passed:
                setup_only = item.config.getoption("setuponly", False)
                if item.config.getoption("setupshow", False):
                    show_test_item(item, add_space=not setup_only)
                if not setup_only:
                    call = call_and_report(item, "call", log=False)
                    # The session may be about to stop, and then everything must be torn down with this test.
                    if not self._is_held(call):
                        log(report=call)
            if item.session.shouldfail or item.session.shouldstop:
                nextitem = None
            teardown = call_and_report(item, "teardown", log=False, nextitem=nextitem)
        except BaseException:
            # An interrupt during the teardown: what is known of the test itself must not be lost.
            if call is not None and self._is_held(call):
                log(report=call)
            raise
        finally:
            if hasattr(item, "_request"):
                item._request = False
                item.funcargs = None
        # Asked before the verdict turns a pass into a failure.
        was_held = call is not None and self._is_held(call)
        subjects = self._judge(item)
        subjects = self._deliver(item, subjects, setup, call, teardown)
        if call is not None and was_held:
            log(report=call)
        setattr(teardown, _SUBJECTS, _encode(subjects))
        log(report=teardown)

    def _is_held(self, call: Any) -> bool:
        """Whether a call's report waits for the verdict: all but a failure that may end the session."""
        return bool(call.passed or is_strict_xpass(call) or not self._may_stop)

    def _deliver(
        self, item: pytest.Item, subjects: Sequence[Subject], setup: Any, call: Any, teardown: Any
    ) -> list[Subject]:
        """Make the verdict part of the test's reports; the subjects, with what was expected to leak marked so."""
        own, of_owners = subjects[0], subjects[1:]
        failing = self.settings.action == "fail"
        if _is_bad(own):
            text = terminal.details(own, self._config.get_verbosity())
            if call is not None and failing and (call.passed or is_strict_xpass(call)):
                fail_report(item, call, terminal.headline(own), text)
            elif failing and _was_skipped(setup, call):
                fail_report(item, teardown, terminal.headline(own), text)
            else:
                (call or setup).sections.append(("leakcheck", text))
        for subject in of_owners:
            if _is_bad(subject):
                text = terminal.details(subject, self._config.get_verbosity())
                if failing and not teardown.failed:
                    fail_report(item, teardown, terminal.headline(subject), text)
                else:
                    teardown.sections.append(("leakcheck", text))
        expected = getattr(call, "wasxfail", None)
        if expected is not None:
            own = _expected_to_leak(own, expected)
        for subject in (own, *of_owners):
            teardown.user_properties += [("leakcheck", terminal.line(subject, finding)) for finding in subject.findings]
        return [own, *of_owners]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        """The baseline, before anything of the test is set up."""
        if not self._is_open:
            self.watch.open()
            self._imports.install()
            self._is_open = True
        self._debugged = False
        self._failure = ""
        self._checked.clear()
        self._setup = None
        self._records = StageRecords(card=self.settings.device != "cpu") if self.settings.report is not None else None
        wrong = ""
        tolerance, judged = None, True
        try:
            markers = read_markers(item)
            judged = not markers.excused
            tolerance = None if self.settings.tolerance_is_final else markers.tolerance
        except pytest.UsageError as error:
            wrong = str(error)
        with self._guarded():
            module = item.nodeid.partition("::")[0]
            self.watch.begin(
                "setup", tolerance, module=module, subject=item.nodeid, judged=judged, follows=self._has_judged
            )
            self._imports.active = True
        if "leakcheck" not in getattr(item, "fixturenames", ()):
            with listening(self):
                yield
            if wrong:
                # Not before the other plugins have set the test up: their teardown relies on that.
                pytest.fail(wrong, pytrace=False)
            return
        # For `leakcheck.check()` in the middle, what the test's fixtures hold is nothing that must be back.
        self._setup = Owner("the test's fixtures", stage="setup")
        with self._owned_by(self._setup), listening(self):
            yield
        if wrong:
            pytest.fail(wrong, pytrace=False)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """What appears from here on is the call's."""
        with self._guarded():
            if has_own_setup(item):
                self.watch.phase("call")
            else:
                self.watch.stage("call")
        with listening(self):
            yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        """The outermost part of the teardown; where another plugin runs the test, the verdict too."""
        with self._guarded():
            self.watch.phase("teardown", settings_later=True)
            self.watch.used(self._owners_used_by(item), allowed=ANYTHING if read_markers(item).excused else None)
        instance = None if self._owns_protocol else getattr(item, "_instance", None)
        # Weakly, so that this function does not have it while it is judged.
        has_weak = instance is not None and type(instance).__weakrefoffset__
        self._instance = weakref.ref(instance) if has_weak else _nothing
        del instance
        with listening(self):
            yield
        if not self._owns_protocol:
            subjects = self._judge(item)
            item.stash[_PENDING] = _encode(subjects)
            leaks = [subject for subject in subjects if _is_bad(subject)]
            if leaks and self.settings.action == "fail":
                raise LeakFailure("\n".join(terminal.details(leak, self._config.get_verbosity()) for leak in leaks))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
        """Note what was raised; where another plugin runs the test, its teardown's report carries what was judged."""
        report = yield
        if call.excinfo is not None:
            self._raised.append(call.excinfo.value)
        if call.when == "teardown" and _PENDING in item.stash:
            setattr(report, _SUBJECTS, item.stash[_PENDING])
            for subject in _decode(item.stash[_PENDING]):
                report.user_properties += [("leakcheck", terminal.line(subject, found)) for found in subject.findings]
            del item.stash[_PENDING]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what was judged, here or in a worker."""
        if hasattr(report, _SUBJECTS):
            self.subjects += _decode(getattr(report, _SUBJECTS))

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
        """A fixture of a wider scope owns what its setup makes, whether it succeeds or not."""
        if fixturedef.scope == "function" or not self._is_open:
            return (yield)
        owner = FixtureOwner(fixturedef, request)
        try:
            with self._owned_by(owner):
                return (yield)
        finally:
            owner.was_set_up()
            self._owners[id(fixturedef)] = owner
            # Called after the teardown of all that depends on the fixture, and before its own.
            fixturedef.addfinalizer(functools.partial(self._ending, owner))

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Its scope has ended: it is judged once the teardown is over."""
        owner = self._owners.pop(id(fixturedef), None)
        if owner is not None:
            self._ended.append(owner)

    def _ending(self, owner: Owner) -> None:
        with self._guarded():
            self.watch.ending(owner)

    def _owners_used_by(self, item: Any) -> list[Owner]:
        """The fixtures of a wider scope that a test uses, by whatever way it asked for them."""
        fixtures = getattr(getattr(item, "_request", None), "_fixture_defs", {})
        return [self._owners[id(fixture)] for fixture in fixtures.values() if id(fixture) in self._owners]

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage of a test, with threads, descriptors and levels attributed to it as well."""
        self.watch.full_phase(self.watch.stage_now)
        with contextlib.ExitStack() as stack:
            if self._records is not None:
                stack.enter_context(self._records.record(name, self._spent))
            stack.enter_context(stage(name))
            try:
                yield
            finally:
                self.watch.full_phase(self.watch.stage_now)

    def check(self) -> tuple[Finding, ...]:
        """Judge in the middle of a test what was made since its call began.

        Raises:
            LeakFailure: something is not back, and a leak fails; it is one of the test, whoever catches this.
        """
        verdict = self.watch.check()
        subject = self._subject("the test so far", verdict.findings)
        if _is_bad(subject) and self.settings.action == "fail":
            self._checked.add(verdict)
            raise LeakFailure(terminal.details(subject, self._config.get_verbosity()))
        return subject.findings

    def stage_entered(self, stage: Stage) -> None:
        """An engine says where it is in its life."""
        if stage.thread == _MAIN_THREAD:
            self._stages.append(self.watch.stage_now)
            with self._guarded():
                self.watch.stage("/".join(stage.path), again=True)
                self._sleeps.entered(stage)

    def stage_left(self, stage: Stage, error: BaseException | None) -> None:
        """And that it is there no more."""
        if stage.thread == _MAIN_THREAD:
            with self._guarded():
                self.watch.stage(self._stages.pop())
                self._sleeps.left(stage, error)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """A reading that fails must not keep a test from being set up or torn down; its verdict says so."""
        try:
            with self._spent.on_judging():
                yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this checker's
            place = traceback.extract_tb(error.__traceback__)[-1]
            self._failure = self._failure or f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"

    def _import_entered(self, owner: Owner) -> None:
        with self._spent.on_judging():
            self.watch.enter(owner)

    def _import_left(self) -> None:
        with self._spent.on_judging():
            self.watch.leave()

    @contextlib.contextmanager
    def _owned_by(self, owner: Owner) -> Iterator[None]:
        """What appears in the block is the owner's."""
        entered = False
        with self._guarded():
            self.watch.enter(owner)
            entered = True
        try:
            yield
        finally:
            if entered:
                with self._guarded():
                    self.watch.leave()

    def _let_go(self) -> None:
        """Drop what pytest holds of a suspect test for what it has still to report."""
        release_warnings()
        clear_unreported(self._config)
        empty_instance(self._instance)

    def _take_ended(self) -> list[FixtureOwner]:
        ended, self._ended = self._ended, []
        return ended

    def _judge(self, item: pytest.Item) -> list[Subject]:
        """The test's subject, then one for each fixture that ended and left something."""
        self._imports.active = False
        ended = self._take_ended()
        release_test(item, owns_protocol=self._owns_protocol)
        empty_instance(self._instance)
        clear_tracebacks([*self._raised, *errors_of_parameters(item)])
        self._raised.clear()
        try:
            excused = read_markers(item).excused
        except pytest.UsageError as error:
            return [Subject(id=item.nodeid, outcome="error", reason=str(error))]
        own_setup = [] if self._setup is None else [self._setup]
        verdict = Verdict()
        with self._guarded():
            self._has_judged = True
            verdict = self.watch.end([*own_setup, *ended], let_go=self._let_go, hints=tuple(hints(item)))
        dangling = self._sleeps.take()
        if self._failure:
            reason = f"lowtide could not judge this test: {self._failure}"
            return [Subject(id=item.nodeid, outcome="error", reason=reason)]
        if excused or self._debugged:
            reason = excused or "a debugger was entered, which holds the test's frames"
            own = Subject(id=item.nodeid, outcome="skipped", reason=reason)
        else:
            of_setup = [finding for owner in own_setup for finding in verdict.of_owners.get(owner.label, ())]
            missing = self._checked.missing_from(verdict)
            own = self._subject(item.nodeid, [*verdict.findings, *of_setup, *missing, *dangling])
            outcome, reason = judged_as(own.outcome, verdict.not_measured)
            own = msgspec.structs.replace(own, outcome=outcome, reason=reason)
        later = sum((verdict.unproven_of_owners.get(owner.label, Unproven()) for owner in own_setup), verdict.unproven)
        self._put_off(own, later)
        own = msgspec.structs.replace(own, not_measured=verdict.not_measured)
        if self._records is not None:
            own = msgspec.structs.replace(
                own,
                stages=tuple(self._records.stages),
                not_measured=(*verdict.not_measured, *_left_out(self._records)),
            )
            self._records.close()
        return [own, *self._owner_subjects(verdict, ended)]

    def _owner_subjects(self, verdict: Verdict, ended: Sequence[FixtureOwner]) -> list[Subject]:
        subjects = []
        for owner in ended:
            name = f"{owner.name} ({owner.where})"
            if verdict.of_owners.get(owner.label) and owner.excused:
                subjects.append(Subject(id=name, outcome="skipped", reason=owner.excused))
            elif verdict.of_owners.get(owner.label):
                subjects.append(self._subject(name, verdict.of_owners[owner.label]))
                self._put_off(subjects[-1], verdict.unproven_of_owners.get(owner.label, Unproven()))
        return subjects

    def _put_off(self, subject: Subject, unproven: Unproven) -> None:
        """Remember what is to be tried at the end: for what fails or warns, and for nothing that is known."""
        told = [part for item in subject.findings for part in (item, *item.parts)]
        later = unproven.only(frozenset(part.fingerprint for part in told if part.suppressed_by is None))
        if later.tensors or later.items:
            self._unproven.append((subject.id, later))

    def _subject(self, name: str, findings: Sequence[Finding]) -> Subject:
        findings = self._suppressed(findings)
        leaks = any(finding.suppressed_by is None for finding in findings)
        return Subject(id=name, outcome="leak" if leaks else "clean", findings=tuple(findings))

    def _suppressed(self, findings: Sequence[Finding]) -> Sequence[Finding]:
        applied = self._suppressions.apply(findings, date.today())
        self._used |= applied.used
        return applied.findings

    def _suppression_problems(self) -> tuple[str, ...]:
        """Expired and replaced entries, and after a run of everything the unused ones too."""
        findings = [finding for subject in self.subjects for finding in subject.findings]
        ran_all = self._ran_everything()
        return problems(self._suppressions.entries, self._used, date.today(), findings, ran_all=ran_all)

    def _ran_everything(self) -> bool:
        """Whether no test was left out of this run, as far as the command line tells."""
        option = self._config.option
        narrowed = any(getattr(option, name, None) for name in ("keyword", "markexpr", "lf", "deselect", "stepwise"))
        return not narrowed and not any("::" in text or text.endswith(".py") for text in self._config.args)

    def _open_leaks(self) -> list[Subject]:
        return [subject for subject in self.subjects if _is_bad(subject)]

    def _record(self, subjects: Sequence[Subject]) -> None:
        self.subjects += subjects


def _nothing() -> None:
    """Stands for a weak reference to what is gone."""


def _warm_up(settings: Settings) -> Literal["now", "first-use", "off"]:
    """When a card is used for the first time: a run that insists on one has it from the beginning."""
    if not settings.warmup or settings.device == "cpu":
        return "off"
    return "now" if settings.device == "cuda" else "first-use"


_PENDING = pytest.StashKey[str]()
_MAIN_THREAD = threading.main_thread().ident


def _is_bad(subject: Subject) -> bool:
    """Whether it left something that is not known, or could not be judged."""
    return subject.outcome == "error" or any(finding.suppressed_by is None for finding in subject.findings)


def _left_out(records: StageRecords) -> tuple[NotMeasured, ...]:
    if not records.left_out:
        return ()
    return (
        NotMeasured(what=f"{records.left_out} further stages", why=f"a test's first {MOST_STAGES} stages are recorded"),
    )


def _expected_to_leak(subject: Subject, reason: str) -> Subject:
    """The same, where the test is marked as expected to fail."""
    findings = tuple(
        msgspec.structs.replace(finding, suppressed_by=finding.suppressed_by or f"xfail: {reason}")
        for finding in subject.findings
    )
    outcome, unseen = judged_as("clean", subject.not_measured)
    return msgspec.structs.replace(subject, findings=findings, outcome=outcome, reason=unseen or subject.reason)


def _was_skipped(setup: Any, call: Any) -> bool:
    """Whether a test was skipped, before or in its call; one that failed as expected was not."""
    last = setup if call is None else call
    return bool(last.skipped and not hasattr(last, "wasxfail"))


def _encode(subjects: Sequence[Subject]) -> str:
    return msgspec.json.encode(list(subjects)).decode()


def _decode(text: str) -> list[Subject]:
    return msgspec.json.decode(text, type=list[Subject])


def _suppressions(config: pytest.Config, given: Path | None) -> Suppressions:
    """The user's entries, then the shipped ones.

    Raises:
        pytest.UsageError: a file cannot be used.
    """
    try:
        path = given or find(config.rootpath)
        own = load(path).entries if path is not None else ()
    except SuppressionError as error:
        raise pytest.UsageError(f"--leakcheck-suppressions: {error}") from None
    return Suppressions((*own, *shipped().entries))


def _workers(config: pytest.Config) -> int:
    """How many xdist workers this run has; 1 without."""
    return len(config.getoption("tx", None) or ()) or 1


def _insist_on_a_card() -> None:
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError(
            "--leakcheck-device cuda: torch sees no card here; use auto, or cpu to judge the host only"
        )

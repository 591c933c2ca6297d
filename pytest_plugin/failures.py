"""One test run as pytest runs it, with its reports held back until what it left is judged; a leak makes it fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from _pytest import runner
from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback
from _pytest.outcomes import Failed
from _pytest.runner import call_and_report, show_test_item
from _pytest.skipping import xfailed_key

from lowtide.probes.allocation_stacks import OWN_FOLDERS
from lowtide.pytest_plugin import terminal
from lowtide.pytest_plugin.results import attach, is_bad
from lowtide.reports.outcomes import judged_as
from lowtide.reports.schema import Subject

_CAUSE, _CONTEXT = (vars(BaseException)[name].__get__ for name in ("__cause__", "__context__"))


class LeakFailure(Failed):
    """A test, or a fixture that ended with it, left something behind; the message says what."""

    def __init__(self, message: str) -> None:
        super().__init__(message, pytrace=False)


def hide_own_frames(error: BaseException) -> None:
    """Have pytest leave the checker's frames out of what it shows of an error, and of those that have led to it."""
    met, waiting = set[int](), [error]
    for each in waiting:
        met.add(id(each))
        traceback = each.__traceback__
        while traceback is not None:
            frame, traceback = traceback.tb_frame, traceback.tb_next
            if frame.f_code.co_filename.startswith(OWN_FOLDERS):
                frame.f_globals["__tracebackhide__"] = True
        # As the interpreter has them, whatever the program's class says.
        before = (_CAUSE(each), _CONTEXT(each))
        waiting += [other for other in before if other is not None and id(other) not in met]


def is_strict_xpass(report: Any) -> bool:
    """Return whether a call passed although its test is marked, strictly, as expected to fail."""
    return bool(report.failed and isinstance(report.longrepr, str) and report.longrepr.startswith("[XPASS(strict)]"))


def fail_report(item: pytest.Item, report: Any, headline: str, text: str) -> None:
    """Make a report that passed or was skipped one of a failure, as if the test had raised `LeakFailure`.

    A test that is marked as expected to fail has then failed as expected.
    """
    xfailed = item.stash.get(xfailed_key, None)
    expected = report.when == "call" and xfailed is not None and not item.config.getoption("runxfail", False)
    if expected and xfailed is not None and _expects_a_leak(xfailed.raises):
        report.outcome = "skipped"
        report.wasxfail = xfailed.reason
    else:
        report.outcome = "failed"
        vars(report).pop("wasxfail", None)
    report.longrepr = shown(item, headline, [text])


def shown(item: pytest.Item, headline: str, texts: Sequence[str]) -> ReprExceptionInfo:
    """Return what is shown of a failure, as pytest renders an exception.

    So the summary's line has the headline, also from a worker, and each text can be replaced by what is known at the
    end of the session.
    """
    path, line, _ = item.location
    return ReprExceptionInfo(
        reprtraceback=ReprTraceback([ReprEntryNative([text + "\n"]) for text in texts], None, style="native"),
        reprcrash=ReprFileLocation(path, (line or 0) + 1, headline),
    )


def _expects_a_leak(raises: Any) -> bool:
    """Return whether `xfail(raises=…)` covers a leak: without it, every failure is expected."""
    if raises is None:
        return True
    if hasattr(raises, "matches"):  # pytest.RaisesExc and the like
        return bool(raises.matches(LeakFailure("")))
    return issubclass(LeakFailure, raises)


def run_by_another(item: pytest.Item, nextitem: pytest.Item | None, run: Callable[[], None], *, but: object) -> bool:
    """Return whether another plugin than `but` and pytest's own runs the test, and has now.

    Args:
        item: the test.
        nextitem: the one after it, if there is one.
        run: runs it for a plugin that only hands it on to pytest.
        but: the plugin that asks.
    """
    for plugin in item.ihook.pytest_runtest_protocol.get_hookimpls()[::-1]:
        if plugin.wrapper or plugin.hookwrapper or plugin.plugin is but or plugin.plugin_name == "runner":
            continue
        arguments = {"item": item, "nextitem": nextitem}
        with _handed_on_to(run, item, plugin.function.__module__.partition(".")[0]):
            if plugin.function(**{name: arguments[name] for name in plugin.argnames}) is not None:
                return True
    return False


@contextlib.contextmanager
def _handed_on_to(run: Callable[[], None], item: pytest.Item, package: str) -> Iterator[None]:
    """Run in the block what a plugin hands on to pytest by `run`, unless its package has noted something at the test.

    `flaky` hands on every test, and notes at those that it runs again how often: `_flaky_max_runs`.
    """
    original, before = runner.pytest_runtest_protocol, _noted(item)

    def handed_on(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        is_marked = item.get_closest_marker(package) is not None or any(package in name for name in vars(item))
        if is_marked or _noted(item) != before:
            return original(item, nextitem)
        run()
        return True

    runner.pytest_runtest_protocol = handed_on
    try:
        yield
    finally:
        runner.pytest_runtest_protocol = original


def _noted(item: pytest.Item) -> dict[str, int]:
    """Return what is noted at a test, by identity: the values of its fixtures are neither kept nor compared."""
    return {name: id(value) for name, value in vars(item).items()}


def run_test(
    item: Any, nextitem: pytest.Item | None, judge: Callable[[], Sequence[Subject]], *, may_stop: bool, fails: bool
) -> None:
    """Do as `_pytest.runner.runtestprotocol`, with the reports of a passed call and of the teardown held back.

    Args:
        item: the test.
        nextitem: the one after it, if there is one.
        judge: called after the teardown; the test's subject, then those of fixtures that ended.
        may_stop: whether a failed test can end the session.
        fails: whether a leak makes its test fail.
    """
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
                if not _is_held(call, may_stop):
                    log(report=call)
        if item.session.shouldfail or item.session.shouldstop:
            nextitem = None
        teardown = call_and_report(item, "teardown", log=False, nextitem=nextitem)
    except BaseException:
        # An interrupt during the teardown: what is known of the test itself must not be lost.
        if call is not None and _is_held(call, may_stop):
            log(report=call)
        raise
    finally:
        if hasattr(item, "_request"):
            item._request = False
            item.funcargs = None
    # Asked before the verdict turns a pass into a failure.
    was_held = call is not None and _is_held(call, may_stop)
    subjects = _deliver(item, judge(), setup, call, teardown, fails=fails)
    if call is not None and was_held:
        log(report=call)
    attach(teardown, subjects)
    log(report=teardown)


def _is_held(call: Any, may_stop: bool) -> bool:
    """Return whether a call's report waits for the verdict: all but a failure that may end the session."""
    return bool(call.passed or is_strict_xpass(call) or not may_stop)


def _deliver(
    item: pytest.Item, subjects: Sequence[Subject], setup: Any, call: Any, teardown: Any, *, fails: bool
) -> list[Subject]:
    """Make the verdict part of the test's reports; the subjects, with what was expected to leak marked so."""
    own, of_owners = subjects[0], subjects[1:]
    verbosity = item.config.get_verbosity()
    if is_bad(own):
        text = terminal.details(own, verbosity)
        if call is not None and fails and (call.passed or is_strict_xpass(call)):
            fail_report(item, call, terminal.headline(own), text)
        elif fails and _was_skipped(setup, call):
            fail_report(item, teardown, terminal.headline(own), text)
        else:
            (call or setup).sections.append(("leakcheck", text))
    for subject in of_owners:
        if is_bad(subject):
            text = terminal.details(subject, verbosity)
            if fails and not teardown.failed:
                fail_report(item, teardown, terminal.headline(subject), text)
            else:
                teardown.sections.append(("leakcheck", text))
    expected = getattr(call, "wasxfail", None)
    if expected is not None:
        own = _expected_to_leak(own, expected)
    for subject in (own, *of_owners):
        teardown.user_properties += [("leakcheck", terminal.line(subject, finding)) for finding in subject.findings]
    return [own, *of_owners]


def _expected_to_leak(subject: Subject, reason: str) -> Subject:
    """Return the same, where the test is marked as expected to fail."""
    findings = tuple(
        msgspec.structs.replace(finding, suppressed_by=finding.suppressed_by or f"xfail: {reason}")
        for finding in subject.findings
    )
    outcome, unseen = judged_as("clean", subject.not_measured)
    return msgspec.structs.replace(subject, findings=findings, outcome=outcome, reason=unseen or subject.reason)


def _was_skipped(setup: Any, call: Any) -> bool:
    """Return whether a test was skipped, before or in its call; one that failed as expected was not."""
    last = setup if call is None else call
    return bool(last.skipped and not hasattr(last, "wasxfail"))

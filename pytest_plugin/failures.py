"""How a leak makes its test fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback
from _pytest.outcomes import Failed
from _pytest.skipping import xfailed_key


class LeakFailure(Failed):
    """A test, or a fixture that ended with it, left something behind; the message says what."""

    def __init__(self, message: str) -> None:
        super().__init__(message, pytrace=False)


def is_strict_xpass(report: Any) -> bool:
    """Whether a call passed although its test is marked, strictly, as expected to fail."""
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
    """What is shown of a failure, as pytest renders an exception: so the summary's line has the headline, also from a
    worker, and each text can be replaced by what is known at the end of the session.
    """
    path, line, _ = item.location
    return ReprExceptionInfo(
        reprtraceback=ReprTraceback([ReprEntryNative([text + "\n"]) for text in texts], None, style="native"),
        reprcrash=ReprFileLocation(path, (line or 0) + 1, headline),
    )


def _expects_a_leak(raises: Any) -> bool:
    """Whether `xfail(raises=…)` covers a leak: without it, every failure is expected."""
    if raises is None:
        return True
    if hasattr(raises, "matches"):  # pytest.RaisesExc and the like
        return bool(raises.matches(LeakFailure("")))
    return issubclass(LeakFailure, raises)

"""Runs pytest in a process of its own, as a user of `--leakcheck` does, and says what came of each test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from lowtide.reports import schema

PLUGIN = "lowtide.pytest_plugin.plugin"

# Loaded in the inner run: what pytest was told of each phase of each test, and what it counted it as.
_RECORDER = """
import json
import os
from pathlib import Path

# Opened once: a test may replace what opens files.
_FILE = os.open(Path(__file__).with_name("phases.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
_write = os.write
_CONFIGS = []

def pytest_configure(config):
    _CONFIGS.append(config)

def pytest_runtest_logreport(report):
    (config,) = _CONFIGS
    if hasattr(config, "workerinput"):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    # Without pytest's terminal nobody says that a passed setup is not counted.
    unsaid = "" if report.passed and report.when != "call" else report.outcome, "", ""
    record = {
        "id": report.nodeid,
        "when": report.when,
        "outcome": report.outcome,
        "counted": (config.hook.pytest_report_teststatus(report=report, config=config) or unsaid)[0],
        "message": crash.message if crash is not None else str(report.longrepr or ""),
        "text": report.longreprtext,
        "properties": [list(pair) for pair in report.user_properties if isinstance(pair[1], str)],
    }
    _write(_FILE, (json.dumps(record) + "\\n").encode())
"""


@dataclass(frozen=True)
class Phase:
    """A report that pytest logged.

    Attributes:
        when: setup, call or teardown.
        outcome: passed, failed or skipped.
        counted: as what the summary counts it: passed, failed, error, skipped, xfailed, xpassed, rerun, or nothing.
        message: what stands behind the test in the short summary.
        text: what is printed of its failure.
        properties: its `user_properties`.
    """

    when: str
    outcome: str
    counted: str
    message: str
    text: str
    properties: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class InnerRun:
    """An inner run of pytest that is over.

    Attributes:
        code: its exit code.
        out: what it printed.
        err: what it printed to the standard error stream.
        folder: where it ran.
        phases: what was logged of each test, by its node id.
        report: the report of `--leakcheck-report`; None if there is none.
    """

    code: int
    out: str
    err: str
    folder: Path
    phases: Mapping[str, tuple[Phase, ...]]
    report: schema.Report | None

    def counted(self, test: str) -> str:
        """As what the summary counts a test: `passed`, `failed`, `passed error` where its teardown failed."""
        return " ".join(phase.counted for phase in self.phases[test] if phase.counted)

    def message(self, test: str) -> str:
        """What stands behind a test that failed."""
        return " ".join(phase.message for phase in self.phases[test] if phase.outcome == "failed")

    def subject(self, name: str) -> schema.Subject:
        """What the report says of a test or a fixture: the one subject whose id is, or begins with, `name`."""
        assert self.report is not None, self.out + self.err
        exact = [subject for subject in self.report.subjects if subject.id == name]
        (found,) = exact or [subject for subject in self.report.subjects if subject.id.startswith(f"{name} (")]
        return found

    def leaks(self, name: str) -> list[tuple[str, str]]:
        """The resource and stage of each finding of a subject."""
        return [(finding.resource, finding.stage) for finding in self.subject(name).findings]

    def is_clean(self, test: str) -> bool:
        """Whether a test was judged, and nothing was found."""
        subject = self.subject(test)
        return subject.outcome == "clean" and not subject.findings

    @property
    def blamed(self) -> list[str]:
        """All subjects with a leak."""
        assert self.report is not None, self.out + self.err
        return [subject.id for subject in self.report.subjects if subject.outcome == "leak"]

    @property
    def totals(self) -> dict[str, int]:
        """The numbers of pytest's last line, by their words in the singular."""
        summary = [line for line in self.out.splitlines() if re.search(r" in [\d.]+s", line)][-1]
        return {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", summary)}


RunInner = Callable[..., InnerRun]


@pytest.fixture(scope="session")
def run_inner(tmp_path_factory: pytest.TempPathFactory) -> RunInner:
    """Writes files into a new folder and runs pytest there, with one thread and every warning an error.

    `run_inner(files, *args)`: `files` is source text by name; with `leakcheck=True` (the default) the run has
    `--leakcheck`, writes a report, and settles for `settle` seconds (not long, because what leaks here moves no more;
    None leaves it to the settings); `cache=True` keeps pytest's cache plugin; `folder` is a folder of an earlier run to
    run in again, and `where` one below it; `using` names the plugins that are loaded beside
    pytest's own and lowtide's; `ends_by` is the signal that is to end it. A run that could not collect its tests, or
    that broke down, is an `AssertionError` with its output.
    """

    def run(
        files: Mapping[str, str],
        *args: str,
        leakcheck: bool = True,
        cache: bool = False,
        folder: Path | None = None,
        where: str = ".",
        using: Sequence[str] = (),
        settle: float | None = 0.05,
        ends_by: int = 0,
    ) -> InnerRun:
        place = folder or tmp_path_factory.mktemp("inner")
        record, report = place / "phases.jsonl", place / "report"
        record.unlink(missing_ok=True)
        settings = {} if "pyproject.toml" in files else {"pytest.ini": "[pytest]\n"}
        for name, text in {**settings, "inner_recorder.py": _RECORDER, **files}.items():
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        command = [sys.executable, "-m", "pytest", "--strict-markers", "-W", "error"]
        plugins = ("lowtide" if _is_entry_point() else PLUGIN, "inner_recorder", *using)
        command += [part for plugin in plugins for part in ("-p", plugin)]
        if not cache:
            command += ["-p", "no:cacheprovider"]
        if leakcheck:
            command.append("--leakcheck")
            if settle is not None:
                command += ["--leakcheck-settle", str(settle)]
            command += ["--leakcheck-report", str(report)]
        # What the outer run hands down to its own workers is not for the inner one.
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])}
        # Other plugins that happen to be installed would change what is tested.
        env |= {"COLUMNS": "200", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            [*command, *args],
            cwd=place / where,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        phases: dict[str, list[Phase]] = {}
        for line in record.read_text().splitlines() if record.exists() else ():
            reported = json.loads(line)
            properties = tuple((name, value) for name, value in reported.pop("properties"))
            phases.setdefault(reported.pop("id"), []).append(Phase(**reported, properties=properties))
        broken = done.returncode == pytest.ExitCode.INTERRUPTED and not phases
        broken |= (
            done.returncode not in (-ends_by, *pytest.ExitCode) or done.returncode == pytest.ExitCode.INTERNAL_ERROR
        )
        # Once, and not in each test that looks for what it was to show.
        assert not broken, f"the inner run ended with {done.returncode}\n{done.stdout}{done.stderr}"
        return InnerRun(
            code=done.returncode,
            out=done.stdout,
            err=done.stderr,
            folder=place,
            phases={test: tuple(reported) for test, reported in phases.items()},
            report=schema.read(report) if schema.is_in(report) else None,
        )

    return run


def _is_entry_point() -> bool:
    """Whether the plugin is installed under its name; to load it by its module too would be an error."""
    return any(entry.value == PLUGIN for entry in metadata.entry_points(group="pytest11"))

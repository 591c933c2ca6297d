"""The gate runs cells in processes of their own; whatever they do, the report says it and no process stays."""

from __future__ import annotations

import ast
import datetime
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from lowtide.leakcheck.cli.commands import app
from lowtide.leakcheck.gate import cells as card_locks
from lowtide.leakcheck.gate.gate import Gate, KnownFinding, KnownFindings, KnownFindingsError, earlier_findings
from lowtide.leakcheck.gate.matrix import Cell, GateError
from lowtide.reports.schema import Finding, Machine, Report, Subject, exit_code, read
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[3]

MACHINE = Machine(platform="here", python="3", torch="", cpus=2, memory=1, devices=(), driver="none")

WRITES = """
import sys, time, subprocess
from pathlib import Path
from lowtide.reports import schema

# With `=`, or pytest would take the folder for one of its arguments.
FOLDER = Path(sys.argv[-1].partition("--report=")[2])

def report(outcome="clean", marks=(), name="life"):
    findings = tuple(
        schema.Finding(resource="tensors", cause="module-global", bytes=8, count=1, device="cpu", stage="call",
                       message="a tensor", fingerprint=mark * 16)
        for mark in marks
    )
    machine = schema.Machine(platform="cell", python="3", torch="9", cpus=2, memory=1, devices=(), driver="none")
    subjects = (schema.Subject(id=name, outcome="leak" if marks else outcome, findings=findings),) if name else ()
    schema.write(
        schema.Report(schema="lowtide-report/1", version="0", created="now", command="x", machine=machine,
                      subjects=subjects),
        FOLDER,
    )
    sys.exit({"clean": 0, "leak": 1, "error": 2}["leak" if marks else outcome])
"""


def cell(name: str, body: str, timeout: float = 60.0, device: str = "cpu", missing: str = "") -> Cell:
    command = (sys.executable, "-c", WRITES + textwrap.dedent(body))
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return Cell(name, device, command, "--report", timeout, env, missing)


def ran(folder: Path, *cells: Cell, **options: object) -> Report:
    return Gate(cells, folder, MACHINE, **options).run()  # type: ignore[arg-type]


def by_id(report: Report) -> Mapping[str, Subject]:
    return {subject.id: subject for subject in report.subjects}


def is_running(word: str) -> bool:
    return any(word in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


def test_the_cells_reports_are_one_report(tmp_path: Path) -> None:
    report = ran(tmp_path, cell("one", "report()"), cell("two", "report(marks='ab')"), cpu_workers=2)
    assert {name: subject.outcome for name, subject in by_id(report).items()} == {
        "one/life": "clean",
        "two/life": "leak",
    }
    assert exit_code(report) == 1
    assert report.machine.platform == "cell"
    assert read(tmp_path) == report
    for name in ("index.html", "junit.xml", "summary.md", "cells/two/leakcheck.json", "cells/two/log.txt"):
        assert (tmp_path / name).exists(), name


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "print('no such model'); sys.exit(2)",
            "ended with exit code 2 and wrote no report; last line: no such model; ",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by signal 11 and wrote no report; "),
        ("report(name='')", "ended with exit code 0 and judged nothing; "),
        ("Path(FOLDER, 'leakcheck.json').write_text('{')", "is not a lowtide-report/1 report"),
    ],
    ids=["refused", "crashed", "empty", "damaged"],
)
def test_a_cell_that_judged_nothing_is_an_error_with_its_log(tmp_path: Path, body: str, reason: str) -> None:
    report = ran(tmp_path, cell("bad", body))
    (subject,) = report.subjects
    assert (subject.id, subject.outcome) == ("bad", "error")
    assert reason in subject.reason
    assert exit_code(report) == 2


def test_an_exit_code_that_the_report_does_not_explain_is_no_pass(tmp_path: Path) -> None:
    body = "try:\n    report()\nexcept SystemExit:\n    print('SUPPRESSION expired')\n    sys.exit(1)"
    found = by_id(ran(tmp_path, cell("odd", body)))
    assert found["odd/life"].outcome == "clean"
    assert found["odd"].reason.startswith("ended with exit code 1, which its report does not explain; last line: SUPP")


def test_a_cell_that_hangs_is_ended_with_all_its_processes_and_says_where_it_was(tmp_path: Path) -> None:
    body = """
    def load():
        # In a session of its own, without the environment: neither group nor mark leads to it.
        subprocess.Popen(["env", "-i", "setsid", "sleep", "4711.5"])
        time.sleep(600)
    load()
    """
    report = ran(tmp_path, cell("slow", body, timeout=1.5))
    (subject,) = report.subjects
    assert subject.reason.startswith("ended after 1.5 s, its time limit, in load (<string>:")
    assert not is_running("4711.5")


def test_what_outlives_a_cell_is_a_finding_and_is_ended(tmp_path: Path) -> None:
    body = 'subprocess.Popen(["env", "-i", "setsid", "sleep", "4711.6"]); report()'
    found = by_id(ran(tmp_path, cell("leaves", body)))
    assert found["leaves/life"].outcome == "clean"
    (finding,) = found["leaves/end"].findings
    assert (finding.resource, finding.count) == ("processes", 1)
    assert "1 process outlived the command and had to be killed: " in finding.message
    assert "(sleep, " in finding.message
    assert not is_running("4711.6")


def test_a_helper_that_ends_soon_after_its_cell_is_none(tmp_path: Path) -> None:
    report = ran(tmp_path, cell("tidy", 'subprocess.Popen(["setsid", "sleep", "0.5"]); report()'))
    assert [subject.id for subject in report.subjects] == ["tidy/life"]


CALIBRATES = """
FOLDER.mkdir(parents=True, exist_ok=True)
time.sleep(0.3)
(FOLDER / "calibration.json").write_text(str(time.time()))
report()
"""

SAYS_CALIBRATION = """
place = sys.argv.index("--calibration") if "--calibration" in sys.argv else len(sys.argv)
print(time.time(), sys.argv[place : place + 2])
report()
"""


def test_a_cell_waits_for_its_calibration_and_is_judged_by_it(tmp_path: Path) -> None:
    calibrated = msgspec.structs.replace(cell("judged", SAYS_CALIBRATION), calibration="calibration-cpu")
    folder = tmp_path / "report"
    # Two workers, and the cell comes first: it waits for the calibration and not for its turn.
    assert exit_code(ran(folder, calibrated, cell("calibration-cpu", CALIBRATES), cpu_workers=2)) == 0
    began, _, words = (folder / "cells/judged/log.txt").read_text().partition(" ")
    assert ast.literal_eval(words.splitlines()[0])[:2] == ["--calibration", str(folder / "cells/calibration-cpu")]
    assert float(began) > float((folder / "cells/calibration-cpu/calibration.json").read_text())


@pytest.mark.parametrize("others", [[], [cell("calibration-cpu", "report('error')")]], ids=["none", "fails"])
def test_without_a_calibration_of_this_run_a_cell_is_judged_by_the_table(tmp_path: Path, others: list[Cell]) -> None:
    folder = tmp_path / "report"
    assert exit_code(ran(folder, cell("calibration-cpu", CALIBRATES))) == 0
    calibrated = msgspec.structs.replace(cell("judged", SAYS_CALIBRATION), calibration="calibration-cpu")
    ran(folder, calibrated, *others)
    assert (folder / "cells/judged/log.txt").read_text().split(" ", 1)[1].startswith("[]")


def test_what_cannot_run_here_is_said_and_never_clean(tmp_path: Path) -> None:
    report = ran(
        tmp_path, cell("card", "report()", device="cuda", missing="cuda is not here: this machine has 0 cards")
    )
    (subject,) = report.subjects
    assert (subject.outcome, subject.reason) == ("unsupported", "cuda is not here: this machine has 0 cards")
    assert exit_code(report) == 2


def test_the_report_of_an_earlier_run_is_not_left_where_a_cell_writes_none(tmp_path: Path) -> None:
    assert exit_code(ran(tmp_path, cell("one", "report()"))) == 0
    assert exit_code(ran(tmp_path, cell("one", "sys.exit(0)"))) == 2


def test_where_its_report_cannot_be_written_what_a_gate_found_is_shown_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lowtide.toml").write_text('[gate]\ncalibrate = false\n[[gate.subject]]\nengine = "tiny"\n')
    # As on a disk that is full by now.
    body = f"path = Path({str(tmp_path / 'out' / 'leakcheck.json')!r}); path.unlink(); path.mkdir()"
    leaking = cell("leaking", f"{body}\nreport(marks='a')")
    monkeypatch.setattr("lowtide.leakcheck.gate.matrix.cells_of", lambda *_: [leaking])
    done = CliRunner().invoke(app, ["gate", "--report", "out"])
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (2, "LEAK: 1 of 1 subject leaked")
    assert done.stderr.startswith("lowtide: out/leakcheck.json cannot be written: Is a directory")


def test_known_findings_pass_and_those_of_an_earlier_report_are_not_new(tmp_path: Path) -> None:
    leaks = cell("one", "report(marks='a')")
    first = ran(tmp_path / "first", leaks)
    assert exit_code(first) == 1
    entry = KnownFinding(fingerprint="a" * 16, reason="issue 7", owner="ann", expires=datetime.date(2100, 1, 1))
    known = ran(tmp_path / "known", leaks, known=KnownFindings(Path("b.json"), (entry,)))
    assert exit_code(known) == 0
    since = earlier_findings(tmp_path / "first")
    same = ran(tmp_path / "same", leaks, earlier=since)
    assert (exit_code(same), same.subjects[0].findings[0].suppressed_by) == (
        0,
        f"not new: also in {tmp_path / 'first'}",
    )
    more = ran(tmp_path / "more", cell("one", "report(marks='ab')"), earlier=since)
    assert exit_code(more) == 1


KILLED = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.leakcheck.gate.test_gate import MACHINE, cell
from lowtide.leakcheck.gate.gate import Gate
slow = 'subprocess.Popen(["env", "-i", "setsid", "sleep", "4711.7"]); print("at work", flush=True); time.sleep(600)'
Gate([cell("one", "report()"), cell("two", slow), cell("three", "report()")], Path({folder!r}), MACHINE).run()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_gate_that_is_killed_leaves_a_readable_report_and_no_process(tmp_path: Path, number: int) -> None:
    program = KILLED.format(root=str(ROOT), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as gate:
        log = tmp_path / "cells" / "two" / "log.txt"
        wait_until(lambda: log.exists() and "at work" in log.read_text())
        assert is_running("4711.7")
        gate.send_signal(number)
        gate.wait(HANG_S)
    wait_until(lambda: not is_running("4711.7"))
    found = by_id(read(tmp_path))
    assert found["one/life"].outcome == "clean"
    unfinished = [subject for name, subject in found.items() if name.startswith(("two", "three"))]
    assert {subject.outcome for subject in unfinished} == {"error"}
    assert exit_code(read(tmp_path)) == 2


def test_one_gate_at_a_time_has_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_locks.tempfile, "gettempdir", lambda: str(tmp_path))
    stop = threading.Event()
    with card_locks.exclusive(0, stop.is_set):
        with card_locks.exclusive(1, stop.is_set):
            pass
        stop.set()
        with (
            pytest.raises(GateError, match="stopped while another gate had card 0"),
            card_locks.exclusive(0, stop.is_set),
        ):
            pass
    with card_locks.exclusive(0, stop.is_set):
        pass


def test_cells_on_cards_get_a_card_each_and_no_two_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_locks.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    body = """
    import os
    print(os.environ["CUDA_VISIBLE_DEVICES"], time.time()); time.sleep(0.3); print(time.time()); report()
    """
    cells = [cell("a", body, device="cuda"), cell("b", body, device="cuda"), cell("c", body, device="cuda:1")]
    assert exit_code(ran(tmp_path / "report", *cells, cards=2)) == 0
    spans = {}
    for name in "abc":
        card, began, ended = (tmp_path / "report/cells" / name / "log.txt").read_text().split()[:3]
        spans[name] = (card, float(began), float(ended))
    assert spans["c"][0] == "1"
    assert {spans["a"][0], spans["b"][0]} <= {"0", "1"}
    for one, other in ("ab", "ac", "bc"):
        if spans[one][0] == spans[other][0]:
            assert spans[one][2] <= spans[other][1] or spans[other][2] <= spans[one][1]


TODAY = datetime.date(2030, 1, 1)
LATER = datetime.date(2030, 2, 1)


def finding(mark: str) -> Finding:
    return Finding(
        resource="tensors",
        cause="module-global",
        bytes=8,
        count=1,
        device="cpu",
        stage="call",
        message=f"tensor {mark}",
        fingerprint=mark * 16,
    )


def subject(cell: str, *marks: str) -> Subject:
    return Subject(id=f"{cell}/test", outcome="leak" if marks else "clean", findings=tuple(map(finding, marks)))


def known(*marks: str, cells: tuple[str, ...] = ("one",), expires: datetime.date = LATER) -> KnownFindings:
    entries = tuple(
        KnownFinding(fingerprint=mark * 16, reason="issue 7", owner="ann", expires=expires, cells=cells)
        for mark in marks
    )
    return KnownFindings(Path("baseline.json"), entries)


def test_what_is_known_passes_with_its_reason_and_what_is_new_does_not() -> None:
    (both, alone) = known("a").mark([subject("one", "a", "b"), subject("one", "a")], TODAY)
    assert both.outcome == "leak"
    assert [each.suppressed_by is None for each in both.findings] == [False, True]
    assert alone.outcome == "clean"
    assert alone.findings[0].suppressed_by == "baseline.json: issue 7 (owner ann, until 2030-02-01)"


def test_an_entry_counts_through_its_last_day() -> None:
    entries = known("a", expires=TODAY)
    assert entries.mark([subject("one", "a")], TODAY)[0].outcome == "clean"
    assert entries.expired(TODAY) == []
    tomorrow = TODAY + datetime.timedelta(days=1)
    assert entries.mark([subject("one", "a")], tomorrow)[0].outcome == "leak"
    assert entries.expired(tomorrow) == list(entries.entries)


def test_what_is_gone_is_what_its_cells_no_longer_show() -> None:
    entries = known("a", "b", cells=("one", "two"))
    assert [entry.fingerprint for entry in entries.gone([subject("one", "a")], {"one", "two"})] == ["b" * 16]
    # A cell that did not run to its end shows nothing.
    assert entries.gone([subject("one", "a")], {"one"}) == []


def test_an_update_adds_what_is_new_and_removes_what_is_gone(tmp_path: Path) -> None:
    entries = replace(known("a", "b"), file=tmp_path / "baseline.json")
    subjects = entries.mark([subject("one", "a", "c"), subject("two", "c")], TODAY)
    judged = {"one", "two"}
    new, change = entries.updated(subjects, judged, reason="issue 9", owner="bob", expires=LATER)
    assert change.lines() == [f"- {'b' * 16} : ", f"+ {'c' * 16} tensors: tensor c"]
    new.save()
    again = KnownFindings.load(new.file)
    assert [(entry.fingerprint[0], entry.reason, entry.cells) for entry in again.entries] == [
        ("a", "issue 7", ("one",)),
        ("c", "issue 9", ("one", "two")),
    ]
    assert {each.outcome for each in again.mark(subjects, TODAY)} == {"clean"}


def test_an_update_needs_a_reason_only_for_what_it_adds() -> None:
    with pytest.raises(KnownFindingsError, match="1 new finding would be added: give --reason TEXT and --owner NAME"):
        known().updated([subject("one", "a")], {"one"}, reason=" ", owner="ann", expires=LATER)
    new, change = known("a").updated([subject("one")], {"one"}, reason="", owner="", expires=LATER)
    assert (new.entries, change.added) == ((), ())


def test_an_update_renews_an_expired_entry() -> None:
    entries = known("a", expires=TODAY - datetime.timedelta(days=1))
    subjects = entries.mark([subject("one", "a")], TODAY)
    new, _ = entries.updated(subjects, {"one"}, reason="still issue 7", owner="ann", expires=LATER)
    assert [(entry.reason, entry.expires) for entry in new.entries] == [("still issue 7", LATER)]


def test_no_file_is_an_empty_baseline(tmp_path: Path) -> None:
    assert KnownFindings.load(tmp_path / "none.json").entries == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a lowtide-baseline/1 baseline"),
        ('{"schema": "lowtide-baseline/9", "findings": []}', "this version reads lowtide-baseline/1"),
        ('{"schema": "lowtide-baseline/1", "findings": [], "x": 1}', "unknown field `x`"),
        (
            '{"schema": "lowtide-baseline/1", "findings": '
            '[{"fingerprint": "f", "reason": "", "owner": "a", "expires": "2030-01-01"}]}',
            "f needs a reason and an owner",
        ),
    ],
)
def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(KnownFindingsError, match=message):
        KnownFindings.load(path)

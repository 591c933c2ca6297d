"""Real calibrations: each planted leak is found by what the judge says of its place, and by nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lowtide.leakcheck.gate import calibration, planted_leaks
from lowtide.leakcheck.gate.calibration import MIB, NULL_LIVES, live_null_lives
from lowtide.leakcheck.gate.planted_leaks import PLANTED, PlantedLeak, findings_with, smallest_found
from lowtide.reports import schema

pytestmark = pytest.mark.nightly

ON_CPU = [leak for leak in PLANTED if not leak.needs_card]
NAMES = [leak.name for leak in ON_CPU]
# A frozen heap keeps some host memory, too.
TOLERANCES = {"host-memory": 2 * MIB}


@pytest.mark.parametrize("leak", ON_CPU, ids=NAMES)
def test_a_leak_is_found_and_removed_again(leak: PlantedLeak, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_leaks, "sizes", lambda page: (4 * MIB,))
    assert smallest_found(leak, "cpu", TOLERANCES) == 4 * MIB
    # With all of it removed, the same leak is found a second time.
    assert smallest_found(leak, "cpu", TOLERANCES) == 4 * MIB


@pytest.mark.parametrize("leak", [leak for leak in ON_CPU if not leak.is_level], ids=NAMES[:4])
def test_a_judge_that_tolerates_the_leak_is_seen_to_be_blind(
    leak: PlantedLeak, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planted_leaks, "sizes", lambda page: (4 * MIB,))
    monkeypatch.setattr(
        planted_leaks.LifecycleRun, "run", lambda run: schema.Subject(id="x", outcome="clean", findings=())
    )
    assert smallest_found(leak, "cpu", {}) is None


@pytest.mark.parametrize("leak", ON_CPU, ids=NAMES)
def test_only_the_finding_about_its_place_counts(leak: PlantedLeak) -> None:
    findings = findings_with(leak, "cpu", 4 * MIB, TOLERANCES if leak.is_level else {})
    reporting = {other.name for other in ON_CPU if any(other.is_reported(each, 4 * MIB) for each in findings)}
    # A tensor is in torch's pool whoever holds it.
    also = {"torch's pool"} if leak.blames else set()
    assert reporting == {leak.name, *also}
    assert not any(leak.is_reported(each, 100 * MIB) for each in findings)


def test_null_lives_are_quiet_and_have_a_figure_for_each_place() -> None:
    noise, problem = live_null_lives("cpu", 3)
    assert problem == ""
    assert {kind.metric_on("cpu") for kind in ON_CPU} <= noise.keys()
    assert noise["tensors cpu"].lives == noise["arena cpu"].lives == (0, 0)
    assert noise["host-memory"].table == 32 * MIB


def test_a_calibration_of_this_machine_sees_16_mib_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibration.main(["--report", str(tmp_path)]) == 0
    report = schema.read(tmp_path)
    assert [subject.id for subject in report.subjects] == ["nothing planted", *(kind.name for kind in ON_CPU)]
    assert f"{NULL_LIVES} lives without a finding" in capsys.readouterr().out
    assert (tmp_path / "summary.md").read_text().count("smallest planted leak found") == len(ON_CPU)
    # The table allows 32 MiB of host memory: of a leak as large as that the noise decides.
    assert re.search(r"by the table's tolerance: (32|64)\.0 MiB", report.subjects[-1].reason)
    assert 0 < calibration.read_tolerances(tmp_path, "cpu")["host-memory"] < 16 * MIB

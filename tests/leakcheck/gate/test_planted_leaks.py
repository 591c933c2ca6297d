"""Real calibrations: each planted leak is found by what the judge says of its place, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.leakcheck.gate import calibration, planted_leaks
from lowtide.leakcheck.gate.calibration import MIB, NULL_LIVES, live_null_lives
from lowtide.leakcheck.gate.planted_leaks import (
    PLANTED,
    ArenaLeak,
    CacheLeak,
    DriverLeak,
    FrozenLeak,
    HostLeak,
    PlantedLeak,
    PoolLeak,
    smallest_found,
)
from lowtide.reports import schema
from lowtide.reports.schema import Finding

pytestmark = pytest.mark.nightly

ON_CPU = [kind for kind in PLANTED if kind is not DriverLeak]


@pytest.mark.parametrize("kind", ON_CPU)
def test_a_leak_is_found_and_removed_again(kind: type[PlantedLeak], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_leaks, "sizes", lambda page: (4 * MIB,))
    tolerances = {"host-memory": 2 * MIB}
    assert smallest_found(kind("cpu"), tolerances) == 4 * MIB
    # With all of it removed, the same leak is found a second time.
    assert smallest_found(kind("cpu"), tolerances) == 4 * MIB


@pytest.mark.parametrize("kind", [PoolLeak, ArenaLeak, FrozenLeak, CacheLeak])
def test_a_judge_that_tolerates_the_leak_is_seen_to_be_blind(
    kind: type[PlantedLeak], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planted_leaks, "sizes", lambda page: (4 * MIB,))
    monkeypatch.setattr(
        planted_leaks.LifecycleRun, "run", lambda run: schema.Subject(id="x", outcome="clean", findings=())
    )
    assert smallest_found(kind("cpu"), {}) is None


def findings_with(kind: type[PlantedLeak]) -> tuple[Finding, ...]:
    leak = kind("cpu")
    try:
        # A frozen heap keeps some host memory, too.
        tolerances = {"host-memory": 2 * MIB} if kind is HostLeak else {}
        return planted_leaks._judged_with(leak, 4 * MIB, tolerances).findings
    finally:
        leak.remove()


@pytest.mark.parametrize("kind", ON_CPU)
def test_only_the_finding_about_its_place_counts(kind: type[PlantedLeak]) -> None:
    findings = findings_with(kind)
    reporting = {other for other in ON_CPU if any(other("cpu").is_reported(each, 4 * MIB) for each in findings)}
    # A tensor is in torch's pool whoever holds it.
    also = {PoolLeak} if kind in (FrozenLeak, CacheLeak) else set()
    assert reporting == {kind, *also}
    assert not any(kind("cpu").is_reported(each, 100 * MIB) for each in findings)


def test_null_lives_are_quiet_and_have_a_figure_for_each_place() -> None:
    null = live_null_lives("cpu", 3)
    assert null.problem == ""
    assert len(null.lives) == 3
    assert {kind.metric_on("cpu") for kind in ON_CPU} <= null.noise.keys()
    assert null.noise["tensors cpu"].lives == null.noise["arena cpu"].lives == (0, 0)
    assert null.noise["host-memory"].table == 32 * MIB


def test_a_calibration_of_this_machine_sees_16_mib_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibration.main(["--report", str(tmp_path)]) == 0
    report = schema.read(tmp_path)
    assert [subject.id for subject in report.subjects] == ["nothing planted", *(kind.name for kind in ON_CPU)]
    assert f"{NULL_LIVES} lives without a finding" in capsys.readouterr().out
    assert (tmp_path / "summary.md").read_text().count("smallest planted leak found") == len(ON_CPU)
    # The table allows 32 MiB of host memory.
    assert report.subjects[-1].reason.count("by the table's tolerance: 64.0 MiB") == 1
    assert 0 < calibration.read_tolerances(tmp_path, "cpu")["host-memory"] < 16 * MIB

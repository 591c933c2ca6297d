"""How small a leak a gate sees on this machine: the noise of lives without a leak, and leaks that are planted.

`python -m lowtide.leakcheck.gate.calibration --report DIR --device cpu` is a cell of the gate: a subject for each place
in which a leak is planted. A place where `MUST_SEE` bytes are not found is not measured there, and the cell exits 2.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import lowtide
from lowtide.leakcheck.gate.matrix import CALIBRATION_FILE
from lowtide.leakcheck.targets.target import start_program
from lowtide.reports import schema
from lowtide.reports.escaping import one_line
from lowtide.reports.folder import write_folder
from lowtide.reports.from_snapshot import report_of
from lowtide.reports.reading.json_files import UnreadableError, decode_json, read_bounded
from lowtide.reports.schema import Subject
from lowtide.reports.sizes import format_bytes

MIB = 1 << 20

MUST_SEE = 16 * MIB
"""A gate that does not find a leak of this many bytes per life in each place has not measured."""

NULL_LIVES = 6
"""Lives with nothing planted; the first is not counted, since libraries move some metrics in it."""

NOISE_MARGIN = 4
"""How many times the largest deviation of a null life a life may stay above its baseline."""

LEAST_TOLERANCE = 4 * MIB
"""Bytes that a metric with a tolerance keeps however quiet it is: a few lives do not show the rarest jump."""

_PROGRAM_LIMIT_S = 600.0

_PLANTED_LEAKS = "lowtide.leakcheck.gate.planted_leaks"


class CalibrationError(RuntimeError):
    """A calibration could not be made or read; the message says why."""


class Noise(msgspec.Struct, frozen=True):
    """One metric in lives without a leak, in bytes.

    Attributes:
        metric: its key, with the device.
        lives: how far it was above its baseline after each life.
        table: the tolerance of the table.
    """

    metric: str
    lives: tuple[int, ...]
    table: int

    @property
    def largest(self) -> int:
        """How far a life was from the usual life, at most.

        From the usual one and not from 0, so that a leak of the same size in every life does not pass for noise.
        """
        usual = statistics.median_low(self.lives) if self.lives else 0
        return max((abs(above - usual) for above in self.lives), default=0)

    @property
    def tolerance(self) -> int:
        """The calibrated tolerance; never above the table's, and none for what must come back exactly."""
        return min(self.table, max(LEAST_TOLERANCE, NOISE_MARGIN * self.largest))


class Sight(msgspec.Struct, frozen=True):
    """How small a leak is found in one place.

    Attributes:
        place: where it was planted.
        noise: of the metric that counts it; None where null lives do not show the metric.
        smallest: bytes of the smallest planted leak that was found by the calibrated tolerance; None if none was.
        by_table: the same by the table's tolerance.
        floor: bytes of the smallest that is planted.
        problem: why it could not be measured; "" if it could.
    """

    place: str
    noise: Noise | None
    smallest: int | None
    by_table: int | None
    floor: int
    problem: str = ""

    @property
    def subject(self) -> Subject:
        """What the report says of this place."""
        if self.problem:
            return Subject(id=self.place, outcome="error", reason=self.problem)
        if self.noise is None:
            return Subject(id=self.place, outcome="unsupported", reason="this machine does not report the metric")
        quiet = f"{self.noise.metric}: noise {format_bytes(self.noise.largest)}"
        tolerance = f"tolerance {format_bytes(self.noise.tolerance)}, table {format_bytes(self.noise.table)}"
        facts = f"{quiet}, {tolerance}" if self.noise.table else quiet
        if self.smallest is None:
            return Subject(id=self.place, outcome="unsupported", reason=f"no planted leak was found ({facts})")
        found = f"smallest planted leak found: {format_bytes(self.smallest)}"
        if self.smallest == self.floor:
            found += ", the smallest planted"
        if self.by_table != self.smallest:
            by_table = "none" if self.by_table is None else format_bytes(self.by_table)
            found += f"; by the table's tolerance: {by_table}"
        if self.smallest > MUST_SEE:
            needed = f"a gate must find {format_bytes(MUST_SEE)}"
            return Subject(id=self.place, outcome="unsupported", reason=f"{found}; {needed} ({facts})")
        return Subject(id=self.place, outcome="clean", reason=f"{found} ({facts})")


class Calibration(msgspec.Struct, frozen=True):
    """What a gate sees on one device.

    Attributes:
        device: "cpu" or "cuda:N".
        noise: by the metric's key.
        sights: one for each place.
        problem: why lives without a leak were not clean; "" if they were.
    """

    device: str
    noise: Mapping[str, Noise]
    sights: tuple[Sight, ...]
    problem: str = ""

    @property
    def tolerances(self) -> dict[str, int]:
        """The calibrated tolerances, for `LifecycleRun`; what must come back exactly is not in it."""
        return {key: noise.tolerance for key, noise in self.noise.items() if noise.table}

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """Those of the report."""
        if self.problem:
            return (Subject(id="nothing planted", outcome="error", reason=self.problem),)
        nothing = Subject(id="nothing planted", outcome="clean", reason=f"{NULL_LIVES} lives without a finding")
        return (nothing, *(sight.subject for sight in self.sights))

    @property
    def table(self) -> dict[str, Any]:
        """The figures, for `calibration.json`; sizes in bytes."""
        return {
            "device": self.device,
            "tolerances": self.tolerances,
            "noise": {key: list(noise.lives) for key, noise in self.noise.items()},
            "places": [
                {
                    "place": sight.place,
                    "metric": sight.noise.metric if sight.noise is not None else None,
                    "noise": sight.noise.largest if sight.noise is not None else None,
                    "tolerance": sight.noise.tolerance if sight.noise is not None else None,
                    "smallest_found": sight.smallest,
                    "smallest_found_by_table": sight.by_table,
                }
                for sight in self.sights
            ],
        }


def calibrate(device: str) -> Calibration:
    """Measure the noise and the smallest leaks on a device, each place in a process of its own."""
    # Only here: it loads torch.
    from lowtide.leakcheck.gate.planted_leaks import PLANTED

    try:
        noise, problem = live_null_lives(device, NULL_LIVES)
    except CalibrationError as error:
        return Calibration(device, {}, (), str(error))
    if problem:
        return Calibration(device, noise, (), f"nothing was planted, and the lives were not clean: {problem}")
    tolerances = Calibration(device, noise, ()).tolerances
    sights = []
    for kind in PLANTED:
        if kind.needs_card and device == "cpu":
            continue
        of_metric = noise.get(kind.metric_on(device))
        alternatives = [tolerances]
        if of_metric is not None and of_metric.tolerance != of_metric.table:
            alternatives.append({})
        try:
            written = _in_own_process("write_smallest", kind.name, device, alternatives)
            found = written["found"]
            sights.append(Sight(kind.name, of_metric, found[0], found[-1], written["floor"]))
        except CalibrationError as error:
            sights.append(Sight(kind.name, of_metric, None, None, 0, str(error)))
    return Calibration(device, noise, tuple(sights))


def live_null_lives(device: str, lives: int) -> tuple[dict[str, Noise], str]:
    """Live whole lives with nothing planted, in a process of its own; return their noise, and what did not come back.

    Raises:
        CalibrationError: that process ended otherwise.
    """
    written = _in_own_process("write_null_lives", device, lives)
    return noise_of(written["lives"], written["tolerances"]), written["problem"]


def noise_of(lives: Sequence[Mapping[str, int | None]], table: Mapping[str, int]) -> dict[str, Noise]:
    """Return the noise of each metric that all lives but the first have: libraries move some metrics in that one.

    Args:
        lives: for each, by the metric's key, how far it was above its baseline; None where that could not be read.
        table: the table's tolerances in bytes, by the same keys; what is not counted in bytes is not in it.
    """
    above = {key: tuple(value for life in lives[1:] if (value := life.get(key)) is not None) for key in table}
    return {key: Noise(key, of, table[key]) for key, of in above.items() if of and len(of) == len(lives) - 1}


class _Table(msgspec.Struct):
    """Of `calibration.json` what a life is judged by."""

    device: str
    tolerances: dict[str, int]


def read_tolerances(folder: Path, device: str) -> dict[str, int]:
    """Read a device's calibrated tolerances from a calibration's report folder.

    Raises:
        CalibrationError: there are none, they cannot be read, or they are of another device.
    """
    path = folder / CALIBRATION_FILE
    try:
        data = read_bounded(path)
    except UnreadableError as error:
        raise CalibrationError(f"{path} {error}") from error
    try:
        table = decode_json(data, _Table)
    except UnreadableError as error:
        raise CalibrationError(f"{path} has no calibrated tolerances: {error}: calibrate again") from error
    if table.device != device:
        raise CalibrationError(f"{path} is of {table.device}, and the engine is on {device}: calibrate there")
    return table.tolerances


def _in_own_process(function: str, *arguments: object) -> Any:
    """Call a function of `planted_leaks` in a process of its own; return what it writes.

    Raises:
        CalibrationError: it ended otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        file = Path(folder) / "result.json"
        call = f"{function}(*{(*arguments, str(file))!r})"
        with start_program(f"from {_PLANTED_LEAKS} import {function}\n{call}", stdin=subprocess.DEVNULL) as process:
            try:
                code = process.wait(_PROGRAM_LIMIT_S)
            except BaseException as error:
                process.kill()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise CalibrationError(f"{function} took more than {_PROGRAM_LIMIT_S:g} s and was ended") from error
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CalibrationError(f"{function} ended with exit code {code} and wrote no result") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, write and show the report; the exit code is that of a cell."""
    try:
        from lowtide.engine import EngineError
        from lowtide.engine.pages import check_device
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        remedy = 'pip install "lowtide[engine]"'
        sys.stderr.write(f"lowtide: this command needs torch, which cannot be imported ({error}): {remedy}\n")
        return 2

    parser = argparse.ArgumentParser(prog="lowtide calibration", description="How small a leak is found here.")
    parser.add_argument("--report", type=Path, required=True, help="folder for the report")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    options = parser.parse_args(arguments)
    try:
        # Not as torch resolves it: that would take a context on the card.
        name = "cuda:0" if options.device == "cuda" else options.device
        calibration = calibrate(str(check_device(name)))
        command = shlex.join(["python", "-m", __spec__.name, *sys.argv[1:]])
        report = report_of(calibration.subjects, lowtide.__version__, command)
        write_folder(report, options.report)
        (options.report / CALIBRATION_FILE).write_text(json.dumps(calibration.table, indent=2) + "\n", encoding="utf-8")
    except (EngineError, schema.ReportError, OSError) as error:
        sys.stderr.write(one_line(f"lowtide: {error}") + "\n")
        return 2
    for subject in report.subjects:
        sys.stdout.write(one_line(f"{subject.id}: {subject.outcome}: {subject.reason}") + "\n")
    return schema.exit_code(report)


if __name__ == "__main__":
    sys.exit(main())

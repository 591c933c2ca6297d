"""From the configuration to cells: subjects x devices x settings, each with the command that runs it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lowtide.leakcheck.gate.settings import GateError, GateSettings, SubjectSettings

_SHARD = re.compile(r"(\d+)/(\d+)")
CALIBRATION_FILE = "calibration.json"
"""The figures of a calibration, in its report folder."""

_PRESETS = ("tiny", "1b", "8b")


@dataclass(frozen=True)
class Cell:
    """One subject on one device under one setting.

    Attributes:
        name: `SUBJECT-DEVICE` or `SUBJECT-DEVICE-SETTING`; also the name of its folder.
        device: `cpu`, `cuda` (whichever card is free) or `cuda:N`.
        command: what runs, this Python first, without its report folder.
        report_option: the option that takes the report folder, after `=`.
        timeout: seconds after which its processes are ended.
        env: environment variables on top of the gate's own.
        missing: why it cannot run here; "" if it can.
        calibrates: whether it measures the smallest leak that its device shows.
        calibration: the name of the cell whose tolerances it is judged by; "" for the tolerances of the table.
    """

    name: str
    device: str
    command: tuple[str, ...]
    report_option: str
    timeout: float
    env: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""
    calibrates: bool = False
    calibration: str = ""

    @property
    def on_card(self) -> bool:
        """Whether it needs a card."""
        return self.device != "cpu"


@dataclass(frozen=True)
class Shard:
    """The cells that one job of a CI matrix runs: each `of`-th cell, from the `index`-th, counted from 1."""

    index: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The shard that `2/5` means.

        Raises:
            GateError: it means none.
        """
        match = _SHARD.fullmatch(text)
        shard = cls(int(match[1]), int(match[2])) if match else cls(0, 0)
        if not 1 <= shard.index <= shard.of:
            raise GateError(f"--shard {text} is not possible: use I/N with I from 1 to N, as 1/4")
        return shard

    def part(self, cells: Sequence[Cell]) -> list[Cell]:
        """Its cells; each part calibrates the devices that it uses, since it may have a machine of its own."""
        part = [cell for cell in cells if not cell.calibrates][self.index - 1 :: self.of]
        devices = {cell.device for cell in part}
        return [cell for cell in cells if cell.calibrates and cell.device in devices] + part


def cells_of(settings: GateSettings, cards: int) -> list[Cell]:
    """All cells: the calibrations, and then the subjects in the order of the configuration.

    Args:
        settings: the configuration.
        cards: how many cards this machine has.

    Raises:
        GateError: two cells have the same name.
    """
    cells: list[Cell] = []
    for subject in settings.subject:
        for device in dict.fromkeys(_device(name, cards) for name in subject.devices or settings.devices):
            under = tuple(settings.settings) if subject.settings is None else subject.settings
            cells += [_cell(settings, subject, device, setting, cards) for setting in under or ("",)]
    if settings.calibrate:
        devices = dict.fromkeys(cell.device for cell in cells)
        cells = [_calibration(settings, device, cards) for device in devices] + cells
    names = [cell.name for cell in cells]
    for name in names:
        if names.count(name) > 1:
            raise GateError(f"two cells are named {name}: rename one of their subjects or settings")
    return cells


def _device(name: str, cards: int) -> str:
    if name != "auto":
        return name
    return "cuda" if cards else "cpu"


def _cell(settings: GateSettings, subject: SubjectSettings, device: str, setting: str, cards: int) -> Cell:
    env = {**settings.settings.get(setting, {}), **subject.env}
    if device == "cpu":
        # A subject that takes a card where it finds one is not to find one.
        env.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    index = int(device.partition(":")[2] or 0)
    missing = ""
    if device != "cpu" and index >= cards:
        missing = f"{device} is not here: this machine has {cards} card{'' if cards == 1 else 's'}"
    return Cell(
        name="-".join(filter(None, (subject.title, device.replace(":", ""), setting))),
        device=device,
        command=(sys.executable, "-m", *_command(subject, "cpu" if device == "cpu" else "cuda"), *subject.args),
        report_option="--leakcheck-report" if subject.kind == "pytest" else "--report",
        timeout=subject.timeout or settings.timeout,
        env=env,
        missing=missing,
        calibration=_calibration_name(device) if settings.calibrate and subject.takes_calibration else "",
    )


def _calibration(settings: GateSettings, device: str, cards: int) -> Cell:
    """The cell that measures the smallest leak which a device shows."""
    like = _cell(settings, SubjectSettings(engine="tiny"), device, "", cards)
    module = "lowtide.leakcheck.gate.calibration"
    command = (sys.executable, "-m", module, "--device", "cpu" if device == "cpu" else "cuda")
    return replace(like, name=_calibration_name(device), command=command, calibrates=True, calibration="")


def _calibration_name(device: str) -> str:
    return f"calibration-{device.replace(':', '')}"


def _command(subject: SubjectSettings, device: str) -> list[str]:
    """The module and arguments that run a subject."""
    tenant = ["--tenant"] if subject.tenant and device != "cpu" else []
    seed = [] if subject.seed is None else ["--seed", str(subject.seed)]
    if subject.engine is not None:
        model = ["--preset" if subject.engine in _PRESETS else "--model", subject.engine]
        return ["lowtide", "run", "--device", device, *model, "--cycles", str(subject.cycles), *seed, *tenant]
    if subject.target is not None:
        return ["lowtide", "check", subject.target, "--cycles", str(subject.cycles), *tenant]
    if subject.pytest is not None:
        # The card is chosen by the environment, so that pytest's own device option stays the suite's.
        return ["pytest", *shlex.split(subject.pytest), "--leakcheck"]
    whose = subject.fuzz or subject.faults or ""
    engine = ["--device", device] if whose == "lowtide" else ["--target", whose]
    how = ["--faults"] if subject.faults is not None else ["--examples", str(subject.examples), *seed]
    return ["lowtide", "fuzz", *engine, *how]

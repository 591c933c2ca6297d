"""From the gate's configuration to cells: subjects x devices x settings, each with the command that runs it.

It is the table `[gate]` in `lowtide.toml`, or `[tool.lowtide.gate]` in `pyproject.toml`.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from lowtide.leakcheck.suppressions.toml import refused

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

FILES = (("lowtide.toml", ("gate",)), ("pyproject.toml", ("tool", "lowtide", "gate")))
"""Where the configuration is looked for, in this order, and the table that holds it."""

_KINDS = ("engine", "target", "pytest", "fuzz", "faults")

_JUDGED_BY_LIFE = ("engine", "target")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""A cell's name is also that of its folder."""

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")

_SHARD = re.compile(r"(\d+)/(\d+)")

CALIBRATION_FILE = "calibration.json"
"""The figures of a calibration, in its report folder."""

_PRESETS = ("tiny", "1b", "8b")


class GateError(ValueError):
    """A gate that cannot be run as it is configured; one line that says what to change."""


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """Base of the tables: immutable, and an unknown key is an error."""


class SubjectSettings(_Table, frozen=True, kw_only=True):
    """One subject of the matrix; exactly one of the first five says what runs.

    Attributes:
        engine: lowtide's reference engine: a preset (`tiny`, `1b`, `8b`) or a checkpoint folder.
        target: `MODULE:FACTORY` of your engine, driven through its life by `lowtide check`.
        pytest: arguments of pytest, as `tests/gpu -m "not slow"`.
        fuzz: `MODULE:FACTORY` whose lives are fuzzed; `lowtide` fuzzes the reference engine.
        faults: likewise, with a failure at every fault point in turn.
        name: the subject's name in reports; default: the kind.
        devices: where it runs; default: the gate's devices.
        settings: the names of the settings under which it runs; default: all.
        timeout: seconds after which one of its cells is ended; default: the gate's.
        cycles: whole lives of `engine` and `target`.
        examples: lives of `fuzz`.
        seed: seed of `engine` and `fuzz`.
        tenant: whether a second process takes what each sleep of `engine` and `target` has freed on a card.
        calibrated: whether the gate's calibration decides what a life of `engine` or `target` may leave; default: for
            `engine = "tiny"`, which is the engine that a calibration measures. A larger engine has more noise.
        args: further arguments of the command.
        env: environment variables of its cells.
    """

    engine: str | None = None
    target: str | None = None
    pytest: str | None = None
    fuzz: str | None = None
    faults: str | None = None
    name: str = ""
    devices: tuple[str, ...] | None = None
    settings: tuple[str, ...] | None = None
    timeout: float | None = None
    cycles: int = 2
    examples: int = 100
    seed: int | None = None
    tenant: bool = True
    calibrated: bool | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}

    @property
    def kind(self) -> str:
        """Which of the five it is."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    @property
    def takes_calibration(self) -> bool:
        """Whether its lives are judged by the tolerances of the gate's calibration."""
        return self.engine == "tiny" if self.calibrated is None else self.calibrated

    @property
    def title(self) -> str:
        """Its name in reports."""
        return self.name or self.kind


class GateSettings(_Table, frozen=True, kw_only=True):
    """The whole configuration.

    Attributes:
        subject: what runs; in TOML one `[[gate.subject]]` for each.
        devices: `cpu`, `cuda` (each card in turn takes a cell), `cuda:N`, or `auto` (a card if there is one).
        settings: environment variables by the name of a setting; each subject runs once under each.
        timeout: seconds after which a cell's processes are ended.
        cpu_workers: cells that run on the CPU at the same time.
        baseline: the file of known findings, relative to the configuration.
        calibrate: whether to measure the smallest leak that each device shows.
    """

    subject: tuple[SubjectSettings, ...]
    devices: tuple[str, ...] = ("auto",)
    settings: dict[str, dict[str, str]] = {}
    timeout: float = 1800.0
    cpu_workers: int = 1
    baseline: str = "lowtide-baseline.json"
    calibrate: bool = True


def load_settings(path: Path | None, folder: Path) -> tuple[GateSettings, Path]:
    """Read the configuration; return it and the file that it was read from.

    Args:
        path: the file; None looks for `FILES` in `folder`.
        folder: the working folder.

    Raises:
        GateError: there is no configuration, or it cannot be used.
    """
    if path is not None:
        tables = ("tool", "lowtide", "gate") if path.name == "pyproject.toml" else ("gate",)
        table = _table(path, tables)
        if table is None:
            raise GateError(f"{path} has no table [{'.'.join(tables)}]: write one with `lowtide init`")
        return _settings(table, path), path
    for name, tables in FILES:
        found = folder / name
        table = _table(found, tables) if found.exists() else None
        if table is not None:
            return _settings(table, found), found
    raise GateError("no gate is configured here: write a lowtide.toml with `lowtide init`, or give --config FILE")


def _table(path: Path, names: tuple[str, ...]) -> Any:
    try:
        document: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GateError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise GateError(f"{path} is not valid TOML: {error}") from error
    except (ValueError, RecursionError) as error:
        raise GateError(f"{path} cannot be read: {refused(error)}") from error
    for name in names:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def _settings(table: Any, path: Path) -> GateSettings:
    try:
        settings = msgspec.convert(table, GateSettings)
    except msgspec.ValidationError as error:
        raise GateError(f"{path}: {error}".replace(" - at `$", ", in `gate")) from error
    for problem in _problems(settings):
        raise GateError(f"{path}: {problem}")
    return settings


def _problems(settings: GateSettings) -> list[str]:
    """Return what cannot work, one line each."""
    found = [] if settings.subject else ["the gate has no subject: add one [[gate.subject]]"]
    found += _device_problems(settings.devices)
    found += [f"cpu-workers {settings.cpu_workers} is not possible: use 1 or more"] if settings.cpu_workers < 1 else []
    found += _name_problems(settings.settings, "setting")
    titles: set[str] = set()
    for place, subject in enumerate(settings.subject, start=1):
        given = [kind for kind in _KINDS if getattr(subject, kind) is not None]
        if len(given) != 1:
            has = "has none" if not given else f"has {' and '.join(given)}"
            found.append(f"subject {place} needs exactly one of {', '.join(_KINDS)}, and {has}")
            continue
        found += _name_problems([subject.title], "subject")
        if subject.title in titles:
            found.append(f"two subjects are named {subject.title}: give one of them another name")
        titles.add(subject.title)
        found += _device_problems(subject.devices or ())
        unknown = [name for name in subject.settings or () if name not in settings.settings]
        found += [f"subject {subject.title} names the setting {name}, which [gate.settings] lacks" for name in unknown]
        if subject.calibrated and subject.kind not in _JUDGED_BY_LIFE:
            found.append(f"subject {subject.title} cannot be calibrated: only the lives of engine and target are")
        numbers = {"cycles": subject.cycles, "examples": subject.examples}
        found += [
            f"{name} {value} of subject {subject.title} is not possible: use 1 or more"
            for name, value in numbers.items()
            if value < 1
        ]
    for timeout in (settings.timeout, *(subject.timeout for subject in settings.subject)):
        if timeout is not None and not 0 < timeout < float("inf"):
            found.append(f"timeout {timeout} is not possible: use seconds above 0")
    return found


def _device_problems(devices: tuple[str, ...]) -> list[str]:
    return [
        f"device {device} is not known; allowed are auto, cpu, cuda and cuda:N"
        for device in devices
        if not _DEVICE.fullmatch(device)
    ]


def _name_problems(names: Any, what: str) -> list[str]:
    return [
        f"the name {name!r} of a {what} is not possible: use letters, digits, `_`, `-` and `.`"
        for name in names
        if not _NAME.fullmatch(name)
    ]


class Cell(msgspec.Struct, frozen=True):
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
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    missing: str = ""
    calibrates: bool = False
    calibration: str = ""

    @property
    def on_card(self) -> bool:
        """Whether it needs a card."""
        return self.device != "cpu"


class Shard(msgspec.Struct, frozen=True):
    """The cells that one job of a CI matrix runs: each `of`-th cell, from the `index`-th, counted from 1."""

    index: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard that `2/5` means.

        Raises:
            GateError: it means none.
        """
        match = _SHARD.fullmatch(text)
        shard = cls(int(match[1]), int(match[2])) if match else cls(0, 0)
        if not 1 <= shard.index <= shard.of:
            raise GateError(f"--shard {text} is not possible: use I/N with I from 1 to N, as 1/4")
        return shard

    def part(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return its cells; each part calibrates the devices that it uses, since it may have a machine of its own."""
        part = [cell for cell in cells if not cell.calibrates][self.index - 1 :: self.of]
        devices = {cell.device for cell in part}
        return [cell for cell in cells if cell.calibrates and cell.device in devices] + part


def cells_of(settings: GateSettings, cards: int) -> list[Cell]:
    """Return all cells: the calibrations, and then the subjects in the order of the configuration.

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
    """Return the cell that measures the smallest leak which a device shows."""
    like = _cell(settings, SubjectSettings(engine="tiny"), device, "", cards)
    module = "lowtide.leakcheck.gate.calibration"
    command = (sys.executable, "-m", module, "--device", "cpu" if device == "cpu" else "cuda")
    return replace(like, name=_calibration_name(device), command=command, calibrates=True, calibration="")


def _calibration_name(device: str) -> str:
    return f"calibration-{device.replace(':', '')}"


def _command(subject: SubjectSettings, device: str) -> list[str]:
    """Return the module and arguments that run a subject."""
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

"""The configuration of the gate: `[gate]` in `lowtide.toml`, or `[tool.lowtide.gate]` in `pyproject.toml`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

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
    """The configuration, and the file that it was read from.

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
    """What cannot work, one line each."""
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

"""The settings of a run: command line, then the marker, then the configuration file, then the default."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import pytest

from lowtide.reports.sizes import parse_bytes

T = TypeVar("T")

Action = Literal["fail", "warn"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Settings:
    """What `--leakcheck` does in this run.

    Attributes:
        tolerance: bytes that a test may leave of each resource.
        tolerance_is_final: whether it was given on the command line, which goes before the marker.
        settle: seconds without movement after which waiting ends.
        action: what a leak does to its test.
        report: folder for the report.
        suppressions: file with known leaks.
        device: what is judged.
    """

    tolerance: int
    tolerance_is_final: bool
    settle: float
    action: Action
    report: Path | None
    suppressions: Path | None
    device: Device


def read_settings(config: pytest.Config) -> Settings:
    """The settings of this run.

    Raises:
        pytest.UsageError: one of them makes no sense; the message says where it came from and what is allowed.
    """
    _check_rootdir(config)
    return Settings(
        tolerance=_read(config, "tolerance", parse_bytes, 0),
        tolerance_is_final=config.getoption("leakcheck_tolerance") is not None,
        settle=_read(config, "settle", _seconds, 0.5),
        action=cast(Action, _read(config, "action", _one_of("fail", "warn"), "fail")),
        report=_read(config, "report", lambda text: config.invocation_params.dir / text, None),
        suppressions=_read(config, "suppressions", lambda text: config.invocation_params.dir / text, None),
        device=cast(Device, _read(config, "device", _one_of("auto", "cpu", "cuda"), "auto")),
    )


@dataclass(frozen=True)
class TestSettings:
    """What the markers of one test say.

    Attributes:
        tolerance: bytes it may leave; None: as the run says.
        excused: why it is not judged; empty: it is.
    """

    __test__ = False

    tolerance: int | None = None
    excused: str = ""


def read_markers(item: pytest.Item) -> TestSettings:
    """The nearest markers of a test.

    Raises:
        pytest.UsageError: a marker has arguments that make no sense; the message names the test.
    """
    tolerance: int | None = None
    marker = item.get_closest_marker("leakcheck")
    if marker is not None:
        unknown = set(marker.kwargs) - {"tolerance"}
        if marker.args or unknown or "tolerance" not in marker.kwargs:
            raise pytest.UsageError(
                f"{item.nodeid}: @pytest.mark.leakcheck takes one argument, tolerance=SIZE, such as tolerance='1MiB'"
            )
        try:
            tolerance = parse_bytes(marker.kwargs["tolerance"])
        except ValueError as error:
            raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.leakcheck(tolerance=…): {error}") from None
    excuse = item.get_closest_marker("no_leakcheck")
    excused = ""
    if excuse is not None:
        reason = excuse.kwargs.get("reason", excuse.args[0] if len(excuse.args) == 1 else None)
        extra = len(excuse.args) > 1 or set(excuse.kwargs) - {"reason"} or (excuse.args and excuse.kwargs)
        if extra or not isinstance(reason, str) or not reason.strip():
            raise pytest.UsageError(
                f"{item.nodeid}: @pytest.mark.no_leakcheck needs one argument, reason='why it is not judged'"
            )
        excused = reason
    return TestSettings(tolerance, excused)


def _read(config: pytest.Config, name: str, parse: Callable[[Any], T], default: T) -> T:
    given = config.getoption(f"leakcheck_{name}")
    source = f"--leakcheck-{name}"
    if given is None:
        given = config.getini(f"leakcheck_{name}")
        source = f"leakcheck_{name} in {config.inipath.name if config.inipath is not None else 'the configuration'}"
    if given is None or given == "":
        return default
    try:
        return parse(given)
    except ValueError as error:
        raise pytest.UsageError(f"{source}: {error}") from None


def _check_rootdir(config: pytest.Config) -> None:
    """Refuse a run whose rootdir is wrong because of one of our options.

    Before it knows a plugin's options, pytest takes an existing path behind one of them for a place of tests, and looks
    for its rootdir and configuration there.
    """
    arguments = [str(argument) for argument in config.invocation_params.args]
    here = config.invocation_params.dir
    for option, value in itertools.pairwise(arguments):
        if option in ("--leakcheck-report", "--leakcheck-suppressions") and not here.is_relative_to(config.rootpath):
            raise pytest.UsageError(
                f"{option} {value}: because of this path pytest takes {config.rootpath} for its rootdir; "
                f"write {option}={value}"
            )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{text!r} is no number of seconds: use 0 or more, such as 2.5")
    return seconds


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"{text!r} is not possible: use {' or '.join(allowed)}")
        return text

    return parse

"""The settings of a run: command line, then the marker, then the configuration file, then the default."""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec
import pytest

from lowtide.leakcheck.suppressions.toml import refused
from lowtide.probes.heap.births import young_generations_tell
from lowtide.probes.objects.collector import NEEDS, observed_collector, why_unusable
from lowtide.reports.escaping import one_line
from lowtide.reports.sizes import parse_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

T = TypeVar("T")

Action = Literal["fail", "warn"]
Device = Literal["auto", "cpu", "cuda"]
Stacks = Literal["auto", "all", "off"]


class Settings(msgspec.Struct, frozen=True):
    """What `--leakcheck` does in this run.

    Attributes:
        tolerance: bytes that a test may leave of each resource.
        tolerance_is_final: whether it was given on the command line, which goes before the marker.
        settle: seconds without movement after which waiting ends.
        action: what a leak does to its test.
        report: folder for the report.
        suppressions: file with known leaks.
        device: what is judged.
        stacks: whose memory's allocation is recorded with its stack.
        remedies: whether to try what would give a leak back.
        warmup: whether a card is used once before a test uses it.
        cycles: bytes from which on what comes back only by a collection is a leak; None: it is noted.
        growth: bytes by which a fixture of a wider scope may grow, test after test, before that is reported at once;
            None: when its scope ends.
        processes: whether what tests leave in other processes is judged, by agents in these.
        budget: seconds for one test's explanations; a session's remedies may take four times as many.
        keep_heap: of how many tests that leak, the first ones in each process, the heap is kept beside the report.
        native: whether calls are recorded that allocate, while host memory seems to grow with each test.
    """

    tolerance: int
    tolerance_is_final: bool
    settle: float
    action: Action
    report: Path | None
    suppressions: Path | None
    device: Device
    stacks: Stacks
    remedies: bool
    warmup: bool = True
    growth: int | None = None
    cycles: int | None = None
    processes: bool = True
    budget: float = 30.0
    keep_heap: int = 0
    native: bool = False

    def as_texts(self) -> dict[str, str]:
        """Return each setting by its name, as a report has it."""
        return {name: str(getattr(self, name)) for name in self.__struct_fields__}


def usage_error(message: str) -> pytest.UsageError:
    """Return the error of a setting, a marker or a file that makes no sense; its message is one line."""
    return pytest.UsageError(one_line(message))


def read_settings(config: pytest.Config) -> Settings:
    """Return the settings of this run.

    Raises:
        pytest.UsageError: one of them makes no sense; the message says where it came from and what is allowed.
    """
    if not young_generations_tell():
        raise usage_error(f"--leakcheck: it needs {NEEDS}: {why_unusable(observed_collector())}")
    _check_rootdir(config)
    report = _read(config, "report", _path, None)
    if report is not None and not hasattr(config, "workerinput"):
        _check_writable(report)
    keep_heap = _read(config, "keep-heap", _count, 0)
    if keep_heap and report is None:
        raise usage_error("--leakcheck-keep-heap: heaps are kept beside the report: add --leakcheck-report DIR")
    return Settings(
        tolerance=_read(config, "tolerance", _size, 0),
        tolerance_is_final=config.getoption("leakcheck_tolerance") is not None,
        settle=_read(config, "settle", _seconds, 0.5),
        action=cast(Action, _read(config, "action", _one_of("fail", "warn"), "fail")),
        report=report,
        suppressions=_read(config, "suppressions", _path, None),
        device=cast(Device, _read(config, "device", _one_of("auto", "cpu", "cuda"), "auto")),
        stacks=cast(Stacks, _read(config, "stacks", _one_of("auto", "all", "off"), "auto")),
        remedies=_read(config, "remedies", _one_of("on", "off"), "on") == "on",
        warmup=_read(config, "warmup", _one_of("on", "off"), "on") == "on",
        growth=_read(config, "growth", _size, None),
        cycles=_read(config, "cycles", _size, None),
        processes=_read(config, "processes", _one_of("auto", "off"), "auto") == "auto",
        budget=_read(config, "budget", _seconds, 30.0),
        keep_heap=keep_heap,
        native=_read(config, "native", _one_of("on", "off"), "off") == "on",
    )


def _read(config: pytest.Config, name: str, parse: Callable[[str, Path], T], default: T) -> T:
    key = name.replace("-", "_")
    given = config.getoption(f"leakcheck_{key}")
    source, base = f"--leakcheck-{name}", config.invocation_params.dir
    if given is None:
        given = config.getini(f"leakcheck_{key}") or None
        if config.inipath is not None:
            source, base = f"leakcheck_{key} in {config.inipath.name}", config.inipath.parent
    if given is None:
        given = _own_table(config.rootpath).get(name)
        source, base = f"{name} in [tool.lowtide] of pyproject.toml", config.rootpath
    if given is None:
        return default
    try:
        return parse(given, base)
    except ValueError as error:
        raise usage_error(f"{source}: {error}") from None


def _own_table(root: Path) -> dict[str, Any]:
    """Return what `[tool.lowtide]` in the root's pyproject.toml sets; `suppressions` there are no setting."""
    try:
        document = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}  # none, or one that pytest itself has refused
    except (ValueError, RecursionError) as error:
        raise pytest.UsageError(f"{root / 'pyproject.toml'}: cannot be read: {refused(error)}") from error
    table = document.get("tool", {}).get("lowtide", {})
    known = (
        "tolerance",
        "settle",
        "action",
        "report",
        "device",
        "stacks",
        "remedies",
        "warmup",
        "growth",
        "cycles",
        "processes",
        "native",
        "suppressions",
    )
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise usage_error(f"[tool.lowtide] of pyproject.toml: {unknown[0]!r} is unknown: use {', '.join(known)}")
    return {name: str(value) for name, value in table.items() if name != "suppressions"}


def _size(text: str, base: Path) -> int:
    return parse_bytes(text)


def _path(text: str, base: Path) -> Path | None:
    if not text:
        raise ValueError("the path is empty: give one, or leave the setting out")
    return base / text


def _check_writable(folder: Path) -> None:
    """Make sure that the report can be written before the tests run for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise usage_error(
            f"--leakcheck-report: {folder} cannot be written to ({error.strerror}): choose another report folder"
        ) from None


def _check_rootdir(config: pytest.Config) -> None:
    """Refuse a run whose rootdir is wrong because of one of our options.

    Before it knows a plugin's options, pytest takes an existing path behind one of them for a place of tests, and looks
    for its rootdir and configuration there.
    """
    arguments = [str(argument) for argument in config.invocation_params.args]
    here = config.invocation_params.dir
    for option, value in itertools.pairwise(arguments):
        if option in ("--leakcheck-report", "--leakcheck-suppressions") and not here.is_relative_to(config.rootpath):
            raise usage_error(
                f"{option} {value}: because of this path pytest takes {config.rootpath} for its rootdir; "
                f"write {option}={value}"
            )


def _seconds(text: str, base: Path) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{text!r} is no number of seconds: use 0 or more, such as 2.5")
    return seconds


def _count(text: str, base: Path) -> int:
    if not text.isdecimal() or len(text) > 6:
        raise ValueError(f"{text!r} is no number of tests: use 0 or more, such as 3")
    return int(text)


def _one_of(*allowed: str) -> Callable[[str, Path], str]:
    def parse(text: str, base: Path) -> str:
        if text not in allowed:
            raise ValueError(f"{text!r} is not possible: use {' or '.join(allowed)}")
        return text

    return parse

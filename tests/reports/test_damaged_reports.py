"""A report that is cut off, older, newer, damaged or hostile: it is read, or one line says what is wrong with it."""

from __future__ import annotations

import copy
import json
import os
import random
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from lowtide.leakcheck.cli.commands import app
from lowtide.leakcheck.gate.calibration import CalibrationError, read_tolerances
from lowtide.leakcheck.gate.gate import KnownFindings, KnownFindingsError
from lowtide.reports import schema
from lowtide.reports.reading.json_files import MOST_BYTES, UnreadableError, decode_json, read_bounded
from tests.reports.small_reports import LIFE, finding, report, subject
from tests.reports.test_generated_reports import BOUNDED as GENERATED
from tests.reports.test_generated_reports import render_all

pytestmark = pytest.mark.nightly

REAL = (Path(__file__).parents[2] / "docs" / "data" / "vllm-life.json").read_bytes()
"""A life of vLLM on an H100, as `lowtide check` wrote it."""

LEAK = schema.encode(
    report(
        subject(
            finding(
                path=(schema.Hop(type="module", edge="engine"), schema.Hop(type="list", edge=".POOL", suspect=True)),
                allocated_at=(schema.Frame(file="engine.py", line=3, function="load"),),
                remedy=schema.Remedy(action="engine.POOL.clear()", returns_bytes=48 << 20),
                parts=(finding(resource="threads", bytes=0),),
            ),
            stages=LIFE,
        )
    )
)

BOUNDED = settings(GENERATED, max_examples=100)

STRANGE = [None, True, -1, 0.5, 1e308, 10**30, 1 << 63, "", "x", "\x1b[2J\n", [], {}, [[[]]], {"": {"": None}}]
"""What a value may be replaced by."""


def outcome(data: bytes) -> schema.Report | None:
    """What is read; None if it was refused, in one line that says what to do."""
    try:
        return schema.decode(data, "a/leakcheck.json")
    except schema.ReportError as error:
        line = str(error)
        assert line.isprintable()
        assert len(line) < 500
        assert line.startswith("a/leakcheck.json ")
        assert ": " in line
        return None


def check(data: bytes) -> None:
    read = outcome(data)
    if read is not None:
        render_all(read)


@pytest.mark.parametrize("data", [REAL, LEAK], ids=["vllm", "leak"])
def test_a_report_that_is_whole_is_read(data: bytes) -> None:
    assert outcome(data) is not None


def test_a_report_that_is_cut_off_anywhere_is_refused_and_says_where() -> None:
    for end in [*range(0, len(LEAK) - 2, 7), *range(0, len(REAL) - 2, 997)]:
        data = LEAK if end < len(LEAK) - 2 else REAL
        with pytest.raises(schema.ReportError, match=f"it is cut off after {end} bytes: write it again"):
            schema.decode(data[:end])


@BOUNDED
@given(st.sampled_from([REAL, LEAK]), st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes_are_refused_or_shown(data: bytes, flips: list[tuple[float, int]]) -> None:
    changed = bytearray(data)
    for where, bits in flips:
        changed[int(where * (len(data) - 1))] ^= bits
    check(bytes(changed))


@BOUNDED
@given(st.sampled_from([REAL, LEAK]), st.integers(0), st.sampled_from(["delete", "double", "rename", *STRANGE]))
def test_values_that_are_gone_doubled_or_of_another_type_are_refused_or_shown(data: bytes, seed: int, how: Any) -> None:
    value = json.loads(data)
    chosen = random.Random(seed)
    for _ in range(chosen.randint(1, 3)):
        mutate(value, how, chosen)
    check(json.dumps(value).encode())


def mutate(value: Any, how: Any, chosen: random.Random) -> None:
    """Change one place of a JSON value, anywhere in it."""
    places: list[tuple[Any, Any]] = []
    queue = [value]
    while queue:
        container = queue.pop()
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        places += [(container, key) for key in keys]
        queue += [container[key] for key in keys if isinstance(container[key], (dict, list))]
    if not places:
        return
    container, key = chosen.choice(places)
    if how == "delete":
        del container[key]
    elif how == "double" and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    elif how == "rename" and isinstance(container, dict):
        container[f"{key}\n\x1b[31m"] = container.pop(key)
    else:
        # A copy: the next change may be in it.
        container[key] = copy.deepcopy(how)


def with_schema(name: object) -> bytes:
    return json.dumps({**json.loads(LEAK), "schema": name}).encode()


def nested(depth: int) -> bytes:
    """A report with parts of parts; as text, because `json.dumps` would not go that deep."""
    whole = json.loads(LEAK)
    head, tail = json.dumps({**whole["subjects"][0]["findings"][0], "parts": ["HERE"]}).split('"HERE"')
    whole["subjects"][0]["findings"] = ["HERE"]
    before, after = json.dumps(whole).split('"HERE"')
    return (before + head * depth + tail * depth + after).encode()


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut off after 0 bytes"),
    "cut off": (LEAK[:-30], "cut off after"),
    "no JSON": (b"<html>", "JSON is malformed"),
    "a list": (b"[]", "Expected `object`, got `array`"),
    "null": (b"null", "Expected `object`, got `null`"),
    "an empty object": (b"{}", "missing required field"),
    "another schema": (with_schema("cyclonedx\x1b[31m\nlowtide: all is well"), "name the folder of a report"),
    "a newer schema": (with_schema("lowtide-report/2"), "newer than lowtide-report/1: update lowtide"),
    "an older schema": (with_schema("lowtide-report/0"), "older than lowtide-report/1: run lowtide again"),
    "a schema that is none": (with_schema(["lowtide-report/1"]), "Expected"),
    "a field of another version": (LEAK.replace(b'"command"', b'"new\\n\\u001b[31m": 1, "command"', 1), "0.1.0"),
    "UTF-16": (LEAK.decode().encode("utf-16"), "malformed"),
    "Latin-1": (LEAK.replace(b"H200", b"H\xe9\xff"), "no UTF-8"),
    "half a surrogate pair": (LEAK.replace(b"H200", b"\\ud800"), "leakcheck.json"),
    "NaN": (LEAK.replace(b'"cycle": 1', b'"cycle": NaN', 1), "malformed"),
    "infinite": (LEAK.replace(b'"seconds": 2.0', b'"seconds": 1e400', 1), "out of range"),
    "endless": (LEAK.replace(b'"seconds": 2.0', b'"seconds": 1e300', 1), "Expected `float` <="),
    "a huge number": (LEAK.replace(b'"count": 3', b'"count": ' + b"9" * 5000, 1), "out of range"),
    "one more than 64 bits": (LEAK.replace(b'"count": 3', b'"count": 9223372036854775808', 1), "Expected `int` <="),
    "deep lists": (b"[" * 200_000, "Expected `object`"),
    "deep lists in a field": (b'{"x": ' + b"[" * 200_000, "unknown field"),
    "parts of parts": (nested(20), "parts 8 deep"),
    "very deep parts": (nested(50_000), "nested too deeply"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_report_is_refused_with_what_is_wrong(name: str) -> None:
    data, wrong = BROKEN[name]
    assert outcome(data) is None
    with pytest.raises(schema.ReportError) as refused:
        schema.decode(data, "leakcheck.json")
    assert wrong in str(refused.value)


def test_of_doubled_keys_the_last_one_counts() -> None:
    doubled = LEAK.replace(b'"command": ', b'"command": "first", "command": ', 1)
    assert schema.decode(doubled) == schema.decode(LEAK)


CONFIG = '[gate]\ndevices = ["cpu"]\n[[gate.subject]]\npytest = "tests"\n'
COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "report": lambda broken, _: ["report", str(broken)],
    "open": lambda broken, _: ["open", str(broken)],
    "diff before": lambda broken, whole: ["diff", str(broken), str(whole)],
    "diff after": lambda broken, whole: ["diff", str(whole), str(broken)],
    "suppress": lambda broken, whole: ["suppress", str(broken), "--file", str(whole / "lowtide.toml")],
    "history": lambda broken, whole: [
        "history", "--add", str(broken), "--commit", "a", "--database", str(whole / "history.sqlite"),
    ],
    "gate": lambda broken, whole: [
        "gate", "--new-since", str(broken), "--list", "--config", str(whole / "gate.toml"),
    ],
}  # fmt: skip


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setattr(webbrowser, "open", lambda url: True)
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    broken.mkdir()
    whole.mkdir()
    (whole / "leakcheck.json").write_bytes(LEAK)
    (whole / "gate.toml").write_text(CONFIG)
    return broken, whole


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_a_broken_report_in_one_line(command: str, folders: tuple[Path, Path]) -> None:
    broken, whole = folders
    for name, (data, _) in BROKEN.items():
        (broken / "leakcheck.json").write_bytes(data)
        done = CliRunner().invoke(app, COMMANDS[command](broken, whole))
        assert isinstance(done.exception, SystemExit), (name, done.exception)
        assert (done.exit_code, done.stdout) == (2, ""), (name, done.output)
        (line,) = done.stderr.splitlines()
        assert line.startswith("lowtide: "), name
        assert "leakcheck.json" in line, name
        assert line.isprintable(), name
        assert sorted(file.name for file in broken.iterdir()) == ["leakcheck.json"], name


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_the_real_report(command: str, folders: tuple[Path, Path]) -> None:
    broken, whole = folders
    (broken / "leakcheck.json").write_bytes(REAL)
    done = CliRunner().invoke(app, COMMANDS[command](broken, whole))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert "cannot be read" not in done.stderr
    assert "not a lowtide-report" not in done.stderr


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "leakcheck.json"
    path.touch()
    # Sparse: it takes no room.
    os.truncate(path, MOST_BYTES + 1)
    with pytest.raises(schema.ReportError, match="is larger than 512 MiB: it is not read"):
        schema.read(tmp_path)


def test_a_file_that_grows_while_it_is_read_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bounded(tmp_path / "a", most=5) == b"12345"
    with pytest.raises(UnreadableError, match="larger"):
        read_bounded(tmp_path / "a", most=4)
    # It reports no size.
    with pytest.raises(UnreadableError, match="larger"):
        read_bounded(Path("/proc/self/maps"), most=4)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "missing"])
def test_what_is_no_file_is_refused_and_never_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "leakcheck.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    with pytest.raises(schema.ReportError, match="No such file" if kind == "missing" else "is no regular file"):
        schema.read(tmp_path)


@pytest.mark.parametrize("data", [b"\xff", b'{"x": ' + b"[" * 100_000, b"{", b"[]", b'{"schema": "\xff"'])
def test_a_baseline_and_a_calibration_are_refused_in_one_line(data: bytes, tmp_path: Path) -> None:
    for name in ("lowtide-baseline.json", "calibration.json"):
        (tmp_path / name).write_bytes(data)
    with pytest.raises(KnownFindingsError, match=r"lowtide-baseline\.json"):
        KnownFindings.load(tmp_path / "lowtide-baseline.json")
    with pytest.raises(CalibrationError, match="has no calibrated tolerances"):
        read_tolerances(tmp_path, "cpu")


def test_what_is_quoted_of_a_file_has_an_end() -> None:
    with pytest.raises(UnreadableError) as refused:
        decode_json(json.dumps({"x" * 5000: 1}).encode(), schema.Machine)
    assert len(str(refused.value)) < 250

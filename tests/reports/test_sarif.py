"""The SARIF file: valid by its schema, a result per finding, at a line that is really there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lowtide.reports import schema
from lowtide.reports.sarif import render_sarif
from tests.reports.small_reports import HOSTILE, finding, report, subject

SCHEMA = Path(__file__).parents[1] / "data" / "sarif-2.1.0.schema.json"


def sarif_of(written: schema.Report, root: Path | None = None) -> Any:
    """The one run of the log, once that is known to be valid."""
    log = json.loads(render_sarif(written, root).encode())
    jsonschema.Draft4Validator(
        json.loads(SCHEMA.read_text(encoding="utf-8")), format_checker=jsonschema.FormatChecker()
    ).validate(log)
    (run,) = log["runs"]
    return run


def place_of(written: schema.Finding, root: Path | None, name: str = "a life") -> tuple[str, int] | None:
    (result,) = sarif_of(report(subject(written, name=name)), root)["results"]
    physical = result["locations"][0].get("physicalLocation")
    return physical and (physical["artifactLocation"]["uri"], physical["region"]["startLine"])


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").touch()
    (tmp_path / "engine" / "cache.py").write_text(
        "import os\n\nif os.environ:\n    POOL: list = []\n\n\nclass Pools:\n    size = 3\n\n    shared = {}\n"
    )
    (tmp_path / "src" / "other").mkdir(parents=True)
    (tmp_path / "src" / "other" / "broken.py").write_text("def :\n")
    (tmp_path / "engine" / "user.py").write_text("\nfrom engine.cache import POOL as HELD\n")
    (tmp_path / "linked").symlink_to("engine")
    return tmp_path


def test_a_finding_is_a_result_with_its_fingerprint_and_its_rule() -> None:
    run = sarif_of(report(subject(finding())))
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("tensors/module-global", "error")
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["tensors/module-global"]
    assert result["partialFingerprints"]["lowtideFingerprint/v1"] == "0123456789abcdef"
    assert result["message"]["text"].startswith("tests/test_a.py::test_b: 48.0 MiB of tensors did not come back")
    assert result["locations"][0]["logicalLocations"] == [{"fullyQualifiedName": "engine.cache.POOL[0]"}]
    assert result["properties"]["bytes"] == 48 << 20


@pytest.mark.parametrize(
    ("holder", "place"),
    [
        ("engine.cache.POOL[0]", ("engine/cache.py", 4)),
        ("engine.cache.Pools.shared['x']", ("engine/cache.py", 10)),
        ("engine.cache.Pools.set_elsewhere", ("engine/cache.py", 7)),
        ("engine.cache.unknown", ("engine/cache.py", 1)),
        ("linked.cache.POOL", ("engine/cache.py", 4)),
        ("engine.user.HELD[1]", ("engine/user.py", 2)),
        ("engine.absent.X", ("engine/__init__.py", 1)),
        ("other.broken.X", ("src/other/broken.py", 1)),
        ("local 'tensor' of step() in engine/cache.py:8", ("engine/cache.py", 8)),
        ("elsewhere.X", None),
        ("local 'tensor' of step() in missing.py:8", None),
        ("thread 'worker'", None),
    ],
)
def test_the_place_is_where_the_holder_is_defined(holder: str, place: tuple[str, int] | None, sources: Path) -> None:
    assert place_of(finding(holder=holder), sources) == place


def test_without_a_known_holder_it_is_the_first_line_of_ours_that_allocated(sources: Path) -> None:
    frames = (
        schema.Frame(file="/usr/lib/torch/nn.py", line=7, function="linear"),
        schema.Frame(file=str(sources / "site-packages" / "x.py"), line=8, function="forward"),
        schema.Frame(file=str(sources / "engine" / "cache.py"), line=4, function="fill"),
    )
    assert place_of(finding(holder=None, allocated_at=frames), sources) == ("engine/cache.py", 4)
    assert place_of(finding(holder=None, allocated_at=frames[:1]), sources) == ("file:///usr/lib/torch/nn.py", 7)
    (result,) = sarif_of(report(subject(finding(allocated_at=frames))), sources)["results"]
    stack = result["stacks"][0]["frames"]
    assert [frame["location"]["physicalLocation"]["region"]["startLine"] for frame in stack] == [7, 8, 4]


def test_else_it_is_the_tests_file_also_in_a_cell_of_the_gate(sources: Path) -> None:
    (sources / "tests").mkdir()
    (sources / "tests" / "test_a.py").touch()
    for name in ("tests/test_a.py::test_b[x::y]", "unit-cpu/tests/test_a.py::test_b"):
        assert place_of(finding(holder=None), sources, name) == ("tests/test_a.py", 1)
    assert place_of(finding(holder=None), sources, "tests/test_gone.py::test_b") is None


def test_a_module_is_parsed_once(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    whole = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path), whole(path))[1])
    sarif_of(report(*(subject(finding(), name=f"life {turn}") for turn in range(20))), sources)
    assert read == [sources / "engine" / "cache.py"]


def test_a_suppressed_finding_is_a_note_with_its_suppression() -> None:
    (result,) = sarif_of(report(subject(finding(suppressed_by="known"))))["results"]
    assert result["level"] == "note"
    assert result["suppressions"] == [{"kind": "external", "justification": "known"}]


def test_what_could_not_be_judged_makes_the_run_no_success() -> None:
    failed = subject(name="life", outcome="error", reason="timed out")
    (invocation,) = sarif_of(report(failed))["invocations"]
    assert invocation["executionSuccessful"] is False
    assert [note["message"]["text"] for note in invocation["toolExecutionNotifications"]] == ["life: error: timed out"]
    (invocation,) = sarif_of(report(subject()))["invocations"]
    assert invocation["executionSuccessful"] is True


def test_no_text_is_a_placeholder_or_a_link_and_any_text_is_valid() -> None:
    hostile = finding(
        message=HOSTILE,
        holder=HOSTILE,
        stage=HOSTILE,
        fingerprint=HOSTILE,
        suppressed_by=HOSTILE,
        allocated_at=(schema.Frame(file=f"/x/{HOSTILE}", line=0, function=HOSTILE),),
    )
    run = sarif_of(report(subject(hostile, name=HOSTILE), version=HOSTILE, command=HOSTILE))
    text = run["results"][0]["message"]["text"]
    assert "{{0}}" in text
    assert "](" not in text
    assert "\x1b" not in json.dumps(run, ensure_ascii=False)

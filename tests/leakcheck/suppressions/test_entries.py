"""Known findings: which entries of a file match them, when, and what is wrong with entries after a run."""

from __future__ import annotations

import re
import sys
from datetime import date
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from lowtide.leakcheck.suppressions.entries import Suppressions, find, load, problems, shipped
from lowtide.leakcheck.suppressions.toml import SuppressionError
from lowtide.reports.schema import Finding, Hop, Outcome, Subject
from lowtide.reports.statement import restated

TODAY = date(2027, 1, 31)

LEAK = Finding(
    resource="tensors",
    cause="lru-cache",
    bytes=112 << 20,
    count=1,
    device="cuda:0",
    stage="shutdown",
    message="112.0 MiB of tensors did not come back",
    fingerprint="0123456789abcdef",
    holder="supports_kw",
    path=(Hop(type="module", edge="utils"), Hop(type="dict", edge=".cache"), Hop(type="Tensor", edge="['kv'][3]")),
)


def written(folder: Path, text: str, name: str = "lowtide.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def entry(folder: Path, *lines: str) -> Suppressions:
    """A file of one entry, its reason given."""
    return load(written(folder, "\n".join(["[[suppressions]]", 'reason = "known"', *lines, ""])))


def suppressed(entries: Suppressions, finding: Finding = LEAK) -> bool:
    (after,) = entries.apply([finding], TODAY).findings
    return after.suppressed_by is not None


def refused(path: Path, line: int | None, problem: str) -> None:
    """Loading it raises one line: the file, the line, and exactly this problem."""
    place = f"{path}:" if line is None else f"{path}:{line}:"
    with pytest.raises(SuppressionError) as caught:
        load(path)
    assert str(caught.value) == f"{place} {problem}"


# What an entry matches


def test_a_fingerprint_suppresses_its_finding_and_no_other(tmp_path: Path) -> None:
    entries = entry(tmp_path, 'fingerprint = "0123456789abcdef"')
    assert suppressed(entries)
    assert not suppressed(entries, msgspec.structs.replace(LEAK, fingerprint="0123456789abcdee"))


def test_a_fingerprint_may_be_in_capitals(tmp_path: Path) -> None:
    assert suppressed(entry(tmp_path, 'fingerprint = "0123456789ABCDEF"'))


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("supports_kw", True),
        ("supports_*", True),
        ("*", True),
        ("*kw*", True),
        ("utils.cache['kv'][3]", True),
        ("utils.*['kv'][*]", True),
        ("supports", False),
        ("utils.cache", False),
        ("utils?cache*", False),
        ("utils.cache['kv'][[]3]", False),
        ("SUPPORTS_KW", False),
    ],
)
def test_a_path_fits_the_whole_holder_or_the_whole_path_and_only_the_star_is_special(
    tmp_path: Path, pattern: str, matches: bool
) -> None:
    assert suppressed(entry(tmp_path, f'path = "{pattern}"')) is matches


def test_a_star_fits_a_finding_whose_holder_nobody_knows_and_a_name_does_not(tmp_path: Path) -> None:
    unexplained = msgspec.structs.replace(LEAK, holder=None, path=())
    assert suppressed(entry(tmp_path, 'path = "*"'), unexplained)
    assert not suppressed(entry(tmp_path, 'path = "supports_kw"'), unexplained)


@pytest.mark.parametrize(
    ("also", "matches"),
    [
        ('resource = "tensors"', True),
        ('resource = "driver"', False),
        ('cause = "lru-cache"', True),
        ('cause = "module-global"', False),
    ],
)
def test_resource_and_cause_must_fit_too(tmp_path: Path, also: str, matches: bool) -> None:
    assert suppressed(entry(tmp_path, 'path = "*"', also)) is matches


def test_a_finding_says_which_entry_suppressed_it_and_why_in_one_line(tmp_path: Path) -> None:
    text = '# first\n\n[[suppressions]]\npath = "*"\nreason = """fixed\nupstream"""\n'
    (after,) = load(written(tmp_path, text)).apply([LEAK], TODAY).findings
    assert after == msgspec.structs.replace(LEAK, suppressed_by="lowtide.toml:3: fixed upstream")


def test_findings_keep_their_order_and_those_that_nothing_matches_stay_as_they_are(tmp_path: Path) -> None:
    other = msgspec.structs.replace(LEAK, fingerprint="f" * 16)
    after = entry(tmp_path, 'fingerprint = "0123456789abcdef"').apply([other, LEAK, other], TODAY).findings
    assert [finding.suppressed_by is None for finding in after] == [True, False, True]
    assert after[0] == after[2] == other


def test_the_first_entry_that_matches_gives_the_reason_and_all_that_match_are_used(tmp_path: Path) -> None:
    text = "\n".join(f'[[suppressions]]\npath = "*"\nreason = "{reason}"' for reason in ("one", "two"))
    applied = load(written(tmp_path, text)).apply([LEAK], TODAY)
    assert applied.findings[0].suppressed_by == "lowtide.toml:1: one"
    assert applied.used == {"lowtide.toml:1", "lowtide.toml:4"}


@pytest.mark.parametrize(
    ("patterns", "known"),
    [(["*ONE*"], False), (["*ONE*", "*TWO*"], False), (["*ONE*", "*TWO*", "*THREE*"], True), (["*"], True)],
)
@pytest.mark.parametrize("is_stated", [False, True])
def test_what_is_known_of_one_setting_hides_no_other_one(
    tmp_path: Path, patterns: list[str], known: bool, is_stated: bool
) -> None:
    names = tuple(f"os.environ['{name}']" for name in ("ONE", "TWO", "THREE"))
    left: Finding = msgspec.structs.replace(LEAK, resource="globals", count=3, path=(), holder=", ".join(names))
    if is_stated:
        left = restated(msgspec.structs.replace(left, holder=f"{names[0]} and 2 more"), names=names)
    lines = [f'[[suppressions]]\npath = "{pattern}"\nreason = "it may"' for pattern in patterns]
    applied = load(written(tmp_path, "\n".join(lines))).apply([left], date.max)
    assert (applied.findings[0].suppressed_by is not None) is known
    assert len(applied.used) == len(patterns)


def test_settings_that_are_not_all_named_are_hidden_by_no_pattern_for_one(tmp_path: Path) -> None:
    left = msgspec.structs.replace(LEAK, resource="globals", count=3, path=(), holder="ONE and 2 more")
    assert not suppressed(entry(tmp_path, 'path = "*ONE*"'), left)
    assert suppressed(entry(tmp_path, f'fingerprint = "{left.fingerprint}"'), left)


def with_parts() -> Finding:
    parts = tuple(msgspec.structs.replace(LEAK, fingerprint=digit * 16) for digit in "12")
    return msgspec.structs.replace(LEAK, parts=parts)


def test_what_suppresses_a_finding_suppresses_its_parts_and_keeps_their_own_reasons(tmp_path: Path) -> None:
    text = "".join(
        f"[[suppressions]]\nreason = '{reason}'\nfingerprint = '{mark}'\n"
        for reason, mark in (("the whole", LEAK.fingerprint), ("a part", "2" * 16))
    )
    entries = load(written(tmp_path, text))
    applied = entries.apply([with_parts()], TODAY)
    (found,) = applied.findings
    reasons = [(part.suppressed_by or "").partition(": ")[2] for part in (found, *found.parts)]
    assert reasons == ["the whole", "the whole", "a part"]
    assert applied.used == {known.id for known in entries.entries}


def test_what_suppresses_a_part_hides_nothing_else_and_is_used(tmp_path: Path) -> None:
    entries = entry(tmp_path, f'fingerprint = "{"1" * 16}"')
    subject, used = entries.judge(Subject(id="a", outcome="leak", findings=(with_parts(),)), TODAY)
    (found,) = subject.findings
    assert subject.outcome == "leak"
    assert [part.suppressed_by is None for part in (found, *found.parts)] == [True, False, True]
    assert used == {known.id for known in entries.entries}


def test_what_is_suppressed_already_keeps_its_note_and_uses_nothing(tmp_path: Path) -> None:
    before = msgspec.structs.replace(LEAK, suppressed_by="other.toml:1: known")
    applied = entry(tmp_path, 'path = "*"').apply([before], TODAY)
    assert applied.findings == (before,)
    assert applied.used == frozenset()


# What becomes of a subject

OTHER = msgspec.structs.replace(LEAK, fingerprint="f" * 16)

KNOWN_ALREADY = msgspec.structs.replace(OTHER, suppressed_by="xfail: known")


@pytest.mark.parametrize(
    ("outcome", "reason", "findings", "after"),
    [
        ("leak", "", (LEAK,), "clean"),
        ("leak", "", (LEAK, KNOWN_ALREADY), "clean"),
        ("leak", "", (LEAK, OTHER), "leak"),
        ("leak", "cycle 2: infer raised", (LEAK,), "error"),
        ("leak", "nobody knows", (), "leak"),
        ("clean", "", (), "clean"),
        ("error", "cycle 2: infer raised", (), "error"),
        ("error", "cycle 2: infer raised", (LEAK,), "error"),
        ("skipped", "no card", (), "skipped"),
    ],
)
def test_a_subject_whose_findings_are_all_known_is_no_leak(
    tmp_path: Path, outcome: Outcome, reason: str, findings: tuple[Finding, ...], after: Outcome
) -> None:
    entries = entry(tmp_path, 'fingerprint = "0123456789abcdef"')
    judged, used = entries.judge(Subject(id="a", outcome=outcome, reason=reason, findings=findings), TODAY)
    assert (judged.id, judged.reason, judged.outcome) == ("a", reason, after)
    assert judged.findings == entries.apply(findings, TODAY).findings
    assert used == ({"lowtide.toml:1"} if LEAK in findings else frozenset())


# How long, and under which versions


@pytest.mark.parametrize("quote", ["", '"'])
@pytest.mark.parametrize(("day", "counts"), [("2027-02-01", True), ("2027-01-31", True), ("2027-01-30", False)])
def test_an_entry_counts_on_its_last_day_and_not_the_day_after(
    tmp_path: Path, quote: str, day: str, counts: bool
) -> None:
    assert suppressed(entry(tmp_path, 'path = "*"', f"expires = {quote}{day}{quote}")) is counts


PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.mark.parametrize(
    ("when", "holds"),
    [
        ("python>=3.10", True),
        ("python<3.10", False),
        (f"python=={PYTHON}.*", True),
        ("Python >= 3.10 , pytest>=8", True),
        ("python>=3.10, pytest<8", False),
        ("no-such-distribution>=0", False),
        ("no-such-distribution<9999", False),
    ],
)
def test_an_entry_counts_where_all_its_version_predicates_hold(tmp_path: Path, when: str, holds: bool) -> None:
    assert suppressed(entry(tmp_path, 'path = "*"', f'when = "{when}"')) is holds


@pytest.mark.parametrize(
    ("installed", "when", "holds"),
    [
        ("2.13.0+cpu", "torch<2.14", True),
        ("2.14.0", "torch<2.14", False),
        ("0.9.1+cu128", "torch==0.9.*", True),
        ("2.15.0.dev20270101", "torch>=2.14", True),
        ("not-a-version", "torch<2.14", False),
    ],
)
def test_local_development_and_broken_versions_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str, when: str, holds: bool
) -> None:
    monkeypatch.setattr(metadata, "version", {"torch": installed}.__getitem__)
    assert suppressed(entry(tmp_path, 'path = "*"', f'when = "{when}"')) is holds


# What a run says of its entries


def judged(entries: Suppressions, *findings: Finding) -> tuple[str, ...]:
    return problems(entries.entries, entries.apply(findings, TODAY).used, TODAY)


def test_an_entry_that_matched_is_no_problem(tmp_path: Path) -> None:
    assert judged(entry(tmp_path, 'path = "*"', "expires = 2027-01-31"), LEAK) == ()


def test_an_unused_entry_is_a_problem(tmp_path: Path) -> None:
    unused = "lowtide.toml:1: unused (owner: ana): no finding matches it, delete the entry"
    assert judged(entry(tmp_path, 'path = "*"', 'owner = "ana"')) == (unused,)


def test_an_expired_entry_is_one_problem_whether_it_matches_or_not(tmp_path: Path) -> None:
    entries = entry(tmp_path, 'path = "*"', "expires = 2027-01-30", 'owner = "ana"')
    expired = "lowtide.toml:1: expired on 2027-01-30 (owner: ana): fix the leak, or renew the entry"
    assert judged(entries) == (expired,)
    # Midnight passes during a run too: what matched yesterday is expired at the end.
    assert problems(entries.entries, {"lowtide.toml:1"}, TODAY) == (expired,)


def test_an_entry_for_other_versions_is_not_unused(tmp_path: Path) -> None:
    assert judged(entry(tmp_path, 'path = "*"', 'when = "python<3.10"')) == ()


def test_an_entry_is_used_if_any_process_used_it(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "\n".join(f'[[suppressions]]\nfingerprint = "{digit * 16}"\nreason = "known"' for digit in "ab"),
    )
    # As two workers, each with its own copy of the file's entries, and strings between them.
    used = [load(path).apply([msgspec.structs.replace(LEAK, fingerprint=digit * 16)], TODAY).used for digit in "ab"]
    assert problems(load(path).entries, used[0], TODAY) == (
        "lowtide.toml:4: unused: no finding matches it, delete the entry",
    )
    assert problems(load(path).entries, used[0] | used[1], TODAY) == ()


def test_an_entry_with_a_former_fingerprint_is_reported_what_replaces_it(tmp_path: Path) -> None:
    entries = entry(tmp_path, f'fingerprint = "{"f" * 16}"', 'owner = "ana"')
    leaks = [
        msgspec.structs.replace(LEAK, fingerprint=mark * 16, former_fingerprint="f" * 16, message=f"{mark} stayed")
        for mark in "aab"
    ]
    reported = (
        "lowtide.toml:1: replaced (owner: ana): each leak has a fingerprint of its own now; write instead of "
        f"{'f' * 16}: {'a' * 16} (tensors: a stayed), {'b' * 16} (tensors: b stayed)"
    )
    assert not suppressed(entries, leaks[0])
    assert problems(entries.entries, (), TODAY, leaks) == (reported,)
    # It is known to be replaced, even where not everything was run; that it is unused is not.
    assert problems(entries.entries, (), TODAY, leaks, ran_all=False) == (reported,)
    assert problems(entries.entries, (), TODAY, [LEAK], ran_all=False) == ()
    assert problems(entries.entries, ("lowtide.toml:1",), TODAY, leaks) == ()


# Where entries are


def test_a_pyproject_has_its_entries_under_its_own_table(tmp_path: Path) -> None:
    text = (
        '[project]\nname = "x"\n[tool.lowtide]\nsettle = 3\n[[tool.lowtide.suppressions]]\npath = "*"\nreason = "y"\n'
    )
    (found,) = load(written(tmp_path, text, "pyproject.toml")).entries
    assert (found.id, found.path) == ("pyproject.toml:5", "*")


@pytest.mark.parametrize(
    ("name", "text"),
    [("lowtide.toml", ""), ("pyproject.toml", "[tool]\nx = 1\n"), ("pyproject.toml", "[tool]\nlowtide = 1\n")],
)
def test_a_file_without_entries_has_none(tmp_path: Path, name: str, text: str) -> None:
    assert load(written(tmp_path, text, name)) == Suppressions()


def test_the_nearest_folder_with_entries_is_found_and_its_own_file_first(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    top = written(tmp_path, "")
    assert find(deep) == top
    written(tmp_path / "a", "[tool.lowtide]\nsettle = 3\n", "pyproject.toml")
    assert find(deep) == top
    project = written(tmp_path / "a", '[[tool.lowtide.suppressions]]\npath = "*"\nreason = "known"\n', "pyproject.toml")
    assert find(deep) == project
    own = written(tmp_path / "a", "")
    assert find(deep) == own


def test_a_folder_without_any_has_none(tmp_path: Path) -> None:
    assert find(tmp_path) is None


def test_a_relative_folder_is_searched_upwards_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    own = written(tmp_path, "")
    assert find(Path()) == own


# The shipped list


def test_the_shipped_list_has_evidence_for_each_entry_and_none_expires() -> None:
    assert len(shipped().entries) == 3
    assert all(found.evidence and found.expires is None for found in shipped().entries)


def test_shipped_entries_are_never_unused() -> None:
    assert judged(shipped()) == ()


LIBRARY = msgspec.structs.replace(LEAK, cause="library-workspace", holder="workspace at 0x7f0000000000", path=())

DRIVER = msgspec.structs.replace(LIBRARY, resource="driver", holder=None)


@pytest.mark.parametrize(
    "finding",
    [
        LIBRARY,
        msgspec.structs.replace(DRIVER, holder="libnccl.so.2"),
        msgspec.structs.replace(DRIVER, cause="driver", holder="context"),
    ],
    ids=["cublas", "nccl", "context"],
)
def test_what_libraries_leave_is_suppressed(finding: Finding) -> None:
    (after,) = shipped().apply([finding], TODAY).findings
    assert re.match(r"shipped_suppressions\.toml:\d+: ", after.suppressed_by or "")


@pytest.mark.parametrize(
    "finding",
    [
        LEAK,
        # A buffer that a kernel library keeps in a global of its own.
        msgspec.structs.replace(LIBRARY, holder="flashinfer.decode.workspace_buffers[0]"),
        msgspec.structs.replace(LIBRARY, cause="native"),
        DRIVER,
        msgspec.structs.replace(DRIVER, cause="driver"),
        msgspec.structs.replace(DRIVER, cause="native", holder="libnccl.so.2"),
        msgspec.structs.replace(DRIVER, holder="ProcessGroupNCCL"),
        msgspec.structs.replace(DRIVER, resource="process-groups", holder="libnccl.so.2"),
        msgspec.structs.replace(DRIVER, cause="driver", holder="my.context"),
        msgspec.structs.replace(DRIVER, cause="native", holder="context"),
    ],
    ids=[
        "tensors",
        "kernel-library",
        "native",
        "driver",
        "unexplained",
        "nccl-native",
        "live-group",
        "groups",
        "my-context",
        "context-native",
    ],
)
def test_what_resembles_it_is_not(finding: Finding) -> None:
    assert not suppressed(shipped(), finding)

"""Files of suppressions: each problem is named with its line, and what is written changes nothing that was there."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import msgspec
import pytest

from lowtide.leakcheck.suppressions.entries import find, load
from lowtide.leakcheck.suppressions.toml import PYPROJECT_TABLE, Added, SuppressionError, append_entries, write_entries
from tests.leakcheck.suppressions.test_entries import (
    LEAK,
    OTHER,
    TODAY,
    entry,
    refused,
    suppressed,
    written,
)

# Lines: the parser gives none, so all that could shift them is here


def test_lines_are_right_after_strings_arrays_and_comments_that_look_like_entries(tmp_path: Path) -> None:
    text = '''\
# [[suppressions]] " \'\'\' """
[tool.other]
text = """
[[tool.lowtide.suppressions]]
\\"""
path = "no"  # ""
"""
quotes = """he said "no [\""""
quote = """
" [ """
raw = \'\'\'
[[tool.lowtide.suppressions]]
it's [
\'\'\'
list = [
  "]", # ]
  [1],
  { a = "}" },
]
[[ tool . "lowtide".suppressions ]]  # the first
reason = """
owner = "no"
"""
path = "*"
[[tool.lowtide.other]]
reason = "no"
[[tool.lowtide.suppressions]]
path = "b"
reason = "known"
\towner = 3
'''
    path = written(tmp_path, text, "pyproject.toml")
    refused(path, text.count("\n"), "owner must be text, and not empty; it is 3")
    path.write_text(text.replace("owner = 3", 'owner = "ana"'))
    assert [found.id for found in load(path).entries] == ["pyproject.toml:20", "pyproject.toml:27"]


def test_lines_are_right_in_a_file_with_two_characters_at_each_end(tmp_path: Path) -> None:
    path = tmp_path / "lowtide.toml"
    path.write_bytes(b'# x\r\n\r\n[[suppressions]]\r\npath = "*"\r\nreason = "y"\r\n')
    assert [found.id for found in load(path).entries] == ["lowtide.toml:3"]


# What is refused


def test_a_missing_file(tmp_path: Path) -> None:
    refused(tmp_path / "lowtide.toml", None, "cannot be read: No such file or directory")


def test_a_file_that_is_not_toml(tmp_path: Path) -> None:
    refused(
        written(tmp_path, "[[suppressions]]\npath\n\n# end\n"),
        2,
        "not TOML: Expected '=' after a key in a key/value pair",
    )


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    path = written(tmp_path, "[[suppressions]]\npath =")
    with pytest.raises(SuppressionError, match=rf"^{re.escape(str(path))}:2: not TOML: Invalid value$"):
        load(path)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "lowtide.toml"
    path.write_bytes(b"[[suppressions]]\npath = '\xff'\n")
    refused(path, 2, "not TOML: a byte that is not UTF-8")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("[" * 5000 + "]" * 5000, "it is nested too deeply"),
        ("1" * 5000, "a number in it has too many digits"),
    ],
)
def test_what_python_refuses_to_read_is_refused_in_one_line(value: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "lowtide.toml"
    path.write_text(f"kept = {value}\n")
    with pytest.raises(SuppressionError, match=rf"^{re.escape(str(path))}: cannot be read: {why}$"):
        load(path)


def test_a_number_of_many_digits_is_no_reason(tmp_path: Path) -> None:
    path = tmp_path / "lowtide.toml"
    path.write_text(f'[[suppressions]]\npath = "a.b"\nreason = 0x{"f" * 5000}\n')
    with pytest.raises(SuppressionError, match="reason must be text, and not empty; it is 0xff"):
        load(path)


def test_a_pyproject_on_the_way_that_is_not_toml(tmp_path: Path) -> None:
    path = written(tmp_path, "\n[tool\n", "pyproject.toml")
    with pytest.raises(SuppressionError, match=rf"^{re.escape(str(path))}:2: not TOML: "):
        find(tmp_path)


ALLOWED = "fingerprint, path, resource, cause, reason, owner, expires, when"


@pytest.mark.parametrize(
    ("lines", "line", "problem"),
    [
        (['path = "*"', 'reason = "x"', 'color = "red"'], 4, f"unknown key 'color'; allowed: {ALLOWED}"),
        (['path = "*"', 'reason = "x"', 'evidence = "x"'], 4, f"unknown key 'evidence'; allowed: {ALLOWED}"),
        (['path = "*"', 'reason = "x"', "[suppressions.when]"], 4, "when must be text, and not empty; it is {}"),
        (['path = "*"'], 1, "an entry needs a reason: why this may stay"),
        (['path = "*"', 'reason = " "'], 3, "reason must be text, and not empty; it is ' '"),
        (['path = ""', 'reason = "x"'], 2, "path must be text, and not empty; it is ''"),
        (['reason = "x"'], 1, "an entry needs either fingerprint or path; it has neither"),
        (
            ['path = "*"', 'reason = "x"', 'fingerprint = "0123456789abcdef"'],
            1,
            "an entry needs either fingerprint or path; it has both",
        ),
        (
            ['path = "*"', 'reason = "TODO: later"'],
            3,
            "the reason is still to be filled in: 'TODO: later'; say why this may stay",
        ),
        (
            ['path = "*"', 'reason = " todo"'],
            3,
            "the reason is still to be filled in: 'todo'; say why this may stay",
        ),
        (
            ['reason = "x"', 'fingerprint = "0123456789abcde"'],
            3,
            "fingerprint '0123456789abcde' is not 16 hex digits, as a report gives them",
        ),
        (
            ['reason = "x"', 'fingerprint = "0123456789abcdeg"'],
            3,
            "fingerprint '0123456789abcdeg' is not 16 hex digits, as a report gives them",
        ),
        (
            ['path = "*"', 'reason = "x"', "expires = 2027-01-31T00:00:00"],
            4,
            "expires must be a day such as 2027-01-31; it is '2027-01-31 00:00:00'",
        ),
        (
            ['path = "*"', 'reason = "x"', 'expires = "2027-02-30"'],
            4,
            "expires must be a day such as 2027-01-31; it is '2027-02-30'",
        ),
        (
            ['path = "*"', 'reason = "x"', 'expires = "20270131"'],
            4,
            "expires must be a day such as 2027-01-31; it is '20270131'",
        ),
        (['path = "*"', 'reason = "x"', "expires = 3"], 4, "expires must be a day such as 2027-01-31; it is '3'"),
    ],
)
def test_an_entry_that_cannot_be_used(tmp_path: Path, lines: list[str], line: int, problem: str) -> None:
    refused(written(tmp_path, "\n".join(["[[suppressions]]", *lines, ""])), line, problem)


@pytest.mark.parametrize(
    "part", ["torch", "<2.14", "2.14", "torch<", "torch<2.x", "torch[x]<2", "torch<2;python_version>'3'", ""]
)
def test_a_predicate_that_is_none_even_behind_one_that_does_not_hold(tmp_path: Path, part: str) -> None:
    lines = f'[[suppressions]]\npath = "*"\nreason = "x"\nwhen = """python<3, {part}"""\n'
    problem = f"when must be version predicates such as torch<2.14, python>=3.12; {part!r} is none"
    refused(written(tmp_path, lines), 4, problem)


@pytest.mark.parametrize(
    ("line", "start", "end"),
    [
        ('resource = "tensor"', "unknown resource 'tensor'; allowed: tensors, reserved, driver, ", ", teardown, state"),
        ('cause = "cache"', "unknown cause 'cache'; allowed: lru-cache, module-global, ", ", unknown"),
    ],
)
def test_a_resource_or_cause_that_no_finding_has(tmp_path: Path, line: str, start: str, end: str) -> None:
    with pytest.raises(SuppressionError) as caught:
        entry(tmp_path, 'path = "*"', line)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'lowtide.toml'}:4: {start}")
    assert message.endswith(end)


def test_a_misspelled_table_is_not_passed_over(tmp_path: Path) -> None:
    text = '\n[[supressions]]\npath = "*"\nreason = "x"\n'
    refused(written(tmp_path, text), 2, "unknown key 'supressions'; allowed: [[suppressions]]")


@pytest.mark.parametrize(
    "text",
    [
        '\n[suppressions]\npath = "*"\nreason = "x"\n',
        '\nsuppressions = [{ path = "*", reason = "x" }]\n',
        '\nsuppressions = [{ path = "*" }, { path = "*" }]\n',
        "\nsuppressions = 3\n",
    ],
)
def test_entries_that_are_no_tables_of_their_own(tmp_path: Path, text: str) -> None:
    refused(written(tmp_path, text), 2, "each suppression is a table of its own, under [[suppressions]]")


def test_in_a_pyproject_the_same_is_said_with_its_table(tmp_path: Path) -> None:
    path = written(tmp_path, "[tool.lowtide]\nsettle = 3\nsuppressions = 3\n", "pyproject.toml")
    refused(path, 3, "each suppression is a table of its own, under [[tool.lowtide.suppressions]]")


# Entries written for a report


def test_written_entries_are_refused_until_a_person_gives_the_reason(tmp_path: Path) -> None:
    text = write_entries([LEAK])
    path = written(tmp_path, text)
    with pytest.raises(SuppressionError, match=r"lowtide\.toml:5: the reason is still to be filled in: 'TODO: say why"):
        load(path)
    path.write_text(text.replace("TODO: say why this may stay", "fixed upstream"))
    (after,) = load(path).apply([LEAK], TODAY).findings
    assert after.suppressed_by == f"lowtide.toml:1: fixed upstream ({LEAK.message})"


def test_there_is_one_entry_per_fingerprint_in_order_of_appearance(tmp_path: Path) -> None:
    others = [msgspec.structs.replace(LEAK, fingerprint=digit * 16) for digit in "babcb"]
    path = written(tmp_path, write_entries(others).replace("TODO", "known"))
    assert [found.fingerprint for found in load(path).entries] == [digit * 16 for digit in "bac"]


def test_what_is_suppressed_already_gets_no_entry() -> None:
    assert write_entries([msgspec.structs.replace(LEAK, suppressed_by="lowtide.toml:1: known")]) == ""


def test_any_message_is_quoted(tmp_path: Path) -> None:
    message = 'a "b" \\ \n """ \x00 \x7f \x85 \u2028 \N{GRINNING FACE} [[suppressions]] \udcff #'
    text = write_entries([msgspec.structs.replace(LEAK, message=message)]).replace("TODO", "known")
    (found,) = load(written(tmp_path, text)).entries
    assert found.reason == f"known: say why this may stay ({message})".replace("\udcff", "\\udcff")


def test_entries_for_a_pyproject_are_in_its_table(tmp_path: Path) -> None:
    text = write_entries([LEAK, OTHER], PYPROJECT_TABLE).replace("TODO", "known")
    entries = load(written(tmp_path, text, "pyproject.toml")).entries
    assert [found.id for found in entries] == ["pyproject.toml:1", "pyproject.toml:7"]


# Entries written into a file


def test_a_file_that_is_not_there_is_made_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "lowtide.toml"
    assert append_entries(path, [LEAK, OTHER, LEAK]) == Added(((1, LEAK), (7, OTHER)), known=0)
    assert path.read_text() == write_entries([LEAK, OTHER])
    (tmp_path / "any").touch()
    assert path.stat().st_mode == (tmp_path / "any").stat().st_mode
    with pytest.raises(SuppressionError, match=r"lowtide\.toml:5: the reason is still to be filled in: 'TODO: say why"):
        load(path)


@pytest.mark.parametrize(
    ("before", "between"),
    [
        (b"", b""),
        (b"# none yet", b"\n\n"),
        (b"# none yet\n", b"\n"),
        (b"# none yet\n\n", b""),
        (b"\t \n# \xc3\xa9 \x09 \r\n\r\n# end\r\n", b"\r\n"),
        (b"# none yet\r\n\r\n# end", b"\r\n\r\n"),
        (b'[[suppressions]]\npath = "*"\nreason = """a\n\n"""  # last', b"\n\n"),
    ],
)
def test_every_byte_that_was_there_stays_and_line_ends_are_as_before(
    tmp_path: Path, before: bytes, between: bytes
) -> None:
    path = tmp_path / "lowtide.toml"
    path.write_bytes(before)
    ((line, finding),) = append_entries(path, [LEAK]).entries
    entries = write_entries([LEAK]).encode()
    if b"\r\n" in before:
        entries = entries.replace(b"\n", b"\r\n")
    assert path.read_bytes() == before + between + entries
    assert finding == LEAK
    assert path.read_bytes().splitlines()[line - 1] == b"[[suppressions]]"
    path.write_bytes(path.read_bytes().replace(b"TODO", b"known"))
    assert load(path).entries[-1].id == f"lowtide.toml:{line}"
    assert suppressed(load(path))


def test_a_finding_that_has_an_entry_gets_no_other_even_if_that_waits_for_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "lowtide.toml"
    append_entries(path, [LEAK])
    path.write_text(path.read_text().replace(LEAK.fingerprint, LEAK.fingerprint.upper()))
    before = path.read_bytes()
    known = msgspec.structs.replace(OTHER, suppressed_by="x:1: known")
    assert append_entries(path, [LEAK, known]) == Added((), known=1)
    assert path.read_bytes() == before
    assert append_entries(path, [LEAK, OTHER]) == Added(((7, OTHER),), known=1)
    assert path.read_bytes().startswith(before)


def test_what_has_nothing_to_write_makes_no_file(tmp_path: Path) -> None:
    assert append_entries(tmp_path / "lowtide.toml", []) == Added((), known=0)
    assert list(tmp_path.iterdir()) == []


def test_entries_that_load_refuses_for_what_they_say_are_kept(tmp_path: Path) -> None:
    text = "[[suppressions]]\nfingerprint = [1]\n\n[[suppressions]]\npath = 3\ncolor = 'red'\n"
    path = written(tmp_path, text)
    assert append_entries(path, [LEAK]) == Added(((8, LEAK),), known=0)
    assert path.read_text() == f"{text}\n{write_entries([LEAK])}"


@pytest.mark.parametrize(
    "text",
    [
        '[project]\nname = "x"\n[tool.lowtide]\nsettle = 3\n',
        "[tool]\nlowtide.settle = 3\n[[suppressions]]\nfingerprint = '0123456789abcdef'\n",
    ],
)
def test_a_pyproject_gets_its_entries_in_its_own_table(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text, "pyproject.toml")
    ((line, _),) = append_entries(path, [LEAK]).entries
    assert path.read_text() == f"{text}\n{write_entries([LEAK], PYPROJECT_TABLE)}"
    assert line == text.count("\n") + 2
    assert append_entries(path, [LEAK]) == Added((), known=1)


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_file_keeps_its_mode_and_a_link_its_target(tmp_path: Path, mode: int) -> None:
    (tmp_path / "real").mkdir()
    path = written(tmp_path / "real", "")
    path.chmod(mode)
    link = tmp_path / "lowtide.toml"
    link.symlink_to(path)
    append_entries(link, [LEAK])
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_text() == write_entries([LEAK])
    assert [item.name for item in (tmp_path / "real").iterdir()] == ["lowtide.toml"]


def kept(path: Path, problem: str) -> None:
    """Nothing can be added: it says so in one line, and the folder is as it was."""
    before = {item: item.read_bytes() for item in path.parent.iterdir() if item.is_file()}
    with pytest.raises(SuppressionError) as caught:
        append_entries(path, [LEAK])
    assert re.fullmatch(f"{re.escape(str(path))}:? ?{problem}", str(caught.value))
    assert {item: item.read_bytes() for item in path.parent.iterdir() if item.is_file()} == before


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("lowtide.toml", "[[suppressions]]\npath\n\n# end\n", "2: not TOML: Expected '=' after a key.*"),
        ("lowtide.toml", "\n[supressions]\n", r"2: unknown key 'supressions'; allowed: \[\[suppressions\]\]"),
        ("lowtide.toml", "suppressions = 3\n", r"1: each suppression is a table of its own.*"),
        ("lowtide.toml", "suppressions = []\n", r"no \[\[suppressions\]\] can follow what is there \(.*\)"),
        ("pyproject.toml", "[tool]\nlowtide = {}\n", r"no \[\[tool\.lowtide\.suppressions\]\] can follow .*"),
    ],
)
def test_a_file_to_which_nothing_can_be_added_stays_as_it_is(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    kept(written(tmp_path, text, name), problem)


def test_a_file_that_is_no_text_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "lowtide.toml"
    path.write_bytes(b"# \xff\n")
    kept(path, "1: not TOML: a byte that is not UTF-8")


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    kept(tmp_path / "folder", "is no file")
    kept(tmp_path / "pipe", "is no file")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(SuppressionError, match=r"deep/lowtide\.toml: cannot be written: No such file or directory$"):
        append_entries(tmp_path / "deep" / "lowtide.toml", [LEAK])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "# mine\n")
    # Whoever runs the tests may be allowed to write to any file.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    kept(path, "cannot be written: Permission denied")


@pytest.mark.parametrize("step", ["write_bytes", "replace"])
def test_a_file_whose_writing_breaks_off_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = written(tmp_path, "# mine\n")
    whole = Path.write_bytes

    def disk_full(path: Path, data: object) -> None:
        if isinstance(data, bytes):
            whole(path, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, step, disk_full)
    kept(path, "cannot be written: No space left on device")

"""What lowtide says stands in one table, `messages.txt`, in plain words."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.package import message_table
from tests.package.message_table import TABLE, messages

RIDDLES = ("is told", "are told", "whose is it", "gives back nothing of", "what it holds of", "not to be had")
"""Phrases that a reader who has never seen the project stumbles over."""


def test_the_table_has_every_message_of_the_code_and_no_other() -> None:
    written = TABLE.read_text(encoding="utf-8")
    assert message_table.table() == written, "messages have changed: read them in the table that " + (
        "python -m tests.package.message_table writes"
    )
    assert written.count("\n") > 300


def test_the_messages_are_plain() -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if any(riddle in line for riddle in RIDDLES)] == []
    # An empty slot: nothing between two marks.
    assert [line for line in lines if " :" in line.partition(": ")[2] or ": ;" in line or ",," in line] == []


def test_no_message_is_replaced_where_it_follows_from_what_is_stated() -> None:
    """`replace` would lose it: a finding of which something is stated makes its message anew."""
    assert [place for file in sources() for place in replaced_in(file)] == []


def test_a_message_that_is_replaced_is_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("found = msgspec.structs.replace(\n    found, bytes=1, message='other'\n)\n")
    assert replaced_in(tmp_path / "module.py") == ["module.py:1"]


def sources() -> list[Path]:
    files = [file for house in message_table.HOUSES for file in (message_table.ROOT / house).rglob("*.py")]
    return [file for file in files if file.parts[-2:] != ("reports", "statement.py")]


def replaced_in(file: Path) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return [
        f"{file.name}:{call.lineno}"
        for call in calls
        if ast.unparse(call.func).endswith("structs.replace") and "message" in [each.arg for each in call.keywords]
    ]


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("raise TargetError(f'{name} names no target')", "TargetError: {name} names no target"),
        ("raise kinds.UsageError('give one ' 'of them')", "UsageError: give one of them"),
        ("NotMeasured(what=key, why='no card is here')", "why: no card is here"),
        ("advice = f'unmap arena {tag!r}'", "advice: unmap arena {tag}"),
        ("raise OwnError('there is ' + what)", "OwnError: there is {…}"),
        ("f(message='one line' if one else f'{count} lines in all')", "message: one line | {count} lines in all"),
        ("refuse(f'--cycles {n} is not possible')", "refused: --cycles {n} is not possible"),
        ("typer.echo('interrupted before the end', err=True)", "printed: interrupted before the end"),
        ("say(f'{n} of', 'interrupted before the end', err=True)", "printed: interrupted before the end"),
        ("noted(finding, f'; {some} of them held by ', holder)", "note: {some} of them held by"),
        ("restated(finding, {'advice': 'end it in its teardown'})", "advice: end it in its teardown"),
        ("warnings.warn('this name is old', DeprecationWarning)", "warning: this name is old"),
    ],
)
def test_a_message_is_collected(code: str, line: str) -> None:
    assert list(messages(ast.parse(code))) == [line]


@pytest.mark.parametrize(
    "code", ["raise error", "raise KeyError(name)", "f(reason='leak')", "text = 'of no interest here'"]
)
def test_what_nobody_reads_is_not(code: str) -> None:
    assert list(messages(ast.parse(code))) == []

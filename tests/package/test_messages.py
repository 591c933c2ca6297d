"""What lowtide says stands in one table, `messages.txt`, in plain words."""

from __future__ import annotations

import ast

import pytest

from tests.package.message_table import TABLE, messages

RIDDLES = ("is told", "are told", "whose is it", "gives back nothing of", "what it holds of", "not to be had")
"""Phrases that a reader who has never seen the project stumbles over."""


def test_the_messages_are_plain() -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if any(riddle in line for riddle in RIDDLES)] == []
    # An empty slot: nothing between two marks.
    assert [line for line in lines if " :" in line.partition(": ")[2] or ": ;" in line or ",," in line] == []


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
    assert list(messages(ast.walk(ast.parse(code)))) == [line]


@pytest.mark.parametrize(
    "code", ["raise error", "raise KeyError(name)", "f(reason='leak')", "text = 'of no interest here'"]
)
def test_what_nobody_reads_is_not(code: str) -> None:
    assert list(messages(ast.walk(ast.parse(code)))) == []

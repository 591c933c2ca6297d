"""What is said of a finding, as data: its message is made of that here, and nobody takes it apart again."""

from __future__ import annotations

from typing import Any

import msgspec

from lowtide.reports.processes.stage_processes import ProcessName
from lowtide.reports.schema import Cause, Finding, Hop, Verdict, as_written
from lowtide.reports.sizes import first_of, format_amount, format_bytes

_STILL = {
    "asyncio tasks that nothing can wake": " still pending",
    "bytes": " still held",
    "file descriptors": " still open",
    "frozen objects": " still frozen",
    "process-wide settings": " not restored",
    "processes": " still running",
    "reserved ranges of addresses": " still reserved",
    "threads": " still running",
}
"""What is said of what was to be gone, by its unit."""


_MOST_NAMED = 8


class Note(msgspec.Struct, frozen=True):
    """What more is known: a part of a sentence, with the punctuation before it.

    Attributes:
        text: it, up to the holder that it names.
        holder: that holder; empty where it names none.
        rest: what comes behind the holder.
    """

    text: str
    holder: str = ""
    rest: str = ""


class Statement(msgspec.Struct, frozen=True):
    """What a message is made of; the finding says how much it is, and since when.

    Attributes:
        unit: in which it is counted: `bytes`, or the things themselves in the plural.
        what: bytes of what: `driver on cuda:0`.
        amount: what it is and how much of it, where that is said in other words.
        came: what became of it, where that is not what its unit says; None where that is no matter.
        is_since: whether it is there since the finding's stage; else it is still there after that.
        things: what it is, each by its name.
        most: how many of these are named: more of them would stand before who holds them.
        names: what each of several settings is called, all of them.
        notes: what more is known, in this order.
        process: the process that it is in, where that is another one than the checked one.
    """

    unit: str = "bytes"
    what: str = ""
    amount: str = ""
    came: str | msgspec.UnsetType | None = msgspec.UNSET
    is_since: bool = False
    things: tuple[str, ...] = ()
    most: int | None = _MOST_NAMED
    names: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    process: str = ""

    def message(self, finding: Finding) -> str:
        """Return the sentence on a finding."""
        where = f"{self.process}: " if self.process else ""
        amount = self.amount
        if not amount and self.unit == "bytes":
            amount = f"{format_bytes(finding.bytes)} of {self.what}"
        elif not amount:
            amount = format_amount(finding.count, self.unit)
        when = ""
        came = _STILL.get(self.unit, " still there") if self.came is msgspec.UNSET else self.came
        if came is not None:
            when = came + (f", since {finding.stage}" if self.is_since else f" after {finding.stage}")
        shown = first_of(self.things, self.most)
        notes = "".join(f"{note.text}{note.holder}{note.rest}" for note in self.notes)
        return f"{where}{amount}{when}{': ' if shown else ''}{shown}{notes}"


class HolderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds what a finding is about.

    Attributes:
        note: what is said of it, with the holder's name.
        cause: see `Finding`, as the others.
        verdict: see `Finding`.
        path: see `Finding`.
        advice: see `Finding`.
    """

    note: Note
    cause: Cause
    verdict: Verdict | None
    path: tuple[Hop, ...]
    advice: str | None


class StatedFinding(Finding, frozen=True, kw_only=True):
    """A finding that is not written yet: its message follows from what is stated.

    Attributes:
        statement: what its message is made of.
    """

    statement: Statement
    message: str = ""

    def __post_init__(self) -> None:
        """Make the message."""
        msgspec.structs.force_setattr(self, "message", self.statement.message(self))


def restated(finding: Finding, changes: dict[str, Any] | None = None, **of_statement: Any) -> Finding:
    """Return a finding with other things stated, and with other facts.

    Args:
        finding: the finding.
        changes: to its own fields.
        of_statement: to the statement's fields.
    """
    facts: dict[str, Any] = {name: getattr(finding, name) for name in Finding.__struct_fields__}
    statement = msgspec.structs.replace(_statement_of(finding), **of_statement)
    return StatedFinding(**{**facts, **(changes or {}), "statement": statement})


def reworded(finding: Finding, message: str, **changes: Any) -> Finding:
    """Return a finding of which another sentence is said, as a whole, and with other facts.

    (`replace` is not for that: where something is stated, the message follows from it.)
    """
    return msgspec.structs.replace(as_written(finding), message=message, **changes)


def restated_as(finding: Finding, other: Finding, changes: dict[str, Any]) -> Finding:
    """Return a finding of which the same is stated as of another one, and with other facts."""
    statement = _statement_of(other)
    return restated(finding, changes, **{name: getattr(statement, name) for name in Statement.__struct_fields__})


def noted(finding: Finding, text: str, holder: str = "", rest: str = "", **changes: Any) -> Finding:
    """Return a finding with one more note, and with other facts.

    Args:
        finding: the finding.
        text: see `Note`.
        holder: see `Note`; it becomes the finding's, too.
        rest: see `Note`.
        changes: to the finding's own fields.
    """
    if holder:
        changes["holder"] = holder
    return restated(finding, changes, notes=(*_statement_of(finding).notes, Note(text, holder, rest)))


def with_holder(finding: Finding, facts: HolderFacts) -> Finding:
    """Return a finding with who holds what it is about."""
    note = facts.note
    return noted(
        finding,
        note.text,
        note.holder,
        note.rest,
        cause=facts.cause,
        verdict=facts.verdict,
        path=facts.path,
        advice=facts.advice,
    )


def as_held(finding: Finding, other: Finding) -> Finding:
    """Return a finding with who holds what it is about, of which that was said earlier in another one."""
    facts = {name: getattr(other, name) for name in ("cause", "holder", "path", "advice")}
    return restated(finding, facts, notes=_statement_of(other).notes)


def in_process(finding: Finding, process: ProcessName) -> Finding:
    """Return a finding as one of a process's, which its message names."""
    return restated(finding, {"process": process}, process=process.text)


def _statement_of(finding: Finding) -> Statement:
    """Return what is stated of a finding; of one that was read from elsewhere that is its message, as a whole."""
    return finding.statement if isinstance(finding, StatedFinding) else Statement(amount=finding.message, came=None)

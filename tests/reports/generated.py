"""Reports that hypothesis makes from the types of the schema: whatever a file of that schema may say."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from hypothesis import strategies as st

from lowtide.reports import schema
from tests.reports.small_reports import report, subject

NESTED = 2
"""Levels of a type within itself."""

# Surrogates are no text that a file of JSON can have.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["", "x" * 3000, "<script>alert(1)</script>", "\" onload='x' ", "</style><b>", "]]>", "-->", "{{ 7 }}", "a\nb\r\nc",
     "\x1b[31mred\x1b[0m", "\x00\x7f\x85\u2028", "| a | `b` |", "[link](javascript:x)",
     "::error::x", "[bold]", "\\u0000",
     "file.py:3", "/etc/passwd:1", "🌊" * 40, "\u202egnp.exe", "\ufeff", "\ufffe", "&amp;&lt;", "$x$", "%0A"]
)  # fmt: skip


def of_type(kind: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """Values of a type, as JSON may have them.

    Args:
        kind: a type, or what `msgspec.inspect` says of one.
        depth: how many objects the values are in.
    """
    info = kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind)
    match info:
        case msgspec.inspect.StrType():
            return TEXTS
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.IntType(ge=least, le=most):
            return st.integers(0, 1 << 36) | st.integers(least, most) | st.sampled_from([least, -1, most])
        case msgspec.inspect.FloatType(ge=least, le=most):
            return st.floats(0, 1e6) | st.floats(least, most)
        case msgspec.inspect.LiteralType(values=values):
            return st.sampled_from(list(values))
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*(of_type(each, depth) for each in types))
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(of_type(item, depth + 1), max_size=3 if depth < 3 else 1).map(tuple)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(of_type(key, depth), of_type(value, depth), max_size=3)
        case msgspec.inspect.StructType(cls=cls):
            return _struct(cls, depth)
    raise NotImplementedError(f"no strategy for {info}: add one")


def _struct(cls: type[Any], depth: int) -> st.SearchStrategy[Any]:
    fields = {}
    for field in msgspec.inspect.type_info(cls).fields:
        if field.name == "parts" and depth > NESTED + 2:
            continue
        # A field that every version has written, or one that an older file lacks.
        values = st.deferred(lambda kind=field.type, depth=depth: of_type(kind, depth + 1))
        if field.required:
            fields[field.name] = values
        else:
            made = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            fields[field.name] = st.just(made) | values
    return st.builds(cls, **fields)


def filled(kind: Any, text: str, depth: int = 0) -> Any:
    """A value of a type with all that it may have: each text is the same one, and each list has one entry."""
    info = kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind)
    match info:
        case msgspec.inspect.StrType():
            return text
        case msgspec.inspect.UnionType(types=types):
            return filled(next(each for each in types if not isinstance(each, msgspec.inspect.NoneType)), text, depth)
        case msgspec.inspect.VarTupleType(item_type=item):
            return (filled(item, text, depth + 1),)
        case msgspec.inspect.DictType(value_type=value):
            return {text: filled(value, text, depth)}
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            # Parts are findings.
            own = [field for field in fields if field.name != "parts" or depth < NESTED + 2]
            return cls(**{field.name: filled(field.type, text, depth + 1) for field in own})
        case msgspec.inspect.LiteralType(values=values):
            return values[0]
        case msgspec.inspect.BoolType():
            return True
    return 7


def filled_report(text: str) -> schema.Report:
    """A report with all that it may have, and a subject of each outcome: pages show some more than others."""
    made: schema.Report = filled(schema.Report, text)
    subjects = [msgspec.structs.replace(made.subjects[0], outcome=each) for each in get_args(schema.Outcome)]
    return msgspec.structs.replace(made, subjects=tuple(subjects))


def _with_one(field: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[schema.Report]:
    """Small reports whose only subject has some values in one field: a whole report is too much to have them often."""
    return st.builds(
        lambda made, outcome: report(subject(**{field: tuple(made), "outcome": outcome})),
        st.lists(values, min_size=1, max_size=3),
        of_type(schema.Outcome),
    )


REPORTS: st.SearchStrategy[schema.Report] = st.one_of(
    of_type(schema.Report),
    _with_one("findings", of_type(schema.Finding)),
    _with_one("stages", of_type(schema.Stage)),
    _with_one("returns", of_type(schema.Return)),
    _with_one("not_measured", of_type(schema.NotMeasured)),
    _with_one("type_growth", of_type(schema.TypeGrowth)),
)

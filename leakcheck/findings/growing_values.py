"""The finding on one value that becomes longer with every turn: a text, an array, and who holds it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from lowtide.leakcheck.explaining.explain import explain
from lowtide.leakcheck.findings.growing_containers import LEAST_IN_ALL, Stretch, is_of_program, stated
from lowtide.leakcheck.growth.containers import Course
from lowtide.probes.heap.large_values import UNIT, read_values, size_of_value
from lowtide.probes.objects.foreign import type_name
from lowtide.reports.schema import Finding
from lowtide.reports.sizes import format_bytes

_MOST_PART = 0.9
"""The part of what its object has more of that a value must have: else several grow a little."""


def growth_of_values(courses: Sequence[Course], stretch: Stretch, told: Collection[int]) -> dict[int, Finding]:
    """Return a finding on each value that grows and that the program holds, by the identity of who refers to it.

    Args:
        courses: how many KiB of values the objects have had that refer to them.
        stretch: in which turns.
        told: the identities of containers that grow: what these take is told by them.
    """
    courses = [course for course in courses if course.identity not in told and course.items * UNIT >= LEAST_IN_ALL]
    if not courses:
        return {}
    _, values = read_values({course.identity for course in courses})
    there = [course for course in courses if course.identity in values]
    wanted = [values[course.identity] for course in there]
    passed = {id(values), id(wanted), id(there)}
    explained = explain(wanted, ignore=passed, roots=stretch.roots, living=True) if wanted else []
    found = {}
    for course, value, explanation in zip(there, wanted, explained, strict=True):
        if size_of_value(value) < _MOST_PART * course.items * UNIT:
            continue
        if not explanation.through.isdisjoint(told) or not is_of_program(explanation, [(value,)], stretch):
            continue
        size = round(course.items * UNIT / course.span)
        finding = stated(
            course,
            explanation,
            stretch,
            name=explanation.holder,
            takes=f"grows by {format_bytes(size)}",
            each=(size, ""),
            what=f"{type_name(type(value))} of {format_bytes(size_of_value(value))}",
        )
        found[course.identity] = msgspec.structs.replace(finding, count=course.span)
    return found

"""Which containers grow, from readings of all lengths: those that take something in every turn, and go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from lowtide.leakcheck.growth.containers import ContainerCourses, Course, together
from lowtide.probes.heap.container_lengths import ContainerLengths
from lowtide.probes.original_numpy import np

LIST, DICT = 1, 2


def reading(lengths: Mapping[int, int], kinds: Mapping[int, int] | None = None) -> ContainerLengths:
    """The lengths of containers by their identities."""
    ids = sorted(lengths)
    of = [(kinds or {}).get(identity, LIST) for identity in ids]
    return ContainerLengths(*(np.array(each, np.int64) for each in (ids, of, [lengths[each] for each in ids])))


class Read(ContainerCourses):
    """Readings, and the turn of the last one."""

    turn = 0

    def note(self, turn: int, now: ContainerLengths) -> None:
        self.turn = turn
        super().note(turn, now)

    def found(self) -> list[Course]:
        return self.growing(self.turn)


def courses(by_turn: Mapping[int, int]) -> Read:
    """One container of so many things after each of some turns, beside one that stays as it is."""
    noted = Read()
    for turn, length in by_turn.items():
        noted.note(turn, reading({100: length, 200: 5}))
    return noted


def test_one_thing_in_every_turn_is_growth_until_it_is_dropped() -> None:
    noted = courses({2: 2, 8: 8, 16: 16, 24: 24, 40: 40})
    (course,) = noted.found()
    assert (course.identity, course.items, course.span) == (100, 38, 38)
    noted.drop(100)
    assert noted.found() == []


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param({2: 2, 8: 8, 16: 16, 24: 24}, id="too few readings"),
        pytest.param({2: 2, 8: 5, 16: 9, 24: 13, 40: 21}, id="not in every turn"),
        pytest.param({2: 2, 8: 8, 16: 16, 24: 16, 40: 16}, id="full"),
        pytest.param({2: 2, 8: 8, 16: 16, 24: 24, 32: 32, 40: 32}, id="full at last"),
        pytest.param({2: 2, 8: 100, 16: 160, 24: 170, 40: 190}, id="ever less"),
        pytest.param({2: 2, 8: 8, 16: 0, 24: 8, 40: 24}, id="emptied"),
    ],
)
def test_what_fills_or_is_emptied_is_no_growth(lengths: dict[int, int]) -> None:
    assert courses(lengths).found() == []


def test_growth_after_a_time_of_rest_is_growth_of_its_own() -> None:
    noted = courses({2: 2, 8: 2, 16: 2, 24: 10, 32: 18, 40: 26, 48: 34})
    (course,) = noted.found()
    assert (course.turns[0], course.span) == (16, 32)


def test_the_turns_before_it_was_used_do_not_count() -> None:
    noted = courses({2: 0, 24: 4, 28: 8, 32: 12, 36: 16, 40: 20})
    (course,) = noted.found()
    assert (course.turns[0], course.items) == (24, 16)


def test_what_is_of_no_interest_is_not_told() -> None:
    noted = courses({2: 2, 8: 8, 16: 16, 24: 24, 40: 40})
    assert list(noted.candidates()) == [100]
    noted.drop(100)
    assert noted.found() == []


def test_what_was_not_read_at_last_is_not_known_to_go_on() -> None:
    assert courses({2: 2, 8: 8, 16: 16, 24: 24, 40: 40}).growing(48) == []


def test_another_container_in_the_same_place_begins_anew() -> None:
    noted = Read()
    for turn in range(0, 60, 10):
        noted.note(turn, reading({100: turn}, {100: LIST if turn < 30 else DICT}))
    assert noted.found() == []


def test_one_that_is_gone_is_forgotten() -> None:
    noted = Read()
    for turn in range(0, 50, 10):
        noted.note(turn, reading({100: turn}))
    noted.note(50, reading({}))
    assert noted.found() == []


def test_what_came_while_it_was_not_judged_is_no_growth() -> None:
    noted = Read()
    for turn in range(0, 100, 10):
        if turn == 50:
            noted.break_off()
        noted.note(turn, reading({100: turn}))
    (course,) = noted.found()
    assert course.turns[0] == 50


def served(*lengths: int, beside: Sequence[int] = ()) -> list[Course]:
    """One container of so many things after each interval of a server, which may have had no requests in it."""
    noted = ContainerCourses(may_rest=True)
    for turn, length in enumerate(lengths):
        noted.note(turn, reading({100: length, 200: beside[turn] if beside else 5}))
    return noted.growing(len(lengths) - 1)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((0, 5, 10, 15, 15, 15, 20, 25, 30), id="a pause"),
        pytest.param((0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5), id="a request now and then"),
        pytest.param((0, 9, 18, 18, 18, 18, 18, 27, 36, 36, 36), id="bursts, and a pause that may end"),
    ],
)
def test_what_grows_with_each_request_grows_though_there_are_none_for_a_while(lengths: Sequence[int]) -> None:
    (course,) = served(*lengths)
    assert (course.identity, course.items) == (100, lengths[-1])


@pytest.mark.parametrize(
    ("lengths", "beside"),
    [
        pytest.param((0, 5, 10, 15, 20, 25, 25, 25, 25), (), id="full"),
        pytest.param((0, 5, 10, 10, 15, 20, 25, 30, 30, 30), (), id="full after a pause"),
        pytest.param((0, 1, 1, 1, 2, 2, 3, 3, 3, 4), (0, 7, 7, 9, 8, 9, 9, 8, 9, 9), id="less often than what is used"),
        pytest.param((0, 5, 10, 10, 0, 5, 10), (), id="emptied"),
    ],
)
def test_what_does_not_grow_on_when_there_are_requests_is_none(lengths: Sequence[int], beside: Sequence[int]) -> None:
    assert served(*lengths, beside=beside) == []


def slow(*by_turn: Mapping[int, int]) -> list[Course]:
    """The courses of containers that grow in some of the turns; each is of so many things after some of these."""
    noted = ContainerCourses(by_turns=True)
    for turn in by_turn[0]:
        noted.note(turn, reading({place: each[turn] for place, each in enumerate(by_turn) if turn in each}))
    return noted.slow()


def test_one_thing_in_every_third_turn_is_regular() -> None:
    (course,) = slow({2: 1, 8: 3, 16: 6, 24: 8, 32: 11})
    assert (course.items, course.is_regular, course.is_of_every_turn) == (10, True, False)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param({2: 1, 8: 6, 16: 11, 24: 14, 32: 16}, id="ever less"),
        pytest.param({2: 1, 8: 6, 16: 12, 24: 18, 32: 24}, id="in three of four turns, by chance"),
        pytest.param({2: 1, 8: 2, 16: 5, 24: 7, 32: 12}, id="unevenly"),
        pytest.param({2: 1, 8: 4, 16: 7, 24: 9, 32: 11}, id="a little less in the end"),
    ],
)
def test_what_is_taken_by_chance_is_not_regular(lengths: dict[int, int]) -> None:
    assert not any(course.is_regular for course in slow(lengths))


def test_a_few_things_are_not_regular_though_there_are_several_such() -> None:
    few = {2: 1, 8: 2, 16: 4, 24: 5, 32: 7}
    courses = slow(few, few)
    assert [(course.items, course.is_regular) for course in courses] == [(6, False)] * 2


def test_containers_that_take_something_by_turns_grow_together() -> None:
    courses = slow({2: 1, 8: 4, 16: 8, 24: 12, 32: 16}, {2: 1, 8: 4, 16: 8, 24: 12, 32: 16})
    assert not any(course.is_of_every_turn for course in courses)
    both = together(courses)
    assert (both.together, both.items, both.is_of_every_turn) == (2, 30, True)


def test_containers_that_take_something_by_turns_grow_beside_one_that_fills() -> None:
    shards = [{turn: (turn + place) // 3 for turn in range(0, 24, 4)} for place in range(3)]
    filling = dict(zip(range(0, 24, 4), (0, 20, 24, 26, 27, 28), strict=True))
    assert together(slow(*shards, filling)[:3]).is_of_every_turn


def test_of_few_readings_nothing_is_said_of_those_that_take_something_by_turns() -> None:
    lengths = {2: 1, 8: 4, 16: 8, 24: 12, 32: 16}
    assert slow(lengths)
    assert slow({turn: lengths[turn] for turn in (2, 8, 16, 24)}) == []


def test_one_that_comes_late_has_held_nothing_before() -> None:
    courses = slow({2: 1, 8: 7, 16: 9, 24: 13, 32: 17}, {16: 6, 24: 10, 32: 14})
    assert together(courses).lengths == [1, 7, 15, 23, 31]


def test_one_that_has_shrunk_is_none_of_them() -> None:
    assert slow({2: 1, 8: 4, 16: 3, 24: 12, 32: 16}) == []


def replaced(*lengths: Mapping[int, int]) -> list[Course]:
    """What is found of containers that are others, by their identities, after turns 2, 8, 16, 24 and 32."""
    noted = ContainerCourses(by_turns=True)
    for turn, of_all in zip((2, 8, 16, 24, 32), lengths, strict=True):
        noted.note(turn, reading(of_all))
    return noted.replaced()


def test_a_list_that_gives_way_to_one_that_is_longer_by_as_many_things_as_there_were_turns_grows() -> None:
    (course,) = replaced({100: 3}, {101: 9}, {102: 17}, {103: 25}, {104: 33})
    assert (course.identity, course.items, course.span, course.by_turns) == (104, 30, 30, False)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(({100: 3}, {101: 9}, {102: 17}, {103: 25}, {104: 25}), id="as long at last"),
        pytest.param(({100: 3}, {101: 9}, {102: 18}, {103: 25}, {104: 33}), id="of any length"),
        pytest.param(({100: 3}, {100: 3, 101: 9}, {102: 17}, {103: 25}, {104: 33}), id="beside it"),
        pytest.param(({100: 3}, {100: 9}, {100: 17}, {100: 25}, {100: 33}), id="the same one, which is found as that"),
    ],
)
def test_what_is_made_anew_in_another_length_does_not(lengths: Sequence[Mapping[int, int]]) -> None:
    assert replaced(*lengths) == []

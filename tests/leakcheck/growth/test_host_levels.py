"""What is said of the process's own memory over some turns, where it does not grow by what matters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from lowtide.leakcheck.growth.host_levels import LEAST_A_TURN, HostLevels, LevelReader, read_levels
from lowtide.probes.host.memory_parts import MemoryParts

KIB, MIB = 1 << 10, 1 << 20


def after(*levels: int) -> HostLevels:
    noted = HostLevels()
    for level in levels:
        noted.note((level, 0))
    return noted


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        pytest.param([100 * MIB] * 12, "host memory is bounded", id="flat"),
        pytest.param([min(turn, 5) * MIB for turn in range(20)], "host memory is bounded", id="full"),
        pytest.param([turn % 6 * MIB for turn in range(36)], "host memory rises and falls back", id="saw"),
        pytest.param(
            [turn * KIB for turn in range(20)], "host memory rises by 1.0 KiB with each at most", id="next to nothing"
        ),
    ],
)
def test_what_does_not_grow_is_said_in_a_word(levels: list[int], said: str) -> None:
    assert (after(*levels).said(), after(*levels).undecided()) == (said, 0)


# Measured over the tests of a module: each adds a runner's notes, and a few are the first to use a part of torch.
FIRST_USES = [0, 2808, 3512, 5284, 5284, 5284, 6608, 7284, 8260, 10548, 10660, 10664, 10668, 16060, 16144, 16152, 16160]


def test_a_few_first_uses_and_a_little_in_each_turn_are_no_growth() -> None:
    assert not after(*(level * KIB for level in FIRST_USES)).seem_to_grow()


def test_what_each_turn_adds_beside_first_uses_grows() -> None:
    more = [level + 400 * turn + (turn % 3) * 60 for turn, level in enumerate(FIRST_USES)]
    assert after(*(level * KIB for level in more)).seem_to_grow()


def test_too_few_turns_decide_nothing() -> None:
    assert after(MIB, 2 * MIB, 3 * MIB).undecided() == 5


def test_what_may_be_growth_needs_more_turns() -> None:
    levels = [turn * MIB + turn % 3 * MIB for turn in range(9)]
    assert 0 < after(*levels).undecided() <= len(levels)


@pytest.mark.parametrize(("each", "grows"), [(1, True), (30, False)], ids=["all stay", "few keep the others' place"])
def test_what_is_free_in_python_s_heap_is_no_growth(each: int, grows: bool) -> None:
    noted, stay = HostLevels(), []
    for turn in range(14):
        # No other turn makes objects of this size, and could have what is free.
        size = 16 * (turn + 16)
        made = [bytes(size - 33) for _ in range(4 * MIB // size)]
        stay += made[::each]
        del made
        noted.note(read_levels())
    assert noted.seem_to_grow()
    assert (noted.grown() is not None) is grows
    assert stay


PARTS = MemoryParts(0, 0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(("each", "grows"), [(0.25, False), (1.0, True)], ids=["imports", "each turn, too"])
def test_what_late_imports_add_is_no_growth(each: float, *, grows: bool) -> None:
    levels = [(round((200 + each * turn + 39 * (turn > 12) + 20 * (turn > 14)) * MIB), 0) for turn in range(16)]
    modules = iter([100] * 13 + [180, 180, 230])
    noted = HostLevels(lambda: levels[-1], lambda: PARTS, lambda: next(modules))
    for level in levels:
        noted.note(level)
    assert noted.seem_to_grow()
    grown = noted.grown()
    assert (grown is not None) is grows
    # Of the turns that import it is not known what they add beside that.
    assert grown is None or grown.bytes == 13 * MIB


@pytest.mark.parametrize("part", ["malloc_free", "other", "python_free"])
@pytest.mark.parametrize("each", [1.0, 0.25], ids=["in each turn", "too little in all"])
def test_what_was_free_or_mapped_at_the_start_hides_no_growth(part: str, each: float) -> None:
    levels = [(round((200 + each * turn) * MIB), 0) for turn in range(16)]
    # At the end that has been given back.
    levels.append((levels[-1][0] - 6 * MIB, 0))
    noted = HostLevels(
        lambda: levels[-1],
        iter([replace(PARTS, **{part: 6 * MIB}), replace(PARTS, malloc=round(15 * each * MIB))]).__next__,
        lambda: 100,
    )
    for level in levels[:-1]:
        noted.note(level)
    grown = noted.grown()
    assert (grown and grown.bytes) == (15 * MIB if each == 1.0 else None)


def test_that_there_are_few_modules_less_excuses_nothing() -> None:
    modules = iter(range(100, 80, -1))
    noted = HostLevels(lambda: (15 * MIB, 0), lambda: PARTS, lambda: next(modules))
    for turn in range(16):
        noted.note((turn * MIB, 0))
    assert noted.grown() is not None


def test_a_step_beside_what_each_turn_adds_is_none_of_it() -> None:
    # As where the first reading of a large heap leaves its table.
    levels = [((200 + turn + 60 * (turn > 0)) * MIB, 0) for turn in range(12)]
    noted = HostLevels(lambda: levels[-1], lambda: PARTS, lambda: 100)
    for level in levels:
        noted.note(level)
    grown = noted.grown()
    assert grown is not None
    assert (grown.turns, grown.bytes) == (11, 11 * MIB)


def asked_of(monkeypatch: pytest.MonkeyPatch, levels: Sequence[tuple[int, int]]) -> tuple[HostLevels, list[int]]:
    """Read levels turn by turn; return them as noted, and the turns in which malloc was asked."""
    noted, asked, turns = HostLevels(lambda: levels[-1], lambda: PARTS, lambda: 0), [], iter(enumerate(levels))
    reader = LevelReader()
    for turn, (held, malloc) in turns:

        def ask(turn: int = turn, malloc: int = malloc) -> int:
            asked.append(turn)
            return malloc

        monkeypatch.setattr("lowtide.leakcheck.growth.host_levels.malloc_in_use", ask)
        noted.note(reader.read(held))
    return noted, asked


def test_malloc_is_asked_now_and_then_where_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, asked = asked_of(monkeypatch, [(200 * MIB, 100 * MIB)] * 400)
    # All of the first few: a short module has no more.
    assert asked[:8] == list(range(8))
    assert len(asked) < 80
    assert noted.said() == "host memory is bounded"


@pytest.mark.parametrize("since", [0, 5, 12, 40])
@pytest.mark.parametrize("more", [16, 80])
def test_growth_in_pages_that_were_there_before_is_seen(monkeypatch: pytest.MonkeyPatch, since: int, more: int) -> None:
    # The kernel counts nothing more.
    turns = 2 * since + more
    levels = [(200 * MIB, 100 * MIB + max(0, turn - since) * 3 * LEAST_A_TURN) for turn in range(turns)]
    noted, asked = asked_of(monkeypatch, levels)
    assert noted.seem_to_grow()
    # From where it is first seen on, in each turn.
    first = next(turn for turn in asked if turn > since)
    assert first - since <= 1 + max(8, since) // 8
    assert asked[asked.index(first) :] == list(range(first, turns))


def test_what_the_kernel_counts_more_has_malloc_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = [((200 + (turn > 201)) * MIB, 100 * MIB) for turn in range(204)]
    _, asked = asked_of(monkeypatch, levels)
    assert 202 in asked
    assert 203 in asked


def test_a_level_that_rises_and_falls_back_is_no_growth_between_the_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    for period in range(2, 20):
        levels = [(200 * MIB, (100 + turn % period) * MIB) for turn in range(300)]
        noted, _ = asked_of(monkeypatch, levels)
        assert not noted.seem_to_grow()


@pytest.mark.parametrize(("each", "told"), [(300 * KIB, True), (180 * KIB, False)])
def test_what_turns_add_is_told_from_four_mib_on(each: int, told: bool) -> None:
    levels = [(200 * MIB + turn * each, 0) for turn in range(20)]
    noted = HostLevels(lambda: levels[-1], lambda: PARTS, lambda: 100)
    for level in levels:
        noted.note(level)
    assert (noted.grown() is not None) == told

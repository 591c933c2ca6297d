"""What a card has in use, apart from what neighbours take and give back meanwhile."""

from __future__ import annotations

import pytest

from lowtide.leakcheck.lives.witness import CardUse, card_use, grown_by_nobody_else
from lowtide.probes.device.driver import DriverError, DriverReading, NoDriver

OWN, NEIGHBOUR = 100, 200


def grown(before: CardUse, now: CardUse, *, distinguished: bool = True) -> int:
    return grown_by_nobody_else(before, now, {OWN}, distinguished=distinguished)


def test_what_the_process_holds_has_grown() -> None:
    assert grown(CardUse(10, {}), CardUse(90, {OWN: 80})) == 80


def test_what_no_listed_process_holds_has_grown() -> None:
    assert grown(CardUse(10, {NEIGHBOUR: 5}), CardUse(90, {NEIGHBOUR: 5})) == 80


def test_what_a_neighbour_took_has_not() -> None:
    assert grown(CardUse(10, {NEIGHBOUR: 5}), CardUse(90, {NEIGHBOUR: 85})) == 0


def test_what_a_neighbour_gave_back_hides_nothing() -> None:
    assert grown(CardUse(500, {NEIGHBOUR: 400}), CardUse(180, {OWN: 80})) == 80


def test_a_neighbour_that_came_is_one_only_where_the_driver_numbers_processes_as_this_machine_does() -> None:
    before, now = CardUse(10, {}), CardUse(90, {NEIGHBOUR: 80})
    assert grown(before, now) == 0
    # It may be the process itself, under another number.
    assert grown(before, now, distinguished=False) == 80


def test_a_neighbour_that_was_there_before_is_one_in_any_case() -> None:
    assert grown(CardUse(10, {NEIGHBOUR: 5}), CardUse(90, {NEIGHBOUR: 85}), distinguished=False) == 0


def test_a_neighbour_of_which_the_driver_does_not_tell_the_memory_explains_nothing() -> None:
    assert grown(CardUse(10, {NEIGHBOUR: None}), CardUse(90, {NEIGHBOUR: None})) == 80


class Listing:
    """A driver with prepared figures."""

    name = "a test"

    def read(self, device_index: int) -> DriverReading:
        return DriverReading(f"cuda:{device_index}", self.name, 0, 1000 + device_index, None, "")

    def processes(self, device_index: int) -> dict[int, int | None]:
        return {OWN: device_index}

    def close(self) -> None: ...


def test_a_card_is_read_with_its_processes() -> None:
    assert card_use(Listing(), 3) == CardUse(1003, {OWN: 3})


def test_a_driver_that_does_not_tell_is_an_error_with_its_reason() -> None:
    with pytest.raises(DriverError, match="nothing here"):
        card_use(NoDriver("nothing here"), 0)

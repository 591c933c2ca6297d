"""What the card of an engine that is killed has in use, apart from what neighbours take and give back meanwhile."""

from __future__ import annotations

import pytest

from lowtide.leakcheck.lives.witness import EngineCard
from lowtide.probes.device.driver import DriverReading, NoDriver

OWN, NEIGHBOUR = 100, 200


class Listing:
    """A driver with figures that the test sets: bytes in use, and by process."""

    name = "a test"

    def __init__(self, used: int, **processes: int | None) -> None:
        self.set(used, **processes)

    def set(self, used: int, *, own: int | None = 0, neighbour: int | None = 0) -> None:
        self.used = used
        self.held = {pid: size for pid, size in ((OWN, own), (NEIGHBOUR, neighbour)) if size != 0}

    def read(self, device_index: int) -> DriverReading:
        return DriverReading(f"cuda:{device_index}", self.name, 0, self.used, None, "")

    def processes(self, device_index: int) -> dict[int, int | None]:
        return dict(self.held)

    def close(self) -> None: ...


def grown(driver: Listing, used: int, *, distinguished: bool = True, **processes: int | None) -> int:
    """Return by how much the card has grown where its process was seen, or not, and there is now so much in use."""
    card = EngineCard("cuda:3", driver)
    before = driver.used, dict(driver.held)
    if distinguished:
        driver.held[OWN] = 1
    card.is_used_by([OWN])
    driver.used, driver.held = before
    driver.set(used, **processes)
    return card.grown()


def test_what_the_process_holds_has_grown() -> None:
    assert grown(Listing(10), 90, own=80) == 80


def test_what_no_listed_process_holds_has_grown() -> None:
    assert grown(Listing(10, neighbour=5), 90, neighbour=5) == 80


def test_what_a_neighbour_took_has_not() -> None:
    assert grown(Listing(10, neighbour=5), 90, neighbour=85) == 0


def test_what_a_neighbour_gave_back_hides_nothing() -> None:
    assert grown(Listing(500, neighbour=400), 180, own=80) == 80


@pytest.mark.parametrize(("distinguished", "left"), [(True, 0), (False, 80)])
def test_a_neighbour_that_came_is_one_only_where_the_driver_numbers_processes_as_this_machine_does(
    distinguished: bool, left: int
) -> None:
    # Else it may be the process itself, under another number.
    assert grown(Listing(10), 90, neighbour=80, distinguished=distinguished) == left


def test_a_neighbour_that_was_there_before_is_one_in_any_case() -> None:
    assert grown(Listing(10, neighbour=5), 90, neighbour=85, distinguished=False) == 0


def test_a_neighbour_of_which_the_driver_does_not_tell_the_memory_explains_nothing() -> None:
    assert grown(Listing(10, neighbour=None), 90, neighbour=None) == 80


def test_a_driver_that_does_not_tell_is_not_measured_with_its_reason() -> None:
    card = EngineCard("cuda:0", NoDriver("nothing here"))
    card.is_used_by([OWN])
    assert card.grown() == 0
    (unknown,) = card.not_measured
    assert unknown.what == "what killed processes leave on cuda:0"
    assert "nothing here" in unknown.why


def test_on_a_cpu_nothing_stays() -> None:
    card = EngineCard("cpu", NoDriver("nothing here"))
    card.is_used_by([OWN])
    assert (card.grown(), card.not_measured) == (0, ())

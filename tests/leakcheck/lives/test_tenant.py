"""What a sleep claims to have freed is taken by a second process: all of it passes, less is a finding.

How much a context alone takes on a card is measured by a process that has nothing else there.
"""

from __future__ import annotations

import ctypes
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lowtide.leakcheck.lives import card_memory, life_reader
from lowtide.leakcheck.lives import tenant as tenants
from lowtide.leakcheck.lives.card_memory import PIECE, DeviceMemoryError, main, occupy, open_card
from lowtide.leakcheck.lives.life_reader import LifeReader
from lowtide.leakcheck.lives.tenant import Tenant, bare_context
from lowtide.probes.device.driver import Driver, DriverError, find_driver
from lowtide.probes.device.driver.card_holders import CardHolders

MIB = 1 << 20
GIB = 1 << 30

NEIGHBOUR = """
import sys
from lowtide.leakcheck.lives.card_memory import open_card

card = open_card("cuda", 0)
print(card.allocate(card.free_bytes() - (2 << 30)) is not None, flush=True)
sys.stdin.read()
"""

RACED = f"""
import subprocess, sys
from lowtide.leakcheck.lives import card_memory as occupier

class Raced:
    # Between what the driver says and the first allocation, another process takes all but 2 GiB.
    def __init__(self, card):
        self.card = card
        self.allocate, self.free = card.allocate, card.free

    def free_bytes(self):
        free = self.card.free_bytes()
        self.neighbour = subprocess.Popen(
            [sys.executable, "-c", {NEIGHBOUR!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.neighbour.stdout.readline() == b"True\\n"
        return free

opened = occupier.open_card
occupier.open_card = lambda kind, index: Raced(opened(kind, index))
sys.exit(occupier.main(sys.argv[1:]))
"""

WAITS = (sys.executable, "-S", "-c", "import sys; print('ready', flush=True); sys.stdin.read()")

FAILS = (sys.executable, "-S", "-c", "raise SystemExit(1)")


class Card:
    """A card that says what is free, and gives less: so much in all, and so much in one piece."""

    def __init__(self, free: int, really: int, largest: int | None = None) -> None:
        self.said, self.really = free, really
        self.largest = really if largest is None else largest
        self.held: dict[int, int] = {}
        self.asked = 0

    def free_bytes(self) -> int:
        return self.said

    def allocate(self, size: int) -> int | None:
        self.asked += 1
        if size > self.largest or sum(self.held.values()) + size > self.really:
            return None
        self.held[self.asked] = size
        return self.asked

    def free(self, address: int) -> None:
        del self.held[address]


def test_what_is_free_is_had_in_one_piece_and_in_small_ones_and_given_back() -> None:
    card = Card(8 * GIB, 8 * GIB)
    assert occupy(card, 6 * GIB) == {"free": 8 * GIB, "wanted": 6 * GIB, "whole": 6 * GIB, "pieces": 6 * GIB}
    assert card.held == {}


def test_no_more_is_taken_than_is_free() -> None:
    said = occupy(Card(GIB + 5, GIB), 6 * GIB)
    assert (said["wanted"], said["pieces"]) == (GIB, GIB)


def test_less_than_is_free_is_seen_also_in_one_piece_alone() -> None:
    card = Card(8 * GIB, 5 * GIB)
    said = occupy(card, 6 * GIB)
    assert said["pieces"] == 5 * GIB
    assert 5 * GIB - said["whole"] <= 8 * MIB
    said = occupy(Card(8 * GIB, 8 * GIB, largest=GIB), 6 * GIB)
    assert said["pieces"] == 6 * GIB
    assert 0 <= GIB - said["whole"] <= 8 * MIB
    assert card.held == {}


def replying(said: dict[str, Any]) -> Tenant:
    return Tenant("cuda:0", command=(sys.executable, "-c", f"print({json.dumps(json.dumps(said))})"))


def reply(free: int, wanted: int, whole: int, pieces: int) -> dict[str, Any]:
    return {"free": free, "wanted": wanted, "whole": whole, "pieces": pieces}


def test_a_sleep_whose_memory_another_process_gets_is_clean() -> None:
    tenant = replying(reply(8 * GIB, 6 * GIB, 6 * GIB, 6 * GIB - 2 * MIB))
    assert tenant.after_sleep("sleep(2)", 6 * GIB) == []
    assert tenant.not_measured == {}


@pytest.mark.parametrize(
    ("whole", "pieces", "how"),
    [(6 * GIB, 5 * GIB, "in pieces of 2 MiB"), (5 * GIB, 6 * GIB, "in one piece"), (GIB, 5 * GIB, "in pieces")],
)
def test_what_another_process_does_not_get_is_one_finding(whole: int, pieces: int, how: str) -> None:
    (finding,) = replying(reply(8 * GIB, 6 * GIB, whole, pieces)).after_sleep("sleep(2)", 6 * GIB)
    assert (finding.resource, finding.bytes, finding.stage, finding.device) == ("driver", GIB, "sleep(2)", "cuda:0")
    assert finding.message.startswith(
        f"the driver says 8.0 GiB are free after sleep(2), 5.0 GiB of 6.0 GiB could be allocated {how}"
    )


def test_what_is_not_free_on_the_card_is_not_measured() -> None:
    tenant = replying(reply(5 * GIB, 5 * GIB, 5 * GIB, 5 * GIB))
    assert tenant.after_sleep("sleep(1)", 6 * GIB) == []
    (missing,) = tenant.not_measured.values()
    assert missing.what == "1.0 GiB of what sleep(1) freed"
    assert "gave back 6.0 GiB, and 5.0 GiB are free on the card" in missing.why


def test_a_tenant_that_cannot_try_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "LIMIT_S", 0.2)
    slow = Tenant("cuda:0", command=(sys.executable, "-c", "import time; time.sleep(600)"))
    silent = Tenant("cuda:0", command=(sys.executable, "-c", ""))
    unsaid = Tenant("cuda:0")
    for tenant, freed, why in (
        (replying({"error": "cuInit failed with code 100"}), GIB, "cuInit failed with code 100"),
        (slow, GIB, "the second process did not end within 0.2 s"),
        (silent, GIB, "the second process failed: "),
        (unsaid, None, "the driver does not say what this process holds"),
    ):
        if tenant is not slow:
            monkeypatch.setattr(tenants, "LIMIT_S", 60.0)
        assert tenant.after_sleep("sleep(1)", freed) == []
        assert tenant.not_measured["sleep(1)"].why.startswith(why)
        monkeypatch.setattr(tenants, "LIMIT_S", 0.2)


def test_a_sleep_that_frees_nothing_is_not_tried() -> None:
    tenant = Tenant("cuda:0", command=("/nowhere",))
    assert tenant.after_sleep("sleep(1)", 0) == []
    assert tenant.not_measured == {}


def test_the_program_without_a_library_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hip", "0", "1"]) == 1
    assert json.loads(capsys.readouterr().out)["error"].startswith("libamdhip64.so cannot be loaded: ")


def test_the_program_holds_a_context_alone_until_its_input_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[tuple[str, int]] = []
    monkeypatch.setattr(card_memory, "open_card", lambda *card: opened.append(card))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(["cuda", "1"]) == 0
    assert (opened, capsys.readouterr().out) == ([("cuda", 1)], "ready\n")


class Library:
    """The calls of a driver's library, over a `Card`; out of memory is its code for that."""

    def __init__(self, kind: str, card: Card, refused: str = "") -> None:
        self._card = card
        names = {
            "cuda": [
                "cuInit",
                "cuDeviceGet",
                "cuDevicePrimaryCtxRetain",
                "cuCtxSetCurrent",
                "cuCtxSynchronize",
                "cuMemsetD8_v2",
            ],
            "hip": ["hipInit", "hipSetDevice", "hipDeviceSynchronize", "hipMemset"],
        }[kind]
        for name in names:
            setattr(self, name, lambda *_, name=name: 101 if name == refused else 0)
        suffix = ("_v2",) * 3 if kind == "cuda" else ("",) * 3
        prefix = "cuMem" if kind == "cuda" else "hipM"
        info, allocate, free = ("GetInfo", "Alloc", "Free") if kind == "cuda" else ("emGetInfo", "alloc", "")
        setattr(self, f"{prefix}{info}{suffix[0]}", self._info)
        setattr(self, f"{prefix}{allocate}{suffix[1]}", self._allocate)
        setattr(self, f"{prefix}{free}{suffix[2]}" if free else "hipFree", self._free)

    def _info(self, free: Any, total: Any) -> int:
        free._obj.value = total._obj.value = self._card.free_bytes()
        return 0

    def _allocate(self, address: Any, size: ctypes.c_size_t) -> int:
        got = self._card.allocate(size.value)
        address._obj.value = got or 0
        return 2 if got is None else 0

    def _free(self, address: Any) -> int:
        self._card.free(address.value)
        return 0


@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_both_drivers_are_asked_alike(kind: str) -> None:
    card = Card(64 * MIB, 40 * MIB)
    memory = open_card(kind, 0, Library(kind, card))
    assert occupy(memory, 64 * MIB) == {"free": 64 * MIB, "wanted": 64 * MIB, "whole": 40 * MIB, "pieces": 40 * MIB}
    assert card.held == {}
    assert PIECE == 2 * MIB


@pytest.mark.parametrize(("kind", "call"), [("cuda", "cuDeviceGet"), ("hip", "hipSetDevice"), ("hip", "hipMemset")])
def test_a_call_that_is_refused_is_named(kind: str, call: str) -> None:
    library = Library(kind, Card(GIB, GIB), refused=call)
    with pytest.raises(DeviceMemoryError, match=f"{call} failed with code 101"):
        occupy(open_card(kind, 0, library), GIB)


def test_nothing_else_of_a_library_is_needed() -> None:
    with pytest.raises(AttributeError):
        open_card("cuda", 0, SimpleNamespace())


@pytest.mark.cuda
@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="needs a CUDA card; there is no /dev/nvidia0")
@pytest.mark.parametrize("raced", [False, True])
def test_what_a_neighbour_on_the_card_takes_meanwhile_cannot_be_had(raced: bool) -> None:
    tenant = Tenant("cuda:0", command=(sys.executable, "-c", RACED)) if raced else Tenant("cuda:0")
    found = tenant.after_sleep("sleep(2)", 8 * GIB)
    assert tenant.not_measured == {}
    if not raced:
        assert found == []
        return
    (finding,) = found
    assert 6 * GIB <= finding.bytes < 8 * GIB
    assert "of 8.0 GiB could be allocated in pieces of 2 MiB by another process" in finding.message


class Listed(dict[int, int]):
    """Counts 450 MiB for every process that it is asked about."""

    def get(self, pid: int, default: Any = None) -> Any:
        return {"cuda:1": 450 * MIB}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    asked: list[object] = []

    def read(driver: object) -> tuple[CardHolders, ...]:
        asked.append(driver)
        return ()

    monkeypatch.setattr(tenants, "read_card_holders", read)
    monkeypatch.setattr(tenants, "by_process", lambda cards: Listed())
    return asked


def measure(command: tuple[str, ...], device: str = "cuda:1") -> int | None:
    return bare_context(device, lambda: cast("Driver", "a driver"), command=command)


def test_it_is_measured_on_its_card(asked: list[object]) -> None:
    assert measure(WAITS) == 450 * MIB
    assert measure(WAITS, "cuda:0") is None
    assert asked == ["a driver"] * 2


def test_it_is_measured_once_for_each_card(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    monkeypatch.setattr(life_reader, "bare_context", lambda device, *of: measured.append(device))
    context = LifeReader("cuda:0", find_driver()).processes.context
    assert [context("cuda:1"), context("cuda:1"), context("cuda:0")] == [None] * 3
    assert measured == ["cuda:1", "cuda:0"]


def test_a_card_without_room_for_a_context_is_not_known(asked: list[object]) -> None:
    assert measure(FAILS) is None
    assert asked == []


def test_a_driver_that_does_not_answer_is_not_known(monkeypatch: pytest.MonkeyPatch, asked: list[object]) -> None:
    def refuse(driver: object) -> None:
        raise DriverError("no answer")

    monkeypatch.setattr(tenants, "read_card_holders", refuse)
    assert measure(WAITS) is None


def test_an_engine_on_the_cpu_has_none() -> None:
    assert LifeReader("cpu", find_driver()).processes.context("cuda:0") is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_a_context_on_a_real_card_takes_hundreds_of_mebibytes() -> None:
    driver = find_driver()
    try:
        size = bare_context("cuda:0", lambda: driver)
    finally:
        driver.close()
    assert size is not None
    assert 100 * MIB < size < 2048 * MIB

"""What a context alone takes on a card: that of a process which has nothing else there, as the driver counts it.

    python -m lowtide.leakcheck.tenant.bare_context KIND INDEX

makes one, prints a line, and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lowtide.leakcheck.tenant.device_memory import kind_of_cards, open_card
from lowtide.probes.device.driver import Driver, DriverError
from lowtide.probes.device.driver.card_holders import read_card_holders
from lowtide.probes.processes.outside_view import by_process

_LIMIT_S = 20.0


@dataclass
class BareContexts:
    """Measures it on each card, once, with a process of its own.

    Attributes:
        driver: gives whom to ask.
        kind: of the cards: `cuda` or `hip`.
        ended: hears of each process that was started for it, once it has ended.
        command: the program that makes a context, without its arguments.
    """

    driver: Callable[[], Driver]
    kind: str = "cuda"
    ended: Callable[[int], None] = lambda pid: None
    command: Sequence[str] = (sys.executable, "-m", "lowtide.leakcheck.tenant.bare_context")
    _sizes: dict[str, int | None] = field(default_factory=dict)

    def size(self, device: str) -> int | None:
        """Bytes on a card, such as `cuda:0`; None where the card has no room for it or the driver does not say."""
        if device not in self._sizes:
            self._sizes[device] = self._measure(device)
        return self._sizes[device]

    def _measure(self, device: str) -> int | None:
        arguments = [*self.command, self.kind, device.partition(":")[2] or "0"]
        try:
            with subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ) as process:
                assert process.stdout is not None
                ready = process.stdout.readline()
                size = by_process(read_card_holders(self.driver())).get(process.pid, {}).get(device) if ready else None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=_LIMIT_S)
                process.kill()
            self.ended(process.pid)
        except (OSError, DriverError):
            return None
        return size


def context_sizes(
    device: str, driver: Callable[[], Driver], ended: Callable[[int], None] = lambda pid: None
) -> Callable[[str], int | None]:
    """What gives the bytes of a context alone on each card; nothing where the engine is on the CPU.

    Args:
        device: the engine's.
        driver: gives whom to ask.
        ended: hears of each process that was started for it, once it has ended.
    """
    return (lambda card: None) if device == "cpu" else BareContexts(driver, kind_of_cards(), ended).size


def main(arguments: list[str]) -> None:
    """Hold a context until the standard input ends.

    Raises:
        DeviceMemoryError: the card cannot be used.
    """
    kind, index = arguments
    card = open_card(kind, int(index))
    print("ready", flush=True)  # noqa: T201 - who measures reads it
    sys.stdin.read()
    del card


if __name__ == "__main__":
    main(sys.argv[1:])

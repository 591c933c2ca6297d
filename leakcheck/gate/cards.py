"""Cards: how many there are, and one cell at a time on each, also between gates."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lowtide.leakcheck.gate.settings import GateError

_POLL_S = 0.2


def count_cards() -> int:
    """How many cards the driver shows and the environment leaves visible; asks no torch, so that no context is made."""
    from lowtide.probes.device.driver import find_driver

    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if name in os.environ:
            return len([each for each in os.environ[name].split(",") if each.strip() and each.strip() != "-1"])
    driver = find_driver()
    try:
        count = 0
        while driver.read(count).card_total is not None:
            count += 1
        return count
    finally:
        driver.close()


@contextmanager
def exclusive(card: int, stopped: Callable[[], bool]) -> Iterator[None]:
    """Have a card alone among the gates of this machine; waits until another one gives it back.

    Args:
        card: its index.
        stopped: asked while it waits; once true, it raises.

    Raises:
        GateError: the gate stopped meanwhile, or the lock cannot be made.
    """
    path = Path(tempfile.gettempdir()) / f"lowtide-card-{card}.lock"
    try:
        handle = _open(path)
    except OSError as error:
        raise GateError(f"{path} cannot be opened, which locks card {card}: {error.strerror}") from error
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stopped():
                    raise GateError(f"stopped while another gate had card {card}") from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    """Open a lock for reading, which is enough for `flock`, and which another user's file allows."""
    with suppress(FileNotFoundError):
        # Without O_CREAT, which Linux refuses for another user's file in /tmp (`fs.protected_regular`).
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)

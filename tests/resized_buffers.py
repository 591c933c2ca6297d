"""A thread that finds out whether somebody else holds what it has just let go of."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def buffers_resized_meanwhile() -> Iterator[list[BufferError]]:
    """Resize buffers in another thread, each after the last view of it was dropped there.

    Yields:
        The errors, of which there is one wherever a list of somebody else's still held the view.
    """
    errors: list[BufferError] = []
    ended = threading.Event()

    def resize() -> None:
        while not ended.is_set():
            buffer = bytearray(100)
            shown = [memoryview(buffer)]
            del shown
            try:
                buffer.extend(b"x" * 100)
            except BufferError as error:
                errors.append(error)

    thread = threading.Thread(target=resize)
    thread.start()
    try:
        yield errors
    finally:
        ended.set()
        thread.join()

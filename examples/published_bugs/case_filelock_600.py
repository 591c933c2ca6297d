"""filelock#600: a lock whose unlocking fails forgets its descriptor (3.29.7; right in 4.2.11)."""

import fcntl

import filelock
import pytest


def test_release_fails(tmp_path, monkeypatch):
    lock = filelock.FileLock(tmp_path / "lock")
    lock.acquire()

    def fail(*_):
        raise OSError("no unlocking today")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fail)
        with pytest.raises(OSError, match="today"):
            lock.release()
    lock.release()

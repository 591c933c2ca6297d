"""What process-wide settings were before earlier tests changed them: to put one back is no change that stays."""

from __future__ import annotations


class SettingHistory:
    """The values that each setting had before it was changed and left so, oldest first."""

    def __init__(self) -> None:
        self._earlier: dict[str, list[str]] = {}

    def note(self, name: str, before: str, now: str) -> None:
        """A test, or a fixture, is over and left a setting changed."""
        earlier = self._earlier.setdefault(name, [])
        if now in earlier:
            del earlier[earlier.index(now) :]
        else:
            earlier.append(before)

    def is_earlier(self, name: str, value: str) -> bool:
        """Whether a setting had this value before somebody changed it and left it so."""
        return value in self._earlier.get(name, ())

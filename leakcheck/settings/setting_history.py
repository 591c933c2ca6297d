"""What process-wide settings were before earlier tests changed them: to put one back is no change that stays."""

from __future__ import annotations

from collections.abc import Mapping


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

    def begin(self, settings: Mapping[str, str]) -> None:
        """A test begins with these: what was put back by whomever is as it was, and may be left changed again."""
        for name, earlier in self._earlier.items():
            if settings.get(name) in earlier:
                del earlier[earlier.index(settings[name]) :]

    def is_earlier(self, name: str, value: str) -> bool:
        """Whether a setting had this value before somebody changed it and left it so."""
        return value in self._earlier.get(name, ())

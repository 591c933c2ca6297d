"""The driver of a machine without one: says that it does not know."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.probes.device.driver import DriverReading


class NoDriver:
    """Reads nothing, and says why."""

    name = "none"

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def read(self, device_index: int) -> DriverReading:
        """Everything unknown."""
        return DriverReading(f"cuda:{device_index}", self.name, None, None, None, f"no driver to ask: {self._reason}")

    def processes(self, device_index: int) -> Mapping[int, int | None]:
        """None known."""
        return {}

    def close(self) -> None:
        """Nothing to let go of."""

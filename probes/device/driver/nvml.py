"""NVIDIA's driver, asked through NVML (the distribution nvidia-ml-py, module `pynvml`)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lowtide.probes.device.driver import CUDA, DriverError, DriverReading, own_bytes, visible_card
from lowtide.probes.originals import initialized_torch


class NvmlDriver:
    """Holds NVML open from construction to `close()`.

    Args:
        library: stands in for the `pynvml` module.

    Raises:
        DriverError: no module, no driver, or no card.
    """

    name = "nvml"

    def __init__(self, library: Any = None) -> None:
        if library is None:
            try:
                library = importlib.import_module("pynvml")
            except ImportError as error:
                raise DriverError("NVML's module pynvml is missing; install nvidia-ml-py") from error
        self._nvml = library
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            raise DriverError(f"NVML: {error}") from error
        self._open = True
        try:
            cards = library.nvmlDeviceGetCount()
        except library.NVMLError as error:
            self.close()
            raise DriverError(f"NVML: {error}") from error
        if not cards:
            self.close()
            raise DriverError("NVML: no card")

    def close(self) -> None:
        """Shuts NVML down; legal twice. A reading after it says that nothing is known."""
        if self._open:
            self._open = False
            self._nvml.nvmlShutdown()

    def read(self, device_index: int) -> DriverReading:
        """Read one card, by torch's index."""
        device = f"cuda:{device_index}"
        if not self._open:
            return DriverReading(device, self.name, None, None, None, "this NVML driver was closed")
        try:
            handle = self._handle(device_index)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except self._nvml.NVMLError as error:
            return DriverReading(device, self.name, None, None, None, f"NVML: {error}")
        except DriverError as error:
            return DriverReading(device, self.name, None, None, None, str(error))
        try:
            held, note = own_bytes(self._listed(handle), "NVML", device_index)
        except self._nvml.NVMLError as error:
            held, note = None, f"NVML: {error}"
        return DriverReading(device, self.name, held, int(memory.used), int(memory.total), note)

    def processes(self, device_index: int) -> Mapping[int, int | None]:
        """Return the bytes on one card by process identifier; empty where NVML reports none."""
        if not self._open:
            return {}
        try:
            return self._listed(self._handle(device_index))
        except (self._nvml.NVMLError, DriverError):
            return {}

    def reserved(self, device_index: int) -> int:
        """Return the bytes of a card that driver and firmware keep, which `card_used` counts; 0 where unknown."""
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        if version is None or not self._open:
            return 0
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle(device_index), version).reserved)
        except (self._nvml.NVMLError, DriverError):
            return 0

    def _listed(self, handle: Any) -> dict[int, int | None]:
        compute = _by_process(self._nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))
        graphics = _by_process(self._nvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle))
        # A process that does both is in both lists with all its memory, not with a share in each.
        return {
            pid: _unless_unknown(max, [each[pid] for each in (compute, graphics) if pid in each])
            for pid in {**compute, **graphics}
        }

    def _handle(self, device_index: int) -> Any:
        """Return the card behind torch's index, which CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER may change."""
        torch = initialized_torch()
        if torch is not None:
            try:
                card_of_torch = torch.cuda.get_device_properties(device_index)
            except AssertionError:
                raise DriverError(f"torch sees no card of index {device_index}") from None
            return self._by_uuid(str(card_of_torch.uuid))
        card = visible_card(os.environ, CUDA, device_index)
        if card is None:
            raise DriverError(f"CUDA_VISIBLE_DEVICES shows no card of index {device_index}")
        if type(card) is str:
            return self._by_uuid(card)
        return self._nvml.nvmlDeviceGetHandleByIndex(card)

    def _by_uuid(self, uuid: str) -> Any:
        """Return the card whose UUID begins so, with or without the `GPU-` that torch leaves out."""
        if uuid.startswith("MIG-"):
            return self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        wanted = "GPU-" + uuid.removeprefix("GPU-")
        for index in range(self._nvml.nvmlDeviceGetCount()):
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            if str(self._nvml.nvmlDeviceGetUUID(handle)).startswith(wanted):
                return handle
        raise DriverError(f"NVML knows no card with the UUID {wanted}")


def _by_process(entries: Iterable[Any]) -> dict[int, int | None]:
    """Return what one of NVML's lists says of each process; one with several contexts stands in it several times."""
    found: dict[int, list[int | None]] = {}
    for entry in entries:
        used = None if entry.usedGpuMemory is None else int(entry.usedGpuMemory)
        found.setdefault(int(entry.pid), []).append(used)
    return {pid: _unless_unknown(sum, amounts) for pid, amounts in found.items()}


def _unless_unknown(combine: Callable[[Iterable[int]], int], amounts: Sequence[int | None]) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return combine(known) if len(known) == len(amounts) else None

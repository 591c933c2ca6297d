"""AMD's driver, asked through the `amdsmi` package."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Mapping
from typing import Any

from lowtide.probes.device.driver import HIP, DriverError, DriverReading, own_bytes, visible_card
from lowtide.probes.originals import initialized_torch


class AmdsmiDriver:
    """Holds amdsmi open from construction to `close()`.

    Args:
        library: stands in for the `amdsmi` module.

    Raises:
        DriverError: no package, no driver, or no card.
    """

    name = "amdsmi"

    def __init__(self, library: Any = None) -> None:
        self._amdsmi = _load() if library is None else library
        try:
            self._amdsmi.amdsmi_init()
        except self._amdsmi.AmdSmiException as error:
            raise DriverError(f"amdsmi: {error}") from error
        self._open = True
        try:
            cards = self._amdsmi.amdsmi_get_processor_handles()
        except self._amdsmi.AmdSmiException as error:
            self.close()
            raise DriverError(f"amdsmi: {error}") from error
        if not cards:
            self.close()
            raise DriverError("amdsmi: no card")

    def close(self) -> None:
        """Shuts amdsmi down; legal twice. A reading after it says that nothing is known."""
        if self._open:
            self._open = False
            self._amdsmi.amdsmi_shut_down()

    def read(self, device_index: int) -> DriverReading:
        """Read one card, by torch's index."""
        device = f"cuda:{device_index}"
        if not self._open:
            return DriverReading(device, self.name, None, None, None, "this amdsmi driver was closed")
        amdsmi = self._amdsmi
        try:
            handle = self._handle(device_index)
            vram = amdsmi.AmdSmiMemoryType.VRAM
            used = int(amdsmi.amdsmi_get_gpu_memory_usage(handle, vram))
            size = int(amdsmi.amdsmi_get_gpu_memory_total(handle, vram))
        except amdsmi.AmdSmiException as error:
            return DriverReading(device, self.name, None, None, None, f"amdsmi: {error}")
        except DriverError as error:
            return DriverReading(device, self.name, None, None, None, str(error))
        try:
            held, note = own_bytes(self._listed(handle), "amdsmi", device_index)
        except amdsmi.AmdSmiException as error:
            held, note = None, f"amdsmi: {error}"
        return DriverReading(device, self.name, held, used, size, note)

    def processes(self, device_index: int) -> Mapping[int, int | None]:
        """Return the bytes on one card by process identifier; empty where amdsmi reports none."""
        if not self._open:
            return {}
        try:
            return self._listed(self._handle(device_index))
        except (self._amdsmi.AmdSmiException, DriverError):
            return {}

    def _listed(self, handle: Any) -> dict[int, int | None]:
        found: dict[int, int | None] = {}
        for entry in self._amdsmi.amdsmi_get_gpu_process_list(handle):
            # Up to ROCm 6.0 the list holds handles, to be asked one by one; since then what they say.
            facts = entry if type(entry) is dict else self._amdsmi.amdsmi_get_gpu_process_info(handle, entry)
            amount, before = facts["memory_usage"]["vram_mem"], found.get(facts["pid"], 0)
            # "N/A" where it is not known.
            found[facts["pid"]] = None if before is None or type(amount) is not int else before + amount
        return found

    def _handle(self, device_index: int) -> Any:
        """Return the card behind torch's index: by its place on the bus, else by the visible-devices variables."""
        amdsmi = self._amdsmi
        handles = list(amdsmi.amdsmi_get_processor_handles())
        torch = initialized_torch()
        if torch is not None:
            try:
                card = torch.cuda.get_device_properties(device_index)
            except AssertionError:
                raise DriverError(f"torch sees no card of index {device_index}") from None
            if hasattr(card, "pci_bus_id"):
                wanted = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}."
                for handle in handles:
                    if str(amdsmi.amdsmi_get_gpu_device_bdf(handle)).lower().startswith(wanted):
                        return handle
                raise DriverError(f"amdsmi knows no card at {wanted}0")
        visible = visible_card(os.environ, HIP, device_index)
        if type(visible) is str:
            serial = visible.removeprefix("GPU-").lower()
            for handle in handles:
                if str(amdsmi.amdsmi_get_gpu_asic_info(handle)["asic_serial"]).lower().removeprefix("0x") == serial:
                    return handle
            raise DriverError(f"amdsmi knows no card with the UUID {visible}")
        if visible is None or not 0 <= int(visible) < len(handles):
            raise DriverError(f"there is no visible card of index {device_index}")
        for handle in handles:
            # amdsmi counts in another order than HIP; from ROCm 6.4 it reports HIP's number.
            if self._hip_number(handle) == visible:
                return handle
        return handles[int(visible)]

    def _hip_number(self, handle: Any) -> int | None:
        ask = getattr(self._amdsmi, "amdsmi_get_gpu_enumeration_info", None)
        number = ask(handle).get("hip_id") if ask is not None else None
        return number if type(number) is int else None


def _load() -> Any:
    """Import amdsmi, which without its C library prints to stdout and raises a KeyError."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module("amdsmi")
    except ImportError as error:
        raise DriverError("amdsmi is missing; install lowtide[rocm]") from error
    except Exception as error:  # whatever it raises, the library cannot be used
        raise DriverError(f"amdsmi cannot be imported: {type(error).__name__}: {error}") from error

"""What a driver's list of processes says of this one."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.probes.device.torch_allocator import has_context
from lowtide.probes.originals import initialized_torch, os


def own_bytes(listed: Mapping[int, int | None], library: str, device_index: int) -> tuple[int | None, str]:
    """Bytes that this process holds on a card, or None with the reason why that is not known.

    A process that is not listed holds nothing, unless torch says that it has a context there: then it is listed under
    another number (a PID namespace of its own).

    Args:
        listed: bytes by process identifier; None where the driver lists one without its memory.
        library: what was asked, as a message calls it.
        device_index: of the card, as torch numbers it.
    """
    pid = os.getpid()
    if pid not in listed:
        torch = initialized_torch()
        if torch is not None and has_context(torch, device_index):
            return None, f"{library} does not list process {pid}, which has a context: another PID namespace?"
        return 0, ""
    if listed[pid] is None:
        return None, f"{library} lists this process without its memory (a permission, or a driver model without it)"
    return listed[pid], ""

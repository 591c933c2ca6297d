"""The places outside torch's operators at which the reference engine can fail."""

from __future__ import annotations

from collections.abc import Sequence

from torch import distributed

from lowtide.engine.device_allocator.host_memory import HostBuffer
from lowtide.engine.device_allocator.transfer import TransferRing
from lowtide.engine.errors import OutOfMemoryError
from lowtide.engine.kv.offloading_connector import OffloadingConnector
from lowtide.engine.model_executor import checkpoint
from lowtide.engine.pages.cpu import CpuPages
from lowtide.engine.pages.vmm import VmmPages
from lowtide.leakcheck.targets.faults import Seam, ShardSeam


def reference_seams(device: str) -> Sequence[Seam | ShardSeam]:
    """Those of an engine on a device."""
    pages = CpuPages if device == "cpu" else VmmPages
    # None of these may fail, but Ctrl-C comes when it comes.
    gives_back = (
        (pages, "unmap"),
        (pages, "unpin"),
        (HostBuffer, "close"),
        (TransferRing, "close"),
        (distributed, "destroy_process_group"),
    )
    return (
        Seam("reserve", pages, "reserve", lambda what: OutOfMemoryError(f"no address range ({what} injected)")),
        Seam("reserve", HostBuffer, "__init__", lambda what: OutOfMemoryError(f"no host memory ({what} injected)")),
        Seam("map", pages, "map", lambda what: OutOfMemoryError(f"no room ({what} injected)")),
        Seam("pin", pages, "pin", lambda what: OutOfMemoryError(f"no memory can be locked ({what} injected)")),
        Seam("transfer", OffloadingConnector, "_copy", lambda what: RuntimeError(f"copy failed ({what} injected)")),
        Seam("transfer", TransferRing, "_drain", lambda what: RuntimeError(f"copy failed ({what} injected)")),
        Seam("transfer", TransferRing, "_fill", lambda what: RuntimeError(f"copy failed ({what} injected)")),
        Seam("collective", distributed, "init_process_group", _timeout),
        Seam("collective", distributed, "new_group", _timeout),
        ShardSeam(checkpoint, "open_safetensors"),
        *(Seam("interrupt", owner, name, KeyboardInterrupt) for owner, name in gives_back),
    )


def _timeout(what: str) -> BaseException:
    return distributed.DistBackendError(f"{what}: the other ranks did not come ({what} injected)")

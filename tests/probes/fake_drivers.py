"""Modules of the drivers' libraries, with cards whose figures a test sets; they record what is called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

MIB = 1 << 20


class FakeNvmlError(Exception):
    pass


class FakeNvml:
    """The pynvml module with two cards, recording what is called."""

    NVMLError = FakeNvmlError

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, str] = {}
        self.uuids = ["GPU-aaaa-0", "GPU-bbbb-1"]
        self.compute: dict[int, list[tuple[int, int | None]]] = {0: [], 1: []}
        self.graphics: dict[int, list[tuple[int, int | None]]] = {0: [], 1: []}

    def _called(self, name: str, *arguments: object) -> None:
        self.calls.append(" ".join([name, *map(str, arguments)]))
        if name in self.failing:
            raise FakeNvmlError(self.failing[name])

    def nvmlInit(self) -> None:
        self._called("init")

    def nvmlShutdown(self) -> None:
        self._called("shutdown")

    def nvmlDeviceGetCount(self) -> int:
        self._called("count")
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._called("by index", index)
        if index >= len(self.uuids):
            raise FakeNvmlError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        self._called("by uuid", uuid)
        return 1

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self.uuids[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._called("memory", handle)
        return SimpleNamespace(used=(handle + 1) * 100 * MIB, total=1000 * MIB, free=0)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: int) -> list[Any]:
        self._called("compute", handle)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.compute[handle]]

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: int) -> list[Any]:
        self._called("graphics", handle)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.graphics[handle]]


class FakeAmdsmi:
    """The amdsmi module with two cards, which it counts in another order than HIP."""

    class AmdSmiException(Exception):  # noqa: N818 - the library's name
        pass

    class AmdSmiMemoryType:
        VRAM = "vram"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, str] = {}
        self.cards = ["first", "second"]
        self.bdfs = {"first": "0000:C1:00.0", "second": "0000:05:00.0"}
        self.hip = {"first": 1, "second": 0}
        self.processes: dict[str, list[Any]] = {"first": [], "second": []}

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise self.AmdSmiException(self.failing[name])

    def amdsmi_init(self) -> None:
        self._called("init")

    def amdsmi_shut_down(self) -> None:
        self._called("shutdown")

    def amdsmi_get_processor_handles(self) -> list[str]:
        self._called("handles")
        return self.cards

    def amdsmi_get_gpu_device_bdf(self, handle: str) -> str:
        return self.bdfs[handle]

    def amdsmi_get_gpu_asic_info(self, handle: str) -> dict[str, str]:
        return {"asic_serial": {"first": "0xAA11", "second": "0xBB22"}[handle]}

    def amdsmi_get_gpu_enumeration_info(self, handle: str) -> dict[str, Any]:
        return {"hip_id": self.hip[handle]}

    def amdsmi_get_gpu_memory_usage(self, handle: str, kind: str) -> int:
        self._called("usage")
        assert kind == "vram"
        return {"first": 100, "second": 200}[handle] * MIB

    def amdsmi_get_gpu_memory_total(self, handle: str, kind: str) -> int:
        assert kind == "vram"
        return 1000 * MIB

    def amdsmi_get_gpu_process_list(self, handle: str) -> list[Any]:
        self._called("processes")
        return self.processes[handle]


def amd_process(pid: int, vram: Any) -> dict[str, Any]:
    return {"name": "python", "pid": pid, "mem": 0, "memory_usage": {"gtt_mem": 1, "cpu_mem": 2, "vram_mem": vram}}

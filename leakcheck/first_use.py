"""Libraries that were used for the first time, and so may keep what they took without anybody having leaked it."""

from __future__ import annotations

from lowtide.probes.libraries import resident_code

VENDOR_LIBRARIES = (
    r"lib(cublas|cublasLt|cudnn\w*|cusolver\w*|cusparse\w*|cufft\w*|curand|cutensor|magma\w*|nccl|nvrtc|nvJitLink|nvshmem\w*"
    r"|hipblas\w*|rocblas|hipsolver|rocsolver|hipsparse|rocsparse|hipfft|rocfft|MIOpen|rccl)(-\w+)?\.so[.\d]*"
)
"""Those that make a handle, with memory of its own on the card, when they are first used, and never give it back."""

_FIRST_USE_BYTES = 256 << 10
"""Code that must newly be in memory: the kernel brings in 64 KiB around every page that is touched."""


class FirstUse:
    """Keeps how much code of each library was in memory at the last look."""

    def __init__(self) -> None:
        self._resident: dict[str, int] = {}

    def adopt(self) -> None:
        """What is in memory now has been used."""
        self._resident = _read()

    @property
    def any_loaded(self) -> bool:
        """Whether any of them was in use at the last look."""
        return any(self._resident.values())

    def libraries(self) -> list[str]:
        """Those of which much more is in memory than at the last `adopt`, sorted."""
        return sorted(name for name, size in _read().items() if size - self._resident.get(name, 0) >= _FIRST_USE_BYTES)


def _read() -> dict[str, int]:
    try:
        return resident_code(VENDOR_LIBRARIES)
    except OSError:  # not this kernel: then nothing is excused
        return {}

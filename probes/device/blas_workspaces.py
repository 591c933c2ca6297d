"""How large the workspaces are that torch gives to the BLAS libraries."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import ModuleType

_KIB = 1024


def workspace_sizes(torch: ModuleType, index: int) -> frozenset[int]:
    """The sizes in bytes that torch gives to the BLAS libraries' workspaces on a device."""
    properties = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    sizes = {
        blas_workspace_bytes(os.environ, properties.major, hip, str(getattr(properties, "gcnArchName", ""))),
        blas_lt_workspace_bytes(os.environ, hip),
    }
    # In newer torch a program can set other sizes; then these two know.
    for getter in ("_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize"):
        if hasattr(torch._C, getter):
            sizes.add(int(getattr(torch._C, getter)()))
    return frozenset(sizes - {0})


def blas_workspace_bytes(environment: Mapping[str, str], major: int, hip: bool, arch: str = "") -> int:
    """Size of the workspace that torch allocates per BLAS handle and stream, in bytes.

    As `parseChosenWorkspaceSize` in torch's ATen/cuda/CublasHandlePool.cpp: a list of `:KIB:COUNT` in
    CUBLAS_WORKSPACE_CONFIG, else 32 MiB on compute capability 9 and later, 8320 KiB before; on ROCm 128 MiB on the
    Instinct MI300 and MI350 families and 32 MiB elsewhere.
    """
    names = ("CUBLAS_WORKSPACE_CONFIG", "HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG")
    for name in names if hip else names[:1]:
        if name in environment:
            parts = re.findall(r":([0-9]+):([0-9]+)", environment[name])
            if parts:
                return sum(int(size) * _KIB * int(count) for size, count in parts)
            break
    if hip:
        return (128 if arch.startswith(("gfx94", "gfx95")) else 32) * _KIB * _KIB
    return 32 * _KIB * _KIB if major >= 9 else (4096 * 2 + 16 * 8) * _KIB


def blas_lt_workspace_bytes(environment: Mapping[str, str], hip: bool) -> int:
    """Size of a cublasLt or hipBLASLt workspace that is not shared with cuBLAS, in bytes.

    As `_parseChosenWorkspaceSize` in torch's ATen/cuda/CUDABlas.cpp: KiB in CUBLASLT_WORKSPACE_SIZE, else 1 MiB, on
    ROCm 76 MiB.
    """
    names = ("CUBLASLT_WORKSPACE_SIZE", "HIPBLASLT_WORKSPACE_SIZE")
    for name in names if hip else names[:1]:
        if name in environment:
            if environment[name].strip().isdigit():
                return int(environment[name]) * _KIB
            break
    return (76 * _KIB if hip else _KIB) * _KIB

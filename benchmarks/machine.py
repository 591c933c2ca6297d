"""Names the machine, and writes a benchmark's result as JSON."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch


def describe() -> dict[str, Any]:
    """What the numbers were measured on."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "card": card,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def write(name: str, results: dict[str, Any], folder: Path) -> None:
    """Write `<name>.json` and print it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"benchmark": name, "machine": describe(), "results": results}, indent=2)
    (folder / f"{name}.json").write_text(text + "\n")
    print(text)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()

"""Builds what is written in C, where a compiler is; without one the package is the same, and slower."""

from __future__ import annotations

import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_NAME = "lowtide.probes.native.heap"
_SOURCE = Path("lowtide/probes/native/heap.c")
# One build serves this version of Python and all later ones.
_FROM = "0x030A0000"
_TAG = "cp310-abi3"


class BuildNative(BuildHookInterface[Any]):
    """Compiles the extension: into a wheel, or beside its source where that is what is installed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling; `version` is `editable` or `standard`."""
        if self.target_name != "wheel":
            return
        source = Path(self.root, _SOURCE)
        self._folder = tempfile.TemporaryDirectory()
        try:
            built = _compile(source, self._folder.name)
            if version == "editable":
                # Renamed: a process that has loaded the old one keeps that.
                shutil.copy(built, source.with_suffix(".new"))
                source.with_suffix(".new").replace(source.with_suffix(".abi3.so"))
                return
        except Exception as error:  # noqa: BLE001 - whatever a compiler may do, the package works without
            self.app.display_warning(f"built without {_SOURCE.name}, walks over the heap take longer: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"{_TAG}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["force_include"][str(built)] = _NAME.replace(".", "/") + ".abi3.so"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """See hatchling."""
        if self.target_name == "wheel":
            self._folder.cleanup()


def _compile(source: Path, folder: str) -> Path:
    from setuptools import Distribution, Extension

    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise RuntimeError("a Python without the GIL has no stable interface")
    extension = Extension(
        _NAME,
        [str(source)],
        define_macros=[("Py_LIMITED_API", _FROM)],
        extra_compile_args=["-O2", "-g0"],
        py_limited_api=True,
    )
    command: Any = Distribution({"ext_modules": [extension]}).get_command_obj("build_ext")
    command.build_lib = command.build_temp = folder
    command.ensure_finalized()
    command.run()
    return Path(command.get_ext_fullpath(_NAME))

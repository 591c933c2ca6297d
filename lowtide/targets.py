"""What an engine offers so that `lowtide check` and `lowtide fuzz` can drive it, and the targets that are there.

`from lowtide.targets import Capabilities`. The targets that lowtide brings need torch, and are imported when they are
asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowtide.leakcheck.targets.target import (
    Capabilities,
    LifecycleTarget,
    PrefixCaching,
    Preserving,
    Reloading,
    Sleeping,
    Stepwise,
    TargetError,
    TargetFactory,
    Updating,
)

if TYPE_CHECKING:
    from lowtide.leakcheck.targets.reference import reference
    from lowtide.leakcheck.targets.server import lowtide_server, sglang_server, vllm_server
    from lowtide.leakcheck.targets.transformers_target import transformers_model

_HOMES = {
    "lowtide_server": "server",
    "reference": "reference",
    "sglang_server": "server",
    "transformers_model": "transformers_target",
    "vllm_server": "server",
}

__all__ = [
    "Capabilities",
    "LifecycleTarget",
    "PrefixCaching",
    "Preserving",
    "Reloading",
    "Sleeping",
    "Stepwise",
    "TargetError",
    "TargetFactory",
    "Updating",
    "lowtide_server",
    "reference",
    "sglang_server",
    "transformers_model",
    "vllm_server",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lowtide.targets' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lowtide.leakcheck.targets.{_HOMES[name]}"), name)

"""What an engine offers so that `lowtide check` and `lowtide fuzz` can drive it, and the targets that are there.

`from lowtide.targets import Capabilities`; each name is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.leakcheck.targets.reference_target import reference
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
    )
    from lowtide.leakcheck.targets.transformers_target import transformers_model

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
    "reference",
    "transformers_model",
]

_HOMES = {"reference": "reference_target", "transformers_model": "transformers_target"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'lowtide.targets' has no attribute {name!r}")
    home = importlib.import_module(f"lowtide.leakcheck.targets.{_HOMES.get(name, 'target')}")
    return getattr(home, name)

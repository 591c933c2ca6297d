"""What an engine offers so that it can be driven, the engines that lowtide brings, and how a call of theirs fails.

A user's target implements what `target` describes; `reference` and `transformers_target` are two that do.
"""

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
]

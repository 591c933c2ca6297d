"""What a dispatch mode of torch (`TorchDispatchMode`) costs a program: not its compiler."""

from __future__ import annotations

from types import CodeType
from typing import Any


def keep_from_compiler(torch: Any, code: CodeType) -> None:
    """Mark a `__torch_dispatch__` as not to be compiled, nor what it calls.

    Torch wraps that of each mode for the same end (`torch._disable_dynamo`), unless the mode's `_should_skip_dynamo`
    says no; its wrapper imports the whole compiler at the first op: seconds, and some 70 MiB.

    Args:
        torch: the module.
        code: of the method.

    Raises:
        AttributeError: this version of torch does it in another way.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
    dynamo.set_code_exec_strategy(code, skip)

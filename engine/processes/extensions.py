"""What a program adds to the processes that the engine starts, before they do anything; as vLLM's worker extensions."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from lowtide.engine.errors import ConfigError


@contextmanager
def entered(extensions: Sequence[str]) -> Iterator[None]:
    """All of these are active while the context lasts.

    Args:
        extensions: each as `module:function=argument`: the function is called with the argument, a string, and
            returns a context manager.

    Raises:
        ConfigError: there is no such function.
    """
    with ExitStack() as stack:
        for extension in extensions:
            stack.enter_context(_load(extension))
        yield


def _load(extension: str) -> AbstractContextManager[Any]:
    name, _, argument = extension.partition("=")
    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    # The last two: a name that is empty, or one that is relative.
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"process extension {extension!r} cannot be loaded ({error}); name it as module:function=argument"
        ) from error
    if not callable(make):
        raise ConfigError(f"process extension {extension!r} names no function; name it as module:function=argument")
    context: AbstractContextManager[Any] = make(argument)
    return context

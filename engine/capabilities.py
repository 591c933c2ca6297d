"""What a callable can take, asked once per function: the answers are kept, and nothing that they are about."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from lowtide.engine.errors import ConfigError

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

Parameters: TypeAlias = "tuple[tuple[str, inspect._ParameterKind], ...]"

_PARAMETERS: WeakKeyDictionary[FunctionType, Parameters] = WeakKeyDictionary()
"""Names and kinds only, by the plain function, weakly.

A key that is a bound method keeps its object, which may be the model with all its weights (vllm#38503); a closure that
was made for one engine keeps what it closes over; a default value may lead back to its function.
"""


def supports_kw(function: Callable[..., Any], name: str) -> bool:
    """Whether a callable takes a keyword argument of that name.

    Raises:
        ConfigError: it does not say what it takes.
    """
    if isinstance(function, MethodType) and type(function.__func__) is FunctionType:
        # The first one is what the method is bound to.
        parameters = _parameters(function.__func__)[1:]
    elif type(function) is FunctionType:
        parameters = _parameters(function)
    else:
        # A partial or a callable instance is asked every time: its answer cannot be kept without keeping it.
        parameters = _read(function)
    if any(kind is inspect.Parameter.VAR_KEYWORD for _, kind in parameters):
        return True
    return any(known == name and kind in _BY_NAME for known, kind in parameters)


def _parameters(function: FunctionType) -> Parameters:
    if function not in _PARAMETERS:
        _PARAMETERS[function] = _read(function)
    return _PARAMETERS[function]


def _read(function: Callable[..., Any]) -> Parameters:
    try:
        return tuple((each.name, each.kind) for each in inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{function!r} does not say which arguments it takes: {error}") from error

"""Settings that are always there while their library is, each with the expression that reads it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lowtide.probes.objects.foreign import mro_of
from lowtide.probes.originals import loaded

Text = Callable[[Any], str]


@dataclass(frozen=True)
class Value:
    """One setting that is always there.

    Attributes:
        name: the expression that reads it.
        read: reads what is safe to compare: numbers, strings, identities.
        text: of what was read; code, where there is code for it.
    """

    name: str
    read: Callable[[], Any]
    text: Text = repr


class Values:
    """Settings that are always there while their library is."""

    def __init__(self, *values: Value, libraries: Mapping[str, Callable[[Any], list[Value]]] | None = None) -> None:
        self._own = list(values)
        self._libraries = libraries or {}
        self._bound: dict[str, tuple[Any, list[Value]]] = {}
        self._all = self._own
        self._readers = _once(self._own)

    def raw(self) -> object:
        """What they are."""
        for name, bind in self._libraries.items():
            module = loaded(name)
            if module is not self._bound.get(name, (None,))[0]:
                self._bind(name, module, bind)
        try:
            return [read() for read in self._readers]
        except Exception:  # noqa: BLE001 - a library that cannot be asked now, in whatever way
            return [_read(value) for value in self._all]

    def texts(self) -> dict[str, str]:
        """Each by its name; those that cannot be read are left out."""
        read = ((value, _read(value)) for value in self._all)
        return {value.name: value.text(found) for value, found in read if found is not _UNREADABLE}

    def _bind(self, name: str, module: Any, bind: Callable[[Any], list[Value]]) -> None:
        self._bound.pop(name, None)
        if module is not None and is_loaded(module):
            # What a test has put in a library's place may have none of its functions.
            with contextlib.suppress(AttributeError):
                self._bound[name] = (module, bind(module))
        self._all = [*self._own, *(value for _, values in self._bound.values() for value in values)]
        self._readers = _once(self._all)


def _once(values: list[Value]) -> list[Callable[[], Any]]:
    """What reads the values; some read several of them."""
    return list(dict.fromkeys(value.read for value in values))


_UNREADABLE = "unreadable"


def _read(value: Value) -> Any:
    try:
        return value.read()
    except Exception:  # noqa: BLE001 - a library that cannot be asked now, in whatever way
        return _UNREADABLE


def is_loaded(module: object) -> bool:
    """Whether it is a module, no stand-in, and its import is over."""
    if not any(base is ModuleType for base in mro_of(type(module))):
        return False
    return getattr(vars(module).get("__spec__"), "_initializing", False) is False

"""What a thing is called in a fingerprint: the same from run to run and from machine to machine."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from lowtide.probes.objects.foreign import MISSING, is_a, type_name
from lowtide.probes.originals import os, temporary_folder

UUIDS = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_DIGESTS = re.compile(r"(?<![0-9A-Za-z])(0x)?(?=[a-f]*\d)[0-9a-f]{8,}(?![0-9A-Za-z])")


# What pytest calls `tmp_path`, wherever `--basetemp` is.
_FOLDER_OF_A_TEST = re.compile(r"/(test_\w*\d(/.*)?)$")
_TMP = ("*", "tmp*")
_PYTESTS_OWN = re.compile(r"pytest-of-[^/]*/pytest-[^/]*/(popen-gw\d+/)?")
# What `tempfile` adds to a prefix.
_RANDOM = re.compile(r"[a-z0-9_]{8}(?=(\.\w+)?$)")


@dataclass(frozen=True)
class Name:
    """A name without what changes from run to run.

    Attributes:
        text: it.
        is_given: whether somebody gave it, rather than the interpreter or a library.
    """

    text: str
    is_given: bool = True


def without_numbers(text: str) -> str:
    """Return the text with `*` for every number, address, digest and UUID."""
    return re.sub(r"\d+", "*", _DIGESTS.sub("*", UUIDS.sub("*", text)))


def function_name(item: Any) -> str:
    """Return the module and qualified name of a function, or the class of what else can be called; "" for nothing."""
    while is_a(item, functools.partial):
        item = functools.partial.__dict__["func"].__get__(item)
    if item is MISSING or item is None:
        return ""
    if type(item) is MethodType:
        return function_name(item.__func__)
    if type(item) is FunctionType or type(item) is BuiltinFunctionType:
        module = item.__module__ if type(item.__module__) is str else ""
        return without_numbers(f"{module}.{item.__qualname__}")
    return type_name(type(item))


def name_of_path(text: str) -> Name:
    """Return a path from the working directory, the temporary folder or the user's own folder, wherever these are."""
    of_test = _FOLDER_OF_A_TEST.search(text)
    if of_test is not None:
        return Name(without_numbers(f"<tmp>/{of_test[1]}"))
    places = {"<tmp>": temporary_folder(), "<var-tmp>": "/var/tmp", "~": os.environ.get("HOME", ""), ".": _here()}
    inside = [word for word, place in places.items() if len(place) > 1 and text.startswith(f"{place}/")]
    if not inside:
        return Name(without_numbers(re.sub(r"^.*/(site|dist)-packages/", "<packages>/", text)))
    word = max(inside, key=lambda word: len(places[word]))
    rest = text[len(places[word]) + 1 :]
    if not word.startswith("<"):
        return Name(without_numbers(f"{word}/{rest}"))
    if _PYTESTS_OWN.match(rest):
        return Name(without_numbers(f"{word}/{_PYTESTS_OWN.sub('', rest, count=1)}"))
    first, slash, behind = rest.partition("/")
    kept = _RANDOM.sub("*", UUIDS.sub("*", first))
    return Name(without_numbers(f"{word}/{kept}{slash}{behind}"), bool(behind) or kept.partition(".")[0] not in _TMP)


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""

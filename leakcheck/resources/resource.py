"""The interface of what must come back: its row of the table, its names for ever, and what may end it."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Collection, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Literal

import msgspec

from lowtide.probes.objects.foreign import MISSING, is_a, type_name
from lowtide.probes.originals import os, temporary_folder
from lowtide.reports.schema import Cause, ResourceName, Verdict

MIB = 1 << 20

Place = Literal["process", "device", "card"]
"""Of what there is one reading: the process, each device (the host is one), or each card."""


class Rung(enum.Enum):
    """One kind of release, in the order in which they are tried."""

    RAW = "raw"
    SETTLE = "settle"
    COLLECT = "collect"
    UNFREEZE = "unfreeze"
    IPC_COLLECT = "ipc_collect"
    EMPTY_CACHE = "empty_cache"
    CLEAR_CACHES = "clear_caches"
    RESET_COMPILED = "reset_compiled"
    CLEAR_WORKSPACES = "clear_workspaces"
    CLEAR_HOST_CACHE = "clear_host_cache"

    @property
    def order(self) -> int:
        """Its place on the ladder, from 0."""
        return list(Rung).index(self)


class Bound(msgspec.Struct, frozen=True):
    """When something counts as back.

    Attributes:
        tolerance: how far above the baseline it may stay, in the rule's unit. A test's own tolerance of bytes counts
            where it is larger.
        with_card: the same in a process that uses a card; None: no other.
        rung: where on the ladder it must be back: what comes back later is somebody else's work.
        first_use: whether libraries move it when they are first used in a process (kernels that load, threads that
            start), so that it is judged from the second life on.
        settles: whether it comes back in the driver's own time, so that waiting is worth while.
        what: how a finding calls it, if not by the resource.
        cause: what a finding says when no rung brings it back.
    """

    tolerance: int = 0
    with_card: int | None = None
    rung: Rung = Rung.COLLECT
    first_use: bool = False
    settles: bool = False
    what: str = ""
    cause: Cause = "unknown"

    def allowed(self, *, card: bool) -> int:
        """Return the tolerance in a process that uses a card, or none."""
        return self.tolerance if self.with_card is None or not card else self.with_card


class Rule(msgspec.Struct, frozen=True):
    """One row: something that must come back.

    Attributes:
        key: its name in readings; those of devices have the device behind it.
        resource: the word that findings use.
        place: of what there is one reading.
        counts: what is counted, as the documentation says it.
        test: when it is back after a test; None: not judged there.
        life: when it is back after an engine's shutdown; None: not judged there.
        unit: "bytes" or the plural of what is counted.
        verdict: what a finding says of it when no rung brings it back.
    """

    key: str
    resource: ResourceName
    place: Place
    counts: str
    test: Bound | None
    life: Bound | None
    unit: str = "bytes"
    verdict: Verdict | None = None

    def key_on(self, device: str) -> str:
        """Return the key of its reading on a device; of the process for ""."""
        return f"{self.key} {device}".strip()


UUIDS = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_DIGESTS = re.compile(r"(?<![0-9A-Za-z])(0x)?(?=[a-f]*\d)[0-9a-f]{8,}(?![0-9A-Za-z])")

# What pytest calls `tmp_path`, wherever `--basetemp` is.
_FOLDER_OF_A_TEST = re.compile(r"/(test_\w*\d(/.*)?)$")
_TMP = ("*", "tmp*")
_PYTESTS_OWN = re.compile(r"pytest-of-[^/]*/pytest-[^/]*/(popen-gw\d+/)?")
# What `tempfile` adds to a prefix.
_RANDOM = re.compile(r"[a-z0-9_]{8}(?=(\.\w+)?$)")


class Name(msgspec.Struct, frozen=True):
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


class Change(msgspec.Struct, frozen=True):
    """Something that may end what a finding is about.

    Attributes:
        code: it, as code or in words.
        effect: what is different afterwards; empty if nothing of the program's is.
        apply: makes it.
        is_code: whether `code` is code that runs as it stands.
    """

    code: str
    effect: str
    apply: Callable[[], object]
    is_code: bool = True


Items = Mapping[str, int]
"""Things by name, each with its bytes or 1."""


class Resource:
    """One kind of thing that must come back.

    A test, a life, a fuzzed call and another process read it by the same functions. What is not overridden is what
    holds for a thing that has a name, no object and no remedy.

    Attributes:
        rule: its row of the table.
        opens: what the descriptors are called that a thing of this kind opens for itself; None where it opens none.
        kept_in: the module that keeps them, and the names of the collections there, or of what says that there may be
            any; all empty, there is none.
    """

    rule: Rule
    opens: re.Pattern[str] | None = None
    kept_in: tuple[str, ...] = ()

    def read(self) -> Items:
        """Return what there is now, in microseconds where there is nothing: it is asked several times in every test.

        Not asked where it is not overridden: that the counters read in one go.
        """
        return {}

    def staying(self, names: Collection[str]) -> Collection[str]:
        """Return those of some new things that are no leak; asked at every poll while something is waited for."""
        return ()

    def objects(self, names: Collection[str]) -> Mapping[str, object]:
        """Return the object that stands for each thing, for those that have one: whoever holds it, holds the thing."""
        return {}

    def describe(self, name: str) -> str:
        """Return how a finding calls a thing."""
        return name

    def identity(self, name: str) -> Name:
        """Return what names a thing for ever, for its fingerprint."""
        return Name(without_numbers(name))

    def remark(self, names: Collection[str]) -> str:
        """Return what a finding says of these things behind what they are."""
        return ""

    def still_there(self, names: Collection[str]) -> Collection[str] | None:
        """Return those of some things that are there still, where a later reading no longer has all; else None."""
        return None

    def changes(self, names: Collection[str]) -> list[Change]:
        """Return what may end these things, the smallest first, to be tried when no test follows."""
        return []

    def advice(self, names: Collection[str]) -> str:
        """Return what to do about these things where nothing of the program is seen to hold them."""
        return ""

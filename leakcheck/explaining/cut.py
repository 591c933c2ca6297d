"""What a cut is, and what is known of a program by which it is judged harmless."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NamedTuple

from lowtide.leakcheck.explaining import declarations
from lowtide.leakcheck.explaining.container_entries import Entries
from lowtide.leakcheck.resources.resource import Change
from lowtide.probes.objects.address_table import Ints
from lowtide.probes.objects.foreign import is_a
from lowtide.probes.objects.identities import identities, namespaces_of, types_of
from lowtide.probes.original_numpy import np

_UNMENTIONED = "a name that is in no source"


class Place(NamedTuple):
    """Where a container's entry is, for one action on several entries of it.

    Attributes:
        container: its identity.
        code: the container as code; in words where there is none.
        key: the entry, as code: `['a']`.
        size: how many entries the container has.
        position: the entry's place in it.
        clear: what empties the container, as code; empty where there is none.
        is_plain: whether `del` with code and key is what deletes the entry.
        ordered: the container's built-in type: `list`, `dict`, `deque`.
    """

    container: int
    code: str
    key: str
    size: int
    position: int = 0
    clear: str = ""
    is_plain: bool = True
    ordered: str = ""


@dataclass(frozen=True, eq=False)
class Cut(Change):
    """A change of the edge by which something is held, to be made once; keeps the holder alive, and not what is held.

    `apply` raises what the holder's own code raises.

    Attributes:
        place: for an entry of a container, where.
        ends_anyway: whether the change is made even where making it raises.
        sets_none: whether None takes the place of what is held, and nothing is taken away.
        emptied: the identity of the cache that the change empties; 0 where it empties none.
        held: the identity of the entry that the change deletes from a container; 0 where it does something else.
        together: deletes several entries of that container, by their identities, going through it once.
    """

    place: Place | None = None
    ends_anyway: bool = False
    sets_none: bool = False
    emptied: int = 0
    held: int = 0
    together: Callable[[Collection[int]], object] | None = None


@dataclass(frozen=True)
class Names:
    """What is known of the program before the leak, by which a change is judged harmless.

    Attributes:
        older: the identities of what was there; None if nobody knows.
        home: the module whose code made what holds; None if nobody knows.
        root: the module that the path begins at; None if it begins elsewhere.
        holder: the name there by which what holds is known; empty if it has none.
        are_free: whether any name may be set to None: the program has ended but for its checker.
        sizes: how many names each module had (`namespace_sizes`); None if nobody knows.
        by_source: whether the program's source says what was there, since nothing else does.
    """

    older: Container[int] | None = None
    home: ModuleType | None = None
    root: ModuleType | None = None
    holder: str = ""
    are_free: bool = False
    sizes: NamespaceSizes | None = None
    by_source: bool = False
    _sources: dict[int, tuple[object, str]] = field(default_factory=dict, repr=False, compare=False)
    _keys: dict[tuple[int, str], tuple[object, declarations.Keys | None]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _read: dict[int, Entries] = field(default_factory=dict, repr=False, compare=False)
    _asked: dict[tuple[object, int, str], tuple[object, declarations.Binding]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def bound(
        self, question: Callable[[Any, str], declarations.Binding], where: object, name: str
    ) -> declarations.Binding:
        """What the program's source says of a name in a class or module; a file is read once for each question."""
        if id(where) not in self._sources:
            # With what it is about, so that the identity stays its own.
            self._sources[id(where)] = where, declarations.source_of(where)
        # Of all names that are not in the source it says the same: a leak may have made a million of them.
        name = name if name in self._sources[id(where)][1] else _UNMENTIONED
        key = (question, id(where), name)
        if key not in self._asked:
            self._asked[key] = where, question(where, name)
        return self._asked[key][1]

    def bound_key(self, module: ModuleType, key: object) -> declarations.Binding:
        """What a module's source says of a key in the dict that has the holder's name there."""
        if (id(module), self.holder) not in self._keys:
            self._keys[id(module), self.holder] = module, declarations.of_keys(module, self.holder)
        return declarations.binding_of(self._keys[id(module), self.holder][1], key)

    def entries(self, container: Any) -> Entries:
        """Where a container has what it holds; read once, so that these names are for one reading of the program."""
        if id(container) not in self._read:
            self._read[id(container)] = Entries(container, self.may_have_been_there)
        return self._read[id(container)]

    def is_bound_elsewhere(self, name: str) -> bool:
        """Whether the modules at hand bind an attribute of that name outside their functions and classes."""
        return any(self.bound(declarations.of_attribute, module, name) != "absent" for module in self.modules)

    def of(self, home: ModuleType | None, root: ModuleType | None, holder: str) -> Names:
        """The same, for what a module's code made."""
        return replace(self, home=home, root=root, holder=holder)

    @property
    def modules(self) -> tuple[ModuleType, ...]:
        """Where something may be bound before anything runs."""
        return tuple(module for module in dict.fromkeys((self.home, self.root)) if module is not None)

    def may_have_been_there(self, item: object) -> bool:
        """Whether an object is older than the leak, or nobody knows."""
        return self.older is None or id(item) in self.older

    def is_new_global(self, namespace: dict[str, object], name: str, bound: declarations.Binding) -> bool:
        """Whether a module got a name since; `bound` is what its source says of the name."""
        if self.sizes is None:
            return bound == "absent" and self.is_new(namespace, name)
        # A dict keeps the order; where a name has gone meanwhile, this errs towards what was there.
        place = self.entries(namespace).place_of_name(name)
        is_added = place is not None and place >= self.sizes.of(namespace)
        return is_added and bound in ("absent", "unknown")

    def is_new(self, namespace: dict[str, object], name: str) -> bool:
        """Whether a name was added since: a dict keeps the order, so nothing older stands behind it."""
        place = self.entries(namespace).place_of_name(name)
        return self.older is not None and place is not None and self.entries(namespace).last_old <= place


@dataclass(frozen=True)
class NamespaceSizes:
    """How many names each module had at one moment.

    Attributes:
        namespaces: the identities of the modules' namespaces, shape [modules].
        sizes: how many names each one had, shape [modules].
    """

    namespaces: Ints
    sizes: Ints

    def of(self, namespace: Mapping[str, object]) -> int:
        """How many names a namespace had; 0 for that of a module that was not there."""
        places = np.flatnonzero(self.namespaces == id(namespace))
        return int(self.sizes[places[0]]) if len(places) else 0


def namespace_sizes() -> NamespaceSizes:
    """How many names each module has; a tenth of a millisecond for 4,000 modules, since every test begins with it."""
    modules = list(sys.modules.values())
    for place in np.flatnonzero(types_of(identities(modules)) != id(ModuleType)).tolist():
        if not is_a(modules[place], ModuleType):
            # Whatever stands there is no module: one that counts anyway takes its place.
            modules[place] = sys
    return NamespaceSizes(*namespaces_of(modules))


class Refused(Exception):  # noqa: N818 - it is an answer, not a failure
    """Cutting here could break what the program has had before; so nothing behind it may be cut either."""


@dataclass(frozen=True)
class LinkOwner:
    """What a link starts from, for a reader.

    Attributes:
        words: as a path has it.
        code: as an expression that leads to it; None where there is none.
    """

    words: str
    code: str | None

    @property
    def text(self) -> str:
        """The expression, or the words."""
        return self.words if self.code is None else self.code

    def cut(
        self,
        code: str | None,
        instead: str,
        effect: str,
        apply: Callable[[], object],
        *,
        place: Place | None = None,
        ends_anyway: bool = False,
        sets_none: bool = False,
    ) -> Cut:
        """Return a change by its code, or where there is none, by words for it."""
        is_code = self.code is not None and code is not None
        return Cut(
            code if is_code and code else instead,
            effect,
            apply,
            is_code,
            place=place,
            ends_anyway=ends_anyway,
            sets_none=sets_none,
        )

"""Cutting one edge of a path: what it is called, that the thing dies of it, that nothing else changes, and refusals."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import importlib
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from lowtide.leakcheck.explaining.cut import Cut, Names, Refused
from lowtide.leakcheck.explaining.cuts import cut_of
from lowtide.leakcheck.explaining.explain import Explanation, explain
from lowtide.probes.heap.holders import trace
from lowtide.probes.objects.identities import NamespaceSizes, namespace_sizes
from tests.waiting import HANG_S


class Thing:
    """What leaks in these tests."""


class Plain:
    """Holds what it is given."""

    def __init__(self, thing: object = None) -> None:
        self.thing = thing


class Others(Container[int]):
    """Everything was there before, but for these."""

    def __init__(self, *new: object) -> None:
        self._new = set(map(id, new))

    def __contains__(self, identity: object) -> bool:
        return identity not in self._new


# --- entries of containers, caches and suspended functions: one walk for all -----------------------------------------


def raising(*_: object) -> Any:
    raise ValueError


class RaisingDict(dict[str, object]):
    __delitem__ = __getitem__ = __iter__ = __contains__ = keys = items = pop = __len__ = raising


class RaisingOrderedDict(OrderedDict[str, object]):
    __delitem__ = raising


class RaisingList(list[object]):
    __delitem__ = __getitem__ = index = remove = pop = __len__ = raising


class RaisingSet(set[object]):
    __iter__ = __contains__ = discard = remove = __len__ = raising


class NewestFirst(list[object]):
    def __iter__(self) -> Iterator[object]:
        return iter(list(list.__iter__(self))[::-1])


class Pair(NamedTuple):
    first: object
    second: object


@dataclass(frozen=True)
class Way:
    """A way to hold a thing and, by the holder's name in a module, how that is cut; what is left of the holder then."""

    action: str | None
    left: object
    hold: Callable[[Any], Any]


WAYS: dict[str, Way] = {}


def cut_by(action: str | None, left: object = None) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Registers a holder; `{}` in the action is the holder as code. None: the edge from the holder cannot be cut."""

    def register(hold: Callable[[Any], Any]) -> Callable[[Any], Any]:
        WAYS[hold.__name__] = Way(action, left, hold)
        return hold

    return register


@cut_by("del {}['a']", [("b", 1), ("c", 2)])
def entry_of_a_dict(thing: Any) -> Any:
    return {"b": 1, "c": 2, "a": thing}


@cut_by("del {}['a']", [])
def only_entry_of_a_dict(thing: Any) -> Any:
    return {"a": thing}


@cut_by("del {}[(1, 'b', 2.5)]", [((1, "b"), 3)])
def entry_under_a_tuple(thing: Any) -> Any:
    return {(1, "b"): 3, (1, "b", 2.5): thing}


@cut_by("del {}['a']", [("a1", 1), ("a2", 2)])
def entry_of_an_ordered_dict(thing: Any) -> Any:
    return OrderedDict(a1=1, a2=2, a=thing)


@cut_by("collections.OrderedDict.__delitem__({}, 'a')", [("a1", 1), ("a2", 2)])
def entry_of_an_ordered_dict_that_forbids_it(thing: Any) -> Any:
    return RaisingOrderedDict(a1=1, a2=2, a=thing)


@cut_by("del {}[7]", [(6, [6]), (8, [8])])
def entry_of_a_default_dict(thing: Any) -> Any:
    return defaultdict(list, {6: [6], 8: [8], 7: thing})


@cut_by("dict.__delitem__({}, 'a')", [("b", 1), ("c", 2)])
def entry_of_a_dict_that_forbids_it(thing: Any) -> Any:
    return RaisingDict(b=1, c=2, a=thing)


@cut_by("del {}[2]", ["a", "b"])
def item_of_a_list(thing: Any) -> Any:
    return ["a", "b", thing]


@cut_by("del {}[0]", [])
def only_item_of_a_list(thing: Any) -> Any:
    return [thing]


@cut_by("list.__delitem__({}, 2)", ["a", "b"])
def item_of_a_list_that_forbids_it(thing: Any) -> Any:
    return RaisingList(["a", "b", thing])


@cut_by("del {}[2]", ["a", "b"])
def item_of_a_list_that_counts_otherwise(thing: Any) -> Any:
    return NewestFirst(["a", "b", thing])


@cut_by("del {}[2]", [1, 2])
def item_of_a_deque(thing: Any) -> Any:
    return deque([1, 2, thing], maxlen=4)


@cut_by(f"discard the {__name__}.Thing from {{}}", {1, 2})
def element_of_a_set(thing: Any) -> Any:
    return {1, thing, 2}


@cut_by("{}.clear()", set())
def only_element_of_a_set(thing: Any) -> Any:
    return {thing}


@cut_by(f"discard the {__name__}.Thing from {{}}", {1, 2})
def element_of_a_set_that_forbids_it(thing: Any) -> Any:
    return RaisingSet([1, thing, 2])


@cut_by(None)
def item_of_a_tuple(thing: Any) -> Any:
    return (1, thing)


@cut_by(None)
def item_of_a_named_tuple(thing: Any) -> Any:
    return Pair(1, thing)


@cut_by(None)
def element_of_a_frozen_set(thing: Any) -> Any:
    return frozenset({1, thing})


@cut_by(None)
def entry_of_a_read_only_view(thing: Any) -> Any:
    return types.MappingProxyType({"a": thing})


@cut_by(None)
def bound_method(thing: Any) -> Any:
    return types.MethodType(len, thing)


@cut_by(None)
def argument_of_a_partial(thing: Any) -> Any:
    return functools.partial(print, thing)


@cut_by(None)
def default_of_an_argument(thing: Any) -> Any:
    def function(argument: object = thing) -> None: ...

    del thing
    return function


@cut_by("{}.cache_clear()", 0)
def key_of_a_bounded_cache(thing: Any) -> Any:
    cached = functools.lru_cache(maxsize=4)(lambda argument: None)
    cached(1)
    cached(thing)
    return cached


@cut_by("{}.cache_clear()", 0)
def result_of_a_bounded_cache(thing: Any) -> Any:
    results = [thing, 1]
    cached = functools.lru_cache(maxsize=4)(lambda argument: results.pop())
    cached("a")
    cached("b")
    return cached


@cut_by("{}.cache_clear()", 0)
def key_of_an_unbounded_cache(thing: Any) -> Any:
    cached = functools.cache(lambda *arguments: None)
    cached(thing)
    cached(1, 2)
    return cached


@cut_by("{}.cache_clear()", 0)
def result_of_an_unbounded_cache(thing: Any) -> Any:
    results = [thing]
    cached = functools.cache(lambda argument: results.pop())
    cached("a")
    return cached


@cut_by("{}.cache_clear()", 0)
def key_of_a_cache_by_type(thing: Any) -> Any:
    cached = functools.lru_cache(typed=True)(lambda *arguments, **named: None)
    cached(1, named=thing)
    return cached


@cut_by("{}.close()", "closed")
def variable_of_a_generator(thing: Any) -> Any:
    def generate(variable: object) -> Iterator[int]:
        yield 1
        del variable

    generator = generate(thing)
    next(generator)
    return generator


class Pause:
    def __await__(self) -> Generator[None, None, None]:
        yield


@cut_by("{}.close()", "closed")
def variable_of_a_coroutine(thing: Any) -> Any:
    async def wait_with(variable: object) -> None:
        await Pause()
        del variable

    coroutine = wait_with(thing)
    coroutine.send(None)
    return coroutine


def left_of(holder: Any) -> object:
    """What a holder holds, without asking it."""
    if isinstance(holder, OrderedDict):
        # It keeps an order of its own, which only its own methods know.
        return list(OrderedDict.items(holder))
    if isinstance(holder, dict):
        return list(dict.items(holder))
    if isinstance(holder, list):
        return list(list.__iter__(holder))
    if isinstance(holder, deque):
        return list(holder)
    if isinstance(holder, set):
        return set(set.__iter__(holder))
    if isinstance(holder, types.GeneratorType):
        return "closed" if holder.gi_frame is None else "suspended"
    if isinstance(holder, types.CoroutineType):
        return "closed" if holder.cr_frame is None else "suspended"
    return holder.cache_info().currsize if hasattr(holder, "cache_info") else None


def parts_of(holder: object) -> list[object]:
    """What a cache made for its entries: as new as the thing."""
    if not isinstance(holder, functools._lru_cache_wrapper):
        return []
    kept = [item for item in gc.get_referents(holder) if item is not holder.__wrapped__ and item is not vars(holder)]
    return [*kept, *(part for item in kept if isinstance(item, dict) for part in gc.get_referents(item))]


@dataclass
class Tried:
    """What came of one cut: its texts, whether the thing lived until it and died of it, and what is left."""

    cut: Cut | None = None
    lived: bool = False
    died: bool = False
    left: object = None
    failure: str = ""


@pytest.fixture(scope="module")
def tried() -> dict[str, Tried]:
    """Each way, cut once where the holder in the module holds on."""
    helper = types.ModuleType("helper")
    sys.modules["helper"] = helper
    things = [Thing() for _ in WAYS]
    watched = [weakref.ref(thing) for thing in things]
    for way, thing in zip(WAYS.values(), things, strict=True):
        setattr(helper, way.hold.__name__, way.hold(thing))
    del thing
    parts = [item for name in WAYS for item in parts_of(vars(helper)[name])]
    suspended = [helper.variable_of_a_generator, helper.variable_of_a_coroutine]
    reported = explain(things, innocent=Others(*things, *parts), names=Names(Others(*things, *parts, *suspended)))
    del parts, suspended
    things.clear()
    done = {}
    for name, explanation, thing_left in zip(WAYS, reported, watched, strict=True):
        outcome = done[name] = Tried(explanation.cut)
        outcome.lived = thing_left() is not None
        if outcome.cut is not None:
            try:
                outcome.cut.apply()
            except Exception as error:  # noqa: BLE001 - it is for the test to say so
                outcome.failure = repr(error)
            if thing_left() is not None:
                gc.collect()
            outcome.died = thing_left() is None
            outcome.left = left_of(vars(helper)[name])
    helper.variable_of_a_coroutine.close()
    del sys.modules["helper"]
    return done


@pytest.mark.parametrize("name", WAYS)
def test_the_action_is_code(tried: dict[str, Tried], name: str) -> None:
    action = WAYS[name].action
    cut = tried[name].cut
    assert (cut and cut.code) == (action and action.format(f"helper.{name}"))


CUT = [name for name, way in WAYS.items() if way.action is not None]


@pytest.mark.parametrize("name", CUT)
def test_the_thing_dies_of_the_cut_and_of_nothing_before(tried: dict[str, Tried], name: str) -> None:
    assert (tried[name].failure, tried[name].lived, tried[name].died) == ("", True, True)


@pytest.mark.parametrize("name", CUT)
def test_everything_else_in_the_holder_stays_in_its_order(tried: dict[str, Tried], name: str) -> None:
    assert tried[name].left == WAYS[name].left


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("entry_of_a_dict", "helper.entry_of_a_dict['a'] is deleted"),
        ("item_of_a_list", "helper.item_of_a_list[2] is deleted"),
        ("element_of_a_set", "one element of helper.element_of_a_set is gone"),
        ("key_of_a_bounded_cache", "helper.key_of_a_bounded_cache is empty"),
        ("variable_of_a_generator", "helper.variable_of_a_generator is closed"),
    ],
)
def test_what_is_changed_is_said(tried: dict[str, Tried], name: str, changed: str) -> None:
    cut = tried[name].cut
    assert cut is not None
    assert cut.effect == changed


def test_an_entrys_place_tells_its_container_and_how_many_there_are(tried: dict[str, Tried]) -> None:
    places = {name: cut.place for name, outcome in tried.items() if (cut := outcome.cut) is not None}
    of_dict, of_list = places["entry_of_a_dict"], places["item_of_a_list"]
    assert of_dict is not None
    assert of_list is not None
    assert (of_dict.code, of_dict.key, of_dict.size) == ("helper.entry_of_a_dict", "['a']", 3)
    assert (of_list.code, of_list.key, of_list.size) == ("helper.item_of_a_list", "[2]", 3)
    assert of_dict.container != of_list.container
    # There is no `.clear()` for these that would mean the same.
    assert places["key_of_a_bounded_cache"] is None
    assert places["element_of_a_set"] is None
    assert places["variable_of_a_generator"] is None


# --- names, places and what was there before: cases that share a walk -------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A program in which something holds a thing, and how the first suspect edge is cut.

    Attributes:
        hold: makes the program hold the thing; returns what it made besides.
        action: the cut's, None if there is none.
        source: the program's.
        changed: what the cut says is different afterwards.
        left: whether the program is as it should be afterwards.
        known: `before`: what was there before the leak; `nothing`; `over`: that, and that the program will not go on.
    """

    hold: Callable[[Any, Any], Sequence[object] | None]
    action: str | None
    source: str
    changed: str
    left: Callable[[Any], object]
    known: Literal["before", "nothing", "over"]


CASES: dict[str, Case] = {}
Hold = Callable[[Any, Any], "Sequence[object] | None"]


def cut(
    action: str | None,
    source: str,
    left: Callable[[Any], object] = lambda program: True,
    changed: str = "",
    known: Literal["before", "nothing", "over"] = "before",
) -> Callable[[Hold], Hold]:
    """Registers a case; its name is the function's."""

    def register(hold: Hold) -> Hold:
        CASES[hold.__name__] = Case(hold, action, source, changed, left, known)
        return hold

    return register


def refused(source: str, known: Literal["before", "nothing", "over"] = "before") -> Callable[[Hold], Hold]:
    """Registers a case in which nothing may be cut."""
    return cut(None, source, known=known)


@cut("del program.TABLE['c']", "TABLE = {'b': [1], 'a': [2]}", lambda program: list(program.TABLE) == ["b", "a", "d"])
def entry_among_new_ones(program: Any, thing: Any) -> Sequence[object]:
    program.TABLE.update(c=thing, d=[3])
    return [program.TABLE["d"]]


@cut(
    "del program.TABLE['c']",
    "TABLE = {'b': [1]}",
    lambda program: list(program.TABLE.items()) == [("b", [1]), ("n", 5)],
)
def entry_with_a_new_number_behind_it(program: Any, thing: Any) -> None:
    program.TABLE.update(c=thing, n=5)


@cut("del program.ROWS[1]", "ROWS = ['a']", lambda program: program.ROWS == ["a", [3]])
def item_among_new_ones(program: Any, thing: Any) -> Sequence[object]:
    program.ROWS.extend([thing, [3]])
    return [program.ROWS[2]]


@refused("SLOTS = [None, None, [2]]")
def slot_before_a_full_one(program: Any, thing: Any) -> None:
    program.SLOTS[1] = thing


@refused("SLOTS = [[0], [1], None]")
def slot_before_an_empty_one(program: Any, thing: Any) -> None:
    program.SLOTS[1] = thing


@refused("SLOTS = [None, [1]]")
def slot_behind_an_empty_one(program: Any, thing: Any) -> None:
    program.SLOTS[1] = thing


@refused("from collections import deque\nSLOTS = deque([[0], [1]])")
def slot_of_a_deque(program: Any, thing: Any) -> None:
    program.SLOTS[0] = thing


@cut(
    "program.SLOTS[1] = None",
    "SLOTS = [None, None, [2]]",
    lambda program: program.SLOTS == [None, None, [2]],
    "program.SLOTS[1] is None",
    known="over",
)
def slot_when_the_program_is_over(program: Any, thing: Any) -> None:
    program.SLOTS[1] = thing


@cut(
    "program.STATE['model'] = None",
    "STATE = {'first': [1], 'model': None, 'tokenizer': [2]}",
    lambda program: list(program.STATE.items()) == [("first", [1]), ("model", None), ("tokenizer", [2])],
    "program.STATE['model'] is None",
)
def key_that_begins_as_none(program: Any, thing: Any) -> None:
    program.STATE["model"] = thing


@cut(
    "program.ENGINE.parts['model'] = None",
    "class Engine:\n    def __init__(self):\n        self.parts = {'model': None}\nENGINE = Engine()",
    lambda program: program.ENGINE.parts == {"model": None},
)
def key_of_an_objects_dict_that_begins_as_none(program: Any, thing: Any) -> None:
    program.ENGINE.parts["model"] = thing


@refused("STATE = {'model': []}")
def key_that_begins_otherwise(program: Any, thing: Any) -> None:
    program.STATE["model"] = thing


@refused("TABLE = {}\nfor name in ('a', 'b'):\n    TABLE[name] = [name]")
def key_with_something_older_behind_it(program: Any, thing: Any) -> None:
    program.TABLE["a"] = thing


@cut("del program.STATE['model']", "STATE = {'model': [], 'other': []}", known="over")
def key_when_the_program_is_over(program: Any, thing: Any) -> None:
    program.STATE["model"] = thing


@cut("del program.CACHE['model']", "DEFAULTS = {'model': None}\nCACHE = {}", lambda program: program.CACHE == {})
def key_that_begins_as_none_in_another_dict(program: Any, thing: Any) -> None:
    program.CACHE["model"] = thing


@cut("del program.CACHE['model']", "DEFAULTS = {'model': []}\nCACHE = {}", lambda program: program.CACHE == {})
def key_that_begins_otherwise_in_another_dict(program: Any, thing: Any) -> None:
    program.CACHE["model"] = thing


@refused("STATE = {'first': [1], 'second': 2}\nSTATE['model'] = []")
def key_that_is_set_at_import(program: Any, thing: Any) -> None:
    program.STATE["model"] = thing


# Dicts that are no plain display under a name; whatever is done, the key must be there afterwards.
STATES = {
    "nested": "HOLDER = {'parts': {'model': None}}",
    "ordered": "from collections import OrderedDict\nHOLDER = {'parts': OrderedDict({'model': None})}",
    "from_keys": "HOLDER = {'parts': dict.fromkeys(('model', 'tokenizer'))}",
    "in_a_namespace": "import types\nHOLDER = types.SimpleNamespace(parts={'model': None})",
    "in_a_deque": "from collections import deque\nHOLDER = deque([{'model': None}])",
}


def state_of(program: Any) -> Any:
    holder = program.HOLDER
    if isinstance(holder, deque):
        return holder[0]
    return holder["parts"] if isinstance(holder, dict) else holder.parts


def old_names(program: Any) -> list[str]:
    return [name for name in vars(program) if name in ("A", "X", "B")]


@cut(
    "program.X = None",
    "A = [1]\nX = None\nB = [2]",
    lambda program: program.X is None and old_names(program) == ["A", "X", "B"],
    "program.X is None",
)
def old_global_that_begins_as_none(program: Any, thing: Any) -> None:
    program.X = thing


@cut("program.X = None", "if True:\n    try:\n        X: object = None\n    finally:\n        pass")
def old_global_that_begins_as_none_in_a_branch(program: Any, thing: Any) -> None:
    program.X = thing


@cut("program.X = None", "X = None", lambda program: program.X is None)
def new_dict_at_a_global_that_begins_as_none(program: Any, thing: Any) -> Sequence[object]:
    program.X = {"model": thing}
    return [program.X]


@cut(
    "program.ENGINE.state = None",
    "class Engine:\n    def __init__(self):\n        self.state = None\nENGINE = Engine()",
    lambda program: program.ENGINE.state is None,
)
def new_dict_at_an_attribute_that_begins_as_none(program: Any, thing: Any) -> Sequence[object]:
    program.ENGINE.state = {"model": thing}
    return [program.ENGINE.state]


@refused("X = []")
def old_global_that_begins_otherwise(program: Any, thing: Any) -> None:
    program.X = thing


@refused("X = ()\ndef reset():\n    X = None")
def old_global_whose_name_is_none_elsewhere(program: Any, thing: Any) -> None:
    program.X = thing


@refused("X = None\nX = []")
def old_global_that_is_no_longer_none_when_the_import_ends(program: Any, thing: Any) -> None:
    program.X = thing


@cut(
    "del program.X",
    "A = [1]",
    lambda program: old_names(program) == ["A"],
    "program.X is deleted",
)
def new_global(program: Any, thing: Any) -> None:
    program.X = thing


@refused("A = [1]\ndef start(thing):\n    global X\n    X = thing")
def global_that_the_programs_functions_may_have_made_before(program: Any, thing: Any) -> None:
    program.start(thing)


@refused("A = [1]")
def global_with_something_older_behind_it(program: Any, thing: Any) -> Sequence[object] | None:
    program.X = thing
    program.B = ORIGINAL
    return None


ORIGINAL = [2]


@cut("del program.X", "A = [1]")
def new_global_with_a_new_number_behind_it(program: Any, thing: Any) -> None:
    program.X = thing
    program.B = True


def whole_program(program: Any, thing: Any) -> Sequence[object]:
    """As if it had been imported since the baseline."""
    program.X = thing
    return list(vars(program).values())


for number, binding in enumerate(
    ("X = []", "@list\ndef X(): ...", "def X(): ...", "class X: ...", "import sys as X", "from sys import flags as X")
):
    CASES[f"what_a_new_modules_own_code_binds_{number}"] = Case(
        whole_program, None, binding.replace("@list", "@(lambda function: [])"), "", lambda program: True, "before"
    )


@cut("program.X = None", "X = []", known="over")
def old_global_when_the_program_is_over(program: Any, thing: Any) -> None:
    program.X = thing


@refused("A = [1]", known="nothing")
def new_global_where_nothing_is_known(program: Any, thing: Any) -> None:
    program.X = thing


@cut("program.X = None", "X = None", known="nothing")
def global_that_begins_as_none_where_nothing_is_known(program: Any, thing: Any) -> None:
    program.X = thing


@cut("del program.X['a']['b']", "X = {}", lambda program: program.X == {"a": {}}, known="nothing")
def only_what_holds_the_thing_itself_where_nothing_is_known(program: Any, thing: Any) -> None:
    program.X["a"] = {"b": thing}


@refused("X = {}", known="nothing")
def entry_before_another_where_nothing_is_known(program: Any, thing: Any) -> None:
    program.X.update(a=thing, b=[])


@cut("del program.X['a']", "X = {}", lambda program: program.X == {"b": 1}, known="nothing")
def entry_before_a_number_where_nothing_is_known(program: Any, thing: Any) -> None:
    program.X.update(a=thing, b=1)


@refused("X = []", known="nothing")
def item_before_another_where_nothing_is_known(program: Any, thing: Any) -> None:
    program.X += [thing, []]


@refused("X = []", known="nothing")
def item_before_a_number_where_nothing_is_known(program: Any, thing: Any) -> None:
    program.X += [thing, 1]


class Loud(types.ModuleType):
    __setattr__ = __delattr__ = raising


@cut("types.ModuleType.__setattr__(program, 'X', None)", "X = None", lambda program: program.X is None)
def global_of_a_module_that_forbids_it(program: Any, thing: Any) -> None:
    program.__class__ = Loud
    vars(program)["X"] = thing


CLASSES = """
class Engine:
    shared = None
    instances = []

    def __init__(self):
        self.model = None
        self.cache = []


class Bare: ...


class Derived(Bare):
    "Its last name is its own."
    instances = []


class Slotted:
    __slots__ = ("begins_as_none", "begins_otherwise")

    def __init__(self):
        self.begins_as_none = None
        self.begins_otherwise = []


class Value:
    def __init__(self):
        self.grad = 0.0


ENGINE, SLOTTED, VALUE, BARE = Engine(), Slotted(), Value(), Bare()


def f(): ...


def g(): ...


f.first = []
f.begins_as_none = None
f.last = []
"""


@cut(
    "program.ENGINE.model = None",
    CLASSES,
    lambda program: vars(program.ENGINE) == {"model": None, "cache": []},
    "program.ENGINE.model is None",
)
def attribute_that_begins_as_none(program: Any, thing: Any) -> None:
    program.ENGINE.model = thing


@cut(
    "program.Engine.shared = None",
    CLASSES,
    lambda program: program.Engine.shared is None,
    "program.Engine.shared is None",
)
def attribute_of_a_class_that_begins_as_none(program: Any, thing: Any) -> None:
    program.Engine.shared = thing


@cut("program.SLOTTED.begins_as_none = None", CLASSES, lambda program: program.SLOTTED.begins_otherwise == [])
def slot_that_begins_as_none(program: Any, thing: Any) -> None:
    program.SLOTTED.begins_as_none = thing


@refused(CLASSES)
def attribute_that_begins_otherwise(program: Any, thing: Any) -> None:
    program.ENGINE.cache = thing


@refused(CLASSES)
def attribute_in_a_dict_that_begins_otherwise(program: Any, thing: Any) -> None:
    vars(program.ENGINE)["cache"] = thing


@refused(CLASSES)
def attribute_of_a_class_that_begins_otherwise(program: Any, thing: Any) -> None:
    program.Engine.instances = thing


@refused(CLASSES)
def last_attribute_of_a_class_that_begins_otherwise(program: Any, thing: Any) -> None:
    program.Derived.instances = thing


@refused(CLASSES)
def slot_that_begins_otherwise(program: Any, thing: Any) -> None:
    program.SLOTTED.begins_otherwise = thing


@cut("program.ENGINE.cache = None", CLASSES, known="over")
def attribute_when_the_program_is_over(program: Any, thing: Any) -> None:
    program.ENGINE.cache = thing


@cut("program.Engine.instances = None", CLASSES, known="over")
def attribute_of_a_class_when_the_program_is_over(program: Any, thing: Any) -> None:
    program.Engine.instances = thing


@cut("program.SLOTTED.begins_otherwise = None", CLASSES, known="over")
def slot_of_an_object_when_the_program_is_over(program: Any, thing: Any) -> None:
    program.SLOTTED.begins_otherwise = thing


@cut("program.ENGINE.model = None", CLASSES, known="nothing")
def attribute_that_begins_as_none_where_nothing_is_known(program: Any, thing: Any) -> None:
    program.ENGINE.model = thing


@refused(CLASSES, known="nothing")
def new_attribute_where_nothing_is_known(program: Any, thing: Any) -> None:
    vars(program.ENGINE)["added"] = thing


@refused(CLASSES, known="nothing")
def new_attribute_of_a_class_where_nothing_is_known(program: Any, thing: Any) -> None:
    program.Engine.added = thing


@cut(
    "del program.ENGINE.added",
    CLASSES,
    lambda program: list(vars(program.ENGINE)) == ["model", "cache"],
    "program.ENGINE.added is deleted",
)
def new_attribute(program: Any, thing: Any) -> None:
    vars(program.ENGINE)["added"] = thing


@cut("del program.Engine.added", CLASSES, lambda program: not hasattr(program.Engine, "added"))
def new_attribute_of_a_class(program: Any, thing: Any) -> None:
    program.Engine.added = thing


@refused(CLASSES)
def old_attribute_of_a_function(program: Any, thing: Any) -> None:
    program.f.last = thing


@cut("program.f.begins_as_none = None", CLASSES, lambda program: list(vars(program.f))[1] == "begins_as_none")
def attribute_of_a_function_that_begins_as_none(program: Any, thing: Any) -> None:
    program.f.begins_as_none = thing


@cut("del program.f.added", CLASSES, lambda program: list(vars(program.f)) == ["first", "begins_as_none", "last"])
def new_attribute_of_a_function(program: Any, thing: Any) -> None:
    program.f.added = thing


@cut("del program.g.added", CLASSES, lambda program: vars(program.g) == {})
def first_attribute_of_a_function(program: Any, thing: Any) -> None:
    program.g.added = thing


@cut("del program.BARE.added", CLASSES, lambda program: vars(program.BARE) == {})
def first_attribute_of_an_object(program: Any, thing: Any) -> None:
    vars(program.BARE)["added"] = thing


@refused(CLASSES)
def what_an_old_object_calls_its_gradient(program: Any, thing: Any) -> None:
    program.VALUE.grad = thing


HOSTILE = """
class Meta(type):
    def _run(*_):
        raise ValueError

    __setattr__ = __delattr__ = _run


class Engine(metaclass=Meta):
    shared = None
    model = None

    def __init__(self):
        object.__setattr__(self, "model", [])

    def _run(*_):
        raise ValueError

    __setattr__ = __delattr__ = __getattr__ = _run


ENGINE = Engine()
"""


@cut("type.__setattr__(program.Engine, 'shared', None)", HOSTILE, lambda program: program.Engine.shared is None)
def attribute_of_a_class_that_forbids_it(program: Any, thing: Any) -> None:
    type.__setattr__(program.Engine, "shared", thing)


@cut("object.__setattr__(program.ENGINE, 'model', None)", HOSTILE, lambda program: program.ENGINE.model is None)
def attribute_of_an_object_that_forbids_it(program: Any, thing: Any) -> None:
    object.__setattr__(program.ENGINE, "model", thing)


@cut("program.ERROR.__traceback__ = None", "ERROR = ValueError()\ndef fail(thing):\n    raise ERROR")
def traceback_of_an_old_exception(program: Any, thing: Any) -> Sequence[object]:
    things = [thing]
    del thing
    with contextlib.suppress(ValueError):
        program.fail(things.pop())
    first = program.ERROR.__traceback__
    return [first, first.tb_next, first.tb_frame, first.tb_next.tb_frame]


KEPT_ERRORS = """
STORED, LISTED, BOX = ValueError(), [], type("Box", (), {})()


def caught(thing, cause=None):
    try:
        raise ValueError from cause
    except ValueError as error:
        return error
"""


def frames_of(error: BaseException | None) -> list[object]:
    """The traceback of an exception, with its frames."""
    found: list[object] = []
    trace = None if error is None else error.__traceback__
    while trace is not None:
        found += [trace, trace.tb_frame]
        trace = trace.tb_next
    return found


@cut(
    "program.STORED.__traceback__ = None",
    KEPT_ERRORS,
    lambda program: type(program.STORED) is ValueError,
    "program.STORED.__traceback__ is None",
    known="over",
)
def exception_in_a_variable(program: Any, thing: Any) -> Sequence[object]:
    program.STORED = program.caught(thing)
    return [program.STORED, *frames_of(program.STORED)]


@cut(
    "program.LISTED[0].__traceback__ = None",
    KEPT_ERRORS,
    lambda program: [type(error) for error in program.LISTED] == [ValueError],
    known="over",
)
def exception_in_a_new_list(program: Any, thing: Any) -> Sequence[object]:
    program.LISTED = [program.caught(thing)]
    return [program.LISTED, *program.LISTED, *frames_of(program.LISTED[0])]


@cut("del program.LISTED[0]", KEPT_ERRORS, lambda program: program.LISTED == [], known="over")
def exception_in_an_old_list(program: Any, thing: Any) -> Sequence[object]:
    program.LISTED.append(program.caught(thing))
    return [*program.LISTED, *frames_of(program.LISTED[0])]


@cut("program.STORED = None", KEPT_ERRORS, lambda program: program.STORED is None, known="over")
def exception_whose_cause_has_a_traceback_too(program: Any, thing: Any) -> Sequence[object]:
    program.STORED = program.caught(thing, program.caught(thing))
    cause = program.STORED.__cause__
    return [program.STORED, *frames_of(program.STORED), cause, *frames_of(cause)]


REGISTERED = """
import weakref
from collections import OrderedDict

HOOKS, LISTED = {"first": lambda x: x}, [lambda x: x]
CALLBACK = None


def plain(x):
    return x


STATIC = {"plain": plain}
SLOTS = [plain, None, None]


class Layer:
    handler = None

    def __init__(self):
        self.seen = []

    def run(self, x):
        return x


LAYER = Layer()
ORDERED, WEAK = OrderedDict(), weakref.WeakKeyDictionary()


def hook_of(thing):
    return lambda x: (x, thing)[0]


def works():
    hooks = [*HOOKS.values(), *LISTED, *STATIC.values(), SLOTS[0], LAYER.run, plain]
    return all(hook(1) == 1 for hook in hooks) and len(SLOTS) == 3 and CALLBACK is LAYER.handler is None
"""


def parts_of_function(function: Any) -> list[object]:
    """A function with what is as new as itself."""
    return [function, *(function.__closure__ or ())]


def works(program: Any) -> bool:
    return bool(program.works())


@cut("del program.HOOKS['rope']", REGISTERED, works, "program.HOOKS['rope'] is deleted", known="over")
def closure_of_a_registered_function(program: Any, thing: Any) -> Sequence[object]:
    program.HOOKS["rope"] = program.hook_of(thing)
    return parts_of_function(program.HOOKS["rope"])


@cut("del program.HOOKS['rope']", REGISTERED, works)
def closure_of_a_registered_function_while_tests_follow(program: Any, thing: Any) -> Sequence[object]:
    return closure_of_a_registered_function(program, thing)


@cut("del program.HOOKS['rope']", REGISTERED, works, known="over")
def default_of_a_registered_function(program: Any, thing: Any) -> Sequence[object]:
    program.HOOKS["rope"] = lambda x, kept=thing: x
    return parts_of_function(program.HOOKS["rope"])


@cut("del program.LISTED[1]", REGISTERED, works, known="over")
def attribute_of_a_registered_class(program: Any, thing: Any) -> Sequence[object]:
    made = type("Made", (), {"kept": thing})
    program.LISTED.append(made)
    return [made, vars(made), *gc.get_referents(vars(made))]


@cut("program.CALLBACK = None", REGISTERED, works, known="over")
def closure_of_a_callback(program: Any, thing: Any) -> Sequence[object]:
    program.CALLBACK = program.hook_of(thing)
    return parts_of_function(program.CALLBACK)


@cut("program.LAYER.handler = None", REGISTERED, works, known="over")
def closure_of_an_instances_callback(program: Any, thing: Any) -> Sequence[object]:
    program.LAYER.handler = program.hook_of(thing)
    return parts_of_function(program.LAYER.handler)


@cut("del program.ADDED", REGISTERED, works, known="over")
def closure_of_a_function_under_a_new_name(program: Any, thing: Any) -> Sequence[object]:
    program.ADDED = program.hook_of(thing)
    return parts_of_function(program.ADDED)


@cut("del program.LAYER.run", REGISTERED, works, "program.LAYER.run is deleted", known="over")
def closure_of_what_hides_a_method(program: Any, thing: Any) -> Sequence[object]:
    program.LAYER.run = program.hook_of(thing)
    return parts_of_function(program.LAYER.run)


@cut("put back what program.plain was", REGISTERED, lambda program: program.plain is None, known="over")
def closure_of_what_replaces_a_function(program: Any, thing: Any) -> Sequence[object]:
    program.plain = program.hook_of(thing)
    return parts_of_function(program.plain)


@cut("put back what program.Layer.run was", REGISTERED, lambda program: program.Layer.run is None, known="over")
def closure_of_what_replaces_a_method(program: Any, thing: Any) -> Sequence[object]:
    program.Layer.run = program.hook_of(thing)
    return parts_of_function(program.Layer.run)


@cut("put back what program.STATIC['plain'] was", REGISTERED, known="over")
def closure_of_what_replaces_an_entry(program: Any, thing: Any) -> Sequence[object]:
    program.STATIC["plain"] = program.hook_of(thing)
    return parts_of_function(program.STATIC["plain"])


@cut("program.SLOTS[1] = None", REGISTERED, works, known="over")
def closure_of_a_function_in_a_slot(program: Any, thing: Any) -> Sequence[object]:
    program.SLOTS[1] = program.hook_of(thing)
    return parts_of_function(program.SLOTS[1])


@cut("del program.ORDERED[list(program.ORDERED)[0]]", REGISTERED, lambda program: not program.ORDERED, known="over")
def entry_of_an_ordered_dict_by_an_object(program: Any, thing: Any) -> None:
    program.ORDERED[program.LAYER] = thing


@cut("del program.WEAK[list(program.WEAK)[0]]", REGISTERED, lambda program: not len(program.WEAK), known="over")
def entry_of_a_weak_dict(program: Any, thing: Any) -> None:
    program.WEAK[program.LAYER] = thing


DISPATCHED = """
import functools


@functools.singledispatch
def run(x):
    return x
"""


@cut("delete program.run.registry[<class int>]", DISPATCHED, lambda program: program.run(1) == 1, known="over")
def closure_of_a_function_in_a_read_only_view(program: Any, thing: Any) -> Sequence[object]:
    things = [thing]
    del thing
    return parts_of_function(program.run.register(int, lambda x: (x, things)[0]))


CLOSURES = """
def make():
    a, kept, z = [1], [2], [3]

    def hook():
        return a, kept, z

    return hook


def make_counter():
    kept = []

    def count(value):
        kept.append(value)

    return count


hook = make()
count = make_counter()
"""


def put_into_the_closure(program: Any, thing: Any) -> None:
    program.hook.__closure__[1].cell_contents = thing


@refused(CLOSURES)
def closure(program: Any, thing: Any) -> None:
    put_into_the_closure(program, thing)


@cut(
    "program.hook.__closure__[1].cell_contents = None",
    CLOSURES,
    lambda program: program.hook() == ([1], None, [3]),
    "kept, in the closure of program.hook, is None",
    known="over",
)
def closure_when_the_program_is_over(program: Any, thing: Any) -> None:
    put_into_the_closure(program, thing)


@cut("del program.count.__closure__[0].cell_contents[0]", CLOSURES)
def what_lies_behind_a_closure(program: Any, thing: Any) -> None:
    program.count(thing)


@cut(
    "del program.f.__defaults__[0][0]",
    "def f(value, kept=[]):\n    kept.append(value)",
    lambda program: not program.f(1),
)
def what_a_default_keeps(program: Any, thing: Any) -> None:
    program.f(thing)


@refused("def f(*, argument=()): ...")
def default_of_a_named_argument(program: Any, thing: Any) -> None:
    program.f.__kwdefaults__["argument"] = thing


STREAM = """
ENDED = []


def stream(batch):
    try:
        yield
    finally:
        ENDED.append(1)


def relay(make):
    yield from stream(make())


async def stream_for_asyncio(batch):
    yield
    del batch


def serve():
    while True:
        request = yield


HELD = ()
SERVER = serve()
next(SERVER)
"""


@refused(STREAM)
def generator_that_was_there_before(program: Any, thing: Any) -> None:
    program.SERVER.send(thing)


@refused(STREAM, known="nothing")
def generator_where_nothing_is_known(program: Any, thing: Any) -> None:
    program.SERVER.send(thing)


@cut("program.SERVER.close()", STREAM, changed="program.SERVER is closed", known="over")
def generator_when_the_program_is_over(program: Any, thing: Any) -> None:
    program.SERVER.send(thing)


@cut("program.HELD[0].close()", STREAM, lambda program: program.ENDED == [1], "program.HELD[0] is closed")
def new_generator(program: Any, thing: Any) -> Sequence[object]:
    program.HELD = (program.stream(thing),)
    next(program.HELD[0])
    return [program.HELD[0]]


@cut("program.HELD[0].gi_yieldfrom.close()", STREAM, lambda program: program.ENDED == [1])
def generator_that_another_one_waits_for(program: Any, thing: Any) -> Sequence[object]:
    things = [thing]
    del thing
    program.HELD = (program.relay(things.pop),)
    next(program.HELD[0])
    return [program.HELD[0], program.HELD[0].gi_yieldfrom]


@refused(STREAM)
def generator_for_asyncio(program: Any, thing: Any) -> Sequence[object]:
    program.HELD = (program.stream_for_asyncio(thing),)
    with contextlib.suppress(StopIteration):
        program.HELD[0].asend(None).send(None)
    return [program.HELD[0]]


LOCAL = "import threading\nLOCAL = threading.local()\nLOCAL.first = 1\nLOCAL.value = []\nLOCAL.begins_as_none = None"


@refused(LOCAL)
def old_value_of_a_thread_local(program: Any, thing: Any) -> None:
    program.LOCAL.value = thing


@cut(
    "program.LOCAL.begins_as_none = None",
    LOCAL,
    lambda program: vars(program.LOCAL) == {"first": 1, "value": [], "begins_as_none": None},
    "program.LOCAL.begins_as_none of this thread is None",
)
def value_of_a_thread_local_that_begins_as_none(program: Any, thing: Any) -> None:
    program.LOCAL.begins_as_none = thing


@cut(
    "del program.LOCAL.added",
    LOCAL,
    lambda program: list(vars(program.LOCAL)) == ["first", "value", "begins_as_none"],
    "program.LOCAL.added of this thread is deleted",
)
def new_value_of_a_thread_local(program: Any, thing: Any) -> None:
    program.LOCAL.added = thing


@cut("program.LOCAL.value = None", LOCAL, lambda program: program.LOCAL.value is None, known="over")
def old_value_of_a_thread_local_when_the_program_is_over(program: Any, thing: Any) -> None:
    program.LOCAL.value = thing


@cut("del program.TABLE['a']", "TABLE = {}")
def first_edge_of_several_that_can_be_cut(program: Any, thing: Any) -> Sequence[object]:
    holder = Plain([(thing,)])
    program.TABLE["a"] = (holder,)
    return [program.TABLE["a"], holder, holder.thing, holder.thing[0]]  # type: ignore[index]


@cut("del program.TABLE['a'][0][0]['b']", "TABLE = {}")
def next_edge_where_the_first_cannot_be_cut(program: Any, thing: Any) -> Sequence[object]:
    program.TABLE["a"] = (({"b": thing},),)
    return [*program.TABLE["a"], *program.TABLE["a"][0]]


@refused("TABLE = {}")
def item_of_an_old_tuple(program: Any, thing: Any) -> None:
    program.TABLE["a"] = (thing,)


@refused("ENGINE = []")
def what_lies_behind_an_edge_that_is_refused(program: Any, thing: Any) -> Sequence[object]:
    program.ENGINE = [{"a": thing}]
    return [program.ENGINE, program.ENGINE[0]]


CACHES = """
import functools


class Model:
    @functools.lru_cache(maxsize=8)
    def described(self):
        return 1

    @functools.cache
    def drawn(self):
        return 2


@functools.lru_cache
def one(x): ...


@functools.lru_cache
def other(x): ...


other(1)
"""


@cut("program.Model.described.cache_clear()", CACHES, lambda program: program.Model.described.cache_info().misses == 0)
def self_in_the_cache_of_a_method(program: Any, thing: Any) -> Sequence[object]:
    program.Model.described(thing)
    return parts_of(program.Model.described)


@cut("program.Model.drawn.cache_clear()", CACHES)
def self_in_the_unbounded_cache_of_a_method(program: Any, thing: Any) -> Sequence[object]:
    program.Model.drawn(thing)
    return parts_of(program.Model.drawn)


@cut("program.one.cache_clear()", CACHES, lambda program: program.other.cache_info().currsize == 1)
def cache_beside_another_one(program: Any, thing: Any) -> Sequence[object]:
    program.one(thing)
    return parts_of(program.one)


@cut("del program.TABLE[list(program.TABLE)[0]]", "TABLE = {}", lambda program: program.TABLE == {})
def entry_whose_key_holds_it_too(program: Any, thing: Any) -> Sequence[object]:
    program.TABLE[Plain(thing)] = thing
    return list(program.TABLE)


@pytest.fixture(scope="module")
def cut_cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tried]:
    return cut_all(CASES, tmp_path_factory.mktemp("programs"))


def cut_all(cases: dict[str, Case], folder: Path) -> dict[str, Tried]:
    """Cut each case, in a program of its own; one walk for all of which as much is known."""
    sys.path.insert(0, str(folder))
    try:
        for name, case in cases.items():
            (folder / f"program_{name}.py").write_text(case.source)
        importlib.invalidate_caches()
        programs = {name: importlib.import_module(f"program_{name}") for name in cases}
        done: dict[str, Tried] = {}
        for known in sorted({case.known for case in cases.values()}):
            done |= cut_each({name: case for name, case in cases.items() if case.known == known}, programs, known)
        return done
    finally:
        sys.path.remove(str(folder))
        for name in cases:
            sys.modules.pop(f"program_{name}", None)


def cut_each(cases: dict[str, Case], programs: dict[str, Any], known: str) -> dict[str, Tried]:
    things = [Thing() for _ in cases]
    watched = [weakref.ref(thing) for thing in things]
    made: list[object] = []
    for (name, case), thing in zip(cases.items(), things, strict=True):
        made += case.hold(programs[name], thing) or ()
    del thing
    older = Others(*things, *made)
    made.clear()
    reported = explain(
        things,
        innocent=() if known == "nothing" else older,
        names=Names(None if known == "nothing" else older, are_free=known == "over"),
    )
    things.clear()
    done = {}
    for (name, case), explanation, thing_left in zip(cases.items(), reported, watched, strict=True):
        outcome = done[name] = Tried(explanation.cut)
        outcome.lived = thing_left() is not None
        if outcome.cut is not None:
            try:
                outcome.cut.apply()
            except Exception as error:  # noqa: BLE001 - it is for the test to say so
                outcome.failure = repr(error)
            if thing_left() is not None:
                gc.collect()
            outcome.died = thing_left() is None
            outcome.left = case.left(programs[name])
    return done


def as_program(text: str | None, name: str) -> str | None:
    return text and text.replace(f"program_{name}", "program")


@pytest.mark.parametrize("name", CASES)
def test_how_it_is_cut(cut_cases: dict[str, Tried], name: str) -> None:
    found = cut_cases[name].cut
    assert as_program(found.code if found is not None else None, name) == CASES[name].action


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.action is not None])
def test_the_thing_dies_and_the_program_is_as_it_was(cut_cases: dict[str, Tried], name: str) -> None:
    found = cut_cases[name]
    assert (found.failure, found.lived, found.died, found.left) == ("", True, True, True)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.changed])
def test_what_is_different_afterwards_is_said(cut_cases: dict[str, Tried], name: str) -> None:
    found = cut_cases[name].cut
    assert found is not None
    assert as_program(found.effect, name) == CASES[name].changed


def test_what_is_set_to_none_is_no_entry_less(cut_cases: dict[str, Tried]) -> None:
    found = cut_cases["key_that_begins_as_none"].cut
    assert found is not None
    assert found.place is None


# --- one thing at a time --------------------------------------------------------------------------------------------


DECLARED = """
class Pool:
    def __init__(self):
        self.workspace = None
        self.entries = {}


POOL, NOBODY = Pool(), None
"""


def test_where_nobody_knows_what_was_there_the_source_says_what_is_meant_to_live(load: Load) -> None:
    program = load(DECLARED)
    things = [Thing() for _ in range(3)]
    program.POOL.workspace, program.POOL.entries["a"], program.NOBODY = things
    reported = explain(things, names=Names(are_free=True, by_source=True))
    assert [found.cause for found in reported] == ["instance-attribute", "instance-attribute", "module-global"]
    code = [found.cut.code if found.cut is not None else "" for found in reported]
    assert code == ["program.POOL.workspace = None", "del program.POOL.entries['a']", "program.NOBODY = None"]
    without = explain(things, names=Names(are_free=True))
    assert [found.cause for found in without] == ["module-global"] * 3


class Leak:
    """A thing that something holds, everything else being older, and how its first suspect edge is cut."""

    def __init__(self, hold: Callable[[Any], object], new: Callable[[], Sequence[object]] = tuple) -> None:
        thing = Thing()
        hold(thing)
        self.older = Others(thing, *new())
        self._watched = weakref.ref(thing)
        del thing
        self.cut = self.reported().cut

    def reported(self, *, are_free: bool = False) -> Explanation:
        targets = [self._watched()]
        (reported,) = explain(targets, innocent=self.older, names=Names(self.older, are_free=are_free))
        return reported

    @property
    def is_alive(self) -> bool:
        if self._watched() is not None:
            gc.collect(1)
        return self._watched() is not None

    def apply(self) -> None:
        assert self.cut is not None
        self.cut.apply()


Load = Callable[[str], Any]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Writes the source of a module `program` and imports it."""
    monkeypatch.syspath_prepend(tmp_path)

    def load(source: str) -> Any:
        (tmp_path / "program.py").write_text(source)
        importlib.invalidate_caches()
        return importlib.import_module("program")

    yield load
    sys.modules.pop("program", None)


@pytest.mark.parametrize(
    ("source", "hold", "empty"),
    [
        ("X = {}", lambda program, thing: program.X.update(a=thing), lambda program: program.X.clear()),
        ("X = []", lambda program, thing: program.X.append(thing), lambda program: program.X.clear()),
        ("X = set()", lambda program, thing: program.X.add(thing), lambda program: program.X.clear()),
        ("X = None", lambda program, thing: setattr(program, "X", thing), lambda program: setattr(program, "X", None)),
        ("A = []", lambda program, thing: setattr(program, "X", thing), lambda program: delattr(program, "X")),
    ],
)
def test_a_cut_that_is_not_made_keeps_nothing_alive_and_one_that_comes_late_does_no_harm(
    load: Load, source: str, hold: Callable[[Any, Any], object], empty: Callable[[Any], object]
) -> None:
    program = load(source)
    leak = Leak(lambda thing: hold(program, thing))
    lived = leak.is_alive
    empty(program)
    assert (lived, leak.is_alive) == (True, False)
    before = dict(vars(program))
    leak.apply()
    assert dict(vars(program)) == before


def test_an_item_that_has_moved_is_still_the_one_that_is_deleted(load: Load) -> None:
    program = load("ROWS = ['a', 'b']")
    leak = Leak(program.ROWS.append)
    del program.ROWS[0]
    program.ROWS.append("c")
    leak.apply()
    assert (leak.is_alive, program.ROWS) == (False, ["b", "c"])


class Equal(Thing):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = Thing.__hash__


def test_of_equal_items_the_one_that_is_held_goes(load: Load) -> None:
    program = load("ROWS = []")
    first = Equal()
    program.ROWS.append(first)
    leak = Leak(program.ROWS.append)
    leak.apply()
    assert not leak.is_alive
    assert program.ROWS[0] is first


def test_a_thing_that_is_held_twice_lives_until_both_are_cut(load: Load) -> None:
    program = load("ROWS = [1]")
    leak = Leak(lambda thing: program.ROWS.extend([thing, thing]))
    leak.apply()
    assert (leak.is_alive, len(program.ROWS)) == (True, 2)
    leak.cut = leak.reported().cut
    leak.apply()
    assert (leak.is_alive, program.ROWS) == (False, [1])


@pytest.mark.parametrize("kind", STATES)
def test_a_key_that_was_there_before_is_there_afterwards(load: Load, kind: str) -> None:
    state = state_of(load(STATES[kind]))
    leak = Leak(lambda thing: state.update(model=thing))
    if leak.cut is not None:
        leak.apply()
    assert "model" in state


@pytest.mark.parametrize(
    "source",
    [
        "class Engine: ...\nENGINE = Engine()\nENGINE.extra = []",
        "class Engine:\n    def __init__(self, **given):\n        vars(self).update(given)\nENGINE = Engine(extra=[])",
        "class Engine:\n    def __init__(self, name):\n        setattr(self, name, [])\nENGINE = Engine('extra')",
        "import argparse\nENGINE = argparse.Namespace(extra=[])",
        "import types\nENGINE = types.SimpleNamespace(extra=[])",
        "from dataclasses import dataclass\n@dataclass\nclass Engine:\n    extra: list\nENGINE = Engine([])",
    ],
)
def test_an_attribute_that_was_there_before_is_there_afterwards(load: Load, source: str) -> None:
    engine = load(source).ENGINE
    vars(engine)
    leak = Leak(lambda thing: setattr(engine, "extra", thing))
    if leak.cut is not None:
        leak.apply()
    assert hasattr(engine, "extra")


# Names that the source binds in another way than by an assignment to them; whatever is done, they must be there
# afterwards.
@pytest.mark.parametrize(
    ("source", "holder"),
    [
        ("def reset():\n    global X\n    X = []\nreset()", "program"),
        ("from lent import *", "program"),
        ("globals()['X'] = []", "program"),
        ("globals().update(X=[])", "program"),
        ("import sys\nsetattr(sys.modules[__name__], 'X', [])", "program"),
        ("exec('X = []')", "program"),
        ("class Engine: ...\nEngine.X = []", "Engine"),
        ("class Engine: ...\nsetattr(Engine, 'X', [])", "Engine"),
        ("def register(cls):\n    cls.X = []\n    return cls\n@register\nclass Engine: ...", "Engine"),
        ("class Base:\n    def __init_subclass__(cls):\n        cls.X = []\nclass Engine(Base): ...", "Engine"),
        (
            "class Meta(type):\n    def __init__(cls, *_):\n        cls.X = []\nclass Engine(metaclass=Meta): ...",
            "Engine",
        ),
    ],
)
def test_a_name_that_was_there_before_is_there_afterwards(load: Load, tmp_path: Path, source: str, holder: str) -> None:
    (tmp_path / "lent.py").write_text("X = []")
    program = load(source)
    sys.modules.pop("lent", None)
    owner = program if holder == "program" else getattr(program, holder)
    leak = Leak(lambda thing: setattr(owner, "X", thing))
    if leak.cut is not None:
        leak.apply()
    assert hasattr(owner, "X")


def test_without_source_no_global_is_touched() -> None:
    program = types.ModuleType("program")
    sys.modules["program"] = program
    try:
        program.A = [1]  # type: ignore[attr-defined]
        assert Leak(lambda thing: setattr(program, "X", thing)).cut is None
    finally:
        del sys.modules["program"]


def test_what_a_generators_end_raises_is_raised_and_the_thing_dies_all_the_same(load: Load) -> None:
    program = load(
        "HELD = ()\ndef stream(batch):\n    try:\n        yield\n    finally:\n        raise OSError('in the end')"
    )

    def hold(thing: object) -> None:
        program.HELD = (program.stream(thing),)
        next(program.HELD[0])

    leak = Leak(hold, new=lambda: [program.HELD[0]])
    with pytest.raises(OSError, match="in the end"):
        leak.apply()
    assert not leak.is_alive


def test_a_context_variable_is_refused_until_the_program_is_over() -> None:
    variable = contextvars.ContextVar[object]("scope", default=None)

    def run() -> None:
        leak = Leak(lambda thing: variable.set(thing) and None)
        assert leak.reported().holder == "context variable 'scope'"
        assert leak.cut is None
        leak.cut = leak.reported(are_free=True).cut
        assert leak.cut is not None
        assert (leak.cut.code, leak.cut.effect) == (
            "next(variable for variable in contextvars.copy_context() if variable.name == 'scope').set(None)",
            "scope is None in this context",
        )
        leak.apply()
        assert (leak.is_alive, variable.get()) == (False, None)
        variable.set(thing := Thing())
        with trace([thing]) as found:
            link = found.link(0, 0)
        with pytest.raises(Refused):
            cut_of(link, "scope", Names(Others(thing)))

    contextvars.copy_context().run(run)


STARTS = """
def start(thing):
    global STARTED
    STARTED = thing
"""


def reported_of(thing: object, sizes: NamespaceSizes) -> Explanation:
    older = Others(thing)
    (reported,) = explain([thing], innocent=older, names=Names(older, sizes=sizes))
    return reported


def test_a_global_that_a_function_makes_is_deleted(load: Load) -> None:
    program = load(STARTS)
    sizes = namespace_sizes()
    program.start(Thing())
    reported = reported_of(program.STARTED, sizes)
    assert reported.cut is not None
    assert reported.cut.code == "del program.STARTED"
    reported.cut.apply()
    assert not hasattr(program, "STARTED")


def test_one_that_the_function_had_made_before_is_refused(load: Load) -> None:
    program = load(f"{STARTS}\nstart(None)")
    sizes = namespace_sizes()
    program.start(Thing())
    assert reported_of(program.STARTED, sizes).cut is None


def test_one_that_was_imported_or_set_by_name_before_is_refused(load: Load) -> None:
    program = load("globals()['STARTED'] = []")
    sizes = namespace_sizes()
    program.STARTED = Thing()
    assert reported_of(program.STARTED, sizes).cut is None


def test_in_a_module_that_came_later_what_its_own_code_binds_stays(load: Load) -> None:
    sizes = namespace_sizes()
    program = load(f"{STARTS}\nX = None\nY = []")
    things = [Thing(), Thing(), Thing()]
    program.start(things[0])
    program.X, program.Y = things[1:]
    cuts = [reported_of(thing, sizes).cut for thing in things]
    things.clear()
    assert [cut and cut.code for cut in cuts] == ["del program.STARTED", "program.X = None", None]


class Part:
    _closed = True

    def __init__(self) -> None:
        self.buffers = [Thing()]

    def close(self) -> None: ...


class Engine:
    def __init__(self) -> None:
        self.part: Any = None


def test_the_closed_part_of_an_engine_that_was_shut_down_stays_and_is_emptied() -> None:
    engine = Engine()
    engine.part = part = Part()
    older = Others(part, part.buffers, *part.buffers)
    targets = list(part.buffers)
    (reported,) = explain(targets, innocent=older, names=Names(older, are_free=True), roots=[("engine", engine)])
    targets.clear()
    assert reported.cut is not None
    assert reported.cut.code == "engine.part.buffers = None"
    reported.cut.apply()
    assert engine.part is part


@dataclass
class Worker:
    """A thread that holds something until it is told to stop."""

    things: list[Any]
    ready: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Worker:
        self.thread = threading.Thread(target=self.run, args=(self.things.pop(),), name="worker")
        self.thread.start()
        assert self.ready.wait(HANG_S)
        return self

    def run(self, *_: object) -> None:
        del _
        self.ready.set()
        self.stop.wait(HANG_S)

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()


@pytest.mark.parametrize("with_a_dict", [False, True])
def test_the_arguments_of_a_running_thread_are_left_alone(with_a_dict: bool) -> None:
    with Worker([Thing()]) as worker:
        if with_a_dict:
            vars(worker.thread)
        arguments = worker.thread._args  # type: ignore[attr-defined]
        (reported,) = explain([arguments[0]], names=Names(Others(arguments, *arguments, worker.thread)))
        assert reported.holder == "thread 'worker'"
        assert reported.cut is None


def test_what_a_running_function_holds_is_left_alone() -> None:
    holder = Plain([Thing()])
    targets = [holder.thing[0]]  # type: ignore[index]
    (reported,) = explain(targets, names=Names(Others(holder, holder.thing, *targets), are_free=True))
    assert reported.cause == "frame"
    assert reported.cut is None


def test_a_cut_that_is_refused_says_so_to_whoever_asks(load: Load) -> None:
    program = load("X = []")
    thing = Thing()
    program.X = thing
    with trace([thing]) as found:
        link = found.link(0, 0)
    with pytest.raises(Refused):
        cut_of(link, "program", Names(Others(thing)))


def test_what_stands_in_for_a_module_has_no_names(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    program = load(STARTS)
    stand_in = types.SimpleNamespace(name="stand_in")
    monkeypatch.setitem(sys.modules, "stand_in", stand_in)
    monkeypatch.setitem(sys.modules, "nothing", None)
    sizes = namespace_sizes()
    later = types.ModuleType("later")
    assert (sizes.of(vars(program)), sizes.of(vars(sys))) == (len(vars(program)), len(vars(sys)))
    assert (sizes.of(vars(later)), sizes.of(vars(stand_in))) == (0, 0)

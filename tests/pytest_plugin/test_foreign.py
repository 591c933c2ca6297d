"""No special method of the program's objects runs while a test is judged, whatever part of a path they are."""

from __future__ import annotations

import json

import pytest

from tests.pytest_plugin.conftest import InnerRun, RunInner

HOSTILE = '''
"""Objects that note, and refuse, every special method from when they are armed."""
import functools
import sys
import types
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple

import torch

CALLS = []
ARMED = []


def special(name, answer=None):
    def run(self, *args, **kwargs):
        if ARMED:
            CALLS.append(f"{name} by {sys._getframe(1).f_code.co_name}")
            raise RuntimeError(name)
        if answer is None:
            raise TypeError(name)
        return answer(self, *args, **kwargs)

    return run


ALL = {
    name: special(name)
    for name in (
        "__len__ __repr__ __str__ __format__ __iter__ __reversed__ __contains__ __getitem__ __setitem__ __delitem__ "
        "__index__ __int__ __float__ __call__ __dir__ __sizeof__ __reduce_ex__ __get__ __set__ __lt__ __copy__ "
        "__deepcopy__ __array__ __fspath__ __instancecheck__ __subclasscheck__"
    ).split()
} | {
    "__eq__": special("__eq__", lambda self, other: self is other),
    "__ne__": special("__ne__", lambda self, other: self is not other),
    "__hash__": special("__hash__", lambda self: 7),
    "__bool__": special("__bool__", lambda self: True),
    "__getattribute__": special("__getattribute__", object.__getattribute__),
    "__setattr__": special("__setattr__", object.__setattr__),
    "__delattr__": special("__delattr__", object.__delattr__),
}
OF_CLASS = {name: ALL[name] for name in ALL if name not in ("__call__", "__setattr__", "__getattribute__", "__dir__")}
OF_CLASS["__getattribute__"] = special("type.__getattribute__", type.__getattribute__)
Meta = type("Meta", (type,), OF_CLASS)
Hostile = Meta("Hostile", (), {**ALL, "__module__": __name__})
Slotted = Meta("Slotted", (), {**ALL, "__slots__": ("kept",), "__module__": __name__})
Error = type("Error", (Exception,), {**ALL, "__module__": __name__})
Partial = type("Partial", (functools.partial,), {"__repr__": ALL["__repr__"], "__module__": __name__})


def derived(base, *left_out):
    own = {name: method for name, method in ALL.items() if name not in left_out}
    return type("Own" + base.__name__, (base,), {**own, "__module__": __name__})


OwnDict, OwnOrderedDict, OwnDefaultDict, OwnUserDict, OwnList, OwnDeque, OwnStr = (
    derived(kind, "__setitem__", "__set__")
    for kind in (dict, OrderedDict, defaultdict, UserDict, list, deque, str)
)
OwnSet, OwnTuple = derived(set), derived(tuple)
OwnTensor = derived(torch.Tensor)
for _name in ("device", "layout", "shape", "dtype", "grad", "is_leaf", "requires_grad", "data_ptr", "numel"):
    setattr(OwnTensor, _name, property(special(_name)))


class OwnModule(types.ModuleType):
    __getattribute__ = special("module.__getattribute__", types.ModuleType.__getattribute__)


def with_kept(holder, tensor):
    object.__setattr__(holder, "kept", tensor)
    return holder


def slotted(tensor):
    holder = Slotted()
    holder.kept = tensor
    return holder


HELD = {}
GROUPS = {torch.nn.Parameter(torch.ones(2)): 1, torch.nn.Parameter(torch.ones(2)): 2}
BOUNDED = functools.lru_cache(maxsize=8)(lambda *arguments: None)
UNBOUNDED = functools.cache(lambda *arguments: torch.ones(9))
Pair = namedtuple("Pair", "first second")


def closure(held, tensor):
    def function(default=held, *, named=tensor):
        return held, tensor

    return function


def generator(held, tensor):
    yield


def suspended(held, tensor):
    found = generator(held, tensor)
    next(found)
    return found


def described(tensor):
    holder = types.SimpleNamespace()
    kind = type("Described", (), {"kept": Hostile(), "__module__": __name__})
    holder = kind()
    holder.__dict__["kept"] = tensor
    return holder


def raised(tensor):
    try:
        raise Error(Hostile(), tensor)
    except Error as error:
        return error


def module(tensor):
    found = OwnModule("own_module")
    found.__dict__["X"] = tensor
    sys.modules["own_module"] = found
    return None


WAYS = {
    "value": lambda t: with_kept(Hostile(), t),
    "value with slots": slotted,
    "key": lambda t: {Hostile(): t, Hostile(): 1},
    "last key": lambda t: {Hostile(): 1, Hostile(): t},
    "behind a key": lambda t: {Hostile(): {"bucket": t}},
    "derived key": lambda t: {OwnStr("a"): t},
    "the key itself": lambda t: {t: Hostile()},
    "element": lambda t: {Hostile(), slotted(t)},
    "tensor element": lambda t: {Hostile(), Hostile(), t},
    "item": lambda t: [Hostile(), t, Hostile()],
    "deque": lambda t: deque([Hostile(), t, Hostile()]),
    "tuple": lambda t: Pair(Hostile(), t),
    "own dict": lambda t: OwnDict(a=t),
    "own dict, own key": lambda t: OwnDict({Hostile(): t}),
    "own ordered dict": lambda t: OwnOrderedDict(a=t),
    "ordered dict, own key": lambda t: OrderedDict([(Hostile(), t)]),
    "own default dict": lambda t: OwnDefaultDict(list, a=t),
    "own list": lambda t: OwnList([t, Hostile()]),
    "own set": lambda t: OwnSet([t, Hostile()]),
    "own deque": lambda t: OwnDeque([t, Hostile()]),
    "own tuple": lambda t: OwnTuple([t, Hostile()]),
    "read-only view": lambda t: types.MappingProxyType({Hostile(): t}),
    "partial": lambda t: functools.partial(Hostile(), t, a=Hostile()),
    "own partial": lambda t: Partial(print, t, a=Hostile()),
    "bound method": lambda t: types.MethodType(print, slotted(t)),
    "closure": lambda t: closure(Hostile(), t),
    "generator": lambda t: suspended(Hostile(), t),
    "class": lambda t: Meta("Made", (), {**ALL, "kept": t, "__module__": __name__}),
    "descriptor": described,
    "error": raised,
    "module": module,
    "own tensor": lambda t: t.as_subclass(OwnTensor),
    "graph": lambda t: with_kept((torch.nn.Parameter(t) * 2).sum(), Hostile()),
}


def leak():
    for place, (name, hold) in enumerate(WAYS.items()):
        HELD[name] = hold(torch.ones(1000 + place))
    user = OwnUserDict()
    user.data["a"] = torch.ones(900)
    HELD["user dict"] = user
    GROUPS[torch.nn.Parameter(torch.ones(1024))] = {"bucket": torch.ones(1025)}
    BOUNDED(functools.partial(Hostile(), torch.ones(901)))
    BOUNDED(types.MethodType(print, Hostile()))
    UNBOUNDED(Hostile(), 1)
    type.__setattr__(Hostile, "kept", torch.ones(902))


def use():
    """The same, and all of it is let go of."""
    held = [hold(torch.ones(1000)) for hold in WAYS.values()]
    del sys.modules["own_module"]
    return len(held)
'''

CONFTEST = """
import json
import pathlib

import hostile
import pytest


@pytest.fixture(autouse=True)
def armed():
    hostile.ARMED.clear()
    yield
    hostile.ARMED.append(True)


def pytest_unconfigure(config):
    hostile.ARMED.clear()
    pathlib.Path(__file__).with_name("calls.json").write_text(json.dumps(hostile.CALLS))
"""

TESTS = """
import hostile


def test_twin():
    assert hostile.use() == len(hostile.WAYS)


def test_leak():
    hostile.leak()
"""


@pytest.fixture(scope="module")
def run(run_inner: RunInner) -> InnerRun:
    return run_inner({"hostile.py": HOSTILE, "conftest.py": CONFTEST, "test_hostile.py": TESTS})


def test_nothing_of_the_program_runs(run: InnerRun) -> None:
    assert json.loads((run.folder / "calls.json").read_text()) == []


def test_every_way_to_hold_a_tensor_is_found(run: InnerRun) -> None:
    subject = run.subject("test_hostile.py::test_leak")
    # An entry's key and its value are one finding, the one a part of the other.
    reported = [part for finding in subject.findings for part in (finding, *finding.parts)]
    sizes = [finding.bytes for finding in reported if finding.resource == "tensors"]
    assert subject.outcome == "leak", subject.reason
    # Where nothing names a part of a path, what hangs on it may be one finding with its neighbours.
    whole = sum(4 * (1000 + place) for place in range(33)) + 4 * (900 + 1024 + 1025 + 901 + 9 + 902)
    assert whole <= sum(sizes) <= whole + 64


def test_what_lets_go_of_them_is_clean(run: InnerRun) -> None:
    assert run.is_clean("test_hostile.py::test_twin")


def test_the_session_ends_well(run: InnerRun) -> None:
    assert "could not" not in run.out

"""Every action that is said to be code is run by `exec`, as it stands, and lets go of what it promised to let go of."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from lowtide.leakcheck.explaining.cut import Names
from lowtide.leakcheck.explaining.explain import explain, expressions_to
from tests.leakcheck.explaining.executing import execute
from tests.leakcheck.explaining.test_cuts import CASES, WAYS, Others, Thing, parts_of

# What a holder may be, as an attribute of the program or of something in it; `thing` is what leaks.
SHAPES = {
    "weird key": "X = {}\ndef hold(thing): X['a\\'b\\n\\u1234'] = thing",
    "long key": "X = {}\ndef hold(thing): X['a' * 500] = thing",
    "one-tuple key": "X = {}\ndef hold(thing): X[('a',)] = thing",
    "class key": "class K: ...\nX = {}\ndef hold(thing): X[K] = thing",
    "object key": "class K: ...\nX = {}\ndef hold(thing): X.update({K(): 1, K(): thing})",
    "tensor key": "import torch\nX = {}\ndef hold(thing): X[torch.ones(2)] = thing",
    "enum key": "import enum\nclass K(enum.Enum):\n    A = 1\nX = {}\ndef hold(thing): X[K.A] = thing",
    "not a number": "X = {}\ndef hold(thing): X[float('nan')] = thing",
    "own key": "class K:\n    def __hash__(self): return 1\nX = {}\ndef hold(thing): X[K()] = thing",
    "cell of an inner class": (
        "def make():\n    class Inner:\n        kept = []\n        def f(self): return Inner\n    return Inner\n"
        "X = make()\ndef hold(thing): X.kept.append(thing)"
    ),
    "static method": (
        "class C:\n    @staticmethod\n    def f(kept=[]): ...\ndef hold(thing): C.f.__defaults__[0].append(thing)"
    ),
    "class method": (
        "class C:\n    @classmethod\n    def f(cls, kept=[]): ...\n"
        "def hold(thing): C.__dict__['f'].__func__.__defaults__[0].append(thing)"
    ),
    "property": (
        "class C:\n    def f(self, kept=[]): ...\n    f = property(f)\n"
        "def hold(thing): C.__dict__['f'].fget.__defaults__[0].append(thing)"
    ),
    "private name": (
        "class C:\n    def __init__(self): self.__kept = []\nX = C()\ndef hold(thing): X._C__kept.append(thing)"
    ),
    "own getattribute": (
        "class C:\n    def __init__(self): self.kept = []\n    def __getattribute__(self, name): 1 / 0\n"
        "X = C()\ndef hold(thing): object.__getattribute__(X, 'kept').append(thing)"
    ),
    "hidden by a property": (
        "class C:\n    @property\n    def kept(self): raise ValueError\n"
        "X = C()\nX.__dict__['kept'] = []\ndef hold(thing): X.__dict__['kept'].append(thing)"
    ),
    "metaclass": (
        "class M(type):\n    def __getattribute__(cls, name): raise ValueError(name)\n"
        "class C(metaclass=M):\n    kept = []\ndef hold(thing): type.__getattribute__(C, 'kept').append(thing)"
    ),
    "own getitem": (
        "class D(dict):\n    def __getitem__(self, key): raise ValueError\n"
        "X = D(a=[])\ndef hold(thing): dict.__getitem__(X, 'a').append(thing)"
    ),
    "own list": (
        "class L(list):\n    def __getitem__(self, key): raise ValueError\n    def __iter__(self): raise ValueError\n"
        "X = L([[]])\ndef hold(thing): list.__getitem__(X, 0).append(thing)"
    ),
    "frozen dataclass": (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass C:\n    kept: object = None\nX = C()\n"
        "def hold(thing): object.__setattr__(X, 'kept', thing)"
    ),
    "user dict": "from collections import UserDict\nX = UserDict()\ndef hold(thing): X['a'] = thing",
    "user list": "from collections import UserList\nX = UserList()\ndef hold(thing): X.append(thing)",
    "chain map": "from collections import ChainMap\nX = ChainMap({})\ndef hold(thing): X['a'] = thing",
    "namespace": "import types\nX = types.SimpleNamespace(kept=[])\ndef hold(thing): X.kept.append(thing)",
    "read-only view": (
        "from types import MappingProxyType\nX = MappingProxyType({'a': []})\ndef hold(thing): X['a'].append(thing)"
    ),
    "partial": "import functools\nX = functools.partial(print, [])\ndef hold(thing): X.args[0].append(thing)",
    "partial's names": (
        "import functools\nX = functools.partial(print, a=[])\ndef hold(thing): X.keywords['a'].append(thing)"
    ),
    "bound method": "class C(list):\n    def f(self): ...\nX = C().f\ndef hold(thing): X.__self__.append(thing)",
    "cached property": (
        "import functools\nclass C:\n    @functools.cached_property\n    def kept(self): return []\n"
        "X = C()\nX.kept\ndef hold(thing): X.kept.append(thing)"
    ),
    "error": "X = ValueError([])\ndef hold(thing): X.args[0].append(thing)",
    "wrapped cache": (
        "import functools\ndef build(x): ...\n_cached = functools.lru_cache(build)\ndef hold(thing): _cached(thing)"
    ),
    "cache in a closure": (
        "import functools\ndef outer():\n    cached = functools.lru_cache(lambda x: 1)\n"
        "    def inner(x): return cached(x)\n    return inner\ninner = outer()\ndef hold(thing): inner(thing)"
    ),
    "cache in an attribute": (
        "import functools\nclass C:\n    def __init__(self): self.cached = functools.cache(self.build)\n"
        "    def build(self, x): return 1\nX = C()\ndef hold(thing): X.cached(thing)"
    ),
    "cache by key": ("import functools\nX = {'a': functools.cache(lambda x: 1)}\ndef hold(thing): X['a'](thing)"),
    "module list": "import torch\nX = torch.nn.ModuleList([torch.nn.Module()])\nX[0].kept = []\n"
    "def hold(thing): X[0].kept.append(thing)",
    "module dict": "import torch\nX = torch.nn.ModuleDict({'a.b'[:1]: torch.nn.Module()})\nX['a'].kept = []\n"
    "def hold(thing): X['a'].kept.append(thing)",
    "only element": "X = set()\ndef hold(thing): X.add(thing)",
    "in the only element": "class C: ...\nX = {C()}\nnext(iter(X)).kept = []\n"
    "def hold(thing): next(iter(X)).kept.append(thing)",
    "one of several elements": "X = {1, 2}\ndef hold(thing): X.add(thing)",
    "context variable": "import contextvars\nX = contextvars.ContextVar('program_scope', default=None)\n"
    "def hold(thing): X.set(thing)",
    "this thread's": "import threading\nX = threading.local()\nX.kept = []\ndef hold(thing): X.kept.append(thing)",
    "another thread's": (
        "import threading\nX = threading.local()\ndef hold(thing):\n"
        "    threading.Thread(target=keep, args=(thing,), daemon=True).start()\n    READY.wait(600)\n"
        "READY, STOP = threading.Event(), threading.Event()\n"
        "def keep(thing):\n    X.kept = {'a': thing}\n    del thing\n    READY.set()\n    STOP.wait(600)\n"
    ),
    "generator's variable": "def stream():\n    kept = []\n    while True: kept.append((yield))\n"
    "X = stream()\nnext(X)\ndef hold(thing): X.send(thing)",
    "class of an instance": "def made():\n    class C:\n        kept = []\n    return C()\n"
    "X = made()\ndef hold(thing): X.kept.append(thing)",
    "nested class": "class A:\n    class B:\n        kept = []\ndef hold(thing): A.B.kept.append(thing)",
    "keyword for a name": "globals()['class'] = []\ndef hold(thing): globals()['class'].append(thing)",
    "no name": "globals()['a b'] = []\ndef hold(thing): globals()['a b'].append(thing)",
}
WORDS = {"own key", "long key", "not a number", "one of several elements", "another thread's"}
"""Shapes for which there need be no code; if there is, it is run all the same."""


@dataclass
class Executed:
    """What came of running one action; `words` where it is no code, `works` if the program's next use does."""

    action: str = ""
    words: str = ""
    error: str = ""
    died: bool = False
    works: bool = True


def executed(programs: dict[str, Any], things: list[Any], made: list[object], *, over: bool) -> dict[str, Executed]:
    """Explains what each program holds, and runs what it says."""
    watched = [weakref.ref(thing) for thing in things]
    older = Others(*things, *made)
    made.clear()
    reported = explain(things, innocent=older, names=Names(older, are_free=over))
    things.clear()
    done = {}
    for name, explanation, left in zip(programs, reported, watched, strict=True):
        outcome = done[name] = Executed()
        if explanation.cut is None:
            continue
        if not explanation.cut.is_code:
            outcome.words = explanation.cut.code
            explanation.cut.apply()
        else:
            outcome.action = explanation.cut.code
            try:
                execute(outcome.action)
            except BaseException as error:  # noqa: BLE001 - it is for the test to say so
                outcome.error = repr(error)
        if left() is not None:
            gc.collect()
        outcome.died = left() is None
        outcome.works = name not in CASES or bool(CASES[name].left(programs[name]))
    return done


def caches_by_module() -> dict[str, list[Any]]:
    wrapped = functools._lru_cache_wrapper
    found: dict[str, list[Any]] = {}
    for item in gc.get_objects():
        if type(item) is wrapped:
            found.setdefault(item.__module__, []).append(item)
    return found


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Executed]]:
    """All shapes: those of this file, and those by which the cuts themselves are tested."""
    folder = tmp_path_factory.mktemp("executed")
    sys.path.insert(0, str(folder))
    loaded: list[str] = []

    def load(name: str, source: str) -> Any:
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
        loaded.append(name)
        return importlib.import_module(name)

    try:
        named = {name: f"executed_{place}" for place, name in enumerate([*SHAPES, *CASES, *WAYS])}
        done: dict[str, Executed] = {}
        for over in (False, True):
            chosen = {name: SHAPES[name] for name in SHAPES} if over else {}
            chosen |= {
                name: case.source for name, case in CASES.items() if case.action and (case.known == "over") is over
            }
            modules = {name: load(named[name], source) for name, source in chosen.items()}
            things: list[Any] = []
            made: list[object] = []
            for name, module in modules.items():
                things.append(Thing())
                if name in SHAPES:
                    module.hold(things[-1])
                else:
                    made += CASES[name].hold(module, things[-1]) or ()
            caches = caches_by_module()
            shaped = [caches.get(module.__name__, ()) for name, module in modules.items() if name in SHAPES]
            made += [part for found in shaped for cache in found for part in parts_of(cache)]
            del caches, shaped
            if over:
                for name, way in WAYS.items():
                    modules[name] = load(named[name], "")
                    things.append(Thing())
                    modules[name].held = way.hold(things[-1])
                    made += parts_of(modules[name].held)
            done |= executed(modules, things, made, over=over)
            for module in modules.values():
                vars(module).get("STOP", types.SimpleNamespace(set=int)).set()
        yield done
    finally:
        sys.path.remove(str(folder))
        for name in loaded:
            sys.modules.pop(name, None)


def test_all_code_runs_and_lets_go_of_what_it_says(programs: dict[str, Executed]) -> None:
    code = {name: outcome for name, outcome in programs.items() if outcome.action}
    assert len(code) >= 100
    assert {name: (outcome.action, outcome.error) for name, outcome in code.items() if outcome.error} == {}
    assert {name: outcome.action for name, outcome in code.items() if not outcome.died} == {}
    assert {name: outcome.action for name, outcome in code.items() if not outcome.works} == {}


def test_words_are_no_code(programs: dict[str, Executed]) -> None:
    words = [outcome.words for outcome in programs.values() if outcome.words]
    assert words
    for text in words:
        with pytest.raises(SyntaxError):
            compile(text, "advice", "exec")


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - WORDS))
def test_the_shape_has_code(programs: dict[str, Executed], name: str) -> None:
    assert programs[name].action, programs[name].words


def test_an_expression_leads_to_the_very_object() -> None:
    program = types.ModuleType("my-program")
    sys.modules["my-program"] = program
    try:
        program.TABLE = {"a": [Thing()]}  # type: ignore[attr-defined]
        program.hidden = lambda: None  # type: ignore[attr-defined]
        codes = expressions_to([program.TABLE["a"], program.hidden])
        assert codes == ["sys.modules['my-program'].TABLE['a']", "sys.modules['my-program'].hidden"]
    finally:
        del sys.modules["my-program"]

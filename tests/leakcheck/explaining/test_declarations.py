"""What a program's source says of a name: every way to bind it to None, and what looks like one and is none."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide.leakcheck.explaining.declarations import (
    Binding,
    binding_of,
    of_attribute,
    of_class_attribute,
    of_global,
    of_instance_attribute,
    of_keys,
)

Load = Callable[[str], Any]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Writes a module's source and imports it."""
    monkeypatch.syspath_prepend(tmp_path)
    loaded: list[str] = []

    def load(source: str) -> Any:
        name = f"declared_{len(loaded)}"
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        loaded.append(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield load
    for name in loaded:
        del sys.modules[name]


def of_key(module: Any, holder: str, key: object) -> Binding:
    return binding_of(of_keys(module, holder), key)


# --- globals --------------------------------------------------------------------------------------------------------

BEGIN_AS_NONE = {
    "plain": "X = None",
    "annotated": "X: int | None = None",
    "one of several targets": "W = X = None",
    "in an if": "if len([]):\n    X = 1\nelse:\n    X = None",
    "in a try": "try:\n    import no_such_module\nexcept ImportError:\n    X = None",
    "in a with": "import contextlib\nwith contextlib.suppress(ValueError):\n    X = None",
    "in a loop": "for X in ():\n    pass\nelse:\n    X = None",
    "deep": "if True:\n    try:\n        if True:\n            X = None\n    finally:\n        pass",
}


@pytest.mark.parametrize("how", BEGIN_AS_NONE)
def test_a_global_that_begins_as_none(load: Load, how: str) -> None:
    module = load(BEGIN_AS_NONE[how])
    assert module.X is None
    assert of_global(module, "X") == "none"
    assert of_global(module, "Y") == "absent"


def test_what_is_unpacked_counts_name_by_name(load: Load) -> None:
    module = load("V, [X, (Y, Z)] = None, [None, (0, None)]\nP, Q = iter((None, None))\nS, *T = None, None")
    assert [of_global(module, name) for name in "VXYZ"] == ["none", "none", "other", "none"]
    assert [of_global(module, name) for name in "PQT"] == ["other", "other", "other"]


@pytest.mark.parametrize(
    ("source", "binding"),
    [
        ("X = None\nX = []", "other"),
        ("X = []\nX = None", "none"),
        ("X = None\ndef X(): ...", "other"),
        ("import sys as X\nX = None", "none"),
        ("X = None\nfor X in (1, 2):\n    pass", "other"),
        ("X = None\nif X is None:\n    X = []", "other"),
    ],
)
def test_the_last_binding_decides(load: Load, source: str, binding: str) -> None:
    assert of_global(load(source), "X") == binding


BEGIN_AS_SOMETHING_ELSE = {
    "plain": "X = []",
    "false": "X = False",
    "none in a tuple": "X = (None,)",
    "unpacked": "X, Y = [], None",
    "result of a call": "X = dict().get('x')",
    "in a function": "X = []\ndef reset():\n    global X\n    X = None",
    "in a lambda": "X = [lambda: (X := None)]",
    "in a class": "X = []\nclass Engine:\n    X = None",
    "an attribute": "import types\nX = types.SimpleNamespace()\nX.X = None",
    "an entry": "X = {}\nX['X'] = None",
    "a default": "X = []\ndef f(X=None): ...",
    "counted up": "X = 0\nX += 1",
}


@pytest.mark.parametrize("how", BEGIN_AS_SOMETHING_ELSE)
def test_a_global_that_begins_as_something_else(load: Load, how: str) -> None:
    assert of_global(load(BEGIN_AS_SOMETHING_ELSE[how]), "X") == "other"


BINDS = {
    "target of a loop": "for X in range(2): pass",
    "target of a with": "import contextlib\nwith contextlib.nullcontext() as X: pass",
    "in a try": "try:\n    X = 1\nfinally:\n    pass",
    "walrus": "if (X := 1): pass",
    "function": "def X(): ...",
    "coroutine": "async def X(): ...",
    "decorated function": "def deco(function):\n    return object()\n@deco\ndef X(): ...",
    "class": "class X: ...",
    "import": "import sys as X",
    "import of a package": "import os.path\nX = os",
    "import of a part": "import os.path as X",
    "import of a name": "from sys import flags as X",
    "in a branch": "if True:\n    def X(): ...",
    "matched": "import sys\nif sys.version_info >= (3, 10):\n    match [1]:\n        case [X]:\n            pass",
}


@pytest.mark.parametrize("how", BINDS)
def test_every_statement_that_binds_a_global_counts(load: Load, how: str) -> None:
    assert of_global(load(BINDS[how]), "X") == "other"


def test_an_import_of_a_package_binds_its_first_name(load: Load) -> None:
    module = load("import os.path")
    assert (of_global(module, "os"), of_global(module, "path")) == ("other", "absent")


BINDS_NOT = {
    "read only": "def f():\n    return X",
    "in a function": "def f():\n    X = 1",
    "in a class": "class Engine:\n    X = 1",
    "an attribute": "import types\nx = types.SimpleNamespace()\nx.X = 1",
    "a function of its own": "def f():\n    def X(): ...",
    "another global": "def f():\n    global Y\n    Y = 1",
    "read of all": "names = [name for name in dir()]",
    "in a function that may do anything": "def f():\n    globals()['X'] = 1\n    exec('X = 1')",
}


@pytest.mark.parametrize("how", BINDS_NOT)
def test_a_global_that_the_source_does_not_bind(load: Load, how: str) -> None:
    assert of_global(load(BINDS_NOT[how]), "X") == "absent"


MAY_BIND = {
    "by a function": "def f():\n    global X\n    X = 1",
    "by a function in a class": "class Engine:\n    def f(self):\n        global X\n        X = 1",
    "everything of another module": "from os.path import *",
    "its own names": "globals()['Y'] = 1",
    "several names": "globals().update(Y=1)",
    "of a module": "import sys\nsetattr(sys.modules[__name__], 'Y', 1)",
    "code": "exec('Y = 1')",
}


@pytest.mark.parametrize("how", MAY_BIND)
def test_a_global_that_may_be_bound_unseen_is_not_known(load: Load, how: str) -> None:
    module = load(MAY_BIND[how])
    assert of_global(module, "X") == "unknown"


@pytest.mark.parametrize("how", MAY_BIND)
def test_what_the_source_says_of_a_global_goes_before_what_may_be(load: Load, how: str) -> None:
    assert of_global(load(f"{MAY_BIND[how]}\nX = None"), "X") == "none"
    assert of_global(load(f"{MAY_BIND[how]}\nX = []"), "X") == "other"


# --- what cannot be read --------------------------------------------------------------------------------------------


def without_source() -> Any:
    return types.ModuleType("made_at_run_time")


def test_without_source_nothing_is_known() -> None:
    module = without_source()
    module.X = None
    assert {of_global(module, "X"), of_attribute(module, "X"), of_key(module, "TABLE", "X")} == {"unknown"}


BROKEN = {
    "gone": None,
    "no Python": b"X = None\nif:",
    "null bytes": b"X = None\0",
    "not utf-8": b"X = None\nY = '\xff\xfe'",
    "a folder": "folder",
}


@pytest.mark.parametrize("how", BROKEN)
def test_source_that_cannot_be_read_is_no_source(tmp_path: Path, how: str) -> None:
    module = without_source()
    file = tmp_path / "broken.py"
    content = BROKEN[how]
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content == "folder":
        file.mkdir()
    module.__file__ = str(file)
    assert of_global(module, "X") == "unknown"


def test_an_extension_is_not_read_which_may_have_hundreds_of_mib(tmp_path: Path) -> None:
    module = without_source()
    file = tmp_path / "_runtime.abi3.so"
    file.write_text("X = None")
    module.__file__ = str(file)
    assert of_global(module, "X") == "unknown"


@pytest.mark.parametrize("file", [None, 7, Path(__file__)])
def test_a_file_that_is_no_text_is_no_source(file: object) -> None:
    module = without_source()
    module.__file__ = file
    assert of_global(module, "X") == "unknown"


def test_a_class_whose_module_is_gone_is_not_known(load: Load) -> None:
    module = load("class Engine:\n    model = None\n    def __init__(self):\n        self.cache = None")
    cls = module.Engine
    assert (of_class_attribute(cls, "model"), of_instance_attribute(cls, "cache")) == ("none", "none")
    cls.__module__ = "no_such_module"
    assert (of_class_attribute(cls, "model"), of_instance_attribute(cls, "cache")) == ("unknown", "unknown")


def test_a_class_made_at_run_time_is_not_known() -> None:
    assert of_class_attribute(type("Made", (), {"model": None}), "model") == "unknown"
    assert of_instance_attribute(int, "real") == "unknown"


def test_source_that_python_warns_of_is_read_in_silence(tmp_path: Path) -> None:
    module = without_source()
    (tmp_path / "warns.py").write_text("PATTERN = '\\d'\nX = None\n")
    module.__file__ = str(tmp_path / "warns.py")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of_global(module, "X") == "none"


# --- classes and instances ------------------------------------------------------------------------------------------

CLASSES = """
class Base:
    inherited = None
    typed: "int | None" = None
    something = []
    only_said: None

    def __init__(self):
        self.inherited_slot = None
        self.something_slot = []
        self.said_with_its_type: "int | None" = None
        local = None
        other = self
        other.of_another = None

    def reset(self):
        if self:
            self.late = self.both = None


class Engine(Base):
    own = None
    if own is None:
        branch = None

    def __init__(self):
        self.model = None
        self.size = 0


class Unrelated:
    elsewhere = None

    def __init__(self):
        self.elsewhere_slot = None
"""


@pytest.mark.parametrize(
    ("name", "binding"),
    [
        ("own", "none"),
        ("inherited", "none"),
        ("typed", "none"),
        ("something", "other"),
        ("only_said", "other"),
        ("branch", "none"),
        ("model", "absent"),
        ("local", "absent"),
        ("no_such_name", "absent"),
    ],
)
def test_an_attribute_of_a_class(load: Load, name: str, binding: str) -> None:
    assert of_class_attribute(load(CLASSES).Engine, name) == binding


@pytest.mark.parametrize(
    ("name", "binding"),
    [
        ("model", "none"),
        ("inherited_slot", "none"),
        ("said_with_its_type", "none"),
        ("late", "none"),
        ("both", "none"),
        ("own", "none"),
        ("size", "other"),
        ("something_slot", "other"),
        ("something", "other"),
        ("of_another", "unknown"),
        ("elsewhere_slot", "absent"),
        ("local", "absent"),
        ("no_such_name", "absent"),
    ],
)
def test_an_attribute_of_an_instance(load: Load, name: str, binding: str) -> None:
    assert of_instance_attribute(load(CLASSES).Engine, name) == binding


@pytest.mark.parametrize(
    "source",
    [
        "def register(cls):\n    return cls\n@register\nclass Engine: ...",
        "class Meta(type): ...\nclass Engine(metaclass=Meta): ...",
        "class Base:\n    def __init_subclass__(cls):\n        cls.X = []\nclass Engine(Base): ...",
        "class Engine:\n    @classmethod\n    def get(cls):\n        cls.X = cls()",
        "class Engine:\n    def start(self):\n        type(self).X = self\n        Engine.Y = self",
        "class Engine:\n    def start(self):\n        Engine.X = self",
    ],
)
def test_an_attribute_that_a_class_may_get_unseen_is_not_known(load: Load, source: str) -> None:
    module = load(source)
    assert of_class_attribute(module.Engine, "X") == "unknown"
    assert of_instance_attribute(module.Engine, "X") == "unknown"


def test_an_attribute_that_a_method_only_asks_for_is_absent(load: Load) -> None:
    module = load("class Engine:\n    @classmethod\n    def get(cls):\n        return cls.X")
    assert of_class_attribute(module.Engine, "X") == "absent"


def test_what_a_class_gives_its_instances_is_not_its_own(load: Load) -> None:
    module = load("class Engine:\n    def __init__(self):\n        self.X = None")
    assert of_class_attribute(module.Engine, "X") == "absent"


@pytest.mark.parametrize(
    "body", ["vars(self).update(given)", "setattr(self, 'X', 1)", "self.__dict__['X'] = 1", "self.__dict__ = given"]
)
@pytest.mark.parametrize("inherited", [False, True])
def test_an_attribute_that_an_instance_may_get_unseen_is_not_known(load: Load, body: str, inherited: bool) -> None:
    own = "class Base(Engine): ...\nEngine = Base" if inherited else ""
    start = "class Engine:\n    W = None\n    def __init__(self, **given):\n        self.Y = self.Z = None"
    module = load(f"{start}\n        {body}\n{own}")
    assert of_instance_attribute(module.Engine, "X") == "unknown"
    assert of_instance_attribute(module.Engine, "Y") == "none"
    assert of_instance_attribute(module.Engine, "W") == "none"


def test_none_in_any_method_is_enough(load: Load) -> None:
    module = load(
        "class Engine:\n    def __init__(self):\n        self.X = None\n        self.Y = []\n"
        "    def start(self):\n        self.X = []\n        self.Y = None\n        other = self\n        other.Z = None"
    )
    assert of_instance_attribute(module.Engine, "X") == "none"
    assert of_instance_attribute(module.Engine, "Y") == "none"


def test_what_a_class_inherits_from_another_module_counts(load: Load) -> None:
    base = load("class Base:\n    model = None\n    def __init__(self):\n        self.cache = None")
    derived = load(f"from {base.__name__} import Base\nclass Engine(Base):\n    def start(self): ...")
    assert of_class_attribute(derived.Engine, "model") == "none"
    assert of_instance_attribute(derived.Engine, "cache") == "none"


def test_what_a_class_binds_itself_goes_before_what_it_inherits(load: Load) -> None:
    module = load("class Base:\n    model = None\n    kept = []\nclass Engine(Base):\n    model = []\n    kept = None")
    assert of_class_attribute(module.Engine, "model") == "other"
    assert of_class_attribute(module.Engine, "kept") == "none"


def test_a_class_of_which_a_part_cannot_be_read_is_not_known(load: Load) -> None:
    module = load("class Engine(type('Base', (), {})):\n    model = None")
    assert of_class_attribute(module.Engine, "model") == "none"
    assert of_class_attribute(module.Engine, "other") == "unknown"
    assert of_instance_attribute(module.Engine, "other") == "unknown"


NESTED = """
class Engine:
    def __init__(self):
        self.model = []

    class Part:
        held = None

        def __init__(self):
            self.slot = None


class Tests:
    class Engine:
        model = None

        def __init__(self):
            self.model = None
"""


def test_a_class_in_a_class_is_found(load: Load) -> None:
    part = load(NESTED).Engine.Part
    assert of_class_attribute(part, "held") == "none"
    assert of_instance_attribute(part, "slot") == "none"


def test_a_class_in_a_function_is_found(load: Load) -> None:
    module = load("def make():\n    class Engine:\n        model = None\n    return Engine\nKept = make()")
    assert of_class_attribute(module.Kept, "model") == "none"


def test_what_a_class_of_the_same_name_says_does_not_count(load: Load) -> None:
    engine = load(NESTED).Engine
    assert of_class_attribute(engine, "model") == "absent"
    assert of_class_attribute(engine, "held") == "absent"
    assert of_instance_attribute(engine, "model") == "other"
    assert of_instance_attribute(engine, "slot") == "absent"


def test_a_class_in_a_function_is_another_one(load: Load) -> None:
    module = load("Engine = type('Engine', (), {'model': []})\ndef make():\n    class Engine:\n        model = None")
    assert of_class_attribute(module.Engine, "model") == "unknown"


def test_of_two_classes_of_one_name_the_later_one_counts(load: Load) -> None:
    source = "class Engine:\n    model = None\n\n\nclass Engine:\n    model = []"
    assert of_class_attribute(load(source).Engine, "model") == "other"


# --- attributes of anything, and keys -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "binding"),
    [
        ("f.cache = None", "none"),
        ("f.cache = []", "other"),
        ("f.cache: object = None", "none"),
        ("f.cache = None\nf.cache = []", "other"),
        ("if True:\n    f.cache = None", "none"),
        ("def g():\n    f.cache = None", "absent"),
        ("cache = None", "absent"),
        ("f.other = None", "absent"),
        ("f.cache: object", "absent"),
        ("f.cache = None\nif f.cache:\n    f.cache += 1", "other"),
        ("f.cache, f.other = None, 1", "none"),
        ("f.cache, *f.other = None, 1, 2", "other"),
    ],
)
def test_an_attribute_that_is_set_outside_functions(load: Load, source: str, binding: str) -> None:
    module = load(f"def f(): ...\n{source}")
    assert of_attribute(module, "cache") == binding


@pytest.mark.parametrize(
    ("source", "binding"),
    [
        ("STATE = {'model': None}", "none"),
        ("STATE: dict = {'other': 1, 'model': None}", "none"),
        ("STATE = dict(model=None)", "none"),
        ("STATE = {'model': []}", "other"),
        ("STATE = {'model': None}\nSTATE = {'model': []}", "other"),
        ("STATE = {'other': None}", "absent"),
        ("STATE = {}\nSTATE['model'] = None", "none"),
        ("STATE = {}\nSTATE['model'] = []", "other"),
        ("STATE = {}\nSTATE['other'] = None", "absent"),
        ("OTHER = {}\nOTHER['model'] = None", "absent"),
        ("STATE = {**{'model': None}, 'other': 1}", "none"),
        ("STATE = {'parts': {'model': None}}", "none"),
        ("STATE = [{'model': None}]", "none"),
        ("STATE = dict(parts=dict(model=None))", "none"),
        ("STATE = {b'model': None}", "absent"),
        ("STATE = {'model'[:]: None}", "absent"),
        ("OTHER = {'model': None}", "absent"),
        ("def f():\n    STATE = {'model': None}", "absent"),
        ("class Engine:\n    STATE = {'model': None}", "none"),
        ("class Engine:\n    def __init__(self):\n        self.STATE = {'model': None}", "none"),
        ("class Engine:\n    def start(self):\n        self.STATE = {'model': None}", "absent"),
    ],
)
def test_a_key_in_a_dict_that_is_written_down(load: Load, source: str, binding: str) -> None:
    assert of_key(load(source), "STATE", "model") == binding


@pytest.mark.parametrize("key", [1, 1.5, True, None, b"x"])
def test_a_key_is_itself_and_no_equal_one(load: Load, key: object) -> None:
    module = load(f"STATE = {{{key!r}: None}}")
    assert of_key(module, "STATE", key) == "none"
    others = [other for other in (1, 1.0, True, "1", None) if type(other) is not type(key)]
    assert {of_key(module, "STATE", other) for other in others} == {"absent"}


class HostileKey:
    def __eq__(self, other: object) -> bool:
        raise ValueError

    __hash__ = object.__hash__


def test_a_key_that_is_no_constant_is_not_asked(load: Load) -> None:
    module = load("STATE = {'model': None}")
    assert of_key(module, "STATE", HostileKey()) == "absent"
    assert of_key(module, "STATE", ("model",)) == "absent"
    assert of_key(load("STATE = {(1, 2): None}"), "STATE", (1, 2)) == "absent"


def raising(*_: object) -> Any:
    raise ValueError


def test_no_code_of_a_metaclass_runs() -> None:
    class Meta(type):
        __getattr__ = __eq__ = __hash__ = __instancecheck__ = raising
        __module__ = __name__ = property(raising)

    class Engine(metaclass=Meta):
        model = None

    assert of_class_attribute(Engine, "model") == "none"
    # A metaclass may give its classes anything.
    assert of_instance_attribute(Engine, "no_such_name") == "unknown"

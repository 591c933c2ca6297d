"""What edges are called: the parts of torch's modules, and holders that Python code shows nothing of."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lowtide.probes.heap.holders import find_paths
from lowtide.probes.heap.paths import Path
from lowtide.probes.host.counters import SettingReader
from lowtide.probes.objects import attribute_names
from lowtide.probes.references import edges as naming
from lowtide.probes.references.edges import UNNAMED


class Thing:
    """What leaks in these tests."""


NAMES_ELSEWHERE = """
class Holder:
    pass

def put(holder, item):
    holder.put_by_a_function = item

class Other:
    def put(self, holder, item):
        holder.put_by_another_class = item
"""


class Bare:
    """Holds what others put into it."""


@pytest.fixture
def helper() -> Iterator[Any]:
    module = types.ModuleType("helper")
    sys.modules["helper"] = module
    yield module
    del sys.modules["helper"]


def edges(path: Path | None) -> str:
    """The edges from the first one after the module on."""
    assert path is not None
    return " ".join(step.edge for step in path.steps[1:])


@pytest.fixture
def nn() -> Any:
    return pytest.importorskip("torch").nn


def parameter(nn: Any) -> Any:
    return nn.Parameter(sys.modules["torch"].zeros(1))


def block(nn: Any) -> Any:
    made = nn.Module()
    made.mlp = nn.Linear(1, 1)
    made.register_buffer("scale", sys.modules["torch"].zeros(1))
    made.register_buffer("table", sys.modules["torch"].zeros(1), persistent=False)
    return made


def model(nn: Any) -> Any:
    made = nn.Module()
    made.weight = parameter(nn)
    made.layers = nn.ModuleList([block(nn), block(nn)])
    made.stack = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    made.parts = nn.ModuleDict({key: block(nn) for key in ("a b", "plain", "class", "0", "it's")})
    made.biases = nn.ParameterList([parameter(nn)])
    made.scales = nn.ParameterDict({"a b": parameter(nn)})
    for name in ("odd name", "7", "lambda"):
        made.add_module(name, nn.Module())
    return made


# The edges that lead to a part, and the part.
PARTS: dict[str, Callable[[Any], object]] = {
    ".weight": lambda model: model.weight,
    ".layers": lambda model: model.layers,
    ".layers [1]": lambda model: model.layers[1],
    ".layers [0] .mlp": lambda model: model.layers[0].mlp,
    ".layers [0] .mlp .weight": lambda model: model.layers[0].mlp.weight,
    ".layers [1] .scale": lambda model: model.layers[1].scale,
    ".layers [1] .table": lambda model: model.layers[1].table,
    ".stack [2] .bias": lambda model: model.stack[2].bias,
    ".parts ['a b'] .mlp .weight": lambda model: model.parts["a b"].mlp.weight,
    ".parts ['a b'] .scale": lambda model: model.parts["a b"].scale,
    '.parts ["it\'s"] .mlp': lambda model: model.parts["it's"].mlp,
    ".parts ['plain']": lambda model: model.parts["plain"],
    ".parts ['class'] .mlp": lambda model: model.parts["class"].mlp,
    ".parts ['0']": lambda model: model.parts["0"],
    ".biases [0]": lambda model: model.biases[0],
    ".scales ['a b']": lambda model: model.scales["a b"],
    "._modules['odd name']": lambda model: getattr(model, "odd name"),
    "._modules['7']": lambda model: getattr(model, "7"),
    "._modules['lambda']": lambda model: getattr(model, "lambda"),
}


def test_the_parts_of_a_module_are_named_as_code(helper: Any, nn: Any) -> None:
    helper.model = model(nn)
    parts = [part(helper.model) for part in PARTS.values()]
    assert list(map(edges, find_paths(parts))) == list(PARTS)


def test_the_code_that_names_a_part_of_a_module_leads_to_it(helper: Any, nn: Any) -> None:
    helper.model = model(nn)
    parts = [part(helper.model) for part in PARTS.values()]
    for part, path in zip(parts, find_paths(parts), strict=True):
        assert path is not None
        assert eval("helper" + "".join(step.edge for step in path.steps)) is part


def test_the_parts_of_a_module_whose_dict_was_asked_for_are_named_the_same(helper: Any, nn: Any) -> None:
    helper.model = model(nn)
    for module in helper.model.modules():
        vars(module)
    parts = [part(helper.model) for part in PARTS.values()]
    assert list(map(edges, find_paths(parts))) == list(PARTS)


def test_the_parts_of_a_module_whose_dict_was_never_asked_for_are_named_the_same(helper: Any, nn: Any) -> None:
    helper.model = nn.Module()
    # What `torch.nn.Module` does when a part is assigned to it asks for the dict.
    helper.model._parameters["weight"] = parameter(nn)
    helper.model._buffers["scale"] = sys.modules["torch"].zeros(1)
    helper.model._modules["mlp"] = nn.Module()
    parts = [
        helper.model._parameters["weight"],
        helper.model._buffers["scale"],
        helper.model._modules["mlp"],
    ]
    assert list(map(edges, find_paths(parts))) == [".weight", ".scale", ".mlp"]


def test_a_registry_of_a_module_itself_is_an_attribute(helper: Any, nn: Any) -> None:
    helper.model = nn.Linear(1, 1)
    assert list(map(edges, find_paths([helper.model._parameters]))) == ["._parameters"]


def test_what_is_not_registered_is_a_plain_attribute(helper: Any, nn: Any) -> None:
    torch = sys.modules["torch"]
    helper.model = nn.Linear(1, 1)
    helper.model.cached = torch.zeros(1)
    helper.model.cache = {"k": [torch.zeros(1)]}
    parts = [helper.model.cached, helper.model.cache["k"][0]]
    assert list(map(edges, find_paths(parts))) == [".cached", ".cache ['k'] [0]"]


def test_what_is_not_registered_is_a_plain_attribute_where_the_dict_was_never_asked_for(helper: Any, nn: Any) -> None:
    helper.model = nn.Module()
    object.__setattr__(helper.model, "cached", Thing())
    assert list(map(edges, find_paths([helper.model.cached]))) == [".cached"]


def test_parts_of_a_module_fold_its_registry_into_one_step(helper: Any, nn: Any) -> None:
    helper.model = nn.Linear(1, 1)
    [path] = find_paths([helper.model.weight])
    assert path is not None
    assert [(step.edge, step.kind) for step in path.steps] == [
        (".model", "module-global"),
        (".weight", "instance-attribute"),
    ]


def test_the_callers_that_a_kept_traceback_holds_are_reached_by_code(helper: Any) -> None:
    def fail() -> None:
        raise ValueError

    def catch() -> None:
        try:
            fail()
        except ValueError as error:
            helper.last_error = error

    def call() -> list[Thing]:
        engine = Thing()
        catch()
        return [engine]

    assert list(map(edges, find_paths(call()))) == [".__traceback__ .tb_frame .f_back f_locals['engine']"]


def test_how_many_callers_lie_between_is_not_part_of_a_path(helper: Any) -> None:
    def catch(depth: int) -> None:
        if depth:
            catch(depth - 1)
            return
        try:
            raise ValueError
        except ValueError as error:
            helper.last_error = error

    def call() -> list[Thing]:
        engine = Thing()
        catch(3)
        return [engine]

    assert list(map(edges, find_paths(call()))) == [".__traceback__ .tb_frame .f_back … .f_back f_locals['engine']"]


def test_names_that_cannot_stand_behind_a_dot_are_reported_as_keys(helper: Any) -> None:
    helper.holder = Bare()
    things = [Thing() for _ in range(4)]
    for namespace, two in ((vars(helper.holder), things[:2]), (vars(helper), things[2:])):
        namespace.update(zip(("odd name", "class"), two, strict=True))
    as_keys = [".__dict__['odd name']", ".__dict__['class']"]
    paths = list(map(str, find_paths(things)))
    assert paths[2:] == [f"module 'helper' {edge}" for edge in as_keys]
    # From Python 3.13 on an instance keeps its attributes itself, even if its dict was asked for.
    if sys.version_info < (3, 13):
        assert paths[:2] == [f"module 'helper' .holder {edge}" for edge in as_keys]


class Mentioning:
    def put(self, thing: object) -> None:
        self.mentioned = thing


def test_an_attribute_that_a_loop_over_names_sets_is_found_by_its_name(helper: Any) -> None:
    def fill(holder: object, *items: object) -> None:
        for name, item in zip(("by_a_loop", "by_it_too"), items, strict=True):
            setattr(holder, name, item)

    things = [Thing(), Thing()]
    helper.holder = Bare()
    fill(helper.holder, *things)
    assert list(map(edges, find_paths(things))) == [".by_a_loop", ".by_it_too"]


def test_an_attribute_is_found_whoever_sets_it(helper: Any) -> None:
    exec(NAMES_ELSEWHERE, vars(helper))
    helper.holder, thing = helper.Holder(), Thing()
    helper.put(helper.holder, thing)
    assert edges(find_paths([thing])[0]) == ".put_by_a_function"
    helper.Other().put(helper.holder, thing)
    assert edges(find_paths([thing])[0]) in (".put_by_a_function", ".put_by_another_class")
    helper.holder = helper.Holder()
    helper.Other().put(helper.holder, thing)
    assert edges(find_paths([thing])[0]) == ".put_by_another_class"


BOUND = """
def put(bound):
    def function[T: bound](): ...
    def choosing[T: (bound, int)](): ...
    def waiting[T: bound](): ...
    type alias[T: bound] = list[T]
    return locals()
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters came with Python 3.12")
def test_what_bounds_a_type_parameter_has_a_name_and_is_not_evaluated_for_it(helper: Any) -> None:
    exec(BOUND, vars(helper))
    bounds = {name: type("Bound", (), {}) for name in ("function", "choosing", "waiting", "alias")}
    for name, bound in bounds.items():
        made = helper.put(bound)[name]
        setattr(helper, name, made)
        if name != "waiting":
            assert made.__type_params__[0].__bound__ or made.__type_params__[0].__constraints__
    del bound, made
    assert list(map(edges, find_paths([*bounds.values()]))) == [
        ".__type_params__ [0] .__bound__",
        ".__type_params__ [0] .__constraints__ [0]",
        ".__type_params__ [0] inside typing.TypeVar cell 'bound'",
        ".__type_params__ [0] .__bound__",
    ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="attributes are in dicts")
def test_where_names_cannot_be_read_those_that_the_class_mentions_are_tried(
    helper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attribute_names, "_place_of_keys", lambda: 0)
    helper.holder, thing, other = Mentioning(), Thing(), Thing()
    helper.holder.put(thing)
    setattr(helper.holder, "_".join(["put", "together"]), other)
    assert list(map(edges, find_paths([thing, other]))) == [".mentioned", UNNAMED]


def test_for_what_c_has_no_name_no_code_is_looked_at(helper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_at_code(*_: object) -> set[str]:
        raise AssertionError

    monkeypatch.setattr(naming, "names_in_class", look_at_code)
    # It keeps the file below its buffer by a pointer of its own.
    with open(os.devnull) as text:  # noqa: PTH123 - `Path` is another one here
        helper.holder = text
        path = find_paths([text.buffer.raw])[0]
        assert path is not None
        assert [step.type_name for step in path.steps][-2:] == ["_io.TextIOWrapper", "_io.FileIO"]


def test_a_class_whose_module_is_gone_or_is_no_name_has_its_attributes_named_all_the_same(helper: Any) -> None:
    for module in ("a_module_that_is_gone", 5):
        made = type("Made", (), {"__module__": module})
        helper.holder, thing = made(), Thing()
        helper.holder.found_in_all_code = thing
        assert edges(find_paths([thing])[0]) == ".found_in_all_code"


def test_an_attribute_that_no_code_names_is_found_by_its_name_whether_its_dict_is_there_or_not(helper: Any) -> None:
    name = "".join(["no_code_", "names_this"])
    things = [Thing(), Thing()]
    helper.first, helper.second = Bare(), Bare()
    for holder, thing in zip((helper.first, helper.second), things, strict=True):
        setattr(holder, name, thing)
    vars(helper.second)
    assert list(map(edges, find_paths(things))) == [f".{name}"] * 2


def test_no_path_leads_through_the_checker_s_own_probes(nn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, thing = SettingReader(), Thing()
    program: Any = types.ModuleType("program_with_a_stand_in")
    # As a function that the checker stands in for meanwhile.
    program.stand_in = lambda: reader
    monkeypatch.setitem(sys.modules, program.__name__, program)
    handle = nn.modules.module.register_module_forward_hook(functools.partial(lambda thing, *_: None, thing))
    try:
        reader.read()
        (path,) = find_paths([thing])
    finally:
        handle.remove()
    assert path is not None
    assert path.root_name == "torch.nn.modules.module"
